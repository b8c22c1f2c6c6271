//! Both ends in one thread, step by step: a [`FrontQueue`] and a [`BackRing`] over a link.

use std::time::Duration;

use ferrite_io::arena::{Arena, Span};

use super::*;
use crate::{CopyWith, GuestOptions, Loopback};
use ferrite_xen::abi::{
    IndirectOp, Message, OP_INDIRECT, OP_READ, OP_WRITE, PlainOp, RawSegment, Request, Response,
    STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY, Slot,
};
use ferrite_xen::hypervisor::{CopySegment, Direction, DomId, GrantRef, Hypervisor, PAGE_SIZE};
use ferrite_xen::mover::Moving;
use ferrite_xen::ring::BackRing;

const DOMID: DomId = DomId(3);
const SOON: Duration = Duration::from_millis(20);

struct World {
    loopback: Loopback,
    space: Arc<GuestSpace>,
    queue: FrontQueue,
    back: BackRing,
}

fn options() -> QueueOptions {
    QueueOptions {
        protocol: Protocol::X86_64,
        order: 0,
        max_indirect: 256,
        id_bits: 0,
        regrant: false,
        check_release: true,
        persistent: false,
    }
}

impl World {
    fn new(options: QueueOptions) -> World {
        let size = GuestOptions { frames: 2048, grants: 4096, ports: 4 };
        let guest = GuestHandle::create(DOMID, size).unwrap();
        let loopback = Loopback::new(CopyWith::Memcpy);
        loopback.add(&guest).unwrap();
        let space = GuestSpace::attach(&guest).unwrap();
        let queue = FrontQueue::new(&space, options).unwrap();
        let link =
            loopback.connect(DOMID, queue.ring_grefs(), queue.port(), &Moving::copy()).unwrap();
        let back = BackRing::attach(link, options.protocol).unwrap();
        World { loopback, space, queue, back }
    }

    /// The next request, as the backend sees it.
    fn receive(&mut self, protocol: Protocol) -> Request {
        assert!(self.back.unconsumed().unwrap() > 0, "no request");
        let request = Request::decode(protocol, &self.back.peek());
        self.back.consume();
        request
    }

    fn answer(&mut self, id: u64, operation: u8, status: i16) {
        self.back.respond(Response { id, operation, status });
        self.back.publish();
    }
}

#[test]
fn requests_arrive_as_they_were_made_in_both_layouts() {
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        for order in [0, 1, 4] {
            let mut w = World::new(QueueOptions { protocol, order, ..options() });
            assert_eq!(w.queue.entries(), 32 << order);
            let buffer = w.space.buffer(2).unwrap();
            // More than once around the ring, so that slots on every page are used.
            for i in 0..2 * w.queue.entries() as u64 {
                let tag = w.queue.read(i, &buffer, 512, 4096).unwrap();
                w.queue.push().unwrap();
                let request = w.receive(protocol);
                let Message::Plain { op: PlainOp::Read, nr_segments: 2, sector, segments } =
                    request.message
                else {
                    panic!("{request:?}")
                };
                assert_eq!(sector, i);
                assert_eq!(segments[..2], [buffer.segment(0, 1, 7), buffer.segment(1, 0, 0)]);
                w.answer(request.id, OP_READ, STATUS_OKAY);
                let reply = w.queue.next_reply(SOON).unwrap();
                assert_eq!((reply.tag, reply.status), (tag, STATUS_OKAY));
            }
        }
    }
}

#[test]
fn ids_can_look_like_kernel_addresses() {
    let id_bits = FrontOptions::windows().id_bits;
    let mut w = World::new(QueueOptions { id_bits, ..options() });
    let tag = w.queue.flush().unwrap();
    w.queue.push().unwrap();
    let request = w.receive(Protocol::X86_64);
    assert_eq!(request.id, id_bits ^ u64::from(tag.0));
    w.answer(request.id, request.response_op, STATUS_ERROR);
    assert_eq!(w.queue.take().unwrap().map(|r| (r.tag, r.is_ok())), Some((tag, false)));
}

#[test]
fn a_large_transfer_is_indirect_and_its_descriptors_are_on_granted_pages() {
    let mut w = World::new(options());
    let buffer = w.space.buffer(256).unwrap();
    w.queue.write(64, &buffer, 0, 256 * PAGE_SIZE).unwrap();
    w.queue.push().unwrap();
    let request = w.receive(Protocol::X86_64);
    let Message::Indirect { op: IndirectOp::Write, nr_segments: 256, sector: 64, pages } =
        request.message
    else {
        panic!("{request:?}")
    };
    let arena = Arena::new(PAGE_SIZE).unwrap();
    let page = arena.span(0, PAGE_SIZE);
    let mut copy = [CopySegment::new(page, pages[0], 0)];
    w.back.link().copy(&arena, Direction::ToGuest, &mut copy).unwrap();
    assert!(!copy[0].is_ok(), "descriptors are read-only");
    w.back.link().copy(&arena, Direction::FromGuest, &mut copy).unwrap();
    assert!(copy[0].is_ok());
    for i in [0, 1, 255] {
        assert_eq!(descriptor(&arena, page, i), buffer.segment(i, 0, 7));
    }
    // Rule 1: an INDIRECT request is answered with its inner operation.
    w.answer(request.id, OP_WRITE, STATUS_OKAY);
    assert!(w.queue.next_reply(SOON).unwrap().is_ok());
    let limit = w.queue.read(0, &w.space.buffer(257).unwrap(), 0, 257 * PAGE_SIZE);
    assert!(matches!(limit, Err(FrontError::TooManySegments { segments: 257, limit: 256 })));
}

