//! The state files: one small file for each disk in `/run/ferrite/disks`, for the next daemon.
//!
//! A file is written before its disk is served, and removed when the disk is not served any more.
//! It is replaced by a rename, so a daemon that dies leaves the old file or the new one. A file
//! that is torn, foreign or of a later version is set aside and logged. It does not keep other
//! disks from being served.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ferrite_serve::blkif::lifecycle::{Tune, run_dir_name};
use ferrite_xen::hypervisor::DomId;
use serde::{Deserialize, Serialize};

use crate::new_leaf::NewLeaf;
use crate::params::{Format, Image};
use crate::pause::Pause;
use crate::suspended::LeftImage;

/// The version of the files. A daemon reads this version and the one before, once there is one.
const VERSION: u32 = 1;
/// The longest valid file.
const MAX_BYTES: u64 = 64 << 10;
/// The space that a file has is a multiple of it.
const BLOCK_BYTES: usize = 4096;

/// The identifier of a disk: a guest's, or a tap's. A tap is a disk that is open without a guest. It
/// has no domain ([`DomId::NONE`]), and its number is tapdisk's minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskId {
    /// The guest's domain number.
    pub domid: u16,
    /// The device number; of a tap its minor.
    pub devid: u32,
}

impl std::fmt::Display for DiskId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.minor_of_tap() {
            Some(minor) => write!(f, "tap/{minor}"),
            None => write!(f, "{}/{}", self.domid, self.devid),
        }
    }
}

impl DiskId {
    /// The tap of this minor.
    pub fn tap(minor: u32) -> DiskId {
        DiskId { domid: DomId::NONE.0, devid: minor }
    }

    /// The minor, if this is a tap.
    pub fn minor_of_tap(self) -> Option<u32> {
        (self.domid == DomId::NONE.0).then_some(self.devid)
    }

    /// Whether this is a tap.
    pub fn is_tap(self) -> bool {
        self.minor_of_tap().is_some()
    }

    /// The name of its run directory and of its files: `vbd-D-N`, or `tap-N`.
    pub fn file_name(self) -> String {
        run_dir_name(self.domid, self.devid)
    }
}

/// The disk whose file name this is.
pub fn id_of_name(name: &str) -> Option<DiskId> {
    let id = match name.strip_prefix("tap-") {
        Some(minor) => DiskId::tap(minor.parse().ok()?),
        None => {
            let (domid, devid) = name.strip_prefix("vbd-")?.split_once('-')?;
            DiskId { domid: domid.parse().ok()?, devid: devid.parse().ok()? }
        }
    };
    (id.file_name() == name).then_some(id)
}

/// What the state of a tap has besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapState {
    /// Whether the image is opened for reading only.
    pub read_only: bool,
    /// Whether this daemon has made the tap for a device (`crate::devices`). No toolstack does the
    /// locking of its image then.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_own: bool,
    /// Whether the tap is closed: it is attached, and has no image.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub closed: bool,
    /// The guest's disk that has joined it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub guest: Option<DiskId>,
}

/// The state of a served disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskState {
    version: u32,
    /// The disk.
    pub id: DiskId,
    /// The image's format when the disk was attached.
    pub format: Format,
    /// The image's path as bytes, since paths need not be text.
    path: Vec<u8>,
    /// The disk's number for tapdisk's tools, which scripts pass on.
    pub minor: u32,
    /// The later attachment of the same disk that it rests for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rests_for: Option<DiskId>,
    /// Whether the guest of that attachment was connected. It may have written data that this guest
    /// does not know.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub has_run: bool,
    /// The guest's disk that this stub domain's disk is served beside.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub beside: Option<DiskId>,
    /// Whether the image was never open for this attachment, so there is nothing to close before
    /// its end.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub never_open: bool,
    /// The image as it was closed for a guest that is suspended. It is closed still.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub left: Option<LeftImage>,
    /// Since when the disk is paused, and by whom. Its image is closed then.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pause: Option<Pause>,
    /// What was set on the running disk, for its next worker.
    #[serde(skip_serializing_if = "Tune::is_empty", default)]
    pub tune: Tune,
    /// What a tap has besides.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tap: Option<TapState>,
    /// The snapshot of a raw disk that is made.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new_leaf: Option<NewLeaf>,
}

