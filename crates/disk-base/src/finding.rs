//! The findings of an image's check: counted by class, and listed, the worst first.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Findings that are listed; the rest is counted.
const MAX_LISTED: usize = 1000;

/// The sizes of entries of tables: of a VHD, of qcow2, and of its extended ones.
const ENTRY_BYTES: [u64; 3] = [4, 8, 16];

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

/// Joins findings about adjacent entries of a table: a damaged stretch of it is one line of the list, which says how
/// many entries it has. They are counted each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretches<P> {
    last: Option<Stretch<P>>,
    /// Findings that are in the line of another one.
    pub joined: u64,
}

/// The entries of a table that were joined last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch<P> {
    problem: P,
    /// The offsets of its first and last entry.
    first: u64,
    last: u64,
    /// The reason of the first.
    why: String,
    more: u64,
}

impl<P> Default for Stretches<P> {
    fn default() -> Stretches<P> {
        Stretches { last: None, joined: 0 }
    }
}

impl<P: Kind + PartialEq> Stretches<P> {
    /// Counts and lists a finding, as [`Finding::list`] does, or joins it to the one before.
    pub fn add(&mut self, found: Finding<P>, findings: &mut Vec<Finding<P>>, counts: &mut Counts) {
        let is_next = |stretch: &&mut Stretch<P>| {
            let step = found.offset.checked_sub(stretch.last);
            stretch.problem == found.problem && step.is_some_and(|step| ENTRY_BYTES.contains(&step))
        };
        if let Some(stretch) = self.last.as_mut().filter(is_next)
            && let Some(listed) = findings
                .iter_mut()
                .rfind(|it| it.problem == stretch.problem && it.offset == stretch.first)
        {
            counts.add(found.problem.class(), found.problem.is_mendable());
            (stretch.last, stretch.more) = (found.offset, stretch.more + 1);
            let (why, more, last) = (&stretch.why, stretch.more, stretch.last);
            listed.why = format!("{why}; and {more} more entries after it, up to byte {last}");
            self.joined += 1;
            return;
        }
        let (problem, offset, why) = (found.problem, found.offset, found.why.clone());
        self.last = Some(Stretch { problem, first: offset, last: offset, why, more: 0 });
        found.list(findings, counts);
    }
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
    fn adjacent_entries_are_one_line_and_counted_each() {
        let mut stretches = Stretches::default();
        let (mut findings, mut counts) = (Vec::new(), Counts::default());
        let mut add = |class, offset: u64| {
            let found = Finding { problem: (class, true), offset, why: format!("at {offset}") };
            stretches.add(found, &mut findings, &mut counts);
        };
        (0..3000).for_each(|i| add(Class::Damage, 512 + 4 * i));
        add(Class::Leak, 16384);
        add(Class::Damage, 16384);
        add(Class::Damage, 16392);
        let lines: Vec<&str> = findings.iter().map(|found| found.why.as_str()).collect();
        assert_eq!(
            lines,
            [
                "at 512; and 2999 more entries after it, up to byte 12508",
                "at 16384; and 1 more entries after it, up to byte 16392",
                "at 16384",
            ]
        );
        assert_eq!((counts.damage, counts.leaks, stretches.joined), (3002, 1, 3000));
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
