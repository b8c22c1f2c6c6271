//! Guests that change their state and their rings at a high rate while requests are in flight and other programs read
//! the disk's state (threats.md T4; XSA-350, XSA-331): the disk ends Connected or Closed as its guest's last state
//! says, and leaves no descriptor, mapping or thread.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_loopback::front::FrontOptions;
use ferrite_loopback::{BACKEND_DOMID, GuestOptions};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_serve::counters::Counters;
use ferrite_serve::trace;
use ferrite_testkit::faulty::{Fault, Faults, Ops};
use ferrite_testkit::proc;
use ferrite_testkit::restless::Restless;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, scale, wait_until};
use ferrite_xen::hypervisor::DomId;

const BYTES: u64 = 4 << 20;

/// Serialises the tests: they count the resources of this process.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Storage takes up to two milliseconds longer, so that a guest disconnects with requests in flight.
fn plan() -> Plan {
    let faults = Faults::none();
    faults.set([Ops::storage().meet(Fault::LateBelow(Duration::from_millis(2)))]);
    Plan {
        bytes: BYTES,
        pool_bytes: 4 << 20,
        // Rings that are dropped with their grants in place are lost to the guest.
        guest: GuestOptions { frames: 96 << 10, grants: 128 << 10, ports: 64 },
        engine: faults.factory(),
        ..Plan::default()
    }
}

/// The resources of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    /// Mappings of files: guests' memory, rings, tables, traces.
    file_mappings: usize,
    queue_threads: usize,
}

/// Mappings without a file may come and go with threads: stacks and heaps that libc keeps.
const SPARE_MAPPINGS: usize = 64;

impl Holdings {
    fn now() -> Holdings {
        Holdings {
            descriptors: proc::descriptors(),
            file_mappings: proc::mappings().iter().filter(|line| line.contains('/')).count(),
            queue_threads: proc::threads_named("queue-").len(),
        }
    }

    fn mappings() -> usize {
        proc::mappings().len()
    }

