use std::time::Duration;

use ferrite_io::arena::Span;

use super::*;
use crate::GuestOptions;
use crate::grants::GNTST_BAD_PAGE;
use ferrite_xen::hypervisor::{
    GNTST_BAD_GNTREF, GNTST_GENERAL_ERROR, GNTST_OKAY, PAGE_SIZE, STATUS_UNTOUCHED,
};

const DOMID: DomId = DomId(7);

/// One guest, attached on both sides, with ring pages 1 and 2 granted as references 10 and 11.
struct World {
    loopback: Loopback,
    guest: GuestHandle,
    front: GuestMemory,
    port: u32,
}

impl World {
    fn new(copy_with: CopyWith) -> World {
        let options = GuestOptions { frames: 64, grants: 64, ports: 4 };
        let guest = GuestHandle::create(DOMID, options).unwrap();
        let front = guest.map().unwrap();
        front.announce_frontend();
        let port = front.open_port().unwrap();
        front.grants().grant(GrantRef(10), BACKEND_DOMID, 2, false);
        front.grants().grant(GrantRef(11), BACKEND_DOMID, 1, false);
        let loopback = Loopback::new(copy_with);
        loopback.add(&guest).unwrap();
        World { loopback, guest, front, port }
    }

    fn connect(&self) -> Result<Box<dyn Link>, HypervisorError> {
        self.loopback.connect(DOMID, &[GrantRef(10), GrantRef(11)], self.port, &Moving::copy())
    }

    fn put(&self, frame: u32, byte: u8) {
        // SAFETY: a whole frame that is not used at the moment.
        unsafe { self.front.frame(frame).write_bytes(byte, PAGE_SIZE) };
    }

    fn byte(&self, frame: u32, at: usize) -> u8 {
        assert!(at < PAGE_SIZE);
        // SAFETY: inside the frame, which is not written at the moment.
        unsafe { self.front.frame(frame).add(at).read() }
    }
}

const BOTH: [CopyWith; 2] = [CopyWith::Memcpy, CopyWith::ProcessVm];

fn span(arena: &Arena, page: usize) -> Span {
    arena.span(page * PAGE_SIZE, PAGE_SIZE)
}

