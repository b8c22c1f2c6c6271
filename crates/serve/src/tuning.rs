//! Settings of the queues' work. They do not change what a guest reads or writes.

use crate::polling::PollWindow;

/// Settings of a disk's queues. docs/performance.md shows that the defaults are best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// How long to poll for work before going to sleep.
    pub poll: PollWindow,
    /// Whether neighbouring requests of a sweep share an operation.
    pub merge: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { poll: PollWindow::Auto, merge: true }
    }
}
