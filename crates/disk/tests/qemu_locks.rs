//! Images that QEMU has open.

mod common;

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::vhd::{at, peer};
use common::{MIB, dir_on_disk, image, open, open_read_only};
use ferrite_disk::ErrorKind;

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

/// Who reads whatever comes (`-U`) keeps nobody out; readers of ours keep nobody of QEMU's out.
#[test]
fn readers_do_not_disturb_each_other() {
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
