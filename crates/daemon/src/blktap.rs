//! The names by which tapdisk's tools find a disk's NBD socket:
//! `/run/blktap-control/nbd<pid>.<minor>`. xl's `block-tap` gives QEMU that name.
//!
//! Callers resolve all links of a name, and read both numbers from what they find. So the name is
//! the socket itself: a second name of the file in the disk's run directory. A link in
//! `names/` of the run directory records the disk of each name.
//!
//! The name contains the process number of a disk's keeper. A new keeper has another number, but
//! the toolstack goes on with the old name. So all names of a disk stay until the disk is removed,
//! and lead to the socket of the keeper of now.
//!
//! The folder of the records is read once: no other process writes to it while this daemon runs. So a name costs as
//! much beside a thousand disks as beside ten.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Paths;
use crate::state::{DiskId, id_of_name};

/// The name of a disk's NBD socket in its run directory.
const SOCKET: &str = "nbd";
/// Suffix of a name that is being made.
const NEW: &str = ".new";

impl Paths {
    /// tapdisk's directory for sockets, beside the run directory.
    pub fn blktap(&self) -> PathBuf {
        self.beside("blktap-control")
    }

    /// The folder of the records of these names.
    fn names(&self) -> PathBuf {
        self.run.join("names")
    }

    /// The path of a disk's NBD socket.
    pub(crate) fn nbd_socket(&self, id: DiskId) -> PathBuf {
        self.run.join(id.file_name()).join(SOCKET)
    }
}

/// The names of all disks, as the records have them.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<Option<Known>>);

/// The records, by their names and by their disks.
#[derive(Debug, Default)]
struct Known {
    of: BTreeMap<String, DiskId>,
    by_disk: BTreeMap<DiskId, BTreeSet<String>>,
}

impl Known {
    fn read(paths: &Paths) -> Known {
        let mut known = Known::default();
        records(paths).for_each(|(name, id)| known.insert(name, id));
        known
    }

    /// Notes a name, which is no other disk's any more.
    fn insert(&mut self, name: String, id: DiskId) {
        self.remove(&name);
        self.by_disk.entry(id).or_default().insert(name.clone());
        self.of.insert(name, id);
    }

    fn remove(&mut self, name: &str) {
        let Some(id) = self.of.remove(name) else { return };
        if let Some(names) = self.by_disk.get_mut(&id) {
            names.remove(name);
            if names.is_empty() {
                self.by_disk.remove(&id);
            }
        }
    }

    fn of_disk(&self, id: DiskId) -> Vec<String> {
        self.by_disk.get(&id).into_iter().flatten().cloned().collect()
    }
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, Option<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a name for a disk and the process number of its keeper. Earlier names of the disk lead to
    /// that keeper, too.
    pub(crate) fn link(&self, paths: &Paths, id: DiskId, pid: u32, minor: u32) {
        let socket = paths.nbd_socket(id);
        let new = format!("nbd{pid}.{minor}");
        let mut known = self.lock();
        let known = known.get_or_insert_with(|| Known::read(paths));
        let mut names = known.of_disk(id);
        names.retain(|name| *name != new);
        names.push(new);
        for name in names {
            if let Err(e) = try_link(paths, &socket, &name) {
                tracing::warn!("cannot make {name}, by which tools would find disk {id}: {e}");
            }
            // Its record may be there, also after an error.
            known.insert(name, id);
        }
    }

    /// Removes all names of a disk that is gone.
    pub(crate) fn unlink(&self, paths: &Paths, id: DiskId) {
        let mut known = self.lock();
        let known = known.get_or_insert_with(|| Known::read(paths));
        for name in known.of_disk(id) {
            let (record, public) = (paths.names().join(&name), paths.blktap().join(&name));
            // The record goes last: the next daemon finds the name by it.
            match remove(&public).and_then(|()| remove(&record)) {
                Ok(()) => known.remove(&name),
                Err(e) => tracing::warn!("cannot remove {}: {e}", record.display()),
            }
        }
    }

    /// The disks that have names.
    pub(crate) fn linked(&self, paths: &Paths) -> Vec<DiskId> {
        let mut known = self.lock();
        let known = known.get_or_insert_with(|| Known::read(paths));
        known.by_disk.keys().copied().collect()
    }
}

