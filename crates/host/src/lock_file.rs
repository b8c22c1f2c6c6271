//! A file that says by its lock that its owner lives, and that is removed by the last owner.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// How often it is tried to make a file that others remove.
const ATTEMPTS: u32 = 100;

/// A file of this name, which is locked for the caller alone. Its owner may remove the name, and lets
/// go of the file afterwards.
///
/// # Errors
/// `WouldBlock`: it has another owner. Otherwise the file system's.
pub fn lock(path: &Path) -> io::Result<OwnedFd> {
    for _ in 0..ATTEMPTS {
        let lock = File::options().create(true).append(true).mode(0o600).open(path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // Its last owner may have removed it before letting go of it.
        match fs::symlink_metadata(path) {
            Ok(now) if now.ino() == lock.metadata()?.ino() => return Ok(lock.into()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Err(io::Error::other("the lock vanishes again and again"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_file_that_its_owners_remove_has_one_owner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let (inside, had) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while had.load(Ordering::Relaxed) < 200 {
                        let Ok(lock) = super::lock(&path) else { continue };
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        had.fetch_add(1, Ordering::Relaxed);
                        fs::remove_file(&path).unwrap();
                        drop(lock);
                    }
                });
            }
        });
        assert!(!path.exists());
    }
}
