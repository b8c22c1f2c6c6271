//! `ferrite image rebase`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::images::{MIB, Place, json, qemu_img};

/// Two different parents, and a leaf on the first with data of its own.
fn place(extension: &str) -> (Place, [String; 3]) {
    let place = Place::new();
    let names = ["one", "two", "leaf"].map(|name| format!("{name}.{extension}"));
    place.pattern("one.img", 8 * MIB, &[(0, MIB), (4 * MIB, 70_000)]);
    place.pattern("two.img", 8 * MIB, &[(MIB / 2, 2 * MIB), (6 * MIB, MIB)]);
    place.ok(&["convert", "one.img", &names[0]]);
    place.ok(&["convert", "two.img", &names[1]]);
    place.ok(&["clone", &names[0], &names[2]]);
    place.write(&names[2], &[(3 * MIB + 512, 4096), (7 * MIB, 512)]);
    place.ok(&["convert", &names[2], "expected.img"]);
    (place, names)
}

#[test]
fn a_disk_on_another_parent_reads_as_before() {
    for extension in ["vhd", "qcow2"] {
        let (place, [one, two, leaf]) = place(extension);
        let before = json(&place.ok(&["info", "--json", &leaf]));
        place.ok(&["rebase", &leaf, "--parent", &two]);
        fs::remove_file(place.path(&one)).unwrap();
        place.ok(&["compare", &leaf, "expected.img"]);
        place.ok(&["check", "--chain", &leaf]);
        let after = json(&place.ok(&["info", "--json", &leaf]));
        assert!(after["chain"][1]["path"].as_str().unwrap().ends_with(&two), "{after}");
        for same in ["uuid", "unit_bytes", "virtual_bytes", "read_only"] {
            assert_eq!(after["chain"][0][same], before["chain"][0][same], "{same}");
        }
        let mode = fs::metadata(place.path(&two)).unwrap().permissions().mode();
        assert_eq!(mode & 0o222, 0, "it is a parent now");
        if extension == "qcow2" && qemu_img(&["--version"]).is_some() {
            let (a, b) = (place.path(&leaf), place.path("expected.img"));
            assert!(qemu_img(&["compare", &a, &b]).unwrap().contains("identical"));
        }
        place.has_no_leftovers();
    }
}

#[test]
fn a_parent_that_was_moved_is_found_again() {
    for extension in ["vhd", "qcow2"] {
        let (place, [one, _, leaf]) = place(extension);
        fs::create_dir(place.path("moved")).unwrap();
        let there = format!("moved/{one}");
        fs::rename(place.path(&one), place.path(&there)).unwrap();
        place.fails(1, &["map", &leaf]);
        place.ok(&["rebase", "-u", "-b", &there, &leaf]);
        place.ok(&["compare", &leaf, "expected.img"]);
        // Only its own data.
        let own =
            json(&place.ok(&["info", "--json", &leaf]))["chain"][0]["allocated_bytes"].clone();
        assert!(own.as_u64().unwrap() <= 4 * MIB, "{own}");
        place.has_no_leftovers();
    }
}

#[test]
fn what_cannot_be_rebased_stays_as_it_is() {
    for extension in ["vhd", "qcow2"] {
        let (place, [one, two, leaf]) = place(extension);
        fs::create_dir(place.path("sub")).unwrap();
        let large = format!("large.{extension}");
        place.ok(&["create", &large, "16M"]);
        std::os::unix::fs::symlink(place.path(&leaf), place.path("link")).unwrap();
        let spelled = [leaf.clone(), format!("./sub/../{leaf}"), format!("{extension}:link")];
        let before = fs::read(place.path(&leaf)).unwrap();
        for itself in &spelled {
            for how in [&[][..], &["--unsafe"]] {
                let text = place.fails(1, &[&["rebase", &leaf, "--parent", itself], how].concat());
                assert!(text.contains("its own parent"), "{text}");
            }
        }
        let text = place.fails(2, &["rebase", &leaf, "--parent", &large]);
        assert!(text.contains("the parent is larger"), "{text}");
        let text = place.fails(1, &["rebase", &one, "--parent", &two]);
        assert!(text.contains("read-only"), "{text}");
        place.fails(3, &["rebase", &leaf, "--parent", "no.vhd"]);
        place.fails(1, &["rebase", "one.img", "--parent", &two]);
        let above = format!("above.{extension}");
        place.ok(&["convert", &leaf, &above]);
        assert_eq!(fs::read(place.path(&leaf)).unwrap(), before);
        place.ok(&["compare", &leaf, "expected.img"]);
        place.has_no_leftovers();
    }
}

