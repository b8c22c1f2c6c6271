//! The layout of a journal's file, its image, and the errors about it.

use std::io::{self, ErrorKind::AlreadyExists, ErrorKind::PermissionDenied, ErrorKind::WouldBlock};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use ferrite_host::naming::Handle;
use ferrite_host::shm::Shm;

use crate::{DiskError, ErrorKind, Format, Raw};
use ferrite_host::place::{self, Place};

/// `ferrjrn3`, little-endian.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"ferrjrn3");
pub(super) const HEADER_BYTES: usize = 8192;
pub(super) const WORD_BYTES: usize = 8;
pub(super) const EXTENSION: &str = ".journal";

/// The place of the word that makes the records void, if it is not 0.
pub(super) const VOID_AT: usize = 40;
/// The place of the image's format, of the lengths of its identity, and of these.
pub(super) const FORMAT_AT: usize = 48;
pub(super) const PLACE_LEN_AT: usize = 56;
pub(super) const PATH_LEN_AT: usize = 60;
pub(super) const HANDLE_LEN_AT: usize = 64;
pub(super) const PLACE_AT: usize = 72;
pub(super) const HANDLE_AT: usize = PLACE_AT + place::MAX_BYTES;
pub(super) const PATH_AT: usize = HANDLE_AT + Handle::MAX_BYTES;
/// The longest path that the kernel takes.
pub(super) const MAX_PATH_BYTES: usize = 4096;
/// The word for which of the two following notes is the [last](super::Journal::tell): 1 or 2; 0: there is none.
pub(super) const TOLD_AT: usize = HEADER_BYTES - 128;
const _: () = assert!(PATH_AT + MAX_PATH_BYTES <= TOLD_AT);

/// Words of a format's note about its image besides the records.
pub const TOLD_WORDS: usize = 7;
/// A format's note about its image besides the records.
pub type Told = [u64; TOLD_WORDS];

/// The identity of a journal's image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub(crate) format: Format,
    /// The image's own identifier.
    pub id: [u8; 16],
    pub(crate) place: Place,
    /// The path by which it was opened; for people, and to check whether it exists.
    pub(super) path: PathBuf,
    /// The handle of a file, which may have been renamed.
    pub(super) handle: Option<Handle>,
}

impl Identity {
    /// The identity of the image with this identifier in `raw`.
    ///
    /// The time of the file's last change is useless: the dead process changed the file to its end, and could not note
    /// the time. So recovery examines what the records refer to, and a qcow2 image is marked.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn of(raw: &Raw, format: Format, id: [u8; 16]) -> io::Result<Identity> {
        let path = std::path::absolute(raw.path())?;
        let handle = if raw.is_file() { Handle::of(raw.fd().as_fd())? } else { None };
        Ok(Identity { format, id, place: Place::of(raw.fd(), &path)?, path, handle })
    }

    /// The name of its journal, as users see it.
    pub fn name(&self) -> String {
        self.file_name().trim_end_matches(EXTENSION).to_owned()
    }

    pub(super) fn file_name(&self) -> String {
        format!("{:032x}{}", u128::from_be_bytes(self.id), self.place.journal_end())
    }
}

/// A record; its format knows the meaning of key and words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its slot in the journal.
    pub slot: Slot,
    /// Its key, in the numbers of its format.
    pub key: u64,
    /// Its words, in the meaning of its format.
    pub words: Box<[u64]>,
}

/// The place of a record in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(super) u32);

/// Bytes of a file with space for so many records.
pub(super) fn file_bytes(slots: u32, words: usize) -> usize {
    HEADER_BYTES + slots as usize * (1 + words) * WORD_BYTES
}

/// Records that a file of so many bytes has space for.
pub(super) fn slots(bytes: usize, words: usize) -> u32 {
    let slots = bytes.saturating_sub(HEADER_BYTES) / ((1 + words) * WORD_BYTES);
    u32::try_from(slots).unwrap_or(u32::MAX)
}

pub(super) fn told_at(which: u64) -> usize {
    TOLD_AT + WORD_BYTES + (which as usize - 1) * TOLD_WORDS * WORD_BYTES
}

/// The note that a process has [left](Journal::tell), if any.
pub(super) fn told(shm: &Shm) -> Option<Told> {
    let which = shm.load_u64(TOLD_AT);
    let words = (1..=2).contains(&which).then(|| told_at(which))?;
    Some(std::array::from_fn(|i| shm.load_u64(words + i * WORD_BYTES)))
}

/// The records of a file, in the order of their slots.
pub(super) fn records(shm: &Shm, words: usize, capacity: u32) -> Vec<Record> {
    let record = |slot| {
        let at = file_bytes(slot, words);
        let key = shm.load_u64(at).checked_sub(1)?;
        let words = (1..=words).map(|i| shm.load_u64(at + i * WORD_BYTES)).collect();
        Some(Record { slot: Slot(slot), key, words })
    };
    (0..slots(shm.len(), words).min(capacity)).filter_map(record).collect()
}

pub(super) fn halves(id: [u8; 16]) -> [u64; 2] {
    let n = u128::from_le_bytes(id);
    [n as u64, (n >> 64) as u64]
}

/// The version of a journal by its magic. `None`: it is no journal.
fn version(magic: u64) -> Option<char> {
    let [name @ .., digit] = magic.to_le_bytes();
    let [ours @ .., _] = MAGIC.to_le_bytes();
    (name == ours && digit.is_ascii_digit()).then_some(char::from(digit))
}

/// The error for a journal of another version of this program, whose content is unknown. A program reads the version
/// before its own, too, once that has been in a release (processes.md 6).
pub(super) fn foreign(path: &Path, shm: &Shm) -> DiskError {
    let what = format!("cannot recover what {} says", path.display());
    let word = |version: Option<char>| version.map_or_else(String::new, |v| format!(" {v}"));
    let was = if shm.len() < WORD_BYTES { None } else { version(shm.load_u64(0)) };
    let why = format!(
        "version{} of journals is read, and another version{} of this program has left it; answered \
         writes may be in it",
        word(version(MAGIC)),
        word(was)
    );
    let name = path.file_stem().unwrap_or_default().display();
    let help = format!(
        "open the image with that version once, which brings them into the image; ferrite image \
         journal drop --force {name} gives them up"
    );
    DiskError::new(ErrorKind::Unsuitable, what, why, help)
}

/// The error when a journal cannot be [`Held`](super::file::Held).
pub(super) fn not_held(path: &Path, verb: &str, e: io::Error) -> DiskError {
    if !matches!(e.kind(), WouldBlock | AlreadyExists) {
        return cannot(path, verb, e);
    }
    let what = format!("{} cannot be {verb}", path.display());
    let why = "another process has the image open, maybe by another device number";
    DiskError::new(ErrorKind::InUse, what, why, "stop what uses the image first")
}

pub(super) fn cannot(path: &Path, verb: &str, e: io::Error) -> DiskError {
    let help = match e.kind() {
        PermissionDenied => {
            "run it as root: only root can keep the crash journal there. Or, to export it, set XDG_RUNTIME_DIR to a \
             folder of this user on a tmpfs, as a login does"
        }
        _ => "it is the crash journal, which needs a tmpfs with room (df)",
    };
    let what = format!("{} cannot be {verb}", path.display());
    DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
}
