//! `ferrite image` on chains, damage and interruptions.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use ferrite_disk::{Disk, ImageName, OpenOptions};
use rustix::process::{Pid, Signal, kill_process};

use crate::images::{self, MIB, Place, json, qemu_img};

/// Overwrites a part of a file, as a guest would.
fn change(place: &Place, name: &str, at: u64, byte: u8) {
    let mut file = File::options().write(true).open(place.path(name)).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte; 4096]).unwrap();
}

/// Makes `NAME.img` a VHD on `parent.vhd`, with the differing data only.
fn child_with(place: &Place, child: &str, parent: &str, ranges: &[(u64, u64)]) {
    place.ok(&["clone", parent, child]);
    place.write(child, ranges);
}

#[test]
fn a_child_is_merged_and_its_parent_takes_its_name() {
    let place = Place::new();
    place.pattern("base.img", 16 * MIB, &[(0, MIB), (8 * MIB, MIB)]);
    place.ok(&["convert", "base.img", "disk.vhd"]);
    place.ok(&["snapshot", "disk.vhd", "base.vhd"]);
    child_with(&place, "grandchild.vhd", "disk.vhd", &[]);
    let before = json(&place.ok(&["info", "disk.vhd", "--json"]));
    let text = place.ok(&["coalesce", "disk.vhd"]);
    assert!(text.contains("base.vhd is gone"), "{text}");
    place.ok(&["compare", "base.img", "disk.vhd"]);
    place.ok(&["compare", "base.img", "grandchild.vhd"]);
    let after = json(&place.ok(&["info", "disk.vhd", "--json"]));
    assert_eq!(after["chain"].as_array().unwrap().len(), 1);
    assert_eq!(after["chain"][0]["uuid"], before["chain"][0]["uuid"]);
    assert!(!fs::exists(place.path("base.vhd")).unwrap());
    place.ok(&["check", "disk.vhd"]);
    place.ok(&["check", "grandchild.vhd", "--chain"]);
}

#[test]
fn a_merge_brings_data_to_the_parent_and_grows_it() {
    let place = Place::new();
    place.pattern("a.img", 16 * MIB, &[(0, 3 * MIB), (9 * MIB, MIB)]);
    place.ok(&["convert", "a.img", "base.vhd"]);
    place.ok(&["create", "--parent", "base.vhd", "disk.vhd", "24M"]);
    place.write("disk.vhd", &[(MIB, 8192), (5 * MIB, 2 * MIB), (23 * MIB, 4096)]);
    place.ok(&["convert", "disk.vhd", "expected.img"]);
    place.ok(&["coalesce", "disk.vhd"]);
    place.ok(&["compare", "disk.vhd", "expected.img"]);
    let info = json(&place.ok(&["info", "disk.vhd", "--json"]));
    assert_eq!(info["virtual_bytes"], 24 * MIB);
    assert_eq!(info["chain"].as_array().unwrap().len(), 1);
    place.ok(&["check", "disk.vhd"]);
}

#[test]
fn a_parent_with_other_children_is_not_changed_without_force() {
    let place = Place::new();
    place.ok(&["create", "base.vhd", "8M"]);
    child_with(&place, "one.vhd", "base.vhd", &[(0, 4096)]);
    child_with(&place, "two.vhd", "base.vhd", &[]);
    let before = fs::read(place.path("base.vhd")).unwrap();
    let text = place.fails(1, &["coalesce", "one.vhd"]);
    assert!(text.contains("two.vhd has the same parent") && text.contains("destroyed"), "{text}");
    assert_eq!(fs::read(place.path("base.vhd")).unwrap(), before);
    place.ok(&["coalesce", "one.vhd", "--force"]);
    let text = place.fails(1, &["info", "two.vhd"]);
    assert!(text.contains("parent"), "{text}");
    let text = place.fails(1, &["check", "two.vhd"]);
    assert!(text.contains("its parent"), "{text}");
}

