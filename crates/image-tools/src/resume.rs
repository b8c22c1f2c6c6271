//! The note that an interrupted conversion leaves beside its file, so that it can go on.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_disk_base::plain;
use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::files::beside;

/// And how far it is.
const STATE: &str = ".partial.json";
/// The name that it is written under first.
const NEXT: &str = ".partial.json.new";
/// Both take a multiple of this.
const UNIT_BYTES: usize = 4096;

/// Far more than what is ever written there.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// A file of the source as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Source {
    /// As it is shown: JSON has no other bytes.
    path: String,
    /// 0: nothing tells whether it has changed. A device's node has no length, and a store is written whenever it is
    /// opened.
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

    /// As it is whenever somebody looks.
    pub(super) fn untold(self) -> Source {
        Source { file_bytes: 0, ..self }
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

    /// Whether nothing tells if the source has changed.
    pub(super) fn is_untold(&self) -> bool {
        self.sources.iter().any(|source| source.file_bytes == 0)
    }

    /// The note that was left for `to`; none: nothing, or nothing of use.
    pub(super) fn load(to: &Path) -> Option<Resume> {
        let text = plain::read(&Resume::path(to), MAX_STATE_BYTES).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Whether something is in its place that was never left here.
    pub(super) fn is_foreign(to: &Path) -> io::Result<bool> {
        match fs::symlink_metadata(Resume::path(to)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
            Ok(_) => Ok(Resume::load(to).is_none()),
        }
    }

    /// Leaves it for the first time, with all the space that [`save`](Self::save) will ever need:
    /// what interrupts may be a disk that is full.
    pub(super) fn begin(&self, to: &Path) -> io::Result<()> {
        self.save(to)?;
        self.reserve(to)
    }

    /// Takes the space for the next [`save`](Self::save).
    pub(super) fn reserve(&self, to: &Path) -> io::Result<()> {
        let mut file = new_file(&beside(to, NEXT))?;
        file.write_all(&self.text()?)?;
        file.sync_all()
    }

    /// Leaves it. What it says is durable must be. The order: it is written over what was reserved,
    /// or left by the save before the last; synced; and the two files exchange their names.
    pub(super) fn save(&self, to: &Path) -> io::Result<()> {
        let (next, text) = (beside(to, NEXT), self.text()?);
        let mut file = match reserved(&next) {
            Some(file) => file,
            None => new_file(&next)?,
        };
        file.write_all(&text)?;
        file.set_len(text.len() as u64)?;
        file.sync_all()?;
        exchange(&next, &Resume::path(to))
    }

    /// Its text, as long as it can ever get.
    fn text(&self) -> io::Result<Vec<u8>> {
        let longest = Resume { done_bytes: u64::MAX, ..self.clone() };
        let bytes = serde_json::to_vec_pretty(&longest)?.len().next_multiple_of(UNIT_BYTES);
        let mut text = serde_json::to_vec_pretty(self)?;
        text.resize(bytes, b'\n');
        Ok(text)
    }

    /// The name of the next one until it is whole.
    pub(super) fn next(to: &Path) -> PathBuf {
        beside(to, NEXT)
    }

    /// It is of no use any more.
    pub(super) fn remove(to: &Path) -> io::Result<()> {
        for suffix in [STATE, NEXT] {
            match fs::remove_file(beside(to, suffix)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The file that was reserved under a name, if it is nobody else's.
fn reserved(path: &Path) -> Option<File> {
    let file = plain::open(path, OFlags::WRONLY).ok()?;
    (file.metadata().ok()?.nlink() == 1).then_some(file)
}

/// An empty file under a name, in the place of whatever is there.
fn new_file(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => File::create_new(path),
    }
}

/// Gives `to` the content of `next`, in one step; what was there has the other name then, where the
/// file system can do that.
fn exchange(next: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, next, CWD, to, RenameFlags::EXCHANGE) {
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => fs::rename(next, to),
        done => Ok(done?),
    }
}
