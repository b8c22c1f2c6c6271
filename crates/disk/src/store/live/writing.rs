//! Writes: what they are made of is found or put somewhere, and told by one journal block (store.md 3).
//!
//! The order of a write is that of [`write_blocks`](Live::write_blocks). Nothing in memory names new content
//! before its data and its record are with the kernel. So nobody finds it before, and a write that
//! fails has changed nothing.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;

use ferrite_io::arena::Span;

use super::leaves::{Change, Leaf};
use super::passes::Phase;
use super::reading::{blocks_of, parts};
use super::{BLOCK_BYTES, Core, Live, damaged};
use crate::Port;
use crate::store::Damaged;
use crate::store::content::{ContentHash, checksum, is_zeros};
use crate::store::journal::{Filling, NewContent, Record, VolumeId};
use crate::store::page::{V2P_ENTRIES, Whereabouts};
use crate::store::space::Given;

/// Content that the store has not: where it is in the bytes that are written, and its name.
struct Unknown {
    at: usize,
    hash: ContentHash,
}

/// What a block gets.
#[derive(Clone, Copy)]
enum Gets {
    Number(u64),
    /// The content that is so many among those that the store has not.
    Unknown(usize),
}

/// What else may have a number while a journal block is under way.
#[derive(Clone, Copy)]
pub(super) enum Lanes {
    /// Others.
    One,
    /// Nothing.
    All,
}

/// What who asks for room for contents gets.
enum Gives {
    /// Places in a row, as many numbers, and the domain that they are of.
    Run(Range<u64>, Vec<u64>, u16),
    /// Nothing before the bits of this segment are in memory.
    Bits(u64),
    /// Nothing before this page of P2M was opened.
    Numbers(u64),
    /// Nothing before a pass.
    Nothing,
}

/// Data in places in a row.
struct Run {
    place: u64,
    bytes: Vec<u8>,
}

/// A journal block that has a number, and has not ended. Dropped before it has, it has failed.
struct UnderWay<'a> {
    live: &'a Live,
    number: u64,
    is_done: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.live.numbers().end(self.number, self.is_done);
    }
}

impl Live {
    /// Writes a range of a volume. It is visible, and survives the death of this process, when this
    /// returns `Ok`; a [flush](Live::flush) makes it durable.
    ///
    /// # Errors
    /// `StorageFull`; `InvalidInput`: not inside the volume. Others are the kernel's.
    pub async fn write(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        from: Span,
    ) -> io::Result<()> {
        self.check_writable(volume, offset, from.len() as u64)?;
        for (at, part) in parts(offset, from.len()) {
            let mut new = vec![0; part.len()];
            // Hash and data are of the same bytes, whoever may write the guest's memory.
            port.memory().copy_out(from.slice(part.start, part.len()), &mut new);
            self.write_part(port, volume, at, new).await?;
        }
        Ok(())
    }

