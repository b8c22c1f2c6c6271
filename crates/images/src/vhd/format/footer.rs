//! The footer, which every VHD has at its end, and a dynamic one also at its beginning.

use std::fmt;

use super::geometry::{Geometry, MAX_SECTORS};
use super::{
    MAX_DISK_BYTES, Malformed, SECTOR, Stamp, Uuid, array, be16, be32, be64, checksum, put,
};

/// Bytes of a footer.
pub(crate) const BYTES: usize = 512;

const COOKIE: [u8; 8] = *b"conectix";
/// vhd-util writes this cookie to keep the image from being opened (`vhd_disabled`).
const POISON: [u8; 8] = *b"v_poison";
const VERSION: u32 = 0x0001_0000;
const FEATURE_TEMPORARY: u32 = 1;
/// Always set, by the specification.
const FEATURE_RESERVED: u32 = 2;
const CHECKSUM_AT: usize = 64;
const HIDDEN_AT: usize = 85;
/// "No further structure", in a fixed disk.
const NOWHERE: u64 = u64::MAX;

/// Seconds from 1970 to 2000, where timestamps of VHD begin.
const EPOCH_S: u64 = 946_684_800;

/// The three kinds of VHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The whole disk in order, and a footer.
    Fixed,
    /// Blocks, each at a place allocated when it was first written.
    Dynamic,
    /// Blocks, and a parent for unwritten data.
    Differencing,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Kind::Fixed => 2,
            Kind::Dynamic => 3,
            Kind::Differencing => 4,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Fixed => "fixed",
            Kind::Dynamic => "dynamic",
            Kind::Differencing => "differencing",
        })
    }
}

/// The program that made an image: four letters, and a version with the program's own meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator {
    /// For example `tap\0`, `win `, `qem2`.
    pub app: [u8; 4],
    /// Two halves: major, minor.
    pub version: u32,
}

impl Creator {
    /// libvhd's, with a version whose images always have a batmap. QEMU uses `current_size` for this creator, and
    /// computes the size from the geometry for creators that it does not know.
    pub(crate) const LIBVHD: Creator = Creator { app: *b"tap\0", version: 0x0001_0003 };
    /// Hyper-V's, for images outside of libvhd's rules (blocks of another size than 2 MiB and no batmap). QEMU uses its
    /// `current_size`, too.
    pub(crate) const HYPER_V: Creator = Creator { app: *b"win ", version: 0x000a_0000 };

    /// Whether QEMU takes `current_size` for the size (`vpc_open`), and not the geometry.
    fn is_sized_for_qemu(&self) -> bool {
        [*b"win ", *b"qem2", *b"d2v ", *b"tap\0", *b"CTXS"].contains(&self.app)
    }

    fn is_tapdisk(&self) -> bool {
        self.app.starts_with(b"tap")
    }

    /// Whether images of this creator may have a batmap (`vhd_has_batmap`).
    pub(crate) fn has_batmap(&self) -> bool {
        self.is_tapdisk() && self.version > 0x0000_0001
    }

    /// Whether bitmaps are in the order of the machine, as in the first versions of tapdisk.
    fn has_native_bitmaps(&self) -> bool {
        self.is_tapdisk() && self.version == 0x0000_0001
    }
}

/// A checked footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The kind of image.
    pub kind: Kind,
    /// The size of the disk, in bytes.
    pub current_size: u64,
    /// Its size when it was made, in bytes.
    pub original_size: u64,
    /// Byte offset of the dynamic header; of no meaning in a fixed disk.
    pub data_offset: u64,
    /// Seconds since 2000 when it was made.
    pub timestamp: u32,
    /// The program that made it.
    pub creator: Creator,
    /// The operating system: `Wi2k`, `Mac `, or nothing.
    pub creator_os: [u8; 4],
    /// Its geometry, which only old guests of Virtual PC use.
    pub geometry: Geometry,
    /// Its identity.
    pub uuid: Uuid,
    /// May be deleted at shutdown.
    pub temporary: bool,
    /// A virtual machine with this disk was suspended.
    pub saved_state: bool,
    /// Used only as a parent: blktap's field.
    pub hidden: u8,
}

impl Footer {
    /// The size that QEMU computes for an image with this creator and a disk of so many bytes.
    pub fn qemu_bytes(&self, bytes: u64) -> u64 {
        let total = bytes / SECTOR;
        if self.creator.is_sized_for_qemu() || total >= MAX_SECTORS {
            return bytes;
        }
        let geometry = Geometry::of_sectors(total);
        u64::from(geometry.cylinders)
            * u64::from(geometry.heads)
            * u64::from(geometry.sectors)
            * SECTOR
    }

