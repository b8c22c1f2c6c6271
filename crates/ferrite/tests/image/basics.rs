//! `ferrite image`: the usual use of each command.

use std::fs;

use crate::images::{MIB, Place, json, qemu_img};

#[test]
fn an_image_is_made_and_says_what_it_is() {
    let place = Place::new();
    place.ok(&["create", "a.vhd", "64M"]);
    let info = json(&place.ok(&["info", "a.vhd", "--json"]));
    assert_eq!(info["virtual_bytes"], 64 * MIB);
    assert_eq!(info["chain"][0]["format"], "vhd");
    assert_eq!(info["chain"][0]["kind"], "dynamic");
    assert!(info["chain"][0]["disk_bytes"].as_u64().unwrap() < MIB);
    if let Some(text) = qemu_img(&["info", &place.path("a.vhd")]) {
        assert!(text.contains("file format: vpc") && text.contains("(67108864 bytes)"), "{text}");
    }
}

#[test]
fn nothing_is_overwritten_without_force() {
    let place = Place::new();
    for (name, command) in [
        ("a.img", &["create", "a.img", "1M"][..]),
        ("b.vhd", &["create", "b.vhd", "1M"]),
        ("c.vhd", &["convert", "source.img", "c.vhd"]),
    ] {
        place.pattern("source.img", 2 * MIB, &[(0, 4096)]);
        fs::write(place.path(name), b"precious").unwrap();
        let text = place.fails(1, command);
        assert!(text.contains("it exists and would be lost, with 8 bytes in it"), "{text}");
        assert!(text.contains("help: ") && text.contains("--force"), "{text}");
        assert_eq!(fs::read(place.path(name)).unwrap(), b"precious");
        place.ok(&[command, &["--force"]].concat());
        assert_ne!(fs::read(place.path(name)).unwrap(), b"precious");
    }
    place.has_no_leftovers();
}

#[test]
fn a_copy_reads_as_the_source_and_holes_stay_holes() {
    let place = Place::new();
    place.pattern("a.img", 40 * MIB, &[(0, 5 * MIB + 512), (20 * MIB, 4096), (39 * MIB, MIB)]);
    place.ok(&["convert", "a.img", "b.vhd"]);
    place.ok(&["convert", "b.vhd", "c.img"]);
    assert!(place.same("a.img", "c.img"));
    let on_disk = |name| json(&place.ok(&["du", name, "--json"]))["disk_bytes"].as_u64().unwrap();
    assert!(on_disk("b.vhd") < 16 * MIB, "{}", on_disk("b.vhd"));
    assert!(on_disk("c.img") < 8 * MIB, "{}", on_disk("c.img"));
    if qemu_img(&["--version"]).is_some() {
        let (a, b) = (place.path("a.img"), place.path("b.vhd"));
        let text = qemu_img(&["compare", "-f", "raw", "-F", "vpc", &a, &b]).unwrap();
        assert!(text.contains("identical"), "{text}");
    }
    place.has_no_leftovers();
}

#[test]
fn zeros_that_were_written_take_no_space_in_a_copy() {
    let place = Place::new();
    fs::write(place.path("a.img"), vec![0; 8 << 20]).unwrap();
    place.ok(&["convert", "a.img", "b.vhd"]);
    let map = json(&place.ok(&["map", "b.vhd", "--json"]));
    assert_eq!(map.as_array().unwrap().len(), 1, "{map}");
    assert_ne!(map[0]["kind"], "data");
}

#[test]
fn a_snapshot_keeps_what_was_and_the_name_goes_on() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(MIB, 3 * MIB)]);
    place.ok(&["convert", "a.img", "disk.vhd"]);
    place.ok(&["snapshot", "disk.vhd", "old.vhd"]);
    place.ok(&["compare", "a.img", "disk.vhd"]);
    place.ok(&["compare", "a.img", "old.vhd"]);
    let info = json(&place.ok(&["info", "disk.vhd", "--json"]));
    assert_eq!(info["chain"].as_array().unwrap().len(), 2);
    assert_eq!(info["chain"][1]["read_only"], true);
    assert_eq!(info["chain"][0]["kind"], "differencing");
    let again = place.ok(&["snapshot", "disk.vhd", "old.vhd"]);
    assert!(again.contains("nothing to do"), "{again}");
    place.ok(&["snapshot", "disk.vhd", "older.vhd"]);
    place.ok(&["compare", "a.img", "disk.vhd"]);
    place.has_no_leftovers();
}

