//! Names of files that no renaming changes, and of file systems whatever number they have.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{fstat, fstatfs};

use crate::names;

/// `_IOR(0x15, 0, struct fsuuid2)` of linux/fs.h.
const FS_IOC_GETFSUUID: libc::Ioctl = 0x8011_1500_u32 as libc::Ioctl;

/// The longest handle there is (`MAX_HANDLE_SZ`).
const MAX_HANDLE_BYTES: usize = 128;

/// File systems that find a file by its handle as long as it is there, also when it is in no cache:
/// ext2 to ext4, XFS, Btrfs, tmpfs, F2FS. Others (FUSE, FAT) may say that it is gone.
const LASTING: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010];

/// How often the kernel is asked again while it gives the file's number to a new file.
const TRIES_WHILE_REUSED: u32 = 200;
const PAUSE_WHILE_REUSED: Duration = Duration::from_millis(1);

/// `struct file_handle` with room for any.
#[repr(C)]
struct Raw {
    bytes: u32,
    kind: c_int,
    handle: [u8; MAX_HANDLE_BYTES],
}

/// A file on its file system: another one never has the same, and its names do not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    kind: c_int,
    bytes: Vec<u8>,
}

impl Handle {
    /// The most that [`to_bytes`](Self::to_bytes) returns.
    pub const MAX_BYTES: usize = 4 + MAX_HANDLE_BYTES;

    /// Of an open file; none, where the file system has no handles that last.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Option<Handle>> {
        if !LASTING.contains(&(fstatfs(file)?.f_type as u64)) {
            return Ok(None);
        }
        let mut raw =
            Raw { bytes: MAX_HANDLE_BYTES as u32, kind: 0, handle: [0; MAX_HANDLE_BYTES] };
        let mut mount: c_int = 0;
        // SAFETY: `raw` is laid out as the kernel's structure and has as much room as it says; the
        // path is a string with its end; both outlive the call.
        let done = unsafe {
            libc::name_to_handle_at(
                file.as_raw_fd(),
                c"".as_ptr(),
                (&raw mut raw).cast(),
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        };
        if done == 0 {
            let bytes = raw.handle.get(..raw.bytes as usize).unwrap_or_default().to_vec();
            return Ok(Some(Handle { kind: raw.kind, bytes }));
        }
        let e = io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EOVERFLOW | libc::ENOSYS | libc::EPERM) => Ok(None),
            _ => Err(e),
        }
    }

    /// For a file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.kind.to_ne_bytes()[..], &self.bytes].concat()
    }

    /// From the bytes that [`to_bytes`](Self::to_bytes) has returned.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Handle> {
        let (kind, bytes) = bytes.split_first_chunk()?;
        let handle = Handle { kind: c_int::from_ne_bytes(*kind), bytes: bytes.to_vec() };
        (1..=MAX_HANDLE_BYTES).contains(&handle.bytes.len()).then_some(handle)
    }

    /// Whether the file is on the file system of `folder`, which is open for more than its path.
    ///
    /// # Errors
    /// As [`open_on`](Self::open_on).
    pub fn is_on(&self, folder: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(self.open_on(folder)?.is_some())
    }

    /// The file, to be examined, if the file system of `folder` has it under any name. The folder is
    /// open for more than its path.
    ///
    /// # Errors
    /// The caller may not know (it takes `CAP_DAC_READ_SEARCH`); other errors of the kernel.
    pub fn open_on(&self, folder: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
        let mut tries = TRIES_WHILE_REUSED;
        let file = loop {
            match names::by_handle(folder, &self.to_bytes(), || self.ask_on(folder)) {
                Ok(file) => break file,
                Err(e) if e.raw_os_error() == Some(libc::ESTALE) => return Ok(None),
                // ext4 also answers this while a file is being made with the same inode number
                // (`iget_locked` in fs/inode.c): the file with this handle is gone then.
                Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && tries > 0 => tries -= 1,
                Err(e) => return Err(e),
            }
            std::thread::sleep(PAUSE_WHILE_REUSED);
        };
        // A file that a process has open is found until it is closed, also without any name.
        Ok(Some(file).filter(|file| fstat(file).map_or(true, |stat| stat.st_nlink > 0)))
    }

    /// Asks the kernel, once.
    ///
    /// # Errors
    /// The kernel's: `ESTALE`, there is none.
    pub fn ask_on(&self, folder: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let mut handle = [0; MAX_HANDLE_BYTES];
        handle[..self.bytes.len()].copy_from_slice(&self.bytes);
        let mut raw = Raw { bytes: self.bytes.len() as u32, kind: self.kind, handle };
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        // SAFETY: `raw` is laid out as the kernel's structure, is as long as it says, and outlives
        // the call.
        let fd =
            unsafe { libc::open_by_handle_at(folder.as_raw_fd(), (&raw mut raw).cast(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// The UUID of the file system of an open file or folder, where the kernel tells it (Linux 6.9).
#[must_use]
pub fn file_system_uuid(file: BorrowedFd<'_>) -> Option<[u8; 16]> {
    /// `struct fsuuid2`.
    #[repr(C)]
    struct Uuid {
        len: u8,
        uuid: [u8; 16],
    }
    let mut found = Uuid { len: 0, uuid: [0; 16] };
    // SAFETY: the kernel writes this structure, which outlives the call, and nothing else.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID, &raw mut found) };
    (done == 0 && found.len == 16 && found.uuid != [0; 16]).then_some(found.uuid)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_file_is_found_under_any_name_until_it_is_gone_and_no_new_one_is_taken_for_it() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = File::open(dir.path()).unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let handle = Handle::of(File::create(&a).unwrap().as_fd()).unwrap().unwrap();
        assert_eq!(Handle::from_bytes(&handle.to_bytes()), Some(handle.clone()));
        assert!(handle.to_bytes().len() <= Handle::MAX_BYTES);
        let is_there = || match handle.is_on(folder.as_fd()) {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => None,
            found => Some(found.unwrap()),
        };
        fs::rename(&a, &b).unwrap();
        assert_ne!(is_there(), Some(false));
        fs::remove_file(&b).unwrap();
        File::create(&a).unwrap();
        assert_ne!(is_there(), Some(true));
    }

    /// ext4 has no memory for a file, it says, while its number is given to a new one.
    #[test]
    fn a_file_is_known_to_be_gone_while_its_number_is_used_again() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let folder = File::open(dir.path()).unwrap();
        let path = dir.path().join("gone");
        let Some(gone) = Handle::of(File::create(&path).unwrap().as_fd()).unwrap() else { return };
        fs::remove_file(path).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..40_000 {
                    let name = dir.path().join((n % 4).to_string());
                    File::create(&name).unwrap();
                    fs::remove_file(&name).unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                match gone.is_on(folder.as_fd()) {
                    Ok(there) => assert!(!there),
                    Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EPERM), "{e}"),
                }
            }
        });
    }

    #[test]
    fn bytes_that_nobody_has_written_are_no_handle() {
        for bytes in [&[][..], &[1; 4], &[1; 5 + MAX_HANDLE_BYTES]] {
            assert_eq!(Handle::from_bytes(bytes), None);
        }
    }
}
