//! Requests of guests on rings.

use ferrite_serve::blkif::request::{
    Limits, Segment, check_data, check_direct, check_indirect_head, reserve_bytes,
};
use ferrite_serve::path::work::{Action, Work};
use ferrite_xen::abi::{
    MAX_SLOT_BYTES, Message, Protocol, RawSegment, Request, Response, SEGMENT_BYTES,
    SEGMENTS_PER_INDIRECT_PAGE, Slot,
};

/// Bytes of the slot and of the disk's properties, before the indirect descriptors.
const HEAD_BYTES: usize = MAX_SLOT_BYTES + 12;

/// Slots of requests with their indirect descriptors, and all checks before the disk.
pub(crate) fn ring(input: &[u8]) {
    let mut head = [0; HEAD_BYTES];
    let len = input.len().min(HEAD_BYTES);
    head[..len].copy_from_slice(&input[..len]);
    let descriptors = &input[len..];
    let (slot, about) = head.split_at(MAX_SLOT_BYTES);
    let mut bytes = [0; MAX_SLOT_BYTES];
    bytes.copy_from_slice(slot);
    let limits = Limits {
        sectors: about[..8].iter().fold(0, |n, b| n << 8 | u64::from(*b)),
        read_only: about[8] & 1 != 0,
        discard: about[8] & 2 != 0,
        max_indirect_segments: u16::from_le_bytes([about[10], about[11]]) % 4097,
    };
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        let request = Request::decode(protocol, &Slot(bytes));
        check_round_trip(protocol, &request);
        check_request(&request.message, &limits, descriptors);
    }
    let response = Response::decode(&Slot(bytes));
    assert_eq!(response.encode()[9], 0, "padding");
}

fn check_round_trip(protocol: Protocol, request: &Request) {
    if request.message != Message::Unknown {
        assert_eq!(Request::decode(protocol, &request.encode(protocol)), *request);
    }
}

fn check_request(message: &Message, limits: &Limits, descriptors: &[u8]) {
    let mut segments = Vec::new();
    let reserved = reserve_bytes(message, limits.max_indirect_segments);
    if let Ok(work) = check_direct(message, limits, &mut segments) {
        check_work(&work, &segments, limits, reserved);
    }
    let Some(head) = check_indirect_head(message, limits) else { return };
    let pages = usize::from(head.nr_segments).div_ceil(SEGMENTS_PER_INDIRECT_PAGE);
    assert!(pages <= 8, "{pages} indirect pages");
    let descriptor = |i: usize| {
        let mut bytes = [0; SEGMENT_BYTES];
        if let Some(from) = descriptors.get(i * SEGMENT_BYTES..(i + 1) * SEGMENT_BYTES) {
            bytes.copy_from_slice(from);
        }
        RawSegment::decode(&bytes)
    };
    let raw = (0..usize::from(head.nr_segments)).map(descriptor);
    if let Ok(work) = check_data(head.action, head.sector, raw, limits, &mut segments) {
        assert!(work.sectors > 0, "an indirect request without data");
        check_work(&work, &segments, limits, reserved);
    }
}

/// Checks that an accepted operation is inside the disk, and in the memory that was reserved for it.
fn check_work(work: &Work, segments: &[Segment], limits: &Limits, reserved: usize) {
    let end = work.sector.checked_add(work.sectors);
    assert!(end.is_some_and(|end| end <= limits.sectors) || work.sectors == 0, "{work:?}");
    assert!(!(limits.read_only && work.action.changes_medium()), "{work:?}");
    let bytes: usize = segments.iter().map(Segment::bytes).sum();
    assert!(bytes <= reserved, "{bytes} bytes in {reserved}");
    for segment in segments {
        let end = usize::from(segment.offset()) + segment.bytes();
        assert!(segment.bytes() >= 512 && end <= 4096, "{segment:?}");
    }
    let discards = matches!(work.action, Action::Discard);
    assert!(discards || bytes as u64 == work.sectors * 512, "{bytes} bytes for {work:?}");
}
