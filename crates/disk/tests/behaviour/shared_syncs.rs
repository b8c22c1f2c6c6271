//! A sync that fails, whichever task makes it: the kernel tells of lost writes once for each open file. No flush may
//! succeed for writes whose loss was reported to another task.

use std::future::{Future, poll_fn};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;

use ferrite_disk::{Disk, OpenOptions, Port, Session, SyncWitness};
use ferrite_image_tools::NewImage;

use crate::model::{name, tools};
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The last one keeps nothing of its own: it is a file, byte for byte.
const FORMATS: [&str; 3] = ["vhd", "qcow2", "raw"];
/// Those that take space as they are written to.
const THIN: [&str; 2] = ["vhd", "qcow2"];

type Step<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;

/// A disk without any writes.
struct Bench {
    _dir: TempDir,
    path: PathBuf,
    faults: Faults,
    session: Session,
}

impl Bench {
    fn new(extension: &str) -> Bench {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let path = dir.path().join("a").with_extension(extension);
        // Small clusters: space is taken often.
        let unit_bytes = (extension == "qcow2").then_some(512);
        let new = NewImage { bytes: Some(64 * MIB), unit_bytes, ..NewImage::default() };
        tools(|tools| tools.create(&name(&path), &new)).unwrap();
        let faults = Faults::none();
        let session = Bench::open(&path, &faults);
        Bench { _dir: dir, path, faults, session }
    }

    fn open(path: &Path, faults: &Faults) -> Session {
        let state_dir = Some(path.with_extension("state"));
        let options = OpenOptions { state_dir, ..Default::default() };
        let disk = Disk::open_image(&name(path), &options).unwrap();
        Session::new(Arc::new(disk), |arena| faults.open(arena, 64)).unwrap()
    }

    /// The process dies, and the next one opens the image.
    fn die(&mut self) {
        let nothing = Session::new(Arc::new(Disk::nothing()), |arena| self.faults.open(arena, 64));
        drop(std::mem::replace(&mut self.session, nothing.unwrap()));
        self.session = Bench::open(&self.path, &self.faults);
    }

    fn run<T>(&mut self, steps: impl AsyncFnOnce(&Disk, &Port, &Faults) -> T) -> T {
        let (disk, port) = (Arc::clone(self.session.disk()), self.session.port().clone());
        let faults = self.faults.clone();
        self.session.run(async move { steps(&disk, &port, &faults).await }).unwrap()
    }
}

fn syncs_fail(faults: &Faults) {
    faults.set([Ops::from(Kind::Sync).fail(EIO)]);
}

async fn write(disk: &Disk, port: &Port, offset: u64) -> io::Result<()> {
    let piece = port.scratch.take(4096).await;
    piece.copy_in(&[7; 4096]);
    disk.write(port, offset, piece.span()).await
}

/// Polls the step until it waits for the engine or for another step.
async fn begin<'a>(step: impl Future<Output = io::Result<()>> + 'a) -> Step<'a> {
    let mut step: Step<'a> = Box::pin(step);
    poll_fn(|cx| {
        assert!(step.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    step
}

#[test]
fn one_sync_of_an_image_is_under_way_whoever_asks_for_it() {
    for extension in THIN {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            let flush = begin(disk.flush(port)).await;
            assert_eq!(faults.seen(&[Kind::Sync]), 1, "{extension}");
            // The first write takes space, and syncs.
            syncs_fail(faults);
            let mut growth = begin(write(disk, port, 0)).await;
            for _ in 0..100 {
                port.io.yield_to_others().await;
                let again = poll_fn(|cx| Poll::Ready(growth.as_mut().poll(cx).is_pending())).await;
                assert!(again && faults.seen(&[Kind::Sync]) == 1, "{extension}");
            }
            flush.await.unwrap();
            growth.await.unwrap_err();
            assert_eq!(faults.seen(&[Kind::Sync]), 2, "{extension}");
        });
    }
}

#[test]
fn a_flush_that_comes_while_a_sync_fails_does_not_succeed() {
    for extension in THIN {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            syncs_fail(faults);
            let mut growth = begin(write(disk, port, 0)).await;
            while faults.seen(&[Kind::Sync]) == 0 {
                let poll = poll_fn(|cx| Poll::Ready(growth.as_mut().poll(cx))).await;
                assert!(poll.is_pending(), "{extension}: it syncs");
                port.io.yield_to_others().await;
            }
            faults.clear();
            let flush = begin(disk.flush(port)).await;
            growth.await.unwrap_err();
            flush.await.unwrap_err();
            assert_eq!(faults.seen(&[Kind::Sync]), 1, "{extension}: none after that");
            assert!(disk.is_faulty(), "{extension}");
        });
    }
}

#[test]
fn of_two_flushes_of_a_raw_disk_none_succeeds_if_one_has_failed() {
    let mut bench = Bench::new("raw");
    bench.run(async |disk, port, faults| {
        syncs_fail(faults);
        let first = begin(disk.flush(port)).await;
        faults.clear();
        let second = begin(disk.flush(port)).await;
        first.await.unwrap_err();
        second.await.unwrap_err();
        assert_eq!(faults.seen(&[Kind::Sync]), 1);
        assert!(disk.is_faulty());
        disk.flush(port).await.unwrap_err();
    });
}

