//! The descriptors of one request: copied, then checked, then turned into places.

use super::memory::Place;
use super::ring::{Broken, DESC_BYTES, Desc, MAX_ENTRIES, Ring, Violation};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Bytes of a table that is copied to the stack. Requests with more data have larger ones.
const FEW_BYTES: usize = 16 * DESC_BYTES;
/// Places of a list that is kept for the next request.
const KEPT: usize = 64;

/// The memory of a request: what the guest has written for us, and what we may write. It is used again and again.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) readable: Vec<Place>,
    pub(super) writable: Vec<Place>,
    pub(super) readable_bytes: u64,
    pub(super) writable_bytes: u64,
    /// Number of its descriptors.
    count: usize,
}

impl Chain {
    /// Reads the request that begins at this descriptor. Tables of descriptors are followed if they were agreed on.
    pub(super) fn read(&mut self, ring: &Ring, head: u16, indirect: bool) -> Result<(), Broken> {
        self.clear();
        let mut index = head;
        for _ in 0..ring.entries {
            let desc = ring.desc(index)?;
            if desc.flags & INDIRECT != 0 {
                if !indirect || desc.flags & NEXT != 0 {
                    return Err(Violation::Indirect.into());
                }
                return self.add_table(ring, &desc);
            }
            self.add(ring, &desc)?;
            if desc.flags & NEXT == 0 {
                return Ok(());
            }
            if desc.next >= ring.entries {
                return Err(Violation::Next(desc.next).into());
            }
            index = desc.next;
        }
        Err(Violation::Loop.into())
    }

    /// Forgets a request. Of long lists the memory is given back.
    fn clear(&mut self) {
        for places in [&mut self.readable, &mut self.writable] {
            places.clear();
            places.shrink_to(KEPT);
        }
        (self.readable_bytes, self.writable_bytes, self.count) = (0, 0, 0);
    }

    /// Adds the descriptors of a table, which is copied as a whole before any is looked at.
    fn add_table(&mut self, ring: &Ring, table: &Desc) -> Result<(), Broken> {
        let len = table.len as usize;
        let count = len / DESC_BYTES;
        if !len.is_multiple_of(DESC_BYTES) || count == 0 || count > usize::from(MAX_ENTRIES) {
            return Err(Violation::TableBytes(table.len).into());
        }
        let (mut few, mut many) = ([0; FEW_BYTES], Vec::new());
        let bytes = match few.get_mut(..len) {
            Some(few) => few,
            None => {
                many.resize(len, 0);
                &mut many[..]
            }
        };
        match ring.table.place(table.address, len as u64) {
            Some(place) => ring.table.gather(&[place], 0, bytes)?,
            None => {
                let mut places = Vec::new();
                if !ring.table.places(table.address, len as u64, &mut places) {
                    return Err(Violation::Outside(table.address, table.len).into());
                }
                ring.table.gather(&places, 0, bytes)?;
            }
        }
        let mut index = 0;
        for _ in 0..count {
            let desc = Desc::decode(&bytes[DESC_BYTES * index..][..DESC_BYTES]);
            if desc.flags & INDIRECT != 0 {
                return Err(Violation::Indirect.into());
            }
            self.add(ring, &desc)?;
            if desc.flags & NEXT == 0 {
                return Ok(());
            }
            index = usize::from(desc.next);
            if index >= count {
                return Err(Violation::Next(desc.next).into());
            }
        }
        Err(Violation::Loop.into())
    }

    fn add(&mut self, ring: &Ring, desc: &Desc) -> Result<(), Broken> {
        self.count += 1;
        if self.count > usize::from(MAX_ENTRIES) {
            return Err(Violation::Loop.into());
        }
        if desc.len == 0 {
            return Err(Violation::Empty.into());
        }
        let is_writable = desc.flags & WRITE != 0;
        if !is_writable && !self.writable.is_empty() {
            return Err(Violation::Order.into());
        }
        // At most 1024 lengths of 32 bits: the sums do not wrap.
        let (places, bytes) = match is_writable {
            true => (&mut self.writable, &mut self.writable_bytes),
            false => (&mut self.readable, &mut self.readable_bytes),
        };
        *bytes += u64::from(desc.len);
        match ring.table.places(desc.address, desc.len.into(), places) {
            true => Ok(()),
            false => Err(Violation::Outside(desc.address, desc.len).into()),
        }
    }
}
