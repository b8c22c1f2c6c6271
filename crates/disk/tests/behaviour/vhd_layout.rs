//! Where everything is in a VHD that has got another size: as libvhd has it, and with zeros where
//! QEMU takes them for granted.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferrite_disk::open_medium;
use ferrite_disk::{Disk, ImageName, OpenOptions, Parents};
use ferrite_image_tools::{ImageTools, NewImage as New, Verdict};
use ferrite_images::vhd::{self, NewImage, Problem, Vhd};

use crate::common::vhd::{
    at, check_by_vhd_util, create, name, offline, options, parent, peer, queue,
};
use crate::common::{MIB, Queue, dir_on_disk, work};
use ferrite_io::engine::Op;
use ferrite_testkit::faulty::Faults;
use ferrite_testkit::few_or_all;

const BLOCK: u64 = 2 * MIB;
const STRIDE: u64 = BLOCK + 512;

fn be32(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 4];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    u32::from_be_bytes(bytes).into()
}

fn resize(path: &Path, bytes: u64) {
    let image = Vhd::open(path, &options()).unwrap();
    let files = image.medium().files();
    crate::common::vhd::offline_files(files, async |port| image.resize(&port, bytes).await)
        .unwrap();
}

/// The place of the table, and where that ends.
fn table(path: &Path) -> (u64, u64) {
    let start = be32(path, 512 + 16) << 32 | be32(path, 512 + 20);
    (start, start + (be32(path, 512 + 28) * 4).next_multiple_of(512))
}

/// Places of blocks in the file.
fn blocks(path: &Path) -> Vec<u64> {
    let (start, end) = table(path);
    let mut bytes = vec![0; (end - start) as usize];
    File::open(path).unwrap().read_exact_at(&mut bytes, start).unwrap();
    let entries = bytes.chunks_exact(4).map(|e| u32::from_be_bytes([e[0], e[1], e[2], e[3]]));
    entries.filter(|entry| *entry != u32::MAX).map(|entry| u64::from(entry) * 512).collect()
}

/// The first block that QEMU makes is behind the table. It writes the bitmap and the footer behind
/// the block, and takes for zeros what is between.
#[track_caller]
fn assert_zeros_for_qemu(path: &Path) {
    assert!(blocks(path).is_empty());
    let first = table(path).1;
    let mut bytes = vec![0; BLOCK as usize];
    File::open(path).unwrap().read_exact_at(&mut bytes, first + 512).unwrap();
    let wrong = bytes.iter().position(|byte| *byte != 0);
    assert_eq!(wrong, None, "{:?}", wrong.map(|at| &bytes[at..][..8]));
    let copy = path.with_extension("by-qemu");
    fs::copy(path, &copy).unwrap();
    let write = "write -P 7 1M 512";
    if peer("qemu-io", &["-f", "vpc", "-c", write, name(&copy)]).is_none() {
        return;
    }
    for read in ["read -P 7 1M 512", "read -P 0 0 1M", "read -P 0 1049088 1048064"] {
        let said = peer("qemu-io", &["-r", "-f", "vpc", "-c", read, name(&copy)]).unwrap();
        assert!(!said.contains("failed"), "{read}: {said}");
    }
}

#[track_caller]
fn assert_libvhd_accepts(path: &Path, parent: Option<&Path>) {
    let raw = open_medium(path, &OpenOptions { read_only: true, ..options() }).unwrap();
    let report = vhd::check_strictly(&raw, parent).unwrap();
    assert!(report.counts.total() == report.counts.leaks, "{:?}", report.findings);
    check_by_vhd_util(path);
}

/// An image in which a process has written that died, with its host, before it had flushed.
fn left_by_a_dead_host(path: &Path, bytes: u64) {
    create(path, &NewImage::dynamic(bytes)).unwrap();
    let mut disk = queue(path);
    disk.write(0, &vec![0xAB; 512 << 10]).unwrap();
    disk.write(5 * MIB, &vec![0xCD; 512 << 10]).unwrap();
    drop(disk);
}

#[test]
fn a_disk_that_grew_while_it_was_empty_has_zeros_where_qemu_puts_its_first_block() {
    for sizes in [&[300 * MIB][..], &[10 * MIB, 900 * MIB, 2000 * MIB], &[1 << 40, 2040 << 30]] {
        let dir = dir_on_disk();
        let path = at(&dir, "a.vhd");
        create(&path, &NewImage::dynamic(8 * MIB)).unwrap();
        for bytes in sizes {
            resize(&path, *bytes);
            assert_zeros_for_qemu(&path);
            assert_libvhd_accepts(&path, None);
        }
    }
}

