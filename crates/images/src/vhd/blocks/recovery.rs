//! Replays the journal of a dead process: its answered changes that no commit had made durable.

use std::collections::HashMap;

use ferrite_disk_base::journal::Record;

use super::entry::{Entry, State as Where};
use super::{Blocks, RECORD_WORDS, SECTOR, State};
use crate::vhd::damage::Why;

impl Blocks {
    /// Replays a journal's records: the state in memory becomes that of the dead process, and dirty. `keep`: the
    /// records are in this image's journal, which releases them once they are durable. Otherwise the image is only
    /// read, and the records belong to a later writer; other readers may read them, too.
    ///
    /// # Errors
    /// They do not fit the disk. Nothing was written.
    pub(in crate::vhd) fn replay(
        &mut self,
        records: Vec<Record>,
        keep: bool,
    ) -> Result<(), String> {
        // Nothing could be evicted to make room.
        self.budget_slots = self.budget_slots.max(records.len());
        self.recover(records, keep)
    }

    fn recover(&self, records: Vec<Record>, keep: bool) -> Result<(), String> {
        let mut state = self.lock();
        let (places, bits): (Vec<Record>, Vec<Record>) =
            records.into_iter().partition(|record| record.key as u32 == 0);
        let mut by_sector: HashMap<u32, u32> = HashMap::new();
        for record in &places {
            let (block, sector) = self.replay_place(&mut state, record)?;
            if by_sector.insert(sector, block).is_some_and(|other| other != block) {
                return Err(format!("two blocks at sector {sector}"));
            }
            self.keep(&mut state, record, keep);
        }
        if !places.is_empty() {
            self.check_overlaps()?;
        }
        for record in &bits {
            self.replay_bits(&mut state, record)?;
            self.keep(&mut state, record, keep);
        }
        state.run_end = state.next;
        self.set_tight(&state);
        Ok(())
    }

    /// The blocks that differ from the disk: start and length in bytes of the disk.
    pub(in crate::vhd) fn dirty_parts(&self) -> Vec<(u64, u64)> {
        let part = |block: &u32| (u64::from(*block) << self.block_shift, self.layout.block_bytes);
        self.lock().dirty.iter().map(part).collect()
    }

    fn keep(&self, state: &mut State, record: &Record, keep: bool) {
        if keep {
            let block = (record.key >> 32) as u32;
            state.records.entry(block).or_default().push((record.key as u32, record.slot));
        }
    }

    fn block_of(&self, record: &Record) -> Result<u32, String> {
        let block = (record.key >> 32) as u32;
        match (block as usize) < self.table.len() {
            true => Ok(block),
            false => Err(format!("block {block} of {}", self.table.len())),
        }
    }

    fn replay_place(&self, state: &mut State, record: &Record) -> Result<(u32, u32), String> {
        let block = self.block_of(record)?;
        let sector = u32::try_from(record.words[0]).map_err(|_| "a place outside of the file")?;
        self.layout.check_place(sector, 0).map_err(|e| e.why)?;
        let entry = self.entry(block);
        let end = u64::from(sector) * SECTOR + self.layout.stride();
        state.next = state.next.max(end);
        match entry.state() {
            Where::Empty => {
                let known = if self.whole() {
                    Where::Full
                } else {
                    let slot = self.take_slot(state, block);
                    self.slab.slot(slot).fill(|i| self.padding_of(block, i));
                    Where::Bits(slot)
                };
                self.mark_dirty(state, block, Entry::new(sector, known).with(Entry::NEW));
                Ok((block, sector))
            }
            Where::Damaged(why) => Err(format!("block {block}: {}", Why::of(why))),
            // The commit had written the table.
            _ if entry.sector() == sector => {
                self.mark_dirty(state, block, entry);
                Ok((block, sector))
            }
            _ => Err(format!(
                "block {block} at sector {sector}, but the table has it at {}",
                entry.sector()
            )),
        }
    }

    fn replay_bits(&self, state: &mut State, record: &Record) -> Result<(), String> {
        let block = self.block_of(record)?;
        let group = (record.key as u32 - 1) as usize;
        if group >= self.slab.words().div_ceil(RECORD_WORDS) {
            return Err(format!("bits {group} of block {block}, which has fewer"));
        }
        let entry = self.entry(block);
        let (slot, known) = match entry.state() {
            Where::Empty => return Err(format!("bits of block {block}, which has no place")),
            Where::Damaged(why) => return Err(format!("block {block}: {}", Why::of(why))),
            Where::Full => {
                self.mark_dirty(state, block, entry);
                return Ok(());
            }
            Where::Bits(slot) | Where::Overlay(slot) => (slot, entry.state()),
            Where::OnDisk => {
                let slot = self.take_slot(state, block);
                self.slab.slot(slot).fill(|_| 0);
                (slot, Where::Overlay(slot))
            }
        };
        let bits = self.slab.slot(slot);
        for (i, word) in record.words.iter().enumerate() {
            let at = group * RECORD_WORDS + i;
            if at < self.slab.words() {
                bits.set_word(at, bits.word(at) | word);
            }
        }
        self.mark_dirty(state, block, entry.with_state(known));
        Ok(())
    }

    /// Checks whether blocks overlap now.
    fn check_overlaps(&self) -> Result<(), String> {
        let placed = (0..self.table.len() as u32).map(|block| self.entry(block));
        let is_placed = |e: Entry| !matches!(e.state(), Where::Empty | Where::Damaged(_));
        let mut sectors: Vec<u32> = placed.filter(|e| is_placed(*e)).map(Entry::sector).collect();
        match self.layout.find_overlap(&mut sectors) {
            None => Ok(()),
            Some((a, b)) => Err(format!("a block at sector {b} over one at sector {a}")),
        }
    }
}
