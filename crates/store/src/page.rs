//! Pages of trees: the pointers of inner pages, and what the leaves have in them (store.md 2).

use std::fmt;

use serde::{Deserialize, Serialize};

use super::content::checksum;
use super::fields::{Reader, Writer};
use super::layout::Layout;
use super::{BLOCK_BYTES, Damaged};

/// Bytes of a pointer, and of an entry of P2M.
pub const POINTER_BYTES: usize = 16;
/// Entries of a leaf of V2P.
pub const V2P_ENTRIES: usize = BLOCK_BYTES / 8;
/// Entries of a leaf of P2M, and pointers of an inner page.
pub const P2M_ENTRIES: usize = BLOCK_BYTES / POINTER_BYTES;
/// Hashes of a page of them.
pub const HASHES: usize = BLOCK_BYTES / 32;

const PLACE_BYTES: usize = 5;
const BORN_BYTES: usize = 7;
/// Blocks of a compressed group, and places that it takes: 64 KiB.
pub const GROUP_BLOCKS: u8 = 16;

/// Where a page is, and what it has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// In the first segment of a pair of metadata.
    pub place: u64,
    /// Of the page.
    pub checksum: u32,
    /// The generation in which it was born: below 2^56.
    pub born: u64,
}

impl Pointer {
    /// To a page with these bytes.
    pub fn to(place: u64, born: u64, page: &[u8]) -> Pointer {
        Pointer { place, checksum: checksum(page), born }
    }

    /// As it is in a page; none: there is no page.
    pub fn encode(pointer: Option<Pointer>) -> [u8; POINTER_BYTES] {
        let mut bytes = [0; POINTER_BYTES];
        if let Some(Pointer { place, checksum, born }) = pointer {
            let mut to = Writer::default();
            to.number(place, PLACE_BYTES).bytes(&checksum.to_le_bytes()).number(born, BORN_BYTES);
            bytes.copy_from_slice(&to.0);
        }
        bytes
    }

    /// The opposite.
    ///
    /// # Errors
    /// It points to where no page can be.
    pub fn decode(
        bytes: &[u8; POINTER_BYTES],
        layout: &Layout,
    ) -> Result<Option<Pointer>, Damaged> {
        if *bytes == [0; POINTER_BYTES] {
            return Ok(None);
        }
        let mut from = Reader::new(bytes);
        let place = from.number(PLACE_BYTES)?;
        let (checksum, born) = (from.u32()?, from.number(BORN_BYTES)?);
        match layout.copy_of(place) {
            Some(_) => Ok(Some(Pointer { place, checksum, born })),
            None => Err(Damaged("a pointer leads to where no page is")),
        }
    }

    /// Whether these bytes are the page.
    ///
    /// # Errors
    /// They are not.
    pub fn verify(&self, page: &[u8]) -> Result<(), Damaged> {
        match page.len() == BLOCK_BYTES && checksum(page) == self.checksum {
            true => Ok(()),
            false => Err(Damaged("a page does not fit its pointer")),
        }
    }
}

/// An entry of V2P as it is in a leaf: a content's number.
pub fn encode_number(number: u64) -> [u8; 8] {
    debug_assert!(number >> 40 == 0);
    number.to_le_bytes()
}

/// The opposite; 0 is the content of zeros.
///
/// # Errors
/// No content of a store of this size has such a number.
pub fn decode_number(bytes: [u8; 8], layout: &Layout) -> Result<u64, Damaged> {
    let number = u64::from_le_bytes(bytes);
    match number < layout.places() {
        true => Ok(number),
        false => Err(Damaged("a volume has a content that no store of this size has")),
    }
}

/// How a group is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// LZ4, a block of it.
    Lz4,
    /// A frame of Zstandard.
    #[serde(rename = "zstd")]
    Zstandard,
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Packing::Lz4 => "lz4",
            Packing::Zstandard => "zstd",
        })
    }
}

/// Where a content is: an entry of P2M.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// The number has no content.
    Nowhere,
    /// As it is, in a block of its own.
    Plain {
        /// Where.
        place: u64,
        /// Of the content.
        checksum: u32,
    },
    /// It is the same as that of a lower number.
    SameAs {
        /// That number.
        number: u64,
    },
    /// In a compressed group.
    Packed {
        /// The group's first place.
        place: u64,
        /// Of the content, as it is unpacked.
        checksum: u32,
        /// How.
        packing: Packing,
        /// Places that the group takes.
        places: u8,
        /// Which block of the group it is.
        index: u8,
    },
}

impl Whereabouts {
    /// As it is in a leaf.
    pub fn encode(self) -> [u8; POINTER_BYTES] {
        let (place, checksum, kind, places, index) = match self {
            Whereabouts::Nowhere => (0, 0, 0, 0, 0),
            Whereabouts::Plain { place, checksum } => (place, checksum, 1, 0, 0),
            Whereabouts::SameAs { number } => (number, 0, 2, 0, 0),
            Whereabouts::Packed { place, checksum, packing, places, index } => {
                let kind = if packing == Packing::Lz4 { 3 } else { 4 };
                (place, checksum, kind, places, index)
            }
        };
        let mut to = Writer::default();
        to.number(place, PLACE_BYTES).bytes(&checksum.to_le_bytes()).bytes(&[kind, places, index]);
        let mut bytes = [0; POINTER_BYTES];
        bytes[..to.0.len()].copy_from_slice(&to.0);
        bytes
    }

