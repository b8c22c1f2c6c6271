//! Writes: each is a task that finds out what its blocks get. What they are made of is put somewhere, and told
//! by one journal block, together with what others of the same turn write (store.md 3; [`batch`](super::batch)).

use std::io;

use ferrite_disk_base::Port;
use ferrite_io::arena::Span;
use ferrite_io::shared_lock::Held;

use super::leaves::{Change, Leaf, is_lost};
use super::passes::Phase;
use super::reading::{blocks_of, parts};
use super::room::Whose;
use super::turns::{BlockTarget, Part};
use super::{BLOCK_BYTES, Core, Live, damaged};
use crate::Damaged;
use crate::content::{ContentHash, DomainKey, checksum, is_zeros};
use crate::journal::{Filling, Record, VolumeId};
use crate::page::{V2P_ENTRIES, Whereabouts};
use crate::side_by_side::all;

/// Bytes that other threads hash. Less is done before they have begun.
const HASHED_BESIDE: usize = 64 << 10;
/// Parts of one request that are under way at once.
const PARTS_AT_ONCE: usize = 4;

/// How a journal block locks the journal while it is written.
#[derive(Clone, Copy)]
pub(super) enum JournalLock {
    /// Beside other blocks.
    Shared,
    /// Beside other blocks; the block has no records.
    SharedEmpty,
    /// Alone.
    Exclusive,
}

/// Whose contents are shared, and what makes their names.
struct Domain {
    number: u16,
    key: DomainKey,
}

/// What is written.
#[derive(Clone, Copy)]
enum Source {
    Span(Span),
    Zeros(usize),
}

impl Source {
    fn len(self) -> usize {
        match self {
            Source::Span(span) => span.len(),
            Source::Zeros(len) => len,
        }
    }

    /// Its bytes, of now.
    fn bytes(self, port: &Port, to: &mut [u8]) {
        match self {
            Source::Span(span) => port.memory().copy_out(span, to),
            Source::Zeros(_) => to.fill(0),
        }
    }
}

/// Whole blocks, and what they get.
struct Named {
    bytes: Vec<u8>,
    gets: Vec<BlockTarget>,
}

impl Named {
    fn of(key: &DomainKey, bytes: Vec<u8>) -> Named {
        let name = |block: &[u8]| match is_zeros(block) {
            true => BlockTarget::Number(0),
            false => BlockTarget::New(key.hash(block), checksum(block)),
        };
        let gets = bytes.chunks(BLOCK_BYTES).map(name).collect();
        Named { bytes, gets }
    }
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

/// Such a block, and what goes with it.
pub(super) struct Told<'a> {
    // In this order: a checkpoint that waits for the lanes finds it ended.
    under_way: UnderWay<'a>,
    _lanes: Vec<Held<'a>>,
    synced: u64,
}

