//! The findings of an image's check: counted by class, and listed, the worst first.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Findings that are listed; the rest is counted.
const MAX_LISTED: usize = 1000;

/// The severity of a finding, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The image does not read correctly, or would not after the next write.
    Damage,
    /// It has something that this program does not know, so the rest could not be checked.
    Unsupported,
    /// Another program refuses the image. Checked only on request.
    Foreign,
    /// The image reads correctly; one of two copies is missing.
    Harmless,
    /// Space that nothing refers to.
    Leak,
}

impl Class {
    /// Whether the image can be used nevertheless, and reads correctly.
    pub fn is_harmless(self) -> bool {
        match self {
            Class::Damage | Class::Unsupported => false,
            Class::Foreign | Class::Harmless | Class::Leak => true,
        }
    }
}

/// A kind of inconsistency of a format.
pub trait Kind: Copy {
    /// Its severity.
    fn class(self) -> Class;

    /// Whether a repair can correct it, without guessing.
    fn is_mendable(self) -> bool;

    /// Whether the image can be used nevertheless, and reads correctly.
    fn is_harmless(self) -> bool {
        self.class().is_harmless()
    }
}

/// The number of findings of each class, listed or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Of [`Class::Damage`].
    pub damage: u64,
    /// Of [`Class::Unsupported`].
    pub unsupported: u64,
    /// Of [`Class::Foreign`].
    pub foreign: u64,
    /// Of [`Class::Harmless`].
    pub harmless: u64,
    /// Of [`Class::Leak`].
    pub leaks: u64,
    /// Of all of them, those that can be repaired.
    pub mendable: u64,
}

impl Counts {
    /// Counts one finding.
    pub fn add(&mut self, class: Class, mendable: bool) {
        *match class {
            Class::Damage => &mut self.damage,
            Class::Unsupported => &mut self.unsupported,
            Class::Foreign => &mut self.foreign,
            Class::Harmless => &mut self.harmless,
            Class::Leak => &mut self.leaks,
        } += 1;
        self.mendable += u64::from(mendable);
    }

    /// The number of all findings.
    pub fn total(&self) -> u64 {
        self.damage + self.unsupported + self.foreign + self.harmless + self.leaks
    }
}

/// One inconsistency of an image, of a kind that its format has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding<P> {
    /// The kind of problem.
    pub problem: P,
    /// Byte offset of the damage in the file.
    pub offset: u64,
    /// The reason.
    pub why: String,
}

impl<P: Kind> Finding<P> {
    /// Counts it, and lists it if there is room, or if a less severe one can make room for it. Within a class, those
    /// that cannot be repaired come first.
    pub fn list(self, findings: &mut Vec<Finding<P>>, counts: &mut Counts) {
        let rank = |finding: &Finding<P>| (finding.problem.class(), finding.problem.is_mendable());
        let (class, mendable) = rank(&self);
        counts.add(class, mendable);
        let at = findings.partition_point(|listed| rank(listed) <= (class, mendable));
        if at < MAX_LISTED {
            findings.truncate(MAX_LISTED - 1);
            findings.insert(at, self);
        }
    }
}

impl<P> fmt::Display for Finding<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {}", self.offset, self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Kind for (Class, bool) {
        fn class(self) -> Class {
            self.0
        }

        fn is_mendable(self) -> bool {
            self.1
        }
    }

    #[test]
    fn damage_behind_any_number_of_leaks_is_listed_first() {
        let (mut findings, mut counts) = (Vec::new(), Counts::default());
        let mut add = |problem, offset| {
            Finding { problem, offset, why: String::new() }.list(&mut findings, &mut counts);
        };
        (0..1500).for_each(|i| add((Class::Leak, true), i));
        add((Class::Harmless, true), 1500);
        add((Class::Damage, true), 1501);
        add((Class::Damage, false), 1502);
        add((Class::Leak, true), 1503);
        let offsets: Vec<u64> = findings.iter().map(|f| f.offset).collect();
        assert_eq!(offsets[..5], [1502, 1501, 1500, 0, 1]);
        assert_eq!(offsets.len(), MAX_LISTED);
        let expected = Counts { damage: 2, harmless: 1, leaks: 1501, mendable: 1503, ..counts };
        assert_eq!((counts, counts.total()), (expected, 1504));
    }
}
