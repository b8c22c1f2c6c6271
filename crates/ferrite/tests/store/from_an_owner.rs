//! Commands on a store that another process serves: their effects, and the state when one of the two is killed
//! meanwhile.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::images::json;
use crate::pages;
use crate::served::{World, end};

#[test]
fn commands_on_a_served_store_say_and_do_what_they_do_on_one_that_is_not() {
    let world = World::new();
    let of_offline =
        [["list", "s", "--json"], ["info", "s#a", "--json"]].map(|args| world.ok(&args));
    let owner = world.export();
    let served = [["list", "s", "--json"], ["info", "s#a", "--json"]].map(|args| world.ok(&args));
    let volumes = |text: &str| json(text)["volumes"].clone();
    assert_eq!(volumes(&served[0]), volumes(&of_offline[0]));
    assert_eq!(served[1], of_offline[1]);
    assert_eq!(world.ok(&["snapshot", "s#a", "s1"]), "s#s1: snapshot of a, 8 MiB\n");
    assert_eq!(world.ok(&["clone", "s#s1", "b"]), "s#b: clone of s1, 8 MiB\n");
    assert_eq!(world.ok(&["rollback", "s#b", "s1"]), "s#b: rolled back, 8 MiB now\n");
    assert_eq!(world.ok(&["resize", "s#b", "12M"]), "s#b: 12 MiB now\n");
    assert_eq!(world.ok(&["resize", "s#b", "-8M", "--shrink"]), "s#b: 4 MiB now\n");
    assert_eq!(world.ok(&["rename", "s#b", "b2"]), "s#b2: renamed, 4 MiB\n");
    assert_eq!(world.ok(&["rename", "s#b2", "b"]), "s#b: renamed, 4 MiB\n");
    let mut resize = world.place.command_of("image", &["resize", "store:s#b", "+4M"]);
    resize.env("XDG_RUNTIME_DIR", world.place.path("own"));
    assert_eq!(resize.output().unwrap().stdout, b"s#b: 8 MiB now\n");
    assert!(world.ok(&["info", "s#b"]).contains("8 MiB"));
    world.ok(&["create", "s#c", "1G", "--domain", "tenant"]);
    assert!(world.ok(&["delete", "s#c"]).contains("is deleted"));
    assert!(world.ok(&["gc", "s"]).contains("freed"));
    // Another path leads to the same store.
    std::os::unix::fs::symlink("s", world.place.path("link")).unwrap();
    assert!(world.ok(&["list", "link"]).contains("s1"));
    let left = world.ok(&["list", "s"]);
    end(owner, Signal::TERM);
    assert_eq!(world.ok(&["list", "s"]), left);
    world.ok(&["check", "s", "--deep"]);
}

#[test]
fn what_cannot_be_done_with_a_served_store_says_so_and_what_to_do() {
    let world = World::new();
    let owner = world.export();
    world.ok(&["snapshot", "s#a", "s1"]);
    for (code, args, says) in [
        (4, &["delete", "s#a"][..], "detach that disk first"),
        (4, &["rollback", "s#a", "s1"], "make a clone of the snapshot"),
        (4, &["resize", "s#a", "16M"], "resize it, and attach it again"),
        (4, &["rename", "s#a", "b"], "detach that disk first"),
        (1, &["resize", "s#s1", "16M"], "make a clone of it"),
        (1, &["rename", "s#s1", "a"], "choose another name"),
        (1, &["snapshot", "s#a", "s1"], "choose another name"),
        (1, &["snapshot", "s#a", "s2.partial"], "a name that does not end in .partial"),
        (1, &["clone", "s#s1", "b.partial"], "a name that does not end in .partial"),
        (1, &["create", "s#b.partial", "1M"], "a name that does not end in .partial"),
        (3, &["rollback", "s#s1", "s9"], "there is no volume or snapshot s9"),
        (1, &["rollback", "s#s1", "a"], "a snapshot, which never changes"),
        (3, &["delete", "s#x"], "there is no volume or snapshot x"),
        (4, &["create", "s", "--size", "64M", "--force"], ""),
    ] {
        let said = world.fails(code, args);
        assert!(said.contains(says), "{args:?}: {said}");
    }
    // A snapshot is read through the owner (stores_read.rs), and all else is its own.
    for args in [&["convert", "store:s#a", "copy.raw"][..], &["convert", "x.raw", "store:s#b"]] {
        fs::write(world.place.path("x.raw"), [1; 4096]).unwrap();
        let refused = world.image(args);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(4), "{said}");
    }
    drop(owner);
}

