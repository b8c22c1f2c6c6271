//! A split virtqueue in the guest's memory.
//!
//! The guest writes descriptors and the available ring, this back end the used ring. The guest may write any of it at any
//! time, so each value is read once and checked. An error is a [`Violation`]: the queue takes no more requests.

use std::sync::atomic::{Ordering, fence};

use ferrite_io::foreign::Fault;

use super::memory::{Place, SharedTable};
use super::message::{RawAddresses, u16_at, u32_at, u64_at};

/// Most entries of a queue, as QEMU has it.
pub(super) const MAX_ENTRIES: u16 = 1024;

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;
/// Bytes of a descriptor.
pub(super) const DESC_BYTES: usize = 16;

/// The guest's error in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("{0} requests are on a queue of {1}")]
    Flood(u16, u16),
    #[error("a request begins at descriptor {0}, and the queue has {1}")]
    Head(u16, u16),
    #[error("a request begins at a descriptor that is in use")]
    Twice,
    #[error("the descriptors of a request are more than the queue has, or a loop")]
    Loop,
    #[error("a descriptor leads to {0}, behind the last one")]
    Next(u16),
    #[error("a descriptor is empty")]
    Empty,
    #[error("a descriptor of {1} bytes at {0:#x} is outside of the memory")]
    Outside(u64, u32),
    #[error("a descriptor that may be read comes behind one that may be written")]
    Order,
    #[error("a table of descriptors is inside another, or was not agreed on")]
    Indirect,
    #[error("a table of descriptors has {0} bytes")]
    TableBytes(u32),
    #[error("a request has no header of 16 bytes")]
    NoHeader,
    #[error("a request has no place for its status")]
    NoStatus,
}

/// Why a queue cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    Violation(Violation),
    /// The memory has gone: nothing of the guest can be used any more.
    Memory(Fault),
}

impl From<Violation> for Broken {
    fn from(violation: Violation) -> Broken {
        Broken::Violation(violation)
    }
}

impl From<Fault> for Broken {
    fn from(fault: Fault) -> Broken {
        Broken::Memory(fault)
    }
}

/// A descriptor, copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Desc {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Desc {
    pub(super) fn decode(bytes: &[u8]) -> Desc {
        Desc {
            address: u64_at(bytes, 0),
            len: u32_at(bytes, 8),
            flags: u16_at(bytes, 12),
            next: u16_at(bytes, 14),
        }
    }
}

/// A queue, as one thread uses it.
pub(super) struct Ring {
    pub(super) table: SharedTable,
    pub(super) entries: u16,
    desc: Place,
    avail: Place,
    used: Place,
    event_index: bool,
    /// The next entry of the available ring; wraps.
    pub(super) next_avail: u16,
    /// The next entry of the used ring, as far as the guest was told.
    pub(super) told: u16,
    /// The next entry of the used ring.
    next_used: u16,
    /// Whether the guest was asked not to kick.
    quiet: bool,
}

impl Ring {
    /// A queue at these addresses. `None`: they are not in the memory, or not aligned.
    pub(super) fn new(
        table: SharedTable,
        entries: u16,
        addresses: RawAddresses,
        next_avail: u16,
        event_index: bool,
    ) -> Result<Option<Ring>, Fault> {
        let n = u64::from(entries);
        let desc = table.place_of_user(addresses.desc, DESC_BYTES as u64 * n, 16);
        // Two words before the entries, and one behind them for the event index.
        let avail = table.place_of_user(addresses.avail, 6 + 2 * n, 2);
        let used = table.place_of_user(addresses.used, 6 + 8 * n, 4);
        let (Some(desc), Some(avail), Some(used)) = (desc, avail, used) else { return Ok(None) };
        let mut ring = Ring {
            table,
            entries,
            desc,
            avail,
            used,
            event_index,
            next_avail,
            told: 0,
            next_used: 0,
            quiet: false,
        };
        let used = ring.load(ring.used, 2)?;
        (ring.told, ring.next_used) = (used, used);
        Ok(Some(ring))
    }

