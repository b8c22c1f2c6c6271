//! What a keeper has open with this process (docs/internals/processes.md 5).

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::names;

/// A file that is open for writing, here and with a keeper: the next process goes on with it if this one
/// dies. With this it is let go of there, unless it was said to be [kept](Hold::keep).
#[derive(Debug)]
pub(super) struct Hold {
    file: Arc<OwnedFd>,
    ends: AtomicBool,
}

impl Hold {
    pub(super) fn of(file: Arc<OwnedFd>) -> Hold {
        Hold { file, ends: AtomicBool::new(true) }
    }

    /// Only [`release`](Hold::release) ends it from now on.
    pub(super) fn keep(&self) {
        self.ends.store(false, Ordering::Relaxed);
    }

    /// The keeper lets go of it.
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
