//! What a frontend asks of a path, and how that ended.

use ferrite_disk::SECTOR_BYTES;

/// What to do for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Fill the segments.
    Read,
    /// Write the segments.
    Write,
    /// Flush what was answered before, then write the segments.
    FlushThenWrite,
    /// Flush what was answered before.
    Flush,
    /// With everything before it answered and nothing after it begun: flush, write the segments
    /// if any, flush.
    Barrier,
    /// Forget the range.
    Discard,
    /// Have the range, of whole blocks of the medium, read as zeros.
    Zero,
    /// Say where the range has data, and where zeros.
    Status,
}

impl Action {
    /// Whether data flows from the guest.
    pub fn takes_data(self) -> bool {
        matches!(self, Action::Write | Action::FlushThenWrite | Action::Barrier)
    }

    /// Whether the medium may change.
    pub fn changes_medium(self) -> bool {
        !matches!(self, Action::Read | Action::Flush | Action::Status)
    }
}

/// A request that may be carried out: the range lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// What.
    pub action: Action,
    /// First sector.
    pub sector: u64,
    /// Sectors; 0 for a flush or barrier without data.
    pub sectors: u64,
}

impl Work {
    /// First byte on the disk.
    pub fn offset(&self) -> u64 {
        self.sector * SECTOR_BYTES
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.sectors * SECTOR_BYTES
    }
}

/// How a request ended; the frontend says so in its protocol's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As asked.
    Done,
    /// With an error. What it was to write may be on the medium in part.
    Failed,
    /// Neither this device nor its medium does such a thing.
    Unsupported,
}