#[test]
fn a_sync_that_is_dropped_with_its_task_counts_as_failed() {
    for extension in FORMATS {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            syncs_fail(faults);
            drop(begin(disk.flush(port)).await);
            faults.clear();
            disk.flush(port).await.expect_err(extension);
        });
    }
}

/// Keeps what the next process would find of the journal if this one died when it is told.
#[derive(Default)]
struct Heir {
    state_dir: PathBuf,
    errors: Mutex<Vec<Option<i32>>>,
    journals: Mutex<Vec<(PathBuf, Vec<u8>)>>,
}

impl SyncWitness for Heir {
    fn sync_has_failed(&self, e: &io::Error) {
        self.errors.lock().unwrap().push(e.raw_os_error());
        for file in std::fs::read_dir(&self.state_dir).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            self.journals.lock().unwrap().push((path, bytes));
        }
    }
}

impl Heir {
    fn of(bench: &Bench) -> Arc<Heir> {
        let heir = Heir { state_dir: bench.path.with_extension("state"), ..Heir::default() };
        let heir = Arc::new(heir);
        let weak: Weak<dyn SyncWitness> = Arc::downgrade(&heir) as Weak<Heir>;
        bench.session.disk().witness_syncs(weak);
        heir
    }
}

/// Writes that were answered beside the sync would be in no journal, and the next process would not know that they may
/// be gone.
#[test]
fn a_witness_knows_of_a_failed_sync_before_the_journal_is_void() {
    for extension in THIN {
        let mut bench = answered(extension);
        let heir = Heir::of(&bench);
        syncs_fail(&bench.faults);
        bench.session.flush().unwrap_err();
        bench.faults.clear();
        assert_eq!(*heir.errors.lock().unwrap(), [Some(EIO)], "{extension}");
        for (path, bytes) in heir.journals.lock().unwrap().drain(..) {
            assert_ne!(std::fs::read(&path).unwrap(), bytes, "{extension}: it is void since");
            std::fs::write(&path, bytes).unwrap();
        }
        bench.die();
        let mut found = [9; 4096];
        bench.session.read(2 * MIB, &mut found).unwrap();
        assert_eq!(found, [2; 4096], "{extension}: it was not void then");
    }
}

/// A process that retires drops its tasks, and the next one goes on with the guest.
#[test]
fn a_witness_is_not_told_of_a_sync_that_was_dropped_while_it_ran() {
    for extension in FORMATS {
        let mut bench = Bench::new(extension);
        let heir = Heir::of(&bench);
        bench.run(async |disk, port, _| {
            drop(begin(disk.flush(port)).await);
            assert!(disk.is_faulty(), "{extension}");
        });
        assert!(heir.errors.lock().unwrap().is_empty(), "{extension}");
    }
}

/// One write is durable, and one was answered.
fn answered(extension: &str) -> Bench {
    let mut bench = Bench::new(extension);
    bench.session.write(0, &[1; 4096]).unwrap();
    bench.session.flush().unwrap();
    bench.session.write(2 * MIB, &[2; 4096]).unwrap();
    assert!(bench.session.disk().is_dirty(), "{extension}");
    bench
}

#[test]
fn after_a_sync_that_has_failed_a_flush_writes_nothing() {
    for extension in THIN {
        let mut bench = answered(extension);
        syncs_fail(&bench.faults);
        bench.session.flush().unwrap_err();
        bench.faults.clear();
        bench.faults.forget();
        bench.session.flush().unwrap_err();
        assert_eq!(bench.faults.seen(&[Kind::Write, Kind::Sync]), 0, "{extension}");
    }
}

/// A VHD in a file takes space without a sync.
#[test]
fn after_a_write_whose_sync_has_failed_a_successor_recovers_nothing() {
    let mut bench = answered("qcow2");
    syncs_fail(&bench.faults);
    let after = 1024..60 * MIB / 4096;
    let failed = after.into_iter().any(|n| bench.session.write(n * 4096, &[3; 4096]).is_err());
    assert!(failed, "a write takes space, and syncs");
    bench.faults.clear();
    bench.die();
    assert!(!bench.session.disk().is_dirty());
    let mut found = [9; 4096];
    bench.session.read(2 * MIB, &mut found).unwrap();
    assert_eq!(found, [0; 4096], "it is as after a power cut");
}

#[test]
fn after_a_write_that_has_failed_for_another_reason_a_successor_recovers_the_answered_ones() {
    for extension in THIN {
        let mut bench = answered(extension);
        bench.faults.set([Ops::from(Kind::Write).fail(EIO)]);
        bench.session.write(8 * MIB, &[3; 4096]).unwrap_err();
        bench.faults.clear();
        bench.die();
        let mut found = [9; 4096];
        bench.session.read(2 * MIB, &mut found).unwrap();
        assert_eq!(found, [2; 4096], "{extension}");
    }
}
