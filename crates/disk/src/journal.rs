//! Metadata that was answered for and is not durable yet, in memory that outlives the process.
//!
//! An answered write survives the death of the process (not of the power): its data was given to
//! the kernel before the answer, and the change of metadata that makes it visible is here, until a
//! commit has made it durable. The file is on tmpfs, one for each image that is open for writing,
//! named after device and inode, and has the image's UUID inside. Whoever opens the image next
//! takes the records over.
//!
//! The file is short at first, and grows ahead of its use: space that it has counts, so a record
//! that there is room for can be made, whatever becomes of the tmpfs.
//!
//! After a flush whose sync failed it says nothing any more: what it refers to may be lost, as
//! after a power cut.
//!
//! Order of stores: a record's words first, then its key (release), so that a record that is seen
//! is whole; a record is changed by single words; it is freed by clearing its key. A process may
//! die between any two of these.

use std::io::{self, ErrorKind::InvalidData, ErrorKind::NotFound};
use std::path::{Path, PathBuf};

use ferrite_io::shm::Shm;

use crate::{DiskError, ErrorKind, Raw};

/// `ferrjrn1`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrjrn1");
const HEADER_BYTES: usize = 64;
const WORD_BYTES: usize = 8;

/// Where the header says, by anything but 0, that the records are void.
const VOID_AT: usize = 40;

/// Records that the file always has space for besides those that are in it, as long as the tmpfs
/// has some: more than writes are in flight at a time, but for the largest rings.
const AHEAD: u32 = 1 << 10;
/// Records that a new file has space for.
const FIRST: u32 = 2 * AHEAD;

/// Which image a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Device and inode of a file; of a block device its own number, and 0.
    pub(crate) inode: (u64, u64),
    /// The image's own identifier, and when its file was made.
    pub(crate) uuid: [u8; 16],
}

impl Identity {
    /// Of the image with this identifier in `raw`. A copy has the identifier of its original, and
    /// may get the number of a file that is gone; it was made later.
    ///
    /// When the file was changed last says nothing: the process that died did that itself, to its
    /// end, and had no chance to note it. So whoever takes records over looks at what they refer
    /// to. A cluster that another program has used meanwhile and freed again is not found that way.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub(crate) fn of(raw: &Raw, uuid: [u8; 16]) -> io::Result<Identity> {
        let mut uuid = uuid;
        for (byte, made) in uuid.iter_mut().zip(raw.made_ns()?.to_le_bytes()) {
            *byte ^= made;
        }
        Ok(Identity { inode: raw.inode()?, uuid })
    }
}

/// What a record says; the format that wrote it knows what key and words mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    pub(crate) key: u64,
    pub(crate) words: Box<[u64]>,
}

/// The place of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u32);

/// The records of one image. With no directory for it there is only the bound on their number.
pub(crate) struct Journal {
    file: Option<(Shm, PathBuf)>,
    words: usize,
    /// Slots below `fresh` that have no record.
    free: Vec<u32>,
    /// From here on no slot was ever used. Most images need few, and chains are long.
    fresh: u32,
    /// From here on the file has no space yet.
    ready: u32,
    capacity: u32,
    /// The tmpfs had no space to grow into.
    stuck: bool,
}

impl Journal {
    /// Opens the image's journal in `dir`, or makes one for `capacity` records of so many words.
    /// The records that are in it come back, and stay where they are.
    ///
    /// # Errors
    /// It cannot be made or read; it is of another image or another kind.
    pub(crate) fn open(
        dir: Option<&Path>,
        identity: Identity,
        words: usize,
        capacity: u32,
    ) -> Result<(Journal, Vec<Record>), DiskError> {
        let (free, fresh, ready, stuck) = (Vec::new(), 0, capacity, false);
        let mut journal = Journal { file: None, words, free, fresh, ready, capacity, stuck };
        let mut records = Vec::new();
        if let Some(dir) = dir {
            let path = path_in(dir, identity.inode);
            let shm = match Shm::open(&path) {
                Ok(shm) if says_nothing(&shm) => {
                    drop(shm);
                    make(dir, &path, identity, words, capacity)
                        .map_err(|e| cannot(&path, "made", e))?
                }
                Ok(shm) => {
                    check(&path, &shm, identity, words, capacity)?;
                    shm
                }
                Err(e) if matches!(e.kind(), NotFound | InvalidData) => {
                    make(dir, &path, identity, words, capacity)
                        .map_err(|e| cannot(&path, "made", e))?
                }
                Err(e) => return Err(cannot(&path, "opened", e)),
            };
            journal.ready = slots(shm.len(), words).min(capacity);
            journal.file = Some((shm, path));
            records = journal.records();
        }
        // The records come in the order of their slots.
        for record in &records {
            journal.free.extend(journal.fresh..record.slot.0);
            journal.fresh = record.slot.0 + 1;
        }
        Ok((journal, records))
    }

