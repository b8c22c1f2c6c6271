//! The memory that guests' data passes through.
//!
//! One [`Arena`] a disk: anonymous memory, page aligned, on 2 MiB pages where the kernel has them.
//! The kernel (a running transfer), the hypervisor (a grant copy) and this process use it at the
//! same time. So nothing here ever hands out a `&[u8]`: bytes are copied in and out. Foreign code
//! gets raw pointers that were bounds-checked once, in [`Arena::ptr`].
//!
//! Pages that were never touched are not resident (but those of the kernel's reserve of huge
//! pages), nor are those that were given back ([`Arena::release`]). Memory that an engine pins is
//! resident, and counts against the memlock limit of a process without `CAP_IPC_LOCK`.

mod lent;

use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

pub use lent::Lender;

use ferrite_host::volatile;

/// The unit that arenas are made of, in bytes: the huge page of x86-64.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The largest arena in bytes: [`Span`] counts in 32 bits.
pub const MAX_ARENA_BYTES: usize = (1 << 32) - HUGE_PAGE_BYTES;

/// A range of bytes in an arena. It says where, not whose: a span made by one arena is checked
/// against the bounds of another that it is used with, and no more than that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    offset: u32,
    len: u32,
}

impl Span {
    /// Bytes in the range.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the range has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes from the start of the arena to the start of the range.
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset as usize
    }

    /// This range and `next` as one, if `next` begins where this ends.
    #[inline]
    pub fn join(self, next: Span) -> Option<Span> {
        let len = self.len.checked_add(next.len)?;
        (self.offset + self.len == next.offset).then_some(Span { offset: self.offset, len })
    }

    /// The part of `len` bytes that starts `from` bytes into this range.
    ///
    /// # Panics
    /// If that is not inside this range.
    #[inline]
    pub fn slice(&self, from: usize, len: usize) -> Span {
        let inside = from.checked_add(len).is_some_and(|end| end <= self.len());
        if !inside {
            outside(from, len, self.len());
        }
        // Both are at most self.len, a u32.
        Span { offset: self.offset + from as u32, len: len as u32 }
    }
}

/// Apart from the checks, which would otherwise make the text ready each time that they pass.
#[cold]
fn outside(from: usize, len: usize, of: usize) -> ! {
    panic!("bytes {from}..+{len} are outside of {of}")
}

/// The kind of memory behind an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Huge,
    Transparent,
    Small,
}

/// A mapping of zeroed anonymous memory; see the module text.
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    kind: Kind,
    /// Of lent pages, by page; 0: it is not one.
    names: OnceLock<Box<[AtomicU32]>>,
}

