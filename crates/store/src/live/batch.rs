//! The writes of one turn: one journal block has their records, and one operation writes consecutive places
//! (store.md 3).
//!
//! Memory refers to new content only when the kernel has its data and its record. So no other write finds the content
//! earlier, and a write that fails has changed nothing. Only the writes fail whose data or record failed.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use ferrite_disk_base::{Failure, Port};
use foldhash::{HashMap, HashMapExt};

use super::changes::{Change, ChangeKind, Changes, Claim, check};
use super::collector::Collector;
use super::committer::Committer;
use super::journal::{Journal, JournalLock};
use super::journal_writer::JournalWriter;
use super::leaf::{Leaf, is_lost};
use super::leaves::Leaves;
use super::shared::Shared;
use super::turns::{BlockTarget, Part, QueuedWrite, Turns};
use super::{BLOCK_BYTES, Core, damaged};
use crate::Damaged;
use crate::content::ContentHash;
use crate::journal::{Filling, NewContent, Record, VolumeId};
use crate::medium::MAX_BLOCKS;
use crate::side_by_side::{all, both};
use crate::space::Given;

/// The most pages of P2M in which one turn looks for numbers. A pass waits for the turn.
const MOST_PAGES: u32 = 256;

/// Content that the store lacks.
struct Fresh {
    hash: ContentHash,
    checksum: u32,
    domain: u16,
    /// The part that has the bytes, and the block of it.
    at: (usize, usize),
    /// The place and the number that it got, or why it got none.
    given: Result<(u64, u64), Failure>,
}

/// A block that is written.
struct Block {
    /// Which part writes it.
    part: usize,
    /// Its number in the volume.
    number: u64,
    gets: Wanted,
}

/// The content that a block gets.
#[derive(Clone, Copy)]
enum Wanted {
    /// Content that the store has, by its number, or zeros.
    Number(u64),
    /// Content that the store lacks, by its index in [`Batch::fresh`].
    Fresh(usize),
}

/// The answer to a request for places and numbers.
enum Gives {
    /// This many contents have got both.
    Room(usize),
    /// None: the bits of this segment must be loaded first.
    Bits(u64),
    /// None: the numbers of this page of P2M must be opened first.
    Numbers(u64),
    /// None: only a pass can make room.
    Nothing,
}

/// The parts of one turn, and what becomes of them.
struct Batch {
    parts: Vec<QueuedWrite>,
    /// By part: why it failed.
    failed: Vec<Option<Failure>>,
    blocks: Vec<Block>,
    fresh: Vec<Fresh>,
}

impl Batch {
    fn of(parts: Vec<QueuedWrite>) -> Batch {
        let mut known: HashMap<ContentHash, usize> = HashMap::new();
        let (mut blocks, mut fresh) = (Vec::new(), Vec::new());
        for (part, queued) in parts.iter().enumerate() {
            let of = &queued.part;
            for (i, gets) in of.gets.iter().enumerate() {
                let gets = match *gets {
                    BlockTarget::Number(number) => Wanted::Number(number),
                    BlockTarget::New(hash, checksum) => Wanted::Fresh(match known.entry(hash) {
                        Entry::Occupied(known) => *known.get(),
                        Entry::Vacant(free) => {
                            let (domain, at) = (of.domain, (part, i));
                            let given = Err(Failure::of(&io::ErrorKind::StorageFull.into()));
                            fresh.push(Fresh { hash, checksum, domain, at, given });
                            *free.insert(fresh.len() - 1)
                        }
                    }),
                };
                blocks.push(Block { part, number: of.first + i as u64, gets });
            }
        }
        let failed = parts.iter().map(|_| None).collect();
        Batch { parts, failed, blocks, fresh }
    }

    fn fail(&mut self, part: usize, why: &io::Error) {
        self.failed[part].get_or_insert_with(|| Failure::of(why));
    }

    fn fail_all(&mut self, why: &io::Error) {
        (0..self.parts.len()).for_each(|part| self.fail(part, why));
    }

    /// Fails the parts that have a content which has failed.
    fn fail_with_contents(&mut self) {
        for block in &self.blocks {
            if let Wanted::Fresh(i) = block.gets
                && let Err(why) = &self.fresh[i].given
            {
                self.failed[block.part].get_or_insert_with(|| why.clone());
            }
        }
    }