fn descriptor(arena: &Arena, page: Span, i: usize) -> RawSegment {
    let mut bytes = [0; 8];
    arena.copy_out(page.slice(8 * i, 8), &mut bytes);
    RawSegment::decode(&bytes)
}

#[test]
fn each_breach_of_the_protocol_is_found() {
    /// Makes one request and answers it with `id + id_off`, `operation`, `status`.
    fn outcome(id_off: u64, operation: u8, status: i16) -> Result<Reply, FrontError> {
        let mut w = World::new(options());
        let buffer = w.space.buffer(16).unwrap();
        w.queue.read(0, &buffer, 0, 16 * PAGE_SIZE).unwrap();
        w.queue.push().unwrap();
        let id = w.receive(Protocol::X86_64).id + id_off;
        w.answer(id, operation, status);
        w.queue.next_reply(SOON)
    }
    assert!(outcome(0, OP_READ, STATUS_OKAY).is_ok());
    assert!(matches!(
        outcome(0, OP_INDIRECT, STATUS_OKAY),
        Err(FrontError::WrongOperation { got: OP_INDIRECT, expected: OP_READ, .. })
    ));
    assert!(matches!(outcome(1, OP_READ, STATUS_OKAY), Err(FrontError::NotPending { id: 1 })));
    assert!(matches!(outcome(1 << 40, OP_READ, 0), Err(FrontError::NotPending { .. })));
    assert!(matches!(
        outcome(0, OP_READ, STATUS_NOT_SUPPORTED),
        Err(FrontError::NotSupported { operation: OP_READ })
    ));
}

#[test]
fn an_answer_given_twice_is_found() {
    let mut w = World::new(options());
    w.queue.flush().unwrap();
    w.queue.flush().unwrap();
    w.queue.push().unwrap();
    let request = w.receive(Protocol::X86_64);
    w.receive(Protocol::X86_64);
    w.answer(request.id, request.response_op, STATUS_OKAY);
    w.answer(request.id, request.response_op, STATUS_OKAY);
    assert!(w.queue.take().is_ok());
    assert!(matches!(w.queue.take(), Err(FrontError::NotPending { .. })));
}

#[test]
fn more_responses_than_requests_are_found() {
    let mut w = World::new(options());
    w.queue.flush().unwrap();
    w.queue.push().unwrap();
    w.queue.flush().unwrap(); // not shown to the backend yet
    w.queue.ring().store(RingWord::RspProd, 2);
    assert!(matches!(
        w.queue.take(),
        Err(FrontError::BogusProducer { rsp_prod: 2, rsp_cons: 0, req_prod: 1 })
    ));
}

#[test]
fn a_response_before_the_pages_are_released_is_found() {
    for regrant in [false, true] {
        let mut w = World::new(QueueOptions { regrant, ..options() });
        let buffer = w.space.buffer(1).unwrap();
        w.queue.read(0, &buffer, 0, PAGE_SIZE).unwrap();
        w.queue.push().unwrap();
        let request = w.receive(Protocol::X86_64);
        let Message::Plain { segments, .. } = request.message else { panic!() };
        // Maps the data page, as a mapping backend does.
        let port = w.space.memory().open_port().unwrap();
        let mapping = w
            .loopback
            .connect(DOMID, &[GrantRef(segments[0].gref)], port, &Moving::copy())
            .unwrap();
        w.answer(request.id, OP_READ, STATUS_OKAY);
        assert!(matches!(w.queue.take(), Err(FrontError::StillUsed { .. })), "{regrant}");
        drop(mapping);
    }
}

