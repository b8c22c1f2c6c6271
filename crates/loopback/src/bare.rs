//! The copies of a load alone, as the baseline of the backend's speed.
//!
//! The memory is as with a backend: on one side frames of a guest, which is another process, on the other an [`Arena`].
//! The calls are those of [`copy`](super::copy), in the direction of reads from a disk without a medium: one page of
//! zeros to every frame. There are no grants, no rings and no events.

use std::io;
use std::sync::Arc;

use ferrite_io::arena::{Arena, Span};

use super::memory::GuestMemory;
use super::{CopyWith, GuestHandle, LoopbackError};
use ferrite_xen::hypervisor::PAGE_SIZE;

/// A guest's first frames, and the page that is copied to them.
pub struct Bare {
    memory: GuestMemory,
    arena: Arc<Arena>,
    page: Span,
    frames: u32,
    /// The guest's process.
    pid: libc::pid_t,
    /// For each frame: the page to copy, and the frame's address in that process.
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
}

impl Bare {
    /// Copies will go to the first `frames` frames of `guest`, whose process has announced itself
    /// ([`GuestSpace::attach`](super::front::GuestSpace::attach)).
    ///
    /// # Errors
    /// It is no guest, it has fewer frames, or there is no memory for the arena.
    pub fn new(guest: &GuestHandle, frames: u32) -> Result<Bare, LoopbackError> {
        let memory = guest.map()?;
        let there = memory.layout().frames;
        if frames == 0 || frames > there {
            return Err(LoopbackError::NotAGuest(format!("it has {there} frames, not {frames}")));
        }
        let arena = Arena::new(PAGE_SIZE).map_err(LoopbackError::system("make an arena"))?;
        let page = arena.span(0, PAGE_SIZE);
        arena.fill(page, 0);
        let (pid, base) = memory.frontend();
        let iovec = |iov_base| libc::iovec { iov_base, iov_len: PAGE_SIZE };
        let local = vec![iovec(arena.ptr(page).as_ptr().cast()); frames as usize];
        let address = |i| (base as usize).wrapping_add(i * PAGE_SIZE);
        let remote = (0..frames as usize)
            .map(|i| iovec(std::ptr::without_provenance_mut(address(i))))
            .collect();
        Ok(Bare { memory, arena, page, frames, pid: pid as libc::pid_t, local, remote })
    }

    /// Copies to each frame once, in calls of up to `batch` pages if the kernel copies.
    ///
    /// # Errors
    /// Those of the kernel: the guest's process has not announced itself, or has ended.
    pub fn round(&self, with: CopyWith, batch: usize) -> io::Result<()> {
        match with {
            CopyWith::Memcpy => {
                (0..self.frames).for_each(|frame| self.memcpy(frame));
                Ok(())
            }
            CopyWith::ProcessVm => {
                let (batch, pieces) = (batch.max(1), &self.remote[..]);
                pieces.chunks(batch).try_for_each(|remote| self.process_vm(remote))
            }
        }
    }

    fn memcpy(&self, frame: u32) {
        let from = self.arena.ptr(self.page);
        // SAFETY: both are whole mapped pages, of different objects. The guest may change the bytes meanwhile: nothing
        // depends on them (see memory.rs).
        unsafe { self.memory.frame(frame).copy_from_nonoverlapping(from, PAGE_SIZE) }
    }

    fn process_vm(&self, remote: &[libc::iovec]) -> io::Result<()> {
        let (local, pages) = (self.local.as_ptr(), remote.len());
        let (remote, count) = (remote.as_ptr(), pages as libc::c_ulong);
        // SAFETY: there are at least as many local pieces as remote ones, all of them the one
        // page of the arena, which lives as long as `self`; the kernel checks the remote ones
        // against the other process.
        let done = unsafe { libc::process_vm_writev(self.pid, local, count, remote, count, 0) };
        match usize::try_from(done) {
            Ok(bytes) if bytes == pages * PAGE_SIZE => Ok(()),
            Ok(bytes) => Err(io::Error::other(format!("{bytes} bytes of {pages} pages copied"))),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestOptions;
    use crate::front::GuestSpace;
    use ferrite_xen::hypervisor::DomId;

    #[test]
    fn a_round_reaches_each_frame_and_no_other() {
        for with in [CopyWith::Memcpy, CopyWith::ProcessVm] {
            let options = GuestOptions { frames: 8, ..GuestOptions::default() };
            let guest = GuestHandle::create(DomId(1), options).unwrap();
            let space = GuestSpace::attach(&guest).unwrap();
            let buffer = space.buffer(8).unwrap();
            buffer.write(0, &[0xA5; 8 * PAGE_SIZE]);
            Bare::new(&guest, 7).unwrap().round(with, 3).unwrap();
            let mut all = [1u8; 8 * PAGE_SIZE];
            buffer.read(0, &mut all);
            assert!(all[..7 * PAGE_SIZE].iter().all(|b| *b == 0), "{with}");
            assert!(all[7 * PAGE_SIZE..].iter().all(|b| *b == 0xA5), "{with}");
        }
    }

    #[test]
    fn a_guest_without_a_process_or_without_the_frames_is_refused() {
        let options = GuestOptions { frames: 8, ..GuestOptions::default() };
        let guest = GuestHandle::create(DomId(1), options).unwrap();
        assert!(Bare::new(&guest, 9).is_err());
        assert!(Bare::new(&guest, 0).is_err());
        let outcome = Bare::new(&guest, 8).unwrap().round(CopyWith::ProcessVm, 3);
        assert!(outcome.is_err());
    }
}
