//! Loop devices are a second access to a file's bytes, with separate locks: writes to the file would corrupt a file
//! system that is mounted from the loop device.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use ferrite_host::names::{self, stat};
use rustix::fs::{Stat, major, minor};

use super::proc_locks::flock_holder;

/// The loop device by which a file may be written.
pub(super) fn writer_of(file: &Stat) -> Option<String> {
    let is_it = |device: &Path| {
        let read_only = names::read_to_string(device.join("ro")).ok()?;
        let behind = stat(behind(&device.join("loop"))?).ok()?;
        let same = (behind.st_dev, behind.st_ino) == (file.st_dev, file.st_ino);
        (same && read_only.trim() == "0").then_some(())
    };
    let devices = names::read_dir("/sys/block").ok()?.filter_map(Result::ok);
    // A host of many disks has as many volumes there: only the loop devices are asked.
    let is_loop = |name: &OsStr| name.as_bytes().starts_with(b"loop");
    let mut loops = devices.filter(|entry| is_loop(&entry.file_name())).map(|entry| entry.path());
    let device = loops.find(|device| is_it(device).is_some())?;
    Some(format!("/dev/{}", device.file_name()?.to_string_lossy()))
}

/// The file of a loop device or of a partition of one, and the process that has locked it.
pub(super) fn locker_of(device: &Stat) -> Option<(PathBuf, u32)> {
    let dir = format!("/sys/dev/block/{}:{}", major(device.st_rdev), minor(device.st_rdev));
    let path = ["loop", "../loop"].iter().find_map(|name| behind(&Path::new(&dir).join(name)))?;
    let file = stat(&path).ok()?;
    let holder = flock_holder((major(file.st_dev), minor(file.st_dev)), file.st_ino)?;
    Some((path, holder))
}

fn behind(of_loop: &Path) -> Option<PathBuf> {
    let path = names::read(of_loop.join("backing_file")).ok()?;
    let path = path.strip_suffix(b"\n").unwrap_or(&path);
    Some(OsStr::from_bytes(path).into())
}
