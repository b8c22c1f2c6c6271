//! The reader: it maps a volume's blocks to numbers and numbers to places, and reads them (store.md 6).

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ferrite_disk_base::{Extent, Port};
use ferrite_io::arena::{Arena, Span};

use super::groups::Groups;
use super::leaf::{Leaf, is_lost};
use super::leaves::Leaves;
use super::mapping::{Spot, Spots};
use super::scrubber::Scrubber;
use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::Damaged;
use crate::content::{checksum, is_zeros};
use crate::journal::VolumeId;
use crate::medium::MAX_BLOCKS;
use crate::page::{V2P_ENTRIES, Whereabouts, decode_number};
use crate::pages::{PageId, Pages};
use crate::side_by_side::all;
use crate::stripes::Stripes;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The most parts of one request under way at once.
const PARTS_AT_ONCE: usize = 4;
/// The most runs of places of one request under way at once.
const RUNS_AT_ONCE: usize = 16;

/// More blocks than any volume has.
const BLOCKS_BEHIND: u64 = 1 << 48;

/// Splits blocks into runs of consecutive places. Each has its first place, or `None` for zeros.
fn runs(spots: &[Spot]) -> Vec<(Option<u64>, Range<usize>)> {
    let mut runs: Vec<(Option<u64>, Range<usize>)> = Vec::new();
    for (i, spot) in spots.iter().enumerate() {
        let place = match *spot {
            Spot::Zeros => None,
            Spot::Place { place, .. } => Some(place),
        };
        match runs.last_mut() {
            Some((first, of)) if first.map(|first| first + of.len() as u64) == place => of.end += 1,
            _ => runs.push((place, i..i + 1)),
        }
    }
    runs
}

/// Splits a range into parts of at most [`MAX_BLOCKS`] blocks: the offset of each, and its bytes of the range.
pub(super) fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
    let most = (MAX_BLOCKS * BLOCK_BYTES) as u64;
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        // No part crosses the end of a leaf of V2P.
        let bytes = ((most - at % most) as usize).min(len - done);
        let part = (at, done..done + bytes);
        done += bytes;
        (bytes > 0).then_some(part)
    })
}

/// The blocks that a range of bytes touches.
pub(super) fn blocks_of(offset: u64, len: usize) -> Range<u64> {
    let block = BLOCK_BYTES as u64;
    offset / block..(offset + len as u64).div_ceil(block)
}

/// Whether blocks that were read have the checksums that the store knows.
fn are_as_known(port: &Port, spots: &[Spot], read: Span) -> bool {
    let mut bytes = [0; BLOCK_BYTES];
    spots.iter().enumerate().all(|(i, spot)| match *spot {
        Spot::Zeros => true,
        Spot::Place { checksum: known, .. } => {
            port.memory().copy_out(read.slice(i * BLOCK_BYTES, BLOCK_BYTES), &mut bytes);
            checksum(&bytes) == known
        }
    })
}

/// Reads volumes.
pub(super) struct Reader {
    shared: Arc<Shared>,
    leaves: Arc<Leaves>,
    groups: Arc<Groups>,
    scrubber: Arc<Scrubber>,
    /// The locks of blocks, which writes hold.
    blocks: Arc<Stripes>,
}

impl Reader {
    pub(super) fn new(
        shared: Arc<Shared>,
        leaves: Arc<Leaves>,
        groups: Arc<Groups>,
        scrubber: Arc<Scrubber>,
        blocks: Arc<Stripes>,
    ) -> Reader {
        Reader { shared, leaves, groups, scrubber, blocks }
    }

