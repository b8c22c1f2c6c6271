//! Locks on bytes of files (`fcntl`), as other programs use them to tell what they do with a file.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether somebody else has any lock on the byte at `offset`. "Somebody" is another open file, of
/// whichever process, or a process as a whole, also this one.
///
/// # Errors
/// The file system has no such locks, or the kernel's.
pub fn is_locked_by_others(file: impl AsFd, offset: u32) -> io::Result<bool> {
    let mut lock = libc::flock {
        // What would conflict with any lock.
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.into(),
        l_len: 1,
        // The kernel wants 0 for locks that belong to open files.
        l_pid: 0,
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is borrowed and so open, and the kernel reads and writes nothing but
    // this one structure, which outlives the call. No lock is taken.
    match unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
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
        let other = File::open(file.path()).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(!is_locked_by_others(file.as_file(), 101).unwrap());
        fcntl_lock(&other, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(is_locked_by_others(file.as_file(), 101).unwrap());
        fcntl_lock(&other, FlockOperation::NonBlockingUnlock).unwrap();
        assert!(!is_locked_by_others(file.as_file(), 101).unwrap());
    }
}
