//! Refused operations of `ferrite image` leave everything unchanged, and report the reason.

use std::ffi::OsStr;
use std::fs;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::images::{MIB, Place, json, qemu_img};

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
        &["resize", "base.qcow2", "65T"],
        &["resize", "base.vhd", "3000T"],
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

/// The name of a qcow2's parent must be text.
#[test]
fn a_snapshot_under_a_name_that_the_format_does_not_have_leaves_one_name() {
    let place = Place::new();
    place.ok(&["create", "a.qcow2", "4M"]);
    let mut command = place.command(&["snapshot", "a.qcow2"]);
    let output = command.arg(OsStr::from_bytes(b"par\xff.qcow2")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names(&place), ["a.qcow2"]);
}

#[test]
fn a_disk_without_its_parent_is_not_checked_rather_than_damaged() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        let [base, leaf] = ["base", "leaf"].map(|name| format!("{name}.{format}"));
        place.ok(&["create", &base, "4M"]);
        place.ok(&["clone", &base, &leaf]);
        fs::remove_file(place.path(&base)).unwrap();
        let text = place.fails(1, &["check", &leaf]);
        assert!(text.contains("parent") && !text.contains("damaged"), "{text}");
        let journals = || place.ok(&["journal", "list"]).matches(&place.path(&leaf)).count();
        assert_eq!(journals(), 0);
        for command in
            [&["snapshot", &leaf, &format!("old.{format}")][..], &["resize", &leaf, "8M"]]
        {
            place.fails(1, command);
            assert_eq!(journals(), 0, "{command:?} has left a journal");
        }
    }
}

#[test]
fn what_is_no_image_is_damaged_whatever_its_name_says() {
    let place = Place::new();
    for name in ["a.vhd", "a.qcow2"] {
        for content in [&b""[..], &[7; 4096]] {
            fs::write(place.path(name), content).unwrap();
            place.fails(5, &["info", name]);
            let output = place.image(&["map", name]);
            assert_eq!((output.status.code(), output.stdout), (Some(5), Vec::new()), "{name}");
        }
    }
}

#[test]
fn a_conversion_that_another_one_is_at_work_on_is_busy() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.pattern("b.img.partial", 4 * MIB, &[(0, MIB)]);
    let file = fs::File::open(place.path("b.img.partial")).unwrap();
    file.lock().unwrap();
    place.fails(4, &["convert", "a.img", "b.img"]);
    // A child of another test has the file open, too, until it executes its program.
    file.unlock().unwrap();
    drop(file);
    let text = place.fails(1, &["convert", "raw:b.img.partial", "b.img", "--force"]);
    assert!(text.contains("is the same file"), "{text}");
    let text = place.fails(1, &["convert", "a.img", "b.img"]);
    assert!(text.contains("interrupted"), "{text}");
    place.ok(&["convert", "a.img", "b.img", "--force"]);
}

#[test]
fn what_is_no_note_of_a_conversion_is_not_removed() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    fs::write(place.path("b.vhd.partial.json"), "precious").unwrap();
    place.fails(1, &["convert", "a.img", "b.vhd"]);
    assert_eq!(fs::read(place.path("b.vhd.partial.json")).unwrap(), b"precious");
    place.ok(&["convert", "a.img", "b.vhd", "--force"]);
    assert_eq!(names(&place), ["a.img", "b.vhd"]);
}

#[test]
fn what_qemu_reads_differently_is_said() {
    let place = Place::new();
    let warns = |args: &[&str]| place.ok(args).contains("QEMU");
    assert!(warns(&["create", "a.vhd", "16M", "--block", "512"]));
    assert!(warns(&["create", "b.vhd", "16M", "--block", "2K"]));
    assert!(!warns(&["create", "c.vhd", "16M", "--block", "4K"]));
    assert!(!warns(&["resize", "c.vhd", "100M"]));
    let theirs = place.path("theirs.vhd");
    if qemu_img(&["create", "-q", "-f", "vpc", &theirs, "40M"]).is_some() {
        assert!(warns(&["resize", "theirs.vhd", "100M"]));
        let info = json(&qemu_img(&["info", "--output=json", &theirs]).unwrap());
        assert!(info["virtual-size"].as_u64().unwrap() < 100 * MIB, "{info}");
    }
}

