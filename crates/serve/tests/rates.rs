//! Limits of requests and bytes in a second, as guests and NBD clients see them. The clock stands still but for what a
//! test turns it, so that all is counted and nothing timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::Clock;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_serve::counters::Counters;
use ferrite_serve::nbd::Options;
use ferrite_serve::path::device::Device;
use ferrite_serve::path::limit::Limits;
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::nbd::{Served, command, options, request};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, wait_until};

/// A clock that the test turns.
#[derive(Default)]
struct Still(AtomicU64);

impl Clock for Still {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn sleep(&self, how_long: Duration) {
        std::thread::sleep(how_long);
    }
}

impl Still {
    fn new() -> Arc<Still> {
        Arc::new(Still(AtomicU64::new(1_000_000_000)))
    }

    fn turn(&self, ms: u64) {
        self.0.fetch_add(ms * 1_000_000, Ordering::SeqCst);
    }
}

fn rig(clock: &Arc<Still>) -> Rig {
    let clock: Arc<dyn Clock> = clock.clone();
    let tuning = Tuning { poll: PollWindow::Fixed(0), ..Tuning::default() };
    Rig::new(Plan { bytes: 4 << 20, clock, tuning, ..Plan::default() })
}

fn limits(text: &str) -> Limits {
    text.parse().unwrap()
}

/// Longer than the queues sleep for the tokens of these tests.
fn let_it_turn() {
    std::thread::sleep(Duration::from_millis(60));
}

/// Asserts that exactly so many requests were answered, and that no more are while the clock stands still.
fn answers(counters: &Counters, requests: u64) {
    wait_until("requests with tokens are answered", || counters.counts().requests >= requests);
    let_it_turn();
    assert_eq!(counters.counts().requests, requests);
}

/// Takes all replies that are there.
fn taken(front: &mut Frontend) -> usize {
    let mut taken = 0;
    for queue in &mut front.queues {
        while let Some(reply) = queue.take().unwrap() {
            assert!(reply.is_ok());
            taken += 1;
        }
    }
    taken
}

