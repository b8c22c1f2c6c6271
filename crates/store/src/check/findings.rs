//! The errors of a store: counted by class, and listed, the worst first.

use ferrite_disk_base::{Class, Counts};
use serde::{Deserialize, Serialize};

/// Findings that are listed; the rest is counted.
const MAX_LISTED: usize = 1000;

/// An error of the store. Sizes and offsets are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFinding {
    /// The part of the store: superblock, journal, space, page, number, content or hash.
    pub kind: String,
    /// The reason.
    pub why: String,
    /// How bad it is.
    pub class: Class,
    /// Where in the store's file, if it is in one place.
    pub place_bytes: Option<u64>,
    /// The name of the volume or snapshot.
    pub volume: Option<String>,
    /// Where it is in that.
    pub offset_bytes: Option<u64>,
    /// How much of it.
    pub length_bytes: Option<u64>,
    /// `repair` mends it.
    pub mendable: bool,
}

impl StoreFinding {
    /// Data that a store does not read, or not for long.
    pub fn damage(kind: &str, why: impl Into<String>) -> StoreFinding {
        let (kind, why, class) = (kind.into(), why.into(), Class::Damage);
        let (volume, place_bytes, mendable) = (None, None, false);
        let (offset_bytes, length_bytes) = (None, None);
        StoreFinding { kind, why, class, place_bytes, volume, offset_bytes, length_bytes, mendable }
    }

    /// An error that costs nothing but a second copy, or space.
    pub fn harmless(kind: &str, why: impl Into<String>) -> StoreFinding {
        StoreFinding { class: Class::Harmless, ..StoreFinding::damage(kind, why) }
    }
}

/// All findings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// By class, listed or not.
    pub counts: Counts,
    /// The worst first.
    pub listed: Vec<StoreFinding>,
}

impl Findings {
    /// One more.
    pub fn add(&mut self, finding: StoreFinding) {
        self.counts.add(finding.class, finding.mendable);
        let at = self.listed.partition_point(|listed| listed.class <= finding.class);
        if at < MAX_LISTED {
            self.listed.truncate(MAX_LISTED - 1);
            self.listed.insert(at, finding);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_listed_before_what_is_harmless_and_all_is_counted() {
        let mut all = Findings::default();
        (0..1500).for_each(|_| all.add(StoreFinding::harmless("page", "one copy")));
        all.add(StoreFinding::damage("content", "first"));
        all.add(StoreFinding::damage("content", "second"));
        let why: Vec<&str> = all.listed.iter().take(3).map(|f| f.why.as_str()).collect();
        assert_eq!(why, ["first", "second", "one copy"]);
        assert_eq!((all.counts.damage, all.counts.harmless, all.listed.len()), (2, 1500, 1000));
    }
}
