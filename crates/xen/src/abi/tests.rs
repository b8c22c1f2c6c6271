use proptest::prelude::*;

use super::*;

fn protocols() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::X86_64), Just(Protocol::X86_32)]
}

#[test]
fn rings_have_the_entries_that_the_headers_give() {
    // blkif.md 1.2, computed there by compiling the headers for both word sizes.
    for order in 0..=MAX_RING_ORDER {
        assert_eq!(Protocol::X86_64.entries(order), 32 << order);
        assert_eq!(Protocol::X86_32.entries(order), 32 << order);
    }
}

#[test]
fn a_missing_protocol_means_32_bit_x86() {
    assert_eq!(Protocol::from_key(None), Some(Protocol::X86_32));
    assert_eq!(Protocol::from_key(Some("x86_64-abi")), Some(Protocol::X86_64));
    assert_eq!(Protocol::from_key(Some("arm-abi")), None);
}

/// Offsets of blkif.md 1.3, written out by hand rather than taken from the code under test.
#[test]
fn fields_stand_where_the_headers_put_them() {
    for (protocol, id_at, sector_at, seg_at, gref_at) in
        [(Protocol::X86_64, 8, 16, 24, 28), (Protocol::X86_32, 4, 12, 20, 24)]
    {
        let mut slot = Slot::default();
        slot.0[0] = 1;
        slot.0[1] = 2;
        slot.0[id_at..id_at + 8].copy_from_slice(&0x1122_3344_5566_7788u64.to_le_bytes());
        slot.0[sector_at..sector_at + 8].copy_from_slice(&99u64.to_le_bytes());
        slot.0[seg_at + 8..seg_at + 14].copy_from_slice(&[7, 0, 0, 0, 3, 5]);
        let r = Request::decode(protocol, &slot);
        assert_eq!(r.id, 0x1122_3344_5566_7788);
        let Message::Plain { op: PlainOp::Write, nr_segments: 2, sector: 99, segments } = r.message
        else {
            panic!("{:?}", r.message)
        };
        assert_eq!(segments[1], RawSegment { gref: 7, first_sect: 3, last_sect: 5 });

        let mut slot = Slot::default();
        slot.0[..4].copy_from_slice(&[6, 1, 0x2c, 0x01]);
        slot.0[gref_at + 4..gref_at + 8].copy_from_slice(&42u32.to_le_bytes());
        let r = Request::decode(protocol, &slot);
        let Message::Indirect { op: IndirectOp::Write, nr_segments: 300, pages, .. } = r.message
        else {
            panic!("{:?}", r.message)
        };
        assert_eq!(pages[1], GrantRef(42));
        assert_eq!(r.response_op, OP_WRITE, "an indirect request is answered as what it does");
    }
}

#[test]
fn a_response_has_zeros_in_its_padding() {
    let bytes = Response { id: u64::MAX, operation: 1, status: -1 }.encode();
    assert_eq!(bytes, [255, 255, 255, 255, 255, 255, 255, 255, 1, 0, 255, 255]);
}

proptest! {
    #[test]
    fn every_bit_pattern_decodes_and_survives_a_round_trip(
        protocol in protocols(),
        bytes in proptest::collection::vec(any::<u8>(), MAX_SLOT_BYTES),
        operation in 0u8..8,
    ) {
        let mut slot = Slot::default();
        slot.0[..protocol.slot_bytes()].copy_from_slice(&bytes[..protocol.slot_bytes()]);
        slot.0[0] = operation;
        let request = Request::decode(protocol, &slot);
        let again = Request::decode(protocol, &request.encode(protocol));
        prop_assert_eq!(request, again);
    }

    #[test]
    fn responses_survive_a_round_trip(id: u64, operation: u8, status: i16) {
        let response = Response { id, operation, status };
        let mut slot = Slot([0xA5; MAX_SLOT_BYTES]);
        slot.0[..Response::BYTES].copy_from_slice(&response.encode());
        prop_assert_eq!(Response::decode(&slot), response);
    }
}
