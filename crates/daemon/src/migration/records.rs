//! The durable records of migrations: a small file for each in `migrations` of the state folder.
//!
//! A record is replaced by a rename. It is synced before that, and its folder after it. So a record that was written is
//! there after a power cut. Records of this host's disks that leave are called `out-ID`, those of disks that come
//! `in-ID`.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ferrite_disk::moved::sync_folder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::messages::is_id;
use super::token::{Receiver, Sender};
use crate::params::{Format, Image};
use crate::state::DiskId;

/// The version of the files.
const VERSION: u32 = 1;
/// The longest record.
const MAX_BYTES: u64 = 64 << 10;
/// How long the record of a migration that is over is kept, in seconds.
const KEPT_S: u64 = 30 * 24 * 3600;
/// Most records of one kind. A further migration is refused.
pub(crate) const MAX: usize = 1000;

/// A disk of this host that leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Outgoing {
    version: u32,
    /// The migration.
    pub(crate) id: String,
    /// The disk when it began.
    pub(crate) disk: DiskId,
    /// Its image here.
    pub(crate) image: Image,
    /// The other host, as `HOST:PORT` of its listener.
    pub(crate) host: String,
    /// The image there, as the URI of its export.
    pub(crate) target: String,
    /// Whether the image there stands on another one there.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub(crate) on_base: bool,
    /// Whether it is the copy of a parent, which stays here, too.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub(crate) is_parent: bool,
    /// Whether the disk goes on here with the image there.
    pub(crate) keep: bool,
    /// Whether it is to be given up.
    pub(crate) gives_up: bool,
    /// Whether it is over, and nothing is to be said to the other host any more.
    pub(crate) done: bool,
    /// An error, or a loss.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) note: Option<String>,
    /// Which host has the disk.
    pub(crate) state: Sender,
    /// When it was begun, in seconds since 1970.
    pub(crate) created: u64,
}

/// A disk that comes to this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Incoming {
    version: u32,
    /// The migration.
    pub(crate) id: String,
    /// Its format.
    pub(crate) format: Format,
    /// The path that the image gets when the disk is taken. Empty: only the decision is known.
    pub(crate) path: PathBuf,
    /// Bytes of the disk.
    pub(crate) bytes: u64,
    /// The image that it stands on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) base: Option<PathBuf>,
    /// Whether its file is copied as bytes: the parent of a disk.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub(crate) is_file: bool,
    /// The TCP port of the export, once it is known.
    pub(crate) port: u16,
    /// The export's name: a secret of the two hosts.
    pub(crate) export: String,
    /// Whether the image is exported further on.
    pub(crate) keep: bool,
    /// Whether the image was made.
    pub(crate) made: bool,
    /// Whether the image has its own name.
    pub(crate) named: bool,
    /// Which host has the disk.
    pub(crate) state: Receiver,
    /// When it was begun, in seconds since 1970.
    pub(crate) created: u64,
}

impl Outgoing {
    pub(crate) fn new(id: &str, disk: DiskId, image: &Image, host: &str, created: u64) -> Outgoing {
        Outgoing {
            version: VERSION,
            id: id.to_owned(),
            disk,
            image: image.clone(),
            host: host.to_owned(),
            target: String::new(),
            on_base: false,
            is_parent: false,
            keep: false,
            gives_up: false,
            done: false,
            note: None,
            state: Sender::Owner,
            created,
        }
    }
}

/// The end of the name of an image that its sender writes.
const INCOMING: &str = ".ferrite-incoming";

impl Incoming {
    pub(crate) fn new(id: &str, format: Format, path: &Path, bytes: u64, created: u64) -> Incoming {
        Incoming {
            version: VERSION,
            id: id.to_owned(),
            format,
            path: path.to_owned(),
            bytes,
            base: None,
            is_file: false,
            port: 0,
            export: String::new(),
            keep: false,
            made: false,
            named: false,
            state: Receiver::Incoming,
            created,
        }
    }

    /// A migration that was given up before this host knew of it.
    pub(crate) fn unknown(id: &str, created: u64) -> Incoming {
        let state = Receiver::Aborted;
        Incoming { state, ..Incoming::new(id, Format::Raw, Path::new(""), 0, created) }
    }

    /// The image while the sender writes it.
    pub(crate) fn coming(&self) -> Image {
        let mut path = self.path.clone().into_os_string();
        path.push(INCOMING);
        let format = if self.is_file { Format::Raw } else { self.format };
        Image { format, path: path.into() }
    }

