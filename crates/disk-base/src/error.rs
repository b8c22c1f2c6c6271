//! Errors of opening a disk, or of reading its size.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

/// The next step for a user who may not write to an image, in the words of the toolstack and of ferrite.
pub const READ_ONLY: &str =
    "open it read-only (access=r in xl's configuration, --read-only with ferrite)";

/// The errors of media that cannot read a block.
const LOST: [Errno; 6] =
    [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::BADMSG, Errno::REMOTEIO, Errno::UCLEAN];

/// Whether an error of reading means that some data are lost, and not that nothing can be read at all: of the medium,
/// or of an image's metadata.
pub fn is_damage(e: &io::Error) -> bool {
    match e.raw_os_error().map(Errno::from_raw_os_error) {
        Some(errno) => LOST.contains(&errno),
        None => matches!(e.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof),
    }
}

/// The kind of an error, for programs; the text is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The image argument itself is invalid.
    Usage,
    /// There is no such image.
    NotFound,
    /// Another process uses it: locked, mounted, claimed. Trying again later may help.
    InUse,
    /// It exists, but cannot be a disk: a directory, a socket, a wrong size.
    Unsuitable,
    /// Its contents contradict themselves.
    Damaged,
    /// This user has no permission, or the medium is write-protected.
    Permission,
    /// The operation would destroy data, or disclose them, and was not forced.
    Refused,
    /// Its parent is in a folder where parents are not allowed.
    Parent,
    /// It was interrupted.
    Interrupted,
    /// The kernel reported something else.
    Io,
}

/// The step that failed, why, and the next step for the user.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct DiskError {
    kind: ErrorKind,
    what: String,
    why: String,
    help: String,
    source: Option<io::Error>,
}

impl DiskError {
    /// An error of a step (`what`), its reason (`why`), and the next step for the user (`help`).
    pub fn new(
        kind: ErrorKind,
        what: impl Into<String>,
        why: impl Into<String>,
        help: impl Into<String>,
    ) -> DiskError {
        DiskError { kind, what: what.into(), why: why.into(), help: help.into(), source: None }
    }

    /// Adds the error of the kernel or of a library that caused this one.
    pub fn with_source(mut self, source: impl Into<io::Error>) -> DiskError {
        self.source = Some(source.into());
        self
    }

    /// This error with the name of the file that the user knows: `temporary` becomes `name` in all texts.
    pub fn renamed(mut self, temporary: &Path, name: &Path) -> DiskError {
        let [from, to] = [temporary, name].map(|path| path.display().to_string());
        for text in [&mut self.what, &mut self.why, &mut self.help] {
            *text = text.replace(&from, &to);
        }
        self
    }

    /// The kind, by which a program acts.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The kernel's number of the error, if it had one.
    pub fn errno(&self) -> Option<Errno> {
        let of_source = self.source.as_ref().and_then(Errno::from_io_error);
        of_source.or(match self.kind {
            ErrorKind::NotFound => Some(Errno::NOENT),
            ErrorKind::Permission => Some(Errno::ACCESS),
            _ => None,
        })
    }

    /// The step that failed, for example `cannot open image /srv/a.img`.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The reason.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The next step for the user.
    pub fn help(&self) -> &str {
        &self.help
    }
}

/// The number of texts that [`warn_once`] remembers.
const TEXTS: usize = 64;

/// Warns of an image in the log, once for each text although a command opens the image several times.
pub fn warn_once(text: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.len() == TEXTS {
        told.clear();
    }
    if told.insert(text.to_owned()) {
        tracing::warn!("{text}");
    }
}
