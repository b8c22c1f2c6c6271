//! The descriptors that the ring watches besides its own operations: the helper's, another ring's.

use std::os::fd::RawFd;

use super::table::Kind;
use super::{Sqe, Uring, errno_of};
use crate::computing::Work;
use crate::engine::{Completion, FileId, Token};
use crate::offload::{Call, Job, Offload};

impl Uring {
    pub(super) fn offload(&mut self, index: u32, file: FileId, call: Call) {
        let Some(file) = self.files.get(file.0 as usize).map(|f| f.fd.clone()) else {
            return self.fail(u64::from(index), libc::EBADF);
        };
        if let Some(offload) = self.helper(index) {
            offload.give(Job { id: u64::from(index), file, call });
            self.watch();
        }
    }

    pub(super) fn compute_beside(&mut self, token: Token, work: Work) {
        let index = self.table.insert(token, Kind::Offloaded);
        if let Some(offload) = self.helper(index) {
            offload.compute(u64::from(index), work);
            self.watch();
        }
    }

    /// The offload to other threads. `None`: it cannot be made, and the operation has failed.
    fn helper(&mut self, index: u32) -> Option<&mut Offload> {
        if self.offload.is_none() {
            match Offload::new() {
                Ok(offload) => self.offload = Some(offload),
                Err(e) => self.fail(u64::from(index), errno_of(&e)),
            }
        }
        self.offload.as_mut()
    }

    /// Watches the helper if there is something to come from it.
    pub(super) fn watch(&mut self) {
        if self.offload.as_ref().is_some_and(|o| o.outstanding > 0) && !self.watching {
            self.watching = true;
            self.queue(Sqe::Watch);
        }
    }

    /// Wakes the next wait when the ring with this descriptor, which outlives this engine's next
    /// completion, has completions of its own.
    pub(super) fn watch_ring(&mut self, fd: RawFd) {
        if !self.watching_ring {
            self.watching_ring = true;
            self.queue(Sqe::Ring { fd });
        }
    }

    pub(super) fn take_offloaded(&mut self, out: &mut Vec<Completion>) {
        let Some(offload) = self.offload.as_mut() else { return };
        self.watching = false;
        for (index, raw) in offload.take() {
            if let Some((token, _)) = self.table.remove(index) {
                out.push(Completion { token, raw });
            }
        }
        self.watch();
    }
}