    /// The records that a process has left behind, for those that only want to read; none if there
    /// is no journal.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn peek(
        dir: Option<&Path>,
        identity: Identity,
        words: usize,
        capacity: u32,
    ) -> Result<Vec<Record>, DiskError> {
        match Self::holds(dir, identity.inode) {
            true => Self::open(dir, identity, words, capacity).map(|(_, records)| records),
            false => Ok(Vec::new()),
        }
    }

    /// Whether a process has left records behind for the image with this inode. Nothing is made or
    /// changed: other readers may be looking at it, too.
    pub(crate) fn holds(dir: Option<&Path>, inode: (u64, u64)) -> bool {
        match dir.map(|dir| Shm::open(path_in(dir, inode))) {
            Some(Ok(shm)) => !says_nothing(&shm),
            // What cannot be looked at may hold any.
            Some(Err(e)) => !matches!(e.kind(), NotFound | InvalidData),
            None => false,
        }
    }

    /// Removes what is left of an image that was in this file or on this device before: what is made
    /// there now is another one, even if nothing in it says so.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn forget(dir: Option<&Path>, inode: (u64, u64)) -> Result<(), DiskError> {
        let Some(path) = dir.map(|dir| path_in(dir, inode)) else { return Ok(()) };
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != NotFound => Err(cannot(&path, "removed", e)),
            _ => Ok(()),
        }
    }

    fn records(&self) -> Vec<Record> {
        let Some((shm, _)) = &self.file else { return Vec::new() };
        let record = |slot| {
            let at = self.at(slot);
            let key = shm.load_u64(at).checked_sub(1)?;
            let words = (1..=self.words).map(|i| shm.load_u64(at + i * WORD_BYTES)).collect();
            Some(Record { slot: Slot(slot), key, words })
        };
        (0..self.ready).filter_map(record).collect()
    }

    fn at(&self, slot: u32) -> usize {
        file_bytes(slot, self.words)
    }

    /// Sees to it that there is room for so many more records, if the tmpfs has it.
    pub(crate) fn reserve(&mut self, records: usize) {
        let wanted = (self.fresh as usize + records).saturating_sub(self.free.len());
        if wanted <= self.ready as usize || self.ready == self.capacity || self.stuck {
            return;
        }
        let ready = (self.ready * 2).max(u32::try_from(wanted).unwrap_or(u32::MAX));
        let ready = ready.min(self.capacity);
        let Some((shm, path)) = &mut self.file else { return };
        match Shm::lengthen(&path, file_bytes(ready, self.words)) {
            Ok(longer) => (*shm, self.ready) = (longer, ready),
            Err(e) => {
                self.stuck = true;
                tracing::warn!(
                    "{} cannot grow, and flushes will be more frequent: {e}",
                    path.display()
                );
            }
        }
    }

    /// A new record; `None`: there is no room, and a commit has to make some first.
    ///
    /// # Panics
    /// If `key` is `u64::MAX`, or the number of words is not what the journal was made for.
    pub(crate) fn claim(&mut self, key: u64, words: &[u64]) -> Option<Slot> {
        assert!(key < u64::MAX && words.len() == self.words, "not a record of this journal");
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.fresh < self.ready => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        if let Some((shm, _)) = &self.file {
            let at = self.at(slot);
            for (i, word) in words.iter().enumerate() {
                shm.store_u64(at + (1 + i) * WORD_BYTES, *word);
            }
            shm.store_u64(at, key + 1);
        }
        // As much again as there is: who commits at half of it shall find that.
        self.reserve(self.len().max(AHEAD as usize));
        Some(Slot(slot))
    }

    /// Changes one word of a record.
    ///
    /// # Panics
    /// If there is no such word.
    pub(crate) fn store(&mut self, slot: Slot, word: usize, value: u64) {
        assert!(word < self.words, "word {word} of a record of {}", self.words);
        if let Some((shm, _)) = &self.file {
            shm.store_u64(self.at(slot.0) + (1 + word) * WORD_BYTES, value);
        }
    }

    /// What the record says is durable now, or no longer true.
    pub(crate) fn release(&mut self, slot: Slot) {
        if let Some((shm, _)) = &self.file {
            shm.store_u64(self.at(slot.0), 0);
        }
        debug_assert!(!self.free.contains(&slot.0), "{slot:?} is released twice");
        self.free.push(slot.0);
        self.stuck &= self.len() > 0;
    }

    /// What the records refer to may be lost: nobody takes them over.
    pub(crate) fn void(&mut self) {
        if let Some((shm, _)) = &self.file {
            shm.store_u64(VOID_AT, 1);
        }
    }

    /// Records in it.
    pub(crate) fn len(&self) -> usize {
        self.fresh as usize - self.free.len()
    }

    /// Records that there is room for, whatever happens.
    pub(crate) fn room(&self) -> usize {
        self.ready as usize - self.len()
    }

    /// Records that there is room for if the tmpfs has it.
    pub(crate) fn left(&self) -> usize {
        self.capacity as usize - self.len()
    }

    /// The image is closed in good order: there is nothing to take over.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn remove(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some((_, path)) if self.len() == 0 => std::fs::remove_file(path),
            other => {
                self.file = other;
                Ok(())
            }
        }
    }
}

