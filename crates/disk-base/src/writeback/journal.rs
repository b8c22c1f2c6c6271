//! Answered changes of metadata that are not durable yet, in memory that outlives the process.
//!
//! An answered write survives the death of the process (not a power cut): its data was given to the kernel before the
//! answer, and the change of metadata that makes it visible is here, until a commit has made it durable. The file is on
//! tmpfs, one for each image that is open for writing. The next process to open the image recovers the records.
//!
//! # The image of a journal
//! A journal is named after the image's own identifier and its [`Place`](ferrite_host::place::Place), which a volume
//! keeps under another device number. Both have to match. `shelf` finds it, and the journals that may be the image's:
//! of an image with this identifier at another place, or of another one at this place.
//!
//! The file is short at first, and grows ahead of its use: allocated space counts, so a record that there is room for
//! can be made, whatever happens to the tmpfs.
//!
//! After a flush whose sync failed it is void: the data that it refers to may be lost, as after a power cut.
//!
//! Order of stores: a record's words first, then its key (release), so that a visible record is complete; a record is
//! changed by single words; it is freed by clearing its key. A process may die between any two of these.

use std::io::{self, ErrorKind::InvalidData, ErrorKind::NotFound};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::names;
use ferrite_host::naming::Handle;
use ferrite_host::shm::Shm;
use rustix::fs::{Mode, fstat};
use rustix::time::{ClockId, clock_gettime};

use super::void::Void;
use crate::error::warn_once;
use crate::{DiskError, ErrorKind, Raw};
use ferrite_host::place;

mod file;
mod layout;
mod refusals;
mod shelf;

use file::{Content, Held};
use layout::{
    FORMAT_AT, HANDLE_AT, HANDLE_LEN_AT, MAGIC, MAX_PATH_BYTES, PATH_AT, PATH_LEN_AT, PLACE_AT,
    PLACE_LEN_AT, TOLD_AT, VOID_AT, WORD_BYTES, cannot, file_bytes, foreign, halves, not_held,
    records, slots, told_at,
};

pub use layout::{Identity, Record, Slot, TOLD_WORDS, Told};
pub use refusals::{lost, parts};
pub use shelf::JournalState;
pub use shelf::{Kept, Left, Survey, all, any_at, drop_kept, forget, has_own, survey, told_of};

/// Free records that the file always has space for, as long as the tmpfs has some: more than writes are in flight at a
/// time, except with the largest rings.
const AHEAD: u32 = 1 << 10;
/// How long another process may still hold a journal after it has closed the image.
const GRACE_MS: u64 = 2000;
const RETRY_AFTER_MS: u64 = 10;
/// Records that a new file has space for.
const FIRST: u32 = 2 * AHEAD;

/// The records of one image. Without a directory it only bounds their number.
pub struct Journal {
    file: Option<(Arc<Shm>, Held)>,
    words: usize,
    /// Slots below `fresh` that have no record.
    free: Vec<u32>,
    /// Slots from here on were never used. Most images need few, and chains are long.
    fresh: u32,
    /// Slots from here on have no space in the file yet.
    ready: u32,
    capacity: u32,
    /// The tmpfs had no space to grow into.
    stuck: bool,
}

impl Journal {
    /// Opens the image's journal in `dir`, or makes one for `capacity` records of so many words. Its records are
    /// returned, and stay in place. Useless journals of earlier images at this place are removed: the caller has the
    /// image locked.
    ///
    /// # Errors
    /// It cannot be made or read; it is of another kind; another process has it open.
    pub fn open(
        dir: Option<&Path>,
        identity: &Identity,
        words: usize,
        capacity: u32,
    ) -> Result<(Journal, Vec<Record>), DiskError> {
        let mut journal = Journal::without(words, capacity);
        let Some(dir) = dir else { return Ok((journal, Vec::new())) };
        let path = dir.join(identity.file_name());
        shelf::sweep(dir, identity, &path)?;
        let (shm, held) = match take(&path).map_err(|e| not_held(&path, "opened", e))? {
            None => make(dir, &path, identity, words, capacity)?,
            Some(held) => match held.map().map_err(|e| cannot(&path, "opened", e))? {
                Some(shm) if Content::of(&shm) != Content::Nothing => {
                    check(&path, &shm, identity, words, capacity)?;
                    (shm, held)
                }
                // A new file, as other processes may have the old one mapped.
                _ => {
                    held.remove().map_err(|e| cannot(&path, "removed", e))?;
                    make(dir, &path, identity, words, capacity)?
                }
            },
        };
        let records = journal.recover(shm, held);
        Ok((journal, records))
    }

