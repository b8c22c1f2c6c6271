//! Resources that a guest can use: it returns all of them (threats.md T7). It causes no flood of the log (T16), no
//! processor time once its ring is stopped (T13), no mappings beyond its budget (T9).
//!
//! All of it is counted for the whole process, so these tests run one at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::Instant;

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, RingWord};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_testkit::proc;
use ferrite_testkit::rig::{Plan, Rig, moving, offer};
use ferrite_testkit::{PATIENCE, scale};
use ferrite_xen::abi::{
    IndirectOp, Message, OP_READ, OP_WRITE, PlainOp, RawSegment, STATUS_ERROR, STATUS_OKAY,
};
use ferrite_xen::hypervisor::GrantRef;
use ferrite_xen::mover::{Budget, Mover};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Counts log lines at the usual level.
struct Lines;

static LINES: AtomicU64 = AtomicU64::new(0);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Ordering::SeqCst);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The lock of the only running test, with a log that is counted.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static LOG: Once = Once::new();
    LOG.call_once(|| tracing::subscriber::set_global_default(Lines).unwrap());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn plan() -> Plan {
    Plan { bytes: 4 << 20, pool_bytes: 4 << 20, ..Plan::default() }
}

fn many() -> FrontOptions {
    FrontOptions { check_release: false, queues: 4, order: 2, ..FrontOptions::windows() }
}

/// Descriptors, mappings, and KiB of memory in use.
#[derive(Clone, Copy, Debug)]
struct Held {
    descriptors: usize,
    mappings: usize,
    threads: usize,
    rss_kib: u64,
}

fn held() -> Held {
    // Heaps and stacks of threads are made and freed; files, devices and arenas have names or are shared.
    let named = |line: &&String| line.contains(" rw-s ") || line.contains('/');
    Held {
        descriptors: proc::descriptors(),
        mappings: proc::mappings().iter().filter(named).count(),
        threads: proc::threads().len(),
        rss_kib: proc::status_kib("VmRSS"),
    }
}

/// Sends `count` requests of every invalid kind, as fast as they are answered.
fn send_errors(front: &mut Frontend, count: u32) {
    let good = front.space().buffer(2).unwrap();
    for queue in &mut front.queues {
        let mut sent = 0;
        while sent < count {
            while queue.free_slots() > 0 && sent < count {
                bad_request(queue, &good, sent);
                sent += 1;
            }
            for reply in queue.drain(PATIENCE).unwrap() {
                assert_ne!(reply.status, STATUS_OKAY);
            }
        }
    }
}

fn bad_request(queue: &mut FrontQueue, good: &Buffer, i: u32) {
    let segment = good.segment(0, 0, 7);
    let bad = RawSegment { gref: 0x7FFF_0000 + i, ..segment };
    let pages = [GrantRef(i % 3); 8];
    let op = IndirectOp::Write;
    match i % 8 {
        0 => queue.plain(PlainOp::Read, 0, &[segment, bad]),
        1 => queue.plain(PlainOp::Write, 0, &[bad]),
        2 => queue.plain(PlainOp::Write, u64::MAX, &[segment]),
        3 => queue.plain(PlainOp::Read, 0, &[RawSegment { last_sect: 9, ..segment }]),
        4 => queue.message(OP_WRITE, Message::Indirect { op, nr_segments: 200, sector: 0, pages }),
        5 => queue.message(OP_WRITE, Message::Indirect { op, nr_segments: 0, sector: 0, pages }),
        6 => queue.message(77, Message::Unknown),
        _ => queue.plain(PlainOp::Barrier, 0, &[bad]),
    }
    .unwrap();
}

