use std::fs::File;
use std::os::unix::fs::FileExt;

use ferrite_io::reactor::Reactor;
use ferrite_simio::SimWorld;

use super::*;
use crate::content::{DomainKey, checksum};
use crate::journal::Name;
use crate::live::{Live, Memory, Operation};
use crate::page::{POINTER_BYTES, Pointer};
use crate::space::SpacePage;
use crate::superblock::Superblock;
use crate::testing::{self, BYTES, Machine, SCRATCH_BYTES};

const MEMORY: Memory = Memory { metadata: 1 << 20, index: 1 << 12 };
const BLOCK: u64 = BLOCK_BYTES as u64;
const DEEP: How = How { contents: true, deep: true, rate: None, mend: false };

/// A store with a volume, a snapshot of it and a clone of that; and one of another domain.
struct Store {
    machine: Machine,
    file: File,
}

fn open(store: &Store) -> (Port, Reactor) {
    testing::port(&SimWorld::new(1), &store.machine.path)
}

/// A content, by a number of ours.
fn content(number: u64) -> Vec<u8> {
    (number + 1).to_le_bytes().repeat(BLOCK_BYTES / 8)
}

/// Contents from one on, by one write.
async fn write(live: &Live, port: &Port, volume: u32, blocks: std::ops::Range<u64>, first: u64) {
    let count = blocks.end - blocks.start;
    let bytes: Vec<u8> = (first..first + count).flat_map(content).collect();
    let span = port.memory().span(SCRATCH_BYTES, bytes.len());
    port.memory().copy_in(span, &bytes);
    live.write(port, volume, blocks.start * BLOCK, span).await.unwrap();
}

impl Store {
    /// `closed`: in good order. Otherwise the journal has all since the first checkpoint.
    fn new(closed: bool) -> Store {
        let machine = Machine::new(3);
        let file = File::options().read(true).write(true).open(&machine.path).unwrap();
        let (port, mut reactor) = testing::port(&machine.world, &machine.path);
        let name = |name| Name::new(name).unwrap();
        let made = async {
            let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
            let a = Operation::Domain(name("a"), DomainKey([1; 32]));
            let b = Operation::Domain(name("b"), DomainKey([2; 32]));
            live.operate(&port, a).await.unwrap();
            live.operate(&port, b).await.unwrap();
            let disk = live.operate(&port, Operation::Create(name("disk"), 2000, 0)).await.unwrap();
            let other = Operation::Create(name("other"), 2000, 1);
            let other = live.operate(&port, other).await.unwrap();
            live.checkpoint(&port).await.unwrap();
            write(&live, &port, disk, 0..20, 0).await;
            // The same once more, and in another domain.
            write(&live, &port, disk, 600..610, 0).await;
            write(&live, &port, other, 0..5, 0).await;
            let of = live.operate(&port, Operation::Snapshot(name("snap"), disk)).await.unwrap();
            live.operate(&port, Operation::Clone(name("clone"), of)).await.unwrap();
            write(&live, &port, disk, 4..6, 50).await;
            live.flush(&port).await.unwrap();
            if closed {
                live.close(&port).await.unwrap();
            }
        };
        reactor.block_on(made).unwrap();
        Store { machine, file }
    }

    fn check(&self, how: How) -> Outcome {
        let (port, mut reactor) = open(self);
        let done = async { check(&port, BYTES, how, &|_, _| true).await };
        reactor.block_on(done).unwrap().unwrap()
    }

    fn read(&self, place: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        self.file.read_exact_at(&mut block, place * BLOCK).unwrap();
        block
    }

    fn write(&self, place: u64, block: &[u8]) {
        self.file.write_all_at(block, place * BLOCK).unwrap();
    }

    fn flip(&self, place: u64) {
        let mut block = self.read(place);
        block[99] ^= 4;
        self.write(place, &block);
    }

    /// The superblock that counts.
    fn superblock(&self) -> Superblock {
        let pages = [0, 1].map(|odd| Superblock::decode(&self.read(odd), 0, odd == 1).unwrap());
        pages.into_iter().max_by_key(|page| page.checkpoint).unwrap()
    }

