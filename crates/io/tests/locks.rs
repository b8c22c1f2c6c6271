//! How long a lock on an image is held. Alone in its process: a process that forks keeps other
//! tests' files, and so their locks, for a moment.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_host::byte_locks::{is_locked_by_others, lock_shared};
use ferrite_io::arena::Arena;
use ferrite_io::engine::{Completion, FileId, Op};
use ferrite_io::engines::{EngineChoice, EngineKind};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FlockOperation, flock};

const LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;

const PATIENCE: Duration = Duration::from_secs(30);
const MOMENT: Duration = Duration::from_millis(1);

/// Of the image, that is locked, too.
const BYTE: u32 = 101;

/// Names the image to the process that is killed.
const IMAGE: &str = "FERRITE_IO_TEST_IMAGE";
/// And its engine.
const ENGINE: &str = "FERRITE_IO_TEST_ENGINE";

/// One test at a time forks or looks at locks.
static ALONE: Mutex<()> = Mutex::new(());

fn open(path: &Path) -> Arc<OwnedFd> {
    Arc::new(File::options().read(true).write(true).open(path).unwrap().into())
}

/// Takes the lock as soon as it is free: the kernel may let go of a file in the background.
fn take(mine: &OwnedFd) {
    take_beside(mine, || std::thread::sleep(MOMENT));
}

/// The same, with something to do between two tries.
fn take_beside(mine: &OwnedFd, mut work: impl FnMut()) {
    let end = Instant::now() + PATIENCE;
    while flock(mine, LOCK).is_err() {
        assert!(Instant::now() < end, "the lock is held for ever");
        work();
    }
}

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_lock_is_held_as_long_as_the_engine_and_no_longer() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, [0; 512]).unwrap();
    for kind in [EngineKind::ALL; 20].concat() {
        let mine = open(&path);
        flock(&mine, LOCK).unwrap();
        let arena = Arena::new(1).unwrap();
        let mut e = kind.open(arena.clone(), 8).unwrap();
        let f = e.add_file(mine).unwrap();
        for token in 0..20 {
            e.push(token, Op::Write { file: f, offset: 0, buf: arena.span(0, 512) });
            e.push(token, Op::Sync { file: f });
        }
        e.submit().unwrap();
        let theirs = open(&path);
        assert!(flock(&theirs, LOCK).is_err());
        drop(e);
        take(&theirs);
    }
}

#[test]
fn a_lock_comes_free_when_its_engine_lets_go_of_the_file_and_goes_on_with_others() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, [0; 512]).unwrap();
    for kind in EngineKind::ALL {
        let arena = Arena::new(1).unwrap();
        let mut e = kind.open(arena.clone(), 8).unwrap();
        let mut out = Vec::new();
        for round in 0..50 {
            let mine = open(&path);
            // A worker thread of the kernel may have had the last of it, and leaves its end to this one.
            take_beside(&mine, || e.wait(Some(MOMENT)).unwrap());
            let f = e.add_file(mine).unwrap();
            assert_eq!(f, FileId(0));
            e.push(round, Op::Write { file: f, offset: 0, buf: arena.span(0, 512) });
            while out.is_empty() {
                e.wait(None).unwrap();
                e.reap(&mut out);
            }
            assert_eq!(out.pop(), Some(Completion { token: round, raw: 512 }));
            e.clear_files().unwrap();
        }
    }
}

#[test]
fn a_lock_of_a_process_that_was_killed_comes_free() {
    if let Some(image) = std::env::var_os(IMAGE) {
        be_killed(Path::new(&image));
    }
    let _alone = alone();
    EngineKind::ALL.into_iter().for_each(comes_free);
}

fn comes_free(kind: EngineKind) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let name = "a_lock_of_a_process_that_was_killed_comes_free";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(IMAGE, &path)
        .env(ENGINE, EngineChoice::Only(kind).to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.ends_with("in flight")));
    let mine = open(&path);
    assert!(flock(&mine, LOCK).is_err());
    assert!(is_locked_by_others(&*mine, BYTE).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    take(&mine);
    // The others go with it: a successor that has the one meets none of its predecessor's.
    assert!(!is_locked_by_others(&*mine, BYTE).unwrap());
}

/// Writes for ever, with a lock.
fn be_killed(image: &Path) -> ! {
    let mine = open(image);
    flock(&mine, LOCK).unwrap();
    lock_shared(&*mine, BYTE).unwrap();
    let arena = Arena::new(1).unwrap();
    let choice: EngineChoice = std::env::var(ENGINE).unwrap().parse().unwrap();
    let mut e = choice.decide().unwrap().kind.open(arena.clone(), 64).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let f = e.add_file(mine).unwrap();
    e.push(100, Op::Readable { fd: event.as_raw_fd() });
    let mut out = Vec::new();
    for token in 0..32 {
        e.push(token, Op::Write { file: f, offset: token << 12, buf: arena.span(0, 4096) });
    }
    e.submit().unwrap();
    println!("in flight");
    loop {
        e.wait(None).unwrap();
        e.reap(&mut out);
        for c in out.drain(..) {
            e.push(c.token, Op::Write { file: f, offset: c.token << 12, buf: arena.span(0, 4096) });
        }
    }
}

#[test]
fn a_file_that_is_held_stays_locked_until_its_ring_has_gone() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("alive");
    std::fs::write(&path, []).unwrap();
    for kind in [EngineKind::Uring, EngineKind::UringPolled] {
        let mine = open(&path);
        take(&mine);
        let mut e = kind.open(Arena::new(1).unwrap(), 8).unwrap();
        e.hold(mine.as_fd()).unwrap();
        drop(mine);
        let theirs = open(&path);
        assert!(flock(&theirs, LOCK).is_err());
        e.add_file(open(&path)).unwrap();
        e.clear_files().unwrap();
        assert!(flock(&theirs, LOCK).is_err());
        drop(e);
        take(&theirs);
    }
}
