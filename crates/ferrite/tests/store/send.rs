//! `ferrite store send` and `receive`: whole snapshots and differences, and what happens when one of the two ends early.

use std::fs::{self, File};
use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

use crate::images::json;
use crate::served::{World, end};

const MIB: usize = 1 << 20;
/// Bytes of the header of a stream, and of a record and its end.
const HEADER: usize = 256;
const RECORD: usize = 48;

fn data(seed: u8, bytes: usize) -> Vec<u8> {
    let block = |i: usize| [(i as u64).to_le_bytes(), [seed | 1; 8]].concat().repeat(256);
    (0..bytes / 4096).flat_map(block).collect()
}

/// A store `s` with the snapshots `s1` and `s2` of an 8 MiB volume, and a store `t`.
fn world() -> World {
    let world = World::new();
    world.ok(&["create", "t", "--size", "64M"]);
    let write = |from: usize, bytes: &[u8]| {
        let mut client = world.client("nbd.sock");
        client.go(false);
        client.write(from as u64, bytes);
        client.flush();
    };
    let owner = world.export();
    write(MIB, &data(0, 3 * MIB));
    world.ok(&["snapshot", "s#a", "s1"]);
    write(2 * MIB, &data(0x40, 8192));
    write(3 * MIB, &[0; 4096]);
    write(7 * MIB, &data(0x20, MIB));
    world.ok(&["snapshot", "s#a", "s2"]);
    end(owner, Signal::TERM);
    world
}

impl World {
    /// The stream of a snapshot.
    #[track_caller]
    fn send(&self, args: &[&str]) -> Vec<u8> {
        let output = self.run(&[&["send"], args].concat());
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
        output.stdout
    }

