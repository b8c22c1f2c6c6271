//! Images under names without a format.

mod images;

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use ferrite_testkit::is_paired;

use images::{MIB, Place};

/// The magic bytes of kinds of files with their offsets, a word that the error has, and the advice of it.
const OTHERS: [(u64, &[u8], &str, &str); 18] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow image of version 1", "qemu-img convert"),
    (0, b"QFI\xfb\0\0\0\x03", "qcow2", "say qcow2:"),
    (0, b"conectix", "a VHD", "say vhd:"),
    (0, b"vhdxfile", "VHDX", "qemu-img convert"),
    (0, b"KDMV", "VMDK", "qemu-img convert"),
    (0, b"# Disk DescriptorFile", "VMDK", "qemu-img convert"),
    (0, b"QED\0", "QED", "qemu-img convert"),
    (0, b"WithoutFreeSpace", "Parallels", "qemu-img convert"),
    (0, b"WithouFreSpacExt", "Parallels", "qemu-img convert"),
    (64, b"\x7f\x10\xda\xbe", "VDI", "qemu-img convert"),
    (0, b"FERSTORE", "a store", "say store:"),
    (0, b"\x1f\x8b\x08\x08", "gzip", "gunzip"),
    (0, b"\xfd7zXZ\0", "xz", "unxz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (0, b"BZh91AY&SY", "bzip2", "bunzip2"),
    (0, b"\x04\x22\x4d\x18", "lz4", "unlz4"),
    (0, b"PK\x03\x04", "ZIP", "unzip"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z", "7z x"),
];

/// A fixed VHD has its magic bytes at its end only; old programs have left out the last byte.
const AT_THE_END: [(u64, &[u8], &str, &str); 2] = [
    (4 * MIB - 512, b"conectix", "a VHD", "say vhd:"),
    (4 * MIB - 511, b"conectix", "a VHD", "say vhd:"),
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
    for (kind, (at, bytes, ..)) in OTHERS.into_iter().chain(AT_THE_END).enumerate() {
        put(&place, at, bytes);
        let before = fs::read(place.path("disk")).unwrap();
        let commands = [
            &["info", "disk"][..],
            &["map", "disk"],
            &["du", "disk"],
            &["compare", "plain.img", "disk"],
            &["check", "disk"],
            &["convert", "disk", "copy.vhd"],
            &["clone", "disk", "child.qcow2"],
            &["create", "--parent", "disk", "child.vhd"],
            &["resize", "disk", "8M"],
        ];
        for (_, command) in commands.iter().enumerate().filter(|(i, _)| is_paired(kind, *i, 4)) {
            let output = place.image(command);
            let text = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success(), "{command:?}, {bytes:?}");
            assert!(text.contains("raw:disk"), "{command:?}: {text}");
        }
        assert!(fs::read(place.path("disk")).unwrap() == before);
        if !is_paired(kind, 0, 4) {
            continue;
        }
        place.ok(&["info", "raw:disk"]);
        place.ok(&["convert", "--from", "raw", "--to", "raw", "disk", "copy"]);
        place.ok(&["create", "disk", "4M", "--force"]);
        fs::remove_file(place.path("copy")).unwrap();
    }
}

/// An image under a wrong name is whole: no message may advise to restore a backup.
#[test]
fn what_is_named_another_format_is_told_what_it_looks_like() {
    let place = Place::new();
    for format in ["vhd", "qcow2"] {
        // A qcow image of any version is one, and opening it says more.
        let own: &[u8] = if format == "qcow2" { b"QFI" } else { b"conectix" };
        let others = OTHERS.into_iter().chain(AT_THE_END);
        let others = others.filter(|it| !it.1.starts_with(own)).enumerate();
        for (kind, (at, bytes, word, advice)) in others {
            put(&place, at, bytes);
            let name = format!("disk.{format}");
            fs::rename(place.path("disk"), place.path(&name)).unwrap();
            let commands = [
                &["info", &name][..],
                &["check", &name],
                &["repair", &name],
                &["repair", "--force", &name],
                &["convert", &name, "copy.img"],
                &["resize", &name, "8M"],
            ];
            let commands = commands.iter().enumerate().filter(|(i, _)| is_paired(kind, *i, 3));
            for (_, command) in commands {
                let text = place.fails(1, command);
                let is_told = text.contains(&format!("named {format}, and looks like "));
                assert!(is_told && text.contains(word), "{command:?}: {text}");
                assert!(text.contains(advice) && !text.contains("damaged"), "{command:?}: {text}");
            }
        }
    }
}

/// A file that has no known format may be a damaged image.
#[test]
fn what_looks_like_nothing_is_damaged_under_the_name_of_a_format() {
    let place = Place::new();
    for name in ["disk.vhd", "disk.qcow2"] {
        place.pattern(name, 4 * MIB, &[(0, 4 * MIB)]);
        place.fails(5, &["info", name]);
        place.fails(2, &["check", name]);
    }
}

/// The first sector of a fixed VHD belongs to the disk: the guest may write anything there.
#[test]
fn a_fixed_vhd_is_one_whatever_its_guest_has_written() {
    let place = Place::new();
    let others = OTHERS.into_iter().filter(|(_, bytes, ..)| *bytes != b"conectix");
    for (kind, (at, bytes, ..)) in others.enumerate() {
        place.ok(&["create", "disk.vhd", "4M", "--fixed", "--force"]);
        let file = File::options().write(true).open(place.path("disk.vhd")).unwrap();
        file.write_all_at(bytes, at).unwrap();
        place.ok(&["check", "disk.vhd"]);
        if !is_paired(kind, 0, 4) {
            continue;
        }
        let copy = place.ok(&["convert", "disk.vhd", "raw:copy.img", "--force"]);
        assert!(copy.contains("4 MiB"), "{copy}");
    }
}

/// A fixed VHD that is larger than what XAPI and QEMU read, with the footer that Azure's has.
#[test]
fn an_image_that_is_only_not_supported_is_not_called_damaged() {
    let place = Place::new();
    place.ok(&["create", "a.vhd", "4M", "--fixed"]);
    let file = File::options().read(true).write(true).open(place.path("a.vhd")).unwrap();
    let mut footer = [0; 512];
    file.read_exact_at(&mut footer, 4 * MIB).unwrap();
    let size: u64 = 4 << 40;
    footer[40..48].copy_from_slice(&size.to_be_bytes());
    footer[48..56].copy_from_slice(&size.to_be_bytes());
    footer[64..68].fill(0);
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    file.write_all_at(&[1; 512], 0).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(&footer, size).unwrap();
    let text = place.fails(1, &["check", "a.vhd"]);
    assert!(text.contains("not supported") && !text.contains("damaged"), "{text}");
    for command in [&["info", "a.vhd"][..], &["convert", "a.vhd", "b.img"], &["repair", "a.vhd"]] {
        let text = place.fails(1, command);
        let said = text.contains("not supported");
        assert!(said && !text.contains("backup"), "{command:?}: {text}");
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
