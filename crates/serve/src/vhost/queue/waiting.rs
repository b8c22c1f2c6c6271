//! A queue without work polls for a while, then asks for a kick and sleeps.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use ferrite_io::engine::Op;
use ferrite_io::reactor::Wait;

use super::{KICK, Queue};
use crate::path::client::COLD;
use crate::path::shared::Shared;
use crate::polling::{Poll, Poller, RunDelay, stolen_ns, wake_up_ns};

/// Turns of the polling loop between two readings of the clock.
const TURNS: u32 = 32;

/// How this queue polls.
pub(super) struct Waiting {
    poller: Poller,
    delay: RunDelay,
}

impl Waiting {
    /// Makes the state. Must run on the queue's thread.
    pub(super) fn new(shared: &Shared) -> Waiting {
        let cpus = ferrite_host::processors::count();
        let has_host = shared.processors.host.is_some();
        Waiting {
            poller: Poller::new(shared.tuning.poll, wake_up_ns(), cpus, has_host),
            delay: RunDelay::of_this_thread(),
        }
    }

    /// Notes how long a turn has waited.
    pub(super) fn slept(&mut self, took_ns: u64) {
        self.poller.slept(took_ns);
    }
}

impl Queue {
    /// How long the next turn may wait. Before a sleep it looks at the ring for the last time, after it has asked the guest
    /// for a kick.
    pub(super) fn wait_for_kick(&mut self, started: bool) -> io::Result<Wait> {
        // A task begins in the turn itself.
        let begins = started && !self.path.has_transfers();
        let more = !self.todo.is_empty() && !self.blocked;
        if begins || more || self.path.is_pending() || self.path.has_yielded() {
            return Ok(Wait::No);
        }
        let now_ns = self.clock.now_ns();
        let stopping = self.shared.stopping();
        if self.broken || self.blocked || stopping || self.path.is_held_back() {
            // The end of the hold wakes the queue, and a kick would only disturb.
            return Ok(Wait::Until(self.path.throttled_for(now_ns)));
        }
        if let Some(left) = self.path.throttled_for(now_ns) {
            return Ok(Wait::Until(Some(left)));
        }
        let window_ns = self.window_ns(now_ns);
        if window_ns > 0 && (started || self.path.reactor().has_unsent()) {
            return Ok(Wait::No);
        }
        if window_ns > 0 && self.poll(now_ns, window_ns) {
            return Ok(Wait::No);
        }
        if let Some(left_ns) = self.held_until_ns.checked_sub(now_ns)
            && left_ns > 0
        {
            return Ok(Wait::Until(Some(Duration::from_nanos(left_ns))));
        }
        // The next turn finds an error of the ring again, and reports it.
        if self.ring.listen().unwrap_or(true) {
            return Ok(Wait::No);
        }
        if !std::mem::replace(&mut self.armed, true) {
            let fd = self.kick.as_raw_fd();
            self.path.reactor().push(KICK, Op::Readable { fd });
        }
        Ok(Wait::Until(self.path.may_cool().then_some(COLD)))
    }

    /// For how long to poll from now on; 0 means not at all.
    fn window_ns(&mut self, from_ns: u64) -> u64 {
        let waiting = &mut self.waiting;
        if waiting.poller.is_wait_check_due(from_ns)
            && let Some(total_ns) = waiting.delay.total_ns()
        {
            waiting.poller.waited(from_ns, total_ns);
        }
        let processors = &self.shared.processors;
        let may_poll = processors.may_poll() && processors.polling.is_left(from_ns);
        if may_poll { waiting.poller.window_ns(from_ns) } else { 0 }
    }

    /// Polls for requests and completions. Returns whether there is work.
    fn poll(&mut self, from_ns: u64, window_ns: u64) -> bool {
        let mut poll = Poll { from_ns, to_ns: from_ns, stolen_ns: 0, hit: false };
        while !poll.hit && poll.to_ns < from_ns + window_ns && !self.shared.stopping() {
            for _ in 0..TURNS {
                if self.ring.waiting() != Ok(0) || self.path.reactor().may_reap() {
                    poll.hit = true;
                    break;
                }
                std::hint::spin_loop();
            }
            let now_ns = self.clock.now_ns();
            poll.stolen_ns += stolen_ns(now_ns - poll.to_ns);
            poll.to_ns = now_ns;
        }
        let (hit, took_ns, to_ns) = (poll.hit, poll.to_ns - poll.from_ns, poll.to_ns);
        self.waiting.poller.polled(poll);
        self.shared.processors.polling.spend(took_ns, to_ns);
        let counters = self.path.counters();
        counters.polls.add(1);
        counters.hits.add(u64::from(hit));
        counters.polled_ns.add(took_ns);
        hit
    }
}
