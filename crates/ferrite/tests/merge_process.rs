//! The process that copies for a job of the daemon: what it reads and writes, and when it ends.

mod images;

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Child, Stdio};

use images::{MIB, Place, json};

/// A chain leaf, mid, base, and a copy of mid's data into base that takes hours.
fn copying(place: &Place) -> Child {
    copying_at(place, "1000")
}

/// A chain leaf, mid, base, and a copy of mid's data into base at so many bytes a second.
fn copying_at(place: &Place, speed: &str) -> Child {
    place.ok(&["create", "base.vhd", "16M"]);
    place.ok(&["clone", "base.vhd", "mid.vhd"]);
    place.write("mid.vhd", &[(MIB, 8 * MIB)]);
    place.ok(&["clone", "mid.vhd", "leaf.vhd"]);
    let step = ["merge-step", "copy", "leaf.vhd", "--speed", speed, "--speeds", "--json"];
    let mut command = place.command(&step);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn line(from: &mut impl std::io::BufRead) -> serde_json::Value {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    json(&line)
}

#[test]
fn a_copy_takes_new_limits_and_says_how_far_it_is() {
    let place = Place::new();
    let mut child = copying(&place);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let first = line(&mut out);
    assert!(first["progress"]["total_bytes"].as_u64().unwrap() > 0, "{first}");
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"fast\n0\n").unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    let last = json(rest.lines().last().unwrap());
    assert!(last["result"].is_object(), "{last}");
    drop(input);
}

/// A copy that has written blocks leaves an image that is complete, and takes no more space than it has blocks.
#[test]
fn a_copy_that_is_stopped_behind_some_blocks_leaves_none_that_nothing_refers_to() {
    let place = Place::new();
    let mut child = copying_at(&place, "4M");
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let done = |line: &serde_json::Value| line["progress"]["done_bytes"].as_u64().unwrap();
    while done(&line(&mut out)) < 4 * MIB {}
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    place.ok(&["check", "base.vhd"]);
    place.ok(&["check", "leaf.vhd", "--chain"]);
    for step in ["copy", "relink", "clean"] {
        let ends = ["--from", "mid.vhd", "--to", "base.vhd"];
        place.ok(&[&["merge-step", step, "leaf.vhd"][..], &ends].concat());
    }
    place.ok(&["check", "leaf.vhd", "--chain"]);
}

#[test]
fn a_copy_ends_when_its_input_is_closed_and_goes_on_later() {
    let place = Place::new();
    let mut child = copying(&place);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    line(&mut out);
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let failure = json(&String::from_utf8(output.stderr).unwrap());
    assert!(failure["why"].is_string() && failure["help"].is_string(), "{failure}");
    place.ok(&["check", "leaf.vhd", "--chain"]);
    for step in ["copy", "relink", "clean"] {
        let ends = ["--from", "mid.vhd", "--to", "base.vhd"];
        place.ok(&[&["merge-step", step, "leaf.vhd"][..], &ends].concat());
    }
    let info = json(&place.ok(&["info", "leaf.vhd", "--json"]));
    assert_eq!(info["chain"].as_array().unwrap().len(), 2);
}
