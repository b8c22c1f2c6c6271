//! Requests whose storage is full, and what becomes of them ([`OnFull`]).
//!
//! With [`OnFull::Wait`] a request that has found no space is not answered. Nothing of it is under way:
//! its path rests, lets others have the gate, and takes what needs no space. One request of each path
//! is tried again after a pause; when it is done, the next one follows at once. Two guests of one disk do
//! not wait at the same time: the turn stays with the side of who waits (`gate.rs`).
//!
//! Who waits is in the in-flight table as before. A path that is stopped leaves it there for its
//! successor, unless its client is gone: then it is [given up](RequestPath::give_up_waiting). All of
//! this is blkif.md 2.2.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::RequestPath;
use super::admission::Admitted;
use super::device::Device;
use super::flight::Ticket;
use super::full::{OnFull, is_full};
use super::work::{Action, Outcome};
use crate::counters::Page;
use crate::log_limit::limited;

/// The first pause between two tries,
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// and the longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Device {
    /// The same device, with requests that do this where there is no space.
    #[must_use]
    pub fn on_full(mut self, policy: OnFull) -> Device {
        self.full.policy = policy;
        self
    }

    /// Whether requests of any path wait for space.
    pub(super) fn waits_for_space(&self) -> bool {
        self.full.waits().requests > 0
    }

    /// One more request waits.
    fn space_ends(&self, e: &io::Error) {
        let mut waits = self.full.waits();
        waits.requests += 1;
        if waits.requests > 1 {
            return;
        }
        waits.since_ns = self.clock.now_ns();
        limited!(
            warn,
            self.log_limits.storage,
            waits.since_ns,
            "the storage of this disk is full ({e}): what its guest writes waits for space. Make \
             some; nothing else is to be done"
        );
    }

    /// So many requests wait no more.
    fn waits_end(&self, requests: usize, how: End) {
        if requests == 0 {
            return;
        }
        let mut waits = self.full.waits();
        waits.requests -= requests;
        if waits.requests > 0 {
            return;
        }
        let now_ns = self.clock.now_ns();
        let waited_s = now_ns.saturating_sub(waits.since_ns) / 1_000_000_000;
        let limit = &self.log_limits.storage;
        match how {
            End::Done => {
                let text = "no request of this disk waits for space any more, after";
                limited!(info, limit, now_ns, "{text} {waited_s} s");
            }
            End::GivenUp => {
                let text =
                    "what waited for space on this disk was not written: who asked is gone, after";
                limited!(warn, limit, now_ns, "{text} {waited_s} s");
            }
            End::Left => {}
        }
        drop(waits);
        // Barriers wait for that.
        self.wake_all();
    }
}

/// How a wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The request is answered.
    Done,
    /// With an error, which nobody hears.
    GivenUp,
    /// A successor waits on.
    Left,
}

/// When the next try may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    /// Nobody waits, or a request is being tried.
    #[default]
    Never,
    AfterPause,
    Now,
}

/// The requests of one path that wait. Dropped, it leaves them to a successor.
pub(super) struct Space {
    device: Arc<Device>,
    page: Page,
    waiting: VecDeque<Ticket>,
    /// The entry of the one that is being tried.
    tried: Option<usize>,
    next: Rc<Cell<Next>>,
    pause: Duration,
    /// Those that were counted as waiting and have no answer.
    counted: usize,
    /// No more request is to wait.
    given_up: bool,
    /// One of those that wait is a barrier: what came after it is to be done after it.
    barrier: bool,
}

impl Space {
    pub(super) fn new(device: &Arc<Device>, page: &Page) -> Space {
        Space {
            device: device.clone(),
            page: page.clone(),
            waiting: VecDeque::new(),
            tried: None,
            next: Rc::default(),
            pause: FIRST_PAUSE,
            counted: 0,
            given_up: false,
            barrier: false,
        }
    }

