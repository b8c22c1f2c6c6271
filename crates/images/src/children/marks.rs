//! A parent's list of its children in other folders, and of children whose names are not those of images: a file beside
//! the parent, `PARENT.ferrite-children`, with a line for each child.
//!
//! It is a file because every file system has files. An attribute of the parent would need permission to write to the
//! parent. Besides, an administrator can read and change a file.
//!
//! A line names the image that the child was made on, the child's file system, its file there, and its path: `of=PLACE
//! on=FILE-SYSTEM handle=HEX file:///PATH`, or `of=PLACE device=PLACE file:///PATH` for a child on a block device.
//! These words stay the same when the host restarts. The URL is the last word: a reader that does not know one of the
//! others takes the line for an invalid one.
//!
//! A child is gone if its file system is there and reports that the file no longer exists: a handle belongs to one
//! file, whatever its name. Without a handle, or without the permission to use it, an empty path proves nothing: the
//! child may have been moved. On a device the child is gone if the device is there without it. A line without the
//! child's file system counts as a child, and so does an invalid line. A child whose chain no longer leads to the
//! parent does not count. Lines of both kinds are left out when the next line is added. At that time a line also gets
//! the present file of its child.
//!
//! A file that still has its temporary name ([`NEW`]) is no child, although its line is written before it gets its own
//! name. Only the process that makes it gives it that name. Until then the process keeps the parent open, so no other
//! process opens the parent for writing. If the process ends before, by a signal or by a power cut, no process gives the
//! file its name any more: the next one that makes a file of this name removes it and makes it anew. So the parent may be
//! written to, and no later snapshot takes the place of what was written.
//!
//! A rename of the parent leaves the list behind. So in the parent's folder the lines of other lists that name it by
//! its place are the parent's, too.
//!
//! The order of adding a child, before the child gets its name, or another one: write the new list under another name
//! and sync it; rename it over the old one; sync the folder. The list stays locked until the child has its name:
//! without the lock the child would look as if it was gone.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk_base::plain;
use ferrite_host::directory::Directory;
use ferrite_host::names;
use ferrite_host::naming::Handle;
use rustix::fs::{FlockOperation, OFlags, flock, fstat};

use super::NEW;
use crate::vhd::{decode, unescape};
use ferrite_host::place::{self, Place, lasting_file_system, look_at};

/// The suffix after the parent's name.
const SUFFIX: &str = ".ferrite-children";
/// The suffix of a list that is being written. It allows no longer names than `SUFFIX`.
const NEXT: &str = ".ferrite-list.new";
/// The words before the image that a child was made on, and before the child's file system or device.
const OF: &str = "of=";
const ON: &str = "on=";
const DEVICE: &str = "device=";
/// The word before the child's handle in its file system, in hexadecimal digits.
const HANDLE: &str = "handle=";
/// The word before the child's path.
const URL: &str = "file://";
/// The largest list: 100,000 children. A larger file is not a list.
const MAX_BYTES: u64 = 16 << 20;
/// How often other processes may replace a list before it is locked.
const MAX_TRIES: u32 = 1 << 16;

/// A parent's record of a child: where it was made, and its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Where the child was made.
    pub child: PathBuf,
    medium: Medium,
    /// The handle of its file, where the file system has handles.
    handle: Option<Handle>,
    /// The image that it was made on; `None`: the line does not say.
    parent: Option<Place>,
}

/// The file system or device of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Medium {
    FileSystem(String),
    Device(Place),
    /// A word that may not identify the medium: `device`, or a number that a file system has only until the host
    /// restarts.
    Unsure(String),
}

/// A line of the list beside a parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// It names a child.
    Mark(Mark),
    /// An invalid line, which may stand for a child.
    Unknown(Vec<u8>),
}

/// The present state of a marked child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The chain of the image at this path leads to the parent.
    Child(PathBuf),
    /// The file is gone, or its chain does not lead to the parent.
    Gone,
    /// The reason why the state is not known.
    Unknown(String),
}