#[test]
fn what_a_process_wrote_that_died_is_not_where_qemu_puts_its_first_block() {
    type Step = fn(&Path);
    let steps: [(&str, Step); 4] = [
        ("close", |path| queue(path).close().unwrap()),
        ("resize", |path| resize(path, 20 * MIB)),
        ("repair", |path| {
            let raw = open_medium(path, &options()).unwrap();
            offline(&[&raw], async |port| vhd::repair(&port, &raw).await).unwrap();
        }),
        ("coalesce", |path| {
            let image = Vhd::open(path, &options()).unwrap();
            let child = path.with_extension("child");
            let new = NewImage::differencing(image.bytes(), parent(path, image.footer()));
            create(&child, &new).unwrap();
            let child = Vhd::open(&child, &options()).unwrap();
            let files = image.medium().files();
            let taken = async |port| image.take_identity(&port, &child).await;
            crate::common::vhd::offline_files(files, taken).unwrap();
        }),
    ];
    for (what, step) in steps {
        let dir = dir_on_disk();
        let path = at(&dir, "a.vhd");
        left_by_a_dead_host(&path, 8 * MIB);
        step(&path);
        eprintln!("{what}");
        assert_zeros_for_qemu(&path);
        assert_libvhd_accepts(&path, None);
    }
}

/// A block may come to lie where the footer was.
#[test]
fn the_old_footer_of_a_device_that_grows_below_an_open_image_becomes_zeros() {
    for writes in [true, false] {
        let dir = dir_on_disk();
        let path = at(&dir, "device");
        File::create_new(&path).unwrap().set_len(8 * MIB).unwrap();
        let device = OpenOptions { fixed_size: true, ..options() };
        let raw = open_medium(&path, &device).unwrap();
        let new = NewImage::dynamic(64 * MIB);
        offline(&[&raw], async |port| new.create(&port, &raw).await).unwrap();
        drop(raw);
        let open = || Queue::new(Disk::open(&format!("vhd:{}", name(&path)), &device).unwrap());
        let mut disk = open();
        File::options().write(true).open(&path).unwrap().set_len(24 * MIB).unwrap();
        if writes {
            (0..8).for_each(|i| disk.write(i * BLOCK, &[1 + i as u8; 512]).unwrap());
        }
        disk.close().unwrap();
        drop(disk);
        let mut sector = [1; 512];
        File::open(&path).unwrap().read_exact_at(&mut sector, 8 * MIB - 512).unwrap();
        assert!(sector == [0; 512], "{writes}");
        assert!(open().disk.sectors() == 64 * 2048);
    }
}

/// Blocks in another order than in the disk, one of them half full.
fn with_blocks(path: &Path, new: &NewImage) -> Vec<(u64, u8)> {
    create(path, new).unwrap();
    let data: Vec<(u64, u8)> =
        [(4, 1), (0, 2), (3, 3), (1, 4)].map(|(block, byte)| (block * BLOCK + 4096, byte)).into();
    let mut disk = queue(path);
    data.iter().for_each(|(at, byte)| disk.write(*at, &[*byte; 512]).unwrap());
    disk.close().unwrap();
    data
}

#[track_caller]
fn assert_holds(path: &Path, data: &[(u64, u8)]) {
    let mut disk = queue(path);
    for (at, byte) in data {
        assert!(disk.read(*at, 512).unwrap() == [*byte; 512], "at {at}");
        assert!(disk.read(*at - 4096, 4096).unwrap() == [0; 4096], "before {at}");
        assert!(disk.read(*at + 512, 4096).unwrap() == [0; 4096], "behind {at}");
    }
}

#[test]
fn blocks_make_room_for_a_larger_table_and_libvhd_accepts_the_image() {
    let dir = dir_on_disk();
    let (base, child) = (at(&dir, "base.vhd"), at(&dir, "child.vhd"));
    let footer = create(&base, &NewImage::dynamic(10 * MIB)).unwrap();
    let mut moved = 0;
    for (path, new) in [
        (at(&dir, "a.vhd"), NewImage::dynamic(10 * MIB)),
        (child, NewImage::differencing(10 * MIB, parent(&base, &footer))),
    ] {
        let data = with_blocks(&path, &new);
        let below = new.parent.as_ref().map(|parent| &*parent.path);
        assert_libvhd_accepts(&path, below);
        let first = blocks(&path);
        for bytes in [300 * MIB, 302 * MIB, 900 << 30, 2040 << 30] {
            resize(&path, bytes);
            let (start, end) = table(&path);
            assert!(blocks(&path).iter().all(|block| *block >= end), "{start} to {end}");
            assert_holds(&path, &data);
            assert_libvhd_accepts(&path, below);
            let mut disk = queue(&path);
            disk.write(bytes - 512, &[9; 512]).unwrap();
            disk.close().unwrap();
            drop(disk);
            if new.parent.is_none() {
                let info = peer("qemu-img", &["info", "-f", "vpc", name(&path)]);
                assert!(info.is_none_or(|said| said.contains(&format!("({bytes} bytes)"))));
                let read = format!("read -P 9 {} 512", bytes - 512);
                let said = peer("qemu-io", &["-r", "-f", "vpc", "-c", &read, name(&path)]);
                assert!(said.is_none_or(|said| !said.contains("failed")));
            }
        }
        moved += first.iter().filter(|block| !blocks(&path).contains(block)).count();
        // Growing in small steps leaves little behind.
        assert!(fs::metadata(&path).unwrap().len() < 60 * MIB);
    }
    assert!(moved >= 6, "{moved} blocks have moved");
}

