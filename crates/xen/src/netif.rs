//! The netif wire format: what stands in the slots of a network interface's two rings.
//!
//! Pure functions over private copies. Layouts follow `xen/include/public/io/netif.h`. They are the same for 32-bit and
//! 64-bit guests. Nothing here has been validated: every field is as the guest wrote it.

use crate::hypervisor::GrantRef;

/// Bytes of a slot of the transmit ring.
pub const TX_SLOT_BYTES: usize = 12;
/// Bytes of a slot of the receive ring.
pub const RX_SLOT_BYTES: usize = 8;
/// Slots that every backend takes for one packet, extra infos not counted: `XEN_NETIF_NR_SLOTS_MIN`.
pub const PACKET_SLOTS: usize = 18;
/// Extra infos of one packet: one of each type that is defined.
pub const EXTRA_INFOS_MAX: usize = 5;
/// The largest frame: the header's size field has 16 bits.
pub const FRAME_BYTES_MAX: usize = 65_535;
/// The bytes of an Ethernet header: the shortest packet.
pub const FRAME_BYTES_MIN: usize = 14;

/// Transmit: the frame's TCP or UDP checksum is not filled in.
pub const TX_CSUM_BLANK: u16 = 1;
/// Transmit: the frame's checksum is known to be right.
pub const TX_DATA_VALIDATED: u16 = 2;
/// Transmit: the next request belongs to the same packet.
pub const TX_MORE_DATA: u16 = 4;
/// Transmit: the next slot is an extra info.
pub const TX_EXTRA_INFO: u16 = 8;

/// Receive: the frame's checksum is known to be right.
pub const RX_DATA_VALIDATED: u16 = 1;
/// Receive: the frame's TCP or UDP checksum is not filled in.
pub const RX_CSUM_BLANK: u16 = 2;
/// Receive: the next response belongs to the same packet.
pub const RX_MORE_DATA: u16 = 4;
/// Receive: the next slot is an extra info.
pub const RX_EXTRA_INFO: u16 = 8;

/// A packet was taken.
pub const RSP_OKAY: i16 = 0;
/// A packet was refused.
pub const RSP_ERROR: i16 = -1;
/// A packet was dropped.
pub const RSP_DROPPED: i16 = -2;
/// The answer to the slot of an extra info: nothing is to be done about it.
pub const RSP_NULL: i16 = 1;

/// `XEN_NETIF_EXTRA_TYPE_GSO`.
pub const EXTRA_GSO: u8 = 1;
/// Another extra info follows.
pub const EXTRA_MORE: u8 = 1;
/// The segments are TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// The segments are TCP over IPv6.
pub const GSO_TCPV6: u8 = 2;

/// A part of a packet that a guest sends. The first part's `size` is that of the whole packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxRequest {
    /// The frame with the bytes.
    pub gref: GrantRef,
    /// The first byte in it.
    pub offset: u16,
    /// `TX_…`.
    pub flags: u16,
    /// The frontend's name for it.
    pub id: u16,
    /// Bytes.
    pub size: u16,
}

impl TxRequest {
    /// From a slot.
    pub fn decode(slot: [u32; 3]) -> TxRequest {
        let [gref, place, name] = slot;
        let (offset, flags) = halves(place);
        let (id, size) = halves(name);
        TxRequest { gref: GrantRef(gref), offset, flags, id, size }
    }

    /// As a slot, for frontends.
    pub fn encode(self) -> [u32; 3] {
        [self.gref.0, word(self.offset, self.flags), word(self.id, self.size)]
    }
}

/// The answer to one slot of the transmit ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxResponse {
    /// The request's.
    pub id: u16,
    /// `RSP_…`.
    pub status: i16,
}

impl TxResponse {
    /// The first word of a slot. The others keep the guest's own request, of which a successor of a killed process
    /// reads the flags and the name.
    pub fn encode(self) -> [u32; 1] {
        [word(self.id, self.status as u16)]
    }

    /// From a slot, for frontends.
    pub fn decode(slot: [u32; 3]) -> TxResponse {
        let (id, status) = halves(slot[0]);
        TxResponse { id, status: status as i16 }
    }
}

/// A page of a guest that the next packet for it may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxRequest {
    /// The frontend's name for it.
    pub id: u16,
    /// The page.
    pub gref: GrantRef,
}

