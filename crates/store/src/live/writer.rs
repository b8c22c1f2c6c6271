//! The writer: it finds out which contents the blocks of a write get (store.md 3). [`batch`](super::batch) then stores the
//! new ones, and records the writes of one turn in one journal block.

use std::io;
use std::sync::Arc;

use ferrite_disk_base::Port;
use ferrite_io::arena::Span;

use super::batch::Batches;
use super::changes::{Change, ChangeKind, Changes};
use super::collector::{Collector, Phase};
use super::journal::{Journal, JournalLock};
use super::journal_writer::JournalWriter;
use super::leaf::{Leaf, is_lost};
use super::leaves::Leaves;
use super::reader::{Reader, blocks_of, parts};
use super::scrubber::Scrubber;
use super::shared::Shared;
use super::turns::{BlockTarget, Part};
use super::{BLOCK_BYTES, Core, damaged};
use crate::Damaged;
use crate::content::{ContentHash, DomainKey, checksum, is_zeros};
use crate::journal::{Filling, Record, VolumeId};
use crate::page::{V2P_ENTRIES, Whereabouts};
use crate::pages::{PageId, Pages};
use crate::side_by_side::all;
use crate::stripes::Stripes;

/// The least bytes that other threads hash. Less takes this thread less time than they need to begin.
const HASHED_BESIDE: usize = 64 << 10;
/// The most parts of one request under way at once.
const PARTS_AT_ONCE: usize = 4;

/// The dedup domain of a volume: its number, and the key of its hashes.
struct Domain {
    number: u16,
    key: DomainKey,
}

/// The data of a write.
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

    /// Copies the bytes that the source has now.
    fn bytes(self, port: &Port, to: &mut [u8]) {
        match self {
            Source::Span(span) => port.memory().copy_out(span, to),
            Source::Zeros(_) => to.fill(0),
        }
    }
}

/// Whole blocks, and the content that each refers to after the write.
struct Named {
    bytes: Vec<u8>,
    gets: Vec<BlockTarget>,
}

impl Named {
    fn of(key: &DomainKey, bytes: Vec<u8>) -> Named {
        let target = |block: &[u8]| match is_zeros(block) {
            true => BlockTarget::Number(0),
            false => BlockTarget::New(key.hash(block), checksum(block)),
        };
        let gets = bytes.chunks(BLOCK_BYTES).map(target).collect();
        Named { bytes, gets }
    }
}

/// Writes volumes.
pub(super) struct Writer {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    journal_writer: Arc<JournalWriter>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    collector: Arc<Collector>,
    scrubber: Arc<Scrubber>,
    reader: Arc<Reader>,
    /// The locks of blocks. A write holds those of the blocks that it changes.
    blocks: Arc<Stripes>,
    batches: Batches,
}

/// The parts that a writer uses.
pub(super) struct Uses {
    pub(super) shared: Arc<Shared>,
    pub(super) journal: Arc<Journal>,
    pub(super) journal_writer: Arc<JournalWriter>,
    pub(super) leaves: Arc<Leaves>,
    pub(super) changes: Arc<Changes>,
    pub(super) collector: Arc<Collector>,
    pub(super) scrubber: Arc<Scrubber>,
    pub(super) reader: Arc<Reader>,
    pub(super) blocks: Arc<Stripes>,
}

impl Writer {
    pub(super) fn new(uses: Uses, batches: Batches) -> Writer {
        let Uses {
            shared,
            journal,
            journal_writer,
            leaves,
            changes,
            collector,
            scrubber,
            reader,
            blocks,
        } = uses;
        Writer {
            shared,
            journal,
            journal_writer,
            leaves,
            changes,
            collector,
            scrubber,
            reader,
            blocks,
            batches,
        }
    }

