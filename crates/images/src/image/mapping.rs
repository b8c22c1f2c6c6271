//! A layer's answer for a range.

/// A layer's answer for the beginning of a range. Lengths are bytes from its start, never 0; offsets are in the layer's
/// file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The layer has data. A write goes there, and [`Layer::written`] follows it.
    ///
    /// [`Layer::written`]: crate::ImageFormat::written
    Data {
        /// Byte offset in the layer's file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// It reads as zeros.
    Zeros {
        /// Bytes.
        len: u64,
    },
    /// The layer has no data: the one below is asked.
    Backing {
        /// Bytes.
        len: u64,
    },
    /// The table for the range is not in memory. After [`Layer::load`], or for a write [`Layer::prepare`], the caller
    /// asks again.
    ///
    /// [`Layer::load`]: crate::Layer::load
    /// [`Layer::prepare`]: crate::ImageFormat::prepare
    Miss {
        /// Bytes.
        len: u64,
    },
    /// It is compressed: only [`Layer::unpack`] reads it.
    ///
    /// [`Layer::unpack`]: crate::ImageFormat::unpack
    Compressed {
        /// Bytes.
        len: u64,
    },
    /// A write must copy the data around it first: only [`Layer::write_copying`] writes it.
    ///
    /// [`Layer::write_copying`]: crate::ImageFormat::write_copying
    Cow {
        /// Bytes.
        len: u64,
    },
}
