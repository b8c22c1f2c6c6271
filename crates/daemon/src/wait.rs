//! Waiting for descriptors, and pauses between tries.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Waits until one of the descriptors is readable, or for `timeout`. Returns which are readable. A
/// descriptor that cannot be polled counts as readable: reading it returns the error.
pub(crate) fn wait_for<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> [bool; N] {
    let timeout = timeout
        .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => fds.map(|fd| !fd.revents().is_empty()),
        Err(rustix::io::Errno::INTR) => [false; N],
        Err(_) => [true; N],
    }
}

/// The pauses between tries. Each is twice as long as the one before, up to `longest`.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, longest, next: first }
    }

    /// The pause after a failed try. `has_worked` begins anew: a failure after a success has
    /// another cause.
    pub(crate) fn after(&mut self, has_worked: bool) -> Duration {
        if has_worked {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew_after_a_try_that_worked() {
        let (first, longest) = (Duration::from_millis(250), Duration::from_secs(5));
        let mut backoff = Backoff::new(first, longest);
        let grown: Vec<_> = (0..8).map(|_| backoff.after(false)).collect();
        assert_eq!(grown[..3], [first, first * 2, first * 4]);
        assert_eq!(grown[5..], [longest; 3]);
        assert_eq!([true, false].map(|worked| backoff.after(worked)), [first, first * 2]);
    }
}
