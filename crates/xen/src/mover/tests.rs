//! The movers over a guest of the test's own, with a clock that the test turns.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::hypervisor::{GNTST_BAD_GNTREF, GNTST_OKAY, PAGE_SIZE};

/// References from here on are bad.
const PAGES: u32 = 2000;

#[derive(Default)]
struct Hands(AtomicU64);

impl Hands {
    fn turn(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clock for Hands {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn sleep(&self, how_long: std::time::Duration) {
        self.turn(how_long.as_nanos() as u64);
    }
}

/// A guest whose reference n is page n of its memory.
struct Guest {
    memory: Arc<Arena>,
    mapped: Arc<AtomicUsize>,
    copied: usize,
    read_only_from: u32,
}

struct Mapped {
    pages: Vec<NonNull<u8>>,
    mapped: Arc<AtomicUsize>,
}

// SAFETY: the pages are those of an arena that the guest of the test holds until its end.
unsafe impl Mapping for Mapped {
    fn page(&self, page: usize) -> NonNull<u8> {
        self.pages[page]
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.mapped.fetch_sub(self.pages.len(), Ordering::Relaxed);
    }
}

impl Guest {
    fn new() -> Guest {
        let memory = Arena::new(PAGES as usize * PAGE_SIZE).unwrap();
        Guest { memory, mapped: Arc::default(), copied: 0, read_only_from: u32::MAX }
    }

    fn ptr(&self, gref: GrantRef) -> NonNull<u8> {
        self.memory.ptr(self.memory.span(gref.0 as usize * PAGE_SIZE, PAGE_SIZE))
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Relaxed)
    }
}

impl Grants for Guest {
    type Mapping = Mapped;

    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        for segment in segments {
            self.copied += 1;
            let gref = segment.gref();
            let writes = direction == Direction::ToGuest;
            segment.status = if gref.0 >= PAGES || writes && gref.0 >= self.read_only_from {
                GNTST_BAD_GNTREF
            } else {
                // SAFETY: a page of the guest's memory, which no other thread uses.
                unsafe { move_bytes(self.ptr(gref), arena, direction, segment) };
                GNTST_OKAY
            };
        }
        Ok(())
    }

    fn map(&mut self, grefs: &[GrantRef], writable: bool) -> io::Result<Mapped> {
        assert!((1..=BATCH).contains(&grefs.len()));
        let bad = |g: &GrantRef| g.0 >= PAGES || writable && g.0 >= self.read_only_from;
        if grefs.iter().any(bad) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.mapped.fetch_add(grefs.len(), Ordering::Relaxed);
        let pages = grefs.iter().map(|g| self.ptr(*g)).collect();
        Ok(Mapped { pages, mapped: self.mapped.clone() })
    }
}

struct World {
    guest: Guest,
    arena: Arc<Arena>,
    clock: Arc<Hands>,
    maps: Arc<Maps>,
    carrier: Carrier<Mapped>,
}

impl World {
    fn new(mover: Mover, mappings: u32) -> World {
        let clock = Arc::new(Hands::default());
        let maps = Maps::new(Budget::of_disk(mappings), clock.clone());
        let carrier = Carrier::new(&Moving { mover, maps: maps.clone() });
        let arena = Arena::new(PAGES as usize * PAGE_SIZE).unwrap();
        World { guest: Guest::new(), arena, clock, maps, carrier }
    }

    /// Moves the first 512 bytes of these pages; the status of each.
    fn go(&mut self, direction: Direction, grefs: impl IntoIterator<Item = u32>) -> Vec<i16> {
        let segment =
            |(i, gref)| CopySegment::new(self.arena.span(i * PAGE_SIZE, 512), GrantRef(gref), 0);
        let mut segments: Vec<_> = grefs.into_iter().enumerate().map(segment).collect();
        self.carrier.copy(&mut self.guest, &self.arena, direction, &mut segments).unwrap();
        segments.iter().map(|s| s.status).collect()
    }

    fn read(&mut self, grefs: impl IntoIterator<Item = u32>) {
        assert!(self.go(Direction::FromGuest, grefs).iter().all(|s| *s == GNTST_OKAY));
    }
}

const SECOND_NS: u64 = 1_000_000_000;

