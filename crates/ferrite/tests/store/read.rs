//! Snapshots that are read while another process serves their store: by `ferrite image` and by a second export.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;

use ferrite_testkit::bytes;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::wait_until;
use rustix::process::{Signal, geteuid};

use crate::images::json;
use crate::served::{Owner, World, end};

const MIB: usize = 1 << 20;
/// The protocol's numbers of EPERM and EIO.
const EPERM: u32 = 1;
const EIO: u32 = 5;

fn data(seed: u8, bytes: usize) -> Vec<u8> {
    bytes::runs(bytes, 97, |n| (n * 7) as u8 ^ seed | 1)
}

/// A store whose volume `a` is exported. Its snapshot `s1` has 3 MiB of data from 1 MiB on, and the volume others.
fn world() -> (World, Owner, Client) {
    let world = World::new();
    let owner = world.export();
    let mut client = world.client("nbd.sock");
    client.go(false);
    client.write(MIB as u64, &data(0, 3 * MIB));
    world.ok(&["snapshot", "s#a", "s1"]);
    client.write(0, &data(0x40, 2 * MIB));
    (world, owner, client)
}

fn snapshot() -> Vec<u8> {
    let mut bytes = vec![0; 8 * MIB];
    bytes[MIB..4 * MIB].copy_from_slice(&data(0, 3 * MIB));
    bytes
}

#[track_caller]
fn ok(world: &World, args: &[&str]) -> String {
    let output = world.image(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_snapshot_is_copied_compared_and_mapped_while_its_volume_is_written() {
    let (world, owner, mut client) = world();
    ok(&world, &["convert", "store:s#s1", "copy.raw"]);
    assert!(fs::read(world.place.path("copy.raw")).unwrap() == snapshot());
    ok(&world, &["convert", "store:s#s1", "copy.qcow2"]);
    ok(&world, &["compare", "store:s#s1", "copy.qcow2"]);
    let map = json(&ok(&world, &["map", "store:s#s1", "--json"]));
    let extents = map["extents"].as_array().unwrap_or_else(|| map.as_array().unwrap());
    let of = |name: &str| -> Vec<u64> {
        extents.iter().map(|extent| extent[name].as_u64().unwrap()).collect()
    };
    let mib = MIB as u64;
    assert_eq!(of("start_bytes"), [0, mib, 4 * mib], "{map}");
    assert_eq!(of("length_bytes"), [mib, 3 * mib, 4 * mib], "{map}");
    let info = json(&ok(&world, &["info", "store:s#s1", "--json"]));
    assert_eq!(info["virtual_bytes"], 8 * mib, "{info}");
    // The volume has gone on.
    assert!(client.read(0, 2 << 20) == data(0x40, 2 * MIB));
    // A reader holds nothing when it has ended.
    wait_until("the snapshot is free", || world.run(&["delete", "s#s1"]).status.success());
    end(owner, Signal::TERM);
    world.ok(&["check", "s", "--deep"]);
}

#[test]
fn a_second_export_reads_a_snapshot_through_the_first_and_holds_it() {
    let (world, owner, mut client) = world();
    let reader = world.export_as("copy.sock", &["store:s#s1", "--read-only"]);
    // Commands find one owner only.
    assert_eq!(world.sockets().len(), 1);
    let mut copy = world.client("copy.sock");
    assert_eq!(copy.go(true).0, 8 * MIB as u64);
    assert!(copy.read(0, 8 << 20) == snapshot());
    assert!(copy.read(512 * 3, 512 * 5000) == snapshot()[512 * 3..512 * 5003]);
    assert_eq!(copy.call(command::WRITE, 0, 0, 512, &[1; 512]).error, EPERM);
    let extents = copy.call(command::BLOCK_STATUS, 0, 0, 8 << 20, &[]).extents;
    assert_eq!(extents[..2], [(1 << 20, 3), (3 << 20, 0)]);
    // The message names the reader, and everything else goes on.
    let said = world.fails(4, &["delete", "s#s1"]);
    assert!(said.contains(&format!("process {} reads it", reader.0.id())), "{said}");
    client.write(0, &data(0x20, MIB));
    world.ok(&["snapshot", "s#a", "s2"]);
    assert!(copy.read(0, 8 << 20) == snapshot());
    // One that is killed leaves nothing behind.
    end(reader, Signal::KILL);
    wait_until("the snapshot is free", || world.run(&["delete", "s#s1"]).status.success());
    world.ok(&["delete", "s#s2"]);
    end(owner, Signal::TERM);
}

#[test]
fn an_owner_that_is_killed_is_named_by_its_readers_and_one_that_is_stopped_waits_for_none() {
    let (world, owner, _client) = world();
    let reader = world.export_as("copy.sock", &["store:s#s1", "--read-only"]);
    let mut copy = world.client("copy.sock");
    copy.go(false);
    copy.read(0, 4096);
    end(owner, Signal::KILL);
    for _ in 0..3 {
        assert_eq!(copy.call(command::READ, 0, 0, 4096, &[]).error, EIO);
    }
    let why = "cannot be read any more: the process that serves the store has ended";
    wait_until("the reader's log", || reader.log().contains(why));
    assert_eq!(reader.log().matches(why).count(), 1, "{}", reader.log());
    end(reader, Signal::TERM);
    // The store is whole, and so is its next owner's end, with an idle reader.
    fs::remove_file(world.place.path("nbd.sock")).unwrap();
    let owner = world.export();
    let reader = world.export_as("copy.sock", &["store:s#s1", "--read-only"]);
    end(owner, Signal::TERM);
    end(reader, Signal::TERM);
    world.ok(&["check", "s", "--deep"]);
}

#[test]
fn what_cannot_be_read_says_why_and_what_to_do() {
    let (world, owner, _client) = world();
    for (code, name, says) in [
        (4, "store:s#a", "make a snapshot"),
        (3, "store:s#s9", "the store has no such volume"),
        (2, "store:s#..", ""),
    ] {
        let output = world.image(&["convert", name, "copy.raw"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(says), "{said}");
        let output = world.exports("copy.sock", &[name, "--read-only"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && said.contains(says), "{said}");
    }
    // To write to a snapshot, or beside the owner, was never possible.
    let output = world.exports("copy.sock", &["store:s#s1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(!world.place.path("copy.raw").is_empty() && world.sockets().len() == 1);
    if geteuid().is_root() {
        fs::set_permissions(world.place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
        let mut nobody = world.place.command(&["info", "store:s#s1"]);
        let output = nobody.uid(65534).env("XDG_RUNTIME_DIR", "/nonexistent").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains("denied"), "{said}");
    }
    end(owner, Signal::TERM);
}

/// A volume that no disk uses is read, and is not written meanwhile.
#[test]
fn a_volume_that_no_disk_uses_is_read_through_the_owner() {
    let world = World::new();
    world.fill("full");
    let owner = world.export();
    ok(&world, &["convert", "store:s#full", "copy.raw"]);
    ok(&world, &["compare", "x.raw", "copy.raw"]);
    let reader = world.export_as("copy.sock", &["store:s#full", "--read-only"]);
    let said = world.fails(4, &["delete", "s#full"]);
    assert!(said.contains("reads it"), "{said}");
    end(reader, Signal::TERM);
    end(owner, Signal::TERM);
}
