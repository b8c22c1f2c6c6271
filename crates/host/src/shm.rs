//! Memory that outlives the process: a file on tmpfs, mapped shared.
//!
//! Values that a process stored are there for the one that opens the file after it, however the first
//! one ended (blkif.md 3.9: the in-flight table). Loads acquire and stores release, so a process that
//! loads a stored value sees what was written before the store. Offsets are bytes from the start.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::thread::futex;

use crate::{names, volatile};

/// A shared mapping of a whole file.
///
/// The file must not be made shorter while it is mapped: the missing pages would be a SIGBUS. It
/// is created with mode 0600 so that only its owner can.
pub struct Shm {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this object alone, and all access is atomic or volatile.
unsafe impl Send for Shm {}
// SAFETY: as above; no method makes a reference to plain bytes of it.
unsafe impl Sync for Shm {}

/// Of a file that can be mapped.
fn len_of(file: &File) -> io::Result<usize> {
    let meta = file.metadata()?;
    match usize::try_from(meta.len()) {
        Ok(bytes @ 1..) if meta.is_file() => Ok(bytes),
        _ => {
            let text = "not a shared memory file: it is no regular file or has no bytes";
            Err(io::Error::new(io::ErrorKind::InvalidData, text))
        }
    }
}

impl Shm {
    /// Creates the file with `bytes` zeros, or empties the one that is there and makes it so.
    /// A process that has the old one mapped must have ended.
    ///
    /// # Errors
    /// Those of `open`, `fallocate` (`StorageFull`: the tmpfs is full, and this is where it shows,
    /// not as a SIGBUS later) and `mmap`; `InvalidInput` for 0 bytes.
    pub fn create(path: impl AsRef<Path>, bytes: usize) -> io::Result<Shm> {
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "shared memory of 0 bytes"));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let file = File::from(names::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        // One that was there may be open to others. A worker is not the owner, and may not ask.
        if file.metadata()?.permissions().mode() & 0o7777 != 0o600 {
            file.set_permissions(PermissionsExt::from_mode(0o600))?;
        }
        file.set_len(bytes as u64)?;
        Self::map(&file, bytes)
    }

