//! The contexts of an export: what BLOCK_STATUS can say of a range (nbd-rules.md 1).

use std::sync::Arc;

use ferrite_disk::dirty::{KnownMap, MAX_MAPS, MIRROR_MAP, MapId};
use ferrite_nbd::wire::{
    CONTEXT, CONTEXT_ID, DEPTH_CONTEXT, DEPTH_CONTEXT_ID, DIRTY_CONTEXT, QEMU_DIRTY_CONTEXT,
};

use crate::path::QUESTIONS;

/// Most extents of one reply, of all contexts together. A relay holds replies of this length.
pub(super) const MAX_EXTENTS: usize = 2 * QUESTIONS;
/// Numbers below are of contexts that every export has.
const FIRST_OF_MAPS: u32 = 16;

/// The contexts of a disk's dirty maps.
#[derive(Clone, Debug, Default)]
pub(super) struct DirtyContexts(Arc<[DirtyContext]>);

/// A dirty map under one of its two names.
#[derive(Debug)]
pub(super) struct DirtyContext {
    name: String,
    /// The number on the wire.
    pub(super) number: u32,
    pub(super) map: MapId,
}

// The chosen ones are a bit each.
const _: () = assert!(2 * MAX_MAPS <= u32::BITS as usize);

impl DirtyContexts {
    /// Those of these maps. Their numbers follow from the maps' identifiers: so a relay that repeats a client's
    /// negotiation with the next worker notices that there is another map of the same name (nbd-rules.md 6).
    pub(super) fn of(maps: &[KnownMap]) -> DirtyContexts {
        let mut all = Vec::<DirtyContext>::with_capacity(2 * maps.len());
        let is_for_clients = |map: &&KnownMap| !map.name.starts_with(MIRROR_MAP);
        for map in maps.iter().filter(is_for_clients).take(MAX_MAPS) {
            let names = [(DIRTY_CONTEXT, 0), (QEMU_DIRTY_CONTEXT, 4)];
            for (space, at) in names {
                let wanted = map.id[at..].first_chunk().map_or(0, |part| u32::from_le_bytes(*part));
                let mut number = wanted.max(FIRST_OF_MAPS);
                while all.iter().any(|other| other.number == number) {
                    number = number.wrapping_add(1).max(FIRST_OF_MAPS);
                }
                all.push(DirtyContext { name: [space, &map.name].concat(), number, map: map.id });
            }
        }
        DirtyContexts(all.into())
    }

    /// The name and the number of each context of the export, in the order of answers.
    pub(super) fn offered(&self) -> impl Iterator<Item = (&str, u32, Context)> {
        let of_all = [
            (CONTEXT, CONTEXT_ID, Context::Allocation),
            (DEPTH_CONTEXT, DEPTH_CONTEXT_ID, Context::Depth),
        ];
        let dirty = self.0.iter().enumerate();
        of_all.into_iter().chain(
            dirty.map(|(i, dirty)| (dirty.name.as_str(), dirty.number, Context::Dirty(i as u8))),
        )
    }

    /// Those of the chosen contexts.
    pub(super) fn chosen(&self, contexts: Contexts) -> impl Iterator<Item = &DirtyContext> {
        let is_chosen = move |i: usize| contexts.dirty >> i & 1 != 0;
        self.0.iter().enumerate().filter_map(move |(i, dirty)| is_chosen(i).then_some(dirty))
    }
}

/// One of an export's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Context {
    Allocation,
    Depth,
    /// The index in [`DirtyContexts`].
    Dirty(u8),
}

/// The contexts that a client has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contexts {
    /// `base:allocation`.
    pub(super) allocation: bool,
    /// `qemu:allocation-depth`.
    pub(super) depth: bool,
    /// A bit for each of the export's [`DirtyContexts`].
    dirty: u32,
}

impl Contexts {
    pub(super) fn is_empty(self) -> bool {
        self == Contexts::default()
    }

    pub(super) fn add(&mut self, context: Context) {
        match context {
            Context::Allocation => self.allocation = true,
            Context::Depth => self.depth = true,
            Context::Dirty(index) => self.dirty |= 1 << index,
        }
    }

    /// Most extents of each context in a reply.
    pub(super) fn most_extents(self) -> usize {
        let count = u32::from(self.allocation) + u32::from(self.depth) + self.dirty.count_ones();
        MAX_EXTENTS / (count.max(2) as usize)
    }

    /// Whether an answer needs the places of the data.
    pub(super) fn need_places(self) -> bool {
        self.allocation || self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(name: &str, first: u32, second: u32) -> KnownMap {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&first.to_le_bytes());
        id[4..8].copy_from_slice(&second.to_le_bytes());
        KnownMap { name: name.to_owned(), id }
    }

    fn numbers(maps: &[KnownMap]) -> Vec<u32> {
        DirtyContexts::of(maps).0.iter().map(|dirty| dirty.number).collect()
    }

    #[test]
    fn a_map_has_two_names_and_its_identifier_says_their_numbers() {
        let contexts = DirtyContexts::of(&[map("a", 77, 99)]);
        let offered: Vec<_> = contexts.offered().map(|(name, number, _)| (name, number)).collect();
        assert_eq!(
            offered,
            [
                ("base:allocation", 1),
                ("qemu:allocation-depth", 2),
                ("ferrite:dirty-a", 77),
                ("qemu:dirty-bitmap:a", 99)
            ]
        );
        assert_eq!(numbers(&[map("a", 78, 99)]), [78, 99]);
    }

    #[test]
    fn maps_of_mirrors_are_not_told() {
        let maps = [map("mirror-0", 77, 99), map("mirror", 100, 101)];
        assert_eq!(numbers(&maps), [100, 101]);
    }

    #[test]
    fn numbers_differ_whatever_the_identifiers_are() {
        assert_eq!(numbers(&[map("a", 0, 1), map("b", 16, u32::MAX)]), [16, 17, 18, u32::MAX]);
        assert_eq!(numbers(&[map("a", u32::MAX, u32::MAX)]), [u32::MAX, FIRST_OF_MAPS]);
        let many: Vec<_> = (0..20).map(|i| map(&format!("m{i}"), 5, 5)).collect();
        assert_eq!(numbers(&many), (16..48).collect::<Vec<_>>());
    }

    #[test]
    fn all_contexts_of_a_client_share_the_extents_of_a_reply() {
        let contexts = DirtyContexts::of(&(0..16).map(|i| map("m", i, 99 + i)).collect::<Vec<_>>());
        let mut chosen = Contexts::default();
        for (_, _, context) in contexts.offered() {
            chosen.add(context);
            let count = chosen.dirty.count_ones() as usize + 2;
            assert!(chosen.most_extents() > 0 && chosen.most_extents() * count <= MAX_EXTENTS * 2);
        }
        assert_eq!(contexts.chosen(chosen).count(), 32);
        assert_eq!(chosen.most_extents() * 34, 1020);
    }
}
