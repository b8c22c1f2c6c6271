//! Recovery: it replays the journal blocks that no checkpoint has, after an end without a close (store.md 4).
//!
//! It reads the journal three times: to find its blocks, to find which contents are whole and take their places, and to
//! carry the records out in their order.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::changes::{Change, Changes};
use super::committer::Committer;
use super::journal::Journal;
use super::leaf::{Leaf, bytes};
use super::leaves::Leaves;
use super::scrubber::NO_HASH;
use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::Damaged;
use crate::content::{ContentHash, DomainKey};
use crate::journal::{Block, NewContent, Record, Replay, Scan, VolumeId};
use crate::medium::{MAX_BLOCKS, is_of_a_block};
use crate::page::Whereabouts;

/// The most blocks of one change of a replay. They are in two leaves.
const MAX_CHANGE: u64 = 512;

/// How often storage that cannot read new content is asked again, since it may have been away for a moment. Content that
/// counts without its data is an error for good.
const READS_AGAIN: u32 = 3;
/// The pause before storage is asked again.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// The data on the medium of a content that no sync is known to cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    /// The data that the record says.
    Whole,
    /// Other data are in its place.
    NotThere,
    /// Its place cannot be read.
    Unreadable,
}

/// A record: the number of its block, and its index in the block.
type At = (u64, usize);
/// The contents that are not whole, by their records.
type NotWhole = BTreeMap<At, Data>;
/// The keys of the dedup domains, by their numbers.
type Keys = BTreeMap<u16, DomainKey>;

/// Replays the journal of a store that nothing else uses yet.
pub(super) struct Recovery<'a> {
    pub(super) shared: &'a Shared,
    pub(super) journal: &'a Journal,
    pub(super) committer: &'a Committer,
    pub(super) leaves: &'a Leaves,
    pub(super) changes: &'a Changes,
}

