//! Finds journals: an image's own, those that may be its own, and all of a host.

use std::ffi::OsString;
use std::io::{self, ErrorKind::NotFound, ErrorKind::WouldBlock};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use super::file::{self, Content, Held};
use super::layout::{
    EXTENSION, FORMAT_AT, HANDLE_AT, HANDLE_LEN_AT, HEADER_BYTES, Identity, MAGIC, MAX_PATH_BYTES,
    PATH_AT, PATH_LEN_AT, PLACE_AT, PLACE_LEN_AT, Told, cannot, foreign, not_held, records, told,
};
use serde::Serialize;

use crate::{DiskError, ErrorKind, Format, Raw};
use ferrite_host::naming::Handle;
use ferrite_host::place::{self, Place};
use ferrite_host::shm::Shm;

/// A journal with answered changes.
#[derive(Debug)]
pub struct Left {
    /// The name of its file, without the extension.
    pub name: String,
    /// The format of the image. None: another version of this program made the journal.
    pub format: Option<Format>,
    /// The image's path.
    pub(crate) path: PathBuf,
    place: Place,
    /// The keys of its records, in the format's own numbers.
    pub keys: Vec<u64>,
}

/// The journals that concern an image.
#[derive(Debug, Default)]
pub struct Survey {
    /// The image's own journal, if it has answered changes.
    pub own: Option<Left>,
    /// The journal of an image with the same identifier that has left its place. It may be this image, or this one may
    /// be an older copy of it.
    pub moved: Option<Left>,
    /// The journal of an image with another identifier that was at this place.
    pub here: Option<Left>,
    /// The journal of this image by another way to its bytes: its loop device, or the file of that.
    pub(crate) other_way: Option<Left>,
    /// The journal of an image with the same identifier that is still at its place, and not open. This image is a copy
    /// of that one.
    pub original: Option<Left>,
}

/// Finds the journals that concern an image. Nothing is changed.
///
/// # Errors
/// They cannot be read, or one of them is another version's.
pub fn survey(dir: Option<&Path>, identity: &Identity) -> Result<Survey, DiskError> {
    let mut found = Survey::default();
    let Some(dir) = dir else { return Ok(found) };
    let own = identity.file_name();
    let (id, place) = halves_of(&own);
    let concerned = |name: &str| {
        let (its_id, its_place) = halves_of(name);
        its_id == id || its_place == place
    };
    for name in names(dir, concerned)? {
        let (its_id, its_place) = halves_of(&name);
        let Some(left) = left(dir, &name)? else { continue };
        if name == own {
            found.own = Some(left);
        } else if its_place == place && left.place == identity.place {
            found.here = Some(left);
        } else if its_id == id && left.place.is_another_way_to(&identity.place) {
            found.other_way = Some(left);
        } else if its_id == id && !left.is_there() {
            found.moved = Some(left);
        } else if its_id == id && !file::is_held(&dir.join(&name)).unwrap_or(true) {
            found.original = Some(left);
        }
    }
    Ok(found)
}

/// Whether an image's own journal has answered changes. Other journals are not looked for: the folder of a busy host has
/// hundreds of them, and this is asked for each image of a chain.
///
/// # Errors
/// It cannot be read, or it is another version's.
pub fn has_own(dir: Option<&Path>, identity: &Identity) -> Result<bool, DiskError> {
    let Some(dir) = dir else { return Ok(false) };
    left(dir, &identity.file_name()).map(|left| left.is_some())
}

/// The note that the last writer of an image has left besides the records, even if there are none.
///
/// # Errors
/// Its journal cannot be read.
pub fn told_of(dir: &Path, identity: &Identity) -> Result<Option<Told>, DiskError> {
    let path = dir.join(identity.file_name());
    match Shm::look(&path) {
        Ok(shm) if shm.len() < HEADER_BYTES || shm.load_u64(0) != MAGIC => Ok(None),
        Ok(shm) => Ok(told(&shm).filter(|_| place_of(&shm) == identity.place)),
        Err(e) if matches!(e.kind(), NotFound | io::ErrorKind::InvalidData) => Ok(None),
        Err(e) => Err(cannot(&path, "opened", e)),
    }
}

/// Whether any journal has answered changes of an image in this file or on this device.
///
/// # Errors
/// As [`survey`].
pub fn any_at(dir: Option<&Path>, raw: &Raw) -> Result<bool, DiskError> {
    let identity = Identity::of(raw, Format::Raw, [0; 16]);
    let identity = identity.map_err(|e| cannot(raw.path(), "examined", e))?;
    survey(dir, &identity).map(|found| found.here.is_some())
}

/// Removes journals of images that were in this file or on this device before: a new image is made there now. The
/// caller has it locked, so a journal that is held belongs to another image.
///
/// # Errors
/// They cannot be removed.
pub fn forget(dir: Option<&Path>, raw: &Raw) -> Result<(), DiskError> {
    let Some(dir) = dir else { return Ok(()) };
    let identity = Identity::of(raw, Format::Raw, [0; 16]);
    let identity = identity.map_err(|e| cannot(raw.path(), "examined", e))?;
    at_place(dir, &identity)?.iter().try_for_each(|path| remove_if(path, |_| true))
}

