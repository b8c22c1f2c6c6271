//! The slots of a packet that a guest sends, taken from its ring and checked.
//!
//! Two kinds of fault: slots from which the next packet's begin cannot be found stop the ring ([`Stop`]). All other
//! faults refuse the one packet ([`Fault`]).

use std::io;
use std::os::fd::BorrowedFd;

use ferrite_xen::hypervisor::{GrantRef, PAGE_SIZE};
use ferrite_xen::net::NetRings;
use ferrite_xen::netif::{
    EXTRA_GSO, EXTRA_INFOS_MAX, EXTRA_MORE, ExtraInfo, FRAME_BYTES_MIN, GSO_TCPV4, GSO_TCPV6,
    GsoInfo, PACKET_SLOTS, RSP_NULL, RX_CSUM_BLANK, RX_DATA_VALIDATED, TX_CSUM_BLANK,
    TX_DATA_VALIDATED, TX_EXTRA_INFO, TX_MORE_DATA, TxRequest, TxResponse,
};
use ferrite_xen::slots::RingViolation;

/// Slots of a packet beyond which a ring is stopped. Some old frontends send a few more than [`PACKET_SLOTS`].
pub const SLOTS_MAX: usize = 20;

/// The kind of a frame's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

/// How a frame is to be segmented before it reaches a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// Bytes of payload in each segment, not 0.
    pub size: u16,
    /// The protocol.
    pub kind: GsoKind,
}

impl Gso {
    /// As an extra info.
    pub fn extra(self) -> ExtraInfo {
        let kind = match self.kind {
            GsoKind::Tcp4 => GSO_TCPV4,
            GsoKind::Tcp6 => GSO_TCPV6,
        };
        ExtraInfo::gso(self.size, kind)
    }

    fn from_extra(info: GsoInfo) -> Option<Gso> {
        let kind = match info.kind {
            GSO_TCPV4 => GsoKind::Tcp4,
            GSO_TCPV6 => GsoKind::Tcp6,
            _ => return None,
        };
        (info.size > 0 && info.features == 0).then_some(Gso { size: info.size, kind })
    }
}

/// The work that is left to do to a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Its TCP or UDP checksum is not filled in.
    pub csum_blank: bool,
    /// Its checksum is known to be right.
    pub csum_valid: bool,
    /// It is to be segmented.
    pub gso: Option<Gso>,
}

impl Offload {
    fn from_flags(flags: u16) -> Offload {
        let csum_blank = flags & TX_CSUM_BLANK != 0;
        Offload { csum_blank, csum_valid: csum_blank || flags & TX_DATA_VALIDATED != 0, gso: None }
    }

    /// The flags of a received packet's first slot, those of checksums.
    pub fn rx_flags(self) -> u16 {
        let blank = if self.csum_blank { RX_CSUM_BLANK } else { 0 };
        let valid = if self.csum_blank || self.csum_valid { RX_DATA_VALIDATED } else { 0 };
        blank | valid
    }
}

/// The way out of a switch, such as a TAP device.
pub trait Uplink: Send {
    /// Readable when there is a frame.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Sends a frame. `false`: there is no room, and it is dropped.
    ///
    /// # Errors
    /// The device is broken.
    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<bool>;

    /// Takes the next frame, if there is one: its bytes in `into`, which has room for the largest.
    ///
    /// # Errors
    /// The device is broken.
    fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<(usize, Offload)>>;
}

/// Bytes of a packet in one page of the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The page.
    pub gref: u32,
    /// First byte.
    pub offset: u16,
    /// Bytes, not 0.
    pub len: u16,
}

/// Why a packet is refused. The guest's next one may be good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It has less than an Ethernet header.
    #[error("the packet has {0} bytes")]
    Short(u16),
    /// Its parts have more bytes than the whole, or all of them.
    #[error("the packet's parts are longer than the packet")]
    Sizes,
    /// A part leaves its page.
    #[error("{len} bytes at {offset} leave their page")]
    LeavesPage {
        /// First byte.
        offset: u16,
        /// Bytes.
        len: u16,
    },
    /// More slots than a backend has to take.
    #[error("the packet has {0} slots")]
    Slots(usize),
    /// An extra info that was not offered, or twice.
    #[error("the packet has an extra info of type {0}, which was not offered or is there twice")]
    Extra(u8),
    /// A segmentation that is none.
    #[error("the packet's segmentation is none")]
    Gso,
}

/// Why a ring is stopped: where the next packet begins is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    /// The producer is impossible.
    #[error(transparent)]
    Ring(#[from] RingViolation),
    /// A packet's last slot is not there.
    #[error("the frontend published a packet without its last slots")]
    Incomplete,
    /// More slots than any frontend uses.
    #[error("the frontend sent a packet with more than {SLOTS_MAX} slots")]
    Slots,
    /// More extra infos than there are types.
    #[error("the frontend sent a packet with more than {EXTRA_INFOS_MAX} extra infos")]
    Extras,
}

/// A packet's slots, taken from the ring.
#[derive(Clone, Debug)]
pub struct Taken {
    parts: [Part; SLOTS_MAX],
    parts_len: usize,
    ids: [u16; SLOTS_MAX],
    ids_len: usize,
    /// The first two bytes of each extra info.
    heads: [u16; EXTRA_INFOS_MAX],
    extras: usize,
    /// Bytes of the whole frame.
    pub size: usize,
    /// The work that is left to do to it.
    pub offload: Offload,
    /// Why it is refused.
    pub fault: Option<Fault>,
}