    /// Where the beginning of a range of a volume is, if memory knows it: blocks in consecutive places, or zeros. The
    /// caller stays in its epoch until its operation on them has ended. `offset` and `len` are bytes.
    pub(super) fn map(&self, volume: VolumeId, offset: u64, len: u64) -> Extent {
        // Only whole blocks have checksums.
        if !(offset | len).is_multiple_of(BLOCK) {
            return Extent::Slow { len };
        }
        let mut spots = Spots::new(&self.shared, volume, blocks_of(offset, len as usize));
        let Some(first) = spots.next().flatten() else { return Extent::Slow { len } };
        let follows = |(count, spot): &(u64, Option<Spot>)| match (first, spot) {
            (Spot::Zeros, Some(Spot::Zeros)) => true,
            (Spot::Place { place: first, .. }, Some(Spot::Place { place, .. })) => {
                *place == first + count
            }
            _ => false,
        };
        let count = 1 + (1..).zip(spots).take_while(follows).count();
        let len = count as u64 * BLOCK;
        self.leaves.count_hits(count, if first == Spot::Zeros { 0 } else { count });
        match first {
            Spot::Zeros => Extent::Zeros { len },
            Spot::Place { place, .. } => Extent::Data { file: 0, offset: place * BLOCK, len },
        }
    }

    /// Whether blocks have these data, as far as memory knows. `false` is no proof of damage: a write may have replaced
    /// the blocks meanwhile. The caller is still in the epoch in which it has mapped. `offset` is in bytes.
    pub(super) fn check(&self, memory: &Arena, volume: VolumeId, offset: u64, data: Span) -> bool {
        if !(offset | data.len() as u64).is_multiple_of(BLOCK) {
            return false;
        }
        let mut bytes = [0; BLOCK_BYTES];
        let mut fits = |(spot, at)| {
            memory.copy_out(data.slice(at, BLOCK_BYTES), &mut bytes);
            match spot {
                Some(Spot::Zeros) => is_zeros(&bytes),
                Some(Spot::Place { checksum: known, .. }) => checksum(&bytes) == known,
                None => false,
            }
        };
        let spots = Spots::new(&self.shared, volume, blocks_of(offset, data.len()));
        spots.zip((0..data.len()).step_by(BLOCK_BYTES)).all(&mut fits)
    }

    /// Reads a range of a volume. `offset` is in bytes.
    ///
    /// # Errors
    /// A block is damaged (`InvalidData`), or cannot be read. `InvalidInput`: not inside the volume. `NotFound`: there
    /// is no such volume.
    pub(super) async fn read(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        to: Span,
    ) -> io::Result<()> {
        self.check_range(volume, offset, to.len() as u64)?;
        if self.shared.epochs.during(self.read_whole(port, volume, offset, to)).await {
            return Ok(());
        }
        let parts: Vec<_> = parts(offset, to.len()).collect();
        for some in parts.chunks(PARTS_AT_ONCE) {
            let read = async |(at, part): &(u64, Range<usize>)| {
                let bytes = self.read_part(port, volume, blocks_of(*at, part.len())).await?;
                let from = (*at % BLOCK_BYTES as u64) as usize;
                let to = to.slice(part.start, part.len());
                port.memory().copy_in(to, &bytes[from..from + part.len()]);
                Ok(())
            };
            all(some.iter().map(read)).await.into_iter().collect::<io::Result<()>>()?;
        }
        Ok(())
    }

    /// Reads whole blocks straight into the request's memory, consecutive places by one operation. `false`: it has
    /// failed, or the request must be read in parts, which also find the error. The caller is in an epoch.
    async fn read_whole(&self, port: &Port, volume: VolumeId, offset: u64, to: Span) -> bool {
        let is_whole = |at: usize| at.is_multiple_of(BLOCK_BYTES);
        if !(is_whole(offset as usize) && is_whole(to.len()) && is_whole(to.offset())) {
            return false;
        }
        let Some(spots) = self.find_all(port, volume, blocks_of(offset, to.len())).await else {
            return false;
        };
        let slice = |blocks: &Range<usize>| {
            to.slice(blocks.start * BLOCK_BYTES, blocks.len() * BLOCK_BYTES)
        };
        for some in runs(&spots).chunks(RUNS_AT_ONCE) {
            let read = async |(place, blocks): &(Option<u64>, Range<usize>)| match place {
                Some(place) => {
                    let at = place * BLOCK_BYTES as u64;
                    let done = port.io.read_exact(port.files[0], at, slice(blocks)).await;
                    // The checksums are compared while other reads are under way.
                    done.is_ok() && are_as_known(port, &spots[blocks.clone()], slice(blocks))
                }
                None => {
                    port.memory().fill(slice(blocks), 0);
                    true
                }
            };
            if !all(some.iter().map(read)).await.into_iter().all(|is_good| is_good) {
                return false;
            }
        }
        true
    }

