//! Refcounts of qcow2 that cannot be reached, or lie over something else: they are made anew, and the disk stays as it is.

use std::fs;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, Format, ImageName, OnDamage, OpenOptions};
use ferrite_image_tools::{ImageTools, NewImage, Repaired, Verdict};
use ferrite_simio::SimWorld;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::places::{dir_in_memory, dir_on_disk};

use crate::model::{
    Model, check_clean, compare, name, open, pattern, peek, poke, qemu, session_of, tools,
};

const COPIED: u64 = 1 << 63;

type Bend = fn(&Path);

/// Each of them, and what a check says of it.
const BENDS: [(&str, Bend, &str); 11] = [
    ("a block behind the end", |path| poke(path, peek(path, 48), |_| 1 << 40), "refcount block 0"),
    (
        "a block within a cluster",
        |path| poke(path, peek(path, 48), |at| at + 8),
        "refcount block 0",
    ),
    (
        "a block over L1",
        |path| poke(path, peek(path, 48), |_| peek(path, 40)),
        "over something else",
    ),
    ("a block over data", |path| poke(path, peek(path, 48), |_| data(path)), "over something else"),
    (
        "a block over the table",
        |path| poke(path, peek(path, 48), |_| peek(path, 48)),
        "over something else",
    ),
    ("the table behind the end", |path| poke(path, 48, |_| 1 << 40), "outside of the file"),
    ("the table within a cluster", |path| poke(path, 48, |at| at + 8), "middle of a cluster"),
    ("the table over L1", |path| poke(path, 48, |_| peek(path, 40)), "overlaps"),
    ("the table over an L2 table", |path| poke(path, 48, |_| table(path)), ""),
    ("a table without an entry", |path| poke(path, 56, |word| word & 0xFFFF_FFFF), "of 0 clusters"),
    ("a table without an end", |path| poke(path, 56, |word| word | 0x7F << 56), "clusters"),
];

/// The first L2 table, and the first cluster with data.
fn table(path: &Path) -> u64 {
    peek(path, peek(path, 40)) & !COPIED
}

