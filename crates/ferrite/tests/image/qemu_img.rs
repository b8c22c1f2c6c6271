//! Everyday lines of qemu-img, run by both programs: the same exit codes, and the same names in JSON.
//! docs/images.md lists what differs.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use ferrite_testkit::programs::installed;
use serde_json::Value;

use crate::images::{MIB, Place, json};

/// Lines with the same exit code.
const SAME: [&str; 42] = [
    "create -f qcow2 -b base.vhd -F vpc x.qcow2",
    "create -f qcow2 -o cluster_size=128k x.qcow2 64M",
    "create -f qcow2 -o extended_l2=on,cluster_size=128k x.qcow2 64M",
    "create -q -f qcow2 x.qcow2 64M",
    "create -f vpc -o subformat=fixed x.vhd 64M",
    "create -f vpc x.vhd 64M",
    "create -f raw -o preallocation=falloc x.img 64M",
    "create x.img 64M",
    "info --backing-chain base.qcow2",
    "info -U base.qcow2",
    "info --output=json base.qcow2",
    "check -r all base.qcow2",
    "check -r leaks base.qcow2",
    "check -q base.qcow2",
    "check base.qcow2",
    "convert -f raw -O qcow2 raw.img x.qcow2",
    "convert -p -f raw -O qcow2 raw.img x.qcow2",
    "convert -U -f qcow2 -O raw base.qcow2 x.raw",
    "convert -t none -T none -f raw -O qcow2 raw.img x.qcow2",
    "convert -W -m 8 -f raw -O qcow2 raw.img x.qcow2",
    "convert -S 4k -f raw -O qcow2 raw.img x.qcow2",
    "convert -n -f raw -O raw raw.img raw2.img",
    "convert -n -f raw -O qcow2 raw.img base.qcow2",
    "convert -o extended_l2=on -f raw -O qcow2 raw.img x.qcow2",
    "convert -o cluster_size=2M -f raw -O qcow2 raw.img x.qcow2",
    "convert -B base.qcow2 -F qcow2 -O qcow2 base.qcow2 x.qcow2",
    "resize -f qcow2 base.qcow2 128M",
    "resize --shrink base.qcow2 32M",
    "resize -f raw raw.img +64M",
    "resize -f raw --shrink raw.img -32M",
    "resize -f raw raw.img 32M",
    "compare -f raw -F qcow2 raw.img base.qcow2",
    "compare -U -f raw -F qcow2 raw.img base.qcow2",
    "compare -q raw.img base.qcow2",
    "compare -s raw.img base.qcow2",
    "compare -s base.qcow2 base.qcow2",
    "map --output=json base.qcow2",
    "map -s 0 -l 1M base.qcow2",
    "snapshot -l base.qcow2",
    "snapshot -c name base.qcow2",
    "snapshot -q -c name base.qcow2",
    "rebase -u -b '' base.qcow2",
];

/// Lines that qemu-img takes and this program refuses, and a word of the reason.
const REFUSED: [(&str, &str); 3] = [
    ("create -f qcow2 -o preallocation=metadata x.qcow2 64M", "only preallocation=off"),
    ("convert -f raw -O qcow2 -c raw.img x.qcow2", "does not write them (-c)"),
    ("amend -o compat=0.10 base.qcow2", "only compat=1.1"),
];

/// The images that the lines name.
fn prepared() -> Option<Place> {
    let place = Place::new();
    for line in ["create -f vpc base.vhd 64M", "create -f qcow2 base.qcow2 64M"] {
        qemu(&place, line)?;
    }
    holes(&place);
    Some(place)
}

fn holes(place: &Place) {
    for name in ["raw.img", "raw2.img"] {
        place.pattern(name, 64 * MIB, &[]);
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').map(|word| word.trim_matches('\'')).collect()
}

