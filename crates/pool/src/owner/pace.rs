//! Copies beside the user's requests: they leave at least half of the time to those.
//!
//! As long as the disk is used one piece is copied at a time, and a small one, behind which a request does not wait long.
//! When it is done, as much time passes without a copy as it has taken. A copy that a request waits for does not wait.

use super::Owner;
use super::tasks::Kind;

/// Pieces that are copied at a time while nothing else is to do.
const COPIES: usize = 2;
/// A piece beside requests is so many times smaller than one without.
const SMALLER: u64 = 8;
/// The disk is used if a request came in the last of so many parts of the time of trust.
const USED_PARTS: u64 = 40;

/// When something was copied and asked for.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The last request.
    asked: Option<u64>,
    /// The last begin of a copy.
    begun: u64,
    /// No copy beside requests before this.
    rests_until: u64,
}

impl Pace {
    pub(super) fn asked(&mut self, now: u64) {
        self.asked = Some(now);
    }

    pub(super) fn begun(&mut self, now: u64) {
        self.begun = now;
    }

    /// A piece was copied.
    pub(super) fn ended(&mut self, now: u64) {
        self.rests_until = now.saturating_add(now.saturating_sub(self.begun));
    }
}

impl Owner {
    /// Whether the disk has had requests lately.
    fn is_used(&self) -> bool {
        let window = self.config.trust / USED_PARTS;
        self.pace.asked.is_some_and(|asked| self.now <= asked.saturating_add(window))
            || self.tasks.values().any(|task| task.request().is_some())
    }

    /// The most blocks of the next piece to copy. `is_waited_for`: a request waits for it. `None`: not now.
    pub(super) fn piece(&self, is_waited_for: bool) -> Option<u64> {
        let copies = self
            .tasks
            .values()
            .filter(|task| matches!(task.kind, Kind::CopyRead { .. } | Kind::CopyWrite { .. }));
        let (copies, most) = (copies.count(), self.config.copy_blocks);
        if is_waited_for || !self.is_used() {
            return (copies < COPIES).then_some(most);
        }
        let may = copies == 0 && self.now >= self.pace.rests_until;
        may.then_some((most / SMALLER).max(1))
    }
}