    /// Requests that wait, and of which nothing is under way.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a barrier waits.
    pub(super) fn has_barrier(&self) -> bool {
        self.barrier
    }

    fn count_out(&mut self, requests: usize, how: End) {
        self.counted -= requests;
        self.page.counters().space_waits_ended.add(requests as u64);
        self.device.waits_end(requests, how);
    }

    /// A request is about to be answered that was counted as waiting.
    pub(super) fn answered(&mut self, entry: usize) {
        self.count_out(1, if self.given_up { End::GivenUp } else { End::Done });
        if self.tried == Some(entry) {
            self.tried = None;
            self.pause = FIRST_PAUSE;
            self.next.set(if self.waiting.is_empty() { Next::Never } else { Next::Now });
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.waiting.drain(..).for_each(|ticket| {
            ticket.park();
        });
        self.count_out(self.counted, End::Left);
    }
}

impl RequestPath {
    /// Has a client that keeps the data of what it has asked for until that is answered. Then requests
    /// wait without a buffer, which others may need.
    pub fn client_keeps_data(&mut self) {
        self.refetches = true;
    }

    /// Whether a request that has found no space is to wait for it.
    pub(super) fn may_wait(&self, e: &io::Error) -> bool {
        let device = self.seat.device();
        let waits = device.full.policy == OnFull::Wait && !self.space.given_up;
        waits && is_full(e) && !device.flush_has_failed()
    }

    /// Keeps a request that has found no space.
    pub(super) fn wait_for_space(&mut self, ticket: Ticket, e: &io::Error) {
        let flight = self.flights.get(&ticket);
        if self.refetches
            && let Some(buf) = flight.buf.take()
        {
            self.buffers.free(buf);
        }
        if !std::mem::replace(&mut flight.waits, true) {
            self.space.counted += 1;
            self.space.page.space_ends();
            self.space.device.space_ends(e);
        }
        if self.space.tried == Some(ticket.entry()) {
            self.space.tried = None;
            self.space.pause = (self.space.pause * 2).min(LONGEST_PAUSE);
        }
        self.space.barrier |= flight.work.action == Action::Barrier;
        // Behind the others: it may be larger than they are.
        self.space.waiting.push_back(ticket);
        self.try_after_pause();
    }

    fn try_after_pause(&mut self) {
        let space = &self.space;
        if space.tried.is_some() || space.next.get() != Next::Never {
            return;
        }
        space.next.set(Next::AfterPause);
        let (next, pause, io) = (space.next.clone(), space.pause, self.medium.port.io.clone());
        self.reactor.spawn(async move {
            // A sleep that fails is none.
            let _ = io.sleep(pause).await;
            next.set(Next::Now);
        });
    }

    /// The next request that is tried again for space, if its time has come. Once a turn.
    pub fn retry(&mut self) -> Option<Admitted> {
        let is_time = self.space.next.get() == Next::Now && !self.shared.stopping();
        if !is_time || self.alone.is_running() || self.medium.is_resting() {
            return None;
        }
        if !self.seat.go_on() {
            self.leave_if_idle();
            return None;
        }
        let admitted = self.try_next();
        self.leave_if_idle();
        admitted
    }

    fn try_next(&mut self) -> Option<Admitted> {
        let work = self.flights.see(self.space.waiting.front()?).work;
        let takes_data = work.action.takes_data() && work.sectors > 0;
        let fetch = takes_data && self.refetches;
        let buf = if fetch { Some(self.buffer(work.bytes() as usize)?) } else { None };
        let ticket = self.space.waiting.pop_front()?;
        self.space.next.set(Next::Never);
        self.space.tried = Some(ticket.entry());
        if buf.is_some() {
            self.flights.get(&ticket).buf = buf;
        }
        self.lay_out_again(&ticket);
        if self.seat.device().flush_has_failed() {
            self.finish(ticket, Outcome::Failed);
        } else if work.action == Action::Barrier {
            self.space.barrier = false;
            self.alone.wait_first(ticket);
        } else if self.needs_to_be_alone(&ticket) {
            self.wait_to_be_alone(ticket);
        } else if fetch {
            return Some(Admitted::Fetch(ticket));
        } else {
            self.ready.push(ticket);
        }
        Some(Admitted::Taken)
    }