    /// The first place of some content.
    fn place_of(&self, number: u64) -> u64 {
        (0..BYTES / BLOCK).find(|place| self.read(*place) == content(number)).unwrap()
    }

    /// Changes the first leaf of P2M, and all that has to fit it.
    fn change_p2m(&self, change: impl FnOnce(&mut [u8])) {
        let superblock = self.superblock();
        let layout = superblock.layout;
        let put = |pointer: &Pointer, page: &[u8]| {
            self.write(pointer.place, page);
            self.write(layout.copy_of(pointer.place).unwrap(), page);
            Pointer { checksum: checksum(page), ..*pointer }
        };
        let root = superblock.roots.p2m.unwrap();
        let mut page = self.read(root.place);
        let leaf = Pointer::decode(page.as_chunks().0.first().unwrap(), &layout).unwrap().unwrap();
        let mut entries = self.read(leaf.place);
        change(&mut entries);
        let leaf = put(&leaf, &entries);
        page[..POINTER_BYTES].copy_from_slice(&Pointer::encode(Some(leaf)));
        let mut changed = superblock;
        changed.roots.p2m = Some(put(&root, &page));
        for home in 0..2 {
            self.write(layout.superblock(home, changed.checkpoint), &changed.encode(home));
        }
    }
}

/// The volume of each finding, and its block.
fn whose(outcome: &Outcome) -> Vec<(String, u64, u64)> {
    let listed = outcome.findings.listed.iter();
    let mut all: Vec<_> = listed
        .filter_map(|finding| {
            let at = finding.offset_bytes? / BLOCK;
            Some((finding.volume.clone()?, at, finding.length_bytes? / BLOCK))
        })
        .collect();
    all.sort();
    all
}

fn only<'a>(outcome: &'a Outcome, kind: &str) -> &'a StoreFinding {
    let [finding] = &outcome.findings.listed[..] else { panic!("{:?}", outcome.findings) };
    assert_eq!(finding.kind, kind, "{finding:?}");
    finding
}

#[test]
fn a_store_in_order_has_no_findings_and_its_space_is_counted() {
    let store = Store::new(true);
    let outcome = store.check(DEEP);
    assert_eq!(outcome.findings, Findings::default());
    let stats = outcome.stats.unwrap();
    assert_eq!(stats.logical_bytes, 4 * 2000 * BLOCK);
    // 30 blocks of each of three, and 5.
    assert_eq!(stats.mapped_bytes, 95 * BLOCK);
    // Blocks 600 to 609 have what 0 to 9 have; two were written anew.
    assert_eq!(stats.distinct_bytes, (20 + 2 + 5) * BLOCK);
    assert_eq!((stats.stored_bytes, stats.garbage_bytes), (stats.distinct_bytes, 0));
    assert_eq!(outcome.read_bytes, stats.stored_bytes);
    assert!((stats.ratio - 95.0 / 27.0).abs() < 1e-9, "{}", stats.ratio);
    let names: Vec<&str> = stats.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["clone", "disk", "other", "snap"]);
}

#[test]
fn content_that_does_not_fit_is_named_by_all_who_have_it() {
    let store = Store::new(true);
    store.flip(store.place_of(5));
    let outcome = store.check(DEEP);
    let of = |name: &str, block, count| (name.to_owned(), block, count);
    // The disk has written over its fifth block, and has another one with the same content.
    let expected = [
        of("clone", 5, 1),
        of("clone", 605, 1),
        of("disk", 605, 1),
        of("snap", 5, 1),
        of("snap", 605, 1),
    ];
    let of_domain: Vec<_> = whose(&outcome).into_iter().filter(|w| w.0 != "other").collect();
    assert_eq!(of_domain, expected);
    assert_eq!(store.check(How::default()).findings, Findings::default());
}

