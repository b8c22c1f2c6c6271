//! qcow2 against QEMU's, in both directions. A test says "skipped" where there is no `qemu-img`.

mod model;

use std::path::{Path, PathBuf};

use ferrite_disk::OpenOptions;
use model::{Model, check_clean, compare, open, pattern, qemu, session};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An image made by QEMU; none if there is none.
fn made(dir: &TempDir, name: &str, options: &str, bytes: u64) -> Option<PathBuf> {
    let path = dir.path().join(name);
    let size = bytes.to_string();
    qemu(&["create", "-q", "-f", "qcow2", "-o", options, text(&path), &size]).then_some(path)
}

/// Some writes all over a disk, also at its ends and across clusters.
fn scatter(session: &mut ferrite_disk::Session, model: &mut Model, stamp: u64) {
    let sectors = session.disk().sectors();
    for i in 0..24u64 {
        let first = match i {
            0 => 0,
            1 => sectors - 1,
            2 => sectors / 2,
            _ => i.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(stamp) % sectors,
        };
        let count = (1 + i * i * 7 % 300).min(sectors - first);
        session.write(first * 512, &pattern(first, count, stamp + i)).unwrap();
        model.write(first, count, stamp + i);
    }
}

/// What QEMU reads from an image.
fn compare_with_qemu(dir: &TempDir, path: &Path, model: &Model) {
    let raw = dir.path().join("out.raw");
    assert!(qemu(&["convert", "-f", "qcow2", "-O", "raw", text(path), text(&raw)]));
    compare(&mut open(&format!("raw:{}", raw.display())), model);
    std::fs::remove_file(raw).unwrap();
}

#[test]
fn what_is_written_to_an_image_of_qemu_is_what_qemu_reads() {
    for options in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=64",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=2,lazy_refcounts=off",
        "preallocation=metadata",
        "preallocation=full",
        "cluster_size=1k,refcount_bits=8,compat=1.1",
    ] {
        for bytes in [512, 2 * MIB - 512, 2 * MIB, 2 * MIB + 512, 100 * MIB] {
            let dir = dir();
            let Some(path) = made(&dir, "a.qcow2", options, bytes) else { return };
            let mut model = Model::default();
            for round in 0..2 {
                let mut session = open(text(&path));
                compare(&mut session, &model);
                scatter(&mut session, &mut model, 100 + round * 1000);
                compare(&mut session, &model);
                session.close().unwrap();
                check_clean(&path);
            }
            compare(&mut open(text(&path)), &model);
            compare_with_qemu(&dir, &path, &model);
        }
    }
}

#[test]
fn disks_up_to_16_tib_are_written_at_both_ends() {
    for bytes in [127 * GIB, 2040 * GIB, 16 << 40] {
        let dir = dir();
        let Some(path) = made(&dir, "a.qcow2", "compat=1.1", bytes) else { return };
        let mut model = Model::default();
        let mut disk = open(text(&path));
        scatter(&mut disk, &mut model, 1);
        compare(&mut disk, &model);
        disk.close().unwrap();
        check_clean(&path);
        compare(&mut open(text(&path)), &model);
        let read_only = OpenOptions { read_only: true, ..Default::default() };
        compare(&mut session(text(&path), &read_only).unwrap(), &model);
    }
}