impl DiskState {
    /// The state of a disk that is to be served.
    pub fn new(id: DiskId, image: &Image, minor: u32) -> DiskState {
        use std::os::unix::ffi::OsStrExt as _;
        let path = image.path.as_os_str().as_bytes().to_vec();
        let (version, format) = (VERSION, image.format);
        let (rests_for, has_run, beside, never_open) = (None, false, None, false);
        let (left, pause, tune, tap, new_leaf) = (None, None, Tune::default(), None, None);
        DiskState {
            version,
            id,
            format,
            path,
            minor,
            rests_for,
            has_run,
            beside,
            never_open,
            left,
            pause,
            tune,
            tap,
            new_leaf,
        }
    }

    /// Sets the snapshot of a raw disk that is made.
    #[must_use]
    pub fn with_new_leaf(self, new_leaf: Option<NewLeaf>) -> DiskState {
        DiskState { new_leaf, ..self }
    }

    /// Sets what a tap has besides.
    #[must_use]
    pub fn with_tap(self, tap: Option<TapState>) -> DiskState {
        DiskState { tap, ..self }
    }

    /// Sets the pause.
    #[must_use]
    pub fn paused(self, pause: Option<Pause>) -> DiskState {
        DiskState { pause, ..self }
    }

    /// Sets what was set on the running disk.
    #[must_use]
    pub fn tuned(self, tune: Tune) -> DiskState {
        DiskState { tune, ..self }
    }

    /// Sets the image as it was left.
    #[must_use]
    pub fn leaving(self, left: Option<LeftImage>) -> DiskState {
        DiskState { left, ..self }
    }

    /// Marks the image as never opened.
    #[must_use]
    pub fn never_open(self) -> DiskState {
        DiskState { never_open: true, ..self }
    }

    /// Sets the disk that this one is served beside.
    #[must_use]
    pub fn beside(self, beside: Option<DiskId>) -> DiskState {
        DiskState { beside, ..self }
    }

    /// Sets the attachment that this one rests for.
    #[must_use]
    pub fn resting_for(self, rests_for: Option<DiskId>) -> DiskState {
        DiskState { rests_for, ..self }
    }

    /// The image that the disk was attached with.
    pub fn image(&self) -> Image {
        use std::os::unix::ffi::OsStringExt as _;
        let path = PathBuf::from(std::ffi::OsString::from_vec(self.path.clone()));
        Image { format: self.format, path }
    }
}

/// The directory of the state files.
#[derive(Clone, Debug)]
pub struct States {
    folder: PathBuf,
}

