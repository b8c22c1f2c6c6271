//! Changes of a volume of a store while this process serves it (docs/internals/store.md, section 8).

use std::ffi::OsStr;
use std::io;

use ferrite_disk_base::{DiskError, ErrorKind};
use ferrite_images::children::PARTIAL;
use ferrite_store::BLOCK_BYTES;
use ferrite_store::live::{Operation, VolumeError};
use ferrite_store::name::StoreName;
use ferrite_store::owned::MAKE_ROOM;

use crate::{Disk, Session, Volume};

/// Whether a request may have been carried out before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// This is the first try: a name that exists is another volume's.
    No,
    /// An earlier try may have made it: a snapshot of this volume with that name is the one.
    Maybe,
}

impl Volume {
    /// Checks whether a snapshot of this volume could get this name.
    ///
    /// # Errors
    /// It is no name, or one that the store has.
    pub fn check_new_name(&self, name: &str) -> Result<(), DiskError> {
        StoreName::entry(OsStr::new(name))?;
        let what = || format!("cannot make the snapshot {name} of {}", self.path().display());
        if name.ends_with(PARTIAL) {
            let why = format!("names that end in {PARTIAL} are of copies that are not complete");
            return Err(DiskError::new(ErrorKind::Usage, what(), why, "choose another name"));
        }
        match self.store().live().volume(name) {
            None => Ok(()),
            Some(_) => {
                let exists = io::Error::new(io::ErrorKind::InvalidInput, VolumeError::Exists);
                Err(failed(what(), self, exists))
            }
        }
    }
}

impl Session {
    /// Keeps what the volume is now as a snapshot, durably. The snapshot has all writes that were answered. Guests go on.
    ///
    /// # Errors
    /// The disk is no volume of a store; the name is none, or another volume's; the store has no room for it. Nothing
    /// has changed then.
    pub fn snapshot_volume(&mut self, name: &str, repeated: Repeated) -> Result<(), DiskError> {
        let disk = self.disk().clone();
        let volume = of(&disk)?;
        let what = || format!("cannot make the snapshot {name} of {}", volume.path().display());
        let store = volume.store().clone();
        // No command of this process takes the name meanwhile.
        let _changing = store.changing();
        if repeated == Repeated::Maybe && is_snapshot_of(volume, name) {
            return Ok(());
        }
        volume.check_new_name(name)?;
        let operation = Operation::Snapshot(StoreName::entry(OsStr::new(name))?, volume.number());
        self.operate(volume, operation).map_err(|e| failed(what(), volume, e))
    }

    /// Makes the volume larger, durably. The caller is the only user of the disk: no queue maps it meanwhile. The added
    /// part reads as zeros.
    ///
    /// # Errors
    /// The disk is no volume of a store; the size is smaller than before, or no multiple of 4 KiB; the store has no room
    /// for it. Nothing has changed then.
    pub fn grow_volume(&mut self, bytes: u64) -> Result<(), DiskError> {
        let disk = self.disk().clone();
        let volume = of(&disk)?;
        let what = || format!("cannot resize {} to {bytes} bytes", volume.path().display());
        let refused = |why: &str, help: &str| {
            Err(DiskError::new(ErrorKind::Usage, what(), why.to_owned(), help.to_owned()))
        };
        if !bytes.is_multiple_of(BLOCK_BYTES as u64) {
            return refused("a volume has whole blocks of 4 KiB", "take a multiple of 4096 bytes");
        }
        match bytes.cmp(&volume.bytes()) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Less => {
                let help =
                    "a disk in use can only grow; detach it, then ferrite store resize --shrink";
                return refused("it is larger, and a disk in use cannot shrink", help);
            }
            std::cmp::Ordering::Greater => {}
        }
        let store = volume.store().clone();
        let _changing = store.changing();
        let blocks = bytes / BLOCK_BYTES as u64;
        let grown = self.operate(volume, Operation::Resize(volume.number(), blocks));
        // The store's memory may have the new size although no checkpoint does, so that is what counts.
        volume.refresh_size();
        grown.map_err(|e| failed(what(), volume, e))
    }

    fn operate(&mut self, volume: &Volume, operation: Operation) -> io::Result<()> {
        let port = self.port().clone();
        self.run(volume.store().live().operate(&port, operation))?.map(drop)
    }
}

fn of(disk: &Disk) -> Result<&Volume, DiskError> {
    match disk {
        Disk::Store(volume) => Ok(volume),
        _ => {
            let what = "cannot change the volume".to_owned();
            let help = "ferrite disk show names the image that the disk has";
            Err(DiskError::new(ErrorKind::Usage, what, "the disk is no volume of a store", help))
        }
    }
}

fn is_snapshot_of(volume: &Volume, name: &str) -> bool {
    let all = volume.store().live().list();
    all.iter().any(|known| {
        known.name == name && known.snapshot && known.origin.as_deref() == Some(volume.name())
    })
}

fn failed(what: String, volume: &Volume, e: io::Error) -> DiskError {
    let store = volume.medium().path().display();
    let inner = e.get_ref().and_then(|inner| inner.downcast_ref::<VolumeError>());
    let (kind, help) = match (inner, e.kind()) {
        (Some(VolumeError::Exists), _) => (
            ErrorKind::Usage,
            format!("choose another name; ferrite store list {store} shows those there are"),
        ),
        (Some(VolumeError::Full), _) => (
            ErrorKind::Usage,
            "delete volumes or snapshots that are not needed: ferrite store delete".to_owned(),
        ),
        (Some(_), _) => (ErrorKind::Usage, format!("ferrite store list {store} shows its volumes")),
        (None, io::ErrorKind::StorageFull) => (ErrorKind::Io, MAKE_ROOM.to_owned()),
        (None, _) => {
            (ErrorKind::Io, "check the medium below it and the kernel's log (dmesg)".to_owned())
        }
    };
    DiskError::new(kind, what, e.to_string(), help).with_source(e)
}
