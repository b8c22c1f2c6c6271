//! What an interrupted conversion leaves beside its file, so that it can go on.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::beside;

/// Behind the destination's name: the image that is not complete yet.
pub(super) const PARTIAL: &str = ".partial";
/// And how far it is.
const STATE: &str = ".partial.json";

/// Far more than what is ever written there.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// A file of the source as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Source {
    /// As it is shown: JSON has no other bytes.
    path: String,
    /// 0: of a device, whose node has no length.
    file_bytes: u64,
    modified_ns: i128,
    inode: u64,
}

impl Source {
    pub(super) fn of(path: &Path) -> io::Result<Source> {
        let meta = fs::metadata(path)?;
        let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        let path = fs::canonicalize(path)?.display().to_string();
        Ok(Source { path, file_bytes: meta.len(), modified_ns, inode: meta.ino() })
    }
}

/// The state of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resume {
    /// The source's files, the leaf first.
    pub(super) sources: Vec<Source>,
    /// Some of the source is in memory only, where a process that died left it: after a cut of the
    /// power it is gone, and the files have not changed.
    pub(super) journal: bool,
    /// `raw`, `vhd` or `qcow2`.
    pub(super) format: String,
    /// Of the disk.
    pub(super) virtual_bytes: u64,
    /// Of the disk, from its beginning: durable in the file that is not complete.
    pub(super) done_bytes: u64,
}

impl Resume {
    fn path(to: &Path) -> PathBuf {
        beside(to, STATE)
    }

    /// Whether nothing tells if the source has changed: a device has no times.
    pub(super) fn is_of_device(&self) -> bool {
        self.sources.iter().any(|source| source.file_bytes == 0)
    }

    /// What was left for `to`; none: nothing, or nothing of use.
    pub(super) fn load(to: &Path) -> Option<Resume> {
        let path = Resume::path(to);
        let size = fs::metadata(&path).ok()?.len();
        let text = (size <= MAX_STATE_BYTES).then(|| fs::read(&path).ok())??;
        serde_json::from_slice(&text).ok()
    }

    /// Leaves it. What it says is durable must be.
    pub(super) fn save(&self, to: &Path) -> io::Result<()> {
        let new = beside(to, ".partial.json.new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(self)?)?;
        file.sync_all()?;
        fs::rename(&new, Resume::path(to))
    }

    /// It is of no use any more.
    pub(super) fn remove(to: &Path) -> io::Result<()> {
        match fs::remove_file(Resume::path(to)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
