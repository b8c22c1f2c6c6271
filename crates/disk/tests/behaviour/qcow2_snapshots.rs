//! Internal snapshots of qcow2, which QEMU makes and we keep. A test says "skipped" where there is
//! no `qemu-img`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ferrite_disk::{OpenOptions, Session};
use ferrite_image_tools::{CheckReport, Info, NewImage};

use crate::model::{
    Model, check_clean, compare, name, open, pattern, peek, poke, qemu, qemu_img, session, tools,
};
use ferrite_testkit::places::dir_on_disk;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn info(path: &Path) -> Info {
    tools(|tools| tools.info(&name(path))).unwrap()
}

fn check(path: &Path) -> CheckReport {
    tools(|tools| tools.check(&name(path), false)).unwrap()
}

/// Writes all over a disk.
fn scatter(session: &mut Session, model: &mut Model, stamp: u64) {
    let sectors = session.disk().sectors();
    for i in 0..16u64 {
        let first = i.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(stamp * 77) % sectors;
        let count = (1 + i * i * 9 % 500).min(sectors - first);
        session.write(first * 512, &pattern(first, count, stamp + i)).unwrap();
        model.write(first, count, stamp + i);
    }
}

/// An image with three snapshots, and what each of them has.
fn with_snapshots(dir: &TempDir, options: &str) -> Option<(PathBuf, Vec<Model>)> {
    let path = dir.path().join("a.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-o", options, text(&path), "6M"];
    if !qemu(&create) {
        return None;
    }
    let mut model = Model::default();
    let mut kept = Vec::new();
    for (i, id) in ["one", "two", "three"].into_iter().enumerate() {
        let mut disk = open(text(&path));
        scatter(&mut disk, &mut model, 100 * i as u64);
        disk.close().unwrap();
        assert!(qemu(&["snapshot", "-c", id, text(&path)]));
        kept.push(model.clone());
    }
    Some((path, kept))
}

/// Compares the bytes that QEMU reads of a snapshot with the model.
fn compare_snapshot(path: &Path, id: &str, model: &Model) {
    let raw = path.with_extension("raw");
    let from = format!("snapshot.name={id}");
    assert!(qemu(&["convert", "-l", &from, "-f", "qcow2", "-O", "raw", text(path), text(&raw)]));
    compare(&mut open(&format!("raw:{}", raw.display())), model);
    std::fs::remove_file(raw).unwrap();
}

#[test]
fn whatever_is_done_to_a_disk_its_snapshots_keep_what_they_have() {
    for options in ["compat=1.1", "compat=0.10,cluster_size=4k", "cluster_size=512"] {
        let dir = dir_on_disk();
        let Some((path, kept)) = with_snapshots(&dir, options) else { return };
        let state_dir = Some(dir.path().join("state"));
        let wait_for_lock = Some(std::time::Duration::from_secs(10));
        let options = OpenOptions { state_dir, wait_for_lock, ..OpenOptions::default() };
        let mut model = kept[2].clone();
        for round in 0..3 {
            let mut disk = session(text(&path), &options).unwrap();
            compare(&mut disk, &model);
            scatter(&mut disk, &mut model, 1000 + round);
            disk.write_zeroes(round * MIB, MIB).unwrap();
            model.zero(round * 2048, 2048);
            disk.discard(4 * MIB, MIB).unwrap();
            // The content after a discard is undefined, so the range is written.
            disk.write(4 * MIB, &pattern(4 * 2048, 2048, round)).unwrap();
            model.write(4 * 2048, 2048, round);
            compare(&mut disk, &model);
            // One process dies, and the next recovers what it left.
            match round {
                1 => drop(disk),
                _ => disk.close().unwrap(),
            }
        }
        check_clean(&path);
        assert!(check(&path).images[0].findings.is_empty());
        for (id, model) in ["one", "two", "three"].into_iter().zip(&kept) {
            compare_snapshot(&path, id, model);
        }
        compare(&mut open(text(&path)), &model);
        assert!(qemu(&["snapshot", "-a", "two", text(&path)]));
        check_clean(&path);
        compare(&mut open(text(&path)), &kept[1]);
    }
}

