//! QEMU's locks ("disk image file locking" in its manual), held as QEMU holds them.
//!
//! QEMU's programs do not use `flock`. They announce their use of an image by shared locks on its bytes: byte 100 plus
//! a permission's number is locked by each user of the permission; byte 200 plus that number by each process that
//! forbids others to use it. A process that opens an image takes its own locks first and then checks for contradicting
//! ones. So of two that do that at the same time at least one sees the other. A process that opens with `-U`
//! (`force-share`) forbids nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ferrite_host::byte_locks::{is_locked_by_others, lock_shared, unlock};

/// The lock of a used permission is on this byte plus its number.
const USED: u32 = 100;
/// The lock of a permission that others must not use is on this byte plus its number.
const FORBIDDEN: u32 = 200;

/// To read data that do not change in between.
const CONSISTENT_READ: u32 = 0;
const WRITE: u32 = 1;
const RESIZE: u32 = 3;

/// The permissions that are used, and those that others must not use.
pub(super) struct Permissions {
    used: &'static [u32],
    forbidden: &'static [u32],
}

/// The permissions of a reader: of a leaf that is opened read-only, and of parents.
const READER: Permissions = Permissions { used: &[CONSISTENT_READ], forbidden: &[WRITE, RESIZE] };
/// The permissions of a writer.
const WRITER: Permissions =
    Permissions { used: &[CONSISTENT_READ, WRITE, RESIZE], forbidden: &[WRITE, RESIZE] };

impl Permissions {
    pub(super) fn new(read_only: bool) -> &'static Permissions {
        if read_only { &READER } else { &WRITER }
    }

    /// Takes the locks for an open file, until it is closed or [let go](release). `false`: another process's use
    /// conflicts with this, and the file is to be closed.
    ///
    /// # Errors
    /// The file system has no such locks; QEMU has none there, either.
    pub(super) fn take(&self, file: &OwnedFd) -> io::Result<bool> {
        // A process that waits for an image must not block QEMU by its attempts.
        if self.contradicts_others(file)? {
            return Ok(false);
        }
        let used = self.used.iter().map(|n| USED + n);
        for byte in used.chain(self.forbidden.iter().map(|n| FORBIDDEN + n)) {
            match lock_shared(file, byte) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                done => done?,
            }
        }
        Ok(!self.contradicts_others(file)?)
    }

    fn contradicts_others(&self, file: &OwnedFd) -> io::Result<bool> {
        let forbidden = self.used.iter().map(|n| FORBIDDEN + n);
        for byte in forbidden.chain(self.forbidden.iter().map(|n| USED + n)) {
            if is_locked_by_others(file, byte)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Releases the locks of an open file.
pub(super) fn release(file: impl AsFd) {
    // An error cannot be handled: the locks end with the file.
    let _ = unlock(file, USED, FORBIDDEN);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use rustix::fs::{Mode, OFlags};

    use super::*;

    fn open(path: &Path) -> OwnedFd {
        File::options().read(true).write(true).open(path).unwrap().into()
    }

    #[test]
    fn who_writes_excludes_everybody_and_readers_exclude_writers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [a, b] = [(); 2].map(|()| open(file.path()));
        for (first, second, together) in [
            (&WRITER, &WRITER, false),
            (&WRITER, &READER, false),
            (&READER, &WRITER, false),
            (&READER, &READER, true),
        ] {
            assert!(first.take(&a).unwrap());
            assert_eq!(second.take(&b).unwrap(), together);
            release(&a);
            release(&b);
        }
    }

    #[test]
    fn who_has_to_wait_leaves_no_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [a, b] = [(); 2].map(|()| open(file.path()));
        assert!(WRITER.take(&a).unwrap());
        assert!(!READER.take(&b).unwrap());
        for byte in 100..300 {
            assert!(!is_locked_by_others(&a, byte).unwrap(), "{byte}");
        }
    }

    /// The other process comes between the check and the locks.
    #[test]
    fn of_two_at_the_same_time_one_at_least_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut both = 0;
        for _ in 0..2000 {
            let fds = [(); 2].map(|()| open(file.path()));
            let barrier = std::sync::Barrier::new(2);
            let taken = std::thread::scope(|scope| {
                let take = |fd| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        WRITER.take(fd).unwrap()
                    })
                };
                fds.each_ref().map(take).map(|thread| thread.join().unwrap())
            });
            both += u32::from(taken == [true, true]);
        }
        assert_eq!(both, 0);
    }

    #[test]
    fn a_file_without_such_locks_is_an_error_and_not_in_use() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = rustix::fs::open(file.path(), OFlags::PATH, Mode::empty()).unwrap();
        assert!(WRITER.take(&path).is_err());
    }
}
