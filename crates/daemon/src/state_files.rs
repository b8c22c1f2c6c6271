//! A directory of state files in `/run/ferrite`: one small file for each thing that the next daemon has to know.
//!
//! A file is replaced by a rename, so a daemon that dies leaves the old file or the new one. A file that is torn,
//! foreign or of a later version is renamed to `NAME.odd` and logged. It keeps no other file from being read.
//!
//! The files are on tmpfs: they have to outlive this process, and not the host. So nothing is synced.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The longest valid file.
const MAX_BYTES: u64 = 64 << 10;
/// The space that a file has is a multiple of it.
const BLOCK_BYTES: usize = 4096;

/// A state that has a file of its own. Its text is a JSON object with the field `version`.
pub(crate) trait Stated: Serialize + DeserializeOwned {
    /// The version of the files. Others are set aside.
    const VERSION: u32;
    /// What follows when a file is set aside, for the log.
    const WITHOUT: &'static str;

    /// The file's name, without `.json`. It is part of the state: a file with another name is foreign.
    fn name(&self) -> String;

    /// Whether the state makes sense.
    ///
    /// # Errors
    /// What is wrong with it, as the end of a sentence about the file.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// The directory of the state files of one kind.
#[derive(Debug)]
pub(crate) struct StateFiles<S> {
    folder: PathBuf,
    kind: PhantomData<fn() -> S>,
}

impl<S> Clone for StateFiles<S> {
    fn clone(&self) -> StateFiles<S> {
        StateFiles { folder: self.folder.clone(), kind: PhantomData }
    }
}

impl<S: Stated> StateFiles<S> {
    /// The directory, which need not exist yet: without it there are no files.
    pub(crate) fn at(folder: &Path) -> StateFiles<S> {
        StateFiles { folder: folder.to_owned(), kind: PhantomData }
    }

    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn open(folder: &Path) -> io::Result<StateFiles<S>> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        Ok(StateFiles::at(folder))
    }

    /// The directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of the file of this name.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }

    /// Replaces the file of a state.
    ///
    /// # Errors
    /// Errors of the file system. The old file stays.
    pub(crate) fn write(&self, state: &S) -> io::Result<()> {
        replace(&self.file(&state.name()), &serde_json::to_vec(state).map_err(io::Error::other)?)
    }

    /// Removes the file of this name, if it exists. A failure is logged.
    pub(crate) fn remove(&self, name: &str) {
        if let Err(e) = self.try_remove(name) {
            tracing::warn!("cannot remove {}: {e}", self.file(name).display());
        }
    }

    /// Removes the file of this name, if it exists.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn try_remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.file(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Reads the file of this name. An invalid file is set aside, and counts as missing.
    ///
    /// # Errors
    /// The file cannot be read now, for want of descriptors for example. It may be valid.
    pub(crate) fn read(&self, name: &str) -> io::Result<Option<S>> {
        read_or_set_aside(&self.file(name))
    }

    /// Reads the file of this name without setting an invalid one aside.
    pub(crate) fn peek(&self, name: &str) -> Option<S> {
        read(&self.file(name)).ok()
    }

    /// Reads all files, in no order. Half-written files are removed, and invalid ones are set aside. Files that
    /// cannot be read now are left out.
    pub(crate) fn all(&self) -> Vec<S> {
        let mut states = Vec::new();
        for path in self.paths() {
            match path.extension().and_then(|extension| extension.to_str()) {
                // A daemon was killed before it renamed the file.
                Some("new") => drop(fs::remove_file(&path)),
                Some("json") => states.extend(read_or_set_aside::<S>(&path).ok().flatten()),
                _ => {}
            }
        }
        states
    }

    /// Reads all files, in no order, without setting invalid ones aside or removing any.
    pub(crate) fn peek_all(&self) -> Vec<S> {
        let files = self.paths().filter(|path| path.extension().is_some_and(|e| e == "json"));
        files.filter_map(|path| read(&path).ok()).collect()
    }

    /// All that is in the directory.
    pub(crate) fn paths(&self) -> impl Iterator<Item = PathBuf> + use<S> {
        fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path())
    }
}

