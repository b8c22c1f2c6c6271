//! Operations that wait for a descriptor or a time: the engine's own business. The kernel hears of
//! them only when the engine sleeps.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::RawFd;

use crate::engine::{Completion, Token};
use ferrite_host::clock::{Clock, SystemClock};

/// The pending waits of one engine.
#[derive(Default)]
pub(super) struct Waits {
    readable: Vec<(RawFd, Token)>,
    /// By when they are due, in nanoseconds of the monotonic clock.
    timers: BinaryHeap<Reverse<(u64, Token)>>,
    /// Reused by each poll.
    fds: Vec<libc::pollfd>,
}

/// The descriptors, except those for [`Waits`] itself, that a poll has found ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The first of them is readable.
    pub(super) first: bool,
}

impl Waits {
    pub(super) fn len(&self) -> usize {
        self.readable.len() + self.timers.len()
    }

    pub(super) fn has_readable(&self) -> bool {
        !self.readable.is_empty()
    }

    pub(super) fn add_readable(&mut self, fd: RawFd, token: Token) {
        self.readable.push((fd, token));
    }

    pub(super) fn add_timer(&mut self, due_ns: u64, token: Token) {
        self.timers.push(Reverse((due_ns, token)));
    }

    /// When the next timer is due.
    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.timers.peek().map(|Reverse((due_ns, _))| *due_ns)
    }

    /// Ends the timers that are due.
    pub(super) fn expire(&mut self, out: &mut Vec<Completion>) {
        if self.timers.is_empty() {
            return;
        }
        let now_ns = SystemClock.now_ns();
        while let Some(Reverse((due_ns, token))) = self.timers.peek().copied() {
            if due_ns > now_ns {
                break;
            }
            self.timers.pop();
            out.push(Completion { token, raw: 0 });
        }
    }

    /// Ends all waits with this token, called off.
    pub(super) fn cancel(&mut self, token: Token, out: &mut Vec<Completion>) {
        let before = self.len();
        self.readable.retain(|(_, t)| *t != token);
        self.timers.retain(|Reverse((_, t))| *t != token);
        for _ in self.len()..before {
            out.push(Completion { token, raw: -libc::ECANCELED });
        }
    }

    /// Waits at most `limit_ns` (`None`: for ever) until one of `others` or of the pending
    /// descriptors has something to read, and ends the waits for those that have. A signal ends it
    /// early.
    pub(super) fn poll(
        &mut self,
        others: &[RawFd],
        limit_ns: Option<u64>,
        out: &mut Vec<Completion>,
    ) -> Seen {
        self.fds.clear();
        let all = others.iter().copied().chain(self.readable.iter().map(|(fd, _)| *fd));
        self.fds.extend(all.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }));
        let limit = limit_ns.map(|ns| libc::timespec {
            tv_sec: (ns / 1_000_000_000) as _,
            tv_nsec: (ns % 1_000_000_000) as libc::c_long,
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), |t| t as *const _);
        // SAFETY: the kernel reads and writes that many pollfd there, and reads the time, if any.
        let ready = unsafe {
            let (fds, n) = (self.fds.as_mut_ptr(), self.fds.len() as libc::nfds_t);
            libc::ppoll(fds, n, limit, std::ptr::null())
        };
        // Interrupted, or short of memory: nothing was seen, and the caller's loop looks again.
        if ready <= 0 {
            return Seen::default();
        }
        let mut events = self.fds[others.len()..].iter().map(|fd| fd.revents);
        self.readable.retain(|(_, token)| {
            let raw = match events.next() {
                None | Some(0) => return true,
                Some(seen) if seen & libc::POLLNVAL != 0 => -libc::EBADF,
                Some(_) => 0,
            };
            out.push(Completion { token: *token, raw });
            false
        });
        Seen { first: self.fds.first().is_some_and(|fd| fd.revents != 0) }
    }
}
