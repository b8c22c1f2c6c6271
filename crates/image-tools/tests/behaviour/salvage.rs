//! Copies of damaged disks: what can be read is in the copy, the rest is zeros and listed, and the source stays as it is.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, ErrorKind, ImageName, OpenOptions};
use ferrite_image_tools::{Convert, ImageTools, NewImage, Salvaged};
use ferrite_simio::{Fault, On, SimWorld};
use ferrite_testkit::bytes::{first_difference, runs};

use crate::common::vhd::{at, options};
use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk, work};
use crate::tools::name;

/// Of the images here: a block of a VHD, a cluster of a qcow2 image.
const UNIT: u64 = 64 << 10;
/// Units that a disk has, all of them with data.
const UNITS: u64 = 16;
const BYTES: u64 = UNITS * UNIT;
/// Bytes of a VHD's block, with its bitmap.
const TABLE_AT: u64 = 1536;

fn data(unit: u64) -> Vec<u8> {
    runs(UNIT as usize, 512, |n| ((n as u64 + unit * 7) % 250) as u8 + 1)
}

fn put(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn number(path: &Path, at: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// The entry of a block in a VHD's table.
fn sector(path: &Path, block: u64) -> u32 {
    (number(path, TABLE_AT + block * 4) >> 32) as u32
}

fn set_sector(path: &Path, block: u64, sector: u32) {
    put(path, TABLE_AT + block * 4, &sector.to_be_bytes());
}

/// The place of an L2 entry in a qcow2 image.
fn entry_at(path: &Path, cluster: u64) -> u64 {
    (number(path, number(path, 40)) & !(1 << 63)) + cluster * 8
}

fn shorten(path: &Path, bytes: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
}

/// An image full of data.
fn full(path: &Path, format: &str, parent: Option<ImageName>) -> ImageName {
    let image = name(format, path);
    let unit_bytes = Some(UNIT as u32);
    let new = NewImage { bytes: Some(BYTES), unit_bytes, parent, ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    image
}

fn fill(image: &ImageName, units: impl Iterator<Item = u64>) {
    let options = OpenOptions { even_parent: true, ..options() };
    let mut disk = Queue::new(Disk::open_image(image, &options).unwrap());
    units.for_each(|unit| disk.write(unit * UNIT, &data(unit)).unwrap());
    disk.close().unwrap();
}

fn made(dir: &Path, format: &str) -> ImageName {
    let image = full(&dir.join(format!("a.{format}")), format, None);
    fill(&image, 0..UNITS);
    image
}

/// Salvages an image into a raw disk, which is complete under its name, and compares: what is not listed has the data.
fn salvage_by(tools: &ImageTools<'_>, image: &ImageName, to: PathBuf) -> Salvaged {
    let before = fs::read(&image.path).unwrap();
    let done = tools.salvage(image, &name("raw", &to), &Convert::default()).unwrap();
    assert!(fs::read(&image.path).unwrap() == before, "the source was written to");
    let found = fs::read(&to).unwrap();
    let mut wanted: Vec<u8> = (0..UNITS).flat_map(data).collect();
    for range in &done.ranges {
        let bytes = range.start_bytes as usize..(range.start_bytes + range.length_bytes) as usize;
        wanted[bytes].fill(0);
    }
    let differs = first_difference(&found, &wanted);
    assert_eq!((found.len(), differs), (wanted.len(), None), "{done:?}");
    let listed: u64 = done.ranges.iter().map(|range| range.length_bytes).sum();
    assert_eq!((done.damaged_bytes, done.more_ranges), (listed, 0));
    for left in ["partial", "partial.json"] {
        assert!(!to.with_extension(format!("img.{left}")).exists());
    }
    done
}

fn salvage(image: &ImageName) -> Vec<(u64, u64, String)> {
    let to = image.path.with_extension("img");
    let done = work(None, |tools| salvage_by(tools, image, to.clone()));
    fs::remove_file(to).unwrap();
    done.ranges.into_iter().map(|r| (r.start_bytes, r.length_bytes, r.why)).collect()
}

type Bend = fn(&Path);
/// A name, the damage, the units that are lost, and a part of the reason.
type Case = (&'static str, Bend, &'static [(u64, u64)], &'static str);

fn judge(format: &str, cases: &[Case]) {
    for (what, bend, lost, why) in cases {
        let dir = dir_on_disk();
        let image = made(dir.path(), format);
        bend(&image.path);
        let found = salvage(&image);
        let ranges: Vec<_> = found.iter().map(|(start, len, _)| (*start, *len)).collect();
        assert_eq!(ranges, *lost, "{what}: {found:?}");
        assert!(found.iter().all(|(_, _, text)| text.contains(why)), "{what}: {found:?}");
    }
}

#[test]
fn of_a_damaged_vhd_all_other_blocks_are_saved() {
    judge(
        "vhd",
        &[
            ("nothing", |_| {}, &[], ""),
            (
                "an entry behind the end",
                |path| set_sector(path, 8, 0x0010_0000),
                &[(8 * UNIT, UNIT)],
                "outside of the image",
            ),
            (
                "over the header",
                |path| set_sector(path, 8, 1),
                &[(8 * UNIT, UNIT)],
                "over metadata",
            ),
            (
                "over two others, which explains it",
                |path| set_sector(path, 8, sector(path, 2) + 16),
                &[(8 * UNIT, UNIT)],
                "over another block",
            ),
            (
                "two at one place, of which nothing tells which is right",
                |path| set_sector(path, 8, sector(path, 2)),
                &[(2 * UNIT, UNIT), (8 * UNIT, UNIT)],
                "over another block",
            ),
            ("the footer cut off", |path| shorten(path, 512), &[], ""),
            (
                "cut off within the last block",
                |path| {
                    let last = u64::from(sector(path, 15)) * 512 + 512;
                    File::options().write(true).open(path).unwrap().set_len(last + 4096).unwrap();
                },
                &[(15 * UNIT + 4096, UNIT - 4096)],
                "the image ends before it",
            ),
            (
                "two blocks cut off",
                |path| {
                    let end = u64::from(sector(path, 14)) * 512;
                    File::options().write(true).open(path).unwrap().set_len(end).unwrap();
                },
                &[(14 * UNIT, 2 * UNIT)],
                "outside of the image",
            ),
            ("no copy of the footer at the beginning", |path| put(path, 0, &[0; 512]), &[], ""),
        ],
    );
}

#[test]
fn of_a_damaged_qcow2_image_all_other_clusters_are_saved() {
    let out: Bend = |path| put(path, entry_at(path, 5), &(1u64 << 40 | 1 << 63).to_be_bytes());
    judge(
        "qcow2",
        &[
            ("nothing", |_| {}, &[], ""),
            ("an entry behind the end", out, &[(5 * UNIT, UNIT)], "outside of the file"),
            (
                "within a cluster",
                |path| put(path, entry_at(path, 5) + 6, &[2]),
                &[(5 * UNIT, UNIT)],
                "middle of a cluster",
            ),
            (
                "over a table",
                |path| put(path, entry_at(path, 5), &number(path, 40).to_be_bytes()),
                &[(5 * UNIT, UNIT)],
                "refers to a table",
            ),
            (
                "compressed data that do not unpack",
                |path| {
                    let host = number(path, entry_at(path, 5)) & 0x00FF_FFFF_FFFF_FE00;
                    put(path, entry_at(path, 5), &(1u64 << 62 | host).to_be_bytes());
                },
                &[(5 * UNIT, UNIT)],
                "compressed cluster is damaged",
            ),
            (
                "the table of all behind the end",
                |path| put(path, number(path, 40), &(1u64 << 40 | 1 << 63).to_be_bytes()),
                &[(0, BYTES)],
                "L2 table is outside of the file",
            ),
            (
                "the table of all over the header",
                |path| put(path, number(path, 40), &(1u64 << 63 | number(path, 48)).to_be_bytes()),
                &[(0, BYTES)],
                "over another table",
            ),
            (
                "cut off within the last cluster",
                |path| {
                    let host = number(path, entry_at(path, 15)) & 0x00FF_FFFF_FFFF_FE00;
                    let file = File::options().write(true).open(path).unwrap();
                    file.set_len(host + 4096).unwrap();
                },
                &[(15 * UNIT + 4096, UNIT - 4096)],
                "the file ends before",
            ),
            (
                "no refcount block",
                |path| put(path, number(path, 48), &(1u64 << 40).to_be_bytes()),
                &[],
                "",
            ),
            ("no refcount table", |path| put(path, 48, &[0x7f; 12]), &[], ""),
            ("no list of snapshots", |path| put(path, 60, &[0, 0, 0, 1, 0x7f]), &[], ""),
        ],
    );
}

/// Nothing tells which part of the disk a table that two entries name belongs to.
#[test]
fn parts_of_a_disk_with_one_table_are_both_lost() {
    let dir = dir_on_disk();
    let image = name("qcow2", &at(&dir, "a.qcow2"));
    // Tables of 64 clusters.
    let new = NewImage { bytes: Some(MIB), unit_bytes: Some(512), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    fill(&image, 0..UNITS);
    let l1 = number(&image.path, 40);
    put(&image.path, l1 + 3 * 8, &number(&image.path, l1 + 7 * 8).to_be_bytes());
    let table = 64 * 512;
    let ranges: Vec<_> = salvage(&image).iter().map(|(at, len, _)| (*at, *len)).collect();
    assert_eq!(ranges, [(3 * table, table), (7 * table, table)]);
}

#[test]
fn damage_in_a_parent_is_lost_only_where_nothing_is_over_it() {
    for (format, bend) in [
        ("vhd", (|path| (2..5).for_each(|block| set_sector(path, block, 0x0010_0000))) as Bend),
        ("qcow2", |path| (2..5).for_each(|n| put(path, entry_at(path, n), &[0x7f; 8]))),
    ] {
        let dir = dir_on_disk();
        let base = full(&at(&dir, &format!("base.{format}")), format, None);
        fill(&base, 0..UNITS);
        let leaf = full(&at(&dir, &format!("leaf.{format}")), format, Some(base.clone()));
        fill(&leaf, 3..4);
        bend(&base.path);
        let to = at(&dir, "copy.img");
        let done = work(None, |tools| salvage_by(tools, &leaf, to));
        let ranges: Vec<_> = done.ranges.iter().map(|r| (r.start_bytes, r.length_bytes)).collect();
        assert_eq!(ranges, [(2 * UNIT, UNIT), (4 * UNIT, UNIT)], "{format}: {done:?}");
        assert!(done.ranges.iter().all(|r| r.path == base.path.to_str().unwrap()), "{done:?}");
    }
}

/// In units of a page, wherever the medium fails.
#[test]
fn what_the_medium_cannot_read_is_lost_by_the_page() {
    for format in ["raw", "vhd", "qcow2"] {
        let dir = dir_in_memory();
        let image = match format {
            "raw" => {
                let path = at(&dir, "a.raw");
                fs::write(&path, (0..UNITS).flat_map(data).collect::<Vec<u8>>()).unwrap();
                name("raw", &path)
            }
            _ => made(dir.path(), format),
        };
        let place = match format {
            "raw" => 5 * UNIT,
            "vhd" => u64::from(sector(&image.path, 5)) * 512 + 512,
            _ => number(&image.path, entry_at(&image.path, 5)) & 0x00FF_FFFF_FFFF_FE00,
        };
        // The copy has the same places, and is only written.
        let world = SimWorld::new(1);
        let bad = place + 3 * 4096 + 512..place + 4 * 4096 + 512;
        let fault = Fault { on: On::Read, range: bad, per_mille: 1000, errno: 5, times: u64::MAX };
        world.set_faults(vec![fault]);
        let done = work(None, |tools| {
            let engine = |arena| Ok(world.engine(arena));
            let tools = ImageTools {
                engine: &engine,
                parents: tools.parents.clone(),
                state_dir: None,
                ..*tools
            };
            salvage_by(&tools, &image, at(&dir, "copy.img"))
        });
        let ranges: Vec<_> = done.ranges.iter().map(|r| (r.start_bytes, r.length_bytes)).collect();
        assert_eq!(ranges, [(5 * UNIT + 3 * 4096, 2 * 4096)], "{format}: {done:?}");
    }
}

/// A loop device cannot read what its file has lost. Without its L1 table nothing of the image can be found.
#[test]
fn an_image_whose_l1_table_the_medium_cannot_read_is_refused() {
    let dir = dir_on_disk();
    let file = at(&dir, "device");
    File::create(&file).unwrap().set_len(8 * MIB).unwrap();
    let Some(device) = Loop::attach(&file, 512) else { return };
    let image = name("qcow2", &device.0);
    let new = NewImage { bytes: Some(BYTES), force: true, ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    fill(&image, 0..UNITS);
    // Its L1 table moves to the last MiB of the device.
    let (l1, entry) = (number(&device.0, 40), number(&device.0, number(&device.0, 40)));
    assert!(l1 < 7 * MIB && entry != 0);
    put(&device.0, 7 * MIB, &entry.to_be_bytes());
    put(&device.0, 40, &(7 * MIB).to_be_bytes());
    let copy = || {
        let to = at(&dir, "copy.img");
        let _ = fs::remove_file(&to);
        work(None, |tools| tools.salvage(&image, &name("raw", &to), &Convert::default()))
    };
    assert_eq!(copy().unwrap().damaged_bytes, 0);
    File::options().write(true).open(&file).unwrap().set_len(7 * MIB).unwrap();
    let refused = copy().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Io, "{refused}");
    assert!(!at(&dir, "copy.img").exists());
}

#[test]
fn a_disk_whose_headers_are_lost_is_refused_with_a_reason() {
    for (format, bend) in [
        ("vhd", (|path| put(path, 512, &[0; 1024])) as Bend),
        ("qcow2", |path| put(path, 40, &[0x7f; 8])),
    ] {
        let dir = dir_on_disk();
        let image = made(dir.path(), format);
        bend(&image.path);
        let to = name("raw", &at(&dir, "copy.img"));
        let refused = work(None, |tools| tools.salvage(&image, &to, &Convert::default()));
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Damaged, "{refused}");
        assert!(refused.help().contains("if its header"), "{}", refused.help());
        assert!(!to.path.exists());
    }
}

/// A thousand ranges are listed, and all are counted.
#[test]
fn the_list_of_what_is_lost_is_bounded() {
    let dir = dir_on_disk();
    let image = name("vhd", &at(&dir, "a.vhd"));
    let unit_bytes = Some(512);
    let new = NewImage { bytes: Some(2 * MIB), unit_bytes, ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    (0..4096).step_by(2).for_each(|block| set_sector(&image.path, block, 0x0010_0000));
    let to = name("raw", &at(&dir, "copy.img"));
    let done = work(None, |tools| tools.salvage(&image, &to, &Convert::default())).unwrap();
    assert_eq!((done.ranges.len(), done.more_ranges), (1000, 1048));
    assert_eq!(done.damaged_bytes, MIB);
}
