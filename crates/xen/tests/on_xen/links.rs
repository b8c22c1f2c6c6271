//! Rings mapped, data copied, events sent.

use std::time::Duration;

use ferrite_io::arena::Arena;
use ferrite_xen::hypervisor::{
    CopySegment, Direction, DomId, GrantRef, Hypervisor, HypervisorError, Link, PAGE_SIZE,
};
use ferrite_xen::mover::Moving;
use ferrite_xen::real::{Restriction, Xen};

use crate::own_domain::{OWN, Pages, Port, is_readable};

const SOON: Duration = Duration::from_secs(5);
const NEVER: Duration = Duration::from_millis(200);
const NO_SUCH_REF: GrantRef = GrantRef(0xFFFF_FFF0);

fn connect(ring: &[GrantRef], port: &Port) -> Box<dyn Link> {
    Xen::new().connect(OWN, ring, port.number, &Moving::copy()).unwrap()
}

/// The byte that `Pages` hold at `at` before a copy writes them.
fn pattern(at: usize) -> u8 {
    (at / 512 % 251) as u8
}

fn patterned(pages: usize) -> Pages {
    let pages = Pages::new(pages, true);
    (0..pages.len()).for_each(|at| pages.set(at, pattern(at)));
    pages
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_ring_is_mapped_in_its_order_and_shared_both_ways() {
    let pages = Pages::new(4, true);
    (0..4).for_each(|p| pages.set(p * PAGE_SIZE, p as u8));
    let order = [2, 0, 3, 1];
    let refs = order.map(|p| pages.refs()[p]);
    let port = Port::new();
    let link = connect(&refs, &port);
    let ring = link.ring();
    assert_eq!(ring.len(), 4 * PAGE_SIZE);
    for (at, page) in order.into_iter().enumerate() {
        // SAFETY: within the ring, which is mapped while the link lives.
        let byte = unsafe { ring.base().add(at * PAGE_SIZE).read_volatile() };
        assert_eq!(usize::from(byte), page);
    }
    // SAFETY: as above.
    unsafe { ring.base().add(PAGE_SIZE + 5).write_volatile(b'!') };
    assert_eq!(pages.get(5), b'!');
}

#[test]
#[ignore = "needs a Xen control domain"]
fn events_are_pending_at_first_held_back_while_taken_and_merged() {
    let ring = Pages::new(1, true);
    let port = Port::new();
    let mut link = connect(ring.refs(), &port);
    assert!(is_readable(link.event_fd(), SOON) && link.take_event().unwrap());
    assert!(!link.take_event().unwrap());

    port.notify();
    port.notify();
    assert!(!is_readable(link.event_fd(), NEVER) && !link.take_event().unwrap());
    link.rearm().unwrap();
    assert!(is_readable(link.event_fd(), SOON) && link.take_event().unwrap());
    link.rearm().unwrap();
    link.rearm().unwrap();
    assert!(!is_readable(link.event_fd(), NEVER) && !link.take_event().unwrap());

    while port.take() {}
    link.notify().unwrap();
    assert!(is_readable(&port, SOON) && port.take());
    drop(port);
    link.notify().unwrap();
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_batch_of_copies_is_exact_and_each_bad_reference_fails_alone() {
    let (ring, port, pages) = (Pages::new(1, true), Port::new(), patterned(32));
    let mut link = connect(ring.refs(), &port);
    // More than one batch of the kernel's call.
    let arena = Arena::new(700 * PAGE_SIZE).unwrap();
    let whole = arena.span(0, arena.len());
    arena.fill(whole, 0xEE);
    let guest_at = |i: usize| (i % 32 * PAGE_SIZE, i / 32 % 4 * 1024);
    let bad = [10, 600];
    let mut segments: Vec<CopySegment> = (0..700)
        .map(|i| {
            let gref = if bad.contains(&i) { NO_SUCH_REF } else { pages.refs()[i % 32] };
            let local = whole.slice(i * PAGE_SIZE, 1024);
            CopySegment::new(local, gref, guest_at(i).1 as u16)
        })
        .collect();
    link.copy(&arena, Direction::FromGuest, &mut segments).unwrap();

    for (i, segment) in segments.iter().enumerate() {
        assert_eq!(segment.is_ok(), !bad.contains(&i), "segment {i}: {}", segment.status);
        let mut got = [0; 1025];
        arena.copy_out(whole.slice(i * PAGE_SIZE, 1025), &mut got);
        let (page, offset) = guest_at(i);
        for (k, byte) in got.into_iter().enumerate() {
            let is_copied = segment.is_ok() && k < 1024;
            let expected = if is_copied { pattern(page + offset + k) } else { 0xEE };
            assert_eq!(byte, expected, "segment {i}, byte {k}");
        }
    }
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_copy_to_the_guest_touches_its_bytes_only() {
    let (ring, port, pages) = (Pages::new(1, true), Port::new(), patterned(32));
    let mut link = connect(ring.refs(), &port);
    let arena = Arena::new(1 << 20).unwrap();
    let whole = arena.span(0, arena.len());
    arena.fill(whole, 0x5A);
    // Local sides that cross pages, guest sides at odd offsets.
    let mut segments: Vec<CopySegment> = (0..32)
        .map(|i| CopySegment::new(whole.slice(i * 5000 + 3000, 2000), pages.refs()[i], 1001))
        .collect();
    link.copy(&arena, Direction::ToGuest, &mut segments).unwrap();
    assert!(segments.iter().all(CopySegment::is_ok));
    for at in 0..pages.len() {
        let is_copied = (1001..3001).contains(&(at % PAGE_SIZE));
        assert_eq!(pages.get(at), if is_copied { 0x5A } else { pattern(at) }, "byte {at}");
    }
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_read_only_grant_can_be_read_and_not_written() {
    let (ring, port, pages) = (Pages::new(1, true), Port::new(), Pages::new(1, false));
    let mut link = connect(ring.refs(), &port);
    let arena = Arena::new(PAGE_SIZE).unwrap();
    let mut segments = [CopySegment::new(arena.span(0, 512), pages.refs()[0], 0)];
    link.copy(&arena, Direction::ToGuest, &mut segments).unwrap();
    assert!(!segments[0].is_ok());
    link.copy(&arena, Direction::FromGuest, &mut segments).unwrap();
    assert!(segments[0].is_ok(), "the status of an earlier copy must not stay");

    let second = Port::new();
    let mapped = Xen::new().connect(OWN, pages.refs(), second.number, &Moving::copy());
    assert!(matches!(mapped.err(), Some(HypervisorError::Guest { .. })));
}

#[test]
#[ignore = "needs a Xen control domain"]
fn what_the_guest_got_wrong_is_its_fault_and_leaves_nothing_behind() {
    let ring = Pages::new(2, true);
    let port = Port::new();
    let xen = Xen::new();
    let refs = ring.refs();
    let attempts = [
        (OWN, vec![NO_SUCH_REF], port.number),
        (OWN, vec![refs[0], NO_SUCH_REF], port.number),
        (OWN, refs.to_vec(), 3999),
        (DomId(0x7000), refs.to_vec(), port.number),
    ];
    for (domid, refs, port) in &attempts {
        let error = xen.connect(*domid, refs, *port, &Moving::copy()).err();
        assert!(matches!(error, Some(HypervisorError::Guest { .. })), "{refs:?}: {error:?}");
    }
    let link = xen.connect(OWN, refs, port.number, &Moving::copy()).unwrap();
    let bound_twice = xen.connect(OWN, refs, port.number, &Moving::copy()).err();
    assert!(matches!(bound_twice, Some(HypervisorError::Guest { .. })), "{bound_twice:?}");
    drop(link);
    // The kernel restricts channels to guests only.
    assert_eq!(xen.restriction(), Restriction::Refused);
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_link_can_be_made_again_any_number_of_times() {
    let ring = Pages::new(4, true);
    let port = Port::new();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for round in 0..300 {
        let mut link = connect(ring.refs(), &port);
        assert!(is_readable(link.event_fd(), SOON), "round {round}");
        assert!(link.take_event().unwrap());
        if round % 2 == 0 {
            link.rearm().unwrap();
        }
        drop(link);
        assert!(Xen::new().connect(OWN, ring.refs(), 3999, &Moving::copy()).is_err());
    }
    assert_eq!(descriptors(), before);
}

#[test]
#[ignore = "needs a Xen control domain"]
fn devices_that_were_opened_ahead_serve_one_connection_after_the_other() {
    let xen = Xen::ahead(1).unwrap();
    for _ in 0..3 {
        let ring = Pages::new(2, true);
        let port = Port::new();
        let connect = || xen.connect(OWN, ring.refs(), port.number, &Moving::copy());
        let mut link = connect().unwrap();
        // SAFETY: within the ring, which is mapped while the link lives.
        unsafe { link.ring().base().write_volatile(b'!') };
        assert_eq!(ring.get(0), b'!');
        // Taken and not let through again: the next connection hears its own events all the same.
        assert!(is_readable(link.event_fd(), SOON) && link.take_event().unwrap());
        assert!(connect().is_err(), "both of its devices are in use");
        drop(link);
        // The guest's end is unbound, so it can be bound again; and its pages are let go of.
        let mut link = connect().unwrap();
        assert!(is_readable(link.event_fd(), SOON) && link.take_event().unwrap());
    }
}