fn is_readable(link: &dyn Link) -> bool {
    let mut fds =
        [rustix::event::PollFd::from_borrowed_fd(link.event_fd(), rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        == 1
}

#[test]
fn ring_pages_appear_in_the_order_of_their_references() {
    let world = World::new(CopyWith::Memcpy);
    world.put(1, 0x11);
    world.put(2, 0x22);
    let link = world.connect().unwrap();
    let ring = link.ring();
    assert_eq!(ring.len(), 2 * PAGE_SIZE);
    // SAFETY: both pages are mapped, and no thread writes them now.
    let (first, second) =
        unsafe { (ring.base().read_volatile(), ring.base().add(PAGE_SIZE).read_volatile()) };
    assert_eq!((first, second), (0x22, 0x11), "reference 10 is frame 2");
}

#[test]
fn a_mapped_ring_cannot_be_taken_back_until_the_link_is_gone() {
    let world = World::new(CopyWith::Memcpy);
    let link = world.connect().unwrap();
    assert!(world.front.grants().revoke(GrantRef(10)).is_err());
    drop(link);
    assert_eq!(world.front.grants().revoke(GrantRef(10)), Ok(()));
    assert_eq!(world.front.grants().users(), 0);
}

#[test]
fn bad_ring_references_are_the_guests_fault_and_leave_nothing_behind() {
    let world = World::new(CopyWith::Memcpy);
    world.front.grants().grant(GrantRef(12), BACKEND_DOMID, 1, true);
    world.front.grants().grant(GrantRef(13), BACKEND_DOMID, 64, false);
    world.front.grants().grant(GrantRef(14), DomId(9), 1, false);
    for bad in [0, 12, 13, 14, 64, u32::MAX] {
        let outcome = world.loopback.connect(
            DOMID,
            &[GrantRef(10), GrantRef(bad)],
            world.port,
            &Moving::copy(),
        );
        assert!(matches!(outcome, Err(HypervisorError::Guest { .. })), "reference {bad}");
        assert_eq!(world.front.grants().users(), 0, "after reference {bad}");
    }
    for refs in [&[][..], &[GrantRef(10); 17]] {
        assert!(world.loopback.connect(DOMID, refs, world.port, &Moving::copy()).is_err());
    }
    for port in [world.port + 1, 4, u32::MAX] {
        assert!(
            world.loopback.connect(DOMID, &[GrantRef(10)], port, &Moving::copy()).is_err(),
            "port {port}"
        );
    }
    assert!(
        world.loopback.connect(DomId(8), &[GrantRef(10)], world.port, &Moving::copy()).is_err()
    );
    assert_eq!((world.front.grants().users(), world.front.bound_ports()), (0, 0));
    assert!(world.connect().is_ok());
}

#[test]
fn a_port_serves_one_queue_and_rebinding_makes_it_pending() {
    let world = World::new(CopyWith::Memcpy);
    let mut link = world.connect().unwrap();
    assert!(link.take_event().unwrap(), "pending from the start");
    assert!(matches!(world.connect(), Err(HypervisorError::Guest { .. })));
    drop(link);
    let mut link = world.connect().unwrap();
    assert!(is_readable(&*link) && link.take_event().unwrap());
}

#[test]
fn events_are_held_back_and_merged_until_the_link_is_rearmed() {
    let world = World::new(CopyWith::Memcpy);
    let mut link = world.connect().unwrap();
    let send = || {
        let fd = world.guest.descriptors().to_back(world.port);
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    };
    assert!(link.take_event().unwrap());
    send();
    send();
    assert!(!link.take_event().unwrap(), "held back");
    link.rearm().unwrap();
    assert!(is_readable(&*link));
    assert!(link.take_event().unwrap());
    link.rearm().unwrap();
    assert!(!link.take_event().unwrap(), "the two were merged");
    assert!(!is_readable(&*link));
}

#[test]
fn a_notification_reaches_the_frontend_and_a_full_counter_is_no_error() {
    let world = World::new(CopyWith::Memcpy);
    let mut link = world.connect().unwrap();
    let fd = world.guest.descriptors().to_front(world.port);
    rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    link.notify().unwrap();
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(fd, &mut count), Ok(8));
    link.notify().unwrap();
    assert_eq!(rustix::io::read(fd, &mut count), Ok(8));
    assert_eq!(u64::from_ne_bytes(count), 1);
}

#[test]
fn copies_go_both_ways_and_touch_only_their_bytes() {
    for with in BOTH {
        let world = World::new(with);
        let mut link = world.connect().unwrap();
        let arena = Arena::new(PAGE_SIZE * 4).unwrap();
        world.front.grants().grant(GrantRef(20), BACKEND_DOMID, 30, false);
        world.put(30, 0xAA);

        arena.fill(span(&arena, 0), 0x55);
        let piece = span(&arena, 0).slice(0, 512);
        let mut out = [CopySegment::new(piece, GrantRef(20), 1024)];
        link.copy(&arena, Direction::ToGuest, &mut out).unwrap();
        assert_eq!(out[0].status, GNTST_OKAY, "{with}");
        let seen: Vec<u8> = [1023, 1024, 1535, 1536].map(|at| world.byte(30, at)).to_vec();
        assert_eq!(seen, [0xAA, 0x55, 0x55, 0xAA], "{with}");

        let mut back = [CopySegment::new(span(&arena, 1), GrantRef(20), 0)];
        link.copy(&arena, Direction::FromGuest, &mut back).unwrap();
        let mut bytes = [0; PAGE_SIZE];
        arena.copy_out(span(&arena, 1), &mut bytes);
        assert_eq!((bytes[1023], bytes[1024], bytes[4095]), (0xAA, 0x55, 0xAA), "{with}");
        assert_eq!(world.front.grants().users(), 2, "the two ring pages only");
    }
}

#[test]
fn each_segment_gets_the_status_of_its_own_grant() {
    for with in BOTH {
        let world = World::new(with);
        let mut link = world.connect().unwrap();
        let arena = Arena::new(PAGE_SIZE * 8).unwrap();
        let grants = world.front.grants();
        grants.grant(GrantRef(20), BACKEND_DOMID, 30, false);
        grants.grant(GrantRef(21), BACKEND_DOMID, 31, true);
        grants.grant(GrantRef(22), BACKEND_DOMID, 64, false);
        grants.grant(GrantRef(23), DomId(5), 31, false);
        let refs = [20, 21, 22, 23, 24, 0, u32::MAX, 20];
        let expected = [
            GNTST_OKAY,
            GNTST_GENERAL_ERROR, // read-only
            GNTST_BAD_PAGE,
            GNTST_GENERAL_ERROR, // another domain's
            GNTST_GENERAL_ERROR, // never granted
            GNTST_GENERAL_ERROR,
            GNTST_BAD_GNTREF,
            GNTST_OKAY,
        ];
        let segment =
            |(page, gref): (usize, u32)| CopySegment::new(span(&arena, page), GrantRef(gref), 0);
        let mut segments: Vec<_> = refs.into_iter().enumerate().map(segment).collect();
        assert!(segments.iter().all(|s| s.status == STATUS_UNTOUCHED));
        link.copy(&arena, Direction::ToGuest, &mut segments).unwrap();
        let got: Vec<i16> = segments.iter().map(|s| s.status).collect();
        assert_eq!(got, expected, "{with}");

        // A read-only frame may be read.
        let mut segments = [segment((0, 21))];
        link.copy(&arena, Direction::FromGuest, &mut segments).unwrap();
        assert_eq!(segments[0].status, GNTST_OKAY);
        assert_eq!(grants.users(), 2);
    }
}

#[test]
fn process_vm_copies_more_than_one_call_takes() {
    let world = World::new(CopyWith::ProcessVm);
    let mut link = world.connect().unwrap();
    let arena = Arena::new(PAGE_SIZE * 2500).unwrap();
    world.front.grants().grant(GrantRef(20), BACKEND_DOMID, 30, false);
    world.put(30, 0x77);
    let mut segments: Vec<_> =
        (0..2500).map(|i| CopySegment::new(span(&arena, i), GrantRef(20), 0)).collect();
    link.copy(&arena, Direction::FromGuest, &mut segments).unwrap();
    assert!(segments.iter().all(CopySegment::is_ok));
    let mut bytes = [0; PAGE_SIZE];
    arena.copy_out(span(&arena, 2499), &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0x77));
}

