//! The messages of NBD, as bytes. All numbers are big-endian (nbd-rules.md 1).

/// The first magic number of a server.
pub(super) const SERVER_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// The second magic number of a server, which also precedes each option.
pub(super) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Flags of the handshake, of either side.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 2;

/// The options of a client before it has an export.
pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
    pub(in crate::nbd) const STRUCTURED_REPLY: u32 = 8;
    pub(in crate::nbd) const LIST_META_CONTEXT: u32 = 9;
    pub(in crate::nbd) const SET_META_CONTEXT: u32 = 10;
}

/// The replies to options.
pub(super) mod reply {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const META_CONTEXT: u32 = 4;
    pub(in crate::nbd) const UNSUPPORTED: u32 = 1 << 31 | 1;
    pub(in crate::nbd) const INVALID: u32 = 1 << 31 | 3;
    pub(in crate::nbd) const UNKNOWN: u32 = 1 << 31 | 6;
    pub(in crate::nbd) const TOO_BIG: u32 = 1 << 31 | 9;
}

/// The kinds of information about an export.
pub(super) mod info {
    pub(in crate::nbd) const EXPORT: u16 = 0;
    pub(in crate::nbd) const NAME: u16 = 1;
    pub(in crate::nbd) const BLOCK_SIZE: u16 = 3;
}

/// The flags of an export.
pub(super) mod can {
    pub(in crate::nbd) const HAS_FLAGS: u16 = 1;
    pub(in crate::nbd) const READ_ONLY: u16 = 1 << 1;
    pub(in crate::nbd) const FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const FUA: u16 = 1 << 3;
    pub(in crate::nbd) const TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const DF: u16 = 1 << 7;
    pub(in crate::nbd) const MULTI_CONN: u16 = 1 << 8;
}

/// The commands.
pub(super) mod command {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISCONNECT: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 7;
}

/// The flags of commands.
pub(super) mod flag {
    /// The data are durable when the reply is sent.
    pub(in crate::nbd) const FUA: u16 = 1;
    /// Zeros take space.
    pub(in crate::nbd) const NO_HOLE: u16 = 1 << 1;
    /// The data come in one chunk.
    pub(in crate::nbd) const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub(in crate::nbd) const REQ_ONE: u16 = 1 << 3;
}

/// The errors of commands.
pub(super) mod error {
    pub(in crate::nbd) const PERM: u32 = 1;
    pub(in crate::nbd) const IO: u32 = 5;
    pub(in crate::nbd) const INVALID: u32 = 22;
    pub(in crate::nbd) const NO_SPACE: u32 = 28;
    pub(in crate::nbd) const OVERFLOW: u32 = 75;
}

/// The kinds of chunks.
pub(super) mod chunk {
    pub(in crate::nbd) const DATA: u16 = 1;
    pub(in crate::nbd) const HOLE: u16 = 2;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 5;
    pub(in crate::nbd) const ERROR: u16 = 1 << 15 | 1;
}

/// The flag of the last chunk of a reply.
pub(super) const DONE: u16 = 1;

/// The namespace and name of the one context, and its number on the wire.
pub(super) const CONTEXT: &str = "base:allocation";
pub(super) const CONTEXT_ID: u32 = 1;

/// The state of an extent that reads as zeros and takes no space.
const HOLE_AND_ZERO: u32 = 3;

/// Bytes of a request, besides its data.
pub(super) const REQUEST_BYTES: usize = 28;
/// The longest head of a reply.
pub(super) const MAX_HEAD_BYTES: usize = 32;

/// A request as it came. Nothing in it was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawRequest {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Reads numbers from the front of bytes. `None`: there are too few bytes.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a length, and this number of bytes.
    pub(super) fn counted(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).ok()?)
    }
}

impl RawRequest {
    /// Parses a request. `None`: the bytes are not a request, and the rest of the stream is
    /// unusable.
    pub(super) fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<RawRequest> {
        let mut fields = Fields(bytes);
        if fields.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(RawRequest {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            len: fields.u32()?,
        })
    }

    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Adds the reply to an option.
pub(super) fn push_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(reply.to_be_bytes());
    // The data are shorter than the longest option.
    out.extend((len as u32).to_be_bytes());
    data.iter().for_each(|part| out.extend(*part));
}