#[test]
fn errors_leave_nothing_behind_not_even_when_the_domain_is_destroyed() {
    let _alone = alone();
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    let space = front.space().clone();
    // Everything that is allocated at the first use, and the allocator's memory for each size of it.
    for _ in 0..2 {
        front.connect(&many(), PATIENCE).unwrap();
        send_errors(&mut front, 12_000);
        front.close(PATIENCE).unwrap();
    }
    let free = space.free_counts();
    let before = held();
    for _ in 0..2 {
        front.connect(&many(), PATIENCE).unwrap();
        assert_eq!(front.queues.len(), 4);
        send_errors(&mut front, 12_000 * scale());
        front.close(PATIENCE).unwrap();
        assert_eq!((space.memory().grants().users(), space.memory().bound_ports()), (0, 0));
        assert_eq!(space.free_counts(), free);
    }
    let after = held();
    assert_eq!(after.descriptors, before.descriptors, "{before:?} became {after:?}");
    assert_eq!(after.threads, before.threads, "{before:?} became {after:?}");
    assert!(after.mappings <= before.mappings, "{before:?} became {after:?}");
    assert!(after.rss_kib < before.rss_kib + 8192, "{before:?} became {after:?}");

    // And with the guest gone during its requests.
    front.connect(&many(), PATIENCE).unwrap();
    let good = space.buffer(2).unwrap();
    for queue in &mut front.queues {
        (0..queue.entries()).for_each(|i| bad_request(queue, &good, i));
        queue.push().unwrap();
    }
    rig.machine.destroy(rig.domid).unwrap();
    rig.machine.unplug(&rig.disk.clone()).unwrap();
    rig.join().unwrap();
    assert_eq!((space.memory().grants().users(), space.memory().bound_ports()), (0, 0));
    front.queues.drain(..).for_each(|queue| queue.release().unwrap());
}

/// Checks that `work` adds no more log lines than its seconds allow.
fn assert_quiet(what: &str, work: impl FnOnce()) {
    let (lines, start) = (LINES.load(Ordering::SeqCst), Instant::now());
    work();
    let lines = LINES.load(Ordering::SeqCst) - lines;
    let windows = start.elapsed().as_secs() / 10 + 2;
    println!("{what}: {lines} lines in {:?}", start.elapsed());
    assert!(lines <= 40 * windows, "{what}: {lines} lines in {:?}", start.elapsed());
}

#[test]
fn a_million_malformed_requests_are_a_handful_of_lines() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut front = rig.connect(&many());
    assert_quiet("malformed requests", || send_errors(&mut front, 25_000 * scale()));
    assert!(LINES.load(Ordering::SeqCst) > 0, "nothing is logged at all");
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_guest_that_connects_again_and_again_is_a_handful_of_lines_too() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    assert_quiet("reconnecting", || {
        for _ in 0..60 * scale() {
            front.connect(&many(), PATIENCE).unwrap();
            send_errors(&mut front, 16);
            front.close(PATIENCE).unwrap();
        }
    });
}

#[test]
fn rings_that_are_broken_again_and_again_are_a_handful_of_lines_too() {
    let _alone = alone();
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    assert_quiet("broken rings", || {
        for _ in 0..60 * scale() {
            front.connect(&FrontOptions::default(), PATIENCE).unwrap();
            front.queues[0].ring().store(RingWord::ReqProd, 1 << 20);
            front.queues[0].notify().unwrap();
            assert!(rig.wait_for_error().contains("impossible"));
            front.close(PATIENCE).unwrap();
        }
    });
}

#[test]
fn frontends_that_are_refused_again_and_again_are_a_handful_of_lines_too() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    assert_quiet("refusals", || {
        for _ in 0..100 * scale() {
            front.set_state(1).unwrap();
            front.wait_for_backend(&[2], PATIENCE).unwrap();
            let options = FrontOptions::default();
            front.offer_edited(&options, |keys| keys.set("ring-ref", "x\ny")).unwrap();
            front.wait_for_backend(&[5], PATIENCE).unwrap();
            front.set_state(6).unwrap();
            front.wait_for_backend(&[6], PATIENCE).unwrap();
        }
    });
}

