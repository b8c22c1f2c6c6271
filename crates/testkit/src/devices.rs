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

/// A file system on a loop device whose writes hang while it is frozen. Needs root.
pub struct Freezable {
    mount: Mount,
    _medium: tempfile::TempDir,
}

impl Freezable {
    /// Makes one of 32 MiB and mounts it on a directory, which it makes. `None` without the permission or the programs,
    /// which is reported.
    pub fn mount(on: &Path) -> Option<Freezable> {
        let medium = tempfile::tempdir().unwrap();
        let file = medium.path().join("ext4");
        std::fs::File::create(&file).unwrap().set_len(32 << 20).unwrap();
        std::fs::create_dir_all(on).unwrap();
        let path = file.to_str().unwrap();
        run("mkfs.ext4", &["-q", "-F", path])?;
        let mount = Mount::new(&["-o", "loop", path], on)?;
        Some(Freezable { mount, _medium: medium })
    }

    /// Its directory.
    pub fn folder(&self) -> &Path {
        &self.mount.0
    }

    /// Lets writes hang. Wait for no writer until it is thawed: such a process does not even end when it is killed.
    pub fn freeze(&self) {
        assert!(self.order("-f"), "cannot freeze {}", self.mount.0.display());
    }

    /// Lets writes go on.
    pub fn thaw(&self) {
        assert!(self.order("-u"), "cannot thaw {}", self.mount.0.display());
    }

    fn order(&self, what: &str) -> bool {
        run("fsfreeze", &[what, self.mount.0.to_str().unwrap()]).is_some()
    }
}

impl Drop for Freezable {
    fn drop(&mut self) {
        // A test that has failed may have left it frozen.
        self.order("-u");
    }
}