#[test]
fn a_process_vm_copy_goes_on_behind_a_page_that_is_not_there() {
    let world = World::new(CopyWith::ProcessVm);
    let arena = Arena::new(PAGE_SIZE * 4).unwrap();
    for i in 0..4 {
        world.front.grants().grant(GrantRef(20 + i), BACKEND_DOMID, 30 + i, false);
    }
    // As a hostile frontend can: its process has no memory at the announced address.
    let flags = rustix::mm::MprotectFlags::empty();
    // SAFETY: frame 31 is not used through this mapping any more.
    unsafe { rustix::mm::mprotect(world.front.frame(31).as_ptr().cast(), PAGE_SIZE, flags) }
        .unwrap();
    let mut link = world.connect().unwrap();
    for direction in [Direction::FromGuest, Direction::ToGuest] {
        let segment = |i| CopySegment::new(span(&arena, i), GrantRef(20 + i as u32), 0);
        let mut segments: Vec<_> = (0..4).map(segment).collect();
        link.copy(&arena, direction, &mut segments).unwrap();
        let got: Vec<i16> = segments.iter().map(|s| s.status).collect();
        assert_eq!(got, [GNTST_OKAY, GNTST_GENERAL_ERROR, GNTST_OKAY, GNTST_OKAY]);
    }
    assert_eq!(world.front.grants().users(), 2);
}

#[test]
fn a_frame_that_is_revoked_during_copies_is_copied_or_refused() {
    for with in BOTH {
        let world = World::new(with);
        let mut link = world.connect().unwrap();
        let arena = Arena::new(PAGE_SIZE).unwrap();
        std::thread::scope(|s| {
            let front = &world.front;
            let toggler = s.spawn(move || {
                let mut taken_back = 0;
                for _ in 0..300 {
                    front.grants().grant(GrantRef(20), BACKEND_DOMID, 30, false);
                    std::thread::yield_now();
                    while front.grants().revoke(GrantRef(20)).is_err() {
                        std::thread::yield_now();
                    }
                    taken_back += 1;
                }
                taken_back
            });
            while !toggler.is_finished() {
                let mut segments = [CopySegment::new(span(&arena, 0), GrantRef(20), 0)];
                link.copy(&arena, Direction::ToGuest, &mut segments).unwrap();
                assert!(matches!(segments[0].status, GNTST_OKAY | GNTST_GENERAL_ERROR));
                std::thread::yield_now();
            }
            assert_eq!(toggler.join().unwrap(), 300);
        });
        assert_eq!(world.front.grants().users(), 2);
    }
}

#[test]
fn a_guest_whose_backend_died_can_be_served_again() {
    let world = World::new(CopyWith::Memcpy);
    let link = world.connect().unwrap();
    // The state that a killed process leaves: pages in use, a bound port, an owner that has ended.
    std::mem::forget(link);
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    let pid = gone.id();
    world.front.owner().store(u64::from(pid) << 32 | 2, Ordering::Release);
    // It has ended by the time its output is closed; a zombie serves no guest.
    while is_running(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let next = Loopback::new(CopyWith::Memcpy);
    next.add(&world.guest).unwrap();
    gone.wait().unwrap();
    assert_eq!((world.front.grants().users(), world.front.bound_ports()), (0, 0));
    assert!(next.connect(DOMID, &[GrantRef(10)], world.port, &Moving::copy()).is_ok());
}

#[test]
fn a_guest_that_a_living_process_serves_is_busy() {
    let world = World::new(CopyWith::Memcpy);
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    world.front.owner().store(u64::from(other.id()) << 32 | 1, Ordering::Release);
    let outcome = Loopback::new(CopyWith::Memcpy).add(&world.guest);
    assert!(matches!(outcome, Err(LoopbackError::Busy { pid, .. }) if pid == other.id()));
    other.kill().unwrap();
    other.wait().unwrap();
}
