//! The region of the arena that the kernel holds on to: fixed buffer 0.

use super::{Uring, errno_of};
use crate::arena::Span;

impl Uring {
    /// See [`Engine::pin`](crate::engine::Engine::pin).
    pub(super) fn pin_region(&mut self, region: Span) {
        if self.pinned == Some(region) || !self.unpin_region() {
            return;
        }
        let iov_base = self.arena.ptr(region).as_ptr().cast();
        let buffer = libc::iovec { iov_base, iov_len: region.len() };
        // SAFETY: the memory is the arena's, which is dropped after the ring (and its pages are
        // held for as long as they are registered).
        match unsafe { self.ring.submitter().register_buffers(&[buffer]) } {
            Ok(()) => {
                self.pinned = Some(region);
                self.features.fixed_buffers = true;
            }
            Err(e) => self.features.fixed_buffers_errno = Some(errno_of(&e)),
        }
    }

    /// See [`Engine::unpin`](crate::engine::Engine::unpin).
    pub(super) fn unpin_region(&mut self) -> bool {
        if self.pinned.is_none() {
            return true;
        }
        // Before Linux 5.13 this waits until nothing at all is in flight, a watch on a descriptor
        // included; the flag came later than that.
        let waits = !self.features.defer_taskrun && !self.features.coop_taskrun;
        if waits || self.ring.submitter().unregister_buffers().is_err() {
            return false;
        }
        self.pinned = None;
        true
    }
}