#[test]
fn hashes_that_are_lost_are_named_until_something_is_written_among_them() {
    let store = Store::new(true);
    let superblock = store.superblock();
    let root = store.read(superblock.roots.hashes.unwrap().place);
    let leaf = Pointer::decode(root.as_chunks().0.first().unwrap(), &superblock.layout);
    store.flip(leaf.unwrap().unwrap().place);
    assert_eq!(only(&store.check(DEEP), "page").class, ferrite_disk_base::Class::Harmless);
    let (port, mut reactor) = open(&store);
    let written = async {
        let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
        write(&live, &port, 0, 700..705, 90).await;
        live.close(&port).await.unwrap();
    };
    reactor.block_on(written).unwrap();
    assert_eq!(store.check(DEEP).findings, Findings::default());
}

#[test]
fn a_page_that_is_damaged_once_is_mended_and_twice_is_the_damage_of_its_blocks() {
    let store = Store::new(true);
    let superblock = store.superblock();
    for root in [superblock.roots.p2m, superblock.roots.volumes] {
        let place = root.unwrap().place;
        store.flip(place);
        let before = store.check(DEEP);
        let finding = only(&before, "page");
        assert!(
            finding.mendable && finding.class == ferrite_disk_base::Class::Harmless,
            "{finding:?}"
        );
        assert_eq!(finding.place_bytes, Some(place * BLOCK));
        assert_eq!(store.check(How { mend: true, ..DEEP }).mended, 1);
        assert_eq!(store.check(DEEP).findings, Findings::default());
    }
    let place = superblock.roots.p2m.unwrap().place;
    store.flip(place);
    store.flip(superblock.layout.copy_of(place).unwrap());
    let outcome = store.check(How { mend: true, ..DEEP });
    assert_eq!((outcome.mended, outcome.findings.counts.damage > 0), (0, true));
    assert!(whose(&outcome).contains(&("disk".into(), 0, 20)), "{outcome:?}");
}

#[test]
fn one_superblock_of_two_is_mended() {
    for (home, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let store = Store::new(true);
        let place = store.superblock().layout.superblock(home, odd);
        let whole = store.read(place);
        store.flip(place);
        let before = store.check(DEEP);
        assert!(only(&before, "superblock").mendable);
        assert_eq!(store.check(How { mend: true, ..DEEP }).mended, 1);
        assert_eq!(store.read(place), whole);
        // Both: there is nothing to go by.
        let second = store.superblock().layout.superblock(1 - home, odd);
        store.flip(place);
        store.flip(second);
        let outcome = store.check(How { mend: true, ..DEEP });
        assert_eq!((outcome.mended, outcome.findings.counts.damage, outcome.stats), (0, 1, None));
    }
}

#[test]
fn two_numbers_in_one_place_are_damage() {
    let store = Store::new(true);
    store.change_p2m(|entries| {
        let (first, rest) = entries.split_at_mut(2 * POINTER_BYTES);
        rest[..POINTER_BYTES].copy_from_slice(&first[POINTER_BYTES..]);
    });
    let outcome = store.check(How::default());
    assert!(only(&outcome, "content").why.contains("two things"), "{outcome:?}");
    // And the hash of the one is not that of the other's content.
    let outcome = store.check(DEEP);
    let kinds: Vec<&str> = outcome.findings.listed.iter().map(|f| f.kind.as_str()).collect();
    assert_eq!(kinds, ["content", "hash"]);
}

#[test]
fn content_that_is_nowhere_or_was_never_given_is_damage() {
    let store = Store::new(true);
    store.change_p2m(|entries| entries[POINTER_BYTES..2 * POINTER_BYTES].fill(0));
    let outcome = store.check(How::default());
    assert!(whose(&outcome).iter().any(|(volume, at, _)| (volume.as_str(), *at) == ("snap", 0)));
    assert!(outcome.findings.listed.iter().all(|f| f.why.contains("nowhere")));
    let store = Store::new(true);
    store.change_p2m(|entries| {
        let (last, first) = (255 * POINTER_BYTES, POINTER_BYTES..2 * POINTER_BYTES);
        entries.copy_within(first.clone(), last);
        entries[first].fill(0);
    });
    let outcome = store.check(How::default());
    assert!(outcome.findings.listed.iter().any(|f| f.why.contains("never given")), "{outcome:?}");
}

