//! Directories and files of a test, which are removed with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A directory on the machine's disk, where direct I/O usually works: in the build folder, which cargo has for tests.
pub fn dir_on_disk() -> TempDir {
    let program = std::env::current_exe().unwrap();
    // The program is in `deps` of a profile's folder.
    let build = program.ancestors().nth(3).expect("a test is in the build folder");
    let dir = build.join("tmp");
    std::fs::create_dir_all(&dir).unwrap();
    TempDir::new_in(dir).unwrap()
}

/// A directory in memory, as a backend's run directory is.
pub fn dir_in_memory() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A sparse file.
pub fn image(dir: &TempDir, bytes: u64) -> PathBuf {
    let path = dir.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// A file system in memory with limits, mounted on a directory. Needs root.
pub struct Small(PathBuf);

impl Small {
    /// Mounts a tmpfs with these options. `None` without the permission, which is reported.
    pub fn mount(on: &Path, limits: &str) -> Option<Small> {
        let options = format!("mode=711,{limits}");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &options, "none"]).arg(on);
        if !command.output().is_ok_and(|output| output.status.success()) {
            crate::programs::skipped("this user may not mount");
            return None;
        }
        Some(Small(on.to_owned()))
    }

    /// Changes the limits.
    pub fn change(&self, limits: &str) {
        let mut command = Command::new("mount");
        command.args(["-o", &format!("remount,{limits}")]).arg(&self.0);
        assert!(command.status().unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
