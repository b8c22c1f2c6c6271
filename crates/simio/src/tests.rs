use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use ferrite_host::directory::Directory;
use ferrite_io::engine::{FileId, Op};
use ferrite_io::reactor::{Io, Reactor, Wait};

/// A machine with one file, and a process on it.
struct Rig {
    dir: TempDir,
    world: SimWorld,
    arena: Arc<Arena>,
    reactor: Reactor,
    file: FileId,
}

impl Rig {
    fn new(seed: u64, bytes: u64) -> Rig {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        File::create_new(dir.path().join("file")).unwrap().set_len(bytes).unwrap();
        fs::create_dir(dir.path().join("attic")).unwrap();
        let (world, arena) = (SimWorld::new(seed), Arena::new(1 << 20).unwrap());
        let mut reactor = Reactor::new(world.engine(arena.clone()));
        let file = add(&mut reactor, &dir.path().join("file"));
        Rig { dir, world, arena, reactor, file }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    fn run<T>(&mut self, work: impl AsyncFnOnce(Io, FileId) -> io::Result<T>) -> io::Result<T> {
        let (io, file) = (self.reactor.io(), self.file);
        self.reactor.block_on(work(io, file))?
    }

    fn write(&mut self, offset: u64, byte: u8, len: usize) -> io::Result<()> {
        let buf = self.arena.span(0, len);
        self.arena.fill(buf, byte);
        self.run(async |io, file| io.write_all(file, offset, buf).await)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.run(async |io, file| io.sync(file).await)
    }
}

fn add(reactor: &mut Reactor, path: &Path) -> FileId {
    let file = File::options().read(true).write(true).open(path).unwrap();
    reactor.add_file(Arc::new(file.into())).unwrap()
}

/// The possible contents of the file after a power cut after `work`, over many seeds.
fn outcomes(bytes: u64, work: impl Fn(&mut Rig)) -> BTreeSet<Vec<u8>> {
    let outcome = |seed| {
        let mut rig = Rig::new(seed, bytes);
        work(&mut rig);
        rig.world.cut_power().unwrap();
        fs::read(rig.path()).unwrap()
    };
    (0..200).map(outcome).collect()
}

#[test]
fn what_was_written_is_read_back_at_once_by_anybody() {
    let mut rig = Rig::new(1, 8192);
    rig.write(512, 7, 1024).unwrap();
    let buf = rig.arena.span(4096, 2048);
    rig.run(async |io, file| io.read_exact(file, 0, buf).await).unwrap();
    let mut bytes = vec![0; 2048];
    rig.arena.copy_out(buf, &mut bytes);
    assert_eq!(bytes, fs::read(rig.path()).unwrap()[..2048]);
    assert_eq!((bytes[511], bytes[512], bytes[1535], bytes[1536]), (0, 7, 7, 0));
}

#[test]
fn a_power_cut_leaves_any_mixture_of_unsynced_sectors_and_nothing_else() {
    let seen = outcomes(1024, |rig| {
        rig.write(0, 1, 1024).unwrap();
        rig.write(0, 2, 512).unwrap();
    });
    let of = |a: u8, b: u8| [vec![a; 512], vec![b; 512]].concat();
    let allowed = [0, 1, 2].into_iter().flat_map(|a| [0, 1].map(|b| of(a, b))).collect();
    assert_eq!(seen, allowed);
}

#[test]
fn what_was_synced_survives_every_power_cut() {
    let seen = outcomes(1024, |rig| {
        rig.write(0, 1, 1024).unwrap();
        rig.sync().unwrap();
        rig.write(512, 2, 512).unwrap();
    });
    let of = |b: u8| [vec![1; 512], vec![b; 512]].concat();
    assert_eq!(seen, BTreeSet::from([of(1), of(2)]));
}

#[test]
fn a_medium_that_lies_about_a_sync_may_lose_what_was_written_before_it() {
    let of = |a: u8, b: u8| [vec![a; 512], vec![b; 512]].concat();
    let lost = BTreeSet::from([of(0, 0), of(0, 2), of(1, 0), of(1, 2)]);
    let kept = BTreeSet::from([of(1, 0), of(1, 2)]);
    let lies = [
        (Lie::Sync { of: 2, which: 0 }, &lost),
        (Lie::Sync { of: 2, which: 1 }, &kept),
        (Lie::SyncBefore(512..1024), &lost),
        (Lie::SyncBefore(0..512), &kept),
    ];
    for (lie, expected) in lies {
        let seen = outcomes(1024, |rig| {
            rig.world.set_lie(Some(lie.clone()));
            rig.write(0, 1, 512).unwrap();
            rig.sync().unwrap();
            rig.write(512, 2, 512).unwrap();
        });
        assert_eq!(seen, *expected, "{lie:?}");
    }
}

#[test]
fn a_world_stops_at_the_beginning_of_the_sync_that_was_named() {
    let mut rig = Rig::new(1, 1024);
    rig.world.stop_at_sync(SyncAfter::Anything, 2, 0);
    rig.sync().unwrap();
    rig.write(0, 1, 512).unwrap();
    assert!(rig.sync().is_err() && rig.world.stopped());
    rig.world.cut_power().unwrap();
    assert!(!rig.world.stopped());
}

#[test]
fn only_syncs_after_a_write_to_what_was_named_count() {
    let mut rig = Rig::new(1, 1024);
    rig.world.stop_at_sync(SyncAfter::Write(512..1024), 2, 0);
    for at in [512, 0, 0] {
        rig.write(at, 1, 512).unwrap();
        rig.sync().unwrap();
    }
    rig.write(0, 2, 1024).unwrap();
    assert!(rig.sync().is_err() && rig.world.stopped());
}

#[test]
fn only_syncs_after_a_fault_count() {
    let mut rig = Rig::new(1, 1024);
    rig.world.stop_at_sync(SyncAfter::Fault, 1, 0);
    rig.sync().unwrap();
    let fault = Fault { on: On::Write, range: 0..512, per_mille: 1000, errno: 5, times: 1 };
    rig.world.set_faults(vec![fault]);
    assert!(rig.write(0, 1, 512).is_err() && !rig.world.stopped());
    assert!(rig.sync().is_err() && rig.world.stopped());
}

#[test]
fn a_file_that_grew_is_short_or_long_and_never_has_what_nobody_wrote() {
    let long = |b: u8| [vec![0; 512], vec![b; 512]].concat();
    let seen = outcomes(512, |rig| rig.write(512, 3, 512).unwrap());
    assert_eq!(seen, BTreeSet::from([vec![0; 512], long(3)]));
    let allocated = outcomes(512, |rig| {
        rig.run(async |io, file| io.set_len(file, 1024).await).unwrap();
        rig.write(512, 3, 512).unwrap();
    });
    assert_eq!(allocated, BTreeSet::from([vec![0; 512], long(0), long(3)]));
}

#[test]
fn a_hole_shows_old_bytes_or_zeros_until_it_is_synced() {
    let punch = |rig: &mut Rig| {
        rig.write(0, 5, 1024).unwrap();
        rig.sync().unwrap();
        rig.run(async |io, file| io.punch_hole(file, 256, 512).await).unwrap();
    };
    let half = [vec![5; 256], vec![0; 512], vec![5; 256]].concat();
    let seen = outcomes(1024, punch);
    assert!(seen.contains(&half) && seen.contains(&vec![5; 1024]) && seen.len() == 4);
    let synced = outcomes(1024, |rig| {
        punch(rig);
        rig.sync().unwrap();
    });
    assert_eq!(synced, BTreeSet::from([half]));
}

#[test]
fn a_write_over_a_durable_hole_never_shows_what_the_hole_replaced() {
    let seen = outcomes(512, |rig| {
        rig.write(0, 5, 512).unwrap();
        rig.sync().unwrap();
        rig.run(async |io, file| io.punch_hole(file, 0, 512).await).unwrap();
        rig.sync().unwrap();
        rig.write(0, 6, 512).unwrap();
    });
    assert_eq!(seen, BTreeSet::from([vec![0; 512], vec![6; 512]]));
}

#[test]
fn a_killed_process_loses_nothing_that_was_completed() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed, 4096);
        rig.write(0, 1, 4096).unwrap();
        let buf = rig.arena.span(0, 4096);
        rig.arena.fill(buf, 2);
        rig.reactor.push(1, Op::Write { file: rig.file, offset: 0, buf });
        rig.world.stop_at(Some(rig.world.step() + 1));
        rig.reactor.turn(ferrite_io::reactor::Wait::No, &mut Vec::new()).unwrap_err();
        rig.world.kill_process().unwrap();
        let bytes = fs::read(rig.path()).unwrap();
        assert!(bytes.chunks(512).all(|s| s == [1; 512] || s == [2; 512]), "seed {seed}");
        let text = rig.sync().unwrap_err().to_string();
        assert!(text.contains("dead"), "{text}");
    }
}

