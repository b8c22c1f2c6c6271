//! The place of a request's data in its buffer.

use ferrite_io::arena::Span;

/// The place of a request's data in its buffer. They begin at the same offset in a block as on the
/// medium, so that the whole blocks around them can be read and written in place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Offset of the whole blocks on the disk, in bytes.
    pub(super) offset: u64,
    /// The whole blocks.
    pub(super) blocks: Span,
    /// The request's own bytes.
    pub(super) data: Span,
}

impl Layout {
    /// The place in `buf` of this number of bytes from `offset` on the disk on. `block_bytes` is a
    /// power of two.
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

    /// Whether the request consists of whole blocks.
    pub(super) fn is_whole(&self) -> bool {
        self.blocks.len() == self.data.len()
    }
}
