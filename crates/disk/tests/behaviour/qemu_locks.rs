//! Images that QEMU has open, and those that it would open while we have them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use ferrite_disk::{ErrorKind, ImageName};
use ferrite_image_tools::NewImage;

use crate::common::vhd::{at, peer};
use crate::common::{Loop, MIB, dir_on_disk, image, open, open_read_only, work};
use ferrite_host::byte_locks::is_locked_by_others;
use ferrite_testkit::wait_until;

/// `qemu-io` with a file open, until it is dropped.
struct Holder(Child);

impl Holder {
    fn of(path: &Path, format: &str, how: &[&str]) -> Option<Holder> {
        peer("qemu-io", &["--version"])?;
        let mut command = Command::new("qemu-io");
        command.args(how).args(["-f", format]).arg(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // It asks what to do when it has opened the file.
        let mut prompt = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"qemu-io>");
        Some(Holder(child))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.stdin.as_mut().unwrap().write_all(b"quit\n");
        let _ = self.0.wait();
    }
}

#[test]
fn what_qemu_writes_to_is_in_use_for_everybody() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let Some(holder) = Holder::of(&path, "raw", &[]) else { return };
    for error in [open(&path).unwrap_err(), open_read_only(&path).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("QEMU"), "{error}");
    }
    drop(holder);
    open(&path).unwrap();
}

/// A raw disk may change under its reader, an image's metadata must not.
#[test]
fn what_qemu_reads_is_in_use_for_writers() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = at(&dir, "disk.qcow2");
    let Some(_) = peer("qemu-img", &["create", "-f", "qcow2", path.to_str().unwrap(), "1M"]) else {
        return;
    };
    let Some(holder) = Holder::of(&path, "qcow2", &["-r"]) else { return };
    open_read_only(&path).unwrap();
    assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::InUse);
    drop(holder);
    open(&path).unwrap();
}

/// A reader of QEMU's that takes no locks (`-U`) keeps no process out; readers of ours keep no readers of QEMU's out.
#[test]
fn readers_do_not_disturb_each_other() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let Some(holder) = Holder::of(&path, "raw", &["-r", "-U"]) else { return };
    let writer = open(&path).unwrap();
    let name = path.to_str().unwrap();
    assert!(peer("qemu-img", &["info", "-U", "-f", "raw", name]).is_some());
    drop((writer, holder));
    let _readers = [open_read_only(&path).unwrap(), open_read_only(&path).unwrap()];
    assert!(peer("qemu-img", &["info", "-f", "raw", name]).is_some());
}

/// One test at a time: a program that one starts has, for a moment, the open files of all others.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of a file that another process has locked, where QEMU's locks are.
fn locked_bytes(path: &Path) -> Vec<u32> {
    let file = File::open(path).unwrap();
    (90..300).filter(|byte| is_locked_by_others(&file, *byte).unwrap()).collect()
}

/// Each of them by itself: consistent reading, writing and resizing are used, and other programs may not write or resize.
/// A program that a test of another file starts may have the locks for a moment longer.
#[test]
fn an_open_image_has_the_locks_that_qemu_would_have() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let writer = open(&path).unwrap();
    assert_eq!(locked_bytes(&path), [100, 101, 103, 201, 203]);
    drop(writer);
    wait_until("the end of its locks", || locked_bytes(&path).is_empty());
    let readers = [(); 2].map(|()| open_read_only(&path).unwrap());
    assert_eq!(locked_bytes(&path), [100, 201, 203]);
    drop(readers);
    wait_until("the end of its locks", || locked_bytes(&path).is_empty());
}

/// Runs one of QEMU's programs: whether it worked, and what it said. None: it is not installed.
fn qemu(program: &str, args: &[&str]) -> Option<(bool, String)> {
    peer(program, &["--version"])?;
    let output = Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    // It ends with 0 whatever its commands have done.
    let failed = program == "qemu-io" && text.contains("failed");
    Some((output.status.success() && !failed, text))
}

#[track_caller]
fn qemu_works(program: &str, args: &[&str]) {
    if let Some((done, text)) = qemu(program, args) {
        assert!(done, "{program} {args:?}: {text}");
    }
}

#[track_caller]
fn qemu_is_refused(program: &str, args: &[&str]) {
    if let Some((done, text)) = qemu(program, args) {
        assert!(!done && text.contains(" lock"), "{program} {args:?}: {text}");
    }
}

