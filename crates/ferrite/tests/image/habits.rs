//! `ferrite image` for users of qemu-img, on images in use, on chains with holes, and under names that are not text.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};

use crate::images::{MIB, Place, json, listening, qemu_img};

#[test]
fn an_image_in_use_is_looked_at_if_that_is_asked_for() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
    for name in ["a.img", "a.vhd", "a.qcow2"] {
        if name != "a.img" {
            place.ok(&["convert", "a.img", name]);
        }
        let used = Disk::open(&place.path(name), &OpenOptions::default()).unwrap();
        for command in ["info", "map", "du", "check"] {
            let busy = if command == "check" { 1 } else { 4 };
            let text = place.fails(busy, &[command, name]);
            assert!(text.contains("with -U"), "{text}");
            let output = place.image(&[command, "-U", name]);
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(0), "{command} {name}: {text}");
            assert!(text.starts_with("note: ") && text.contains("stale"), "{text}");
            assert!(!output.stdout.is_empty());
        }
        // Reading without a lock does not block the owner, and other commands stay locked out.
        place.fails(4, &["resize", name, "16M"]);
        drop(used);
        // A child that another test has just forked has a copy of it until it executes its program.
        let end = Instant::now() + Duration::from_secs(30);
        while place.image(&["info", name]).status.code() == Some(4) {
            assert!(Instant::now() < end, "{name} stays locked");
        }
        place.ok(&["info", name]);
    }
}

#[test]
fn what_can_be_seen_of_a_chain_without_its_parent_is_shown() {
    for extension in ["vhd", "qcow2"] {
        let place = Place::new();
        let [base, middle, leaf] = ["base", "middle", "leaf"].map(|n| format!("{n}.{extension}"));
        place.ok(&["create", &base, "4M"]);
        place.ok(&["clone", &base, &middle]);
        place.ok(&["clone", &middle, &leaf]);
        fs::remove_file(place.path(&base)).unwrap();
        let output = place.image(&["info", "--json", &leaf]);
        assert_eq!(output.status.code(), Some(1));
        let info = json(&String::from_utf8(output.stdout).unwrap());
        assert_eq!(info["chain"].as_array().unwrap().len(), 2, "{info}");
        assert!(info["incomplete"].as_str().unwrap().contains(&base), "{info}");
        let output = place.image(&["info", &leaf]);
        let [said, why] = [output.stdout, output.stderr].map(|t| String::from_utf8(t).unwrap());
        assert!(said.contains(&middle) && said.contains("the chain ends here"), "{said}");
        assert!(why.starts_with("ferrite: ") && why.contains("\nhelp: "), "{why}");
        place.fails(1, &["map", &leaf]);
    }
}

#[test]
fn the_format_may_be_said_by_an_option() {
    let place = Place::new();
    place.pattern("a.vhd.raw", 4 * MIB, &[(0, MIB)]);
    fs::rename(place.path("a.vhd.raw"), place.path("a.vhd")).unwrap();
    place.ok(&["convert", "-p", "-f", "raw", "-O", "qcow2", "a.vhd", "b.disk"]);
    let info = json(&place.ok(&["info", "-f", "qcow2", "--output=json", "b.disk"]));
    assert_eq!(
        (&info["virtual_bytes"], &info["chain"][0]["format"]),
        (&(4 * MIB).into(), &"qcow2".into())
    );
    place.ok(&["compare", "-f", "raw", "-F", "qcow2", "a.vhd", "b.disk"]);
    place.ok(&["check", "-f", "qcow2", "b.disk"]);
    place.ok(&["create", "-f", "vpc", "c.disk", "1.5M"]);
    let info = json(&place.ok(&["info", "vhd:c.disk", "--output", "json"]));
    assert_eq!(info["virtual_bytes"], 3 * MIB / 2);
    place.ok(&["resize", "-f", "vhd", "c.disk", "+1.5M"]);
    let info = json(&place.ok(&["info", "vhd:c.disk", "--json"]));
    assert_eq!(info["virtual_bytes"], 3 * MIB);
    let text = place.fails(2, &["resize", "-f", "vhd", "c.disk", "+8191P"]);
    assert!(text.contains("cannot resize c.disk"), "{text}");
}

#[test]
fn an_old_qcow2_image_is_amended_as_qemu_img_does_it() {
    let place = Place::new();
    let path = place.path("old.qcow2");
    let made = ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &path, "8M"];
    if qemu_img(&made).is_none() {
        return;
    }
    place.write("old.qcow2", &[(MIB, MIB)]);
    place.ok(&["convert", "old.qcow2", "before.img"]);
    let kind = || json(&place.ok(&["info", "old.qcow2", "--json"]))["chain"][0]["kind"].clone();
    assert_eq!(kind(), "version 2");
    let text = place.image(&["amend", "-o", "compat=0.10", "old.qcow2"]);
    assert_eq!(text.status.code(), Some(2));
    place.ok(&["amend", "-f", "qcow2", "-o", "compat=1.1", "old.qcow2"]);
    assert_eq!(kind(), "version 3");
    let text = place.ok(&["amend", "-o", "compat=v3", "old.qcow2"]);
    assert!(text.contains("version 3 before"), "{text}");
    assert!(qemu_img(&["check", &path]).unwrap().contains("No errors"));
    place.ok(&["compare", "old.qcow2", "before.img"]);
    place.fails(1, &["amend", "-o", "compat=1.1", "before.img"]);
    place.ok(&["clone", "old.qcow2", "child.qcow2"]);
    place.fails(1, &["amend", "-o", "compat=1.1", "old.qcow2"]);
}

