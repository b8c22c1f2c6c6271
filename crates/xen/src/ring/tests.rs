use proptest::prelude::*;

use super::*;
use crate::abi::{Message, PlainOp, RING_HEADER_BYTES, RawSegment, Request};
use crate::bare::{BareLink, Front};
use crate::slots::{REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD};

/// Slots of a disk's ring.
trait Slots {
    fn put_slot(&self, protocol: Protocol, index: u32, entries: u32, slot: &Slot);
    fn slot(&self, protocol: Protocol, index: u32, entries: u32) -> Slot;
}

impl Slots for Front {
    fn put_slot(&self, protocol: Protocol, index: u32, entries: u32, slot: &Slot) {
        let bytes = protocol.slot_bytes();
        let at = RING_HEADER_BYTES + (index & (entries - 1)) as usize * bytes;
        self.write(at, &slot.0[..bytes]);
    }
    fn slot(&self, protocol: Protocol, index: u32, entries: u32) -> Slot {
        let bytes = protocol.slot_bytes();
        let at = RING_HEADER_BYTES + (index & (entries - 1)) as usize * bytes;
        let mut slot = Slot::default();
        self.read(at, &mut slot.0[..bytes]);
        slot
    }
}

fn read_request(id: u64) -> Request {
    let segments = [RawSegment::default(); 11];
    let message = Message::Plain { op: PlainOp::Read, nr_segments: 1, sector: id * 8, segments };
    Request { id, response_op: 0, message }
}

#[test]
fn a_producer_that_runs_ahead_or_backwards_stops_the_ring() {
    let (link, front) = BareLink::boxed(0);
    let mut ring = BackRing::attach(link, Protocol::X86_64).unwrap();
    front.set(REQ_PROD, 2);
    assert_eq!(ring.unconsumed(), Ok(2));
    ring.consume();
    ring.consume();
    for bogus in [33u32, 2 + (1 << 31), 1, 0u32.wrapping_sub(1)] {
        front.set(REQ_PROD, bogus);
        assert!(ring.unconsumed().is_err(), "{bogus}");
        assert!(ring.final_check().is_err(), "{bogus}");
    }
    front.set(REQ_PROD, 32);
    assert_eq!(ring.unconsumed(), Ok(30), "a full ring is legal");
}

#[test]
fn a_scribbled_response_producer_does_not_change_the_notify_decision() {
    let (link, front) = BareLink::boxed(0);
    let mut ring = BackRing::attach(link, Protocol::X86_64).unwrap();
    front.set(REQ_PROD, 1);
    ring.consume();
    ring.respond(Response { id: 1, operation: 0, status: 0 });
    front.set(RSP_PROD, 0xDEAD_BEEF);
    front.set(RSP_EVENT, 1);
    assert!(ring.publish(), "the guest asked for response 1");
    assert_eq!(front.get(RSP_PROD), 1);
    assert!(!ring.publish(), "nothing new");
}

#[test]
fn response_padding_holds_zeros() {
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        let (link, front) = BareLink::boxed(0);
        let mut ring = BackRing::attach(link, protocol).unwrap();
        front.put_slot(protocol, 0, 32, &Slot([0xA5; 112]));
        front.set(REQ_PROD, 1);
        ring.consume();
        ring.respond(Response { id: u64::MAX, operation: 3, status: -1 });
        let bytes = front.slot(protocol, 0, 32).0;
        assert_eq!(bytes[9], 0);
        let tail = if protocol == Protocol::X86_64 { 0 } else { 0xA5 };
        assert_eq!(bytes[12..16], [tail; 4], "written only where the structure has a tail");
    }
}

#[test]
fn final_check_asks_for_the_next_request() {
    let (link, front) = BareLink::boxed(0);
    let mut ring = BackRing::attach(link, Protocol::X86_64).unwrap();
    assert_eq!(ring.final_check(), Ok(false));
    assert_eq!(front.get(REQ_EVENT), 1);
    front.set(REQ_PROD, 1);
    assert_eq!(ring.final_check(), Ok(true));
}

#[test]
fn a_ring_resumes_where_its_predecessor_stood() {
    let (link, front) = BareLink::boxed(0);
    front.set(REQ_PROD, 7);
    front.set(RSP_PROD, 3);
    let ring = BackRing::resume(link, Protocol::X86_64, 5, 3).unwrap();
    assert_eq!(ring.unconsumed(), Ok(2));
    let (link, _front) = BareLink::boxed(0);
    assert!(BackRing::resume(link, Protocol::X86_64, 100, 3).is_err());
}

proptest! {
    /// Any interleaving of production, consumption and answers, over any order, protocol and
    /// start index (so also across the wrap), delivers each request once and in order.
    #[test]
    fn requests_and_responses_pass_in_order(
        order in 0u32..=4,
        x86_32: bool,
        start in prop_oneof![Just(0u32), Just(u32::MAX - 40), any::<u32>()],
        steps in proptest::collection::vec(0u8..3, 1..400),
    ) {
        let protocol = if x86_32 { Protocol::X86_32 } else { Protocol::X86_64 };
        let (link, front) = BareLink::boxed(order);
        front.set(REQ_PROD, start);
        front.set(RSP_PROD, start);
        let mut ring = BackRing::attach(link, protocol).unwrap();
        let entries = ring.entries();
        let (mut produced, mut taken, mut answered) = (0u32, 0u32, 0u32);
        for step in steps {
            match step {
                0 if produced - answered < entries => {
                    let request = read_request(u64::from(produced));
                    let at = start.wrapping_add(produced);
                    front.put_slot(protocol, at, entries, &request.encode(protocol));
                    produced += 1;
                    front.set(REQ_PROD, start.wrapping_add(produced));
                }
                1 if ring.unconsumed().unwrap() > 0 => {
                    let seen = Request::decode(protocol, &ring.peek());
                    prop_assert_eq!(seen, read_request(u64::from(taken)));
                    ring.consume();
                    taken += 1;
                }
                2 if answered < taken => {
                    ring.respond(Response { id: u64::from(answered), operation: 0, status: 0 });
                    ring.publish();
                    let at = start.wrapping_add(answered);
                    let response = Response::decode(&front.slot(protocol, at, entries));
                    prop_assert_eq!(response.id, u64::from(answered));
                    answered += 1;
                    prop_assert_eq!(front.get(RSP_PROD), start.wrapping_add(answered));
                }
                _ => {}
            }
            prop_assert_eq!(ring.unconsumed().unwrap(), produced - taken);
        }
    }
}
