//! Events that come without requests (threats.md T8, XSA-332).
//!
//! The kernel does no storm control for user space (blkif.md 5), so this module does. If a guest
//! sends events without requests, its channel is left unacknowledged for a while. The hypervisor
//! merges the events of that time into one. Storage continues, and requests that arrive meanwhile
//! wait until that time ends.

/// How many events in a row without a request are normal. For example, an event may be under way
/// while its request is found by polling.
const HARMLESS: u32 = 4;
/// How long the channel stays masked, in nanoseconds: the first time, and at most.
const HOLD_NS: (u64, u64) = (50_000, 20_000_000);

/// The count of one queue's events without requests.
#[derive(Debug, Default)]
pub(crate) struct Storm {
    empty: u32,
    taken_since: bool,
}

impl Storm {
    /// Records that requests were taken off the ring.
    pub(crate) fn taken(&mut self) {
        self.taken_since = true;
    }

    /// Records that an event came.
    pub(crate) fn event(&mut self) {
        self.empty = if self.taken_since { 0 } else { self.empty.saturating_add(1) };
        self.taken_since = false;
    }

    /// Returns for how long to mask events before the next sleep, in nanoseconds. It returns a time
    /// once for each event beyond the harmless ones.
    pub(crate) fn hold_ns(&mut self) -> Option<u64> {
        if self.taken_since || self.empty <= HARMLESS {
            return None;
        }
        let doubled = HOLD_NS.0 << (self.empty - HARMLESS - 1).min(16);
        Some(doubled.min(HOLD_NS.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_with_requests_are_never_held() {
        let mut storm = Storm::default();
        for _ in 0..1000 {
            storm.event();
            storm.taken();
            assert_eq!(storm.hold_ns(), None);
        }
    }

    #[test]
    fn empty_events_are_held_longer_and_longer_until_a_request_comes() {
        let mut storm = Storm::default();
        let mut last_ns = 0;
        for i in 0..100 {
            storm.event();
            let hold_ns = storm.hold_ns().unwrap_or(0);
            assert_eq!(hold_ns == 0, i < 4, "{i}");
            assert!(hold_ns >= last_ns && hold_ns <= HOLD_NS.1);
            last_ns = hold_ns;
        }
        assert_eq!(last_ns, HOLD_NS.1);
        storm.taken();
        assert_eq!(storm.hold_ns(), None);
        storm.event();
        assert_eq!(storm.hold_ns(), None);
    }
}
