//! Requests whose storage is full, and the policy for them ([`OnFull`]).
//!
//! With [`OnFull::Wait`] a request that finds no space is not answered. Nothing of it is under way:
//! its path rests, lets others have the gate, and takes requests that need no space. One request of
//! each path is tried again after a pause. When it is done, the next one follows at once. Two
//! guests of one disk do not wait at the same time: the side with a waiting request keeps the turn
//! (`gate.rs`).
//!
//! A waiting request stays in the in-flight table. A path that is stopped leaves it there for its
//! successor. If its client is gone, it is [given up](RequestPath::give_up_waiting). All of this is
//! blkif.md 2.2.

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

/// The first pause between two tries.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Device {
    /// Sets the policy for requests that find no space.
    #[must_use]
    pub fn on_full(self, policy: OnFull) -> Device {
        self.set_on_full(policy);
        self
    }

    /// Sets the policy of a device that is served. Requests that wait for space and are to fail do
    /// so at their next try.
    pub fn set_on_full(&self, policy: OnFull) {
        self.full.set_policy(policy);
    }

    /// Whether requests of any path wait for space.
    pub(super) fn waits_for_space(&self) -> bool {
        self.full.waits().requests > 0
    }

    /// Counts one more waiting request.
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
             some: no restart is needed"
        );
    }

    /// Counts this number of requests as not waiting any more.
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
                let text = "a write that waited for space on this disk was dropped: its client is gone, after";
                limited!(warn, limit, now_ns, "{text} {waited_s} s");
            }
            End::Left => {}
        }
        drop(waits);
        // Barriers may wait for that.
        self.wake_all();
    }
}

/// How a wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The request is answered.
    Done,
    /// The request fails, and there is no client to be told.
    GivenUp,
    /// A successor goes on waiting.
    Left,
}

/// The time of the next try.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    /// No request waits, or one is being tried.
    #[default]
    Never,
    AfterPause,
    Now,
}

/// The requests of one path that wait. Dropping it leaves them to a successor.
pub(super) struct Space {
    device: Arc<Device>,
    page: Page,
    waiting: VecDeque<Ticket>,
    /// The entry of the request that is being tried.
    tried: Option<usize>,
    next: Rc<Cell<Next>>,
    pause: Duration,
    /// Number of requests that were counted as waiting and have no answer.
    counted: usize,
    /// Whether no more requests may wait.
    given_up: bool,
    /// Whether a barrier waits: requests after it have to be done after it.
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

    /// Number of requests that wait, and of which nothing is under way.
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

    /// Counts a waiting request that is about to be answered.
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
    /// Says that the client keeps the data of a request until it is answered. Then requests wait
    /// without a buffer, which others may need.
    pub fn client_keeps_data(&mut self) {
        self.refetches = true;
    }

    /// Whether a request with this error is to wait for space.
    pub(super) fn may_wait(&self, e: &io::Error) -> bool {
        let device = self.member.device();
        let waits = device.full.policy() == OnFull::Wait && !self.space.given_up;
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
        // It goes behind the others, since it may be larger than they are.
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
            // A failed sleep ends at once.
            let _ = io.sleep(pause).await;
            next.set(Next::Now);
        });
    }

    /// Tries the next waiting request again, if it is time. Call it once a turn.
    pub fn retry(&mut self) -> Option<Admitted> {
        let is_time = self.space.next.get() == Next::Now && !self.shared.stopping();
        if !is_time || self.alone.is_running() || self.medium.is_resting() {
            return None;
        }
        if !self.member.go_on() {
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
        if self.member.device().flush_has_failed() {
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

    /// Computes the place of the request's data again, since the disk may be another one now.
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

    /// Fails all waiting requests, and lets no more wait: there is no client that could be answered
    /// later.
    pub fn give_up_waiting(&mut self) {
        self.space.given_up = true;
        self.space.barrier = false;
        while let Some(ticket) = self.space.waiting.pop_front() {
            self.flights.get(&ticket).no_space = true;
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Number of requests that nothing is under way of before there is space: those that wait for
    /// it, and those that may have to come after them.
    pub(super) fn behind_space(&self) -> usize {
        let after = match self.alone.waiting() {
            0 => 0,
            _ if self.member.device().waits_for_space() => self.alone.waiting(),
            _ => 0,
        };
        self.space.waiting() + after
    }

    /// Whether the next request that has to be alone must wait until no request waits for space. A
    /// barrier comes after all requests before it (blkif.md 2, rule 9).
    pub(super) fn is_alone_behind_space(&self) -> bool {
        let Some(ticket) = self.alone.first() else { return false };
        let flight = self.flights.see(ticket);
        // A barrier that is tried again was one of the waiting requests.
        let waits = flight.work.action == Action::Barrier && !flight.waits && !self.space.given_up;
        self.space.barrier || (waits && self.member.device().waits_for_space())
    }

    /// Whether requests of this path wait for space.
    pub fn waits_for_space(&self) -> bool {
        self.space.counted > 0
    }
}

#[cfg(test)]
mod tests {
    use ferrite_disk::Disk;
    use ferrite_host::clock::SystemClock;

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
        // This holds also for a path that was parked meanwhile.
        first.member.rest();
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