#[test]
fn snapshots_inside_of_an_image_are_not_lost() {
    let (place, [_, two, leaf]) = place("qcow2");
    if qemu_img(&["snapshot", "-c", "first", &place.path(&leaf)]).is_none() {
        return;
    }
    let text = place.fails(1, &["rebase", &leaf, "--parent", &two]);
    assert!(text.contains("snapshots inside"), "{text}");
    place.ok(&["compare", &leaf, "expected.img"]);
}

#[test]
fn a_parent_with_a_colon_in_its_name_is_no_protocol() {
    for (name, old) in [("./db:1.qcow2", "./db:1-old.qcow2"), ("./file:p.qcow2", "./file:p1.qcow2")]
    {
        let place = Place::new();
        place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
        place.pattern("b.img", 4 * MIB, &[(2 * MIB, MIB)]);
        // Files that another reading of the name would find.
        for other in ["p.qcow2", "p1.qcow2"] {
            place.ok(&["convert", "b.img", other]);
        }
        place.ok(&["convert", "a.img", name]);
        place.ok(&["clone", name, "clone.qcow2"]);
        place.ok(&["compare", "a.img", "clone.qcow2"]);
        place.ok(&["clone", "p.qcow2", "other.qcow2"]);
        place.ok(&["rebase", "-b", name, "other.qcow2"]);
        place.ok(&["compare", "b.img", "other.qcow2"]);
        for child in ["clone.qcow2", "other.qcow2"] {
            fs::remove_file(place.path(child)).unwrap();
        }
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(0o644)).unwrap();
        place.ok(&["snapshot", name, old]);
        place.ok(&["compare", "a.img", name]);
        if let Some(disk) = qemu_img(&["compare", &place.path("a.img"), &place.path(name)]) {
            assert!(disk.contains("identical"), "{disk}");
        }
    }
}

#[test]
fn a_name_with_a_protocol_leads_where_qemu_goes_until_it_is_mended() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.pattern("b.img", 4 * MIB, &[(2 * MIB, MIB)]);
    place.ok(&["convert", "a.img", "./file:p.qcow2"]);
    place.ok(&["convert", "b.img", "p.qcow2"]);
    place.ok(&["clone", "./file:p.qcow2", "c.qcow2"]);
    let child = place.path("c.qcow2");
    let bare = ["rebase", "-u", "-F", "qcow2", "-b", "file:p.qcow2", &child];
    if qemu_img(&bare).is_none() {
        return;
    }
    place.ok(&["compare", "b.img", "c.qcow2"]);
    place.ok(&["rebase", "-u", "-b", "./file:p.qcow2", "c.qcow2"]);
    place.ok(&["compare", "a.img", "c.qcow2"]);
}

#[test]
fn one_of_two_names_of_an_image_is_not_rebased() {
    let (place, [_, two, leaf]) = place("qcow2");
    fs::hard_link(place.path(&leaf), place.path("again.qcow2")).unwrap();
    let text = place.fails(1, &["rebase", &leaf, "-b", &two]);
    assert!(text.contains("2 names"), "{text}");
    place.ok(&["compare", &leaf, "again.qcow2"]);
}
