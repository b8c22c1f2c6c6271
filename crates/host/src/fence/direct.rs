//! A LUN that a process of this host has alone, and reads and writes by itself: past all caches of this host, and each write on
//! the LUN's medium when it has ended.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags, fallocate, flock};
use rustix::io::Errno;

use super::{identity, lun};

/// The alignment of memory, places and lengths. LUNs with larger blocks are refused.
const BLOCK: u32 = 512;
/// The alignment of memory that every device takes.
const PAGE: usize = 4096;
/// The most bytes of one command's memory.
const PIECE: usize = 1 << 20;

/// An open LUN. No other process of this host has it open in this way.
#[derive(Debug)]
pub struct Direct {
    file: File,
    /// Of a model in a file, which the processes of several hosts of a test have open.
    _lock: Option<OwnedFd>,
}

/// The name that the LUN of this device has on every host.
///
/// # Errors
/// Why it is no LUN that can be reserved, or the kernel's.
pub fn name(device: &Path) -> Result<String, String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(device, flags, Mode::empty()).map_err(|e| e.to_string())?;
    name_of(file.as_fd())
}

fn name_of(file: BorrowedFd<'_>) -> Result<String, String> {
    #[cfg(feature = "testing")]
    if let Some(lun) = super::model::FileLun::of(file) {
        return Ok(lun.identity());
    }
    identity::wwid(file)
}

/// The device of the LUN with this name on this host. `likely`: where it was on another one.
pub fn find(wanted: &str, likely: &Path) -> Option<PathBuf> {
    match name(likely) {
        Ok(found) if found == wanted => Some(likely.to_owned()),
        _ => identity::find(wanted),
    }
}

impl Direct {
    /// Opens the LUN with this name.
    ///
    /// # Errors
    /// `ResourceBusy`: a process of this host has it. `InvalidInput`: it is another LUN, or its blocks are larger than 512
    /// bytes. Others of the kernel.
    pub fn open(device: &Path, wanted: &str) -> io::Result<Direct> {
        let stat = rustix::fs::stat(device)?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let exclusively = if is_device { OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DSYNC | OFlags::DIRECT | exclusively;
        let file = rustix::fs::open(device, flags, Mode::empty())?;
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        // The name may have come to stand for another LUN since it was looked up.
        let found = name_of(file.as_fd()).map_err(invalid)?;
        if found != wanted {
            return Err(invalid(format!("it is the LUN {found}, and not {wanted}")));
        }
        let lock = lock(&file)?;
        if is_device && rustix::fs::ioctl_blksszget(&file)? != BLOCK {
            return Err(invalid("its blocks have more than 512 bytes".to_owned()));
        }
        Ok(Direct { file: file.into(), _lock: lock })
    }

    /// The LUN for orders to it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Its bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bytes(&self) -> io::Result<u64> {
        (&self.file).seek(SeekFrom::End(0))
    }

    /// Whether the LUN is reserved by this key: no other host had taken it when the LUN answered.
    ///
    /// # Errors
    /// The LUN does not answer.
    pub fn is_held(&self, key: u64) -> io::Result<bool> {
        let is_it = |found: Option<lun::Reservation>| {
            found.is_some_and(|found| found.key == key && found.is_ours_by_type)
        };
        #[cfg(feature = "testing")]
        if let Some(lun) = super::model::FileLun::of(self.as_fd()) {
            return lun::Lun::reservation(&lun).map(is_it);
        }
        lun::open(self.as_fd())?.reservation().map(is_it)
    }

    /// Reads at `start`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self, bytes: &mut [u8], start: u64) -> io::Result<()> {
        let mut memory = memory(bytes.len());
        for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let memory = aligned(&mut memory, piece.len());
            self.file.read_exact_at(memory, start + (i * PIECE) as u64)?;
            piece.copy_from_slice(memory);
        }
        Ok(())
    }

    /// Writes at `start`, durably.
    ///
    /// # Errors
    /// The kernel's. Another host has the LUN: `EBADE`.
    pub fn write(&self, bytes: &[u8], start: u64) -> io::Result<()> {
        let mut memory = memory(bytes.len());
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let memory = aligned(&mut memory, piece.len());
            memory.copy_from_slice(piece);
            self.judged(|| self.file.write_all_at(memory, start + (i * PIECE) as u64))?;
        }
        Ok(())
    }

    /// Makes bytes zero, durably.
    ///
    /// # Errors
    /// As [`write`](Direct::write).
    pub fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        self.judged(|| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match fallocate(&self.file, punch, start, len) {
                // The LUN cannot give space back. The kernel writes zeros then.
                Err(Errno::OPNOTSUPP) => {
                    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
                    fallocate(&self.file, zero, start, len)?;
                }
                done => done?,
            }
            self.file.sync_data()
        })
    }

    /// Does a write. The model of a test is asked, since a file executes every write.
    fn judged<T>(&self, write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        #[cfg(feature = "testing")]
        if let Some(lun) = super::model::FileLun::of(self.as_fd()) {
            return lun.writing(write);
        }
        write()
    }
}

/// The lock of a writer. Of a model each port has its own.
fn lock(file: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    #[cfg(feature = "testing")]
    if let Some(lun) = super::model::FileLun::of(file.as_fd()) {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let own = rustix::fs::open(lun.lock_file(), flags, Mode::RUSR | Mode::WUSR)?;
        flock(&own, FlockOperation::NonBlockingLockExclusive)?;
        return Ok(Some(own));
    }
    flock(file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(None)
}

/// Memory for commands of so many bytes, or of a part of them.
fn memory(len: usize) -> Vec<u8> {
    vec![0; len.min(PIECE) + PAGE]
}

fn aligned(memory: &mut [u8], len: usize) -> &mut [u8] {
    let skipped = memory.as_ptr().align_offset(PAGE).min(PAGE);
    &mut memory[skipped..skipped + len]
}
