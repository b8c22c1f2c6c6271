//! The records of a queue's thread for observers: requests, times of polling and sleep, and facts that the ring shows
//! of its guest (docs/internals/trace.md 1).

use super::Queue;
use crate::trace::{Doing, Noticed, Span, TraceRing};

/// The queue's trace, and the state that its records need.
pub(super) struct Diary {
    pub(super) ring: TraceRing,
    /// How the thread noticed the requests that it takes next.
    pub(super) noticed: Noticed,
    /// When the thread last read the clock before a sleep.
    pub(super) awake_until_ns: u64,
    /// The guest's consumed responses at the last look at its ring; `looked_ns` is when that was.
    consumed: u32,
    looked_ns: u64,
}

impl Diary {
    pub(super) fn new(ring: TraceRing, consumed: u32, now_ns: u64) -> Diary {
        let noticed = Noticed::Working;
        Diary { ring, noticed, awake_until_ns: now_ns, consumed, looked_ns: now_ns }
    }

    /// Records that the thread slept until `now_ns`, and whether an event woke it.
    pub(super) fn slept(&mut self, event: bool, now_ns: u64) {
        if event {
            self.noticed = Noticed::Event;
        }
        let doing = if event { Doing::WokenByEvent } else { Doing::Slept };
        self.ring.span(&Span { doing, from_ns: self.awake_until_ns, to_ns: now_ns });
    }

    /// Records that the thread polled.
    pub(super) fn polled(&mut self, hit: bool, from_ns: u64, to_ns: u64) {
        self.awake_until_ns = to_ns;
        self.ring.span(&Span { doing: Doing::Polled(hit), from_ns, to_ns });
    }
}

impl Queue {
    /// Records whether the guest has consumed responses since the last look. This costs one load of
    /// a cache line that was just read for requests.
    #[inline]
    pub(super) fn look_at_guest(&mut self, now_ns: u64) {
        let consumed = self.ring.said_consumed();
        let diary = &mut self.diary;
        if consumed != diary.consumed {
            diary.consumed = consumed;
            let doing = Doing::Consumed(consumed);
            diary.ring.span(&Span { doing, from_ns: diary.looked_ns, to_ns: now_ns });
        }
        diary.looked_ns = now_ns;
    }
}