/// Gives a state file this text: by a rename, so a process that dies leaves the old file or the new
/// one. A file that has the text already is left alone, whatever happens to its file system.
///
/// Without space for a second file it is written in place, by one write within the space that it has.
/// The death of a process does not tear that write. After the host's death these files are gone.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|old| old.trim_ascii_end() == text) {
        return Ok(());
    }
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(&new).and_then(|mut file| file.write_all(text));
    match written.and_then(|()| fs::rename(&new, path)) {
        Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            let _ = fs::remove_file(&new);
            write_in_place(path, text).map_err(|_| e)
        }
        replaced => replaced,
    }
}

fn write_in_place(path: &Path, text: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let old = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut text = text.to_vec();
    if text.len() > old.next_multiple_of(BLOCK_BYTES) {
        return Err(io::ErrorKind::StorageFull.into());
    }
    // A reader ignores empty lines behind the text.
    text.resize(text.len().max(old), b'\n');
    match file.write_at(&text, 0)? {
        all if all == text.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Why a state file was not read.
enum ReadError {
    Missing,
    /// The contents are invalid, for this reason.
    Invalid(String),
    /// The file cannot be read now.
    Io(io::Error),
}

/// The version field alone, which every version has.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

fn read_or_set_aside<S: Stated>(path: &Path) -> io::Result<Option<S>> {
    match read(path) {
        Ok(state) => Ok(Some(state)),
        Err(ReadError::Missing) => Ok(None),
        Err(ReadError::Io(e)) => Err(e),
        Err(ReadError::Invalid(why)) => {
            set_aside(path, &why, S::WITHOUT);
            Ok(None)
        }
    }
}

/// Renames an invalid file: it is logged once, and an administrator can look at it.
fn set_aside(path: &Path, why: &str, without: &str) {
    let aside = path.with_extension("odd");
    tracing::warn!(
        "{} is invalid and renamed to {}: {why}; {without}",
        path.display(),
        aside.display()
    );
    if let Err(e) = fs::rename(path, &aside) {
        tracing::warn!("cannot rename {}: {e}", path.display());
    }
}

fn read<S: Stated>(path: &Path) -> Result<S, ReadError> {
    let invalid = |e: &dyn std::fmt::Display| ReadError::Invalid(e.to_string());
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(ReadError::Missing),
        opened => opened.map_err(ReadError::Io)?,
    };
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(|e| match e.kind() {
        io::ErrorKind::IsADirectory => invalid(&e),
        _ => ReadError::Io(e),
    })?;
    if text.len() as u64 > MAX_BYTES {
        return Err(invalid(&"it is too long"));
    }
    // Later versions may have fields that this one does not know.
    let Versioned { version } = serde_json::from_slice(&text).map_err(|e| invalid(&e))?;
    if version != S::VERSION {
        let known = S::VERSION;
        return Err(invalid(&format!("it has version {version}, and this daemon reads {known}")));
    }
    let state: S = serde_json::from_slice(&text).map_err(|e| invalid(&e))?;
    let name = state.name();
    if path.file_stem().is_none_or(|stem| stem != name.as_str()) {
        return Err(invalid(&format!("it is of {name}")));
    }
    state.check().map_err(|why| invalid(&why))?;
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Thing {
        version: u32,
        name: String,
        text: String,
    }

    impl Stated for Thing {
        const VERSION: u32 = 1;
        const WITHOUT: &'static str = "the thing is gone";

        fn name(&self) -> String {
            self.name.clone()
        }
    }

    fn thing(text: &str) -> Thing {
        Thing { version: 1, name: "a".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_file_that_is_written_in_place_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = StateFiles::open(&dir.path().join("things")).unwrap();
        files.write(&thing("long enough")).unwrap();
        let (path, shorter) = (files.file("a"), thing("x"));
        write_in_place(&path, &serde_json::to_vec(&shorter).unwrap()).unwrap();
        assert_eq!(files.all(), [thing("x")]);
        assert_eq!(files.peek("a"), Some(thing("x")));
        // A text that does not fit into the blocks of the old one is refused, and the old text stays.
        let longer = serde_json::to_vec(&thing(&"y".repeat(BLOCK_BYTES))).unwrap();
        let e = write_in_place(&path, &longer).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::StorageFull);
        assert_eq!(files.read("a").unwrap(), Some(thing("x")));
    }

    #[test]
    fn a_missing_directory_has_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = StateFiles::<Thing>::at(&dir.path().join("things"));
        assert_eq!(files.all(), []);
        assert_eq!(files.peek_all(), []);
        files.try_remove("a").unwrap();
        files.write(&thing("x")).unwrap_err();
    }
}
