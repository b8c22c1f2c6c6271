//! Loads bitmaps into memory when they are first needed, and evicts them for others.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;
use ferrite_io::engine::FileId;

use super::entry::{Entry, State as Where};
use super::{Blocks, GENERATIONS, SECTOR, State};
use crate::vhd::damage::{Why, unreadable};

impl Blocks {
    /// Reads the bitmaps of the range that are not in memory.
    pub(in crate::vhd) async fn load(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let len = len.min(self.disk_bytes.saturating_sub(offset));
        for part in self.parts(offset, len) {
            self.load_block(port, file, part.block).await?;
        }
        Ok(())
    }

    pub(super) async fn load_block(&self, port: &Port, file: FileId, block: u32) -> io::Result<()> {
        loop {
            let generation = self.generation(block).load(Ordering::Acquire);
            let entry = self.entry(block);
            match entry.state() {
                Where::OnDisk | Where::Overlay(_) => {}
                Where::Damaged(why) => return Err(unreadable(block, Why::of(why))),
                Where::Empty | Where::Full | Where::Bits(_) => return Ok(()),
            }
            let bytes = self.bitmap_bytes_used();
            let piece = port.scratch.take(bytes.next_multiple_of(SECTOR as usize)).await;
            port.io.read_exact(file, u64::from(entry.sector()) * SECTOR, piece.span()).await?;
            let mut raw = vec![0; bytes.next_multiple_of(8)];
            piece.copy_out(&mut raw[..bytes]);
            drop(piece);
            if self.install(block, generation, &raw) {
                return Ok(());
            }
        }
    }

    /// Bytes of a bitmap that stand for sectors.
    pub(super) fn bitmap_bytes_used(&self) -> usize {
        self.sectors_per_block.div_ceil(8) as usize
    }

    fn generation(&self, block: u32) -> &std::sync::atomic::AtomicU32 {
        &self.generations[block as usize % GENERATIONS]
    }

    /// Puts a bitmap that was read into memory. `false`: it was in memory meanwhile and may have been changed and
    /// evicted again, so the bytes may be outdated.
    fn install(&self, block: u32, generation: u32, raw: &[u8]) -> bool {
        let mut state = self.lock();
        if self.generation(block).load(Ordering::Acquire) != generation {
            return false;
        }
        let entry = self.entry(block);
        let word = |i: usize| {
            let bytes: [u8; 8] = raw[i * 8..i * 8 + 8].try_into().unwrap_or_default();
            u64::from_be_bytes(bytes) | self.padding_of(block, i)
        };
        let full = |slot: Option<u32>| {
            let more = |i| slot.map_or(0, |slot| self.slab.slot(slot).word(i));
            (0..self.slab.words()).all(|i| word(i) | more(i) == u64::MAX)
        };
        let known = match entry.state() {
            Where::OnDisk if full(None) => Where::Full,
            Where::OnDisk => {
                let slot = self.take_slot(&mut state, block);
                self.slab.slot(slot).fill(word);
                Where::Bits(slot)
            }
            Where::Overlay(slot) if full(Some(slot)) => {
                self.free_slot(&mut state, slot);
                Where::Full
            }
            Where::Overlay(slot) => {
                let bits = self.slab.slot(slot);
                (0..self.slab.words()).for_each(|i| bits.set_word(i, bits.word(i) | word(i)));
                Where::Bits(slot)
            }
            Where::Empty | Where::Full | Where::Bits(_) | Where::Damaged(_) => return true,
        };
        self.set_entry(block, entry.with_state(known));
        true
    }

    /// A slot for the block's bitmap. Its content is not cleared.
    pub(super) fn take_slot(&self, state: &mut State, block: u32) -> u32 {
        let slot = match state.free_slots.pop() {
            Some(slot) => slot,
            None if state.owners.len() < self.budget_slots => self.new_slot(state),
            // Searching for a clean one would examine almost all of them, each time.
            None if state.dirty.len() >= state.owners.len() => self.new_slot(state),
            None => match self.evict(state) {
                Some(slot) => slot,
                // All of them are dirty; there are as many slots as blocks.
                None => self.new_slot(state),
            },
        };
        state.owners[slot as usize] = block;
        slot
    }

    fn new_slot(&self, state: &mut State) -> u32 {
        state.owners.push(0);
        // At most one for each block.
        (state.owners.len() - 1) as u32
    }

    pub(super) fn free_slot(&self, state: &mut State, slot: u32) {
        state.free_slots.push(slot);
    }

    /// Takes the slot of a clean bitmap that was not used lately (clock).
    fn evict(&self, state: &mut State) -> Option<u32> {
        for _ in 0..2 * state.owners.len() {
            #[cfg(test)]
            {
                state.steps += 1;
            }
            let slot = state.hand as u32;
            state.hand = (state.hand + 1) % state.owners.len();
            let block = state.owners[slot as usize];
            let entry = self.entry(block);
            if entry.has(Entry::NEW | Entry::DIRTY | Entry::BUSY)
                || entry.state() != Where::Bits(slot)
                || self.slab.slot(slot).take_used()
            {
                continue;
            }
            self.set_entry(block, entry.with_state(Where::OnDisk));
            self.generation(block).fetch_add(1, Ordering::AcqRel);
            return Some(slot);
        }
        None
    }
}