impl States {
    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(folder: &Path) -> io::Result<States> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        Ok(States { folder: folder.to_owned() })
    }

    /// The path of a disk's file in `folder`.
    pub fn file(folder: &Path, id: DiskId) -> PathBuf {
        folder.join(format!("{}.json", id.file_name()))
    }

    /// Reads a disk's file without setting an invalid one aside.
    pub fn peek(folder: &Path, id: DiskId) -> Option<DiskState> {
        read(&States::file(folder, id), id).ok()
    }

    fn path(&self, id: DiskId) -> PathBuf {
        States::file(&self.folder, id)
    }

    /// Replaces a disk's file.
    ///
    /// # Errors
    /// Errors of the file system. The old file stays.
    pub fn write(&self, state: &DiskState) -> io::Result<()> {
        replace(&self.path(state.id), &serde_json::to_vec(state).map_err(io::Error::other)?)
    }

    /// Reads the files of all disks, in order, without setting invalid ones aside or removing any.
    pub fn peek_all(folder: &Path) -> Vec<DiskState> {
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let ids = entries.filter_map(|entry| Self::id_of(&entry.path()));
        let mut states: Vec<_> = ids.filter_map(|id| States::peek(folder, id)).collect();
        states.sort_by_key(|state| state.id);
        states.dedup_by_key(|state| state.id);
        states
    }

    /// Reads a disk's file. An invalid file is set aside, and counts as missing.
    ///
    /// # Errors
    /// The file cannot be read now, for want of descriptors for example. It may be valid.
    pub fn read(&self, id: DiskId) -> io::Result<Option<DiskState>> {
        let path = self.path(id);
        match read(&path, id) {
            Ok(state) => Ok(Some(state)),
            Err(ReadError::Missing) => Ok(None),
            Err(ReadError::Io(e)) => Err(e),
            Err(ReadError::Invalid(why)) => {
                self.set_aside(&path, &why);
                Ok(None)
            }
        }
    }

    /// Removes a disk's file, if it exists. A failure is logged.
    pub fn remove(&self, id: DiskId) {
        if let Err(e) = self.try_remove(id) {
            tracing::warn!("cannot remove {}: {e}", self.path(id).display());
        }
    }

    /// Removes a disk's file, if it exists.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn try_remove(&self, id: DiskId) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Reads the files of all disks, in order. Half-written files are removed, and invalid ones are
    /// set aside. Files that cannot be read now are left out.
    pub fn all(&self) -> Vec<DiskState> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok);
        let mut states = Vec::new();
        for path in entries.map(|entry| entry.path()) {
            match path.extension().and_then(|extension| extension.to_str()) {
                // A daemon was killed before it renamed the file.
                Some("new") => drop(fs::remove_file(&path)),
                Some("json") => match Self::id_of(&path) {
                    Some(id) => states.extend(self.read(id).ok().flatten()),
                    None => self.set_aside(&path, "its name is not that of a disk"),
                },
                _ => {}
            }
        }
        states.sort_by_key(|state| state.id);
        states
    }

    /// The disk that a file's name says.
    fn id_of(path: &Path) -> Option<DiskId> {
        id_of_name(path.file_stem()?.to_str()?)
    }

    /// Renames an invalid file: it is logged once, and an administrator can look at it.
    fn set_aside(&self, path: &Path, why: &str) {
        let aside = path.with_extension("odd");
        tracing::warn!(
            "{} is invalid and renamed to {}: {why}; the disk is served as the toolstack says",
            path.display(),
            aside.display()
        );
        if let Err(e) = fs::rename(path, &aside) {
            tracing::warn!("cannot rename {}: {e}", path.display());
        }
    }
}

/// Gives a state file this text: by a rename, so a process that dies leaves the old file or the new
/// one. A file that has the text already is left alone, whatever happens to its file system.
///
/// Without space for a second file it is written in place, by one write within the space that it has:
/// the death of a process does not tear that, and with the host's death these files are gone.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
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