    /// Fails the parts that cannot be carried out any more: a volume lacks the block now, or the task that had locked it
    /// was dropped.
    fn fail_if_gone(&mut self, core: &Core) {
        for Block { part, number, .. } in &self.blocks {
            let QueuedWrite { part: of, .. } = &self.parts[*part];
            let failed = &mut self.failed[*part];
            match check(core, of.volume, *number) {
                Err(e) => drop(failed.get_or_insert_with(|| Failure::of(&e))),
                Ok(()) if self.parts[*part].is_awaited() => {}
                Ok(()) => {
                    failed.get_or_insert_with(|| Failure::of(&io::ErrorKind::BrokenPipe.into()));
                }
            }
        }
    }

    fn is_left(&self) -> bool {
        self.failed.iter().any(Option::is_none)
    }

    fn failures(&self) -> usize {
        self.failed.iter().flatten().count()
    }

    /// The blocks of parts that have not failed, in the order of the parts: volume, block, and the content that it gets.
    fn left(&self) -> impl Iterator<Item = (VolumeId, u64, Wanted)> {
        let left = self.blocks.iter().filter(|block| self.failed[block.part].is_none());
        left.map(|block| (self.parts[block.part].part.volume, block.number, block.gets))
    }

    /// By fresh content: its record, with the first block that has it. `None`: all its parts have failed.
    fn news(&self) -> Vec<Option<NewContent>> {
        let mut news = vec![None; self.fresh.len()];
        for (volume, block, gets) in self.left() {
            if let Wanted::Fresh(i) = gets
                && let Fresh { hash, checksum, domain, given: Ok((place, number)), .. } =
                    self.fresh[i]
            {
                let new = NewContent { volume, block, number, place, checksum, domain, hash };
                news[i].get_or_insert(new);
            }
        }
        news
    }

    /// The change in memory.
    fn change(&self) -> Change {
        let number = |gets| match gets {
            Wanted::Number(number) => number,
            Wanted::Fresh(i) => self.fresh[i].given.as_ref().map_or(0, |given| given.1),
        };
        let blocks = self.left().map(|(volume, block, gets)| (volume, block, number(gets)));
        Change { blocks: blocks.collect(), new: self.news().into_iter().flatten().collect() }
    }

    /// The records of the journal block. A turn has so few blocks that one journal block has room for all.
    fn records(&self) -> io::Result<Filling> {
        let (mut filling, mut news) = (Filling::default(), self.news());
        for (volume, block, gets) in self.left() {
            let record = match gets {
                Wanted::Number(0) => Record::Zeros { volume, block, count: 1 },
                Wanted::Number(number) => Record::Same { volume, block, number, count: 1 },
                Wanted::Fresh(i) => match news[i].take_if(|new| is_of(new, volume, block)) {
                    Some(new) => Record::New(new),
                    None => {
                        let (_, number) = *self.fresh[i].given.as_ref().map_err(Failure::error)?;
                        Record::Same { volume, block, number, count: 1 }
                    }
                },
            };
            if !filling.add(&record) {
                return Err(damaged(Damaged("a turn has more records than a block takes")));
            }
        }
        Ok(filling)
    }

    fn bytes(&self, fresh: &Fresh) -> &[u8] {
        let (part, block) = fresh.at;
        &self.parts[part].part.bytes[block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES]
    }

    /// Runs of contents in consecutive places, as many as one operation takes. Contents whose parts have all failed are
    /// not written.
    fn runs(&self) -> Vec<(u64, Range<usize>)> {
        let mut runs: Vec<(u64, Range<usize>)> = Vec::new();
        let news = self.news();
        for (i, new) in news.iter().enumerate().filter_map(|(i, new)| Some((i, new.as_ref()?))) {
            match runs.last_mut() {
                Some((first, of))
                    if of.end == i
                        && of.len() < MAX_BLOCKS
                        && *first + of.len() as u64 == new.place =>
                {
                    of.end += 1;
                }
                _ => runs.push((new.place, i..i + 1)),
            }
        }
        runs
    }
}

fn is_of(new: &NewContent, volume: VolumeId, block: u64) -> bool {
    (new.volume, new.block) == (volume, block)
}

/// Collects the writes of a turn, and carries them out together.
pub(super) struct Batches {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    journal_writer: Arc<JournalWriter>,
    committer: Arc<Committer>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    collector: Arc<Collector>,
    turns: Turns,
}

