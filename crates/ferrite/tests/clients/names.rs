//! `ferrite export nbd` with several images: clients choose by name.

use std::fs;

use ferrite_testkit::nbd::{ACK, Client, contexts, info, option};
use ferrite_testkit::programs::peer;
use rustix::process::Signal;

use crate::images;
use crate::served::{World, end};

const MIB: u64 = 1 << 20;
/// Replies to options: a name, and errors.
const SERVER: u32 = 2;
const UNKNOWN: u32 = 1 << 31 | 6;

/// Chooses an export; gives its size.
#[track_caller]
fn choose(client: &mut Client, name: &str) -> u64 {
    let answers = client.option(option::GO, &info(name));
    assert_eq!(answers.last().unwrap().0, ACK, "{name}");
    let export = answers.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]).unwrap();
    u64::from_be_bytes(export.1[2..10].try_into().unwrap())
}

fn names(client: &mut Client) -> Vec<String> {
    let answers = client.option(option::LIST, &[]);
    let (last, names) = answers.split_last().unwrap();
    assert_eq!(last.0, ACK);
    let name = |(kind, data): &(u32, Vec<u8>)| {
        assert_eq!(
            (*kind, u32::from_be_bytes(data[..4].try_into().unwrap())),
            (SERVER, data.len() as u32 - 4)
        );
        String::from_utf8(data[4..].to_vec()).unwrap()
    };
    names.iter().map(name).collect()
}

#[test]
fn several_images_are_listed_and_chosen_by_name_and_others_are_unknown() {
    let world = World::new();
    world.place.ok(&["create", "web.qcow2", "4M"]);
    world.place.ok(&["create", "other.raw", "2M"]);
    let owner = world.export_as("nbd.sock", &["web.qcow2", "db=other.raw", "store:s#a"]);
    let mut client = world.client("nbd.sock");
    assert_eq!(names(&mut client), ["web", "db", "a"]);
    for unknown in ["", "other", "WEB", "we", "webb"] {
        for asked in [option::INFO, option::GO] {
            assert_eq!(client.option(asked, &info(unknown)), [(UNKNOWN, vec![])], "{unknown}");
        }
        let mut other = world.client("nbd.sock");
        assert_eq!(other.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
        for asked in [option::SET_META_CONTEXT, option::LIST_META_CONTEXT] {
            let queries = contexts(unknown, &["base:allocation"]);
            assert_eq!(other.option(asked, &queries), [(UNKNOWN, vec![])], "{unknown}");
        }
        other.ask(option::EXPORT_NAME, unknown.as_bytes());
        assert!(other.is_closed(), "{unknown}");
    }
    // Each is its own disk.
    assert_eq!(choose(&mut client, "web"), 4 * MIB);
    let mut second = world.client("nbd.sock");
    assert_eq!(choose(&mut second, "db"), 2 * MIB);
    let mut third = world.client("nbd.sock");
    assert_eq!(choose(&mut third, "a"), 8 * MIB);
    client.write(4096, &[1; 4096]);
    second.write(4096, &[2; 4096]);
    third.write(4096, &[3; 4096]);
    for (client, value) in [(&mut client, 1), (&mut second, 2), (&mut third, 3)] {
        assert_eq!(client.read(4096, 4096), [value; 4096]);
        assert_eq!(client.read(0, 4096), [0; 4096]);
    }
    let mut oldest = world.client("nbd.sock");
    oldest.ask(option::EXPORT_NAME, b"db");
    assert_eq!(oldest.bytes(8), (2 * MIB).to_be_bytes());
    drop((client, second, third, oldest));
    if peer("nbdinfo", &["--version"]).is_some() {
        let uri = format!("nbd+unix:///?socket={}", world.place.path("nbd.sock"));
        let output = std::process::Command::new("nbdinfo").args(["--list", &uri]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.contains("export=\"db\""), "{said}");
    }
    end(owner, Signal::TERM);
    world.place.ok(&["check", "web.qcow2"]);
    assert_eq!(fs::read(world.place.path("other.raw")).unwrap()[4096..8192], [2; 4096]);
    assert!(!fs::exists(world.place.path("nbd.sock")).unwrap());
}

#[test]
fn volumes_of_one_store_are_in_one_process_and_commands_find_it() {
    let world = World::new();
    world.ok(&["create", "s#b", "4M"]);
    let owner = world.export_as("nbd.sock", &["store:s#a", "store:s#b"]);
    assert_eq!(world.sockets().len(), 1);
    let [mut a, mut b] = ["a", "b"].map(|name| {
        let mut client = world.client("nbd.sock");
        choose(&mut client, name);
        client
    });
    a.write(0, &[1; 8192]);
    b.write(0, &[2; 8192]);
    world.ok(&["snapshot", "s#b", "s1"]);
    b.write(0, &[3; 8192]);
    let copied = world.image(&["convert", "store:s#s1", "copy.raw"]);
    assert!(copied.status.success(), "{copied:?}");
    assert_eq!(fs::read(world.place.path("copy.raw")).unwrap()[..8192], [2; 8192]);
    drop((a, b));
    end(owner, Signal::TERM);
    world.ok(&["check", "s", "--deep"]);
}

#[test]
fn a_single_image_with_a_name_has_that_and_the_empty_one() {
    let world = World::new();
    let owner = world.export_as("nbd.sock", &["disk=store:s#a"]);
    let mut client = world.client("nbd.sock");
    assert_eq!(names(&mut client), ["disk"]);
    assert_eq!(client.option(option::GO, &info("a")), [(UNKNOWN, vec![])]);
    assert_eq!(choose(&mut client, ""), 8 * MIB);
    assert_eq!(choose(&mut world.client("nbd.sock"), "disk"), 8 * MIB);
    end(owner, Signal::TERM);
}

#[test]
fn if_one_image_cannot_be_exported_none_is() {
    let world = World::new();
    world.place.ok(&["create", "a.qcow2", "4M"]);
    for (code, images, says) in [
        (2, ["a.qcow2", "a=b.raw"], "another image is exported as a"),
        (3, ["a.qcow2", "missing.raw"], "missing.raw"),
        (4, ["a.qcow2", "again=a.qcow2"], "a.qcow2"),
        (4, ["store:s#a", "again=store:s#a"], "another disk of this process uses it"),
        (3, ["store:s#a", "store:s#b"], "no such volume"),
    ] {
        let output = world.exports("nbd.sock", &images).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && said.contains(says), "{images:?}: {said}");
        assert!(!fs::exists(world.place.path("nbd.sock")).unwrap());
        assert!(world.sockets().is_empty(), "{images:?}");
    }
    // The first one was closed: no journal of it is left.
    let info = images::json(&world.place.ok(&["info", "a.qcow2", "--json"]));
    assert_eq!(info["chain"][0]["journal"], false, "{info}");
    let owner = world.export_as("nbd.sock", &["a.qcow2", "b=store:s#a"]);
    end(owner, Signal::TERM);
}
