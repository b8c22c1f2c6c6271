//! Which files the tools make, take and leave.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use ferrite_disk::{Disk, ErrorKind, ImageName, OpenOptions, Parents};
use ferrite_image_tools::{Convert, ImageTools, NewImage, Progress};

use crate::common::vhd::{at, options};
use crate::common::{Loop, MIB, Queue, dir_on_disk, rights};
use ferrite_host::directory::{Directory, HostDirectory};
use ferrite_io::engines::EngineChoice;
use ferrite_testkit::bytes::again;
use ferrite_testkit::images::tools;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

/// By its extension.
fn name(path: &Path) -> ImageName {
    ImageName::parse(path.to_str().unwrap()).unwrap()
}

fn work<T>(work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    watched(&|_| true, work)
}

fn watched<T>(progress: &dyn Fn(Progress) -> bool, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    let choice = std::env::var("FERRITE_TEST_ENGINE").unwrap_or_else(|_| "uring".into());
    let kind = choice.parse::<EngineChoice>().unwrap().decide().unwrap().kind;
    let engine = &move |arena| kind.open(arena, 64);
    work(&ImageTools { engine, progress, ..tools(&HostDirectory) })
}

fn forced() -> Convert {
    Convert { force: true, ..Convert::default() }
}

fn resumed() -> Convert {
    Convert { resume: true, ..Convert::default() }
}

/// A raw disk without zeros, and where a copy of it goes.
fn source(dir: &TempDir) -> (ImageName, ImageName) {
    let path = at(dir, "a.img");
    let bytes = again(&(1..=251).collect::<Vec<u8>>(), 0, 40 * MIB as usize);
    fs::write(&path, bytes).unwrap();
    (name(&path), name(&at(dir, "b.vhd")))
}

/// Stops a conversion when half is done; what it leaves.
fn interrupt(from: &ImageName, to: &ImageName) -> (PathBuf, PathBuf) {
    let half = |progress: Progress| progress.done_bytes < progress.total_bytes / 2;
    let error = watched(&half, |tools| tools.convert(from, to, &Convert::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    let (partial, note) = remains(to);
    assert!(partial.exists() && note.exists());
    (partial, note)
}

fn remains(to: &ImageName) -> (PathBuf, PathBuf) {
    let path = to.path.to_str().unwrap();
    (format!("{path}.partial").into(), format!("{path}.partial.json").into())
}

/// How far a note says that its copy is.
fn noted_bytes(note: &Path) -> u64 {
    let note: serde_json::Value = serde_json::from_slice(&fs::read(note).unwrap()).unwrap();
    note["done_bytes"].as_u64().unwrap()
}

fn same(a: &ImageName, b: &ImageName) -> bool {
    work(|tools| tools.compare(a, b, false)).unwrap().first_difference_bytes.is_none()
}

/// Cut off before its first note, the new copy would go on where the old one had ended.
#[test]
fn a_copy_that_starts_again_does_not_go_on_from_an_earlier_ones_note() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let (partial, note) = interrupt(&from, &to);
    // The files that a kill leaves when the first byte is asked for.
    let (killed, killed_note) = remains(&name(&at(&dir, "killed.vhd")));
    let seen = std::cell::Cell::new(false);
    let killed_at_once = |_: Progress| {
        if !seen.replace(true) {
            assert_eq!(noted_bytes(&note), 0, "the old note is there");
            fs::copy(&partial, &killed).unwrap();
            if note.exists() {
                fs::copy(&note, &killed_note).unwrap();
            }
        }
        true
    };
    watched(&killed_at_once, |tools| tools.convert(&from, &to, &forced())).unwrap();
    assert!(seen.get() && same(&from, &to));
    let again = name(&at(&dir, "killed.vhd"));
    if work(|tools| tools.convert(&from, &again, &resumed())).is_err() {
        work(|tools| tools.convert(&from, &again, &forced())).unwrap();
    }
    assert!(same(&from, &again));
}

/// A crash between a copy's name and the end of its note.
#[test]
fn a_note_of_a_copy_that_was_finished_is_nothing_to_go_on_from() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let (partial, note) = interrupt(&from, &to);
    fs::remove_file(&partial).unwrap();
    let seen = std::cell::Cell::new(false);
    let look = |_: Progress| {
        assert!(seen.replace(true) || noted_bytes(&note) == 0, "the old note is there");
        true
    };
    watched(&look, |tools| tools.convert(&from, &to, &resumed())).unwrap();
    assert!(seen.get() && same(&from, &to));
}

