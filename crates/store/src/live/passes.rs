//! Passes: which contents and places are in use, and what is not comes free (store.md 7).
//!
//! The steps are those of [`pass`](Live::pass). One that ends early, also dropped with its task, has changed
//! nothing but entries of contents that no volume has.

use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::Held;

use super::{BLOCK_BYTES, Live, damaged};
use crate::Damaged;
use crate::checkpoint::Core;
use crate::free_numbers::page_of;
use crate::medium::MAX_BLOCKS;
use crate::pace::Pace;
use crate::page::P2M_ENTRIES;
use crate::side_by_side::all;
use crate::space::{Bits, Changes, NoRoom, Passes};
use crate::tree::Link;

/// Between looks whether all have left who were here before.
const AGAIN: Duration = Duration::from_millis(1);
/// How often a pass looks whether operations have ended that have hung since: for half a minute.
const LOOKS_AT_EPOCHS: u32 = 30_000;
/// Places that come free by one checkpoint, at most: 4 GiB, which have 128 KiB of bits.
const PLACES_AT_ONCE: u64 = 1 << 20;

/// It looks for no duplicates any more when writers have got this part of what was free.
const IN_A_HURRY: u64 = 8;

/// What who finds content again has to do. It goes by the phase in which it has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing.
    None,
    /// Its number's bit is set.
    Marking,
    /// It is refused, unless its bit is set.
    Closing,
}

/// What a pass looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// What no volume has; and while no write waits for room, contents that are there twice.
    ForDead,
    /// Both.
    ForAll,
}

/// What all know of the pass.
pub(super) struct Marks {
    phase: Phase,
    /// By number: a volume has its content, or may get it.
    live: Option<Bits>,
    /// When so many places have been given it is in a hurry.
    pub(super) most_given: u64,
    pub(super) passes: Passes,
}

impl Marks {
    /// Before the first pass, with so many places free.
    pub(super) fn new(free: u64) -> Marks {
        Marks { phase: Phase::None, live: None, most_given: 0, passes: Passes::new(free) }
    }

    /// A pass begins, in a store with so many numbers at most.
    fn begin(&mut self, numbers: u64, most_given: u64) {
        self.most_given = most_given;
        self.live = Some(Bits::all(false, numbers));
        self.phase = Phase::Marking;
        self.passes.begin();
    }

    /// A number has been given to somebody.
    pub(super) fn is_given(&mut self, number: u64) {
        if let Some(live) = &mut self.live {
            live.set(number);
        }
    }

    pub(super) fn is_live(&self, number: u64) -> bool {
        self.live.as_ref().is_none_or(|live| live.get(number))
    }

    /// Somebody wants content that was found again. `false`: it cannot be had.
    fn claim(&mut self, phase: Phase, number: u64) -> bool {
        match (phase, &mut self.live) {
            (Phase::None, _) | (Phase::Marking, None) => true,
            (Phase::Marking, Some(live)) => {
                live.set(number);
                true
            }
            (Phase::Closing, live) => live.as_ref().is_some_and(|live| live.get(number)),
        }
    }
}

/// What a pass has found and done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Contents that volumes have.
    pub contents: u64,
    /// Contents that none had any more.
    pub dead: u64,
    /// Contents that turned out to be those of lower numbers.
    pub joined: u64,
    /// Blocks of the store that came free.
    pub freed: u64,
    /// It has looked at all contents whether they are there twice.
    pub is_thorough: bool,
}

/// What is left of a pass when it ends, in whatever way.
struct Ends<'a>(&'a Live);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        {
            let core = &mut *self.0.core();
            core.kept.clear();
            core.space.end_marks();
        }
        let mut marks = self.0.marks();
        (marks.phase, marks.live) = (Phase::None, None);
        marks.passes.stop();
    }
}

impl Live {
    /// The phase that an operation goes by, behind its entry into its epoch.
    pub(super) fn phase(&self) -> Phase {
        self.marks().phase
    }

    /// See [`Marks::claim`].
    pub(super) fn claim_content(&self, phase: Phase, number: u64) -> bool {
        // Who writes what is bad on the medium makes a good copy of it.
        let refuses = self.finds_bad() && self.scheduler().scrub.refuses(number);
        !refuses && (phase == Phase::None || self.marks().claim(phase, number))
    }

    /// A write has found no room: the pass that it has to wait for.
    pub(super) fn no_room(&self) -> NoRoom {
        self.marks().passes.no_room()
    }

