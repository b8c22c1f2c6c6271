//! Volumes: each block has content that can be read. A finding names the volumes whose blocks have not.

use std::io;

use super::contents::root_of;
use super::medium::Step;
use super::{Check, Known, Stats, StoreFinding, VolumeStats, in_bytes};
use crate::page::{V2P_ENTRIES, decode_number};
use crate::table::Volume;

/// A page whose pages are being looked at.
struct Frame {
    step: Step,
    /// Those that are left, the first of them last.
    below: Vec<Step>,
    mapped: u64,
    is_bad: bool,
}

/// The error of blocks in a row.
struct BadRun {
    why: &'static str,
    from: u64,
    end: u64,
}

impl Check<'_> {
    /// All volumes and snapshots.
    pub(super) async fn volumes(&mut self) -> io::Result<()> {
        let mut stats = Stats::default();
        let volumes: Vec<Volume> = self.core.volumes.entries().values().cloned().collect();
        for volume in &volumes {
            let mapped = self.volume(volume).await?;
            stats.volumes.push(VolumeStats {
                name: volume.name.as_str().into(),
                snapshot: volume.is_snapshot,
                virtual_bytes: in_bytes(volume.blocks),
                mapped_bytes: in_bytes(mapped),
            });
        }
        stats.volumes.sort_by(|a, b| a.name.cmp(&b.name));
        stats.logical_bytes = stats.volumes.iter().map(|volume| volume.virtual_bytes).sum();
        stats.mapped_bytes = stats.volumes.iter().map(|volume| volume.mapped_bytes).sum();
        self.outcome.stats = Some(stats);
        Ok(())
    }

    /// One of them: how many of its blocks are not zeros.
    async fn volume(&mut self, volume: &Volume) -> io::Result<u64> {
        let domain = u32::from(volume.domain);
        if !self.core.domains.entries().contains_key(&domain) {
            let name = Some(volume.name.as_str().into());
            let finding = StoreFinding::damage("volume", "it refers to a missing dedup domain");
            self.add(StoreFinding { volume: name, ..finding });
        }
        let Some(root) = root_of(&volume.tree) else { return Ok(0) };
        let mut way: Vec<Frame> = Vec::new();
        let mut step = root;
        loop {
            // Down, as far as there is something to look at.
            let done = match self.enter(volume, step).await? {
                Ok(known) => known,
                Err(frame) => {
                    way.push(frame);
                    Known { checksum: 0, level: 0, mapped: 0, is_bad: false }
                }
            };
            let mut done = Some(done);
            loop {
                let Some(frame) = way.last_mut() else { return Ok(done.map_or(0, |d| d.mapped)) };
                if let Some(done) = done.take() {
                    frame.mapped += done.mapped;
                    frame.is_bad |= done.is_bad;
                }
                if let Some(next) = frame.below.pop() {
                    step = next;
                    break;
                }
                let Some(Frame { step, mapped, is_bad, .. }) = way.pop() else { return Ok(0) };
                done = Some(self.remember(&step, mapped, is_bad));
            }
        }
    }

    fn remember(&mut self, step: &Step, mapped: u64, is_bad: bool) -> Known {
        let known = Known { checksum: step.pointer.checksum, level: step.level, mapped, is_bad };
        self.known.insert(step.pointer.place, known);
        known
    }

    /// Enters a page: gives the known facts of it, or the pages that it leads to.
    async fn enter(&mut self, volume: &Volume, step: Step) -> io::Result<Result<Known, Frame>> {
        let pointer = step.pointer;
        let known = self.known.get(&pointer.place).copied();
        let is_same =
            |known: &Known| (known.checksum, known.level) == (pointer.checksum, step.level);
        let page = match known {
            Some(known) if is_same(&known) && !known.is_bad => return Ok(Ok(known)),
            // It is read again for what this volume calls the bad blocks below it.
            Some(known) if is_same(&known) => {
                self.looks_at_page()?;
                let copy = self.layout.copy_of(pointer.place);
                self.medium.read_page(self.port, &pointer, copy).await.ok()
            }
            _ => self.page("a volume", &pointer, true).await?,
        };
        let Some(page) = page else {
            let blocks = (V2P_ENTRIES as u64) << (8 * u32::from(step.level));
            let from = step.index * blocks;
            let end = (from + blocks).min(volume.blocks);
            self.tell(volume, &BadRun { why: "a page of its tree is damaged", from, end });
            return Ok(Ok(self.remember(&step, 0, true)));
        };
        if step.level == 0 {
            let (mapped, is_bad) = self.leaf(volume, step.index, &page);
            return Ok(Ok(self.remember(&step, mapped, is_bad)));
        }
        let mut below = self.below(&step, &page, "a volume");
        below.reverse();
        Ok(Err(Frame { step, below, mapped: 0, is_bad: false }))
    }

    /// The blocks of a leaf: how many are not zeros, and whether one of them cannot be read.
    fn leaf(&mut self, volume: &Volume, index: u64, page: &[u8]) -> (u64, bool) {
        let (mut mapped, mut is_bad) = (0, false);
        let mut run: Option<BadRun> = None;
        for (entry, block) in page.as_chunks().0.iter().zip(index * V2P_ENTRIES as u64..) {
            let why = match decode_number(*entry, &self.layout) {
                Ok(0) => None,
                _ if block >= volume.blocks => Some("it has a block behind its end"),
                Ok(number) if number >= self.core.numbers_end => {
                    Some("it has content that was never given")
                }
                Ok(number) => {
                    mapped += 1;
                    self.live.set(number);
                    match () {
                        () if !self.contents.get(number) => Some("it has content that is nowhere"),
                        () if self.bad.get(number) => Some("its content does not fit its checksum"),
                        () => None,
                    }
                }
                Err(_) => Some("it has content that no store of this size has"),
            };
            is_bad |= why.is_some();
            match (&mut run, why) {
                (Some(run), Some(why)) if run.why == why && run.end == block => run.end += 1,
                (_, Some(why)) => {
                    let next = BadRun { why, from: block, end: block + 1 };
                    run.replace(next).iter().for_each(|run| self.tell(volume, run));
                }
                (_, None) => {}
            }
        }
        run.iter().for_each(|run| self.tell(volume, run));
        (mapped, is_bad)
    }

    fn tell(&mut self, volume: &Volume, run: &BadRun) {
        let finding = StoreFinding {
            volume: Some(volume.name.as_str().into()),
            offset_bytes: Some(in_bytes(run.from)),
            length_bytes: Some(in_bytes(run.end.saturating_sub(run.from))),
            ..StoreFinding::damage("content", run.why)
        };
        self.add(finding);
    }
}
