//! What `ferrite image` cannot do leaves everything as it was, and says so.

mod images;

use std::fs;

use images::{MIB, Place};

/// All names of the directory, in order.
fn names(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(place.path(".")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_new_image_that_could_not_be_opened_is_refused_before_anything_is_written() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.ok(&["convert", "a.img", "good.vhd"]);
    place.ok(&["convert", "a.img", "base.vhd"]);
    place.ok(&["convert", "a.img", "base.qcow2"]);
    let (good, before) = (fs::read(place.path("good.vhd")).unwrap(), names(&place));
    for command in [
        &["create", "x.vhd", "1T", "--block", "512M"][..],
        &["create", "x.vhd", "1T", "--block", "1G"],
        &["create", "x.vhd", "1T", "--block", "2G"],
        &["create", "x.vhd", "3000T"],
        &["create", "x.qcow2", "65T"],
        &["create", "x.qcow2", "1T", "--block", "4M"],
        &["create", "good.vhd", "1T", "--block", "512M", "--force"],
        &["create", "--parent", "base.vhd", "x.vhd", "--block", "512M"],
        &["create", "--parent", "base.vhd", "x.vhd", "3000T"],
        &["create", "--parent", "base.qcow2", "x.qcow2", "--block", "4M"],
        &["convert", "a.img", "x.vhd", "--block", "512M"],
        &["convert", "a.img", "x.qcow2", "--block", "4M"],
        &["convert", "a.img", "good.vhd", "--block", "512M", "--force"],
    ] {
        place.fails(2, command);
        assert_eq!(names(&place), before, "{command:?}");
        assert!(fs::read(place.path("good.vhd")).unwrap() == good, "{command:?}");
        for base in ["base.vhd", "base.qcow2"] {
            let writable = !fs::metadata(place.path(base)).unwrap().permissions().readonly();
            assert!(writable, "{command:?} made {base} read-only");
        }
    }
    place.ok(&["create", "x.vhd", "1T", "--block", "256M"]);
    place.ok(&["info", "x.vhd"]);
}
