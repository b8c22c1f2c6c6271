//! The frontend's side of persistent grants, as in Linux: data is copied to and from pages of the queue, which are
//! granted for reading and writing. They are reused, the last one first, as long as the backend keeps them mapped
//! (blkif.md 4.5).

use std::sync::Arc;

use super::super::grants::GrantTable;
use super::super::memory::GuestMemory;
use super::error::FrontError;
use super::space::{Buffer, GuestSpace, SECTORS_PER_PAGE};
use ferrite_xen::abi::{IndirectOp, SECTOR_BYTES};
use ferrite_xen::hypervisor::PAGE_SIZE;

/// A queue's free pages, each a buffer of one page.
#[derive(Default)]
pub(super) struct PagePool(Vec<Buffer>);

impl PagePool {
    /// Ensures that the next `pages` calls of [`take`](Self::take) find a page.
    pub(super) fn reserve(
        &mut self,
        space: &Arc<GuestSpace>,
        pages: usize,
    ) -> Result<(), FrontError> {
        while self.0.len() < pages {
            let new = space.buffer(1)?;
            // Used after the pages that the backend has mapped.
            self.0.insert(0, new);
        }
        Ok(())
    }

    /// Takes the page that was returned last.
    pub(super) fn take(&mut self) -> Buffer {
        self.0.pop().expect("reserved before")
    }

    /// Keeps a page that the backend has mapped. The grant of any other page is revoked.
    pub(super) fn give(&mut self, page: Buffer, table: &GrantTable<'_>) {
        if table.in_use(page.gref(0)) {
            self.0.push(page);
        }
    }
}

/// A piece of data in a page of the pool.
pub(super) struct Bounce {
    page: Buffer,
    /// The caller's frame, and the bytes in it.
    frame: u32,
    from: usize,
    len: usize,
    is_read: bool,
}

impl Bounce {
    /// Takes sectors `first..=last` of a page of `buffer`, and copies them to `page` for a write.
    pub(super) fn new(
        page: Buffer,
        buffer: &Buffer,
        (number, first, last): (usize, u8, u8),
        op: IndirectOp,
    ) -> Bounce {
        assert!(first <= last && usize::from(last) < SECTORS_PER_PAGE);
        let (first, last) = (usize::from(first), usize::from(last));
        let bounce = Bounce {
            page,
            frame: buffer.frame(number),
            from: first * SECTOR_BYTES as usize,
            len: (last - first + 1) * SECTOR_BYTES as usize,
            is_read: op == IndirectOp::Read,
        };
        if !bounce.is_read {
            let (ours, theirs) = (bounce.page.frame(0), bounce.frame);
            copy(buffer.space().memory(), theirs, ours, bounce.from, bounce.len);
        }
        bounce
    }

    /// Copies read data to the caller; returns the page.
    pub(super) fn finish(self, space: &GuestSpace, is_ok: bool) -> Buffer {
        if self.is_read && is_ok {
            copy(space.memory(), self.page.frame(0), self.frame, self.from, self.len);
        }
        self.page
    }
}

/// Copies bytes of a frame to the same place in another one.
fn copy(memory: &GuestMemory, from: u32, to: u32, at: usize, len: usize) {
    assert!(from != to && at + len <= PAGE_SIZE);
    // SAFETY: inside two different frames of the mapping. The backend may be writing them: opaque
    // bytes (see memory.rs).
    unsafe {
        let (from, to) = (memory.frame(from).add(at), memory.frame(to).add(at));
        to.copy_from_nonoverlapping(from, len);
    }
}