/// The parent whose marks are examined.
pub(crate) trait Family {
    /// Whether the chain of the image at a path leads to the parent.
    fn is_below(&self, path: &Path) -> io::Result<bool>;
    /// Whether an image has any parent; a file that is no image any more has none.
    fn has_parent(&self, path: &Path) -> io::Result<bool>;
    /// Whether a file, by its device and inode, does not count: the parent itself, or the image of the caller.
    fn is_excepted(&self, file: (u64, u64)) -> bool;
}

/// The present place of a mark's file.
enum Whereabouts {
    AtPath,
    /// It is gone, or another file has its path and the handle leads nowhere.
    Nowhere,
    /// It has its temporary name: it was never finished.
    Unfinished,
    /// It has another name.
    Elsewhere(OwnedFd),
    /// There is no handle, or the kernel does not tell.
    Unknown(Option<io::Error>),
}

impl Mark {
    /// A mark for a child of `parent` that is about to be made in the file `made`. `None`: it is made on a device.
    ///
    /// # Errors
    /// The parent or the child cannot be examined.
    pub fn of(parent: &Path, child: PathBuf, made: Option<&Path>) -> io::Result<Mark> {
        let (medium, handle) = match made {
            None => (Medium::Device(Place::at(&child)?), None),
            Some(made) => (
                Medium::FileSystem(lasting_file_system(&child)?),
                Handle::of(look_at(made)?.as_fd())?,
            ),
        };
        Ok(Mark { child, medium, handle, parent: Some(Place::lasting(parent)?) })
    }

    fn parse(line: &[u8]) -> Option<Mark> {
        let (first, rest) = str::from_utf8(line).ok()?.split_once(' ')?;
        let (parent, medium, rest) = match first.strip_prefix(OF) {
            Some(place) => {
                let (medium, rest) = rest.split_once(' ')?;
                let medium = match (medium.strip_prefix(ON), medium.strip_prefix(DEVICE)) {
                    (Some(system), _) => Medium::FileSystem(plain(system)?),
                    (None, device) => Medium::Device(Place::from_text(plain(device?)?)),
                };
                (Some(Place::from_text(plain(place)?)), medium, rest)
            }
            None if first == "device" || u64::from_str_radix(first, 16).is_ok() => {
                (None, Medium::Unsure(first.to_owned()), rest)
            }
            None => return None,
        };
        let (handle, url) = match rest.strip_prefix(HANDLE) {
            Some(rest) => {
                let (digits, url) = rest.split_once(' ')?;
                (Some(Handle::from_bytes(&from_hex(digits)?)?), url)
            }
            None => (None, rest),
        };
        let child = decode(*b"MacX", url.as_bytes()).ok()?.into_iter().next()?;
        Some(Mark { child, medium, handle, parent })
    }

    fn line(&self) -> Vec<u8> {
        let mut line = Vec::new();
        let mut put = |word: &str, text: &[u8]| {
            line.extend_from_slice(word.as_bytes());
            line.extend(escape(text));
        };
        if let Some(place) = &self.parent {
            put(OF, place.text().as_bytes());
            put(" ", b"");
        }
        match &self.medium {
            Medium::FileSystem(system) => put(ON, system.as_bytes()),
            Medium::Device(place) => put(DEVICE, place.text().as_bytes()),
            Medium::Unsure(word) => put("", word.as_bytes()),
        }
        put(" ", b"");
        if let Some(handle) = &self.handle {
            put(HANDLE, hex(&handle.to_bytes()).as_bytes());
            put(" ", b"");
        }
        put(URL, self.child.as_os_str().as_bytes());
        put("\n", b"");
        line
    }

    /// Whether the line names another parent.
    pub(crate) fn is_of_another(&self, parent: &Place) -> bool {
        self.parent.as_ref().is_some_and(|its| its != parent)
    }

    /// Finds the present state of the child.
    pub(crate) fn state(&self, family: &impl Family) -> State {
        let child = self.child.display();
        match family.is_below(&self.child) {
            Ok(true) => State::Child(self.child.clone()),
            Err(e) if !matches!(e.kind(), NotFound | NotADirectory) => {
                State::Unknown(format!("{child} was made on it, and cannot be read: {e}"))
            }
            // The file is missing, or the path has another file.
            Ok(false) | Err(_) => self.missing(family),
        }
    }

