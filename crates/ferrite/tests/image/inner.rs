//! Snapshots inside of qcow2 images, by `ferrite image snapshot` and `convert -l`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use ferrite_disk::{Disk, ImageName, OpenOptions};

use crate::images::{MIB, Place, json, qemu_img};

/// A disk with data, a snapshot "monday" of that, and more data since. `before.img` and `later.img` are the two.
fn changed_since() -> Place {
    let place = Place::new();
    place.pattern("before.img", 4 * MIB, &[(0, MIB), (2 * MIB, 4096)]);
    place.ok(&["convert", "before.img", "a.qcow2"]);
    let said = place.ok(&["snapshot", "-c", "monday", "a.qcow2"]);
    assert_eq!(said, "a.qcow2: snapshot monday (1) is inside of it now\n");
    place.write("a.qcow2", &[(2 * MIB, MIB), (MIB, 512)]);
    place.ok(&["convert", "a.qcow2", "later.img"]);
    assert!(!place.same("before.img", "later.img"));
    place
}

fn is_in_order(place: &Place) {
    place.ok(&["check", "a.qcow2"]);
    let told = qemu_img(&["check", &place.path("a.qcow2")]);
    assert!(told.as_ref().is_none_or(|told| told.contains("No errors")), "{told:?}");
}

#[test]
fn a_snapshot_inside_is_listed_copied_applied_and_deleted() {
    let place = changed_since();
    is_in_order(&place);
    let all = json(&place.ok(&["snapshot", "-l", "a.qcow2", "--json"]));
    assert_eq!((&all[0]["id"], &all[0]["name"]), (&"1".into(), &"monday".into()));
    for (i, text) in ["monday", "1", "snapshot.name=monday", "snapshot.id=1"].iter().enumerate() {
        let copy = format!("copy-{i}.img");
        place.ok(&["convert", "-l", text, "a.qcow2", &copy]);
        assert!(place.same("before.img", &copy), "{text}");
    }
    let copied = qemu_img(&[
        "convert",
        "-l",
        "monday",
        "-O",
        "raw",
        &place.path("a.qcow2"),
        &place.path("theirs.img"),
    ]);
    assert!(copied.is_none() || place.same("before.img", "theirs.img"));
    let made = json(&place.ok(&["snapshot", "-c", "tuesday", "a.qcow2", "--json"]));
    assert_eq!((&made["snapshot"]["id"], &made["path"]), (&"2".into(), &"a.qcow2".into()));
    place.ok(&["snapshot", "-a", "monday", "a.qcow2"]);
    is_in_order(&place);
    place.ok(&["compare", "-q", "a.qcow2", "before.img"]);
    place.ok(&["snapshot", "-q", "-d", "1", "a.qcow2"]);
    place.ok(&["compare", "-q", "a.qcow2", "before.img"]);
    place.ok(&["snapshot", "-a", "tuesday", "a.qcow2"]);
    place.ok(&["compare", "-q", "a.qcow2", "later.img"]);
    place.ok(&["snapshot", "-d", "tuesday", "a.qcow2"]);
    is_in_order(&place);
    place.ok(&["compare", "-q", "a.qcow2", "later.img"]);
    place.has_no_leftovers();
}

#[test]
fn what_cannot_be_done_is_refused_and_nothing_changes() {
    let place = changed_since();
    place.ok(&["create", "b.vhd", "4M"]);
    let before = fs::read(place.path("a.qcow2")).unwrap();
    for (code, args, why) in [
        (2, &["snapshot", "-c", "monday", "a.qcow2"][..], "already"),
        (2, &["snapshot", "-c", "", "a.qcow2"], "empty"),
        (3, &["snapshot", "-a", "sunday", "a.qcow2"], "no snapshot sunday"),
        (3, &["snapshot", "-d", "sunday", "a.qcow2"], "no snapshot sunday"),
        (3, &["convert", "-l", "sunday", "a.qcow2", "x.img"], "no snapshot sunday"),
        (1, &["snapshot", "-c", "monday", "b.vhd"], "format vhd has none"),
        (1, &["convert", "-l", "monday", "b.vhd", "x.img"], "format vhd has none"),
    ] {
        let said = place.fails(code, args);
        assert!(said.contains(why), "{args:?}: {said}");
    }
    let path = place.path("a.qcow2");
    let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o444);
    place.fails(1, &["snapshot", "-c", "more", "a.qcow2"]);
    mode(0o644);
    let name = ImageName::parse(&path).unwrap();
    let served = Arc::new(Disk::open_image(&name, &OpenOptions::default()).unwrap());
    for letter in ["-a", "-d", "-c"] {
        place.fails(4, &["snapshot", letter, "more", "a.qcow2"]);
    }
    drop(served);
    assert!(fs::read(&path).unwrap() == before);
    place.ok(&["clone", "a.qcow2", "leaf.qcow2"]);
    mode(0o644);
    let said = place.fails(1, &["snapshot", "-a", "monday", "a.qcow2"]);
    assert!(said.contains("leaf.qcow2"), "{said}");
    assert!(fs::read(&path).unwrap() == before);
}

/// Dirty bitmaps are of the disk, which -a alone changes.
#[test]
fn bitmaps_are_kept_until_a_snapshot_is_applied() {
    let place = changed_since();
    if qemu_img(&["bitmap", "--add", &place.path("a.qcow2"), "changes"]).is_none() {
        return;
    }
    let is_valid = || {
        json(&place.ok(&["info", "a.qcow2", "--json"]))["chain"][0]["bitmaps"][0]["valid"].clone()
    };
    place.ok(&["snapshot", "-c", "tuesday", "a.qcow2"]);
    place.ok(&["snapshot", "-d", "tuesday", "a.qcow2"]);
    is_in_order(&place);
    assert_eq!(is_valid(), true);
    let said = place.ok(&["snapshot", "-a", "monday", "a.qcow2"]);
    assert!(said.contains("out of date now: 1"), "{said}");
    assert_eq!(is_valid(), false);
}