#[test]
fn a_snapshot_takes_no_other_files_name() {
    let place = Place::new();
    place.ok(&["create", "disk.vhd", "4M"]);
    fs::write(place.path("old.vhd"), b"precious").unwrap();
    let text = place.fails(1, &["snapshot", "disk.vhd", "old.vhd"]);
    assert!(text.contains("exists and is another file"), "{text}");
    let text = place.fails(1, &["snapshot", "disk.vhd", "old.img"]);
    assert!(text.contains("its name says raw"), "{text}");
    fs::create_dir(place.path("sub")).unwrap();
    let text = place.fails(1, &["snapshot", "disk.vhd", "sub/old.vhd"]);
    assert!(text.contains("another directory"), "{text}");
    assert_eq!(fs::read(place.path("old.vhd")).unwrap(), b"precious");
}

#[test]
fn a_snapshot_that_was_cut_off_is_finished() {
    let place = Place::new();
    place.ok(&["create", "disk.vhd", "4M"]);
    fs::hard_link(place.path("disk.vhd"), place.path("old.vhd")).unwrap();
    fs::write(place.path("disk.vhd.ferrite-new"), b"half").unwrap();
    place.ok(&["snapshot", "disk.vhd", "old.vhd"]);
    let info = json(&place.ok(&["info", "disk.vhd", "--json"]));
    assert_eq!(info["chain"].as_array().unwrap().len(), 2);
    place.has_no_leftovers();
}

#[test]
fn an_image_in_use_is_busy() {
    let place = Place::new();
    place.ok(&["create", "disk.vhd", "4M"]);
    let holder = fs::File::open(place.path("disk.vhd")).unwrap();
    holder.lock().unwrap();
    for command in [
        &["snapshot", "disk.vhd", "old.vhd"][..],
        &["info", "disk.vhd"],
        &["resize", "disk.vhd", "8M"],
        &["create", "disk.vhd", "4M", "--force"],
        &["clone", "disk.vhd", "new.vhd"],
    ] {
        let text = place.fails(4, command);
        assert!(text.contains("has locked it"), "{command:?}: {text}");
    }
    assert!(!fs::exists(place.path("old.vhd")).unwrap());
    place.has_no_leftovers();
}

#[test]
fn a_clone_begins_as_its_parent_which_becomes_read_only() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    let text = place.ok(&["clone", "a.img", "one.vhd"]);
    assert!(text.contains("a.img is read-only now"), "{text}");
    place.ok(&["clone", "a.img", "two.vhd"]);
    place.ok(&["compare", "one.vhd", "two.vhd"]);
    let text = place.fails(1, &["clone", "a.img", "three.img"]);
    assert!(text.contains("a raw image cannot have a parent"), "{text}");
    let text = place.fails(2, &["create", "--parent", "a.img", "four.vhd", "1M"]);
    assert!(text.contains("smaller than its parent"), "{text}");
    place.ok(&["create", "--parent", "a.img", "five.vhd", "8M"]);
    place.ok(&["compare", "a.img", "five.vhd"]);
}

#[test]
fn compare_finds_the_first_byte_that_differs() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, 3 * MIB)]);
    place.ok(&["convert", "a.img", "b.vhd"]);
    let mut bytes = fs::read(place.path("a.img")).unwrap();
    bytes.extend([0; 512]);
    fs::write(place.path("c.img"), &bytes).unwrap();
    let text = place.ok(&["compare", "b.vhd", "c.img"]);
    assert!(text.contains("the rest of the larger one"), "{text}");
    for at in [0, 2 * MIB as usize + 77, 8 * MIB as usize + 511] {
        let mut other = bytes.clone();
        other[at] ^= 1;
        fs::write(place.path("c.img"), &other).unwrap();
        let text = place.fails(1, &["compare", "b.vhd", "c.img"]);
        assert!(text.contains(&format!("the first difference is at byte {at}\n")), "{text}");
    }
}

#[test]
fn a_map_names_data_and_holes_with_their_places() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(MIB, MIB)]);
    let mut map = json(&place.ok(&["map", "a.img", "--json"]));
    // qemu-img's names stand beside these: `qemu_img.rs`.
    for part in map.as_array_mut().unwrap() {
        for name in ["start", "length", "depth", "present", "zero", "data", "offset"] {
            part.as_object_mut().unwrap().remove(name);
        }
    }
    let expected = serde_json::json!([
        {"start_bytes": 0, "length_bytes": MIB, "kind": "zero", "layer": 0, "offset_bytes": null},
        {"start_bytes": MIB, "length_bytes": MIB, "kind": "data", "layer": 0, "offset_bytes": MIB},
        {"start_bytes": 2 * MIB, "length_bytes": 2 * MIB, "kind": "zero", "layer": 0,
         "offset_bytes": null},
    ]);
    assert_eq!(map, expected);
}

