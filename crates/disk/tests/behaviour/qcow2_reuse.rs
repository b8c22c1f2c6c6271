//! Free clusters of qcow2 are used before the file grows. A test says "skipped" where there is no
//! `qemu-img`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::model::{
    Model, check_clean, compare, open, pattern, peek, poke, qemu, wait_until_released,
};
use ferrite_testkit::places::dir_on_disk;
use ferrite_testkit::rounds;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The first run that is set aside, of which a close keeps only what was used.
const RUN: u64 = MIB;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn bytes(path: &Path) -> u64 {
    path.metadata().unwrap().len()
}

fn made(dir: &TempDir, options: &str) -> Option<PathBuf> {
    let path = dir.path().join("a.qcow2");
    qemu(&["create", "-q", "-f", "qcow2", "-o", options, text(&path), "64M"]).then_some(path)
}

/// Writes parts of 256 KiB, from MiB to MiB, in one session.
fn write(path: &Path, model: &mut Model, mib: std::ops::Range<u64>, stamp: u64) {
    let mut disk = open(text(path));
    for first in (mib.start * 2048..mib.end * 2048).step_by(512) {
        disk.write(first * 512, &pattern(first, 512, stamp)).unwrap();
        model.write(first, 512, stamp);
    }
    disk.close().unwrap();
}

#[test]
fn what_a_deleted_snapshot_leaves_is_used_before_the_file_grows() {
    for options in ["cluster_size=64k", "cluster_size=4k", "compat=0.10", "cluster_size=2M"] {
        let dir = dir_on_disk();
        let Some(path) = made(&dir, options) else { return };
        let mut model = Model::default();
        write(&path, &mut model, 0..16, 1);
        assert!(qemu(&["snapshot", "-c", "old", text(&path)]));
        write(&path, &mut model, 0..16, 2);
        let full = bytes(&path);
        for stamp in 3..6 {
            assert!(qemu(&["snapshot", "-d", "old", text(&path)]));
            check_clean(&path);
            assert!(qemu(&["snapshot", "-c", "old", text(&path)]));
            write(&path, &mut model, 0..16, stamp);
            check_clean(&path);
            // A table is copied for each snapshot, too.
            assert!(bytes(&path) <= full + RUN, "{options}: {full} and then {}", bytes(&path));
        }
        compare(&mut open(text(&path)), &model);
    }
}

#[test]
fn single_clusters_that_another_program_has_freed_are_used() {
    let dir = dir_on_disk();
    let Some(path) = made(&dir, "cluster_size=64k") else { return };
    let mut model = Model::default();
    write(&path, &mut model, 0..32, 1);
    let full = bytes(&path);
    let mut io = Command::new("qemu-io");
    io.arg("-d").arg("unmap").arg(&path);
    for cluster in (0..512u64).step_by(2) {
        io.arg("-c").arg(format!("discard {}k 64k", cluster * 64));
        model.zero(cluster * 128, 128);
    }
    wait_until_released(&path);
    let output = io.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    write(&path, &mut model, 32..48, 2);
    assert!(bytes(&path) <= full + RUN, "{full} and then {}", bytes(&path));
    check_clean(&path);
    compare(&mut open(text(&path)), &model);
}

#[test]
fn discarding_and_writing_again_and_again_does_not_make_the_file_grow() {
    for options in ["cluster_size=64k", "compat=0.10", "cluster_size=512"] {
        let dir = dir_on_disk();
        let Some(path) = made(&dir, options) else { return };
        let mut model = Model::default();
        write(&path, &mut model, 0..8, 1);
        let full = bytes(&path);
        let mut disk = open(text(&path));
        for stamp in 2..2 + u64::from(rounds(18)) {
            for mib in 0..8 {
                disk.discard(mib * MIB, MIB).unwrap();
                disk.write(mib * MIB, &pattern(mib * 2048, 2048, stamp)).unwrap();
                model.write(mib * 2048, 2048, stamp);
            }
            disk.flush().unwrap();
        }
        compare(&mut disk, &model);
        disk.close().unwrap();
        check_clean(&path);
        assert_eq!(bytes(&path), full, "{options}");
    }
}

/// An image whose first MiBs, so many, are compressed to about half of their size.
fn compressed(dir: &TempDir, mib: u64) -> Option<PathBuf> {
    let (raw, path) = (dir.path().join("a.raw"), dir.path().join("a.qcow2"));
    // Noise in every other sector.
    let mut state = 1u64;
    let mut bytes = Vec::new();
    for _ in 0..mib * MIB / 1024 {
        for _ in 0..64 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            bytes.extend_from_slice(&(state ^ state >> 29).to_le_bytes());
        }
        bytes.resize(bytes.len() + 512, 0);
    }
    std::fs::write(&raw, bytes).unwrap();
    qemu(&["convert", "-c", "-f", "raw", "-O", "qcow2", text(&raw), text(&path)]).then_some(path)
}

#[test]
fn compressed_clusters_that_are_replaced_are_used_while_the_image_is_open() {
    let dir = dir_on_disk();
    let Some(path) = compressed(&dir, 32) else { return };
    let mut model = Model::default();
    let packed = bytes(&path);
    assert!(packed < 24 * MIB, "{packed}");
    let mut disk = open(text(&path));
    for mib in 0..32 {
        disk.write(mib * MIB, &pattern(mib * 2048, 2048, 2)).unwrap();
        model.write(mib * 2048, 2048, 2);
        disk.flush().unwrap();
    }
    compare(&mut disk, &model);
    disk.close().unwrap();
    check_clean(&path);
    compare(&mut open(text(&path)), &model);
    // The last third has used the space that the first two thirds left.
    let grown = bytes(&path) - packed;
    assert!(grown < 24 * MIB, "{grown} for 32 MiB");
}

/// A guest tries again and again what cannot be done: a part of a cluster is written whose rest
/// cannot be unpacked.
#[test]
fn writes_that_fail_for_what_is_around_them_take_no_space() {
    let dir = dir_on_disk();
    let Some(path) = compressed(&dir, 1) else { return };
    let entry = peek(&path, peek(&path, peek(&path, 40)) & !(1 << 63));
    let packed_at = entry & ((1 << 54) - 1);
    for i in 0..16 {
        poke(&path, packed_at + i * 8, |_| u64::MAX);
    }
    let before = bytes(&path);
    let mut disk = open(text(&path));
    for _ in 0..300 {
        disk.write(512, &[1; 512]).unwrap_err();
    }
    disk.close().unwrap();
    let grown = bytes(&path) - before;
    assert!(grown <= 2 * RUN, "{grown}");
    check_clean(&path);
}
