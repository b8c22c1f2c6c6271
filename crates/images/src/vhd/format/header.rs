//! The dynamic header: the place of the block table, the size of blocks, and the parent.

use super::footer::{Footer, Kind};
use super::locator::{Locator, utf16_be};
use super::{MAX_BLOCKS, Malformed, SECTOR, Uuid, array, be32, be64, checksum, put};

/// Bytes of a header.
pub(crate) const BYTES: usize = 1024;
/// Locators of a header.
pub(crate) const LOCATORS: usize = 8;
/// The usual size of a block, in bytes, and the only one that libvhd knows.
pub const DEFAULT_BLOCK_BYTES: u32 = 2 << 20;
/// The largest block: its bitmap still fits into one piece of memory for metadata I/O.
const MAX_BLOCK_BYTES: u32 = 256 << 20;

const COOKIE: [u8; 8] = *b"cxsparse";
const VERSION: u32 = 0x0001_0000;
const CHECKSUM_AT: usize = 36;
const PARENT_NAME_AT: usize = 64;
const PARENT_NAME_BYTES: usize = 512;
/// The offset of the locators.
pub(crate) const LOCATORS_AT: usize = PARENT_NAME_AT + PARENT_NAME_BYTES;

/// Whether an image can have blocks of that size; if not, the reason.
pub(crate) fn check_block_bytes(bytes: u32) -> Result<(), String> {
    match bytes.is_power_of_two() && (SECTOR as u32..=MAX_BLOCK_BYTES).contains(&bytes) {
        true => Ok(()),
        false => Err(format!("blocks of {bytes} bytes (a power of two from 512 bytes to 256 MiB)")),
    }
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Byte offset of the block table.
    pub(crate) table_offset: u64,
    /// Entries that the table has room for, at least those of the disk.
    pub(crate) max_entries: u32,
    /// Bytes of a block's data, a power of two.
    pub(crate) block_bytes: u32,
    /// The parent's identity; nil in a dynamic disk, and for a raw parent.
    pub(crate) parent_uuid: Uuid,
    /// When the parent was last changed, in seconds since 2000.
    pub(crate) parent_timestamp: u32,
    /// The bytes of the parent's file name: UTF-16, and zeros.
    pub(crate) parent_name: [u8; PARENT_NAME_BYTES],
    /// The places of paths to the parent.
    pub(crate) locators: [Locator; LOCATORS],
}

impl Header {
    pub(crate) fn new(table_offset: u64, max_entries: u32, block_bytes: u32) -> Header {
        Header {
            table_offset,
            max_entries,
            block_bytes,
            parent_uuid: Uuid::NIL,
            parent_timestamp: 0,
            parent_name: [0; PARENT_NAME_BYTES],
            locators: [Locator::default(); LOCATORS],
        }
    }

    /// Reads the header that was found at `offset`, of the disk with `footer`.
    ///
    /// # Errors
    /// It is no header, is damaged, does not fit the disk, or has unsupported values.
    pub(crate) fn parse(
        bytes: &[u8; BYTES],
        offset: u64,
        footer: &Footer,
    ) -> Result<Header, Malformed> {
        let bad = |why: String| Err(Malformed::new(offset, format!("dynamic header: {why}")));
        let unsupported =
            |why: String| Err(Malformed::unsupported(offset, format!("dynamic header: {why}")));
        if array(bytes, 0) != COOKIE {
            return bad("no cookie \"cxsparse\"".into());
        }
        let (found, right) = (be32(bytes, CHECKSUM_AT), checksum(bytes, CHECKSUM_AT));
        if found != right {
            return bad(format!("its checksum is {found:#010x}, but its bytes give {right:#010x}"));
        }
        let version = be32(bytes, 24);
        if version != VERSION {
            let why = format!("unknown version {}.{}", version >> 16, version & 0xffff);
            return unsupported(why);
        }
        let block_bytes = be32(bytes, 32);
        if let Err(why) = check_block_bytes(block_bytes) {
            return if block_bytes.is_power_of_two() { unsupported(why) } else { bad(why) };
        }
        let needed = footer.current_size.div_ceil(u64::from(block_bytes));
        let max_entries = be32(bytes, 28);
        if u64::from(max_entries) < needed {
            return bad(format!("a table of {max_entries} entries for {needed} blocks"));
        }
        if needed > u64::from(MAX_BLOCKS) {
            return unsupported(format!("{needed} blocks; at most {MAX_BLOCKS} are supported"));
        }
        let table_offset = be64(bytes, 16);
        if !table_offset.is_multiple_of(SECTOR) {
            return bad(format!("the table at byte {table_offset}, which is no sector's start"));
        }
        let mut locators = [Locator::default(); LOCATORS];
        if footer.kind == Kind::Differencing {
            for (i, locator) in locators.iter_mut().enumerate() {
                let at = LOCATORS_AT + i * Locator::BYTES;
                *locator = Locator::parse(&array(bytes, at), offset + at as u64)?;
            }
        }
        Ok(Header {
            table_offset,
            max_entries,
            block_bytes,
            parent_uuid: Uuid(array(bytes, 40)),
            parent_timestamp: be32(bytes, 56),
            parent_name: array(bytes, PARENT_NAME_AT),
            locators,
        })
    }

