//! The blkif wire format: what stands in the slots of a shared ring.
//!
//! Pure functions over private copies. Layouts follow `xen/include/public/io/blkif.h` as the
//! 64-bit and the 32-bit x86 compilers lay it out (blkif.md 1.2 and 1.3); nothing here has been
//! validated against a disk, and every field is as the guest wrote it.

use crate::hypervisor::GrantRef;
use crate::slots;

pub use crate::slots::RING_HEADER_BYTES;

/// A 512-byte unit on the wire, whatever the medium's own block is (blkif.md 3.5).
pub const SECTOR_BYTES: u64 = 512;
/// Segments that fit in a plain request.
pub const MAX_DIRECT_SEGMENTS: usize = 11;
/// Segment descriptors in one indirect page.
pub const SEGMENTS_PER_INDIRECT_PAGE: usize = 512;
/// Indirect pages that a request can name.
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Bytes of a segment descriptor.
pub const SEGMENT_BYTES: usize = 8;
/// Bytes of the largest slot.
pub const MAX_SLOT_BYTES: usize = 112;
/// Largest ring: 2^4 pages.
pub const MAX_RING_ORDER: u32 = 4;

/// A request succeeded.
pub const STATUS_OKAY: i16 = 0;
/// A request failed.
pub const STATUS_ERROR: i16 = -1;
/// The operation is not supported. Never for reads and writes: Windows takes it for success
/// (blkif.md 2, rule 2).
pub const STATUS_NOT_SUPPORTED: i16 = -2;

/// `BLKIF_OP_READ`.
pub const OP_READ: u8 = 0;
/// `BLKIF_OP_WRITE`.
pub const OP_WRITE: u8 = 1;
/// `BLKIF_OP_WRITE_BARRIER`.
pub const OP_BARRIER: u8 = 2;
/// `BLKIF_OP_FLUSH_DISKCACHE`.
pub const OP_FLUSH: u8 = 3;
/// `BLKIF_OP_DISCARD`.
pub const OP_DISCARD: u8 = 5;
/// `BLKIF_OP_INDIRECT`.
pub const OP_INDIRECT: u8 = 6;

/// `BLKIF_DISCARD_SECURE`, in the flag byte of a discard.
pub const DISCARD_SECURE: u8 = 1;

/// The structure layout that a frontend uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `x86_64-abi`, this machine's own.
    X86_64,
    /// `x86_32-abi`: a 32-bit guest, and what a missing key means.
    X86_32,
}

impl Protocol {
    /// From the frontend's `protocol` key; `None` if it names a layout that we do not know.
    pub fn from_key(value: Option<&str>) -> Option<Protocol> {
        match value {
            Some("x86_64-abi") => Some(Protocol::X86_64),
            // blkif.md 1.3: missing means 32-bit x86, even for a 64-bit guest.
            Some("x86_32-abi") | None => Some(Protocol::X86_32),
            Some(_) => None,
        }
    }

    /// The value of the `protocol` key.
    pub fn key(self) -> &'static str {
        match self {
            Protocol::X86_64 => "x86_64-abi",
            Protocol::X86_32 => "x86_32-abi",
        }
    }

    /// Bytes from one slot to the next.
    pub const fn slot_bytes(self) -> usize {
        match self {
            Protocol::X86_64 => 112,
            Protocol::X86_32 => 108,
        }
    }

    /// Slots of a ring of `2^order` pages: a power of two.
    pub const fn entries(self, order: u32) -> u32 {
        slots::entries(1 << order, self.slot_bytes())
    }

    const fn id_offset(self) -> usize {
        match self {
            Protocol::X86_64 => 8,
            Protocol::X86_32 => 4,
        }
    }

    /// Where the pieces after `id` begin: sector number, then what the operation adds.
    const fn sector_offset(self) -> usize {
        self.id_offset() + 8
    }

    const fn segments_offset(self) -> usize {
        self.sector_offset() + 8
    }

    const fn indirect_grefs_offset(self) -> usize {
        // After the sector number stand the handle and, on x86_64 as on x86_32, two bytes of pad.
        self.sector_offset() + 12
    }
}

/// A private copy of one slot; bytes past the protocol's slot size are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub [u8; MAX_SLOT_BYTES]);