#[test]
fn a_place_in_use_whose_bit_is_clear_is_damage() {
    let store = Store::new(true);
    let place = store.place_of(3);
    store.clear_bit(place);
    let outcome = store.check(How::default());
    let finding = only(&outcome, "content");
    assert_eq!(finding.place_bytes, Some(place * BLOCK));
    assert!(finding.why.contains("not in use"), "{finding:?}");
}

/// Otherwise an older one could count behind a cut.
#[test]
fn who_opens_a_store_for_writing_writes_damaged_space_pages_first() {
    let store = Store::new(true);
    let (layout, place) = (store.superblock().layout, store.place_of(3));
    let (segment, _) = layout.segment_of(place).unwrap();
    // Neither page of it is of the last checkpoint then.
    let reopen = |changes: bool| {
        let (port, mut reactor) = open(&store);
        let done = async {
            let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
            if changes {
                let name = Name::new("new").unwrap();
                live.operate(&port, Operation::Create(name, 9, 0)).await.unwrap();
                live.close(&port).await.unwrap();
            }
        };
        reactor.block_on(done).unwrap();
    };
    reopen(true);
    store.flip(layout.space_page(segment, 0));
    assert!(only(&store.check(DEEP), "space").why.contains("before the next gc"));
    reopen(false);
    assert_eq!(store.check(DEEP).findings, Findings::default());
}

/// The kind of the pair is unknown until a pass finds it out.
#[test]
fn pages_in_a_pair_whose_space_pages_were_damaged_are_not_damage() {
    let store = Store::new(true);
    let superblock = store.superblock();
    let (segment, _) = superblock.layout.segment_of(superblock.roots.p2m.unwrap().place).unwrap();
    for (half, home) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        store.flip(superblock.layout.space_page(segment + half, home));
    }
    let (port, mut reactor) = open(&store);
    let write_some = async {
        let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
        let disk = live.volume("disk").unwrap();
        for block in 100..102 {
            write(&live, &port, disk, block..block + 1, 1000 + block).await;
            live.checkpoint(&port).await.unwrap();
        }
    };
    reactor.block_on(write_some).unwrap();
    assert_eq!(store.check(DEEP).findings, Findings::default());
    let (port, mut reactor) = open(&store);
    let pass = async {
        let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
        live.gc(&port).await.unwrap();
        live.close(&port).await.unwrap();
    };
    reactor.block_on(pass).unwrap();
    let outcome = store.check(DEEP);
    assert_eq!(outcome.findings, Findings::default());
    let stats = outcome.stats.unwrap();
    assert!(stats.garbage_bytes < stats.free_bytes / 100, "{stats:?}");
}

#[test]
fn a_page_is_not_written_again_where_something_else_may_be() {
    let store = Store::new(true);
    let superblock = store.superblock();
    let root = superblock.roots.p2m.unwrap().place;
    let copy = superblock.layout.copy_of(root).unwrap();
    store.flip(copy);
    let before = store.read(copy);
    store.clear_bit(root);
    let outcome = store.check(How { mend: true, ..DEEP });
    assert_eq!((outcome.mended, outcome.findings.counts.mendable), (0, 0), "{outcome:?}");
    assert_eq!(store.read(copy), before);
}

#[test]
fn a_journal_is_checked_as_far_as_no_checkpoint_has_it() {
    let store = Store::new(false);
    assert_eq!(store.check(DEEP).findings, Findings::default());
    // Later blocks of the journal vouch for it.
    store.flip(store.place_of(2));
    let outcome = store.check(DEEP);
    assert!(whose(&outcome).contains(&("disk".into(), 2, 1)), "{outcome:?}");
    // A block of the journal that later ones vouch for.
    let (superblock, store) = (store.superblock(), Store::new(false));
    store.flip(superblock.layout.journal(superblock.replay_from));
    assert!(only(&store.check(DEEP), "journal").why.contains("missing"));
}

