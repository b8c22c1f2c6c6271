//! A machine whose writes fail, and whose power is cut at any step after that.

use std::future::{Future, poll_fn};
use std::task::Poll;

use ferrite_disk_base::ProblemKind as _;
use ferrite_simio::{Fault, On, SimWorld};
use tempfile::TempDir;

use super::*;
use crate::open_medium;

/// EIO, as the kernel returns it.
pub(super) const EIO: i32 = 5;

pub(super) struct Machine {
    pub(super) dir: TempDir,
    pub(super) world: SimWorld,
    pub(super) session: Session,
}

impl Machine {
    pub(super) fn new(seed: u64, make: impl FnOnce(&Path)) -> Machine {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        make(&dir.path().join("a.qcow2"));
        let world = SimWorld::new(seed);
        let session = session_on(dir.path(), &world);
        Machine { dir, world, session }
    }

    /// The process dies, and the next one opens the image.
    pub(super) fn reopen(self) -> Machine {
        let Machine { dir, world, session } = self;
        drop(session);
        world.kill_process().unwrap();
        let session = session_on(dir.path(), &world);
        Machine { dir, world, session }
    }

    pub(super) fn fail_once(&self, on: On, range: std::ops::Range<u64>) {
        let fault = Fault { on, range, per_mille: 1000, errno: EIO, times: 1 };
        self.world.set_faults(vec![fault]);
    }

    /// Stops the world so many steps from now.
    pub(super) fn stop_after(&self, steps: u64) {
        self.world.stop_at(Some(self.world.step() + steps));
    }

    /// Cuts the power; the medium is intact, except for leaks. Returns whether the world had been stopped before.
    fn end(self) -> bool {
        let Machine { dir, world, session } = self;
        let stopped = world.stopped();
        world.cut_power().unwrap();
        drop(session);
        let report = check(&medium(&dir.path().join("a.qcow2"))).unwrap();
        let harmful: Vec<_> = report.findings.iter().filter(|f| !f.problem.is_harmless()).collect();
        assert!(harmful.is_empty(), "{harmful:?}");
        stopped
    }
}

/// Opens the image with a journal.
pub(super) fn open_in(dir: &Path, read_only: bool) -> Image {
    let name = ferrite_disk_base::ImageName {
        format: ferrite_disk_base::Format::Qcow2,
        path: dir.join("a.qcow2"),
    };
    let options = OpenOptions { read_only, state_dir: Some(dir.join("state")), ..options() };
    Image::open(&name, &options).unwrap()
}

fn session_on(dir: &Path, world: &SimWorld) -> Session {
    Session::new(Arc::new(open_in(dir, false)), |arena| Ok(world.engine(arena))).unwrap()
}

fn small(path: &Path) {
    create(path, &NewImage { cluster_bytes: 512, ..NewImage::new(8 << 20) });
}

/// Makes an image with clusters of so many bytes, on a parent that is full of fives.
pub(super) fn on_parent(cluster_bytes: u32) -> impl FnOnce(&Path) {
    move |path| {
        std::fs::write(path.with_file_name("parent"), vec![5; 8 << 20]).unwrap();
        let backing = Some(("parent".into(), ferrite_disk_base::Format::Raw));
        create(path, &NewImage { cluster_bytes, backing, ..NewImage::new(8 << 20) });
    }
}

/// A failed commit may have written the entry of a new table. Entries of that table may then only be written after the
/// counts of the clusters that they refer to.
#[test]
fn a_table_that_a_failed_commit_made_reachable_refers_to_nothing_without_a_count() {
    for seed in 0..4 {
        for stop in 1.. {
            let mut machine = Machine::new(seed, small);
            let session = &mut machine.session;
            // With 512 bytes a cluster, a sector of L1 maps 2 MiB.
            session.write(0, &[1; 512]).unwrap();
            session.write(4 << 20, &[1; 512]).unwrap();
            let l1 = with_qcow2(session, |qcow2| qcow2.header.l1_offset);
            machine.fail_once(On::Write, l1 + 1024..l1 + 1536);
            machine.session.flush().unwrap_err();
            machine.session.write(8 << 10, &[2; 4096]).unwrap();
            machine.stop_after(stop);
            let _ = machine.session.flush();
            if !machine.end() {
                break;
            }
        }
    }
}

