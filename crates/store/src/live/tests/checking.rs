//! Checks of a store in use: they find what a checkpoint has, whatever is done meanwhile, and do not delay guests.

use std::cell::Cell;
use std::time::Duration;

use super::passes::{read_one, write_new};
use super::*;
use crate::check::{Findings, How, Outcome};
use crate::live::BackgroundTask;
use crate::pace::Pace;

pub(super) const DEEP: How = How { contents: true, deep: true, rate: None, mend: false };

/// A check beside what a story does. It may make way.
pub(super) async fn all_is_in_order(live: &Live, port: &Port) -> io::Result<()> {
    match live.check_store(port, DEEP, &Pace::unbounded(), &|_, _| true).await {
        Ok(outcome) => {
            assert_eq!(outcome.findings, Findings::default());
            Ok(())
        }
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        Err(e) => Err(e),
    }
}

/// Says what a process does while a check is under way.
struct Beside<'a> {
    live: &'a Live,
    port: &'a Port,
    is_begun: Cell<bool>,
    is_over: Cell<bool>,
}

impl Beside<'_> {
    /// All of a block of `v0` gets this word.
    async fn put(&self, block: u64, word: u64) -> io::Result<()> {
        let span = self.port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        self.port.memory().copy_in(span, &word.to_le_bytes().repeat(BLOCK_BYTES / 8));
        let volume = self.live.volume("v0").unwrap();
        self.live.write(self.port, volume, block * BLOCK_BYTES as u64, span).await
    }
}

impl Process {
    /// A slow check, and something that begins when the check has its checkpoint.
    fn check_beside<T>(
        &mut self,
        how: How,
        other: impl AsyncFnOnce(&Beside) -> io::Result<T>,
    ) -> (io::Result<Outcome>, io::Result<T>) {
        let Process { live, port, reactor } = self;
        let beside = Beside { live, port, is_begun: Cell::default(), is_over: Cell::default() };
        let (mut outcome, mut others) = (None, None);
        let check = async {
            // So it takes longer than a pass waits for operations in an epoch.
            let how = How { rate: Some(1 << 16), ..how };
            let pace = Pace::bounded(how.rate, None);
            let progress = |_, _| {
                beside.is_begun.set(true);
                true
            };
            outcome = Some(beside.live.check_store(beside.port, how, &pace, &progress).await);
            beside.is_over.set(true);
            Ok(())
        };
        let other = async {
            while !beside.is_begun.get() {
                port.io.yield_to_others().await;
            }
            others = Some(other(&beside).await);
            Ok(())
        };
        reactor.block_on(all(vec![Box::pin(check), Box::pin(other)])).unwrap();
        (outcome.unwrap(), others.unwrap())
    }
}

#[test]
fn a_check_finds_what_a_checkpoint_has_while_all_of_it_is_changed() {
    let (_machine, mut process) = with_a_volume();
    for block in (0..640).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let volume = process.volume("v0");
    process.operate(Operation::Snapshot(Name::new("s").unwrap(), volume)).unwrap();
    // Its leaves are its own again, so the next change drops them.
    for leaf in [100, 600, 1100, 1600] {
        write_new(&mut process, "v0", leaf, 1, 7).unwrap();
    }
    let (outcome, done) = process.check_beside(DEEP, async |beside| {
        let Beside { live, port, .. } = beside;
        let first = live.shared.core().checkpoint;
        live.operate(port, Operation::Delete(live.volume("s").unwrap())).await?;
        for round in 0..40 {
            // These contents exist already: their writes need room for pages only.
            for leaf in [0, 500, 1000, 1500] {
                beside.put(leaf + round, 1 + round % 2).await?;
            }
            live.checkpoint(port).await?;
        }
        assert!(!beside.is_over.get(), "it was checked before anything was changed");
        assert_eq!(live.shared.core().checkpoint, first + 40);
        // However long the check takes, a pass comes behind it.
        live.gc(port).await?;
        assert!(beside.is_over.get());
        Ok(())
    });
    done.unwrap();
    let outcome = outcome.unwrap();
    assert_eq!(outcome.findings, Findings::default());
    let mapped: Vec<u64> = outcome.stats.unwrap().volumes.iter().map(|v| v.mapped_bytes).collect();
    assert_eq!(mapped, [640, 642, 0].map(|blocks| blocks * BLOCK_BYTES as u64));
    assert_eq!(read_one(&mut process, "v0", 1030), 1);
    passes::nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn a_check_begins_at_any_time_of_a_checkpoint() {
    for delay in 0..60 {
        let (_machine, mut process) = with_a_volume();
        write_new(&mut process, "v0", 0, 16, 1).unwrap();
        let Process { live, port, reactor } = &mut process;
        let beside = Beside { live, port, is_begun: Cell::new(true), is_over: Cell::default() };
        let change = async {
            for _ in 0..delay {
                port.io.yield_to_others().await;
            }
            for leaf in [500, 1000, 1500] {
                beside.put(leaf, 1).await?;
                live.checkpoint(port).await?;
            }
            Ok(())
        };
        let check = all_is_in_order(live, port);
        let done = reactor.block_on(all(vec![Box::pin(check), Box::pin(change)])).unwrap();
        assert!(done.iter().all(Result::is_ok), "{delay}: {done:?}");
    }
}

/// Until it is over, blocks get new content, and their old content is dead. Gives the passes that writes had to make for
/// that.
async fn leave_garbage(beside: &Beside<'_>) -> io::Result<u64> {
    let passes = || beside.live.collector.passes().count();
    let before = passes();
    for word in 10_000..30_000 {
        if beside.is_over.get() {
            return Ok(passes() - before);
        }
        beside.put(word % 64, word).await?;
        // Much more often than the check looks.
        beside.port.io.sleep(Duration::from_millis(10)).await?;
    }
    panic!("the store has room for all, and the check has no end");
}

fn assert_made_way(outcome: io::Result<Outcome>) {
    let e = outcome.unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::ResourceBusy);
    assert!(e.get_ref().unwrap().is::<MadeWay>());
}