#[test]
fn all_queues_of_a_guest_share_what_a_limit_brings_and_the_rest_waits_on_their_rings() {
    let clock = Still::new();
    let mut rig = rig(&clock);
    let options = FrontOptions { queues: 2, order: 2, ..FrontOptions::default() };
    let mut front = rig.connect(&options);
    rig.device().set_limits(&limits("iops=100"));
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        for i in 0..60 {
            let pushed = match i % 2 {
                0 => queue.read(8 * i, &buffer, 0, 4096),
                _ => queue.discard(8 * i, 8, false),
            };
            pushed.unwrap();
        }
        queue.push().unwrap();
    }
    // A burst of a tenth of a second's, and the request that has none left afterwards. Both queues may take that one.
    let first = 11;
    let counters = rig.counters.clone();
    wait_until("a burst passes", || counters.counts().requests >= first);
    let_it_turn();
    let begun = counters.counts().requests;
    assert!(begun <= first + 1, "{begun}");
    let counts = counters.counts();
    assert_eq!(counts.limit_waits, 120 - begun, "each request that waits is counted once");
    for tenth in 1..=5 {
        clock.turn(100);
        let all = first + 10 * tenth;
        wait_until("a tenth of a second's requests pass", || counters.counts().requests >= all);
        let_it_turn();
        assert!(counters.counts().requests <= all + 1, "{}", counters.counts().requests);
    }
    let counts = counters.counts();
    assert!(counts.limit_waited_ns >= 400_000_000, "{counts:?}");
    assert!(counts.limit_waits <= 120 - begun, "{counts:?}");
    // Without a limit all go on at once, although the clock stands still.
    rig.device().set_limits(&Limits::default());
    wait_until("all requests are answered", || counters.counts().requests == 120);
    assert_eq!(taken(&mut front), 120);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_limit_of_bytes_counts_what_moves_and_flushes_and_the_other_direction_are_free() {
    let clock = Still::new();
    let mut rig = rig(&clock);
    let mut front = rig.connect(&FrontOptions::default());
    // A megabyte a second: a burst of 100 KiB and some, by requests of 32 KiB.
    rig.device().set_limits(&limits("bytes_write=1048576"));
    let buffer = front.space().buffer(64).unwrap();
    let queue = &mut front.queues[0];
    for i in 0..8 {
        queue.write(64 * i, &buffer, 0, 32 << 10).unwrap();
    }
    queue.push().unwrap();
    answers(&rig.counters, 4);
    clock.turn(1000);
    answers(&rig.counters, 8);
    // Neither is held back by what the writes owe.
    for i in 0..8 {
        queue.flush().unwrap();
        queue.read(64 * i, &buffer, 0, 32 << 10).unwrap();
    }
    queue.push().unwrap();
    answers(&rig.counters, 8 + 16);
    // One indirect request of 128 KiB is more than the burst: it passes, and the next one waits.
    clock.turn(1000);
    for i in 0..2 {
        queue.write(256 * i, &buffer, 0, 128 << 10).unwrap();
    }
    queue.push().unwrap();
    answers(&rig.counters, 8 + 16 + 1);
    clock.turn(20);
    let_it_turn();
    assert_eq!(rig.counters.counts().requests, 8 + 16 + 1);
    clock.turn(10);
    answers(&rig.counters, 8 + 16 + 2);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_guest_that_leaves_and_a_backend_that_stops_wait_for_no_tokens() {
    let clock = Still::new();
    let mut rig = rig(&clock);
    let mut front = rig.connect(&FrontOptions::default());
    rig.device().set_limits(&limits("iops=1"));
    let buffer = front.space().buffer(1).unwrap();
    let push = |front: &mut Frontend| {
        for i in 0..30 {
            front.queues[0].write(8 * i, &buffer, 0, 4096).unwrap();
        }
        front.queues[0].push().unwrap();
    };
    push(&mut front);
    answers(&rig.counters, 1);
    // The next backend has no limit. The requests that the first one left on the ring are there.
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    assert_eq!(rig.counters.counts().requests, 1);
    rig.start();
    answers(&rig.counters, 30);
    assert_eq!(taken(&mut front), 30);

    rig.device().set_limits(&limits("iops=1"));
    push(&mut front);
    answers(&rig.counters, 31);
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    answers(&rig.counters, 60);
    assert_eq!(taken(&mut front), 30);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

#[test]
fn a_guest_and_nbd_clients_share_a_limit() {
    let clock = Still::new();
    let dir = dir_in_memory();
    let image = dir.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let disk = Disk::open(image.to_str().unwrap(), &OpenOptions::default()).unwrap();
    let device = Arc::new(Device::new(disk, clock.clone()));
    device.set_limits(&limits("iops=10:1"));
    let counters = Counters::default();
    let options = Options {
        counters: Some(counters.clone()),
        goodbye: Duration::from_millis(200),
        ..options()
    };
    let served = Served::of(dir, device, options);
    let (mut one, mut other) = (served.client(), served.client());
    for client in [&mut one, &mut other] {
        for i in 0..3 {
            client.send(command::READ, 0, i << 20, 4096, &[]);
            client.send(command::WRITE, 0, i << 20, 4096, &[1; 4096]);
        }
    }
    let all = || counters.counts().requests;
    wait_until("a burst of one passes", || all() >= 2);
    let_it_turn();
    assert!(all() <= 3, "{}", all());
    // They wait a millisecond longer, so that they do not wake for each token.
    clock.turn(1);
    for tenth in 1..=5 {
        clock.turn(100);
        wait_until("a request passes in a tenth of a second", || all() >= 2 + tenth);
        let_it_turn();
        assert!(all() <= 3 + tenth, "{}", all());
    }
    let counts = counters.counts();
    // A request that comes while others wait may pass at its first try.
    assert!((5..=10).contains(&counts.limit_waits), "{counts:?}");
    served.device.set_limits(&Limits::default());
    for client in [&mut one, &mut other] {
        (0..6).for_each(|_| assert_eq!(client.reply().error, 0));
    }
    // A client that leaves does not wait for tokens for longer than its goodbye.
    served.device.set_limits(&limits("iops=1"));
    let commands = [command::READ, command::READ, command::READ, command::DISCONNECT];
    let bytes: Vec<u8> = commands.iter().flat_map(|c| request(*c, 0, 9, 0, 4096)).collect();
    one.say(&bytes);
    wait_until("the client's end begins", || all() >= 13);
    let_it_turn();
    clock.turn(300);
    assert!((0..100_000).any(|_| one.is_closed()));
}