/// An image whose refcount table will have to grow.
fn small_table(path: &Path) {
    // It has room for 2 MiB, and the disk is larger.
    let new = NewImage { cluster_bytes: 512, refcount_bits: 64, ..NewImage::new(1 << 20) };
    create(path, &new);
    let mut session = open(path);
    let port = session.port().clone();
    let disk = session.disk().clone();
    session.run(qcow2_of(&disk).resize(&port, 8 << 20, 0)).unwrap().unwrap();
    drop((session, port, disk));
    let mut session = open(path);
    for at in (0..3 << 19).step_by(1 << 16) {
        session.write(at, &[1; 1 << 16]).unwrap();
    }
    session.close().unwrap();
}

/// After the failed write the header may name either refcount table.
#[test]
fn a_refcount_table_that_may_be_the_one_in_use_is_left_alone() {
    for seed in 0..4 {
        for stop in (1..).step_by(3) {
            let mut machine = Machine::new(seed, small_table);
            let mut at = 4 << 20;
            machine.session.write(at, &[2; 512]).unwrap();
            machine.session.flush().unwrap();
            machine.fail_once(On::Write, 0..512);
            while machine.session.write(at, &[2; 1 << 14]).is_ok() {
                at += 1 << 14;
                assert!(at < 7 << 20, "the table did not have to grow");
            }
            machine.stop_after(stop);
            for i in 0..4 {
                // Operations in flight in a stopped world keep their memory.
                if !machine.world.stopped() {
                    let _ = machine.session.write(at + (i << 14), &[3; 1 << 14]);
                }
            }
            if !machine.world.stopped() {
                let _ = machine.session.flush();
            }
            if !machine.end() {
                break;
            }
        }
    }
}

/// As above, where the task that writes the header is dropped.
#[test]
fn a_refcount_table_whose_naming_was_called_off_is_left_alone() {
    for times in (1..).step_by(2) {
        let mut machine = Machine::new(times, small_table);
        let table =
            |session: &Session| with_qcow2(session, |q| q.state().clusters.refs().table().len());
        let before = table(&machine.session);
        let mut at = 4 << 20;
        let mut given_up = false;
        while table(&machine.session) == before && !given_up {
            let (disk, port) = (machine.session.disk().clone(), machine.session.port().clone());
            let write = async {
                let piece = port.scratch.take(1 << 14).await;
                disk.write(&port, at, piece.span()).await.unwrap();
            };
            given_up = machine.session.run(given_up_after(write, times)).unwrap();
            at += 1 << 14;
        }
        for i in 1..8 {
            let _ = machine.session.write(at + (i << 14), &[3; 1 << 14]);
        }
        let _ = machine.session.flush();
        machine.end();
        if !given_up {
            break;
        }
    }
}

/// Polls a future at most so often; whether it was not done by then.
async fn given_up_after(work: impl Future, times: u64) -> bool {
    let mut work = std::pin::pin!(work);
    let mut left = times;
    poll_fn(|cx| {
        if work.as_mut().poll(cx).is_ready() {
            return Poll::Ready(false);
        }
        left -= 1;
        if left == 0 {
            return Poll::Ready(true);
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Polls `first` so often, then runs `second` to its end, then `first`.
pub(super) async fn one_within_another(first: impl Future, times: u32, second: impl Future) {
    let mut first = std::pin::pin!(first);
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 || first.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        left -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    second.await;
    if left == 0 {
        first.await;
    }
}

/// A commit that lowers many counts makes room for theirs.
#[test]
fn counts_of_the_next_run_are_there_whatever_is_read_meanwhile() {
    for times in (0..60).step_by(2) {
        let make = |path: &Path| {
            // 64 counts to a slice.
            let new = NewImage { cluster_bytes: 512, refcount_bits: 64, ..NewImage::new(8 << 20) };
            create(path, &new);
            let mut session = open(path);
            for at in (0..3 << 20).step_by(1 << 20) {
                session.write(at, &vec![1; 1 << 20]).unwrap();
            }
            session.close().unwrap();
        };
        let mut machine = Machine::new(1, make);
        let session = &mut machine.session;
        let (disk, port) = (session.disk().clone(), session.port().clone());
        let qcow2 = qcow2_of(&disk);
        let load = async {
            for cluster in (0..6000).step_by(64) {
                qcow2.alloc.load_refs(&port, cluster).await.unwrap();
            }
        };
        let refill = async { qcow2.alloc.set_aside(&port).await.unwrap() };
        session.run(one_within_another(refill, times, load)).unwrap();
        let taken = {
            let clusters = &mut qcow2.state().clusters;
            assert!(clusters.next().is_some());
            clusters.take()
        };
        assert!(taken.is_some());
        qcow2.state().clusters.forget_runs();
        drop((disk, port));
        machine.end();
    }
}

/// The refcount table is made large enough to have entries for its own blocks.
#[test]
fn a_table_far_behind_what_refcounts_cover_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage { cluster_bytes: 512, ..NewImage::new(1 << 20) });
    let l1 = with_qcow2(&open(&path), |qcow2| qcow2.header.l1_offset);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    // In the 128th block of 256 counts each; the last two are free.
    let table = 32765u64 << 9;
    file.write_all_at(&(COPIED | table).to_be_bytes(), l1).unwrap();
    file.set_len(table + 512).unwrap();
    let mut session = open(&path);
    session.write(512 << 10, &[1; 512]).unwrap();
    session.close().unwrap();
    let mut bytes = [0; 512];
    open(&path).read(512 << 10, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 512]);
}

/// If the entry became zeros, it would hide the place of a write in flight. The next write would make a failed write's
/// data visible.
#[test]
fn the_entry_of_a_cluster_with_a_place_given_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage::new(1 << 20));
    let mut session = open(&path);
    session.write(1 << 19, &[1; 512]).unwrap();
    let placed = session.disk().reserve(0, 4096);
    assert!(matches!(placed, Extent::Data { .. }), "{placed:?}");
    assert!(!with_qcow2(&session, |qcow2| qcow2.publish_if(0, 0, entry::ZERO)));
    session.write(0, &[1; 512]).unwrap();
    assert!(!with_qcow2(&session, |qcow2| qcow2.state().pending.contains_key(&0)));
}

