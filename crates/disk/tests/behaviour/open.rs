//! Which files can be opened as a disk, and which other processes may have them open meanwhile.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, image, open, open_read_only, run};
use ferrite_disk::{Disk, ErrorKind, OpenOptions};

#[track_caller]
fn refused(path: &Path, kind: ErrorKind, why: &str) {
    for error in [open(path).unwrap_err(), open_read_only(path).unwrap_err()] {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.why().contains(why), "{error}");
        assert!(error.what().contains(path.to_str().unwrap()) && !error.help().is_empty());
    }
}

#[test]
fn a_missing_image_is_not_found_and_not_created() {
    let dir = dir_on_disk();
    refused(&dir.path().join("none"), ErrorKind::NotFound, "no such file");
    let file = image(&dir, MIB);
    refused(&file.join("below"), ErrorKind::NotFound, "no such file");
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    refused(&dir.path().join("dangling"), ErrorKind::NotFound, "no such file");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn strange_paths_are_errors() {
    refused(Path::new(""), ErrorKind::Usage, "no name was given");
    refused(Path::new(&"x".repeat(5000)), ErrorKind::NotFound, "cannot be followed");
    refused(Path::new("a\0b"), ErrorKind::NotFound, "cannot be followed");
    let dir = dir_on_disk();
    symlink("loop", dir.path().join("loop")).unwrap();
    refused(&dir.path().join("loop"), ErrorKind::NotFound, "cannot be followed");
}

#[test]
fn what_is_no_image_is_unsuitable() {
    let dir = dir_on_disk();
    refused(dir.path(), ErrorKind::Unsuitable, "directory");
    refused(Path::new("/dev/null"), ErrorKind::Unsuitable, "character device");
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    refused(&socket, ErrorKind::Unsuitable, "pipe or socket");
    let pipe = dir.path().join("pipe");
    run("mkfifo", &[pipe.to_str().unwrap()]).unwrap();
    refused(&pipe, ErrorKind::Unsuitable, "pipe or socket");
}

/// It locks a device for longer than other processes get.
#[test]
fn a_device_manager_that_examines_it_is_waited_for() {
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let locked = "open F, '<', $ARGV[0]; flock F, 1; open C, '>', '/proc/self/comm'; print C '(udev-worker)'; \
                  close C; $| = 1; print 'locked'; select undef, undef, undef, 0.5";
    let mut manager = Command::new("perl");
    let manager = manager.args(["-e", locked]).arg(&path).stdout(Stdio::piped());
    let mut manager = manager.spawn().unwrap();
    manager.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    open(&path).unwrap();
    assert!(manager.wait().unwrap().success());
}

#[test]
fn a_size_of_broken_sectors_is_unsuitable() {
    let dir = dir_on_disk();
    let path = image(&dir, 0);
    refused(&path, ErrorKind::Unsuitable, "empty");
    for bytes in [1, 511, 513, 1_000_000] {
        File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        refused(&path, ErrorKind::Unsuitable, "not a multiple of 512");
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
    }
}

#[test]
fn opening_and_closing_changes_nothing() {
    for dir in [dir_on_disk(), dir_in_memory()] {
        let path = image(&dir, MIB + 512);
        let before = fs::metadata(&path).unwrap();
        drop(open(&path).unwrap());
        drop(open_read_only(&path).unwrap());
        let after = fs::metadata(&path).unwrap();
        let of =
            |m: &fs::Metadata| (m.len(), m.blocks(), m.mtime(), m.mtime_nsec(), m.ctime_nsec());
        assert_eq!(of(&before), of(&after));
    }
}

#[test]
fn an_image_tells_its_size_and_access() {
    let dir = dir_in_memory();
    let path = image(&dir, 3 * MIB + 512);
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    let disk = open(&link).unwrap();
    assert_eq!(disk.sectors(), 6145);
    assert_eq!(disk.block_bytes(), 512);
    assert!(disk.physical_block_bytes() >= disk.block_bytes());
    assert!(disk.contains(3 * MIB, 512) && !disk.contains(3 * MIB, 1024));
    assert!(!disk.contains(u64::MAX, 2) && !disk.contains(u64::MAX - 511, 512));
    assert!(!disk.read_only() && disk.files().len() == 1);
    let text = disk.to_string();
    assert!(text.contains("link, 3 MiB, read-write, through the page cache (tmpfs"), "{text}");
}

#[test]
fn one_writer_excludes_everybody_else() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let writer = open(&path).unwrap();
    for error in [open(&path).unwrap_err(), open_read_only(&path).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.why().contains(&format!("process {}", std::process::id())), "{error}");
    }
    drop(writer);
    open(&path).unwrap();
}

#[test]
fn readers_share_and_exclude_writers() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let readers = [open_read_only(&path).unwrap(), open_read_only(&path).unwrap()];
    assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::InUse);
    drop(readers);
    open(&path).unwrap();
}

#[test]
fn the_lock_lasts_as_long_as_an_engine_has_the_file() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let queue = Queue::new(open(&path).unwrap());
    let Queue { disk, reactor, .. } = queue;
    drop(disk);
    assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::InUse);
    drop(reactor);
    let patient =
        OpenOptions { wait_for_lock: Some(Duration::from_secs(10)), ..Default::default() };
    Disk::open(path.to_str().unwrap(), &patient).unwrap();
}