/// Bytes of a file with space for so many records.
fn file_bytes(slots: u32, words: usize) -> usize {
    HEADER_BYTES + slots as usize * (1 + words) * WORD_BYTES
}

/// Records that a file of so many bytes has space for.
fn slots(bytes: usize, words: usize) -> u32 {
    let slots = bytes.saturating_sub(HEADER_BYTES) / ((1 + words) * WORD_BYTES);
    u32::try_from(slots).unwrap_or(u32::MAX)
}

fn path_in(dir: &Path, (device, inode): (u64, u64)) -> PathBuf {
    dir.join(format!("{device:x}-{inode:x}.journal"))
}

fn make(
    dir: &Path,
    path: &Path,
    identity: Identity,
    words: usize,
    capacity: u32,
) -> io::Result<Shm> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let shm = Shm::create(path, file_bytes(capacity.min(FIRST), words))?;
    let [first, second] = halves(identity.uuid);
    shm.store_u64(8, first);
    shm.store_u64(16, second);
    shm.store_u64(24, words as u64);
    shm.store_u64(32, u64::from(capacity));
    // Last: a process may die before, and what it leaves is no journal then.
    shm.store_u64(0, MAGIC);
    Ok(shm)
}

/// Whether nothing was answered for in it: its maker died over it, everything is durable, or it is
/// void. Whose it was is all the same then; an image may have been resized since, or its inode be
/// another's.
fn says_nothing(shm: &Shm) -> bool {
    if shm.len() < HEADER_BYTES || shm.load_u64(0) != MAGIC || shm.load_u64(VOID_AT) != 0 {
        return true;
    }
    let words = usize::try_from(shm.load_u64(24)).unwrap_or(usize::MAX);
    if words >= shm.len() {
        return false;
    }
    let keys = (0..slots(shm.len(), words)).map(|slot| shm.load_u64(file_bytes(slot, words)));
    keys.into_iter().all(|key| key == 0)
}

fn halves(uuid: [u8; 16]) -> [u64; 2] {
    let n = u128::from_le_bytes(uuid);
    [n as u64, (n >> 64) as u64]
}

/// Whether the file is the journal of this image.
fn check(
    path: &Path,
    shm: &Shm,
    identity: Identity,
    words: usize,
    capacity: u32,
) -> Result<(), DiskError> {
    let refuse = |why: &str| {
        let what = format!("cannot take over what {} says", path.display());
        let help = "answered writes may be in it: open the image as it was open before; if it is \
                    left from an image that is gone, remove the file";
        Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
    };
    let made_for = [shm.load_u64(24), shm.load_u64(32)];
    if made_for != [words as u64, u64::from(capacity)] || shm.len() > file_bytes(capacity, words) {
        return refuse("it was made for another format or by another version");
    }
    if [shm.load_u64(8), shm.load_u64(16)] != halves(identity.uuid) {
        return refuse("it belongs to an image with another UUID");
    }
    Ok(())
}