    fn load(&self, of: Place, at: usize) -> Result<u16, Fault> {
        let (memory, base) = self.table.at(of);
        memory.load_u16(base + at)
    }

    fn store(&self, of: Place, at: usize, value: u16) -> Result<(), Fault> {
        let (memory, base) = self.table.at(of);
        memory.store_u16(base + at, value)
    }

    /// Number of requests on the queue that were not taken.
    pub(super) fn waiting(&self) -> Result<u16, Broken> {
        let waiting = self.load(self.avail, 2)?.wrapping_sub(self.next_avail);
        match waiting > self.entries {
            true => Err(Violation::Flood(waiting, self.entries).into()),
            false => Ok(waiting),
        }
    }

    /// The first descriptor of the next request. Call it if one is [waiting](Self::waiting).
    pub(super) fn peek(&self) -> Result<u16, Broken> {
        let slot = usize::from(self.next_avail % self.entries);
        let head = self.load(self.avail, 4 + 2 * slot)?;
        match head < self.entries {
            true => Ok(head),
            false => Err(Violation::Head(head, self.entries).into()),
        }
    }

    /// Goes on behind the request that was [seen](Self::peek).
    pub(super) fn advance(&mut self) {
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// A descriptor below the number of entries.
    pub(super) fn desc(&self, index: u16) -> Result<Desc, Fault> {
        let (memory, base) = self.table.at(self.desc);
        let mut bytes = [0; DESC_BYTES];
        memory.copy_out(base + DESC_BYTES * usize::from(index), &mut bytes)?;
        Ok(Desc::decode(&bytes))
    }

    /// Puts a request on the used ring. The guest sees it after [`publish`](Self::publish).
    pub(super) fn push_used(&mut self, head: u16, written: u32) -> Result<(), Fault> {
        let slot = usize::from(self.next_used % self.entries);
        let (memory, base) = self.table.at(self.used);
        memory.store_u32(base + 4 + 8 * slot, u32::from(head))?;
        memory.store_u32(base + 8 + 8 * slot, written)?;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(())
    }

    pub(super) fn has_unpublished(&self) -> bool {
        self.next_used != self.told
    }

    /// Shows the guest what was put on the used ring: entries first, then the index. Returns whether it wants an
    /// interrupt for it.
    pub(super) fn publish(&mut self) -> Result<bool, Fault> {
        self.store(self.used, 2, self.next_used)?;
        let before = std::mem::replace(&mut self.told, self.next_used);
        // The index is there before the guest's wish is read, as the guest writes its wish before it reads the index.
        fence(Ordering::SeqCst);
        if !self.event_index {
            return Ok(self.load(self.avail, 0)? & NO_INTERRUPT == 0);
        }
        let event = self.load(self.avail, 4 + 2 * usize::from(self.entries))?;
        Ok(is_between(event, before, self.told))
    }

    /// Asks the guest not to kick, as far as that takes asking.
    pub(super) fn be_quiet(&mut self) -> Result<(), Fault> {
        if !self.event_index && !self.quiet {
            self.store(self.used, 0, NO_NOTIFY)?;
            self.quiet = true;
        }
        Ok(())
    }

    /// Asks the guest for a kick at its next request. Returns whether there is one already, of which no kick may come.
    pub(super) fn listen(&mut self) -> Result<bool, Broken> {
        if self.event_index {
            self.store(self.used, 4 + 8 * usize::from(self.entries), self.next_avail)?;
        } else if self.quiet {
            self.store(self.used, 0, 0)?;
            self.quiet = false;
        }
        fence(Ordering::SeqCst);
        Ok(self.waiting()? > 0)
    }
}

/// Whether the index went from `before` to `now` over `event` (`vring_need_event`).
fn is_between(event: u16, before: u16, now: u16) -> bool {
    now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
}