/// The largest guests, on disks that together may map less than a tenth of their pages.
fn exhaust_mappings(mover: Mover) {
    const OF_DISK: usize = 256;
    const OF_HOST: usize = 640;
    let dir = ferrite_testkit::places::dir_in_memory();
    let budget = || {
        let path = dir.path().join("map-budget");
        Budget::of_host(&path, OF_HOST as u32, OF_DISK as u32).unwrap()
    };
    let offer = Offer { max_queues: 16, persistent: mover == Mover::Persistent, ..offer() };
    let rig = |_| {
        Rig::new(Plan {
            bytes: 16 << 20,
            offer,
            moving: moving(mover, budget()),
            ..Plan::default()
        })
    };
    let rigs: Vec<Rig> = (0..4).map(rig).collect();
    let windows = FrontOptions { queues: 16, ..FrontOptions::windows() };
    let mut fronts: Vec<Frontend> = rigs.iter().map(|rig| rig.connect(&windows)).collect();
    for round in 0..2 {
        for (disk, front) in fronts.iter_mut().enumerate() {
            assert_eq!((front.queues.len(), front.queues[0].entries()), (16, 512));
            let buffer = front.space().buffer(256).unwrap();
            for (q, queue) in front.queues.iter_mut().enumerate() {
                let byte = (1 + round + 2 * (16 * disk + q)) as u8;
                buffer.fill(0, buffer.len(), byte);
                queue.write(q as u64 * 2048, &buffer, 0, buffer.len()).unwrap();
                assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                buffer.fill(0, buffer.len(), 0);
                queue.read(q as u64 * 2048, &buffer, 0, buffer.len()).unwrap();
                assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                assert!(buffer.to_vec(0, buffer.len()).iter().all(|b| *b == byte));
            }
        }
        let claimed: Vec<usize> = rigs.iter().map(Rig::claimed_mappings).collect();
        assert!(claimed.iter().all(|n| *n <= OF_DISK), "{claimed:?}");
        assert_eq!(claimed.iter().sum::<usize>(), OF_HOST, "{claimed:?}");
        assert!(rigs.iter().all(|rig| rig.counts().mapped <= OF_DISK as u64));
    }
    assert!(rigs.iter().all(|rig| rig.counts().fallbacks > 0));
    for (rig, front) in rigs.iter().zip(&mut fronts) {
        front.close(PATIENCE).unwrap();
        assert_eq!((rig.claimed_mappings(), rig.counts().mapped), (0, 0));
        assert_eq!(front.space().memory().grants().users(), 0);
    }
}

#[test]
fn guests_that_want_all_mappings_get_their_share_and_the_rest_copied() {
    let _alone = alone();
    let exhaust = || [Mover::Map, Mover::Persistent].into_iter().for_each(exhaust_mappings);
    // Once for everything that is allocated at the first use.
    exhaust();
    let before = held();
    let mut last = before.rss_kib;
    // A leak grows each time; an allocator's store fills up once. AddressSanitizer keeps memory for each former thread,
    // so with it only the rest is checked.
    let sanitized = std::env::var_os("ASAN_OPTIONS").is_some();
    let returns = (0..6).any(|_| {
        exhaust();
        let rss_kib = held().rss_kib;
        let grown_kib = rss_kib.saturating_sub(std::mem::replace(&mut last, rss_kib));
        sanitized || grown_kib < 1024
    });
    let after = held();
    assert!(returns, "{before:?} became {after:?}");
    assert_eq!(after.descriptors, before.descriptors, "{before:?} became {after:?}");
    assert!(after.mappings <= before.mappings, "{before:?} became {after:?}");
}

/// The processor time of this process's threads of that name, in clock ticks.
fn ticks_of(name: &str) -> u64 {
    proc::threads_named(name).iter().filter_map(|thread| proc::ticks(thread)).sum()
}

/// Repeats `work` until it has used some processor time of this thread, in the same ticks. A busy machine delays
/// another thread as much.
fn keep_busy(mut work: impl FnMut()) -> u64 {
    let own = || proc::ticks("").unwrap();
    let before = own();
    loop {
        (0..1000).for_each(|_| work());
        let used = own() - before;
        if used >= 40 {
            return used;
        }
    }
}

#[test]
fn a_stopped_ring_costs_no_time_whatever_is_sent_to_it() {
    let _alone = alone();
    let mut rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions::default());
    front.queues[0].ring().store(RingWord::ReqProd, 1 << 31);
    front.queues[0].notify().unwrap();
    rig.wait_for_error();
    let before = ticks_of("queue-0");
    let mut producer = 0u32;
    let busy = keep_busy(|| {
        producer = producer.wrapping_add(0x0100_0193);
        front.queues[0].notify().unwrap();
        front.queues[0].ring().store(RingWord::ReqProd, producer);
    });
    let used = ticks_of("queue-0") - before;
    assert!(used * 8 <= busy, "{used} ticks beside {busy} of who sends");
    front.close(PATIENCE).unwrap();
}

#[test]
fn an_idle_ring_costs_no_time() {
    let _alone = alone();
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions { queues: 4, ..FrontOptions::default() });
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        queue.plain(PlainOp::Barrier, 0, &[buffer.segment(0, 0, 7)]).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        queue.message(OP_READ, Message::Unknown).unwrap();
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
    }
    let names = ["queue-0", "queue-1", "queue-2", "queue-3"];
    let ticks = || names.into_iter().map(ticks_of).sum::<u64>();
    let before = ticks();
    let busy = keep_busy(std::hint::spin_loop);
    let used = ticks() - before;
    assert!(used * 8 <= busy, "{used} ticks beside {busy} of who is busy");
    front.close(PATIENCE).unwrap();
}
