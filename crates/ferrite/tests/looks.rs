//! Images under names without a format.

mod images;

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use images::{MIB, Place};

/// The magic bytes of other formats, and their offsets.
const OTHERS: [(u64, &[u8]); 10] = [
    (0, b"QFI\xfb\0\0\0\x01"),
    (0, b"QFI\xfb\0\0\0\x03"),
    (0, b"conectix"),
    (0, b"vhdxfile"),
    (0, b"KDMV"),
    (0, b"# Disk DescriptorFile"),
    (0, b"QED\0"),
    (0, b"WithoutFreeSpace"),
    (0, b"WithouFreSpacExt"),
    (64, b"\x7f\x10\xda\xbe"),
];

fn put(place: &Place, at: u64, bytes: &[u8]) {
    place.pattern("disk", 4 * MIB, &[(MIB, 4096)]);
    let file = File::options().write(true).open(place.path("disk")).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

#[test]
fn what_looks_like_an_image_is_raw_only_if_that_is_said() {
    let place = Place::new();
    place.pattern("plain.img", 4 * MIB, &[(0, MIB)]);
    let ends = [(4 * MIB - 512, &b"conectix"[..]), (4 * MIB - 511, b"conectix")];
    for (at, bytes) in OTHERS.into_iter().chain(ends) {
        put(&place, at, bytes);
        let before = fs::read(place.path("disk")).unwrap();
        for command in [
            &["info", "disk"][..],
            &["map", "disk"],
            &["du", "disk"],
            &["compare", "plain.img", "disk"],
            &["check", "disk"],
            &["convert", "disk", "copy.vhd"],
            &["clone", "disk", "child.qcow2"],
            &["create", "--parent", "disk", "child.vhd"],
            &["resize", "disk", "8M"],
        ] {
            let output = place.image(command);
            let text = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success(), "{command:?}, {bytes:?}");
            assert!(text.contains("raw:disk"), "{command:?}: {text}");
        }
        assert!(fs::read(place.path("disk")).unwrap() == before);
        place.ok(&["info", "raw:disk"]);
        place.ok(&["convert", "--from", "raw", "--to", "raw", "disk", "copy"]);
        place.ok(&["create", "disk", "4M", "--force"]);
        fs::remove_file(place.path("copy")).unwrap();
    }
}

#[test]
fn nothing_is_served_raw_that_looks_like_an_image() {
    let place = Place::new();
    place.ok(&["create", "a.vhd", "4M"]);
    fs::rename(place.path("a.vhd"), place.path("disk")).unwrap();
    let serve = |image: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["serve", image, "--xen", "32000/xvdz"]).env_remove("RUST_LOG");
        let output = command.current_dir(place.path(".")).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let text = serve("disk");
    assert!(text.contains("looks like a VHD") && text.contains("vhd:disk"), "{text}");
    let text = serve("disk.vmdk");
    assert!(text.contains("vmdk are not read here"), "{text}");
}

#[test]
fn a_raw_disk_is_what_looks_like_nothing() {
    let place = Place::new();
    for (at, bytes) in [(1, &b"conectix"[..]), (512, b"QFI\xfb"), (4 * MIB - 520, b"conectix")] {
        put(&place, at, bytes);
        place.ok(&["info", "disk"]);
    }
    fs::write(place.path("short"), [1; 512]).unwrap();
    place.ok(&["info", "short"]);
}

#[test]
fn names_of_other_formats_are_refused_for_old_and_new_images() {
    let place = Place::new();
    place.pattern("a.img", MIB, &[(0, 4096)]);
    for name in ["a.vmdk", "a.VDI", "a.vhdx", "a.qed"] {
        let text = place.fails(2, &["convert", "a.img", name]);
        assert!(text.contains(&format!("raw:{name}")), "{text}");
        place.fails(2, &["create", name, "1M"]);
        place.ok(&["convert", "a.img", "--to", "raw", name]);
        place.fails(2, &["info", name]);
        place.ok(&["info", &format!("raw:{name}")]);
        fs::remove_file(place.path(name)).unwrap();
    }
}
