//! The writes of one turn: one journal block has their records, and places in a row get one operation
//! (store.md 3).
//!
//! Nothing in memory names new content before its data and its record are with the kernel. So nobody finds it
//! before, and what fails has changed nothing. It fails for those whose data or record it was.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::io;
use std::ops::Range;

use ferrite_disk_base::{Failure, Port};
use foldhash::{HashMap, HashMapExt};

use super::leaves::{Change, Claim, Leaf, check};
use super::room::Whose;
use super::turns::{BlockTarget, QueuedWrite};
use super::writing::JournalLock;
use super::{BLOCK_BYTES, Core, Live, damaged};
use crate::Damaged;
use crate::content::ContentHash;
use crate::journal::{Filling, NewContent, Record, VolumeId};
use crate::medium::MAX_BLOCKS;
use crate::side_by_side::{all, both};
use crate::space::Given;

/// Pages of P2M in which one turn looks for numbers: a pass waits for it.
const MOST_PAGES: u32 = 256;

/// Content that the store has not.
struct Fresh {
    hash: ContentHash,
    checksum: u32,
    domain: u16,
    /// Where its bytes are: a part, and a block of it.
    at: (usize, usize),
    /// Place and number.
    given: Result<(u64, u64), Failure>,
}

/// A block that is written: of which part, and what it gets.
struct Block {
    part: usize,
    number: u64,
    gets: Wanted,
}

#[derive(Clone, Copy)]
enum Wanted {
    Number(u64),
    /// One of what is fresh.
    Fresh(usize),
}

/// What who asks for room for contents gets.
enum Gives {
    /// This many have it.
    Room(usize),
    /// Nothing before the bits of this segment are in memory.
    Bits(u64),
    /// Nothing before this page of P2M was opened.
    Numbers(u64),
    /// Nothing before a pass.
    Nothing,
}

pub(super) struct Batch {
    parts: Vec<QueuedWrite>,
    /// By part.
    failed: Vec<Option<Failure>>,
    blocks: Vec<Block>,
    fresh: Vec<Fresh>,
}

