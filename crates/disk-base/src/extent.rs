//! The place of a part of a disk, as queues need it.

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
    /// Reads give zeros; writes are discarded.
    Zeros {
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
    /// Reaching the bytes takes steps: `Disk::read` or `Disk::write`.
    Slow {
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
}

/// The values about discard that a guest is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Smaller pieces than this free nothing.
    pub granularity_bytes: u32,
    /// Offset of the first whole piece.
    pub alignment_bytes: u32,
}
