//! The maps of an open disk, for those who ask while it is open.
//!
//! An answer has all changes that were answered before the question: a map may name too much, and never too little.

use std::ops::Range;
use std::path::Path;

use super::fine::Fine;
use super::found::{Found, fine_path};
use super::layout::{Map, MapId};
use super::{BLOCK_BYTES, REGION_BYTES, Tracker};
use crate::{DiskError, Raw};

/// Most regions that one answer looks at: 256 GiB.
const MAX_REGIONS: u64 = 1 << 16;

/// A map that can be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownMap {
    /// Its name.
    pub name: String,
    /// Its identifier, which no other map has. A copy of the map has the same.
    pub id: MapId,
}

impl KnownMap {
    pub(super) fn of(map: &Map) -> KnownMap {
        KnownMap { name: map.name.clone(), id: map.id }
    }
}

/// A part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Bytes.
    pub len: u64,
    /// Whether it may have changed since the map was begun.
    pub changed: bool,
}

/// The maps of an open disk.
#[derive(Clone, Copy, Debug)]
pub enum View<'a> {
    /// The disk is open for writing, and its changes are recorded.
    Live(&'a Tracker),
    /// The disk is open for reading only.
    AtRest(&'a AtRest),
}

impl View<'_> {
    /// The maps.
    pub fn maps(&self) -> &[KnownMap] {
        match self {
            View::Live(tracker) => tracker.known(),
            View::AtRest(maps) => &maps.known,
        }
    }

    /// The beginning of a range by what has changed since the map of this identifier was begun: at most `most` stretches,
    /// of which neighbours differ. The last one may end before the range does. `None`: there is no such map any more.
    pub fn stretches(&self, id: &MapId, range: Range<u64>, most: usize) -> Option<Vec<Stretch>> {
        let map = self.maps().iter().position(|map| map.id == *id)?;
        let limits = Limits { stretches: most, regions: MAX_REGIONS };
        Some(match self {
            View::Live(tracker) => tracker
                .with_blocks(map, |bytes, blocks| stretches(range.clone(), bytes, limits, blocks)),
            View::AtRest(maps) => {
                stretches(range, maps.bytes, limits, |region| maps.blocks(map, region))
            }
        })
    }
}

/// The maps of an image that no process writes to as long as it is open here.
pub struct AtRest {
    known: Vec<KnownMap>,
    maps: Vec<Map>,
    /// The size of the disk that they are for.
    bytes: u64,
    fine: Option<Fine>,
}

impl std::fmt::Debug for AtRest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AtRest").field("known", &self.known).finish_non_exhaustive()
    }
}

impl AtRest {
    /// The maps beside the image in `raw`, which is open for reading; its disk has so many bytes. `None`: it has no maps,
    /// or they are void, which the log says.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn load(
        raw: &Raw,
        bytes: u64,
        state_dir: Option<&Path>,
    ) -> Result<Option<AtRest>, DiskError> {
        let Some(found) = Found::open(raw, bytes, false)? else { return Ok(None) };
        let (path, void) = (found.path.display(), found.void.as_deref());
        let (Some(content), None) = (&found.content, void) else {
            let why = void.unwrap_or("they cannot be read");
            crate::warn_once(&format!(
                "the dirty maps {path} are void, and clients do not see them: {why}; make a full backup"
            ));
            return Ok(None);
        };
        let fine = state_dir.and_then(|dir| {
            Fine::look(&fine_path(dir, raw.fd(), raw.path(), &content.head)?, &content.head)
        });
        Ok(Some(AtRest {
            known: content.maps.iter().map(KnownMap::of).collect(),
            maps: content.maps.clone(),
            bytes: content.head.bytes,
            fine,
        }))
    }

    fn blocks(&self, map: usize, region: u64) -> u64 {
        changed_blocks(&self.maps[map], region, self.fine.as_ref().map(|fine| (fine, map)))
    }
}

/// The changed blocks of a region that the map has a bit for: without words in memory, all of a marked one.
pub(super) fn changed_blocks(map: &Map, region: u64, fine: Option<(&Fine, usize)>) -> u64 {
    let is_set = map.bits[region as usize / 64] >> (region % 64) & 1 != 0;
    match fine {
        _ if !is_set => 0,
        Some((fine, index)) => fine.changed(index, region),
        None => u64::MAX,
    }
}

