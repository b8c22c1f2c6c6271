//! Pages that stay mapped from their first use on, for frontends that use the same ones again and
//! again (blkif.md 4.5). We may unmap an idle one at any time and tell no frontend: the frontend looks
//! before it uses a page for something else.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrite_io::arena::Arena;

use super::budget::Claims;
use super::table::Table;
use super::{Grants, Mapping, Maps, count, move_bytes};
use crate::hypervisor::{CopySegment, Direction, GNTST_OKAY, GrantRef};

/// Most pages that a queue keeps mapped, as Linux's blkback does.
pub const QUEUE_MAPPINGS: usize = 1056;

const SECOND_NS: u64 = 1_000_000_000;
/// A mapping that was not used for so long is unmapped.
const IDLE_NS: u64 = 60 * SECOND_NS;
/// How often that is looked at, if anything happens at all, and how many pages go each time.
const PURGE_EVERY_NS: u64 = SECOND_NS;
const PURGE_PAGES: usize = 64;
/// A page gives its place to another only if it was not used for so long. A guest that uses more
/// pages than there are places would otherwise have each mapped and unmapped for every request,
/// which costs far more than the copy that it gets instead.
const EVICT_NS: u64 = SECOND_NS;
/// Hits are counted here and told in steps: the counters are shared by all queues.
const TELL_HITS: u64 = 1024;

/// One queue's part.
pub(crate) struct Persistent<M> {
    // Dropped before what it has claimed is given back.
    table: Table<M>,
    claims: Claims,
    maps: Arc<Maps>,
    hits: u64,
    purged_ns: u64,
    /// Segments whose pages are not mapped, and where they are in the caller's batch.
    unmapped: Vec<CopySegment>,
    places: Vec<usize>,
}

impl<M: Mapping> Persistent<M> {
    pub(super) fn new(maps: Arc<Maps>) -> Persistent<M> {
        Persistent {
            table: Table::new(QUEUE_MAPPINGS),
            claims: Claims::new(maps.clone()),
            hits: 0,
            purged_ns: maps.clock.now_ns(),
            maps,
            unmapped: Vec::new(),
            places: Vec::new(),
        }
    }

    pub(super) fn copy<G: Grants<Mapping = M>>(
        &mut self,
        grants: &mut G,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        let now_ns = self.maps.clock.now_ns();
        self.unmapped.clear();
        self.places.clear();
        for (i, segment) in segments.iter_mut().enumerate() {
            match self.page(grants, segment.gref(), now_ns) {
                Some(page) => {
                    // SAFETY: a page in the table is mapped, readable and writable; nothing is
                    // taken out of the table before the next segment.
                    unsafe { move_bytes(page, arena, direction, segment) };
                    segment.status = GNTST_OKAY;
                }
                None => {
                    self.unmapped.push(*segment);
                    self.places.push(i);
                }
            }
        }
        self.tell_hits(TELL_HITS);
        self.purge(now_ns);
        if self.unmapped.is_empty() {
            return Ok(());
        }
        count(&self.maps.counters.fallbacks, self.unmapped.len() as u64);
        grants.copy(arena, direction, &mut self.unmapped)?;
        for (segment, place) in self.unmapped.iter().zip(&self.places) {
            segments[*place].status = segment.status;
        }
        Ok(())
    }

    /// The page of a reference, mapped now if it can be.
    fn page<G: Grants<Mapping = M>>(
        &mut self,
        grants: &mut G,
        gref: GrantRef,
        now_ns: u64,
    ) -> Option<NonNull<u8>> {
        if let Some(mapping) = self.table.get(gref.0, now_ns) {
            self.hits += 1;
            return Some(mapping.page(0));
        }
        let has_room = !self.table.is_full() && self.claims.has_room(self.table.len(), now_ns);
        if !has_room && self.unmap_idle(now_ns, EVICT_NS, 1) == 0 {
            return None;
        }
        // Always writable, even for what is only read (blkif.md 4.5): the next use may write. A
        // reference that cannot be mapped so is copied, or refused, by the hypervisor.
        let mapping = grants.map(&[gref], true).ok()?;
        let mapping = self.table.insert(gref.0, now_ns, mapping).ok()?;
        count(&self.maps.counters.misses, 1);
        count(&self.maps.counters.mapped, 1);
        Some(mapping.page(0))
    }

    /// Unmaps up to `most` pages that were not used for `idle_ns`; how many it were.
    fn unmap_idle(&mut self, now_ns: u64, idle_ns: u64, most: usize) -> usize {
        let mut unmapped = 0;
        while unmapped < most
            && self.table.oldest_use_ns().is_some_and(|used_ns| used_ns + idle_ns <= now_ns)
        {
            drop(self.table.pop_oldest());
            unmapped += 1;
        }
        if unmapped > 0 {
            count(&self.maps.counters.evictions, unmapped as u64);
            self.maps.counters.mapped.fetch_sub(unmapped as u64, Ordering::Relaxed);
        }
        unmapped
    }

    /// Unmaps what was idle for long. Done when something happens: an idle disk is not woken.
    fn purge(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.purged_ns) < PURGE_EVERY_NS {
            return;
        }
        self.purged_ns = now_ns;
        if self.unmap_idle(now_ns, IDLE_NS, PURGE_PAGES) > 0 {
            self.claims.shrink(self.table.len());
        }
    }

    fn tell_hits(&mut self, from: u64) {
        if self.hits >= from {
            count(&self.maps.counters.hits, std::mem::take(&mut self.hits));
        }
    }
}

impl<M> Drop for Persistent<M> {
    fn drop(&mut self) {
        count(&self.maps.counters.hits, self.hits);
        let mapped = self.table.len() as u64;
        self.maps.counters.mapped.fetch_sub(mapped, Ordering::Relaxed);
    }
}