/// The exit code of qemu-img and its standard output; `None` if it is not installed.
#[track_caller]
fn qemu(place: &Place, line: &str) -> Option<(Option<i32>, String)> {
    let mut command = Command::new("qemu-img");
    let output = command.args(words(line)).current_dir(place.path(".")).output();
    let output = match output {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => installed("qemu-img", Err(e))?,
        output => output.unwrap(),
    };
    Some((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

#[test]
fn everyday_lines_of_qemu_img_end_with_its_exit_codes() {
    let Some(template) = prepared() else { return };
    let copied = || {
        let place = Place::new();
        for name in ["base.vhd", "base.qcow2"] {
            fs::copy(template.path(name), place.path(name)).unwrap();
        }
        holes(&place);
        place
    };
    let mut differ = Vec::new();
    for line in SAME {
        let (ours, theirs) = (copied(), copied());
        let Some((code, _)) = qemu(&theirs, line) else { return };
        let output = ours.image(&words(line));
        if output.status.code() != code {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            differ.push(format!("{line}: {code:?}, and {:?}: {text}", output.status.code()));
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
}

#[test]
fn lines_that_would_mean_something_else_here_are_refused_with_a_reason() {
    for (line, why) in REFUSED {
        let Some(place) = prepared() else { return };
        let before = fs::read_dir(place.path(".")).unwrap().count();
        let output = place.image(&words(line));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {text}");
        assert!(text.contains(why), "{line}: {text}");
        assert_eq!(fs::read_dir(place.path(".")).unwrap().count(), before, "{line}");
    }
}

/// Runs commands of qemu-io on an image.
#[track_caller]
fn qemu_io(place: &Place, image: &str, commands: &[&str]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]).args(commands.iter().flat_map(|each| ["-c", each]));
    let output = installed("qemu-io", command.arg(place.path(image)).output());
    let said = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    assert!(said.is_none_or(|said| !said.contains("failed")), "{commands:?}");
}

fn keys(value: &Value) -> BTreeSet<String> {
    value.as_object().unwrap().keys().cloned().collect()
}

/// Their keys that we do not have, or that have another value.
fn missing(ours: &Value, theirs: &Value, but: &[&str]) -> Vec<String> {
    let names = keys(theirs).into_iter().filter(|key| !but.contains(&key.as_str()));
    names.filter(|key| ours[key] != theirs[key]).collect()
}

#[test]
fn info_has_the_names_and_values_of_qemu_img_in_json() {
    let Some(place) = prepared() else { return };
    let made = "create -q -f qcow2 -b base.qcow2 -F qcow2 leaf.qcow2";
    if qemu(&place, made).is_none() {
        return;
    }
    place.pattern("small.img", MIB, &[(0, 4096)]);
    qemu(&place, "create -q -f qcow2 -o extended_l2=on sub.qcow2 64M");
    for name in ["base.qcow2", "leaf.qcow2", "sub.qcow2", "base.vhd", "raw.img", "small.img"] {
        let line = format!("info --output=json {name}");
        let theirs = json(&qemu(&place, &line).unwrap().1);
        let ours = json(&place.ok(&words(&line)));
        assert_eq!(missing(&ours, &theirs, &[]), [""; 0], "{name}: {theirs}\n{ours}");
        assert_eq!(ours["virtual_bytes"], ours["virtual-size"]);
    }
    let line = "info --output=json --backing-chain leaf.qcow2";
    let (theirs, ours) = (json(&qemu(&place, line).unwrap().1), json(&place.ok(&words(line))));
    let [theirs, ours] = [&theirs, &ours].map(|all| all.as_array().unwrap().clone());
    assert_eq!((theirs.len(), ours.len()), (2, 2));
    for (theirs, ours) in theirs.iter().zip(&ours) {
        assert_eq!(missing(ours, theirs, &[]), [""; 0], "{theirs}\n{ours}");
        assert_eq!(keys(ours), keys(theirs));
    }
}

#[test]
fn map_has_the_names_and_values_of_qemu_img_in_json() {
    let Some(place) = prepared() else { return };
    place.write("base.qcow2", &[(MIB, MIB)]);
    if qemu(&place, "create -q -f qcow2 -b base.qcow2 -F qcow2 leaf.qcow2").is_none() {
        return;
    }
    place.write("leaf.qcow2", &[(4 * MIB, MIB)]);
    place.pattern("raw.img", 8 * MIB, &[(MIB, MIB)]);
    qemu(&place, "create -q -f qcow2 -o extended_l2=on -b base.qcow2 -F qcow2 sub.qcow2");
    qemu_io(&place, "sub.qcow2", &["write 1M 6k", "write -z 1100k 10k", "write 4098k 2k"]);
    for line in [
        "map leaf.qcow2",
        "map -s 1M -l 4M leaf.qcow2",
        "map base.vhd",
        "map raw.img",
        "map sub.qcow2",
    ] {
        let line = format!("{line} --output=json");
        let theirs = json(&qemu(&place, &line).unwrap().1);
        let ours = json(&place.ok(&words(&line)));
        let [theirs, ours] = [&theirs, &ours].map(|all| all.as_array().unwrap().clone());
        assert_eq!(theirs.len(), ours.len(), "{line}: {theirs:?}\n{ours:?}");
        for (theirs, ours) in theirs.iter().zip(&ours) {
            // The place of a hole in a file: nothing is there.
            let but = if theirs["data"] == true { &[][..] } else { &["offset"] };
            assert_eq!(missing(ours, theirs, but), [""; 0], "{line}: {theirs}\n{ours}");
        }
    }
}

#[test]
fn a_measured_image_takes_what_qemu_img_says_and_what_it_takes_then() {
    let Some(place) = prepared() else { return };
    for line in [
        "measure -O qcow2 --size 64M",
        "measure -O qcow2 --size 2040G",
        "measure -O qcow2 -o cluster_size=2M --size 64T",
        "measure -O qcow2 -o extended_l2=on --size 2040G",
        "measure -O raw base.vhd",
        "measure -O qcow2 base.qcow2",
    ] {
        let line = format!("{line} --output=json");
        let Some((code, theirs)) = qemu(&place, &line) else { return };
        assert_eq!(code, Some(0), "{line}");
        // This program does not copy bitmaps.
        let (ours, theirs) = (json(&place.ok(&words(&line))), json(&theirs));
        assert_eq!(missing(&ours, &theirs, &["bitmaps"]), [""; 0], "{line}: {ours}");
    }
    // Of a VHD qemu-img does not say it.
    place.pattern("raw.img", 64 * MIB, &[(3 * MIB, 2 * MIB)]);
    for (more, name) in [(&["--fixed"][..], "fixed.vhd"), (&[], "thin.vhd")] {
        let measured = [&["measure", "-O", "vpc", "raw.img", "--json"], more].concat();
        let measured = json(&place.ok(&measured));
        place.ok(&[&["convert", "raw.img", name], more].concat());
        let bytes = fs::metadata(place.path(name)).unwrap().len();
        assert_eq!(measured["required"], bytes, "{name}");
    }
}

#[test]
fn an_image_is_copied_over_another_one_and_onto_a_parent() {
    let place = Place::new();
    place.pattern("a.img", 8 * MIB, &[(MIB, MIB)]);
    place.pattern("b.img", 12 * MIB, &[(0, 12 * MIB)]);
    place.ok(&["convert", "b.img", "b.qcow2"]);
    for name in ["b.img", "b.qcow2"] {
        place.ok(&["convert", "-n", "a.img", name]);
        place.ok(&["convert", name, "c.img", "--force"]);
        let (a, c) =
            (fs::read(place.path("a.img")).unwrap(), fs::read(place.path("c.img")).unwrap());
        assert!(c[..8 << 20] == a && c[8 << 20..].iter().all(|byte| *byte != 0), "{name}");
    }
    let text = place.fails(2, &["convert", "-n", "b.img", "a.img"]);
    assert!(text.contains("ferrite image resize"), "{text}");
    place.fails(3, &["convert", "-n", "a.img", "none.img"]);

    for extension in ["vhd", "qcow2"] {
        let [base, leaf] = ["base", "leaf"].map(|name| format!("{name}.{extension}"));
        place.pattern("changed.img", 8 * MIB, &[(MIB, MIB), (6 * MIB, 65536)]);
        place.ok(&["convert", "a.img", &base]);
        place.ok(&["convert", "-B", &base, "changed.img", &leaf]);
        place.ok(&["compare", &leaf, "changed.img"]);
        place.ok(&["compare", &base, "a.img"]);
        let info = json(&place.ok(&["info", &leaf, "--json"]));
        let allocated = info["chain"][0]["allocated_bytes"].as_u64().unwrap();
        assert!(allocated <= 2 * MIB && info["chain"][1]["path"] == base, "{info}");
        // The parent is not written to any more.
        place.fails(1, &["resize", &base, "16M"]);
        place.has_no_leftovers();
    }
}

#[test]
fn an_image_without_its_parent_has_all_of_the_disk_or_only_its_own_part() {
    for extension in ["vhd", "qcow2"] {
        let place = Place::new();
        place.pattern("a.img", 8 * MIB, &[(MIB, MIB)]);
        let [base, leaf] = ["base", "leaf"].map(|name| format!("{name}.{extension}"));
        place.ok(&["convert", "a.img", &base]);
        place.ok(&["clone", &base, &leaf]);
        place.write(&leaf, &[(4 * MIB, MIB)]);
        fs::copy(place.path(&leaf), place.path(&format!("own.{extension}"))).unwrap();
        place.ok(&["rebase", "-b", "", &leaf]);
        place.pattern("all.img", 8 * MIB, &[(MIB, MIB), (4 * MIB, MIB)]);
        place.ok(&["compare", &leaf, "all.img"]);
        let text = place.ok(&["rebase", "-b", "", &leaf]);
        assert!(text.contains("nothing to do: it has no parent"), "{text}");
        let own = format!("own.{extension}");
        place.ok(&["rebase", "-u", "-b", "", &own]);
        place.pattern("own.img", 8 * MIB, &[(4 * MIB, MIB)]);
        place.ok(&["compare", &own, "own.img"]);
        for name in [&leaf, &own] {
            let info = json(&place.ok(&["info", name, "--json"]));
            assert_eq!(info["chain"].as_array().unwrap().len(), 1, "{info}");
            place.ok(&["check", name]);
        }
        place.has_no_leftovers();
    }
}

#[test]
fn small_zeros_are_left_out_as_far_as_they_are_asked_for() {
    let place = Place::new();
    let runs: Vec<(u64, u64)> = (0..64).map(|i| (i * 64 * 1024, 4096)).collect();
    place.pattern("a.img", 4 * MIB, &runs);
    // All of it is read: the file has no holes.
    let whole = fs::read(place.path("a.img")).unwrap();
    fs::write(place.path("a.img"), whole).unwrap();
    let allocated =
        |name: &str| json(&place.ok(&["info", name, "--json"]))["actual-size"].as_u64().unwrap();
    place.ok(&["convert", "a.img", "usual.img"]);
    place.ok(&["convert", "-S", "4k", "a.img", "small.img"]);
    assert!(place.same("usual.img", "small.img"));
    assert!(allocated("small.img") * 4 < allocated("usual.img"));
    let output = place.image(&["convert", "-S", "0", "a.img", "b.img"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn an_image_is_repaired_in_the_scope_that_check_is_given() {
    let Some(place) = prepared() else { return };
    place.write("base.qcow2", &[(0, MIB)]);
    // A refcount of a cluster behind all that are in use: a leak.
    let mut bytes = fs::read(place.path("base.qcow2")).unwrap();
    let at = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let block = at(at(48));
    let clusters = bytes.len() / 65536;
    bytes.resize((clusters + 1) * 65536, 0);
    bytes[block + 2 * clusters + 1] = 1;
    fs::write(place.path("base.qcow2"), bytes).unwrap();
    place.fails(3, &["check", "base.qcow2"]);
    place.ok(&["check", "-r", "leaks", "base.qcow2"]);
    place.ok(&["check", "base.qcow2"]);
    assert!(place.ok(&["check", "-q", "-r", "all", "base.qcow2"]).is_empty());
}

#[test]
fn snapshots_inside_are_listed_with_their_dates() {
    let Some(place) = prepared() else { return };
    assert!(place.ok(&["snapshot", "-l", "base.qcow2"]).contains("no snapshots"));
    if qemu(&place, "snapshot -c monday base.qcow2").is_none() {
        return;
    }
    let text = place.ok(&["snapshot", "-l", "base.qcow2"]);
    assert!(text.contains("monday") && text.contains(" UTC"), "{text}");
    let all = json(&place.ok(&["snapshot", "-l", "base.qcow2", "--json"]));
    assert_eq!(all[0]["name"], "monday");
    place.fails(1, &["snapshot", "-l", "base.vhd"]);
}

/// The image that each command leaves is in order for qemu-img, and reads as before.
#[test]
fn images_with_subclusters_go_through_all_commands() {
    let place = Place::new();
    let data = [(0, 4096), (MIB, 3 * MIB), (5 * MIB + 6144, 2048), (7 * MIB, 70_000)];
    place.pattern("raw.img", 8 * MIB, &data);
    let is_clean = |name: &str| {
        let line = format!("check -f qcow2 {name}");
        let Some((code, said)) = qemu(&place, &line) else { return };
        assert_eq!(code, Some(0), "{name}: {said}");
        let info = json(&place.ok(&["info", name, "--json"]));
        assert_eq!(info["format-specific"]["data"]["extended-l2"], true, "{info}");
    };
    place.ok(&["convert", "-o", "extended_l2=on,cluster_size=32k", "raw.img", "base.qcow2"]);
    is_clean("base.qcow2");
    assert!(place.ok(&["info", "base.qcow2"]).contains("extended l2"));
    place.ok(&["compare", "raw.img", "base.qcow2"]);
    let on = ["create", "-o", "extended_l2=on", "-b", "base.qcow2", "-F", "qcow2", "leaf.qcow2"];
    place.ok(&on);
    let more = [(2 * MIB + 2048, 2048), (6 * MIB, 65536)];
    place.write("leaf.qcow2", &more);
    qemu_io(&place, "leaf.qcow2", &["write -P 5 3M 10k", "write -z 1026k 2k"]);
    is_clean("leaf.qcow2");
    place.ok(&["convert", "leaf.qcow2", "want.img"]);
    if let Some((code, said)) = qemu(&place, "compare -f raw -F qcow2 want.img leaf.qcow2") {
        assert_eq!(code, Some(0), "{said}");
    }
    place.ok(&["resize", "leaf.qcow2", "64M"]);
    place.ok(&["compare", "want.img", "leaf.qcow2"]);
    // The parent's content in another format.
    place.ok(&["convert", "base.qcow2", "other.vhd"]);
    place.ok(&["rebase", "-b", "other.vhd", "leaf.qcow2"]);
    is_clean("leaf.qcow2");
    place.ok(&["compare", "want.img", "leaf.qcow2"]);
    place.ok(&["rebase", "-b", "base.qcow2", "leaf.qcow2"]);
    place.ok(&["coalesce", "leaf.qcow2"]);
    is_clean("leaf.qcow2");
    place.ok(&["compare", "want.img", "leaf.qcow2"]);
    place.ok(&["convert", "leaf.qcow2", "copy.vhd"]);
    place.ok(&["compare", "want.img", "copy.vhd"]);
}

/// Relative ones are found from the working directory by both.
#[test]
fn backing_files_that_options_of_qemu_name_are_read_as_qemu_reads_them() {
    let place = Place::new();
    place.pattern("base.img", 2 * MIB, &[(0, MIB)]);
    place.ok(&["convert", "base.img", "base.qcow2"]);
    fs::create_dir(place.path("sub")).unwrap();
    let absolute = place.path("base.qcow2");
    for name in [
        format!(r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{absolute}"}}}}"#),
        r#"json:{"driver":"qcow2","file.driver":"file","file.filename":"base.qcow2"}"#.into(),
        "file:base.qcow2".into(),
    ] {
        let made = format!("create -q -f qcow2 -b {name} -F qcow2 sub/leaf.qcow2");
        let Some((code, _)) = qemu(&place, &made) else { return };
        assert_eq!(code, Some(0), "{name}");
        let folder = place.path("");
        place.ok(&["compare", "--parents", &folder, "base.img", "sub/leaf.qcow2"]);
        let (code, said) = qemu(&place, "compare base.img sub/leaf.qcow2").unwrap();
        assert_eq!(code, Some(0), "{name}: {said}");
    }
}
