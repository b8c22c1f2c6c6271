//! Discards ranges, and makes ranges read as zeros.
//!
//! A block keeps its place: a write in flight to it must never reach another block's data. Discard returns the space in
//! the file by punching holes.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Extent, Port, Raw};
use ferrite_io::arena::Span;

use super::entry::{Entry, State as Where};
use super::{Blocks, Look, Part, masks};
use crate::image::backing::Backing;
use crate::image::mapping::Mapping;

/// Blocks without a place that one part of a discard skips: about ten microseconds.
const BLOCKS_A_PART: usize = 1 << 14;

impl Blocks {
    /// Discards the beginning of the range, up to the end of the first block that has a place; the bytes that this was.
    /// The range may then read as zeros, as the data below, or as before. In a file its space is returned. If there are
    /// data below, or no holes can be made, its bits are cleared.
    ///
    /// The order does not matter here: holes and bits reach the disk at any time, and after a power cut every
    /// combination is allowed.
    pub(in crate::vhd) async fn discard_part(
        &self,
        port: &Port,
        raw: &Raw,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let mut done = 0;
        for part in self.parts(offset, len).take(BLOCKS_A_PART) {
            done += part.bytes();
            if self.entry(part.block).state() == Where::Empty {
                continue;
            }
            if !self.whole() {
                // As before a write: bitmaps stay in memory until a commit, and one request may be for all of them.
                if self.tight.load(Ordering::Relaxed) {
                    self.commit(port).await?;
                }
                self.clear(port, part).await?;
            }
            if self.is_file {
                let at = self.data_offset(self.entry(part.block), part.first);
                match raw.discard(&port.io, &port.files, at, part.bytes()).await {
                    // No holes on this file system: clearing the bits has to do.
                    Err(e) if e.kind() == io::ErrorKind::Unsupported && !self.whole() => {}
                    done => done?,
                }
            }
            break;
        }
        Ok(done.min(len))
    }

    /// Clears the bits of a part.
    async fn clear(&self, port: &Port, part: Part) -> io::Result<()> {
        loop {
            self.load_block(port, port.files[0], part.block).await?;
            let mut state = self.lock();
            let entry = self.entry(part.block);
            let slot = match entry.state() {
                Where::Empty | Where::Damaged(_) => return Ok(()),
                // It was evicted again.
                Where::OnDisk | Where::Overlay(_) => continue,
                Where::Bits(slot) => slot,
                Where::Full => {
                    let slot = self.take_slot(&mut state, part.block);
                    self.slab.slot(slot).fill(|_| u64::MAX);
                    slot
                }
            };
            let bits = self.slab.slot(slot);
            for (i, mask) in masks(part.first, part.sectors) {
                bits.set_word(i, bits.word(i) & !mask);
            }
            self.mark_dirty(&mut state, part.block, entry.with_state(Where::Bits(slot)));
            return Ok(());
        }
    }

    /// Makes the range read as zeros. Parts that do so already (no place and nothing below, or zeros below) are
    /// skipped; the rest gets zeros in its place, and then its bits. Sectors are skipped only by bits that are durable.
    /// A bit that a discard has cleared in memory only is set again if this process dies, and the old data with it.
    pub(in crate::vhd) async fn write_zeroes(
        &self,
        port: &Port,
        raw: &Raw,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let (mut offset, end) = (offset, offset + len);
        while offset < end {
            let mut part = self.part(offset, end - offset);
            let (_, look) = self.look(part);
            match look {
                Look::Unknown => {
                    self.load_block(port, port.files[0], part.block).await?;
                    continue;
                }
                Look::Absent(n) => {
                    part.sectors = n;
                    let entry = self.entry(part.block);
                    // An image that was opened without its parents has unknown data below.
                    let is_zero_below = || {
                        let found = below.map(offset, part.bytes());
                        !below.is_empty()
                            && matches!(found, Extent::Zeros { len } if len >= part.bytes())
                    };
                    let zero = !entry.has(Entry::DIRTY)
                        && !entry.has(Entry::BUSY)
                        && (!self.differencing || is_zero_below());
                    if zero {
                        offset += part.bytes();
                        continue;
                    }
                }
                Look::Present(n) => part.sectors = n,
            }
            match self.reserve(offset, part.bytes()) {
                Mapping::Data { offset: at, len } => {
                    raw.empty(&port.io, &port.files, at, len, zeros).await?;
                    self.written(offset, len);
                    offset += len;
                }
                _ => self.prepare(port, raw, offset, part.bytes()).await?,
            }
        }
        Ok(())
    }
}
