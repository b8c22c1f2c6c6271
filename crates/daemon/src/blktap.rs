//! Where tapdisk's tools look for a disk: `/run/blktap-control/nbd<pid>.<minor>`, a link to the disk's
//! NBD socket. xl's `block-tap` gives QEMU that name.
//!
//! The number of a disk's keeper is in it. A keeper that is replaced has another, and the toolstack goes
//! on with what it was told, so all names of a disk stay as long as the disk does.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use crate::Places;
use crate::state::{DiskId, id_of_name};

/// The name of a disk's NBD socket in its run directory.
const SOCKET: &str = "nbd";

impl Places {
    /// tapdisk's folder for sockets, beside ours.
    pub fn blktap(&self) -> PathBuf {
        self.run.with_file_name("blktap-control")
    }

    /// A disk's NBD socket.
    fn nbd_socket(&self, id: DiskId) -> PathBuf {
        self.run.join(id.file_name()).join(SOCKET)
    }
}

/// Makes the link of a disk that this process stands for.
pub(crate) fn link(places: &Places, id: DiskId, pid: u32, minor: u32) {
    let name = places.blktap().join(format!("nbd{pid}.{minor}"));
    if let Err(e) = try_link(&places.nbd_socket(id), &name) {
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
    // Both numbers are this disk's now: whoever had them is gone.
    match fs::remove_file(name) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(socket, name)
}

/// Removes all links of a disk that is no more.
pub(crate) fn unlink(places: &Places, id: DiskId) {
    for (name, _) in links(places).filter(|(_, of)| *of == id) {
        if let Err(e) = fs::remove_file(&name) {
            tracing::warn!("cannot remove {}: {e}", name.display());
        }
    }
}

/// The disks that have links.
pub(crate) fn linked(places: &Places) -> impl Iterator<Item = DiskId> {
    links(places).map(|(_, id)| id)
}

/// Our links; tapdisk's own sockets may stand beside them.
fn links(places: &Places) -> impl Iterator<Item = (PathBuf, DiskId)> {
    let entries = fs::read_dir(places.blktap()).into_iter().flatten().flatten();
    let run = places.run.clone();
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
        let places = Places { run: dir.path().join("ferrite") };
        let [a, b] = [3, 4].map(|domid| DiskId { domid, devid: 51712 });
        link(&places, a, 70, 0);
        link(&places, a, 70, 0);
        link(&places, b, 71, 1);
        // Another keeper; and a number that was another disk's.
        link(&places, a, 72, 0);
        link(&places, b, 70, 0);
        let name = |name: &str| places.blktap().join(name);
        assert_eq!(
            fs::read_link(name("nbd72.0")).unwrap(),
            dir.path().join("ferrite/vbd-3-51712/nbd")
        );
        for (foreign, target) in [("nbd5.5", "/run/x/vbd-3-51712/nbd"), ("other", "x")] {
            symlink(target, name(foreign)).unwrap();
        }
        fs::write(name("nbd6.6"), b"").unwrap();
        let mut ids: Vec<DiskId> = linked(&places).collect();
        ids.sort();
        assert_eq!(ids, [a, b, b]);
        unlink(&places, a);
        assert_eq!(linked(&places).collect::<Vec<_>>(), [b, b]);
        unlink(&places, b);
        let mut left: Vec<_> =
            fs::read_dir(places.blktap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["nbd5.5", "nbd6.6", "other"]);
    }
}