    /// A new image's footer.
    pub(crate) fn new(kind: Kind, bytes: u64, creator: Creator, stamp: &Stamp) -> Footer {
        let data_offset = if kind == Kind::Fixed { NOWHERE } else { BYTES as u64 };
        Footer {
            kind,
            current_size: bytes,
            original_size: bytes,
            data_offset,
            timestamp: timestamp(stamp.unix_s),
            creator,
            creator_os: [0; 4],
            geometry: Geometry::of_sectors(bytes / SECTOR),
            uuid: stamp.uuid,
            temporary: false,
            saved_state: false,
            hidden: 0,
        }
    }

    /// This footer for a disk of another size.
    pub(crate) fn of_size(&self, bytes: u64) -> Footer {
        Footer {
            current_size: bytes,
            // Some programs take this for the size (libvhdi), or refuse a larger one (vhd-lib).
            original_size: bytes,
            geometry: Geometry::of_sectors(bytes / SECTOR),
            ..self.clone()
        }
    }

    /// Reads the footer that was found at `offset`.
    ///
    /// # Errors
    /// It is no footer, is damaged, or of an unsupported kind.
    pub(crate) fn parse(bytes: &[u8; BYTES], offset: u64) -> Result<Footer, Malformed> {
        let bad = |why: String| Malformed::new(offset, format!("footer: {why}"));
        let unsupported = |why: &str| Malformed::unsupported(offset, format!("footer: {why}"));
        match array(bytes, 0) {
            COOKIE => {}
            POISON => return Err(unsupported("the image was disabled by vhd-util (v_poison)")),
            _ => return Err(bad("no cookie \"conectix\"".into())),
        }
        check_sum(bytes).map_err(&bad)?;
        let features = be32(bytes, 8);
        if features & !(FEATURE_TEMPORARY | FEATURE_RESERVED) != 0 {
            return Err(unsupported(&format!("unknown features {features:#x}")));
        }
        let version = be32(bytes, 12);
        if version >> 16 != VERSION >> 16 {
            let why = format!("unknown version {}.{}", version >> 16, version & 0xffff);
            return Err(unsupported(&why));
        }
        let kind = match be32(bytes, 60) {
            2 => Kind::Fixed,
            3 => Kind::Dynamic,
            4 => Kind::Differencing,
            other => return Err(unsupported(&format!("unknown disk type {other}"))),
        };
        let creator = Creator { app: array(bytes, 28), version: be32(bytes, 32) };
        if kind != Kind::Fixed && creator.has_native_bitmaps() {
            let why = "bitmaps of tapdisk 0.1 are not supported (vhd-update mends it)";
            return Err(unsupported(why));
        }
        let current_size = be64(bytes, 48);
        if current_size == 0 || current_size > MAX_DISK_BYTES {
            let why = format!("a disk of {current_size} bytes (1 sector to 2040 GiB)");
            return Err(if current_size == 0 { bad(why) } else { unsupported(&why) });
        }
        if !current_size.is_multiple_of(SECTOR) {
            return Err(bad(format!("a disk of {current_size} bytes, which is not whole sectors")));
        }
        Ok(Footer {
            kind,
            current_size,
            original_size: be64(bytes, 40),
            data_offset: be64(bytes, 16),
            timestamp: be32(bytes, 24),
            creator,
            creator_os: array(bytes, 36),
            geometry: Geometry { cylinders: be16(bytes, 56), heads: bytes[58], sectors: bytes[59] },
            uuid: Uuid(array(bytes, 68)),
            temporary: features & FEATURE_TEMPORARY != 0,
            saved_state: bytes[84] != 0,
            hidden: bytes[HIDDEN_AT],
        })
    }

    /// The bytes on disk.
    pub(crate) fn bytes(&self) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        let temporary = if self.temporary { FEATURE_TEMPORARY } else { 0 };
        put(&mut out, 0, &COOKIE);
        put(&mut out, 8, &(FEATURE_RESERVED | temporary).to_be_bytes());
        put(&mut out, 12, &VERSION.to_be_bytes());
        put(&mut out, 16, &self.data_offset.to_be_bytes());
        put(&mut out, 24, &self.timestamp.to_be_bytes());
        put(&mut out, 28, &self.creator.app);
        put(&mut out, 32, &self.creator.version.to_be_bytes());
        put(&mut out, 36, &self.creator_os);
        put(&mut out, 40, &self.original_size.to_be_bytes());
        put(&mut out, 48, &self.current_size.to_be_bytes());
        put(&mut out, 56, &self.geometry.cylinders.to_be_bytes());
        put(&mut out, 58, &[self.geometry.heads, self.geometry.sectors]);
        put(&mut out, 60, &self.kind.number().to_be_bytes());
        put(&mut out, 68, &self.uuid.0);
        put(&mut out, 84, &[u8::from(self.saved_state), self.hidden]);
        let sum = checksum(&out, CHECKSUM_AT);
        put(&mut out, CHECKSUM_AT, &sum.to_be_bytes());
        out
    }
}