/// How far one look goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) stretches: usize,
    pub(super) regions: u64,
}

impl Limits {
    pub(super) const NONE: Limits = Limits { stretches: usize::MAX, regions: u64::MAX };
}

/// The beginning of a range by what has changed. `blocks` says the changed blocks of a region of a disk that had so many
/// bytes when its maps were begun. The bytes behind these count as changed.
pub(super) fn stretches(
    range: Range<u64>,
    bytes: u64,
    limits: Limits,
    blocks: impl Fn(u64) -> u64,
) -> Vec<Stretch> {
    let (mut found, mut at) = (Vec::<Stretch>::new(), range.start);
    let mut regions = 0;
    while at < range.end && regions < limits.regions {
        // Regions beyond the map's size have no bits.
        let (word, end) = match at < bytes {
            true => {
                let region = at / REGION_BYTES;
                (blocks(region), ((region + 1) * REGION_BYTES).min(bytes).min(range.end))
            }
            false => (u64::MAX, range.end),
        };
        regions += 1;
        while at < end {
            let bit = at % REGION_BYTES / BLOCK_BYTES;
            let changed = word >> bit & 1 != 0;
            // All equal bits from this one on.
            let same = if changed {
                (!word >> bit).trailing_zeros()
            } else {
                (word >> bit).trailing_zeros()
            };
            let until = match word {
                0 | u64::MAX => end,
                _ => (at - at % BLOCK_BYTES).saturating_add(u64::from(same) * BLOCK_BYTES).min(end),
            };
            let (len, is_full) = (until - at, found.len() == limits.stretches);
            match found.last_mut() {
                Some(last) if last.changed == changed => last.len += len,
                _ if is_full => return found,
                _ => found.push(Stretch { len, changed }),
            }
            at = until;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { stretches: 100, regions: 100 };

    fn look(range: Range<u64>, bytes: u64, limits: Limits, words: &[u64]) -> Vec<(u64, bool)> {
        let found = stretches(range, bytes, limits, |region| words[region as usize]);
        found.iter().map(|stretch| (stretch.len, stretch.changed)).collect()
    }

    #[test]
    fn stretches_follow_the_blocks_from_any_byte_to_any_byte() {
        let (block, region) = (BLOCK_BYTES, REGION_BYTES);
        let words = [0b0110, u64::MAX, 0, 1 << 63];
        let bytes = 4 * region;
        assert_eq!(
            look(0..bytes, bytes, LIMITS, &words),
            [
                (block, false),
                (2 * block, true),
                (region - 3 * block, false),
                (region, true),
                (2 * region - block, false),
                (block, true)
            ]
        );
        assert_eq!(look(1..2, bytes, LIMITS, &words), [(1, false)]);
        let inside = block + 5..3 * block + 7;
        assert_eq!(look(inside, bytes, LIMITS, &words), [(2 * block - 5, true), (7, false)]);
        assert_eq!(look(bytes - 1..bytes, bytes, LIMITS, &words), [(1, true)]);
        let alternating = look(0..region, region, LIMITS, &[0x5555_5555_5555_5555]);
        assert_eq!(alternating.len(), 64);
        assert!(alternating.iter().all(|(len, _)| *len == block));
    }

    #[test]
    fn what_a_disk_has_grown_by_has_changed() {
        let bytes = REGION_BYTES + 512;
        let all = 3 * REGION_BYTES;
        assert_eq!(look(0..all, bytes, LIMITS, &[0, 0]), [(bytes, false), (all - bytes, true)]);
        assert_eq!(look(bytes..all, bytes, LIMITS, &[0, 0]), [(all - bytes, true)]);
    }

    #[test]
    fn a_look_ends_at_its_limits_and_never_before_its_first_stretch() {
        let few = Limits { stretches: 2, ..LIMITS };
        let found = look(0..REGION_BYTES, REGION_BYTES, few, &[0b101]);
        assert_eq!(found, [(BLOCK_BYTES, true), (BLOCK_BYTES, false)]);
        let near = Limits { regions: 2, ..LIMITS };
        let found = look(5..3 * REGION_BYTES, 3 * REGION_BYTES, near, &[0, 0, 0]);
        assert_eq!(found, [(2 * REGION_BYTES - 5, false)]);
    }
}
