//! What a queue's thread leaves for who wants to see it at work: requests, when it polled and slept, and what
//! the ring shows of its guest (docs/internals/trace.md 1).

use super::Queue;
use crate::trace::{Doing, Noticed, Span, TraceRing};

/// The trace, and what is needed to say it.
pub(super) struct Diary {
    pub(super) ring: TraceRing,
    /// How requests that are taken next were noticed.
    pub(super) noticed: Noticed,
    /// The thread has looked at the clock before a sleep.
    pub(super) awake_until_ns: u64,
    /// What the guest had consumed by the last look, and when that was.
    consumed: u32,
    looked_ns: u64,
}

impl Diary {
    pub(super) fn new(ring: TraceRing, consumed: u32, now_ns: u64) -> Diary {
        let noticed = Noticed::Working;
        Diary { ring, noticed, awake_until_ns: now_ns, consumed, looked_ns: now_ns }
    }

    /// The thread has slept until now.
    pub(super) fn slept(&mut self, event: bool, now_ns: u64) {
        if event {
            self.noticed = Noticed::Event;
        }
        let doing = if event { Doing::WokenByEvent } else { Doing::Slept };
        self.ring.span(&Span { doing, from_ns: self.awake_until_ns, to_ns: now_ns });
    }

    /// It has polled.
    pub(super) fn polled(&mut self, hit: bool, from_ns: u64, to_ns: u64) {
        self.awake_until_ns = to_ns;
        self.ring.span(&Span { doing: Doing::Polled(hit), from_ns, to_ns });
    }
}

impl Queue {
    /// Notes whether the guest has consumed answers since the last look. One load of a line that was looked
    /// at for requests just now.
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
