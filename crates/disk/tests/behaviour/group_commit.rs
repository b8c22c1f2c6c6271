//! Flushes of several queues share commits: how many syncs they cost, and what each of them has
//! waited for. A flush that has begun makes no step but when it is polled, so the tests say in which
//! order things happen.

use std::future::{Future, poll_fn};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use ferrite_disk::{Disk, OpenOptions, Port, Session};
use ferrite_image_tools::NewImage;

use crate::model::{name, tools};
use ferrite_testkit::errno::{EIO, ENOSPC};
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const FLUSHES: usize = 16;

type Flush<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;

/// A disk without dirty metadata.
struct Bench {
    _dir: TempDir,
    faults: Faults,
    session: Session,
}

fn open(path: &Path, faults: &Faults) -> Session {
    let options =
        OpenOptions { state_dir: Some(path.with_extension("state")), ..Default::default() };
    let disk = Disk::open_image(&name(path), &options).unwrap();
    Session::new(Arc::new(disk), |arena| faults.open(arena, 64)).unwrap()
}

impl Bench {
    fn new(extension: &str) -> Bench {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let path = dir.path().join("a").with_extension(extension);
        let new = NewImage { bytes: Some(256 * MIB), ..NewImage::default() };
        tools(|tools| tools.create(&name(&path), &new)).unwrap();
        let faults = Faults::none();
        let mut session = open(&path, &faults);
        // Space is set aside, and nothing is dirty.
        session.write(0, &[1; 4096]).unwrap();
        for _ in 0..3 {
            session.flush().unwrap();
        }
        assert!(!session.disk().is_dirty());
        faults.list();
        faults.forget();
        Bench { _dir: dir, faults, session }
    }

    fn run<T>(&mut self, steps: impl AsyncFnOnce(&Disk, &Port, &Faults) -> T) -> T {
        let (disk, port) = (Arc::clone(self.session.disk()), self.session.port().clone());
        let faults = self.faults.clone();
        self.session.run(async move { steps(&disk, &port, &faults).await }).unwrap()
    }
}

/// Begins a flush, or so many.
async fn begin<'a>(disk: &'a Disk, port: &'a Port, count: usize) -> Vec<Flush<'a>> {
    let mut flushes: Vec<Flush<'a>> =
        (0..count).map(|_| Box::pin(disk.flush(port)) as Flush<'a>).collect();
    poll_fn(|cx| {
        flushes.iter_mut().for_each(|flush| assert!(flush.as_mut().poll(cx).is_pending()));
        Poll::Ready(())
    })
    .await;
    flushes
}

/// Waits for all of them.
async fn all(flushes: Vec<Flush<'_>>) -> Vec<io::Result<()>> {
    let mut left: Vec<Option<Flush<'_>>> = flushes.into_iter().map(Some).collect();
    let mut done: Vec<Option<io::Result<()>>> = left.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (flush, done) in left.iter_mut().zip(&mut done) {
            if let Some(Poll::Ready(outcome)) = flush.as_mut().map(|f| f.as_mut().poll(cx)) {
                (*flush, *done) = (None, Some(outcome));
            }
        }
        if left.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

/// The writes and syncs since the last look.
fn order(faults: &Faults) -> Vec<Kind> {
    let list = faults.take_list();
    list.iter().map(Kind::of).filter(|kind| [Kind::Write, Kind::Sync].contains(kind)).collect()
}

async fn write(disk: &Disk, port: &Port, offset: u64) {
    let piece = port.scratch.take(4096).await;
    piece.copy_in(&[7; 4096]);
    disk.write(port, offset, piece.span()).await.unwrap();
}

fn for_both_formats(check: impl Fn(&str)) {
    ["vhd", "qcow2"].into_iter().for_each(check);
}

#[test]
fn sixteen_flushes_at_once_cost_two_commits() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        let done = bench.run(async |disk, port, _| all(begin(disk, port, FLUSHES).await).await);
        assert!(done.len() == FLUSHES && done.iter().all(Result::is_ok), "{extension}: {done:?}");
        // With nothing dirty each commit is a sync.
        assert_eq!(bench.faults.seen(&[Kind::Sync]), 2, "{extension}");
    });
}

