//! Pages of this domain that it has granted to itself, by /dev/xen/gntalloc.
//!
//! The hypervisor copies between two grants without this kernel's help, which otherwise pins the local
//! page for each copy (blkif.md 4.3). No guest is granted anything. All of a host's disks share the
//! number that xen-gntalloc's parameter `limit` allows. Pages go back when a disk rests, and whatever
//! a process had goes back when it ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_host::names;
use ferrite_io::arena::{Arena, Lender, Span};
use rustix::fs::{Mode, OFlags};

use super::uapi;
use crate::hypervisor::{DomId, PAGE_SIZE};

/// The control domain, which this has to be: in another one its own number is not known.
pub(super) const OWN: DomId = DomId(0);

/// The device, for all queues of a process.
#[derive(Debug)]
pub(super) struct PageDevice {
    device: OwnedFd,
    /// It was said that there are no more pages.
    told: AtomicBool,
}

impl PageDevice {
    pub(super) fn new(device: OwnedFd) -> Arc<PageDevice> {
        Arc::new(PageDevice { device, told: AtomicBool::new(false) })
    }

    /// So many pages, granted; where they are on the device, and their references.
    pub(super) fn alloc(&self, pages: usize) -> io::Result<(u64, [u32; uapi::ALLOC_PAGES_MAX])> {
        assert!((1..=uapi::ALLOC_PAGES_MAX).contains(&pages), "1 to 64 pages are made at once");
        let mut request = uapi::AllocGref {
            domid: OWN.0,
            flags: uapi::ALLOC_WRITABLE,
            count: pages as u32,
            index: 0,
            refs: [0; uapi::ALLOC_PAGES_MAX],
        };
        // SAFETY: a structure of the kernel's layout with room for `count` references behind its head.
        unsafe { uapi::ioctl(self.device.as_fd(), uapi::ALLOC_GREF, &raw mut request) }?;
        Ok((request.index, request.refs))
    }

    /// Gives pages back: now, or when they are unmapped.
    pub(super) fn free(&self, index: u64, pages: usize) {
        let mut request = uapi::DeallocGref { index, count: pages as u32, pad: 0 };
        // SAFETY: a structure of the kernel's layout.
        let result =
            unsafe { uapi::ioctl(self.device.as_fd(), uapi::DEALLOC_GREF, &raw mut request) };
        if let Err(e) = result {
            tracing::debug!("{pages} own pages go back when this process ends: {e}");
        }
    }

    /// Said once: disks that come and go decide how often it happens.
    fn tell(&self, got: usize, wanted: usize, e: &io::Error) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "{got} of {wanted} pages granted by this domain to itself: {e}; the rest of the data is \
                 copied a little slower (ferrite doctor names the limit)"
            );
        }
    }
}

/// Opens the device.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(names::open(path, OFlags::RDWR, Mode::empty())?)
}

/// Pages that stand in an arena.
#[derive(Clone, Copy, Debug)]
struct Lent {
    at: Span,
    index: u64,
}

/// The lender of one pool.
pub(super) struct OwnPages {
    device: Arc<PageDevice>,
    lent: Mutex<Vec<Lent>>,
}

impl OwnPages {
    pub(super) fn new(device: Arc<PageDevice>) -> OwnPages {
        OwnPages { device, lent: Mutex::default() }
    }

    fn lent(&self) -> std::sync::MutexGuard<'_, Vec<Lent>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `pages` more, from the beginning of `at`.
    fn lend_some(&self, arena: &Arena, at: Span, pages: usize) -> io::Result<()> {
        let (index, refs) = self.device.alloc(pages)?;
        if let Err(e) = arena.put(at, self.device.device.as_fd(), index, &refs[..pages]) {
            self.device.free(index, pages);
            return Err(e);
        }
        self.lent().push(Lent { at, index });
        Ok(())
    }
}

impl Lender for OwnPages {
    /// The kernel gives all that it is asked for or nothing: the rest of its limit is found by asking
    /// for less.
    fn lend(&self, arena: &Arena, wanted: Span) {
        let all = wanted.len() / PAGE_SIZE;
        let (mut got, mut step) = (0, uapi::ALLOC_PAGES_MAX);
        while got < all {
            let pages = step.min(all - got);
            let at = wanted.slice(got * PAGE_SIZE, pages * PAGE_SIZE);
            match self.lend_some(arena, at, pages) {
                Ok(()) => got += pages,
                Err(e) if pages == 1 => return self.device.tell(got, all, &e),
                Err(_) => step = pages / 2,
            }
        }
    }

    fn take_back(&self, arena: &Arena, wanted: Span) {
        let end = wanted.offset() + wanted.len();
        self.lent().retain(|lent| {
            let is_there = (wanted.offset()..end).contains(&lent.at.offset());
            if is_there {
                arena.take_out(lent.at);
                self.device.free(lent.index, lent.at.len() / PAGE_SIZE);
            }
            !is_there
        });
    }
}

/// The pool has gone, and perhaps not its arena: mapped pages go back when they are unmapped.
impl Drop for OwnPages {
    fn drop(&mut self) {
        for lent in self.lent().drain(..) {
            self.device.free(lent.index, lent.at.len() / PAGE_SIZE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_pages_the_arena_stays_what_it_was() {
        let (not_gntalloc, _writer) = io::pipe().unwrap();
        let lender = OwnPages::new(PageDevice::new(not_gntalloc.into()));
        let arena = Arena::new(1).unwrap();
        let all = arena.span(0, arena.len());
        arena.fill(all, 0x5A);
        lender.lend(&arena, all);
        assert!(lender.lent().is_empty() && lender.device.told.load(Ordering::Relaxed));
        assert!((0..arena.len()).step_by(PAGE_SIZE).all(|byte| arena.name(byte).is_none()));
        let mut last = [0];
        arena.copy_out(all.slice(all.len() - 1, 1), &mut last);
        assert_eq!(last, [0x5A]);
        lender.take_back(&arena, all);
    }
}