    fn receive(&self, stream: &[u8], args: &[&str]) -> Output {
        let mut command = self.command(&[&["receive"], args].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It may end before it has read all.
        let _ = child.stdin.take().unwrap().write_all(stream);
        child.wait_with_output().unwrap()
    }

    #[track_caller]
    fn received(&self, stream: &[u8], args: &[&str]) -> String {
        let output = self.receive(stream, args);
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// A stream that is not received: why.
    #[track_caller]
    fn not_received(&self, code: i32, stream: &[u8], args: &[&str]) -> String {
        let output = self.receive(stream, args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn names(&self, store: &str) -> Vec<String> {
        let list = json(&self.ok(&["list", store, "--json"]));
        let name = |volume: &serde_json::Value| volume["name"].as_str().unwrap().to_owned();
        list["volumes"].as_array().unwrap().iter().map(name).collect()
    }

    #[track_caller]
    fn same(&self, a: &str, b: &str) {
        let [a, b] = [a, b].map(|name| format!("store:{name}"));
        let output = self.image(&["compare", &a, &b]);
        assert!(output.status.success(), "{a} {b}: {output:?}");
    }
}

#[test]
fn a_snapshot_and_its_difference_arrive_as_they_were_also_from_a_served_store() {
    let world = world();
    let whole = world.send(&["s#s1"]);
    let difference = world.send(&["s#s2", "--from", "s1"]);
    // Zeros are not sent, and of the difference two blocks, one of zeros, and 1 MiB.
    assert!(whole.len() < 3 * MIB + 10 * RECORD + HEADER, "{}", whole.len());
    assert_eq!(difference.len(), HEADER + MIB + 8192 + 4 * RECORD + 32);
    let owner = world.export();
    assert!(world.send(&["s#s1"]) == whole);
    assert!(world.send(&["s#s2", "--from", "s1"]) == difference);
    assert_eq!(world.received(&whole, &["t#s1"]), "t#s1: snapshot received, 8 MiB\n");
    assert_eq!(world.received(&difference, &["t#s2"]), "t#s2: snapshot received, 8 MiB\n");
    for name in ["s1", "s2"] {
        world.same(&format!("s#{name}"), &format!("t#{name}"));
    }
    // Where the base has another name.
    let done = world.received(&whole, &["t#monday", "--json"]);
    assert_eq!(json(&done)["done"], "received");
    world.received(&difference, &["t#tuesday", "--base", "monday"]);
    world.same("s#s2", "t#tuesday");
    assert_eq!(world.names("t"), ["monday", "s1", "s2", "tuesday"]);
    end(owner, Signal::TERM);
    world.ok(&["check", "t", "--deep"]);
}

#[test]
fn a_difference_is_received_on_the_right_base_only() {
    let world = world();
    let difference = world.send(&["s#s2", "--from", "s1"]);
    let said = world.not_received(3, &difference, &["t#s2"]);
    assert!(said.contains("the store has no s1"), "{said}");
    // One of the same name and size has another content.
    world.ok(&["create", "t#v", "8M"]);
    world.ok(&["snapshot", "t#v", "s1"]);
    let said = world.not_received(1, &difference, &["t#s2"]);
    assert!(said.contains("the base here is another one"), "{said}");
    world.ok(&["create", "t#small", "4M"]);
    world.ok(&["snapshot", "t#small", "small1"]);
    for (base, says) in [("v", "no snapshot"), ("small1", "no snapshot"), ("none", "no none")] {
        let output = world.receive(&difference, &["t#s2", "--base", base]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(says), "{said}");
    }
    let said = world.not_received(1, &world.send(&["s#s1"]), &["t#s2", "--base", "v"]);
    assert!(said.contains("leave --base out"), "{said}");
    assert_eq!(world.names("t"), ["s1", "small", "small1", "v"]);
}

#[test]
fn a_stream_that_is_cut_off_goes_on_where_it_was() {
    let world = world();
    world.received(&world.send(&["s#s1"]), &["t#s1"]);
    for (args, cut) in [(&["s#s1"][..], 2 * MIB), (&["s#s2", "--from", "s1"], MIB / 2 + 9000)] {
        let stream = world.send(args);
        let said = world.not_received(1, &stream[..cut], &["t#new"]);
        let at = said.split("--resume ").nth(1).expect(&said).split(',').next().unwrap().to_owned();
        assert!(!world.names("t").contains(&"new".to_owned()));
        assert!(world.names("t").contains(&"new.partial".to_owned()));
        // Neither another stream nor another place is taken for the rest of it.
        let said = world.not_received(1, &stream, &["t#new"]);
        assert!(said.contains("go on with --resume"), "{said}");
        let rest = world.send(&[args, &["--resume", &at]].concat());
        assert!(rest.len() < stream.len());
        let said = world.not_received(1, &rest, &["t#other"]);
        assert!(said.contains("does not begin a snapshot"), "{said}");
        let other = world.send(&["s#s2", "--resume", "8M"]);
        let said = world.not_received(1, &other, &["t#new", "--resume"]);
        assert!(said.contains("is not what the stream has before"), "{said}");
        world.received(&rest, &["t#new", "--resume"]);
        world.same(args[0], "t#new");
        assert_eq!(world.names("t"), ["new", "s1"]);
        world.ok(&["delete", "t#new"]);
    }
    world.ok(&["check", "t", "--deep"]);
}

#[test]
fn a_receiver_that_is_killed_leaves_nothing_under_the_name() {
    let world = world();
    let stream = world.send(&["s#s1"]);
    let mut command = world.command(&["receive", "t#new"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&stream[..2 * MIB]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!world.names("t").contains(&"new".to_owned()));
    // One that is interrupted while nothing comes ends, and can go on.
    let mut child = world
        .command(&["receive", "t#new", "--force"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut waits = child.stdin.take().unwrap();
    waits.write_all(&stream[..2 * MIB]).unwrap();
    let pid = Pid::from_child(&child);
    wait_until("it reads", || world.run(&["list", "t"]).status.code() == Some(4));
    kill_process(pid, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    drop(waits);
    assert!(!world.names("t").contains(&"new".to_owned()));
    world.received(&stream, &["t#new", "--force"]);
    world.same("s#s1", "t#new");
    world.ok(&["check", "t", "--deep"]);
}

#[test]
fn what_is_damaged_does_not_fit_or_is_no_snapshot_says_so() {
    let world = world();
    let stream = world.send(&["s#s1"]);
    let mut bad = stream.clone();
    bad[HEADER + RECORD + 5000] ^= 1;
    let said = world.not_received(5, &bad, &["t#new"]);
    assert!(said.contains("does not fit its hash"), "{said}");
    assert!(
        world
            .not_received(5, b"no stream".repeat(100).as_slice(), &["t#new"])
            .contains("no stream of")
    );
    assert!(world.not_received(1, &[], &["t#new"]).contains("it ends before"));
    world.received(&stream, &["t#new"]);
    assert!(world.not_received(1, &stream, &["t#new"]).contains("new is there"));
    assert!(world.fails(3, &["send", "s#s9"]).contains("no such volume"));
    assert!(world.fails(3, &["send", "s#s2", "--from", "s9"]).contains("no such volume"));
    assert!(world.fails(1, &["send", "s#a"]).contains("is no snapshot"));
    assert!(world.fails(2, &["send", "s#s1", "--resume", "100"]).contains("no place to go on"));
    // A store without room, and one that another process serves.
    world.ok(&["create", "full", "--size", "18M"]);
    let large: Vec<u8> = data(3, 20 * MIB);
    fs::write(world.place.path("large.raw"), large).unwrap();
    world.place.ok(&["convert", "large.raw", "store:s#large"]);
    world.ok(&["snapshot", "s#large", "large1"]);
    let said = world.not_received(1, &world.send(&["s#large1"]), &["full#new"]);
    assert!(said.contains("full") && world.names("full").is_empty(), "{said}");
    let owner = world.export();
    assert!(world.not_received(4, &stream, &["s#new"]).contains("only one process"));
    end(owner, Signal::TERM);
    // No program reads the stream.
    let mut send = world.command(&["send", "s#large1"]);
    let mut send = send.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(send.stdout.take());
    let output = send.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("no program reads"), "{said}");
}

#[test]
fn a_stream_goes_to_no_terminal_and_comes_from_none() {
    let world = world();
    let on_terminal = |line: String| {
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        let output = script.current_dir(world.place.path(".")).output().expect("script(1) runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let program = env!("CARGO_BIN_EXE_ferrite");
    for args in ["send s#s1", "receive t#new"] {
        let (code, said) = on_terminal(format!("{program} store {args}"));
        assert!(code == Some(2) && said.contains("this is a terminal"), "{said}");
    }
    let file = File::create(world.place.path("stream")).unwrap();
    assert!(world.command(&["send", "s#s1"]).stdout(file).status().unwrap().success());
    let file = File::open(world.place.path("stream")).unwrap();
    assert!(world.command(&["receive", "t#new"]).stdin(file).status().unwrap().success());
}
