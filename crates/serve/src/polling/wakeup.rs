//! The cost of a wake-up on this machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ferrite_host::clock::{Clock, SystemClock};
use rustix::event::{PollFd, PollFlags, poll};

use crate::waker::Waker;

/// Most round trips of the measurement.
const ROUNDS: usize = 21;
/// The longest measurement, in nanoseconds. On a busy machine each round trip can take many times
/// as long.
const MEASURE_NS: u64 = 3_000_000;
/// The assumed cost if it cannot be measured, in nanoseconds.
const GUESS_NS: u64 = 20_000;

/// The time from one thread's signal to another's waking up, in nanoseconds. It is the median of a
/// few trips between two threads, measured once in the life of the process. On an idle machine it
/// is mostly the time that a processor takes to come out of its sleep.
pub fn wake_up_ns() -> u64 {
    static MEASURED: OnceLock<u64> = OnceLock::new();
    *MEASURED.get_or_init(|| measure().unwrap_or(GUESS_NS))
}

fn measure() -> Option<u64> {
    let (there, back) = (Arc::new(Waker::new().ok()?), Arc::new(Waker::new().ok()?));
    let over = Arc::new(AtomicBool::new(false));
    let (hears, answers, ends) = (there.clone(), back.clone(), over.clone());
    let echo = std::thread::Builder::new().name("wake-up".to_owned()).spawn(move || {
        wait(&hears);
        while !ends.load(Ordering::Acquire) {
            answers.wake();
            wait(&hears);
        }
    });
    let echo = echo.ok()?;
    let start_ns = SystemClock.now_ns();
    let mut trips_ns = Vec::with_capacity(ROUNDS);
    while trips_ns.len() < ROUNDS && SystemClock.now_ns() < start_ns + MEASURE_NS {
        let from_ns = SystemClock.now_ns();
        there.wake();
        wait(&back);
        trips_ns.push(SystemClock.now_ns() - from_ns);
    }
    over.store(true, Ordering::Release);
    there.wake();
    echo.join().ok()?;
    trips_ns.sort_unstable();
    trips_ns.get(trips_ns.len() / 2).map(|trip_ns| trip_ns / 2)
}

/// Sleeps until the other thread has signalled.
fn wait(waker: &Waker) {
    let mut fds = [PollFd::from_borrowed_fd(waker.fd(), PollFlags::IN)];
    while !matches!(poll(&mut fds, None), Ok(1..)) {}
    waker.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_up_takes_some_time() {
        assert!(wake_up_ns() > 0);
        assert_eq!(wake_up_ns(), wake_up_ns());
    }
}
