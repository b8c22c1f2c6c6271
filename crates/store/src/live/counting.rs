//! Counts what the space of a store in use is for. Guests write meanwhile, so the figures are not of one moment.

use std::collections::HashMap;
use std::io;

use ferrite_disk_base::Port;

use super::leaf::{Leaf, numbers_of};
use super::leaves::Leaves;
use super::shared::Shared;
use super::{BLOCK_BYTES, VolumeInfo, damaged};
use crate::check::{Stats, VolumeStats};
use crate::journal::VolumeId;
use crate::page::{P2M_ENTRIES, V2P_ENTRIES, Whereabouts, decode_number};
use crate::pages::{PageId, Pages};
use crate::space::{Bits, Kind, Places};
use crate::tree::Found;

/// Leaves that are counted before requests go on.
const STEP: u64 = 64;

/// The counts so far.
struct Count {
    /// By leaf of V2P: its blocks that are not zeros. Volumes share leaves.
    mapped: HashMap<PageId, u32>,
    /// By number: a volume has it.
    live: Bits,
}

fn in_bytes(blocks: u64) -> u64 {
    blocks * BLOCK_BYTES as u64
}

/// Counts what the space is for.
pub(super) struct Counter<'a> {
    pub(super) shared: &'a Shared,
    pub(super) leaves: &'a Leaves,
}

impl Counter<'_> {
    /// Counts what the space is for.
    ///
    /// # Errors
    /// Metadata are damaged (`InvalidData`), or cannot be read.
    pub(super) async fn stats(&self, port: &Port) -> io::Result<Stats> {
        let places = self.shared.core().layout.places();
        let mut count = Count { mapped: HashMap::new(), live: Bits::all(false, places) };
        let mut stats = Stats { volumes: self.volumes(), ..Stats::default() };
        for volume in &mut stats.volumes {
            let Some(found) = self.shared.core().volume_called(&volume.name) else { continue };
            volume.mapped_bytes = in_bytes(self.mapped(port, found.number, &mut count).await?);
        }
        stats.logical_bytes = stats.volumes.iter().map(|volume| volume.virtual_bytes).sum();
        stats.mapped_bytes = stats.volumes.iter().map(|volume| volume.mapped_bytes).sum();
        let (distinct, stored) = self.distinct(port, &mut count.live).await?;
        (stats.distinct_bytes, stats.stored_bytes) = (in_bytes(distinct), in_bytes(stored));
        stats.ratio = stats.mapped_bytes as f64 / stats.stored_bytes.max(in_bytes(1)) as f64;
        let core = self.shared.core();
        stats.metadata_bytes = in_bytes(core.space.used(Kind::Metadata));
        let data = in_bytes(core.space.used(Kind::Data));
        stats.garbage_bytes = data.saturating_sub(stats.stored_bytes);
        stats.free_bytes = in_bytes(core.space.free());
        let kept = (core.owed_pages(), core.space.reserve());
        let ballast = self.shared.medium.ballast().wanted();
        stats.set_room(&core.layout, &core.space, kept, ballast);
        Ok(stats)
    }

    /// All volumes, with no mapped bytes yet.
    fn volumes(&self) -> Vec<VolumeStats> {
        let of = |volume: VolumeInfo| VolumeStats {
            name: volume.name,
            snapshot: volume.snapshot,
            virtual_bytes: volume.virtual_bytes,
            mapped_bytes: 0,
        };
        self.shared.core().list().into_iter().map(of).collect()
    }

    /// How many blocks of a volume are not zeros. If it is deleted meanwhile, the rest of it does not count.
    async fn mapped(&self, port: &Port, volume: VolumeId, count: &mut Count) -> io::Result<u64> {
        let blocks =
            self.shared.core().volumes.entries().get(&volume).map_or(0, |volume| volume.blocks);
        let mut mapped = 0;
        for index in 0..blocks.div_ceil(V2P_ENTRIES as u64) {
            if index % STEP == 0 {
                port.io.yield_to_others().await;
            }
            match self.mapped_in(port, Leaf::V2p(volume, index), count).await {
                Ok(blocks) => mapped += u64::from(blocks),
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) => return Err(e),
            }
        }
        Ok(mapped)
    }

    /// How many blocks of a leaf are not zeros.
    async fn mapped_in(&self, port: &Port, leaf: Leaf, count: &mut Count) -> io::Result<u32> {
        let found = leaf.find(&self.shared.core())?;
        if let Found::Nothing = found {
            return Ok(0);
        }
        if let Found::Leaf(id) | Found::Load(id, _) = found
            && let Some(known) = count.mapped.get(&id)
        {
            return Ok(*known);
        }
        let look = |pages: &Pages, id: &PageId| (*id, pages.words::<V2P_ENTRIES>(id, 0));
        let Some((id, words)) = self.leaves.look(port, leaf, look).await? else { return Ok(0) };
        // As it is behind the read: the store may have grown since the count began.
        let layout = self.shared.layout();
        count.live.reach(layout.places());
        let mut mapped = 0;
        for word in words.unwrap_or([0; V2P_ENTRIES]) {
            let number = decode_number(word.to_le_bytes(), &layout).map_err(damaged)?;
            if number > 0 {
                count.live.set(number);
                mapped += 1;
            }
        }
        count.mapped.insert(id, mapped);
        Ok(mapped)
    }

    /// How many different contents the live numbers have, and the places that these take.
    async fn distinct(&self, port: &Port, live: &mut Bits) -> io::Result<(u64, u64)> {
        let (end, layout) = {
            let core = self.shared.core();
            (core.numbers_end, core.layout)
        };
        live.reach(layout.places());
        let (mut distinct, mut stored) = (0, 0);
        // The first places of groups.
        let mut groups = Places::default();
        // From the highest number down, since a number may stand for a lower one.
        for page in (0..end.div_ceil(P2M_ENTRIES as u64)).rev() {
            if page % STEP == 0 {
                port.io.yield_to_others().await;
            }
            let entries = self.leaves.entries(port, page).await?;
            for number in numbers_of(page, end).rev() {
                let entry = &entries[(number % P2M_ENTRIES as u64) as usize];
                match entry {
                    _ if !live.get(number) => {}
                    // A pass has cleared it since.
                    Whereabouts::Nowhere => {}
                    Whereabouts::SameAs { number } => {
                        live.set(*number);
                    }
                    Whereabouts::Plain { .. } => (distinct, stored) = (distinct + 1, stored + 1),
                    Whereabouts::Packed { place, places, .. } => {
                        distinct += 1;
                        stored += if groups.add(&layout, *place) { u64::from(*places) } else { 0 };
                    }
                }
            }
        }
        Ok((distinct, stored))
    }
}
