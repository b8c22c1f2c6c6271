//! A cache of which layer below the leaf has a page.
//!
//! Those layers do not change while they are open, but for pages that one above them has (docs/internals/locks.md), so an
//! answer stays true. Without the cache, a read from a long chain asks each layer, and each answer costs a cache miss or
//! two. It holds pages, because small reads have that size; larger ranges ask the layers, and have fewer requests to do
//! it for.
//!
//! A layer's entries of neighbouring pages are in the same cache line, so a miss looks up a whole group of them. A page
//! takes a byte here, so the table of a disk in use stays in the processor's cache.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::layer::Layer;
use super::mapping::Mapping;

/// The unit in bytes.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Pages that are looked up together.
const GROUP_PAGES: u64 = 64;
pub(super) const GROUP_BYTES: u64 = GROUP_PAGES * PAGE_BYTES;

/// With fewer layers below the leaf there is nothing to gain.
const MIN_BELOW: usize = 2;

/// Pages of an entry.
const ENTRY_PAGES: u64 = 8;
/// Bits of each page's owner in an entry.
const OWNER_BITS: u32 = 6;
/// The position of the tag in an entry, above the owners: which of the pages that share the entry it holds.
const TAG_SHIFT: u32 = ENTRY_PAGES as u32 * OWNER_BITS;

/// The owner of a page that was not looked up. From `LAYERS` on, owners are layers by their index in the chain, the
/// first of which is 1.
const UNKNOWN: u64 = 0;
const NOBODY: u64 = 1;
const ASK: u64 = 2;
const LAYERS: u64 = ASK;
const MAX_LAYER: u64 = (1 << OWNER_BITS) - 1 - LAYERS;

/// The layer that has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The layer with this index has the whole page, in one piece.
    Layer(usize),
    /// It reads as zeros.
    Nobody,
    /// The page is in several places: the layers have to be asked.
    Ask,
}

/// A table with an entry for each eight pages, by their number modulo its size; later pages replace earlier ones.
/// Written and read by all queues, each entry atomically.
#[derive(Debug)]
pub(super) struct Shortcut {
    entries: Box<[AtomicU64]>,
}

impl Shortcut {
    /// The shortcut of a disk of so many bytes; `None` for a short chain.
    pub(super) fn new(layers: usize, disk_bytes: u64, budget_bytes: usize) -> Option<Shortcut> {
        if layers <= MIN_BELOW {
            return None;
        }
        let needed = disk_bytes.div_ceil(GROUP_BYTES).max(1) * (GROUP_PAGES / ENTRY_PAGES);
        let most = (budget_bytes / size_of::<AtomicU64>()) as u64;
        let entries = most.min(needed).max(GROUP_PAGES / ENTRY_PAGES);
        // Down to a power of two, so that the modulo is a mask.
        let bits = entries.ilog2();
        if needed >> bits >> (u64::BITS - TAG_SHIFT) != 0 {
            return None;
        }
        Some(Shortcut { entries: (0..1u64 << bits).map(|_| AtomicU64::new(0)).collect() })
    }

    /// The entry with a page, and its tag.
    fn entry(&self, page: u64) -> (&AtomicU64, u64) {
        let number = page / ENTRY_PAGES;
        let bits = self.entries.len().ilog2();
        (&self.entries[number as usize & (self.entries.len() - 1)], number >> bits)
    }

    /// The layer that has the page, if that is known.
    pub(super) fn get(&self, page: u64) -> Option<Owner> {
        let (entry, tag) = self.entry(page);
        let entry = entry.load(Relaxed);
        if entry >> TAG_SHIFT != tag {
            return None;
        }
        let shift = (page % ENTRY_PAGES) as u32 * OWNER_BITS;
        match entry >> shift & ((1 << OWNER_BITS) - 1) {
            UNKNOWN => None,
            NOBODY => Some(Owner::Nobody),
            ASK => Some(Owner::Ask),
            layer => Some(Owner::Layer((layer - LAYERS) as usize)),
        }
    }

    /// Stores the owners of the pages of a group.
    pub(super) fn put(&self, group: u64, owners: &Owners) {
        for (i, owners) in owners.0.chunks_exact(ENTRY_PAGES as usize).enumerate() {
            let (entry, tag) = self.entry(group * GROUP_PAGES + i as u64 * ENTRY_PAGES);
            let coded = owners.iter().rev().fold(0, |all, owner| all << OWNER_BITS | code(*owner));
            entry.store(tag << TAG_SHIFT | coded, Relaxed);
        }
    }
}

fn code(owner: Option<Owner>) -> u64 {
    match owner {
        None => UNKNOWN,
        Some(Owner::Nobody) => NOBODY,
        Some(Owner::Layer(layer)) if layer as u64 <= MAX_LAYER => layer as u64 + LAYERS,
        // Layers beyond the limit of an entry have to be asked.
        Some(Owner::Layer(_) | Owner::Ask) => ASK,
    }
}

/// The owners of the pages of a group; `None`: not known without I/O.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Owners([Option<Owner>; GROUP_PAGES as usize]);

