//! The ends of commands: exit codes that programs can tell apart, signals, and messages.

mod images;

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use ferrite_testkit::programs::installed;
use images::{MIB, Place, json};

#[test]
fn images_that_differ_and_images_that_cannot_be_compared_end_differently() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    place.pattern("b.img", 4 * MIB, &[]);
    place.ok(&["compare", "a.img", "a.img"]);
    place.fails(1, &["compare", "a.img", "b.img"]);
    fs::write(place.path("c.img"), b"no sector").unwrap();
    place.fails(2, &["compare", "a.img", "c.img"]);
    place.fails(2, &["compare", "a.img", "no.img"]);
}

#[test]
fn a_check_says_by_its_code_whether_it_was_done_and_what_it_found() {
    let place = Place::new();
    place.ok(&["create", "a.qcow2", "4M"]);
    place.ok(&["check", "a.qcow2"]);
    place.fails(1, &["check", "no.qcow2"]);
    let unknown = place.image(&["--engine", "auto", "check", "--frobnicate", "a.qcow2"]);
    assert_eq!(unknown.status.code(), Some(1));
    // The first refcount block counts a cluster past the end.
    let whole = fs::read(place.path("a.qcow2")).unwrap();
    let at = |place: usize| u64::from_be_bytes(whole[place..place + 8].try_into().unwrap());
    let block = at(at(48) as usize);
    let put = |at: u64, bytes: &[u8]| {
        let mut file = File::options().write(true).open(place.path("a.qcow2")).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(bytes).unwrap();
    };
    let clusters = whole.len().div_ceil(64 << 10) as u64;
    put((clusters + 1) * (64 << 10) - 1, &[0]);
    put(block + 2 * clusters, &[0, 1]);
    let text = place.fails(3, &["check", "a.qcow2"]);
    assert!(text.contains("nothing refers to"), "{text}");
    if let Some(code) = qemu_check(&place.path("a.qcow2")) {
        assert_eq!(code, Some(3));
    }
    // And does not count the header.
    put(block, &[0, 0]);
    let text = place.fails(2, &["check", "a.qcow2"]);
    assert!(text.contains("is damaged"), "{text}");
    if let Some(code) = qemu_check(&place.path("a.qcow2")) {
        assert_eq!(code, Some(2));
    }
}

/// The exit code of `qemu-img check`; `None` if it is not installed.
fn qemu_check(path: &str) -> Option<Option<i32>> {
    let output = Command::new("qemu-img").args(["check", path]).output();
    Some(installed("qemu-img", output)?.status.code())
}

#[test]
fn an_image_that_contradicts_itself_has_an_exit_code_of_its_own() {
    for name in ["a.vhd", "a.qcow2"] {
        let place = Place::new();
        place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
        place.ok(&["convert", "a.img", name]);
        // The first entry of the block table, or the field with the place of the L1 table.
        let at = if name == "a.vhd" { 1536 } else { 40 };
        let mut file = File::options().write(true).open(place.path(name)).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&[0x70, 0, 0, 0]).unwrap();
        for command in [&["map", name][..], &["convert", name, "b.img"]] {
            place.fails(5, command);
        }
    }
}

#[test]
fn doctor_fails_where_guests_cannot_be_served() {
    for args in [&["doctor"][..], &["doctor", "--json"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite")).args(args).output().unwrap();
        let serves = if args.len() == 2 {
            json(&String::from_utf8_lossy(&output.stdout))["xen"] == true
        } else {
            String::from_utf8_lossy(&output.stdout).contains("and guests can be served.")
        };
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(if serves { 0 } else { 1 }), "{text}");
        assert!(serves || text.contains("guests cannot be served"), "{text}");
    }
}

#[test]
fn an_error_names_no_temporary_file() {
    let place = Place::new();
    place.pattern("source.img", MIB, &[]);
    for command in [&["create", "a.vhd", "4M"][..], &["convert", "source.img", "a.vhd"]] {
        let holders = ["a.vhd.ferrite-new", "a.vhd.partial"].map(|name| {
            let file = File::create(place.path(name)).unwrap();
            file.lock().unwrap();
            file
        });
        let force = if command[0] == "convert" { &["--force"][..] } else { &[] };
        let text = place.fails(4, &[command, force].concat());
        assert!(text.contains("/a.vhd: process") || text.contains(" a.vhd: process"), "{text}");
        assert!(!text.contains("ferrite-new") && !text.contains("partial"), "{text}");
        drop(holders);
    }
}

/// All source files of a directory.
fn sources(dir: &Path, to: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        match path.is_dir() {
            true => sources(&path, to),
            false => to.push(path),
        }
    }
}

/// The commands that a text names: `ferrite image WORD`, `ferrite store WORD` and `ferrite WORD`.
fn named(text: &str) -> Vec<Vec<String>> {
    // A literal may continue on the next line.
    let text = text.replace('\\', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    let word = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_lowercase() && c != '-');
        text[..end.unwrap_or(text.len())].to_owned()
    };
    text.match_indices("ferrite ")
        .map(|(at, found)| {
            let rest = &text[at + found.len()..];
            let of = ["image", "store"]
                .into_iter()
                .find_map(|of| Some((of, rest.strip_prefix(of)?.strip_prefix(' ')?)));
            match of {
                Some((of, rest)) => vec![of.to_owned(), word(rest)],
                None => vec![word(rest)],
            }
        })
        .collect()
}

#[test]
fn a_hint_names_commands_that_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for name in [
        "ferrite",
        "lab",
        "disk-base",
        "images",
        "store",
        "disk",
        "image-tools",
        "serve",
        "xen",
        "io",
    ] {
        sources(&crates.join(name).join("src"), &mut files);
    }
    let mut commands = Vec::new();
    for file in files.iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let text = fs::read_to_string(file).unwrap();
        for (i, line) in text.lines().enumerate() {
            let comment = line.trim_start().starts_with("//");
            if !comment && line.contains("ferrite ") {
                let two: Vec<&str> = text.lines().skip(i).take(2).collect();
                commands.extend(named(&two.join("\n")));
            }
        }
    }
    commands.sort();
    commands.dedup();
    assert!(commands.iter().any(|c| c == &["image", "check"]), "{commands:?}");
    // Options after it belong to another program, or precede a command.
    commands.retain(|c| c.last().is_some_and(|word| !word.starts_with('-')));
    for command in commands.iter().filter(|c| !PROSE.contains(&c.last().unwrap().as_str())) {
        let mut help = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let output = help.args(command).arg("--help").output().unwrap();
        assert!(output.status.success(), "ferrite {command:?} is named, and does not exist");
    }
}

/// Words after the program's name that are not commands.
const PROSE: [&str; 4] = ["over", "processes", "runs", ""];
