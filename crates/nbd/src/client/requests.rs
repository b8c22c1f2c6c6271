//! The requests of a client as bytes.

use crate::wire::{REQUEST_BYTES, REQUEST_MAGIC, command, flag};

/// Requests of one connection under way, at most.
pub const MAX_REQUESTS: usize = 128;

/// The command of a request. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads a range.
    Read {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Writes a range; its data follow the request.
    Write {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Makes completed writes durable.
    Flush,
    /// The range is unused.
    Trim {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// The range reads as zeros.
    WriteZeroes {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Zeros take space.
        allocate: bool,
    },
    /// Asks for the extents of a range.
    Status {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
}

/// A request under way: its place in the table of its connection, and which use of that place it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Its place, below [`MAX_REQUESTS`].
    pub slot: u16,
    /// The number of requests of the connection before it.
    pub serial: u32,
}

impl Ticket {
    /// The number on the wire.
    pub fn cookie(self) -> u64 {
        u64::from(self.serial) << 16 | u64::from(self.slot)
    }
}

impl Command {
    /// The range; a flush has an empty one.
    pub fn range(&self) -> (u64, u32) {
        match *self {
            Command::Read { offset, len }
            | Command::Write { offset, len }
            | Command::Trim { offset, len }
            | Command::WriteZeroes { offset, len, .. }
            | Command::Status { offset, len } => (offset, len),
            Command::Flush => (0, 0),
        }
    }

    /// Whether repeating it after other requests could undo these.
    pub fn changes(&self) -> bool {
        matches!(self, Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. })
    }

    /// The bytes of the request; the data of a write follow.
    pub fn encode(&self, cookie: u64) -> [u8; REQUEST_BYTES] {
        let (code, flags) = match self {
            Command::Read { .. } => (command::READ, 0),
            Command::Write { .. } => (command::WRITE, 0),
            Command::Flush => (command::FLUSH, 0),
            Command::Trim { .. } => (command::TRIM, 0),
            Command::WriteZeroes { allocate: true, .. } => (command::WRITE_ZEROES, flag::NO_HOLE),
            Command::WriteZeroes { .. } => (command::WRITE_ZEROES, 0),
            Command::Status { .. } => (command::BLOCK_STATUS, 0),
        };
        request(flags, code, cookie, self.range())
    }

    /// The request that ends a connection; it has no reply.
    pub fn disconnect() -> [u8; REQUEST_BYTES] {
        request(0, command::DISCONNECT, 0, (0, 0))
    }
}

fn request(flags: u16, code: u16, cookie: u64, range: (u64, u32)) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&code.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&range.0.to_be_bytes());
    bytes[24..].copy_from_slice(&range.1.to_be_bytes());
    bytes
}
