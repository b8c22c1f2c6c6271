//! The structures on disk, as pure code over byte arrays: no I/O, no panics, every length bounded.
//!
//! Sources: Microsoft's "Virtual Hard Disk Image Format Specification" (1.0), and the behaviour of
//! blktap's `libvhd` where it differs (bytes instead of sectors in locators, the batmap, a nil
//! UUID for a raw parent). All numbers are big-endian.

pub(crate) mod batmap;
pub(crate) mod footer;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod layout;
pub(crate) mod locator;

use std::fmt;

use ferrite_host::clock::{self, Random, SplitMix64};

/// Bytes of a sector.
pub(crate) const SECTOR: u64 = 512;

/// The largest disk that libvhd, XAPI and QEMU all support, 2,040 GiB.
pub const MAX_DISK_BYTES: u64 = 2040 << 30;

/// The most blocks of a table that are used: 32 MiB of memory while the disk is open.
pub(crate) const MAX_BLOCKS: u32 = 4 << 20;

/// An invalid structure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {offset}: {why}")]
pub struct Malformed {
    /// Byte offset of the structure in the file.
    pub offset: u64,
    /// The structure, and what is wrong with it.
    pub why: String,
    /// It seems intact, and is of an unsupported kind.
    pub unsupported: bool,
}

impl Malformed {
    pub(crate) fn new(offset: u64, why: impl Into<String>) -> Malformed {
        Malformed { offset, why: why.into(), unsupported: false }
    }

    pub(crate) fn unsupported(offset: u64, why: impl Into<String>) -> Malformed {
        Malformed { unsupported: true, ..Malformed::new(offset, why) }
    }
}

/// The identity of an image; parents are recognised by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// All zeros: no image has it. As a parent's identity it means that the parent is raw.
    pub const NIL: Uuid = Uuid([0; 16]);

    /// A UUID of version 4, from a source of random numbers.
    pub fn random(source: &mut dyn Random) -> Uuid {
        let mut bytes = [0; 16];
        put(&mut bytes, 0, &source.next_u64().to_be_bytes());
        put(&mut bytes, 8, &source.next_u64().to_be_bytes());
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Uuid(bytes)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The values that make a new image unique.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// Its identity.
    pub uuid: Uuid,
    /// When it is made, in seconds since 1970.
    pub unix_s: u64,
}

impl Stamp {
    /// A random identity, and the present time.
    pub fn from_system() -> Stamp {
        Stamp { uuid: Uuid::random(&mut SplitMix64::from_system()), unix_s: clock::unix_time_s() }
    }
}

/// The checksum of footers and headers: the complement of the sum of all bytes, those of the
/// checksum itself, at `field`, counted as zero.
pub(crate) fn checksum(bytes: &[u8], field: usize) -> u32 {
    let sum = bytes.iter().enumerate().fold(0u32, |sum, (i, byte)| {
        let own = (field..field + 4).contains(&i);
        sum.wrapping_add(if own { 0 } else { u32::from(*byte) })
    });
    !sum
}

/// The `N` bytes at `at`. All callers pass constants inside arrays of a fixed size.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(part) = bytes.get(at..at + N) {
        out.copy_from_slice(part);
    }
    out
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// `n` rounded up to whole sectors.
pub(crate) fn whole_sectors(n: u64) -> u64 {
    n.div_ceil(SECTOR) * SECTOR
}

/// Four bytes for people: as text if they are text.
pub(crate) fn tag(bytes: [u8; 4]) -> String {
    bytes.escape_ascii().to_string()
}
