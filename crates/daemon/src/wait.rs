//! Waiting for descriptors.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Waits for one of these, or the end of `timeout`; which have something to say. A descriptor that the
/// kernel cannot wait for has: whoever reads it hears why.
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

/// Pauses before further tries: each twice as long as the one before, up to the longest.
#[derive(Debug)]
pub(crate) struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    pub(crate) fn new(first: Duration, longest: Duration) -> Pauses {
        Pauses { first, longest, next: first }
    }

    /// The pause after a try that has failed. One that had worked for a while, and failed then, has
    /// another reason than those before.
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
        let mut pauses = Pauses::new(first, longest);
        let grown: Vec<_> = (0..8).map(|_| pauses.after(false)).collect();
        assert_eq!(grown[..3], [first, first * 2, first * 4]);
        assert_eq!(grown[5..], [longest; 3]);
        assert_eq!([true, false].map(|worked| pauses.after(worked)), [first, first * 2]);
    }
}
