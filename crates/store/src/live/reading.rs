//! Reads: from a volume's blocks to numbers, from numbers to places (store.md 6).

use std::io;
use std::ops::Range;

use ferrite_disk_base::Port;
use ferrite_io::arena::Span;

use super::leaves::{Leaf, is_lost};
use super::mapping::Spot;
use super::{BLOCK_BYTES, Live, damaged};
use crate::Damaged;
use crate::content::checksum;
use crate::journal::VolumeId;
use crate::medium::MAX_BLOCKS;
use crate::page::{V2P_ENTRIES, Whereabouts, decode_number};
use crate::pages::{PageId, Pages};
use crate::side_by_side::all;

/// Parts of one request that are under way at once.
const PARTS_AT_ONCE: usize = 4;
/// Runs of places that are.
const RUNS_AT_ONCE: usize = 16;

/// Blocks in a row: the first of the places that they are in, one after the other. None: they are zeros.
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

/// Parts of a range that are in so many blocks at most, each: offset, and bytes.
pub(super) fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
    let most = (MAX_BLOCKS * BLOCK_BYTES) as u64;
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        // They end where a leaf of V2P ends, at the latest.
        let bytes = ((most - at % most) as usize).min(len - done);
        let part = (at, done..done + bytes);
        done += bytes;
        (bytes > 0).then_some(part)
    })
}

/// The blocks that a range is in.
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

impl Live {
    /// Reads a range of a volume.
    ///
    /// # Errors
    /// A block is damaged (`InvalidData`), or cannot be read. `InvalidInput`: not inside the volume.
    pub async fn read(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        to: Span,
    ) -> io::Result<()> {
        self.check_range(volume, offset, to.len() as u64)?;
        if self.epochs.during(self.read_whole(port, volume, offset, to)).await {
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

    /// Reads whole blocks to where they are wanted, those in places in a row by one operation. `false`: it has to
    /// be done in parts, or has failed, which those find out. The caller is in an epoch.
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
                    // While the others are under way.
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

    /// Where blocks in a row are. What memory does not have of that is read. None: that has failed, or one of
    /// them is not in a block of its own.
    async fn find_all(
        &self,
        port: &Port,
        volume: VolumeId,
        mut blocks: Range<u64>,
    ) -> Option<Vec<Spot>> {
        let mut all = Vec::with_capacity((blocks.end - blocks.start) as usize);
        while !blocks.is_empty() {
            let before = all.len();
            all.extend(self.spots(volume, blocks.clone()).map_while(|spot| spot));
            let found = &all[before..];
            let zeros = found.iter().filter(|spot| **spot == Spot::Zeros).count();
            self.count_hits(found.len(), found.len() - zeros);
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

    /// Blocks of one part. What does not fit is read once more under the blocks' lock before it is an error; what
    /// storage cannot read is not, since it takes long.
    async fn read_part(
        &self,
        port: &Port,
        volume: VolumeId,
        blocks: Range<u64>,
    ) -> io::Result<Vec<u8>> {
        let read = || self.epochs.during(self.read_blocks(port, volume, blocks.clone()));
        let (mut done, mut _alone) = (read().await, None);
        if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::InvalidData) {
            // In no epoch: who has the lock may wait for a pass, which waits for all epochs.
            _alone = Some(self.blocks.lock_blocks(&port.io, volume, blocks.clone()).await?);
            done = read().await;
        }
        if done.as_ref().is_err_and(is_lost) {
            self.epochs.during(self.refuse_bad(port, volume, blocks)).await;
        }
        done
    }

    /// Whether a range is in a volume, as all that its guest asks for must be.
    pub(super) fn check_range(&self, volume: VolumeId, offset: u64, len: u64) -> io::Result<()> {
        let core = self.core();
        let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
        let size = volume.blocks * BLOCK_BYTES as u64;
        match offset.checked_add(len).is_some_and(|end| end <= size) {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Blocks of one part. The caller is in an epoch.
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
                    let block = self.unpacked(port, packed).await?;
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
            let data = self.medium.read(port, first, run).await?;
            for (block, place) in data.chunks(BLOCK_BYTES).zip(&places[at..]) {
                // It is what a map has named since before this began, so nothing else can be there.
                if plain(place).is_none_or(|(_, sum)| checksum(block) != sum) {
                    return Err(damaged(Damaged("a block does not fit its checksum")));
                }
            }
            bytes[at * BLOCK_BYTES..(at + run) * BLOCK_BYTES].copy_from_slice(&data);
            at += run;
        }
        Ok(bytes)
    }

    /// Whether blocks of a volume from one on are zeros that take no space, and for how many at least.
    ///
    /// # Errors
    /// As [`read`](Live::read).
    pub async fn zeros_from(
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
        let found = self.look(port, leaf, look).await?;
        Ok(found.unwrap_or((true, (V2P_ENTRIES - first) as u64)))
    }

    /// Where a block of a volume is. None: it is zeros.
    async fn place_of(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
    ) -> io::Result<Option<Whereabouts>> {
        let [word] = self.words(port, Leaf::of_block(volume, block)).await?;
        let number = decode_number(word.to_le_bytes(), &self.layout).map_err(damaged)?;
        if number == 0 {
            return Ok(None);
        }
        match self.content_of(port, number).await? {
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
