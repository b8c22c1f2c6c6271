//! qcow2 against QEMU's, in both directions. A test says "skipped" where there is no `qemu-img`.

use std::path::{Path, PathBuf};

use crate::model::{Model, check_clean, compare, open, pattern, qemu, session};
use ferrite_disk::OpenOptions;
use ferrite_testkit::is_night;
use ferrite_testkit::places::dir_on_disk;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

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

/// Compares the bytes that QEMU reads from an image with the model.
fn compare_with_qemu(dir: &TempDir, path: &Path, model: &Model) {
    let raw = dir.path().join("out.raw");
    assert!(qemu(&["convert", "-f", "qcow2", "-O", "raw", text(path), text(&raw)]));
    compare(&mut open(&format!("raw:{}", raw.display())), model);
    std::fs::remove_file(raw).unwrap();
}

#[test]
fn what_is_written_to_an_image_of_qemu_is_what_qemu_reads() {
    let kinds = [
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
        "extended_l2=on",
        "extended_l2=on,cluster_size=2M,refcount_bits=1",
        "extended_l2=on,preallocation=metadata",
    ];
    for (kind, options) in kinds.into_iter().enumerate() {
        // With each commit, each kind has one of the first two.
        let sizes = [2 * MIB + 512, 512, 100 * MIB, 2 * MIB - 512, 2 * MIB];
        let sizes = if is_night() { &sizes[..] } else { &sizes[kind % 2..=kind % 2] };
        for bytes in sizes.iter().copied() {
            let dir = dir_on_disk();
            let Some(path) = made(&dir, "a.qcow2", options, bytes) else { return };
            let mut model = Model::default();
            for round in 0..if is_night() { 2 } else { 1 } {
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
        let dir = dir_on_disk();
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

/// A raw disk with something in it, and its model.
fn source(dir: &TempDir, bytes: u64) -> (PathBuf, Model) {
    let path = dir.path().join("source.img");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    let mut model = Model::default();
    let mut disk = open(&format!("raw:{}", path.display()));
    scatter(&mut disk, &mut model, 5);
    (path, model)
}

fn file_hash(path: &Path) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(&std::fs::read(path).unwrap());
    hasher.finish()
}

#[test]
fn compressed_clusters_are_read_and_written_over() {
    for options in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=512",
        "compression_type=zstd,cluster_size=2M",
        "compression_type=zlib,extended_l2=on,cluster_size=16k",
        "compat=0.10",
    ] {
        let dir = dir_on_disk();
        let (raw, mut model) = source(&dir, 20 * MIB + 512);
        let path = dir.path().join("packed.qcow2");
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
        if !qemu(&[&convert[..], &[text(&raw), text(&path)]].concat()) {
            return;
        }
        let before = file_hash(&path);
        let read_only = OpenOptions { read_only: true, ..Default::default() };
        compare(&mut session(text(&path), &read_only).unwrap(), &model);
        assert_eq!(file_hash(&path), before, "reading has written");
        let mut disk = open(text(&path));
        // Parts of clusters that are compressed, and of others.
        for (i, first) in [0, 1, 7, 130, 20 * 2048, 20000, 9000].into_iter().enumerate() {
            disk.write(first * 512, &pattern(first, 1, 9 + i as u64)).unwrap();
            model.write(first, 1, 9 + i as u64);
        }
        compare(&mut disk, &model);
        disk.close().unwrap();
        check_clean(&path);
        compare_with_qemu(&dir, &path, &model);
    }
}

#[test]
fn internal_snapshots_keep_what_they_have() {
    for options in ["compat=1.1", "compat=0.10,cluster_size=4k", "cluster_size=512"] {
        let dir = dir_on_disk();
        let Some(path) = made(&dir, "a.qcow2", options, 12 * MIB) else { return };
        let mut model = Model::default();
        let mut disk = open(text(&path));
        scatter(&mut disk, &mut model, 1);
        disk.close().unwrap();
        assert!(qemu(&["snapshot", "-c", "one", text(&path)]));
        let old = model.clone();
        let mut disk = open(text(&path));
        compare(&mut disk, &model);
        scatter(&mut disk, &mut model, 77);
        disk.write_zeroes(0, MIB).unwrap();
        model.zero(0, MIB / 512);
        compare(&mut disk, &model);
        disk.close().unwrap();
        check_clean(&path);
        compare_with_qemu(&dir, &path, &model);
        assert!(qemu(&["snapshot", "-a", "one", text(&path)]));
        check_clean(&path);
        compare(&mut open(text(&path)), &old);
    }
}

#[test]
fn chains_of_images_and_raw_disks_are_read_as_qemu_reads_them() {
    let dir = dir_on_disk();
    let (raw, mut model) = source(&dir, 9 * MIB);
    let base_before = file_hash(&raw);
    let (middle, leaf) = (dir.path().join("middle.qcow2"), dir.path().join("leaf.qcow2"));
    // The leaf is larger than what is below it, and names it from its own folder.
    let create = |path: &Path, below: &str, format: &str, size: &str| {
        qemu(&["create", "-q", "-f", "qcow2", "-b", below, "-F", format, text(path), size])
    };
    if !create(&middle, "source.img", "raw", "9M") {
        return;
    }
    let mut disk = open(text(&middle));
    scatter(&mut disk, &mut model, 50);
    disk.close().unwrap();
    assert!(create(&leaf, "middle.qcow2", "qcow2", "15M"));
    let middle_before = file_hash(&middle);
    let mut disk = open(text(&leaf));
    compare(&mut disk, &model);
    scatter(&mut disk, &mut model, 60);
    disk.write_zeroes(3 * MIB, 2 * MIB).unwrap();
    model.zero(3 * 2048, 2 * 2048);
    compare(&mut disk, &model);
    disk.close().unwrap();
    check_clean(&leaf);
    compare_with_qemu(&dir, &leaf, &model);
    assert_eq!((file_hash(&raw), file_hash(&middle)), (base_before, middle_before));
}

#[test]
fn a_refcount_table_that_is_too_short_grows() {
    let dir = dir_on_disk();
    // One cluster of the table covers 8 MiB.
    let Some(path) = made(&dir, "a.qcow2", "cluster_size=512,refcount_bits=64", 40 * MIB) else {
        return;
    };
    let mut model = Model::default();
    let mut disk = open(text(&path));
    for first in (0..40 * 2048).step_by(2048).filter(|first| first % 4096 == 0) {
        disk.write(first * 512, &pattern(first, 1500, 3)).unwrap();
        model.write(first, 1500, 3);
    }
    compare(&mut disk, &model);
    disk.close().unwrap();
    check_clean(&path);
    compare_with_qemu(&dir, &path, &model);
}

#[test]
fn an_image_that_another_program_marked_is_refused_or_unmarked() {
    let dir = dir_on_disk();
    let Some(path) = made(&dir, "a.qcow2", "compat=1.1", MIB) else { return };
    let set = |at: u64, value: u64| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&value.to_be_bytes(), at).unwrap();
    };
    let read_only = OpenOptions { read_only: true, ..Default::default() };
    for (bits, words) in [(1, "refcounts"), (2, "corrupt"), (4, "external"), (32, "feature 5")] {
        set(72, bits);
        let error = session(text(&path), &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(session(text(&path), &read_only).is_ok(), bits < 4);
    }
    set(72, 0);
    set(88, 1 << 7 | 1);
    let mut disk = open(text(&path));
    let autoclear = || std::fs::read(&path).unwrap()[88..96].to_vec();
    assert_ne!(autoclear(), [0; 8], "opening has written");
    disk.write(0, &[1; 512]).unwrap();
    assert_eq!(autoclear(), [0; 8]);
    disk.close().unwrap();
    check_clean(&path);
}