    /// Where consecutive blocks are. Leaves that memory lacks are read. `None`: that has failed, or one of the contents
    /// is compressed.
    async fn find_all(
        &self,
        port: &Port,
        volume: VolumeId,
        mut blocks: Range<u64>,
    ) -> Option<Vec<Spot>> {
        let mut all = Vec::with_capacity((blocks.end - blocks.start) as usize);
        while !blocks.is_empty() {
            let before = all.len();
            all.extend(Spots::new(&self.shared, volume, blocks.clone()).map_while(|spot| spot));
            let found = &all[before..];
            let zeros = found.iter().filter(|spot| **spot == Spot::Zeros).count();
            self.leaves.count_hits(found.len(), found.len() - zeros);
            blocks.start += found.len() as u64;
            let Some(block) = blocks.next() else { break };
            all.push(match self.place_of(port, volume, block).await.ok()? {
                None => Spot::Zeros,
                Some(Whereabouts::Plain { place, checksum }) => Spot::Place { place, checksum },
                Some(_) => return None,
            });
        }
        Some(all)
    }

    /// Reads the blocks of one part. A block that does not fit its checksum is read again with the blocks locked before
    /// it is an error. A block that storage cannot read is not, since that takes long.
    async fn read_part(
        &self,
        port: &Port,
        volume: VolumeId,
        blocks: Range<u64>,
    ) -> io::Result<Vec<u8>> {
        let read = || self.shared.epochs.during(self.read_blocks(port, volume, blocks.clone()));
        let (mut done, mut _alone) = (read().await, None);
        if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::InvalidData) {
            // Not in an epoch: the task that holds the lock may wait for a pass, which waits for all epochs.
            _alone = Some(self.blocks.lock_blocks(&port.io, volume, blocks.clone()).await?);
            done = read().await;
        }
        if done.as_ref().is_err_and(is_lost) {
            self.shared.epochs.during(self.refuse_bad(port, volume, blocks)).await;
        }
        done
    }

    /// Whether a range of bytes is inside a volume.
    ///
    /// # Errors
    /// `InvalidInput`: it is not. `NotFound`: there is no such volume.
    pub(super) fn check_range(&self, volume: VolumeId, offset: u64, len: u64) -> io::Result<()> {
        let core = self.shared.core();
        let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
        let size = volume.blocks * BLOCK_BYTES as u64;
        match offset.checked_add(len).is_some_and(|end| end <= size) {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Reads the blocks of one part. The caller is in an epoch.
    ///
    /// # Errors
    /// As [`read`](Reader::read).
    pub(super) async fn read_blocks(
        &self,
        port: &Port,
        volume: VolumeId,
        blocks: Range<u64>,
    ) -> io::Result<Vec<u8>> {
        let mut places = Vec::new();
        for block in blocks {
            places.push(self.place_of(port, volume, block).await?);
        }
        let mut bytes = vec![0; places.len() * BLOCK_BYTES];
        let mut at = 0;
        while at < places.len() {
            let first = match places[at] {
                Some(Whereabouts::Plain { place, .. }) => place,
                Some(packed) => {
                    let block = self.groups.read(port, packed).await?;
                    bytes[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES].copy_from_slice(&block);
                    at += 1;
                    continue;
                }
                None => {
                    at += 1;
                    continue;
                }
            };
            let plain = |place: &Option<Whereabouts>| match place {
                Some(Whereabouts::Plain { place, checksum }) => Some((*place, *checksum)),
                _ => None,
            };
            let follows = |(i, place): (u64, &Option<Whereabouts>)| {
                plain(place).is_some_and(|(place, _)| place == first + i)
            };
            let run = (0..).zip(&places[at..]).take_while(|pair| follows(*pair)).count();
            let data = self.shared.medium.read(port, first, run).await?;
            for (block, place) in data.chunks(BLOCK_BYTES).zip(&places[at..]) {
                // The map has named this content since before the read began, so the place can have no other content.
                if plain(place).is_none_or(|(_, sum)| checksum(block) != sum) {
                    return Err(damaged(Damaged("a block does not fit its checksum")));
                }
            }
            bytes[at * BLOCK_BYTES..(at + run) * BLOCK_BYTES].copy_from_slice(&data);
            at += run;
        }
        Ok(bytes)
    }

    /// Whether a block of a volume is zeros without space, and how many blocks from it on are the same, at least.
    ///
    /// # Errors
    /// As [`read`](Reader::read).
    pub(super) async fn zeros_from(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
    ) -> io::Result<(bool, u64)> {
        let (leaf, first) = Leaf::of_block(volume, block);
        let are_zeros = |words: Option<[u64; 1]>| words == Some([0]);
        let look = |pages: &Pages, id: &PageId| {
            let are = |at| are_zeros(pages.words(id, at));
            let is = are(first);
            (is, (first..V2P_ENTRIES).take_while(|at| are(*at) == is).count() as u64)
        };
        if let Some(found) = self.leaves.look(port, leaf, look).await? {
            return Ok(found);
        }
        // All leaves that are not there count at once.
        let next = block / V2P_ENTRIES as u64 + 1;
        let next = self.leaves.next_leaf(port, volume, next).await?;
        Ok((true, next.map_or(BLOCKS_BEHIND, |next| next * V2P_ENTRIES as u64 - block)))
    }

    /// Has writes refuse the contents of those of these blocks that cannot be read. The caller is in an epoch.
    async fn refuse_bad(&self, port: &Port, volume: VolumeId, blocks: Range<u64>) {
        for block in blocks {
            let read = self.read_blocks(port, volume, block..block + 1).await;
            if read.is_err_and(|e| is_lost(&e))
                && let Ok([number]) = self.leaves.words(port, Leaf::of_block(volume, block)).await
            {
                self.scrubber.refuse(port, number).await;
            }
        }
    }

    /// Where a block of a volume is. `None`: it is zeros.
    async fn place_of(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
    ) -> io::Result<Option<Whereabouts>> {
        let [word] = self.leaves.words(port, Leaf::of_block(volume, block)).await?;
        let number = decode_number(word.to_le_bytes(), &self.shared.layout()).map_err(damaged)?;
        if number == 0 {
            return Ok(None);
        }
        match self.leaves.content_of(port, number).await? {
            found @ (Whereabouts::Plain { .. } | Whereabouts::Packed { .. }) => Ok(Some(found)),
            _ => Err(damaged(Damaged("a volume has a content that is nowhere"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_a_row_are_one_run_and_so_are_zeros() {
        let at = |place| Spot::Place { place, checksum: 0 };
        let no = Spot::Zeros;
        let spots = [no, no, at(7), at(8), at(10), no, at(11), at(9)];
        let expected = [
            (None, 0..2),
            (Some(7), 2..4),
            (Some(10), 4..5),
            (None, 5..6),
            (Some(11), 6..7),
            (Some(9), 7..8),
        ];
        assert_eq!(runs(&spots), expected);
        assert!(runs(&[]).is_empty());
    }
}
