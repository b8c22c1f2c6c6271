//! Refcounts of qcow2 that are lost with their blocks. A test says "skipped" where there is no
//! `qemu-img`.

use std::path::{Path, PathBuf};

use crate::model::{Model, check_clean, compare, name, open, pattern, peek, poke, qemu, tools};
use ferrite_testkit::is_paired;
use ferrite_testkit::places::dir_on_disk;
use tempfile::TempDir;

/// An image with data all over it.
fn made(dir: &TempDir, options: &str) -> Option<(PathBuf, Model)> {
    let path = dir.path().join("a.qcow2");
    let text = path.to_str().unwrap();
    if !qemu(&["create", "-q", "-f", "qcow2", "-o", options, text, "40M"]) {
        return None;
    }
    let mut model = Model::default();
    let mut disk = open(text);
    for first in (0..40 * 2048).step_by(4096) {
        disk.write(first * 512, &pattern(first, 1500, 3)).unwrap();
        model.write(first, 1500, 3);
    }
    disk.close().unwrap();
    check_clean(&path);
    Some((path, model))
}

/// The places of the entries of the refcount table that are in use.
fn blocks(path: &Path) -> Vec<u64> {
    let (table, clusters) = (peek(path, 48), peek(path, 56) >> 32);
    let end = table + (clusters << (peek(path, 20) >> 32));
    (table..end).step_by(8).filter(|at| peek(path, *at) != 0).collect()
}

fn mends(path: &Path, model: &Model) {
    let repaired = tools(|tools| tools.repair(&name(path), true)).unwrap();
    assert!(!repaired.before.findings.is_empty());
    assert!(repaired.after.findings.is_empty(), "{:?}", repaired.after);
    check_clean(path);
    let mut disk = open(path.to_str().unwrap());
    compare(&mut disk, model);
    let mut model = model.clone();
    disk.write(2 << 20, &pattern(4096, 2048, 9)).unwrap();
    model.write(4096, 2048, 9);
    disk.close().unwrap();
    check_clean(path);
    compare(&mut open(path.to_str().unwrap()), &model);
}

#[test]
fn blocks_of_refcounts_that_are_missing_are_made() {
    let kinds = ["cluster_size=64k", "cluster_size=512", "cluster_size=1k,refcount_bits=64"];
    for (kind, options) in kinds.into_iter().enumerate() {
        type Which = fn(usize, usize) -> bool;
        let cases: [Which; 4] = [|i, _| i == 0, |i, n| i + 1 == n, |i, _| i % 2 == 1, |_, _| true];
        let cases = cases.into_iter().enumerate().filter(|(case, _)| is_paired(*case, kind, 2));
        for (_, which) in cases {
            let dir = dir_on_disk();
            let Some((path, model)) = made(&dir, options) else { return };
            let entries = blocks(&path);
            let gone = entries.iter().enumerate().filter(|(i, _)| which(*i, entries.len()));
            if gone.clone().count() == 0 {
                continue;
            }
            gone.for_each(|(_, at)| poke(&path, *at, |_| 0));
            mends(&path, &model);
        }
    }
}

#[test]
fn a_refcount_table_that_ends_too_early_is_replaced() {
    let dir = dir_on_disk();
    let Some((path, model)) = made(&dir, "cluster_size=512,refcount_bits=64") else { return };
    assert!(peek(&path, 56) >> 32 > 1, "the table has one cluster only");
    poke(&path, 56, |word| 1 << 32 | word & 0xFFFF_FFFF);
    mends(&path, &model);
}