#[test]
fn a_failed_sync_may_have_lost_what_a_later_sync_does_not_bring_back() {
    let seen = outcomes(512, |rig| {
        rig.write(0, 1, 512).unwrap();
        let (range, errno) = (0..u64::MAX, libc::EIO);
        let fault = Fault { on: On::Sync, range, per_mille: 1000, errno, times: 1 };
        rig.world.set_faults(vec![fault]);
        assert_eq!(rig.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
        rig.sync().unwrap();
    });
    assert_eq!(seen, BTreeSet::from([vec![0; 512], vec![1; 512]]));
}

#[test]
fn transfers_are_cut_short_and_interrupted_and_end_all_the_same() {
    let mut rig = Rig::new(3, 1 << 20);
    rig.world.set_nuisances(500, 300);
    for i in 0..50 {
        rig.write(i * 8192, i as u8, 8192).unwrap();
    }
    let bytes = fs::read(rig.path()).unwrap();
    assert!((0..50).all(|i| bytes[i * 8192..][..8192].iter().all(|b| *b == i as u8)));
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let history = |seed| {
        let mut rig = Rig::new(seed, 65536);
        rig.world.set_nuisances(200, 100);
        for i in 0..40 {
            rig.write((i * 1536) % 61440, i as u8 + 1, 2048).unwrap();
            if i % 7 == 0 {
                // It may be interrupted, too.
                let _ = rig.sync();
            }
        }
        let step = rig.world.step();
        rig.world.cut_power().unwrap();
        (step, rig.world.clock().now_ns(), fs::read(rig.path()).unwrap())
    };
    assert_eq!(history(11), history(11));
    assert_ne!(history(11), history(12));
}

#[test]
fn a_world_stops_at_exactly_the_step_that_was_asked_for() {
    let steps = |stop: Option<u64>| {
        let mut rig = Rig::new(5, 65536);
        rig.world.stop_at(stop);
        let done = (0..10).try_for_each(|i| {
            rig.write(i * 512, 1, 512)?;
            rig.sync()
        });
        (done.is_ok(), rig.world.step())
    };
    let (_, all) = steps(None);
    assert_eq!(all, 40);
    for step in 0..all {
        assert_eq!(steps(Some(step)), (false, step));
    }
}

/// A value that the task holds until it is dropped may be a lock: the next holder would write before it.
#[test]
fn a_task_of_a_reactor_that_is_dropped_ends_behind_its_operation() {
    struct Guard(PathBuf, Rc<RefCell<Vec<u8>>>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.1.replace(fs::read(&self.0).unwrap());
        }
    }
    let rig = Rig::new(4, 512);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let guard = Guard(rig.path(), seen.clone());
    let Rig { mut reactor, file, arena, .. } = rig;
    arena.fill(arena.span(0, 512), 7);
    let (io, buf) = (reactor.io(), arena.span(0, 512));
    reactor.spawn(async move {
        let _guard = guard;
        let _ = io.write_all(file, 0, buf).await;
    });
    reactor.spawn({
        let io = reactor.io();
        async move { drop(io.sleep(Duration::from_secs(3600)).await) }
    });
    reactor.turn(Wait::No, &mut Vec::new()).unwrap();
    assert!(reactor.in_flight() > 0);
    drop(reactor);
    assert_eq!(*seen.borrow(), [7; 512]);
}