    /// The state if no child of the parent is at the path.
    fn missing(&self, family: &impl Family) -> State {
        let why = match &self.medium {
            Medium::FileSystem(_) if self.is_mounted() => match self.whereabouts() {
                Whereabouts::AtPath => match family.has_parent(&self.child) {
                    Ok(_) => return State::Gone,
                    Err(_) => "and what it stands on cannot be read in it any more",
                },
                Whereabouts::Nowhere | Whereabouts::Unfinished => return State::Gone,
                Whereabouts::Elsewhere(file) => return self.moved(&file, family),
                Whereabouts::Unknown(error) => return self.unknown(error),
            },
            Medium::FileSystem(_) => "and that file system is not mounted now",
            Medium::Device(place) => match Place::at(&self.child) {
                Ok(now) if now == *place => return State::Gone,
                _ => "and is not there",
            },
            Medium::Unsure(_) => "and is not there; its line does not say on which volume",
        };
        State::Unknown(format!("{} was made on it, {why}", self.child.display()))
    }

    /// The state if its file may have been deleted or moved.
    fn unknown(&self, error: Option<io::Error>) -> State {
        let child = self.child.display();
        let there =
            if names::exists(&self.child) { "another image is there" } else { "is not there" };
        let why = error.map_or_else(String::new, |e| format!(" ({e})"));
        State::Unknown(format!(
            "{child} was made on it, and {there}; nothing says whether it was deleted or moved{why}"
        ))
    }

    fn is_mounted(&self) -> bool {
        let now = lasting_file_system(&self.child);
        now.is_ok_and(|now| matches!(&self.medium, Medium::FileSystem(system) if *system == now))
    }

    /// The place of its file, if its file system is there.
    fn whereabouts(&self) -> Whereabouts {
        if self.is_at_path() {
            return Whereabouts::AtPath;
        }
        let Some(handle) = &self.handle else { return Whereabouts::Unknown(None) };
        if handle_at(&with(&self.child, NEW)).as_ref() == Some(handle) {
            return Whereabouts::Unfinished;
        }
        match place::folder_above(&self.child).map(|folder| handle.open_on(folder.as_fd())) {
            Some(Ok(Some(file))) => Whereabouts::Elsewhere(file),
            Some(Ok(None)) => Whereabouts::Nowhere,
            Some(Err(e)) => Whereabouts::Unknown(Some(e)),
            None => Whereabouts::Unknown(None),
        }
    }

    /// Whether its file is known and is not the one at its path.
    pub(crate) fn is_displaced(&self) -> bool {
        self.handle.is_some() && !self.is_at_path()
    }

    /// Whether the file at its path is its file.
    fn is_at_path(&self) -> bool {
        self.handle.is_some() && handle_at(&self.child) == self.handle
    }

    /// The state if its file has another name. Only the kernel's cache knows the name.
    fn moved(&self, file: &OwnedFd, family: &impl Family) -> State {
        let child = self.child.display();
        let link = names::of_descriptor(file.as_fd());
        let identity = match fstat(file) {
            Ok(stat) => (stat.st_dev, stat.st_ino),
            Err(e) => return State::Unknown(format!("{child} was moved, and cannot be read: {e}")),
        };
        if family.is_excepted(identity) || matches!(family.has_parent(&link), Ok(false)) {
            return State::Gone;
        }
        let is_it = |path: &PathBuf| {
            names::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == identity)
        };
        let now = match names::read_link(&link).ok().filter(is_it) {
            Some(path) if matches!(family.is_below(&path), Ok(true)) => return State::Child(path),
            Some(path) => format!("it is {} now", path.display()),
            None => format!("find MOUNT-POINT -xdev -inum {} finds it", identity.1),
        };
        State::Unknown(format!("{child} was made on it and was moved ({now})"))
    }

    /// The mark with the file that is now at its path: of an image that was made again there, or of a line from before
    /// handles.
    pub(crate) fn refreshed(mut self) -> Mark {
        let is_new = || self.handle.is_none() || matches!(self.whereabouts(), Whereabouts::Nowhere);
        if self.is_mounted() && is_new() {
            self.handle = handle_at(&self.child);
        }
        self
    }
}

