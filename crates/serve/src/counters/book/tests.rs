use std::os::unix::fs::symlink;
use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::counters::account::{Account, Kind};
use crate::counters::layout::KINDS_AT;
use crate::counters::snapshot::{Problem, Snapshot, parse, read};
use crate::path::work::Action;
use crate::trace::Stages;

/// A disk's run directory in a folder of its own.
fn run_dir(base: &tempfile::TempDir) -> PathBuf {
    base.path().join("vbd-7-51712")
}

fn counters(run_dir: &Path, image: &str) -> Counters {
    let counters = Counters::default();
    counters.keep_in(run_dir, image);
    counters
}

fn account(counters: &Counters, path: usize) -> Account {
    Account::new(counters.page(path).unwrap())
}

fn seen(run_dir: &Path) -> Snapshot {
    read(&stats_file(run_dir)).unwrap()
}

fn kind(action: Action) -> Kind {
    Kind::of(action)
}

fn stages(taken_ns: u64, answered_ns: u64) -> Stages {
    Stages { taken_ns, answered_ns, ..Stages::default() }
}

#[test]
fn what_a_queue_counts_is_read_by_others() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let counters = counters(&dir, "/a/disk.vhd");
    let mut account = account(&counters, 3);
    (0..3).for_each(|_| account.submitted(kind(Action::Read)));
    (0..2).for_each(|_| account.submitted(kind(Action::Write)));
    account.submitted(kind(Action::Flush));
    // Two that were taken and answered together, and one that was not.
    account.done(kind(Action::Read), &stages(1_000, 101_000), 8);
    account.done(kind(Action::Read), &stages(1_000, 101_000), 16);
    account.done(kind(Action::Write), &stages(1_000, 101_000), 32);
    account.failed(kind(Action::Write), &stages(2_000, 5_002_000));
    account.failed(Kind::Refused, &stages(2_000, 3_000));
    account.counters().requests.add(5);
    account.settle_all();
    let seen = seen(&dir);
    assert_eq!((seen.disk.as_str(), seen.image.as_str()), ("vbd-7-51712", "/a/disk.vhd"));
    assert_eq!(seen.pid, std::process::id());
    assert!(seen.process().is_some() && seen.made_unix_s > 1_600_000_000);
    assert_eq!((seen.counts.requests, seen.counts.refused), (5, 1));
    let of =
        |k: &snapshot::KindCounts| (k.submitted, k.completed, k.errors, k.sectors, k.in_flight());
    assert_eq!(of(&seen.reads), (3, 2, 0, 24, 1));
    assert_eq!(of(&seen.writes), (2, 2, 1, 32, 0));
    assert_eq!(of(&seen.flushes), (1, 0, 0, 0, 1));
    assert_eq!((seen.reads.sum_ns, seen.reads.max_ns), (200_000, 100_000));
    assert_eq!((seen.writes.sum_ns, seen.writes.max_ns), (5_100_000, 5_000_000));
    assert_eq!(seen.reads.histogram.iter().sum::<u64>(), 2);
    assert_eq!(counters.counts().requests, 5);
}

#[test]
fn the_next_process_counts_on_and_nothing_is_in_flight_at_its_start() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let first = counters(&dir, "/old");
    let mut killed = account(&first, 1);
    (0..5).for_each(|_| killed.submitted(kind(Action::Read)));
    killed.done(kind(Action::Read), &stages(1, 2), 8);
    killed.counters().requests.add(1);
    killed.settle_all();
    assert_eq!(seen(&dir).reads.in_flight(), 4);
    let second = counters(&dir, "/new");
    let now = seen(&dir);
    assert_eq!((now.reads.in_flight(), now.reads.completed, now.image.as_str()), (0, 1, "/new"));
    assert_eq!(second.counts().requests, 0, "counts of its own");
    let mut account = account(&second, 1);
    account.submitted(kind(Action::Read));
    account.counters().requests.add(1);
    account.settle_all();
    assert_eq!(seen(&dir).reads.in_flight(), 1);
    account.done(kind(Action::Read), &stages(1, 2), 8);
    drop(account);
    let now = seen(&dir);
    assert_eq!((now.reads.completed, now.reads.sectors, now.counts.requests), (2, 16, 2));
    assert_eq!(second.counts().requests, 1);
    assert_eq!(std::fs::read_dir(base.path().join(FOLDER)).unwrap().count(), 1);
}

