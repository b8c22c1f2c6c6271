//! What blocks are where, and where they end: for closing, resizing, and whoever wants to know.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Raw};

use super::entry::{Entry, State as Where};
use super::{Blocks, Look, SECTOR};
use crate::vhd::footers::End;
use crate::vhd::format::layout::{Layout, Placed};

impl Blocks {
    /// Where the footer of a file belongs, if the image was changed or `anyway`; no block is placed
    /// from now on.
    pub(in crate::vhd) fn closing(&self, anyway: bool) -> Option<End> {
        let mut state = self.lock();
        if !state.changed && !anyway {
            return None;
        }
        state.run_end = state.next;
        drop(state);
        Some(self.end_of_file())
    }

    /// Where the used parts of a file end, and where its footer belongs.
    pub(in crate::vhd) fn end_of_file(&self) -> End {
        let used = self.end();
        End { used, footer: self.layout.footer_at(used, self.qemu_overwrites_batmap()) }
    }

    fn qemu_overwrites_batmap(&self) -> bool {
        let placed = (0..self.table.len() as u32).filter_map(|block| self.place_of(block));
        !self.differencing && self.layout.qemu_overwrites_batmap(placed)
    }

    /// Whether a device is not as large any more as when the footer was written to its end.
    pub(in crate::vhd) fn is_moved(&self, last_sector: u64) -> bool {
        !self.is_file && self.last_sector.load(Ordering::Acquire) != last_sector
    }

    /// Everything is on disk.
    pub(in crate::vhd) fn closed(&self) -> io::Result<()> {
        let mut state = self.lock();
        (state.changed, state.cut) = (false, false);
        state.journal.remove()
    }

    /// Where the last part of the image ends that is used.
    pub(in crate::vhd) fn end(&self) -> u64 {
        self.lock().next
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

    /// All blocks that have a place, and where.
    pub(in crate::vhd) fn placed(&self) -> impl Iterator<Item = Placed> + '_ {
        let blocks = 0..self.table.len() as u32;
        blocks.filter_map(|block| Some(Placed { sector: self.place_of(block)?, block }))
    }

    /// Where everything was when the image was opened.
    pub(in crate::vhd) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether metadata does not end before the first block, as libvhd has it.
    pub(in crate::vhd) fn is_table_behind_a_block(&self) -> bool {
        let end = self.layout.metadata_end();
        self.placed().any(|placed| placed.start() < end)
    }

    /// The next block gets no place before `end`.
    pub(in crate::vhd) fn leave_room(&self, end: u64) {
        let mut state = self.lock();
        state.next = state.next.max(end);
        state.run_end = state.run_end.max(state.next);
    }

    /// Takes places for so many blocks more, behind all others, in space that is set aside for them.
    ///
    /// # Errors
    /// There is no space. Nothing but the end of the file was changed.
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

    /// A copy of a block is at `sector`, durable: from now on the block is there.
    pub(in crate::vhd) fn moved(&self, block: u32, sector: u32) {
        let _state = self.lock();
        self.set_entry(block, self.entry(block).at(sector));
    }

    /// Blocks that have a place.
    pub(in crate::vhd) fn allocated(&self) -> u32 {
        let placed = |block: &u32| self.place_of(*block).is_some();
        (0..self.table.len() as u32).filter(placed).count() as u32
    }

    /// The first byte at or behind `from` that the image itself has; a block without a single
    /// present sector counts, if it is wholly behind.
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

    /// The bits of the batmap: blocks that are known to be full; none where QEMU needs zeros.
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