    /// The image once the disk is here.
    pub(crate) fn image(&self) -> Image {
        Image { format: self.format, path: self.path.clone() }
    }
}

/// A record of one kind.
pub(crate) trait Kept: Serialize + DeserializeOwned {
    /// The beginning of the file's name.
    const KIND: &'static str;
    fn id(&self) -> &str;
    fn version(&self) -> u32;
}

impl Kept for Outgoing {
    const KIND: &'static str = "out-";
    fn id(&self) -> &str {
        &self.id
    }
    fn version(&self) -> u32 {
        self.version
    }
}

impl Kept for Incoming {
    const KIND: &'static str = "in-";
    fn id(&self) -> &str {
        &self.id
    }
    fn version(&self) -> u32 {
        self.version
    }
}

/// The folder of the records.
#[derive(Debug)]
pub(crate) struct Records {
    folder: PathBuf,
}

impl Records {
    pub(crate) fn of(state_folder: &Path) -> Records {
        Records { folder: state_folder.join("migrations") }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn file<R: Kept>(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{}{id}.json", R::KIND))
    }

    /// Writes a record, durably.
    ///
    /// # Errors
    /// Errors of the file system. After a power cut the record is the one before, or this one.
    pub(crate) fn write<R: Kept>(&self, record: &R) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let path = self.file::<R>(record.id());
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&new)?;
        file.write_all(&serde_json::to_vec(record).map_err(io::Error::other)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_folder(&path)
    }

    /// Removes a record, durably.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn remove<R: Kept>(&self, id: &str) -> io::Result<()> {
        let path = self.file::<R>(id);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => sync_folder(&path),
        }
    }

    /// Removes old records of which nothing depends any more: those that `is_over`.
    pub(crate) fn prune<R: Kept>(&self, now_s: u64, is_over: impl Fn(&R) -> Option<u64>) {
        for record in self.all::<R>() {
            let is_old = is_over(&record).is_some_and(|at| now_s.saturating_sub(at) > KEPT_S);
            if is_old && let Err(e) = self.remove::<R>(record.id()) {
                tracing::warn!("the record of migration {} stays: {e}", record.id());
            }
        }
    }

    /// Reads a record. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not valid: then nothing may be concluded.
    pub(crate) fn read<R: Kept>(&self, id: &str) -> io::Result<Option<R>> {
        if !is_id(id) {
            return Ok(None);
        }
        match read::<R>(&self.file::<R>(id)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// All records of a kind that can be read, the oldest name first. Those that cannot are logged.
    pub(crate) fn all<R: Kept>(&self) -> Vec<R> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        let is_kind = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(R::KIND) && name.ends_with(".json")
        };
        let read = |path: PathBuf| match read::<R>(&path) {
            Ok(record) => Some(record),
            Err(e) => {
                tracing::error!("cannot read {}: {e}; its migration rests", path.display());
                None
            }
        };
        paths.into_iter().filter(is_kind).filter_map(read).collect()
    }
}

fn read<R: Kept>(path: &Path) -> io::Result<R> {
    let mut text = Vec::new();
    fs::File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    let record: R = serde_json::from_slice(&text).map_err(io::Error::other)?;
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let is_it = stem.and_then(|stem| stem.strip_prefix(R::KIND)) == Some(record.id());
    match is_it && record.version() == VERSION && is_id(record.id()) {
        true => Ok(record),
        false => Err(io::Error::other("it is of another migration or version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_written_and_damaged_ones_are_no_missing_ones() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::of(dir.path());
        let id = "0a".repeat(16);
        assert_eq!(records.read::<Incoming>(&id).unwrap(), None);
        let record = Incoming::new(&id, Format::Qcow2, Path::new("/srv/a.qcow2"), 5, 7);
        records.write(&record).unwrap();
        assert_eq!(records.read::<Incoming>(&id).unwrap(), Some(record.clone()));
        assert_eq!(records.all::<Incoming>(), [record]);
        assert_eq!(records.all::<Outgoing>(), []);
        fs::write(records.file::<Incoming>(&id), b"{}").unwrap();
        records.read::<Incoming>(&id).unwrap_err();
        assert_eq!(records.read::<Incoming>("../x").unwrap(), None);
        records.remove::<Incoming>(&id).unwrap();
        assert_eq!(records.all::<Incoming>(), []);
    }
}
