//! Which blocks of each region have changed, in memory that survives the process and no power cut.
//!
//! A region has a word for this opening, and one for each map, with a bit for each block:
//! * *now*: blocks that this opening has written. A word that is not 0 says also that the region's bit is durable in
//!   all maps. This is the only word that the hot path reads.
//! * *before*: blocks that earlier openings have written since the map was begun.
//!
//! The file is on tmpfs. It belongs to one file of maps, and to one opening of that: both know the opening's random
//! number. Otherwise *before* is made from the durable bits, with all blocks of a marked region. Memory without a file
//! has only *now*, since no other process reads it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_host::names;
use ferrite_host::shm::Shm;
use rustix::fs::Mode;

use super::layout::{Head, MapId, State, regions};
use super::{BLOCK_BYTES, REGION_BYTES};

/// `ferrfin2`.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrfin2");
const HEADER_BYTES: usize = 4096;
const OPENING_AT: usize = 8;
const ID_AT: usize = 16;
const WORDS_AT: usize = HEADER_BYTES / 8;
/// The longest file: of a disk of 4 TiB with three maps. A larger one has its blocks in the process alone.
const MAX_FILE_BYTES: usize = HEADER_BYTES + (32 << 20);

/// The words of a disk.
pub(crate) struct Fine {
    shm: Shm,
    /// Maps that have words of their own: 0 without a file.
    maps: usize,
}

/// The file's identifier as two words.
fn halves(id: &MapId) -> [u64; 2] {
    let id = u128::from_le_bytes(*id);
    [id as u64, (id >> 64) as u64]
}

/// The path of the file in the directory of answered changes.
pub(crate) fn path(dir: &Path, id: &MapId, journal_end: &str) -> PathBuf {
    let end = journal_end.strip_suffix(".journal").unwrap_or(journal_end);
    dir.join(format!("{:032x}{end}.dirty", u128::from_le_bytes(*id)))
}

