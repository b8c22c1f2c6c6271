use super::*;
use proptest::prelude::*;

fn header() -> Header {
    Header {
        version: 3,
        cluster_bits: 16,
        disk_bytes: 1 << 30,
        l1_entries: 2,
        l1_offset: 0x3_0000,
        reftable_offset: 0x1_0000,
        reftable_clusters: 1,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: 0,
        compatible: 1,
        autoclear: 1 << 5,
        refcount_order: 4,
        compression: Compression::Deflate,
        backing: Some(Backing { name: "base.img".into(), format: Some("raw".into()) }),
        extensions: vec![(0x1234_5678, b"kept".to_vec())],
    }
}

const FILE_BYTES: u64 = 0x4_0000;

fn parse(bytes: &[u8]) -> Result<Header, HeaderError> {
    Header::parse(bytes, FILE_BYTES)
}

fn encoded(h: &Header) -> Vec<u8> {
    let mut bytes = h.encode().unwrap();
    bytes.resize(4096, 0);
    bytes
}

#[test]
fn a_header_is_read_as_it_was_written() {
    let mut h = header();
    assert_eq!(parse(&encoded(&h)), Ok(h.clone()));
    h.compression = Compression::Zstd;
    h.incompatible = COMPRESSION_TYPE;
    h.backing = None;
    assert_eq!(parse(&encoded(&h)), Ok(h.clone()));
    h = Header { version: 2, incompatible: 0, compatible: 0, autoclear: 0, ..header() };
    assert_eq!(parse(&encoded(&h)), Ok(h));
}

/// Each row: a field, and a word of the refusal.
#[test]
fn each_field_is_checked() {
    let good = encoded(&header());
    for (at, bytes, text) in [
        (0, &b"QFI"[..], ""),
        (0, b"conectix", "no qcow2"),
        (4, &4u32.to_be_bytes(), "version 4"),
        (4, &1u32.to_be_bytes(), "version 1"),
        (20, &8u32.to_be_bytes(), "2^8"),
        (20, &22u32.to_be_bytes(), "2^22"),
        (20, &u32::MAX.to_be_bytes(), "2^4294967295"),
        (32, &1u32.to_be_bytes(), "AES"),
        (32, &2u32.to_be_bytes(), "LUKS"),
        (24, &0u64.to_be_bytes(), "0 bytes"),
        (24, &513u64.to_be_bytes(), "513"),
        (24, &(1u64 << 47).to_be_bytes(), "64 TiB"),
        (24, &(2u64 << 30).to_be_bytes(), "4 are needed"),
        (36, &u32::MAX.to_be_bytes(), "32 MiB"),
        (40, &0u64.to_be_bytes(), "overlaps the header"),
        (40, &0x1_0000u64.to_be_bytes(), "overlaps"),
        (40, &0x3_0200u64.to_be_bytes(), "middle"),
        (40, &0x4_0000u64.to_be_bytes(), "outside"),
        (40, &(1u64 << 63).to_be_bytes(), "outside"),
        (48, &0u64.to_be_bytes(), "overlaps the header"),
        (48, &0x9_0000u64.to_be_bytes(), "outside"),
        (56, &0u32.to_be_bytes(), "refcount table of 0"),
        (56, &u32::MAX.to_be_bytes(), "refcount table of"),
        (60, &65537u32.to_be_bytes(), "snapshots"),
        (60, &1u32.to_be_bytes(), "overlaps the header"),
        (72, &(1u64 << 2).to_be_bytes(), "external data"),
        (72, &(1u64 << 3).to_be_bytes(), "compression type 0"),
        (72, &(1u64 << 5).to_be_bytes(), "feature 5 (without a name)"),
        (72, &(1u64 << 63).to_be_bytes(), "feature 63 (without a name)"),
        (96, &7u32.to_be_bytes(), "order of 7"),
        (100, &96u32.to_be_bytes(), "header length of 96"),
        (100, &108u32.to_be_bytes(), "header length of 108"),
        (100, &0xFFFF_FFF8u32.to_be_bytes(), "header length"),
        (104, &[1], "compression type 1"),
        (8, &8u64.to_be_bytes(), "backing file name at 0x8"),
        (8, &4090u64.to_be_bytes(), "backing file name at"),
        (8, &u64::MAX.to_be_bytes(), "backing file name at"),
        (16, &0u32.to_be_bytes(), "name of 0 bytes"),
        (16, &1024u32.to_be_bytes(), "name of 1024 bytes"),
        (116, &u32::MAX.to_be_bytes(), "cut off"),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        if text.is_empty() {
            assert!(parse(&bad).is_ok());
            continue;
        }
        let error = parse(&bad).expect_err(text).to_string();
        assert!(error.contains(text), "{error:?} instead of {text:?}");
    }
}

#[test]
fn an_unknown_feature_is_called_by_the_name_that_the_image_gives_it() {
    let mut names = vec![0u8; 96];
    names[48..57].copy_from_slice(b"\0\x28shrink\n");
    let mut h = header();
    h.incompatible = 1 << 40;
    h.extensions.push((EXT_FEATURE_NAMES, names));
    let error = parse(&encoded(&h)).unwrap_err();
    assert_eq!(error, Unsupported("the incompatible feature 40 (shrink?)".into()));
}

#[test]
fn an_extension_that_comes_twice_and_a_flood_of_them_are_refused() {
    let mut h = header();
    h.extensions.push(h.extensions[0].clone());
    assert!(matches!(parse(&encoded(&h)), Err(Damaged(_))));
    h.extensions = (1..=65).map(|kind| (kind, Vec::new())).collect();
    assert!(matches!(parse(&encoded(&h)), Err(Damaged(_))));
}

#[test]
fn a_header_that_does_not_fit_is_not_written() {
    let mut h = header();
    h.cluster_bits = 9;
    h.extensions = vec![(1, vec![0; 400])];
    assert_eq!(h.encode(), None);
}

proptest! {
    #[test]
    fn a_damaged_header_is_refused_or_still_within_bounds(
        changes in proptest::collection::vec((0usize..200, any::<u8>()), 1..6),
        len in 0usize..4096,
    ) {
        let mut bytes = encoded(&header());
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        for bytes in [&bytes[..], &bytes[..len]] {
            if let Ok(h) = parse(bytes) {
                prop_assert!(h.l1_offset + u64::from(h.l1_entries) * 8 <= FILE_BYTES);
                prop_assert!(h.reftable_offset + h.reftable_bytes() <= FILE_BYTES);
                prop_assert!(h.disk_bytes <= MAX_DISK_BYTES);
            }
        }
    }
}