#[test]
fn time_is_the_worlds_own() {
    let mut rig = Rig::new(9, 512);
    let hour = Duration::from_secs(3600);
    rig.run(async |io, _| io.sleep(hour).await).unwrap();
    assert!(rig.world.clock().now_ns() >= hour.as_nanos() as u64);
}

#[test]
fn the_last_directory_operations_that_were_not_synced_may_be_undone() {
    let mut seen = BTreeSet::new();
    for seed in 0..100 {
        let rig = Rig::new(seed, 512);
        let dir = rig.world.directories(&rig.dir.path().join("attic"));
        let at = |name: &str| rig.dir.path().join(name);
        dir.create_new(&at("a")).unwrap();
        dir.sync(rig.dir.path()).unwrap();
        dir.hard_link(&at("file"), &at("b")).unwrap();
        dir.rename(&at("a"), &at("file")).unwrap();
        dir.remove(&at("b")).unwrap();
        rig.world.cut_power().unwrap();
        let names = ["a", "b", "file"].map(|n| fs::metadata(at(n)).ok().map(|m| m.len()));
        seen.insert(names);
    }
    // In order: nothing, the link, the rename over the old file, the removal.
    let old = [Some(0), None, Some(512)];
    let linked = [Some(0), Some(512), Some(512)];
    let renamed = [None, Some(512), Some(0)];
    let removed = [None, None, Some(0)];
    assert_eq!(seen, BTreeSet::from([old, linked, renamed, removed]));
}

