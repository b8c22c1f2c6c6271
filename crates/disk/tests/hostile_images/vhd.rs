//! One VHD.

use ferrite_disk::open_medium;
use ferrite_disk::{Format, OpenOptions};
use ferrite_hostile_inputs::images::Sketch;
use ferrite_hostile_inputs::images::vhd::{self, Dynamic, FOOTER_BYTES, Parent, Sealed, TABLE_AT};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::Den;

fn refuses(den: &Den, image: &Sketch, why: &str) {
    den.refuses_image(Format::Vhd, image, why);
}

/// The reason has the place of what is wrong.
fn refuses_with_place(den: &Den, image: &Sketch, why: &str) {
    refuses(den, image, why);
    refuses(den, image, "at byte");
}

/// A footer field, in both footers, with the right checksums.
fn with_footer(field: usize, value: &[u8]) -> Sketch {
    let mut image = vhd::small().build();
    for at in [0, image.bytes() - FOOTER_BYTES] {
        Sealed::Footer.forge(&mut image, at, field, value);
    }
    image
}

fn with_header(field: usize, value: &[u8]) -> Sketch {
    let mut image = vhd::small().build();
    Sealed::Header.forge(&mut image, FOOTER_BYTES, field, value);
    image
}

fn with_entry(block: u64, sector: u32) -> Sketch {
    let mut image = vhd::small().build();
    image.put_u32(TABLE_AT + 4 * block, sector);
    image
}

#[test]
fn an_undamaged_image_is_read() {
    let den = Den::new();
    let bytes = den.reads(Format::Vhd, &vhd::small().build());
    assert_eq!(bytes.len(), 64 << 10);
    assert!(bytes[..4096].iter().all(|b| *b == 1) && bytes[5 * 4096] == 6 && bytes[4096] == 0);
    assert_eq!(den.reads(Format::Vhd, &vhd::fixed(4096, [7; 16], 3)), vec![3; 4096]);
}

#[test]
fn what_is_cut_off_is_refused() {
    let den = Den::new();
    let blocks_at = vhd::small().blocks_at();
    for bytes in [1, 511, 512, 513, 1024, 1535, 1536].into_iter().chain((0..blocks_at).step_by(257))
    {
        let mut image = vhd::small().build();
        image.set_bytes(bytes);
        refuses(&den, &image, "");
    }
    for bytes in [0, 1, 4096, 4097, 4096 + 510] {
        let mut image = vhd::fixed(4096, [7; 16], 1);
        image.set_bytes(bytes);
        refuses(&den, &image, "");
    }
}

#[test]
fn wrong_checksums_are_refused() {
    let den = Den::new();
    let mut image = vhd::small().build();
    let end = image.bytes() - FOOTER_BYTES;
    image.put(64, &[1; 4]).put(end + 64, &[1; 4]);
    refuses(&den, &image, "checksum");
    let mut image = vhd::small().build();
    image.put(FOOTER_BYTES + 36, &[1; 4]);
    refuses(&den, &image, "checksum");
}

#[test]
fn what_is_not_known_is_refused() {
    let den = Den::new();
    for (field, value, why) in [
        (0, b"conectiX".as_slice(), "cookie"),
        (8, &[0, 0, 0, 0x12], "unknown features"),
        (12, &[0, 2, 0, 0], "unknown version"),
        (60, &[0, 0, 0, 5], "unknown disk type"),
        (60, &[0xFF; 4], "unknown disk type"),
    ] {
        refuses_with_place(&den, &with_footer(field, value), why);
    }
    for (field, value, why) in
        [(0, b"cxsparsE".as_slice(), "cookie"), (24, &[0, 2, 0, 0], "unknown version")]
    {
        refuses_with_place(&den, &with_header(field, value), why);
    }
}

#[test]
fn absurd_sizes_and_places_are_refused() {
    let den = Den::new();
    for size in [0, 1, 513, (2040 << 30) + 512, 1 << 62, u64::MAX - 511, u64::MAX] {
        refuses(&den, &with_footer(48, &size.to_be_bytes()), "a disk of");
    }
    for at in [u64::MAX, u64::MAX - 511, 1 << 63, 1 << 40, 100] {
        refuses(&den, &with_footer(16, &at.to_be_bytes()), "dynamic header");
    }
    for at in [u64::MAX, u64::MAX - 511, 1 << 63, 1 << 40, 0, 512, 1024, 1537] {
        refuses(&den, &with_header(16, &at.to_be_bytes()), "table");
    }
    for entries in [0u32, 15, 1 << 20, u32::MAX] {
        refuses(&den, &with_header(28, &entries.to_be_bytes()), "table");
    }
    for block in [0u32, 1, 511, 4095, 3 << 20, 1 << 31, u32::MAX] {
        refuses(&den, &with_header(32, &block.to_be_bytes()), "blocks of");
    }
    // The largest disk in the smallest blocks that it says there are.
    let mut image = with_footer(48, &(2040u64 << 30).to_be_bytes());
    Sealed::Header.forge(&mut image, FOOTER_BYTES, 28, &[0xFF; 4]);
    refuses(&den, &image, "blocks");
}