#[test]
fn qemu_does_not_write_to_what_is_open_and_reads_metadata_only_if_told_to() {
    let _alone = alone();
    for format in ["raw", "qcow2", "vhd"] {
        let dir = dir_on_disk();
        let path = at(&dir, &format!("disk.{format}"));
        let name = ImageName::parse(path.to_str().unwrap()).unwrap();
        let new = NewImage { bytes: Some(4 * MIB), ..NewImage::default() };
        work(None, |tools| tools.create(&name, &new)).unwrap();
        let (path, format) = (path.to_str().unwrap(), format.replace("vhd", "vpc"));
        let writer = open(path.as_ref()).unwrap();
        qemu_is_refused("qemu-io", &["-f", &format, "-c", "write 0 512", path]);
        // To qemu-io a raw disk may change under its reader, an image's metadata must not.
        if format != "raw" {
            qemu_is_refused("qemu-io", &["-r", "-f", &format, "-c", "read 0 512", path]);
            qemu_is_refused("qemu-img", &["info", "-f", &format, path]);
        }
        qemu_is_refused("qemu-img", &["resize", "-f", &format, path, "8M"]);
        qemu_works("qemu-img", &["info", "-U", "-f", &format, path]);
        qemu_works("qemu-io", &["-r", "-U", "-f", &format, "-c", "read 0 512", path]);
        drop(writer);
        qemu_works("qemu-io", &["-f", &format, "-c", "write 0 512", path]);
    }
}

#[test]
fn qemu_reads_what_is_open_for_reading_and_does_not_write_to_it() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let readers = [(); 2].map(|()| open_read_only(&path).unwrap());
    let path = path.to_str().unwrap();
    qemu_is_refused("qemu-io", &["-f", "raw", "-c", "write 0 512", path]);
    qemu_is_refused("qemu-img", &["resize", "-f", "raw", path, "2M"]);
    qemu_works("qemu-io", &["-r", "-f", "raw", "-c", "read 0 512", path]);
    drop(readers);
    qemu_works("qemu-io", &["-f", "raw", "-c", "write 0 512", path]);
}

#[test]
fn a_parent_serves_many_of_ours_and_of_qemus_and_is_written_by_none() {
    let _alone = alone();
    let dir = dir_on_disk();
    let name = |file: &str| ImageName::parse(at(&dir, file).to_str().unwrap()).unwrap();
    let parent = name("parent.qcow2");
    let new = NewImage { bytes: Some(4 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&parent, &new)).unwrap();
    let on = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
    let children = ["a.qcow2", "b.qcow2", "c.qcow2"].map(name);
    for child in &children {
        work(None, |tools| tools.create(child, &on)).unwrap();
    }
    let [a, b, c] = children.map(|child| child.path.to_str().unwrap().to_owned());
    let _open = [open(a.as_ref()).unwrap(), open(b.as_ref()).unwrap()];
    assert_eq!(locked_bytes(&parent.path), [100, 201, 203]);
    qemu_works("qemu-io", &["-f", "qcow2", "-c", "write 0 512", &c]);
    qemu_is_refused("qemu-img", &["commit", "-f", "qcow2", &c]);
    let parent = parent.path.to_str().unwrap();
    qemu_is_refused("qemu-io", &["-f", "qcow2", "-c", "write 0 512", parent]);
}

#[test]
fn qemu_does_not_write_to_a_device_that_is_open() {
    let _alone = alone();
    let dir = dir_on_disk();
    let Some(device) = Loop::attach(&image(&dir, MIB), 512) else { return };
    let path = device.0.to_str().unwrap();
    let open = open(&device.0).unwrap();
    assert_eq!(locked_bytes(&device.0), [100, 101, 103, 201, 203]);
    qemu_is_refused("qemu-io", &["-f", "raw", "-c", "write 0 512", path]);
    qemu_works("qemu-io", &["-r", "-U", "-f", "raw", "-c", "read 0 512", path]);
    drop(open);
    qemu_works("qemu-io", &["-f", "raw", "-c", "write 0 512", path]);
}

/// As serving ends: the image is complete, and the process has it open for a while yet.
#[test]
fn what_was_let_go_of_opens_again_though_it_is_open_still() {
    let _alone = alone();
    let dir = dir_on_disk();
    let path = image(&dir, MIB);
    let first = open(&path).unwrap();
    first.unlock();
    wait_until("the end of its locks", || locked_bytes(&path).is_empty());
    let second = open(&path).unwrap();
    drop(first);
    assert_eq!(locked_bytes(&path), [100, 101, 103, 201, 203]);
    drop(second);
}
