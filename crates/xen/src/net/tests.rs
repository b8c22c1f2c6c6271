use super::*;
use crate::bare::{BareLink, Front};
use crate::hypervisor::GrantRef;
use crate::netif::{RSP_NULL, RSP_OKAY, TX_EXTRA_INFO, TX_MORE_DATA};
use crate::slots::{ANNOUNCED, REQ_PROD, RING_HEADER_BYTES, RSP_PROD};

const RX: usize = PAGE_SIZE;

fn put(front: &Front, ring: usize, slots: &[&[u32]], slot_bytes: usize) {
    for (i, words) in slots.iter().enumerate() {
        for (j, word) in words.iter().enumerate() {
            front.set(ring + RING_HEADER_BYTES + i * slot_bytes + 4 * j, *word);
        }
    }
    front.set(ring + REQ_PROD, slots.len() as u32);
}

/// A packet of two pages with an extra info, and three pages to receive in.
fn busy() -> (NetRings, Front) {
    let (link, front) = BareLink::boxed(1);
    let gref = GrantRef(70);
    let first = TxRequest { gref, offset: 3, flags: TX_EXTRA_INFO | TX_MORE_DATA, id: 9, size: 99 };
    let last = TxRequest { flags: 0, id: 8, size: 50, ..first };
    let tx =
        [first.encode().to_vec(), ExtraInfo::gso(1448, 1).encode().to_vec(), last.encode().into()];
    put(&front, 0, &tx.each_ref().map(Vec::as_slice), TX_SLOT_BYTES);
    let rx = [0, 1, 2].map(|id| RxRequest { id, gref }.encode());
    put(&front, RX, &rx.each_ref().map(|words| words.as_slice()), RX_SLOT_BYTES);
    (NetRings::attach(link).unwrap(), front)
}

fn answer_all(rings: &mut NetRings) {
    let (first, extra, last) = (rings.take_tx(), rings.take_extra(), rings.take_tx());
    for (id, status) in [(first.id, RSP_OKAY), (extra.head(), RSP_NULL), (last.id, RSP_OKAY)] {
        rings.answer_tx(TxResponse { id, status });
    }
    let (first, _, last) = (rings.take_rx(), rings.take_rx(), rings.take_rx());
    rings.answer_rx(RxResponse { id: first.id, offset: 0, flags: 12, status: 99 });
    rings.answer_rx_extra(ExtraInfo::gso(1448, 1));
    rings.answer_rx(RxResponse { id: last.id, offset: 0, flags: 0, status: 50 });
}

#[test]
fn answers_are_not_on_the_page_before_they_are_published() {
    let (mut rings, front) = busy();
    let before = front.bytes();
    answer_all(&mut rings);
    assert_eq!((rings.tx_answers(), rings.rx_answers()), (3, 3));
    assert!(front.bytes() == before, "a successor takes these requests again");
    rings.publish();
    assert_eq!((front.get(RSP_PROD), front.get(RX + RSP_PROD)), (3, 3));
    assert_eq!((front.get(ANNOUNCED), front.get(RX + ANNOUNCED)), (3, 3));
}

#[test]
fn answers_leave_flags_names_and_kinds_of_transmit_slots() {
    let (mut rings, front) = busy();
    answer_all(&mut rings);
    rings.publish();
    front.set(RSP_PROD, 0);
    let mut successor = NetRings::attach(front.link()).unwrap();
    assert_eq!(successor.tx_torn(), 3);
    let (first, extra, last) = (successor.take_tx(), successor.take_extra(), successor.take_tx());
    assert_eq!((first.id, first.flags), (9, TX_EXTRA_INFO | TX_MORE_DATA));
    assert_eq!((extra.kind, extra.flags), (1, 0));
    assert_eq!((last.id, last.flags), (8, 0));
}

#[test]
fn received_slots_that_were_written_over_are_answered_by_errors() {
    let (mut rings, front) = busy();
    answer_all(&mut rings);
    rings.publish();
    front.set(RX + RSP_PROD, 1);
    let mut successor = NetRings::attach(front.link()).unwrap();
    assert_eq!((successor.rx_unconsumed(), successor.rx_answers()), (Ok(0), 3));
    successor.publish();
    for at in [1, 2] {
        let slot = RX + RING_HEADER_BYTES + at * RX_SLOT_BYTES;
        let answer = RxResponse::decode([front.get(slot), front.get(slot + 4)]);
        assert_eq!((answer.flags, answer.status), (0, RSP_ERROR));
    }
}

#[test]
fn a_count_of_answers_that_cannot_be_is_none() {
    for announced in [0, 4, 1000, u32::MAX] {
        let (rings, front) = busy();
        drop(rings);
        for ring in [0, RX] {
            front.set(ring + ANNOUNCED, announced);
        }
        let successor = NetRings::attach(front.link()).unwrap();
        assert_eq!((successor.tx_torn(), successor.rx_unconsumed()), (0, Ok(3)), "{announced}");
    }
}