#[test]
fn a_file_made_shorter_and_longer_again_has_old_bytes_or_zeros_behind_the_cut() {
    for seed in 0..100 {
        let rig = Rig::new(seed, 2048);
        let file = File::options().read(true).write(true).open(rig.path()).unwrap();
        file.write_all_at(&[9; 2048], 0).unwrap();
        let mut sim = SimFile::new(file).unwrap();
        sim.set_len(1, 700).unwrap();
        sim.set_len(2, 2048).unwrap();
        let random = &mut SplitMix64::new(seed);
        let fate = Fate::choose(random);
        sim.cut(fate, random).unwrap();
        let bytes = fs::read(rig.path()).unwrap();
        let old = vec![9; 2048];
        let zeros = [vec![9; 700], vec![0; 1348]].concat();
        assert!([&old, &zeros, &old[..700].to_vec()].contains(&&bytes), "seed {seed}");
    }
}

#[test]
fn a_device_keeps_its_size_and_a_discard_leaves_what_was_there_or_zeros() {
    let device = Device { discards: true, zeroes: false };
    let mut seen = BTreeSet::new();
    for seed in 0..40 {
        let mut rig = Rig::new(seed, 64 << 10);
        rig.world.set_device(File::open(rig.path()).unwrap(), device).unwrap();
        rig.write(0, 7, 64 << 10).unwrap();
        rig.sync().unwrap();
        let full = rig.write((64 << 10) - 512, 8, 1024).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        for refused in [
            rig.run(async |io, file| io.allocate(file, 0, 1 << 20).await),
            rig.run(async |io, file| io.set_len(file, 0).await),
            rig.run(async |io, file| io.zero_range(file, 0, 512).await),
        ] {
            let errno = refused.unwrap_err().raw_os_error();
            assert!(matches!(errno, Some(libc::EOPNOTSUPP | libc::EINVAL)));
        }
        rig.run(async |io, file| io.discard(file, 0, 32 << 10).await).unwrap();
        let bytes = fs::read(rig.path()).unwrap();
        assert!(bytes[..32 << 10].iter().all(|b| *b == 7 || *b == 0));
        assert!(bytes[32 << 10..63 << 10].iter().all(|b| *b == 7) && bytes.len() == 64 << 10);
        seen.insert((bytes[0], bytes[31 << 10]));
    }
    assert_eq!(seen.len(), 4);
}

/// The order in which work and writes end, and the steps that this took.
fn ends(seed: u64) -> (Vec<usize>, u64) {
    let mut rig = Rig::new(seed, 8192);
    let ended = Rc::new(RefCell::new(Vec::new()));
    for i in 0..3 {
        let (io, computed) = (rig.reactor.io(), ended.clone());
        rig.reactor.spawn(async move {
            assert_eq!(io.compute(move || i * 2).await.unwrap(), i * 2);
            computed.borrow_mut().push(i);
        });
        let (io, file, written) = (rig.reactor.io(), rig.file, ended.clone());
        let buf = rig.arena.span(0, 512);
        rig.reactor.spawn(async move {
            io.write_all(file, 0, buf).await.unwrap();
            written.borrow_mut().push(3 + i);
        });
    }
    while rig.reactor.tasks() > 0 {
        rig.reactor.turn(Wait::Until(None), &mut Vec::new()).unwrap();
    }
    (ended.take(), rig.world.step())
}

#[test]
fn what_is_computed_ends_when_the_seed_says() {
    let orders: BTreeSet<Vec<usize>> = (0..50).map(|seed| ends(seed).0).collect();
    assert!(orders.len() > 30, "{} orders", orders.len());
    for seed in 0..10 {
        let (order, steps) = ends(seed);
        assert_eq!((order, steps), ends(seed));
        assert_eq!(steps, 9, "a step for each that ends, and one for each write's submission");
    }
}

#[test]
fn a_dead_process_computes_no_more() {
    let mut rig = Rig::new(1, 8192);
    rig.world.stop_at(Some(rig.world.step() + 1));
    let done = Arc::new(AtomicU64::new(0));
    let theirs = done.clone();
    let computed =
        rig.run(async move |io, _| io.compute(move || theirs.store(1, Ordering::Relaxed)).await);
    assert!(computed.is_err() && rig.world.stopped());
    rig.world.kill_process().unwrap();
    drop(rig.reactor);
    assert_eq!(done.load(Ordering::Relaxed), 0);
}