impl Slot {
    /// Its bytes as words.
    #[inline]
    pub fn words(&self) -> [u64; MAX_SLOT_BYTES / 8] {
        let (words, _) = self.0.as_chunks();
        std::array::from_fn(|i| u64::from_ne_bytes(words[i]))
    }
}

impl Default for Slot {
    fn default() -> Self {
        Slot([0; MAX_SLOT_BYTES])
    }
}

/// One segment as the guest described it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawSegment {
    /// The frame's grant.
    pub gref: u32,
    /// First 512-byte sector in the frame.
    pub first_sect: u8,
    /// Last sector, inclusive.
    pub last_sect: u8,
}

impl RawSegment {
    /// From a descriptor's eight bytes.
    pub fn decode(b: &[u8; SEGMENT_BYTES]) -> Self {
        RawSegment {
            gref: u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            first_sect: b[4],
            last_sect: b[5],
        }
    }

    /// A descriptor's eight bytes.
    pub fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let g = self.gref.to_le_bytes();
        [g[0], g[1], g[2], g[3], self.first_sect, self.last_sect, 0, 0]
    }
}

/// The four operations that share the plain layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainOp {
    /// Fill the segments from the disk.
    Read,
    /// Write the segments to the disk.
    Write,
    /// Everything before, then this, then everything after.
    Barrier,
    /// Flush, then write the segments if there are any.
    Flush,
}

/// The operations that may stand in the `indirect_op` byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndirectOp {
    /// A large read.
    Read,
    /// A large write.
    Write,
    /// Anything else; the byte is echoed in the error response.
    Other(u8),
}

impl IndirectOp {
    fn from_byte(b: u8) -> Self {
        match b {
            OP_READ => IndirectOp::Read,
            OP_WRITE => IndirectOp::Write,
            other => IndirectOp::Other(other),
        }
    }

    /// The byte on the wire, which is also the operation of the response (blkif.md 2, rule 1).
    pub fn byte(self) -> u8 {
        match self {
            IndirectOp::Read => OP_READ,
            IndirectOp::Write => OP_WRITE,
            IndirectOp::Other(b) => b,
        }
    }
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// READ, WRITE, WRITE_BARRIER, FLUSH_DISKCACHE.
    Plain {
        /// Which of the four.
        op: PlainOp,
        /// As written; more than [`MAX_DIRECT_SEGMENTS`] is an error.
        nr_segments: u8,
        /// First sector on the disk.
        sector: u64,
        /// The slot's eleven descriptors; those from `nr_segments` on mean nothing.
        segments: [RawSegment; MAX_DIRECT_SEGMENTS],
    },
    /// DISCARD.
    Discard {
        /// First sector.
        sector: u64,
        /// Sectors.
        nr_sectors: u64,
        /// The flag byte.
        flag: u8,
    },
    /// INDIRECT.
    Indirect {
        /// The operation on the segments.
        op: IndirectOp,
        /// How many there are on the indirect pages.
        nr_segments: u16,
        /// First sector on the disk.
        sector: u64,
        /// The pages that hold the descriptors.
        pages: [GrantRef; MAX_INDIRECT_PAGES],
    },
    /// Anything else.
    Unknown,
}

/// A request's identity and its decoded body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Opaque; all 64 bits are echoed (a kernel pointer on Windows).
    pub id: u64,
    /// The byte that the response's `operation` has to repeat.
    pub response_op: u8,
    /// The rest.
    pub message: Message,
}

fn u32_at(slot: &Slot, at: usize) -> u32 {
    let mut b = [0; 4];
    b.copy_from_slice(&slot.0[at..at + 4]);
    u32::from_le_bytes(b)
}

fn u64_at(slot: &Slot, at: usize) -> u64 {
    let mut b = [0; 8];
    b.copy_from_slice(&slot.0[at..at + 8]);
    u64::from_le_bytes(b)
}

fn segment_at(slot: &Slot, at: usize) -> RawSegment {
    let mut b = [0; SEGMENT_BYTES];
    b.copy_from_slice(&slot.0[at..at + SEGMENT_BYTES]);
    RawSegment::decode(&b)
}

