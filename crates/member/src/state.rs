//! The state of a copy as bytes (docs/internals/pool.md, "Files of a copy").
//!
//! A file has two slots. A state is written to the slot that does not have the present one, so a cut write harms nothing.

use std::collections::BTreeSet;

use ferrite_pool::wire::{BLOCK_BYTES, MAX_REGIONS, MIN_REGION, is_name};
use ferrite_pool::{BootId, Generation, OwnerId, Region, Stored};

/// Bytes of a slot.
pub(crate) const SLOT_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"FeMember";
const VERSION: u64 = 1;
const BITMAP_AT: usize = 1024;
const SUM_AT: usize = SLOT_BYTES - 32;

/// Which file has the data. A file that was put in its place, such as one from a backup, is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    pub(crate) inode: u64,
    /// When it was made, in nanoseconds since 1970. 0: the file system does not say.
    pub(crate) made_ns: u64,
}

/// The facts of a copy that never change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fixed {
    pub(crate) pool: [u8; 16],
    pub(crate) id: [u8; 16],
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) region_bytes: u64,
    pub(crate) file: FileIdentity,
}

impl Fixed {
    /// Blocks of a region.
    pub(crate) fn region_blocks(&self) -> u64 {
        self.region_bytes / BLOCK_BYTES
    }

    /// The number of regions.
    pub(crate) fn regions(&self) -> u64 {
        self.size.div_ceil(self.region_bytes)
    }

    /// Both slots of a new copy. One that is not whole lacks all regions: its own bits tell each owner so, also after the one
    /// that began to fill it.
    pub(crate) fn first_slots(self, is_whole: bool) -> Vec<u8> {
        let regions = if is_whole { 0 } else { self.regions() };
        let dirty = (0..regions).map(Region).collect();
        let stored = Stored { incomplete: !is_whole, dirty, ..Stored::default() };
        let mut slot = Slot { number: 1, fixed: self, stored };
        let first = slot.to_bytes();
        slot.number = 2;
        [first, slot.to_bytes()].concat()
    }
}

/// A state with its number. A later one has a higher number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) number: u64,
    pub(crate) fixed: Fixed,
    pub(crate) stored: Stored,
}

impl Slot {
    /// Its bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let Slot { number, fixed, stored } = self;
        let mut bytes = Vec::with_capacity(SLOT_BYTES);
        bytes.extend(MAGIC);
        let mut put = |numbers: &[u64]| bytes.extend(numbers.iter().flat_map(|n| n.to_be_bytes()));
        put(&[
            VERSION,
            *number,
            fixed.size,
            fixed.region_bytes,
            fixed.file.inode,
            fixed.file.made_ns,
        ]);
        put(&[stored.generation.0, u64::from(stored.incomplete)]);
        put(&[u64::from(stored.owner.is_some()), stored.owner.map_or(0, |owner| owner.0)]);
        put(&[u64::from(stored.boot.is_some()), stored.boot.map_or(0, |boot| boot.0)]);
        put(&[fixed.name.len() as u64]);
        bytes.extend(fixed.pool);
        bytes.extend(fixed.id);
        bytes.extend(fixed.name.as_bytes());
        bytes.resize(SUM_AT, 0);
        for region in &stored.dirty {
            bytes[BITMAP_AT + (region.0 / 8) as usize] |= 1 << (region.0 % 8);
        }
        bytes.extend(blake3::hash(&bytes).as_bytes());
        bytes
    }

    /// The state that a slot has. `None`: it has none, or a cut one.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Slot> {
        let (body, sum) = bytes.split_at_checked(SUM_AT)?;
        if bytes.len() != SLOT_BYTES || blake3::hash(body).as_bytes() != sum {
            return None;
        }
        let mut rest = body.strip_prefix(MAGIC)?;
        let mut numbers = [0u64; 13];
        for number in &mut numbers {
            let (first, behind) = rest.split_first_chunk::<8>()?;
            (*number, rest) = (u64::from_be_bytes(*first), behind);
        }
        let [
            version,
            number,
            size,
            region_bytes,
            inode,
            made_ns,
            generation,
            incomplete,
            rights @ ..,
        ] = numbers;
        let [has_owner, owner, has_boot, boot, name_len] = rights;
        let at = MAGIC.len() + numbers.len() * 8;
        let pool = body.get(at..at + 16)?.try_into().ok()?;
        let id = body.get(at + 16..at + 32)?.try_into().ok()?;
        let name = body.get(at + 32..)?.get(..usize::try_from(name_len).ok()?)?;
        let name = std::str::from_utf8(name).ok().filter(|name| is_name(name))?.to_owned();
        let is_sound = version == VERSION
            && size > 0
            && size.is_multiple_of(BLOCK_BYTES)
            && region_bytes.is_power_of_two()
            && region_bytes >= MIN_REGION
            && size.div_ceil(region_bytes) <= MAX_REGIONS;
        let file = FileIdentity { inode, made_ns };
        let fixed = is_sound.then_some(Fixed { pool, id, name, size, region_bytes, file })?;
        let is_dirty = |n: &u64| body[BITMAP_AT + (n / 8) as usize] >> (n % 8) & 1 == 1;
        let dirty: BTreeSet<_> = (0..fixed.regions()).filter(is_dirty).map(Region).collect();
        let stored = Stored {
            generation: Generation(generation),
            owner: (has_owner == 1).then_some(OwnerId(owner)),
            boot: (has_boot == 1).then_some(BootId(boot)),
            incomplete: incomplete != 0,
            dirty,
        };
        Some(Slot { number, fixed, stored })
    }
}

