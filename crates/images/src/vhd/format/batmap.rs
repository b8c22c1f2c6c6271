//! The batmap, libvhd's extension: a bit for each block that says "all of its sectors are present", so that their
//! bitmaps need not be read. Its header follows the block table.
//!
//! It is only a hint: a bit may be clear though the block is full. libvhd writes it when it closes an image, and never
//! clears a bit.

use super::footer::Footer;
use super::header::{DEFAULT_BLOCK_BYTES, Header};
use super::{Malformed, SECTOR, array, be32, be64, put, whole_sectors};

/// Bytes of the header, which has a sector of its own.
pub(crate) const BYTES: usize = 512;

const COOKIE: [u8; 8] = *b"tdbatmap";
const CHECKSUM_AT: usize = 24;
/// A number that means nothing here.
const MARKER_AT: usize = 28;
/// 1: the image is encrypted, and the hash of its key follows.
const KEY_AT: usize = 29;
const NONCE_AT: usize = 30;
const HASH_AT: usize = 62;
/// From this version on the checksum adds bytes as signed numbers.
const VERSION_SIGNED: u32 = 0x0001_0001;
const VERSION: u32 = 0x0001_0002;

/// The reaction to an encrypted image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encrypted {
    Refused,
    Opened,
}

/// The hash of an encrypted image's key, as in its batmap's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash {
    /// The nonce that was hashed together with the key.
    pub nonce: [u8; 32],
    /// SHA-256 of both.
    pub hash: [u8; 32],
}

impl KeyHash {
    /// Puts it into the bytes of a batmap's header.
    pub(crate) fn put(&self, raw: &mut [u8; BYTES]) {
        put(raw, KEY_AT, &[1]);
        put(raw, KEY_AT + 1, &self.nonce);
        put(raw, KEY_AT + 1 + self.nonce.len(), &self.hash);
    }
}

/// A checked header, and its bytes on disk, which have fields of other programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batmap {
    raw: [u8; BYTES],
    /// Byte offset of the map.
    pub(crate) offset: u64,
    /// Bytes of the map: whole sectors.
    pub(crate) len: u64,
    version: u32,
}

impl Batmap {
    /// The place of the header, if the image can have a batmap.
    pub(crate) fn header_offset(footer: &Footer, header: &Header) -> Option<u64> {
        let ours = footer.creator.has_batmap() && header.block_bytes == DEFAULT_BLOCK_BYTES;
        let table = whole_sectors(u64::from(header.max_entries) * 4);
        ours.then(|| header.table_offset.checked_add(table)).flatten()
    }

    /// An empty batmap with its header at `at` and its map after that, for a table of so many entries.
    pub(crate) fn new(at: u64, max_entries: u32) -> Batmap {
        Self::at(at + SECTOR, max_entries)
    }

    /// An empty batmap with its map at `offset`, for a table of so many entries.
    pub(crate) fn at(offset: u64, max_entries: u32) -> Batmap {
        let len = Self::map_bytes(max_entries);
        let mut raw = [0; BYTES];
        put(&mut raw, 0, &COOKIE);
        put(&mut raw, 8, &offset.to_be_bytes());
        put(&mut raw, 16, &((len / SECTOR) as u32).to_be_bytes());
        put(&mut raw, 20, &VERSION.to_be_bytes());
        Batmap { raw, offset, len, version: VERSION }
    }

    /// This batmap, at its place, for a table of another number of entries.
    pub(crate) fn resized(&self, max_entries: u32) -> Batmap {
        let mut new = self.clone();
        new.len = Self::map_bytes(max_entries);
        put(&mut new.raw, 16, &((new.len / SECTOR) as u32).to_be_bytes());
        new
    }

    /// Bytes of a map for so many blocks.
    pub(crate) fn map_bytes(max_entries: u32) -> u64 {
        whole_sectors(u64::from(max_entries).div_ceil(8)).max(SECTOR)
    }

    /// The hash of the key in the header.
    pub(crate) fn key(&self) -> Option<KeyHash> {
        let key = KeyHash { nonce: array(&self.raw, NONCE_AT), hash: array(&self.raw, HASH_AT) };
        (self.raw[KEY_AT] == 1).then_some(key)
    }

    /// The header `on_disk`, which is this one with another checksum, with the hash of a key.
    pub(crate) fn with_key(mut on_disk: [u8; BYTES], key: &KeyHash) -> [u8; BYTES] {
        on_disk[KEY_AT] = 1;
        put(&mut on_disk, NONCE_AT, &key.nonce);
        put(&mut on_disk, HASH_AT, &key.hash);
        on_disk
    }

    /// The header `on_disk` with another marker.
    pub(crate) fn with_marker(mut on_disk: [u8; BYTES], marker: u8) -> [u8; BYTES] {
        on_disk[MARKER_AT] = marker;
        on_disk
    }