impl Batch {
    fn of(parts: Vec<QueuedWrite>) -> Batch {
        let mut known: HashMap<ContentHash, usize> = HashMap::new();
        let (mut blocks, mut fresh) = (Vec::new(), Vec::new());
        for (part, entrusted) in parts.iter().enumerate() {
            let of = &entrusted.part;
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

    /// Whoever has a content that has failed has, too.
    fn fail_with_contents(&mut self) {
        for block in &self.blocks {
            if let Wanted::Fresh(i) = block.gets
                && let Err(why) = &self.fresh[i].given
            {
                self.failed[block.part].get_or_insert_with(|| why.clone());
            }
        }
    }

    /// Those that cannot be carried out any more: there is no such block now, or nobody has it locked.
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

    /// What is written of it, in the order of the parts: the volume, the block, and what that gets.
    fn left(&self) -> impl Iterator<Item = (VolumeId, u64, Wanted)> {
        let left = self.blocks.iter().filter(|block| self.failed[block.part].is_none());
        left.map(|block| (self.parts[block.part].part.volume, block.number, block.gets))
    }

    /// What is new in it, and the block that has it first.
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

    /// What it changes in memory.
    fn change(&self) -> Change {
        let number = |gets| match gets {
            Wanted::Number(number) => number,
            Wanted::Fresh(i) => self.fresh[i].given.as_ref().map_or(0, |given| given.1),
        };
        let blocks = self.left().map(|(volume, block, gets)| (volume, block, number(gets)));
        Change { blocks: blocks.collect(), new: self.news().into_iter().flatten().collect() }
    }

    /// The journal's block. Turns are of so few blocks that there is room for all.
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

    /// Contents in places in a row, as many as one operation takes. Those that nobody waits for have places
    /// that no operation is for.
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

impl Live {
    /// Carries out the writes of one turn, and tells all who wait.
    pub(super) async fn write_all(&self, port: &Port, parts: Vec<QueuedWrite>) {
        let mut batch = Batch::of(parts);
        if let Err(e) = self.write_batch(port, &mut batch).await {
            batch.fail_all(&e);
        }
        for (entrusted, failed) in batch.parts.iter().zip(&batch.failed) {
            entrusted.answer(failed.as_ref().map_or(Ok(()), |why| Err(why.error())));
        }
    }

    /// Section 3, steps 4 to 6. An error is one of all.
    async fn write_batch(&self, port: &Port, batch: &mut Batch) -> io::Result<()> {
        self.give_places(port, batch).await?;
        let Some(mut claim) = self.claim_batch(port, batch).await? else { return Ok(()) };
        let told = self.tell_of(port, JournalLock::Shared, |core| {
            batch.fail_if_gone(core);
            Ok(())
        });
        let told = told.await?;
        if !batch.is_left() {
            return Ok(());
        }
        let block = told.block(self, batch.records()?);
        // Those have no record: nothing of the block has failed.
        let before = batch.failures();
        let runs = batch.runs();
        let write = async |(place, of): &(u64, Range<usize>)| {
            let blocks = batch.fresh[of.clone()].iter().map(|fresh| batch.bytes(fresh));
            self.medium.write_blocks(port, *place, blocks).await
        };
        let data = all(runs.iter().map(write));
        let (data, record) = both(data, self.medium.write(port, block.0, &block.1)).await;
        record?;
        for (done, (_, of)) in data.iter().zip(&runs) {
            if let Err(e) = done {
                batch.fresh[of.clone()].iter_mut().for_each(|f| f.given = Err(Failure::of(e)));
            }
        }
        batch.fail_with_contents();
        let leaves = batch.change().leaves();
        // In memory all of a write is there, or nothing.
        let make = |core: &mut Core| {
            batch.fail_if_gone(core);
            let change = batch.change();
            change.make(core)?;
            Ok(change.new)
        };
        for new in self.with_all(port, &mut claim, &leaves, make).await? {
            self.index.remember(&new.hash, new.number);
        }
        told.end(batch.failures() == before);
        Ok(())
    }

    /// Step 4. What finds no room has failed, and all who have it. So it is while the ballast is not whole.
    async fn give_places(&self, port: &Port, batch: &mut Batch) -> io::Result<()> {
        let (mut done, mut pages) = (0, 0);
        while done < batch.fresh.len() && self.leaves_space(port).await {
            match self.give(&mut batch.fresh[done..]) {
                Gives::Room(count) => {
                    done += count;
                    self.numbers().new_data(count as u64);
                }
                Gives::Bits(segment) => self.load_bits(port, segment).await?,
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

    /// Places, in as few runs as there are, and as many numbers. Numbers that were used before come first, so
    /// that their pages need no more room.
    fn give(&self, fresh: &mut [Fresh]) -> Gives {
        let ended = self.epochs.ended();
        let core = &mut *self.core();
        core.space.release(ended);
        let mut done = 0;
        while done < fresh.len() {
            let gives = match core.give_some((fresh.len() - done) as u64) {
                Ok(places) => places,
                // What has been given is kept.
                Err(_) if done > 0 => break,
                Err(gives) => return gives,
            };
            let mut marks = self.marks();
            for place in gives {
                let number = core.free_numbers.give().unwrap_or(core.numbers_end);
                core.numbers_end = core.numbers_end.max(number + 1);
                marks.is_given(number);
                fresh[done].given = Ok((place, number));
                done += 1;
            }
        }
        Gives::Room(done)
    }

    /// Room in memory for what is left of a batch. If a leaf is damaged those have failed whose it is. None:
    /// nothing is left.
    async fn claim_batch<'a>(
        &'a self,
        port: &Port,
        batch: &mut Batch,
    ) -> io::Result<Option<Claim<'a>>> {
        loop {
            if !batch.is_left() {
                return Ok(None);
            }
            let why = match self.claim(port, &batch.change().leaves()).await {
                Ok(claim) => {
                    self.check_room(Whose::Data)?;
                    return Ok(Some(claim));
                }
                Err(why) => why,
            };
            let before = batch.failed.clone();
            for part in (0..batch.parts.len()).filter(|part| before[*part].is_none()) {
                let leaves = batch.leaves_of(part);
                if let Err(e) = self.claim(port, &leaves).await {
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
    /// What one part changes by itself.
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
    /// Places in a row for as many contents as there are numbers for, at most so many.
    fn give_some(&mut self, most: u64) -> Result<Range<u64>, Gives> {
        let ready = self.free_numbers.ready();
        let never_given = self.layout.places().saturating_sub(self.numbers_end);
        // A page that may have none is looked at if there is no other way.
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
