//! Ranges that are not needed any more, and ranges that have to read as zeros.
//!
//! A block keeps its place: a write that is in flight to it must never land in what has become
//! another block's. What is given back is the space in the file below it, by punching holes.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Extent, Port, Raw};
use ferrite_io::arena::Span;

use super::entry::{Entry, State as Where};
use super::{Blocks, Look, Part, masks};
use crate::image::backing::Backing;
use crate::image::mapping::Mapping;

/// Blocks without a place that one part of a discard passes over: some ten microseconds.
const BLOCKS_A_PART: usize = 1 << 14;

impl Blocks {
    /// Of the beginning of the range, up to the end of the first block that has a place; the bytes
    /// that this was. The range may read as zeros, as what is below, or as before. In a file its space is given
    /// back; where there is something below, or no holes can be made, its bits are cleared.
    ///
    /// Order does not matter here: holes and bits reach the disk when they like, and whichever is
    /// there after a power cut, what is read is allowed.
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
                // As before a write: bitmaps stay in memory until a commit, and one request may be
                // for all of them.
                if self.tight.load(Ordering::Relaxed) {
                    self.commit(port).await?;
                }
                self.clear(port, part).await?;
            }
            if self.is_file {
                let at = self.data_offset(self.entry(part.block), part.first);
                match raw.discard(&port.io, &port.files, at, part.bytes()).await {
                    // No holes on this file system: the bits are cleared, that is all there is.
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
                Where::Empty => return Ok(()),
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

    /// Makes the range read as zeros. What reads so already (no place and nothing below, or zeros
    /// below) stays as it is; the rest gets zeros in its place, and then its bits. A bit that a
    /// discard has cleared in memory only is no reason to leave out anything: if this process
    /// dies, it is set again, and what was there before is back.
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
                    let zero = !entry.has(Entry::DIRTY)
                        && !entry.has(Entry::BUSY)
                        && (!self.differencing
                            || matches!(below.map(offset, part.bytes()),
                                Extent::Zeros { len } if len >= part.bytes()));
                    if zero {
                        offset += part.bytes();
                        continue;
                    }
                }
                Look::Present(n) => part.sectors = n,
            }
            match self.reserve(offset, part.bytes()) {
                Mapping::Data { offset: at, len } => {
                    raw.write_zeroes(&port.io, &port.files, at, len, zeros).await?;
                    self.written(offset, len);
                    offset += len;
                }
                _ => self.prepare(port, raw, offset, part.bytes()).await?,
            }
        }
        Ok(())
    }
}
