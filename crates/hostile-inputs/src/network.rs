//! Packets of guests: the slots of a transmit ring, and frames.

use ferrite_net::packet::{Slots, Taken};
use ferrite_net::switch::{Mac, Source, Switch};
use ferrite_xen::hypervisor::PAGE_SIZE;
use ferrite_xen::netif::{ExtraInfo, PACKET_SLOTS, TxRequest};

/// Bytes of a frame, before the slots.
const FRAME_BYTES: usize = 16;

/// Slots of any words.
struct Words(std::vec::IntoIter<[u32; 3]>);

impl Slots for Words {
    fn request(&mut self) -> TxRequest {
        TxRequest::decode(self.0.next().unwrap_or_default())
    }

    fn extra(&mut self) -> ExtraInfo {
        let [a, b, _] = self.0.next().unwrap_or_default();
        ExtraInfo::decode([a, b])
    }
}

/// A frame that is judged, then all packets of a ring.
pub(crate) fn net_slots(input: &[u8]) {
    let (frame, slots) = input.split_at(input.len().min(FRAME_BYTES));
    judge(frame);
    let word =
        |bytes: &[u8], i: usize| u32::from_le_bytes(std::array::from_fn(|k| bytes[4 * i + k]));
    let slots = slots.chunks_exact(12).take(256);
    let slots: Vec<[u32; 3]> = slots.map(|slot| [0, 1, 2].map(|i| word(slot, i))).collect();
    let mut there = slots.len() as u32;
    let mut ring = Words(slots.into_iter());
    while there > 0 {
        let before = there;
        let Ok(taken) = Taken::take(&mut ring, &mut there) else { return };
        assert_eq!((before - there) as usize, taken.slots(), "each slot is taken once");
        assert_eq!(taken.answers(0).count(), taken.slots(), "each slot is answered once");
        if taken.fault.is_some() {
            continue;
        }
        let bytes: usize = taken.parts().iter().map(|part| usize::from(part.len)).sum();
        assert!(bytes == taken.size && bytes >= 14 && taken.parts().len() <= PACKET_SLOTS);
        for border in [1, 14, 128, taken.size] {
            let pieces = taken.pieces(0, border).chain(taken.pieces(border, taken.size));
            let mut sum = 0;
            for (_, offset, len) in pieces {
                assert!(len > 0 && usize::from(offset) + usize::from(len) <= PAGE_SIZE);
                sum += usize::from(len);
            }
            assert!(border > taken.size || sum == taken.size);
        }
    }
}

fn judge(frame: &[u8]) {
    let mut switch = Switch::new(true);
    let port = switch.add(Mac([0, 0x16, 0x3e, 0, 0, 1]));
    let _ = switch.add(Mac([0, 0x16, 0x3e, 0, 0, 2]));
    let (Ok(port), mut targets) = (port, Vec::new()) else { return };
    for source in [Source::Port(port), Source::Uplink] {
        if switch.route(source, frame, &mut targets).is_ok() {
            let own = frame[6..12] == [0, 0x16, 0x3e, 0, 0, 1];
            assert_eq!(own, source == Source::Port(port), "no source sends with another's address");
            assert!(targets.len() <= 3);
        }
    }
}