/// A user with the right to write in the folder puts links there, under the names that a conversion will use.
#[test]
fn a_conversion_writes_through_no_link_and_waits_for_no_pipe() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let victim = at(&dir, "victim");
    fs::write(&victim, "precious").unwrap();
    let (partial, note) = remains(&to);
    let next = at(&dir, &format!("{}.new", note.file_name().unwrap().to_str().unwrap()));
    let plants: [&dyn Fn(); 2] = [&|| std::os::unix::fs::symlink(&victim, &next).unwrap(), &|| {
        fs::hard_link(&victim, &next).unwrap()
    }];
    for plant in plants {
        let _ = fs::remove_file(&partial);
        // While it is under way, before it notes how far it is.
        let stop = |_: Progress| {
            let _ = fs::remove_file(&next);
            plant();
            false
        };
        watched(&stop, |tools| tools.convert(&from, &to, &forced())).unwrap_err();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        // Before it goes on.
        let _ = fs::remove_file(&next);
        plant();
        watched(&|_| false, |tools| tools.convert(&from, &to, &resumed())).unwrap_err();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
    // The copy itself.
    let moved = at(&dir, "moved");
    fs::rename(&partial, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &partial).unwrap();
    let before = fs::read(&moved).unwrap();
    let error = work(|tools| tools.convert(&from, &to, &resumed())).unwrap_err();
    assert!(error.to_string().contains("link"), "{error}");
    assert!(fs::read(&moved).unwrap() == before);
    fs::remove_file(&note).unwrap();
    mknodat(CWD, &note, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let error = work(|tools| tools.convert(&from, &to, &resumed())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    work(|tools| tools.convert(&from, &to, &forced())).unwrap();
    assert!(same(&from, &to) && fs::read(&moved).unwrap() == before);
}

#[test]
fn a_second_conversion_leaves_the_first_ones_file_alone() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let (partial, _) = interrupt(&from, &to);
    let holder = fs::File::open(&partial).unwrap();
    holder.lock().unwrap();
    let before = fs::read(&partial).unwrap();
    for how in [Convert::default(), forced(), resumed()] {
        let error = work(|tools| tools.convert(&from, &to, &how)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(fs::read(&partial).unwrap() == before, "{how:?}");
    }
    drop(holder);
    work(|tools| tools.convert(&from, &to, &resumed())).unwrap();
    assert!(same(&from, &to));
}

#[test]
fn a_source_that_is_called_like_an_unfinished_copy_is_not_removed() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    work(|tools| tools.convert(&from, &to, &Convert::default())).unwrap();
    let odd = ImageName { path: at(&dir, "c.vhd.partial"), ..to.clone() };
    fs::rename(&to.path, &odd.path).unwrap();
    let error =
        work(|tools| tools.convert(&odd, &name(&at(&dir, "c.vhd")), &forced())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsuitable, "{error}");
    assert!(same(&from, &odd));
}

#[test]
fn a_second_create_leaves_the_first_ones_file_alone() {
    let dir = dir_on_disk();
    let image = name(&at(&dir, "a.vhd"));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    let first = at(&dir, "a.vhd.ferrite-new");
    let holder = fs::File::create_new(&first).unwrap();
    holder.lock().unwrap();
    let error = work(|tools| tools.create(&image, &new)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(first.exists());
    drop(holder);
    work(|tools| tools.create(&image, &new)).unwrap();
    assert!(!first.exists());
}

/// Where a command is when another one comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// Its file is there, and not locked.
    Made,
    /// It is locked.
    Empty,
    /// It is complete, and about to get its name.
    Complete,
}

/// Does something else at that moment.
struct Met<'a> {
    moment: Moment,
    meets: &'a dyn Fn(),
}

