//! Backups of disks: full ones, and what has changed since the last one (docs/internals/backups.md).
//!
//! A folder has backups; [`folder`] has their names. The data of a backup are a qcow2 image on the data of its parent,
//! so any program that reads qcow2 reads a backup. The manifest has the hash of each region.
//!
//! Disks without maps are compared with the hashes of their last backup: [`compared`].
//!
//! Two dirty maps take turns, NAME.1 and NAME.2. The map that was begun when a backup was made names what the next one
//! copies. The manifest has the identifier of that map, so a map never leads to the wrong backup.
//!
//! The order of writes of [`ImageTools::back_up`]:
//! 1. A file says that a map is begun for this folder (`MAP.begun`), and the next map is begun, durably.
//! 2. The unfinished manifest is written, with the identifier of that map.
//! 3. The regions that the last map names are copied. At times the data are made durable, and then the hashes of the
//!    complete regions are written into the unfinished manifest.
//! 4. The data are durable and get their name, and the folder is synced.
//! 5. The manifest is durable and gets its name, and the folder is synced. From here on the backup is complete.
//! 6. The unfinished manifest and `MAP.begun` are removed, and the last map is ended.
//!
//! Before step 5 the last map still names all that has changed since the last backup, so a backup that was interrupted
//! is continued, or begun again. Regions that changed since step 1 are copied again then. After step 5 the next backup
//! ends the last map, if step 6 did not.

use serde::Serialize;

mod compared;
mod create;
mod folder;
mod live;
mod manifest;
mod maps;
mod prune;
mod regions;
mod restore;
mod stream;
mod verify;

pub use create::BackUp;
pub use live::{AtRest, BackupRecord, LiveDisk};
pub use prune::Prune;
pub use restore::{Restore, RestoreStream};

/// The kind of a backup: the data that it may copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackupKind {
    /// The changes since the last one, if they are known; otherwise everything.
    #[default]
    Auto,
    /// Everything.
    Full,
    /// The changes since the last one.
    Incremental,
}

/// A backup that was made, or that is in a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackupInfo {
    /// Its name.
    pub name: String,
    /// 32 hexadecimal digits; empty if the manifest cannot be used.
    pub id: String,
    /// The name of the backup that it stands on; `None`: it is a full one.
    pub parent: Option<String>,
    /// When it was begun, in seconds since 1970.
    pub created_unix_s: u64,
    /// The disk that it is of.
    pub disk: String,
    /// Bytes of that disk.
    pub virtual_bytes: u64,
    /// Bytes of its file of data.
    pub data_bytes: u64,
    /// The map that was begun with it.
    pub map: Option<String>,
    /// `complete`, `unfinished`, or `damaged`; `begun` if a backup was interrupted before it had a name.
    pub state: &'static str,
    /// The snapshot of a disk in use that is copied, or that an interrupted backup has left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Why it is damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The result of making a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackupDone {
    /// The backup.
    #[serde(flatten)]
    pub backup: BackupInfo,
    /// Bytes of the disk that were read.
    pub read_bytes: u64,
    /// An interrupted backup was continued.
    pub resumed: bool,
    /// Further changes that were made, and steps that are left to the user.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The result of verifying one backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The backup.
    pub name: String,
    /// Bytes of it that were read and compared.
    pub read_bytes: u64,
    /// The offsets on the disk of regions that are not what was backed up.
    pub damaged_regions: Vec<u64>,
    /// Why it could not be verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Verified {
    /// Whether it is as it was made.
    pub fn is_good(&self) -> bool {
        self.why.is_none() && self.damaged_regions.is_empty()
    }
}

/// The result of removing backups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// The backups that were removed.
    pub removed: Vec<String>,
    /// The backups that were made full ones.
    pub merged: Vec<String>,
    /// The backups that are left.
    pub kept: Vec<String>,
}
