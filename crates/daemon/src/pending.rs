//! The disks that the daemon's main thread has to look at: those with a directory in xenstore and without a thread.
//!
//! An event names its disk, and only that one is added. So an attachment costs as much beside a thousand disks as beside
//! ten. All directories are listed when xenstore is connected to.

use std::collections::BTreeSet;

use ferrite_xen::store::{Store, StoreError};

use crate::directory::{self, EventOf};
use crate::state::DiskId;

#[derive(Default)]
pub(crate) struct Pending {
    disks: BTreeSet<DiskId>,
    /// Domains whose directories have to be listed.
    domains: BTreeSet<u16>,
    /// Whether all directories have to be listed.
    all: bool,
}

impl Pending {
    /// Has all directories listed: events may have been missed.
    pub(crate) fn add_all(&mut self) {
        self.all = true;
    }

    /// Adds what an event of the watch on all directories is about.
    pub(crate) fn add_changed(&mut self, path: &str) {
        match directory::event_of(path) {
            EventOf::Disk(id) => drop(self.disks.insert(id)),
            EventOf::Domain(domid) => drop(self.domains.insert(domid)),
            EventOf::Nothing => {}
            EventOf::All => self.all = true,
        }
    }

    /// Adds a disk whose thread has ended. Its directory may be there still, or again.
    pub(crate) fn add(&mut self, id: DiskId) {
        if !id.is_tap() {
            self.disks.insert(id);
        }
    }

    /// Removes a disk: the next event of it, or the end of its thread, adds it again.
    pub(crate) fn remove(&mut self, id: DiskId) {
        self.disks.remove(&id);
    }

    pub(crate) fn contains(&self, id: DiskId) -> bool {
        self.disks.contains(&id)
    }

    /// The disks to look at, after listing what has to be listed.
    ///
    /// # Errors
    /// Errors of xenstore. The listing still has to be done then.
    pub(crate) fn disks(&mut self, store: &mut Store) -> Result<Vec<DiskId>, StoreError> {
        if self.all {
            self.disks.extend(directory::all(store)?);
            self.all = false;
            self.domains.clear();
        }
        while let Some(domid) = self.domains.first().copied() {
            self.disks.extend(directory::of_domain(store, domid)?);
            self.domains.remove(&domid);
        }
        Ok(self.disks.iter().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_adds_its_disk_and_nothing_else() {
        let mut pending = Pending::default();
        pending.add_changed("/local/domain/0/backend/vbd3/3/51712/params");
        pending.add_changed("backend/vbd3/4/51728");
        let disk = |domid, devid| DiskId { domid, devid };
        assert_eq!(pending.disks, [disk(3, 51712), disk(4, 51728)].into());
        assert!(!pending.all && pending.domains.is_empty());
        pending.add_changed("backend/vbd3/9");
        assert_eq!(pending.domains, [9].into());
        for foreign in ["backend/vbd3/03/1", "backend/vbd3/x", "backend/vbd3/3/x/state"] {
            pending.add_changed(foreign);
        }
        assert_eq!((pending.disks.len(), pending.domains.len(), pending.all), (2, 1, false));
        pending.add_changed("backend/vbd3");
        assert!(pending.all);
    }
}
