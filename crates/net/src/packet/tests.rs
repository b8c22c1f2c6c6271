use proptest::prelude::*;

use super::*;

/// Slots as words, from a list; zeros behind it.
struct List(std::vec::IntoIter<[u32; 3]>);

impl Slots for List {
    fn request(&mut self) -> TxRequest {
        TxRequest::decode(self.0.next().unwrap_or_default())
    }

    fn extra(&mut self) -> ExtraInfo {
        let [a, b, _] = self.0.next().unwrap_or_default();
        ExtraInfo::decode([a, b])
    }
}

fn request(id: u16, offset: u16, size: u16, flags: u16) -> [u32; 3] {
    TxRequest { gref: GrantRef(100 + u32::from(id)), offset, flags, id, size }.encode()
}

fn take(slots: Vec<[u32; 3]>) -> Result<(Taken, u32), Stop> {
    let mut there = slots.len() as u32;
    Taken::take(&mut List(slots.into_iter()), &mut there).map(|taken| (taken, there))
}

fn extra(kind: u8, flags: u8) -> [u32; 3] {
    let [a, b] = ExtraInfo { kind, flags, ..ExtraInfo::gso(1448, GSO_TCPV4) }.encode();
    [a, b, 0]
}

#[test]
fn the_first_part_has_what_the_others_leave() {
    let slots = vec![
        request(9, 10, 5000, TX_MORE_DATA | TX_EXTRA_INFO | TX_CSUM_BLANK),
        extra(EXTRA_GSO, 0),
        request(2, 0, 4000, TX_MORE_DATA),
        request(3, 5, 500, 0),
        request(4, 0, 60, 0),
    ];
    let (taken, there) = take(slots).unwrap();
    assert_eq!((taken.fault, taken.size, taken.slots(), there), (None, 5000, 4, 1));
    let lens: Vec<_> =
        taken.parts().iter().map(|part| (part.gref, part.offset, part.len)).collect();
    assert_eq!(lens, [(109, 10, 500), (102, 0, 4000), (103, 5, 500)]);
    assert!(taken.offload.csum_blank && taken.offload.gso.is_some());
    // An extra info keeps its first bytes: a successor may have to read them.
    let answers: Vec<_> = taken.answers(0).map(|answer| (answer.id, answer.status)).collect();
    assert_eq!(answers, [(9, 0), (1, RSP_NULL), (2, 0), (3, 0)]);
    let pieces: Vec<_> = taken.pieces(128, 4600).map(|(g, o, len)| (g.0, o, len)).collect();
    assert_eq!(pieces, [(109, 138, 372), (102, 0, 4000), (103, 5, 100)]);
}

#[test]
fn sizes_that_lie_refuse_the_packet_and_leave_the_ring_in_step() {
    let more = TX_MORE_DATA;
    let cases = [
        (vec![request(1, 0, 13, 0)], Fault::Short(13)),
        (vec![request(1, 4090, 14, 0)], Fault::LeavesPage { offset: 4090, len: 14 }),
        (vec![request(1, 0, 100, more), request(2, 0, 100, 0)], Fault::Sizes),
        (vec![request(1, 0, 100, more), request(2, 0, 65_535, 0)], Fault::Sizes),
        (
            vec![request(1, 0, 1000, more), request(2, 4000, 100, 0)],
            Fault::LeavesPage { offset: 4000, len: 100 },
        ),
        (vec![request(1, u16::MAX, 60, 0)], Fault::LeavesPage { offset: u16::MAX, len: 60 }),
    ];
    for (mut slots, fault) in cases {
        slots.push(request(9, 0, 60, 0));
        let (taken, there) = take(slots).unwrap();
        assert_eq!((taken.fault, there), (Some(fault), 1));
    }
}

#[test]
fn parts_without_bytes_are_answered_and_nothing_else() {
    let more = TX_MORE_DATA;
    let slots = vec![request(1, 0, 100, more), request(2, 4096, 0, more), request(3, 0, 40, 0)];
    let (taken, _) = take(slots).unwrap();
    assert_eq!((taken.fault, taken.slots(), taken.parts().len()), (None, 3, 2));
    assert_eq!(taken.pieces(0, 100).map(|(.., len)| len).collect::<Vec<_>>(), [60, 40]);
}

#[test]
fn extra_infos_that_were_not_offered_refuse_the_packet() {
    for (kind, fault) in [(2, Fault::Extra(2)), (4, Fault::Extra(4)), (255, Fault::Extra(255))] {
        let slots = vec![request(1, 0, 60, TX_EXTRA_INFO), extra(kind, 0), request(2, 0, 60, 0)];
        let (taken, there) = take(slots).unwrap();
        assert_eq!((taken.fault, there), (Some(fault), 1));
    }
    let twice = vec![request(1, 0, 60, TX_EXTRA_INFO), extra(1, EXTRA_MORE), extra(1, 0)];
    assert_eq!(take(twice).unwrap().0.fault, Some(Fault::Extra(EXTRA_GSO)));
    let mut none = extra(1, 0);
    none[0] &= 0xFFFF;
    let none = vec![request(1, 0, 60, TX_EXTRA_INFO), none];
    assert_eq!(take(none).unwrap().0.fault, Some(Fault::Gso));
}

#[test]
fn slots_without_an_end_stop_the_ring() {
    let more = TX_MORE_DATA;
    assert_eq!(take(vec![request(1, 0, 600, more)]).err(), Some(Stop::Incomplete));
    assert_eq!(take(vec![request(1, 0, 600, TX_EXTRA_INFO)]).err(), Some(Stop::Incomplete));
    assert_eq!(take(vec![request(1, 0, 600, more); 30]).err(), Some(Stop::Slots));
    let mut endless = vec![extra(EXTRA_GSO, EXTRA_MORE); 30];
    endless.insert(0, request(1, 0, 600, TX_EXTRA_INFO));
    assert_eq!(take(endless).err(), Some(Stop::Extras));
    let of = |slots: usize| {
        let mut all = vec![request(1, 0, 1000, more); slots];
        for other in &mut all[1..] {
            *other = request(2, 0, 10, more);
        }
        all[slots - 1] = request(3, 0, 10, 0);
        take(all).unwrap().0.fault
    };
    assert_eq!((of(18), of(19), of(20)), (None, Some(Fault::Slots(19)), Some(Fault::Slots(20))));
}

proptest! {
    #[test]
    fn any_slots_are_a_packet_a_fault_or_the_end(
        slots in prop::collection::vec(any::<[u32; 3]>(), 1..40)
    ) {
        let count = slots.len() as u32;
        if let Ok((taken, there)) = take(slots) {
            prop_assert_eq!(count - there, taken.slots() as u32);
            prop_assert_eq!(taken.answers(0).count(), taken.slots());
            if taken.fault.is_none() {
                let bytes: usize = taken.parts().iter().map(|part| usize::from(part.len)).sum();
                prop_assert_eq!(bytes, taken.size);
                prop_assert!(taken.parts().len() <= PACKET_SLOTS);
                for (_, offset, len) in taken.pieces(0, taken.size) {
                    prop_assert!(len > 0 && usize::from(offset) + usize::from(len) <= PAGE_SIZE);
                }
            }
        }
    }
}
