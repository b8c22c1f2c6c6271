//! The file of maps as it is found beside an image.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ferrite_host::place::Place;
use rustix::fs::{OFlags, fstat};

use super::fine::{self, Fine};
use super::layout::{Content, Head, Image, Map, MapId, State, most_bytes};
use super::path_of;
use super::view::{Limits, changed_blocks, stretches};
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

/// Which blocks have changed, in memory: of a file of maps as it was found.
pub struct Blocks(Fine);

impl Blocks {
    /// The changed blocks of a region of `REGION_BYTES` since the map of this index was begun, a bit for each. They
    /// count only if the map has the region.
    ///
    /// # Panics
    /// If there is no such map or region.
    pub fn changed(&self, map: usize, region: u64) -> u64 {
        self.0.changed(map, region)
    }

    /// Leaves the blocks for those who read or open a new file of maps: `before` says those of a map's region. Without
    /// them all blocks of a region count as changed.
    pub fn leave(
        state_dir: &Path,
        image: impl AsFd,
        path: &Path,
        head: &Head,
        before: impl Fn(usize, u64) -> u64,
    ) {
        let left = fine_path(state_dir, image, path, head)
            .and_then(|file| fine::write(&file, head, before));
        if left.is_none() {
            tracing::debug!(
                "the changed blocks of {} are not kept: its regions are",
                path.display()
            );
        }
    }
}