/// The state that a file has, from its bytes. One slot that is cut makes the copy incomplete: its content is not known.
/// `None`: there is no state.
pub(crate) fn read(bytes: &[u8]) -> Option<Slot> {
    let (first, second) = bytes.split_at_checked(SLOT_BYTES)?;
    let slots = [first, second].map(Slot::from_bytes);
    let is_cut = slots.iter().any(Option::is_none);
    let mut newest = slots.into_iter().flatten().max_by_key(|slot| slot.number)?;
    newest.stored.incomplete |= is_cut;
    Some(newest)
}

#[cfg(test)]
mod tests {
    use ferrite_pool::wire::region_bytes;

    use super::*;

    fn slot(number: u64) -> Slot {
        let file = FileIdentity { inode: 5, made_ns: 6 };
        let (pool, id, name) = ([1; 16], [2; 16], "disk-0".to_owned());
        let size = 40 << 30;
        let fixed = Fixed { pool, id, name, size, region_bytes: region_bytes(size), file };
        let dirty = [0, 7, 8, fixed.regions() - 1].into_iter().map(Region).collect();
        let (owner, boot) = (Some(OwnerId(0)), Some(BootId(9)));
        let stored = Stored { generation: Generation(3), owner, boot, incomplete: false, dirty };
        Slot { number, fixed, stored }
    }

    #[test]
    fn the_newest_state_is_read_and_a_cut_one_makes_the_copy_incomplete() {
        let (old, new) = (slot(1), slot(2));
        let mut bytes = [new.to_bytes(), old.to_bytes()].concat();
        assert_eq!(read(&bytes), Some(new));
        bytes[2000] ^= 1;
        let found = read(&bytes).unwrap();
        assert!(found.number == 1 && found.stored.incomplete);
        bytes[SLOT_BYTES + 2000] ^= 1;
        assert_eq!(read(&bytes), None);
        assert_eq!(read(&bytes[..100]), None);
    }

    #[test]
    fn regions_are_few_whatever_the_size() {
        for size in [512u64, 1 << 20, 1 << 34, (1 << 34) + 512, 1 << 44, 1 << 60] {
            assert!(size.div_ceil(region_bytes(size)) <= MAX_REGIONS, "{size}");
        }
    }
}
