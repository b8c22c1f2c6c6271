//! Finds out whether storage finishes a sweep within the call that submits it.
//!
//! If it does (data in memory already), the queue looks for completions before it asks the guest
//! for an event, which would only disturb. If not, one call submits, listens and waits.

/// While storage is slow, at most one sweep in this many is submitted on its own, to see whether
/// storage has become prompt.
const LONGEST: u32 = 64;

/// The record of recent sweeps.
#[derive(Debug, Default)]
pub(super) struct Promptness {
    /// Sweeps until the next check.
    left: u32,
    /// Length of the pause before this check, in sweeps.
    pause: u32,
}

impl Promptness {
    /// Returns whether to submit this sweep without waiting. If so, the caller reports the result
    /// to [`seen`](Self::seen).
    pub(super) fn looks(&mut self) -> bool {
        let looks = self.left == 0;
        self.left = self.left.saturating_sub(1);
        looks
    }

    /// Takes the result of a check: whether the sweep was done once it was submitted. One slow
    /// sweep says little about the next.
    pub(super) fn seen(&mut self, done: bool) {
        self.pause = if done { 0 } else { (2 * self.pause).clamp(1, LONGEST) };
        self.left = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of `sweeps` sweeps were submitted on their own.
    fn looks(prompt: &mut Promptness, sweeps: u32, done: bool) -> u32 {
        let one = |_: &u32| {
            let looks = prompt.looks();
            if looks {
                prompt.seen(done);
            }
            looks
        };
        (0..sweeps).filter(one).count() as u32
    }

    #[test]
    fn slow_storage_is_looked_at_ever_less_and_prompt_storage_always() {
        let mut prompt = Promptness::default();
        assert_eq!(looks(&mut prompt, 100, true), 100);
        // After 1, 2, 4, ... sweeps, and the checks themselves.
        assert_eq!(looks(&mut prompt, 134, false), 7);
        assert_eq!(looks(&mut prompt, 6500, false), 100);
        assert_eq!(looks(&mut prompt, 1, false), 1);
        assert_eq!(looks(&mut prompt, 64 + 100, true), 100, "it is prompt again");
    }
}