    /// Waits for the same resources: threads end a moment after they were joined.
    fn come_back(self, when: &str) {
        let end = Instant::now() + PATIENCE;
        while Holdings::now() != self {
            assert!(Instant::now() < end, "{when}: {:?} instead of {self:?}", Holdings::now());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Reads the counters and traces of a disk's queues in a loop.
struct Observer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Observer {
    fn of(rig: &Rig) -> Observer {
        let stop = Arc::new(AtomicBool::new(false));
        let (ended, counters) = (stop.clone(), rig.counters.clone());
        let traces: Vec<_> = (0..4).map(|i| rig.run_dir().join(format!("trace-{i}"))).collect();
        let thread = std::thread::spawn(move || observe(&counters, &traces, &ended));
        Observer { stop, thread }
    }

    /// The number of traces that it has read.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn observe(counters: &Counters, traces: &[PathBuf], stop: &AtomicBool) -> u64 {
    let (mut before, mut read) = (counters.counts(), 0);
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_micros(200));
        let counts = counters.counts();
        assert!(counts.requests >= before.requests && counts.events >= before.events);
        before = counts;
        for path in traces {
            // A queue that never existed has none.
            let Ok(records) = trace::read::read(path) else { continue };
            read += 1;
            for record in records {
                assert!(record.bytes <= 1 << 20, "{record:?}");
                assert!(record.stages.taken_ns <= record.stages.answered_ns, "{record:?}");
            }
        }
    }
    read
}

/// A restless guest with the rig's disk.
fn restless(rig: &Rig, seed: u64) -> Restless {
    Restless::new(rig.frontend(), seed)
}

#[test]
fn a_guest_that_toggles_gets_its_disk_back_and_leaves_nothing_behind() {
    let _alone = alone();
    (0..u64::from(scale())).for_each(|n| toggle(21 + 100 * n));
}

fn toggle(seed: u64) {
    let rig = Rig::new(plan());
    let mut guest = restless(&rig, seed);
    guest.reconnect();
    let (base, mappings) = (Holdings::now(), Holdings::mappings());
    let (start, mut toggled) = (Instant::now(), Duration::ZERO);
    let mut traces = 0;
    for round in 0..8 {
        let observer = Observer::of(&rig);
        let begun = Instant::now();
        (0..600).for_each(|_| guest.act());
        toggled += begun.elapsed();
        guest.reconnect();
        traces += observer.end();
        base.come_back(&format!("round {round}"));
        let now = Holdings::mappings();
        assert!(now <= mappings + SPARE_MAPPINGS, "{now} mappings, {mappings} before");
    }
    let requests = rig.counters.counts().requests;
    println!("{} actions in {toggled:?} of {:?}", guest.actions(), start.elapsed());
    println!("{requests} requests answered, {traces} traces read");
    // How many there is time for depends on the machine's load; reconnecting needs some 100.
    assert!(requests > 300 && traces > 0, "nothing was in flight or no trace was read");
}

#[test]
fn a_disk_that_is_unplugged_from_a_toggling_guest_goes() {
    let _alone = alone();
    (0..u64::from(scale())).for_each(|n| unplug(22 + 100 * n));
}

fn unplug(seed: u64) {
    let mut rig = Rig::new(plan());
    let mut guest = restless(&rig, seed);
    guest.reconnect();
    let mut base = None;
    for round in 0..8 {
        let observer = Observer::of(&rig);
        let disk = rig.disk.clone();
        let (before, after) = (guest.below(200), guest.below(400));
        (0..before).for_each(|_| guest.act());
        rig.machine.unplug(&disk).unwrap();
        (0..after).for_each(|_| guest.act());
        // The ways in which a guest ends after the toolstack's request: it closes, or its driver is gone.
        match round % 2 {
            0 => guest.front.set_state(6).unwrap(),
            _ => guest.front.remove_key("state").unwrap(),
        }
        wait_until("the end of the backend", || !rig.is_running());
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        assert_eq!(rig.machine.backend_state(&disk).unwrap(), 6);
        observer.end();
        guest.front.queues.clear();
        base.get_or_insert_with(Holdings::now).come_back(&format!("round {round}"));
        assert_eq!(Holdings::now().queue_threads, 0);
        assert_eq!(guest.front.space().memory().bound_ports(), 0);

        rig.machine.remove_disk(&disk).unwrap();
        rig.attach();
        rig.start();
        guest.reconnect();
    }
}

/// Makes the frontend's directory as the toolstack does.
fn make_directory(rig: &Rig, domid: DomId) {
    let mut store = rig.machine.store().unwrap();
    let (front, back) = (&rig.disk.frontend, &rig.disk.backend);
    store
        .transaction(|t| {
            t.mkdir(front)?;
            t.set_permissions(front, &[('n', domid), ('r', BACKEND_DOMID)])?;
            t.write(&format!("{front}/backend"), back.as_bytes())?;
            t.write(&format!("{front}/state"), b"1")
        })
        .unwrap();
}

#[test]
fn a_directory_that_vanishes_under_a_toggling_guest_closes_the_disk() {
    let _alone = alone();
    (0..u64::from(scale())).for_each(|n| remove_directory(23 + 100 * n));
}

fn remove_directory(seed: u64) {
    let mut rig = Rig::new(plan());
    let mut guest = restless(&rig, seed);
    guest.reconnect();
    let base = Holdings::now();
    for round in 0..8 {
        let before = guest.below(200);
        (0..before).for_each(|_| guest.act());
        rig.machine.store().unwrap().remove(&rig.disk.frontend).unwrap();
        (0..100).for_each(|_| guest.act());
        rig.machine.store().unwrap().remove(&rig.disk.frontend).unwrap();
        let disk = rig.disk.clone();
        rig.machine.wait_for_backend(&disk, &[6, 2], PATIENCE).unwrap();
        wait_until("the end of the connection", || guest.front.space().memory().bound_ports() == 0);
        guest.front.queues.clear();
        base.come_back(&format!("round {round}"));
        make_directory(&rig, rig.domid);
        guest.reconnect();
        assert!(rig.is_running());
    }
}

#[test]
fn a_guest_that_closes_what_was_never_open_is_told_that_it_is_closed() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut guest = restless(&rig, 25);
    for _ in 0..3 {
        guest.front.set_state(6).unwrap();
        guest.front.wait_for_backend(&[6], PATIENCE).unwrap();
        guest.front.set_state(1).unwrap();
        guest.front.wait_for_backend(&[2], PATIENCE).unwrap();
    }
    guest.reconnect();
}

/// As a guest that was resumed elsewhere (blkif.md 3.8): the backend was in state 4 all the time, and may not have read
/// the guest's state 3.
#[test]
fn rings_that_change_unseen_are_found_all_the_same() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut guest = restless(&rig, 24);
    guest.front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    guest.works();
    for _ in 0..20 * scale() {
        let shape = guest.shape();
        guest.front.offer(&shape).unwrap();
        guest.front.finish(PATIENCE).unwrap();
        guest.works();
    }
    guest.front.close(PATIENCE).unwrap();
}