fn data(path: &Path) -> u64 {
    let entries = (table(path)..).step_by(8).map(|at| peek(path, at));
    entries.into_iter().find(|entry| *entry != 0).unwrap() & !COPIED
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn repair(path: &Path, force: bool) -> Repaired {
    tools(|tools| tools.repair(&name(path), force)).unwrap()
}

/// An image with data all over it, and its contents.
fn made(path: &Path, unit: u32) -> Model {
    let new = NewImage { bytes: Some(6 << 20), unit_bytes: Some(unit), ..NewImage::default() };
    tools(|tools| tools.create(&name(path), &new)).unwrap();
    let mut model = Model::default();
    let mut disk = open(text(path));
    for first in (0..6 * 2048).step_by(1024) {
        disk.write(first * 512, &pattern(first, 300, 3)).unwrap();
        model.write(first, 300, 3);
    }
    disk.close().unwrap();
    model
}

/// The check, the rehearsal and the repair say the same, and the disk is the same before and after.
fn mends(path: &Path, model: &Model, what: &str, why: &str) {
    let bent = fs::read(path).unwrap();
    let checked = tools(|tools| tools.check(&name(path), false)).unwrap();
    assert_eq!(checked.verdict, Verdict::Damaged, "{what}");
    let found = &checked.images[0];
    let told = found.findings.iter().find(|f| f.kind == "refcounts");
    assert!(told.is_some_and(|f| f.mendable && f.why.contains(why)), "{what}: {found:?}");
    let shown = repair(path, false);
    assert!(shown.mendable && shown.is_mended(), "{what}: {shown:?}");
    assert_eq!(shown.before.findings, found.findings, "{what}");
    assert!(fs::read(path).unwrap() == bent, "{what}: a rehearsal writes");
    let done = repair(path, true);
    assert_eq!(done.before.findings, found.findings, "{what}");
    assert!(done.after.findings.is_empty() && done.or_refused().is_ok(), "{what}: {done:?}");
    check_clean(path);
    compare(&mut open(text(path)), model);
}

#[test]
fn refcounts_that_cannot_be_reached_are_made_anew() {
    let dir = dir_on_disk();
    for unit in [64 << 10, 512] {
        let whole = dir.path().join("whole.qcow2");
        let _ = fs::remove_file(&whole);
        let model = made(&whole, unit);
        for (what, bend, why) in BENDS {
            let path = dir.path().join("a.qcow2");
            fs::copy(&whole, &path).unwrap();
            bend(&path);
            mends(&path, &model, what, why);
            // It can be written to, and stays in order.
            let mut model = model.clone();
            let mut disk = open(text(&path));
            disk.write(1 << 20, &pattern(2048, 1024, 9)).unwrap();
            model.write(2048, 1024, 9);
            disk.close().unwrap();
            check_clean(&path);
            compare(&mut open(text(&path)), &model);
        }
    }
}

/// An image with a snapshot and a bitmap inside, and the contents of both.
fn with_insides(dir: &Path) -> Option<(PathBuf, Model, Model)> {
    let path = dir.join("whole.qcow2");
    if !qemu(&["create", "-q", "-f", "qcow2", text(&path), "6M"]) {
        return None;
    }
    let mut model = Model::default();
    let mut write = |first: u64, stamp: u64| {
        let mut disk = open(text(&path));
        disk.write(first * 512, &pattern(first, 2000, stamp)).unwrap();
        model.write(first, 2000, stamp);
        disk.close().unwrap();
        model.clone()
    };
    let kept = write(100, 1);
    assert!(qemu(&["snapshot", "-c", "one", text(&path)]));
    let now = write(1000, 2);
    assert!(qemu(&["bitmap", "--add", text(&path), "changes"]));
    Some((path, now, kept))
}

#[test]
fn snapshots_and_bitmaps_inside_are_counted_when_refcounts_are_made_anew() {
    let dir = dir_on_disk();
    let Some((whole, model, kept)) = with_insides(dir.path()) else { return };
    for (what, bend, why) in BENDS {
        let path = dir.path().join("a.qcow2");
        fs::copy(&whole, &path).unwrap();
        bend(&path);
        mends(&path, &model, what, why);
        let raw = dir.path().join("one.img");
        let snapshot = ["convert", "-f", "qcow2", "-O", "raw", "-l", "snapshot.name=one"];
        assert!(qemu(&[&snapshot[..], &[text(&path), text(&raw)]].concat()));
        assert!(fs::read(&raw).unwrap() == kept.bytes(0, 6 * 2048), "{what}");
        assert!(qemu(&["bitmap", "--clear", text(&path), "changes"]), "{what}");
    }
}

/// On a device the new refcounts are in clusters that nothing uses; on a full one in those of the lost ones.
#[test]
fn refcounts_are_made_anew_on_a_device_also_on_a_full_one() {
    for bytes in [16 << 20, 2 << 20] {
        let dir = dir_on_disk();
        let file = dir.path().join("device");
        fs::File::create(&file).unwrap().set_len(bytes).unwrap();
        let Some(device) = Loop::attach(&file, 512) else { return };
        let path = device.0.as_path();
        let image = ImageName { format: Format::Qcow2, path: path.to_owned() };
        let new = NewImage {
            bytes: Some(6 << 20),
            unit_bytes: Some(512),
            force: true,
            ..NewImage::default()
        };
        tools(|tools| tools.create(&image, &new)).unwrap();
        let open = || session_of(Disk::open_image(&image, &OpenOptions::default()).unwrap());
        let (mut model, mut disk) = (Model::default(), open());
        // On the small device there is a time when only clusters of tables that are there get a place, and then none.
        for first in 0..6 * 2048 {
            if disk.write(first * 512, &pattern(first, 1, 3)).is_ok() {
                model.write(first, 1, 3);
            }
        }
        // A full device may have no room for what closing writes.
        let _ = disk.close();
        let (what, bend, _) = BENDS[0];
        bend(path);
        let done = tools(|tools| tools.repair(&image, true)).unwrap();
        let is_mended = done.after.findings.is_empty() && done.or_refused().is_ok();
        assert!(is_mended, "{what}, {bytes}: {done:?}");
        assert_eq!(fs::metadata(&file).unwrap().len(), bytes);
        compare(&mut open(), &model);
    }
}

/// Wherever the power is cut, the disk reads the same, and another repair finds the rest.
#[test]
fn a_repair_that_is_cut_off_anywhere_can_be_made_again() {
    let dir = dir_in_memory();
    let whole = dir.path().join("whole.qcow2");
    let model = made(&whole, 512);
    for (what, bend, _) in [BENDS[0], BENDS[3], BENDS[5]] {
        let (mut cuts, mut is_cut) = (0, true);
        while is_cut {
            cuts += 1;
            let path = dir.path().join("a.qcow2");
            fs::copy(&whole, &path).unwrap();
            bend(&path);
            let named = |path: &Path| (peek(path, 48), peek(path, 56));
            let before = named(&path);
            let world = SimWorld::new(cuts);
            world.stop_at(Some(world.step() + cuts));
            is_cut = tools(|tools| {
                let engine = |arena| Ok(world.engine(arena));
                let parents = tools.parents.clone();
                let tools = ImageTools { engine: &engine, parents, state_dir: None, ..*tools };
                tools.repair(&name(&path), true).is_err()
            });
            world.cut_power().unwrap();
            let options = OpenOptions {
                read_only: true,
                on_damage: OnDamage::Serve,
                ..OpenOptions::default()
            };
            let disk = Disk::open_image(&name(&path), &options).unwrap();
            compare(&mut session_of(disk), &model);
            if named(&path) != before {
                // The refcounts that the header names are complete.
                let counts = |kind: &str| kind.starts_with("refcount");
                let found = repair(&path, false).before.findings;
                assert!(found.iter().all(|f| !counts(&f.kind)), "{what}, cut at {cuts}: {found:?}");
            }
            let done = repair(&path, true);
            assert!(done.after.findings.is_empty(), "{what}, cut at {cuts}: {done:?}");
            compare(&mut open(text(&path)), &model);
        }
        assert!(cuts > 10, "{what}: it took {cuts} steps only");
    }
}
