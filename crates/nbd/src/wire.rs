//! The messages of NBD, as bytes, of servers and clients. All numbers are big-endian (nbd-rules.md 1).
//! Names are those of the NBD protocol (nbd-rules.md) without their prefix.

/// The first magic number of a server.
pub const SERVER_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// The second magic number of a server, which also precedes each option.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The magic number before each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The magic number of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The magic number of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The magic number of a chunk of a reply behind an extended head.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// A flag of the handshake, of either side: options that are unknown get an error, and the client may go on.
pub const FIXED_NEWSTYLE: u16 = 1;
/// The 124 bytes of zeros behind the answer to EXPORT_NAME are left out.
pub const NO_ZEROES: u16 = 2;

/// The options of a client before it has an export.
pub mod option {
    /// Chooses an export; it has no error but the end of the connection.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the negotiation.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Asks for TLS from here on.
    pub const STARTTLS: u32 = 5;
    /// Asks for information about an export.
    pub const INFO: u32 = 6;
    /// As INFO, and chooses the export.
    pub const GO: u32 = 7;
    /// Asks for replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Asks for the contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Asks for heads with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
    /// Of no standard: a relay between client and server says which version of it this is, by 32 bits. Without them it is
    /// the first. The server answers in the same form, by the version that both understand.
    pub const RELAYED: u32 = u32::from_be_bytes(*b"FRLY");
}

/// The replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// The name of an export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A context, and its number.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not know the option.
    pub const UNSUPPORTED: u32 = 1 << 31 | 1;
    /// The server was told to refuse the option.
    pub const POLICY: u32 = 1 << 31 | 2;
    /// The option is malformed, or came in the wrong place.
    pub const INVALID: u32 = 1 << 31 | 3;
    /// The option needs TLS first.
    pub const TLS_REQUIRED: u32 = 1 << 31 | 5;
    /// There is no export of this name.
    pub const UNKNOWN: u32 = 1 << 31 | 6;
    /// The option or its reply is too long.
    pub const TOO_BIG: u32 = 1 << 31 | 9;
    /// This works with extended heads only, or they cannot be left again.
    pub const EXTENDED_REQUIRED: u32 = 1 << 31 | 10;
    /// Of no standard: a helper process of ours has no export, and its text says why; behind a line feed, what to do.
    pub const FAULT: u32 = 1 << 31 | u32::from_be_bytes(*b"\0FFA");
    /// As FAULT, and it may pass by itself.
    pub const PASSING_FAULT: u32 = 1 << 31 | u32::from_be_bytes(*b"\0FFP");
}

/// The kinds of information about an export.
pub mod info {
    /// Size in bytes and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// The minimal, preferred and largest block, in bytes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// The flags of an export.
pub mod can {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1;
    /// Changes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is known.
    pub const FLUSH: u16 = 1 << 2;
    /// The flag FUA is known.
    pub const FUA: u16 = 1 << 3;
    /// TRIM is known.
    pub const TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is known.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF is known.
    pub const DF: u16 = 1 << 7;
    /// A flush covers the writes of all connections.
    pub const MULTI_CONN: u16 = 1 << 8;
    /// CACHE is known.
    pub const CACHE: u16 = 1 << 10;
    /// The flag FAST_ZERO is known.
    pub const FAST_ZERO: u16 = 1 << 11;
}

/// The commands.
pub mod command {
    /// Reads a range.
    pub const READ: u16 = 0;
    /// Writes a range; the data follow the request.
    pub const WRITE: u16 = 1;
    /// Ends the connection; it has no reply.
    pub const DISCONNECT: u16 = 2;
    /// Makes completed writes durable.
    pub const FLUSH: u16 = 3;
    /// The range is unused.
    pub const TRIM: u16 = 4;
    /// The range will be read soon.
    pub const CACHE: u16 = 5;
    /// The range reads as zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Asks for the extents of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// The flags of commands.
pub mod flag {
    /// The data are durable when the reply is sent.
    pub const FUA: u16 = 1;
    /// Zeros take space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The data come in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeros are refused if they would take as long as a write.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of the data behind the request. For extended heads only.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The errors of commands.
pub mod error {
    /// EPERM: the export is read-only.
    pub const PERM: u32 = 1;
    /// EIO.
    pub const IO: u32 = 5;
    /// EINVAL.
    pub const INVALID: u32 = 22;
    /// ENOSPC.
    pub const NO_SPACE: u32 = 28;
    /// EOVERFLOW: the reply does not fit in one chunk.
    pub const OVERFLOW: u32 = 75;
    /// ENOTSUP: zeros would take as long as a write.
    pub const UNSUPPORTED: u32 = 95;
}

/// The kinds of chunks.
pub mod chunk {
    /// Nothing: the request has succeeded.
    pub const NONE: u16 = 0;
    /// An offset, and data.
    pub const DATA: u16 = 1;
    /// An offset and a length: zeros.
    pub const HOLE: u16 = 2;
    /// A context, and extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// A context, and a number of extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error and a text; the request has failed.
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// The flag of the last chunk of a reply.
pub const DONE: u16 = 1;

/// The namespace and name of the context that says where data are.
pub const CONTEXT: &str = "base:allocation";
/// Its number on the wire.
pub const CONTEXT_ID: u32 = 1;
/// The namespace and name of QEMU's context that says which image of a chain has the data.
pub const DEPTH_CONTEXT: &str = "qemu:allocation-depth";
/// Its number on the wire.
pub const DEPTH_CONTEXT_ID: u32 = 2;

/// The beginning of the name of a context that says what has changed since a dirty map was begun; the map's name follows.
pub const DIRTY_CONTEXT: &str = "ferrite:dirty-";
/// The same as QEMU calls it.
pub const QEMU_DIRTY_CONTEXT: &str = "qemu:dirty-bitmap:";

/// The state of an extent that may have changed.
pub const DIRTY: u32 = 1;
/// The state of an extent that reads as zeros and takes no space.
pub const HOLE_AND_ZERO: u32 = 3;

/// Bytes of a request, besides its data.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a request with an extended head, besides its data.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// The longest head of a reply.
pub const MAX_HEAD_BYTES: usize = 44;

/// A request as it came. Nothing in it was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRequest {
    /// The flags.
    pub flags: u16,
    /// The command.
    pub command: u16,
    /// The client's number for it, which its reply has, too.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Reads numbers from the front of bytes. `None`: there are too few bytes.
pub struct Fields<'a>(
    /// The bytes that are left.
    pub &'a [u8],
);

impl<'a> Fields<'a> {
    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    /// The next two bytes as a number.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next four bytes as a number.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next eight bytes as a number.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a length, and this number of bytes.
    pub fn counted(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).ok()?)
    }
}

impl RawRequest {
    /// Parses a request. `None`: the bytes are not a request, and the rest of the stream is
    /// unusable.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<RawRequest> {
        RawRequest::parse_head(bytes, REQUEST_MAGIC, |len| len.u32().map(u64::from))
    }

