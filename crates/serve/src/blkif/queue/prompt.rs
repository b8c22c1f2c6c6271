//! Whether storage does a sweep within the call that hands it over.
//!
//! Where it does (what is in memory already), the queue looks for answers before it asks the guest for an
//! event, which would come for nothing. Where it does not, one call hands over, listens and waits.

/// While storage takes its time, one sweep in so many at most is handed over by itself, to see whether it
/// still does.
const LONGEST: u32 = 64;

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct Promptness {
    /// Sweeps until the next look.
    left: u32,
    /// How many there were before this look.
    pause: u32,
}

impl Promptness {
    /// Whether to hand this sweep over without waiting, and to say what was [`seen`](Self::seen).
    pub(super) fn looks(&mut self) -> bool {
        let looks = self.left == 0;
        self.left = self.left.saturating_sub(1);
        looks
    }

    /// Whether all was done once it was handed over. One sweep that was not says little of the next.
    pub(super) fn seen(&mut self, done: bool) {
        self.pause = if done { 0 } else { (2 * self.pause).clamp(1, LONGEST) };
        self.left = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many sweeps were handed over by themselves.
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
        // After 1, 2, 4, ... sweeps, and the looks themselves.
        assert_eq!(looks(&mut prompt, 134, false), 7);
        assert_eq!(looks(&mut prompt, 6500, false), 100);
        assert_eq!(looks(&mut prompt, 1, false), 1);
        assert_eq!(looks(&mut prompt, 64 + 100, true), 100, "it is prompt again");
    }
}
