//! What a queue does when there is nothing to do: poll for a while, sleep, and have memory given
//! back when the sleep is long.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use ferrite_io::engine::{Completion, Op};
use ferrite_io::reactor::Wait;

use super::storm::Storm;
use super::{DRAIN, EVENT, Queue, REARM};
use crate::polling::{HELD_NS, Poll, Poller, RunDelay, stolen_ns, wake_up_ns};
use crate::processors::Processors;
use crate::trace::Noticed;
use crate::tuning::Tuning;

/// After so many nanoseconds without anything to do, memory is given back. One wake-up; none
/// follows until there is a request.
const COLD_NS: u64 = 5_000_000_000;
/// What an event is when it is read: a port of Xen's driver, and never a second one (blkif.md 5). An engine that is to read more
/// tells of each one that it got less, and that is a wake-up and a call more.
const EVENT_BYTES: u32 = 4;
/// Turns of the polling loop between two readings of the clock.
const TURNS: u32 = 32;

/// What is known about this queue's waiting.
pub(super) struct Waiting {
    poller: Poller,
    delay: RunDelay,
    /// When this queue polled last, with a unit of the host's that may have to be given back.
    polled_ns: Option<u64>,
    /// It was given back, and nothing has come since that polling might have found sooner.
    resting: bool,
    /// When the last thing to do was done.
    idle_since_ns: Option<u64>,
}

/// What is known about the guest's events.
#[derive(Default)]
pub(super) struct Events {
    /// An operation waits for the event channel.
    armed: bool,
    /// The engine reads and writes the channel, in the order in which it is told.
    by_engine: bool,
    pub(super) storm: Storm,
    /// Until then they are not listened to.
    held_until_ns: u64,
}

impl Waiting {
    /// To be made on the queue's thread.
    pub(super) fn new(tuning: &Tuning, processors: &Processors) -> Waiting {
        let cpus = ferrite_io::processors::count();
        Waiting {
            poller: Poller::new(tuning.poll, wake_up_ns(), cpus, processors.host.is_some()),
            delay: RunDelay::of_this_thread(),
            polled_ns: None,
            resting: false,
            idle_since_ns: None,
        }
    }
}

impl Queue {
    /// How the next turn of the reactor shall wait. Before a sleep, the final check of the ring,
    /// and only then the event channel is let through again (blkif.md 1.4 and 5). `started`: the turn
    /// is to hand something over, which nobody polls before; no more than the next step of a task, which
    /// would wait for the end of the window.
    pub(super) fn next_wait(&mut self, started: bool) -> io::Result<Wait> {
        if self.path.is_pending() || self.path.has_yielded() {
            return Ok(Wait::No);
        }
        // Held back by something that will wake us: the guest's events would only disturb.
        let deaf = self.broken || self.path.is_held_back();
        let now_ns = self.clock.now_ns();
        self.diary.awake_until_ns = now_ns;
        if deaf || self.connection.shared.stopping() {
            // What held it back may be gone while nothing may be taken: it is found out only then.
            return Ok(Wait::Until(self.path.throttled_for().or(self.until_unit_is_free())));
        }
        if let Some(left) = self.path.throttled_for() {
            return Ok(Wait::Until(Some(left)));
        }
        let window_ns = self.window_ns(now_ns);
        if (started || self.path.reactor().has_unsent()) && window_ns > 0 {
            return Ok(Wait::No);
        }
        self.waiting.idle_since_ns.get_or_insert(now_ns);
        if window_ns > 0 && self.poll(now_ns, window_ns) {
            return Ok(Wait::No);
        }
        if let Some(left_ns) = self.events.held_until_ns.checked_sub(now_ns)
            && left_ns > 0
        {
            return Ok(Wait::Until(Some(Duration::from_nanos(left_ns))));
        }
        match self.ring.final_check() {
            // The violation is found again, and reported, by the next sweep.
            Ok(true) | Err(_) => return Ok(Wait::No),
            Ok(false) => {}
        }
        if !self.listen()? {
            return Ok(Wait::No);
        }
        let cold = Duration::from_nanos(COLD_NS);
        let cools = self.path.may_cool();
        Ok(Wait::Until(self.until_unit_is_free().or(cools.then_some(cold))))
    }

    /// How long to sleep before others of this host may poll, if we have what it takes.
    fn until_unit_is_free(&self) -> Option<Duration> {
        self.waiting.polled_ns.map(|_| Duration::from_nanos(HELD_NS))
    }

    /// Lets the guest's next event wake this queue. `false`: not yet, the engine has to take first what
    /// it has been given.
    fn listen(&mut self) -> io::Result<bool> {
        let link = self.ring.link();
        let fd = link.event_fd().as_raw_fd();
        match link.rearm_word() {
            Some(word) if self.path.reactor().put(REARM, fd, word) => self.ring.link().rearmed(),
            // Its reading of an event may be still to come: let through before that, the next event
            // would be read with this one, and nobody would know.
            Some(_) if self.events.by_engine => return Ok(false),
            _ => self.ring.link().rearm()?,
        }
        if !self.events.armed {
            self.path.reactor().push(EVENT, Op::Readable { fd });
            self.events.armed = true;
        }
        Ok(true)
    }