/// Data written before a failed sync may or may not be on the medium. After a flush or a close has reported that, the
/// records must not bring back entries that refer to them.
#[test]
fn what_a_failed_sync_has_lost_is_not_recovered() {
    for (seed, closing) in (0..16).map(|i| (i / 2, i % 2 == 1)) {
        let mut machine = Machine::new(seed, on_parent(65536));
        // The first flush syncs the parent, too.
        machine.session.flush().unwrap();
        machine.session.write(4096, &[1; 512]).unwrap();
        machine.fail_once(On::Sync, 0..u64::MAX);
        if closing {
            let (disk, port) = (machine.session.disk().clone(), machine.session.port().clone());
            machine.session.run(disk.close(&port)).unwrap().unwrap_err();
        } else {
            machine.session.flush().unwrap_err();
            machine.session.write(1 << 20, &[2; 512]).unwrap();
        }
        let mut machine = machine.reopen();
        machine.session.flush().unwrap();
        machine.world.cut_power().unwrap();
        let Machine { dir, session, .. } = machine;
        drop(session);
        let mut bytes = vec![0; 65536];
        open(&dir.path().join("a.qcow2")).read(0, &mut bytes).unwrap();
        assert!(bytes == [5; 65536], "seed {seed}, closing: {closing}");
    }
}

/// Only the journal refers to the table, though the table's contents are on the medium.
#[test]
fn a_reader_is_told_of_clusters_in_a_table_that_only_the_journal_names() {
    for seed in 0..4 {
        let mut machine = Machine::new(seed, small);
        machine.session.write(0, &[1; 512]).unwrap();
        let l1 = with_qcow2(&machine.session, |qcow2| qcow2.header.l1_offset);
        machine.fail_once(On::Write, l1..l1 + 512);
        machine.session.flush().unwrap_err();
        let Machine { dir, session, .. } = machine;
        drop(session);
        let disk = open_in(dir.path(), true);
        assert_eq!(qcow2_of(&disk).recovered(), [(0, 512)], "seed {seed}");
    }
}

#[test]
fn an_entry_that_changes_after_a_commit_that_failed_is_recovered() {
    for seed in 0..4 {
        let mut machine = Machine::new(seed, on_parent(512));
        machine.session.write(32 << 10, &[1; 512]).unwrap();
        machine.session.flush().unwrap();
        machine.session.write_zeroes(0, 512).unwrap();
        machine.session.write(40 << 10, &[1; 512]).unwrap();
        let second = with_qcow2(&machine.session, |qcow2| qcow2.slice_offset(1).unwrap().unwrap());
        machine.fail_once(On::Write, second..second + 512);
        machine.session.flush().unwrap_err();
        machine.session.write(0, &[2; 512]).unwrap();
        let mut machine = machine.reopen();
        let mut bytes = [0; 512];
        for (at, byte) in [(0, 2), (512, 5), (32 << 10, 1), (40 << 10, 1)] {
            machine.session.read(at, &mut bytes).unwrap();
            assert_eq!(bytes, [byte; 512], "seed {seed}, {at}");
        }
        machine.session.flush().unwrap();
        machine.end();
    }
}

