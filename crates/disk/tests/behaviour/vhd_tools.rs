//! Checking, repairing and resizing VHDs, and the end of a coalesce.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferrite_disk::open_medium;
use ferrite_disk::{Disk, OpenOptions};
use ferrite_images::vhd::{self, Footer, NewImage, Problem, Uuid, Vhd};

use crate::common::vhd::{at, create, name, offline, options, parent, peer, queue};
use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk};
use tempfile::TempDir;

const BYTES: u64 = 9 * MIB + 512;

fn check(path: &Path) -> Vec<Problem> {
    let raw = open_medium(path, &OpenOptions { read_only: true, ..options() }).unwrap();
    let mut problems: Vec<Problem> =
        vhd::check(&raw).unwrap().findings.iter().map(|f| f.problem).collect();
    problems.dedup();
    problems
}

fn repair(path: &Path) {
    let raw = open_medium(path, &options()).unwrap();
    offline(&[&raw], async |port| vhd::repair(&port, &raw).await).unwrap();
}

fn resize(path: &Path, bytes: u64) -> Result<(), ferrite_disk::DiskError> {
    let image = Vhd::open(path, &options())?;
    let files = image.medium().files();
    crate::common::vhd::offline_files(files, async |port| image.resize(&port, bytes).await)
}

/// An image with three blocks, one of them whole.
fn image(dir: &TempDir) -> std::path::PathBuf {
    let path = at(dir, "a.vhd");
    create(&path, &NewImage::dynamic(BYTES)).unwrap();
    let mut disk = queue(&path);
    for (offset, byte) in [(4 * MIB, 3), (0, 1), (9 * MIB, 4)] {
        disk.write(offset, &[byte; 512]).unwrap();
    }
    disk.close().unwrap();
    path
}

fn is_intact(path: &Path) {
    let mut disk = queue(path);
    for (offset, byte) in [(4 * MIB, 3), (0, 1), (9 * MIB, 4), (2 * MIB, 0), (4 * MIB + 512, 0)] {
        assert_eq!(disk.read(offset, 512).unwrap(), [byte; 512], "at {offset}");
    }
}

