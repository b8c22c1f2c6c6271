//! What a wake-up costs here.

use std::sync::{Arc, OnceLock};

use ferrite_io::clock::{Clock, SystemClock};
use rustix::event::{PollFd, PollFlags, poll};

use crate::connection::Waker;

/// Round trips that are measured.
const ROUNDS: usize = 21;
/// If it cannot be measured, in nanoseconds.
const GUESS_NS: u64 = 20_000;

/// From one thread's signal to another's waking up, in nanoseconds: the median of a few trips
/// between two threads, measured once in the life of the process. On an idle machine this is
/// mostly the time that a processor takes to come out of its sleep.
pub fn wake_up_ns() -> u64 {
    static MEASURED: OnceLock<u64> = OnceLock::new();
    *MEASURED.get_or_init(|| measure().unwrap_or(GUESS_NS))
}

fn measure() -> Option<u64> {
    let (there, back) = (Arc::new(Waker::new().ok()?), Arc::new(Waker::new().ok()?));
    let (hears, answers) = (there.clone(), back.clone());
    let echo = std::thread::Builder::new().name("wake-up".to_owned()).spawn(move || {
        for _ in 0..ROUNDS {
            wait(&hears);
            answers.wake();
        }
    });
    let echo = echo.ok()?;
    let mut trips_ns = [0; ROUNDS];
    for trip_ns in &mut trips_ns {
        let from_ns = SystemClock.now_ns();
        there.wake();
        wait(&back);
        *trip_ns = SystemClock.now_ns() - from_ns;
    }
    echo.join().ok()?;
    trips_ns.sort_unstable();
    Some(trips_ns[ROUNDS / 2] / 2)
}

/// Sleeps until the other has called.
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