#[test]
fn a_patient_open_gets_the_lock_when_it_is_free() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let holder = open(&path).unwrap();
    let start = Instant::now();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(holder);
    });
    let patient =
        OpenOptions { wait_for_lock: Some(Duration::from_secs(30)), ..Default::default() };
    Disk::open(path.to_str().unwrap(), &patient).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200));
    thread.join().unwrap();
}

/// As after a server that was killed: the process that took the lock is gone, and its lock will be soon.
#[test]
fn a_lock_that_outlives_its_holder_is_waited_for_in_any_case() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let script = format!("exec 9<{} && flock -x 9 && sleep 0.5 9<&9 >&- &", path.display());
    let start = Instant::now();
    run("sh", &["-c", &format!("{script} sleep 0.2")]).unwrap();
    open(&path).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(500));
}

#[test]
fn patience_ends() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let _holder = open(&path).unwrap();
    let start = Instant::now();
    let patient =
        OpenOptions { wait_for_lock: Some(Duration::from_millis(150)), ..Default::default() };
    let error = Disk::open(path.to_str().unwrap(), &patient).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(start.elapsed() >= Duration::from_millis(150));
}

#[test]
fn waiting_for_an_image_that_is_replaced_gives_the_new_one() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let holder = open(&path).unwrap();
    let new = dir.path().join("new");
    File::create(&new).unwrap().set_len(2 * MIB).unwrap();
    let to = path.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        fs::rename(&new, &to).unwrap();
        drop(holder);
    });
    let patient =
        OpenOptions { wait_for_lock: Some(Duration::from_secs(30)), ..Default::default() };
    let disk = Disk::open(path.to_str().unwrap(), &patient).unwrap();
    assert_eq!(disk.sectors() * 512, 2 * MIB);
    thread.join().unwrap();
}

#[test]
fn a_grown_image_is_seen_and_a_shrunk_one_keeps_its_size() {
    for dir in [dir_on_disk(), dir_in_memory()] {
        let path = image(&dir, MIB);
        let disk = open(&path).unwrap();
        let resize =
            |bytes| File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        assert_eq!(disk.refresh_size().unwrap(), None);
        resize(2 * MIB);
        assert_eq!(disk.sectors(), 2048);
        assert_eq!(disk.refresh_size().unwrap(), Some(4096));
        assert_eq!(disk.sectors(), 4096);
        assert_eq!(disk.refresh_size().unwrap(), None);
        resize(2 * MIB + 4095);
        let partial = disk.refresh_size().unwrap().unwrap_or(4096);
        assert!(
            partial * 512 <= 2 * MIB + 4095
                && (partial * 512).is_multiple_of(u64::from(disk.block_bytes()))
        );
        resize(512);
        assert_eq!(disk.refresh_size().unwrap(), None);
        assert_eq!(disk.sectors(), partial);
    }
}

#[test]
fn a_read_only_disk_cannot_be_changed_by_anything() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    File::options().write(true).open(&path).unwrap().write_all_at(&[7; 4096], 0).unwrap();
    let mut queue = Queue::new(open_read_only(&path).unwrap());
    assert!(queue.disk.read_only());
    assert_eq!(queue.disk.discard_limits(), None);
    let errors = [
        queue.write(0, &[1; 512]).unwrap_err(),
        queue.discard(0, 4096).unwrap_err(),
        queue.write_zeroes(0, 4096).unwrap_err(),
    ];
    assert_eq!(errors[1].kind(), std::io::ErrorKind::PermissionDenied);
    assert_eq!(errors[2].kind(), std::io::ErrorKind::PermissionDenied);
    // Not even by what gets past all checks: the kernel knows it, too (XSA-142).
    let bad = Some(rustix::io::Errno::BADF.raw_os_error());
    for file in queue.disk.files() {
        let file = File::from(file.try_clone().unwrap());
        assert_eq!(file.write_at(&[1; 512], 0).unwrap_err().raw_os_error(), bad);
    }
    queue.flush().unwrap();
    assert_eq!(queue.read(0, 4096).unwrap(), vec![7; 4096]);
}

#[test]
fn null_disks_have_the_size_asked_for_and_keep_nothing() {
    let open = |image| Disk::open(image, &OpenOptions::default());
    assert_eq!(open("null:").unwrap().sectors(), 1 << 31);
    let mut queue = Queue::new(open("null:16M").unwrap());
    assert_eq!(queue.disk.sectors(), 32768);
    queue.write(512, &[9; 1024]).unwrap();
    assert_eq!(queue.read(0, 4096).unwrap(), vec![0; 4096]);
    queue.flush().unwrap();
    queue.discard(512, 512).unwrap();
    queue.write_zeroes(0, 16 * MIB).unwrap();
    assert!(queue.discard(16 * MIB, 512).is_err());
    assert_eq!(queue.disk.refresh_size().unwrap(), None);
    for bad in ["null:x", "null:0", "null:513", "null:8192P", "null: 1G"] {
        assert_eq!(open(bad).unwrap_err().kind(), ErrorKind::Usage, "{bad}");
    }
    assert_eq!(open("./null:").unwrap_err().kind(), ErrorKind::NotFound);
}
