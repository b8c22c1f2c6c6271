//! Images that somebody made to do harm, or that are broken: a clear error, soon, and nothing
//! written (security.md T17).

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::vhd::{at, create, name, options, parent, queue};
use common::{MIB, Queue, dir_on_tmpfs};
use ferrite_disk::vhd::{self, NewImage};
use ferrite_disk::{Disk, DiskError, OpenOptions, Raw};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tempfile::TempDir;

fn open(path: &Path) -> Result<Disk, DiskError> {
    Disk::open(name(path), &options())
}

fn why(path: &Path) -> String {
    let before = fs::read(path).unwrap();
    let error = open(path).expect_err("it makes no sense");
    assert!(fs::read(path).unwrap() == before);
    assert!(!error.help().is_empty());
    error.to_string()
}

/// A dynamic image with two blocks, and its bytes.
fn image(dir: &TempDir) -> (PathBuf, Vec<u8>) {
    let path = at(dir, "a.vhd");
    create(&path, &NewImage { block_bytes: 65536, ..NewImage::dynamic(MIB) }).unwrap();
    let mut disk = queue(&path);
    disk.write(0, &[1; 512]).unwrap();
    disk.write(MIB - 512, &[2; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

/// Makes the checksums of footers and header right.
fn forge(bytes: &mut [u8]) {
    let end = bytes.len() - 512;
    for (start, len, field) in [(0, 512, 64), (512, 1024, 36), (end, 512, 64)] {
        let part = &mut bytes[start..start + len];
        part[field..field + 4].fill(0);
        let sum = part.iter().fold(0u32, |sum, b| sum.wrapping_add(u32::from(*b)));
        part[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
    }
}

#[test]
fn forged_fields_are_refused_and_named_with_their_place() {
    let dir = dir_on_tmpfs();
    let (path, good) = image(&dir);
    // Where, what, and a part of the reason. Fields of footers are changed in both.
    let footers: [(usize, &[u8], &str); 6] = [
        (8, &[0xff; 4], "unknown features"),
        (12, &[0, 9, 0, 0], "unknown version 9.0"),
        (16, &[0xff; 8], "the dynamic header at byte"),
        (48, &[0xff; 8], "a disk of 18446744073709551615 bytes"),
        (60, &[0, 0, 0, 9], "unknown disk type 9"),
        (48, &[0, 0, 1, 0, 0, 0, 0, 0], "a table of"),
    ];
    for (field, value, reason) in footers {
        let mut bytes = good.clone();
        let end = bytes.len() - 512;
        for start in [0, end] {
            bytes[start + field..start + field + value.len()].copy_from_slice(value);
        }
        forge(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        let why = why(&path);
        assert!(why.contains(reason) && why.contains("at byte"), "{why}");
    }
    let others: [(usize, &[u8], &str); 9] = [
        (512, b"x", "no cookie"),
        (512 + 16, &[0; 8], "the block table lies over the footer's copy"),
        (512 + 16, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0], "outside of the image"),
        (512 + 28, &[0xff; 4], "outside of the image"),
        (512 + 28, &[0; 4], "a table of 0 entries"),
        (512 + 32, &[0; 4], "blocks of 0 bytes"),
        (512 + 32, &[0, 0, 2, 0], "over the block table"),
        (1536, &[0, 0, 0, 1], "over the dynamic header"),
        (1536, &[0xff, 0xff, 0xff, 0xfe], "outside of the image"),
    ];
    for (offset, value, reason) in others {
        let mut bytes = good.clone();
        bytes[offset..offset + value.len()].copy_from_slice(value);
        if offset == 512 + 32 && value[2] == 2 {
            // Blocks of 512 bytes, 2,048 of them, in a table of 16.
            bytes[512 + 28..512 + 32].copy_from_slice(&[0, 0, 8, 0]);
        }
        forge(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        let why = why(&path);
        assert!(why.contains(reason) && why.contains("at byte"), "{offset}: {why}");
    }
    // Two blocks in one place.
    let mut bytes = good.clone();
    let first: [u8; 4] = bytes[1536..1540].try_into().unwrap();
    bytes[1536 + 15 * 4..1536 + 16 * 4].copy_from_slice(&first);
    fs::write(&path, &bytes).unwrap();
    assert!(why(&path).contains("over one at byte"));
    // Wrong checksums, of all that have one.
    let mut bytes = good.clone();
    bytes[600] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(why(&path).contains("its checksum is"));
}

#[test]
fn a_truncated_image_is_refused_wherever_it_ends() {
    let dir = dir_on_tmpfs();
    let (path, good) = image(&dir);
    for len in (0..good.len()).step_by(257).chain([1, 511, 512, 513, 1535, 1536]) {
        // Only the footer at the end, and what follows the last block, can be missed.
        if good.len() - len > 512 + 4096 {
            fs::write(&path, &good[..len]).unwrap();
            why(&path);
        }
    }
}

#[test]
fn footers_of_different_images_are_refused() {
    let dir = dir_on_tmpfs();
    // A guest writes a whole image to the beginning of its fixed disk.
    let (_, inner) = image(&dir);
    let fixed = at(&dir, "fixed.vhd");
    create(&fixed, &NewImage { fixed: true, ..NewImage::dynamic(MIB) }).unwrap();
    let mut disk = queue(&fixed);
    disk.write(0, &inner[..4096]).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert!(why(&fixed).contains("of different images"));
}

#[test]
fn the_last_sector_of_an_open_file_is_never_a_guests() {
    let dir = dir_on_tmpfs();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage { block_bytes: 4096, ..NewImage::dynamic(64 * MIB) }).unwrap();
    let mut disk = queue(&path);
    let footer = fs::read(&path).unwrap();
    let mut forged = vec![0; 4096];
    forged[3584..].copy_from_slice(&footer[footer.len() - 512..]);
    for block in 0..5000u64 {
        disk.write(block * 4096, &forged).unwrap();
        if block % 499 == 0 {
            let bytes = fs::read(&path).unwrap();
            assert!(bytes[bytes.len() - 512..].iter().all(|b| *b == 0), "{block}");
        }
    }
}

/// A chain of so many images; `None`: the last is its own ancestor.
fn chain(dir: &TempDir, length: usize) -> PathBuf {
    let mut last = at(dir, "0.vhd");
    let mut footer = create(&last, &NewImage::dynamic(MIB)).unwrap();
    for i in 1..length {
        let next = at(dir, &format!("{i}.vhd"));
        footer = create(&next, &NewImage::differencing(MIB, parent(&last, &footer))).unwrap();
        last = next;
    }
    last
}

#[test]
fn a_chain_that_is_too_long_is_refused_and_a_long_one_is_not() {
    let dir = dir_on_tmpfs();
    let last = chain(&dir, ferrite_disk::MAX_LAYERS + 1);
    assert!(why(&last).contains("number 256 of its chain"));
    assert_eq!(open(&last.with_file_name("255.vhd")).unwrap().sectors(), 2048);
}

#[test]
fn a_chain_that_comes_back_to_itself_is_refused() {
    let dir = dir_on_tmpfs();
    let last = chain(&dir, 3);
    // The base becomes a copy of the middle, whose parent is the base.
    fs::copy(last.with_file_name("1.vhd"), last.with_file_name("0.vhd")).unwrap();
    let why = why(&last);
    assert!(why.contains("is itself or one of its children"), "{why}");
}

#[test]
fn a_parent_that_was_replaced_is_refused() {
    let dir = dir_on_tmpfs();
    let last = chain(&dir, 2);
    let base = last.with_file_name("0.vhd");
    fs::remove_file(&base).unwrap();
    assert!(why(&last).contains("is at none of"));
    create(&base, &NewImage::dynamic(MIB)).unwrap();
    assert!(why(&last).contains("but the image was made on"));
}

/// Uses all of a disk, if it opens.
fn use_all(path: &Path) {
    let read_only = OpenOptions { read_only: true, ..options() };
    let Ok(disk) = Disk::open(name(path), &read_only) else { return };
    let mut disk = Queue::new(disk);
    let bytes = disk.disk.sectors() * 512;
    for at in (0..bytes.min(2 * MIB)).step_by(65536) {
        let len = (bytes - at).min(65536);
        let _ = disk.read(at, len as usize);
    }
    drop(disk);
    let raw = Raw::open_medium(path, &read_only).unwrap();
    let _ = vhd::check(&raw);
}

#[test]
fn no_change_of_metadata_makes_it_panic() {
    let dir = dir_on_tmpfs();
    let (path, good) = image(&dir);
    let metadata: usize = 1536 + 512;
    let change = (0..metadata, any::<u8>());
    let changes = proptest::collection::vec(change, 1..6);
    let mut runner = TestRunner::new(Config { cases: 400, ..Config::default() });
    runner
        .run(&(changes, any::<bool>()), |(changes, forged)| {
            let mut bytes = good.clone();
            for (offset, byte) in &changes {
                bytes[*offset] = *byte;
            }
            if forged {
                let end = bytes.len() - 512;
                bytes.copy_within(0..512, end);
                forge(&mut bytes);
            }
            fs::write(&path, &bytes).unwrap();
            use_all(&path);
            assert!(fs::read(&path).unwrap() == bytes);
            Ok(())
        })
        .unwrap();
}