#[test]
fn growing_in_small_steps_moves_the_table_seldom() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    with_blocks(&path, &NewImage::dynamic(10 * MIB));
    let mut places = vec![table(&path).0];
    for i in 1..u64::from(few_or_all(60, 200)) {
        resize(&path, 10 * MIB + i * 128 * BLOCK);
        places.push(table(&path).0);
    }
    places.dedup();
    assert!(places.len() <= 16, "{places:?}");
    assert!(fs::metadata(&path).unwrap().len() < 6 * STRIDE + 64 * 1024);
}

/// This program made such images before it kept libvhd's layout.
#[test]
fn a_table_behind_data_comes_before_it_with_the_next_resize() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    let data = with_blocks(&path, &NewImage::dynamic(10 * MIB));
    let mut bytes = fs::read(&path).unwrap();
    let footer = bytes.split_off(bytes.len() - 512);
    let place = bytes.len() as u64;
    // Table, header of the batmap, batmap.
    let mut moved = bytes[1536..1536 + 1536].to_vec();
    moved[512 + 8..512 + 16].copy_from_slice(&(place + 1024).to_be_bytes());
    bytes.extend(moved);
    bytes.extend(footer);
    let header = &mut bytes[512..1536];
    header[16..24].copy_from_slice(&place.to_be_bytes());
    header[36..40].fill(0);
    let sum = header.iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
    header[36..40].copy_from_slice(&(!sum).to_be_bytes());
    fs::write(&path, bytes).unwrap();
    assert_holds(&path, &data);
    let strict = || {
        let raw = open_medium(&path, &OpenOptions { read_only: true, ..options() }).unwrap();
        vhd::check_strictly(&raw, None).unwrap()
    };
    let report = strict();
    assert!(report.counts.foreign == 4 && report.counts.damage == 0, "{:?}", report.findings);
    assert!(report.findings[0].why.contains("before metadata"), "{:?}", report.findings);
    resize(&path, 12 * MIB);
    assert_holds(&path, &data);
    assert_eq!(strict().counts.total(), 0, "{:?}", strict().findings);
}

/// Before each operation of a resize the image, as others would see it, is one and holds its data. The table moves, it
/// gets further sectors at its place, and loses them again.
#[test]
fn an_image_that_is_resized_is_whole_at_each_step() {
    for (first, then) in
        [(None, 700 << 30), (Some(300 * MIB), 600 * MIB), (Some(600 * MIB), 20 * MIB)]
    {
        let dir = dir_on_disk();
        let (path, seen) = (at(&dir, "a.vhd"), at(&dir, "seen.vhd"));
        let data = with_blocks(&path, &NewImage::dynamic(10 * MIB));
        first.iter().for_each(|bytes| resize(&path, *bytes));
        let place = table(&path).0;
        let image = Vhd::open(&path, &options()).unwrap();
        let files = image.medium().files();
        let (from, to, held) = (path.clone(), seen, data.clone());
        let faults = Faults::none();
        faults.before_each(move |op: &Op| {
            // One of many writes of a copy.
            if matches!(op, Op::Read { .. }) {
                return;
            }
            fs::copy(&from, &to).unwrap();
            assert_holds(&to, &held);
        });
        let wrap = |engine| faults.around(engine);
        crate::common::vhd::offline_on(wrap, files, async |port| image.resize(&port, then).await)
            .unwrap();
        assert_eq!(table(&path).0 == place, first.is_some(), "{first:?}");
        assert_holds(&path, &data);
        assert_libvhd_accepts(&path, None);
    }
}

/// Entries of the table that its header tells of.
fn entries(path: &Path) -> u64 {
    be32(path, 512 + 28)
}

