//! A ring in this process's own memory, for tests.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferrite_io::arena::Arena;

use crate::hypervisor::{CopySegment, Direction, Link, PAGE_SIZE, RingMemory};
use crate::slots::{REQ_EVENT, RSP_EVENT};

/// A ring in this process's own memory, and nothing else.
pub(crate) struct BareLink {
    memory: Arc<Arena>,
    pages: usize,
    fd: OwnedFd,
}

impl BareLink {
    /// Both sides of a new ring of `1 << order` pages.
    pub(crate) fn boxed(order: u32) -> (Box<dyn Link>, Front) {
        let pages = 1 << order;
        let front = Front { memory: Arena::new(pages * PAGE_SIZE).unwrap(), pages };
        front.set(REQ_EVENT, 1);
        front.set(RSP_EVENT, 1);
        (front.link(), front)
    }
}

impl Link for BareLink {
    fn ring(&self) -> RingMemory {
        let bytes = self.pages * PAGE_SIZE;
        // SAFETY: the arena is page aligned and lives as long as this link.
        unsafe { RingMemory::new(self.memory.ptr(self.memory.span(0, bytes)), bytes) }
    }
    fn copy(&mut self, _: &Arena, _: Direction, _: &mut [CopySegment]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn event_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
    fn event_taken(&mut self) {}

    fn take_event(&mut self) -> io::Result<bool> {
        Ok(false)
    }
    fn rearm(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn notify(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The other side, as bytes.
pub(crate) struct Front {
    memory: Arc<Arena>,
    pages: usize,
}

impl Front {
    /// Another link to the ring, as a successor has.
    pub(crate) fn link(&self) -> Box<dyn Link> {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Box::new(BareLink { memory: self.memory.clone(), pages: self.pages, fd })
    }

    /// All bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.pages * PAGE_SIZE];
        self.read(0, &mut bytes);
        bytes
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        self.memory.copy_in(self.memory.span(at, bytes.len()), bytes);
    }
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) {
        self.memory.copy_out(self.memory.span(at, bytes.len()), bytes);
    }
    pub(crate) fn set(&self, at: usize, value: u32) {
        self.write(at, &value.to_le_bytes());
    }
    pub(crate) fn get(&self, at: usize) -> u32 {
        let mut b = [0; 4];
        self.read(at, &mut b);
        u32::from_le_bytes(b)
    }
}
