//! Regions: which are dirty, and which may differ (R6, R7).

use std::collections::BTreeSet;

use super::tasks::{Kind, Task};
use super::{Owner, Wanted};
use crate::rules::Rule;
use crate::{Blocks, Data, Io, MemberId, OpId, Region};

impl Owner {
    /// A write to these regions begins.
    pub(super) fn note_write(&mut self, regions: &BTreeSet<Region>) {
        self.dirty.extend(regions);
        for task in self.tasks.values_mut() {
            if let Kind::Flush { clears, .. } = &mut task.kind {
                clears.retain(|region| !regions.contains(region));
            }
        }
    }

    /// Whether all members are in sync, so that bits may be cleared.
    fn is_whole(&self) -> bool {
        let out = self.record.as_ref().is_some_and(|(_, record)| !record.out.is_empty());
        !out && self.returning.is_none() && self.change.is_none()
    }

    /// The regions that are the same on all members, durably, when a flush that begins now is done.
    pub(super) fn clean_after_flush(&self) -> BTreeSet<Region> {
        if self.keep(Rule::ClearLate) && !self.is_whole() {
            return BTreeSet::new();
        }
        let written =
            self.tasks.values().filter_map(|task| task.holds).filter(|(_, writes)| *writes);
        let region_blocks = self.config.region_blocks;
        let written: BTreeSet<Region> =
            written.flat_map(|(blocks, _)| blocks.regions(region_blocks)).collect();
        let clean = self.dirty.difference(&self.unequal).copied();
        clean.filter(|region| !written.contains(region)).collect()
    }

    /// A flush is done that has made these regions clean. The message is not sent again by a later connection: a write
    /// may have marked the region again by then.
    pub(super) fn clear(&mut self, clears: BTreeSet<Region>, epoch: u64) {
        let is_late = self.keep(Rule::ClearLate) && (epoch != self.epoch || !self.is_whole());
        if clears.is_empty() || is_late {
            return;
        }
        self.dirty.retain(|region| !clears.contains(region));
        for member in self.in_sync() {
            self.send_once(member, Io::Clear(clears.clone()));
        }
    }

    /// Makes regions equal that may differ. Those that a request waits for come first.
    pub(super) fn equalise(&mut self) {
        let region_blocks = self.config.region_blocks;
        let wanted = self.queue.iter().filter_map(|(_, wanted)| match wanted {
            Wanted::Read(blocks) => Some(*blocks),
            _ => None,
        });
        let wanted: Vec<Region> = wanted.flat_map(|blocks| blocks.regions(region_blocks)).collect();
        let first = wanted.into_iter().filter(|region| self.unequal.contains(region));
        let first: Vec<(Region, bool)> = first.map(|region| (region, true)).collect();
        if first.is_empty() && self.piece(false).is_none() {
            return;
        }
        let others = self.unequal.iter().map(|region| (*region, false));
        let order: Vec<(Region, bool)> = first.into_iter().chain(others).collect();
        for (region, is_waited_for) in order {
            let Some(most) = self.piece(is_waited_for) else { break };
            self.begin_copy(region, None, most);
        }
    }

    /// Begins to copy the next piece of a region, of at most so many blocks, if no request holds it.
    pub(super) fn begin_copy(&mut self, region: Region, to: Option<MemberId>, most: u64) {
        let whole = region.blocks(self.config.region_blocks, self.config.disk_blocks);
        let start = self.copied_to.get(&(to, region)).copied().unwrap_or(whole.start);
        let end = start.saturating_add(most).min(whole.end);
        let blocks = Blocks { start, end };
        let may = !self.is_held(blocks, true);
        let Some(source) = self.source().filter(|_| may) else { return };
        self.pace.begun(self.now);
        let kind = Kind::CopyRead { region, to, source, found: None };
        let waits = [(source, Io::Read { blocks })].into();
        self.begin(Task { kind, waits, holds: Some((blocks, true)) });
    }

    /// The piece that is copied was read by this operation: it is written to the others. `None`: its source was dropped, so it
    /// is still to be copied.
    pub(super) fn copy_read(
        &mut self,
        region: Region,
        to: Option<MemberId>,
        source: MemberId,
        found: Option<OpId>,
        blocks: Blocks,
    ) {
        let Some(op) = found else { return };
        let returns = self.returning.as_ref().map(|it| it.member);
        let mut targets = match to {
            None => self.write_set(),
            Some(member) => [member].into_iter().filter(|m| returns == Some(*m)).collect(),
        };
        targets.remove(&source);
        if targets.is_empty() {
            return self.copied(region, to, blocks);
        }
        let io = Io::Repair { blocks, data: Data::OfRead(op) };
        let waits = targets.into_iter().map(|member| (member, io.clone())).collect();
        let kind = Kind::CopyWrite { region, to };
        self.begin(Task { kind, waits, holds: Some((blocks, true)) });
    }

    /// A piece of a region is the same on all that it was copied to.
    pub(super) fn copied(&mut self, region: Region, to: Option<MemberId>, piece: Blocks) {
        self.pace.ended(self.now);
        let whole = region.blocks(self.config.region_blocks, self.config.disk_blocks);
        if piece.end < whole.end {
            self.copied_to.insert((to, region), piece.end);
            return;
        }
        self.copied_to.remove(&(to, region));
        match to {
            None => drop(self.unequal.remove(&region)),
            Some(member) => self.copied_to(member, region),
        }
    }
}