/// azure-vhd-utils takes entries times block size for the disk's size.
#[test]
fn a_resized_table_has_an_entry_for_each_block_of_the_disk_and_no_more() {
    let dir = dir_on_disk();
    let base = at(&dir, "base.vhd");
    let footer = create(&base, &NewImage::dynamic(10 * MIB)).unwrap();
    let child = NewImage::differencing(10 * MIB, parent(&base, &footer));
    for (file, new) in [("a.vhd", NewImage::dynamic(10 * MIB)), ("b.vhd", child)] {
        let path = at(&dir, file);
        let data = with_blocks(&path, &new);
        let below = new.parent.as_ref().map(|parent| &*parent.path);
        for mib in [101, 256, 258, 300, 520, 600, 4000, 514, 512, 40, 10, 9000, 20_000, 300, 301] {
            let before = table(&path);
            resize(&path, mib * MIB);
            assert_eq!(entries(&path), mib.div_ceil(2), "{mib} MiB, from {before:?}");
            assert_holds(&path, &data);
            if mib % 2 == 0 {
                assert_libvhd_accepts(&path, below);
            }
        }
    }
}

/// As earlier versions made them, and vhd-util with the option -S.
#[test]
fn a_table_with_room_for_more_blocks_loses_it_when_the_disk_is_resized() {
    for mib in [200, 100, 40] {
        let dir = dir_on_disk();
        let path = at(&dir, "a.vhd");
        let data = with_blocks(&path, &NewImage::dynamic(4000 * MIB));
        // The size of a smaller disk, with the table of the larger one.
        let mut bytes = fs::read(&path).unwrap();
        let len = bytes.len();
        for start in [0, len - 512] {
            let part = &mut bytes[start..start + 512];
            part[48..56].copy_from_slice(&(100 * MIB).to_be_bytes());
            part[64..68].fill(0);
            let sum = part.iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
            part[64..68].copy_from_slice(&(!sum).to_be_bytes());
        }
        fs::write(&path, bytes).unwrap();
        assert_holds(&path, &data);
        resize(&path, mib * MIB);
        assert_eq!(entries(&path), mib / 2);
        assert_eq!(table(&path).0, 1536, "{mib}");
        assert_holds(&path, &data);
        let raw = open_medium(&path, &OpenOptions { read_only: true, ..options() }).unwrap();
        let report = vhd::check_strictly(&raw, None).unwrap();
        assert_eq!(report.counts.total(), 0, "{:?}", report.findings);
    }
}

fn named(path: &Path) -> ImageName {
    ImageName::parse(&format!("vhd:{}", name(path))).unwrap()
}

#[test]
fn a_chain_that_was_moved_as_a_whole_is_accepted() {
    let dir = dir_on_disk();
    fs::create_dir_all(at(&dir, "old/sub")).unwrap();
    let new = |bytes, parent: Option<&str>| New {
        bytes,
        parent: parent.map(|parent| named(&at(&dir, parent))),
        ..New::default()
    };
    work(None, |tools| {
        let make = |path: &str, new: New| tools.create(&named(&at(&dir, path)), &new).unwrap();
        assert!(make("old/100%25.vhd", new(Some(8 * MIB), None)).notes.is_empty());
        let notes = make("old/child.vhd", new(None, Some("old/100%25.vhd"))).notes;
        assert!(notes.iter().all(|note| note.contains("read-only now")), "{notes:?}");
        make("old/sub/grandchild.vhd", new(None, Some("old/child.vhd")));
        fs::rename(at(&dir, "old"), at(&dir, "new")).unwrap();
        // Another disk under the name that the first one would have, were its `%` an escape.
        make("new/100%.vhd", new(Some(8 * MIB), None));
        let tools = ImageTools { parents: Parents::Any, state_dir: None, ..*tools };
        let report =
            tools.check_strictly(&named(&at(&dir, "new/sub/grandchild.vhd")), true).unwrap();
        assert_eq!(report.images.len(), 3);
        assert_eq!(report.verdict, Verdict::InOrder, "{:?}", report.images);
    });
}

