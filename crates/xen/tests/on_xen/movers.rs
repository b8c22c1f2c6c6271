//! Data by mapping pages: for a batch, and for good.

use std::sync::Arc;

use ferrite_host::clock::SystemClock;
use ferrite_io::arena::{Arena, Span};
use ferrite_xen::hypervisor::{CopySegment, Direction, GrantRef, Hypervisor, Link, PAGE_SIZE};
use ferrite_xen::mover::{Budget, Maps, Mover, Moving};
use ferrite_xen::real::Xen;

use crate::own_domain::{OWN, Pages, Port};

const NO_SUCH_REF: GrantRef = GrantRef(0xFFFF_FFF0);
const PAGES: usize = 32;

struct Scene {
    maps: Arc<Maps>,
    link: Box<dyn Link>,
    arena: Arc<Arena>,
    pages: Pages,
    _ring: Pages,
    _port: Port,
}

impl Scene {
    fn new(mover: Mover, mappings: u32, is_writable: bool) -> Scene {
        let maps = Maps::new(Budget::of_disk(mappings), SystemClock::shared());
        let moving = Moving { mover, maps: maps.clone() };
        let (ring, port) = (Pages::new(1, true), Port::new());
        let link = Xen::new().connect(OWN, ring.refs(), port.number, &moving).unwrap();
        let arena = Arena::new(600 * PAGE_SIZE).unwrap();
        let pages = Pages::new(PAGES, is_writable);
        (0..pages.len()).for_each(|at| pages.set(at, pattern(at)));
        Scene { maps, link, arena, pages, _ring: ring, _port: port }
    }

    fn whole(&self) -> Span {
        self.arena.span(0, self.arena.len())
    }

    /// Moves 1000 bytes from byte 2000 of these pages on; whether each was moved.
    fn go(&mut self, direction: Direction, refs: &[GrantRef]) -> Vec<bool> {
        let whole = self.whole();
        let local = |i: usize| whole.slice(i * PAGE_SIZE, 1000);
        let mut segments: Vec<_> =
            refs.iter().enumerate().map(|(i, r)| CopySegment::new(local(i), *r, 2000)).collect();
        self.link.copy(&self.arena, direction, &mut segments).unwrap();
        segments.iter().map(CopySegment::is_ok).collect()
    }

    /// Moves many segments each way, one of them bad, and looks at every byte.
    fn check_each_way(&mut self) {
        let bad = 300;
        let mut refs: Vec<GrantRef> = (0..500).map(|i| self.pages.refs()[i % PAGES]).collect();
        refs[bad] = NO_SUCH_REF;
        self.arena.fill(self.whole(), 0xEE);
        let moved = self.go(Direction::FromGuest, &refs);
        assert!(moved.iter().enumerate().all(|(i, ok)| *ok == (i != bad)), "{moved:?}");
        for i in 0..refs.len() {
            let mut got = [0; 1001];
            self.arena.copy_out(self.whole().slice(i * PAGE_SIZE, 1001), &mut got);
            let from = i % PAGES * PAGE_SIZE + 2000;
            let expected = |k| if i == bad { 0xEE } else { pattern(from + k) };
            assert!((0..1000).all(|k| got[k] == expected(k)) && got[1000] == 0xEE, "segment {i}");
        }
        self.arena.fill(self.whole(), 0x5A);
        let moved = self.go(Direction::ToGuest, &refs[..PAGES]);
        assert!(moved.into_iter().all(|ok| ok));
        for at in 0..self.pages.len() {
            let is_moved = (2000..3000).contains(&(at % PAGE_SIZE));
            let expected = if is_moved { 0x5A } else { pattern(at) };
            assert_eq!(self.pages.get(at), expected, "byte {at}");
        }
    }
}

fn pattern(at: usize) -> u8 {
    (at / 512 % 251) as u8
}

/// Whether this process has pages of a guest mapped beside the ring's.
fn mapped_pages() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("xen/gntdev")).count() - 1
}

#[test]
#[ignore = "needs a Xen control domain"]
fn pages_mapped_for_a_batch_are_exact_and_gone_afterwards() {
    let mut s = Scene::new(Mover::Map, 4096, true);
    s.check_each_way();
    assert_eq!(mapped_pages(), 0);
    let counts = s.maps.counts();
    // The batch with the bad reference was copied.
    assert!(counts.misses > 250 && (1..=256).contains(&counts.fallbacks), "{counts}");
}

#[test]
#[ignore = "needs a Xen control domain"]
fn pages_that_stay_mapped_are_exact_and_mapped_once() {
    let mut s = Scene::new(Mover::Persistent, 4096, true);
    s.check_each_way();
    assert_eq!(mapped_pages(), PAGES);
    assert_eq!(s.maps.counts().mapped, PAGES as u64);
    drop(s.link);
    let counts = s.maps.counts();
    assert_eq!((counts.mapped, counts.misses, counts.fallbacks), (0, PAGES as u64, 1), "{counts}");
    assert_eq!(counts.hits, 499, "{counts}");
}

#[test]
#[ignore = "needs a Xen control domain"]
fn read_only_pages_can_be_read_and_not_written_by_any_mover() {
    for mover in [Mover::Map, Mover::Persistent] {
        let mut s = Scene::new(mover, 4096, false);
        let refs = s.pages.refs()[..2].to_vec();
        assert_eq!(s.go(Direction::FromGuest, &refs), [true; 2]);
        assert_eq!(s.go(Direction::ToGuest, &refs), [false; 2]);
    }
}

#[test]
#[ignore = "needs a Xen control domain"]
fn without_a_budget_everything_is_copied() {
    for mover in [Mover::Map, Mover::Persistent] {
        let mut s = Scene::new(mover, 0, true);
        s.check_each_way();
        assert_eq!((mapped_pages(), s.maps.counts().misses), (0, 0));
    }
}