impl Directory for Met<'_> {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        let made = HostDirectory.create_new(path);
        if self.moment == Moment::Made && made.is_ok() {
            (self.meets)();
        }
        made
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.moment == Moment::Complete {
            (self.meets)();
        }
        HostDirectory.hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.moment == Moment::Empty {
            (self.meets)();
        }
        HostDirectory.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        HostDirectory.remove(path)
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        HostDirectory.sync(directory)
    }
}

/// The second command comes at a moment of the first one, and waits until that has ended before it
/// gives its own file its name.
#[test]
fn of_two_that_make_a_file_one_succeeds_and_the_file_is_that_ones() {
    for extension in ["vhd", "qcow2"] {
        for moment in [Moment::Made, Moment::Empty, Moment::Complete] {
            let dir = dir_on_disk();
            fs::create_dir(at(&dir, "folder")).unwrap();
            let [parent, image] =
                ["parent", "folder/a"].map(|file| name(&at(&dir, &format!("{file}.{extension}"))));
            let new = |mib| NewImage { bytes: Some(mib * MIB), ..NewImage::default() };
            work(|tools| tools.create(&parent, &new(8))).unwrap();
            let made = meeting(
                &image,
                moment,
                [NewImage { parent: Some(parent.clone()), ..new(8) }, new(16)],
            );
            // A file that has no lock yet is taken for left over.
            let bytes = match moment {
                Moment::Made => [None, Some(16 * MIB)],
                Moment::Empty | Moment::Complete => [Some(8 * MIB), None],
            };
            assert_eq!(made, bytes, "{extension}, {moment:?}");
            let options = OpenOptions { parents: Parents::Any, ..options() };
            let disk = Disk::open_image(&image, &options).unwrap();
            assert_eq!(Some(disk.sectors() * 512), bytes[0].or(bytes[1]));
            assert_eq!(fs::read_dir(at(&dir, "folder")).unwrap().count(), 1);
        }
    }
}

/// The sizes of what the first and the second have made; none if that is refused.
fn meeting(image: &ImageName, moment: Moment, new: [NewImage; 2]) -> [Option<u64>; 2] {
    let make = |new: &NewImage, moment, meets: &dyn Fn()| {
        let directory = Met { moment, meets };
        work(|tools| {
            let tools = ImageTools {
                directory: &directory,
                parents: Parents::default(),
                state_dir: None,
                ..*tools
            };
            match tools.create(image, new) {
                Ok(done) => Some(done.virtual_bytes),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::InUse, "{e}");
                    None
                }
            }
        })
    };
    let [first, second] = new;
    let [(come, comes), (ready, is_ready), (end, ended)] = [(); 3].map(|()| mpsc::channel());
    let patience = Duration::from_secs(120);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            comes.recv_timeout(patience).unwrap();
            let made = make(&second, Moment::Complete, &|| {
                ready.send(()).unwrap();
                ended.recv_timeout(patience).unwrap();
            });
            ready.send(()).unwrap();
            made
        });
        let made = make(&first, moment, &|| {
            come.send(()).unwrap();
            is_ready.recv_timeout(patience).unwrap();
        });
        end.send(()).ok();
        [made, other.join().unwrap()]
    })
}

#[test]
fn a_complete_copy_is_kept_when_its_name_is_taken() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let (partial, _) = remains(&to);
    let take = |_: Progress| {
        fs::write(&to.path, b"precious").unwrap();
        true
    };
    let error = watched(&take, |tools| tools.convert(&from, &to, &Convert::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(fs::read(&to.path).unwrap(), b"precious");
    let copy = ImageName { path: partial, ..to.clone() };
    assert!(same(&from, &copy));
}

/// By the owner's mode: the super-user is not kept from writing.
#[test]
fn an_image_that_may_have_children_is_no_snapshots_leaf() {
    for extension in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let [disk, child, old] =
            ["disk", "child", "old"].map(|n| name(&at(&dir, &format!("{n}.{extension}"))));
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        work(|tools| tools.create(&disk, &new)).unwrap();
        let on = NewImage { parent: Some(disk.clone()), ..NewImage::default() };
        work(|tools| tools.create(&child, &on)).unwrap();
        let error = work(|tools| tools.snapshot(&disk, &old)).unwrap_err();
        let denied = [ErrorKind::Refused, ErrorKind::Permission].contains(&error.kind());
        assert!(denied && !old.path.exists(), "{error}");
        // One that is done already is nothing to refuse.
        work(|tools| tools.snapshot(&child, &old)).unwrap();
        fs::set_permissions(&child.path, fs::Permissions::from_mode(0o440)).unwrap();
        if let Err(error) = work(|tools| tools.snapshot(&child, &old)) {
            assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        }
    }
}

