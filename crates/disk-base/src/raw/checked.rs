//! A raw disk whose data are checked by a test, to see what is done above a disk with a doubt.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use ferrite_io::arena::{Arena, Span};

/// Says whether these bytes are what was written from that offset on.
pub type TestCheck = Arc<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// The check of a disk that has one.
#[derive(Default)]
pub struct Checked(OnceLock<TestCheck>);

impl Checked {
    /// Gives the disk a check.
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

    /// Whether `data`, which was read from `offset` on, is what the check expects. `true` without a check.
    pub fn fits(&self, memory: &Arena, offset: u64, data: Span) -> bool {
        self.0.get().is_none_or(|check| {
            let mut bytes = vec![0; data.len()];
            memory.copy_out(data, &mut bytes);
            check(offset, &bytes)
        })
    }

    /// The end of a read that is made step by step.
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