fn change(path: &Path, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

fn table_entry(path: &Path, block: u64) -> u32 {
    let mut entry = [0; 4];
    File::open(path).unwrap().read_exact_at(&mut entry, 1536 + block * 4).unwrap();
    u32::from_be_bytes(entry)
}

/// A fixed image's only footer is in the last sector.
#[test]
fn who_opens_a_fixed_image_on_a_device_that_has_grown_is_told_where_its_footer_belongs() {
    let dir = dir_on_disk();
    let path = at(&dir, "device");
    create(&path, &NewImage { fixed: true, ..NewImage::dynamic(MIB) }).unwrap();
    let old = fs::metadata(&path).unwrap().len() / 512 - 1;
    File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
    let device = OpenOptions { fixed_size: true, ..options() };
    let error = Vhd::open(&path, &device).unwrap_err();
    let command = error.help().split(": ").last().unwrap().replace("OLD", &old.to_string());
    assert!(command.starts_with("dd ") && command.ends_with("seek=4095"), "{command}");
    crate::common::run("sh", &["-c", &command]).unwrap();
    assert_eq!(Vhd::open(&path, &device).unwrap().bytes(), MIB);
}

/// The beginning of a fixed disk is its guest's: there it says that the disk is an image on another
/// guest's disk, which the footer at the end of the device contradicts, until the device grows.
#[test]
fn a_guest_of_a_fixed_image_on_a_device_that_has_grown_gets_no_other_disk() {
    let dir = dir_on_disk();
    let (other, forged) = (at(&dir, "other.img"), at(&dir, "forged.vhd"));
    fs::write(&other, vec![0xAB; MIB as usize]).unwrap();
    let nobodys =
        Footer { uuid: Uuid::NIL, ..create(&at(&dir, "x.vhd"), &NewImage::dynamic(MIB)).unwrap() };
    create(&forged, &NewImage::differencing(MIB, parent(&other, &nobodys))).unwrap();
    let mut forged = fs::read(&forged).unwrap();
    assert_eq!(queue(&at(&dir, "forged.vhd")).read(0, 512).unwrap(), [0xAB; 512]);
    for kind in [4, 3] {
        let path = at(&dir, &format!("device{kind}"));
        create(&path, &NewImage { fixed: true, ..NewImage::dynamic(MIB) }).unwrap();
        let before = fs::metadata(&path).unwrap().len();
        forged[60..68].copy_from_slice(&[0, 0, 0, kind, 0, 0, 0, 0]);
        let sum = forged[..512].iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
        forged[64..68].copy_from_slice(&(!sum).to_be_bytes());
        change(&path, 0, &forged);
        File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
        let grown = fs::read(&path).unwrap();
        let device = OpenOptions { fixed_size: true, ..options() };
        let error = Vhd::open(&path, &device).unwrap_err();
        assert!(error.to_string().contains("guest's") && error.help().contains("dd "), "{error:?}");
        // Nor does a repair believe it.
        let raw = open_medium(&path, &device).unwrap();
        let found = offline(&[&raw], async |port| vhd::repair(&port, &raw).await).unwrap();
        assert!(found.findings.iter().any(|f| f.problem == Problem::Footers));
        drop(raw);
        assert!(fs::read(&path).unwrap() == grown);
        // The owner says what it is.
        let footer = &grown[before as usize - 512..before as usize];
        change(&path, 2 * MIB - 512, footer);
        Vhd::open(&path, &device).unwrap_err();
        change(&path, 0, &[0; 512]);
        assert_eq!(Vhd::open(&path, &device).unwrap().bytes(), MIB);
    }
}

/// Tapdisk leaves an image so that it has open, and so does growing the device of a closed one.
#[test]
fn a_dynamic_image_on_a_device_that_lost_its_end_is_opened_when_its_owner_has_put_the_copy_there() {
    let dir = dir_on_disk();
    let path = image(&dir);
    File::options().write(true).open(&path).unwrap().set_len(64 * MIB).unwrap();
    change(&path, 64 * MIB - 512, &[0xC7; 512]);
    let device = OpenOptions { fixed_size: true, ..options() };
    let error = Vhd::open(&path, &device).unwrap_err();
    let command = error.help().split(": ").last().unwrap().replace("OLD", "0");
    crate::common::run("sh", &["-c", &command]).unwrap();
    assert_eq!(Vhd::open(&path, &device).unwrap().bytes(), BYTES);
    is_intact(&path);
}

/// The user who attaches it says that it is a VHD, and tapdisk's mark says that it was no fixed one.
#[test]
fn an_image_on_a_device_that_tapdisk_had_open_is_opened_by_its_format_and_is_whole_when_it_is_closed()
 {
    let dir = dir_on_disk();
    let path = image(&dir);
    let last = 64 * MIB - 512;
    File::options().write(true).open(&path).unwrap().set_len(64 * MIB).unwrap();
    change(&path, last, &[0xC7; 512]);
    let device = OpenOptions { fixed_size: true, ..options() };
    let said = format!("vhd:{}", name(&path));
    let taken = fs::read(&path).unwrap();
    for unsaid in [&OpenOptions { read_only: true, ..device.clone() }, &device] {
        let error = Disk::open(name(&path), unsaid).unwrap_err();
        assert!(error.help().contains(&format!("name it {said}")), "{error:?}");
    }
    drop(Disk::open(&said, &device).unwrap());
    assert!(fs::read(&path).unwrap() == taken, "opening has written");
    // Killed, it is as it was; closed, it has its footer at the end again.
    let mut disk = Queue::new(Disk::open(&said, &device).unwrap());
    disk.write(2 * MIB + 512, &[5; 512]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    assert!(fs::read(&path).unwrap()[last as usize..] == [0xC7; 512]);
    let mut disk = Queue::new(Disk::open(&said, &device).unwrap());
    assert_eq!(disk.read(2 * MIB + 512, 512).unwrap(), [5; 512]);
    disk.close().unwrap();
    drop(disk);
    let footer = Vhd::open(&path, &device).unwrap().footer().clone();
    assert_eq!(fs::read(&path).unwrap()[last as usize..], taken[..512]);
    // The copy has to be whole, and so has what it names; nothing else is taken for tapdisk's mark.
    for (at, bytes, why) in [
        (0, &[1][..], "cookie"),
        (70, &[0xFF], "cookie"),
        (512 + 70, &[0xFF], "checksum"),
        (last + 511, &[0], "guest's"),
    ] {
        fs::write(&path, &taken).unwrap();
        change(&path, at, bytes);
        let error = Disk::open(&said, &device).unwrap_err();
        assert!(error.to_string().contains(why), "{at}: {error}");
    }
    // Only the image on a parent says the parent's format, which is not enough.
    fs::write(&path, &taken).unwrap();
    let child = at(&dir, "child.vhd");
    create(&child, &NewImage::differencing(BYTES, parent(&path, &footer))).unwrap();
    let error = Disk::open(&format!("vhd:{}", name(&child)), &device).unwrap_err();
    assert!(error.to_string().contains("guest's"), "{error}");
}

/// Windows keeps paths of its own kinds in images that are older than itself.
#[test]
fn the_text_of_a_deprecated_locator_outlives_repairs_and_new_blocks() {
    let dir = dir_on_disk();
    let (below, path) = (image(&dir), at(&dir, "child.vhd"));
    let footer = Vhd::open(&below, &options()).unwrap().footer().clone();
    create(&path, &NewImage::differencing(BYTES, parent(&below, &footer))).unwrap();
    let end = fs::metadata(&path).unwrap().len();
    let (text, place) = ([0xAB; 512], end.next_multiple_of(4096) + 8192);
    let mut header = fs::read(&path).unwrap()[512..1536].to_vec();
    let locator = &mut header[576 + 7 * 24..][..24];
    locator[..12].copy_from_slice(b"Wi2k\0\0\x02\0\0\0\x02\0");
    locator[16..].copy_from_slice(&place.to_be_bytes());
    header[36..40].fill(0);
    let sum = header.iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
    header[36..40].copy_from_slice(&(!sum).to_be_bytes());
    change(&path, 512, &header);
    change(&path, place, &text);
    change(&path, place + 16384, &[0; 512]);
    assert_eq!(check(&path), [Problem::EndFooter, Problem::Leak]);
    repair(&path);
    assert_eq!(check(&path), []);
    let mut disk = queue(&path);
    (0..4).for_each(|i| disk.write(i * 2 * MIB, &[7; 512]).unwrap());
    disk.close().unwrap();
    drop(disk);
    assert_eq!(check(&path), []);
    assert!(fs::read(&path).unwrap()[place as usize..][..512] == text);
}

#[test]
fn a_closed_image_has_nothing_wrong() {
    let dir = dir_on_disk();
    assert_eq!(check(&image(&dir)), []);
    for (name, new) in [
        ("fixed.vhd", NewImage { fixed: true, ..NewImage::dynamic(MIB) }),
        ("empty.vhd", NewImage::dynamic(512)),
        ("small.vhd", NewImage { block_bytes: 4096, ..NewImage::dynamic(MIB) }),
    ] {
        create(&at(&dir, name), &new).unwrap();
        assert_eq!(check(&at(&dir, name)), [], "{name}");
    }
}

#[test]
fn an_image_whose_process_died_is_sound_and_repair_completes_it() {
    let dir = dir_on_disk();
    let path = image(&dir);
    let mut disk = queue(&path);
    disk.write(2 * MIB + 512, &[0; 512]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    assert_eq!(check(&path), [Problem::EndFooter, Problem::Leak]);
    repair(&path);
    assert_eq!(check(&path), []);
    is_intact(&path);
}

#[test]
fn damaged_footers_are_written_again_from_the_whole_one() {
    let dir = dir_on_disk();
    let path = image(&dir);
    let end = fs::metadata(&path).unwrap().len() - 512;
    for (offset, problem) in [(end, Problem::EndFooter), (0, Problem::FooterCopy)] {
        let before = fs::read(&path).unwrap();
        change(&path, offset + 40, b"damage");
        assert_eq!(check(&path), [problem]);
        is_intact(&path);
        repair(&path);
        assert_eq!(check(&path), []);
        assert!(fs::read(&path).unwrap() == before);
    }
}

#[test]
fn a_wrong_batmap_is_made_again_from_the_bitmaps() {
    let dir = dir_on_disk();
    let path = image(&dir);
    let map = 1536 + 512 + 512;
    let before = fs::read(&path).unwrap();
    change(&path, map, &[0x5f]);
    assert_eq!(check(&path), [Problem::Batmap]);
    is_intact(&path);
    repair(&path);
    assert_eq!(check(&path), []);
    assert!(fs::read(&path).unwrap() == before);
    // One that is whole but says too much.
    let first = u64::from(table_entry(&path, 0)) * 512;
    change(&path, first + 3, &[0x7f]);
    assert_eq!(check(&path), [Problem::BatmapBit]);
    repair(&path);
    assert_eq!(check(&path), []);
}

#[test]
fn places_that_make_no_sense_are_named_and_nothing_is_mended() {
    let dir = dir_on_disk();
    let path = image(&dir);
    let good = fs::read(&path).unwrap();
    let first = table_entry(&path, 0);
    for (entry, problem) in [
        (0u32, Problem::Place),
        (3, Problem::Place),
        (u32::MAX - 1, Problem::Place),
        (first + 1, Problem::Overlap),
        (first, Problem::Overlap),
    ] {
        fs::write(&path, &good).unwrap();
        change(&path, 1536 + 4, &entry.to_be_bytes());
        assert!(check(&path).contains(&problem), "{entry}");
        assert!(Vhd::open(&path, &options()).is_err());
        let before = fs::read(&path).unwrap();
        repair(&path);
        assert!(fs::read(&path).unwrap() == before, "{entry}");
    }
}

#[test]
fn a_disk_grows_with_room_in_its_table_and_without() {
    for first in [BYTES, 1 << 40] {
        let dir = dir_on_disk();
        let path = at(&dir, "a.vhd");
        create(&path, &NewImage::dynamic(first)).unwrap();
        resize(&path, BYTES).unwrap();
        let mut disk = queue(&path);
        for (offset, byte) in [(4 * MIB, 3), (0, 1), (9 * MIB, 4)] {
            disk.write(offset, &[byte; 512]).unwrap();
        }
        disk.close().unwrap();
        drop(disk);
        // The table gets a second sector with the last.
        for bytes in [BYTES + 512, 10 * MIB, 300 * MIB, 900 * MIB] {
            resize(&path, bytes).unwrap();
            is_intact(&path);
            let problems = check(&path);
            assert!(problems.is_empty() || problems == [Problem::Leak], "{problems:?}");
            let mut disk = queue(&path);
            assert_eq!(disk.disk.sectors() * 512, bytes);
            assert_eq!(disk.read(bytes - 512, 512).unwrap(), [0; 512]);
            disk.write(bytes - 512, &[9; 512]).unwrap();
            disk.close().unwrap();
            drop(disk);
            if let Some(said) = peer("qemu-img", &["info", "-f", "vpc", name(&path)]) {
                assert!(said.contains(&format!("({bytes} bytes)")), "{said}");
            }
        }
    }
}

/// Entries of the table behind the disk's end mean nothing, also when the disk comes to reach there.
#[test]
fn a_disk_gets_no_blocks_as_it_grows() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage::dynamic(900 * MIB)).unwrap();
    resize(&path, BYTES).unwrap();
    let mut disk = queue(&path);
    disk.write(0, &[7; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let first = table_entry(&path, 0).to_be_bytes();
    for block in [5, 127, 128, 200] {
        change(&path, 1536 + block * 4, &first);
    }
    resize(&path, 600 * MIB).unwrap();
    assert_eq!(check(&path), []);
    let mut disk = queue(&path);
    assert_eq!(disk.read(0, 512).unwrap(), [7; 512]);
    for block in [5, 127, 128, 200] {
        assert_eq!(disk.read(block * 2 * MIB, 512).unwrap(), [0; 512]);
    }
}

/// The last block has old bytes behind the disk's end.
#[test]
fn what_a_disk_gets_as_it_grows_is_zeros_on_a_device_too() {
    for sectors in [1, 3] {
        let dir = dir_on_disk();
        let file = at(&dir, "device");
        fs::write(&file, vec![0xEE; 16 * MIB as usize]).unwrap();
        let Some(device) = Loop::attach(&file, 512) else { return };
        let bytes = 4 * MIB + sectors * 512;
        crate::common::vhd::create_on(&device.0, &NewImage::dynamic(bytes)).unwrap();
        let mut disk = queue(&device.0);
        disk.write(4 * MIB, &[7; 512]).unwrap();
        disk.close().unwrap();
        drop(disk);
        resize(&device.0, 6 * MIB).unwrap();
        let mut disk = queue(&device.0);
        assert!(disk.read(4 * MIB, 512).unwrap() == [7; 512]);
        let new = disk.read(bytes, 64 << 10).unwrap();
        assert!(new.iter().all(|byte| *byte == 0), "{sectors} sectors: {:#x}", new[0]);
    }
}

#[test]
fn a_disk_shrinks_only_if_nothing_is_behind_its_new_end() {
    let dir = dir_on_disk();
    let path = image(&dir);
    let before = fs::read(&path).unwrap();
    for bytes in [9 * MIB, MIB, 512, 0, 513] {
        assert!(resize(&path, bytes).is_err(), "{bytes}");
        assert!(fs::read(&path).unwrap() == before);
    }
    let path = at(&dir, "b.vhd");
    create(&path, &NewImage::dynamic(BYTES)).unwrap();
    let mut disk = queue(&path);
    disk.write(0, &[1; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    resize(&path, 2 * MIB).unwrap();
    assert_eq!(check(&path), []);
    assert_eq!(queue(&path).disk.sectors(), 4096);
}

#[test]
fn a_fixed_image_grows_and_what_was_its_footer_is_zeros() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage { fixed: true, ..NewImage::dynamic(MIB) }).unwrap();
    let mut disk = queue(&path);
    disk.write(MIB - 512, &[7; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    resize(&path, 3 * MIB).unwrap();
    assert!(resize(&path, MIB).is_err());
    let mut disk = queue(&path);
    assert_eq!(disk.disk.sectors(), 3 * 2048);
    assert_eq!(disk.read(MIB - 512, 512).unwrap(), [7; 512]);
    assert!(disk.read(MIB, MIB as usize).unwrap().iter().all(|b| *b == 0));
    drop(disk);
    assert_eq!(check(&path), []);
}

#[test]
fn a_parent_with_the_childs_identity_serves_both_names() {
    let dir = dir_in_memory();
    let (base, child, grandchild) =
        (at(&dir, "base.vhd"), at(&dir, "child.vhd"), at(&dir, "grandchild.vhd"));
    let first = create(&base, &NewImage::dynamic(4 * MIB)).unwrap();
    let second = create(&child, &NewImage::differencing(4 * MIB, parent(&base, &first))).unwrap();
    create(&grandchild, &NewImage::differencing(4 * MIB, parent(&child, &second))).unwrap();
    let mut disk = queue(&child);
    disk.write(MIB, &[2; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    // The merge, of the little that there is.
    let mut disk = queue(&base);
    disk.write(MIB, &[2; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let small = Vhd::open(&child, &OpenOptions { read_only: true, ..options() }).unwrap();
    let merging = OpenOptions { even_parent: true, ..options() };
    let image = Vhd::open(&base, &merging).unwrap();
    let files = image.medium().files();
    crate::common::vhd::offline_files(files, async |port| image.take_identity(&port, &small).await)
        .unwrap();
    drop(small);
    for _ in 0..2 {
        assert_eq!(queue(&grandchild).read(MIB, 512).unwrap(), [2; 512]);
        assert_eq!(check(if base.exists() { &base } else { &child }), []);
        if base.exists() {
            assert_eq!(queue(&child).read(MIB, 512).unwrap(), [2; 512]);
            fs::rename(&base, &child).unwrap();
        }
    }
}