#[test]
fn flushes_of_new_data_share_the_syncs_of_one_commit() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        let syncs_of_one = bench.run(async |disk, port, faults| {
            write(disk, port, 64 * MIB).await;
            faults.forget();
            disk.flush(port).await.unwrap();
            faults.seen(&[Kind::Sync])
        });
        let done = bench.run(async |disk, port, faults| {
            write(disk, port, 128 * MIB).await;
            faults.forget();
            all(begin(disk, port, FLUSHES).await).await
        });
        assert!(done.len() == FLUSHES && done.iter().all(Result::is_ok), "{extension}: {done:?}");
        // One commit with all of it, and one for those that came after its beginning.
        let syncs = bench.faults.seen(&[Kind::Sync]);
        assert!(syncs <= 2 * syncs_of_one, "{extension}: {syncs}, one commit takes {syncs_of_one}");
    });
}

#[test]
fn a_flush_that_comes_while_a_commit_runs_is_not_answered_by_that() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            let mut flushes = begin(disk, port, 1).await;
            // In place: it is data only, and nothing but a sync brings it to the medium.
            write(disk, port, 0).await;
            assert_eq!(order(faults), [Kind::Sync, Kind::Write], "{extension}");
            flushes.extend(begin(disk, port, 3).await);
            assert!(all(flushes).await.iter().all(Result::is_ok), "{extension}");
            assert_eq!(order(faults), [Kind::Sync], "{extension}");
        });
    });
}

#[test]
fn all_who_waited_for_a_commit_that_failed_get_its_error_and_the_next_one_is_made() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            let mut flushes = begin(disk, port, 1).await;
            write(disk, port, 64 * MIB).await;
            faults.set([Ops::from(Kind::Write).fail(ENOSPC)]);
            flushes.extend(begin(disk, port, FLUSHES - 1).await);
            faults.forget();
            let done = all(flushes).await;
            assert!(done[0].is_ok(), "{extension}: it was the commit before");
            let errors: Vec<_> =
                done[1..].iter().map(|d| d.as_ref().unwrap_err().raw_os_error()).collect();
            assert_eq!(errors, [Some(ENOSPC); FLUSHES - 1], "{extension}");
            // One attempt for all of them.
            assert_eq!(faults.seen(&[Kind::Write]), 1, "{extension}");
            faults.clear();
            assert!(disk.is_dirty(), "{extension}");
            disk.flush(port).await.unwrap();
        });
    });
}

#[test]
fn after_a_sync_that_failed_no_flush_succeeds_whenever_it_came() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            faults.set([Ops::from(Kind::Sync).fail(EIO)]);
            let flushes = begin(disk, port, FLUSHES).await;
            let done = all(flushes).await;
            assert!(done.len() == FLUSHES && done.iter().all(Result::is_err), "{extension}");
            faults.clear();
            disk.flush(port).await.unwrap_err();
            assert_eq!(faults.seen(&[Kind::Sync]), 1, "{extension}: none after that");
        });
    });
}

#[test]
fn a_commit_that_is_dropped_with_its_task_answers_nobody() {
    for_both_formats(|extension| {
        let mut bench = Bench::new(extension);
        bench.run(async |disk, port, faults| {
            write(disk, port, 64 * MIB).await;
            faults.forget();
            faults.list();
            let mut flushes = begin(disk, port, 3).await;
            drop(flushes.remove(0));
            assert_eq!(order(faults), [Kind::Write], "{extension}: it had not got further");
            assert!(disk.is_dirty(), "{extension}");
            assert!(all(flushes).await.iter().all(Result::is_ok), "{extension}");
            assert!(!disk.is_dirty(), "{extension}");
            // A dropped flush that waits takes no other flush's turn with it.
            faults.forget();
            let mut flushes = begin(disk, port, 4).await;
            drop(flushes.remove(1));
            assert!(all(flushes).await.iter().all(Result::is_ok), "{extension}");
            assert_eq!(faults.seen(&[Kind::Sync]), 2, "{extension}");
        });
    });
}
