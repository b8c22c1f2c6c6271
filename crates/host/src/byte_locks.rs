//! Locks on bytes of files (`fcntl`), as other programs use them to tell what they do with a file.
//!
//! Those that are taken here belong to the open file, not to the process: they last as long as a
//! `flock` on it would, and the kernel takes them away before that.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether another owner has a lock on the byte at `offset`: another open file, of whichever process,
/// or a process as a whole, also this one. A shared lock on the whole file does not count: on NFS a
/// `flock` of a reader looks like that.
///
/// # Errors
/// The file system has no such locks, or the kernel's.
pub fn is_locked_by_others(file: impl AsFd, offset: u32) -> io::Result<bool> {
    // An exclusive lock conflicts with any other lock.
    let found = fcntl(file, libc::F_OFD_GETLK, libc::F_WRLCK, offset, 1)?;
    let whole = found.l_start == 0 && found.l_len == 0;
    let shared = found.l_type == libc::F_RDLCK as libc::c_short;
    Ok(found.l_type != libc::F_UNLCK as libc::c_short && !(whole && shared))
}

/// Takes a shared lock on the byte at `offset` for the open file, which must be open for reading.
///
/// # Errors
/// `WouldBlock`: another owner has an exclusive one. Otherwise as [`is_locked_by_others`].
pub fn lock_shared(file: impl AsFd, offset: u32) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_RDLCK, offset, 1).map(|_| ())
}

/// Takes an exclusive lock on the byte at `offset` for the open file, which must be open for writing.
///
/// # Errors
/// `WouldBlock`: another owner has one. Otherwise as [`is_locked_by_others`].
pub fn lock_exclusive(file: impl AsFd, offset: u32) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_WRLCK, offset, 1).map(|_| ())
}

/// The first byte behind the lock of others that covers this one.
pub fn end_of_lock(file: impl AsFd, offset: u32) -> u32 {
    let next = offset + 1;
    match fcntl(file, libc::F_OFD_GETLK, libc::F_WRLCK, offset, 1) {
        Ok(found) if i32::from(found.l_type) != libc::F_UNLCK && found.l_len > 0 => {
            u32::try_from(found.l_start + found.l_len).unwrap_or(u32::MAX).max(next)
        }
        _ => next,
    }
}

/// Gives up all locks of the open file on `len` bytes from `offset` on.
///
/// # Errors
/// As [`is_locked_by_others`].
pub fn unlock(file: impl AsFd, offset: u32, len: u32) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_UNLCK, offset, len).map(|_| ())
}

/// Asks for a lock of that kind, or for what is in its way.
fn fcntl(
    file: impl AsFd,
    command: libc::c_int,
    kind: libc::c_int,
    offset: u32,
    len: u32,
) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.into(),
        l_len: len.into(),
        // The kernel wants 0 for locks that belong to open files.
        l_pid: 0,
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is borrowed and so open; the commands that are used here take a
    // structure of this type, and the kernel reads and writes nothing but this one, which outlives
    // the call.
    match unsafe { libc::fcntl(fd, command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{FlockOperation, fcntl_lock, flock};

    use super::*;

    #[test]
    fn a_lock_of_a_process_is_seen_and_a_flock_is_none_on_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = File::options().write(true).open(file.path()).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(!is_locked_by_others(file.as_file(), 101).unwrap());
        fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(is_locked_by_others(file.as_file(), 101).unwrap());
        fcntl_lock(&other, FlockOperation::NonBlockingUnlock).unwrap();
        assert!(!is_locked_by_others(file.as_file(), 101).unwrap());
    }

    #[test]
    fn a_readers_flock_on_a_network_file_system_is_no_lock_on_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = File::open(file.path()).unwrap();
        fcntl(&other, libc::F_OFD_SETLK, libc::F_RDLCK, 0, 0).unwrap();
        assert!(!is_locked_by_others(file.as_file(), 101).unwrap());
    }

    #[test]
    fn locks_of_open_files_are_shared_and_seen_by_others_only() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [a, b] = [(); 2].map(|()| File::open(file.path()).unwrap());
        lock_shared(&a, 101).unwrap();
        assert!(!is_locked_by_others(&a, 101).unwrap());
        assert!(is_locked_by_others(&b, 101).unwrap());
        lock_shared(&b, 101).unwrap();
        assert!(is_locked_by_others(&a, 101).unwrap());
        assert!(!is_locked_by_others(&b, 102).unwrap());
        let closed_with_it = b.try_clone().unwrap();
        drop(b);
        assert!(is_locked_by_others(&a, 101).unwrap());
        drop(closed_with_it);
        assert!(!is_locked_by_others(&a, 101).unwrap());
        unlock(&a, 100, 10).unwrap();
        let exclusive = fcntl(file.as_file(), libc::F_OFD_SETLK, libc::F_WRLCK, 101, 1);
        assert!(exclusive.is_ok());
        assert_eq!(lock_shared(&a, 101).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