/// The head of a reply, before its data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    bytes: [u8; MAX_HEAD_BYTES],
    len: u8,
}

impl Head {
    fn new(parts: &[&[u8]]) -> Head {
        let mut head = Head { bytes: [0; MAX_HEAD_BYTES], len: 0 };
        for part in parts {
            let at = usize::from(head.len);
            head.bytes[at..at + part.len()].copy_from_slice(part);
            head.len += part.len() as u8;
        }
        head
    }

    /// The head of further data.
    pub(super) fn none() -> Head {
        Head::new(&[])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// A simple reply. The data of a read follow.
    pub(super) fn simple(cookie: u64, error: u32) -> Head {
        let magic = SIMPLE_REPLY_MAGIC.to_be_bytes();
        Head::new(&[&magic, &error.to_be_bytes(), &cookie.to_be_bytes()])
    }

    fn chunk(cookie: u64, kind: u16, done: bool, len: u32, more: &[&[u8]]) -> Head {
        let flags = if done { DONE } else { 0 };
        let mut fixed = [0; 20];
        fixed[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
        fixed[4..6].copy_from_slice(&flags.to_be_bytes());
        fixed[6..8].copy_from_slice(&kind.to_be_bytes());
        fixed[8..16].copy_from_slice(&cookie.to_be_bytes());
        fixed[16..].copy_from_slice(&len.to_be_bytes());
        match more {
            [] => Head::new(&[&fixed]),
            [one] => Head::new(&[&fixed, one]),
            [one, two, ..] => Head::new(&[&fixed, one, two]),
        }
    }

    /// A chunk whose data follow: `len` bytes of the disk from `offset` on.
    pub(super) fn data(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        Head::chunk(cookie, chunk::DATA, done, len + 8, &[&offset.to_be_bytes()])
    }

    /// A chunk for a range of zeros.
    pub(super) fn hole(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        let (offset, bytes) = (offset.to_be_bytes(), len.to_be_bytes());
        Head::chunk(cookie, chunk::HOLE, done, 12, &[&offset, &bytes])
    }

    /// The last chunk of a reply to a request that has failed.
    pub(super) fn error(cookie: u64, error: u32) -> Head {
        let text_bytes = 0u16.to_be_bytes();
        Head::chunk(cookie, chunk::ERROR, true, 6, &[&error.to_be_bytes(), &text_bytes])
    }

    /// The last chunk, which this number of extents follow.
    pub(super) fn status(cookie: u64, extents: usize) -> Head {
        // A request has a bounded number of extents.
        let len = 4 + 8 * extents as u32;
        Head::chunk(cookie, chunk::BLOCK_STATUS, true, len, &[&CONTEXT_ID.to_be_bytes()])
    }
}

/// An extent of a [status](Head::status).
pub(super) fn push_extent(out: &mut Vec<u8>, len: u32, zeros: bool) {
    out.extend(len.to_be_bytes());
    out.extend(if zeros { HOLE_AND_ZERO } else { 0 }.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_it_stands_and_only_with_its_magic() {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6]);
        bytes[8..16].copy_from_slice(&7u64.to_be_bytes());
        bytes[16..24].copy_from_slice(&(1u64 << 40).to_be_bytes());
        bytes[24..].copy_from_slice(&4096u32.to_be_bytes());
        let request = RawRequest { flags: 1, command: 6, cookie: 7, offset: 1 << 40, len: 4096 };
        assert_eq!(RawRequest::parse(&bytes), Some(request));
        assert!(request.has(flag::FUA) && !request.has(flag::DF));
        bytes[0] ^= 1;
        assert_eq!(RawRequest::parse(&bytes), None);
    }

    #[test]
    fn heads_have_the_lengths_that_the_protocol_gives_them() {
        assert_eq!(Head::simple(1, 0).bytes().len(), 16);
        assert_eq!(Head::data(1, true, 0, 512).bytes().len(), 28);
        assert_eq!(Head::hole(1, true, 0, 512).bytes().len(), 32);
        assert_eq!(Head::error(1, 5).bytes().len(), 26);
        let status = Head::status(1, 2);
        assert_eq!(status.bytes().len(), 24);
        assert_eq!(status.bytes()[16..20], 20u32.to_be_bytes());
        assert_eq!(status.bytes()[4..8], [0, 1, 0, 5]);
    }
}
