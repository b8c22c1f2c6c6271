//! The one place where a disk's control thread waits, and what it hears there.

use std::time::Duration;

use ferrite_xen::store::StoreError;

use super::attachment::DIRECTORY;
use super::{Backend, FRONTEND, ServeError};
use crate::waker::wait_for;

/// What has happened. It says when to look at all states, and never what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Something was written in the disk's directories in xenstore.
    Store,
    /// A queue has something to report, or the disk was exchanged.
    Queue,
    /// The medium may have grown.
    Growth,
    /// It is time to look again.
    Time,
    /// We are asked to stop.
    Stop,
}

/// What is waited for, beside queues and the stop.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// Anything, and no longer than this.
    Anything(Option<Duration>),
    /// The toolstack, and no longer than this: xenstore was asked too often.
    Debt(Duration),
    /// Nothing, for so long: xenstore has failed. For ever if it is gone.
    Silence(Option<Duration>),
}

impl Wait {
    /// No longer than this.
    pub(super) fn at_most(&mut self, limit: Duration) {
        if let Wait::Anything(timeout) = self {
            *timeout = Some(timeout.map_or(limit, |t| t.min(limit)));
        }
    }
}

impl Backend<'_> {
    /// Waits for an event. Even a guest that never stops to write keeps nobody from asking us to
    /// stop.
    pub(super) fn select(&mut self) -> Result<Event, ServeError> {
        let (follows_store, timeout) = match self.wait {
            Wait::Anything(timeout) => (true, timeout),
            Wait::Debt(debt) => (true, Some(debt)),
            Wait::Silence(pause) => (false, pause),
        };
        let changed = follows_store && {
            self.drain_watches()?;
            match self.wait {
                Wait::Debt(_) => self.directory_moved,
                _ => self.moved || self.directory_moved,
            }
        };
        let has_news = self.worker.has_news();
        let timeout = if changed || has_news { Some(Duration::ZERO) } else { timeout };
        let (reports, stop) = (self.worker.reports_fd(), self.stop.fd());
        // In place of one that is not waited for, the stop once more.
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
            () if queue || has_news => Event::Queue,
            () if growth => Event::Growth,
            () if store || changed => Event::Store,
            () => Event::Time,
        })
    }

    /// Takes what watches have to say; `true` if there was anything.
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
