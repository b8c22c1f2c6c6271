//! A queue without work polls for a while, then sleeps, and gives memory back when the sleep is long.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use ferrite_io::engine::{Completion, Op};
use ferrite_io::reactor::Wait;

use super::storm::Storm;
use super::{DRAIN, EVENT, Queue, REARM};
use crate::polling::{HELD_NS, Poll, PollWindow, Poller, RunDelay, stolen_ns, wake_up_ns};
use crate::processors::Processors;
use crate::trace::Noticed;
use crate::tuning::Tuning;

/// After this many nanoseconds without work, memory is given back. That costs one wake-up; no
/// further one follows until there is a request.
const COLD_NS: u64 = 5_000_000_000;
/// Size of an event as it is read: one port of Xen's driver, never a second one (blkif.md 5). An
/// engine that is asked for more bytes reports each short read, which costs a wake-up and a call.
const EVENT_BYTES: u32 = 4;
/// Turns of the polling loop between two readings of the clock.
const TURNS: u32 = 32;

/// How this queue waits.
pub(super) struct Waiting {
    window: PollWindow,
    poller: Poller,
    delay: RunDelay,
    /// When this queue polled last, while it holds a unit of the host's polling budget that it may
    /// have to give back.
    polled_ns: Option<u64>,
    /// The unit was given back, and since then no work came that polling could have found sooner.
    resting: bool,
    /// When the queue ran out of work.
    idle_since_ns: Option<u64>,
}

/// The state of the guest's events.
#[derive(Default)]
pub(super) struct Events {
    /// An operation of the engine waits for the event channel.
    armed: bool,
    /// The engine reads and writes the channel, in the order in which that is submitted.
    by_engine: bool,
    pub(super) storm: Storm,
    /// Until this time the channel stays masked.
    held_until_ns: u64,
}

impl Waiting {
    /// Makes the state. Must run on the queue's thread.
    pub(super) fn new(tuning: &Tuning, processors: &Processors) -> Waiting {
        let cpus = ferrite_host::processors::count();
        Waiting {
            window: tuning.poll,
            poller: Poller::new(tuning.poll, wake_up_ns(), cpus, processors.host.is_some()),
            delay: RunDelay::of_this_thread(),
            polled_ns: None,
            resting: false,
            idle_since_ns: None,
        }
    }
}

impl Queue {
    /// Returns how the next turn of the reactor shall wait. Before a sleep it checks the ring for
    /// the last time, and only then lets the event channel through again (blkif.md 1.4 and 5).
    ///
    /// `started`: the turn has operations to submit, so the thread does not poll before it. It does
    /// not poll before the next step of a task either: the step would wait until the polling window
    /// ends.
    pub(super) fn next_wait(&mut self, started: bool) -> io::Result<Wait> {
        if self.path.is_pending() || self.path.has_yielded() {
            return Ok(Wait::No);
        }
        // The queue is held back by something that will wake it: the guest's events would only
        // disturb.
        let deaf = self.broken || self.path.is_held_back();
        let now_ns = self.clock.now_ns();
        self.diary.awake_until_ns = now_ns;
        if deaf || self.connection.shared.stopping() {
            // The reason may end while no request may be taken. That shows only after the wait.
            return Ok(Wait::Until(self.path.throttled_for(now_ns).or(self.until_unit_is_free())));
        }
        if let Some(left) = self.path.throttled_for(now_ns) {
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

    /// Returns how long to sleep before other disks of this host may poll, if this queue holds a
    /// unit of the budget.
    fn until_unit_is_free(&self) -> Option<Duration> {
        self.waiting.polled_ns.map(|_| Duration::from_nanos(HELD_NS))
    }

    /// Lets the guest's next event wake this queue. Returns `false` if the engine must first
    /// process what was submitted to it.
    fn listen(&mut self) -> io::Result<bool> {
        let link = self.ring.link();
        let fd = link.event_fd().as_raw_fd();
        match link.rearm_word() {
            Some(word) if self.path.reactor().put(REARM, fd, word) => self.ring.link().rearmed(),
            // The engine may still have to read an event that has come. If the channel were let
            // through before that, the next event would be read together with this one and be
            // missed.
            Some(_) if self.events.by_engine => return Ok(false),
            _ => self.ring.link().rearm()?,
        }
        if !self.events.armed {
            self.path.reactor().push(EVENT, Op::Readable { fd });
            self.events.armed = true;
        }
        Ok(true)
    }

    /// Handles an event. The event is read now, or with the next submission, and before the next
    /// event is let through. A submission comes after the final check of the ring, so the engine
    /// only reads channels that cannot bring another event meanwhile.
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

    /// Handles the result of the engine's read of an event.
    pub(super) fn event_not_read(&mut self, completion: Completion) -> io::Result<()> {
        match completion.result() {
            Err(e)
                if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            // It was read.
            Ok(_) => Ok(()),
            // The link handles errors of its descriptor.
            Err(_) => self.ring.link().take_event().map(drop),
        }
    }

    /// Returns for how long to poll from now on, in nanoseconds; 0 means not at all.
    fn window_ns(&mut self, from_ns: u64) -> u64 {
        self.follow_window();
        self.read_host_load(from_ns);
        if self.waiting.poller.is_wait_check_due(from_ns)
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

    /// Begins to poll for as long as was set on the running disk.
    fn follow_window(&mut self) {
        let processors = &self.connection.shared.processors;
        if let Some(window) = processors.window()
            && self.waiting.window != window
        {
            let has_host = processors.host.is_some();
            self.waiting.window = window;
            self.waiting.poller =
                Poller::new(window, wake_up_ns(), ferrite_host::processors::count(), has_host);
        }
    }

    /// Polls for requests and completions while that is worthwhile. Meanwhile the guest is not
    /// asked for events, and events that it sends are not acknowledged. Returns `true` if there is
    /// work.
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

    /// Reads what is known about the host's processors, and requests a fresh value where it
    /// matters.
    fn read_host_load(&mut self, now_ns: u64) {
        if let Some(host) = &self.connection.shared.processors.host
            && self.waiting.poller.is_host_check_due(now_ns)
        {
            self.waiting.poller.observe_host(now_ns, host.look(now_ns));
            if self.waiting.poller.wants_host_load() {
                host.want();
            }
        }
    }

    fn poll_until(&mut self, from_ns: u64, end_ns: u64) -> Poll {
        let mut poll = Poll { from_ns, to_ns: from_ns, stolen_ns: 0, hit: false };
        // Not every engine shows in memory that it was asked to stop, so the loop checks for that
        // itself.
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

    /// Counts an event of the guest, and masks the channel after too many.
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

    /// Updates the waiting state after a turn of the reactor. `slept`: the turn may have waited.
    /// `idle`: it brought no completion.
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