/// Bits flipped anywhere: the check finds it, or the block is not needed.
#[test]
fn whatever_block_is_damaged_the_check_tells_or_nobody_needs_it() {
    let store = Store::new(true);
    let layout = store.superblock().layout;
    let is_used = |place: u64| store.read(place).iter().any(|byte| *byte != 0);
    let journal = layout.journal(0)..layout.space_page(0, 0);
    let mut told = 0;
    for place in (0..layout.blocks).filter(|place| is_used(*place)) {
        store.flip(place);
        let outcome = store.check(DEEP);
        store.flip(place);
        let is_told = outcome.findings.counts.total() > 0;
        told += u64::from(is_told);
        // Of the journal, and of pages of earlier checkpoints, nothing is needed.
        let is_garbage = || {
            let (segment, _) = layout.segment_of(place).unwrap();
            let mut first = place - (segment % 2) * layout.segment_blocks;
            first -= layout.first_place(0);
            !store.used(first)
        };
        assert!(is_told || journal.contains(&place) || is_garbage(), "block {place}");
    }
    assert!(told > 100, "{told}");
}

impl Store {
    /// Marks a place as free in the space pages.
    fn clear_bit(&self, place: u64) {
        let superblock = self.superblock();
        let layout = superblock.layout;
        let (segment, at) = layout.segment_of(place).unwrap();
        for home in 0..2 {
            let block = layout.space_page(segment, home);
            let home = home as usize;
            let page = SpacePage::decode(&self.read(block), &superblock.id, &layout, segment, home);
            let mut page = page.unwrap();
            page.bits.clear(at);
            self.write(block, &page.encode(&superblock.id, segment, home));
        }
    }

    fn used(&self, at: u64) -> bool {
        let superblock = self.superblock();
        let layout = superblock.layout;
        let segment = at / layout.segment_blocks;
        let homes = [0, 1].map(|home| {
            let page = self.read(layout.space_page(segment, home as u64));
            SpacePage::decode(&page, &superblock.id, &layout, segment, home)
        });
        let page = crate::space::choose(homes, superblock.checkpoint).page.unwrap();
        page.bits.get(at % layout.segment_blocks)
    }
}

#[test]
fn a_check_ends_when_it_is_told_to() {
    let store = Store::new(true);
    let (port, mut reactor) = open(&store);
    let done = async { check(&port, BYTES, DEEP, &|_, _| false).await };
    let kind = reactor.block_on(done).unwrap().map_err(|e| e.kind());
    assert_eq!(kind, Err(io::ErrorKind::Interrupted));
}

#[test]
fn what_is_garbage_is_counted_and_after_two_passes_there_is_none() {
    let store = Store::new(true);
    let (port, mut reactor) = open(&store);
    let using = |passes: usize| {
        let port = &port;
        async move {
            let live = Live::open(port, BYTES, MEMORY).await.unwrap();
            for name in ["snap", "clone"] {
                if let Some(volume) = live.volume(name) {
                    live.operate(port, Operation::Delete(volume)).await.unwrap();
                }
            }
            for _ in 0..passes {
                live.gc(port).await.unwrap();
            }
            live.close(port).await.unwrap();
        }
    };
    reactor.block_on(using(0)).unwrap();
    let outcome = store.check(DEEP);
    assert_eq!(outcome.findings, Findings::default());
    // The old content of the two blocks that were written anew is in blocks 604 and 605, too.
    let stats = outcome.stats.unwrap();
    assert_eq!((stats.distinct_bytes, stats.garbage_bytes), (27 * BLOCK, 0));
    let emptied = async {
        let live = Live::open(&port, BYTES, MEMORY).await.unwrap();
        let disk = live.volume("disk").unwrap();
        live.write_zeros(&port, disk, 10 * BLOCK, 10 * BLOCK).await.unwrap();
        live.close(&port).await.unwrap();
    };
    reactor.block_on(emptied).unwrap();
    let stats = store.check(DEEP).stats.unwrap();
    assert_eq!((stats.distinct_bytes, stats.garbage_bytes), (17 * BLOCK, 10 * BLOCK));
    reactor.block_on(using(2)).unwrap();
    let outcome = store.check(DEEP);
    assert_eq!(outcome.findings, Findings::default());
    let after = outcome.stats.unwrap();
    assert_eq!((after.distinct_bytes, after.garbage_bytes), (17 * BLOCK, 0));
    assert!(after.free_bytes >= stats.free_bytes + 10 * BLOCK, "{stats:?}, {after:?}");
}
