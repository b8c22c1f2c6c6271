//! Makes discards give way to everything else. A file's other requests wait while a part of it is
//! punched out. So a guest that discards all the time would stop its own reads, and those of all of
//! its queues.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ferrite_io::reactor::Io;
use ferrite_io::shared_lock::{Held, SharedLock};

/// The discards of a device, of all its paths.
#[derive(Default)]
pub(super) struct Turns {
    /// Held for each part of a discard, and for the rest after it.
    turn: SharedLock,
    /// Number of running discards.
    begun: AtomicUsize,
    /// Whether other requests have begun since the last part.
    others: AtomicBool,
}

/// A running discard.
pub(super) struct Begun<'a>(&'a Turns);

impl Turns {
    pub(super) fn begin(&self) -> Begun<'_> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Begun(self)
    }

    /// Notes that another request begins.
    pub(super) fn others_begin(&self) {
        if self.begun.load(Ordering::Relaxed) > 0 && !self.others.load(Ordering::Relaxed) {
            self.others.store(true, Ordering::Relaxed);
        }
    }
}

impl Begun<'_> {
    /// Waits until no other discard of the device does a part.
    pub(super) async fn turn(&self, io: &Io) -> io::Result<Held<'_>> {
        self.0.turn.lock(io).await
    }

    /// Whether other requests have begun since the last call. Then the discard rests for as long as
    /// its part took. Requests that the part kept waiting begin in that rest, and are noticed the
    /// next time.
    pub(super) fn gives_way(&self) -> bool {
        self.0.others.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.begun.fetch_sub(1, Ordering::Relaxed);
    }
}