fn handle_at(path: &Path) -> Option<Handle> {
    Handle::of(look_at(path).ok()?.as_fd()).ok()?
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let pair = |pair: &[u8]| match pair.iter().all(u8::is_ascii_hexdigit) {
        true => u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok(),
        false => None,
    };
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|p| pair(p)).collect())?
}

/// A text as one word, also with a `%` or a line break in it.
fn escape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for byte in text {
        match byte {
            b'!'..=b'~' if *byte != b'%' => out.push(*byte),
            _ => out.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    out
}

fn plain(word: &str) -> Option<String> {
    String::from_utf8(unescape(word.as_bytes())).ok().filter(|text| !text.is_empty())
}

/// The path of the list of marks of the image in `file`.
pub fn beside(file: &Path) -> PathBuf {
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

    pub(crate) fn mark(&self) -> Option<&Mark> {
        match self {
            Line::Mark(mark) => Some(mark),
            Line::Unknown(_) => None,
        }
    }

    /// Whether it names the image at this path as the child.
    pub fn is_for(&self, child: &Path) -> bool {
        self.mark().is_some_and(|mark| mark.child == child)
    }

    /// Whether it is a child of the image at this place.
    pub(crate) fn is_of(&self, parent: &Place) -> bool {
        self.mark().is_some_and(|mark| mark.parent.as_ref() == Some(parent))
    }

    /// The mark with the parent `now`, if its parent was `then`.
    pub(crate) fn handed_over(mut self, then: &Place, now: &Place) -> Line {
        if let Line::Mark(Mark { parent: Some(parent), .. }) = &mut self
            && parent == then
        {
            parent.clone_from(now);
        }
        self
    }
}

/// Reads the marks of the image in `file`. Without a list there are none.
///
/// # Errors
/// The list cannot be read.
pub fn read(file: &Path) -> io::Result<Vec<Line>> {
    let text = match plain::read(&beside(file), MAX_BYTES) {
        // No list can exist beside a file with so long a name.
        Err(e) if matches!(e.kind(), NotFound | InvalidFilename) => return Ok(Vec::new()),
        text => text?,
    };
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    Ok(lines.map(Line::parse).collect())
}

/// Former names of the image in `file`: those of other lists in its folder with a line of its `place`; with `doubtful`,
/// also those of lists that cannot be read.
pub(crate) fn former_names(file: &Path, place: &Place, doubtful: bool) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in names::read_dir(file.parent().unwrap_or(Path::new("/")))? {
        let list = entry?.path();
        let Some(name) = list.as_os_str().as_bytes().strip_suffix(SUFFIX.as_bytes()) else {
            continue;
        };
        let name = Path::new(OsStr::from_bytes(name));
        if name != file
            && read(name).map_or(doubtful, |lines| lines.iter().any(|line| line.is_of(place)))
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// The lock of a list of marks, which no other process changes until this is dropped.
#[derive(Debug)]
pub struct Held {
    _lock: File,
    /// The mark that was added. `None`: the list had it before.
    pub added: Option<Mark>,
}

/// Adds a mark to the list of the image in `file`, durably; see the module text. `keep` decides about the other lines.
pub(crate) fn leave(
    directory: &dyn Directory,
    file: &Path,
    mark: &Mark,
    keep: impl Fn(Line) -> Option<Line>,
) -> io::Result<Held> {
    let list = List::lock(directory, file)?;
    let old = read(file)?;
    let mark = Line::Mark(mark.clone());
    let added = if old.contains(&mark) { None } else { mark.mark().cloned() };
    let mut lines = distinct(old.into_iter().filter_map(keep).collect());
    // While it is about to be renamed, its file still has the name in another line.
    if !lines.contains(&mark) {
        lines.push(mark);
    }
    let lock = list.replace(&lines)?;
    Ok(Held { _lock: lock, added })
}

/// Reviews the list without adding a mark. An empty list is removed.
pub(crate) fn review(
    directory: &dyn Directory,
    file: &Path,
    keep: impl Fn(Line) -> Option<Line>,
) -> io::Result<()> {
    let list = List::lock(directory, file)?;
    let lines = distinct(read(file)?.into_iter().filter_map(keep).collect());
    list.replace(&lines).map(drop)
}

/// The locked list of an image. On failure an empty list is removed again.
struct List<'a> {
    directory: &'a dyn Directory,
    file: &'a Path,
    lock: File,
}

impl<'a> List<'a> {
    fn lock(directory: &'a dyn Directory, file: &'a Path) -> io::Result<List<'a>> {
        Ok(List { directory, file, lock: lock(directory, &beside(file))? })
    }

    /// Replaces the list by these lines; returns the lock of the new list.
    fn replace(self, lines: &[Line]) -> io::Result<File> {
        let lines: Vec<u8> = lines.iter().flat_map(Line::text).collect();
        let path = beside(self.file);
        let folder = path.parent().unwrap_or(Path::new("/"));
        if lines.is_empty() {
            self.directory.remove(&path)?;
            self.directory.sync(folder)?;
            return self.lock.try_clone();
        }
        let next = with(self.file, NEXT);
        match self.directory.remove(&next) {
            Err(e) if e.kind() != NotFound => return Err(named(&next, e)),
            _ => {}
        }
        let mut new = File::from(self.directory.create_new(&next)?);
        // No process waits for this one yet.
        flock(&new, FlockOperation::NonBlockingLockExclusive)?;
        let written = new.write_all(&lines).and_then(|()| new.sync_all());
        if let Err(e) = written.and_then(|()| self.directory.rename(&next, &path)) {
            let _ = self.directory.remove(&next);
            return Err(e);
        }
        self.directory.sync(folder)?;
        Ok(new)
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        let path = beside(self.file);
        // A file of that name with another identity belongs to another process.
        if has_name(&self.lock, &path).unwrap_or(false)
            && self.lock.metadata().is_ok_and(|list| list.len() == 0)
        {
            let _ = self.directory.remove(&path);
        }
    }
}