#[test]
fn a_check_ends_when_room_is_short_and_before_a_write_waits() {
    let (_machine, mut process) = with_a_volume();
    for block in (0..BLOCKS / 2).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let (outcome, passes) = process.check_beside(DEEP, leave_garbage);
    assert_made_way(outcome);
    assert_eq!(passes.unwrap(), 0);
}

#[test]
fn a_write_that_waits_for_room_ends_a_check_that_began_when_it_was_short() {
    let (_machine, mut process) = with_a_volume();
    for block in (0..BLOCKS / 2).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let mut word = 50_000;
    while !process.live.collector.is_short_of_room() {
        write_new(&mut process, "v0", word % 64, 1, word).unwrap();
        word += 1;
    }
    let (outcome, passes) = process.check_beside(DEEP, leave_garbage);
    assert_made_way(outcome);
    assert_eq!(passes.unwrap(), 1);
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(all_is_in_order(live, port)).unwrap().unwrap();
}

#[test]
fn the_stores_own_work_that_needs_no_pass_goes_on_beside_a_check() {
    let (_machine, mut process) = with_a_volume();
    for block in (0..640).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let (outcome, done) =
        process.check_beside(DEEP, async |Beside { live, port, is_over, .. }| {
            live.begin_scrub();
            live.begin_compaction();
            while live.run_background_task(port, &Pace::unbounded()).await? == BackgroundTask::Ran {
            }
            assert!(!is_over.get(), "it has waited for the check");
            Ok(())
        });
    done.unwrap();
    outcome.unwrap();
}

#[test]
fn a_check_asks_all_the_time_whether_to_go_on() {
    let (_machine, mut process) = with_a_volume();
    let thin = Operation::Create(Name::new("thin").unwrap(), 1 << 24, 0);
    let thin = process.operate(thin).unwrap();
    let Process { live, port, reactor } = &mut process;
    let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
    port.memory().fill(span, 7);
    let leaves = 1000;
    for leaf in 0..leaves {
        let offset = leaf * (crate::page::V2P_ENTRIES * BLOCK_BYTES) as u64;
        let write = async { live.write(port, thin, offset, span).await };
        reactor.block_on(write).unwrap().unwrap();
    }
    let (asked, pace) = (Cell::new(0), Pace::unbounded());
    let progress = |_, _| {
        asked.set(asked.get() + 1);
        true
    };
    let check = async { live.check_store(port, How::default(), &pace, &progress).await };
    reactor.block_on(check).unwrap().unwrap();
    assert!(asked.get() > leaves / 64, "{}", asked.get());
}

#[test]
fn a_check_that_is_to_end_ends_between_two_steps_and_places_come_free_again() {
    let (_machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 16, 1).unwrap();
    let Process { live, port, reactor } = &mut process;
    let pace = Pace::unbounded();
    let stopped = live.check_store(port, DEEP, &pace, &|_, _| false);
    let e = reactor.block_on(stopped).unwrap().unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::Interrupted);
    passes::nothing_is_lost_and_nothing_left(&mut process);
}
