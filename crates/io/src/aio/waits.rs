//! Operations that wait for a descriptor or a time: the engine's own business. The kernel hears of
//! them only when the engine sleeps.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::arena::{Arena, Span};
use crate::engine::{Completion, MAX_VECTORED, Token, Transfer};
use crate::socket;
use ferrite_host::clock::{Clock, SystemClock};

/// A transfer of a socket, made as soon as that can be done.
pub(super) struct Stream {
    transfer: Transfer,
    socket: Arc<OwnedFd>,
    bufs: [Span; MAX_VECTORED],
    count: usize,
}

impl Stream {
    /// One of at least one and at most [`MAX_VECTORED`] spans, which are inside the engine's arena.
    pub(super) fn new(transfer: Transfer, socket: Arc<OwnedFd>, spans: &[Span]) -> Stream {
        let mut bufs = [spans[0]; MAX_VECTORED];
        bufs[..spans.len()].copy_from_slice(spans);
        Stream { transfer, socket, bufs, count: spans.len() }
    }

    /// Makes it, unless the socket is not ready: its result as from the kernel.
    fn attempt(&self, arena: &Arena) -> Option<i32> {
        let bufs = &self.bufs[..self.count];
        match socket::transfer(self.transfer, self.socket.as_fd(), arena, bufs) {
            Ok(bytes) => Some(i32::try_from(bytes).unwrap_or(i32::MAX)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) => Some(-e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

/// An operation that waits for a descriptor.
struct Waiting {
    fd: RawFd,
    events: i16,
    token: Token,
    /// The transfer that is made then.
    stream: Option<Stream>,
}

impl Waiting {
    /// The result, after the descriptor was seen with these events; `None`: it waits on.
    fn ended(&self, seen: i16, arena: &Arena) -> Option<i32> {
        match &self.stream {
            _ if seen == 0 => None,
            _ if seen & libc::POLLNVAL != 0 => Some(-libc::EBADF),
            Some(stream) => stream.attempt(arena),
            None => Some(0),
        }
    }
}

/// The pending waits of one engine.
#[derive(Default)]
pub(super) struct Waits {
    descriptors: Vec<Waiting>,
    /// The last of `descriptors`, so many, are streams that were not tried yet.
    fresh: usize,
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
        self.descriptors.len() + self.timers.len()
    }

    pub(super) fn has_descriptors(&self) -> bool {
        !self.descriptors.is_empty()
    }

    /// Adds a wait for one of `events` of poll(2).
    pub(super) fn add_descriptor(&mut self, fd: RawFd, events: i16, token: Token) {
        // Fresh waits stay at the end of the list.
        let at = self.descriptors.len() - self.fresh;
        self.descriptors.insert(at, Waiting { fd, events, token, stream: None });
    }

    pub(super) fn add_stream(&mut self, stream: Stream, token: Token) {
        let events = if stream.transfer == Transfer::Read { libc::POLLIN } else { libc::POLLOUT };
        let (fd, stream) = (stream.socket.as_raw_fd(), Some(stream));
        self.descriptors.push(Waiting { fd, events, token, stream });
        self.fresh += 1;
    }

    /// Makes the new transfers of sockets that are ready: mostly that saves asking.
    #[inline]
    pub(super) fn attempt(&mut self, arena: &Arena, out: &mut Vec<Completion>) {
        if self.fresh > 0 {
            self.attempt_fresh(arena, out);
        }
    }

    fn attempt_fresh(&mut self, arena: &Arena, out: &mut Vec<Completion>) {
        let mut seen = self.descriptors.len() - std::mem::take(&mut self.fresh);
        while let Some(waiting) = self.descriptors.get(seen) {
            match waiting.ended(waiting.events, arena) {
                Some(raw) => {
                    out.push(Completion { token: waiting.token, raw });
                    self.descriptors.remove(seen);
                }
                None => seen += 1,
            }
        }
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
        let fresh = self.descriptors.len() - self.fresh;
        self.fresh -= self.descriptors[fresh..].iter().filter(|w| w.token == token).count();
        self.descriptors.retain(|w| w.token != token);
        self.timers.retain(|Reverse((_, t))| *t != token);
        for _ in self.len()..before {
            out.push(Completion { token, raw: -libc::ECANCELED });
        }
    }

    /// Waits at most `limit_ns` (`None`: for ever) until one of `others` has something to read, or a
    /// pending descriptor what is waited for, and ends the waits for those that have. A signal ends it
    /// early.
    pub(super) fn poll(
        &mut self,
        arena: &Arena,
        others: &[RawFd],
        limit_ns: Option<u64>,
        out: &mut Vec<Completion>,
    ) -> Seen {
        self.fds.clear();
        let others_read = others.iter().map(|fd| (*fd, libc::POLLIN));
        let all = others_read.chain(self.descriptors.iter().map(|w| (w.fd, w.events)));
        self.fds.extend(all.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 }));
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
        self.descriptors.retain(|waiting| {
            let raw = events.next().and_then(|seen| waiting.ended(seen, arena));
            out.extend(raw.map(|raw| Completion { token: waiting.token, raw }));
            raw.is_none()
        });
        Seen { first: self.fds.first().is_some_and(|fd| fd.revents != 0) }
    }
}