#[test]
fn disks_of_different_sizes_differ_if_they_are_compared_strictly() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.pattern("b.img", 6 * MIB, &[(0, MIB)]);
    place.ok(&["compare", "a.img", "b.img"]);
    let text = place.fails(1, &["compare", "-s", "b.img", "a.img"]);
    assert!(text.contains(&format!("at byte {}\n", 4 * MIB)), "{text}");
    place.ok(&["compare", "--strict", "a.img", "a.img"]);
}

/// A name with a byte that is not UTF-8.
fn odd(name: &str) -> OsString {
    let bytes = name.bytes().map(|byte| if byte == b'?' { 0xff } else { byte });
    OsStr::from_bytes(&bytes.collect::<Vec<u8>>()).to_owned()
}

#[test]
fn names_that_are_no_utf8_are_names_for_every_command() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let mut command = listening();
        command.arg("image").args(args.iter().map(|arg| odd(arg)));
        let output = command.current_dir(place.path(".")).env_remove("RUST_LOG").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {text}");
    };
    run(&["create", "a?.vhd", "4M"]);
    run(&["info", "a?.vhd", "--json"]);
    run(&["convert", "a?.vhd", "vhd:b?"]);
    run(&["compare", "a?.vhd", "vhd:b?"]);
    run(&["resize", "a?.vhd", "+4M"]);
    run(&["map", "a?.vhd"]);
    run(&["du", "a?.vhd"]);
    run(&["check", "a?.vhd"]);
    run(&["repair", "a?.vhd"]);
    assert!(File::open(Path::new(&place.path(".")).join(odd("b?"))).is_ok());
    let output = listening()
        .args([OsStr::new("serve"), &odd("no?.img"), OsStr::new("--xen")])
        .arg("32000/xvda")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn the_program_takes_json_and_quiet_before_and_behind_its_commands() {
    let place = Place::new();
    let run = |words: &[&str]| {
        let output = listening().args(words).current_dir(place.path(".")).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|t| String::from_utf8(t).unwrap());
        (output.status.code(), out, err)
    };
    let quiet = (Some(0), String::new(), String::new());
    assert_eq!(run(&["-q", "image", "create", "a.vhd", "4M"]), quiet);
    assert_eq!(run(&["image", "-q", "create", "b.vhd", "4M"]), quiet);
    assert_eq!(run(&["image", "compare", "a.vhd", "b.vhd", "--quiet"]), quiet);
    assert_eq!(run(&["-q", "store", "create", "s.store", "--size", "64M"]), quiet);
    for words in [
        &["--json", "store", "list", "s.store"][..],
        &["store", "--json", "list", "s.store"],
        &["store", "list", "s.store", "--json"],
        &["--json", "image", "info", "a.vhd"],
        &["image", "info", "--json", "a.vhd"],
    ] {
        let (code, out, _) = run(words);
        assert!(code == Some(0) && json(&out).is_object(), "{words:?}: {out}");
    }
    // Errors are one object then.
    for (code, words) in [
        (3, &["--json", "image", "info", "none.vhd"][..]),
        (3, &["image", "info", "none.vhd", "--output=json"]),
        (3, &["store", "list", "--json", "none"]),
        (2, &["--json", "image", "frobnicate"]),
        (1, &["image", "check", "--json", "--frob", "a.vhd"]),
    ] {
        let (ended, out, err) = run(words);
        assert_eq!((ended, out.as_str()), (Some(code), ""), "{words:?}: {err}");
        let error = json(&err);
        assert_eq!(error["code"], code, "{words:?}: {err}");
        for key in ["what", "why", "help"] {
            assert!(error[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {err}");
        }
    }
}

#[test]
fn names_and_sizes_that_no_image_can_have_are_refused_with_what_to_type() {
    let place = Place::new();
    let text = place.fails(2, &["create", "c.vmdk", "1M"]);
    assert!(text.starts_with("ferrite: cannot make c.vmdk: VMDK is not supported"), "{text}");
    assert!(text.contains("raw:c.vmdk"), "{text}");
    for words in [&["create", "", "1G"][..], &["info", ""], &["convert", "", "a.vhd"]] {
        let text = place.fails(2, words);
        assert!(text.contains("no name was given"), "{text}");
    }
    for words in [
        &["create", "b.vhd", "-1"][..],
        &["create", "b.vhd", "-1G"],
        &["create", "b.vhd", "--block", "2M", "-5.5M"],
    ] {
        let output = place.image(words);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text.contains("a size is not negative") && !text.contains("tip:"), "{text}");
    }
    place.ok(&["create", "big.vhd", "2040G"]);
    assert!(place.ok(&["info", "big.vhd"]).starts_with("disk of 1.99 TiB ("));
}

#[test]
fn a_disk_that_its_file_system_cannot_hold_names_that_limit() {
    let place = Place::new();
    let mut command = std::process::Command::new("prlimit");
    command.args(["--fsize=1048576", "env", "--ignore-signal=XFSZ"]);
    command.arg(env!("CARGO_BIN_EXE_ferrite")).args(["image", "create", "b.img", "1G"]);
    let output = command.current_dir(place.path(".")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("16 TiB") && !text.contains("dmesg"), "{text}");
    place.has_no_leftovers();
}
