//! The uplink of a switch by a TAP device of this host: frames with a virtio-net header before them.
//!
//! Both sides leave work on frames to each other: checksums that are not filled in, and TCP in one piece. The kernel
//! says where a checksum is; a ring says only that it is missing. So headers are parsed here, in private copies.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use ferrite_host::tap::{Tap, VNET_BYTES};

use crate::packet::{Gso, GsoKind, Offload, Uplink};

/// The largest frame of a ring, bytes.
pub const FRAME_BYTES_MAX: usize = 65_535;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_F_DATA_VALID`.
const DATA_VALID: u8 = 2;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;

const ETHERNET_BYTES: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The most frames of one look that are skipped, since no ring could carry them.
const SKIPPED_MAX: usize = 16;

/// A TAP device as an uplink. One queue of it is used: the worker is one thread.
#[derive(Debug)]
pub struct TapUplink {
    tap: Tap,
}

impl TapUplink {
    /// Attaches to this device, or makes it: see [`Tap::open`].
    ///
    /// # Errors
    /// Those of [`Tap::open`].
    pub fn open(name: &str) -> io::Result<TapUplink> {
        Tap::open(name).map(|tap| TapUplink { tap })
    }
}

impl Uplink for TapUplink {
    fn fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }

    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<bool> {
        let Some(mut begin) = Begin::of(frame, offload) else { return Ok(false) };
        let header = begin.header;
        // Only the checksum differs from the frame, and only if it is segmented.
        let written = match begin.take_frame(frame) {
            Some(changed) => self.tap.write(&header, &changed),
            None => self.tap.write(&header, frame),
        };
        match written {
            Ok(()) => Ok(true),
            // The device was removed.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::BADFD.raw_os_error()) => Err(e),
            // Its queue is full, it is down (EIO), or the kernel does not like the frame.
            Err(_) => Ok(false),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<(usize, Offload)>> {
        for _ in 0..SKIPPED_MAX {
            let mut header = [0; VNET_BYTES];
            let len = match self.tap.read(&mut header, into) {
                Ok(len) => len,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if len > FRAME_BYTES_MAX {
                continue;
            }
            if let Some(offload) = received(&header, &mut into[..len]) {
                return Ok(Some((len, offload)));
            }
        }
        Ok(None)
    }
}

/// The begin of a frame that is sent.
struct Begin {
    header: [u8; VNET_BYTES],
    /// Where the checksum's field is, and what has to be there.
    checksum: Option<(usize, [u8; 2])>,
}

impl Begin {
    /// `None`: the offload cannot be done to this frame.
    fn of(frame: &[u8], offload: Offload) -> Option<Begin> {
        let mut header = [0; VNET_BYTES];
        if !offload.csum_blank && offload.gso.is_none() {
            header[0] = if offload.csum_valid { DATA_VALID } else { 0 };
            return Some(Begin { header, checksum: None });
        }
        let found = Transport::find(frame)?;
        let mut checksum = None;
        if let Some(gso) = offload.gso {
            let kind = match gso.kind {
                GsoKind::Tcp4 if found.protocol == TCP && !found.is_v6 => GSO_TCPV4,
                GsoKind::Tcp6 if found.protocol == TCP && found.is_v6 => GSO_TCPV6,
                _ => return None,
            };
            let header_len = found.at + usize::from(*frame.get(found.at + 12)? >> 4) * 4;
            if header_len < found.at + 20 || header_len > frame.len() || gso.size == 0 {
                return None;
            }
            header[1] = kind;
            header[2..4].copy_from_slice(&u16::try_from(header_len).ok()?.to_ne_bytes());
            header[4..6].copy_from_slice(&gso.size.to_ne_bytes());
            // A sender may have left the field empty, filled it in, or put the sum of the pseudo-header there.
            checksum = Some((found.field(), found.pseudo_sum(frame).to_be_bytes()));
        }
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&u16::try_from(found.at).ok()?.to_ne_bytes());
        header[8..10].copy_from_slice(&(found.offset as u16).to_ne_bytes());
        Some(Begin { header, checksum })
    }

    /// The frame with its checksum, if that differs.
    fn take_frame(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        let (at, sum) = self.checksum.take()?;
        if frame[at..at + 2] == sum {
            return None;
        }
        let mut changed = frame.to_vec();
        changed[at..at + 2].copy_from_slice(&sum);
        Some(changed)
    }
}

/// The work that is left to do to a frame that was read. Fills checksums in that a guest could not find. `None`: no
/// guest can take it.
fn received(header: &[u8; VNET_BYTES], frame: &mut [u8]) -> Option<Offload> {
    let word = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let gso = match header[1] {
        GSO_NONE => None,
        GSO_TCPV4 => Some(Gso { size: word(4), kind: GsoKind::Tcp4 }),
        GSO_TCPV6 => Some(Gso { size: word(4), kind: GsoKind::Tcp6 }),
        _ => return None,
    };
    if gso.is_some_and(|gso| gso.size == 0) {
        return None;
    }
    if header[0] & NEEDS_CSUM == 0 {
        let csum_valid = header[0] & DATA_VALID != 0;
        return gso.is_none().then_some(Offload { csum_blank: false, csum_valid, gso });
    }
    let (start, field) = (usize::from(word(6)), usize::from(word(6)) + usize::from(word(8)));
    let found = Transport::find(frame);
    if found.is_some_and(|found| (found.at, found.field()) == (start, field)) {
        return Some(Offload { csum_blank: true, csum_valid: true, gso });
    }
    // A frame with a VLAN's tag, for one.
    if gso.is_some() || field + 2 > frame.len() {
        return None;
    }
    // The field has the sum of the pseudo-header, which is a part of the sum.
    let sum = !fold(sum_of(&frame[start..]));
    let sum = if sum == 0 { 0xffff } else { sum };
    frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    Some(Offload { csum_blank: false, csum_valid: true, gso: None })
}

/// Where TCP or UDP begins in a frame.
#[derive(Clone, Copy, Debug)]
struct Transport {
    /// The first byte.
    at: usize,
    /// The checksum's place behind it.
    offset: usize,
    protocol: u8,
    is_v6: bool,
}

impl Transport {
    /// Headers of IPv6 that extend the first one are not followed.
    fn find(frame: &[u8]) -> Option<Transport> {
        let kind: [u8; 2] = frame.get(12..14)?.try_into().ok()?;
        let (at, protocol, is_v6) = match kind {
            TYPE_IPV4 => {
                let words = frame.get(ETHERNET_BYTES)? & 0xf;
                let fragment = u16::from_be_bytes([*frame.get(20)?, *frame.get(21)?]);
                // A fragment has no checksum of its own.
                if words < 5 || fragment & 0x3fff != 0 {
                    return None;
                }
                (ETHERNET_BYTES + usize::from(words) * 4, *frame.get(23)?, false)
            }
            TYPE_IPV6 => (ETHERNET_BYTES + 40, *frame.get(20)?, true),
            _ => return None,
        };
        let offset = match protocol {
            TCP => 16,
            UDP => 6,
            _ => return None,
        };
        (at + offset + 2 <= frame.len()).then_some(Transport { at, offset, protocol, is_v6 })
    }

    /// The checksum's place in the frame.
    fn field(&self) -> usize {
        self.at + self.offset
    }

    /// The sum over addresses, protocol and length, not inverted.
    fn pseudo_sum(&self, frame: &[u8]) -> u16 {
        let addresses = if self.is_v6 { &frame[22..54] } else { &frame[26..34] };
        let len = (frame.len() - self.at) as u64;
        fold(sum_of(addresses) + u64::from(self.protocol) + (len >> 16) + (len & 0xffff))
    }
}

fn sum_of(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks(2);
    pairs.map(|pair| u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))).sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of IPv4 with this protocol and payload behind the first 14 + 20 bytes.
    fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend(TYPE_IPV4);
        frame.extend([0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn a_missing_checksum_is_named_by_its_place() {
        let frame = ipv4(UDP, &[0; 20]);
        let blank = Offload { csum_blank: true, csum_valid: true, gso: None };
        let begin = Begin::of(&frame, blank).unwrap();
        assert_eq!(begin.header[0], NEEDS_CSUM);
        assert_eq!(begin.header[6..8], 34_u16.to_ne_bytes());
        assert_eq!(begin.header[8..10], 6_u16.to_ne_bytes());
        let mut back = frame.clone();
        assert_eq!(received(&begin.header, &mut back), Some(blank));
        assert_eq!(back, frame, "the receiver fills it in");
    }

    #[test]
    fn a_checksum_that_a_guest_cannot_find_is_filled_in() {
        // A VLAN's tag is before the protocol.
        let mut frame = ipv4(UDP, &[0, 1, 0, 2, 0, 9, 0, 0, 7]);
        let found = Transport::find(&frame).unwrap();
        let pseudo = found.pseudo_sum(&frame);
        frame[40..42].copy_from_slice(&pseudo.to_be_bytes());
        frame.splice(12..12, [0x81, 0, 0, 5]);
        let mut header = [0; VNET_BYTES];
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&38_u16.to_ne_bytes());
        header[8..10].copy_from_slice(&6_u16.to_ne_bytes());
        let offload = received(&header, &mut frame).unwrap();
        assert!(!offload.csum_blank && offload.csum_valid);
        // The sum over both, with the checksum, has all bits set.
        let addresses = u64::from(pseudo);
        assert_eq!(fold(addresses + sum_of(&frame[38..])), 0xffff);
    }

    #[test]
    fn a_segmented_frame_gets_the_sum_of_its_pseudo_header() {
        let mut tcp = [0; 3000];
        tcp[12] = 5 << 4;
        let frame = ipv4(TCP, &tcp);
        let gso = Some(Gso { size: 1448, kind: GsoKind::Tcp4 });
        let mut begin =
            Begin::of(&frame, Offload { csum_blank: false, csum_valid: true, gso }).unwrap();
        assert_eq!((begin.header[0], begin.header[1]), (NEEDS_CSUM, GSO_TCPV4));
        assert_eq!(begin.header[2..4], 54_u16.to_ne_bytes());
        let changed = begin.take_frame(&frame).unwrap();
        // 10.0.0.1 and 10.0.0.2, protocol 6, 3000 bytes.
        let sum = 0x0a00 + 1 + 0x0a00 + 2 + 6 + 3000_u16;
        assert_eq!(changed[50..52], sum.to_be_bytes());
    }

    #[test]
    fn what_a_header_cannot_mean_is_dropped() {
        let blank = Offload { csum_blank: true, csum_valid: true, gso: None };
        let gso = |kind, size| Offload { gso: Some(Gso { size, kind }), ..blank };
        let tcp = ipv4(TCP, &[0; 20]);
        assert!(Begin::of(&tcp, blank).is_some());
        assert!(Begin::of(&ipv4(1, &[0; 20]), blank).is_none(), "no checksum is known");
        assert!(Begin::of(&tcp, gso(GsoKind::Tcp6, 100)).is_none(), "another protocol");
        assert!(Begin::of(&tcp, gso(GsoKind::Tcp4, 100)).is_none(), "TCP's header has no bytes");
        for len in 0..tcp.len() {
            let _ = Begin::of(&tcp[..len], blank);
            let _ = Begin::of(&tcp[..len], gso(GsoKind::Tcp4, 1));
        }
        let mut header = [0; VNET_BYTES];
        header[1] = 3;
        assert_eq!(received(&header, &mut tcp.clone()), None, "UDP in pieces");
        let outside = [NEEDS_CSUM, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(received(&outside, &mut tcp.clone()), None);
    }
}
