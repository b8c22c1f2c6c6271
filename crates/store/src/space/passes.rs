//! When a pass is wanted, and when a write fails for want of room (store.md 7).

/// The history of passes.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    begun: u64,
    ended: u64,
    /// The last pass that has looked for all duplicates.
    thorough: u64,
    /// The input of the last pass, if that pass has looked for all duplicates.
    looked_at: Option<PassInput>,
    /// Up to this pass, passes only look for what makes room at once.
    hurried: u64,
    is_running: bool,
    /// The places that were free when the last pass ended.
    free_then: u64,
    /// A write has found no room since the last pass began.
    is_full: bool,
    /// A write waits for the end of a pass.
    is_awaited: bool,
    /// Compaction has moved much.
    is_wanted: bool,
}

/// How many passes are in a hurry after a write has found no room.
const HURRIED: u64 = 4;

/// How much of what a pass looks at has changed since the opening. An equal value means that nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassInput {
    /// Journal blocks that have ended.
    pub blocks: u64,
    /// Pages of P2M that the index was loaded from.
    pub indexed: u64,
}

/// The time when a write found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// The first pass that begins after it.
    next: u64,
    /// The last pass that had ended before it.
    ended: u64,
}

impl Passes {
    /// The history before the first pass, with `free` places free.
    pub fn new(free: u64) -> Passes {
        Passes {
            begun: 0,
            ended: 0,
            thorough: 0,
            looked_at: None,
            hurried: 0,
            is_running: false,
            free_then: free,
            is_full: false,
            is_awaited: false,
            is_wanted: false,
        }
    }

    /// Notes that a write has found no room.
    pub fn no_room(&mut self) -> NoRoom {
        (self.is_full, self.is_awaited) = (true, true);
        self.hurried = self.begun + HURRIED;
        NoRoom { next: self.begun + 1, ended: self.ended }
    }

    /// Whether a pass has ended since, so the write tries again.
    pub fn has_ended_since(&self, write: NoRoom) -> bool {
        self.ended > write.ended
    }

    /// Whether a pass has begun and ended since.
    pub fn has_had_one(&self, write: NoRoom) -> bool {
        self.ended >= write.next
    }

    /// Whether the write fails if it still finds no room.
    pub fn may_fail(&self, write: NoRoom) -> bool {
        self.thorough >= write.next
    }

    /// Whether another pass would free nothing, since nothing has changed since one that has looked for all duplicates.
    pub fn would_find_nothing(&self, now: PassInput) -> bool {
        self.looked_at == Some(now)
    }

    /// Whether a write has found no room lately.
    pub fn is_hurried(&self) -> bool {
        self.begun <= self.hurried && self.hurried > 0
    }

    /// Whether a pass is to begin, with `free` of `places` places free.
    pub fn wants_one(&self, free: u64, places: u64) -> bool {
        let is_wanted = self.is_full || self.is_wanted || self.is_low(free, places);
        !self.is_running && is_wanted
    }

    /// Whether room is short, and has become shorter since the last pass.
    pub fn is_low(&self, free: u64, places: u64) -> bool {
        let is_shorter = self.free_then.saturating_sub(free) >= self.free_then / 8;
        free <= places / 4 && is_shorter && free < self.free_then
    }

    /// Has a pass begin, whatever is free, since compaction has moved much.
    pub fn want(&mut self) {
        self.is_wanted = true;
    }

    /// Whether a write waits for the pass under way, or for the next one.
    pub fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Whether a pass is under way.
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// How many passes have begun.
    pub fn count(&self) -> u64 {
        self.begun
    }

    /// Notes that a pass begins.
    pub fn begin(&mut self) {
        self.begun += 1;
        self.is_running = true;
        (self.is_full, self.is_wanted) = (false, false);
    }

    /// Notes that a pass has ended early. Its result does not count.
    pub fn stop(&mut self) {
        self.is_running = false;
    }

    /// Notes that a pass has ended, with `free` places free. Waiting writes try again. `looked_at`: the input of the
    /// pass, if it has looked for all duplicates.
    pub fn end(&mut self, free: u64, looked_at: Option<PassInput>) {
        self.ended = self.begun;
        if looked_at.is_some() {
            self.thorough = self.begun;
        }
        self.looked_at = looked_at;
        (self.is_full, self.is_awaited) = (false, false);
        self.is_running = false;
        self.free_then = free;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOKED: PassInput = PassInput { blocks: 7, indexed: 2 };

    #[test]
    fn a_write_fails_for_want_of_room_only_after_a_pass_for_all_that_began_behind_it() {
        let mut passes = Passes::new(100);
        assert!(!passes.wants_one(26, 100) && passes.wants_one(25, 100) && !passes.is_hurried());
        passes.begin();
        let write = passes.no_room();
        assert!(!passes.wants_one(0, 100) && passes.is_awaited());
        passes.end(0, Some(LOOKED));
        // It may find some now, and does not have to have.
        assert!(
            passes.has_ended_since(write) && !passes.has_had_one(write) && !passes.is_awaited()
        );
        assert!(!passes.may_fail(write) && !passes.wants_one(0, 100));
        let again = passes.no_room();
        assert!(!passes.has_ended_since(again) && passes.wants_one(0, 100));
        passes.begin();
        assert!(passes.would_find_nothing(LOOKED));
        passes.end(0, None);
        assert!(passes.has_had_one(write) && !passes.may_fail(write));
        assert!(!passes.would_find_nothing(LOOKED), "that one has not looked for all");
        passes.begin();
        passes.end(0, Some(LOOKED));
        assert!(passes.may_fail(write) && passes.may_fail(again));
        for changed in [PassInput { blocks: 8, ..LOOKED }, PassInput { indexed: 3, ..LOOKED }] {
            assert!(passes.would_find_nothing(LOOKED) && !passes.would_find_nothing(changed));
        }
        // No write has asked, and no place was given since.
        assert!(!passes.wants_one(0, 100));
        passes.end(24, Some(LOOKED));
        assert!(!passes.wants_one(22, 100) && passes.wants_one(21, 100));
    }

    #[test]
    fn passes_are_in_a_hurry_for_a_while_after_a_write_has_found_no_room() {
        let mut passes = Passes::new(100);
        passes.no_room();
        for _ in 0..4 {
            passes.begin();
            assert!(passes.is_hurried());
            passes.end(50, None);
        }
        passes.begin();
        assert!(!passes.is_hurried());
    }
}
