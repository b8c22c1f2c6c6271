//! Loop devices and file systems on them. They need root; a test without it ends early and reports that.

use std::path::{Path, PathBuf};

use crate::programs::{run, skipped};

/// A loop device, until this is dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Attaches one with blocks of so many bytes. `None` if there are none, see [`skipped`].
    #[track_caller]
    pub fn attach(file: &Path, block_bytes: u32) -> Option<Loop> {
        let block = block_bytes.to_string();
        let made = run("losetup", &["--find", "--show", "-b", &block, file.to_str().unwrap()]);
        if made.is_none() {
            skipped("no loop devices for this user");
        }
        made.map(|device| Loop(device.into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}

/// A mounted file system, until this is dropped.
pub struct Mount(pub PathBuf);

impl Mount {
    /// Mounts a file system. `None` if that is impossible, see [`skipped`].
    #[track_caller]
    pub fn new(args: &[&str], at: &Path) -> Option<Mount> {
        let mut all = args.to_vec();
        all.push(at.to_str().unwrap());
        if run("mount", &all).is_none() {
            skipped("mounting is not possible here");
            return None;
        }
        Some(Mount(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run("umount", &[self.0.to_str().unwrap()]);
    }
}