#[test]
fn every_mover_moves_exactly_the_bytes_and_refuses_each_bad_reference_alone() {
    for (mover, mappings) in
        [(Mover::Copy, 0), (Mover::Map, 4096), (Mover::Map, 0), (Mover::Persistent, 4096)]
    {
        let mut w = World::new(mover, mappings);
        for direction in [Direction::FromGuest, Direction::ToGuest] {
            let (ours, theirs) = match direction {
                Direction::FromGuest => (1, 2),
                Direction::ToGuest => (3, 4),
            };
            w.arena.fill(w.arena.span(0, w.arena.len()), ours);
            w.guest.memory.fill(w.guest.memory.span(0, w.guest.memory.len()), theirs);
            let bad = [3, 600];
            let grefs = (0..700).map(|i| if bad.contains(&i) { PAGES + i } else { i });
            let status = w.go(direction, grefs.collect::<Vec<_>>());
            let (to, byte) = match direction {
                Direction::FromGuest => (&w.arena, theirs),
                Direction::ToGuest => (&w.guest.memory, ours),
            };
            for (i, status) in status.into_iter().enumerate() {
                let is_bad = bad.contains(&(i as u32));
                assert_eq!(status == GNTST_OKAY, !is_bad, "{mover} {i}");
                let mut got = [0; 513];
                to.copy_out(to.span(i * PAGE_SIZE, 513), &mut got);
                assert_eq!(got[..512].iter().all(|b| *b == byte), !is_bad, "{mover} {i}");
                assert_ne!(got[512], byte, "{mover} {i}: beyond the segment");
            }
        }
        if mover != Mover::Persistent {
            assert_eq!((w.guest.mapped(), w.maps.counts().mapped), (0, 0));
        }
    }
}

#[test]
fn what_a_batch_has_mapped_is_released_and_its_budget_is_kept_within() {
    let mut w = World::new(Mover::Map, 64);
    w.read(0..500);
    let counts = w.maps.counts();
    assert_eq!((counts.misses, counts.fallbacks, w.guest.copied), (500, 0, 0));
    assert_eq!((w.maps.budget().claimed(), w.guest.mapped()), (64, 0));
    // A bad reference costs its batch the mapping, not the others theirs.
    w.go(Direction::FromGuest, (0..128).map(|i| if i == 70 { PAGES } else { i }));
    assert_eq!((w.maps.counts().misses, w.maps.counts().fallbacks), (564, 64));
    drop(w.carrier);
    assert_eq!(w.maps.budget().claimed(), 0);
}

#[test]
fn a_page_stays_mapped_and_is_found_again() {
    let mut w = World::new(Mover::Persistent, 4096);
    for _ in 0..3 {
        w.read((0..40).rev());
        w.go(Direction::ToGuest, 0..40);
    }
    assert_eq!((w.guest.mapped(), w.guest.copied), (40, 0));
    drop(w.carrier);
    let told = Counts { mapped: 0, hits: 200, misses: 40, evictions: 0, fallbacks: 0 };
    assert_eq!((w.maps.counts(), w.guest.mapped.load(Ordering::Relaxed)), (told, 0));
    assert_eq!(w.maps.budget().claimed(), 0);
}

#[test]
fn without_a_place_a_page_is_copied_until_another_was_not_used_for_a_second() {
    for (mappings, places) in [(64, 64), (4096, QUEUE_MAPPINGS as u32)] {
        let mut w = World::new(Mover::Persistent, mappings);
        w.read(0..places + 10);
        assert_eq!((w.guest.mapped(), w.guest.copied), (places as usize, 10));
        w.clock.turn(SECOND_NS - 1);
        w.read([places]);
        assert_eq!(w.guest.copied, 11);
        w.clock.turn(1);
        w.read([5, places, 5]);
        assert_eq!((w.guest.mapped(), w.guest.copied), (places as usize, 11));
        // It took the place of 0, which was used first; 1 to 9 are the next.
        w.read([0]);
        assert_eq!((w.maps.counts().evictions, w.guest.copied), (2, 11));
        w.read([places]);
        assert_eq!(w.maps.counts().evictions, 2);
    }
}

#[test]
fn what_was_idle_for_a_minute_is_unmapped_when_something_happens() {
    let mut w = World::new(Mover::Persistent, 4096);
    w.read(0..300);
    w.clock.turn(30 * SECOND_NS);
    w.read(0..100);
    w.clock.turn(30 * SECOND_NS);
    for _ in 0..4 {
        w.read([0]);
        w.clock.turn(SECOND_NS);
    }
    assert_eq!((w.guest.mapped(), w.maps.counts().evictions), (100, 200));
    assert!(w.maps.budget().claimed() <= 160, "it is given back");
}

#[test]
fn a_page_that_may_only_be_read_is_copied() {
    let mut w = World::new(Mover::Persistent, 4096);
    w.guest.read_only_from = 10;
    w.read(0..20);
    assert_eq!((w.guest.mapped(), w.guest.copied), (10, 10));
    let status = w.go(Direction::ToGuest, [9, 10]);
    assert_eq!(status, [GNTST_OKAY, GNTST_BAD_GNTREF]);
}

#[test]
fn names_are_read_as_they_are_written() {
    for mover in [Mover::Copy, Mover::Map, Mover::Persistent] {
        assert_eq!(mover.to_string().parse(), Ok(mover));
    }
    assert!("Map".parse::<Mover>().is_err());
}
