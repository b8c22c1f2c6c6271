//! The worker looks for packets for a while, asks for events, and sleeps.

use std::os::fd::{AsFd, OwnedFd};

use ferrite_host::clock::Clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Worker;
use crate::packet::Stop;
use crate::switch::PortId;
use crate::trace::Noticed;

/// How long a channel stays as it is after an event that brought nothing: the hypervisor merges what comes meanwhile.
const QUIET_NS: u64 = 1_000_000;
/// How often held packets are looked at, for frontends that send no event with a new page.
const HELD_NS: u64 = 2_000_000;

impl Worker {
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
        let begin_ns = self.clock.now_ns();
        while self.clock.now_ns().saturating_sub(begin_ns) < ns {
            let mut queues = self.vifs.iter().flatten().flat_map(|vif| &vif.queues);
            if queues.any(|queue| queue.rings.tx_unconsumed() != Ok(0)) {
                return true;
            }
            self.look_at_consumed();
            std::hint::spin_loop();
        }
        false
    }

    /// Asks for events. `true`: something came meanwhile.
    fn is_awaited(&mut self) -> bool {
        let now_ns = self.clock.now_ns();
        let mut found = false;
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
                if !std::mem::take(&mut queue.has_worked) && queue.quiet_until_ns == 0 {
                    queue.quiet_until_ns = now_ns + QUIET_NS;
                }
                if queue.quiet_until_ns <= now_ns {
                    (queue.quiet_until_ns, queue.has_event) = (0, false);
                    if let Err(e) = queue.rings.link().rearm() {
                        tracing::debug!("cannot let events through: {e}");
                    }
                }
            }
        }
        if !self.turn.stops.is_empty() {
            self.stop_all();
            return true;
        }
        found
    }

    pub(super) fn sleep(&mut self) {
        let queues = || self.vifs.iter().flatten().flat_map(|vif| &vif.queues);
        let quiet = queues().any(|queue| queue.has_event).then_some(QUIET_NS);
        let held = queues().any(|queue| !queue.held.is_empty()).then_some(HELD_NS);
        let ns = quiet.into_iter().chain(held).min();
        let timeout = ns.map(|ns| Timespec { tv_sec: 0, tv_nsec: ns as i64 });
        let mut fds = vec![PollFd::from_borrowed_fd(self.start.wake.as_fd(), PollFlags::IN)];
        fds.extend(
            self.start.uplink.iter().map(|up| PollFd::from_borrowed_fd(up.fd(), PollFlags::IN)),
        );
        let before = fds.len();
        for queue in queues().filter(|queue| !queue.has_event) {
            fds.push(PollFd::from_borrowed_fd(queue.rings.event_fd(), PollFlags::IN));
        }
        if let Err(e) = poll(&mut fds, timeout.as_ref())
            && e != rustix::io::Errno::INTR
        {
            tracing::error!("the network cannot wait for events: {e}");
            std::thread::sleep(std::time::Duration::from_millis(1));
            return;
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let is_woken = is_ready(&fds[0]);
        let ready: Vec<bool> = fds[before..].iter().map(is_ready).collect();
        drop(fds);
        if is_woken {
            take_wake(&self.start.wake);
        }
        let queues = self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues);
        for (queue, _) in queues.filter(|q| !q.has_event).zip(ready).filter(|(_, ready)| *ready) {
            match queue.rings.link().take_event() {
                Ok(taken) => (queue.has_event, queue.has_worked) = (taken, false),
                Err(e) => tracing::debug!("cannot take an event: {e}"),
            }
        }
    }
}

/// Wakes whoever polls an eventfd.
pub(crate) fn wake(fd: &OwnedFd) {
    // A full counter is awake already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Takes the wake-ups.
pub(crate) fn take_wake(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}