/// The parts that batches use.
pub(super) struct Uses {
    pub(super) shared: Arc<Shared>,
    pub(super) journal: Arc<Journal>,
    pub(super) journal_writer: Arc<JournalWriter>,
    pub(super) committer: Arc<Committer>,
    pub(super) leaves: Arc<Leaves>,
    pub(super) changes: Arc<Changes>,
    pub(super) collector: Arc<Collector>,
}

impl Batches {
    pub(super) fn new(uses: Uses) -> Batches {
        let Uses { shared, journal, journal_writer, committer, leaves, changes, collector } = uses;
        let turns = Turns::new(shared.core().pages.most_leaves());
        Batches { shared, journal, journal_writer, committer, leaves, changes, collector, turns }
    }

    /// Writes a part, whose blocks the caller has locked, in an epoch. The part joins the turn of this thread. The task
    /// that began the turn carries it out for all.
    ///
    /// # Errors
    /// `StorageFull`. `NotFound`, `InvalidInput`: the volume was deleted, or made smaller. Others are the kernel's.
    pub(super) async fn write(&self, port: &Port, part: Part) -> io::Result<()> {
        let (waiter, leader) = self.turns.join(port.io.id(), part);
        if let Some(leader) = leader {
            port.io.yield_to_others().await;
            self.write_all(port, leader.close()).await;
        }
        waiter.wait().await
    }

    /// Carries out the writes of one turn, and answers all of them.
    async fn write_all(&self, port: &Port, parts: Vec<QueuedWrite>) {
        let mut batch = Batch::of(parts);
        if let Err(e) = self.write_batch(port, &mut batch).await {
            batch.fail_all(&e);
        }
        for (queued, failed) in batch.parts.iter().zip(&batch.failed) {
            queued.answer(failed.as_ref().map_or(Ok(()), |why| Err(why.error())));
        }
    }

    /// Section 3, steps 4 to 6. An error fails all parts.
    async fn write_batch(&self, port: &Port, batch: &mut Batch) -> io::Result<()> {
        self.give_places(port, batch).await?;
        let Some(mut claim) = self.claim_batch(port, batch).await? else { return Ok(()) };
        let check = |core: &Core| {
            batch.fail_if_gone(core);
            Ok(())
        };
        let begun = self.journal_writer.begin(port, JournalLock::Shared, check).await?;
        if !batch.is_left() {
            return Ok(());
        }
        let block = begun.encode(batch.records()?);
        // Parts that have failed up to here have no record, so they do not count as a failure of the block.
        let before = batch.failures();
        let runs = batch.runs();
        let write = async |(place, of): &(u64, Range<usize>)| {
            let blocks = batch.fresh[of.clone()].iter().map(|fresh| batch.bytes(fresh));
            self.shared.medium.write_blocks(port, *place, blocks).await
        };
        let data = all(runs.iter().map(write));
        let (data, record) = both(data, self.shared.medium.write(port, block.0, &block.1)).await;
        record?;
        for (done, (_, of)) in data.iter().zip(&runs) {
            if let Err(e) = done {
                batch.fresh[of.clone()].iter_mut().for_each(|f| f.given = Err(Failure::of(e)));
            }
        }
        batch.fail_with_contents();
        let leaves = batch.change().leaves();
        // Memory has a whole write, or nothing of it.
        let make = |core: &mut Core| {
            batch.fail_if_gone(core);
            let change = batch.change();
            change.make(core)?;
            Ok(change.new)
        };
        for new in self.changes.with_all(port, &mut claim, &leaves, make).await? {
            self.shared.index.remember(&new.hash, new.number);
        }
        begun.end(batch.failures() == before);
        Ok(())
    }

    /// Step 4: gives places and numbers to new contents. A content that gets none fails, with its parts. While the
    /// ballast is not whole, no content gets any.
    async fn give_places(&self, port: &Port, batch: &mut Batch) -> io::Result<()> {
        let (mut done, mut pages) = (0, 0);
        while done < batch.fresh.len() && self.committer.leaves_space(port).await {
            match self.give(&mut batch.fresh[done..]) {
                Gives::Room(count) => {
                    done += count;
                    self.journal.new_data(count as u64);
                }
                Gives::Bits(segment) => self.shared.load_bits(port, segment).await?,
                Gives::Numbers(page) if pages < MOST_PAGES => {
                    pages += 1;
                    self.open_numbers(port, page).await?;
                }
                Gives::Numbers(_) | Gives::Nothing => break,
            }
        }
        batch.fail_with_contents();
        Ok(())
    }

