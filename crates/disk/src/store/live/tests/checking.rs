//! Checks of a store in use: they find what a checkpoint has, whatever is done meanwhile, and are in nobody's way.

use std::cell::Cell;

use super::passes::{read_one, write_new};
use super::*;
use crate::store::check::{Findings, How, Outcome};
use crate::store::pace::Pace;

const DEEP: How = How { contents: true, deep: true, rate: None, mend: false };

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

    async fn waits(&self) {
        while !self.is_begun.get() {
            self.port.io.yield_to_others().await;
        }
    }
}

impl Process {
    /// A slow check, and something that begins when the check has its checkpoint.
    fn check_beside(
        &mut self,
        how: How,
        other: impl AsyncFnOnce(&Beside) -> io::Result<()>,
    ) -> (io::Result<Outcome>, io::Result<()>) {
        let Process { live, port, reactor } = self;
        let beside = Beside { live, port, is_begun: Cell::default(), is_over: Cell::default() };
        let mut outcome = None;
        let check = async {
            // So it takes longer than passes wait for who is in an epoch.
            let pace = Pace::bounded(Some(1 << 16), None);
            let progress = |_, _| {
                beside.is_begun.set(true);
                true
            };
            outcome = Some(beside.live.check_store(beside.port, how, &pace, &progress).await);
            beside.is_over.set(true);
            Ok(())
        };
        let other = async {
            beside.waits().await;
            other(&beside).await
        };
        let mut done = reactor.block_on(all(vec![Box::pin(check), Box::pin(other)])).unwrap();
        let done = done.pop().unwrap();
        (outcome.unwrap(), done)
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
        let first = live.core().checkpoint;
        live.operate(port, Operation::Delete(live.volume("s").unwrap())).await?;
        for round in 0..40 {
            // What is there already: no room but that of pages.
            for leaf in [0, 500, 1000, 1500] {
                beside.put(leaf + round, 1 + round % 2).await?;
            }
            live.checkpoint(port).await?;
        }
        assert!(!beside.is_over.get(), "it was checked before anything was changed");
        assert_eq!(live.core().checkpoint, first + 40);
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

#[test]
fn a_write_that_waits_for_room_ends_a_check_and_gets_it() {
    let (_machine, mut process) = with_a_volume();
    for block in (0..BLOCKS / 2).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let (outcome, done) = process.check_beside(DEEP, async |beside| {
        let passes = || beside.live.marks().passes.count();
        let before = passes();
        for word in 10_000..20_000 {
            // Nobody has had it, and what was there is nobody's.
            beside.put(word % 64, word).await?;
            if passes() > before {
                return Ok(());
            }
        }
        panic!("the store has room for all");
    });
    done.unwrap();
    let e = outcome.unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::ResourceBusy);
    assert!(e.get_ref().unwrap().is::<MadeWay>());
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(all_is_in_order(live, port)).unwrap().unwrap();
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