impl Owners {
    /// Looks up the owners of a group in these layers, the first of which has index `first` in the chain, of a disk
    /// that ends at `disk_bytes`.
    pub(super) fn of(layers: &[Layer], first: usize, group: u64, disk_bytes: u64) -> Owners {
        let mut owners = [None; GROUP_PAGES as usize];
        let start = group * GROUP_BYTES;
        let bytes = disk_bytes.saturating_sub(start).min(GROUP_BYTES);
        // A bit for each page without an owner so far.
        let mut open = mask(0, bytes.div_ceil(PAGE_BYTES));
        for (i, layer) in layers.iter().enumerate() {
            for (from, to) in runs(std::mem::take(&mut open)) {
                let end = (to * PAGE_BYTES).min(bytes);
                let mut page = from;
                while page < to {
                    let at = page * PAGE_BYTES;
                    let found = layer.find(start + at, end - at);
                    let (len, answer) = answer(found, first + i);
                    // Up to the disk's end, which may cut a page off, or to the last whole page.
                    let upto = match at + len {
                        upto if upto >= end => to,
                        upto => upto / PAGE_BYTES,
                    };
                    match answer {
                        Answer::Is(owner) => owners[page as usize..upto as usize].fill(owner),
                        Answer::Below => open |= mask(page, upto),
                    }
                    page = upto;
                    if page < to && !(at + len).is_multiple_of(PAGE_BYTES) {
                        owners[page as usize] = Some(Owner::Ask);
                        page += 1;
                    }
                }
            }
        }
        for (from, to) in runs(open) {
            owners[from as usize..to as usize].fill(Some(Owner::Nobody));
        }
        Owners(owners)
    }
}

/// A layer's answer for a page.
enum Answer {
    Is(Option<Owner>),
    Below,
}

/// The length of a mapping, and the answer.
fn answer(found: Mapping, layer: usize) -> (u64, Answer) {
    match found {
        Mapping::Data { len, .. } => (len, Answer::Is(Some(Owner::Layer(layer)))),
        Mapping::Zeros { len } => (len, Answer::Is(Some(Owner::Nobody))),
        Mapping::Backing { len } => (len, Answer::Below),
        Mapping::Miss { len } | Mapping::Compressed { len } | Mapping::Cow { len } => {
            (len, Answer::Is(None))
        }
    }
}

/// The bits from `from` up to `to`.
fn mask(from: u64, to: u64) -> u64 {
    let upto = |n: u64| if n == 64 { u64::MAX } else { (1 << n) - 1 };
    upto(to) & !upto(from)
}

/// The runs of ones: where each begins and ends.
fn runs(mut bits: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if bits == 0 {
            return None;
        }
        let zeros = bits.trailing_zeros();
        let ones = (bits >> zeros).trailing_ones();
        let from = at + u64::from(zeros);
        at = from + u64::from(ones);
        bits = bits.checked_shr(zeros + ones).unwrap_or(0);
        Some((from, at))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(owner: Option<Owner>) -> Owners {
        Owners([owner; GROUP_PAGES as usize])
    }

    #[test]
    fn a_page_is_known_until_another_takes_its_place() {
        let table = Shortcut::new(3, 1 << 30, 8 * 16).unwrap();
        assert_eq!((table.entries.len(), table.get(0)), (16, None));
        let mut owners = all(Some(Owner::Layer(1)));
        owners.0[9] = Some(Owner::Nobody);
        owners.0[10] = None;
        owners.0[63] = Some(Owner::Ask);
        table.put(0, &owners);
        for (page, owner) in owners.0.into_iter().enumerate() {
            assert_eq!(table.get(page as u64), owner, "page {page}");
        }
        table.put(1, &all(Some(Owner::Layer(2))));
        // Pages 0 to 127 do not share entries.
        assert_eq!((table.get(128), table.get(128 * 77)), (None, None));
        table.put(2, &all(Some(Owner::Nobody)));
        assert_eq!((table.get(0), table.get(128)), (None, Some(Owner::Nobody)));
        assert_eq!(table.get(64), Some(Owner::Layer(2)));
    }

    #[test]
    fn layers_beyond_what_an_entry_can_say_are_asked() {
        let table = Shortcut::new(256, 1 << 30, 1 << 20).unwrap();
        for layer in [1, MAX_LAYER as usize, MAX_LAYER as usize + 1, 255] {
            table.put(0, &all(Some(Owner::Layer(layer))));
            let known = if layer > MAX_LAYER as usize { Owner::Ask } else { Owner::Layer(layer) };
            assert_eq!(table.get(5), Some(known));
        }
    }

    #[test]
    fn it_is_as_large_as_the_disk_or_the_budget_and_not_there_for_short_chains() {
        let entries = |layers, disk_bytes, budget_bytes| {
            Shortcut::new(layers, disk_bytes, budget_bytes).map(|table| table.entries.len())
        };
        assert_eq!(entries(2, 1 << 30, 1 << 20), None);
        assert_eq!(entries(3, 1 << 30, 4 << 20), Some(1 << 15));
        assert_eq!(entries(256, 1 << 40, 1 << 20), Some(1 << 17));
        assert_eq!(entries(3, 512, 0), Some(8));
        // The tag could not tell so many pages apart.
        assert_eq!(entries(3, 64 << 40, 0), None);
    }

    #[test]
    fn runs_and_masks_are_opposites() {
        for bits in [0, 1, 1 << 63, u64::MAX, 0xF0F0_0000_0000_000F, 0x8000_0000_0000_0001] {
            let again = runs(bits).fold(0, |all, (from, to)| all | mask(from, to));
            assert_eq!(again, bits, "{bits:#x}");
        }
        assert_eq!(runs(0b0110_1000).collect::<Vec<_>>(), [(3, 4), (5, 7)]);
    }
}
