//! How queues go about their work; nothing here changes what a guest gets.

use crate::polling::PollWindow;

/// Settings of a disk's queues. The defaults are what docs/performance.md shows to be best.
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
