//! What checks of images find.

use std::fmt;

/// Findings that are listed; the rest is counted.
const MAX_LISTED: usize = 1000;

/// One inconsistency of an image, of a kind that its format has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding<P> {
    /// What kind of.
    pub problem: P,
    /// Byte offset in the file of what is wrong.
    pub offset: u64,
    /// The reason.
    pub why: String,
}

impl<P> Finding<P> {
    /// Adds it to a list, or to the number of those for which the list has no room.
    pub(crate) fn list(self, findings: &mut Vec<Finding<P>>, more: &mut u64) {
        match findings.len() {
            MAX_LISTED => *more += 1,
            _ => findings.push(self),
        }
    }
}

impl<P> fmt::Display for Finding<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {}", self.offset, self.why)
    }
}
