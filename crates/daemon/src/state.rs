//! The state files: one small file for each disk in `/run/ferrite/disks`, for the next daemon.
//!
//! A file is written before its disk is served, and removed when the disk is not served any more.
//! `crate::state_files` replaces and reads it.

use std::io;
use std::path::{Path, PathBuf};

use ferrite_serve::blkif::lifecycle::{Tune, run_dir_name};
use ferrite_xen::hypervisor::DomId;
use serde::{Deserialize, Serialize};

use crate::new_leaf::NewLeaf;
use crate::params::{Format, Image};
use crate::pause::Pause;
use crate::state_files::{StateFiles, Stated};
use crate::suspended::LeftImage;

/// The version of the files. A daemon reads this version and the one before, once there is one.
const VERSION: u32 = 1;

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
    /// The lowest one.
    pub(crate) const FIRST: DiskId = DiskId { domid: 0, devid: 0 };

    /// The tap of this minor.
    pub const fn tap(minor: u32) -> DiskId {
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

/// The further state of a tap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The log of changed blocks, which the storage manager has named.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub log: Option<PathBuf>,
    /// The second disk that writes go to.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mirror: Option<TapMirror>,
}

/// A second disk, behind a connection that XAPI has passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapMirror {
    /// The name that XAPI has given it.
    pub name: String,
    /// The socket of the process that has the connection. `None`: there was no connection of this name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub socket: Option<PathBuf>,
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
    /// The settings of the running disk, for its next worker.
    #[serde(skip_serializing_if = "Tune::is_empty", default)]
    pub tune: Tune,
    /// The further state of a tap.
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

    /// Sets the settings of the running disk.
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

impl Stated for DiskState {
    const VERSION: u32 = VERSION;
    const WITHOUT: &'static str = "the disk is served as the toolstack says";

    fn name(&self) -> String {
        self.id.file_name()
    }

    fn check(&self) -> Result<(), String> {
        let image = self.image();
        match image.path.is_absolute() || image.export().is_some() {
            true => Ok(()),
            false => Err("it names no image".to_owned()),
        }
    }
}

/// The directory of the state files.
#[derive(Clone, Debug)]
pub struct States(StateFiles<DiskState>);

impl States {
    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(folder: &Path) -> io::Result<States> {
        StateFiles::open(folder).map(States)
    }

    /// The path of a disk's file in `folder`.
    pub fn file(folder: &Path, id: DiskId) -> PathBuf {
        StateFiles::<DiskState>::at(folder).file(&id.file_name())
    }

    /// Reads a disk's file without setting an invalid one aside.
    pub fn peek(folder: &Path, id: DiskId) -> Option<DiskState> {
        StateFiles::at(folder).peek(&id.file_name())
    }

    /// Replaces a disk's file.
    ///
    /// # Errors
    /// Errors of the file system. The old file stays.
    pub fn write(&self, state: &DiskState) -> io::Result<()> {
        self.0.write(state)
    }

    /// Reads the files of all disks, in order, without setting invalid ones aside or removing any.
    pub fn peek_all(folder: &Path) -> Vec<DiskState> {
        in_order(StateFiles::at(folder).peek_all())
    }

    /// Reads a disk's file. An invalid file is set aside, and counts as missing.
    ///
    /// # Errors
    /// The file cannot be read now, for want of descriptors for example. It may be valid.
    pub fn read(&self, id: DiskId) -> io::Result<Option<DiskState>> {
        self.0.read(&id.file_name())
    }

    /// Removes a disk's file, if it exists. A failure is logged.
    pub fn remove(&self, id: DiskId) {
        self.0.remove(&id.file_name());
    }

    /// Removes a disk's file, if it exists.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn try_remove(&self, id: DiskId) -> io::Result<()> {
        self.0.try_remove(&id.file_name())
    }

    /// Reads the files of all disks, in order. Half-written files are removed, and invalid ones are
    /// set aside. Files that cannot be read now are left out.
    pub fn all(&self) -> Vec<DiskState> {
        in_order(self.0.all())
    }
}

fn in_order(mut states: Vec<DiskState>) -> Vec<DiskState> {
    states.sort_by_key(|state| state.id);
    states
}

#[cfg(test)]
mod tests {
    use std::fs;

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