    /// Makes a range of a volume read as zeros.
    ///
    /// # Errors
    /// As [`write`](Live::write).
    pub async fn write_zeros(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.check_writable(volume, offset, len)?;
        let (block, leaf) = (BLOCK_BYTES as u64, (V2P_ENTRIES * BLOCK_BYTES) as u64);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let bytes = match at % block {
                0 if end - at >= block => (leaf - at % leaf).min((end - at) / block * block),
                within => (block - within).min(end - at),
            };
            if bytes < block {
                self.write_part(port, volume, at, vec![0; bytes as usize]).await?;
            } else {
                self.empty_blocks(port, volume, at / block, bytes / block).await?;
            }
            at += bytes;
            port.io.yield_to_others().await;
        }
        Ok(())
    }

    fn check_writable(&self, volume: VolumeId, offset: u64, len: u64) -> io::Result<()> {
        self.check_range(volume, offset, len)?;
        let is_snapshot = |v: &crate::store::table::Volume| v.is_snapshot;
        match self.core().volumes.entries().get(&volume).is_some_and(is_snapshot) {
            true => Err(io::ErrorKind::PermissionDenied.into()),
            false => Ok(()),
        }
    }

    /// Whole blocks of one leaf get zeros.
    async fn empty_blocks(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
        count: u64,
    ) -> io::Result<()> {
        let _alone = self.blocks.lock_blocks(&port.io, volume, block..block + count).await?;
        let change = async {
            let (leaf, _) = Leaf::of_block(volume, block);
            if self.look(port, leaf, |_, _| ()).await?.is_none() {
                return Ok(());
            }
            let blocks = (block..block + count).map(|block| (block, 0)).collect();
            let record = Record::Zeros { volume, block, count: count as u32 };
            let change = Change { volume, blocks, new: Vec::new() };
            self.carry_out(port, change, vec![record], Vec::new()).await
        };
        self.epochs.during(change).await
    }

    /// One part: of its first and last block the rest stays as it is.
    async fn write_part(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        new: Vec<u8>,
    ) -> io::Result<()> {
        let blocks = blocks_of(offset, new.len());
        // Section 3, step 1.
        let _alone = self.blocks.lock_blocks(&port.io, volume, blocks.clone()).await?;
        let write = async || {
            let from = (offset % BLOCK_BYTES as u64) as usize;
            let is_whole = from == 0 && new.len().is_multiple_of(BLOCK_BYTES);
            let first = blocks.start;
            if is_whole {
                return self.write_blocks(port, volume, first, &new).await;
            }
            let mut bytes = self.read_blocks(port, volume, blocks.clone()).await?;
            bytes[from..from + new.len()].copy_from_slice(&new);
            self.write_blocks(port, volume, first, &bytes).await
        };
        let is_full = |e: &io::Error| e.kind() == io::ErrorKind::StorageFull;
        match self.epochs.during(write()).await {
            Err(e) if is_full(&e) => {}
            done => return done,
        }
        // Section 7, ENOSPC: in no epoch, for which the pass would wait.
        let no_room = self.no_room();
        self.wait_for_room(port, no_room).await?;
        self.epochs.during(write()).await
    }

    /// Whole blocks of one part, whose locks the caller has. It is in an epoch.
    async fn write_blocks(
        &self,
        port: &Port,
        volume: VolumeId,
        first: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        // Behind the entry into the epoch (section 7).
        let phase = self.phase();
        self.checkpoint_if_wanted(port).await;
        let (gets, unknown) = self.look_up(port, volume, phase, bytes).await?;
        let (new, runs) = self.place(port, volume, first, &unknown, bytes).await?;
        let (mut blocks, mut records) = (Vec::new(), Vec::new());
        let mut told = vec![false; unknown.len()];
        for (block, gets) in (first..).zip(&gets) {
            let number = match *gets {
                Gets::Number(number) => number,
                Gets::Unknown(i) => new[i].number,
            };
            blocks.push((block, number));
            records.push(match *gets {
                Gets::Number(0) => Record::Zeros { volume, block, count: 1 },
                Gets::Unknown(i) if !std::mem::replace(&mut told[i], true) => Record::New(new[i]),
                _ => Record::Same { volume, block, number, count: 1 },
            });
        }
        let change = Change { volume, blocks, new };
        self.carry_out(port, change, records, runs).await
    }

    /// Section 3, step 3: what the blocks get, and which content of it the store has not.
    async fn look_up(
        &self,
        port: &Port,
        volume: VolumeId,
        phase: Phase,
        bytes: &[u8],
    ) -> io::Result<(Vec<Gets>, Vec<Unknown>)> {
        let key = {
            let core = self.core();
            let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
            let domain = core.domains.entries().get(&volume.domain.into());
            domain.map(|domain| domain.key.clone())
        };
        let key = key.ok_or_else(|| damaged(Damaged("a volume is of no domain")))?;
        let (mut gets, mut unknown) = (Vec::new(), Vec::new());
        // Of this part itself.
        let mut known: HashMap<ContentHash, usize> = HashMap::new();
        for (at, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            if is_zeros(block) {
                gets.push(Gets::Number(0));
                continue;
            }
            let hash = key.hash(block);
            gets.push(match (self.find(port, phase, &hash).await?, known.get(&hash)) {
                (Some(number), _) => Gets::Number(number),
                (None, Some(i)) => Gets::Unknown(*i),
                (None, None) => {
                    known.insert(hash, unknown.len());
                    unknown.push(Unknown { at, hash });
                    Gets::Unknown(unknown.len() - 1)
                }
            });
        }
        Ok((gets, unknown))
    }

    /// A number that has this content: the index names candidates, the whole hash decides.
    async fn find(&self, port: &Port, phase: Phase, hash: &ContentHash) -> io::Result<Option<u64>> {
        let candidates: Vec<u64> = self.index.candidates(hash).collect();
        for number in candidates {
            // In this order (section 6, Order).
            match self.has(port, number, hash).await {
                Ok(true) if self.claim_content(phase, number) => return Ok(Some(number)),
                // What is damaged is no reason to fail a write: the content is put somewhere else.
                Err(e) if e.kind() != io::ErrorKind::InvalidData => return Err(e),
                _ => {}
            }
        }
        Ok(None)
    }

    pub(super) async fn has(
        &self,
        port: &Port,
        number: u64,
        hash: &ContentHash,
    ) -> io::Result<bool> {
        // In this order (section 6, Order).
        let entry = self.whereabouts(port, number).await?;
        let is_here = matches!(entry, Whereabouts::Plain { .. } | Whereabouts::Packed { .. });
        Ok(is_here && self.hash_of(port, number).await? == *hash)
    }

    /// Section 3, step 4: numbers and places for what the store has not, and its data by places in a row.
    async fn place(
        &self,
        port: &Port,
        volume: VolumeId,
        first: u64,
        unknown: &[Unknown],
        bytes: &[u8],
    ) -> io::Result<(Vec<NewContent>, Vec<Run>)> {
        let (mut new, mut runs): (Vec<NewContent>, Vec<Run>) = (Vec::new(), Vec::new());
        while new.len() < unknown.len() {
            let given = self.give(volume, (unknown.len() - new.len()) as u64)?;
            let (places, numbers, domain) = match given {
                Gives::Run(places, numbers, domain) => (places, numbers, domain),
                Gives::Bits(segment) => {
                    self.load_bits(port, segment).await?;
                    continue;
                }
                Gives::Numbers(page) => {
                    self.open_numbers(port, page).await?;
                    continue;
                }
                Gives::Nothing => return Err(io::ErrorKind::StorageFull.into()),
            };
            let mut run = Run { place: places.start, bytes: Vec::new() };
            for (place, number) in places.zip(numbers) {
                let Unknown { at, hash } = unknown[new.len()];
                let data = &bytes[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES];
                run.bytes.extend_from_slice(data);
                let (block, checksum) = (first + at as u64, checksum(data));
                new.push(NewContent { volume, block, number, place, checksum, domain, hash });
            }
            runs.push(run);
        }
        Ok((new, runs))
    }

    /// Places in a row, and as many numbers of a volume's domain. Numbers that were used before come first, so
    /// that their pages need no more room.
    fn give(&self, volume: VolumeId, most: u64) -> io::Result<Gives> {
        self.release();
        let core = &mut *self.core();
        let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
        let domain = volume.domain;
        let ready = core.free_numbers.ready();
        if let (0, Some(page)) = (ready, core.free_numbers.next_page()) {
            return Ok(Gives::Numbers(page));
        }
        let never_given = core.layout.places().saturating_sub(core.numbers_end);
        let most = most.min(if ready > 0 { ready } else { never_given });
        if most == 0 {
            return Ok(Gives::Nothing);
        }
        let places = match core.space.give_data(most) {
            Given::Places(places) => places,
            Given::Load(segment) => return Ok(Gives::Bits(segment)),
            Given::Full => return Ok(Gives::Nothing),
        };
        let mut marks = self.marks();
        let numbers = places.clone().map(|_| {
            let number = core.free_numbers.give().unwrap_or(core.numbers_end);
            core.numbers_end = core.numbers_end.max(number + 1);
            marks.is_given(number);
            number
        });
        let numbers = numbers.collect();
        Ok(Gives::Run(places, numbers, domain))
    }

    /// Section 3, steps 5 and 6: data and journal block side by side, then the change in memory.
    async fn carry_out(
        &self,
        port: &Port,
        change: Change,
        records: Vec<Record>,
        runs: Vec<Run>,
    ) -> io::Result<()> {
        let leaves = change.leaves();
        let mut claim = self.claim(port, &leaves).await?;
        let mut block = Filling::default();
        if !records.iter().all(|record| block.add(record)) {
            return Err(damaged(Damaged("a change has more records than a block takes")));
        }
        let data = async {
            let mut done = Ok(());
            for run in &runs {
                // A later one is tried all the same: all of them have ended then.
                done = self.medium.write(port, run.place, &run.bytes).await.and(done);
            }
            done
        };
        // In memory all of it is there, or nothing.
        let make = async |live: &Live| {
            live.with_all(port, &mut claim, &leaves, |core| change.make(core)).await
        };
        let check = |core: &Core| change.check(core);
        self.tell(port, Lanes::One, block, check, data, make).await?;
        for new in &change.new {
            self.index.remember(&new.hash, new.number);
        }
        Ok(())
    }

    /// Writes a journal block beside `data`; when both have ended well `act` changes the memory. No checkpoint
    /// begins in between, so it has all of it or nothing. `check` is asked when no volume can come or go any
    /// more: a replay has to be able to carry out what the block says.
    pub(super) async fn tell(
        &self,
        port: &Port,
        lanes: Lanes,
        block: Filling,
        check: impl Fn(&Core) -> io::Result<()>,
        data: impl Future<Output = io::Result<()>>,
        act: impl AsyncFnOnce(&Live) -> io::Result<()>,
    ) -> io::Result<()> {
        let (_lanes, number, synced) = loop {
            let (held, begun) = match lanes {
                Lanes::One => {
                    let held = vec![self.lanes.lock_one(&port.io).await?];
                    check(&self.core())?;
                    (held, self.numbers().begin())
                }
                Lanes::All => {
                    let held = self.lanes.lock_all(&port.io).await?;
                    check(&self.core())?;
                    (held, self.numbers().begin_operation())
                }
            };
            match begun {
                Some((number, synced)) => break (held, number, synced),
                None => drop(held),
            }
            self.checkpoint(port).await?;
        };
        let mut under_way = UnderWay { live: self, number, is_done: false };
        let (id, place) = {
            let core = self.core();
            (core.id, core.layout.journal(number))
        };
        let block = block.finish(&id, number, synced);
        let (data, record) = both(data, self.medium.write(port, place, &block)).await;
        data.and(record)?;
        act(self).await?;
        under_way.is_done = true;
        Ok(())
    }
}

/// Two things at once, until both have ended.
async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut done_a, mut done_b) = (None, None);
    poll_fn(|cx| {
        if done_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(cx)
        {
            done_a = Some(value);
        }
        if done_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(cx)
        {
            done_b = Some(value);
        }
        match (done_a.take(), done_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (done_a, done_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}
