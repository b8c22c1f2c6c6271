//! Histories of queues on a real hypervisor, in the lab's emulator, played to what decides.
//!
//! Each is of one queue: how long it had nothing to do, how long it worked then, and what Xen said of the host's processors.
//! They were taken with `ferrite trace record` while `--poll-us auto` served a guest, so pauses and polls of that run are
//! in the times. A decision now does not change them: each request comes at its recorded time.

use super::{HostLoad, MAX_AUTO_NS, Poll, PollWindow, Poller};

const WAKE_UP_NS: u64 = 20_000;

/// The host has two processors, one for the dom0 and one for the guest. The guest reads 4 KiB, one at a time.
const TWO_BUSY: &str = include_str!("histories/two-processors-depth-1.txt");
/// The same, with 3 ms of rest after each read.
const TWO_RESTING: &str = include_str!("histories/two-processors-resting.txt");
/// As the first, on a host with one processor.
const ONE: &str = include_str!("histories/one-processor-depth-1.txt");

/// The parts of the time in which the queue had nothing to do, in nanoseconds.
#[derive(Debug, Default)]
struct Played {
    /// Polled, with and without success.
    hits_ns: u64,
    misses_ns: u64,
    slept_ns: u64,
    /// All of it that was not longer than the longest window.
    soon_ns: u64,
    /// Things that came.
    count: u32,
}

impl Played {
    fn polled_milli(&self) -> u64 {
        let polled_ns = self.hits_ns + self.misses_ns;
        polled_ns * 1000 / (polled_ns + self.slept_ns)
    }
}

/// Plays a history to the only processor of its domain.
fn play(history: &str) -> Played {
    let mut p = Poller::new(PollWindow::Auto, WAKE_UP_NS, 1, true);
    let (mut now_ns, mut host, mut played) = (1_000_000_000, None, Played::default());
    for line in history.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        if words[0] == "host" {
            host = Some(HostLoad { cpus: number(1) as u32, idle_milli: number(2) as u32 });
            continue;
        }
        let (idle_ns, work_ns) = (number(0), number(1));
        if p.is_host_check_due(now_ns) {
            p.observe_host(now_ns, host);
        }
        if p.is_wait_check_due(now_ns) {
            p.waited(now_ns, 0);
        }
        let window_ns = p.window_ns(now_ns);
        let poll =
            |took_ns, hit| Poll { from_ns: now_ns, to_ns: now_ns + took_ns, stolen_ns: 0, hit };
        if idle_ns <= MAX_AUTO_NS {
            played.soon_ns += idle_ns;
        }
        if window_ns >= idle_ns {
            p.polled(poll(idle_ns, true));
            played.hits_ns += idle_ns;
        } else {
            if window_ns > 0 {
                p.polled(poll(window_ns, false));
                played.misses_ns += window_ns;
            }
            p.slept(idle_ns);
            played.slept_ns += idle_ns - window_ns;
        }
        played.count += 1;
        now_ns += idle_ns + work_ns;
    }
    assert!(played.count > 200, "a short history: {played:?}");
    played
}

#[test]
fn recorded_reads_one_at_a_time_are_polled_for_where_the_host_has_an_idle_processor() {
    let played = play(TWO_BUSY);
    assert!(played.hits_ns * 4 > played.soon_ns * 3, "{played:?}");
    assert!(played.hits_ns > 4 * played.misses_ns, "{played:?}");
}

#[test]
fn recorded_reads_that_come_seldom_are_slept_for_though_a_processor_is_idle() {
    let played = play(TWO_RESTING);
    assert!(played.polled_milli() < 5, "{played:?}");
}

#[test]
fn the_same_reads_are_slept_for_on_a_host_of_one_processor() {
    assert_eq!(play(ONE).polled_milli(), 0);
}