#[test]
fn what_libvhd_cannot_read_is_said_when_it_is_made_and_by_a_strict_check() {
    let dir = dir_on_disk();
    let made = |file: &str, new: New| {
        let image = named(&at(&dir, file));
        work(None, |tools| {
            let notes = tools.create(&image, &new).unwrap().notes.join("; ");
            assert!(tools.check(&image, true).unwrap().verdict == Verdict::InOrder);
            (notes, tools.check_strictly(&image, false).unwrap())
        })
    };
    let sized = |bytes, unit_bytes| New { bytes: Some(bytes), unit_bytes, ..New::default() };
    let (notes, report) = made("small.vhd", sized(8 * MIB, Some(512 << 10)));
    assert!(notes.contains("2 MiB only"), "{notes}");
    assert!(report.verdict == Verdict::Refused && report.usable, "{report:?}");
    let (notes, report) = made("odd.vhd", sized(9 * MIB, None));
    assert!(notes.contains("multiple of 2 MiB"), "{notes}");
    assert_eq!(report.verdict, Verdict::Refused);
    let (notes, report) = made("whole.vhd", sized(8 * MIB, None));
    assert!(notes.is_empty() && report.verdict == Verdict::InOrder, "{notes} {report:?}");
    for (i, parent) in ["b\u{e4}se.vhd", "a\tb.vhd", "a\\b.vhd", "c:base.vhd"].iter().enumerate() {
        made(parent, sized(8 * MIB, None));
        let parent = Some(named(&at(&dir, parent)));
        let (notes, report) = made(&format!("on-{i}.vhd"), New { parent, ..New::default() });
        assert!(notes.contains("XAPI and XCP-ng cannot read it"), "{notes}");
        assert_eq!(report.verdict, Verdict::Refused, "{report:?}");
        assert!(report.images[0].findings.iter().all(|f| f.kind == "vhd-util"));
    }
}

/// Each rule by itself, on an image that breaks nothing else.
#[test]
fn each_rule_of_vhd_util_is_applied() {
    let dir = dir_on_disk();
    let (base, path) = (at(&dir, "base.vhd"), at(&dir, "a.vhd"));
    let footer = create(&base, &NewImage::dynamic(8 * MIB)).unwrap();
    with_blocks(&path, &NewImage::differencing(10 * MIB, parent(&base, &footer)));
    let good = fs::read(&path).unwrap();
    let found = |image: &[u8]| {
        fs::write(&path, image).unwrap();
        let raw = open_medium(&path, &OpenOptions { read_only: true, ..options() }).unwrap();
        let report = vhd::check_strictly(&raw, Some(&base)).unwrap();
        assert_eq!(report.counts.damage, 0, "{:?}", report.findings);
        let refused = report.findings.iter().filter(|f| f.problem == Problem::Refused);
        refused.map(|f| f.why.clone()).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(found(&good), "");
    let sum = |part: &mut [u8], field: usize| {
        part[field..field + 4].fill(0);
        let sum = part.iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
        part[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
    };
    let footer = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        for start in [0, image.len() - 512] {
            let part = &mut image[start..start + 512];
            part[at..at + bytes.len()].copy_from_slice(bytes);
            sum(part, 64);
        }
        found(&image)
    };
    for (at, bytes, why) in [
        (11, &[0u8][..], "reserved feature"),
        (15, &[1], "another version"),
        (24, &[0xff; 4], "made in the future"),
        (35, &[4], "to come"),
        (56, &[0xff], "geometry"),
        (84, &[2], "saved state"),
        (85, &[2], "hidden"),
        (200, &[1], "reserved bytes"),
        (68, &[0; 16], "no UUID"),
    ] {
        let said = footer(at, bytes);
        assert!(said.contains(why), "{why}: {said}");
    }
    let header = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        let part = &mut image[512..1536];
        part[at..at + bytes.len()].copy_from_slice(bytes);
        sum(part, 36);
        found(&image)
    };
    let entry = 576;
    for (at, bytes, why) in [
        (8, &[0u8][..], "further structure"),
        (62, &[1], "reserved bytes"),
        (900, &[1], "reserved bytes"),
        (56, &[0xff; 4], "a parent of the future"),
        (65, b"x", "the header to"),
        (entry + 24, b"MacX", "two locators of one platform"),
        (entry + 12, &[1], "something in its reserved bytes"),
        (entry + 2 * 24 + 4, &[0, 0, 2, 1], "does not understand"),
        (entry + 11, &[0], "without a text"),
        (entry + 7 * 24 + 23, &[1], "without a platform"),
    ] {
        let said = header(at, bytes);
        assert!(said.contains(why), "{why}: {said}");
    }
    // A batmap that is none.
    let mut image = good.clone();
    image[2048] = b'x';
    assert!(found(&image).contains("no batmap"), "{}", found(&image));
    // A footer that is gone from the end.
    assert!(found(&good[..good.len() - 512]).contains("no footer at the end"));
    // A parent of another name.
    fs::write(&path, &good).unwrap();
    fs::rename(&base, at(&dir, "other.vhd")).unwrap();
    assert!(found(&good).contains("does not lead to the parent"), "{}", found(&good));
}
