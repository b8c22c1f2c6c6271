//! Which contents are in use, as the pass under way knows it (store.md 7).

use crate::space::{Bits, Passes};

use super::Passed;

/// The action of a write that finds its content in the store. It depends on the phase in which the write began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::live) enum Phase {
    /// The write uses the content.
    None,
    /// The write marks the content as live, and uses it.
    Marking,
    /// The write uses the content only if it is marked as live.
    Closing,
}

/// The marks of the pass under way, and the history of passes.
pub(super) struct Marks {
    pub(super) phase: Phase,
    /// By number: a volume has the content, or may get it. `None`: no pass needs marks.
    pub(super) live: Option<Bits>,
    /// The pass is in a hurry when the store has given this many places.
    pub(super) most_given: u64,
    pub(super) passes: Passes,
    /// The result of the last pass.
    pub(super) last: Option<Passed>,
}

impl Marks {
    /// The marks before the first pass. `free`: the free places.
    pub(super) fn new(free: u64) -> Marks {
        let passes = Passes::new(free);
        Marks { phase: Phase::None, live: None, most_given: 0, passes, last: None }
    }

    /// Begins a pass in a store with at most `numbers` numbers.
    pub(super) fn begin(&mut self, numbers: u64, most_given: u64) {
        self.most_given = most_given;
        self.live = Some(Bits::all(false, numbers));
        self.phase = Phase::Marking;
        self.passes.begin();
    }

    /// Marks a number that a write has been given.
    pub(super) fn is_given(&mut self, number: u64) {
        if let Some(live) = &mut self.live {
            live.set(number);
        }
    }

    /// Whether a number is marked. Without a pass all numbers count as marked.
    pub(super) fn is_live(&self, number: u64) -> bool {
        self.live.as_ref().is_none_or(|live| live.get(number))
    }

    /// Claims content that a write has found again. `false`: the write cannot use it.
    pub(super) fn claim(&mut self, phase: Phase, number: u64) -> bool {
        match (phase, &mut self.live) {
            (Phase::None, _) | (Phase::Marking, None) => true,
            (Phase::Marking, Some(live)) => {
                live.set(number);
                true
            }
            (Phase::Closing, live) => live.as_ref().is_some_and(|live| live.get(number)),
        }
    }

    /// Whether a number is marked. If it is, the lower number that it stands for is marked, too.
    pub(super) fn judge(&mut self, number: u64, same_as: Option<u64>) -> bool {
        let is_live = self.is_live(number);
        if let (true, Some(lower), Some(live)) = (is_live, same_as, &mut self.live) {
            live.set(lower);
        }
        is_live
    }

    /// Marks numbers that volumes have.
    pub(super) fn are_live(&mut self, numbers: impl Iterator<Item = u64>) {
        if let Some(live) = &mut self.live {
            numbers.filter(|number| *number > 0).for_each(|number| {
                live.set(number);
            });
        }
    }
}
