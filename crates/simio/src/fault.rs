//! The faults of a simulated world, and their places.

use std::ops::Range;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;

/// The target of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs.
    Sync,
    /// Holes, zeroing, discard, allocation and changes of size.
    Change,
}

impl On {
    pub(super) fn of(op: &Op) -> Option<On> {
        match op {
            Op::Read { .. } => Some(On::Read),
            Op::Write { .. } => Some(On::Write),
            Op::Sync { .. } => Some(On::Sync),
            Op::PunchHole { .. }
            | Op::ZeroRange { .. }
            | Op::Discard { .. }
            | Op::Allocate { .. }
            | Op::SetLen { .. } => Some(On::Change),
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => None,
        }
    }
}

/// A fault: operations of one kind, in one range of every file, fail at times.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The kind of operation.
    pub on: On,
    /// The bytes that an operation must touch. Syncs touch all.
    pub range: Range<u64>,
    /// How many of a thousand fail.
    pub per_mille: u64,
    /// The error.
    pub errno: i32,
    /// The most failures.
    pub times: u64,
}

/// False answers of a medium. A format cannot handle these: they test that the simulator finds data loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Of so many syncs, the one of this number, from 0, is answered and does nothing.
    Sync {
        /// The number of syncs.
        of: u64,
        /// The one that does nothing.
        which: u64,
    },
    /// A sync does nothing if a write to these bytes follows it before the next sync, as if that write had come before
    /// it.
    SyncBefore(Range<u64>),
    /// Of a thousand writes, so many are answered and not made.
    Write {
        /// The number of these.
        per_mille: u64,
    },
}

/// A sync that was answered, and is made only if no later write forbids it.
#[derive(Clone, Copy)]
pub(super) struct Deferred {
    /// Its file's index in the world's table.
    pub(super) file: usize,
    /// See [`SimFile::sync`](super::file::SimFile::sync).
    pub(super) since: u64,
}

/// All faults.
#[derive(Default)]
pub(super) struct Faults {
    pub(super) list: Vec<Fault>,
    pub(super) lie: Option<Lie>,
    /// The number of answered syncs.
    pub(super) syncs: u64,
    pub(super) deferred: Option<Deferred>,
    /// Partial transfers, of a thousand.
    pub(super) short: u64,
    /// Operations that the kernel asks to retry, of a thousand.
    pub(super) again: u64,
}

impl Faults {
    /// The errno of an operation, if it fails.
    pub(super) fn hit(
        &mut self,
        on: On,
        range: Range<u64>,
        random: &mut SplitMix64,
    ) -> Option<i32> {
        let hit = self.list.iter_mut().find(|f| {
            let touched =
                on == On::Sync || (f.range.start < range.end && range.start < f.range.end);
            f.on == on && touched && f.times > 0 && random.below(1000) < f.per_mille
        })?;
        hit.times -= 1;
        Some(hit.errno)
    }

    /// Whether the medium answers this write without making it.
    pub(super) fn drops_write(&self, random: &mut SplitMix64) -> bool {
        matches!(self.lie, Some(Lie::Write { per_mille }) if random.below(1000) < per_mille)
    }

    /// Whether the medium answers the next sync without making it.
    pub(super) fn ignores_sync(&mut self) -> bool {
        self.syncs += 1;
        matches!(self.lie, Some(Lie::Sync { of, which }) if (self.syncs - 1) % of == which)
    }

    /// Whether an operation is interrupted, and how.
    pub(super) fn nuisance(&self, random: &mut SplitMix64) -> Option<i32> {
        if self.again == 0 || random.below(1000) >= self.again {
            return None;
        }
        Some([libc::EAGAIN, libc::EINTR][random.below(2) as usize])
    }

    /// The bytes that a transfer of `len` moves: whole sectors, and never none.
    pub(super) fn shorten(&self, len: u64, random: &mut SplitMix64) -> u64 {
        let sectors = len / super::file::SECTOR_BYTES;
        if sectors < 2 || self.short == 0 || random.below(1000) >= self.short {
            return len;
        }
        (1 + random.below(sectors - 1)) * super::file::SECTOR_BYTES
    }
}