/// Each line once, without those whose file is at the path of another line.
pub(crate) fn distinct(lines: Vec<Line>) -> Vec<Line> {
    let file = |line: &Line| {
        let mark = line.mark()?;
        let Medium::FileSystem(system) = &mark.medium else { return None };
        let parent = mark.parent.as_ref()?.text().to_owned();
        Some((parent, system.clone(), mark.handle.as_ref()?.to_bytes()))
    };
    let is_at_path = |line: &Line| line.mark().is_some_and(Mark::is_at_path);
    let found: HashSet<_> = lines.iter().filter(|line| is_at_path(line)).filter_map(file).collect();
    let is_followed =
        |line: &Line| file(line).is_some_and(|file| found.contains(&file)) && !is_at_path(line);
    let mut seen = HashSet::new();
    lines.into_iter().filter(|line| !is_followed(line) && seen.insert(line.text())).collect()
}

/// Locks the list of that name, which is made if there is none.
fn lock(directory: &dyn Directory, path: &Path) -> io::Result<File> {
    for _ in 0..MAX_TRIES {
        let list = match plain::open(path, OFlags::RDONLY) {
            Err(e) if e.kind() == NotFound => match directory.create_new(path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => File::from(made?),
            },
            list => list.map_err(|e| named(path, e))?,
        };
        flock(&list, FlockOperation::LockExclusive)?;
        // Its former holder may have replaced it.
        if has_name(&list, path)? {
            return Ok(list);
        }
    }
    Err(named(path, io::ErrorKind::ResourceBusy.into()))
}

fn has_name(list: &File, path: &Path) -> io::Result<bool> {
    let (list, now) = (list.metadata()?, names::symlink_metadata(path));
    Ok(now.is_ok_and(|now| (now.dev(), now.ino()) == (list.dev(), list.ino())))
}

/// An error about the list, since the caller's context names another file.
fn named(list: &Path, e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", list.display()))
}
