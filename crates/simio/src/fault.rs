//! The faults of a simulated world, and where they hit.

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
            Op::Readable { .. } | Op::Timer { .. } => None,
        }
    }
}

/// Operations of one kind, in one range of every file, fail now and then.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Of which kind.
    pub on: On,
    /// Those that touch these bytes. Syncs touch all.
    pub range: Range<u64>,
    /// How many of a thousand.
    pub per_mille: u64,
    /// The error.
    pub errno: i32,
    /// How often at most.
    pub times: u64,
}

/// Untrue answers of a medium. A format is none the better for it: this is how a simulator
/// is known to find what it is there to find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Of so many syncs, the one of this number, from 0, is answered and does nothing.
    Sync {
        /// Syncs.
        of: u64,
        /// Which of them.
        which: u64,
    },
    /// A sync does nothing if a write that touches these bytes follows it before the next sync: as
    /// if that write had been made ahead of it.
    SyncBefore(Range<u64>),
    /// Of a thousand writes, so many are answered and not made.
    Write {
        /// How many.
        per_mille: u64,
    },
}

/// A sync that was answered, and is made only if no write follows that says otherwise.
#[derive(Clone, Copy)]
pub(super) struct Deferred {
    /// In the world's table.
    pub(super) file: usize,
    /// See [`SimFile::sync`](super::file::SimFile::sync).
    pub(super) since: u64,
}

/// All that goes wrong.
#[derive(Default)]
pub(super) struct Faults {
    pub(super) list: Vec<Fault>,
    pub(super) lie: Option<Lie>,
    /// Syncs that were answered.
    pub(super) syncs: u64,
    pub(super) deferred: Option<Deferred>,
    /// Transfers cut short, of a thousand.
    pub(super) short: u64,
    /// Operations that the kernel asks to try again, of a thousand.
    pub(super) again: u64,
}

impl Faults {
    /// The errno that an operation ends with, if it fails.
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

    /// Whether the medium only says that it has made this write.
    pub(super) fn drops_write(&self, random: &mut SplitMix64) -> bool {
        matches!(self.lie, Some(Lie::Write { per_mille }) if random.below(1000) < per_mille)
    }

    /// Whether this sync, the next one, is only said to be made.
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
