//! Memory that another process has given: a mapped file of it, such as the memory of a guest of QEMU.
//!
//! The other process reads and writes it at any time, and may make the file shorter. So nothing here hands out a
//! `&[u8]`: bytes are copied in and out, and each access is checked against the bounds. An access to a page that has
//! gone is an error and no signal that ends this process (`lost`).
//!
//! Only files on tmpfs and hugetlbfs are mapped (memfds are that). The pages of others may be read from a medium, or from
//! a server that never answers.

mod lost;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use ferrite_host::volatile;
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::arena::{Arena, Span};
use lost::Watch;

/// `statfs` of the file systems whose files are memory.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;
const PAGE_BYTES: u64 = 4096;

/// Why an access was not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not within the memory.
    #[error("an address is outside of the memory")]
    Outside,
    /// Pages of it have gone. Nothing of this memory can be used any more, nor what was read from it just before.
    #[error("the memory's file was made shorter while it was in use")]
    Gone,
}

/// A part of another process's file, mapped shared.
pub struct Memory {
    /// The first byte of the part.
    base: NonNull<u8>,
    len: usize,
    /// Its pages.
    mapped: NonNull<u8>,
    mapped_len: usize,
    watch: Watch,
}

// SAFETY: the mapping belongs to this object alone, and all access is atomic or volatile.
unsafe impl Send for Memory {}
// SAFETY: as above; no method makes a reference to plain bytes of it.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `len` bytes from `offset` on, for reading and writing.
    ///
    /// # Errors
    /// `InvalidInput`: the file is not memory, or has no such part. Otherwise the kernel's, also if the file may not be
    /// written. `QuotaExceeded`: this process has as many of them as it can watch.
    pub fn map(file: impl AsFd, offset: u64, len: u64) -> io::Result<Memory> {
        let stat = fstat(&file)?;
        let of = fstatfs(&file)?;
        let is_memory = [TMPFS, HUGETLBFS].contains(&(of.f_type as u64));
        if !is_memory || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(invalid(
                "the descriptor is no memory: it must be a memfd, or a file on tmpfs or hugetlbfs",
            ));
        }
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= stat.st_size as u64);
        let Some(end) = end else {
            return Err(invalid("the memory is not within its file"));
        };
        // Pages of hugetlbfs are mapped whole.
        let page =
            PAGE_BYTES.max(if of.f_type as u64 == HUGETLBFS { of.f_bsize as u64 } else { 0 });
        let from = offset - offset % page;
        let mapped_len = usize::try_from((end - from).next_multiple_of(page)).map_err(too_large)?;
        let watch = Watch::new()?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap(ptr::null_mut(), mapped_len, prot, flags, &file, from) }?;
        // SAFETY: advice on our own new mapping. A child and a core dump have nothing of it; an error does no harm.
        let _ = unsafe { madvise(mapped, mapped_len, Advice::LinuxDontFork) };
        // SAFETY: as above.
        let _ = unsafe { madvise(mapped, mapped_len, Advice::LinuxDontDump) };
        let mapped = NonNull::new(mapped.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        watch.begin(mapped.as_ptr() as usize, mapped_len);
        // SAFETY: offset - from is below a page, and the mapping has at least one more byte.
        let base = unsafe { mapped.add((offset - from) as usize) };
        Ok(Memory { base, len: len as usize, mapped, mapped_len, watch })
    }

    /// Bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether pages of it have gone: see [`Fault::Gone`].
    pub fn is_gone(&self) -> bool {
        self.watch.is_lost()
    }

    /// Copies from `at` into `to`; not atomic as a whole.
    ///
    /// # Errors
    /// `to` has no meaning then.
    pub fn copy_out(&self, at: usize, to: &mut [u8]) -> Result<(), Fault> {
        let from = self.at(at, to.len(), 1)?;
        // SAFETY: `at` checked that the range is mapped; `to` is no part of the mapping.
        unsafe { volatile::copy_out(from, to) };
        self.after()
    }

    /// Copies `from` to `at`; not atomic as a whole.
    ///
    /// # Errors
    /// The other process may see a part of it, or nothing.
    pub fn copy_in(&self, at: usize, from: &[u8]) -> Result<(), Fault> {
        let to = self.at(at, from.len(), 1)?;
        // SAFETY: as in `copy_out`.
        unsafe { volatile::copy_in(to, from) };
        self.after()
    }

    /// Copies from `at` into the whole span.
    ///
    /// # Errors
    /// The span has no meaning then: nothing of it may be written to a disk.
    ///
    /// # Panics
    /// The span is not inside the arena.
    pub fn to_arena(&self, at: usize, arena: &Arena, span: Span) -> Result<(), Fault> {
        let from = self.at(at, span.len(), 1)?;
        // SAFETY: both ranges were checked, are mapped and are different mappings.
        unsafe { volatile::copy(from, arena.ptr(span).as_ptr(), span.len()) };
        self.after()
    }

    /// Copies the whole span to `at`.
    ///
    /// # Errors
    /// The other process may see a part of it, or nothing.
    ///
    /// # Panics
    /// The span is not inside the arena.
    pub fn from_arena(&self, at: usize, arena: &Arena, span: Span) -> Result<(), Fault> {
        let to = self.at(at, span.len(), 1)?;
        // SAFETY: as in `to_arena`.
        unsafe { volatile::copy(arena.ptr(span).as_ptr(), to, span.len()) };
        self.after()
    }

    /// Sets `len` bytes to zero.
    ///
    /// # Errors
    /// As [`copy_in`](Self::copy_in).
    pub fn zero(&self, at: usize, len: usize) -> Result<(), Fault> {
        let to = self.at(at, len, 1)?;
        // SAFETY: as in `copy_in`.
        unsafe { volatile::fill(to, len, 0) };
        self.after()
    }

    /// Loads with acquire ordering, as it stands in memory.
    ///
    /// # Errors
    /// It is outside, not a multiple of 2, or gone.
    #[inline]
    pub fn load_u16(&self, at: usize) -> Result<u16, Fault> {
        let word = self.at(at, 2, 2)?.cast::<u16>();
        // SAFETY: it is mapped and aligned; all access to it here is atomic or volatile.
        let value = unsafe { AtomicU16::from_ptr(word) }.load(Ordering::Acquire);
        self.after().map(|()| value)
    }

    /// Stores with release ordering.
    ///
    /// # Errors
    /// As [`load_u16`](Self::load_u16).
    #[inline]
    pub fn store_u16(&self, at: usize, value: u16) -> Result<(), Fault> {
        let word = self.at(at, 2, 2)?.cast::<u16>();
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(word) }.store(value, Ordering::Release);
        self.after()
    }

    /// Stores with release ordering.
    ///
    /// # Errors
    /// It is outside, not a multiple of 4, or gone.
    #[inline]
    pub fn store_u32(&self, at: usize, value: u32) -> Result<(), Fault> {
        let word = self.at(at, 4, 4)?.cast::<u32>();
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(word) }.store(value, Ordering::Release);
        self.after()
    }

    /// Stores with release ordering.
    ///
    /// # Errors
    /// It is outside, not a multiple of 8, or gone.
    #[inline]
    pub fn store_u64(&self, at: usize, value: u64) -> Result<(), Fault> {
        let word = self.at(at, 8, 8)?.cast::<u64>();
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
        self.after()
    }

    /// Where `len` bytes from `at` on are in this process, aligned to `unit`.
    #[inline]
    fn at(&self, at: usize, len: usize, unit: usize) -> Result<*mut u8, Fault> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Fault::Outside);
        }
        // SAFETY: at <= len, so the result is inside the mapping or one past its end.
        let there = unsafe { self.base.add(at) }.as_ptr();
        match (there as usize).is_multiple_of(unit) {
            true => Ok(there),
            false => Err(Fault::Outside),
        }
    }

    /// Whether the access just made was to the file's own pages. A thread that has read a replaced page sees here
    /// that it was replaced: the mark is set before (`lost.rs`).
    #[inline]
    fn after(&self) -> Result<(), Fault> {
        fence(Ordering::Acquire);
        if self.watch.is_lost() { Err(Fault::Gone) } else { Ok(()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.watch.end();
        // SAFETY: our own mapping; nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.mapped.as_ptr().cast(), self.mapped_len) };
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish()
    }
}

/// A file in memory of `len` zeros that cannot be made shorter or longer, to be given to another process.
///
/// # Errors
/// The kernel's.
pub fn create(name: &str, len: u64) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn too_large(_: std::num::TryFromIntError) -> io::Error {
    invalid("the memory is larger than this process can address")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64) -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn bytes_and_words_are_those_of_the_file() {
        use std::os::unix::fs::FileExt;
        let file = memfd(3 * 4096);
        let memory = Memory::map(&file, 4096 + 16, 4096).unwrap();
        memory.copy_in(3, b"bytes").unwrap();
        memory.store_u16(16, 7).unwrap();
        let mut found = [0; 5];
        file.read_exact_at(&mut found, 4096 + 19).unwrap();
        assert_eq!(&found, b"bytes");
        file.write_all_at(&9u16.to_ne_bytes(), 4096 + 16 + 32).unwrap();
        assert_eq!((memory.load_u16(16), memory.load_u16(32)), (Ok(7), Ok(9)));
        let arena = Arena::new(4096).unwrap();
        memory.to_arena(3, &arena, arena.span(8, 5)).unwrap();
        memory.from_arena(100, &arena, arena.span(8, 5)).unwrap();
        memory.copy_out(100, &mut found).unwrap();
        assert_eq!(&found, b"bytes");
        memory.zero(101, 3).unwrap();
        memory.copy_out(100, &mut found).unwrap();
        assert_eq!(&found, b"b\0\0\0s");
        // Long ones are set and copied by words; the bytes beside them stay.
        memory.copy_in(1000, &[7; 2003]).unwrap();
        memory.zero(1001, 2001).unwrap();
        let mut found = [0; 2003];
        memory.copy_out(1000, &mut found).unwrap();
        assert_eq!((found[0], found[2002]), (7, 7));
        assert!(found[1..2002].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn accesses_outside_or_unaligned_are_errors() {
        let memory = Memory::map(memfd(8192), 0, 4096).unwrap();
        assert_eq!(memory.load_u16(4096), Err(Fault::Outside));
        assert_eq!(memory.load_u16(1), Err(Fault::Outside));
        assert_eq!(memory.copy_in(4090, &[0; 7]), Err(Fault::Outside));
        assert_eq!(memory.copy_out(usize::MAX, &mut [0; 2]), Err(Fault::Outside));
        assert_eq!(memory.copy_in(4096, &[]), Ok(()));
    }

    #[test]
    fn what_is_no_memory_or_not_in_the_file_is_refused() {
        let file = memfd(4096);
        for (offset, len) in [(0, 4097), (4096, 1), (0, 0), (u64::MAX, 2), (1, u64::MAX)] {
            let refused = Memory::map(&file, offset, len).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{offset} {len}");
        }
        let null = File::options().read(true).write(true).open("/dev/zero").unwrap();
        assert_eq!(Memory::map(&null, 0, 4096).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        // A file of 4096 bytes on a file system that is neither.
        let other = File::open("/sys/devices/system/cpu/online").unwrap();
        assert_eq!(Memory::map(&other, 0, 4096).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(Memory::map(&pipe, 0, 4096).is_err());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_for_its_own_memory_only() {
        let (file, other) = (memfd(64 << 10), memfd(4096));
        let (memory, beside) =
            (Memory::map(&file, 0, 64 << 10).unwrap(), Memory::map(&other, 0, 4096).unwrap());
        beside.store_u16(0, 5).unwrap();
        memory.store_u16(40 << 10, 1).unwrap();
        file.set_len(16 << 10).unwrap();
        let threads: Vec<_> = std::thread::scope(|scope| {
            let read = |at: usize| memory.copy_out(at, &mut [0; 4096]);
            let threads: Vec<_> = (4..12).map(|k| scope.spawn(move || read(k * 4096))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(threads.iter().all(|read| *read == Err(Fault::Gone)));
        // Nothing of it is used any more, also where there are pages.
        assert!(memory.is_gone() && memory.load_u16(0) == Err(Fault::Gone));
        assert_eq!((beside.load_u16(0), beside.is_gone()), (Ok(5), false));
        drop(memory);
        // Its place in the table is used again.
        let again = Memory::map(&file, 0, 4096).unwrap();
        assert_eq!(again.copy_in(0, &[1]), Ok(()));
    }

    #[test]
    fn memory_of_our_own_cannot_shrink() {
        let file = create("ours", 4096).unwrap();
        assert!(file.set_len(0).is_err() && file.set_len(8192).is_err());
        assert!(Memory::map(&file, 0, 4096).is_ok());
    }
}