/// A write that was answered with an error may be on the medium.
#[test]
fn a_refcount_block_that_the_table_may_name_is_not_cut_off() {
    for seed in 0..8 {
        let mut machine = Machine::new(seed, small);
        let table = with_qcow2(&machine.session, |qcow2| qcow2.header.reftable_offset);
        machine.fail_once(On::Write, table..table + 512);
        let mut at = 0;
        while machine.session.write(at, &[1; 4096]).is_ok() {
            at += 4096;
            assert!(at < 8 << 20, "no block had to be made");
        }
        let Machine { dir, session, .. } = machine;
        session.close().unwrap();
        let path = dir.path().join("a.qcow2");
        let report = check(&medium(&path)).unwrap();
        assert!(report.findings.iter().all(|f| f.problem.is_harmless()), "{report:?}");
        open(&path).write(at, &[1; 4096]).unwrap();
    }
}

/// A device may be made larger while its image is open.
#[test]
fn what_a_larger_device_has_room_for_can_be_read_and_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let fixed = OpenOptions { fixed_size: true, ..options() };
    let raw = open_medium(&path, &fixed).unwrap();
    let (mut reactor, port) = port_to(&raw);
    let new = NewImage { cluster_bytes: 4096, ..NewImage::new(40 << 20) };
    reactor.block_on(new.create(&port, &raw)).unwrap().unwrap();
    drop((reactor, port, raw));
    let name = ferrite_disk_base::ImageName { format: ferrite_disk_base::Format::Qcow2, path };
    let disk = Image::open(&name, &fixed).unwrap();
    let kind = test_engine();
    let mut session = Session::new(Arc::new(disk), |arena| kind.open(arena, 16)).unwrap();
    let mut at = 0;
    let full = loop {
        match session.write(at, &[1; 4096]) {
            Ok(()) => at += 4096,
            Err(e) => break e,
        }
    };
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    file.set_len(4 << 20).unwrap();
    session.write(at, &[2; 4096]).unwrap();
    let mut bytes = [0; 4096];
    session.read(at, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 4096]);
    let used = with_qcow2(&session, |qcow2| qcow2.state().clusters.used_end());
    session.write(at, &[3; 4096]).unwrap();
    assert_eq!(with_qcow2(&session, |qcow2| qcow2.state().clusters.used_end()), used);
}

/// A place for a larger L1 table is not searched between used clusters, where there may be only single ones.
#[test]
fn single_free_clusters_are_left_alone_when_many_neighbours_are_needed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage::new(40 << 20));
    let mut session = open(&path);
    session.write(0, &[1; 1 << 20]).unwrap();
    session.close().unwrap();
    let mut session = open(&path);
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let qcow2 = qcow2_of(&disk);
    let found = session.run(async {
        qcow2.alloc.load_refs(&port, 0).await.unwrap();
        qcow2.state().clusters.refs().set(8, 0);
        qcow2.alloc.take_neighbours(&port, 4).await.unwrap()
    });
    assert!(found.unwrap() > 8 << 16);
    assert!(!qcow2.state().clusters.is_quarantined(8));
}

/// The guest waits meanwhile, and the tables of one disk may have 8 GiB.
#[test]
fn many_tables_of_a_marked_image_are_not_read_when_it_is_recovered() {
    let read = |tables: u64, version: u32| {
        let table_covers = (2 << 20) / 8 * (2 << 20);
        let new = NewImage {
            version,
            refcount_bits: 16,
            cluster_bytes: 2 << 20,
            ..NewImage::new(tables * table_covers)
        };
        let mut machine = Machine::new(1, |path| create(path, &new));
        for table in 0..tables {
            machine.session.write(table * table_covers, &[7; 512]).unwrap();
        }
        machine.session.flush().unwrap();
        let machine = machine.reopen();
        let unused = std::collections::HashSet::from([1 << 40]);
        with_qcow2(&machine.session, |qcow2| qcow2.check_unused(&unused).unwrap())
    };
    assert_eq!(read(33, 3), 0);
    assert_eq!(read(2, 3), 4 << 20);
    assert_eq!(read(33, 2), 66 << 20, "it has no mark");
}