/// Where the slots of a packet come from: a ring.
pub trait Slots {
    /// The next slot as a request.
    fn request(&mut self) -> TxRequest;
    /// The next slot as an extra info.
    fn extra(&mut self) -> ExtraInfo;
}

impl Slots for NetRings {
    fn request(&mut self) -> TxRequest {
        self.take_tx()
    }

    fn extra(&mut self) -> ExtraInfo {
        self.take_extra()
    }
}

impl Taken {
    /// Takes the slots of one packet, of `there` that may be taken: at least one. Counts `there` down.
    ///
    /// # Errors
    /// The ring is to be stopped.
    pub fn take(ring: &mut impl Slots, there: &mut u32) -> Result<Taken, Stop> {
        let first = next(there, || ring.request())?;
        let mut taken = Taken {
            parts: [Part::default(); SLOTS_MAX],
            parts_len: 0,
            ids: [0; SLOTS_MAX],
            ids_len: 0,
            heads: [0; EXTRA_INFOS_MAX],
            extras: 0,
            size: usize::from(first.size),
            offload: Offload::from_flags(first.flags),
            fault: None,
        };
        if first.flags & TX_EXTRA_INFO != 0 {
            taken.take_extras(ring, there)?;
        }
        let whole = usize::from(first.size);
        let (mut request, mut rest) = (first, 0);
        loop {
            let at = taken.ids_len;
            taken.ids[at] = request.id;
            let TxRequest { gref, offset, size, .. } = request;
            taken.parts[at] = Part { gref: gref.0, offset, len: size };
            taken.ids_len += 1;
            if at > 0 {
                rest += usize::from(request.size);
            }
            if request.flags & TX_MORE_DATA == 0 {
                break;
            }
            if taken.ids_len == SLOTS_MAX {
                return Err(Stop::Slots);
            }
            request = next(there, || ring.request())?;
        }
        taken.check(whole, rest);
        Ok(taken)
    }

    fn take_extras(&mut self, ring: &mut impl Slots, there: &mut u32) -> Result<(), Stop> {
        loop {
            let extra = next(there, || ring.extra())?;
            *self.heads.get_mut(self.extras).ok_or(Stop::Extras)? = extra.head();
            self.extras += 1;
            match extra.kind {
                EXTRA_GSO if self.offload.gso.is_none() => {
                    self.offload.gso = Gso::from_extra(extra.gso);
                    if self.offload.gso.is_none() {
                        self.refuse(Fault::Gso);
                    }
                }
                kind => self.refuse(Fault::Extra(kind)),
            }
            if extra.flags & EXTRA_MORE == 0 {
                return Ok(());
            }
        }
    }

    /// Checks the sizes. There is a part for each request; those without bytes are left out.
    fn check(&mut self, whole: usize, rest: usize) {
        if whole < FRAME_BYTES_MIN {
            self.refuse(Fault::Short(whole as u16));
        }
        if self.ids_len > PACKET_SLOTS {
            self.refuse(Fault::Slots(self.ids_len));
        }
        // The first part has what the others leave, at least a byte.
        if rest >= whole {
            return self.refuse(Fault::Sizes);
        }
        self.parts[0].len = (whole - rest) as u16;
        for at in 0..self.ids_len {
            let part @ Part { offset, len, .. } = self.parts[at];
            if usize::from(offset) + usize::from(len) > PAGE_SIZE {
                return self.refuse(Fault::LeavesPage { offset, len });
            }
            // A part without bytes is nothing (XSA-448).
            if len > 0 {
                self.parts[self.parts_len] = part;
                self.parts_len += 1;
            }
        }
    }

    fn refuse(&mut self, fault: Fault) {
        self.fault = self.fault.or(Some(fault));
    }

    /// Where the bytes are, in order. They add up to `size` if there is no fault.
    pub fn parts(&self) -> &[Part] {
        &self.parts[..self.parts_len]
    }

    /// Slots of the ring that it had, each to be answered.
    pub fn slots(&self) -> usize {
        self.ids_len + self.extras
    }

    /// The answers to its slots, in their order on the ring.
    pub fn answers(&self, status: i16) -> impl Iterator<Item = TxResponse> + '_ {
        let first = self.ids[0];
        let heads = self.heads[..self.extras].iter();
        let extras = heads.map(|head| TxResponse { id: *head, status: RSP_NULL });
        let rest = self.ids[1..self.ids_len].iter().map(move |id| TxResponse { id: *id, status });
        std::iter::once(TxResponse { id: first, status }).chain(extras).chain(rest)
    }

    /// The sender's pages with bytes `from..to` of the frame.
    pub fn pieces(
        &self,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = (GrantRef, u16, u16)> + '_ {
        let mut begin = 0;
        self.parts().iter().filter_map(move |part| {
            let (first, end) = (begin, begin + usize::from(part.len));
            begin = end;
            let (a, b) = (from.max(first), to.min(end));
            let offset = part.offset + (a.max(first) - first) as u16;
            (a < b).then(|| (GrantRef(part.gref), offset, (b - a) as u16))
        })
    }
}

fn next<T>(there: &mut u32, take: impl FnOnce() -> T) -> Result<T, Stop> {
    *there = there.checked_sub(1).ok_or(Stop::Incomplete)?;
    Ok(take())
}

#[cfg(test)]
mod tests;