impl Request {
    /// Reads a private copy of a slot. Total: every bit pattern means something.
    pub fn decode(protocol: Protocol, slot: &Slot) -> Request {
        let operation = slot.0[0];
        let id = u64_at(slot, protocol.id_offset());
        let message = match operation {
            OP_READ => Self::plain(protocol, slot, PlainOp::Read),
            OP_WRITE => Self::plain(protocol, slot, PlainOp::Write),
            OP_BARRIER => Self::plain(protocol, slot, PlainOp::Barrier),
            OP_FLUSH => Self::plain(protocol, slot, PlainOp::Flush),
            OP_DISCARD => Message::Discard {
                flag: slot.0[1],
                sector: u64_at(slot, protocol.sector_offset()),
                nr_sectors: u64_at(slot, protocol.sector_offset() + 8),
            },
            OP_INDIRECT => {
                let at = protocol.indirect_grefs_offset();
                Message::Indirect {
                    op: IndirectOp::from_byte(slot.0[1]),
                    nr_segments: u16::from_le_bytes([slot.0[2], slot.0[3]]),
                    sector: u64_at(slot, protocol.sector_offset()),
                    pages: std::array::from_fn(|i| GrantRef(u32_at(slot, at + 4 * i))),
                }
            }
            _ => Message::Unknown,
        };
        let response_op = match message {
            Message::Indirect { op, .. } => op.byte(),
            _ => operation,
        };
        Request { id, response_op, message }
    }

    fn plain(protocol: Protocol, slot: &Slot, op: PlainOp) -> Message {
        let at = protocol.segments_offset();
        Message::Plain {
            op,
            nr_segments: slot.0[1],
            sector: u64_at(slot, protocol.sector_offset()),
            segments: std::array::from_fn(|i| segment_at(slot, at + SEGMENT_BYTES * i)),
        }
    }

    /// Writes the slot as a frontend of that protocol would; the opposite of
    /// [`decode`](Self::decode) but for `Unknown`, which becomes `response_op` and the id.
    pub fn encode(&self, protocol: Protocol) -> Slot {
        let mut slot = Slot::default();
        let mut put = |at: usize, bytes: &[u8]| slot.0[at..at + bytes.len()].copy_from_slice(bytes);
        put(protocol.id_offset(), &self.id.to_le_bytes());
        let sector_at = protocol.sector_offset();
        match self.message {
            Message::Plain { op, nr_segments, sector, segments } => {
                let operation = match op {
                    PlainOp::Read => OP_READ,
                    PlainOp::Write => OP_WRITE,
                    PlainOp::Barrier => OP_BARRIER,
                    PlainOp::Flush => OP_FLUSH,
                };
                put(0, &[operation, nr_segments]);
                put(sector_at, &sector.to_le_bytes());
                for (i, segment) in segments.iter().enumerate() {
                    put(protocol.segments_offset() + SEGMENT_BYTES * i, &segment.encode());
                }
            }
            Message::Discard { sector, nr_sectors, flag } => {
                put(0, &[OP_DISCARD, flag]);
                put(sector_at, &sector.to_le_bytes());
                put(sector_at + 8, &nr_sectors.to_le_bytes());
            }
            Message::Indirect { op, nr_segments, sector, pages } => {
                put(0, &[OP_INDIRECT, op.byte()]);
                put(2, &nr_segments.to_le_bytes());
                put(sector_at, &sector.to_le_bytes());
                for (i, page) in pages.iter().enumerate() {
                    put(protocol.indirect_grefs_offset() + 4 * i, &page.0.to_le_bytes());
                }
            }
            Message::Unknown => put(0, &[self.response_op]),
        }
        slot
    }
}

/// An answer. Its layout is the same in both protocols; only the tail's padding differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request's.
    pub id: u64,
    /// The request's [`response_op`](Request::response_op).
    pub operation: u8,
    /// [`STATUS_OKAY`], [`STATUS_ERROR`] or [`STATUS_NOT_SUPPORTED`].
    pub status: i16,
}

impl Response {
    /// Bytes on the wire, without the tail's padding.
    pub const BYTES: usize = 12;

    /// The first twelve bytes of the slot; the pad byte is zero (XSA-216).
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        b[..8].copy_from_slice(&self.id.to_le_bytes());
        b[8] = self.operation;
        b[10..].copy_from_slice(&self.status.to_le_bytes());
        b
    }

    /// As a frontend reads it.
    pub fn decode(slot: &Slot) -> Response {
        Response {
            id: u64_at(slot, 0),
            operation: slot.0[8],
            status: i16::from_le_bytes([slot.0[10], slot.0[11]]),
        }
    }
}

#[cfg(test)]
mod tests;