    /// Writes a range of a volume. When it returns `Ok`, reads see the data, and they survive the death of this
    /// process. A [flush](Journal::flush) makes them durable. `offset` is in bytes.
    ///
    /// # Errors
    /// `StorageFull`. `InvalidInput`: not inside the volume. `NotFound`: there is no such volume. `PermissionDenied`: it
    /// is a snapshot. Others are the kernel's.
    pub(super) async fn write(
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
                // All begin in their order, so content that is read in order gets places in that order.
                n => all((0..n).map(write)).await.into_iter().collect::<io::Result<()>>()?,
            }
        }
    }

    /// Makes a range of a volume read as zeros. `offset` and `len` are bytes.
    ///
    /// # Errors
    /// As [`write`](Writer::write).
    pub(super) async fn write_zeros(
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
            let nothing = self.nothing_from(port, volume, at, end - at).await?;
            if nothing > 0 {
                at += nothing;
                continue;
            }
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
                self.collector.with_room(port, empty).await?;
            }
            at += bytes;
            port.io.yield_to_others().await;
        }
        Ok(())
    }

    /// How many bytes from `offset` on are whole blocks of leaves that are not there: they need no zeros. `offset` and
    /// `len` are bytes.
    ///
    /// # Errors
    /// As [`write`](Writer::write).
    pub(super) async fn nothing_from(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let (block, leaf) = (BLOCK_BYTES as u64, (V2P_ENTRIES * BLOCK_BYTES) as u64);
        let end = (offset + len) / block * block;
        if !offset.is_multiple_of(block) || offset >= end {
            return Ok(0);
        }
        let next = self.leaves.next_leaf(port, volume, offset / leaf).await?;
        // A replay may carry out a write that has failed. Only a later record of zeros undoes it.
        if self.journal.has_failed() {
            return Ok(0);
        }
        Ok(next.map_or(end, |next| end.min(next * leaf)).saturating_sub(offset))
    }

    /// Checks that a range can be written. Gives the dedup domain of the volume.
    fn check_writable(&self, volume: VolumeId, offset: u64, len: u64) -> io::Result<Domain> {
        self.reader.check_range(volume, offset, len)?;
        let core = self.shared.core();
        let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
        if volume.is_snapshot {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let domain = core.domains.entries().get(&volume.domain.into());
        let domain =
            domain.ok_or_else(|| damaged(Damaged("volume refers to a missing dedup domain")))?;
        Ok(Domain { number: volume.domain, key: domain.key.clone() })
    }

    /// Makes whole blocks of one leaf zeros.
    async fn empty_blocks(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
        count: u64,
    ) -> io::Result<()> {
        let _alone = self.blocks.lock_blocks(&port.io, volume, block..block + count).await?;
        let change = async {
            let (leaf, first) = Leaf::of_block(volume, block);
            let are_zeros = |pages: &Pages, id: &PageId| {
                (first..first + count as usize).all(|at| pages.words(id, at) == Some([0; 1]))
            };
            let is_empty = self.leaves.look(port, leaf, are_zeros).await?.unwrap_or(true);
            // A replay may carry out a write that has failed. Only a later record of zeros undoes it.
            if is_empty && !self.journal.has_failed() {
                return Ok(());
            }
            let blocks = (block..block + count).map(|block| (volume, block, 0)).collect();
            let record = Record::Zeros { volume, block, count: count as u32 };
            self.carry_out(port, Change { blocks, new: Vec::new() }, &record).await
        };
        self.shared.epochs.during(change).await
    }

    /// Writes one part. The rest of its first and last block stays as it is.
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
            // The write asks for the phase when it is in the epoch (section 7).
            let phase = self.collector.phase();
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
            self.batches.write(port, Part { volume, domain, first, bytes, gets }).await
        };
        let write = async || {
            // Section 3, step 1. A write that waits for room holds no locks (section 7, ENOSPC).
            let _alone = self.blocks.lock_blocks(&port.io, volume, blocks.clone()).await?;
            self.shared.epochs.during(write()).await
        };
        self.collector.with_room(port, write).await
    }

    /// Reads the blocks of a range, if the write leaves a part of them as it is.
    async fn read_around(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: usize,
    ) -> io::Result<Vec<u8>> {
        match is_whole(offset, len) {
            true => Ok(vec![0; len]),
            false => self.reader.read_blocks(port, volume, blocks_of(offset, len)).await,
        }
    }

    /// Section 3, step 3: content that the store has is not stored again.
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

    /// Looks for a number with this content. The index has candidates, and the whole hash decides.
    async fn find(&self, port: &Port, phase: Phase, hash: &ContentHash) -> io::Result<Option<u64>> {
        for number in self.shared.index.candidates(hash) {
            // In this order (section 6, Order).
            match self.has(port, number, hash).await {
                Ok(true) if self.claim(phase, number) => return Ok(Some(number)),
                // A damaged entry does not fail the write: the content is stored again.
                Err(e) if !is_lost(&e) => return Err(e),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Claims content that the store has. `false`: the write must not use it.
    fn claim(&self, phase: Phase, number: u64) -> bool {
        // A guest that writes bad content again makes a good copy of it.
        let refuses = self.scrubber.refuses(number);
        !refuses && self.collector.claim(phase, number)
    }

    /// Whether a number has content with this hash.
    ///
    /// # Errors
    /// Its entry or hash is damaged (`InvalidData`), or cannot be read.
    pub(super) async fn has(
        &self,
        port: &Port,
        number: u64,
        hash: &ContentHash,
    ) -> io::Result<bool> {
        // In this order (section 6, Order).
        let entry = self.leaves.whereabouts(port, number).await?;
        let is_here = matches!(entry, Whereabouts::Plain { .. } | Whereabouts::Packed { .. });
        Ok(is_here && self.leaves.hash_of(port, number).await? == *hash)
    }

    /// Writes the record of zeros, and then changes memory.
    async fn carry_out(&self, port: &Port, change: Change, record: &Record) -> io::Result<()> {
        let leaves = change.leaves();
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes.check_room(ChangeKind::Zeros)?;
        let mut block = Filling::default();
        block.add(record);
        // Memory has the whole change, or nothing of it.
        let make = async || {
            self.changes.with_all(port, &mut claim, &leaves, |core| change.make(core)).await
        };
        let check = |core: &Core| change.check(core);
        self.journal_writer.write(port, JournalLock::Shared, block, check, make).await
    }
}

fn is_whole(offset: u64, len: usize) -> bool {
    offset.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES)
}

/// Hashes the parts that are whole blocks, before any lock is taken. Other threads do it if the parts are large.
async fn name_parts(port: &Port, domain: &Domain, parts: &[(u64, Span)]) -> Vec<Option<Named>> {
    let mut bytes: Vec<Option<Vec<u8>>> = parts
        .iter()
        .map(|(at, from)| {
            is_whole(*at, from.len()).then(|| {
                let mut bytes = vec![0; from.len()];
                // The copy keeps hash and data equal though the guest may change its memory meanwhile.
                port.memory().copy_out(*from, &mut bytes);
                bytes
            })
        })
        .collect();
    let hash = |key: &DomainKey, bytes: &mut [Option<Vec<u8>>]| -> Vec<Option<Named>> {
        bytes.iter_mut().map(|bytes| bytes.take().map(|bytes| Named::of(key, bytes))).collect()
    };
    if parts.iter().map(|(_, from)| from.len()).sum::<usize>() < HASHED_BESIDE {
        return hash(&domain.key, &mut bytes);
    }
    let key = domain.key.clone();
    let named = port.io.compute(move || hash(&key, &mut bytes)).await;
    // A part without hashes hashes its blocks itself.
    named.unwrap_or_else(|_| parts.iter().map(|_| None).collect())
}