fn cannot(path: &Path, verb: &str, e: io::Error) -> DiskError {
    let help = "it keeps what was answered if this process dies; it needs a tmpfs with room (df)";
    let what = format!("{} cannot be {verb}", path.display());
    DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity { inode: (1, 2), uuid: [7; 16] };

    fn open(dir: &Path) -> (Journal, Vec<Record>) {
        Journal::open(Some(dir), IDENTITY, 3, 4).unwrap()
    }

    #[test]
    fn what_was_claimed_is_there_for_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, records) = open(dir.path());
        assert!(records.is_empty());
        let a = journal.claim(0, &[1, 2, 3]).unwrap();
        let b = journal.claim(9, &[4, 5, 6]).unwrap();
        journal.store(b, 1, 50);
        journal.release(a);
        drop(journal);
        let (mut journal, records) = open(dir.path());
        assert_eq!(records, [Record { slot: b, key: 9, words: Box::new([4, 50, 6]) }]);
        assert_eq!((journal.len(), journal.room()), (1, 3));
        journal.remove().unwrap();
        assert_eq!(Journal::peek(Some(dir.path()), IDENTITY, 3, 4).unwrap(), records);
        journal.release(b);
        journal.remove().unwrap();
        assert!(Journal::peek(Some(dir.path()), IDENTITY, 3, 4).unwrap().is_empty());
    }

    #[test]
    fn a_full_journal_gives_no_slot_with_a_file_or_without() {
        let dir = tempfile::tempdir().unwrap();
        for dir in [Some(dir.path()), None] {
            let (mut journal, _) = Journal::open(dir, IDENTITY, 1, 2).unwrap();
            let slot = journal.claim(1, &[0]).unwrap();
            assert!(journal.claim(2, &[0]).is_some() && journal.claim(3, &[0]).is_none());
            journal.release(slot);
            assert!(journal.claim(3, &[0]).is_some());
        }
    }

    #[test]
    fn the_journal_of_another_image_or_kind_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = open(dir.path());
        let slot = journal.claim(1, &[1, 2, 3]).unwrap();
        let other = Identity { uuid: [8; 16], ..IDENTITY };
        assert!(Journal::open(Some(dir.path()), other, 3, 4).is_err());
        assert!(Journal::open(Some(dir.path()), IDENTITY, 2, 4).is_err());
        // One that says nothing is nobody's.
        journal.release(slot);
        assert!(Journal::open(Some(dir.path()), other, 2, 4).unwrap().1.is_empty());
    }

    #[test]
    fn a_void_journal_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = open(dir.path());
        journal.claim(1, &[1, 2, 3]).unwrap();
        journal.void();
        assert!(!Journal::holds(Some(dir.path()), IDENTITY.inode));
        journal.claim(2, &[1, 2, 3]).unwrap();
        drop(journal);
        let (mut journal, records) = open(dir.path());
        assert!(records.is_empty() && journal.claim(3, &[1, 2, 3]).is_some());
        assert_eq!(open(dir.path()).1.len(), 1);
    }

    #[test]
    fn a_journal_is_short_until_it_is_used_and_the_next_process_gets_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Journal::open(Some(dir.path()), IDENTITY, 8, 1 << 16).unwrap();
        let bytes = || path_in(dir.path(), IDENTITY.inode).metadata().unwrap().len();
        let (mut journal, _) = open();
        for key in 0..1000 {
            journal.claim(key, &[key; 8]).unwrap();
        }
        assert!(bytes() < 160 << 10, "{} bytes", bytes());
        for key in 1000..1 << 16 {
            assert!(journal.room() >= journal.left().min(AHEAD as usize));
            journal.claim(key, &[key; 8]).unwrap();
        }
        assert!(journal.claim(1 << 16, &[0; 8]).is_none());
        drop(journal);
        let (_, records) = open();
        let right = |(key, r): (u64, &Record)| r.key == key && *r.words == [key; 8];
        assert!(records.len() == 1 << 16 && (0..).zip(&records).all(right));
    }

    #[test]
    fn where_a_journal_cannot_grow_its_room_is_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(Some(dir.path()), IDENTITY, 1, 1 << 16).unwrap();
        std::fs::remove_file(path_in(dir.path(), IDENTITY.inode)).unwrap();
        let mut slots = Vec::new();
        while journal.room() > 0 {
            slots.push(journal.claim(1, &[1]).unwrap());
        }
        assert_eq!(slots.len(), FIRST as usize);
        assert!(journal.claim(1, &[1]).is_none() && journal.left() > 0);
        journal.release(slots[0]);
        assert!(journal.claim(1, &[1]).is_some());
    }
}