    /// The disk may be another one than when the request was laid out.
    pub(super) fn lay_out_again(&mut self, ticket: &Ticket) {
        let flight = self.flights.get(ticket);
        let before = flight.layout.map(|layout| layout.data);
        flight.lay_out(self.medium.block_bytes);
        let (Some(from), Some(to)) = (before, flight.layout.map(|layout| layout.data)) else {
            return;
        };
        if from != to && !self.refetches {
            let arena = self.shared.pool.arena();
            let mut data = vec![0; from.len()];
            arena.copy_out(from, &mut data);
            arena.copy_in(to, &data);
        }
    }

    /// Answers all that wait with an error, and lets nothing wait any more: nobody is there who could
    /// hear of the space when it comes.
    pub fn give_up_waiting(&mut self) {
        self.space.given_up = true;
        self.space.barrier = false;
        while let Some(ticket) = self.space.waiting.pop_front() {
            self.flights.get(&ticket).no_space = true;
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Requests of which nothing is under way, nor will be before there is space: those that wait for
    /// it, and those that may have to come after them.
    pub(super) fn behind_space(&self) -> usize {
        let after = match self.alone.waiting() {
            0 => 0,
            _ if self.seat.device().waits_for_space() => self.alone.waiting(),
            _ => 0,
        };
        self.space.waiting() + after
    }

    /// Whether the next request that has to be alone is to wait until none waits for space any more: a
    /// barrier comes after all that was asked for before it (blkif.md 2, rule 9).
    pub(super) fn is_alone_behind_space(&self) -> bool {
        let Some(ticket) = self.alone.first() else { return false };
        let flight = self.flights.see(ticket);
        // A barrier that is tried again is one of those that wait.
        let waits = flight.work.action == Action::Barrier && !flight.waits && !self.space.given_up;
        self.space.barrier || (waits && self.seat.device().waits_for_space())
    }

    /// Whether requests of this path wait for space.
    pub fn waits_for_space(&self) -> bool {
        self.space.counted > 0
    }
}

#[cfg(test)]
mod tests {
    use ferrite_disk::Disk;
    use ferrite_io::clock::SystemClock;

    use super::*;
    use crate::path::admission::tests::path;
    use crate::path::gate::Side;
    use crate::path::work::Work;

    /// Otherwise a dead process could leave requests of both sides.
    #[test]
    fn who_waits_for_space_keeps_the_turn_and_is_tried_again_though_the_other_side_wants_it() {
        let device = Arc::new(Device::new(Disk::nothing(), SystemClock::shared()));
        let [mut first, mut second] = [Side::First, Side::Second].map(|side| path(&device, side));
        assert!(first.enter());
        let ticket = first.take(1, 0, None, 0).unwrap();
        let work = Work { action: Action::Flush, sector: 0, sectors: 0 };
        assert!(matches!(first.admit(ticket, work), Admitted::Taken));
        let ticket = first.ready.pop().unwrap();
        first.wait_for_space(ticket, &io::Error::from_raw_os_error(28));
        assert!(first.leave_if_idle() && !second.enter());
        // Also of a path that was parked meanwhile.
        first.seat.rest();
        assert!(!second.enter());
        assert!(first.leave_if_idle() && !second.enter());
        first.space.next.set(Next::Now);
        assert!(matches!(first.retry(), Some(Admitted::Taken)));
        assert!(!second.enter());
        let ticket = first.ready.pop().unwrap();
        first.finish(ticket, Outcome::Done);
        let ticket = first.finished.pop().unwrap();
        first.release(ticket);
        assert!(first.leave_if_idle() && second.enter());
    }
}
