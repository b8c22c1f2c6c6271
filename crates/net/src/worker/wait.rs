//! The worker looks for packets for a while, asks for events, and sleeps.
//!
//! A descriptor is watched by the engine from one wait to the next. An event also has to be read, and a word lets the
//! next one through. Both are handed over with the wait: one system call for all of it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::Clock;
use ferrite_io::arena::Arena;
use ferrite_io::engine::{Completion, Op, Token};
use ferrite_io::engines::EngineChoice;
use ferrite_io::reactor::{Reactor, Wait};

use super::Worker;
use crate::packet::Stop;
use crate::switch::PortId;
use crate::trace::Noticed;
use crate::vif::Queue;

/// How long a channel stays as it is after an event that brought nothing: the hypervisor merges what comes meanwhile.
const QUIET_NS: u64 = 1_000_000;
/// How often held packets are looked at, for frontends that send no event with a new page.
const HELD_NS: u64 = 2_000_000;
/// In how many turns without a wait the uplink is looked at once, which costs a system call.
const UPLINK_TURNS: u32 = 16;

/// The tokens of waits. A queue has the number of its connection, and its own in the lowest byte: connections count
/// from 1.
const WAKE: Token = 0;
const UPLINK: Token = 1;
const DRAIN: Token = 2;
const REARM: Token = 3;
const QUEUE_BITS: u32 = 8;
/// Bytes of an event.
const EVENT_BYTES: u32 = 4;
/// The entries that are handed over at once. More are handed over in parts.
const ENTRIES: u32 = 256;

fn token(epoch: u64, queue: usize) -> Token {
    epoch << QUEUE_BITS | queue as u64
}

/// The events that wake the thread.
pub(super) struct Events {
    reactor: Reactor,
    completions: Vec<Completion>,
    watches_wake: bool,
    watches_uplink: bool,
    /// Control has called since its commands were looked at last.
    pub(super) is_called: bool,
    /// The uplink may have frames.
    pub(super) has_frames: bool,
    /// Turns since the last wait.
    turns: u32,
    failures: u64,
}

impl Events {
    pub(super) fn new(arena: Arc<Arena>) -> io::Result<Events> {
        let engine = EngineChoice::Auto.open(arena, ENTRIES)?;
        Ok(Events {
            reactor: Reactor::new(engine),
            completions: Vec::new(),
            watches_wake: false,
            watches_uplink: false,
            is_called: false,
            has_frames: false,
            turns: 0,
            failures: 0,
        })
    }

    /// Whether the uplink is to be looked at in this turn.
    pub(super) fn is_uplink_due(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        self.has_frames || self.turns.is_multiple_of(UPLINK_TURNS)
    }

    /// An event of this queue has come. It is read now, or with the next wait and before the next event is let through.
    fn came(&mut self, queue: &mut Queue) {
        let link = queue.rings.link();
        let fd = link.event_fd().as_raw_fd();
        queue.is_read_by_engine =
            link.is_shut_by_event() && self.reactor.drain(DRAIN, fd, EVENT_BYTES);
        if queue.is_read_by_engine {
            link.event_taken();
            queue.has_event = true;
            return;
        }
        match link.take_event() {
            Ok(taken) => queue.has_event = taken,
            Err(e) => tracing::debug!("cannot take an event: {e}"),
        }
    }

    /// Lets a queue's next event through. `false`: only after the next submission.
    fn rearm(&mut self, queue: &mut Queue) -> bool {
        let link = queue.rings.link();
        let fd = link.event_fd().as_raw_fd();
        match link.rearm_word() {
            Some(word) if self.reactor.put(REARM, fd, word) => link.rearmed(),
            // Together with the event that is still to be read, the next one would be read, and missed.
            Some(_) if queue.is_read_by_engine => return false,
            _ => {
                if let Err(e) = link.rearm() {
                    tracing::debug!("cannot let events through: {e}");
                }
            }
        }
        queue.has_event = false;
        true
    }
}

impl Worker {
    /// Whether another turn has something to do without an event.
    pub(super) fn has_more(&self) -> bool {
        let mut queues = self.vifs.iter().flatten().flat_map(|vif| &vif.queues);
        // A stop in this turn may have taken control's call. While a packet was moved, pages may have come for those
        // that wait.
        self.events.is_called
            || self.events.has_frames
            || queues.any(|queue| {
                queue.rings.tx_unconsumed() != Ok(0)
                    || (self.turn.has_worked && !queue.held.is_empty())
            })
    }

    /// Returns when there may be something to do.
    pub(super) fn rest(&mut self) {
        if self.poll_for(self.start.poll_us * 1000) {
            self.tracer.noticed = Noticed::Poll;
        } else if !self.is_awaited() {
            self.sleep();
            self.tracer.noticed = Noticed::Event;
        }
    }

    /// Looks at the rings for so long.
    fn poll_for(&mut self, ns: u64) -> bool {
        if ns == 0 {
            return false;
        }
        let begin_ns = self.clock.now_ns();
        loop {
            let now_ns = self.clock.now_ns();
            if now_ns.saturating_sub(begin_ns) >= ns {
                return false;
            }
            let mut queues = self.vifs.iter().flatten().flat_map(|vif| &vif.queues);
            if queues.any(|queue| queue.rings.tx_unconsumed() != Ok(0)) {
                return true;
            }
            self.look_at_consumed(now_ns);
            std::hint::spin_loop();
        }
    }

