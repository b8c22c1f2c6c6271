//! The file of maps as bytes.

use proptest::prelude::*;

use super::layout::{Content, Head, Image, Map, State, regions};
use super::{MAX_DISK_BYTES, MAX_MAPS, REGION_BYTES};

fn content(bytes: u64, names: &[&str]) -> Content {
    let words = regions(bytes).div_ceil(64);
    let map = |(i, name): (usize, &&str)| Map {
        name: (*name).to_owned(),
        id: [i as u8 + 1; 16],
        begun_s: 1_700_000_000 + i as u64,
        bits: (0..words).map(|word| word.wrapping_mul(0x9E37_79B9) ^ i as u64).collect(),
    };
    let head = Head {
        file: [7; 16],
        state: State::Closed(-3, 999_999_999),
        maps: names.len(),
        bytes,
        opening: u64::MAX,
    };
    let maps = names.iter().enumerate().map(map).collect();
    let other = (names.len() == 2)
        .then(|| Image { identity: "inode 5 made 6".to_owned(), changed: (-7, 999_999_999) });
    Content { head, identity: "inode 12 made 34".to_owned(), other, maps, damaged: 0 }
}

#[test]
fn a_file_is_read_as_it_was_written() {
    for (bytes, names) in [
        (512, &["a"][..]),
        (REGION_BYTES * 4032, &["a", "b.c-d_e"]),
        (REGION_BYTES * 4032 + 1, &["nightly", "weekly", "x"]),
        (1 << 40, &[]),
    ] {
        let content = content(bytes, names);
        assert_eq!(Content::parse(&content.to_bytes()).as_ref(), Ok(&content), "{bytes}");
    }
}

#[test]
fn a_damaged_sector_of_bits_has_all_of_its_regions_and_no_others() {
    let whole = content(REGION_BYTES * 10_000, &["a", "b"]);
    let mut bytes = whole.to_bytes();
    // The second sector of the first map.
    bytes[8192 + 512 + 17] ^= 4;
    let read = Content::parse(&bytes).unwrap();
    assert_eq!((read.damaged, &read.maps[1]), (1, &whole.maps[1]));
    let (is, was) = (&read.maps[0].bits, &whole.maps[0].bits);
    assert!(is[63..126].iter().all(|bits| *bits == u64::MAX));
    assert_eq!((&is[..63], &is[126..]), (&was[..63], &was[126..]));
}

#[test]
fn sectors_that_change_places_are_damaged() {
    let mut bytes = content(REGION_BYTES * 10_000, &["a", "b"]).to_bytes();
    let (first, second) = (8192, 8192 + 512);
    let moved = bytes[first..second].to_vec();
    bytes[second..second + 512].copy_from_slice(&moved);
    assert_eq!(Content::parse(&bytes).unwrap().damaged, 1);
}

#[test]
fn a_file_of_another_kind_version_or_length_is_refused_with_its_reason() {
    let good = content(1 << 30, &["a"]).to_bytes();
    let changed = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        Content::parse(&bytes).unwrap_err()
    };
    assert_eq!(Content::parse(&[]), Err("it is too short"));
    assert_eq!(changed(0, b'x'), "it is no file of dirty maps");
    assert_eq!(changed(7, b'2'), "it was made by another version of this program");
    assert_eq!(changed(33, 1), "its head is damaged");
    assert_eq!(changed(512 + 9, 1), "the identity of its image is damaged");
    assert_eq!(changed(1024 + 9, 1), "the identity of its image is damaged");
    assert_eq!(changed(4096 + 30, 1), "its table of maps is damaged");
    assert_eq!(Content::parse(&good[..good.len() - 1]), Err("its length does not fit its head"));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..20_000),
        at in proptest::collection::vec((0..12_000usize, any::<u8>()), 0..8),
    ) {
        let _ = Content::parse(&bytes);
        let good = content(REGION_BYTES * 70, &["a", "b", "c"]).to_bytes();
        bytes.splice(.., good);
        for (at, to) in at {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = to;
            }
        }
        if let Ok(read) = Content::parse(&bytes) {
            prop_assert!(read.maps.len() <= MAX_MAPS && read.head.bytes <= MAX_DISK_BYTES);
        }
    }
}