impl Recovery<'_> {
    /// Carries out the records of the journal that count, and makes a checkpoint of them before anything else is
    /// written: a record that does not count now could count after the next opening.
    ///
    /// # Errors
    /// The journal is damaged (`InvalidData`), or cannot be read. Others are the kernel's.
    pub(super) async fn replay(&self, port: &Port) -> io::Result<()> {
        let replay = scan(self.shared, port).await?;
        if replay.next == self.shared.core().replay_from {
            return Ok(());
        }
        let not_whole = self.take_places(port, &replay).await?;
        for number in &replay.blocks {
            let block = journal_block(self.shared, port, *number).await?;
            for (i, record) in block.records.iter().enumerate() {
                let data = not_whole.get(&(*number, i)).copied().unwrap_or(Data::Whole);
                self.carry_out_again(port, &replay, *number, record, data).await?;
            }
        }
        let unreadable = not_whole.values().filter(|data| **data == Data::Unreadable).count();
        if unreadable > 0 {
            tracing::warn!(
                "storage cannot read {unreadable} blocks of content that were new when the store was not closed: \
                 where volumes have them reads fail until they are written again"
            );
        }
        self.committer.checkpoint_before(port, replay.next).await?;
        self.journal.restart(replay.next);
        Ok(())
    }

    /// Rules 2 and 4: takes the places and numbers of contents that count. Gives the contents that are not whole.
    async fn take_places(&self, port: &Port, replay: &Replay) -> io::Result<NotWhole> {
        let domains = self.shared.core().domains.entries().clone();
        let mut keys: Keys =
            domains.into_iter().map(|(number, domain)| (number as u16, domain.key)).collect();
        let (mut not_whole, mut unreadable) = (NotWhole::new(), Vec::new());
        for number in &replay.blocks {
            let block = journal_block(self.shared, port, *number).await?;
            for (i, record) in block.records.iter().enumerate() {
                match record {
                    Record::Domain { domain, key, .. } => drop(keys.insert(*domain, key.clone())),
                    Record::New(new) if !replay.is_durable(*number) => {
                        let at = (*number, i);
                        if !self.settle(port, &keys, at, new, &mut not_whole).await? {
                            unreadable.push((at, *new));
                        }
                    }
                    Record::New(new) => self.take(port, new).await?,
                    _ => {}
                }
            }
        }
        for _ in 0..READS_AGAIN {
            if unreadable.is_empty() {
                break;
            }
            port.io.sleep(READ_AGAIN).await?;
            for (at, new) in std::mem::take(&mut unreadable) {
                if !self.settle(port, &keys, at, &new, &mut not_whole).await? {
                    unreadable.push((at, new));
                }
            }
        }
        for (at, new) in unreadable {
            self.take(port, &new).await?;
            not_whole.insert(at, Data::Unreadable);
        }
        Ok(not_whole)
    }

    /// Takes the place of a content that is whole, or notes that its data are not there. `false`: they cannot be read.
    async fn settle(
        &self,
        port: &Port,
        keys: &Keys,
        at: At,
        new: &NewContent,
        not_whole: &mut NotWhole,
    ) -> io::Result<bool> {
        let data = self.data_of(port, keys, new).await?;
        match data {
            Data::Whole => self.take(port, new).await?,
            Data::NotThere => drop(not_whole.insert(at, data)),
            Data::Unreadable => {}
        }
        Ok(data != Data::Unreadable)
    }

    /// Compares the data in a place with the hash in their record. Whole data are written again: after a failed sync, the
    /// kernel may have data that the medium lacks, and no later sync would report it.
    async fn data_of(&self, port: &Port, keys: &Keys, new: &NewContent) -> io::Result<Data> {
        let key = keys.get(&new.domain);
        let key =
            key.ok_or_else(|| damaged(Damaged("a record refers to a missing dedup domain")))?;
        let data = match self.shared.medium.read(port, new.place, 1).await {
            Ok(data) => data,
            // A power cut during a write may leave such a place. It may also be the place of an answered write.
            Err(e) if is_of_a_block(&e) => return Ok(Data::Unreadable),
            Err(e) => return Err(e),
        };
        if key.hash(&data) != new.hash {
            return Ok(Data::NotThere);
        }
        self.shared.medium.write(port, new.place, &data).await?;
        Ok(Data::Whole)
    }

    /// Takes the place and the number of a content.
    async fn take(&self, port: &Port, new: &NewContent) -> io::Result<()> {
        let segment = self.shared.core().layout.segment_of(new.place);
        if let Some((segment, _)) = segment
            && !self.shared.core().space.is_loaded(segment)
        {
            self.shared.load_bits(port, segment).await?;
        }
        let core = &mut *self.shared.core();
        core.space.take(new.place).map_err(damaged)?;
        core.numbers_end = core.numbers_end.max(new.number + 1);
        Ok(())
    }

    /// Carries out one record: rules 2, 3 and 5.
    async fn carry_out_again(
        &self,
        port: &Port,
        replay: &Replay,
        block: u64,
        record: &Record,
        data: Data,
    ) -> io::Result<()> {
        let mut all_there = true;
        if let Record::Same { number, count, .. } = record {
            for number in *number..number + u64::from(*count) {
                all_there &= self.is_somewhere(port, number).await?;
            }
        }
        if !replay.counts(block, record, |_| data != Data::NotThere, |_| all_there) {
            return Ok(());
        }
        match *record {
            Record::New(mut new) => {
                self.is_new(port, &new).await?;
                // No write must find content that cannot be read, in later processes neither.
                if data != Data::Whole {
                    new.hash = ContentHash(bytes(NO_HASH));
                }
                let blocks = vec![(new.volume, new.block, new.number)];
                let change = Change { blocks, new: vec![new] };
                self.change_again(port, block, change).await?;
                self.shared.index.remember(&new.hash, new.number);
                Ok(())
            }
            Record::Same { volume, block: first, number, count } => {
                let blocks = (first..first + u64::from(count)).zip(number..);
                let blocks = blocks.map(|(at, number)| (volume, at, number)).collect();
                self.change_again(port, block, Change { blocks, new: Vec::new() }).await
            }
            Record::Zeros { volume, block: first, count } => {
                self.empty_again(port, block, volume, first, count.into()).await
            }
            ref record => self.shared.core().apply(record).map_err(io::Error::other),
        }
    }

    /// Whether a number has content.
    async fn is_somewhere(&self, port: &Port, number: u64) -> io::Result<bool> {
        if number >= self.shared.core().numbers_end {
            return Ok(false);
        }
        Ok(self.leaves.whereabouts(port, number).await? != Whereabouts::Nowhere)
    }

    /// Checks that a number has no other content. It may have this one, if an earlier replay was interrupted.
    async fn is_new(&self, port: &Port, new: &NewContent) -> io::Result<()> {
        let is = Whereabouts::Plain { place: new.place, checksum: new.checksum };
        match self.leaves.whereabouts(port, new.number).await? {
            Whereabouts::Nowhere => Ok(()),
            known if known == is => Ok(()),
            _ => Err(damaged(Damaged("a record of the journal gives a number two contents"))),
        }
    }

    /// Makes blocks zeros, where the volume has leaves.
    async fn empty_again(
        &self,
        port: &Port,
        block: u64,
        volume: VolumeId,
        first: u64,
        count: u64,
    ) -> io::Result<()> {
        let (mut at, end) = (first, first + count);
        while at < end {
            let next = end.min(at - at % MAX_CHANGE + MAX_CHANGE);
            let (leaf, _) = Leaf::of_block(volume, at);
            match self.leaves.look(port, leaf, |_, _| ()).await {
                Ok(Some(())) => {
                    let blocks = (at..next).map(|block| (volume, block, 0)).collect();
                    let change = Change { blocks, new: Vec::new() };
                    self.change_again(port, block, change).await?;
                }
                Ok(None) => {}
                Err(e) => return Err(of_no_volume(e)),
            }
            at = next;
        }
        Ok(())
    }

    /// Makes a change of the journal block `number`. If memory is short, it first makes a checkpoint that has all blocks
    /// below that one. The next replay would carry out the block again, with the same result.
    async fn change_again(&self, port: &Port, number: u64, change: Change) -> io::Result<()> {
        if self.shared.core().pages.wants_checkpoint() {
            self.committer.checkpoint_before(port, number).await?;
        }
        let leaves = change.leaves();
        let mut claim = self.changes.claim(port, &leaves).await.map_err(of_no_volume)?;
        let made = self.changes.with_all(port, &mut claim, &leaves, |core| change.make(core)).await;
        made.map_err(of_no_volume)
    }
}

