//! The messages as bytes (docs/internals/pool.md). It does no I/O.
//!
//! A connection begins as one of NBD does, up to the client's flags, so a tunnel that speaks TLS for NBD carries it. Then
//! comes the option [`OPTION`]. After its answer there are [`Header`]s alone, each with its payload behind it.

/// The option of NBD's handshake that begins a connection of a pool ("FeP1"). Its data are those of [`Greeting`].
pub const OPTION: u32 = 0x4665_5031;
/// The first bytes of each header ("FePm").
pub const MAGIC: u32 = 0x4665_506d;
/// The version of these messages.
pub const VERSION: u16 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 36;
/// Most bytes of a payload, and of a read.
pub const MAX_PAYLOAD: u32 = 1 << 20;
/// Most bytes that one request hashes.
pub const MAX_HASHED: u64 = 64 << 20;
/// Bytes that one hash stands for. The last ones of a request may be fewer.
pub const HASH_PIECE: u64 = 1 << 20;
/// Bytes of a hash (BLAKE3).
pub const HASH_BYTES: usize = 32;
/// Most requests of a connection that are not answered.
pub const MAX_REQUESTS: usize = 64;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 512;
/// Most regions of a copy.
pub const MAX_REGIONS: u64 = 16384;
/// Fewest bytes of a region.
pub const MIN_REGION: u64 = 1 << 20;
/// Most bytes of a name.
pub const MAX_NAME: usize = 64;

/// Bytes of a region of a copy of this size. All copies of a set have the same.
pub fn region_bytes(size: u64) -> u64 {
    size.div_ceil(MAX_REGIONS).next_power_of_two().max(MIN_REGION)
}

/// A copy on a LUN is a range of it, which begins and ends at multiples of this. The first one is the LUN's own.
pub const RANGE_UNIT: u64 = 1 << 20;

/// Bytes of the range of a copy of this size: a unit for its state, then the data.
pub fn range_bytes(size: u64) -> u64 {
    size.div_ceil(RANGE_UNIT).saturating_add(1).saturating_mul(RANGE_UNIT)
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// Makes a copy. `len`: its bytes. `start`: 1 if it is not whole until `Complete`. The payload is an [`Extent`].
    Create = 1,
    /// Begins a session. `start`: the generation. `len`: the owner. The payload is an [`Extent`].
    Open = 2,
    /// Writes the payload at `start`.
    Write = 3,
    /// Writes the payload at `start` if there is something else.
    Repair = 4,
    /// Reads `len` bytes at `start`.
    Read = 5,
    /// Makes durable what was answered before.
    Flush = 6,
    /// Asks whether the session still is the member's.
    Confirm = 7,
    /// Asks for the dirty regions.
    Bits = 8,
    /// Marks regions. The payload is their numbers, 8 bytes each.
    Mark = 9,
    /// Regions are not dirty any more. The payload is their numbers.
    Clear = 10,
    /// The copy is whole.
    Complete = 11,
    /// Asks for hashes of `len` bytes at `start`.
    Hash = 12,
    /// Makes `len` bytes at `start` zero.
    Zero = 13,
    /// Removes the copy for good.
    Delete = 14,
    /// Answer to `Open`. `start`: 1 if the copy may lack something. `len`: bytes of a region. The payload is the dirty ones.
    Opened = 0x101,
    /// Answer to `Open`. `start`: the generation of a later owner, or of another one.
    Refused = 0x102,
    /// Something is done. The payload is what was read, or hashes.
    Done = 0x103,
    /// Answer to `Bits`. The payload is the numbers of the dirty regions.
    Dirty = 0x104,
    /// Something failed, and the connection ends. `start`: an errno. The payload says why, in words.
    Failed = 0x105,
}

const KINDS: [Kind; 19] = {
    use Kind::*;
    [
        Create, Open, Write, Repair, Read, Flush, Confirm, Bits, Mark, Clear, Complete, Hash, Zero,
        Delete, Opened, Refused, Done, Dirty, Failed,
    ]
};

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// They do not begin with the magic.
    Magic,
    /// Another version, which is this.
    Version(u16),
    /// An unknown message, which is this.
    Kind(u16),
    /// So many bytes, which are too many or no whole numbers.
    Length(u32),
    /// A name that no copy may have.
    Name,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Magic => f.write_str("no message begins like this"),
            Malformed::Version(v) => write!(f, "messages of version {v}; this side has {VERSION}"),
            Malformed::Kind(kind) => write!(f, "unknown message {kind:#x}"),
            Malformed::Length(bytes) => write!(f, "{bytes} bytes are not allowed here"),
            Malformed::Name => f.write_str("a name has 1 to 64 of a-z, 0-9, '-' and '_'"),
        }
    }
}