#[test]
fn a_sibling_that_names_the_parent_as_it_was_called_before_is_not_destroyed() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.ok(&["convert", "a.img", "base.qcow2"]);
    child_with(&place, "one.qcow2", "base.qcow2", &[(0, 4096)]);
    child_with(&place, "two.qcow2", "base.qcow2", &[]);
    fs::rename(place.path("base.qcow2"), place.path("renamed.qcow2")).unwrap();
    // Its next writer is warned before the mode is changed.
    let name = ImageName::parse(&place.path("renamed.qcow2")).unwrap();
    let text = Disk::open_image(&name, &OpenOptions::default()).err().unwrap().to_string();
    assert!(text.contains("two.qcow2") && !text.contains("chmod"), "{text}");
    place.ok(&["rebase", "-u", "one.qcow2", "-b", "renamed.qcow2"]);
    let before = fs::read(place.path("renamed.qcow2")).unwrap();
    let text = place.fails(1, &["coalesce", "one.qcow2"]);
    assert!(text.contains("two.qcow2 has lost its parent") && text.contains("rebase -u"), "{text}");
    assert_eq!(fs::read(place.path("renamed.qcow2")).unwrap(), before);
    // Rebased to the new name it is a sibling like any other.
    place.ok(&["rebase", "-u", "two.qcow2", "-b", "renamed.qcow2"]);
    let text = place.fails(1, &["coalesce", "one.qcow2"]);
    assert!(text.contains("two.qcow2 has the same parent"), "{text}");
    place.ok(&["compare", "a.img", "two.qcow2"]);
    fs::remove_file(place.path("two.qcow2")).unwrap();
    place.ok(&["coalesce", "one.qcow2"]);
}

#[test]
fn a_repair_beside_damage_says_that_it_has_done_nothing() {
    let place = Place::new();
    place.pattern("a.img", 24 * MIB, &[(0, 24 * MIB)]);
    place.ok(&["convert", "a.img", "a.vhd"]);
    let file = File::options().write(true).open(place.path("a.vhd")).unwrap();
    let bytes = file.metadata().unwrap().len() - 3 * MIB;
    file.set_len(bytes).unwrap();
    let before = fs::read(place.path("a.vhd")).unwrap();
    let output = place.command(&["repair", "a.vhd", "--force"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(5), "{text}");
    assert!(text.starts_with("nothing was mended"), "{text}");
    assert!(fs::read(place.path("a.vhd")).unwrap() == before);
}

#[test]
fn a_child_that_describes_its_parent_in_json_keeps_it_from_being_written() {
    let place = Place::new();
    place.ok(&["create", "base.qcow2", "8M"]);
    let described = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"base.qcow2"}}"#;
    let child = place.path("child.qcow2");
    if qemu_img(&["create", "-u", "-f", "qcow2", "-F", "qcow2", "-b", described, &child, "8M"])
        .is_none()
    {
        return;
    }
    let name = ImageName::parse(&place.path("base.qcow2")).unwrap();
    let text = Disk::open_image(&name, &OpenOptions::default()).err().unwrap().to_string();
    assert!(text.contains("child.qcow2 stands on it"), "{text}");
}

#[test]
fn what_cannot_be_merged_says_what_to_do() {
    let place = Place::new();
    place.pattern("raw.img", 4 * MIB, &[(0, MIB)]);
    place.ok(&["clone", "raw.img", "on-raw.vhd"]);
    let text = place.fails(1, &["coalesce", "on-raw.vhd"]);
    assert!(text.contains("could not take its name") && text.contains("convert"), "{text}");
    place.ok(&["create", "single.vhd", "4M"]);
    let text = place.fails(1, &["coalesce", "single.vhd"]);
    assert!(text.contains("it has no parent"), "{text}");
}

