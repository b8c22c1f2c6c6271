//! Where a request's data stands in its buffer.

use ferrite_io::arena::Span;

/// Where a request's data stands in its buffer: from the offset in the medium's block that it has
/// on the medium, so that the whole blocks around it can be read and written in place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// First byte on the disk of the whole blocks.
    pub(super) offset: u64,
    /// The whole blocks.
    pub(super) blocks: Span,
    /// The request's own bytes.
    pub(super) data: Span,
}

impl Layout {
    /// Of so many bytes from `offset` on, in `buf`. `block_bytes` is a power of two.
    pub(super) fn of(buf: Span, offset: u64, bytes: usize, block_bytes: usize) -> Layout {
        let in_block = block_bytes - 1;
        let before = offset as usize & in_block;
        let whole = (before + bytes + in_block) & !in_block;
        Layout {
            offset: offset - before as u64,
            blocks: buf.slice(0, whole),
            data: buf.slice(before, bytes),
        }
    }

    /// Whether the request is of whole blocks only.
    pub(super) fn is_whole(&self) -> bool {
        self.blocks.len() == self.data.len()
    }
}
