//! The collector: passes find out which contents and places are in use, and free the others (store.md 7).
//!
//! The steps are those of [`Collector::pass`]. A pass that ends early, also dropped with its task, has changed nothing
//! but entries of contents that no volume has.

mod joining;
mod marks;
mod sweeping;

use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::{Held, SharedLock};

pub(super) use self::marks::Phase;

use self::marks::Marks;
use super::changes::{ChangeKind, Changes};
use super::committer::Committer;
use super::groups::Groups;
use super::journal::Journal;
use super::leaves::Leaves;
use super::loader::Loader;
use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::Damaged;
use crate::checkpoint::Core;
use crate::free_numbers::page_of;
use crate::medium::MAX_BLOCKS;
use crate::pace::Pace;
use crate::side_by_side::all;
use crate::space::{NoRoom, PassInput, Passes};
use crate::tree::Link;

/// How long a pass waits before it checks the epochs again.
const AGAIN: Duration = Duration::from_millis(1);
/// How often a pass checks the epochs before it gives up on an operation that hangs: half a minute.
const LOOKS_AT_EPOCHS: u32 = 30_000;
/// The most places that one checkpoint frees: 4 GiB, which have 128 KiB of bits.
const PLACES_AT_ONCE: u64 = 1 << 20;
/// A pass is in a hurry, and looks for no duplicates, when writers have got this part of the free places.
const IN_A_HURRY: u64 = 8;
/// The most replaced pages whose places a check may keep. Their numbers take 64 MiB of memory.
const MOST_KEPT: usize = 1 << 23;

/// The contents that a pass looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Contents that no volume has. While no write waits for room, also duplicate contents.
    ForDead,
    /// Contents that no volume has, and duplicate contents.
    ForAll,
}

/// The results of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Contents that volumes have.
    pub contents: u64,
    /// Contents that no volume had any more.
    pub dead: u64,
    /// Contents that were duplicates of those of lower numbers.
    pub joined: u64,
    /// Blocks of the store that the pass has freed.
    pub freed: u64,
    /// The pass has compared all contents.
    pub is_thorough: bool,
}

/// Makes passes, one at a time, and knows which writes wait for one.
pub(super) struct Collector {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    committer: Arc<Committer>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    groups: Arc<Groups>,
    loader: Arc<Loader>,
    /// Held by a pass, and by work that must not run beside a pass.
    passing: SharedLock,
    marks: Mutex<Marks>,
    /// Writes that wait for a pass.
    waiting: AtomicU32,
}

/// Resets the marks when a pass ends, however it ends.
struct Ends<'a>(&'a Collector);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        {
            let core = &mut *self.0.shared.core();
            core.kept.clear();
            core.space.end_marks();
        }
        let mut marks = self.0.marks();
        (marks.phase, marks.live) = (Phase::None, None);
        marks.passes.stop();
    }
}

/// Counts a write that waits for a pass, until it is dropped, also with its task.
struct Waits<'a>(&'a AtomicU32);

