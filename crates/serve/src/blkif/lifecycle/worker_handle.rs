//! The follower's access to a worker: direct calls or a socket.

use std::os::fd::BorrowedFd;

use super::messages::{Failure, Order, Reply, Report};

/// Access to a worker.
pub(super) trait WorkerHandle {
    /// Has the worker carry out an order, and returns its reply.
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure>;

    /// A descriptor that is readable when there are reports.
    fn reports_fd(&self) -> BorrowedFd<'_>;

    /// Makes [`reports_fd`](Self::reports_fd) unreadable, before reports are read.
    fn clear_reports(&mut self) -> Result<(), Failure>;

    /// The next report, if there is one.
    fn report(&mut self) -> Option<Report>;

    /// Whether there are reports or events that make no descriptor readable any more.
    fn has_pending_events(&self) -> bool;

    /// A descriptor that is readable when the medium may have grown, after [`Order::CheckSize`].
    /// `None`: growth makes `reports_fd` readable.
    fn growth_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Whether the worker is another process, which goes on without a follower.
    fn is_separate_process(&self) -> bool;
}
