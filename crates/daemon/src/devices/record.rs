//! The record of a device: a small file in `/run/ferrite/devices`, for the next daemon.
//!
//! It is written before the device is made, and again when its index is known. A daemon that dies in between finds the
//! device by its identifier, which the kernel keeps (from Linux 5.14 on).

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use ferrite_host::nbd_device;
use serde::{Deserialize, Serialize};

use crate::state::{DiskId, replace};

const VERSION: u32 = 1;
/// The longest valid file.
const MAX_BYTES: u64 = 64 << 10;
/// All identifiers of this program begin with it.
const PREFIX: &str = "ferrite-";

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    /// The text by which the kernel knows the device. Of this host, it is used once.
    pub(crate) identifier: String,
    /// The disk that it shows.
    pub(crate) disk: DiskId,
    /// Its index, once the kernel has made it.
    pub(crate) index: Option<u32>,
    /// Whether it is for reading only.
    pub(crate) read_only: bool,
    /// The number of its connections.
    pub(crate) connections: u32,
    /// The size in bytes that it was made with.
    pub(crate) bytes: u64,
    /// Whether the disk is a tap that was made for it.
    pub(crate) owns_disk: bool,
}

impl Record {
    /// The record of a device that is to be made. `unique` was not used since this host was started.
    pub(crate) fn new(disk: DiskId, unique: u64, owns_disk: bool) -> Record {
        let identifier = format!("{PREFIX}{}-{unique:x}", disk.file_name());
        let (index, read_only, connections, bytes) = (None, false, 1, 0);
        let version = VERSION;
        Record { version, identifier, disk, index, read_only, connections, bytes, owns_disk }
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}.json", self.identifier))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        replace(&self.path(folder), &serde_json::to_vec(self).map_err(io::Error::other)?)
    }

    /// Removes the file. A failure is logged.
    pub(crate) fn remove(&self, folder: &Path) {
        let path = self.path(folder);
        if let Err(e) = fs::remove_file(&path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {e}", path.display());
        }
        // The next device makes it again.
        let _ = fs::remove_dir(folder);
    }

    /// Whether the kernel has this device under its index.
    pub(crate) fn is_at(&self, index: u32) -> bool {
        match nbd_device::identifier(index) {
            Some(identifier) => identifier == self.identifier,
            // An older kernel does not say.
            None => self.index == Some(index),
        }
    }
}

/// All records. Invalid files are set aside.
pub(crate) fn all(folder: &Path) -> Vec<Record> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut records = Vec::new();
    for path in entries.map(|entry| entry.path()) {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("new") => drop(fs::remove_file(&path)),
            Some("json") => match read(&path) {
                Ok(record) => records.push(record),
                Err(why) => {
                    let aside = path.with_extension("odd");
                    tracing::warn!("{} is renamed to {}: {why}", path.display(), aside.display());
                    let _ = fs::rename(&path, &aside);
                }
            },
            _ => {}
        }
    }
    records.sort_by_key(|record| record.disk);
    records
}

fn read(path: &Path) -> Result<Record, String> {
    let len = fs::metadata(path).map_err(|e| e.to_string())?.len();
    if len > MAX_BYTES {
        return Err(format!("it has {len} bytes"));
    }
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let record: Record = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    let is_named = path.file_stem().is_some_and(|name| name == record.identifier.as_str());
    match (record.version, is_named) {
        (VERSION, true) => Ok(record),
        (VERSION, false) => Err("its name is not that of its device".to_owned()),
        (version, _) => Err(format!("it has version {version}, and {VERSION} is known")),
    }
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
        let mut record = Record::new(DiskId::tap(3), 0xab, true);
        record.write(&at).unwrap();
        record.index = Some(7);
        record.write(&at).unwrap();
        fs::write(at.join("ferrite-x.json"), "{}").unwrap();
        fs::write(at.join("half.new"), "{").unwrap();
        fs::copy(record.path(&at), at.join("ferrite-copy.json")).unwrap();
        assert_eq!(all(&at), [record.clone()]);
        let odd = |name: &str| at.join(name).exists();
        assert!(odd("ferrite-x.odd") && odd("ferrite-copy.odd") && !odd("half.new"));
        record.remove(&at);
        assert_eq!(all(&at), []);
    }
}
