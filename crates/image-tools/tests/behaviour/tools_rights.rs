//! A file that replaces an image has the owner, the group and the rights of the file before.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ferrite_disk::ImageName;
use ferrite_image_tools::{Convert, ImageTools, NewImage};

use crate::common::vhd::at;
use crate::common::{MIB, dir_on_disk, rights, skipped};
use rustix::fs::{XattrFlags, lgetxattr, lremovexattr, setxattr};
use tempfile::TempDir;

fn work<T>(work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    crate::common::work(None, work)
}

/// By its extension.
fn name(path: &Path) -> ImageName {
    ImageName::parse(path.to_str().unwrap()).unwrap()
}

fn forced() -> Convert {
    Convert { force: true, ..Convert::default() }
}

/// A raw disk without zeros, and where a copy of it goes.
fn source(dir: &TempDir) -> (ImageName, ImageName) {
    let path = at(dir, "a.img");
    fs::write(&path, vec![1; 8 * MIB as usize]).unwrap();
    (name(&path), name(&at(dir, "b.vhd")))
}

fn set_rights(image: &ImageName, mode: u32) -> (u32, u32, u32) {
    fs::set_permissions(&image.path, fs::Permissions::from_mode(mode)).unwrap();
    let _ = std::os::unix::fs::chown(&image.path, Some(4321), Some(1234));
    rights(image)
}

#[test]
fn what_replaces_an_image_has_its_owner_and_mode() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let new = NewImage { bytes: Some(8 * MIB), force: true, ..NewImage::default() };
    work(|tools| tools.create(&to, &new)).unwrap();
    for mode in [0o600, 0o660] {
        let expected = set_rights(&to, mode);
        work(|tools| tools.create(&to, &new)).unwrap();
        assert_eq!(rights(&to), expected, "create");
        work(|tools| tools.convert(&from, &to, &forced())).unwrap();
        assert_eq!(rights(&to), expected, "convert");
    }
    // An image that is no parent replaces a parent.
    let (user, group, _) = set_rights(&to, 0o440);
    work(|tools| tools.create(&to, &new)).unwrap();
    assert_eq!(rights(&to), (user, group, 0o640));
}

const LIST: &str = "system.posix_acl_access";

/// An access control list that lets a user read a file, but not its group.
fn list_for_one() -> Vec<u8> {
    let none = u32::MAX;
    let entries = [(1u16, 6u16, none), (2, 4, 4321), (4, 0, none), (16, 4, none), (32, 0, none)];
    let bytes = |(tag, permissions, id): (u16, u16, u32)| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    [2u32.to_le_bytes().to_vec(), entries.into_iter().flat_map(bytes).collect()].concat()
}

fn list_of(image: &ImageName) -> Option<Vec<u8>> {
    let mut list = vec![0; 1024];
    let len = lgetxattr(&image.path, LIST, &mut list[..]).ok()?;
    list.truncate(len);
    Some(list)
}

/// Beside a list, the group's bits of the mode are what the list gives at most.
#[test]
fn what_replaces_an_image_has_its_access_control_list() {
    let dir = dir_on_disk();
    let (from, to) = source(&dir);
    let old = name(&at(&dir, "old.vhd"));
    let new = NewImage { bytes: Some(8 * MIB), force: true, ..NewImage::default() };
    work(|tools| tools.create(&to, &new)).unwrap();
    if setxattr(&to.path, LIST, &list_for_one(), XattrFlags::empty()).is_err() {
        return skipped("a file system without access control lists");
    }
    let keeps = |what: &str| {
        assert_eq!(list_of(&to), Some(list_for_one()), "{what}");
        assert_eq!(rights(&to).2, 0o640, "{what}");
    };
    work(|tools| tools.create(&to, &new)).unwrap();
    keeps("create");
    work(|tools| tools.convert(&from, &to, &forced())).unwrap();
    keeps("convert");
    work(|tools| tools.snapshot(&to, &old)).unwrap();
    keeps("snapshot");
    lremovexattr(&old.path, LIST).unwrap();
    work(|tools| tools.coalesce(&to, false)).unwrap();
    keeps("coalesce");
    // One without a list gets none, whatever its folder gives to new files.
    lremovexattr(&to.path, LIST).unwrap();
    let expected = set_rights(&to, 0o640);
    let default = "system.posix_acl_default";
    setxattr(dir.path(), default, &list_for_one(), XattrFlags::empty()).unwrap();
    work(|tools| tools.create(&to, &new)).unwrap();
    assert_eq!((list_of(&to), rights(&to)), (None, expected));
}

#[test]
fn a_disk_has_the_same_owner_and_mode_after_a_snapshot_and_a_merge() {
    for mode in [0o600, 0o660] {
        let dir = dir_on_disk();
        let [disk, old] = ["disk.vhd", "old.vhd"].map(|n| name(&at(&dir, n)));
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        work(|tools| tools.create(&disk, &new)).unwrap();
        let expected = set_rights(&disk, mode);
        work(|tools| tools.snapshot(&disk, &old)).unwrap();
        assert_eq!(rights(&disk), expected);
        assert_eq!(rights(&old).2, mode & 0o444);
        set_rights(&old, 0o400);
        work(|tools| tools.coalesce(&disk, false)).unwrap();
        assert_eq!(rights(&disk), expected);
    }
}
