//! Keeps a successor's information about the served image up to date when the image is exchanged.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_disk::{Disk, DiskIdentity};

use crate::blkif::inflight::ImageName;
use crate::counters::Counters;
use crate::path::device::Successor;
use crate::waker::Waker;

/// Keeps the image's name in the in-flight table up to date. It also wakes the control thread at
/// once, since the next image may be larger.
pub(super) struct TableSuccessor {
    /// The name in the current table, if there is one.
    name: Mutex<Option<ImageName>>,
    counters: Counters,
    control: Arc<Waker>,
}

impl TableSuccessor {
    /// Starts with a predecessor's table, since the disk may be exchanged before its connection is
    /// taken over. A table of another image is ignored.
    pub(super) fn new(
        table: &Path,
        disk: &Disk,
        counters: Counters,
        control: Arc<Waker>,
    ) -> TableSuccessor {
        let is_ours = |name: &ImageName| disk.identity().is_ok_and(|own| own.key == name.get().key);
        let name = Mutex::new(ImageName::open(table).ok().flatten().filter(is_ours));
        TableSuccessor { name, counters, control }
    }

    /// Sets the table of the current connection.
    pub(super) fn keep(&self, name: ImageName) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }
}

impl Successor for TableSuccessor {
    fn serves(&self, image: &DiskIdentity) {
        let name = self.name.lock().unwrap_or_else(PoisonError::into_inner);
        name.iter().for_each(|name| name.set(image));
        self.counters.serves(&image.path);
    }

    fn goes_on(&self) {
        self.control.wake();
    }
}

#[cfg(test)]
mod tests {
    use ferrite_disk::OpenOptions;
    use ferrite_xen::abi::Protocol;

    use super::*;
    use crate::blkif::inflight::{Identity, Table};

    #[test]
    fn a_disk_that_is_exchanged_before_its_guest_is_taken_over_is_named_and_only_there() {
        let dir = tempfile::tempdir().unwrap();
        let identity = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, [0; 4096]).unwrap();
            Disk::open(&path, &OpenOptions::default()).unwrap().identity().unwrap()
        };
        let (old, next, other) = (identity("old"), identity("next"), identity("other"));
        let left = |image: &DiskIdentity| {
            let path = dir.path().join("inflight");
            let identity = Identity {
                guest: String::new(),
                rings: String::new(),
                image: image.clone(),
                protocol: Protocol::X86_64,
                ring_order: 0,
                queues: 1,
                max_segments: 11,
            };
            Table::create(&path, identity).unwrap();
            let disk = Disk::open(&dir.path().join("old"), &OpenOptions::default()).unwrap();
            let successor = TableSuccessor::new(
                &path,
                &disk,
                Counters::default(),
                Arc::new(Waker::new().unwrap()),
            );
            successor.serves(&next);
            ImageName::open(&path).unwrap().unwrap().get()
        };
        assert_eq!(left(&old), next);
        assert_eq!(left(&other), other);
    }
}