/// Removes what is in memory of earlier files of maps of an image, whose file of maps has the identifier `keep` now, or is
/// gone. The image is locked. A file that cannot be removed stays: it fits no maps.
pub fn forget_blocks(state_dir: &Path, image: impl AsFd, path: &Path, keep: Option<&MapId>) {
    let Ok(place) = Place::of(image, path) else { return };
    let end = place.journal_end();
    let kept = keep.map(|id| fine::path(state_dir, id, &end));
    for entry in std::fs::read_dir(state_dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if fine::is_of(&entry.file_name(), &end) && kept.as_ref() != Some(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

pub(super) fn fine_path(
    state_dir: &Path,
    image: impl AsFd,
    path: &Path,
    head: &Head,
) -> Option<PathBuf> {
    let end = Place::of(image, path).ok()?.journal_end();
    Some(fine::path(state_dir, &head.file, &end))
}

/// The identity of an image's file: see the text of [`dirty`](super).
///
/// # Errors
/// It cannot be examined.
pub fn identity(file: impl AsFd, path: &Path) -> io::Result<String> {
    let place = Place::of(file, path)?;
    let text = place.text();
    Ok(text.split_once(" on ").map_or(text, |(file, _)| file).to_owned())
}

/// When the image was last changed: seconds and nanoseconds.
///
/// # Errors
/// It cannot be examined.
pub fn changed_at(file: impl AsFd) -> io::Result<(i64, u32)> {
    let stat = fstat(file)?;
    Ok((stat.st_mtime as i64, stat.st_mtime_nsec as u32))
}

/// The marks that bind maps to the image at `path`, which is complete and not written any more.
///
/// # Errors
/// It cannot be opened or examined.
pub fn image_at(path: &Path) -> io::Result<Image> {
    let file = plain::open(path, OFlags::RDONLY)?;
    Ok(Image { identity: identity(&file, path)?, changed: changed_at(&file)? })
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

    /// The blocks that have changed, in memory. `None`: nothing is left of them.
    pub fn blocks(&self, raw: &Raw, state_dir: &Path) -> Option<Blocks> {
        let head = &self.content.as_ref()?.head;
        Fine::look(&fine_path(state_dir, raw.fd(), raw.path(), head)?, head).map(Blocks)
    }

    /// Before the image is changed by a step that leaves the disk's contents: from here on its time of change does not
    /// count. `true`: [`end_change`](Self::end_change) has to follow.
    ///
    /// # Errors
    /// The file cannot be written. The image must not be changed.
    pub fn begin_change(&mut self) -> Result<bool, DiskError> {
        let Some(content) = self.content.as_mut().filter(|_| self.void.is_none()) else {
            return Ok(false);
        };
        if !matches!(content.head.state, State::Closed(..)) {
            return Ok(false);
        }
        content.head.state = State::Open;
        self.put_head().map_err(|e| cannot("keep", &self.path, e)).map(|()| true)
    }

    /// After a change that [`begin_change`](Self::begin_change) has begun, of the image in `image`, complete and synced.
    ///
    /// # Errors
    /// The file cannot be written. The maps stay valid: the image counts as open.
    pub fn end_change(&mut self, image: impl AsFd) -> Result<(), DiskError> {
        let closed = changed_at(image).and_then(|(seconds, nanoseconds)| {
            if let Some(content) = &mut self.content {
                content.head.state = State::Closed(seconds, nanoseconds);
            }
            self.put_head()
        });
        closed.map_err(|e| cannot("keep", &self.path, e))
    }

    fn put_head(&self) -> io::Result<()> {
        let Some(content) = &self.content else { return Ok(()) };
        self.file.write_all_at(&content.head.to_bytes(), 0)?;
        self.file.sync_data()
    }

    /// Makes maps void that do not fit, durably, and says why: the image is about to be written without them.
    pub(super) fn make_void(&self, why: &str) -> Result<(), DiskError> {
        let path = self.path.display();
        crate::warn_once(&format!(
            "the dirty maps {path} are void, and changes are not recorded: {why}; {BEGIN_ANEW}"
        ));
        match &self.content {
            Some(content) if content.head.state != State::Void => {
                let head = Head { state: State::Void, ..content.head.clone() };
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
    let (head, now) = (&content.head, changed_at(raw.fd())?);
    let own = identity(raw.fd(), raw.path())?;
    let closed = match (head.state, &content.other) {
        (State::Void, _) => return Ok(Some("they were given up before".to_owned())),
        (State::Closed(seconds, nanoseconds), _) if own == content.identity => {
            Some((seconds, nanoseconds))
        }
        (State::Closed(..), Some(other)) if own == other.identity => Some(other.changed),
        (State::Open, _) if own == content.identity => None,
        (State::Open, Some(other)) if own == other.identity => None,
        _ => {
            let why = "they were made for another file: the image was copied or restored";
            return Ok(Some(why.to_owned()));
        }
    };
    Ok(match closed {
        _ if bytes < head.bytes => {
            Some(format!("the disk had {} bytes, and has {bytes} now", head.bytes))
        }
        Some(closed) if closed != now => {
            Some("another program has changed the image since it was closed here".to_owned())
        }
        _ => None,
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
        Fine::look(&fine_path(dir, raw.fd(), raw.path(), &content.head)?, &content.head)
    });
    let seen = |(index, map): (usize, &Map)| SeenMap {
        name: map.name.clone(),
        id: map.id,
        begun_s: map.begun_s,
        changed: match void {
            Some(_) => std::iter::once(0..bytes).collect(),
            None => {
                let words = fine.as_ref().map(|fine| (fine, index));
                let blocks = |region| changed_blocks(map, region, words);
                changed(content.head.bytes, bytes, blocks)
            }
        },
    };
    let maps = content.maps.iter().enumerate().map(seen).collect();
    Ok(Some(Seen { path, void, damaged: content.damaged, maps }))
}

/// The ranges that may have changed since a map was begun. `known`: the size of the disk that the map is for.
fn changed(known: u64, bytes: u64, blocks: impl Fn(u64) -> u64) -> Vec<Range<u64>> {
    let mut end = 0;
    let ranges = stretches(0..bytes, known, Limits::NONE, blocks).into_iter().filter_map(|part| {
        let start = end;
        end += part.len;
        part.changed.then_some(start..end)
    });
    ranges.collect()
}