#[test]
fn a_connection_after_another_goes_on_in_the_same_file() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let counters = counters(&dir, "/a");
    account(&counters, 0).counters().sweeps.add(1);
    counters.open();
    account(&counters, 0).counters().sweeps.add(1);
    assert_eq!((seen(&dir).counts.sweeps, counters.counts().sweeps), (2, 2));
    // The disk was removed, and one of its name was attached.
    std::fs::remove_file(stats_file(&dir)).unwrap();
    counters.open();
    account(&counters, 0).counters().sweeps.add(5);
    assert_eq!((seen(&dir).counts.sweeps, counters.counts().sweeps), (5, 7));
}

#[test]
fn what_is_no_file_of_this_disk_gives_way() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let file = stats_file(&dir);
    let whole = |change: &dyn Fn(&mut Vec<u8>)| {
        account(&counters(&dir, "/a"), 0).counters().sweeps.add(1);
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        drop(counters(&dir, "/a"));
        seen(&dir).counts.sweeps
    };
    assert_eq!(whole(&|_| {}), 1);
    assert_eq!(whole(&|bytes| bytes[0] ^= 1), 0);
    assert_eq!(whole(&|bytes| bytes[7] += 1), 0, "another version");
    assert_eq!(whole(&|bytes| bytes[8 * USED_AT + 1] = 1), 0, "too many queues");
    assert_eq!(whole(&|bytes| bytes[8 * BOOT_AT] ^= 1), 0, "an earlier start of the machine");
    assert_eq!(whole(&|bytes| bytes[DISK_TEXT_AT + 8] = b'x'), 0, "another disk's");
    assert_eq!(whole(&|bytes| bytes.truncate(PAGE_BYTES)), 0, "cut off");
    assert_eq!(whole(&|bytes| bytes.clear()), 0);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[8 * USED_AT + 7] = 0x10;
    assert!(matches!(parse(&bytes), Err(Problem::Invalid("the number of its queues"))));
    std::fs::remove_file(&file).unwrap();
    let theirs = base.path().join("theirs");
    std::fs::write(&theirs, b"untouched").unwrap();
    symlink(&theirs, &file).unwrap();
    drop(counters(&dir, "/a"));
    assert_eq!((seen(&dir).counts.sweeps, std::fs::read(&theirs).unwrap().len()), (0, 9));
}

#[test]
fn a_disk_without_a_file_counts_in_memory() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    std::fs::write(base.path().join(FOLDER), b"in the way").unwrap();
    let counters = counters(&dir, "/a");
    account(&counters, 2).counters().sweeps.add(1);
    assert_eq!(counters.counts().sweeps, 1);
    std::fs::remove_file(base.path().join(FOLDER)).unwrap();
    counters.open();
    account(&counters, 2).counters().sweeps.add(1);
    assert_eq!((seen(&dir).counts.sweeps, counters.counts().sweeps), (1, 2));
    // One that has no place has none in the file either.
    account(&counters, PAGES).counters().sweeps.add(1);
    assert_eq!((seen(&dir).counts.sweeps, counters.counts().sweeps), (1, 3));
}

#[test]
fn long_names_are_cut_between_characters() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let counters = counters(&dir, &format!("x{}", "ä".repeat(3000)));
    let image = seen(&dir).image;
    assert_eq!((image.len(), image.ends_with('ä')), (IMAGE_TEXT_MAX - 1, true));
    counters.serves("/next");
    assert_eq!(seen(&dir).image, "/next");
}

#[test]
fn a_name_that_is_being_written_is_torn() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let counters = counters(&dir, "/a");
    let mut bytes = std::fs::read(stats_file(&dir)).unwrap();
    bytes[8 * IMAGE_CHANGES_AT] |= 1;
    assert!(matches!(parse(&bytes), Err(Problem::Torn)));
    std::fs::write(stats_file(&dir), &bytes).unwrap();
    assert!(matches!(read(&stats_file(&dir)), Err(Problem::Torn)));
    // The writer died there. The next writer writes the file whole.
    counters.serves("/b");
    assert_eq!(seen(&dir).image, "/b");
}

#[test]
fn a_page_holds_every_kind_by_itself() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base);
    let counters = counters(&dir, "/a");
    let page = counters.page(0).unwrap();
    for (word, n) in page.words().iter().zip(1..) {
        word.store(n, Relaxed);
    }
    let seen = seen(&dir);
    let submitted = seen.kinds().map(|(_, kind)| kind.submitted as usize - 1 - KINDS_AT);
    assert_eq!(submitted, [0, 120, 240, 360]);
    assert_eq!(seen.discards.histogram[103], 512);
    assert_eq!(seen.counts.requests, 1);
}