    /// Asks for events. `true`: something came meanwhile.
    fn is_awaited(&mut self) -> bool {
        let (mut now_ns, mut found, mut is_full) = (None, false, false);
        for (at, vif) in self.vifs.iter_mut().enumerate() {
            for queue in vif.iter_mut().flat_map(|vif| &mut vif.queues) {
                match queue.rings.final_check(!queue.held.is_empty()) {
                    Ok(more) => found |= more,
                    Err(violation) => {
                        self.turn.stops.push((PortId(at as u16), Stop::Ring(violation)));
                        continue;
                    }
                }
                if !queue.has_event {
                    continue;
                }
                // One event for what was done since the last one was let through is no more than its due.
                if !queue.has_worked || queue.quiet_until_ns != 0 {
                    let now_ns = *now_ns.get_or_insert_with(|| self.clock.now_ns());
                    if queue.quiet_until_ns == 0 {
                        queue.quiet_until_ns = now_ns + QUIET_NS;
                    }
                    if queue.quiet_until_ns > now_ns {
                        continue;
                    }
                }
                (queue.quiet_until_ns, queue.has_worked) = (0, false);
                is_full |= !self.events.rearm(queue);
            }
        }
        if is_full {
            self.collect(Wait::No);
        }
        if !self.turn.stops.is_empty() {
            self.stop_all();
            return true;
        }
        found || is_full
    }

    pub(super) fn sleep(&mut self) {
        let queues = || self.vifs.iter().flatten().flat_map(|vif| &vif.queues);
        let quiet = queues().any(|queue| queue.has_event).then_some(QUIET_NS);
        let held = queues().any(|queue| !queue.held.is_empty()).then_some(HELD_NS);
        let ns = quiet.into_iter().chain(held).min();
        self.watch();
        self.collect(Wait::Until(ns.map(Duration::from_nanos)));
    }

    /// Watches all that is not watched yet.
    fn watch(&mut self) {
        let events = &mut self.events;
        if !std::mem::replace(&mut events.watches_wake, true) {
            events.reactor.push(WAKE, Op::Readable { fd: self.start.wake.as_raw_fd() });
        }
        if let Some(uplink) = &self.start.uplink
            && !std::mem::replace(&mut events.watches_uplink, true)
        {
            events.reactor.push(UPLINK, Op::Readable { fd: uplink.fd().as_raw_fd() });
        }
        for vif in self.vifs.iter_mut().flatten() {
            for (at, queue) in vif.queues.iter_mut().enumerate() {
                if !queue.has_event && !std::mem::replace(&mut queue.is_watched, true) {
                    let fd = queue.rings.event_fd().as_raw_fd();
                    events.reactor.push(token(vif.epoch, at), Op::Readable { fd });
                }
            }
        }
    }

    /// Hands everything over, waits if asked, and takes what has come.
    fn collect(&mut self, wait: Wait) {
        let mut completions = std::mem::take(&mut self.events.completions);
        if let Err(e) = self.events.reactor.turn(wait, &mut completions) {
            self.events.failures += 1;
            // Once, then each time that there are twice as many.
            if self.events.failures.is_power_of_two() {
                tracing::error!("the network cannot wait for events: {e}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if wait != Wait::No {
            self.events.turns = 0;
        }
        for completion in completions.drain(..) {
            self.came(completion);
        }
        self.events.completions = completions;
    }

    fn came(&mut self, completion: Completion) {
        let is_ok = completion.raw >= 0;
        match completion.token {
            WAKE => {
                (self.events.watches_wake, self.events.is_called) = (false, true);
                take_wake(&self.start.wake);
            }
            UPLINK => {
                self.events.watches_uplink = false;
                self.events.has_frames = is_ok;
            }
            DRAIN | REARM if is_ok => {}
            DRAIN | REARM => {
                let e = io::Error::from_raw_os_error(-completion.raw);
                tracing::debug!("the engine has not moved an event's word: {e}");
                self.rearm_all();
            }
            token => {
                let (epoch, at) = (token >> QUEUE_BITS, token as usize & ((1 << QUEUE_BITS) - 1));
                let mut vifs = self.vifs.iter_mut().flatten();
                let vif = vifs.find(|vif| vif.epoch == epoch);
                let Some(queue) = vif.and_then(|vif| vif.queues.get_mut(at)) else { return };
                queue.is_watched = false;
                if is_ok {
                    self.events.came(queue);
                }
            }
        }
    }

    /// Lets the events of all queues through: which one's word was not moved is unknown.
    #[cold]
    fn rearm_all(&mut self) {
        for queue in self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues) {
            let link = queue.rings.link();
            link.event_taken();
            if let Err(e) = link.rearm() {
                tracing::debug!("cannot let events through: {e}");
            }
            (queue.has_event, queue.is_read_by_engine) = (false, false);
        }
    }

    /// Calls off all that the engine does with an interface's descriptors: they are closed next.
    pub(super) fn unwatch(&mut self, port: PortId) {
        let Some(vif) = self.vifs.get(usize::from(port.0)).and_then(Option::as_ref) else { return };
        for (at, _) in vif.queues.iter().enumerate().filter(|(_, queue)| queue.is_watched) {
            self.events.reactor.cancel(token(vif.epoch, at));
        }
        while self.vif(port).is_some_and(|vif| vif.queues.iter().any(|queue| queue.is_watched)) {
            self.collect(Wait::Until(None));
        }
        // The operations that the last events have handed over.
        self.collect(Wait::No);
    }

    /// The uplink is broken.
    pub(super) fn lose_uplink(&mut self) {
        if self.events.watches_uplink {
            self.events.reactor.cancel(UPLINK);
        }
        while self.events.watches_uplink {
            self.collect(Wait::Until(None));
        }
        (self.start.uplink, self.events.has_frames) = (None, false);
    }
}

/// Wakes the thread that polls an eventfd.
pub(crate) fn wake(fd: &OwnedFd) {
    // A full counter is awake already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Takes the wake-ups.
pub(crate) fn take_wake(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}
