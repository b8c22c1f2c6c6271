//! The vector by which the kernel finds the memory of a transfer.

use crate::arena::{Arena, Span};
use crate::engine::MAX_VECTORED;

/// `struct iovec` as numbers, so that an engine can move to another thread with it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Vector {
    address: usize,
    bytes: usize,
}

impl Vector {
    /// Writes the vectors of `bufs`, or says the errno of what is wrong with them.
    pub(crate) fn fill(
        vectors: &mut [Vector; MAX_VECTORED],
        arena: &Arena,
        bufs: &[Span],
    ) -> Result<(), i32> {
        for (vector, buf) in vectors.iter_mut().zip(bufs) {
            let address = arena.checked_ptr(*buf).ok_or(libc::EFAULT)?.as_ptr() as usize;
            *vector = Vector { address, bytes: buf.len() };
        }
        Ok(())
    }
}

/// `struct user_msghdr` of the kernel as numbers, likewise: vectors, and nothing else.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Message {
    name: usize,
    name_bytes: u32,
    vectors: usize,
    count: usize,
    control: usize,
    control_bytes: usize,
    flags: u32,
}

impl Message {
    /// The header of a message in so many vectors.
    pub(crate) fn of(vectors: *const Vector, count: usize) -> Message {
        Message { vectors: vectors as usize, count, ..Message::default() }
    }
}
