//! The one place where a disk's control thread waits for events.

use std::time::Duration;

use ferrite_xen::store::StoreError;

use super::attachment::DIRECTORY;
use super::{Backend, FRONTEND, ServeError};
use crate::waker::wait_for;

/// An event. It says when to read all states, and never what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The disk's directories in xenstore were written.
    Store,
    /// A queue has a report, or the disk was exchanged.
    Queue,
    /// The medium may have grown.
    Growth,
    /// It is time to read again.
    Time,
    /// `stop` was woken.
    Stop,
}

/// The events to wait for, besides reports and `stop`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// Any event, for at most this time.
    Anything(Option<Duration>),
    /// Events of the toolstack, for at most this time: there were too many requests to xenstore.
    Debt(Duration),
    /// No event, for this time or for ever: xenstore has failed or is gone.
    Silence(Option<Duration>),
}

impl Wait {
    /// Shortens the wait to `limit`.
    pub(super) fn at_most(&mut self, limit: Duration) {
        if let Wait::Anything(timeout) = self {
            *timeout = Some(timeout.map_or(limit, |t| t.min(limit)));
        }
    }
}

impl Backend<'_> {
    /// Waits for an event. A guest that writes without end cannot hide `stop`.
    pub(super) fn select(&mut self) -> Result<Event, ServeError> {
        let (follows_store, timeout) = match self.wait {
            Wait::Anything(timeout) => (true, timeout),
            Wait::Debt(debt) => (true, Some(debt)),
            Wait::Silence(pause) => (false, pause),
        };
        let changed = follows_store && {
            self.drain_watches()?;
            match self.wait {
                Wait::Debt(_) => self.directory_changed,
                _ => self.frontend_changed || self.directory_changed,
            }
        };
        let has_pending_events = self.worker.has_pending_events();
        let timeout = if changed || has_pending_events { Some(Duration::ZERO) } else { timeout };
        let (reports, stop) = (self.worker.reports_fd(), self.stop.fd());
        // A descriptor that is not waited for is replaced by that of `stop`.
        let store = if follows_store { self.store.fd() } else { stop };
        let listens = self.listens && matches!(self.wait, Wait::Anything(_));
        let growth = self.worker.growth_fd().filter(|_| listens).unwrap_or(stop);
        let [store, queue, growth, stop] = wait_for([store, reports, growth, stop], timeout)
            .map_err(|e| ServeError::host("wait for events", e))?;
        if follows_store {
            self.drain_watches()?;
        }
        Ok(match () {
            () if stop => Event::Stop,
            () if queue || has_pending_events => Event::Queue,
            () if growth => Event::Growth,
            () if store || changed => Event::Store,
            () => Event::Time,
        })
    }

    /// Reads all events of the watches. Returns whether there were any.
    pub(super) fn drain_watches(&mut self) -> Result<bool, StoreError> {
        let mut any = false;
        while let Some(event) = self.store.poll_event()? {
            any = true;
            self.frontend_changed |= event.token == FRONTEND;
            self.directory_changed |= event.token == DIRECTORY;
        }
        Ok(any)
    }
}