/// It was shrunk, and cannot grow again: its parent's data would become visible.
#[test]
fn a_disk_that_is_smaller_than_its_parent_is_told_what_is_left() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        let [base, leaf] = ["base", "leaf"].map(|name| format!("{name}.{format}"));
        place.ok(&["create", &base, "64M"]);
        place.ok(&["clone", &base, &leaf]);
        place.ok(&["resize", &leaf, "32M", "--force"]);
        place.ok(&["clone", &base, &format!("other.{format}")]);
        for (code, command) in [
            (1, &["coalesce", &leaf, "--force"][..]),
            (1, &["resize", &leaf, "64M"]),
            (2, &["rebase", "-u", &leaf, "-b", &format!("other.{format}")]),
        ] {
            let text = place.fails(code, command);
            assert!(text.contains("ferrite image convert"), "{command:?}: {text}");
        }
        place.ok(&["convert", &leaf, &format!("all.{format}")]);
    }
}

#[test]
fn a_name_that_is_too_long_is_said_to_be() {
    let place = Place::new();
    place.pattern("a.img", MIB, &[(0, 4096)]);
    let name = |bytes: usize| format!("{}.vhd", "n".repeat(bytes - 4));
    for args in [["create", &name(250), "1M"], ["convert", "a.img", &name(245)]] {
        let text = place.fails(2, &args);
        assert!(text.contains("a name of at most 238 bytes"), "{text}");
        assert_eq!(names(&place), ["a.img"]);
    }
    place.ok(&["convert", "a.img", &name(238)]);
    place.ok(&["create", "--force", &name(238), "1M"]);
    // No list of children can exist beside it.
    fs::rename(place.path(&name(238)), place.path(&name(250))).unwrap();
    place.ok(&["resize", &name(250), "2M"]);
}

#[test]
fn a_format_that_the_name_contradicts_is_refused() {
    let place = Place::new();
    place.ok(&["create", "a.vhd", "4M"]);
    place.fails(2, &["info", "-f", "vhd", "raw:a.vhd"]);
    place.ok(&["info", "-f", "vhd", "vhd:a.vhd"]);
}

/// The list of a parent's children has a line for each, with escapes.
#[test]
fn a_clone_whose_path_has_what_the_list_uses_itself_is_not_lost() {
    for odd in ["D%41", "a%20b", "%0a", "nl\nx", "100%"] {
        let place = Place::new();
        fs::create_dir(place.path("C")).unwrap();
        fs::create_dir(place.path(odd)).unwrap();
        place.ok(&["create", "C/base.vhd", "4M"]);
        place.ok(&["clone", "C/base.vhd", "C/own.vhd"]);
        place.ok(&["clone", "C/base.vhd", &format!("{odd}/vm.vhd")]);
        let text = place.fails(1, &["coalesce", "C/own.vhd"]);
        assert!(text.contains("vm.vhd"), "{odd}: {text}");
    }
}

#[test]
fn a_chain_is_whole_again_when_the_parent_of_its_middle_was_moved() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        let [base, middle, leaf] = ["base", "middle", "leaf"].map(|n| format!("{n}.{format}"));
        place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
        place.ok(&["convert", "a.img", &base]);
        place.ok(&["clone", &base, &middle]);
        place.ok(&["clone", &middle, &leaf]);
        fs::create_dir(place.path("moved")).unwrap();
        let moved = format!("moved/{base}");
        fs::rename(place.path(&base), place.path(&moved)).unwrap();
        place.fails(1, &["rebase", "-u", &middle, "-b", &moved]);
        place.ok(&["rebase", "-u", "--force", &middle, "-b", &moved]);
        place.ok(&["compare", "a.img", &leaf]);
        assert!(fs::metadata(place.path(&middle)).unwrap().permissions().readonly());
    }
}

/// The author of a file name, or of a parent's name in an image, must not control the reader's terminal, or forge a
/// line there.
#[test]
fn what_is_in_a_name_is_shown_and_not_sent_to_the_terminal() {
    let place = Place::new();
    let name = "y\x1b[31m\nfake.img";
    place.pattern(name, MIB, &[]);
    place.ok(&["create", "--parent", name, "c.qcow2"]);
    let harmless = |text: &str| {
        assert!(!text.contains('\x1b') && !text.contains("\nfake"), "{text:?}");
        assert!(text.contains("y\\u{1b}[31m\\nfake.img"), "{text:?}");
    };
    for command in [&["info", "c.qcow2"][..], &["du", "c.qcow2"], &["info", name], &["check", name]]
    {
        harmless(&place.ok(command));
    }
    harmless(&place.fails(1, &["create", name, "1M"]));
    fs::remove_file(place.path(name)).unwrap();
    harmless(&place.fails(1, &["map", "c.qcow2"]));
    harmless(&place.fails(3, &["map", name]));
}

