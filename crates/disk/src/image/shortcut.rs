//! Which of the layers below the leaf answers for a page, remembered.
//!
//! Those layers do not change while they are open, so an answer stays true; without this, a read
//! behind a long chain asks each layer, and each answer is a cache miss or two. Pages, because that
//! is what small reads are; larger ranges ask the layers, and have fewer requests to do it for.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The unit in bytes.
pub(super) const PAGE_BYTES: u64 = 4096;

/// With fewer layers below the leaf there is nothing to gain.
const MIN_BELOW: usize = 2;

/// No layer has it: zeros.
const NOBODY: u64 = 0xFF_FFFF;
const LAYER_BITS: u32 = 24;

/// Who has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The layer with this index has all of it, in one piece.
    Layer(usize),
    /// It reads as zeros.
    Nobody,
}

/// A table with a place for each page number modulo its size; a page that comes later takes the
/// place of the one before. Written and read by all queues, each entry for itself.
#[derive(Debug)]
pub(super) struct Shortcut {
    /// Page number plus one, and the layer; 0: empty.
    entries: Box<[AtomicU64]>,
}

impl Shortcut {
    /// For a disk of so many bytes; none for a short chain.
    pub(super) fn new(layers: usize, disk_bytes: u64, budget_bytes: usize) -> Option<Shortcut> {
        let pages = disk_bytes.div_ceil(PAGE_BYTES);
        if layers <= MIN_BELOW || layers as u64 >= NOBODY || pages >> (64 - LAYER_BITS) != 0 {
            return None;
        }
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        let most = (budget_bytes / size_of::<AtomicU64>()).max(2);
        let entries = most.min(pages.max(1));
        // Down to a power of two, so that the modulo is a mask.
        let entries = 1 << entries.ilog2();
        Some(Shortcut { entries: (0..entries).map(|_| AtomicU64::new(0)).collect() })
    }

    fn entry(&self, page: u64) -> &AtomicU64 {
        &self.entries[page as usize & (self.entries.len() - 1)]
    }

    /// Who has the page, if that is known.
    pub(super) fn get(&self, page: u64) -> Option<Owner> {
        let entry = self.entry(page).load(Relaxed);
        if entry >> LAYER_BITS != page + 1 {
            return None;
        }
        Some(match entry & NOBODY {
            NOBODY => Owner::Nobody,
            layer => Owner::Layer(layer as usize),
        })
    }

    /// Remembers who has the page.
    pub(super) fn put(&self, page: u64, owner: Owner) {
        let layer = match owner {
            Owner::Layer(layer) => layer as u64,
            Owner::Nobody => NOBODY,
        };
        self.entry(page).store((page + 1) << LAYER_BITS | layer, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_known_until_another_takes_its_place() {
        let table = Shortcut::new(3, 1 << 30, 64).unwrap();
        assert_eq!(table.entries.len(), 8);
        assert_eq!(table.get(0), None);
        table.put(0, Owner::Layer(1));
        table.put(5, Owner::Nobody);
        assert_eq!((table.get(0), table.get(5)), (Some(Owner::Layer(1)), Some(Owner::Nobody)));
        assert_eq!((table.get(8), table.get(13)), (None, None));
        table.put(8, Owner::Layer(2));
        assert_eq!((table.get(0), table.get(8)), (None, Some(Owner::Layer(2))));
    }

    #[test]
    fn it_is_as_large_as_the_disk_or_the_budget_and_not_there_for_short_chains() {
        assert!(Shortcut::new(2, 1 << 30, 1 << 20).is_none());
        assert_eq!(Shortcut::new(3, 40960, 1 << 20).unwrap().entries.len(), 8);
        assert_eq!(Shortcut::new(256, 1 << 40, 1 << 20).unwrap().entries.len(), 1 << 17);
        assert_eq!(Shortcut::new(3, 512, 0).unwrap().entries.len(), 1);
    }
}