#[test]
fn a_snapshot_of_a_symbolic_link_is_refused() {
    let dir = dir_on_disk();
    let [disk, link, old] = ["disk.vhd", "link.vhd", "old.vhd"].map(|n| name(&at(&dir, n)));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(|tools| tools.create(&disk, &new)).unwrap();
    std::os::unix::fs::symlink("disk.vhd", &link.path).unwrap();
    let error = work(|tools| tools.snapshot(&link, &old)).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert!(link.path.is_symlink() && !old.path.is_symlink() && !old.path.exists());
}

/// A disk with data, under names that lead to it without being another one.
fn spellings(dir: &TempDir, extension: &str) -> (ImageName, Vec<ImageName>) {
    let file = format!("disk.{extension}");
    let disk = name(&at(dir, &file));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(|tools| tools.create(&disk, &new)).unwrap();
    let mut queue = Queue::new(Disk::open_image(&disk, &options()).unwrap());
    queue.write(MIB, &[7; 4096]).unwrap();
    queue.close().unwrap();
    fs::create_dir(at(dir, "sub")).unwrap();
    let [link, folder] = [format!("link.{extension}"), "folder".into()].map(|n| at(dir, &n));
    std::os::unix::fs::symlink(&file, &link).unwrap();
    std::os::unix::fs::symlink(".", &folder).unwrap();
    let paths = [
        disk.path.clone(),
        dir.path().join(".").join(&file),
        at(dir, "sub").join("..").join(&file),
        link,
        folder.join(&file),
    ];
    let names = paths.map(|path| ImageName { path, ..disk.clone() });
    (disk, names.into())
}

#[test]
fn an_image_is_not_replaced_by_what_is_made_of_it_however_it_is_spelled() {
    for extension in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let (disk, spellings) = spellings(&dir, extension);
        let before = (fs::read(&disk.path).unwrap(), rights(&disk));
        for other in &spellings {
            let [error, of_other] = [(&disk, other), (other, &disk)]
                .map(|(a, b)| work(|tools| tools.snapshot(a, b)).unwrap_err());
            assert_eq!(error.kind(), ErrorKind::Unsuitable, "{error}");
            assert_eq!(of_other.kind(), ErrorKind::Unsuitable, "{of_other}");
            let on = NewImage { parent: Some(other.clone()), force: true, ..NewImage::default() };
            let error = work(|tools| tools.create(&disk, &on)).unwrap_err();
            assert!(error.to_string().contains("same file"), "{error}");
            let error = work(|tools| tools.convert(other, &disk, &forced())).unwrap_err();
            assert!(error.to_string().contains("same file"), "{error}");
            assert!((fs::read(&disk.path).unwrap(), rights(&disk)) == before, "{other:?}");
        }
    }
}

/// That is how far a snapshot may have come when it was interrupted.
#[test]
fn a_snapshot_goes_on_under_the_other_name_of_the_file() {
    for extension in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let (disk, _) = spellings(&dir, extension);
        let old = name(&at(&dir, &format!("old.{extension}")));
        fs::hard_link(&disk.path, &old.path).unwrap();
        // With two names, the file still is itself under each.
        let error = work(|tools| tools.snapshot(&disk, &disk)).unwrap_err();
        assert!(error.to_string().contains("the disk itself"), "{error}");
        work(|tools| tools.snapshot(&disk, &old)).unwrap();
        assert_eq!(work(|tools| tools.info(&disk)).unwrap().chain.len(), 2);
        let mut queue = Queue::new(Disk::open_image(&disk, &options()).unwrap());
        assert!(queue.read(MIB, 4096).unwrap() == [7; 4096]);
    }
}

