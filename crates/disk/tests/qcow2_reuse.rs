//! Free clusters of qcow2 are used before the file grows. A test says "skipped" where there is no
//! `qemu-img`.

mod model;

use std::path::{Path, PathBuf};
use std::process::Command;

use model::{Model, check_clean, compare, open, pattern, qemu};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The first run that is set aside, of which a close keeps only what was used.
const RUN: u64 = MIB;

fn dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

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
        let dir = dir();
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
    let dir = dir();
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
    assert!(io.output().unwrap().status.success());
    write(&path, &mut model, 32..48, 2);
    assert!(bytes(&path) <= full + RUN, "{full} and then {}", bytes(&path));
    check_clean(&path);
    compare(&mut open(text(&path)), &model);
}

#[test]
fn discarding_and_writing_again_and_again_does_not_make_the_file_grow() {
    for options in ["cluster_size=64k", "compat=0.10", "cluster_size=512"] {
        let dir = dir();
        let Some(path) = made(&dir, options) else { return };
        let mut model = Model::default();
        write(&path, &mut model, 0..8, 1);
        let full = bytes(&path);
        let mut disk = open(text(&path));
        for stamp in 2..20 {
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
