//! The places of blocks, and their end: for closing, resizing, and reports.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Raw};

use super::entry::{Entry, State as Where};
use super::{Blocks, Look, SECTOR};
use crate::vhd::footers::End;
use crate::vhd::format::layout::{Layout, Placed};

impl Blocks {
    /// The place of a file's footer, if the image was changed or `anyway`; no block is placed from now on.
    pub(in crate::vhd) fn closing(&self, anyway: bool) -> Option<End> {
        let mut state = self.lock();
        if !state.changed && !anyway {
            return None;
        }
        state.run_end = state.next;
        drop(state);
        Some(self.end_of_file())
    }

    /// The end of the used parts of a file, and the place of its footer.
    pub(in crate::vhd) fn end_of_file(&self) -> End {
        let used = self.end();
        End { used, footer: self.layout.footer_at(used, self.qemu_overwrites_batmap()) }
    }

    fn qemu_overwrites_batmap(&self) -> bool {
        let placed = (0..self.table.len() as u32).filter_map(|block| self.place_of(block));
        !self.differencing && self.layout.qemu_overwrites_batmap(placed)
    }

    /// Whether a device has another size than when the footer was written to its end.
    pub(in crate::vhd) fn is_moved(&self, last_sector: u64) -> bool {
        !self.is_file && self.last_sector.load(Ordering::Acquire) != last_sector
    }

    /// Called when everything is on disk.
    pub(in crate::vhd) fn closed(&self) -> io::Result<()> {
        let mut state = self.lock();
        (state.changed, state.cut) = (false, false);
        state.journal.remove()
    }

    /// The end of the last used part of the image.
    pub(in crate::vhd) fn end(&self) -> u64 {
        self.lock().next
    }

    /// Gives space back that was reserved for blocks since the opening, and that nothing was written to. A commit has
    /// synced all else, and nothing is in flight.
    pub(in crate::vhd) async fn give_back(&self, port: &Port, raw: &Raw) {
        raw.give_back(&port.io, &port.files, self.first_new, self.end()).await;
    }

    /// Blocks of the disk.
    pub(in crate::vhd) fn blocks(&self) -> u32 {
        self.layout.blocks
    }

    /// The table's entry for a block, if it has a place.
    pub(in crate::vhd) fn place_of(&self, block: u32) -> Option<u32> {
        let entry = Entry(self.table.get(block as usize)?.load(Ordering::Acquire));
        (entry.state() != Where::Empty).then(|| entry.sector())
    }

    /// All blocks that have a place, with their places.
    pub(in crate::vhd) fn placed(&self) -> impl Iterator<Item = Placed> + '_ {
        let blocks = 0..self.table.len() as u32;
        blocks.filter_map(|block| Some(Placed { sector: self.place_of(block)?, block }))
    }

    /// The layout of the image when it was opened.
    pub(in crate::vhd) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether metadata does not end before the first block, as libvhd requires.
    pub(in crate::vhd) fn is_table_behind_a_block(&self) -> bool {
        let end = self.layout.metadata_end();
        self.placed().any(|placed| placed.start() < end)
    }

    /// Whether neither metadata nor a block lies in these bytes of the file.
    pub(in crate::vhd) fn is_free(&self, bytes: &Range<u64>) -> bool {
        let apart = |(start, end): (u64, u64)| end <= bytes.start || bytes.end <= start;
        let stride = self.layout.stride();
        let mut blocks = self.placed().map(|placed| (placed.start(), placed.start() + stride));
        self.layout.regions().all(apart) && blocks.all(apart)
    }

    /// Keeps the next block from a place before `end`.
    pub(in crate::vhd) fn leave_room(&self, end: u64) {
        let mut state = self.lock();
        state.next = state.next.max(end);
        state.run_end = state.run_end.max(state.next);
    }

    /// Takes places for so many more blocks, after all others, in space that is set aside for them.
    ///
    /// # Errors
    /// There is no space. Only the end of the file was changed.
    pub(in crate::vhd) async fn places_behind(
        &self,
        port: &Port,
        raw: &Raw,
        count: usize,
    ) -> io::Result<Vec<u32>> {
        self.refill(port, raw, count).await?;
        let mut state = self.lock();
        let mut places = Vec::with_capacity(count);
        for _ in 0..count {
            let sector = self.layout.aligned_place(state.next);
            let sector = sector.ok_or(io::ErrorKind::StorageFull)?;
            state.next = u64::from(sector) * SECTOR + self.layout.stride();
            places.push(sector);
        }
        Ok(places)
    }

    /// Moves a block to `sector`, where a durable copy of it is.
    pub(in crate::vhd) fn moved(&self, block: u32, sector: u32) {
        let _state = self.lock();
        self.set_entry(block, self.entry(block).at(sector));
    }

    /// Blocks that have a place.
    pub(in crate::vhd) fn allocated(&self) -> u32 {
        let placed = |block: &u32| self.place_of(*block).is_some();
        (0..self.table.len() as u32).filter(placed).count() as u32
    }

    /// The first byte at or after `from` that the image itself has. A block without a present sector counts, if it is
    /// wholly after `from`.
    pub(in crate::vhd) async fn used_behind(
        &self,
        port: &Port,
        from: u64,
    ) -> io::Result<Option<u64>> {
        let mut at = from;
        while at < self.disk_bytes {
            let part = self.part(at, self.disk_bytes - at);
            match self.look(part).1 {
                Look::Unknown => self.load_block(port, port.files[0], part.block).await?,
                Look::Present(_) => return Ok(Some(at)),
                Look::Absent(_) if part.first == 0 && self.place_of(part.block).is_some() => {
                    return Ok(Some(at));
                }
                Look::Absent(n) => at += u64::from(n) * SECTOR,
            }
        }
        Ok(None)
    }

    /// The bits of the batmap: blocks that are known to be full; all clear if QEMU needs that.
    pub(in crate::vhd) fn batmap(&self, bytes: usize) -> Vec<u8> {
        let mut map = vec![0; bytes];
        if self.qemu_overwrites_batmap() {
            return map;
        }
        for (block, entry) in self.table.iter().enumerate().take(bytes * 8) {
            let full = Entry(entry.load(Ordering::Acquire)).state() == Where::Full;
            if full && !self.is_cut(block as u32) {
                map[block / 8] |= 0x80 >> (block % 8);
            }
        }
        map
    }
}
