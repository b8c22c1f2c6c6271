//! Time and randomness. Everything above asks these traits, so that a simulated world can give
//! both from one seed.

use std::sync::Arc;
use std::time::Duration;

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Nanoseconds since an arbitrary start; never goes back.
    fn now_ns(&self) -> u64;
    /// Sleeps the calling thread.
    fn sleep(&self, how_long: Duration);
    /// Processor time that all threads of this process have used, in nanoseconds. A simulated world
    /// takes none.
    fn process_cpu_ns(&self) -> u64 {
        0
    }
}

/// A source of random numbers; not for secrets.
pub trait Random: Send {
    /// 64 uniformly distributed bits.
    fn next_u64(&mut self) -> u64;

    /// A number below `bound` (which must not be 0), with a bias too small to matter here.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

/// `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// The clock as the shared object that constructors take.
    pub fn shared() -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }
}

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        read(libc::CLOCK_MONOTONIC)
    }

    fn sleep(&self, how_long: Duration) {
        std::thread::sleep(how_long);
    }

    fn process_cpu_ns(&self) -> u64 {
        read(libc::CLOCK_PROCESS_CPUTIME_ID)
    }
}

/// By the C library: its way to the clock is the one that valgrind knows.
fn read(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a timespec of ours to be filled in.
    let done = unsafe { libc::clock_gettime(clock, &mut t) };
    debug_assert_eq!(done, 0, "every Linux has these clocks");
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The time of day in seconds since 1970, for timestamps that people read; it may jump.
pub fn unix_time_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs())
}

/// SplitMix64 (Steele, Lea, Flood 2014): one word of state, any seed is good.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The same seed gives the same sequence.
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// Seeded from the kernel's random numbers.
    pub fn from_system() -> Self {
        let mut seed = [0u8; 8];
        match rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty()) {
            Ok(8) => SplitMix64(u64::from_ne_bytes(seed)),
            _ => SplitMix64(SystemClock.now_ns()),
        }
    }
}

/// Bytes that cannot be foretold: for keys.
///
/// # Errors
/// The kernel has none.
pub fn secret<const N: usize>() -> std::io::Result<[u8; N]> {
    let (mut bytes, mut got) = ([0; N], 0);
    while got < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        got += rustix::rand::getrandom(&mut bytes[got..], flags)?;
    }
    Ok(bytes)
}

impl Random for SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_secrets_are_the_same() {
        let two: [[u8; 32]; 2] = [secret().unwrap(), secret().unwrap()];
        assert_ne!(two[0], two[1]);
        assert!(two.iter().all(|secret| secret[16..] != [0; 16]));
    }

    #[test]
    fn work_takes_processor_time() {
        let before_ns = SystemClock.process_cpu_ns();
        while SystemClock.process_cpu_ns() < before_ns + 1_000_000 {}
    }

    #[test]
    fn splitmix_follows_the_published_sequence() {
        let mut r = SplitMix64::new(1234567);
        let first: Vec<u64> = (0..3).map(|_| r.next_u64()).collect();
        assert_eq!(first, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn below_stays_below_its_bound() {
        let mut r = SplitMix64::new(7);
        assert!((0..1000).all(|_| r.below(3) < 3));
    }
}
