//! Files that a keeper has open together with this process (docs/internals/processes.md 5).

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::names;

/// A file that is open for writing, here and in a keeper: if this process dies, the successor continues with it. When
/// this is dropped, the keeper closes the file, unless it was [kept](Hold::keep).
#[derive(Debug)]
pub(super) struct Hold {
    file: Arc<OwnedFd>,
    ends: AtomicBool,
}

impl Hold {
    pub(super) fn of(file: Arc<OwnedFd>) -> Hold {
        Hold { file, ends: AtomicBool::new(true) }
    }

    /// Keeps the file in the keeper until [`release`](Hold::release).
    pub(super) fn keep(&self) {
        self.ends.store(false, Ordering::Relaxed);
    }

    /// Has the keeper close the file.
    pub(super) fn release(&self) {
        names::release(self.file.as_fd());
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if *self.ends.get_mut() {
            self.release();
        }
    }
}
