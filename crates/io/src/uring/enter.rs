//! Entering the kernel: to submit, to wait, and where it is short of memory.

use std::io;
use std::time::Duration;

use io_uring::EnterFlags;
use io_uring::types::SubmitArgs;

use super::{MAX_TIME_S, Uring, errno_of, timespec};
use crate::engine::Engine;
use ferrite_host::clock::{Clock, SystemClock};

/// How long to leave a kernel alone that is short of memory, in nanoseconds.
const SHORTAGE_NS: u64 = 1_000_000;

impl Uring {
    /// Binds the ring to this thread, once.
    fn enable(&mut self) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        Ok(())
    }

    /// See [`Engine::submit`].
    pub(super) fn submit_all(&mut self) -> io::Result<()> {
        self.enable()?;
        loop {
            self.unspill();
            // Due: completions that the kernel works off, or moves to the queue that was full,
            // only when it is entered.
            let (queued, due) = {
                let sq = self.ring.submission();
                (sq.len(), sq.cq_overflow() || sq.taskrun())
            };
            let due = due || (self.polled && self.pending > 0);
            if queued == 0 && !due {
                return Ok(());
            }
            let can_take = self.enter(0, None)?;
            let left = self.ring.submission().len();
            // Short of memory, and nothing to free some: the remaining operations wait for the next call.
            if !can_take && left == queued && !self.make_room() {
                return Ok(());
            }
            if left == 0 && self.spill.is_empty() {
                return Ok(());
            }
        }
    }

    /// See [`Engine::wait`].
    pub(super) fn wait_for(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.enable()?;
        let idle = self.in_flight() == 0 && timeout.is_none();
        if idle || timeout == Some(Duration::ZERO) || !self.backlog.is_empty() {
            return self.submit_all();
        }
        if self.has_completions() {
            return self.submit_all();
        }
        let max_ns = MAX_TIME_S * 1_000_000_000;
        let deadline = timeout.map(|t| {
            let ns = u64::try_from(t.as_nanos()).unwrap_or(max_ns).min(max_ns);
            SystemClock.now_ns().saturating_add(ns)
        });
        self.wait_until(deadline)
    }

    /// Enters the kernel: submits what is queued and waits for `want` completions at most
    /// `timeout`. Returns whether the kernel can take more now (false: it is short of memory).
    fn enter(&mut self, want: usize, timeout: Option<Duration>) -> io::Result<bool> {
        let entered = match timeout {
            Some(t) => {
                let time = timespec(t);
                self.ring.submitter().submit_with_args(want, &SubmitArgs::new().timespec(&time))
            }
            None if want > 0 => self.ring.submitter().submit_and_wait(want),
            None => self.submit_and_reap(),
        };
        match entered.map_err(|e| (errno_of(&e), e)) {
            Ok(_) | Err((libc::ETIME | libc::EINTR, _)) => Ok(true),
            Err((libc::EAGAIN | libc::EBUSY, _)) => Ok(false),
            Err((_, e)) => Err(e),
        }
    }

    /// Submits, and takes what is done by then: without the flag the completions of what the kernel does
    /// at once would take another call.
    fn submit_and_reap(&mut self) -> io::Result<usize> {
        let queued = self.ring.submission().len() as u32;
        // SAFETY: no argument; the entries are whole, as for any other submission.
        unsafe { self.ring.submitter().enter::<()>(queued, 0, EnterFlags::GETEVENTS.bits(), None) }
    }

    /// Lets the kernel finish something, without giving it more: at most [`SHORTAGE_NS`].
    fn relieve(&mut self) -> io::Result<()> {
        let time = timespec(Duration::from_nanos(SHORTAGE_NS));
        let args = SubmitArgs::new().timespec(&time);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        // SAFETY: the argument is what EXT_ARG says it is, and outlives the call.
        match unsafe { self.ring.submitter().enter(0, 1, flags.bits(), Some(&args)) } {
            Ok(_) => Ok(()),
            Err(e) => match errno_of(&e) {
                libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// Waits until there is a completion or `deadline_ns` of the monotonic clock is over.
    pub(super) fn wait_until(&mut self, deadline_ns: Option<u64>) -> io::Result<()> {
        loop {
            self.unspill();
            let left_ns = deadline_ns.map(|d| d.saturating_sub(SystemClock.now_ns()));
            let can_take = self.enter(1, left_ns.map(Duration::from_nanos))?;
            if self.has_completions() || !self.backlog.is_empty() {
                return Ok(());
            }
            if !can_take {
                self.relieve()?;
            }
            // A signal ends the kernel's wait as well, so only the clock tells.
            if deadline_ns.is_some_and(|d| SystemClock.now_ns() >= d) {
                return Ok(());
            }
        }
    }
}