#[test]
fn what_cannot_be_mended_is_not_sent_to_repair() {
    let place = Place::new();
    place.ok(&["create", "fx.vhd", "2M", "--fixed"]);
    let file = File::options().write(true).open(place.path("fx.vhd")).unwrap();
    file.set_len(2 * MIB).unwrap();
    let said = place.fails(2, &["check", "fx.vhd"]);
    let help = "help: nothing in it can be repaired: restore it from a backup; if it was a fixed VHD, raw:fx.vhd reads";
    assert!(said.contains(help), "{said}");
    // The advice is good.
    place.ok(&["info", "raw:fx.vhd"]);
}

#[test]
fn a_damaged_footer_is_found_and_mended_with_force() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
    place.ok(&["convert", "a.img", "a.vhd"]);
    assert_eq!(place.ok(&["check", "a.vhd"]), "a.vhd: in order\n");
    assert_eq!(place.ok(&["repair", "a.vhd"]), "a.vhd: in order\n");
    let end = fs::metadata(place.path("a.vhd")).unwrap().len() - 512;
    let mut file = File::options().read(true).write(true).open(place.path("a.vhd")).unwrap();
    // Bytes of the random UUID: no other bytes have the same sum, and the footer's checksum is a sum.
    let damage = [0xff; 6];
    file.seek(SeekFrom::Start(end + 70)).unwrap();
    file.write_all(&damage).unwrap();
    let report = json(&place.ok(&["check", "a.vhd", "--json"]));
    assert_eq!(report["usable"], true);
    assert_eq!(report["images"][0]["findings"][0]["kind"], "end-footer");
    assert_eq!(report["images"][0]["findings"][0]["offset_bytes"], end);
    let text = place.fails(1, &["repair", "a.vhd"]);
    assert!(text.contains("--force does it"), "{text}");
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(end + 70)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes.starts_with(&damage), "it was only asked");
    let text = place.ok(&["repair", "a.vhd", "--force"]);
    assert!(text.contains("mended: 1") && text.contains("in order"), "{text}");
    place.ok(&["compare", "a.img", "a.vhd"]);
}

#[test]
fn damage_that_cannot_be_mended_is_told_by_the_exit_code() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
    place.ok(&["convert", "a.img", "a.vhd"]);
    // The first entry of the block table: far past the end of the file.
    let mut file = File::options().write(true).open(place.path("a.vhd")).unwrap();
    file.seek(SeekFrom::Start(1536)).unwrap();
    file.write_all(&[0x70, 0, 0, 0]).unwrap();
    let output = place.image(&["check", "a.vhd"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("at byte 1536") && text.contains("(damage)"), "{text}");
    let text = place.fails(5, &["repair", "a.vhd", "--force"]);
    assert!(text.contains("nothing is known to mend"), "{text}");
    for command in [&["info", "a.vhd"][..], &["map", "a.vhd"], &["convert", "a.vhd", "b.img"]] {
        place.fails(5, command);
    }
    place.has_no_leftovers();
}

#[test]
fn a_vhd_grows_and_shrinks_only_where_nothing_is() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB), (7 * MIB, MIB)]);
    place.ok(&["convert", "a.img", "a.vhd"]);
    place.ok(&["resize", "a.vhd", "5G"]);
    place.ok(&["check", "a.vhd"]);
    place.ok(&["compare", "a.img", "a.vhd"]);
    let text = place.fails(1, &["resize", "a.vhd", "1G"]);
    assert!(text.contains("4 GiB at its end would be gone"), "{text}");
    place.ok(&["resize", "a.vhd", "1G", "--force"]);
    let text = place.fails(1, &["resize", "a.vhd", "4M", "--force"]);
    assert!(text.contains("there is data at byte"), "{text}");
    place.ok(&["compare", "a.img", "a.vhd"]);
    place.ok(&["clone", "a.vhd", "b.vhd"]);
    let text = place.fails(1, &["resize", "a.vhd", "2G"]);
    assert!(text.contains("it is read-only by its mode"), "{text}");
}

