//! The record of a device: a small file in `/run/ferrite/devices`, for the next daemon.
//!
//! It is written before the device is made, and again when its index is known. A daemon that dies in between finds the
//! device by its identifier or its mark, which the kernel keeps (the identifier of NBD from Linux 5.14 on).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ferrite_host::nbd_device;
use serde::{Deserialize, Serialize};

use super::by_ublk;
use super::kernel::{Kind, Name};
use crate::state::DiskId;
use crate::state_files::{StateFiles, Stated};

const VERSION: u32 = 1;
/// All identifiers of this program begin with it.
const PREFIX: &str = "ferrite-";

/// The record of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    /// Which driver has the device.
    #[serde(default, skip_serializing_if = "Kind::is_default")]
    pub(crate) kind: Kind,
    /// The text by which the kernel's NBD client knows the device. Of this host, it is used once.
    pub(crate) identifier: String,
    /// The number by which the ublk driver knows the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mark: Option<u64>,
    /// The disk that it shows.
    pub(crate) disk: DiskId,
    /// Its index, once the kernel has made it.
    pub(crate) index: Option<u32>,
    /// Whether it is for reading only.
    pub(crate) read_only: bool,
    /// The number of its connections or queues.
    pub(crate) connections: u32,
    /// The size in bytes that it was made with.
    pub(crate) bytes: u64,
    /// Whether the disk is a tap that was made for it.
    pub(crate) owns_disk: bool,
    /// Whether it may be written beside a guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shared: bool,
}

impl Record {
    /// The record of a device that is to be made. `unique` was not used since this host was started.
    pub(crate) fn new(disk: DiskId, kind: Kind, unique: u64, owns_disk: bool) -> Record {
        Record {
            version: VERSION,
            kind,
            identifier: format!("{PREFIX}{}-{unique:x}", disk.file_name()),
            mark: (kind == Kind::Ublk).then(|| by_ublk::mark(unique)),
            disk,
            index: None,
            read_only: false,
            connections: 1,
            bytes: 0,
            owns_disk,
            shared: false,
        }
    }

    /// The device, once the kernel has made it.
    pub(crate) fn device(&self) -> Option<Name> {
        Some(Name { kind: self.kind, index: self.index? })
    }

    /// The device's path. It is empty before the kernel has made it.
    pub(crate) fn path(&self) -> PathBuf {
        self.device().map(Name::path).unwrap_or_default()
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        StateFiles::open(folder)?.write(self)
    }

    /// Removes the file. A failure is logged.
    pub(crate) fn remove(&self, folder: &Path) {
        StateFiles::<Record>::at(folder).remove(&self.identifier);
        // The next device makes it again.
        let _ = fs::remove_dir(folder);
    }

    /// Whether the kernel's NBD client has this device under its index.
    pub(crate) fn is_at(&self, index: u32) -> bool {
        match nbd_device::identifier(index) {
            Some(identifier) => identifier == self.identifier,
            // An older kernel does not say.
            None => self.index == Some(index),
        }
    }
}

impl Stated for Record {
    const VERSION: u32 = VERSION;
    const WITHOUT: &'static str =
        "its device, if there is one, is not followed: remove it by ferrite disk device --clean";

    fn name(&self) -> String {
        self.identifier.clone()
    }
}

/// All records. Invalid files are set aside.
pub(crate) fn all(folder: &Path) -> Vec<Record> {
    let mut records = StateFiles::<Record>::at(folder).all();
    records.sort_by_key(|record| record.disk);
    records
}

/// The index of a device that this program has made on this host, by the kernel's word alone.
pub(crate) fn is_ours(index: u32) -> bool {
    nbd_device::identifier(index).is_some_and(|identifier| identifier.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_found_again_and_a_foreign_one_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("devices");
        assert_eq!(all(&at), []);
        let mut record = Record::new(DiskId::tap(3), Kind::Nbd, 0xab, true);
        record.write(&at).unwrap();
        record.index = Some(7);
        record.write(&at).unwrap();
        fs::write(at.join("ferrite-x.json"), "{}").unwrap();
        fs::write(at.join("half.new"), "{").unwrap();
        fs::copy(at.join(format!("{}.json", record.identifier)), at.join("ferrite-copy.json"))
            .unwrap();
        assert_eq!(all(&at), [record.clone()]);
        let odd = |name: &str| at.join(name).exists();
        assert!(odd("ferrite-x.odd") && odd("ferrite-copy.odd") && !odd("half.new"));
        record.remove(&at);
        assert_eq!(all(&at), []);
    }
}