/// Removes the useless ones of this place, except for the one at `own`.
pub(super) fn sweep(dir: &Path, identity: &Identity, own: &Path) -> Result<(), DiskError> {
    let others = at_place(dir, identity)?.into_iter().filter(|path| path != own);
    others.into_iter().try_for_each(|path| {
        remove_if(&path, |shm| shm.is_none_or(|shm| Content::of(shm) == Content::Nothing))
    })
}

fn at_place(dir: &Path, identity: &Identity) -> Result<Vec<PathBuf>, DiskError> {
    let own = identity.file_name();
    let (_, place) = halves_of(&own);
    let mut paths = Vec::new();
    for name in names(dir, |name| halves_of(name).1 == place)? {
        let path = dir.join(&name);
        let Ok(shm) = Shm::look(&path) else { continue };
        // For another version's only the name tells its image.
        if Content::of(&shm) == Content::Foreign
            || shm.len() >= HEADER_BYTES && place_of(&shm) == identity.place
        {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Removes a journal that is not held, if its content is `unneeded`.
fn remove_if(path: &Path, unneeded: impl Fn(Option<&Shm>) -> bool) -> Result<(), DiskError> {
    let held = match Held::take(path) {
        Err(e) if e.kind() == WouldBlock => return Ok(()),
        held => held.map_err(|e| cannot(path, "opened", e))?,
    };
    let Some(held) = held else { return Ok(()) };
    let shm = held.map().map_err(|e| cannot(path, "opened", e))?;
    match unneeded(shm.as_ref()) {
        true => held.remove().map_err(|e| cannot(path, "removed", e)),
        false => Ok(()),
    }
}

/// The names of journals that are `wanted`, in order.
fn names(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, DiskError> {
    let failed = |e| cannot(dir, "looked through", e);
    let entries = match ferrite_host::names::read_dir(dir) {
        Err(e) if e.kind() == NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let is_one = |name: &String| name.ends_with(EXTENSION) && wanted(name);
        names.extend(name.into_string().ok().filter(is_one));
    }
    names.sort();
    Ok(names)
}

/// The two parts of a name, the image's identifier and its place.
fn halves_of(name: &str) -> (&str, &str) {
    let name = name.strip_suffix(EXTENSION).unwrap_or(name);
    name.split_once('-').unwrap_or((name, ""))
}

/// A journal, if it has answered changes.
///
/// # Errors
/// It cannot be read, or it is another version's.
fn left(dir: &Path, name: &str) -> Result<Option<Left>, DiskError> {
    let path = dir.join(name);
    let shm = match Shm::look(&path) {
        Ok(shm) => shm,
        Err(e) if matches!(e.kind(), NotFound | io::ErrorKind::InvalidData) => return Ok(None),
        Err(e) => return Err(cannot(&path, "opened", e)),
    };
    match Content::of(&shm) {
        Content::Nothing => return Ok(None),
        Content::Foreign => return Err(foreign(&path, &shm)),
        Content::Records => {}
    }
    let words = usize::try_from(shm.load_u64(24)).unwrap_or(usize::MAX);
    let capacity = u32::try_from(shm.load_u64(32)).unwrap_or(u32::MAX);
    let (place, was, format) = (place_of(&shm), path_of(&shm), format_of(&shm));
    let records = records(&shm, words, capacity);
    let keys = records.iter().map(|record| record.key).collect();
    let name = name.strip_suffix(EXTENSION).unwrap_or(name).to_owned();
    Ok(Some(Left { name, format, path: was, place, keys }))
}

impl Left {
    /// Whether the image is still at its place.
    pub(super) fn is_there(&self) -> bool {
        Place::at(&self.path).is_ok_and(|place| place == self.place)
    }
}

/// Bytes that [`make`](super::make) has written, or any others.
fn bytes(shm: &Shm, len_at: usize, at: usize, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; (shm.load_u32(len_at) as usize).min(most)];
    shm.copy_out(at, &mut bytes);
    bytes
}

pub(super) fn place_of(shm: &Shm) -> Place {
    let text = bytes(shm, PLACE_LEN_AT, PLACE_AT, place::MAX_BYTES);
    Place::from_text(String::from_utf8_lossy(&text).into_owned())
}

fn path_of(shm: &Shm) -> PathBuf {
    OsString::from_vec(bytes(shm, PATH_LEN_AT, PATH_AT, MAX_PATH_BYTES)).into()
}

fn handle_of(shm: &Shm) -> Option<Handle> {
    Handle::from_bytes(&bytes(shm, HANDLE_LEN_AT, HANDLE_AT, Handle::MAX_BYTES))
}

fn format_of(shm: &Shm) -> Option<Format> {
    Format::ALL.into_iter().find(|format| *format as u64 == shm.load_u64(FORMAT_AT))
}

/// The states of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum JournalState {
    /// A process has the image open.
    InUse,
    /// Its image is at its place: the next process to open it recovers the changes.
    Kept,
    /// Another version of this program has left it: only that version can recover it.
    Foreign,
    /// Its image is not at its place: renamed, or not mounted or attached now.
    Away,
    /// Its image is gone.
    Stale,
}

/// A journal that was left on this host.
#[derive(Debug, PartialEq, Eq)]
pub struct Kept {
    /// The name of its file, without the extension.
    pub name: String,
    /// The format of the image. `None`: it is unknown, see `state`.
    pub format: Option<Format>,
    /// The image's path.
    pub path: PathBuf,
    /// The number of records.
    pub records: u64,
    /// The state of the journal and its image.
    pub state: JournalState,
}

/// Lists all journals of this host. None is held for that, so a backend that starts meanwhile gets its own.
///
/// # Errors
/// They cannot be read.
pub fn all(dir: &Path) -> Result<Vec<Kept>, DiskError> {
    let kept = |file: &String| kept(dir, file).transpose();
    names(dir, |_| true)?.iter().filter_map(kept).collect()
}

/// A journal of the list; `None`: it is gone.
fn kept(dir: &Path, file: &str) -> Result<Option<Kept>, DiskError> {
    let path = dir.join(file);
    match file::is_held(&path) {
        Err(e) if e.kind() == NotFound => Ok(None),
        in_use => examine(dir, file, in_use.map_err(|e| cannot(&path, "examined", e))?),
    }
}

/// A journal of the list, if it is known whether a process holds it.
fn examine(dir: &Path, file: &str, in_use: bool) -> Result<Option<Kept>, DiskError> {
    let path = dir.join(file);
    let name = file.strip_suffix(EXTENSION).unwrap_or(file).to_owned();
    let state = |state| if in_use { JournalState::InUse } else { state };
    let unknown =
        |state| Kept { name: name.clone(), format: None, path: "".into(), records: 0, state };
    let shm = match Shm::look(&path) {
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            return Ok(Some(unknown(state(JournalState::Stale))));
        }
        Err(e) if e.kind() == NotFound => return Ok(None),
        shm => shm.map_err(|e| cannot(&path, "opened", e))?,
    };
    match Content::of(&shm) {
        Content::Foreign => return Ok(Some(unknown(state(JournalState::Foreign)))),
        // Its maker died while making it.
        Content::Nothing if shm.len() < HEADER_BYTES => {
            return Ok(Some(unknown(state(JournalState::Stale))));
        }
        Content::Nothing | Content::Records => {}
    }
    let (was, format) = (path_of(&shm), format_of(&shm));
    let state = state(whereabouts(&was, &place_of(&shm), handle_of(&shm).as_ref()));
    drop(shm);
    let records = left(dir, file)?.map_or(0, |left| left.keys.len() as u64);
    Ok(Some(Kept { name, format, path: was, records, state }))
}

/// The state of the image that was at `path`. It is gone only if its file system says so: a missing file may have been
/// renamed, or not be mounted or attached now. A removed device may always come back.
fn whereabouts(path: &Path, place: &Place, handle: Option<&Handle>) -> JournalState {
    let now = Place::at(path);
    if now.as_ref().is_ok_and(|now| now == place) {
        return JournalState::Kept;
    }
    let folder = place::folder_above(path);
    let Some((system, folder)) = place.file_system().zip(folder) else { return JournalState::Away };
    let is_mounted = place::file_system(&folder).is_ok_and(|mounted| mounted == system);
    let is_replaced = || now.is_ok_and(|now| now.has_replaced(place));
    let is_gone = || match handle {
        Some(handle) => handle.is_on(folder.as_fd()).is_ok_and(|there| !there),
        None => is_replaced(),
    };
    if is_mounted && is_gone() { JournalState::Stale } else { JournalState::Away }
}

/// Drops journals with their changes: all, or none if one has changed.
///
/// # Errors
/// One is in use, or has changed; they cannot be removed.
pub fn drop_kept(dir: &Path, all: &[&Kept]) -> Result<(), DiskError> {
    let held: Vec<_> = all.iter().map(|kept| hold(dir, kept)).collect::<Result<_, _>>()?;
    held.into_iter().flatten().try_for_each(|held| {
        let path = held.path().to_owned();
        held.remove().map_err(|e| cannot(&path, "removed", e))
    })
}

/// Holds a journal that has not changed; `None`: it is gone. A backend may have been started and killed since, and its
/// image may exist again.
fn hold(dir: &Path, kept: &Kept) -> Result<Option<Held>, DiskError> {
    let file = format!("{}{EXTENSION}", kept.name);
    let path = dir.join(&file);
    let held = Held::take(&path).map_err(|e| not_held(&path, "dropped", e))?;
    if held.is_some() && examine(dir, &file, false)?.as_ref() != Some(kept) {
        let what = format!("cannot drop {}", kept.name);
        let why = "it has changed since it was examined";
        let help =
            "see what it is now (ferrite image journal list), and run the same command again";
        return Err(DiskError::new(ErrorKind::InUse, what, why, help));
    }
    Ok(held)
}