#[test]
fn geometry_is_not_believed() {
    let den = Den::new();
    for geometry in [[0; 4], [0xFF; 4]] {
        assert_eq!(den.reads(Format::Vhd, &with_footer(56, &geometry)).len(), 64 << 10);
    }
}

#[test]
fn the_largest_table_is_read_within_bounds() {
    let den = Den::new();
    let entries = 4u32 << 20;
    let table = u64::from(entries) * 4;
    let footer = vhd::footer(vhd::DYNAMIC, u64::from(entries) * 512, [7; 16]);
    let mut image = Sketch::new(0);
    image.put(0, &footer).put(FOOTER_BYTES, &vhd::header(TABLE_AT, entries, 512));
    image.put(TABLE_AT, &vec![0xFF; table as usize]).put(TABLE_AT + table, &footer);
    let path = den.put("image.vhd", &image);
    drop(image);
    let verdict = den.judge(&path, Format::Vhd, true);
    assert!(matches!(verdict, super::Verdict::Reads(_)), "it {verdict}");
    // Holes: each entry is a block over the footer.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 4], TABLE_AT + table - 4).unwrap();
    den.refuses(&path, Format::Vhd, "over the footer's copy");
}

#[test]
fn blocks_outside_of_the_image_or_over_anything_are_refused() {
    let den = Den::new();
    let first = (vhd::small().blocks_at() / 512) as u32;
    let end = (vhd::small().build().bytes() / 512) as u32;
    for sector in [end - 8, end - 1, end, end + 1, 1 << 31, u32::MAX - 1] {
        refuses(&den, &with_entry(3, sector), "outside of the image");
    }
    for sector in 0..first {
        refuses(&den, &with_entry(3, sector), "over");
    }
    for sector in [first, first + 1, first + 8, first + 9] {
        refuses(&den, &with_entry(3, sector), "over");
    }
}

#[test]
fn parent_locators_that_make_no_sense_do_no_harm() {
    let den = Den::new();
    den.put("parent.vhd", &vhd::small().build());
    let child = |change: &dyn Fn(&mut Sketch)| {
        let parent = Some(Parent::beside([7; 16], "parent.vhd"));
        let mut image = Dynamic { uuid: [9; 16], parent, ..vhd::small() }.build();
        change(&mut image);
        image
    };
    assert_eq!(den.reads(Format::Vhd, &child(&|_| ())).len(), 64 << 10);
    for (field, value) in [
        (576, b"What".as_slice()),
        (580, &[0xFF; 4]),
        (584, &[0xFF; 4]),
        (592, &[0xFF; 8]),
        (592, &[0x7F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFE, 0]),
        (592, &[0; 8]),
        (40, &[1; 16]),
    ] {
        let forge = |image: &mut Sketch| {
            Sealed::Header.forge(image, FOOTER_BYTES, field, value);
        };
        refuses(&den, &child(&forge), "");
    }
    for text in ["", "\\\\.\\PhysicalDrive0", "..\\..\\nothing", "a\u{fffd}\u{10ffff}"] {
        let mut parent = Parent::beside([7; 16], "");
        parent.locators[0].1 = vhd::utf16(text);
        let image = Dynamic { uuid: [9; 16], parent: Some(parent), ..vhd::small() }.build();
        refuses(&den, &image, "");
    }
}

#[test]
fn footers_of_different_images_are_refused() {
    let den = Den::new();
    // A guest writes a whole image to the beginning of its fixed disk.
    let mut image = vhd::fixed(1 << 20, [8; 16], 0);
    image.put(0, &vhd::small().build().get(0, 4096));
    refuses(&den, &image, "of different images");
}

/// Opens, reads and checks, whatever that gives.
fn use_all(den: &Den, image: &Sketch) {
    let path = den.put("image.vhd", image);
    den.judge(&path, Format::Vhd, true);
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    let raw = open_medium(&path, &read_only).unwrap();
    let _ = ferrite_images::vhd::check(&raw);
}

#[test]
fn no_change_of_metadata_makes_it_panic() {
    let den = Den::new();
    let good = vhd::small().build();
    let metadata = TABLE_AT + FOOTER_BYTES;
    let changes = proptest::collection::vec((0..metadata, any::<u8>()), 1..6);
    let mut runner = TestRunner::new(Config { cases: 200, ..Config::default() });
    let done = runner.run(&(changes, any::<bool>()), |(changes, sealed)| {
        let mut image = vhd::small().build();
        for (at, byte) in changes {
            image.put(at, &[byte]);
        }
        if sealed {
            Sealed::Footer.forge(&mut image, 0, 0, &[]);
            Sealed::Header.forge(&mut image, FOOTER_BYTES, 0, &[]);
            let footer = image.get(0, FOOTER_BYTES as usize);
            image.put(good.bytes() - FOOTER_BYTES, &footer);
        }
        use_all(&den, &image);
        Ok(())
    });
    done.unwrap();
}
