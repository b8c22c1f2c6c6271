//! What a parent knows of its children in other folders, or without the name of an image: a file
//! beside it, `PARENT.ferrite-children`, with a line for each.
//!
//! A file, since any file system has files, also for who may not write to the parent, as an
//! attribute of the parent would need; and since an administrator can read and change it.
//!
//! A line says on which image the child was made, on which file system, and where:
//! `of=PLACE on=FILE-SYSTEM file:///PATH`, or `device=PLACE` in the middle for a child on a block device, in
//! words that stay the same when the host starts again. A child that is not there is gone, if its
//! file system or device is there. A line that does not say which that is counts, and so does one that makes
//! no sense. A child does not count whose chain does not lead to the parent any more. Lines of both
//! kinds are left out when the next one is added.
//!
//! Whoever renames the parent leaves the list: another one in its folder that names it by its place is
//! the parent's, too, in those lines only.
//!
//! The order of adding one, before the child gets its name, or another one: the new list under another name, synced;
//! that over the old one; the folder, synced. The list stays locked until the child has its name:
//! before that, it would look as if it was gone.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_io::directory::Directory;
use rustix::fs::{FlockOperation, flock};

use crate::place::{Place, lasting_file_system};
use crate::plain;
use crate::vhd::{decode, unescape};

/// Behind the parent's name.
const SUFFIX: &str = ".ferrite-children";
/// Behind that: a list on its way.
const NEXT: &str = ".new";
/// Before what a child was made on, and before the child's file system or device.
const OF: &str = "of=";
const ON: &str = "on=";
const DEVICE: &str = "device=";
/// A list of more than this is nobody's: 100,000 children.
const MAX_BYTES: u64 = 16 << 20;
/// How often a list may be replaced by others before it is locked.
const MAX_TRIES: u32 = 1 << 16;

/// Where a child was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) child: PathBuf,
    medium: Medium,
    /// On which image; none: it does not say.
    parent: Option<Place>,
}

/// What a child is on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Medium {
    FileSystem(String),
    Device(Place),
    /// A word that names none for sure: `device`, or a number that a file system has only until the
    /// host goes down.
    Unsure(String),
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
    /// Of a child of `parent` that is about to be made.
    pub(crate) fn of(parent: &Path, child: PathBuf, is_device: bool) -> io::Result<Mark> {
        let medium = match is_device {
            true => Medium::Device(Place::at(&child)?),
            false => Medium::FileSystem(lasting_file_system(&child)?),
        };
        Ok(Mark { child, medium, parent: Some(Place::lasting(parent)?) })
    }

    fn parse(line: &[u8]) -> Option<Mark> {
        let (first, rest) = str::from_utf8(line).ok()?.split_once(' ')?;
        let (parent, medium, url) = match first.strip_prefix(OF) {
            Some(place) => {
                let (medium, url) = rest.split_once(' ')?;
                let medium = match (medium.strip_prefix(ON), medium.strip_prefix(DEVICE)) {
                    (Some(system), _) => Medium::FileSystem(plain(system)?),
                    (None, device) => Medium::Device(Place::from_text(plain(device?)?)),
                };
                (Some(Place::from_text(plain(place)?)), medium, url)
            }
            None if first == "device" || u64::from_str_radix(first, 16).is_ok() => {
                (None, Medium::Unsure(first.to_owned()), rest)
            }
            None => return None,
        };
        let child = decode(*b"MacX", url.as_bytes()).ok()?.into_iter().next()?;
        Some(Mark { child, medium, parent })
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
        put(" file://", self.child.as_os_str().as_bytes());
        put("\n", b"");
        line
    }

    /// Whether it says that it is of another one.
    pub(crate) fn is_of_another(&self, parent: &Place) -> bool {
        self.parent.as_ref().is_some_and(|its| its != parent)
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
            Ok(false) | Err(_) => self.missing(),
        }
    }

    /// What has become of it if no child of the parent is there.
    fn missing(&self) -> State {
        let child = self.child.display();
        let (is_there, why) = match &self.medium {
            Medium::FileSystem(system) => (
                lasting_file_system(&self.child).is_ok_and(|now| now == *system),
                "and that file system is not mounted now",
            ),
            Medium::Device(place) => {
                (Place::at(&self.child).is_ok_and(|now| now == *place), "and is not there")
            }
            Medium::Unsure(_) => (false, "and is not there; its line does not say on which volume"),
        };
        if is_there {
            return State::Gone;
        }
        State::Unknown(format!("{child} was made on it, {why}"))
    }
}

/// A text in one word: also one that has a `%` or a line's end itself.
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

    pub(crate) fn mark(&self) -> Option<&Mark> {
        match self {
            Line::Mark(mark) => Some(mark),
            Line::Unknown(_) => None,
        }
    }

    pub(crate) fn is_for(&self, child: &Path) -> bool {
        self.mark().is_some_and(|mark| mark.child == child)
    }

    /// Whether it is of the image at this place.
    pub(crate) fn is_of(&self, parent: &Place) -> bool {
        self.mark().is_some_and(|mark| mark.parent.as_ref() == Some(parent))
    }
}

/// The marks of the image in `file`.
pub(crate) fn read(file: &Path) -> io::Result<Vec<Line>> {
    let text = match plain::read(&beside(file), MAX_BYTES) {
        // Beside a file with so long a name there can be none.
        Err(e) if matches!(e.kind(), NotFound | InvalidFilename) => return Ok(Vec::new()),
        text => text?,
    };
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    Ok(lines.map(Line::parse).collect())
}

/// Names of the image in `file` before it was renamed: those of other lists in its folder with a line
/// of its `place`; with `doubtful`, also those of lists that cannot be read.
pub(crate) fn former_names(file: &Path, place: &Place, doubtful: bool) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(file.parent().unwrap_or(Path::new("/")))? {
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

/// The marks, which nobody else changes until this is dropped.
#[derive(Debug)]
pub(crate) struct Held(#[expect(dead_code, reason = "it is the lock")] File);

/// Adds a mark, if there is one, to those of the image in `file`, durably; see the module text.
/// `keep` says of the others whether they are still of use. Without any, there is no list.
pub(crate) fn leave(
    directory: &dyn Directory,
    file: &Path,
    mark: Option<&Mark>,
    keep: impl Fn(&Line) -> bool,
) -> io::Result<Held> {
    let path = beside(file);
    let folder = path.parent().unwrap_or(Path::new("/"));
    let old = lock(directory, &path)?;
    let is_replaced = |line: &Line| mark.is_some_and(|mark| line.is_for(&mark.child));
    let others = read(file)?.into_iter().filter(|line| !is_replaced(line) && keep(line));
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
    for _ in 0..MAX_TRIES {
        let list = match plain::open(path, File::options().read(true)) {
            Err(e) if e.kind() == NotFound => match directory.create_new(path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => File::from(made?),
            },
            list => list.map_err(|e| named(path, e))?,
        };
        flock(&list, FlockOperation::LockExclusive)?;
        // Whoever had it may have put another one in its place.
        let meta = list.metadata()?;
        let now = fs::symlink_metadata(path);
        if now.is_ok_and(|now| (now.dev(), now.ino()) == (meta.dev(), meta.ino())) {
            return Ok(list);
        }
    }
    Err(named(path, io::ErrorKind::ResourceBusy.into()))
}

/// An error of a list, which is not the file that the caller speaks of.
fn named(list: &Path, e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", list.display()))
}