/// Whether a file of this name is of the image with this end of a journal's name.
pub(crate) fn is_of(name: &OsStr, journal_end: &str) -> bool {
    let end = journal_end.strip_suffix(".journal").unwrap_or(journal_end);
    let id = name.to_str().and_then(|name| name.strip_suffix(".dirty")?.strip_suffix(end));
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn fits(shm: &Shm, head: &Head) -> bool {
    shm.len() == bytes(regions(head.bytes), head.maps)
        && shm.load_u64(0) == MAGIC
        && shm.load_u64(OPENING_AT) == head.opening
        && [shm.load_u64(ID_AT), shm.load_u64(ID_AT + 8)] == halves(&head.file)
}

fn bytes(regions: u64, maps: usize) -> usize {
    HEADER_BYTES + 8 * (1 + maps) * regions as usize
}

/// Makes the file for a file of maps with this head. `None`: it would be too long, or there is no place for it.
fn make(file: &Path, head: &Head) -> Option<Fine> {
    let len = bytes(regions(head.bytes), head.maps);
    if len > MAX_FILE_BYTES {
        return None;
    }
    names::create_dir_all(file.parent()?, Mode::RWXU).ok()?;
    // A reader may have the old one mapped: it keeps it.
    let _ = names::remove_file(file);
    Some(Fine { shm: Shm::create(file, len).ok()?, maps: head.maps })
}

/// Makes the file for a new file of maps, of which `before` says the blocks of a map's region.
pub(crate) fn write(file: &Path, head: &Head, before: impl Fn(usize, u64) -> u64) -> Option<()> {
    let fine = make(file, head)?;
    fine.begin(head, before);
    Some(())
}

impl Fine {
    /// The words of a disk that is opened for writing. `marked` says whether the durable bit of a region is set in a
    /// map.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn open(
        file: Option<&Path>,
        head: &Head,
        marked: impl Fn(usize, u64) -> bool,
    ) -> std::io::Result<Fine> {
        if let Some(shm) = file.and_then(|file| Shm::open(file).ok())
            && fits(&shm, head)
        {
            let fine = Fine { shm, maps: head.maps };
            // Of a killed process: its marks are durable.
            if head.state != State::Open {
                fine.end_opening();
            }
            return Ok(fine);
        }
        let fine = match file.and_then(|file| make(file, head)) {
            Some(fine) => fine,
            None => Fine { shm: Shm::private(bytes(regions(head.bytes), 0))?, maps: 0 },
        };
        fine.begin(head, |map, region| if marked(map, region) { u64::MAX } else { 0 });
        Ok(fine)
    }

    fn begin(&self, head: &Head, before: impl Fn(usize, u64) -> u64) {
        for region in 0..self.regions() {
            for map in 0..self.maps {
                let blocks = before(map, region);
                if blocks != 0 {
                    self.before(map, region).store(blocks, Ordering::Relaxed);
                }
            }
        }
        let [first, second] = halves(&head.file);
        self.shm.store_u64(ID_AT, first);
        self.shm.store_u64(ID_AT + 8, second);
        self.shm.store_u64(OPENING_AT, head.opening);
        self.shm.store_u64(0, MAGIC);
    }

    /// Looks at the words that a process has left, or uses. `None`: they do not fit.
    pub(crate) fn look(file: &Path, head: &Head) -> Option<Fine> {
        let shm = Shm::look(file).ok()?;
        fits(&shm, head).then_some(Fine { shm, maps: head.maps })
    }

    /// From now on the words are of this opening.
    pub(crate) fn begin_opening(&self, opening: u64) {
        self.shm.store_u64(OPENING_AT, opening);
    }

    /// No region counts as marked any more.
    pub(crate) fn end_opening(&self) {
        for region in 0..self.regions() {
            let Some(now) = self.now(region) else { return };
            // First the copy: the process may die in between.
            let blocks = now.load(Ordering::Acquire);
            if blocks != 0 {
                for map in 0..self.maps {
                    self.before(map, region).fetch_or(blocks, Ordering::AcqRel);
                }
                now.store(0, Ordering::Release);
            }
        }
    }

    fn regions(&self) -> u64 {
        ((self.shm.len() - HEADER_BYTES) / (8 * (1 + self.maps))) as u64
    }

    /// The place of a region's words.
    #[inline]
    fn at(&self, region: u64) -> usize {
        WORDS_AT + (1 + self.maps) * region as usize
    }

    #[inline]
    fn now(&self, region: u64) -> Option<&AtomicU64> {
        self.shm.words().get(self.at(region))
    }

    fn before(&self, map: usize, region: u64) -> &AtomicU64 {
        &self.shm.words()[self.at(region) + 1 + map]
    }

    /// Whether all regions of a range are marked; then their blocks are, too.
    #[inline]
    pub(crate) fn is_marked(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        for region in offset / REGION_BYTES..end.div_ceil(REGION_BYTES) {
            // Regions beyond the map count as changed without it.
            let Some(word) = self.now(region) else { return true };
            let (now, wanted) = (word.load(Ordering::Acquire), blocks(region, offset, end));
            if now == 0 {
                return false;
            }
            if now & wanted != wanted {
                word.fetch_or(wanted, Ordering::AcqRel);
            }
        }
        true
    }

    /// Marks the blocks of a range whose regions are durable in all maps.
    pub(crate) fn mark(&self, offset: u64, len: u64) {
        let end = offset + len;
        for region in offset / REGION_BYTES..end.div_ceil(REGION_BYTES) {
            let Some(word) = self.now(region) else { return };
            word.fetch_or(blocks(region, offset, end), Ordering::AcqRel);
        }
    }

    /// Whether each map has words of its own.
    pub(crate) fn has_words(&self) -> bool {
        self.maps > 0
    }

    /// The next write to a region is to set its bit again, and one map has nothing of it any more. The others keep what
    /// they had: they get the copy first, since the process may die in between.
    pub(crate) fn clear(&self, map: usize, region: u64) {
        let Some(now) = self.now(region) else { return };
        let blocks = now.load(Ordering::Acquire);
        for other in (0..self.maps).filter(|other| *other != map) {
            self.before(other, region).fetch_or(blocks, Ordering::AcqRel);
        }
        if map < self.maps {
            self.before(map, region).store(0, Ordering::Release);
        }
        now.store(0, Ordering::Release);
    }

    /// The blocks of a region that have changed since a map was begun.
    ///
    /// # Panics
    /// Of memory without a file, or of a map or region that it does not have.
    pub(crate) fn changed(&self, map: usize, region: u64) -> u64 {
        let now = self.now(region).map_or(u64::MAX, |now| now.load(Ordering::Acquire));
        now | self.before(map, region).load(Ordering::Acquire)
    }
}

/// The bits of a range's blocks in the word of a region.
#[inline]
fn blocks(region: u64, offset: u64, end: u64) -> u64 {
    let start = region * REGION_BYTES;
    let first = offset.saturating_sub(start) / BLOCK_BYTES;
    let last = (end.min(start + REGION_BYTES) - 1 - start) / BLOCK_BYTES;
    (u64::MAX << first) & (u64::MAX >> (63 - last))
}
