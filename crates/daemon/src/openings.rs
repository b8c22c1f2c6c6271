//! How many disks are opened at a time.
//!
//! Guests that boot together have their disks attached together. Each opening starts two processes and reads tables of an
//! image. So only some are opened at a time, and the host's processors and storage stay with the guests that run.
//!
//! Storage may hang. So an opening that takes long does not count any more: the disks behind it go on.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_serve::waker::Waker;

use crate::state::DiskId;
use crate::wait::wait_for;

/// Most openings at a time.
const MOST: usize = 8;
/// An opening that takes longer waits for its storage, and does not count.
const SLOW: Duration = Duration::from_secs(1);
/// How often one that waits looks whether its thread is woken.
const LOOK: Duration = Duration::from_millis(100);

/// The disks that are being opened.
pub(crate) struct Openings {
    most: usize,
    slow: Duration,
    /// When each began.
    open: Mutex<BTreeMap<DiskId, Instant>>,
    left: Condvar,
}

impl Default for Openings {
    fn default() -> Openings {
        Openings::new(MOST, SLOW)
    }
}

impl Openings {
    fn new(most: usize, slow: Duration) -> Openings {
        Openings { most, slow, open: Mutex::default(), left: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Instant>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this disk may be opened, or until `stop` is woken: then its thread has something else to do first,
    /// and does not count.
    pub(crate) fn enter(&self, id: DiskId, stop: &Waker) {
        let mut open = self.lock();
        loop {
            open.retain(|_, since| since.elapsed() < self.slow);
            if open.len() < self.most {
                open.insert(id, Instant::now());
                return;
            }
            let [woken] = wait_for([stop.fd()], Some(Duration::ZERO));
            if woken {
                return;
            }
            let waited = self.left.wait_timeout(open, LOOK.min(self.slow));
            open = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes that this disk is open, or that it cannot be opened.
    pub(crate) fn leave(&self, id: DiskId) {
        if self.lock().remove(&id).is_some() {
            self.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn disk(domid: u16) -> DiskId {
        DiskId { domid, devid: 51712 }
    }

    #[test]
    fn no_more_than_so_many_disks_are_opened_at_a_time() {
        let (openings, stop) = (Openings::new(3, Duration::from_secs(600)), Waker::new().unwrap());
        let (now, most, all) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for domid in 0..20 {
                let (openings, stop, now, most, all) = (&openings, &stop, &now, &most, &all);
                scope.spawn(move || {
                    openings.enter(disk(domid), stop);
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(2));
                    now.fetch_sub(1, Ordering::SeqCst);
                    all.fetch_add(1, Ordering::SeqCst);
                    openings.leave(disk(domid));
                });
            }
        });
        assert_eq!(all.into_inner(), 20);
        assert!(most.into_inner() <= 3);
    }

    #[test]
    fn storage_that_hangs_keeps_no_other_disk_from_being_opened() {
        let (openings, stop) = (Openings::new(2, Duration::from_millis(5)), Waker::new().unwrap());
        // None of these ever leaves, and all of these enter.
        (0..6).for_each(|domid| openings.enter(disk(domid), &stop));
        assert!(openings.lock().contains_key(&disk(5)));
        // Disk 0 does not count any more, so its end lets no other disk begin.
        openings.leave(disk(0));
    }

    #[test]
    fn a_thread_with_something_else_to_do_does_not_wait() {
        let (openings, stop) = (Openings::new(1, Duration::from_secs(600)), Waker::new().unwrap());
        openings.enter(disk(1), &stop);
        stop.wake();
        openings.enter(disk(2), &stop);
        assert!(!openings.lock().contains_key(&disk(2)));
    }
}
