//! What a parent knows of its children in other folders, or without the name of an image: a file
//! beside it, `PARENT.ferrite-children`, with a line for each.
//!
//! A file, since any file system has files, also for who may not write to the parent, as an
//! attribute of the parent would need; and since an administrator can read and change it.
//!
//! A line says where the child was made and on which file system: `FSID file:///PATH`, `device` for
//! the FSID of a block device. A child that is not there is gone, unless its file system is not
//! there, either. A line that makes no sense counts. A child does not count whose chain does not lead to the parent any more. Lines of
//! both kinds are left out when the next one is added.
//!
//! The order of adding one, before the child gets its name, or another one: the new list under another name, synced;
//! that over the old one; the folder, synced. The list stays locked until the child has its name:
//! before that, it would look as if it was gone.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_io::directory::Directory;
use rustix::fs::{FlockOperation, flock, statvfs};

use crate::vhd::decode;

/// Behind the parent's name.
const SUFFIX: &str = ".ferrite-children";
/// Behind that: a list on its way.
const NEXT: &str = ".new";
/// What stands for the file system of a child on a block device.
const DEVICE: &str = "device";
/// A list of more than this is nobody's: 100,000 children.
const MAX_BYTES: u64 = 16 << 20;

/// Where a child was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) child: PathBuf,
    /// Of its file system; none: it is a block device.
    file_system: Option<u64>,
}

/// A line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Mark(Mark),
    /// What makes no sense: somebody may have meant a child by it.
    Unknown(Vec<u8>),
}

/// What has become of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Its chain leads to the parent.
    Child,
    /// It is no more, or its chain does not lead there.
    Gone,
    /// Why that is not known.
    Unknown(String),
}

impl Mark {
    /// Of a child that is about to be made.
    pub(crate) fn of(child: PathBuf, is_device: bool) -> io::Result<Mark> {
        let file_system = if is_device { None } else { Some(file_system(&child)?) };
        Ok(Mark { child, file_system })
    }

    fn parse(line: &[u8]) -> Option<Mark> {
        let (file_system, url) = str::from_utf8(line).ok()?.split_once(' ')?;
        let file_system = match file_system {
            DEVICE => None,
            id => Some(u64::from_str_radix(id, 16).ok()?),
        };
        let child = decode(*b"MacX", url.as_bytes()).ok()?.into_iter().next()?;
        Some(Mark { child, file_system })
    }

    fn line(&self) -> Vec<u8> {
        let mut line = match self.file_system {
            None => DEVICE.to_owned(),
            Some(id) => format!("{id:016x}"),
        }
        .into_bytes();
        line.push(b' ');
        line.extend(url(&self.child));
        line.push(b'\n');
        line
    }

    /// Looks what has become of it; `is_below` says whether the chain of the image at a path leads to
    /// the parent.
    pub(crate) fn state(&self, is_below: impl Fn(&Path) -> io::Result<bool>) -> State {
        let child = self.child.display();
        match is_below(&self.child) {
            Ok(true) => State::Child,
            Err(e) if !matches!(e.kind(), NotFound | NotADirectory) => {
                State::Unknown(format!("{child} was made on it, and cannot be read: {e}"))
            }
            // It is not there, or something else is.
            Ok(false) | Err(_) => match self.file_system {
                None if self.child.exists() => State::Gone,
                None => State::Unknown(format!("{child} was made on it, and is not there")),
                Some(id) if file_system(&self.child).is_ok_and(|now| now == id) => State::Gone,
                Some(_) => State::Unknown(format!(
                    "{child} was made on it, and that file system is not mounted now"
                )),
            },
        }
    }
}

/// A path in one line, for who unescapes it: also one that has a `%` or a line's end itself.
fn url(path: &Path) -> Vec<u8> {
    let mut out = b"file://".to_vec();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' '..=b'~' if *byte != b'%' => out.push(*byte),
            _ => out.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    out
}

/// The file system that a path is on, or would be.
fn file_system(path: &Path) -> io::Result<u64> {
    let there = path.ancestors().skip(1).find(|folder| folder.is_dir());
    Ok(statvfs(there.unwrap_or(Path::new("/")))?.f_fsid)
}

/// Where the marks of the image in `file` are.
pub(crate) fn beside(file: &Path) -> PathBuf {
    with(file, SUFFIX)
}

fn with(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

impl Line {
    fn parse(line: &[u8]) -> Line {
        Mark::parse(line).map_or_else(|| Line::Unknown(line.to_owned()), Line::Mark)
    }

    fn text(&self) -> Vec<u8> {
        match self {
            Line::Mark(mark) => mark.line(),
            Line::Unknown(line) => [line, &b"\n"[..]].concat(),
        }
    }

    pub(crate) fn is_of(&self, child: &Path) -> bool {
        matches!(self, Line::Mark(mark) if mark.child == child)
    }
}

/// The marks of the image in `file`.
pub(crate) fn read(file: &Path) -> io::Result<Vec<Line>> {
    let path = beside(file);
    let text = match fs::metadata(&path) {
        // Beside a file with so long a name there can be none.
        Err(e) if matches!(e.kind(), NotFound | InvalidFilename) => return Ok(Vec::new()),
        Err(e) => return Err(e),
        Ok(meta) if meta.len() > MAX_BYTES => return Err(io::ErrorKind::FileTooLarge.into()),
        Ok(_) => fs::read(&path)?,
    };
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    Ok(lines.map(Line::parse).collect())
}

/// The marks, which nobody else changes until this is dropped.
#[derive(Debug)]
pub(crate) struct Held(#[expect(dead_code, reason = "it is the lock")] File);

/// Adds a mark, if there is one, to those of the image in `file`, durably; see the module text.
/// `keep` says of the others whether they are still of use. Without any, there is no list.
pub(crate) fn leave(
    directory: &dyn Directory,
    file: &Path,
    mark: Option<&Mark>,
    keep: impl Fn(&Mark) -> bool,
) -> io::Result<Held> {
    let path = beside(file);
    let folder = path.parent().unwrap_or(Path::new("/"));
    let old = lock(directory, &path)?;
    let is_of = |child: &Path| mark.is_some_and(|mark| mark.child == child);
    let others = read(file)?.into_iter().filter(|line| match line {
        Line::Mark(other) => !is_of(&other.child) && keep(other),
        Line::Unknown(_) => true,
    });
    let lines = others.chain(mark.cloned().map(Line::Mark));
    let lines: Vec<u8> = lines.flat_map(|line| line.text()).collect();
    if lines.is_empty() {
        directory.remove(&path)?;
        directory.sync(folder)?;
        return Ok(Held(old));
    }
    let next = with(&path, NEXT);
    match directory.remove(&next) {
        Err(e) if e.kind() != NotFound => return Err(e),
        _ => {}
    }
    let mut new = File::from(directory.create_new(&next)?);
    // Nobody waits for this one yet.
    flock(&new, FlockOperation::NonBlockingLockExclusive)?;
    new.write_all(&lines)?;
    new.sync_all()?;
    directory.rename(&next, &path)?;
    directory.sync(folder)?;
    Ok(Held(new))
}

/// Locks the list that has the name, made if there is none.
fn lock(directory: &dyn Directory, path: &Path) -> io::Result<File> {
    loop {
        let list = match File::open(path) {
            Err(e) if e.kind() == NotFound => match directory.create_new(path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => File::from(made?),
            },
            list => list?,
        };
        flock(&list, FlockOperation::LockExclusive)?;
        // Whoever had it may have put another one in its place.
        let meta = list.metadata()?;
        if fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (meta.dev(), meta.ino())) {
            return Ok(list);
        }
    }
}