fn try_link(paths: &Paths, socket: &Path, name: &str) -> io::Result<()> {
    let (record, public) = (paths.names().join(name), paths.blktap().join(name));
    for folder in [paths.names(), paths.blktap()] {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    if !fs::read_link(&record).is_ok_and(|target| target == socket) {
        // This disk has both numbers now, so a record of an earlier disk is stale.
        remove(&record)?;
        symlink(socket, &record)?;
    }
    // A group's keeper has made the socket before, or a keeper makes it at once.
    let inode = |path: &Path| fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let Ok(real) = fs::canonicalize(socket) else { return Ok(()) };
    let found = inode(&real)?;
    if inode(&public).is_ok_and(|now| now == found) {
        return Ok(());
    }
    // The name is replaced in one step: a client may come at any time.
    let new = paths.blktap().join(format!("{name}{NEW}"));
    remove(&new)?;
    let linked = fs::hard_link(&real, &new).and_then(|()| fs::rename(&new, &public));
    match linked {
        // The socket of an older keeper is in the run directory, which may be on another file system.
        Err(e) if e.kind() == io::ErrorKind::CrossesDevices => {
            remove(&new)?;
            remove(&public)?;
            symlink(socket, &public)
        }
        linked => linked,
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The records of this daemon's names.
fn records(paths: &Paths) -> impl Iterator<Item = (String, DiskId)> {
    let entries = fs::read_dir(paths.names()).into_iter().flatten().flatten();
    let run = paths.run.clone();
    entries.filter_map(move |entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let folder = target.strip_prefix(&run).ok()?.parent()?;
        let id = id_of_name(folder.to_str()?)?;
        let name = entry.file_name().into_string().ok()?;
        target.ends_with(SOCKET).then_some((name, id))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn all_names_of_a_disk_lead_to_its_socket_and_go_with_it_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { run: dir.path().join("ferrite") };
        let [a, b] = [DiskId { domid: 3, devid: 51712 }, DiskId::tap(1)];
        let listen = |id: DiskId| {
            let socket = paths.nbd_socket(id);
            fs::create_dir_all(socket.parent().unwrap()).unwrap();
            let _ = fs::remove_file(&socket);
            UnixListener::bind(&socket).unwrap();
            fs::symlink_metadata(&socket).unwrap().ino()
        };
        let (_, of_b) = (listen(a), listen(b));
        let names = Names::default();
        names.link(&paths, a, 70, 0);
        names.link(&paths, a, 70, 0);
        names.link(&paths, b, 71, 1);
        // A second keeper has another socket.
        let of_a = listen(a);
        names.link(&paths, a, 72, 0);
        let name = |name: &str| paths.blktap().join(name);
        let inode = |path: &str| fs::symlink_metadata(name(path)).unwrap().ino();
        assert_eq!(["nbd70.0", "nbd72.0", "nbd71.1"].map(inode), [of_a, of_a, of_b]);
        // A number that belonged to another disk.
        names.link(&paths, b, 70, 0);
        assert_eq!(inode("nbd70.0"), of_b);
        fs::write(name("nbd6.6"), b"").unwrap();
        assert_eq!(names.linked(&paths), [a, b]);
        names.unlink(&paths, a);
        assert_eq!(names.linked(&paths), [b]);
        // The next daemon finds the names that are left, also the one that another disk had.
        let names = Names::default();
        assert_eq!(names.lock().insert(Known::read(&paths)).of_disk(b), ["nbd70.0", "nbd71.1"]);
        names.unlink(&paths, b);
        assert_eq!(Names::default().linked(&paths), []);
        let left: Vec<_> =
            fs::read_dir(paths.blktap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["nbd6.6"]);
    }

    #[test]
    fn the_names_of_other_disks_are_not_read_again_for_each_disk() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { run: dir.path().join("ferrite") };
        let [a, b] = [3, 4].map(|domid| DiskId { domid, devid: 51712 });
        let names = Names::default();
        names.link(&paths, a, 70, 0);
        // A record that this daemon has not made: it would be found by a look at the folder.
        symlink(paths.nbd_socket(b), paths.names().join("nbd71.1")).unwrap();
        names.link(&paths, a, 72, 0);
        assert_eq!(names.linked(&paths), [a]);
        names.unlink(&paths, a);
        assert_eq!(names.linked(&paths), []);
        // The next daemon looks once.
        assert_eq!(Names::default().linked(&paths), [b]);
    }
}