/// The header before each payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message.
    pub kind: Kind,
    /// The request's number. An answer has that of its request.
    pub op: u64,
    /// See [`Kind`].
    pub start: u64,
    /// See [`Kind`].
    pub len: u64,
    /// Bytes of the payload.
    pub payload: u32,
}

impl Header {
    /// Its bytes.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[6..8].copy_from_slice(&(self.kind as u16).to_be_bytes());
        bytes[8..16].copy_from_slice(&self.op.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.start.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_be_bytes());
        bytes[32..].copy_from_slice(&self.payload.to_be_bytes());
        bytes
    }

    /// The header that these bytes are.
    ///
    /// # Errors
    /// They are none, or announce too much.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Malformed> {
        let number = |at: usize, len: usize| {
            bytes[at..at + len].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
        };
        if number(0, 4) != u64::from(MAGIC) {
            return Err(Malformed::Magic);
        }
        let (version, kind) = (number(4, 2) as u16, number(6, 2) as u16);
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        let kind =
            KINDS.into_iter().find(|known| *known as u16 == kind).ok_or(Malformed::Kind(kind))?;
        let payload = number(32, 4) as u32;
        if payload > MAX_PAYLOAD {
            return Err(Malformed::Length(payload));
        }
        Ok(Header { kind, op: number(8, 8), start: number(16, 8), len: number(24, 8), payload })
    }
}

/// A copy that an owner means: the payload of `Create` and `Open`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its identifier, of no other copy ever.
    pub id: [u8; 16],
    /// Its name, which its file has.
    pub name: String,
}

impl Extent {
    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        named(&self.id, &self.name)
    }

    /// The extent that these bytes are.
    ///
    /// # Errors
    /// They are none, or its name is not allowed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Extent, Malformed> {
        from_named(bytes).map(|(id, name)| Extent { id, name })
    }
}

/// The server that an owner means to talk to: the data of [`OPTION`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The pool's identifier.
    pub pool: [u8; 16],
    /// The server's name.
    pub server: String,
}

impl Greeting {
    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        named(&self.pool, &self.server)
    }

    /// The greeting that these bytes are.
    ///
    /// # Errors
    /// They are none, or its name is not allowed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Greeting, Malformed> {
        from_named(bytes).map(|(pool, server)| Greeting { pool, server })
    }
}

/// Whether a server or a copy may have this name.
pub fn is_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits) && !name.starts_with('-')
}

/// The numbers of regions as a payload.
pub fn regions_to_bytes(regions: impl IntoIterator<Item = crate::Region>) -> Vec<u8> {
    regions.into_iter().flat_map(|region| region.0.to_be_bytes()).collect()
}

/// The regions that a payload names. They may lie behind the disk's end.
///
/// # Errors
/// The payload has no whole numbers.
pub fn regions_from_bytes(bytes: &[u8]) -> Result<Vec<crate::Region>, Malformed> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    match rest.is_empty() {
        true => Ok(numbers.iter().map(|n| crate::Region(u64::from_be_bytes(*n))).collect()),
        false => Err(Malformed::Length(bytes.len() as u32)),
    }
}

fn named(id: &[u8; 16], name: &str) -> Vec<u8> {
    [&id[..], name.as_bytes()].concat()
}

fn from_named(bytes: &[u8]) -> Result<([u8; 16], String), Malformed> {
    let (id, name) =
        bytes.split_first_chunk::<16>().ok_or(Malformed::Length(bytes.len() as u32))?;
    let name = std::str::from_utf8(name).map_err(|_| Malformed::Name)?;
    if !is_name(name) {
        return Err(Malformed::Name);
    }
    Ok((*id, name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_itself_again_and_others_are_refused() {
        for kind in KINDS {
            let header = Header { kind, op: 1, start: u64::MAX, len: 3, payload: MAX_PAYLOAD };
            assert_eq!(Header::from_bytes(&header.to_bytes()), Ok(header));
        }
        let good = Header { kind: Kind::Read, op: 1, start: 2, len: 3, payload: 0 }.to_bytes();
        for (at, error) in [
            (0, Malformed::Magic),
            (4, Malformed::Version(0xff01)),
            (6, Malformed::Kind(0xff05)),
            (32, Malformed::Length(0xff00_0000)),
        ] {
            let mut bad = good;
            bad[at] = 0xff;
            assert_eq!(Header::from_bytes(&bad), Err(error));
        }
    }

    #[test]
    fn a_name_is_never_a_path() {
        for bad in ["", "..", "a/b", "A", "a.raw", "-a", &"a".repeat(65)] {
            assert_eq!(Extent::from_bytes(&named(&[1; 16], bad)), Err(Malformed::Name), "{bad}");
        }
        assert_eq!(Extent::from_bytes(&[1; 15]), Err(Malformed::Length(15)));
        let good = Extent { id: [7; 16], name: "disk-0_1".to_owned() };
        assert_eq!(Extent::from_bytes(&good.to_bytes()), Ok(good));
    }
}
