//! Which URI has which tap, and which domains use it: a file for each URI in `smapi` in the daemon's folder.
//!
//! The folder is on a tmpfs beside the taps' own state. So the files live as long as the taps: longer than any process,
//! and not longer than the host runs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{self, Wait};
use super::{Fault, Kind};

/// The folder of these files, in the daemon's.
const FOLDER: &str = "smapi";
const STATE: &str = "json";
const LOCK: &str = "lock";

/// A URI that has a tap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Disk {
    pub(super) uri: String,
    /// The number of its tap.
    pub(super) minor: u32,
    /// The process that was started for its tap.
    pub(super) pid: Option<u32>,
    /// The domains that are attached. With none the tap is to be removed.
    pub(super) attached: BTreeSet<String>,
    /// The domains for which the image is open. A domain is added after the image was opened, and removed after it was
    /// closed, so a crash in between leaves an order that can be repeated.
    pub(super) active: BTreeSet<String>,
    /// Whether the image was opened for reading only, though it could be written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) read_only: bool,
}

/// The files of all URIs.
pub(super) struct Disks {
    folder: PathBuf,
}

impl Disks {
    pub(super) fn of(run_dir: &Path) -> Disks {
        Disks { folder: run_dir.join(FOLDER) }
    }

    /// The file of a URI, locked: calls on one URI follow each other.
    pub(super) fn lock(&self, uri: &str) -> Result<Held, Fault> {
        let id = id_of(uri);
        let held = files::make_folder(&self.folder).and_then(|()| self.held(&id, Wait::UntilFree));
        held.map_err(|e| Fault::of_io(format!("cannot lock {}", self.folder.display()), e))
    }

    fn held(&self, id: &str, wait: Wait) -> io::Result<Held> {
        let state = self.folder.join(id).with_extension(STATE);
        let lock = state.with_extension(LOCK);
        Ok(Held { _lock: files::lock(&lock, wait)?, id: id.to_owned(), state })
    }

    /// The files that no other call has locked.
    pub(super) fn at_rest(&self) -> Vec<Held> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let ids = paths.filter(|path| path.extension() == Some(OsStr::new(STATE)));
        let ids = ids.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
        ids.filter_map(|id| self.held(&id, Wait::Never).ok()).collect()
    }
}

/// The name of a URI's files: URIs are longer than names of files may be.
pub(super) fn id_of(uri: &str) -> String {
    blake3::hash(uri.as_bytes()).to_hex()[..32].to_owned()
}

/// The file of one URI, locked.
pub(super) struct Held {
    _lock: OwnedFd,
    pub(super) id: String,
    state: PathBuf,
}

impl Held {
    /// `None`: the URI has no tap.
    pub(super) fn read(&self) -> Result<Option<Disk>, Fault> {
        files::read(&self.state).map_err(|e| {
            let path = self.state.display();
            let help =
                "remove the file if no domain uses that disk, and its tap by tap-ctl destroy";
            Fault::new(Kind::Failed, format!("cannot read {path}: {e}; {help}"))
        })
    }

    pub(super) fn save(&self, disk: &Disk) -> Result<(), Fault> {
        let saved = files::replace(&self.state, disk);
        saved.map_err(|e| Fault::of_io(format!("cannot write {}", self.state.display()), e))
    }

    /// Removes the file, and its lock if nothing is left.
    pub(super) fn remove(&self) -> Result<(), Fault> {
        let removed = files::remove(&self.state);
        removed.map_err(|e| Fault::of_io(format!("cannot remove {}", self.state.display()), e))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.state.exists() {
            // A lock that stays is found and used by the next call.
            let _ = fs::remove_file(self.state.with_extension(LOCK));
        }
    }
}
