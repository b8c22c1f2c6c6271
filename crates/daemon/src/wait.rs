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