    /// Reads the header. `None`: there is none, and none is needed.
    ///
    /// # Errors
    /// The image is encrypted, unless that is `allowed`.
    pub(crate) fn parse(
        raw: &[u8; BYTES],
        at: u64,
        footer: &Footer,
        header: &Header,
        allowed: Encrypted,
    ) -> Result<Option<Batmap>, Malformed> {
        let version = be32(raw, 20);
        let (offset, sectors) = (be64(raw, 8), u64::from(be32(raw, 16)));
        if array(raw, 0) != COOKIE || version > VERSION {
            return Ok(None);
        }
        if raw[KEY_AT] == 1 && allowed == Encrypted::Refused {
            let why = "batmap: the image is encrypted, which is not supported";
            return Err(Malformed::unsupported(at, why));
        }
        let len = sectors * SECTOR;
        // A map larger than the table needs is useless, and not read.
        let fits = len >= covered_bytes(footer.current_size)
            && len <= Self::map_bytes(header.max_entries)
            && offset.is_multiple_of(SECTOR)
            && offset.checked_add(len).is_some();
        Ok(fits.then_some(Batmap { raw: *raw, offset, len, version }))
    }

    /// Whether the checksum fits `map`.
    pub(crate) fn is_valid(&self, map: &[u8]) -> bool {
        be32(&self.raw, CHECKSUM_AT) == self.sum(map)
    }

    /// The header for `map`, the first [`covered_bytes`] of it.
    pub(crate) fn header_for(&self, map: &[u8]) -> [u8; BYTES] {
        let mut raw = self.raw;
        put(&mut raw, CHECKSUM_AT, &self.sum(map).to_be_bytes());
        raw
    }

    fn sum(&self, map: &[u8]) -> u32 {
        let signed = self.version == VERSION_SIGNED;
        !map.iter().fold(0u32, |sum, byte| {
            let value = if signed { *byte as i8 as u32 } else { u32::from(*byte) };
            sum.wrapping_add(value)
        })
    }
}

/// Bytes of the map that the checksum covers and libvhd reads. libvhd rounds down to bytes first, so the last seven
/// blocks of some sizes have no bit.
pub(crate) fn covered_bytes(current_size: u64) -> u64 {
    whole_sectors(current_size / u64::from(DEFAULT_BLOCK_BYTES) / 8).max(SECTOR)
}

#[cfg(test)]
mod tests {
    use super::super::footer::{Creator, Kind};
    use super::super::{Stamp, Uuid};
    use super::*;

    fn image(bytes: u64) -> (Footer, Header) {
        let stamp = Stamp { uuid: Uuid([1; 16]), unix_s: 0 };
        let entries = bytes.div_ceil(u64::from(DEFAULT_BLOCK_BYTES)) as u32;
        let footer = Footer::new(Kind::Dynamic, bytes, Creator::LIBVHD, &stamp);
        (footer, Header::new(1536, entries, DEFAULT_BLOCK_BYTES))
    }

    #[test]
    fn a_map_is_valid_with_the_header_that_was_made_for_it() {
        let (footer, header) = image(2040 << 30);
        let at = Batmap::header_offset(&footer, &header).unwrap();
        assert_eq!(at, 1536 + 1_044_480 * 4);
        let mut map = vec![0; covered_bytes(footer.current_size) as usize];
        assert_eq!(map.len(), 255 * 512);
        map[7] = 0x81;
        let raw = Batmap::new(at, header.max_entries).header_for(&map);
        let batmap =
            Batmap::parse(&raw, at, &footer, &header, Encrypted::Refused).unwrap().unwrap();
        assert_eq!((batmap.offset, batmap.len), (at + 512, 255 * 512));
        assert!(batmap.is_valid(&map));
        map[8] = 1;
        assert!(!batmap.is_valid(&map));
    }

    #[test]
    fn checksums_of_the_first_version_add_signed_bytes() {
        let (footer, header) = image(1 << 30);
        let mut raw = Batmap::new(4096, header.max_entries).header_for(&[]);
        raw[20..24].copy_from_slice(&VERSION_SIGNED.to_be_bytes());
        raw[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&(!(-2i32 as u32)).to_be_bytes());
        let batmap =
            Batmap::parse(&raw, 4096, &footer, &header, Encrypted::Refused).unwrap().unwrap();
        assert!(batmap.is_valid(&[0xff, 0xff]) && !batmap.is_valid(&[1, 1]));
    }

    #[test]
    fn what_is_no_batmap_is_not_used_and_an_encrypted_image_is_refused() {
        let (footer, header) = image(1 << 30);
        let good = Batmap::new(4096, header.max_entries).header_for(&[0; 512]);
        let parse = |at: usize, value: &[u8]| {
            let mut raw = good;
            put(&mut raw, at, value);
            Batmap::parse(&raw, 4096, &footer, &header, Encrypted::Refused)
        };
        assert!(parse(0, b"t").unwrap().is_some());
        assert_eq!(parse(0, b"x"), Ok(None));
        assert_eq!(parse(8, &[0xff; 8]), Ok(None));
        assert_eq!(parse(15, &[1]), Ok(None));
        assert_eq!(parse(16, &[0xff; 4]), Ok(None));
        assert_eq!(parse(16, &[0; 4]), Ok(None));
        assert_eq!(parse(23, &[3]), Ok(None));
        assert!(parse(KEY_AT, &[1]).unwrap_err().why.contains("encrypted"));
        let mut other = footer.clone();
        other.creator = Creator::HYPER_V;
        assert_eq!(Batmap::header_offset(&other, &header), None);
    }
}