impl Told<'_> {
    /// Its place, and its bytes.
    pub(super) fn block(&self, live: &Live, filling: Filling) -> (u64, Vec<u8>) {
        let (id, place) = {
            let core = live.core();
            (core.id, core.layout.journal(self.under_way.number))
        };
        (place, filling.finish(&id, self.under_way.number, self.synced))
    }

    /// Block and data are with the kernel and in memory, or some of that has failed.
    pub(super) fn end(mut self, is_done: bool) {
        self.under_way.is_done = is_done;
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
        let domain = self.check_writable(volume, offset, from.len() as u64)?;
        let mut parts =
            parts(offset, from.len()).map(|(at, part)| (at, from.slice(part.start, part.len())));
        loop {
            let some: Vec<_> = parts.by_ref().take(PARTS_AT_ONCE).collect();
            let mut named = name_parts(port, &domain, &some).await;
            let mut write = |i: usize| {
                let (at, from) = some[i];
                self.write_part(port, volume, &domain, at, Source::Span(from), named[i].take())
            };
            match some.len() {
                0 => return Ok(()),
                1 => write(0).await?,
                // In their order: so content that is read in order is put in order.
                n => all((0..n).map(write)).await.into_iter().collect::<io::Result<()>>()?,
            }
        }
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
        let domain = self.check_writable(volume, offset, len)?;
        let (block, leaf) = (BLOCK_BYTES as u64, (V2P_ENTRIES * BLOCK_BYTES) as u64);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let bytes = match at % block {
                0 if end - at >= block => (leaf - at % leaf).min((end - at) / block * block),
                within => (block - within).min(end - at),
            };
            if bytes < block {
                let zeros = Source::Zeros(bytes as usize);
                self.write_part(port, volume, &domain, at, zeros, None).await?;
            } else {
                let (first, count) = (at / block, bytes / block);
                let empty = async || self.empty_blocks(port, volume, first, count).await;
                self.with_room(port, empty).await?;
            }
            at += bytes;
            port.io.yield_to_others().await;
        }
        Ok(())
    }

    /// Whether somebody may write there. Gives what names its contents.
    fn check_writable(&self, volume: VolumeId, offset: u64, len: u64) -> io::Result<Domain> {
        self.check_range(volume, offset, len)?;
        let core = self.core();
        let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
        if volume.is_snapshot {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let domain = core.domains.entries().get(&volume.domain.into());
        let domain =
            domain.ok_or_else(|| damaged(Damaged("volume refers to a missing dedup domain")))?;
        Ok(Domain { number: volume.domain, key: domain.key.clone() })
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
            let is_empty = self.look(port, leaf, |_, _| ()).await?.is_none();
            // A replay may carry out a write that has failed. Only a later record undoes it.
            if is_empty && !self.numbers().has_failed() {
                return Ok(());
            }
            let blocks = (block..block + count).map(|block| (volume, block, 0)).collect();
            let record = Record::Zeros { volume, block, count: count as u32 };
            self.carry_out(port, Change { blocks, new: Vec::new() }, &record).await
        };
        self.epochs.during(change).await
    }

    /// One part: of its first and last block the rest stays as it is.
    async fn write_part(
        &self,
        port: &Port,
        volume: VolumeId,
        domain: &Domain,
        offset: u64,
        source: Source,
        mut named: Option<Named>,
    ) -> io::Result<()> {
        let blocks = blocks_of(offset, source.len());
        let mut write = async || {
            // Behind the entry into the epoch (section 7).
            let phase = self.phase();
            let Named { bytes, mut gets } = match named.take() {
                Some(named) => named,
                None => {
                    let mut bytes = self.read_around(port, volume, offset, source.len()).await?;
                    let from = (offset % BLOCK_BYTES as u64) as usize;
                    source.bytes(port, &mut bytes[from..from + source.len()]);
                    Named::of(&domain.key, bytes)
                }
            };
            self.look_up(port, phase, &mut gets).await?;
            let (domain, first) = (domain.number, blocks.start);
            self.write_together(port, Part { volume, domain, first, bytes, gets }).await
        };
        let write = async || {
            // Section 3, step 1. Who waits for room has no locks (section 7, ENOSPC).
            let _alone = self.blocks.lock_blocks(&port.io, volume, blocks.clone()).await?;
            self.epochs.during(write()).await
        };
        self.with_room(port, write).await
    }

    /// Queues a part in the turn of this thread, or carries the turn out as its leader.
    async fn write_together(&self, port: &Port, part: Part) -> io::Result<()> {
        let (waiter, leader) = self.turns.join(port.io.id(), part);
        if let Some(leader) = leader {
            port.io.yield_to_others().await;
            self.write_all(port, leader.close()).await;
        }
        waiter.wait().await
    }

    /// The blocks around a range, as far as it leaves something of them.
    async fn read_around(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: usize,
    ) -> io::Result<Vec<u8>> {
        match is_whole(offset, len) {
            true => Ok(vec![0; len]),
            false => self.read_blocks(port, volume, blocks_of(offset, len)).await,
        }
    }

    /// Section 3, step 3: content that the store has is not written once more.
    async fn look_up(&self, port: &Port, phase: Phase, gets: &mut [BlockTarget]) -> io::Result<()> {
        for gets in gets {
            if let BlockTarget::New(hash, _) = gets
                && let Some(number) = self.find(port, phase, hash).await?
            {
                *gets = BlockTarget::Number(number);
            }
        }
        Ok(())
    }

    /// A number that has this content: the index names candidates, the whole hash decides.
    async fn find(&self, port: &Port, phase: Phase, hash: &ContentHash) -> io::Result<Option<u64>> {
        for number in self.index.candidates(hash) {
            // In this order (section 6, Order).
            match self.has(port, number, hash).await {
                Ok(true) if self.claim_content(phase, number) => return Ok(Some(number)),
                // What is damaged is no reason to fail a write: the content is put somewhere else.
                Err(e) if !is_lost(&e) => return Err(e),
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

    /// Zeros: their record, and then they are in memory.
    async fn carry_out(&self, port: &Port, change: Change, record: &Record) -> io::Result<()> {
        let leaves = change.leaves();
        let mut claim = self.claim(port, &leaves).await?;
        self.check_room(Whose::Zeros)?;
        let mut block = Filling::default();
        block.add(record);
        // In memory all of it is there, or nothing.
        let make = async |live: &Live| {
            live.with_all(port, &mut claim, &leaves, |core| change.make(core)).await
        };
        self.tell(port, JournalLock::Shared, block, |core| change.check(core), make).await
    }

    /// Writes a journal block; when it has ended well `act` changes the memory. No checkpoint begins in
    /// between, so it has all of it or nothing. `check` is as that of [`tell_of`](Live::tell_of).
    pub(super) async fn tell(
        &self,
        port: &Port,
        lock: JournalLock,
        block: Filling,
        check: impl FnMut(&Core) -> io::Result<()>,
        act: impl AsyncFnOnce(&Live) -> io::Result<()>,
    ) -> io::Result<()> {
        let told = self.tell_of(port, lock, check).await?;
        let (place, block) = told.block(self, block);
        self.medium.write(port, place, &block).await?;
        act(self).await?;
        told.end(true);
        Ok(())
    }

    /// Takes a number for a journal block, after checkpoints if the journal has no room. `check` is called when no
    /// volume can be added or removed any more, since a replay must be able to carry out the block's records.
    pub(super) async fn tell_of(
        &self,
        port: &Port,
        lock: JournalLock,
        mut check: impl FnMut(&Core) -> io::Result<()>,
    ) -> io::Result<Told<'_>> {
        if self.medium.is_faulty() {
            // After a power cut the operation whose sync has failed may be missing, and this block be there: of a
            // volume that is smaller then.
            self.medium.sync(port).await?;
        }
        loop {
            let (held, begun) = match lock {
                JournalLock::Shared | JournalLock::SharedEmpty => {
                    let held = vec![self.lanes.lock_one(&port.io).await?];
                    check(&self.core())?;
                    let mut numbers = self.numbers();
                    let is_empty = matches!(lock, JournalLock::SharedEmpty);
                    (held, if is_empty { numbers.begin_empty() } else { numbers.begin() })
                }
                JournalLock::Exclusive => {
                    let held = self.lanes.lock_all(&port.io).await?;
                    check(&self.core())?;
                    (held, self.numbers().begin_operation())
                }
            };
            if let Some((number, synced)) = begun {
                let under_way = UnderWay { live: self, number, is_done: false };
                return Ok(Told { under_way, _lanes: held, synced });
            }
            drop(held);
            self.checkpoint(port).await?;
        }
    }
}

fn is_whole(offset: u64, len: usize) -> bool {
    offset.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES)
}

/// Names the parts that are whole blocks, before anybody has to wait for them: on other threads if they are many.
async fn name_parts(port: &Port, domain: &Domain, parts: &[(u64, Span)]) -> Vec<Option<Named>> {
    let mut bytes: Vec<Option<Vec<u8>>> = parts
        .iter()
        .map(|(at, from)| {
            is_whole(*at, from.len()).then(|| {
                let mut bytes = vec![0; from.len()];
                // Hash and data are of the same bytes, whoever may write the guest's memory.
                port.memory().copy_out(*from, &mut bytes);
                bytes
            })
        })
        .collect();
    let name = |key: &DomainKey, bytes: &mut [Option<Vec<u8>>]| -> Vec<Option<Named>> {
        bytes.iter_mut().map(|bytes| bytes.take().map(|bytes| Named::of(key, bytes))).collect()
    };
    if parts.iter().map(|(_, from)| from.len()).sum::<usize>() < HASHED_BESIDE {
        return name(&domain.key, &mut bytes);
    }
    let key = domain.key.clone();
    let named = port.io.compute(move || name(&key, &mut bytes)).await;
    // What no thread has named each part names for itself.
    named.unwrap_or_else(|_| parts.iter().map(|_| None).collect())
}
