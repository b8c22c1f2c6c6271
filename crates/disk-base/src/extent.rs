//! Where a part of a disk is, in the words that queues understand.

/// The beginning of a range, translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The bytes are in a file.
    Data {
        /// Index into `Disk::files`.
        file: usize,
        /// Byte offset in that file.
        offset: u64,
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
    /// Reads give zeros; writes vanish.
    Zeros {
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
    /// It takes steps to get there: `Disk::read` or `Disk::write`.
    Slow {
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
}

/// The values about discard that a guest gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Smaller pieces than this free nothing.
    pub granularity_bytes: u32,
    /// Offset of the first whole piece.
    pub alignment_bytes: u32,
}