    /// Parses a request with an extended head. `None`: as for [`parse`](Self::parse).
    pub fn parse_extended(bytes: &[u8; EXTENDED_REQUEST_BYTES]) -> Option<RawRequest> {
        RawRequest::parse_head(bytes, EXTENDED_REQUEST_MAGIC, Fields::u64)
    }

    #[inline]
    fn parse_head<'a>(
        bytes: &'a [u8],
        magic: u32,
        len: impl FnOnce(&mut Fields<'a>) -> Option<u64>,
    ) -> Option<RawRequest> {
        let mut fields = Fields(bytes);
        if fields.u32()? != magic {
            return None;
        }
        Some(RawRequest {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            len: len(&mut fields)?,
        })
    }

    /// Whether the request has this flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The form of requests and replies that a client has negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Each request has one reply.
    #[default]
    Simple,
    /// Replies to reads and queries are made of chunks.
    Structured,
    /// All replies are made of chunks, and heads have 64-bit lengths.
    Extended,
}

/// Adds the reply to an option.
pub fn push_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[&[u8]]) {
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
pub struct Head {
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
    pub fn none() -> Head {
        Head::new(&[])
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// A simple reply. The data of a read follow.
    pub fn simple(cookie: u64, error: u32) -> Head {
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
    pub fn data(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        Head::chunk(cookie, chunk::DATA, done, len + 8, &[&offset.to_be_bytes()])
    }

    /// A chunk for a range of zeros.
    pub fn hole(cookie: u64, done: bool, offset: u64, len: u32) -> Head {
        let (offset, bytes) = (offset.to_be_bytes(), len.to_be_bytes());
        Head::chunk(cookie, chunk::HOLE, done, 12, &[&offset, &bytes])
    }

    /// The last chunk of a reply to a request that has failed.
    pub fn error(cookie: u64, error: u32) -> Head {
        let text_bytes = 0u16.to_be_bytes();
        Head::chunk(cookie, chunk::ERROR, true, 6, &[&error.to_be_bytes(), &text_bytes])
    }

    /// The last chunk, which this number of extents follow.
    pub fn status(cookie: u64, extents: usize) -> Head {
        Head::status_of(cookie, true, CONTEXT_ID, extents)
    }

    fn status_of(cookie: u64, done: bool, context: u32, extents: usize) -> Head {
        // A request has a bounded number of extents.
        let len = 4 + 8 * extents as u32;
        Head::chunk(cookie, chunk::BLOCK_STATUS, done, len, &[&context.to_be_bytes()])
    }
}

/// An extent of a [status](ReplyTo::status) with 32-bit lengths.
pub fn push_extent(out: &mut Vec<u8>, len: u32, state: u32) {
    out.extend(len.to_be_bytes());
    out.extend(state.to_be_bytes());
}

mod forms;

pub use forms::{ReplyTo, push_long_extent};

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