#[test]
fn a_conversion_that_was_interrupted_goes_on() {
    let place = Place::new();
    place.pattern("a.img", 64 * MIB, &[(0, 40 * MIB), (60 * MIB, MIB)]);
    place.ok(&["convert", "a.img", "whole.vhd"]);
    let meta = fs::metadata(place.path("a.img")).unwrap();
    // The files of an interrupted run: the image up to some point, and the state.
    place.ok(&["create", "part.vhd", "64M"]);
    place.write("part.vhd", &[(0, 16 * MIB)]);
    fs::rename(place.path("part.vhd"), place.path("b.vhd.partial")).unwrap();
    let note = images::note(&place.path("a.img"), &meta, "vhd", 64 * MIB, 16 * MIB);
    fs::write(place.path("b.vhd.partial.json"), note.to_string()).unwrap();
    let text = place.fails(1, &["convert", "a.img", "b.vhd"]);
    assert!(text.contains("interrupted") && text.contains("--resume"), "{text}");
    place.ok(&["convert", "a.img", "b.vhd", "--resume"]);
    place.ok(&["compare", "a.img", "b.vhd"]);
    place.has_no_leftovers();
}

/// Begins to convert a file of so many MiB to `b.vhd`, and interrupts it with a signal as soon as some of it exists.
/// Returns the output; `None`: it was done before.
fn interrupt(place: &Place, mib: u64, signal: Signal) -> Option<String> {
    let mut source = fs::File::create(place.path("a.img")).unwrap();
    let mut piece = vec![0; MIB as usize];
    for n in 0..mib {
        piece.fill(n as u8 | 1);
        source.write_all(&piece).unwrap();
    }
    let mut convert = place.command(&["convert", "a.img", "b.vhd"]);
    let mut convert = convert.stderr(Stdio::piped()).spawn().unwrap();
    let some = || {
        let partial = fs::metadata(place.path("b.vhd.partial"));
        partial.is_ok_and(|meta| meta.blocks() * 512 > 8 * MIB)
    };
    while !some() && convert.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    if convert.try_wait().unwrap().is_none() {
        kill_process(Pid::from_child(&convert), signal).unwrap();
    }
    let output = convert.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code() == Some(130)).then_some(text)
}

#[test]
fn a_conversion_that_is_interrupted_by_its_user_goes_on() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        goes_on_after(signal);
    }
}

fn goes_on_after(signal: Signal) {
    let (place, text) = [128, 512, 2048]
        .into_iter()
        .find_map(|mib| {
            let place = Place::new();
            interrupt(&place, mib, signal).map(|text| (place, text))
        })
        .expect("copying 2 GiB takes long enough to be interrupted");
    assert!(text.contains("interrupted") && text.contains("--resume"), "{text}");
    let note = json(&fs::read_to_string(place.path("b.vhd.partial.json")).unwrap());
    let done = note["done_bytes"].as_u64().unwrap();
    assert!(0 < done && done < note["virtual_bytes"].as_u64().unwrap(), "{note}");
    assert!(!fs::exists(place.path("b.vhd")).unwrap());
    place.ok(&["convert", "a.img", "b.vhd", "--resume"]);
    place.ok(&["compare", "a.img", "b.vhd"]);
    place.has_no_leftovers();
}

#[test]
fn a_conversion_of_something_else_does_not_go_on() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
    let meta = fs::metadata(place.path("a.img")).unwrap();
    place.ok(&["create", "b.vhd.partial.vhd", "8M"]);
    fs::rename(place.path("b.vhd.partial.vhd"), place.path("b.vhd.partial")).unwrap();
    let note = images::note(&place.path("a.img"), &meta, "vhd", 8 * MIB, MIB);
    fs::write(place.path("b.vhd.partial.json"), note.to_string()).unwrap();
    change(&place, "a.img", 0, 7);
    let text = place.fails(1, &["convert", "a.img", "b.vhd", "--resume"]);
    assert!(text.contains("the source has changed since"), "{text}");
    place.ok(&["convert", "a.img", "b.vhd", "--force"]);
    place.ok(&["compare", "a.img", "b.vhd"]);
}

