//! How many disks are opened at a time.
//!
//! Guests that boot together have their disks attached together. Each opening starts two processes and reads tables of an
//! image. So only some are opened at a time, and the host's processors and storage stay with the guests that run.
//!
//! Storage may hang. So an opening that takes long does not count any more: the disks behind it go on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_serve::waker::Waker;

use crate::state::DiskId;
use crate::wait::wait_for;

/// Most openings at a time.
const MOST: usize = 8;
/// An opening that takes longer waits for its storage, and does not count.
const SLOW: Duration = Duration::from_secs(1);

/// The disks that are being opened, and those that wait for that.
pub(crate) struct Openings {
    most: usize,
    slow: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When each opening began.
    open: BTreeMap<DiskId, Instant>,
    /// The disks that wait, the next one first. Only that one is woken: a thousand may wait.
    waiting: VecDeque<Arc<Waker>>,
}

impl State {
    fn wake_next(&self) {
        self.waiting.front().into_iter().for_each(|next| next.wake());
    }

    fn remove(&mut self, turn: &Arc<Waker>) {
        self.waiting.retain(|other| !Arc::ptr_eq(other, turn));
        self.wake_next();
    }
}

impl Default for Openings {
    fn default() -> Openings {
        Openings::new(MOST, SLOW)
    }
}

impl Openings {
    fn new(most: usize, slow: Duration) -> Openings {
        Openings { most, slow, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this disk may be opened, or until `stop` is woken: then its thread has something else to do first,
    /// and does not count.
    pub(crate) fn enter(&self, id: DiskId, stop: &Waker) {
        let turn = {
            let mut state = self.lock();
            let turn = match self.has_room(&mut state) && state.waiting.is_empty() {
                true => None,
                // A process without free descriptors opens the disk at once: it could not be woken.
                false => Waker::new().ok().map(Arc::new),
            };
            let Some(turn) = turn else {
                state.open.insert(id, Instant::now());
                return;
            };
            state.waiting.push_back(turn.clone());
            turn
        };
        loop {
            let within = self.until_slow(&turn);
            let [woken, _] = wait_for([stop.fd(), turn.fd()], within);
            turn.clear();
            let mut state = self.lock();
            if woken {
                return state.remove(&turn);
            }
            let is_next = state.waiting.front().is_some_and(|next| Arc::ptr_eq(next, &turn));
            if is_next && self.has_room(&mut state) {
                state.open.insert(id, Instant::now());
                return state.remove(&turn);
            }
        }
    }

    fn has_room(&self, state: &mut State) -> bool {
        state.open.retain(|_, since| since.elapsed() < self.slow);
        state.open.len() < self.most
    }

    /// The time until an opening does not count any more. Only the next disk has to know.
    fn until_slow(&self, turn: &Arc<Waker>) -> Option<Duration> {
        let state = self.lock();
        state.waiting.front().filter(|next| Arc::ptr_eq(next, turn))?;
        // Without one there is room, and this disk was not told of it yet.
        let oldest = state.open.values().min().map(Instant::elapsed);
        Some(oldest.map_or(Duration::ZERO, |oldest| self.slow.saturating_sub(oldest)))
    }

    /// Notes that this disk is open, or that it cannot be opened.
    pub(crate) fn leave(&self, id: DiskId) {
        let mut state = self.lock();
        if state.open.remove(&id).is_some() {
            state.wake_next();
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
        assert!(openings.lock().open.contains_key(&disk(5)));
        // Disk 0 does not count any more, so its end lets no other disk begin.
        openings.leave(disk(0));
    }

    /// How often this thread has gone to sleep.
    fn sleeps() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    }

    #[test]
    fn a_disk_that_waits_is_woken_when_it_is_its_turn_and_not_before() {
        const WAITING: u16 = 30;
        let (openings, stop) = (Openings::new(1, Duration::from_secs(600)), Waker::new().unwrap());
        openings.enter(disk(0), &stop);
        let most = std::thread::scope(|scope| {
            let enter = |domid| {
                let (openings, stop) = (&openings, &stop);
                scope.spawn(move || {
                    let before = sleeps();
                    openings.enter(disk(domid), stop);
                    let after = sleeps();
                    openings.leave(disk(domid));
                    after - before
                })
            };
            let threads: Vec<_> = (1..=WAITING).map(enter).collect();
            while openings.lock().waiting.len() < WAITING.into() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Threads that looked again and again would do so many times meanwhile.
            std::thread::sleep(Duration::from_secs(1));
            openings.leave(disk(0));
            threads.into_iter().map(|thread| thread.join().unwrap()).max()
        });
        // One for its turn, one if it becomes the next before, and some for the lock.
        assert!(most.is_some_and(|most| most <= 6), "{most:?} sleeps");
        assert!(openings.lock().open.is_empty() && openings.lock().waiting.is_empty());
    }

    #[test]
    fn a_thread_with_something_else_to_do_does_not_wait() {
        let (openings, stop) = (Openings::new(1, Duration::from_secs(600)), Waker::new().unwrap());
        openings.enter(disk(1), &stop);
        stop.wake();
        openings.enter(disk(2), &stop);
        assert!(!openings.lock().open.contains_key(&disk(2)));
        assert!(openings.lock().waiting.is_empty());
    }
}