    /// Waits for the next end of a pass, or makes one. `first` is from when the write found no room first, and
    /// `now` from when it did last.
    ///
    /// # Errors
    /// As [`gc`](Live::gc).
    pub(super) async fn wait_for_room(
        &self,
        port: &Port,
        first: NoRoom,
        now: NoRoom,
    ) -> io::Result<()> {
        let _waits = self.waiting.one_more();
        let _alone = self.passing.lock(&port.io).await?;
        let passes = self.marks().passes;
        if passes.has_ended_since(now) {
            return Ok(());
        }
        let look = if passes.has_had_one(first) { Look::ForAll } else { Look::ForDead };
        match self.pass(port, &Pace::unbounded(), look).await {
            // It can find none while an operation hangs.
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err(io::ErrorKind::StorageFull.into()),
            done => done.map(drop),
        }
    }

    fn changes(&self) -> Changes {
        let blocks = self.numbers().ended();
        Changes { blocks, indexed: self.scheduler().loading.done() }
    }

    /// Whether a write that has found no room fails at once: a pass would find nothing.
    pub(super) fn is_full(&self) -> bool {
        let changes = self.changes();
        self.marks().passes.would_find_nothing(changes)
    }

    /// Whether it fails: no room came, whatever was looked for.
    pub(super) fn may_fail(&self, first: NoRoom) -> bool {
        self.marks().passes.may_fail(first)
    }

    /// Whether a pass is to begin by itself: there is little room, and less than there was.
    pub fn wants_pass(&self) -> bool {
        let (free, places) = {
            let core = self.core();
            (core.space.free(), core.layout.places())
        };
        self.marks().passes.wants_one(free, places)
    }

    /// Finds out what no volume has, and gives its room free. One at a time.
    ///
    /// # Errors
    /// The kernel's; metadata are damaged; there is no room for a checkpoint. Nothing is lost then.
    pub async fn gc(&self, port: &Port) -> io::Result<Passed> {
        let _alone = self.passing.lock(&port.io).await?;
        self.pass(port, &Pace::unbounded(), Look::ForAll).await
    }

    /// The same behind service, not faster than `pace` allows while no write waits for room. While one does
    /// nothing is looked for but what no volume has.
    ///
    /// # Errors
    /// As [`gc`](Live::gc). `Interrupted`: `pace` has ended it.
    pub async fn gc_at(&self, port: &Port, pace: &Pace) -> io::Result<Passed> {
        let _alone = self.take_pass(port, pace).await?;
        self.pass(port, pace, Look::ForDead).await
    }

