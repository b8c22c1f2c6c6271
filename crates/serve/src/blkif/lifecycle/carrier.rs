//! What brings orders to a worker, and what it has to say back: a call or a socket.

use std::os::fd::BorrowedFd;

use super::messages::{Failure, Order, Reply, Report};

/// The way to a worker.
pub(super) trait Carrier {
    /// Has it done.
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure>;

    /// Readable when there are reports.
    fn reports_fd(&self) -> BorrowedFd<'_>;

    /// Makes [`reports_fd`](Self::reports_fd) unreadable, before reports are asked for.
    fn clear_reports(&mut self) -> Result<(), Failure>;

    /// The next report, if there is one.
    fn report(&mut self) -> Option<Report>;

    /// There is something to be heard that makes no descriptor readable any more.
    fn has_news(&self) -> bool;

    /// Readable when the medium may have grown, once [`Order::CheckSize`] was carried out. `None`:
    /// that is told like a report.
    fn growth_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The worker is another process, and serves on when nobody follows.
    fn outlives_us(&self) -> bool;
}