/// Finds the blocks of the journal.
///
/// # Errors
/// The journal is damaged (`InvalidData`), or cannot be read.
pub(super) async fn scan(shared: &Shared, port: &Port) -> io::Result<Replay> {
    let (layout, id, from) = {
        let core = shared.core();
        (core.layout, core.id, core.replay_from)
    };
    let mut scan = Scan::new(&layout, from);
    let mut at = 0;
    while at < layout.journal_blocks {
        let count = (layout.journal_blocks - at).min(MAX_BLOCKS as u64);
        let first = layout.journal(at);
        let blocks = shared.medium.read_each(port, first, count as usize).await?;
        for (block, place) in blocks.into_iter().zip(first..) {
            let Ok(bytes) = block else {
                scan.add_unreadable(&layout, place);
                continue;
            };
            if let Some(block) = Block::decode(&bytes, &id, &layout).map_err(damaged)? {
                scan.add(&layout, place, &block).map_err(damaged)?;
            }
        }
        at += count;
    }
    if let Some(number) = scan.in_doubt().next() {
        let at = layout.journal(number) * BLOCK_BYTES as u64;
        return Err(io::Error::other(format!(
            "storage cannot read the 4096 bytes at {at}, where the journal may have answered writes"
        )));
    }
    scan.end().map_err(damaged)
}

/// Reads one block of the journal.
///
/// # Errors
/// It is not what [`scan`] has found (`InvalidData`), or cannot be read.
pub(super) async fn journal_block(shared: &Shared, port: &Port, number: u64) -> io::Result<Block> {
    let (layout, id) = {
        let core = shared.core();
        (core.layout, core.id)
    };
    let bytes = shared.medium.read(port, layout.journal(number), 1).await?;
    let block = Block::decode(&bytes, &id, &layout).map_err(damaged)?;
    let block = block.filter(|block| block.number == number);
    block.ok_or_else(|| damaged(Damaged("a block of the journal has changed as it was read")))
}

/// The error of a record for a missing volume or block: the journal is damaged.
fn of_no_volume(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => {
            damaged(Damaged("a record of the journal is of no volume, or behind its end"))
        }
        _ => e,
    }
}
