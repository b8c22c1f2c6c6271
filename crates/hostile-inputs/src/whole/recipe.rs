//! Makes a file from the fuzzer's bytes.

use ferrite_disk::Format;

use crate::images::Sketch;
use crate::images::vhd::Sealed;

/// Files need room for blocks of the usual size, but inputs are small. So one range of zeros is inserted. Checksums are
/// corrected on request, since no change of a byte would pass them.
///
/// Before the file's bytes: a byte of flags, an unused one, the place of the zeros (`u16`) and their number (`u32`),
/// both in sectors and little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// See the constants.
    pub flags: u8,
    /// The place of the zeros, in sectors.
    pub hole_at: u16,
    /// The number of zeros, in sectors.
    pub hole: u32,
    /// The file without the hole.
    pub bytes: Vec<u8>,
}

const HEAD_BYTES: usize = 8;
/// Bytes of a file without its hole.
const MAX_BYTES: usize = 128 << 10;
/// The most zeros: 2 GiB.
const MAX_HOLE: u32 = 1 << 22;

impl Recipe {
    /// Flag: correct the checksums of footers.
    pub const SEAL_FOOTERS: u8 = 1;
    /// Flag: correct the checksum of the dynamic header.
    pub const SEAL_HEADER: u8 = 2;
    /// Flag: copy the footer at the beginning to the end.
    pub const SAME_FOOTERS: u8 = 4;
    /// Flag: write to the image.
    pub const WRITE: u8 = 8;
    /// Flag: repair the image.
    pub const REPAIR: u8 = 16;

    /// Decodes an input. `None`: it is too short.
    pub fn decode(input: &[u8]) -> Option<Recipe> {
        let (head, bytes) = input.split_first_chunk::<HEAD_BYTES>()?;
        Some(Recipe {
            flags: head[0],
            hole_at: u16::from_le_bytes([head[2], head[3]]),
            hole: u32::from_le_bytes([head[4], head[5], head[6], head[7]]) % (MAX_HOLE + 1),
            bytes: bytes[..bytes.len().min(MAX_BYTES)].to_vec(),
        })
    }

    /// Encodes it as an input.
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