    /// The opposite, of the entry of `number`.
    ///
    /// # Errors
    /// It says nothing that an entry can say.
    pub fn decode(
        bytes: &[u8; POINTER_BYTES],
        number: u64,
        layout: &Layout,
    ) -> Result<Whereabouts, Damaged> {
        let mut from = Reader::new(bytes);
        let place = from.number(PLACE_BYTES)?;
        let (checksum, kind) = (from.u32()?, from.u8()?);
        let (places, index) = (from.u8()?, from.u8()?);
        from.zeros()?;
        let (at, of_group) = (layout.segment_of(place), (places, index) != (0, 0));
        let packing = if kind == 3 { Packing::Lz4 } else { Packing::Zstandard };
        match kind {
            0 if *bytes == [0; POINTER_BYTES] => Ok(Whereabouts::Nowhere),
            1 if at.is_some() && !of_group => Ok(Whereabouts::Plain { place, checksum }),
            // So no chain of them has a circle.
            2 if (1..number).contains(&place) && checksum == 0 && !of_group => {
                Ok(Whereabouts::SameAs { number: place })
            }
            3 | 4
                if at.is_some_and(|(_, at)| at + u64::from(places) <= layout.segment_blocks)
                    && (1..=GROUP_BLOCKS).contains(&places)
                    && index < GROUP_BLOCKS =>
            {
                Ok(Whereabouts::Packed { place, checksum, packing, places, index })
            }
            _ => Err(Damaged("an entry of P2M means nothing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout() -> Layout {
        Layout::of(1 << 30).unwrap()
    }

    fn places() -> impl Strategy<Value = u64> {
        let layout = layout();
        (0..layout.segments, 0..layout.segment_blocks - 16)
            .prop_map(move |(segment, at)| layout.first_place(segment) + at)
    }

    fn whereabouts() -> impl Strategy<Value = Whereabouts> {
        prop_oneof![
            Just(Whereabouts::Nowhere),
            (places(), any::<u32>())
                .prop_map(|(place, checksum)| Whereabouts::Plain { place, checksum }),
            (1..99u64).prop_map(|number| Whereabouts::SameAs { number }),
            (places(), any::<u32>(), any::<bool>(), 1..=16u8, 0..16u8).prop_map(
                |(place, checksum, lz4, places, index)| {
                    let packing = if lz4 { Packing::Lz4 } else { Packing::Zstandard };
                    Whereabouts::Packed { place, checksum, packing, places, index }
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn what_a_page_says_is_what_was_put_into_it(entry in whereabouts(), place in places()) {
            prop_assert_eq!(Whereabouts::decode(&entry.encode(), 99, &layout()), Ok(entry));
            let first = layout().segment_of(place).is_some_and(|(segment, _)| segment % 2 == 0);
            let pointer = Some(Pointer { place, checksum: 7, born: (1 << 56) - 1 });
            let back = Pointer::decode(&Pointer::encode(pointer), &layout());
            prop_assert_eq!(back, if first { Ok(pointer) } else { back });
            prop_assert_eq!(back.is_ok(), first);
        }

        #[test]
        fn any_bytes_are_refused_or_mean_what_they_say(bytes: [u8; POINTER_BYTES], kind in 0..6u8) {
            let mut bytes = bytes;
            bytes[9] = kind;
            for sane in [false, true] {
                if sane {
                    bytes[2..5].fill(0);
                    bytes[10..].fill(0);
                }
                if let Ok(entry) = Whereabouts::decode(&bytes, 1 << 20, &layout()) {
                    prop_assert_eq!(entry.encode(), bytes);
                }
                if let Ok(pointer) = Pointer::decode(&bytes, &layout()) {
                    prop_assert_eq!(Pointer::encode(pointer), bytes);
                }
            }
        }
    }

    #[test]
    fn a_page_is_believed_with_its_own_checksum_only() {
        let mut page = vec![3; BLOCK_BYTES];
        let pointer = Pointer::to(1, 1, &page);
        assert_eq!(pointer.verify(&page), Ok(()));
        page[100] ^= 1;
        assert!(pointer.verify(&page).is_err());
        page[100] ^= 1;
        assert!(pointer.verify(&page[..512]).is_err());
    }

    #[test]
    fn a_content_is_never_the_same_as_itself_or_a_higher_number() {
        let entry = |number| Whereabouts::SameAs { number }.encode();
        let decode = |number, of| Whereabouts::decode(&entry(number), of, &layout());
        assert!(decode(4, 5).is_ok());
        assert!(decode(5, 5).is_err() && decode(6, 5).is_err() && decode(0, 5).is_err());
    }

    #[test]
    fn a_group_ends_in_its_segment() {
        let end = layout().first_place(1);
        let packed = |place, places| {
            let packing = Packing::Lz4;
            let entry = Whereabouts::Packed { place, checksum: 1, packing, places, index: 0 };
            Whereabouts::decode(&entry.encode(), 9, &layout())
        };
        assert!(packed(end - 4, 4).is_ok() && packed(end - 4, 5).is_err());
        assert!(packed(end - 20, 0).is_err() && packed(end - 20, 17).is_err());
    }

    #[test]
    fn numbers_are_lower_than_the_places_of_the_store() {
        let most = layout().places();
        assert_eq!(decode_number(encode_number(most - 1), &layout()), Ok(most - 1));
        assert!(decode_number(encode_number(most), &layout()).is_err());
        assert!(decode_number([0xFF; 8], &layout()).is_err());
    }
}
