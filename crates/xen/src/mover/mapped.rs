//! Map, memcpy, unmap: one batch at a time, so that every grant is released before the call
//! returns, and so before the response (blkif.md 2, rule 5). Only the processor has touched the
//! pages: the kernel holds no reference that could defer an unmap (blkif.md 4.4).

use std::io;
use std::sync::Arc;

use ferrite_io::arena::Arena;

use super::budget::Claims;
use super::{Grants, Mapping, Maps, count, move_bytes};
use crate::hypervisor::{CopySegment, Direction, GNTST_OKAY, GrantRef};

/// Most pages that one batch maps: a request of 1 MiB.
pub const BATCH: usize = 256;

/// One queue's part.
pub(crate) struct Mapped {
    maps: Arc<Maps>,
    /// Kept from batch to batch: mapped pages are counted whether they are mapped at this moment.
    claims: Claims,
    grefs: Vec<GrantRef>,
}

impl Mapped {
    pub(super) fn new(maps: Arc<Maps>) -> Mapped {
        let claims = Claims::new(maps.clone());
        Mapped { maps, claims, grefs: Vec::with_capacity(BATCH) }
    }

    pub(super) fn copy<G: Grants>(
        &mut self,
        grants: &mut G,
        arena: &Arena,
        direction: Direction,
        mut segments: &mut [CopySegment],
    ) -> io::Result<()> {
        let wanted = segments.len().min(BATCH);
        let now_ns = self.maps.clock.now_ns();
        while self.claims.pages() < wanted && self.claims.has_room(self.claims.pages(), now_ns) {}
        let pages = self.claims.pages().min(BATCH);
        if pages == 0 && !segments.is_empty() {
            count(&self.maps.counters.fallbacks, segments.len() as u64);
            return grants.copy(arena, direction, segments);
        }
        while !segments.is_empty() {
            let (batch, rest) = segments.split_at_mut(pages.min(segments.len()));
            self.batch(grants, arena, direction, batch)?;
            segments = rest;
        }
        Ok(())
    }

    fn batch<G: Grants>(
        &mut self,
        grants: &mut G,
        arena: &Arena,
        direction: Direction,
        batch: &mut [CopySegment],
    ) -> io::Result<()> {
        let counters = &self.maps.counters;
        self.grefs.clear();
        self.grefs.extend(batch.iter().map(CopySegment::gref));
        // All or nothing: with one bad reference among them none is mapped, and the error does not
        // say which is bad. The copy does, by a status for each (XSA-361).
        let Ok(mapping) = grants.map(&self.grefs, direction == Direction::ToGuest) else {
            count(&counters.fallbacks, batch.len() as u64);
            return grants.copy(arena, direction, batch);
        };
        count(&counters.misses, batch.len() as u64);
        for (page, segment) in batch.iter_mut().enumerate() {
            // SAFETY: one page a reference is mapped, in their order, writable if need be, until
            // `mapping` is dropped.
            unsafe { move_bytes(mapping.page(page), arena, direction, segment) };
            segment.status = GNTST_OKAY;
        }
        Ok(())
    }
}
