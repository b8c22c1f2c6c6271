//! The reservation of an open LUN, as long as it is open for writing ([`ferrite_host::fence`]).

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::fence::{Refusal, Terms};
use ferrite_host::names;

use super::medium::cannot_open;
use super::{Raw, lock};
use crate::{DiskError, ErrorKind, OpenOptions};

/// A reservation, which is given back when this is dropped: before the file's locks are.
pub(super) struct Fence {
    file: Arc<OwnedFd>,
    path: PathBuf,
    terms: Terms,
    is_held: AtomicBool,
}

impl Fence {
    /// Takes the reservation of an image that is open and locked, if the options say so.
    pub(super) fn take(
        path: &Path,
        file: &Arc<OwnedFd>,
        options: &OpenOptions,
    ) -> Result<Option<Fence>, DiskError> {
        let wanted = options.fence.as_ref().filter(|_| !options.read_only && !options.unlocked);
        let Some(terms) = wanted else { return Ok(None) };
        let held = names::fence::take(file.as_fd(), terms);
        let held = held.map_err(|refusal| refused(path, &refusal))?;
        if held.is_weak {
            tracing::warn!(
                image = %path.display(),
                "its target forgets reservations when it starts again: two hosts may write to it then"
            );
        }
        tracing::info!(image = %path.display(), "it is reserved for this host by key {:016x}", held.key);
        let is_held = AtomicBool::new(true);
        Ok(Some(Fence { file: file.clone(), path: path.to_owned(), terms: terms.clone(), is_held }))
    }

    /// Gives it back. Nothing is written to the image any more.
    pub(super) fn release(&self) {
        if !self.is_held.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Err(e) = names::fence::release(self.file.as_fd(), &self.terms) {
            tracing::warn!(image = %self.path.display(), "it stays reserved for this host: {e}");
        }
    }

    /// The host that has the LUN now, in words.
    pub(super) fn holder(&self) -> String {
        match names::fence::holder(self.file.as_fd(), &self.terms) {
            Some(key) => format!("the host with key {key:016x}"),
            None => "another host, which has given it back or cannot be told".to_owned(),
        }
    }
}

impl Raw {
    /// Releases the locks, while the file stays open.
    pub fn unlock(&self) {
        self.fence.iter().for_each(Fence::release);
        lock::release(&self.file);
        self.let_go();
    }

    /// The host that has the LUN, in words for the log. `None`: it is not reserved for this host. It may wait for the
    /// LUN.
    pub fn holder(&self) -> Option<String> {
        self.fence.as_ref().map(Fence::holder)
    }
}

fn refused(path: &Path, refusal: &Refusal) -> DiskError {
    let kind = match refusal {
        Refusal::InUse(_) | Refusal::Foreign(_) => ErrorKind::InUse,
        Refusal::Taken(_) => ErrorKind::Refused,
        Refusal::Forgetful | Refusal::Unsuitable(_) => ErrorKind::Unsuitable,
        Refusal::Record(_) | Refusal::Io(_) => ErrorKind::Io,
    };
    let help = refusal.help(&path.display().to_string());
    DiskError::new(kind, cannot_open(path), refusal.to_string(), help)
}

impl Drop for Fence {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("terms", &self.terms).finish_non_exhaustive()
    }
}
