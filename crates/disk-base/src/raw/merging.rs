//! Locks of a merge of images that a running disk has open.
//!
//! A merge copies the data of images of a chain into an image below them. A reader of the whole chain sees no change,
//! since the upper images hide what is written. So the merge shares the readers' locks on the image that it writes
//! (`OpenOptions::beside_readers`). A reader of that image itself, or of one between the two ends, would see a mixture.
//! Two more bytes of each file keep those apart, as OFD locks:
//! * [`LEAF`]: an image is read for its own content, as the first of its chain. Shared.
//! * [`MERGED`]: a merge changes what an image reads as. The image that is written has it exclusively, so there is one
//!   merge into an image at a time; the images between have it shared.
//!
//! Each side takes its own lock first and then looks for the other's, so of two at the same time at least one sees the
//! other. QEMU does not know these bytes: its programs can read such an image during a merge (they are kept from
//! writing to it, as by any reader).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ferrite_host::byte_locks::{is_locked_by_others, lock_exclusive, lock_shared, unlock};

use super::Raw;
use crate::OpenOptions;

/// Behind QEMU's bytes.
const LEAF: u32 = 300;
const MERGED: u32 = 301;

/// Takes the locks for an open file, until it is closed. `Some`: the reason why it is in use.
///
/// # Errors
/// The file system has no such locks, and this is a merge. A reader does without, as no merge is possible there.
pub(super) fn claim(file: &OwnedFd, options: &OpenOptions) -> io::Result<Option<&'static str>> {
    if options.beside_readers {
        let taken = match lock_exclusive(file, MERGED) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => false,
            done => done.map(|()| true)?,
        };
        return Ok(match taken && !is_locked_by_others(file, LEAF)? {
            true => None,
            false if taken => Some("a process reads its own content, which a merge would change"),
            false => Some("another merge changes it, or an image below it"),
        });
    }
    if options.read_only && !options.as_parent {
        let is_merged = lock_shared(file, LEAF).and_then(|()| is_locked_by_others(file, MERGED));
        if is_merged.unwrap_or(false) {
            return Ok(Some("a merge is changing its content; only the disk above it reads right"));
        }
    }
    Ok(None)
}

/// Releases the locks of a file that stays open.
pub(super) fn release(file: impl AsFd) {
    // An error cannot be handled: the locks end with the file.
    let _ = unlock(file, LEAF, 2);
}

impl Raw {
    /// Tells other processes that a merge changes what this image, which is open for reading, reads as: it is between the
    /// two ends of the merge. `false`: a process reads it for its own content, or it is being merged already.
    ///
    /// # Errors
    /// The file system has no locks on bytes.
    pub fn claim_merged(&self) -> io::Result<bool> {
        match lock_shared(self.fd(), MERGED) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            done => done?,
        }
        Ok(!is_locked_by_others(self.fd(), LEAF)?)
    }
}