fn read(path: &Path, id: DiskId) -> Result<DiskState, ReadError> {
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
    let versioned: Versioned = serde_json::from_slice(&text).map_err(|e| invalid(&e))?;
    if versioned.version != VERSION {
        let version = versioned.version;
        return Err(invalid(&format!("it has version {version}, and this daemon reads {VERSION}")));
    }
    let state: DiskState = serde_json::from_slice(&text).map_err(|e| invalid(&e))?;
    if state.id != id {
        return Err(invalid(&format!("it is of disk {}", state.id)));
    }
    let image = state.image();
    if !image.path.is_absolute() && image.export().is_none() {
        return Err(invalid(&"it names no image"));
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states() -> (tempfile::TempDir, States) {
        let dir = tempfile::tempdir().unwrap();
        let states = States::open(&dir.path().join("disks")).unwrap();
        (dir, states)
    }

    fn state(domid: u16) -> DiskState {
        use std::os::unix::ffi::OsStrExt as _;
        let path = Path::new(std::ffi::OsStr::from_bytes(b"/srv/\xff:1.vhd"));
        let image = Image { format: Format::Vhd, path: path.to_owned() };
        DiskState::new(DiskId { domid, devid: 51712 }, &image, 3)
    }

    #[test]
    fn what_was_written_is_read_and_removed() {
        let (_dir, states) = states();
        let (first, second) = (state(7), state(3));
        states.write(&first).unwrap();
        states.write(&second).unwrap();
        assert_eq!(states.read(first.id).unwrap(), Some(first.clone()));
        assert_eq!(states.all(), [second.clone(), first.clone()]);
        let newer = DiskState { minor: 9, ..first.clone() };
        states.write(&newer).unwrap();
        assert_eq!(states.read(first.id).unwrap(), Some(newer));
        states.remove(first.id);
        states.remove(first.id);
        assert_eq!(states.all(), [second]);
        assert_eq!(states.read(first.id).unwrap(), None);
    }

    #[test]
    fn what_is_torn_foreign_or_newer_is_put_aside_and_disturbs_no_other() {
        let (dir, states) = states();
        let good = state(1);
        states.write(&good).unwrap();
        let whole = serde_json::to_string(&state(2)).unwrap();
        let bad = [
            String::new(),
            whole[..whole.len() / 2].to_owned(),
            whole.replace("\"version\":1", "\"version\":2"),
            whole.replace("\"version\":1,", ""),
            whole.replace("\"domid\":2", "\"domid\":5"),
            whole.replace("\"minor\"", "\"major\""),
            whole.replace("\"path\":[47", "\"path\":[48"),
            whole.replace("vhd", "vmdk"),
            "[".repeat(60_000),
            "x".repeat(200_000),
        ];
        let path = dir.path().join("disks/vbd-2-51712.json");
        for text in bad {
            fs::write(&path, &text).unwrap();
            assert_eq!(states.all(), std::slice::from_ref(&good), "{:.40}", text);
            let aside = path.with_extension("odd");
            assert_eq!(fs::read_to_string(&aside).unwrap(), text);
            fs::remove_file(&aside).unwrap();
            assert!(!path.exists());
        }
        for name in ["vbd-2.json", "vbd-02-1.json", "theirs.json", "vbd-70000-1.json"] {
            fs::write(dir.path().join("disks").join(name), &whole).unwrap();
        }
        fs::write(dir.path().join("disks/vbd-9-1.new"), "{").unwrap();
        fs::create_dir(dir.path().join("disks/vbd-4-1.json")).unwrap();
        assert_eq!(states.all(), std::slice::from_ref(&good));
        assert_eq!(states.all(), [good]);
        let left = fs::read_dir(dir.path().join("disks")).unwrap().map(|e| e.unwrap().path());
        let extensions = left.map(|p| p.extension().unwrap().to_str().unwrap().to_owned());
        assert!(extensions.into_iter().all(|e| e == "json" || e == "odd"));
    }

    #[test]
    fn what_cannot_be_read_now_stays_where_it_is() {
        let (dir, states) = states();
        let path = dir.path().join("disks/vbd-2-51712.json");
        // The file cannot be opened, as without free descriptors.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        assert!(states.read(state(2).id).is_err());
        assert_eq!(states.all(), []);
        fs::remove_file(&path).unwrap();
        states.write(&state(2)).unwrap();
        assert_eq!(states.read(state(2).id).unwrap(), Some(state(2)));
        assert!(!path.with_extension("odd").exists());
    }

    #[test]
    fn a_death_before_the_rename_leaves_the_file_before() {
        let (dir, states) = states();
        let before = state(1);
        states.write(&before).unwrap();
        fs::write(dir.path().join("disks/vbd-1-51712.new"), "{\"version\":1,").unwrap();
        assert_eq!(states.all(), [before]);
    }
}
