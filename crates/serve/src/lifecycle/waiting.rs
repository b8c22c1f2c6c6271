//! What the control thread sleeps on.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use ferrite_xen::store::StoreError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::attachment::DIRECTORY;
use super::{Backend, FRONTEND, ServeError};

impl Backend<'_> {
    /// Waits for a watch, a queue, for `other` or the end of `timeout`. `true`: asked to stop.
    pub(super) fn wait(
        &mut self,
        timeout: Option<Duration>,
        other: Option<BorrowedFd<'_>>,
    ) -> Result<bool, ServeError> {
        // Even a guest that never stops to write keeps nobody from asking us to stop.
        let changed = self.drain_watches()? || self.moved;
        let timeout = if changed { Some(Duration::ZERO) } else { timeout };
        let (store, control, stop) = (self.store.fd(), self.control.fd(), self.stop.fd());
        // Without another, the stop twice.
        let [_, _, stop, _] = poll_all([store, control, stop, other.unwrap_or(stop)], timeout)?;
        self.drain_watches()?;
        Ok(stop)
    }

    pub(super) fn drain_watches(&mut self) -> Result<bool, StoreError> {
        let mut any = false;
        while let Some(event) = self.store.poll_event()? {
            any = true;
            self.moved |= event.token == FRONTEND;
            self.directory_moved |= event.token == DIRECTORY;
        }
        Ok(any)
    }
}

/// Waits for one of these, or the end of `timeout`; which are readable.
pub(super) fn poll_all<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> Result<[bool; N], ServeError> {
    let timeout = timeout
        .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(ServeError::host("wait for events", e.into())),
    }
    Ok(fds.map(|fd| fd.revents().contains(PollFlags::IN)))
}