    /// A journal that dies with the process: it only bounds the number of records.
    pub fn without(words: usize, capacity: u32) -> Journal {
        let (free, fresh, ready, stuck) = (Vec::new(), 0, capacity, false);
        Journal { file: None, words, free, fresh, ready, capacity, stuck }
    }

    /// The records that a process has left, for a reader; none if there is no journal.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn peek(
        dir: Option<&Path>,
        identity: &Identity,
        words: usize,
        capacity: u32,
    ) -> Result<Vec<Record>, DiskError> {
        let Some(path) = dir.map(|dir| dir.join(identity.file_name())) else {
            return Ok(Vec::new());
        };
        match Shm::look(&path) {
            Ok(shm) if Content::of(&shm) == Content::Nothing => Ok(Vec::new()),
            Ok(shm) => {
                check(&path, &shm, identity, words, capacity)?;
                Ok(records(&shm, words, capacity))
            }
            Err(e) if matches!(e.kind(), NotFound | InvalidData) => Ok(Vec::new()),
            Err(e) => Err(cannot(&path, "opened", e)),
        }
    }

    /// As [`peek`](Self::peek), of a process that has ended: the records of one that writes to the image change while
    /// they are read.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn peek_left(
        dir: Option<&Path>,
        identity: &Identity,
        words: usize,
        capacity: u32,
    ) -> Result<Vec<Record>, DiskError> {
        let records = Journal::peek(dir, identity, words, capacity)?;
        let path = dir.map(|dir| dir.join(identity.file_name())).filter(|_| !records.is_empty());
        match path.is_some_and(|path| file::is_held(&path).unwrap_or(true)) {
            true => Ok(Vec::new()),
            false => Ok(records),
        }
    }

    fn recover(&mut self, shm: Shm, held: Held) -> Vec<Record> {
        let records = records(&shm, self.words, self.capacity);
        self.ready = slots(shm.len(), self.words).min(self.capacity);
        self.file = Some((Arc::new(shm), held));
        // They come in the order of their slots.
        for record in &records {
            self.free.extend(self.fresh..record.slot.0);
            self.fresh = record.slot.0 + 1;
        }
        records
    }

    fn at(&self, slot: u32) -> usize {
        file_bytes(slot, self.words)
    }

    /// Makes room for so many more records, if the tmpfs has it.
    pub fn reserve(&mut self, records: usize) {
        let wanted = (self.fresh as usize + records).saturating_sub(self.free.len());
        if wanted <= self.ready as usize || self.ready == self.capacity || self.stuck {
            return;
        }
        let ready = (self.ready * 2).max(u32::try_from(wanted).unwrap_or(u32::MAX));
        let ready = ready.min(self.capacity);
        let Some((shm, held)) = &mut self.file else { return };
        match held.lengthen(file_bytes(ready, self.words)) {
            Ok(longer) => (*shm, self.ready) = (Arc::new(longer), ready),
            Err(e) => {
                self.stuck = true;
                tracing::warn!(
                    "{} cannot grow, and flushes will be more frequent: {e}",
                    held.path().display()
                );
            }
        }
    }

    /// Makes a record; `None`: there is no room, and a commit has to make some first.
    ///
    /// # Panics
    /// If `key` is `u64::MAX`, or the number of words does not fit the journal.
    pub fn claim(&mut self, key: u64, words: &[u64]) -> Option<Slot> {
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
        // Doubles the space, so that a commit at half of it finds room.
        self.reserve(self.len().max(AHEAD as usize));
        Some(Slot(slot))
    }

    /// Changes one word of a record.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn store(&mut self, slot: Slot, word: usize, value: u64) {
        assert!(word < self.words, "word {word} of a record of {}", self.words);
        if let Some((shm, _)) = &self.file {
            shm.store_u64(self.at(slot.0) + (1 + word) * WORD_BYTES, value);
        }
    }

    /// Frees a record: its change is durable now, or no longer true.
    pub fn release(&mut self, slot: Slot) {
        if let Some((shm, _)) = &self.file {
            shm.store_u64(self.at(slot.0), 0);
        }
        debug_assert!(!self.free.contains(&slot.0), "{slot:?} is released twice");
        self.free.push(slot.0);
        self.stuck &= self.len() > 0;
    }

    /// The means to make the journal void when a sync fails. `None`: the journal has no file.
    pub fn void(&self) -> Option<Void> {
        self.file.as_ref().map(|(shm, _)| Void::new(Arc::clone(shm), VOID_AT))
    }

    /// Replaces the note about the image besides the records. After a death either the old or the new note is there.
    pub fn tell(&mut self, told: &Told) {
        let Some((shm, _)) = &self.file else { return };
        let next = if shm.load_u64(TOLD_AT) == 1 { 2 } else { 1 };
        for (at, word) in (told_at(next)..).step_by(WORD_BYTES).zip(told) {
            shm.store_u64(at, *word);
        }
        shm.store_u64(TOLD_AT, next);
    }

    /// The number of records.
    #[expect(clippy::len_without_is_empty, reason = "no caller asks that")]
    pub fn len(&self) -> usize {
        self.fresh as usize - self.free.len()
    }

    /// The number of further records for which there is certainly room.
    pub fn room(&self) -> usize {
        self.ready as usize - self.len()
    }

    /// The number of further records for which there is room if the tmpfs has it.
    pub fn left(&self) -> usize {
        self.capacity as usize - self.len()
    }

    /// Removes the journal: the image is closed in good order, and there is nothing to recover.
    ///
    /// # Errors
    /// The file system's.
    pub fn remove(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some((_, held)) if self.len() == 0 => held.remove(),
            other => {
                self.file = other;
                Ok(())
            }
        }
    }
}

