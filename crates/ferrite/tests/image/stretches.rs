//! Stretches of chains are merged by `ferrite image coalesce`, and step by step as the daemon does it.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::images::{MIB, Place, json};

/// A chain a, b, c, d, e, the last one being the leaf, and a raw copy of its disk.
fn chain(format: &str) -> Place {
    let place = Place::new();
    let name = |i: usize| format!("{}.{format}", ["a", "b", "c", "d", "e"][i]);
    place.ok(&["create", &name(0), "8M"]);
    for i in 0..5 {
        if i > 0 {
            place.ok(&["clone", &name(i - 1), &name(i)]);
        }
        place.write(&name(i), &[(i as u64 * MIB, MIB + 4096)]);
    }
    place.ok(&["convert", &name(4), "model.img"]);
    place
}

fn has_images(place: &Place, names: &str, format: &str) {
    let chain = json(&place.ok(&["info", &format!("e.{format}"), "--json"]));
    let paths = chain["chain"].as_array().unwrap().iter();
    let found = paths.map(|it| Path::new(it["path"].as_str().unwrap()).file_stem().unwrap());
    let found: Vec<_> = found.map(|name| name.to_str().unwrap()).collect();
    assert_eq!(found.concat(), names);
    for name in ["a", "b", "c", "d", "e"] {
        let is_there = fs::exists(place.path(&format!("{name}.{format}"))).unwrap();
        assert_eq!(is_there, names.contains(name), "{name}");
    }
    place.ok(&["compare", &format!("e.{format}"), "model.img"]);
    place.has_no_leftovers();
}

#[test]
fn coalesce_merges_the_stretch_that_is_named() {
    for format in ["vhd", "qcow2"] {
        let name = |name: &str| format!("{name}.{format}");
        let place = chain(format);
        place.fails(1, &["coalesce", &name("e"), "--from", &name("b"), "--to", &name("d")]);
        let both = place.image(&["coalesce", &name("e"), "--into", &name("d"), "--to", &name("d")]);
        assert_eq!(both.status.code(), Some(2), "{both:?}");
        place.ok(&["coalesce", &name("e"), "--from", &name("c"), "--to", &name("b")]);
        has_images(&place, "edba", format);
        let gone =
            place.fails(3, &["coalesce", &name("e"), "--from", &name("c"), "--to", &name("b")]);
        assert!(gone.contains("nothing left to do"), "{gone}");
        place.ok(&["coalesce", &name("e"), "--to", &name("a")]);
        has_images(&place, "ea", format);
    }
}

/// The lines of JSON that a step prints.
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

#[test]
fn the_steps_print_a_line_for_each_event_and_can_be_taken_again() {
    for format in ["vhd", "qcow2"] {
        let name = |name: &str| format!("{name}.{format}");
        let place = chain(format);
        let (leaf, from, to) = (name("e"), name("d"), name("b"));
        let step = |step: &str| {
            let args = ["merge-step", step, &leaf, "--from", &from, "--to", &to, "--json"];
            lines(&place.ok(&args))
        };
        let plan = &step("plan")[0]["result"];
        assert!(plan["child"].as_str().unwrap().ends_with(&leaf), "{plan}");
        assert_eq!(plan["images"].as_array().unwrap().len(), 2);
        assert!(plan["needed_bytes"].as_u64().unwrap() >= 4096, "{plan}");
        assert_eq!(
            (&plan["must_grow"], &plan["virtual_bytes"]),
            (&false.into(), &(8 * MIB).into())
        );
        for early in ["relink", "clean"] {
            let args = ["merge-step", early, &leaf, "--from", &from, "--to", &to, "--json"];
            let output = place.image(&args);
            match early {
                "relink" => {
                    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
                    assert!(error["help"].as_str().unwrap().contains("merge-step copy"), "{error}");
                }
                _ => assert!(output.status.success()),
            }
        }
        for _ in 0..2 {
            let copied = step("copy");
            assert_eq!(copied.last().unwrap()["result"]["virtual_bytes"], 8 * MIB);
        }
        for again in ["relink", "relink", "clean", "clean"] {
            assert_eq!(step(again).len(), 1);
        }
        has_images(&place, "eba", format);
    }
}

#[test]
fn what_an_unfinished_merge_has_noted_goes_with_its_image() {
    // The images that the first one names are merged in another way.
    for (ends, others, left) in [
        (["d", "c"], vec!["e", "--from", "d", "--to", "a"], "ea"),
        (["c", "b"], vec!["e", "--from", "d", "--to", "a"], "ea"),
        (["d", "c"], vec!["d", "--into", "c"], "edba"),
    ] {
        for format in ["vhd", "qcow2"] {
            let place = chain(format);
            let name = |name: &str| match name.starts_with("--") {
                true => name.to_owned(),
                false => format!("{name}.{format}"),
            };
            let [leaf, from, to] = ["e", ends[0], ends[1]].map(name);
            place.ok(&["merge-step", "copy", &leaf, "--from", &from, "--to", &to]);
            let note = place.path(&format!("{to}.ferrite-merge.partial.json"));
            assert!(fs::exists(&note).unwrap() && fs::exists(note + ".new").unwrap());
            let other: Vec<String> = others.iter().map(|word| name(word)).collect();
            let other: Vec<&str> = other.iter().map(String::as_str).collect();
            place.ok(&[&["coalesce"], &other[..]].concat());
            has_images(&place, left, format);
        }
    }
}

/// At the speed of a byte a second nothing would ever end.
#[test]
fn a_copy_takes_new_speeds_and_ends_in_good_order_when_it_is_told_to() {
    let place = chain("vhd");
    let args = ["merge-step", "copy", "e.vhd", "--from", "d.vhd", "--to", "b.vhd", "--json"];
    let start = || {
        let mut command = place.command(&[&args[..], &["--speed", "1", "--speeds"]].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        out.read_line(&mut first).unwrap();
        assert_eq!(lines(&first)[0]["progress"]["total_bytes"], 8 * MIB);
        (child, out)
    };
    let (mut child, _out) = start();
    // The end of its input would end it, too.
    let _input = child.stdin.take();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    let error: Value = serde_json::from_slice(&ended.stderr).unwrap();
    assert_eq!(error["code"], 130, "{error}");
    place.ok(&["compare", "e.vhd", "model.img"]);
    let (mut child, out) = start();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"0\n").unwrap();
    let rest: Vec<String> = out.lines().map(Result::unwrap).collect();
    assert!(child.wait().unwrap().success());
    assert!(lines(rest.last().unwrap())[0]["result"].is_object(), "{rest:?}");
    place.ok(&["compare", "e.vhd", "model.img"]);
}