#[test]
fn regranting_grants_for_one_request_only_and_leaks_nothing() {
    let mut w = World::new(QueueOptions { regrant: true, ..options() });
    let before = w.space.free_counts();
    let buffer = w.space.buffer(20).unwrap();
    for round in 0..200 {
        let pages = if round % 2 == 0 { 1 } else { 20 };
        w.queue.write(0, &buffer, 0, pages * PAGE_SIZE).unwrap();
        w.queue.push().unwrap();
        let request = w.receive(Protocol::X86_64);
        if let Message::Plain { segments, .. } = request.message {
            let gref = GrantRef(segments[0].gref);
            let arena = Arena::new(PAGE_SIZE).unwrap();
            let mut copy = [CopySegment::new(arena.span(0, PAGE_SIZE), gref, 0)];
            w.back.link().copy(&arena, Direction::FromGuest, &mut copy).unwrap();
            assert!(copy[0].is_ok());
            w.back.link().copy(&arena, Direction::ToGuest, &mut copy).unwrap();
            assert!(!copy[0].is_ok(), "what is to be written is granted for reading");
            w.answer(request.id, OP_WRITE, STATUS_OKAY);
            w.queue.next_reply(SOON).unwrap();
            w.back.link().copy(&arena, Direction::FromGuest, &mut copy).unwrap();
            assert!(!copy[0].is_ok(), "taken back with the response");
        } else {
            w.answer(request.id, OP_WRITE, STATUS_OKAY);
            w.queue.next_reply(SOON).unwrap();
        }
    }
    // One request is still in flight when the queue is dropped.
    w.queue.write(0, &buffer, 0, PAGE_SIZE).unwrap();
    drop(buffer);
    drop(w.back);
    w.queue.release().unwrap();
    let (frames, grants) = before;
    assert_eq!(w.space.free_counts(), (frames + 1, grants + 1), "the ring's page, too");
}

#[test]
fn the_backend_is_notified_only_when_it_asked() {
    let mut w = World::new(options());
    assert!(w.back.link().take_event().unwrap(), "pending since it was bound");
    w.back.link().rearm().unwrap();
    w.queue.flush().unwrap();
    assert!(w.queue.push().unwrap(), "req_event is 1 at first");
    assert!(w.back.link().take_event().unwrap());
    w.back.link().rearm().unwrap();
    w.queue.flush().unwrap();
    assert!(!w.queue.push().unwrap(), "it has not asked since");
    assert!(!w.back.link().take_event().unwrap());
    w.receive(Protocol::X86_64);
    w.receive(Protocol::X86_64);
    assert!(!w.back.final_check().unwrap());
    w.queue.flush().unwrap();
    assert!(w.queue.push().unwrap());
    assert!(!w.queue.push().unwrap(), "nothing new");
}

#[test]
fn waiting_ends_with_a_response_or_in_time() {
    let mut w = World::new(options());
    w.queue.flush().unwrap();
    w.queue.push().unwrap();
    assert!(!w.queue.wait(Duration::from_millis(5)).unwrap());
    assert!(matches!(
        w.queue.next_reply(Duration::from_millis(5)),
        Err(FrontError::Loopback(LoopbackError::Timeout { .. }))
    ));
    let request = w.receive(Protocol::X86_64);
    w.back.respond(Response {
        id: request.id,
        operation: request.response_op,
        status: STATUS_OKAY,
    });
    assert!(w.back.publish(), "the frontend asked for an event before it slept");
    w.back.link().notify().unwrap();
    assert!(w.queue.wait(SOON).unwrap());
    assert!(w.queue.take().unwrap().is_some());
}

#[test]
fn a_full_ring_takes_no_more() {
    let mut w = World::new(options());
    for _ in 0..w.queue.entries() {
        w.queue.flush().unwrap();
    }
    assert!(matches!(w.queue.flush(), Err(FrontError::Full { entries: 32 })));
    w.queue.push().unwrap();
    assert_eq!(w.back.unconsumed().unwrap(), 32);
}

#[test]
fn a_hostile_frontend_can_write_anything_anywhere() {
    let mut w = World::new(options());
    w.queue.raw_request(&Slot([0xA5; 112]));
    w.queue.push().unwrap();
    let request = w.receive(Protocol::X86_64);
    assert_eq!((request.message, request.response_op), (Message::Unknown, 0xA5));
    w.answer(request.id, 0xA5, STATUS_NOT_SUPPORTED);
    let (response, raw) = w.queue.take_raw().unwrap().unwrap();
    assert_eq!((response.id, response.operation), (0xA5A5_A5A5_A5A5_A5A5, 0xA5));
    assert_eq!((raw[9], &raw[12..]), (0, &[0; 4][..]), "the padding (T2)");
    let ring = w.queue.ring();
    ring.store(RingWord::ReqProd, 1 + 33);
    assert!(w.back.unconsumed().is_err());
    ring.poke(ring.len() - 1, &[7]);
    let mut last = [0];
    ring.peek(ring.len() - 1, &mut last);
    assert_eq!(last, [7]);
}

#[test]
fn a_ring_that_is_still_mapped_is_reported_and_not_used_again() {
    let w = World::new(options());
    let (frames, grants) = w.space.free_counts();
    let outcome = w.queue.release();
    assert!(matches!(outcome, Err(FrontError::StillMapped(_))));
    assert_eq!(w.space.free_counts(), (frames, grants));
}

#[test]
fn an_abandoned_queue_stays_granted() {
    let w = World::new(options());
    let (gref, port) = (w.queue.ring_grefs()[0], w.queue.port());
    w.queue.abandon();
    assert!(w.space.memory().grants().in_use(gref));
    drop(w.back);
    assert!(
        w.loopback.connect(DOMID, &[gref], port, &Moving::copy()).is_err(),
        "its port is closed"
    );
    let port = w.space.memory().open_port().unwrap();
    assert!(w.loopback.connect(DOMID, &[gref], port, &Moving::copy()).is_ok());
}
