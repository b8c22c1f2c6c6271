//! Pages of a device's in the place of an arena's own, while a queue uses that part of it.
//!
//! Pages that have names need not be looked up each time: Xen copies between two grants without this
//! kernel's help (blkif.md 4.3). Such pages have names here. A page without one is as good as it ever was,
//! so no queue has to be lent any.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use super::{Arena, Kind, Span};

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// An owner of pages that can be lent.
pub trait Lender: Send + Sync {
    /// [Puts](Arena::put) pages behind the first bytes of `wanted`, which is whole pages that are not in
    /// use: as many as there are.
    fn lend(&self, arena: &Arena, wanted: Span);

    /// [Takes](Arena::take_out) all pages out that were lent to `wanted`. They are not in use any more.
    fn take_back(&self, arena: &Arena, wanted: Span);
}

impl Arena {
    /// Puts pages of a device behind `at`: the bytes from `offset` on, a name for each page. The content
    /// of `at` is gone, so it must not be in use, by the kernel either.
    ///
    /// # Errors
    /// The kernel's: `at` is as it was, but its bytes are zero. Huge pages of the kernel's reserve
    /// cannot have a part replaced.
    ///
    /// # Panics
    /// If `at` is not inside this arena, or not a page for each name.
    pub fn put(
        &self,
        at: Span,
        device: BorrowedFd<'_>,
        offset: u64,
        names: &[u32],
    ) -> io::Result<()> {
        self.assert_pages(at);
        assert_eq!(at.len(), names.len() * PAGE_BYTES, "a name for each page");
        if self.kind == Kind::Huge {
            let text = "this disk's memory is from the kernel's reserve of huge pages";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let start = self.ptr(at).as_ptr().cast();
        let (rights, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: `ptr` checked that it replaces our own mapping only, by one of the same rights.
        // Pointers into it stay good, and no references exist.
        if let Err(e) = unsafe { mmap(start, at.len(), rights, flags, device, offset) } {
            self.restore(at);
            return Err(e.into());
        }
        self.keep_private(at);
        let all = self.names.get_or_init(|| {
            (0..self.len / PAGE_BYTES).map(|_| AtomicU32::new(0)).collect::<Box<[AtomicU32]>>()
        });
        for (to, name) in all[at.offset() / PAGE_BYTES..].iter().zip(names) {
            to.store(*name, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Puts ordinary memory behind `at` again, all zero. It must not be in use.
    ///
    /// # Panics
    /// If `at` is not inside this arena, or not whole pages.
    pub fn take_out(&self, at: Span) {
        self.assert_pages(at);
        self.forget(at);
        self.restore(at);
    }

    /// The name of the page that this byte is in, if it is a lent one.
    #[inline]
    pub fn name(&self, byte: usize) -> Option<u32> {
        let name = self.names.get()?.get(byte / PAGE_BYTES)?.load(Ordering::Relaxed);
        (name != 0).then_some(name)
    }

    /// The names of the pages that `at` touches are no good: they have none from now on.
    pub fn forget(&self, at: Span) {
        let Some(names) = self.names.get() else { return };
        let end = (at.offset() + at.len()).div_ceil(PAGE_BYTES);
        for name in &names[at.offset() / PAGE_BYTES..end] {
            name.store(0, Ordering::Relaxed);
        }
    }

    fn assert_pages(&self, at: Span) {
        let whole = at.offset().is_multiple_of(PAGE_BYTES) && at.len().is_multiple_of(PAGE_BYTES);
        assert!(whole, "{at:?} is not whole pages");
    }

    fn restore(&self, at: Span) {
        let (rights, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        let start = self.ptr(at).as_ptr().cast();
        // SAFETY: as in `put`.
        if let Err(e) = unsafe { mmap_anonymous(start, at.len(), rights, flags) } {
            // There may be a hole in memory that pointers lead to: nothing may run on.
            tracing::error!("the kernel has no memory to replace pages by: {e}; ending at once");
            std::process::abort();
        }
        self.keep_private(at);
        if self.kind == Kind::Transparent {
            // SAFETY: advice on our own mapping.
            let _ = unsafe { madvise(start, at.len(), Advice::LinuxHugepage) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// Pages of a device: each begins with its number.
    fn device(pages: usize) -> File {
        use std::os::unix::fs::FileExt;
        let device = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
        device.set_len((pages * PAGE_BYTES) as u64).unwrap();
        for page in 0..pages {
            device.write_all_at(&[page as u8 + 1], (page * PAGE_BYTES) as u64).unwrap();
        }
        device
    }

    fn first(arena: &Arena, page: usize) -> u8 {
        let mut byte = [0];
        arena.copy_out(arena.span(page * PAGE_BYTES, 1), &mut byte);
        byte[0]
    }

    #[test]
    fn lent_pages_have_names_and_stand_where_they_were_put() {
        let (arena, device) = (Arena::new(1).unwrap(), device(3));
        if arena.kind == Kind::Huge {
            return; // It cannot be lent any.
        }
        arena.fill(arena.span(0, arena.len()), 0xEE);
        let at = arena.span(PAGE_BYTES, 2 * PAGE_BYTES);
        arena.put(at, device.as_fd(), PAGE_BYTES as u64, &[70, 80]).unwrap();
        assert_eq!([0, 1, 2, 3].map(|page| first(&arena, page)), [0xEE, 2, 3, 0xEE]);
        let names = [0, 4095, 4096, 8191, 8192, 12287, 12288].map(|byte| arena.name(byte));
        assert_eq!(names, [None, None, Some(70), Some(70), Some(80), Some(80), None]);

        arena.forget(arena.span(8190, 3));
        assert_eq!([4096, 8192].map(|byte| arena.name(byte)), [None, None]);
        assert_eq!(first(&arena, 2), 3, "the page is still there");

        arena.put(at, device.as_fd(), 0, &[70, 80]).unwrap();
        arena.take_out(at);
        assert_eq!([4096, 8192].map(|byte| arena.name(byte)), [None, None]);
        assert_eq!([0, 1, 2, 3].map(|page| first(&arena, page)), [0xEE, 0, 0, 0xEE]);
        arena.fill(arena.span(0, arena.len()), 1);
    }

    #[test]
    fn a_device_without_pages_leaves_the_arena_usable() {
        let (arena, (nothing, _writer)) = (Arena::new(1).unwrap(), std::io::pipe().unwrap());
        let at = arena.span(0, PAGE_BYTES);
        arena.put(at, nothing.as_fd(), 0, &[70]).unwrap_err();
        assert_eq!(arena.name(0), None);
        arena.fill(at, 7);
        assert_eq!(first(&arena, 0), 7);
    }
}
