//! How the fuzzer's bytes become a file.

use ferrite_disk::Format;

use crate::images::Sketch;
use crate::images::vhd::Sealed;

/// Files have room for blocks of the usual size, but an input has not: one stretch of zeros is
/// put in. And checksums are set right on demand, since no change of a byte would get past them.
///
/// In front of the file's bytes: a byte of flags, an unused one, where the zeros go (`u16`) and
/// how many there are (`u32`), both in sectors and little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// See the constants.
    pub flags: u8,
    /// In sectors.
    pub hole_at: u16,
    /// In sectors.
    pub hole: u32,
    /// The file without the hole.
    pub bytes: Vec<u8>,
}

const HEAD_BYTES: usize = 8;
/// Bytes of a file without its hole.
const MAX_BYTES: usize = 128 << 10;
/// 2 GiB.
const MAX_HOLE: u32 = 1 << 22;

impl Recipe {
    /// The checksums of footers.
    pub const SEAL_FOOTERS: u8 = 1;
    /// The checksum of the dynamic header.
    pub const SEAL_HEADER: u8 = 2;
    /// The footer at the end is the one at the beginning.
    pub const SAME_FOOTERS: u8 = 4;
    /// The image is written to.
    pub const WRITE: u8 = 8;
    /// The image is repaired.
    pub const REPAIR: u8 = 16;

    /// `None`: too short for one.
    pub fn decode(input: &[u8]) -> Option<Recipe> {
        let (head, bytes) = input.split_first_chunk::<HEAD_BYTES>()?;
        Some(Recipe {
            flags: head[0],
            hole_at: u16::from_le_bytes([head[2], head[3]]),
            hole: u32::from_le_bytes([head[4], head[5], head[6], head[7]]) % (MAX_HOLE + 1),
            bytes: bytes[..bytes.len().min(MAX_BYTES)].to_vec(),
        })
    }

    /// The opposite.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.flags, 0];
        out.extend(self.hole_at.to_le_bytes());
        out.extend(self.hole.to_le_bytes());
        out.extend(&self.bytes);
        out
    }

    pub(super) fn writes(&self) -> bool {
        self.flags & Recipe::WRITE != 0
    }

    pub(super) fn repairs(&self) -> bool {
        self.flags & Recipe::REPAIR != 0
    }

    pub(super) fn file(&self, format: Format) -> Sketch {
        let mut bytes = self.bytes.clone();
        if format == Format::Vhd {
            self.seal(&mut bytes);
        }
        let at = (usize::from(self.hole_at) * 512).min(bytes.len());
        let mut out = Sketch::new(0);
        out.put(0, &bytes[..at]);
        out.put(at as u64 + u64::from(self.hole) * 512, &bytes[at..]);
        out
    }

    fn seal(&self, bytes: &mut [u8]) {
        let asked = |flag| self.flags & flag != 0;
        if asked(Recipe::SEAL_HEADER)
            && let Some(header) = bytes.get_mut(512..512 + Sealed::Header.bytes())
        {
            Sealed::Header.seal(header);
        }
        let Some(last) = bytes.len().checked_sub(512).filter(|last| *last >= 512) else { return };
        if asked(Recipe::SAME_FOOTERS) {
            bytes.copy_within(..512, last);
        }
        if asked(Recipe::SEAL_FOOTERS) {
            Sealed::Footer.seal(&mut bytes[..512]);
            Sealed::Footer.seal(&mut bytes[last..]);
        }
    }
}