    /// Gives places, in as few runs as possible, and numbers. Numbers that were used before come first, since their
    /// pages exist.
    fn give(&self, fresh: &mut [Fresh]) -> Gives {
        let ended = self.shared.epochs.ended();
        let core = &mut *self.shared.core();
        core.space.release(ended);
        let mut done = 0;
        while done < fresh.len() {
            let gives = match core.give_some((fresh.len() - done) as u64) {
                Ok(places) => places,
                // The contents keep what they were given.
                Err(_) if done > 0 => break,
                Err(gives) => return gives,
            };
            let first = done;
            for place in gives {
                let number = core.free_numbers.give().unwrap_or(core.numbers_end);
                core.numbers_end = core.numbers_end.max(number + 1);
                fresh[done].given = Ok((place, number));
                done += 1;
            }
            let given = fresh[first..done].iter().filter_map(|fresh| fresh.given.as_ref().ok());
            self.collector.are_given(given.map(|(_, number)| *number));
        }
        Gives::Room(done)
    }

    /// Makes the empty numbers of a page of P2M ready to be given. A damaged page is left out.
    async fn open_numbers(&self, port: &Port, page: u64) -> io::Result<()> {
        let loaded = self.leaves.look(port, Leaf::P2m(page), |_, _| ()).await;
        let core = &mut *self.shared.core();
        if let Err(e) = loaded {
            // Other pages have numbers, too.
            core.free_numbers.close(page);
            return if is_lost(&e) { Ok(()) } else { Err(e) };
        }
        core.open_numbers(page)
    }

    /// Claims room in memory for the parts that have not failed. A damaged leaf fails the parts that change it. `None`:
    /// all parts have failed.
    async fn claim_batch<'a>(
        &'a self,
        port: &Port,
        batch: &mut Batch,
    ) -> io::Result<Option<Claim<'a>>> {
        loop {
            if !batch.is_left() {
                return Ok(None);
            }
            let why = match self.changes.claim(port, &batch.change().leaves()).await {
                Ok(claim) => {
                    self.changes.check_room(ChangeKind::Data)?;
                    return Ok(Some(claim));
                }
                Err(why) => why,
            };
            let before = batch.failed.clone();
            for part in (0..batch.parts.len()).filter(|part| before[*part].is_none()) {
                let leaves = batch.leaves_of(part);
                if let Err(e) = self.changes.claim(port, &leaves).await {
                    batch.fail(part, &e);
                }
            }
            if batch
                .failed
                .iter()
                .zip(&before)
                .all(|(now, before)| now.is_some() == before.is_some())
            {
                return Err(why);
            }
        }
    }
}

impl Batch {
    /// The leaves that one part changes.
    fn leaves_of(&self, part: usize) -> BTreeSet<Leaf> {
        let volume = self.parts[part].part.volume;
        let mut leaves = BTreeSet::new();
        for block in self.blocks.iter().filter(|block| block.part == part) {
            leaves.insert(Leaf::of_block(volume, block.number).0);
            if let Wanted::Fresh(i) = block.gets
                && let Ok((_, number)) = self.fresh[i].given
            {
                leaves.extend([Leaf::of_number(number).0, Leaf::of_hash(number).0]);
            }
        }
        leaves
    }
}

impl Core {
    /// Gives consecutive places: at most `most`, and at most as many as there are numbers ready.
    fn give_some(&mut self, most: u64) -> Result<Range<u64>, Gives> {
        let ready = self.free_numbers.ready();
        let never_given = self.layout.places().saturating_sub(self.numbers_end);
        // Before the first pass a page may have no free numbers. Then it is looked at only as the last resort.
        let may_look = self.free_numbers.are_known() || never_given == 0;
        if ready == 0
            && may_look
            && let Some(page) = self.free_numbers.next_page()
        {
            return Err(Gives::Numbers(page));
        }
        let most = most.min(if ready > 0 { ready } else { never_given });
        if most == 0 {
            return Err(Gives::Nothing);
        }
        match self.space.give_data(most) {
            Given::Places(places) => Ok(places),
            Given::Load(segment) => Err(Gives::Bits(segment)),
            Given::Full => Err(Gives::Nothing),
        }
    }
}