#[test]
fn the_stats_of_a_served_store_are_those_that_a_look_at_its_medium_finds() {
    let world = World::new();
    world.fill("full");
    let owner = world.export();
    world.ok(&["snapshot", "s#full", "s1"]);
    world.ok(&["clone", "s#full", "b"]);
    let served = json(&world.ok(&["stats", "s", "--json"]));
    end(owner, Signal::TERM);
    let alone = json(&world.ok(&["stats", "s", "--json"]));
    for name in ["logical_bytes", "mapped_bytes", "distinct_bytes", "stored_bytes", "volumes"] {
        assert_eq!(served[name], alone[name], "{name}");
    }
    // A block of zeros in 768 takes no space.
    assert_eq!(served["mapped_bytes"], 3 * 1023 * 4096);
    // Equal content that is written at the same time may be stored twice.
    assert!(served["distinct_bytes"].as_u64().unwrap() >= 767 * 4096, "{served}");
}

#[test]
fn a_served_store_is_scrubbed_and_what_is_damaged_is_named() {
    let world = World::new();
    world.fill("full");
    let owner = world.export();
    assert!(world.ok(&["scrub", "s"]).contains("s: in order"));
    assert!(world.ok(&["scrub", "s"]).contains("of content read"));
    // The 300th block of the volume has unique content.
    let store = fs::read(world.place.path("s")).unwrap();
    let block = 300u32.to_le_bytes().repeat(1024);
    let at = store.chunks(4096).position(|here| here == block).unwrap() as u64 * 4096;
    let medium = fs::File::options().write(true).open(world.place.path("s")).unwrap();
    medium.write_all_at(b"x", at + 100).unwrap();
    medium.sync_all().unwrap();
    let output = world.run(&["scrub", "s", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let found = json(&String::from_utf8(output.stdout).unwrap());
    let findings = found["findings"].as_array().unwrap().clone();
    let of_volume = findings.iter().filter(|finding| finding["volume"] == "full");
    let offsets: Vec<_> = of_volume.map(|finding| finding["offset_bytes"].clone()).collect();
    assert_eq!(offsets, [299 * 4096], "{findings:?}");
    let stats = json(&world.ok(&["stats", "s", "--json"]));
    assert_eq!(stats["work"]["scrub"]["bad_contents"], 1);
    assert_eq!(stats["findings"].as_array().unwrap().len(), findings.len());
    drop(owner);
}

#[test]
fn a_served_store_is_checked_beside_its_export_and_what_is_there_twice_is_written_again() {
    let world = World::new();
    world.fill("full");
    let owner = world.export();
    assert!(world.ok(&["check", "s", "--deep"]).contains("s: in order"));
    assert!(world.ok(&["repair", "s"]).contains("in order"));
    // Besides content, equal blocks are the two copies of tree pages. The second copy of each is damaged.
    let path = world.place.path("s");
    let medium = fs::File::options().write(true).open(&path).unwrap();
    let mut known = BTreeSet::new();
    for (block, place) in fs::read(&path).unwrap().chunks(4096).zip(0..) {
        let is_page = block.chunks(4).any(|word| *word != block[..4]);
        if is_page && !known.insert(block.to_vec()) {
            medium.write_all_at(&[!block[5]], place * 4096 + 5).unwrap();
        }
    }
    medium.sync_all().unwrap();
    let found = json(&world.ok(&["check", "s", "--json"]));
    assert!(found["counts"]["mendable"].as_u64().unwrap() > 3, "{found}");
    assert!(world.fails(1, &["repair", "s"]).contains("--force"));
    world.ok(&["repair", "s", "--force"]);
    assert!(world.ok(&["check", "s"]).contains("s: in order"));
    // Content is stored once.
    let store = fs::read(&path).unwrap();
    let block = 300u32.to_le_bytes().repeat(1024);
    let at = store.chunks(4096).position(|here| here == block).unwrap() as u64 * 4096;
    medium.write_all_at(b"x", at + 100).unwrap();
    medium.sync_all().unwrap();
    let output = world.run(&["check", "s", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let found = json(&String::from_utf8(output.stdout).unwrap());
    let findings = found["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(
        (&findings[0]["volume"], &findings[0]["offset_bytes"]),
        (&"full".into(), &(299 * 4096).into())
    );
    end(owner, Signal::TERM);
    world.fails(2, &["check", "s"]);
}

#[test]
fn a_served_store_is_compacted_and_its_volumes_read_the_same() {
    let world = World::new();
    world.fill("full");
    let owner = world.export();
    let done = json(&world.ok(&["compact", "s", "--compress", "lz4", "--json"]));
    assert!(done["packed_bytes"].as_u64().unwrap() > 0, "{done}");
    let served = json(&world.ok(&["stats", "s", "--json"]));
    assert!(served["stored_bytes"].as_u64() < served["distinct_bytes"].as_u64(), "{served}");
    end(owner, Signal::TERM);
    let alone = json(&world.ok(&["stats", "s", "--json"]));
    for name in ["distinct_bytes", "stored_bytes", "volumes"] {
        assert_eq!(served[name], alone[name], "{name}");
    }
    world.ok(&["check", "s", "--deep"]);
    world.place.ok(&["compare", "x.raw", "store:s#full"]);
}

#[test]
fn the_table_of_what_a_served_store_does_has_all_names() {
    let world = World::new();
    let owner = world.export();
    let mut printed = BTreeSet::new();
    pages::add_names(&json(&world.ok(&["stats", "s", "--json"]))["work"], &mut printed);
    drop(owner);
    let page = include_str!("../../../../docs/store.md");
    let rows = pages::rows(page, "What a served store does by itself");
    let told = rows.iter().flatten().flat_map(|cell| pages::quoted(cell));
    let told: BTreeSet<String> = told.collect();
    assert_eq!(told, printed);
}

#[test]
fn two_commands_at_once_are_both_done_and_of_the_same_name_one() {
    let world = World::new();
    let owner = world.export();
    let spawn = |args: &[&str]| {
        world.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let names = ["s1", "s2", "s3", "same", "same"];
    let all: Vec<Child> = names.iter().map(|name| spawn(&["snapshot", "s#a", name])).collect();
    let codes =
        all.into_iter().map(|child| child.wait_with_output().unwrap().status.code().unwrap());
    let codes: Vec<i32> = codes.collect();
    assert_eq!(codes[..3], [0; 3]);
    assert_eq!(codes[3] + codes[4], 1, "{codes:?}");
    assert_eq!(json(&world.ok(&["list", "s", "--json"]))["volumes"].as_array().unwrap().len(), 5);
    drop(owner);
}

/// Every answered change is there, every other one is complete or absent, and the store is intact.
#[test]
fn a_killed_owner_leaves_each_command_done_or_not() {
    let world = World::new();
    world.fill("full");
    let mut owner = world.export();
    world.ok(&["snapshot", "s#full", "base"]);
    for round in 0..12u32 {
        let name = format!("n{round}");
        let old = format!("s#old{round}");
        world.ok(&["clone", "s#base", &old[2..]]);
        let args: &[&str] = match round % 4 {
            0 => &["snapshot", "s#a", &name],
            1 => &["rollback", &old, "base"],
            2 => &["delete", &old],
            _ => &["gc", "s"],
        };
        let command = world.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        std::thread::sleep(Duration::from_millis(u64::from(round) * 2));
        end(owner, Signal::KILL);
        let ended = command.unwrap().wait_with_output().unwrap();
        // A command after the kill runs by itself.
        let done = ended.status.success();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(done || said.contains("has ended") || said.contains("in use"), "{args:?}: {said}");
        world.ok(&["check", "s", "--deep"]);
        let list = world.ok(&["list", "s"]);
        let has = |name: &str| list.lines().any(|line| line.split(' ').next() == Some(name));
        match round % 4 {
            0 if done => assert!(has(&name), "{list}"),
            2 if done => assert!(!has(&old[2..]), "{list}"),
            _ => assert!(has("a") && has("base"), "{list}"),
        }
        owner = world.export();
        assert_eq!(world.sockets().len(), 1, "what the dead owner has left is removed");
    }
    end(owner, Signal::TERM);
    assert!(world.sockets().is_empty());
    world.ok(&["check", "s", "--deep"]);
}

#[test]
fn a_command_that_is_interrupted_says_so_and_the_owner_goes_on() {
    let world = World::new();
    let owner = world.export();
    kill_process(Pid::from_child(&owner.0), Signal::STOP).unwrap();
    let mut waits = world.command(&["gc", "s"]);
    let waits = waits.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    kill_process(Pid::from_child(&waits), Signal::INT).unwrap();
    let ended = waits.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    kill_process(Pid::from_child(&owner.0), Signal::CONT).unwrap();
    world.ok(&["snapshot", "s#a", "s1"]);
    end(owner, Signal::TERM);
}