#[test]
fn snapshots_and_what_is_allocated_are_told() {
    let dir = dir_on_disk();
    let Some((path, kept)) = with_snapshots(&dir, "compat=1.1") else { return };
    let info = info(&path);
    let layer = &info.chain[0];
    let names: Vec<_> = layer.snapshots.iter().map(|s| (&s.id[..], &s.name[..])).collect();
    assert_eq!(names, [("1", "one"), ("2", "two"), ("3", "three")]);
    assert!(layer.snapshots.iter().all(|s| s.virtual_bytes == 6 * MIB && s.created_unix_s > 0));
    let clusters: std::collections::BTreeSet<u64> = kept[2].0.keys().map(|s| s / 128).collect();
    assert_eq!(layer.allocated_bytes, Some(clusters.len() as u64 * (64 << 10)));
}

#[test]
fn a_child_with_snapshots_inside_is_not_merged_even_by_force() {
    let dir = dir_on_disk();
    let [base, child] = ["base", "child"].map(|n| name(&dir.path().join(format!("{n}.qcow2"))));
    let new = NewImage { bytes: Some(6 * MIB), ..NewImage::default() };
    tools(|tools| tools.create(&base, &new)).unwrap();
    let on = NewImage { parent: Some(base.clone()), ..NewImage::default() };
    tools(|tools| tools.create(&child, &on)).unwrap();
    if !qemu(&["snapshot", "-c", "s", text(&child.path)]) {
        return;
    }
    let before = [&base, &child].map(|image| std::fs::read(&image.path).unwrap());
    for force in [false, true] {
        let error = tools(|tools| tools.coalesce(&child, force)).unwrap_err();
        assert!(error.to_string().contains("snapshots inside"), "{error}");
        assert!(before == [&base, &child].map(|image| std::fs::read(&image.path).unwrap()));
    }
    assert!(qemu(&["snapshot", "-d", "s", text(&child.path)]));
    // Those of the parent stay, in the file that has the child's name now.
    std::fs::set_permissions(&base.path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(qemu(&["snapshot", "-c", "p", text(&base.path)]));
    tools(|tools| tools.coalesce(&child, false)).unwrap();
    assert_eq!(info(&child.path).chain[0].snapshots[0].name, "p");
    check_clean(&child.path);
}

#[test]
fn damage_in_tables_of_snapshots_is_found_as_qemu_finds_it() {
    let dir = dir_on_disk();
    // Small clusters: the table of snapshots has more than one.
    let Some((path, _)) = with_snapshots(&dir, "cluster_size=512") else { return };
    let whole = std::fs::read(&path).unwrap();
    const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;
    let table = peek(&path, 64);
    let l1 = peek(&path, table);
    let l1_entry = (0..).map(|i| l1 + i * 8).find(|at| peek(&path, *at) != 0).unwrap();
    let l2 = peek(&path, l1_entry) & OFFSET;
    let l2_entry = (0..).map(|i| l2 + i * 8).find(|at| peek(&path, *at) != 0).unwrap();
    let far = 1 << 40;
    type Change<'a> = &'a dyn Fn(u64) -> u64;
    let damages: [(&str, u64, Change<'_>); 5] = [
        ("an L1 entry is gone", l1_entry, &|_| 0),
        ("an L1 entry is outside", l1_entry, &|_| far),
        ("an L2 entry is gone", l2_entry, &|_| 0),
        ("an L2 entry refers to another's cluster", l2_entry, &|e| e + 512),
        ("the table of L1 is elsewhere", table, &|_| far),
    ];
    for (what, at, change) in damages {
        std::fs::write(&path, &whole).unwrap();
        poke(&path, at, change);
        let report = check(&path);
        assert!(!report.images[0].findings.is_empty(), "{what}");
        let (clean, said) = qemu_img(&["check", "-f", "qcow2", text(&path)]).unwrap();
        assert!(!clean, "{what}: {said}");
    }
    // Nothing is written to an image whose snapshots cannot be told from free space.
    assert!(session(text(&path), &OpenOptions::default()).is_err());
    let read_only = OpenOptions { read_only: true, ..Default::default() };
    assert!(session(text(&path), &read_only).is_ok());
}

#[test]
fn counts_that_snapshots_need_are_mended() {
    let dir = dir_on_disk();
    let Some((path, kept)) = with_snapshots(&dir, "compat=1.1") else { return };
    let block = peek(&path, peek(&path, 48));
    // All counts of the first sector of the block are lost.
    for at in (block..block + 512).step_by(8) {
        poke(&path, at, |_| 0);
    }
    let repaired = tools(|tools| tools.repair(&name(&path), true)).unwrap();
    assert!(repaired.done && repaired.after.findings.is_empty(), "{repaired:?}");
    check_clean(&path);
    for (id, model) in ["one", "two", "three"].into_iter().zip(&kept) {
        compare_snapshot(&path, id, model);
    }
}