    /// Maps a file that [`create`](Shm::create) made, as long as it is.
    ///
    /// # Errors
    /// Those of `open` and `mmap`; `InvalidData` for what is no regular file or has no bytes.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Shm> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        Self::of(&names::open(path, flags, Mode::empty())?.into())
    }

    /// Maps such a file to look into it, without the right to write to it: stored values are this
    /// mapping's own, and the file's bytes on that page are not seen any more.
    ///
    /// # Errors
    /// As [`open`](Shm::open).
    pub fn look(path: impl AsRef<Path>) -> io::Result<Shm> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(names::open(path, flags, Mode::empty())?);
        let len = len_of(&file)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::PRIVATE, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Shm { base, len })
    }

    /// The same of a file that is open for reading and writing.
    ///
    /// # Errors
    /// As [`open`](Shm::open).
    pub fn of(file: &File) -> io::Result<Shm> {
        Self::map(file, len_of(file)?)
    }

    /// Makes a file that is open for reading and writing longer, by zeros, and maps all of it. Older
    /// mappings of it stay as long as they are, and both see what is stored in either.
    ///
    /// # Errors
    /// Those of `fallocate` (`StorageFull`: the file is as it was) and `mmap`; `InvalidInput` if the
    /// file is longer already.
    pub fn lengthen(file: &File, bytes: usize) -> io::Result<Shm> {
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() > bytes as u64 {
            let text = "shared memory can only be made longer";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Self::map(file, bytes)
    }

    /// Maps a part of a file that is open for reading and writing; the file becomes longer where the
    /// part ends behind it. `offset` is a multiple of the page size.
    ///
    /// # Errors
    /// Those of `fallocate` (`StorageFull`) and `mmap`; `InvalidInput` for 0 bytes.
    pub fn part(file: &File, offset: u64, bytes: usize) -> io::Result<Shm> {
        // All pages exist from now on: a full tmpfs is an error here.
        retry_on_intr(|| fallocate(file, FallocateFlags::empty(), offset, bytes as u64))?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(ptr::null_mut(), bytes, prot, MapFlags::SHARED, file, offset) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Shm { base, len: bytes })
    }

    /// Zeros that are of this process only, and gone with it: for a caller that can do without a file.
    ///
    /// # Errors
    /// That of `mmap`.
    pub fn private(bytes: usize) -> io::Result<Shm> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Shm { base, len: bytes })
    }

    fn map(file: &File, bytes: usize) -> io::Result<Shm> {
        Self::part(file, 0, bytes)
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "shared memory is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// All whole 64-bit words of it.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page aligned and this long; as in `u32_at` otherwise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / 8) }
    }

    /// The address of `len` bytes at `offset`, which must be a multiple of `align`.
    #[inline]
    fn at(&self, offset: usize, len: usize, align: usize) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(align) {
            self.misplaced(offset, len, align);
        }
        // SAFETY: offset + len is inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Apart from [`at`](Self::at), which would otherwise make the text ready with each access.
    #[cold]
    fn misplaced(&self, offset: usize, len: usize, align: usize) -> ! {
        panic!("bytes {offset}..+{len}, aligned to {align}, of shared memory of {}", self.len)
    }

    #[inline]
    fn u32_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: `at` checked bounds. The base is page aligned, so the address is as aligned as
        // the offset. The mapping lives as long as `self`, and Rust code here only ever uses
        // atomics and volatile copies on it.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4, 4).cast()) }
    }

    #[inline]
    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8, 8).cast()) }
    }

    /// Loads with acquire ordering.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 4.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> u32 {
        self.u32_at(offset).load(Ordering::Acquire)
    }

    /// Stores with release ordering.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 4.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) {
        self.u32_at(offset).store(value, Ordering::Release);
    }

    /// Stores, and returns what was there.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 4.
    #[inline]
    pub fn swap_u32(&self, offset: usize, value: u32) -> u32 {
        self.u32_at(offset).swap(value, Ordering::AcqRel)
    }

    /// Sleeps while `value` is there, until a thread [wakes](Self::wake) the sleepers, in whatever process
    /// that has the file mapped. It may return for no reason.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 4.
    pub fn wait(&self, offset: usize, value: u32) {
        // Whatever it says, the caller looks again.
        let _ = futex::wait(self.u32_at(offset), futex::Flags::empty(), value, None);
    }

    /// Wakes all who sleep at `offset`.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 4.
    pub fn wake(&self, offset: usize) {
        let _ = futex::wake(self.u32_at(offset), futex::Flags::empty(), i32::MAX.cast_unsigned());
    }

    /// Loads with acquire ordering.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        self.u64_at(offset).load(Ordering::Acquire)
    }

    /// Stores with release ordering.
    ///
    /// # Panics
    /// If `offset` is outside or no multiple of 8.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.u64_at(offset).store(value, Ordering::Release);
    }

    /// Stores `values` one after the other, each with release ordering, from `offset` on.
    ///
    /// # Panics
    /// If that is outside, or `offset` no multiple of 8.
    #[inline]
    pub fn store_words<const N: usize>(&self, offset: usize, values: &[u64; N]) {
        let first = self.at(offset, 8 * N, 8).cast::<u64>();
        for (i, value) in values.iter().enumerate() {
            // SAFETY: `at` checked all N words; as in `u64_at` otherwise.
            unsafe { AtomicU64::from_ptr(first.add(i)) }.store(*value, Ordering::Release);
        }
    }

    /// Copies `from` to `offset`; not atomic as a whole.
    ///
    /// # Panics
    /// If that is outside.
    #[inline]
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        // SAFETY: `at` checked that the range is mapped; `from` is no part of the mapping, to
        // which no reference exists.
        unsafe { volatile::copy_in(self.at(offset, from.len(), 1), from) }
    }

    /// Copies from `offset` into `to`; not atomic as a whole.
    ///
    /// # Panics
    /// If that is outside.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        // SAFETY: as in `copy_in`.
        unsafe { volatile::copy_out(self.at(offset, to.len(), 1), to) }
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // SAFETY: our own mapping; nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Shm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shm").field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_there_after_the_mapping_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let shm = Shm::create(&path, 5000).unwrap();
        shm.store_u32(4996, 7);
        shm.store_u64(8, u64::MAX - 1);
        shm.copy_in(101, b"in flight");
        drop(shm);
        let shm = Shm::open(&path).unwrap();
        assert_eq!((shm.len(), shm.load_u32(4996), shm.load_u64(8)), (5000, 7, u64::MAX - 1));
        let mut text = [0u8; 9];
        shm.copy_out(101, &mut text);
        assert_eq!(&text, b"in flight");
    }

    #[test]
    fn two_mappings_see_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let one = Shm::create(&path, 4096).unwrap();
        let two = Shm::open(&path).unwrap();
        one.store_u32(0, 1);
        assert_eq!(two.load_u32(0), 1);
    }

    #[test]
    fn who_sleeps_at_a_word_is_woken_by_another_mapping_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let one = Shm::create(&path, 4096).unwrap();
        let two = Shm::open(&path).unwrap();
        one.wait(4, 1);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while one.load_u32(4) == 0 {
                    one.wait(4, 0);
                }
            });
            assert_eq!(two.swap_u32(4, 7), 0);
            while !waits.is_finished() {
                two.wake(4);
            }
        });
        assert_eq!(one.swap_u32(4, 0), 7);
    }

    #[test]
    fn a_longer_mapping_has_what_the_shorter_one_has() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let short = Shm::create(&path, 4096).unwrap();
        short.store_u64(8, 1);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let long = Shm::lengthen(&file, 10_000).unwrap();
        short.store_u64(16, 2);
        assert_eq!((long.load_u64(8), long.load_u64(16), long.load_u64(9_992)), (1, 2, 0));
        assert_eq!((short.len(), Shm::open(&path).unwrap().len()), (4096, 10_000));
        let error = Shm::lengthen(&file, 4096).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn parts_of_a_file_are_mapped_by_themselves_and_make_it_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let whole = Shm::create(&path, 4096).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let part = Shm::part(&file, 3 * 4096, 4096).unwrap();
        part.words()[511].store(7, Ordering::Relaxed);
        whole.words()[0].store(8, Ordering::Relaxed);
        let all = Shm::open(&path).unwrap();
        assert_eq!((all.len(), part.len(), part.words().len()), (4 * 4096, 4096, 512));
        assert_eq!((all.load_u64(4 * 4096 - 8), all.load_u64(0)), (7, 8));
        assert!(Shm::part(&file, 0, 0).is_err());
    }

    #[test]
    fn private_memory_is_zeros_that_hold_what_is_stored() {
        let shm = Shm::private(4096).unwrap();
        assert!(shm.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        shm.store_u64(8, 1);
        assert_eq!(shm.words()[1].load(Ordering::Relaxed), 1);
    }

    #[test]
    fn create_leaves_nothing_of_an_older_file_and_only_its_owner_may_open_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        std::fs::write(&path, vec![0xAAu8; 10_000]).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        let shm = Shm::create(&path, 4096).unwrap();
        let mut bytes = [1u8; 4096];
        shm.copy_out(0, &mut bytes);
        assert!(bytes.iter().all(|b| *b == 0));
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.len(), meta.permissions().mode() & 0o777), (4096, 0o600));
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        assert_eq!(Shm::open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(Shm::create(&path, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(!path.exists());
        std::fs::write(&path, b"").unwrap();
        assert_eq!(Shm::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Shm::open(&link).is_err() && Shm::create(&link, 64).is_err());
    }

    #[test]
    fn accesses_outside_or_unaligned_panic() {
        let dir = tempfile::tempdir().unwrap();
        let shm = Shm::create(dir.path().join("table"), 4096).unwrap();
        let panics = |f: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_err();
        };
        panics(&|| assert_eq!(shm.load_u32(4096), 0));
        panics(&|| assert_eq!(shm.load_u32(2), 0));
        panics(&|| assert_eq!(shm.load_u64(4), 0));
        panics(&|| shm.store_u64(usize::MAX, 0));
        panics(&|| shm.copy_in(4090, &[0; 7]));
    }
}