    /// The bytes on disk.
    pub(crate) fn bytes(&self) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        put(&mut out, 0, &COOKIE);
        put(&mut out, 8, &u64::MAX.to_be_bytes());
        put(&mut out, 16, &self.table_offset.to_be_bytes());
        put(&mut out, 24, &VERSION.to_be_bytes());
        put(&mut out, 28, &self.max_entries.to_be_bytes());
        put(&mut out, 32, &self.block_bytes.to_be_bytes());
        put(&mut out, 40, &self.parent_uuid.0);
        put(&mut out, 56, &self.parent_timestamp.to_be_bytes());
        put(&mut out, PARENT_NAME_AT, &self.parent_name);
        for (i, locator) in self.locators.iter().enumerate() {
            put(&mut out, LOCATORS_AT + i * Locator::BYTES, &locator.bytes());
        }
        let sum = checksum(&out, CHECKSUM_AT);
        put(&mut out, CHECKSUM_AT, &sum.to_be_bytes());
        out
    }

    /// The first sector of the header in `old` with this one's table: the second sector and reserved fields stay as
    /// they are. `None`: `old` is no intact header.
    pub(crate) fn moved_table(&self, old: &[u8]) -> Option<[u8; SECTOR as usize]> {
        let mut raw: [u8; BYTES] = old.try_into().ok()?;
        put(&mut raw, 16, &self.table_offset.to_be_bytes());
        put(&mut raw, 28, &self.max_entries.to_be_bytes());
        let sum = checksum(&raw, CHECKSUM_AT);
        put(&mut raw, CHECKSUM_AT, &sum.to_be_bytes());
        Some(array(&raw, 0))
    }

    /// Sets the parent's file name. A longer name is cut off, since nothing depends on it.
    pub(crate) fn set_parent_name(&mut self, name: &str) {
        self.parent_name = [0; PARENT_NAME_BYTES];
        let text = utf16_be(name);
        // The last character stays zero.
        let len = text.len().min(PARENT_NAME_BYTES - 2);
        put(&mut self.parent_name, 0, &text[..len]);
    }

    /// The parent's file name, for people.
    pub(crate) fn parent_name(&self) -> String {
        let units = self.parent_name.chunks_exact(2).map(|b| u16::from_be_bytes([b[0], b[1]]));
        let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
        String::from_utf16_lossy(&units)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Stamp;
    use super::super::footer::Creator;
    use super::*;
    use proptest::prelude::*;

    fn footer() -> Footer {
        let stamp = Stamp { uuid: Uuid([1; 16]), unix_s: 0 };
        Footer::new(Kind::Differencing, 9 << 20, Creator::LIBVHD, &stamp)
    }

    fn header() -> Header {
        let mut header = Header::new(1536, 5, DEFAULT_BLOCK_BYTES);
        header.parent_uuid = Uuid([9; 16]);
        header.parent_timestamp = 77;
        header.set_parent_name("elder ä.vhd");
        header.locators[0] = Locator { code: *b"MacX", space: 512, len: 11, offset: 2048 };
        header
    }

    fn forged(mut bytes: [u8; BYTES], at: usize, value: &[u8]) -> [u8; BYTES] {
        put(&mut bytes, at, value);
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    #[test]
    fn what_is_written_is_read_again() {
        let header = header();
        let read = Header::parse(&header.bytes(), 512, &footer()).unwrap();
        assert_eq!(read, header);
        assert_eq!(read.parent_name(), "elder ä.vhd");
    }

    #[test]
    fn a_name_that_is_too_long_is_cut() {
        let mut header = header();
        header.set_parent_name(&"n".repeat(1000));
        assert_eq!(header.parent_name(), "n".repeat(255));
    }

    #[test]
    fn a_change_of_any_byte_is_seen() {
        let bytes = header().bytes();
        for at in 0..BYTES {
            let mut changed = bytes;
            changed[at] ^= 0x10;
            assert_eq!(Header::parse(&changed, 512, &footer()).unwrap_err().offset, 512);
        }
    }

    #[test]
    fn what_does_not_fit_the_disk_is_refused_and_named() {
        let bytes = header().bytes();
        for (at, value, why) in [
            (0, b"cxsparsf".as_slice(), "no cookie"),
            (23, &[1], "no sector's start"),
            (24, &[0, 1, 0, 1], "unknown version 1.1"),
            (28, &[0, 0, 0, 4], "a table of 4 entries for 5 blocks"),
            (32, &[0, 0, 0, 0], "blocks of 0 bytes"),
            (32, &[0, 0x30, 0, 0], "blocks of 3145728 bytes"),
            (32, &[0x80, 0, 0, 0], "blocks of 2147483648 bytes"),
            (LOCATORS_AT, b"ABCD", "unknown platform code"),
        ] {
            let error = Header::parse(&forged(bytes, at, value), 512, &footer()).unwrap_err();
            assert!(error.why.contains(why), "{error}");
        }
        let mut large = footer();
        large.current_size = 2040 << 30;
        let small = forged(forged(bytes, 32, &[0, 0, 0x10, 0]), 28, &[0xff; 4]);
        let error = Header::parse(&small, 512, &large).unwrap_err();
        assert!(error.why.contains("at most 4194304 are supported"), "{error}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), BYTES)) {
            let bytes: [u8; BYTES] = bytes.try_into().unwrap();
            let _ = Header::parse(&bytes, 512, &footer());
            let _ = Header::parse(&forged(forged(bytes, 0, &COOKIE), 24, &VERSION.to_be_bytes()), 512, &footer());
        }
    }
}
