//! The memory table: which part of which file an address of the guest or of the front end is.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferrite_io::foreign::{Fault, Memory};

use super::message::RawRegion;

/// Most bytes of a table. The address space of a process has 128 TiB.
const MAX_BYTES: u64 = 16 << 40;

/// A mapped region.
#[derive(Debug)]
struct Region {
    guest: u64,
    user: u64,
    len: u64,
    memory: Memory,
}

/// The memory of a guest.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By the guest's address, and none overlap.
    regions: Vec<Region>,
}

/// A range within one region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    region: u8,
    at: usize,
    pub(super) len: usize,
}

impl Place {
    /// The part of `len` bytes that begins `from` bytes into it. Both are within it.
    pub(super) fn slice(&self, from: usize, len: usize) -> Place {
        debug_assert!(from + len <= self.len);
        Place { region: self.region, at: self.at + from, len }
    }
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadTable {
    #[error("region {0} of the memory table is empty, wraps, or overlaps another")]
    Region(usize),
    #[error("the memory table has more than 16 TiB")]
    TooLarge,
    #[error("region {0} of the memory table cannot be mapped: {1}")]
    Map(usize, io::Error),
}

impl Table {
    /// Maps the regions of a table. There is a file for each of them.
    pub(super) fn map(raw: &[RawRegion], files: &[OwnedFd]) -> Result<Table, BadTable> {
        check(raw)?;
        let map = |(index, (raw, file)): (usize, (&RawRegion, &OwnedFd))| {
            let memory =
                Memory::map(file, raw.offset, raw.len).map_err(|e| BadTable::Map(index, e))?;
            Ok(Region { guest: raw.guest, user: raw.user, len: raw.len, memory })
        };
        let regions = raw.iter().zip(files).enumerate().map(map).collect::<Result<Vec<_>, _>>();
        let mut regions = regions?;
        regions.sort_by_key(|region| region.guest);
        Ok(Table { regions })
    }

    /// Adds the places of a range of the guest's addresses to `into`: more than one where it goes from region to region.
    /// `false`: some of it is no memory.
    pub(super) fn places(&self, address: u64, len: u64, into: &mut Vec<Place>) -> bool {
        let (mut address, mut left) = (address, len);
        while left > 0 {
            let Some((index, region)) = self.of_guest(address) else { return false };
            let at = address - region.guest;
            let part = left.min(region.len - at);
            into.push(Place { region: index as u8, at: at as usize, len: part as usize });
            left -= part;
            match address.checked_add(part) {
                Some(next) => address = next,
                None => return left == 0,
            }
        }
        true
    }

    /// The place of a range of the guest's addresses that is in one region.
    pub(super) fn place(&self, address: u64, len: u64) -> Option<Place> {
        let (index, region) = self.of_guest(address)?;
        let at = address - region.guest;
        let is_in_one = len <= region.len - at;
        is_in_one.then_some(Place { region: index as u8, at: at as usize, len: len as usize })
    }

    fn of_guest(&self, address: u64) -> Option<(usize, &Region)> {
        let inside = |region: &Region| address.wrapping_sub(region.guest) < region.len;
        self.regions.iter().enumerate().find(|(_, region)| inside(region))
    }

    /// The place of a range of the front end's addresses, aligned to `unit`.
    pub(super) fn place_of_user(&self, address: u64, len: u64, unit: u64) -> Option<Place> {
        let inside = |region: &Region| {
            let at = address.wrapping_sub(region.user);
            at < region.len && len <= region.len - at
        };
        let (index, region) = self.regions.iter().enumerate().find(|(_, region)| inside(region))?;
        let at = address - region.user;
        let place = Place { region: index as u8, at: at as usize, len: len as usize };
        address.is_multiple_of(unit).then_some(place)
    }

    /// The memory that a place is in, and where in it.
    #[inline]
    pub(super) fn at(&self, place: Place) -> (&Memory, usize) {
        (&self.regions[usize::from(place.region)].memory, place.at)
    }

    /// Copies the bytes of these places, from `skip` bytes on, to `to`. They have that many.
    pub(super) fn gather(&self, places: &[Place], skip: u64, to: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        self.each(places, skip, to.len(), |memory, at, len| {
            let part = &mut to[done..done + len];
            done += len;
            memory.copy_out(at, part)
        })
    }

    /// Copies `from` to these places, from `skip` bytes on. They have that many.
    pub(super) fn scatter(&self, places: &[Place], skip: u64, from: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        self.each(places, skip, from.len(), |memory, at, len| {
            let part = &from[done..done + len];
            done += len;
            memory.copy_in(at, part)
        })
    }

    /// Calls `f` for each part of `len` bytes from `skip` on, in order: with its memory, where it is in that, and its length.
    pub(super) fn each(
        &self,
        places: &[Place],
        skip: u64,
        len: usize,
        mut f: impl FnMut(&Memory, usize, usize) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (mut skip, mut left) = (skip, len);
        for place in places {
            if left == 0 {
                return Ok(());
            }
            if skip >= place.len as u64 {
                skip -= place.len as u64;
                continue;
            }
            let part = left.min(place.len - skip as usize);
            let (memory, at) = self.at(place.slice(skip as usize, part));
            f(memory, at, part)?;
            (skip, left) = (0, left - part);
        }
        if left == 0 { Ok(()) } else { Err(Fault::Outside) }
    }
}

/// Whether the regions are ranges that do not meet, for the guest and for the front end.
fn check(raw: &[RawRegion]) -> Result<(), BadTable> {
    let meet = |a: (u64, u64), b: (u64, u64)| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
    let mut all = 0u64;
    for (index, one) in raw.iter().enumerate() {
        let wraps = |from: u64| from.checked_add(one.len).is_none();
        if one.len == 0 || wraps(one.guest) || wraps(one.user) || wraps(one.offset) {
            return Err(BadTable::Region(index));
        }
        let overlaps = |other: &RawRegion| {
            meet((one.guest, one.len), (other.guest, other.len))
                || meet((one.user, one.len), (other.user, other.len))
        };
        if raw[..index].iter().any(overlaps) {
            return Err(BadTable::Region(index));
        }
        all = all.saturating_add(one.len);
    }
    if all > MAX_BYTES { Err(BadTable::TooLarge) } else { Ok(()) }
}

/// A table that several queues use.
pub(super) type SharedTable = Arc<Table>;