// SAFETY: the arena is plain memory that is unmapped by its one owner. All access is by volatile
// copies or through raw pointers whose users answer for them.
unsafe impl Send for Arena {}
// SAFETY: as above; no method needs exclusive access, and none makes a reference to the bytes.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `bytes`, rounded up to 2 MiB, all zero.
    ///
    /// # Errors
    /// `InvalidInput` for 0 bytes or more than [`MAX_ARENA_BYTES`]; what `mmap` says otherwise.
    pub fn new(bytes: usize) -> io::Result<Arc<Arena>> {
        Arena::with_room(bytes, 0)
    }

    /// The same, and behind it room for `more` bytes, likewise, if this host has that: address space,
    /// that is. Where the kernel's reserve of huge pages is used there is none, since pages of that
    /// would be taken at once.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_room(bytes: usize, more: usize) -> io::Result<Arc<Arena>> {
        check_bytes(bytes)?;
        let len = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let more = more.min(MAX_ARENA_BYTES - len).next_multiple_of(HUGE_PAGE_BYTES);
        let arena = match Self::map_huge(len) {
            Some(arena) => arena,
            None if more == 0 => Self::map_aligned(len)?,
            None => Self::map_aligned(len + more).or_else(|_| Self::map_aligned(len))?,
        };
        arena.keep_private(arena.span(0, arena.len));
        Ok(Arc::new(arena))
    }

    /// Memory of which little may ever be used: ordinary one, in pages of 4 KiB except for the `large` part.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sparse(bytes: usize, large: std::ops::Range<usize>) -> io::Result<Arc<Arena>> {
        check_bytes(bytes)?;
        let arena = Self::map_aligned(bytes.next_multiple_of(HUGE_PAGE_BYTES))?;
        for small in [0..large.start.min(arena.len), large.end.min(arena.len)..arena.len] {
            arena.keep_small(arena.span(small.start, small.len()));
        }
        arena.keep_private(arena.span(0, arena.len));
        Ok(Arc::new(arena))
    }

    /// From the kernel's reserve of huge pages. The mapping is not `MAP_NORESERVE`, so the pages
    /// are set aside now. They are also made now, which costs no other process more. A shortage (of
    /// the reserve, of a memory node or a control group) shows here, never as a SIGBUS later.
    fn map_huge(len: usize) -> Option<Arena> {
        if free_huge_pages() < len / HUGE_PAGE_BYTES {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        let base = NonNull::new(base.ok()?.cast::<u8>())?;
        // From here on, dropping it unmaps it.
        let arena = Arena { base, len, kind: Kind::Huge, names: OnceLock::new() };
        // SAFETY: our own mapping; its pages are made, and their content stays zero.
        match unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxPopulateWrite) } {
            // Before Linux 5.14 there is no such advice.
            Ok(()) | Err(Errno::INVAL) => Some(arena),
            Err(_) => None,
        }
    }

    /// Ordinary memory, aligned so that transparent huge pages fit, with the kernel asked to use
    /// them.
    fn map_aligned(len: usize) -> io::Result<Arena> {
        let padded = len + HUGE_PAGE_BYTES;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), padded, prot, MapFlags::PRIVATE) }?
            .cast::<u8>();
        let before = start.align_offset(HUGE_PAGE_BYTES);
        let base = start.wrapping_add(before);
        let after = padded - before - len;
        // SAFETY: both ranges lie in the mapping made above, outside of base..base+len, and no other
        // code knows of them. An error leaves them mapped, which costs address space only.
        unsafe {
            if before > 0 {
                let _ = munmap(start.cast(), before);
            }
            if after > 0 {
                let _ = munmap(base.wrapping_add(len).cast(), after);
            }
        }
        let Some(base) = NonNull::new(base) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let mut arena = Arena { base, len, kind: Kind::Small, names: OnceLock::new() };
        // SAFETY: advice on our own mapping that changes how it is backed, not what it holds.
        let advised = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        if advised.is_ok() && transparent_huge_pages_on() {
            arena.kind = Kind::Transparent;
        }
        Ok(arena)
    }

    /// Pages of 4 KiB for the span, so that it becomes resident by itself and as far as it is used. Memory from the
    /// reserve of huge pages stays as it is.
    pub(crate) fn keep_small(&self, s: Span) {
        if self.kind == Kind::Huge || s.is_empty() {
            return;
        }
        // SAFETY: advice on our own mapping that changes how it is backed, not what it holds. An error leaves it on
        // larger pages, which work as well.
        let _ = unsafe { madvise(self.ptr(s).as_ptr().cast(), s.len(), Advice::LinuxNoHugepage) };
    }

    /// A child process gets no copy (a fork must not make the kernel copy pages that are pinned
    /// for a transfer), and a core dump holds no guest's data. Both are best effort.
    fn keep_private(&self, s: Span) {
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: advice on our own mapping; this process keeps its contents.
            let _ = unsafe { madvise(self.ptr(s).as_ptr().cast(), s.len(), advice) };
        }
    }

    /// Bytes; a multiple of 2 MiB.
    #[expect(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The kind of memory behind it, for people: `2 MiB pages`, `transparent huge pages` or `4 KiB pages`.
    pub fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Huge => "2 MiB pages",
            Kind::Transparent => "transparent huge pages",
            Kind::Small => "4 KiB pages",
        }
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If the arena is shorter.
    pub fn span(&self, offset: usize, len: usize) -> Span {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside {
            outside(offset, len, self.len);
        }
        // MAX_ARENA_BYTES fits in 32 bits.
        Span { offset: offset as u32, len: len as u32 }
    }

    /// Where the span is in this process, for the kernel and the hypervisor. The pointer is good
    /// for `s.len()` bytes as long as the arena lives.
    ///
    /// # Panics
    /// If the span is not inside this arena.
    #[inline]
    pub fn ptr(&self, s: Span) -> NonNull<u8> {
        match self.checked_ptr(s) {
            Some(p) => p,
            None => panic!("{s:?} is outside of an arena of {} bytes", self.len),
        }
    }

    /// [`ptr`](Arena::ptr) for those that answer a bad span with an error.
    #[inline]
    pub(crate) fn checked_ptr(&self, s: Span) -> Option<NonNull<u8>> {
        if s.offset() + s.len() > self.len {
            return None;
        }
        // SAFETY: offset <= len, so the result is inside the mapping or one past its end.
        Some(unsafe { self.base.add(s.offset()) })
    }

    /// Copies the span into `to`.
    ///
    /// # Panics
    /// If the two lengths differ, or the span is not inside this arena.
    pub fn copy_out(&self, s: Span, to: &mut [u8]) {
        assert_eq!(s.len(), to.len(), "copy_out of unequal lengths");
        // SAFETY: `ptr` checked that the span is mapped memory of that length.
        unsafe { volatile::copy_out(self.ptr(s).as_ptr(), to) }
    }

    /// Copies `from` into the span.
    ///
    /// # Panics
    /// If the two lengths differ, or the span is not inside this arena.
    pub fn copy_in(&self, s: Span, from: &[u8]) {
        assert_eq!(s.len(), from.len(), "copy_in of unequal lengths");
        // SAFETY: `ptr` checked that the span is mapped memory of that length.
        unsafe { volatile::copy_in(self.ptr(s).as_ptr(), from) }
    }

    /// Gives the memory of the span back to the system: it is no longer resident, and reads as
    /// zeros. It must not be in use, by the kernel either. Memory from the reserve of huge pages
    /// stays.
    ///
    /// # Panics
    /// If the span is not inside this arena, or not whole pages.
    pub fn release(&self, s: Span) {
        let whole = s.offset().is_multiple_of(4096) && s.len().is_multiple_of(4096);
        assert!(whole, "{s:?} is not whole pages");
        if self.kind == Kind::Huge {
            self.fill(s, 0);
            return;
        }
        let start = self.ptr(s).as_ptr().cast();
        // SAFETY: our own mapping, which stays; its bytes become zero, as if by `fill`.
        if let Err(e) = unsafe { madvise(start, s.len(), Advice::LinuxDontNeed) } {
            tracing::debug!("memory is not given back: {e}");
        }
    }

    /// Sets every byte of the span.
    ///
    /// # Panics
    /// If the span is not inside this arena.
    pub fn fill(&self, s: Span, byte: u8) {
        // SAFETY: `ptr` checked that the span is mapped memory of that length.
        unsafe { volatile::fill(self.ptr(s).as_ptr(), s.len(), byte) }
    }

    /// Whether every byte of the span is zero.
    ///
    /// # Panics
    /// If the span is not inside this arena.
    pub fn is_zero(&self, s: Span) -> bool {
        // SAFETY: `ptr` checked that the span is mapped memory of that length.
        unsafe { volatile::is_zero(self.ptr(s).as_ptr(), s.len()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: our own mapping. Engines hold an Arc of the arena until the kernel is done with
        // it, and a pointer from `ptr` is good only while the arena lives.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("len", &self.len).field("kind", &self.kind).finish()
    }
}

fn check_bytes(bytes: usize) -> io::Result<()> {
    if bytes == 0 || bytes > MAX_ARENA_BYTES {
        let text = format!("an arena has 1 to {MAX_ARENA_BYTES} bytes, not {bytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// Huge pages of 2 MiB that are neither used nor promised to another mapping.
fn free_huge_pages() -> usize {
    let read = |name: &str| -> Option<usize> {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        ferrite_host::names::read_to_string(path).ok()?.trim().parse().ok()
    };
    let free = read("free_hugepages").unwrap_or(0);
    free.saturating_sub(read("resv_hugepages").unwrap_or(0))
}

/// Whether the kernel acts on the advice to use huge pages.
fn transparent_huge_pages_on() -> bool {
    ferrite_host::names::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|modes| !modes.contains("[never]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_arena_is_zero_and_rounded_up_to_huge_pages() {
        let arena = Arena::new(1).unwrap();
        assert_eq!(arena.len(), HUGE_PAGE_BYTES);
        assert_eq!(arena.base.as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
        let mut bytes = vec![1u8; arena.len()];
        arena.copy_out(arena.span(0, arena.len()), &mut bytes);
        assert!(bytes.iter().all(|b| *b == 0));
    }

    #[test]
    fn bytes_go_in_and_come_out_at_any_alignment() {
        let arena = Arena::new(1 << 20).unwrap();
        for offset in 0..9 {
            // From 512 bytes on they may go another way.
            for len in (0..40).chain(500..540) {
                let from: Vec<u8> = (0..len).map(|i| (i * 7 + offset) as u8).collect();
                arena.fill(arena.span(0, 600), 0xEE);
                arena.copy_in(arena.span(offset, len), &from);
                let mut all = [0u8; 600];
                arena.copy_out(arena.span(0, 600), &mut all);
                assert_eq!(&all[offset..offset + len], &from[..]);
                assert!(all[..offset].iter().chain(&all[offset + len..]).all(|b| *b == 0xEE));
                let mut out = vec![0u8; len];
                arena.copy_out(arena.span(offset, len), &mut out);
                assert_eq!(out, from);
            }
        }
    }

    #[test]
    fn untouched_memory_is_not_resident() {
        let arena = Arena::new(64 << 20).unwrap();
        if arena.kind == Kind::Huge {
            return; // From the reserve, which no other program uses.
        }
        arena.fill(arena.span(0, 1), 1);
        let pages = arena.len() / 4096;
        let mut map = vec![0u8; pages];
        // SAFETY: the range is our mapping, and `map` has a byte for each of its pages.
        let r = unsafe {
            libc::mincore(arena.base.as_ptr().cast(), arena.len(), map.as_mut_ptr().cast())
        };
        assert_eq!(r, 0);
        let resident = map.iter().filter(|b| **b & 1 == 1).count();
        assert!(resident <= HUGE_PAGE_BYTES / 4096, "{resident} pages are resident");
    }

    #[test]
    fn a_slice_stays_inside_its_span() {
        let arena = Arena::new(1 << 20).unwrap();
        let s = arena.span(4096, 8192);
        assert_eq!(s.slice(4096, 4096), arena.span(8192, 4096));
        assert!(s.slice(8192, 0).is_empty());
        for (from, len) in [(0, 8193), (8192, 1), (usize::MAX, 1), (1, usize::MAX)] {
            assert!(std::panic::catch_unwind(|| s.slice(from, len)).is_err(), "{from} {len}");
        }
    }

    #[test]
    fn a_byte_that_is_not_zero_is_seen_wherever_it_is() {
        let arena = Arena::new(1).unwrap();
        for at in [0, 3, 8, 61, 95] {
            let span = arena.span(4096 + 3, 96);
            assert!(arena.is_zero(span));
            arena.copy_in(span.slice(at, 1), &[1]);
            assert!(!arena.is_zero(span), "byte {at}");
            arena.copy_in(span.slice(at, 1), &[0]);
        }
    }

    #[test]
    fn a_span_of_a_larger_arena_is_refused() {
        let (small, large) = (Arena::new(1).unwrap(), Arena::new(4 << 20).unwrap());
        let end = large.span(large.len() - 1, 1);
        assert!(small.checked_ptr(end).is_none());
        assert!(large.checked_ptr(end).is_some());
    }

    #[test]
    fn sizes_that_a_span_cannot_count_are_refused() {
        for bytes in [0, MAX_ARENA_BYTES + 1, usize::MAX] {
            assert_eq!(Arena::new(bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
