//! The requests of a frontend to a path, and their outcome.

use ferrite_disk::SECTOR_BYTES;

/// The action of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read into the segments.
    Read,
    /// Write the segments.
    Write,
    /// Flush what was answered before, then write the segments.
    FlushThenWrite,
    /// Flush what was answered before.
    Flush,
    /// Flush, write the segments if there are any, and flush. Everything before it is answered, and
    /// nothing after it has begun.
    Barrier,
    /// Discard the range.
    Discard,
    /// Make the range read as zeros. It consists of whole blocks of the medium.
    Zero,
    /// Report where the range has data and where zeros.
    Status,
}

impl Action {
    /// Whether data come from the guest.
    pub fn takes_data(self) -> bool {
        matches!(self, Action::Write | Action::FlushThenWrite | Action::Barrier)
    }

    /// Whether the medium may change.
    pub fn changes_medium(self) -> bool {
        !matches!(self, Action::Read | Action::Flush | Action::Status)
    }
}

/// A request that may be carried out: its range is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The action.
    pub action: Action,
    /// The first sector.
    pub sector: u64,
    /// Number of sectors; 0 for a flush or barrier without data.
    pub sectors: u64,
}

impl Work {
    /// The offset on the disk in bytes.
    pub fn offset(&self) -> u64 {
        self.sector * SECTOR_BYTES
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.sectors * SECTOR_BYTES
    }
}

/// The outcome of a request, which the frontend translates for its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request was carried out.
    Done,
    /// The request has failed. A write may be on the medium in part.
    Failed,
    /// The device or its medium does not support the action.
    Unsupported,
}