/// As a script does that takes one each week.
#[test]
fn a_second_snapshot_under_the_same_name_is_refused_when_the_disk_has_changed() {
    for extension in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let (disk, _) = spellings(&dir, extension);
        let old = name(&at(&dir, &format!("old.{extension}")));
        work(|tools| tools.snapshot(&disk, &old)).unwrap();
        // A snapshot that is interrupted in its last step leaves this mode.
        fs::set_permissions(&old.path, fs::Permissions::from_mode(0o640)).unwrap();
        let done = work(|tools| tools.snapshot(&disk, &old)).unwrap();
        assert!(done.notes.iter().any(|note| note.contains("nothing to do")), "{done:?}");
        assert_eq!(rights(&old).2, 0o440);
        let refused = || {
            let error = work(|tools| tools.snapshot(&disk, &old)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
            assert!(error.help().contains("another name"), "{error} {}", error.help());
        };
        let write = |bytes: &[u8]| {
            let mut queue = Queue::new(Disk::open_image(&disk, &options()).unwrap());
            queue.write(0, bytes).unwrap();
            queue.close().unwrap();
        };
        // Data that read as before may be writes of the guest.
        write(&[0; 4096]);
        refused();
        write(&[1; 4096]);
        refused();
        assert_eq!(work(|tools| tools.info(&disk)).unwrap().chain.len(), 2);
        let next = name(&at(&dir, &format!("next.{extension}")));
        work(|tools| tools.snapshot(&disk, &next)).unwrap();
        work(|tools| tools.resize(&disk, 16 * MIB, false)).unwrap();
        let error = work(|tools| tools.snapshot(&disk, &next)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    }
}

#[test]
fn a_parent_stays_as_it_is_when_no_child_can_be_made() {
    let dir = dir_on_disk();
    let (disk, _) = spellings(&dir, "vhd");
    let taken = name(&at(&dir, "taken.vhd"));
    fs::write(&taken.path, b"precious").unwrap();
    let before = rights(&disk);
    let on = NewImage { parent: Some(disk.clone()), ..NewImage::default() };
    let error = work(|tools| tools.create(&taken, &on)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(rights(&disk), before);
}

#[test]
fn no_link_is_taken_for_the_image_when_a_child_is_merged() {
    let dir = dir_on_disk();
    let (disk, _) = spellings(&dir, "vhd");
    let [old, link] = ["old.vhd", "link.vhd"].map(|n| name(&at(&dir, n)));
    work(|tools| tools.snapshot(&disk, &old)).unwrap();
    let error = work(|tools| tools.coalesce(&link, false)).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert!(link.path.is_symlink() && old.path.exists());
}

/// Neither its size nor any time shows a write to it.
#[test]
fn a_copy_of_a_device_does_not_go_on() {
    let dir = dir_on_disk();
    let (file, to) = source(&dir);
    let Some(device) = Loop::attach(&file.path, 512) else { return };
    let from = ImageName { path: device.0.clone(), ..file };
    interrupt(&from, &to);
    fs::File::options().write(true).open(&device.0).unwrap().write_all(&[0xEE; 4096]).unwrap();
    let error = work(|tools| tools.convert(&from, &to, &resumed())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    work(|tools| tools.convert(&from, &to, &forced())).unwrap();
    assert!(same(&from, &to));
}

#[test]
fn what_a_refusal_to_shrink_a_vhd_advises_helps() {
    let dir = dir_on_disk();
    let [disk, copy] = ["disk.vhd", "copy.vhd"].map(|n| name(&at(&dir, n)));
    let new = NewImage { bytes: Some(16 * MIB), ..NewImage::default() };
    work(|tools| tools.create(&disk, &new)).unwrap();
    let open = || Queue::new(Disk::open_image(&disk, &options()).unwrap());
    let mut queue = open();
    queue.write(12 * MIB, &[1; 4096]).unwrap();
    queue.close().unwrap();
    drop(queue);
    let refused = || {
        let error = work(|tools| tools.resize(&disk, 8 * MIB, true)).unwrap_err();
        assert!(error.help().contains("convert"), "{error}");
    };
    refused();
    let mut queue = open();
    queue.discard(12 * MIB, 2 * MIB).unwrap();
    queue.close().unwrap();
    drop(queue);
    refused();
    work(|tools| tools.convert(&disk, &copy, &Convert::default())).unwrap();
    work(|tools| tools.resize(&copy, 8 * MIB, true)).unwrap();
}
