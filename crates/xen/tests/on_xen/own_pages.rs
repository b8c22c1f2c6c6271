//! Pages that this domain has granted to itself, as both ends of copies.

use std::fs;
use std::sync::Arc;

use ferrite_io::arena::{Arena, Lender, Span};
use ferrite_xen::hypervisor::{CopySegment, Direction, GrantRef, Hypervisor, PAGE_SIZE};
use ferrite_xen::mover::Moving;
use ferrite_xen::real::Xen;

use crate::own_domain::{OWN, Pages, Port};

/// Of all pages that this domain grants by the device.
const LIMIT: &str = "/sys/module/xen_gntalloc/parameters/limit";

/// Has another limit until it is dropped.
struct Limit(String);

impl Limit {
    fn set(pages: usize) -> Limit {
        let before = fs::read_to_string(LIMIT).unwrap();
        fs::write(LIMIT, pages.to_string()).unwrap();
        Limit(before)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        fs::write(LIMIT, &self.0).unwrap();
    }
}

fn lender() -> Box<dyn Lender> {
    Xen::new().with_own_grants().lender().unwrap()
}

fn pattern(at: usize) -> u8 {
    (at * 7 + at / 4096) as u8
}

fn lent(arena: &Arena) -> usize {
    (0..arena.len()).step_by(PAGE_SIZE).filter(|byte| arena.name(*byte).is_some()).count()
}

/// Own pages, with ordinary ones behind them.
fn arena(lender: &dyn Lender, pages: usize) -> (Arc<Arena>, Span) {
    let arena = Arena::new(1 << 20).unwrap();
    let all = arena.span(0, arena.len());
    lender.lend(&arena, all.slice(0, pages * PAGE_SIZE));
    (arena, all)
}

#[test]
#[ignore = "needs a Xen control domain"]
fn bytes_are_right_at_odd_offsets_across_own_pages() {
    let (ring, port, pages) = (Pages::new(1, true), Port::new(), Pages::new(32, true));
    (0..pages.len()).for_each(|at| pages.set(at, pattern(at)));
    let xen = Xen::new();
    let mut link = xen.connect(OWN, ring.refs(), port.number, &Moving::copy()).unwrap();
    let lender = lender();
    let (arena, all) = arena(&*lender, 16);
    assert_eq!(lent(&arena), 16);
    // From own pages into ordinary ones, with a bad reference among them.
    let bad = 7;
    let place = |i: usize| (i * 3001 + 513, 2500, i * 37 % 1500 + 1);
    let mut segments: Vec<CopySegment> = (0..32)
        .map(|i| {
            let (local, len, offset) = place(i);
            let gref = if i == bad { GrantRef(u32::MAX) } else { pages.refs()[i] };
            CopySegment::new(all.slice(local, len), gref, offset as u16)
        })
        .collect();
    arena.fill(all, 0xEE);
    link.copy(&arena, Direction::FromGuest, &mut segments).unwrap();
    let mut got = vec![0; arena.len()];
    arena.copy_out(all, &mut got);
    let mut expected = vec![0xEE; arena.len()];
    for (i, segment) in segments.iter().enumerate() {
        assert_eq!(segment.is_ok(), i != bad, "{i}: {}", segment.status);
        let (local, len, offset) = place(i);
        if i != bad {
            (0..len).for_each(|k| expected[local + k] = pattern(i * PAGE_SIZE + offset + k));
        }
    }
    assert!(got == expected);
    assert_eq!(lent(&arena), 16, "what was copied by its name is named still");

    // And back, to other places.
    for (i, segment) in segments.iter_mut().enumerate() {
        let (local, len, _) = place(i);
        *segment = CopySegment::new(all.slice(local, len), pages.refs()[i], 1001);
    }
    link.copy(&arena, Direction::ToGuest, &mut segments).unwrap();
    assert!(segments.iter().all(CopySegment::is_ok));
    for at in 0..pages.len() {
        let (i, k) = (at / PAGE_SIZE, at % PAGE_SIZE);
        let is_copied = (1001..3501).contains(&k);
        let byte = if is_copied { expected[place(i).0 + k - 1001] } else { pattern(at) };
        assert_eq!(pages.get(at), byte, "byte {at}");
    }
    lender.take_back(&arena, all);
    assert_eq!(lent(&arena), 0);
    arena.fill(all, 1);
}

#[test]
#[ignore = "needs a Xen control domain"]
fn pages_are_lent_up_to_the_limit_and_go_back() {
    let held = Pages::new(5, true);
    let limit = Limit::set(5 + 75);
    for round in 0..3 {
        let lender = lender();
        let (arena, all) = arena(&*lender, 100);
        assert_eq!(lent(&arena), 75, "round {round}");
        arena.fill(all, 1);
        match round {
            0 => {
                lender.take_back(&arena, all);
                lender.lend(&arena, all.slice(0, 100 * PAGE_SIZE));
                assert_eq!(lent(&arena), 75, "all went back");
            }
            // The order in which a pool is dropped, and the other one.
            1 => drop((arena, lender)),
            _ => drop((lender, arena)),
        }
    }
    drop(held);
    let none = Limit::set(0);
    let lender = lender();
    assert_eq!(lent(&arena(&*lender, 100).0), 0);
    drop(none);
    drop(limit);
}

#[test]
#[ignore = "needs a Xen control domain"]
fn the_doctor_finds_them() {
    let probe = ferrite_xen::real::probe();
    assert_eq!(probe.own_grants, Ok(()));
    assert!(probe.own_grants_limit.is_some());
}