    /// An event has come: it is read now, or with the next submission, before the next is let through. That is
    /// behind the final check of the ring, so not of a channel that brings further ones meanwhile.
    pub(super) fn event_came(&mut self) -> io::Result<()> {
        self.events.armed = false;
        let (shut, fd) = {
            let link = self.ring.link();
            (link.is_shut_by_event(), link.event_fd().as_raw_fd())
        };
        self.events.by_engine = shut && self.path.reactor().drain(DRAIN, fd, EVENT_BYTES);
        if self.events.by_engine {
            self.ring.link().event_taken();
        } else if !self.ring.link().take_event()? {
            return Ok(());
        }
        self.count_event();
        Ok(())
    }

    /// The engine could not read it.
    pub(super) fn event_not_read(&mut self, completion: Completion) -> io::Result<()> {
        match completion.result() {
            Err(e)
                if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            // It was read.
            Ok(_) => Ok(()),
            // The link knows what to do about its descriptor's errors.
            Err(_) => self.ring.link().take_event().map(drop),
        }
    }

    /// For how long to poll from now on; 0: not at all.
    fn window_ns(&mut self, from_ns: u64) -> u64 {
        self.hear_of_host(from_ns);
        if self.waiting.poller.asks_for_wait(from_ns)
            && let Some(total_ns) = self.waiting.delay.total_ns()
        {
            self.waiting.poller.waited(from_ns, total_ns);
        }
        let window_ns = self.waiting.poller.window_ns(from_ns);
        let processors = &self.connection.shared.processors;
        let may_poll = window_ns > 0
            && !self.waiting.resting
            && processors.may_poll()
            && processors.polling.is_left(from_ns);
        if may_poll { window_ns } else { 0 }
    }

    /// Polls for requests and completions for as long as that is worth it. Meanwhile the guest
    /// is not asked for events, and those that it sends are not acknowledged. `true`: there is
    /// something.
    fn poll(&mut self, from_ns: u64, window_ns: u64) -> bool {
        let poll = self.poll_until(from_ns, from_ns + window_ns);
        self.waiting.poller.polled(poll);
        self.diary.polled(poll.hit, poll.from_ns, poll.to_ns);
        if self.ring.unconsumed() != Ok(0) {
            self.diary.noticed = Noticed::Poll;
        }
        let took_ns = poll.to_ns - poll.from_ns;
        let polling = &self.connection.shared.processors.polling;
        polling.spend(took_ns, poll.to_ns);
        self.waiting.polled_ns = polling.is_shared().then_some(poll.to_ns);
        let counters = self.counters();
        counters.polls.add(1);
        counters.hits.add(u64::from(poll.hit));
        counters.polled_ns.add(took_ns);
        poll.hit
    }

    /// Looks up what the host says of its processors, and has somebody ask it where that matters.
    fn hear_of_host(&mut self, now_ns: u64) {
        if let Some(host) = &self.connection.shared.processors.host
            && self.waiting.poller.listens(now_ns)
        {
            self.waiting.poller.heard(now_ns, host.look(now_ns));
            if self.waiting.poller.wants() {
                host.want();
            }
        }
    }

    fn poll_until(&mut self, from_ns: u64, end_ns: u64) -> Poll {
        let mut poll = Poll { from_ns, to_ns: from_ns, stolen_ns: 0, hit: false };
        // Not all engines show in memory that they were asked to stop.
        while !poll.hit && poll.to_ns < end_ns && !self.connection.shared.stopping() {
            for _ in 0..TURNS {
                if self.ring.unconsumed() != Ok(0) || self.path.reactor().may_reap() {
                    poll.hit = true;
                    break;
                }
                std::hint::spin_loop();
            }
            let now_ns = self.clock.now_ns();
            poll.stolen_ns += stolen_ns(now_ns - poll.to_ns);
            poll.to_ns = now_ns;
            self.look_at_guest(now_ns);
        }
        poll
    }

    /// One event of the guest's was taken.
    fn count_event(&mut self) {
        self.events.storm.event();
        let hold_ns = self.events.storm.hold_ns();
        if let Some(hold_ns) = hold_ns {
            self.events.held_until_ns = self.clock.now_ns() + hold_ns;
        }
        let counters = self.counters();
        counters.events.add(1);
        counters.held_events.add(u64::from(hold_ns.is_some()));
    }

    /// The reactor's turn is over; `slept`: it may have waited; `idle`: and nothing came of it.
    pub(super) fn woke(&mut self, slept: bool, idle: bool, now_ns: u64) {
        self.waiting.resting &= idle;
        if let Some(polled_ns) = self.waiting.polled_ns
            && now_ns.saturating_sub(polled_ns) >= HELD_NS
        {
            self.waiting.polled_ns = None;
            self.waiting.resting = idle;
            self.connection.shared.processors.polling.give_back_unused(now_ns);
        }
        let Some(since_ns) = self.waiting.idle_since_ns.take() else { return };
        let idle_ns = now_ns.saturating_sub(since_ns);
        if slept {
            self.waiting.poller.slept(idle_ns);
            self.counters().sleeps.add(1);
        }
        if idle && idle_ns >= COLD_NS {
            self.path.give_memory_back();
        }
    }
}