/// Its output is no longer read: in any state it must not need to check a flag.
#[test]
fn a_command_that_only_looks_ends_when_it_is_told_to() {
    let place = Place::new();
    let ranges: Vec<(u64, u64)> = (0..4000).map(|i| (i * 8192, 4096)).collect();
    place.pattern("a.img", 32 * MIB, &ranges);
    for signal in [Signal::TERM, Signal::INT] {
        let mut map = place.command(&["map", "a.img"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = map.stdout.take().unwrap();
        output.read_exact(&mut [0; 1]).unwrap();
        kill_process(Pid::from_child(&map), signal).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while map.try_wait().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = map.kill();
        assert_eq!(map.wait().unwrap().code(), Some(130), "{signal:?}");
    }
}

#[test]
fn a_comparison_whose_result_cannot_be_printed_does_not_say_that_they_differ() {
    let place = Place::new();
    place.pattern("a.img", MIB, &[(0, 4096)]);
    place.pattern("b.img", MIB, &[(0, 4096)]);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = place.command(&["compare", "a.img", "b.img"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_has_a_temporary_name_and_is_no_file_is_named() {
    let place = Place::new();
    place.ok(&["create", "a.qcow2", "8M"]);
    for (name, command) in [
        ("x.qcow2.ferrite-new", &["create", "x.qcow2", "8M"][..]),
        ("x.qcow2.ferrite-new", &["clone", "a.qcow2", "x.qcow2"]),
        ("x.qcow2.partial", &["convert", "a.qcow2", "x.qcow2"]),
        ("x.qcow2.partial.json.new", &["convert", "a.qcow2", "x.qcow2"]),
    ] {
        fs::create_dir(place.path(name)).unwrap();
        let said = place.fails(1, command);
        assert!(said.contains(&format!("{name} is no file")), "{said}");
        assert_eq!(names(&place), ["a.qcow2", name], "{command:?}");
        fs::remove_dir(place.path(name)).unwrap();
    }
}

#[test]
fn refusals_name_the_file_that_is_in_the_way() {
    let place = Place::new();
    place.ok(&["create", "base.qcow2", "8M"]);
    place.ok(&["clone", "base.qcow2", "leaf.qcow2"]);
    fs::set_permissions(place.path("base.qcow2"), fs::Permissions::from_mode(0o644)).unwrap();
    std::os::unix::fs::symlink("base.qcow2", place.path("link.qcow2")).unwrap();
    let before = names(&place);
    for (code, command, why) in [
        (
            1,
            &["rebase", "base.qcow2", "-b", "leaf.qcow2", "--force"][..],
            "leaf.qcow2 stands on it",
        ),
        (1, &["rebase", "base.qcow2", "-b", "leaf.qcow2"], "leaf.qcow2 stands on it"),
        (1, &["rebase", "-u", "base.qcow2", "-b", "leaf.qcow2"], "leaf.qcow2 stands on it"),
        (3, &["rebase", "-u", "leaf.qcow2", "-b", "nowhere.qcow2"], "nowhere.qcow2"),
        (1, &["coalesce", "leaf.qcow2", "--into", "link.qcow2"], "link.qcow2 is a symbolic link"),
        (2, &["create", "x.img", "8M", "--block", "64K"], "a raw disk has no blocks"),
        (2, &["create", "x.vhd", "8M", "--block", "2M", "--fixed"], "a fixed VHD has no blocks"),
        (2, &["convert", "base.qcow2", "x.img", "--block", "64K"], "a raw disk has no blocks"),
    ] {
        let said = place.fails(code, command);
        assert!(said.contains(why), "{command:?}: {said}");
        assert_eq!(names(&place), before, "{command:?}");
    }
    // Removes its parent, not that parent's folder.
    fs::remove_file(place.path("base.qcow2")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.path("base.qcow2"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let said = place.fails(1, &["du", "leaf.qcow2"]);
    assert!(said.contains("base.qcow2 is no file or device"), "{said}");
}

/// As a file of another user, which even root may not change.
#[test]
fn a_parent_that_cannot_be_made_read_only_is_not_said_to_be_it() {
    let place = Place::new();
    place.ok(&["create", "base.qcow2", "8M"]);
    let base = place.path("base.qcow2");
    let chattr = |how: &str| std::process::Command::new("chattr").args([how, &base]).status();
    if !chattr("+i").is_ok_and(|status| status.success()) {
        eprintln!("skipped: there are no immutable files here");
        return;
    }
    let said = place.fails(1, &["clone", "base.qcow2", "x.qcow2"]);
    chattr("-i").unwrap();
    assert!(said.contains("only its owner may") && said.contains("chmod a-w"), "{said}");
    assert!(!said.contains("is read-only now"), "{said}");
    assert_eq!(names(&place), ["base.qcow2"]);
}