    /// Has the pass, or what keeps it away, when others have ended.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the wait.
    pub(super) async fn take_pass(&self, port: &Port, pace: &Pace) -> io::Result<Held<'_>> {
        let (mut taken, mut ended) =
            (pin!(self.passing.lock(&port.io)), pin!(pace.ended(&port.io)));
        poll_fn(|cx| match taken.as_mut().poll(cx) {
            Poll::Pending => ended.as_mut().poll(cx).map(Err),
            taken => taken,
        })
        .await
    }

    /// The steps of section 7. The caller is in no epoch.
    pub(super) async fn pass(&self, port: &Port, pace: &Pace, look: Look) -> io::Result<Passed> {
        let ends = Ends(self);
        let changes = self.changes();
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
            // The page in which the numbers end may have some on their way.
            let below = |(page, count)| if page < page_of(end) { count } else { 0 };
            let free = (0..).zip(free).map(below).collect();
            self.core().free_numbers.end(free);
        }
        self.mark_places(port, pace).await?;
        // Step 7.
        passed.freed = self.sweep_places(port, pace).await?;
        let free_places = self.core().space.free();
        self.marks().passes.end(free_places, passed.is_thorough.then_some(changes));
        self.scheduler().passed = Some(passed);
        drop(ends);
        Ok(passed)
    }

    fn begin_marking(&self) {
        let (places, most_given) = {
            let core = self.core();
            (core.layout.places(), core.space.given() + core.space.free() / IN_A_HURRY)
        };
        self.marks().begin(places, most_given);
    }

    /// Waits until all have left who are in an epoch now.
    async fn two_epochs(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        let now = self.epochs.removed();
        for _ in 0..LOOKS_AT_EPOCHS {
            if self.epochs.ended() >= now {
                return Ok(());
            }
            pace.check()?;
            port.io.sleep(AGAIN).await?;
        }
        // One hangs, or was dropped with its queue and counts for good.
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Volumes change no page that they have now, and all of them are on the medium, with all that is in memory.
    async fn keep_trees(&self, port: &Port) -> io::Result<()> {
        self.core().keep_trees();
        // The first may be one that had begun before.
        for _ in 0..3 {
            self.checkpoint(port).await?;
            if self.core().kept.iter().all(|tree| !matches!(tree.root, Link::Unwritten { .. })) {
                return Ok(());
            }
        }
        Err(damaged(Damaged("a tree does not come to the medium")))
    }

    /// From now on places in use are marked. Gives the end of the numbers.
    async fn begin_places(&self, port: &Port) -> io::Result<u64> {
        // Of a checkpoint under way the pages would have no marks, and be in no tree yet.
        let _alone = self.checkpointing.lock(&port.io).await?;
        if self.core().under_way.is_some() {
            self.write_checkpoint(port).await?;
        }
        let core = &mut *self.core();
        core.space.begin_marks();
        core.free_numbers.begin();
        Ok(core.numbers_end)
    }

    /// All places without a mark come free, a part of them by each checkpoint.
    async fn sweep_places(&self, port: &Port, pace: &Pace) -> io::Result<u64> {
        let pairs = self.layout.segments / 2;
        // Two parts at least: then what is between two of them happens in small stores, too.
        let at_once = (PLACES_AT_ONCE / (2 * self.layout.segment_blocks)).min(pairs.div_ceil(2));
        let mut freed = 0;
        for first in (0..pairs).step_by(at_once as usize) {
            let part = first..pairs.min(first + at_once);
            self.core().space.keep(part.clone());
            self.load_all_bits(port, 2 * part.start..2 * part.end).await?;
            let (holes, count) = self.sweep_part(port, part).await?;
            freed += count;
            // Who reads there was told of it before.
            self.two_epochs(port, pace).await?;
            self.groups().forget();
            self.punch(port, &holes).await;
            self.core().space.let_go();
            self.release();
        }
        Ok(freed)
    }

    /// Of these segments, which are [kept](crate::space::Space::keep).
    async fn load_all_bits(&self, port: &Port, segments: Range<u64>) -> io::Result<()> {
        loop {
            let missing: Vec<u64> = {
                let core = self.core();
                let missing = segments.clone().filter(|segment| !core.space.is_loaded(*segment));
                missing.take(MAX_BLOCKS).collect()
            };
            if missing.is_empty() {
                return Ok(());
            }
            let loads = missing.into_iter().map(|segment| self.load_bits(port, segment));
            all(loads).await.into_iter().collect::<io::Result<()>>()?;
        }
    }

    /// A checkpoint in which these pairs have nothing without a mark.
    async fn sweep_part(
        &self,
        port: &Port,
        pairs: Range<u64>,
    ) -> io::Result<(Vec<Range<u64>>, u64)> {
        let _alone = self.checkpointing.lock(&port.io).await?;
        if self.core().under_way.is_some() {
            self.write_checkpoint(port).await?;
        }
        let swept = {
            let _quiet = self.lanes.lock_all(&port.io).await?;
            let next = self.numbers().next();
            let core = &mut *self.core();
            core.freeze(next);
            core.space.sweep(pairs)
        };
        self.write_checkpoint(port).await?;
        Ok(swept)
    }

    /// Gives runs of places back. It is a hint: what cannot do that keeps them.
    async fn punch(&self, port: &Port, runs: &[Range<u64>]) {
        for run in runs {
            let (at, len) = (run.start, run.end - run.start);
            let block = BLOCK_BYTES as u64;
            self.medium.give_back(port, at * block, len * block).await;
        }
    }
}

impl Core {
    /// Volumes change no page that they have now.
    fn keep_trees(&mut self) {
        let volumes = self.volumes.entries();
        let written = volumes.iter().filter(|(_, volume)| !volume.is_snapshot);
        let written: Vec<u32> = written.map(|(number, _)| *number).collect();
        self.kept = volumes.values().map(|volume| volume.tree).collect();
        written.into_iter().for_each(|number| self.renew(number));
    }
}

/// Entries of a page of P2M, which has so many numbers below the end.
pub(super) fn numbers_of(page: u64, end: u64) -> Range<u64> {
    let first = page * P2M_ENTRIES as u64;
    first.max(1)..end.min(first + P2M_ENTRIES as u64)
}

impl Marks {
    /// See [`sweeping`](super::sweeping): whether a number's content is in use.
    pub(super) fn judge(&mut self, number: u64, same_as: Option<u64>) -> bool {
        let is_live = self.is_live(number);
        if let (true, Some(lower), Some(live)) = (is_live, same_as, &mut self.live) {
            live.set(lower);
        }
        is_live
    }

    /// Volumes have these.
    pub(super) fn are_live(&mut self, numbers: impl Iterator<Item = u64>) {
        if let Some(live) = &mut self.live {
            numbers.filter(|number| *number > 0).for_each(|number| {
                live.set(number);
            });
        }
    }
}

#[cfg(test)]
mod claims;