#[test]
fn a_parents_mode_and_a_leafs_mode_stay_what_they_are() {
    let place = Place::new();
    place.ok(&["create", "disk.vhd", "4M"]);
    place.ok(&["snapshot", "disk.vhd", "one.vhd"]);
    let mode = |name| fs::metadata(place.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("disk.vhd"), mode("one.vhd")), (0o640, 0o440));
    place.ok(&["coalesce", "disk.vhd"]);
    assert_eq!(mode("disk.vhd"), 0o640);
}

#[test]
fn a_merge_that_names_its_parent_never_merges_the_next_one() {
    for extension in ["vhd", "qcow2"] {
        let place = Place::new();
        let [base, middle, leaf] = ["base", "middle", "leaf"].map(|n| format!("{n}.{extension}"));
        place.ok(&["create", &base, "4M"]);
        place.ok(&["clone", &base, &middle]);
        place.ok(&["clone", &middle, &leaf]);
        let text = place.fails(1, &["coalesce", &leaf, "--into", &base]);
        assert!(text.contains("it stands on") && text.contains(&middle), "{text}");
        let merge = ["coalesce", &leaf, "--into", &middle];
        place.ok(&merge);
        let after = fs::read(place.path(&leaf)).unwrap();
        // Run again by a user who missed the first run's success, or with a wrong name.
        for into in [&middle, &format!("midle.{extension}")] {
            let text = place.fails(3, &["coalesce", &leaf, "--into", into]);
            assert!(text.contains("does not stand on") && text.contains("merged before"), "{text}");
        }
        assert_eq!(fs::read(place.path(&leaf)).unwrap(), after);
        assert!(fs::exists(place.path(&base)).unwrap());
    }
}

/// The option that a message tells the user to add, with its value.
fn told(text: &str) -> [String; 2] {
    let mut words = text.split_whitespace().skip_while(|word| *word != "--parents");
    [(); 2].map(|()| words.next().unwrap_or_default().trim_end_matches(',').to_owned())
}

#[test]
fn a_clone_in_another_folder_says_what_it_takes_to_use_it() {
    for extension in ["vhd", "qcow2"] {
        let place = Place::new();
        for folder in ["templates", "guests"] {
            fs::create_dir(place.path(folder)).unwrap();
        }
        let [template, guest] =
            [format!("templates/a.{extension}"), format!("guests/b.{extension}")];
        place.ok(&["create", &template, "4M"]);
        let option = told(&place.ok(&["clone", &template, &guest]));
        assert_eq!(option[0], "--parents");
        let option: [&str; 2] = [&option[0], &option[1]];
        let copy = format!("guests/copy.{extension}");
        for command in [
            &["info", &guest][..],
            &["map", &guest],
            &["du", &guest],
            &["check", "--chain", &guest],
            &["compare", &guest, &template],
            &["convert", &guest, &copy],
            &["coalesce", &guest],
            &["resize", &guest, "8M"],
            &["snapshot", &guest, &copy],
            &["clone", &guest, &copy],
        ] {
            let output = place.image(command);
            let text = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success(), "{command:?}");
            assert!(text.contains(&template) && text.contains("--parents"), "{command:?}: {text}");
            assert_eq!(told(&text)[1], option[1], "{text}");
        }
        // The image itself is intact, and its parent was not checked.
        let text = place.ok(&["check", &guest]);
        assert!(text.contains("not looked at") && text.contains("--parents"), "{text}");
        place.ok(&[&["info", &guest][..], &option].concat());
        place.ok(&[&option[..], &["check", "--chain", &guest]].concat());
        place.ok(&["info", &guest, "--parents", "any"]);
        // Or once for all, in the host's list.
        let list = place.path("parents");
        fs::write(&list, format!("# templates\n{}\n", option[1])).unwrap();
        let mut listed = place.command(&["info", &guest]);
        assert!(listed.env("FERRITE_PARENTS_FILE", &list).status().unwrap().success());
    }
}
