//! The file of maps as it is found beside an image.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ferrite_host::place::Place;
use rustix::fs::{OFlags, fstat};

use super::fine::{self, Fine};
use super::layout::{Content, Map, MapId, State, most_bytes, regions};
use super::{BLOCK_BYTES, REGION_BYTES, path_of};
use crate::{DiskError, ErrorKind, Raw, plain};

/// How to go on without a map that does not fit.
const BEGIN_ANEW: &str = "make a full backup, and begin the map anew (ferrite image dirty add)";

/// A file of maps.
pub struct Found {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// The contents, if they could be read.
    pub content: Option<Content>,
    /// Why the maps are void; `None`: they fit the image.
    pub void: Option<String>,
}

/// The identity of an image's file: see the text of [`dirty`](super).
///
/// # Errors
/// It cannot be examined.
pub fn identity(raw: &Raw) -> io::Result<String> {
    let place = Place::of(raw.fd(), raw.path())?;
    let text = place.text();
    Ok(text.split_once(" on ").map_or(text, |(file, _)| file).to_owned())
}

/// When the image was last changed: seconds and nanoseconds.
///
/// # Errors
/// It cannot be examined.
pub fn changed_at(raw: &Raw) -> io::Result<(i64, u32)> {
    let stat = fstat(raw.fd())?;
    Ok((stat.st_mtime as i64, stat.st_mtime_nsec as u32))
}

/// The error of the kernel about a file of maps.
pub(super) fn cannot(what: &str, path: &Path, e: io::Error) -> DiskError {
    let help = "check its modes and the storage; without it the image can be used again, and the \
                next backup has to be a full one";
    let what = format!("cannot {what} the dirty maps {}", path.display());
    let kind = match e.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    DiskError::new(kind, what, e.to_string(), help).with_source(e)
}

impl Found {
    /// The file beside the image in `raw`, whose disk has so many bytes. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub fn open(raw: &Raw, bytes: u64, writable: bool) -> Result<Option<Found>, DiskError> {
        let path = path_of(raw.path());
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let file = match plain::open(&path, flags) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            // No file can be beside an image with such a name.
            Err(e) if e.kind() == io::ErrorKind::InvalidFilename => return Ok(None),
            file => file.map_err(|e| cannot("open", &path, e))?,
        };
        let text = read_all(&file).map_err(|e| cannot("read", &path, e))?;
        let mut found = Found { file, path, content: None, void: None };
        match Content::parse(&text) {
            Err(why) => found.void = Some(why.to_owned()),
            Ok(content) => {
                let void = why_void(raw, bytes, &content);
                found.void = void.map_err(|e| cannot("compare", &found.path, e))?;
                found.content = Some(content);
            }
        }
        Ok(Some(found))
    }

    /// Makes maps void that do not fit, durably, and says why: the image is about to be written without them.
    pub(super) fn make_void(&self, why: &str) -> Result<(), DiskError> {
        let path = self.path.display();
        crate::warn_once(&format!(
            "the dirty maps {path} are void, and changes are not recorded: {why}; {BEGIN_ANEW}"
        ));
        match &self.content {
            Some(content) if content.head.state != State::Void => {
                let head = super::layout::Head { state: State::Void, ..content.head.clone() };
                let written = self.file.write_all_at(&head.to_bytes(), 0);
                let synced = written.and_then(|()| self.file.sync_data());
                synced.map_err(|e| cannot("give up", &self.path, e))
            }
            _ => Ok(()),
        }
    }
}

/// Reads a file of maps whole, up to one byte more than the longest valid one.
fn read_all(file: &File) -> io::Result<Vec<u8>> {
    let len = file.metadata()?.len().min(most_bytes() + 1);
    let mut text = vec![0; len as usize];
    match file.read_exact_at(&mut text, 0) {
        // It has become shorter meanwhile: it is refused for its length.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(Vec::new()),
        read => read.map(|()| text),
    }
}

/// Why maps do not fit an image.
fn why_void(raw: &Raw, bytes: u64, content: &Content) -> io::Result<Option<String>> {
    let head = &content.head;
    let now = changed_at(raw)?;
    Ok(match head.state {
        State::Void => Some("they were given up before".to_owned()),
        _ if content.identity != identity(raw)? => {
            Some("they were made for another file: the image was copied or restored".to_owned())
        }
        _ if bytes < head.bytes => {
            Some(format!("the disk had {} bytes, and has {bytes} now", head.bytes))
        }
        State::Closed(seconds, nanoseconds) if (seconds, nanoseconds) != now => {
            Some("another program has changed the image since it was closed here".to_owned())
        }
        State::Closed(..) | State::Open => None,
    })
}

/// The maps of an image, for a reader.
#[derive(Debug)]
pub struct Seen {
    /// The path of their file.
    pub path: PathBuf,
    /// Why they are void.
    pub void: Option<String>,
    /// Sectors of bits that were damaged: all their regions count as changed.
    pub damaged: usize,
    /// The maps, with what has changed; of void ones, everything.
    pub maps: Vec<SeenMap>,
}

/// One map, for a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenMap {
    /// Its name.
    pub name: String,
    /// Its identifier.
    pub id: MapId,
    /// When it was begun, in seconds since 1970.
    pub begun_s: u64,
    /// The byte ranges of the disk that may have changed since, in order, and not touching each other.
    pub changed: Vec<Range<u64>>,
}

/// The maps beside the image in `raw`, whose disk has so many bytes. `state_dir` as in
/// [`OpenOptions`](crate::OpenOptions). `None`: it has none.
///
/// # Errors
/// They cannot be read.
pub fn look(raw: &Raw, bytes: u64, state_dir: Option<&Path>) -> Result<Option<Seen>, DiskError> {
    let Some(found) = Found::open(raw, bytes, false)? else { return Ok(None) };
    let Found { path, content, void, .. } = found;
    let Some(content) = content else {
        return Ok(Some(Seen { path, void, damaged: 0, maps: Vec::new() }));
    };
    let fine = state_dir.and_then(|dir| {
        let end = Place::of(raw.fd(), raw.path()).ok()?.journal_end();
        let head = &content.head;
        let file = fine::path(dir, &head.file, &end);
        Fine::look(&file, &head.file, head.opening, regions(head.bytes))
    });
    let seen = |map: &Map| SeenMap {
        name: map.name.clone(),
        id: map.id,
        begun_s: map.begun_s,
        changed: match void {
            Some(_) => std::iter::once(0..bytes).collect(),
            None => changed(map, content.head.bytes, bytes, fine.as_ref()),
        },
    };
    let maps = content.maps.iter().map(seen).collect();
    Ok(Some(Seen { path, void, damaged: content.damaged, maps }))
}

/// The ranges that may have changed since a map was begun. `known`: the size of the disk that the map is for.
fn changed(map: &Map, known: u64, bytes: u64, fine: Option<&Fine>) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut add = |range: Range<u64>| match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    };
    let is_set = |region: u64| map.bits[region as usize / 64] >> (region % 64) & 1 != 0;
    for region in (0..regions(known)).filter(|region| is_set(*region)) {
        let (start, blocks) = (region * REGION_BYTES, fine.map_or(u64::MAX, |f| f.changed(region)));
        for block in (0..64).filter(|block| blocks >> block & 1 != 0) {
            let at = start + block * BLOCK_BYTES;
            add(at.min(known)..(at + BLOCK_BYTES).min(known));
        }
    }
    add(known..bytes);
    ranges
}