impl Waits<'_> {
    fn one_more(count: &AtomicU32) -> Waits<'_> {
        count.fetch_add(1, Ordering::Relaxed);
        Waits(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The parts that a collector uses.
pub(super) struct Uses {
    pub(super) shared: Arc<Shared>,
    pub(super) journal: Arc<Journal>,
    pub(super) committer: Arc<Committer>,
    pub(super) leaves: Arc<Leaves>,
    pub(super) changes: Arc<Changes>,
    pub(super) groups: Arc<Groups>,
    pub(super) loader: Arc<Loader>,
}

impl Collector {
    pub(super) fn new(uses: Uses) -> Collector {
        let Uses { shared, journal, committer, leaves, changes, groups, loader } = uses;
        let marks = Mutex::new(Marks::new(shared.core().space.free()));
        Collector {
            shared,
            journal,
            committer,
            leaves,
            changes,
            groups,
            loader,
            passing: SharedLock::new(),
            marks,
            waiting: AtomicU32::new(0),
        }
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The phase that decides about content which a write finds again. The write asks when it is in its epoch.
    pub(super) fn phase(&self) -> Phase {
        self.marks().phase
    }

    /// Claims content that a write has found again. `false`: the pass may free it.
    pub(super) fn claim(&self, phase: Phase, number: u64) -> bool {
        phase == Phase::None || self.marks().claim(phase, number)
    }

    /// Marks numbers that a write is given, so the pass under way does not free them.
    pub(super) fn are_given(&self, numbers: impl Iterator<Item = u64>) {
        let mut marks = self.marks();
        numbers.for_each(|number| marks.is_given(number));
    }

    /// How many passes have begun, and what they have led to.
    pub(super) fn passes(&self) -> Passes {
        self.marks().passes
    }

    /// The result of the last pass.
    pub(super) fn last(&self) -> Option<Passed> {
        self.marks().last
    }

    /// Has a pass begin soon, though room is not low.
    pub(super) fn want(&self) {
        self.marks().passes.want();
    }

    /// Whether a pass is to begin by itself: room is low, and lower than it was.
    pub(super) fn wants_pass(&self) -> bool {
        let (free, places) = self.room();
        self.marks().passes.wants_one(free, places)
    }

    /// Whether a pass would begin by itself, or a write might soon wait for one.
    pub(super) fn is_short_of_room(&self) -> bool {
        let (free, places) = self.room();
        let kept = self.shared.core().space.waiting();
        let is_low = self.marks().passes.is_low(free, places);
        is_low || kept > MOST_KEPT || self.changes.check_room(ChangeKind::Data).is_err()
    }

    /// The free places, and all places.
    fn room(&self) -> (u64, u64) {
        let core = self.shared.core();
        (core.space.free(), core.layout.places())
    }

    /// Whether a write waits for a pass.
    pub(super) fn has_waiting_writes(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Lets requests go first behind each page of background work, at the pace given. While a write waits for room,
    /// the work does not rest.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the work.
    pub(super) async fn page_done(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        pace.check()?;
        port.io.yield_to_others().await;
        let is_awaited = self.marks().passes.is_awaited();
        match is_awaited {
            true => Ok(()),
            false => pace.used(&port.io, BLOCK_BYTES as u64).await,
        }
    }

    /// Runs `act`. While it finds no room, and a checkpoint or passes may make some, it runs `act` again behind them.
    /// `act` must not leave an epoch open, since a pass would wait for its end (section 7, ENOSPC).
    ///
    /// # Errors
    /// Those of `act`, of a checkpoint, and of [`pass`](Collector::pass). `StorageFull`: no room came free.
    pub(super) async fn with_room(
        &self,
        port: &Port,
        mut act: impl AsyncFnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut first, mut is_checkpointed) = (None, false);
        loop {
            match act().await {
                Err(e) if e.kind() == io::ErrorKind::StorageFull => {}
                done => return done,
            }
            // A checkpoint frees the pages that the dirty ones replace.
            is_checkpointed =
                !is_checkpointed && self.changes.check_room(ChangeKind::Data).is_err();
            if is_checkpointed {
                let checkpoint = self.shared.core().checkpoint;
                let is_newer = || self.shared.core().checkpoint != checkpoint;
                self.committer.checkpoint_unless(port, is_newer).await?;
                continue;
            }
            if self.is_full() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let now = self.marks().passes.no_room();
            let first = *first.get_or_insert(now);
            if self.marks().passes.may_fail(first) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.wait_for_room(port, first, now).await?;
        }
    }

    /// The input of a pass that begins now.
    fn pass_input(&self) -> PassInput {
        let blocks = self.journal.ended();
        PassInput { blocks, indexed: self.loader.progress().done }
    }

    /// Whether a pass would free nothing, so a write that has found no room fails at once.
    fn is_full(&self) -> bool {
        let input = self.pass_input();
        self.marks().passes.would_find_nothing(input)
    }

    /// Waits for the end of the next pass, or makes one. `first` is of the time when the write found no room first,
    /// `now` of the last time.
    ///
    /// # Errors
    /// As [`pass`](Collector::pass).
    async fn wait_for_room(&self, port: &Port, first: NoRoom, now: NoRoom) -> io::Result<()> {
        let _waits = Waits::one_more(&self.waiting);
        let _alone = self.passing.lock(&port.io).await?;
        let passes = self.marks().passes;
        if passes.has_ended_since(now) {
            return Ok(());
        }
        let look = if passes.has_had_one(first) { Look::ForAll } else { Look::ForDead };
        match self.pass(port, &Pace::unbounded(), look).await {
            // While an operation hangs, a pass cannot free room.
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err(io::ErrorKind::StorageFull.into()),
            done => done.map(drop),
        }
    }

    /// Frees what no volume has, and looks for all duplicates.
    ///
    /// # Errors
    /// As [`pass`](Collector::pass).
    pub(super) async fn collect_all(&self, port: &Port) -> io::Result<Passed> {
        let _alone = self.passing.lock(&port.io).await?;
        self.pass(port, &Pace::unbounded(), Look::ForAll).await
    }

    /// Waits for the pass under way, and begins no other one until the guard is dropped.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the wait.
    pub(super) async fn hold(&self, port: &Port, pace: &Pace) -> io::Result<Held<'_>> {
        let (mut taken, mut ended) =
            (pin!(self.passing.lock(&port.io)), pin!(pace.ended(&port.io)));
        poll_fn(|cx| match taken.as_mut().poll(cx) {
            Poll::Pending => ended.as_mut().poll(cx).map(Err),
            taken => taken,
        })
        .await
    }

    /// Begins no pass until the guard is dropped. `None`: another task holds the pass.
    pub(super) fn try_hold(&self) -> Option<Held<'_>> {
        self.passing.try_lock()
    }

    /// Makes a pass: the steps of section 7. The caller holds the pass, and is in no epoch. It is not faster than `pace`
    /// allows while no write waits for room.
    ///
    /// # Errors
    /// The kernel's. `InvalidData`: metadata are damaged. `StorageFull`: there is no room for a checkpoint.
    /// `TimedOut`: an operation hangs. `Interrupted`: `pace` has ended the pass. No data are lost then.
    pub(super) async fn pass(&self, port: &Port, pace: &Pace, look: Look) -> io::Result<Passed> {
        let ends = Ends(self);
        let input = self.pass_input();
        // The store does not grow during a pass: the task that has it grow holds the pass, or has failed, and then the
        // checkpoint under way does it.
        drop(self.committer.hold(port).await?);
        // Step 1.
        self.begin_marking();
        self.two_epochs(port, pace).await?;
        // Step 2.
        self.keep_trees(port).await?;
        // Step 3.
        self.mark_numbers(port, pace).await?;
        // Step 4.
        self.marks().phase = Phase::Closing;
        self.two_epochs(port, pace).await?;
        // Step 5.
        let (mut passed, free) = self.sweep_numbers(port, pace, look).await?;
        // Step 6.
        self.marks().phase = Phase::None;
        self.two_epochs(port, pace).await?;
        self.marks().live = None;
        let end = self.begin_places(port).await?;
        self.two_epochs(port, pace).await?;
        self.keep_trees(port).await?;
        {
            // Writes may be about to use numbers of the page in which the numbers end.
            let below = |(page, count)| if page < page_of(end) { count } else { 0 };
            let free = (0..).zip(free).map(below).collect();
            self.shared.core().free_numbers.end(free);
        }
        self.mark_places(port, pace).await?;
        // Step 7.
        passed.freed = self.sweep_places(port, pace).await?;
        let free_places = self.shared.core().space.free();
        {
            let mut marks = self.marks();
            marks.passes.end(free_places, passed.is_thorough.then_some(input));
            marks.last = Some(passed);
        }
        drop(ends);
        Ok(passed)
    }

    fn begin_marking(&self) {
        let (places, most_given) = {
            let core = self.shared.core();
            (core.layout.places(), core.space.given() + core.space.free() / IN_A_HURRY)
        };
        self.marks().begin(places, most_given);
    }

    /// Waits until all operations have left that are in an epoch now.
    ///
    /// # Errors
    /// `TimedOut`: one hangs. `Interrupted`: `pace` has ended the wait.
    async fn two_epochs(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        let now = self.shared.epochs.removed();
        for _ in 0..LOOKS_AT_EPOCHS {
            if self.shared.epochs.ended() >= now {
                return Ok(());
            }
            pace.check()?;
            port.io.sleep(AGAIN).await?;
        }
        // The operation hangs, or it was dropped with its queue and never leaves.
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Keeps the volumes' trees as they are now, and makes checkpoints until all their pages are on the medium.
    async fn keep_trees(&self, port: &Port) -> io::Result<()> {
        self.shared.core().keep_trees();
        // The first checkpoint may have begun before.
        for _ in 0..3 {
            self.committer.checkpoint(port).await?;
            if self
                .shared
                .core()
                .kept
                .iter()
                .all(|tree| !matches!(tree.root, Link::Unwritten { .. }))
            {
                return Ok(());
            }
        }
        Err(damaged(Damaged("a tree does not come to the medium")))
    }

    /// Begins to mark places in use. Gives the end of the numbers.
    async fn begin_places(&self, port: &Port) -> io::Result<u64> {
        // The pages of a checkpoint under way would have no marks, and be in no tree yet.
        let _alone = self.committer.hold(port).await?;
        let core = &mut *self.shared.core();
        core.space.begin_marks();
        core.free_numbers.begin();
        Ok(core.numbers_end)
    }

    /// Frees all places without a mark, a part of them by each checkpoint. Gives how many.
    async fn sweep_places(&self, port: &Port, pace: &Pace) -> io::Result<u64> {
        let layout = self.shared.layout();
        let pairs = layout.segments / 2;
        // At least two parts, so that small stores run the code between two parts, too.
        let at_once = (PLACES_AT_ONCE / (2 * layout.segment_blocks)).min(pairs.div_ceil(2));
        let mut freed = 0;
        for first in (0..pairs).step_by(at_once as usize) {
            let part = first..pairs.min(first + at_once);
            self.shared.core().space.keep(part.clone());
            self.load_all_bits(port, 2 * part.start..2 * part.end).await?;
            // A checkpoint in which these pairs have no place without a mark.
            let sweep = |core: &mut Core| core.space.sweep(part);
            let (holes, count) = self.committer.checkpoint_with(port, sweep).await?;
            freed += count;
            // Reads that were mapped before the sweep may still use these places.
            self.two_epochs(port, pace).await?;
            self.groups.forget();
            self.punch(port, &holes).await;
            self.shared.core().space.let_go();
            self.shared.release();
        }
        Ok(freed)
    }

    /// Loads the bits of these segments, which are [kept](crate::space::Space::keep).
    async fn load_all_bits(&self, port: &Port, segments: Range<u64>) -> io::Result<()> {
        loop {
            let missing: Vec<u64> = {
                let core = self.shared.core();
                let missing = segments.clone().filter(|segment| !core.space.is_loaded(*segment));
                missing.take(MAX_BLOCKS).collect()
            };
            if missing.is_empty() {
                return Ok(());
            }
            let loads = missing.into_iter().map(|segment| self.shared.load_bits(port, segment));
            all(loads).await.into_iter().collect::<io::Result<()>>()?;
        }
    }

    /// Gives runs of places back to the medium. It is a hint: a medium that cannot do it keeps them.
    async fn punch(&self, port: &Port, runs: &[Range<u64>]) {
        for run in runs {
            let (at, len) = (run.start, run.end - run.start);
            let block = BLOCK_BYTES as u64;
            self.shared.medium.give_back(port, at * block, len * block).await;
        }
    }
}

impl Core {
    /// Keeps the trees of all volumes: from now on, volumes copy the pages that they have before they change them.
    fn keep_trees(&mut self) {
        let volumes = self.volumes.entries();
        let written = volumes.iter().filter(|(_, volume)| !volume.is_snapshot);
        let written: Vec<u32> = written.map(|(number, _)| *number).collect();
        self.kept = volumes.values().map(|volume| volume.tree).collect();
        written.into_iter().for_each(|number| self.renew(number));
    }
}

#[cfg(test)]
mod claims;
