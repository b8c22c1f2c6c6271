//! A lock for tasks of several threads: it may be held across waiting.
//!
//! Each thread has a reactor of its own, and what comes from another thread has to come through a
//! descriptor. So a task that finds the lock taken waits for an eventfd of its own. A task that lets
//! go hands the lock to the first waiter. Contention is rare where this is used (commits of
//! metadata), so a descriptor for each wait does no harm.
//!
//! A host that is short of memory or descriptors makes the wait busy, and no more: a failure here would
//! fail a flush, and a guest would be told that its data may be lost (threats.md T6).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::reactor::Io;

/// How often one that cannot be woken looks whether the lock is its own.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// One that waits.
#[derive(Debug)]
struct Waiter {
    /// None: there was no descriptor for it.
    wake: Option<OwnedFd>,
    /// It has been handed the lock, and may not know yet.
    owns: Mutex<bool>,
}

#[derive(Debug, Default)]
struct State {
    held: bool,
    waiting: VecDeque<Arc<Waiter>>,
}

/// See the module text.
#[derive(Debug, Default)]
pub struct SharedLock {
    state: Mutex<State>,
}

impl SharedLock {
    /// Free.
    pub fn new() -> SharedLock {
        SharedLock::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the lock is this task's; first come, first served. It is let go when the guard
    /// is dropped, also with its task.
    ///
    /// # Errors
    /// The reactor is gone; the lock is not held then.
    pub async fn lock(&self, io: &Io) -> io::Result<Held<'_>> {
        let waiter = {
            let mut state = self.state();
            if !state.held {
                state.held = true;
                return Ok(Held(self));
            }
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok();
            let waiter = Arc::new(Waiter { wake, owns: Mutex::new(false) });
            state.waiting.push_back(waiter.clone());
            waiter
        };
        let mut waiting = Waiting { lock: self, waiter, accepted: false };
        while !waiting.owns() {
            let woken = match &waiting.waiter.wake {
                Some(wake) => io.readable(wake.as_raw_fd()).await,
                None => io.sleep(LOOK_AGAIN).await,
            };
            match woken {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Err(e),
                Err(_) => io.yield_to_others().await,
            }
        }
        waiting.accepted = true;
        Ok(Held(self))
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<Held<'_>> {
        let mut state = self.state();
        (!std::mem::replace(&mut state.held, true)).then(|| Held(self))
    }

    fn unlock(&self) {
        let mut state = self.state();
        match state.waiting.pop_front() {
            None => state.held = false,
            Some(next) => {
                *next.owns.lock().unwrap_or_else(PoisonError::into_inner) = true;
                // It can fail only if the counter is full, and then it wakes already.
                let wake = |wake| rustix::io::write(wake, &1u64.to_ne_bytes());
                let _ = next.wake.as_ref().map(wake);
            }
        }
    }
}

/// A place in the queue. Dropped before its turn it is given up; after it, the lock is passed on.
struct Waiting<'a> {
    lock: &'a SharedLock,
    waiter: Arc<Waiter>,
    /// A guard stands for the lock now.
    accepted: bool,
}

impl Waiting<'_> {
    fn owns(&self) -> bool {
        *self.waiter.owns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.accepted {
            return;
        }
        let mut state = self.lock.state();
        let before = state.waiting.len();
        state.waiting.retain(|w| !Arc::ptr_eq(w, &self.waiter));
        let was_waiting = state.waiting.len() < before;
        drop(state);
        if !was_waiting {
            self.lock.unlock();
        }
    }
}

/// The lock is held until this is dropped.
#[must_use = "the lock is let go at once"]
pub struct Held<'a>(&'a SharedLock);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.unlock();
    }
}
