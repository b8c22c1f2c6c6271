//! The links by which tapdisk's tools find a disk: `/run/blktap-control/nbd<pid>.<minor>` leads to
//! the disk's NBD socket. xl's `block-tap` gives QEMU that name.
//!
//! The name contains the process number of a disk's keeper. A new keeper has another number, but
//! the toolstack goes on with the old name. So all names of a disk stay until the disk is removed.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use crate::Paths;
use crate::state::{DiskId, id_of_name};

/// The name of a disk's NBD socket in its run directory.
const SOCKET: &str = "nbd";

impl Paths {
    /// tapdisk's directory for sockets, beside the run directory.
    pub fn blktap(&self) -> PathBuf {
        self.run.with_file_name("blktap-control")
    }

    /// The path of a disk's NBD socket.
    fn nbd_socket(&self, id: DiskId) -> PathBuf {
        self.run.join(id.file_name()).join(SOCKET)
    }
}

/// Makes a link for a disk and the process number of its keeper.
pub(crate) fn link(paths: &Paths, id: DiskId, pid: u32, minor: u32) {
    let name = paths.blktap().join(format!("nbd{pid}.{minor}"));
    if let Err(e) = try_link(&paths.nbd_socket(id), &name) {
        tracing::warn!("cannot make {}, by which QEMU would find disk {id}: {e}", name.display());
    }
}

fn try_link(socket: &Path, name: &Path) -> io::Result<()> {
    if fs::read_link(name).is_ok_and(|target| target == socket) {
        return Ok(());
    }
    if let Some(folder) = name.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    // Both numbers are this disk's now, so a link of an earlier disk is stale.
    match fs::remove_file(name) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(socket, name)
}

/// Removes all links of a disk that is gone.
pub(crate) fn unlink(paths: &Paths, id: DiskId) {
    for (name, _) in links(paths).filter(|(_, of)| *of == id) {
        if let Err(e) = fs::remove_file(&name) {
            tracing::warn!("cannot remove {}: {e}", name.display());
        }
    }
}

/// The disks that have links.
pub(crate) fn linked(paths: &Paths) -> impl Iterator<Item = DiskId> {
    links(paths).map(|(_, id)| id)
}

/// The links of this daemon. tapdisk's own sockets may be in the directory, too.
fn links(paths: &Paths) -> impl Iterator<Item = (PathBuf, DiskId)> {
    let entries = fs::read_dir(paths.blktap()).into_iter().flatten().flatten();
    let run = paths.run.clone();
    entries.filter_map(move |entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let folder = target.strip_prefix(&run).ok()?.parent()?;
        let id = id_of_name(folder.to_str()?)?;
        target.ends_with(SOCKET).then(|| (entry.path(), id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_of_a_disk_go_with_it_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { run: dir.path().join("ferrite") };
        let [a, b] = [3, 4].map(|domid| DiskId { domid, devid: 51712 });
        link(&paths, a, 70, 0);
        link(&paths, a, 70, 0);
        link(&paths, b, 71, 1);
        // A second keeper, and a number that belonged to another disk.
        link(&paths, a, 72, 0);
        link(&paths, b, 70, 0);
        let name = |name: &str| paths.blktap().join(name);
        assert_eq!(
            fs::read_link(name("nbd72.0")).unwrap(),
            dir.path().join("ferrite/vbd-3-51712/nbd")
        );
        for (foreign, target) in [("nbd5.5", "/run/x/vbd-3-51712/nbd"), ("other", "x")] {
            symlink(target, name(foreign)).unwrap();
        }
        fs::write(name("nbd6.6"), b"").unwrap();
        let mut ids: Vec<DiskId> = linked(&paths).collect();
        ids.sort();
        assert_eq!(ids, [a, b, b]);
        unlink(&paths, a);
        assert_eq!(linked(&paths).collect::<Vec<_>>(), [b, b]);
        unlink(&paths, b);
        let mut left: Vec<_> =
            fs::read_dir(paths.blktap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["nbd5.5", "nbd6.6", "other"]);
    }
}
