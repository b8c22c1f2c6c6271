//! What a check says of an image in which there is much to find.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use ferrite_disk::{Class, ImageName};
use ferrite_image_tools::{CheckReport, NewImage, Verdict};

use crate::common::vhd::{at, peer};
use crate::common::{MIB, dir_on_disk, work};
use tempfile::TempDir;

/// Of the images here.
const CLUSTER: u64 = 64 << 10;
/// More than are listed.
const LEAKS: u64 = 1500;
const FIRST_LEAK: u64 = 100;
/// A cluster behind those that leaked.
const BEHIND: u64 = 1900;

fn made(dir: &TempDir, format: &str) -> ImageName {
    let path = at(dir, &format!("a.{format}"));
    let name = ImageName::parse(&format!("{format}:{}", path.to_str().unwrap())).unwrap();
    let new = NewImage { bytes: Some(16 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&name, &new)).unwrap();
    name
}

fn check(name: &ImageName) -> CheckReport {
    work(None, |tools| tools.check(name, false)).unwrap()
}

fn change(path: &Path, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

fn number(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    u64::from_be_bytes(bytes)
}

/// An image with clusters that have a count of one and nothing that refers to them.
fn leaking(dir: &TempDir) -> ImageName {
    let name = made(dir, "qcow2");
    let path = &name.path;
    File::options().write(true).open(path).unwrap().set_len(2000 * CLUSTER).unwrap();
    let counts = number(path, number(path, 48));
    let leaks: Vec<u8> = (0..LEAKS).flat_map(|_| [0, 1]).collect();
    change(path, counts + FIRST_LEAK * 2, &leaks);
    name
}

#[test]
fn an_image_with_more_leaks_than_are_listed_is_usable_and_they_are_counted() {
    let dir = dir_on_disk();
    let name = leaking(&dir);
    let report = check(&name);
    assert!(report.usable);
    assert_eq!(report.verdict, Verdict::Leaks);
    let image = &report.images[0];
    assert_eq!((image.counts.leaks, image.counts.total()), (LEAKS, LEAKS));
    assert_eq!(image.findings.len() as u64 + image.more_findings, LEAKS);
    // All of them are mended.
    let repaired = work(None, |tools| tools.repair(&name, true)).unwrap();
    assert_eq!(repaired.before.counts.mendable, LEAKS);
    assert_eq!(repaired.after.verdict(), Verdict::InOrder);
    peer("qemu-img", &["check", "-q", name.path.to_str().unwrap()]);
}

#[test]
fn damage_behind_more_leaks_than_are_listed_is_listed_first() {
    let dir = dir_on_disk();
    let name = leaking(&dir);
    let path = &name.path;
    // An L2 table in the cluster before, and an entry in it for a cluster without a count.
    let counts = number(path, number(path, 48));
    change(path, counts + (BEHIND - 1) * 2, &[0, 1]);
    change(path, number(path, 40), &(((BEHIND - 1) * CLUSTER) | (1 << 63)).to_be_bytes());
    change(path, (BEHIND - 1) * CLUSTER, &(BEHIND * CLUSTER).to_be_bytes());
    let report = check(&name);
    assert!(!report.usable);
    assert_eq!(report.verdict, Verdict::Damaged);
    let image = &report.images[0];
    assert_eq!((image.counts.damage, image.counts.leaks), (1, LEAKS));
    let first = &image.findings[0];
    assert_eq!((first.class, first.offset_bytes), (Class::Damage, Some(BEHIND * CLUSTER)));
}

#[test]
fn what_is_not_supported_is_not_called_damage() {
    let dir = dir_on_disk();
    let qcow2 = made(&dir, "qcow2");
    // Data in another file.
    change(&qcow2.path, 79, &[1 << 2]);
    let vhd = made(&dir, "vhd");
    let mut footer = [0; 512];
    let file = File::open(&vhd.path).unwrap();
    let end = file.metadata().unwrap().len() - 512;
    file.read_exact_at(&mut footer, end).unwrap();
    // A feature without a name.
    footer[11] |= 4;
    footer[64..68].fill(0);
    let sum = footer.iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    change(&vhd.path, 0, &footer);
    change(&vhd.path, end, &footer);
    for name in [qcow2, vhd] {
        let report = check(&name);
        assert!(!report.usable);
        assert_eq!(report.verdict, Verdict::Unsupported, "{:?}", report.images);
        assert_eq!(report.images[0].counts.damage, 0);
        assert!(report.images[0].findings.iter().all(|f| f.class == Class::Unsupported));
    }
}

/// Each would be looked at once more: a hundred thousand times in an image of some megabytes.
#[test]
fn a_table_that_many_entries_name_is_damage_and_not_looked_into() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.qcow2");
    let name = ImageName::parse(&format!("qcow2:{}", path.to_str().unwrap())).unwrap();
    let new = NewImage { bytes: Some(1 << 40), ..NewImage::default() };
    work(None, |tools| tools.create(&name, &new)).unwrap();
    // A table whose every entry would be a finding.
    let (l1, table) = (number(&path, 40), 100 * CLUSTER);
    change(&path, table, &[0xFF; CLUSTER as usize]);
    let entries: Vec<u8> = (0..2048).flat_map(|_| table.to_be_bytes()).collect();
    change(&path, l1, &entries);
    let report = check(&name);
    assert_eq!(report.verdict, Verdict::Damaged);
    let damage = report.images[0].counts.damage;
    assert!((2048..4096).contains(&damage), "{damage} findings");
}

#[test]
fn damage_in_a_chain_is_told_although_what_is_below_it_is_missing() {
    let dir = dir_on_disk();
    let below = made(&dir, "qcow2");
    let [parent, child] = ["parent.qcow2", "child.qcow2"]
        .map(|file| ImageName::parse(at(&dir, file).to_str().unwrap()).unwrap());
    for (image, parent) in [(&parent, &below), (&child, &parent)] {
        let new = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        work(None, |tools| tools.create(image, &new)).unwrap();
    }
    std::fs::remove_file(&below.path).unwrap();
    let check = || work(None, |tools| tools.check(&child, true));
    check().unwrap_err();
    // Its first cluster, the header's, is counted as free.
    std::fs::set_permissions(&parent.path, std::fs::Permissions::from_mode(0o644)).unwrap();
    change(&parent.path, number(&parent.path, number(&parent.path, 48)), &[0, 0]);
    let report = check().unwrap();
    assert_eq!(report.verdict, Verdict::Damaged, "{report:?}");
    assert!(!report.images[1].is_usable(), "{report:?}");
}
