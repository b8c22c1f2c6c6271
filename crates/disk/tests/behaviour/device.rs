//! Block devices, and file systems on them; these need root and pass without it, saying so.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use crate::common::{
    Loop, MIB, Mount, Queue, dir_in_memory, dir_on_disk, image, open, open_read_only, run,
};
use ferrite_disk::{Disk, ErrorKind};

fn is_direct(disk: &Disk) -> bool {
    matches!(disk, Disk::Raw(raw) if raw.direct())
}

#[test]
fn a_device_tells_its_blocks_and_discard() {
    for block in [512, 4096] {
        let dir = dir_on_disk();
        let Some(device) = Loop::attach(&image(&dir, MIB), block) else { return };
        let disk = open(&device.0).unwrap();
        assert_eq!(disk.sectors(), 2048);
        assert_eq!(disk.block_bytes(), block);
        assert!(disk.physical_block_bytes() >= block && is_direct(&disk));
        let limits = disk.discard_limits().expect("loop devices can discard");
        assert!(limits.granularity_bytes >= block);
        assert!(disk.to_string().starts_with("block device /dev/loop"), "{disk}");
    }
}

#[test]
fn a_discarded_device_gives_its_space_back() {
    let dir = dir_in_memory();
    let path = image(&dir, 4 * MIB);
    let Some(device) = Loop::attach(&path, 512) else { return };
    let mut queue = Queue::new(open(&device.0).unwrap());
    for at in 0..4 {
        queue.write(at * MIB, &vec![0x5A; MIB as usize]).unwrap();
    }
    queue.flush().unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() >= 4 * MIB / 512);
    queue.discard(MIB, 2 * MIB).unwrap();
    queue.flush().unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() <= 2 * MIB / 512 + 64);
    assert_eq!(queue.read(3 * MIB, 512).unwrap(), vec![0x5A; 512]);
}

#[test]
fn a_device_has_one_writer() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, MIB), 512) else { return };
    let _first = open(&device.0).unwrap();
    assert_eq!(open(&device.0).unwrap_err().kind(), ErrorKind::InUse);
}

#[test]
fn a_file_and_its_loop_device_are_not_written_at_once() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let Some(device) = Loop::attach(&path, 512) else { return };
    let refused = open(&path).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InUse);
    assert!(refused.to_string().contains(device.0.to_str().unwrap()), "{refused}");
    drop(open_read_only(&path).unwrap());
    drop(device);
    let _writer = open(&path).unwrap();
    let Some(device) = Loop::attach(&path, 512) else { return };
    let refused = open(&device.0).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InUse);
    assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
}

#[test]
fn a_mounted_device_is_busy_for_writers() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, 16 * MIB), 512) else { return };
    let name = device.0.to_str().unwrap();
    if run("mkfs.ext4", &["-q", name]).is_none() {
        return crate::common::skipped("no mkfs.ext4");
    }
    let at = dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let Some(mount) = Mount::new(&[name], &at) else { return };
    let error = open(&device.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.why().contains("mounted at /"), "{error}");
    open_read_only(&device.0).unwrap();
    drop(mount);
    open(&device.0).unwrap();
}

#[test]
fn a_device_that_is_served_cannot_be_mounted() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, 16 * MIB), 512) else { return };
    let name = device.0.to_str().unwrap();
    if run("mkfs.ext4", &["-q", name]).is_none() {
        return crate::common::skipped("no mkfs.ext4");
    }
    let at = dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let _disk = open(&device.0).unwrap();
    assert!(crate::common::run("mount", &[name, at.to_str().unwrap()]).is_none());
}

#[test]
fn a_write_protected_device_says_so() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, MIB), 512) else { return };
    let name = device.0.to_str().unwrap();
    run("blockdev", &["--setro", name]).unwrap();
    let opened = (open(&device.0), open_read_only(&device.0));
    // The flag would outlive the loop device.
    run("blockdev", &["--setrw", name]).unwrap();
    assert_eq!(opened.0.unwrap_err().kind(), ErrorKind::Permission);
    opened.1.unwrap();
    open(&device.0).unwrap();
}

#[test]
fn a_device_that_grows_is_seen() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let Some(device) = Loop::attach(&path, 512) else { return };
    let mut queue = Queue::new(open(&device.0).unwrap());
    File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
    run("losetup", &["--set-capacity", device.0.to_str().unwrap()]).unwrap();
    assert_eq!(queue.disk.refresh_size().unwrap(), Some(4096));
    queue.write(2 * MIB - 512, &[3; 512]).unwrap();
    assert_eq!(queue.read(2 * MIB - 512, 512).unwrap(), vec![3; 512]);
}

#[test]
fn a_device_without_medium_is_unsuitable() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, MIB), 512) else { return };
    let path = device.0.clone();
    drop(device);
    // Another program may have taken the loop device meanwhile.
    if let Err(error) = open(&path) {
        assert!(matches!(error.kind(), ErrorKind::Unsuitable | ErrorKind::InUse), "{error}");
    }
}

/// On media with blocks of 4096 bytes direct I/O is in such blocks, so an image that does not
/// end on one goes through the page cache.
#[test]
fn files_on_a_device_of_4096_byte_sectors_are_direct_only_in_whole_blocks() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, 16 * MIB), 4096) else { return };
    let name = device.0.to_str().unwrap();
    if run("mkfs.ext4", &["-q", "-b", "4096", name]).is_none() {
        return crate::common::skipped("no mkfs.ext4");
    }
    let at = dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let Some(_mount) = Mount::new(&[name], &at) else { return };

    let whole = at.join("whole");
    File::create(&whole).unwrap().set_len(MIB).unwrap();
    let mut queue = Queue::new(open(&whole).unwrap());
    assert!(is_direct(&queue.disk) && queue.disk.block_bytes() == 4096, "{}", queue.disk);
    queue.write(4096, &[4; 4096]).unwrap();
    assert_eq!(queue.read(4096, 4096).unwrap(), vec![4; 4096]);

    let broken = at.join("broken");
    File::create(&broken).unwrap().set_len(MIB + 512).unwrap();
    let mut queue = Queue::new(open(&broken).unwrap());
    assert!(!is_direct(&queue.disk) && queue.disk.block_bytes() == 512, "{}", queue.disk);
    assert!(queue.disk.to_string().contains("multiple of 4096"), "{}", queue.disk);
    queue.write(MIB, &[4; 512]).unwrap();
    assert_eq!(queue.read(MIB, 512).unwrap(), vec![4; 512]);
}

/// ramfs has neither direct I/O nor holes: the rest is the page cache, an honest "cannot", and zeros that are written.
#[test]
fn a_file_system_that_can_nothing_still_serves() {
    let dir = dir_in_memory();
    let at = dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let Some(_mount) = Mount::new(&["-t", "ramfs", "ramfs"], &at) else { return };
    let path = at.join("disk.img");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let mut queue = Queue::new(open(&path).unwrap());
    queue.write(0, &[6; 16384]).unwrap();
    assert!(queue.disk.discard_limits().is_some());
    for _ in 0..2 {
        let error = queue.discard(0, 4096).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        assert_eq!(queue.disk.discard_limits(), None);
    }
    queue.write_zeroes(512, 9216).unwrap();
    let bytes = queue.read(0, 16384).unwrap();
    assert!(bytes[..512].iter().chain(&bytes[9728..]).all(|b| *b == 6));
    assert!(bytes[512..9728].iter().all(|b| *b == 0));
}
