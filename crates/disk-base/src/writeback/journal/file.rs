//! The files of journals, and their holders.
//!
//! Any process may read a file. Only the process that has it [`Held`] makes it longer, replaces or removes it. It is
//! never made shorter: other processes have it mapped.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_host::names;
use ferrite_host::shm::Shm;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, major, minor};

use crate::raw::flock_holder;

use super::layout::{HEADER_BYTES, MAGIC, VOID_AT, file_bytes, slots};

/// A journal's file, open and locked. While it has its name, no other process holds the journal.
#[derive(Debug)]
pub(super) struct Held {
    file: File,
    path: PathBuf,
}

impl Held {
    /// Takes the existing file; `None`: there is none.
    ///
    /// # Errors
    /// `WouldBlock`: another process holds it. Otherwise the file system's.
    pub(super) fn take(path: &Path) -> io::Result<Option<Held>> {
        loop {
            let file = match open(path, OFlags::empty()) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                file => file?,
            };
            let held = Held::lock(file, path)?;
            // The former holder may have removed or replaced it.
            if held.has_its_name()? {
                return Ok(Some(held));
            }
        }
    }

    /// Makes an empty file.
    ///
    /// # Errors
    /// `AlreadyExists`; `WouldBlock`: another process was faster. Otherwise the file system's.
    pub(super) fn create(path: &Path) -> io::Result<Held> {
        let held = Held::lock(open(path, OFlags::CREATE | OFlags::EXCL)?, path)?;
        match held.has_its_name()? {
            true => Ok(held),
            false => Err(ErrorKind::WouldBlock.into()),
        }
    }

    fn lock(file: File, path: &Path) -> io::Result<Held> {
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Held { file, path: path.to_owned() })
    }

    fn has_its_name(&self) -> io::Result<bool> {
        let mine = self.file.metadata()?;
        match names::symlink_metadata(&self.path) {
            Ok(now) => Ok((now.dev(), now.ino()) == (mine.dev(), mine.ino())),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Maps it; `None`: it has not even a header.
    pub(super) fn map(&self) -> io::Result<Option<Shm>> {
        match self.file.metadata()?.len() {
            0 => Ok(None),
            _ => Shm::of(&self.file).map(Some),
        }
    }

    /// Makes it longer.
    pub(super) fn lengthen(&self, bytes: usize) -> io::Result<Shm> {
        Shm::lengthen(&self.file, bytes)
    }

    /// Removes its name.
    pub(super) fn remove(self) -> io::Result<()> {
        match self.has_its_name()? {
            true => names::remove_file(&self.path),
            false => Ok(()),
        }
    }
}

/// Opens a file, never through a link, and without waiting for the other end of a pipe.
fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(names::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Whether a process holds a journal's file. The check takes no lock, not even a shared one: a backend that starts just
/// then would find that lock.
pub(super) fn is_held(path: &Path) -> io::Result<bool> {
    let meta = names::symlink_metadata(path)?;
    let (dev, ino) = (meta.dev(), meta.ino());
    Ok(flock_holder((major(dev), minor(dev)), ino).is_some())
}

/// The state of a journal's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The journal is useless: its maker died while making it, everything in it is durable, or it is void. Its image
    /// does not matter then; that may have been resized since.
    Nothing,
    /// It has answered changes.
    Records,
    /// Another version of this program has made it, and it may have answered changes.
    Foreign,
}

impl Content {
    pub(super) fn of(shm: &Shm) -> Content {
        let magic = if shm.len() < 8 { 0 } else { shm.load_u64(0) };
        // It is stored last.
        if magic == 0 {
            return Content::Nothing;
        }
        if magic != MAGIC || shm.len() < HEADER_BYTES {
            return Content::Foreign;
        }
        if shm.load_u64(VOID_AT) != 0 {
            return Content::Nothing;
        }
        let words = usize::try_from(shm.load_u64(24)).unwrap_or(usize::MAX);
        if words >= shm.len() {
            return Content::Foreign;
        }
        let mut keys =
            (0..slots(shm.len(), words)).map(|slot| shm.load_u64(file_bytes(slot, words)));
        match keys.all(|key| key == 0) {
            true => Content::Nothing,
            false => Content::Records,
        }
    }
}
