//! The file of a mirror: which regions may differ, and how the mirror is (docs/internals/mirror.md 1).
//!
//! It is on tmpfs. The worker of the disk has it mapped. The daemon makes it, reads it by calls and writes two of its
//! words: it must not map memory that a worker can take away.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_host::names;
use ferrite_host::shm::Shm;
use rustix::fs::{Mode, OFlags};

/// Bytes of a region: the unit of the map, and of the copy.
pub const REGION_BYTES: u64 = 1 << 20;

/// Regions of a group: what a bit of a dirty map stands for.
pub(super) const GROUP: u64 = ferrite_disk_base::dirty::REGION_BYTES / REGION_BYTES;

/// `ferrmir1`.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrmir1");
const HEADER_BYTES: usize = 4096;
const BITS_AT: usize = HEADER_BYTES / 8;
const BYTES_AT: usize = 8;
const STATE_AT: usize = 16;
const LEFT_AT: usize = 24;
const COPIED_AT: usize = 32;
const SPEED_AT: usize = 40;
const RESTS_AT: usize = 48;
const REOPEN_AT: usize = 56;
const COMPLETE_AT: usize = 64;
const OPENED_AT: usize = 72;
const WHY_LEN_AT: usize = 80;
const KEPT_AT: usize = 88;
/// Whether only new writes go to the target.
const WRITES_AT: usize = 96;
/// Whether what the target has already is compared, and not written.
const COMPARES_AT: usize = 104;
/// Whether the target was made for this mirror.
const FRESH_AT: usize = 112;
const WHY_AT: usize = 128;
/// The longest reason, in bytes.
const MAX_WHY: usize = 1024;
const NAME_LEN_AT: usize = 1152;
const NAME_AT: usize = 1160;
/// The longest name of a dirty map, in bytes.
const MAX_NAME: usize = 63;
const TARGET_LEN_AT: usize = 1232;
const TARGET_AT: usize = 1240;
/// The longest identity of a target, in bytes.
const MAX_TARGET: usize = 480;

/// The state of the mirror, as the worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorState {
    /// No worker has opened it.
    New,
    /// The target lacks regions, which are copied.
    Copying,
    /// The target has all answered writes.
    InStep,
    /// The target has failed. Regions that are written are noted, and it is tried again.
    Behind,
    /// The target could not be opened.
    NoTarget,
}

const STATES: [MirrorState; 5] = [
    MirrorState::New,
    MirrorState::Copying,
    MirrorState::InStep,
    MirrorState::Behind,
    MirrorState::NoTarget,
];

fn regions(bytes: u64) -> u64 {
    bytes.div_ceil(REGION_BYTES)
}

fn file_bytes(bytes: u64) -> usize {
    HEADER_BYTES + 8 * regions(bytes).div_ceil(64) as usize
}

/// The map as the worker has it.
#[derive(Debug)]
pub(crate) struct Map {
    shm: Shm,
    regions: u64,
    /// Only new writes go to the target: nothing is copied, and a target that has failed is not tried again.
    pub(crate) only_writes: bool,
    /// Data that the target has already are not written.
    pub(crate) compares: bool,
    /// A worker before has not closed both disks with the same in them.
    pub(crate) was_left: bool,
    /// No worker has written to the target yet, so nothing of a killed one can come late.
    pub(crate) is_fresh: bool,
}