#[test]
fn a_disk_grows_at_once_and_shrinks_only_where_nothing_is() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(MIB, MIB)]);
    place.ok(&["resize", "a.img", "16M"]);
    assert_eq!(fs::metadata(place.path("a.img")).unwrap().len(), 16 * MIB);
    let text = place.fails(1, &["resize", "a.img", "8M"]);
    assert!(text.contains("8 MiB at its end would be gone") && text.contains("--shrink"), "{text}");
    place.ok(&["resize", "a.img", "8M", "--force"]);
    let text = place.fails(1, &["resize", "a.img", "1536K", "--force"]);
    assert!(text.contains("there is data at byte 1572864"), "{text}");
    assert_eq!(fs::metadata(place.path("a.img")).unwrap().len(), 8 * MIB);
}

#[test]
fn what_a_qcow2_image_has_is_told_and_all_its_space_at_once_is_refused() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB), (3 * MIB, 512)]);
    place.ok(&["convert", "a.img", "a.qcow2"]);
    let info = json(&place.ok(&["info", "a.qcow2", "--json"]));
    assert_eq!(info["chain"][0]["allocated_bytes"], MIB + (64 << 10));
    let usage = json(&place.ok(&["du", "a.qcow2", "--json"]));
    assert_eq!(usage["allocated_bytes"], MIB + (64 << 10));
    for command in [&["create", "b.qcow2", "1M"][..], &["convert", "a.img", "b.qcow2"]] {
        let text = place.fails(2, &[command, &["--fixed"]].concat());
        assert!(text.contains("help: leave --fixed out"), "{text}");
    }
    place.has_no_leftovers();
}

#[test]
fn a_dirty_map_is_added_shown_cleared_and_removed() {
    let place = Place::new();
    place.ok(&["create", "a.qcow2", "64M"]);
    assert_eq!(place.ok(&["dirty", "list", "a.qcow2"]), "a.qcow2: no dirty maps\n");
    let said = place.ok(&["dirty", "add", "a.qcow2", "nightly"]);
    assert!(said.contains("a.qcow2.ferrite-dirty has to stay beside the image"), "{said}");
    place.write("a.qcow2", &[(9 * MIB, MIB)]);
    let shown = json(&place.ok(&["dirty", "show", "a.qcow2", "nightly", "--json"]));
    // Whole regions: the helper has no state directory.
    let region = serde_json::json!([{"start_bytes": 8 * MIB, "length_bytes": 4 * MIB}]);
    assert_eq!((&shown["name"], &shown["changed"]), (&"nightly".into(), &region));
    let listed = place.ok(&["dirty", "list", "a.qcow2"]);
    assert!(listed.starts_with("nightly") && listed.contains("changed since 20"), "{listed}");
    place.ok(&["dirty", "clear", "a.qcow2", "nightly"]);
    assert_eq!(place.ok(&["dirty", "show", "a.qcow2", "nightly"]).lines().count(), 1);
    let text = place.fails(3, &["dirty", "show", "a.qcow2", "weekly"]);
    assert!(text.contains("no map \"weekly\"") && text.contains("dirty list"), "{text}");
    let text = place.fails(1, &["dirty", "add", "a.qcow2", "nightly"]);
    assert!(text.contains("there is a map nightly") && text.contains("dirty clear"), "{text}");
    place.ok(&["dirty", "remove", "a.qcow2", "nightly"]);
    assert!(!fs::exists(place.path("a.qcow2.ferrite-dirty")).unwrap());
}

#[test]
fn a_dirty_map_beside_a_copy_is_not_shown_as_if_it_were_the_copys() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
    place.ok(&["dirty", "add", "a.img", "nightly"]);
    for end in ["", ".ferrite-dirty"] {
        fs::copy(place.path(&format!("a.img{end}")), place.path(&format!("b.img{end}"))).unwrap();
    }
    let text = place.fails(1, &["dirty", "show", "b.img", "nightly"]);
    assert!(text.contains("copied or restored") && text.contains("full backup"), "{text}");
    assert!(place.ok(&["dirty", "list", "b.img"]).contains("is void"));
}