impl RxRequest {
    /// From a slot.
    pub fn decode(slot: [u32; 2]) -> RxRequest {
        RxRequest { id: halves(slot[0]).0, gref: GrantRef(slot[1]) }
    }

    /// As a slot, for frontends.
    pub fn encode(self) -> [u32; 2] {
        [word(self.id, 0), self.gref.0]
    }
}

/// A part of a packet that has been written to a page of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxResponse {
    /// The request's.
    pub id: u16,
    /// First byte in the page.
    pub offset: u16,
    /// `RX_…`.
    pub flags: u16,
    /// Bytes, or `RSP_ERROR`.
    pub status: i16,
}

impl RxResponse {
    /// As a slot.
    pub fn encode(self) -> [u32; 2] {
        [word(self.id, self.offset), word(self.flags, self.status as u16)]
    }

    /// From a slot, for frontends.
    pub fn decode(slot: [u32; 2]) -> RxResponse {
        let (id, offset) = halves(slot[0]);
        let (flags, status) = halves(slot[1]);
        RxResponse { id, offset, flags, status: status as i16 }
    }
}

/// The segmentation that a frame needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GsoInfo {
    /// Bytes of payload in each segment.
    pub size: u16,
    /// `GSO_…`.
    pub kind: u8,
    /// Must be 0.
    pub features: u16,
}

/// A slot with more about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtraInfo {
    /// `EXTRA_GSO`, or another type's number.
    pub kind: u8,
    /// `EXTRA_MORE`, or 0.
    pub flags: u8,
    /// If it is of type `EXTRA_GSO`; else without meaning.
    pub gso: GsoInfo,
}

impl ExtraInfo {
    /// The only extra info of a packet: its segmentation.
    pub fn gso(size: u16, kind: u8) -> ExtraInfo {
        ExtraInfo { kind: EXTRA_GSO, flags: 0, gso: GsoInfo { size, kind, features: 0 } }
    }

    /// From the first eight bytes of a slot.
    pub fn decode(slot: [u32; 2]) -> ExtraInfo {
        let (head, size) = halves(slot[0]);
        let (gso, features) = halves(slot[1]);
        let ([kind, flags], [gso, _pad]) = (head.to_le_bytes(), gso.to_le_bytes());
        ExtraInfo { kind, flags, gso: GsoInfo { size, kind: gso, features } }
    }

    /// The first two bytes, which are the id of a request and of an answer.
    pub fn head(self) -> u16 {
        u16::from_le_bytes([self.kind, self.flags])
    }

    /// As the first eight bytes of a slot.
    pub fn encode(self) -> [u32; 2] {
        [word(self.head(), self.gso.size), word(u16::from(self.gso.kind), self.gso.features)]
    }
}

/// The two halves of a word, in memory order.
const fn halves(word: u32) -> (u16, u16) {
    (word as u16, (word >> 16) as u16)
}

const fn word(first: u16, second: u16) -> u32 {
    first as u32 | (second as u32) << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn slots_have_the_bytes_of_the_header() {
        let tx =
            TxRequest { gref: GrantRef(0x0403_0201), offset: 0x0605, flags: 8, id: 9, size: 66 };
        assert_eq!(bytes(&tx.encode()), [1, 2, 3, 4, 5, 6, 8, 0, 9, 0, 66, 0]);
        assert_eq!(TxRequest::decode(tx.encode()), tx);
        let answer = TxResponse { id: 0x0102, status: RSP_DROPPED };
        assert_eq!(bytes(&answer.encode()), [2, 1, 0xFE, 0xFF]);
        let [first] = answer.encode();
        assert_eq!(TxResponse::decode([first, 1, 2]), answer);
        let rx = RxRequest { id: 7, gref: GrantRef(0x0102_0304) };
        assert_eq!(bytes(&rx.encode()), [7, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(RxRequest::decode(rx.encode()), rx);
        let answer = RxResponse { id: 7, offset: 0x0102, flags: 4, status: RSP_ERROR };
        assert_eq!(bytes(&answer.encode()), [7, 0, 2, 1, 4, 0, 0xFF, 0xFF]);
        assert_eq!(RxResponse::decode(answer.encode()), answer);
        let gso = ExtraInfo::gso(1448, GSO_TCPV6);
        assert_eq!(bytes(&gso.encode()), [1, 0, 0xA8, 5, 2, 0, 0, 0]);
        assert_eq!(ExtraInfo::decode(gso.encode()), gso);
    }
}