impl Map {
    /// Opens the file of a mirror of a disk of so many bytes.
    pub(crate) fn open(path: &Path, bytes: u64) -> io::Result<Map> {
        let mut shm = Shm::open(path)?;
        let only_writes = shm.len() >= HEADER_BYTES && shm.load_u64(WRITES_AT) != 0;
        if only_writes && shm.load_u64(0) == MAGIC && shm.load_u64(BYTES_AT) == 0 {
            // The program that made the file did not know the disk's size.
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = File::from(names::open(path, flags, Mode::empty())?);
            shm = Shm::lengthen(&file, file_bytes(bytes))?;
            shm.store_u64(BYTES_AT, bytes);
        }
        let is_it = shm.len() >= file_bytes(bytes)
            && shm.load_u64(0) == MAGIC
            && shm.load_u64(BYTES_AT) == bytes;
        if !is_it {
            let text = "it is no file of a mirror of this disk";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let was_left = shm.load_u64(OPENED_AT) != 0 && shm.load_u64(COMPLETE_AT) != 1;
        // A successor must not take the disk for the target's equal from here on.
        shm.store_u64(COMPLETE_AT, 0);
        shm.store_u64(REOPEN_AT, 0);
        let opened = shm.load_u64(OPENED_AT);
        let is_fresh = opened == 0 && shm.load_u64(FRESH_AT) != 0;
        shm.store_u64(OPENED_AT, opened.wrapping_add(1));
        let compares = shm.load_u64(COMPARES_AT) != 0;
        Ok(Map { shm, regions: regions(bytes), only_writes, compares, was_left, is_fresh })
    }

    /// The name of the source's dirty map that says durably what the target may lack.
    pub(crate) fn name(&self) -> Option<String> {
        let len = self.shm.load_u64(NAME_LEN_AT) as usize;
        let mut name = vec![0; len.min(MAX_NAME)];
        self.shm.copy_out(NAME_AT, &mut name);
        String::from_utf8(name).ok().filter(|name| !name.is_empty())
    }

    /// Notes which file the target is, at the first call. Returns whether it is the file of the first call.
    pub(crate) fn is_same_target(&self, identity: &str) -> bool {
        let own = &identity.as_bytes()[..identity.len().min(MAX_TARGET)];
        let len = (self.shm.load_u64(TARGET_LEN_AT) as usize).min(MAX_TARGET);
        if len == 0 {
            self.shm.copy_in(TARGET_AT, own);
            self.shm.store_u64(TARGET_LEN_AT, own.len() as u64);
            return true;
        }
        let mut known = vec![0; len];
        self.shm.copy_out(TARGET_AT, &mut known);
        known == own
    }

    /// Says whether a map that survives a power cut is kept, too.
    pub(crate) fn say_kept(&self, kept: bool) {
        self.shm.store_u64(KEPT_AT, u64::from(kept));
    }

    fn word(&self, region: u64) -> &AtomicU64 {
        &self.shm.words()[BITS_AT + region as usize / 64]
    }

    /// Whether a region may differ.
    pub(crate) fn is_set(&self, region: u64) -> bool {
        self.word(region).load(Ordering::Acquire) >> (region % 64) & 1 != 0
    }

    pub(crate) fn set(&self, region: u64) {
        self.word(region).fetch_or(1 << (region % 64), Ordering::AcqRel);
    }

    pub(crate) fn clear(&self, region: u64) {
        self.word(region).fetch_and(!(1 << (region % 64)), Ordering::AcqRel);
    }

    /// Whether no region of a group may differ.
    pub(crate) fn is_group_clear(&self, group: u64) -> bool {
        let all = group * GROUP..((group + 1) * GROUP).min(self.regions);
        all.into_iter().all(|region| !self.is_set(region))
    }

    /// Groups of regions, of which the durable map has one bit each.
    pub(crate) fn groups(&self) -> u64 {
        self.regions.div_ceil(GROUP)
    }

    /// The regions of a group do not differ.
    pub(crate) fn clear_group(&self, group: u64) {
        let all = group * GROUP..((group + 1) * GROUP).min(self.regions);
        all.into_iter().for_each(|region| self.clear(region));
    }

    /// The number of regions that may differ.
    pub(crate) fn count(&self) -> u64 {
        (0..self.regions).filter(|region| self.is_set(*region)).count() as u64
    }

    /// The first region from this one on that may differ.
    pub(crate) fn first_set(&self, from: u64) -> Option<u64> {
        let mut at = from;
        while at < self.regions {
            let word = self.word(at).load(Ordering::Acquire) >> (at % 64);
            if word != 0 {
                let found = at + u64::from(word.trailing_zeros());
                return (found < self.regions).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    pub(crate) fn say(&self, state: MirrorState, left: u64) {
        let number = STATES.iter().position(|known| *known == state).unwrap_or(0);
        self.shm.store_u64(LEFT_AT, left);
        self.shm.store_u64(STATE_AT, number as u64);
    }

    /// Says why the target is not used.
    pub(crate) fn say_why(&self, why: &str) {
        let bytes = why.as_bytes();
        let bytes = &bytes[..bytes.len().min(MAX_WHY)];
        self.shm.store_u64(WHY_LEN_AT, 0);
        self.shm.copy_in(WHY_AT, bytes);
        self.shm.store_u64(WHY_LEN_AT, bytes.len() as u64);
    }

    pub(crate) fn add_copied(&self, bytes: u64) {
        self.shm.store_u64(COPIED_AT, self.shm.load_u64(COPIED_AT).wrapping_add(bytes));
    }

    /// Asks the daemon to open the target anew, or takes that back.
    pub(crate) fn ask_reopen(&self, asked: bool) {
        self.shm.store_u64(REOPEN_AT, u64::from(asked));
    }

    /// Says that both have the same, durably, and are closed.
    pub(crate) fn set_complete(&self) {
        self.shm.store_u64(COMPLETE_AT, 1);
    }

    /// The most bytes that are copied in a second; 0: no limit.
    pub(crate) fn speed(&self) -> u64 {
        self.shm.load_u64(SPEED_AT)
    }

    /// Whether the copy rests.
    pub(crate) fn rests(&self) -> bool {
        self.shm.load_u64(RESTS_AT) != 0
    }
}

/// How a mirror is, as its worker says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorStatus {
    /// Its state.
    pub state: MirrorState,
    /// Regions of [`REGION_BYTES`] that the target lacks.
    pub left: u64,
    /// All regions.
    pub regions: u64,
    /// Bytes that were copied since the mirror was begun.
    pub copied_bytes: u64,
    /// How often a worker has opened it.
    pub opened: u64,
    /// Whether the target has to be opened anew.
    pub reopen: bool,
    /// Whether a map of the source that survives a power cut says what the target may lack.
    pub kept: bool,
    /// Why the target is not used, in the words of the worker.
    pub why: String,
}

/// The file of a mirror as the daemon has it.
#[derive(Debug)]
pub struct MirrorFile {
    file: File,
    regions: u64,
}

impl MirrorFile {
    /// Makes the file of a mirror of a disk of so many bytes, in which all regions differ.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(path: &Path, bytes: u64) -> io::Result<MirrorFile> {
        if let Some(folder) = path.parent() {
            names::create_dir_all(folder, Mode::RWXU)?;
        }
        // A worker may have an older one mapped, and keeps it.
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&new)?;
        // The bits come before the head, which makes it a map.
        let mut bits = vec![u8::MAX; file_bytes(bytes) - HEADER_BYTES];
        let spare = regions(bytes) % 64;
        if let (Some(last), true) = (bits.len().checked_sub(8), spare != 0) {
            bits[last..].copy_from_slice(&((1u64 << spare) - 1).to_le_bytes());
        }
        file.write_all_at(&bits, HEADER_BYTES as u64)?;
        let mut head = vec![0; HEADER_BYTES];
        head[BYTES_AT..BYTES_AT + 8].copy_from_slice(&bytes.to_le_bytes());
        head[LEFT_AT..LEFT_AT + 8].copy_from_slice(&regions(bytes).to_le_bytes());
        head[..8].copy_from_slice(&MAGIC.to_le_bytes());
        file.write_all_at(&head, 0)?;
        std::fs::rename(&new, path)?;
        Ok(MirrorFile { file, regions: regions(bytes) })
    }

    /// Makes the file of a mirror that copies nothing, of a disk whose size its worker knows.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create_for_writes(path: &Path) -> io::Result<MirrorFile> {
        if let Some(folder) = path.parent() {
            names::create_dir_all(folder, Mode::RWXU)?;
        }
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&new)?;
        let mut head = vec![0; HEADER_BYTES];
        head[WRITES_AT] = 1;
        head[..8].copy_from_slice(&MAGIC.to_le_bytes());
        file.write_all_at(&head, 0)?;
        std::fs::rename(&new, path)?;
        Ok(MirrorFile { file, regions: 0 })
    }

    /// Opens the file of a mirror.
    ///
    /// # Errors
    /// Errors of the file system. `InvalidData`: the file is no map.
    pub fn open(path: &Path) -> io::Result<MirrorFile> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let found = MirrorFile { file, regions: 0 };
        let bytes = found.word(BYTES_AT)?;
        if found.word(0)? != MAGIC || found.file.metadata()?.len() < file_bytes(bytes) as u64 {
            let text = "it is no file of a mirror";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(MirrorFile { regions: regions(bytes), ..found })
    }

    fn word(&self, at: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn set(&self, at: usize, value: u64) -> io::Result<()> {
        self.file.write_all_at(&value.to_le_bytes(), at as u64)
    }

    /// How the mirror is.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn status(&self) -> io::Result<MirrorStatus> {
        let state = STATES.get(self.word(STATE_AT)? as usize).copied();
        let len = (self.word(WHY_LEN_AT)? as usize).min(MAX_WHY);
        let mut why = vec![0; len];
        self.file.read_exact_at(&mut why, WHY_AT as u64)?;
        let why = String::from_utf8_lossy(&why).chars().filter(|c| !c.is_control()).collect();
        Ok(MirrorStatus {
            state: state.unwrap_or(MirrorState::New),
            left: self.word(LEFT_AT)?.min(self.regions),
            regions: self.regions,
            copied_bytes: self.word(COPIED_AT)?,
            opened: self.word(OPENED_AT)?,
            reopen: self.word(REOPEN_AT)? != 0,
            kept: self.word(KEPT_AT)? != 0,
            why,
        })
    }

    /// Whether the worker has closed both disks with the same in them, durably: no bit is set, and it says so.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn is_complete(&self) -> io::Result<bool> {
        if self.word(COMPLETE_AT)? != 1 {
            return Ok(false);
        }
        let mut bits = vec![0; regions_bytes(self.regions)];
        self.file.read_exact_at(&mut bits, HEADER_BYTES as u64)?;
        Ok(bits.iter().all(|byte| *byte == 0))
    }

    /// Names the dirty map of the source that says durably what the target may lack. No worker has the file open now,
    /// and that map names all that the target lacks.
    ///
    /// # Errors
    /// The file cannot be written. `InvalidInput`: the name is too long.
    pub fn set_name(&self, name: Option<&str>) -> io::Result<()> {
        let name = name.unwrap_or_default();
        if name.len() > MAX_NAME {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.set(NAME_LEN_AT, 0)?;
        self.file.write_all_at(name.as_bytes(), NAME_AT as u64)?;
        self.set(NAME_LEN_AT, name.len() as u64)
    }

    /// Sets whether the copy compares what the target has, and writes only what differs. No worker has the file open.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_compares(&self, compares: bool) -> io::Result<()> {
        self.set(COMPARES_AT, u64::from(compares))
    }

    /// Sets whether the target was made for this mirror, so that no other worker has written to it. No worker has the file open.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_fresh(&self, is_fresh: bool) -> io::Result<()> {
        self.set(FRESH_AT, u64::from(is_fresh))
    }

    /// Sets the most bytes that are copied in a second (`None`: no limit), and whether the copy rests.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_pace(&self, speed: Option<u64>, rests: bool) -> io::Result<()> {
        self.set(SPEED_AT, speed.unwrap_or(0))?;
        self.set(RESTS_AT, u64::from(rests))
    }
}

fn regions_bytes(regions: u64) -> usize {
    8 * regions.div_ceil(64) as usize
}
