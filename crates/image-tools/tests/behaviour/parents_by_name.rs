//! Parents that a VHD names in its header only: without locators, or with some that lead nowhere.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use ferrite_disk::{Disk, ErrorKind, ImageName};
use ferrite_image_tools::NewImage;

use crate::common::vhd::{at, options};
use crate::common::{MIB, Queue, dir_on_disk, work};
use crate::tools::name;

/// The dynamic header, and its parts.
const HEADER: u64 = 512;
const CHECKSUM: usize = 36;
const NAME: usize = 64;
const LOCATORS: usize = 576;

/// A parent with data, and a child.
fn family(dir: &Path) -> (ImageName, ImageName) {
    let [parent, child] = ["base.vhd", "child.vhd"].map(|file| name("vhd", &dir.join(file)));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&parent, &new)).unwrap();
    let mut disk = Queue::new(Disk::open_image(&parent, &options()).unwrap());
    disk.write(MIB, &[5; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let on = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
    work(None, |tools| tools.create(&child, &on)).unwrap();
    (parent, child)
}

/// Gives a child another name of its parent in its header, and removes its locators.
fn rename_in_header(child: &ImageName, parent: &str) {
    let file = fs::File::options().read(true).write(true).open(&child.path).unwrap();
    let mut header = [0; 1024];
    file.read_exact_at(&mut header, HEADER).unwrap();
    header[NAME..].fill(0);
    for (i, unit) in parent.encode_utf16().enumerate() {
        header[NAME + 2 * i..][..2].copy_from_slice(&unit.to_be_bytes());
    }
    assert!(parent.len() * 2 < LOCATORS - NAME);
    header[CHECKSUM..][..4].fill(0);
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[CHECKSUM..][..4].copy_from_slice(&(!sum).to_be_bytes());
    file.write_all_at(&header, HEADER).unwrap();
}

fn read(child: &ImageName) -> Vec<u8> {
    Queue::new(Disk::open_image(child, &options()).unwrap()).read(MIB, 512).unwrap()
}

#[test]
fn a_parent_beside_its_child_is_found_by_the_name_in_the_header() {
    for text in
        ["base.vhd", "BASE.vhd", "C:\\vm\\Base.VHD", "/srv/vm/base.vhd", "\\\\h\\s\\base.vhd"]
    {
        let dir = dir_on_disk();
        let (_, child) = family(dir.path());
        rename_in_header(&child, text);
        assert!(read(&child) == [5; 512], "{text}");
        let report = work(None, |tools| tools.check(&child, true)).unwrap();
        assert!(report.usable && report.images.len() == 2, "{text}: {report:?}");
        work(None, |tools| tools.coalesce(&child, false)).unwrap();
        assert!(read(&child) == [5; 512], "{text}");
    }
}

/// Locators that lead nowhere: both were moved, and the parent was renamed.
#[test]
fn a_parent_is_found_by_its_name_where_the_locators_lead_nowhere() {
    let (dir, there) = (dir_on_disk(), dir_on_disk());
    let (parent, child) = family(dir.path());
    let moved = name("vhd", &at(&there, "child.vhd"));
    fs::copy(&child.path, &moved.path).unwrap();
    fs::copy(&parent.path, at(&there, "BASE.VHD")).unwrap();
    assert!(read(&moved) == [5; 512]);
}

/// It would be written to otherwise, under its child.
#[test]
fn a_parent_by_name_is_not_written_to() {
    let dir = dir_on_disk();
    let (parent, child) = family(dir.path());
    rename_in_header(&child, "BASE.VHD");
    let meta = fs::metadata(&parent.path).unwrap();
    let mut rights = meta.permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut rights, 0o644);
    fs::set_permissions(&parent.path, rights).unwrap();
    Disk::open_image(&parent, &options()).unwrap_err();
}

#[test]
fn a_name_without_the_uuid_is_no_parent() {
    let dir = dir_on_disk();
    let (parent, child) = family(dir.path());
    rename_in_header(&child, "base.vhd");
    fs::rename(&parent.path, at(&dir, "kept.vhd")).unwrap();
    let other = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&parent, &other)).unwrap();
    let error = Disk::open_image(&child, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsuitable);
    assert!(error.why().contains("has the UUID"), "{error}");
}

/// The error names the places, or that there are none.
#[test]
fn a_parent_that_is_nowhere_is_named_with_its_places() {
    let dir = dir_on_disk();
    let (parent, child) = family(dir.path());
    fs::rename(&parent.path, at(&dir, "kept.vhd")).unwrap();
    rename_in_header(&child, "D:\\vm\\base.vhd");
    let error = Disk::open_image(&child, &options()).unwrap_err();
    assert!(error.why().contains("/base.vhd\""), "{error}");
    // The name is the child's own.
    rename_in_header(&child, "child.vhd");
    let error = Disk::open_image(&child, &options()).unwrap_err();
    assert!(error.why().ends_with("no place of it"), "{error}");
    assert!(error.help().contains("rebase -u"), "{}", error.help());
}
