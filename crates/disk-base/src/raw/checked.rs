//! A raw disk whose data a test checks, to test the code above a disk with checksums.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use ferrite_io::arena::{Arena, Span};

/// Whether these bytes are those that were written from that offset on.
pub type TestCheck = Arc<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// The check of a disk, if it has one.
#[derive(Default)]
pub struct Checked(OnceLock<TestCheck>);

impl Checked {
    /// Sets the disk's check.
    ///
    /// # Panics
    /// If it has one.
    pub fn set(&self, check: TestCheck) {
        assert!(self.0.set(check).is_ok(), "a disk has one check");
    }

    /// Whether the disk has a check.
    pub fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// Whether `data`, read from `offset` on, passes the check. `true` without a check.
    pub fn fits(&self, memory: &Arena, offset: u64, data: Span) -> bool {
        self.0.get().is_none_or(|check| {
            let mut bytes = vec![0; data.len()];
            memory.copy_out(data, &mut bytes);
            check(offset, &bytes)
        })
    }

    /// Checks the data of a read that is made step by step.
    pub(crate) fn demand(&self, memory: &Arena, offset: u64, data: Span) -> io::Result<()> {
        match self.fits(memory, offset, data) {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "the test's check fails")),
        }
    }
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Checked").field(&self.is_set()).finish()
    }
}