/// Warns that a directory which cannot be read may have a dead process's journal of the image, unless the image was not
/// written since the host started: no journal is older.
pub fn warn_unseen(raw: &Raw) {
    let boot = clock_gettime(ClockId::Realtime).tv_sec - clock_gettime(ClockId::Boottime).tv_sec;
    if fstat(raw.fd()).is_ok_and(|stat| raw.is_file() && stat.st_mtime < boot) {
        return;
    }
    warn_once(&format!(
        "run this as root: writes that a killed server has completed for {} may be in a journal, \
         which you may not read",
        raw.path().display()
    ));
}

/// Takes the existing journal. The caller has the image, so another holder is about to release it: a process that ends,
/// or one that has just been forked and has not executed its program yet.
fn take(path: &Path) -> io::Result<Option<Held>> {
    for _ in 0..GRACE_MS / RETRY_AFTER_MS {
        match Held::take(path) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            taken => return taken,
        }
        SystemClock.sleep(Duration::from_millis(RETRY_AFTER_MS));
    }
    Held::take(path)
}

/// Makes the file of an image's journal.
fn make(
    dir: &Path,
    path: &Path,
    identity: &Identity,
    words: usize,
    capacity: u32,
) -> Result<(Shm, Held), DiskError> {
    let made = names::create_dir_all(dir, Mode::RWXU);
    let held = made.and_then(|()| Held::create(path)).map_err(|e| not_held(path, "made", e))?;
    let shm = match held.lengthen(file_bytes(capacity.min(FIRST), words)) {
        Ok(shm) => shm,
        Err(e) => {
            // It is empty, and the first error is the one to report.
            let _ = held.remove();
            return Err(cannot(path, "made", e));
        }
    };
    let [first, second] = halves(identity.id);
    shm.store_u64(8, first);
    shm.store_u64(16, second);
    shm.store_u64(24, words as u64);
    shm.store_u64(32, u64::from(capacity));
    shm.store_u64(FORMAT_AT, identity.format as u64);
    let handle = identity.handle.as_ref().map(Handle::to_bytes).unwrap_or_default();
    for (len_at, at, bytes, most) in [
        (PLACE_LEN_AT, PLACE_AT, identity.place.text().as_bytes(), place::MAX_BYTES),
        (PATH_LEN_AT, PATH_AT, identity.path.as_os_str().as_bytes(), MAX_PATH_BYTES),
        (HANDLE_LEN_AT, HANDLE_AT, &handle, Handle::MAX_BYTES),
    ] {
        // A part of the path would be another one.
        let bytes = if bytes.len() <= most { bytes } else { &[] };
        shm.store_u32(len_at, bytes.len() as u32);
        shm.copy_in(at, bytes);
    }
    // The magic is last: if the process dies before, the file is no journal.
    shm.store_u64(0, MAGIC);
    Ok((shm, held))
}

/// Whether the file is the journal of this image.
fn check(
    path: &Path,
    shm: &Shm,
    identity: &Identity,
    words: usize,
    capacity: u32,
) -> Result<(), DiskError> {
    let refuse = |why: &str| {
        let what = format!("cannot recover what {} says", path.display());
        let help = "answered writes may be in it: open the image as it was open before; ferrite \
                    image journal drop gives them up";
        Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
    };
    if Content::of(shm) == Content::Foreign {
        return Err(foreign(path, shm));
    }
    let made_for = [shm.load_u64(24), shm.load_u64(32)];
    if made_for != [words as u64, u64::from(capacity)] || shm.len() > file_bytes(capacity, words) {
        return refuse("it was made for another format or by another version");
    }
    if [shm.load_u64(8), shm.load_u64(16)] != halves(identity.id)
        || shelf::place_of(shm) != identity.place
    {
        return refuse("it belongs to another image");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