/// Checks the checksum. Early versions of vhd-util marked an image as hidden and left its checksum unchanged.
fn check_sum(bytes: &[u8; BYTES]) -> Result<(), String> {
    let (found, right) = (be32(bytes, CHECKSUM_AT), checksum(bytes, CHECKSUM_AT));
    let creator = Creator { app: array(bytes, 28), version: be32(bytes, 32) };
    let early = creator.is_tapdisk() && matches!(creator.version, 0x0000_0001 | 0x0001_0001);
    let without_hidden = right.wrapping_add(u32::from(bytes[HIDDEN_AT]));
    if found == right || (early && found == without_hidden) {
        return Ok(());
    }
    Err(format!("its checksum is {found:#010x}, but its bytes give {right:#010x}"))
}

/// Seconds since 2000 for seconds since 1970.
pub(crate) fn timestamp(unix_s: u64) -> u32 {
    u32::try_from(unix_s.saturating_sub(EPOCH_S)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn footer(kind: Kind) -> Footer {
        let stamp = Stamp { uuid: Uuid([3; 16]), unix_s: EPOCH_S + 7 };
        let mut footer = Footer::new(kind, 5 << 20, Creator::LIBVHD, &stamp);
        (footer.hidden, footer.temporary, footer.creator_os) = (1, true, *b"Wi2k");
        footer
    }

    /// Changes a byte and corrects the checksum.
    fn forged(mut bytes: [u8; BYTES], at: usize, value: &[u8]) -> [u8; BYTES] {
        put(&mut bytes, at, value);
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    #[test]
    fn what_is_written_is_read_again() {
        for kind in [Kind::Fixed, Kind::Dynamic, Kind::Differencing] {
            let footer = footer(kind);
            assert_eq!(footer.timestamp, 7);
            assert_eq!(Footer::parse(&footer.bytes(), 0), Ok(footer));
        }
    }

    #[test]
    fn a_change_of_any_byte_is_seen() {
        let bytes = footer(Kind::Dynamic).bytes();
        for at in 0..BYTES {
            let mut changed = bytes;
            changed[at] ^= 0x10;
            let error = Footer::parse(&changed, 4096).unwrap_err();
            assert_eq!(error.offset, 4096, "byte {at}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_and_named() {
        let bytes = footer(Kind::Dynamic).bytes();
        for (at, value, why) in [
            (0, b"v_poison".as_slice(), "disabled by vhd-util"),
            (8, &[0, 0, 0, 6], "unknown features 0x6"),
            (12, &[0, 2, 0, 0], "unknown version 2.0"),
            (32, &[0, 0, 0, 1], "tapdisk 0.1"),
            (48, &[0; 8], "a disk of 0 bytes"),
            (48, &[0xff; 8], "a disk of 18446744073709551615 bytes"),
            (55, &[1], "not whole sectors"),
            (60, &[0, 0, 0, 6], "unknown disk type 6"),
        ] {
            let error = Footer::parse(&forged(bytes, at, value), 0).unwrap_err();
            assert!(error.why.contains(why), "{error}");
        }
    }

    #[test]
    fn an_early_hidden_image_keeps_its_old_checksum() {
        let mut image = footer(Kind::Dynamic);
        (image.hidden, image.creator.version) = (0, 0x0001_0001);
        let mut bytes = image.bytes();
        bytes[HIDDEN_AT] = 1;
        assert_eq!(Footer::parse(&bytes, 0).unwrap().hidden, 1);
        bytes[HIDDEN_AT + 1] = 1;
        assert!(Footer::parse(&bytes, 0).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), BYTES)) {
            let mut bytes: [u8; BYTES] = bytes.try_into().unwrap();
            let _ = Footer::parse(&bytes, 0);
            put(&mut bytes, 0, &COOKIE);
            let _ = Footer::parse(&forged(bytes, 12, &VERSION.to_be_bytes()), 0);
        }
    }
}
