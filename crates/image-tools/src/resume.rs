//! The state file beside an unfinished conversion, from which the conversion can be resumed.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_disk_base::plain;
use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::files::beside;

/// The suffix of the state file.
const STATE: &str = ".partial.json";
/// The suffix under which it is written first.
const NEXT: &str = ".partial.json.new";
/// The sizes of both are multiples of this.
const UNIT_BYTES: usize = 4096;

/// A bound far above the size of a state.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// A file of the source when the conversion began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Source {
    /// Its path as shown: JSON has no other bytes.
    path: String,
    /// 0: the size does not tell whether it has changed. A device's node has no length, and a store is written whenever
    /// it is opened.
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

    /// An export: its server does not tell whether it has changed.
    pub(super) fn of_export(name: &str) -> Source {
        Source { path: name.to_owned(), file_bytes: 0, modified_ns: 0, inode: 0 }
    }

    /// The source as a file that is written meanwhile.
    pub(super) fn only_identity(self) -> Source {
        Source { file_bytes: 0, modified_ns: 0, ..self }
    }

    pub(super) fn path(&self) -> &Path {
        Path::new(&self.path)
    }

    /// The source without values that change by themselves.
    pub(super) fn untold(self) -> Source {
        Source { file_bytes: 0, ..self }
    }
}

/// The state of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resume {
    /// The source's files, the leaf first.
    pub(super) sources: Vec<Source>,
    /// Some of the source is only in a dead process's journal: after a power cut that is gone, and the files have not
    /// changed.
    pub(super) journal: bool,
    /// `raw`, `vhd` or `qcow2`.
    pub(super) format: String,
    /// Bytes of the disk.
    pub(super) virtual_bytes: u64,
    /// Bytes from the beginning of the disk that are durable in the unfinished file.
    pub(super) done_bytes: u64,
}

impl Resume {
    fn path(to: &Path) -> PathBuf {
        beside(to, STATE)
    }

    /// Whether a change of the source cannot be detected.
    pub(super) fn is_untold(&self) -> bool {
        self.sources.iter().any(|source| source.file_bytes == 0)
    }

    /// The state for `to`; `None`: there is none, or it is useless.
    pub(super) fn load(to: &Path) -> Option<Resume> {
        let text = plain::read(&Resume::path(to), MAX_STATE_BYTES).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Whether the file at its path was not written by this program.
    pub(super) fn is_foreign(to: &Path) -> io::Result<bool> {
        match fs::symlink_metadata(Resume::path(to)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
            Ok(_) => Ok(Resume::load(to).is_none()),
        }
    }

    /// Writes the first state, with all the space that [`save`](Self::save) will need: the interruption may be a full
    /// disk.
    pub(super) fn begin(&self, to: &Path) -> io::Result<()> {
        self.save(to)?;
        self.reserve(to)
    }

    /// Reserves the space for the next [`save`](Self::save).
    pub(super) fn reserve(&self, to: &Path) -> io::Result<()> {
        let mut file = new_file(&beside(to, NEXT))?;
        file.write_all(&self.text()?)?;
        file.sync_all()
    }

    /// Writes the state. The data that it counts as durable must be. The order: it is written over the reserved file,
    /// or that of the save before the last; synced; and the two files exchange their names.
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

    /// Its text, padded to the longest that it can get.
    fn text(&self) -> io::Result<Vec<u8>> {
        let longest = Resume { done_bytes: u64::MAX, ..self.clone() };
        let bytes = serde_json::to_vec_pretty(&longest)?.len().next_multiple_of(UNIT_BYTES);
        let mut text = serde_json::to_vec_pretty(self)?;
        text.resize(bytes, b'\n');
        Ok(text)
    }

    /// The path of the next state until it is complete.
    pub(super) fn next(to: &Path) -> PathBuf {
        beside(to, NEXT)
    }

    /// Removes the state. The file that counts goes last: without it no command looks for the other one.
    pub(super) fn remove(to: &Path) -> io::Result<()> {
        for suffix in [NEXT, STATE] {
            match fs::remove_file(beside(to, suffix)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The file that was reserved under a name, if it is still this program's.
fn reserved(path: &Path) -> Option<File> {
    let file = plain::open(path, OFlags::WRONLY).ok()?;
    (file.metadata().ok()?.nlink() == 1).then_some(file)
}

/// Makes an empty file under a name, which replaces an existing one.
fn new_file(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => File::create_new(path),
    }
}

/// Gives `to` the content of `next`, in one step; the old content gets the other name, if the file system can do that.
fn exchange(next: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, next, CWD, to, RenameFlags::EXCHANGE) {
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => fs::rename(next, to),
        done => Ok(done?),
    }
}
