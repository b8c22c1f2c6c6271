//! A store that is made larger: at rest and while it is served, and what is refused.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;
use std::time::Duration;

use ferrite_testkit::bytes;
use rustix::process::Signal;
use serde_json::Value;

use crate::endings::on_a_small_disk;
use crate::images::{MIB, Place, json};
use crate::served::{World, end};

fn info(place: &Place, key: &str) -> u64 {
    json(&place.store_ok(&["info", "s", "--json"]))[key].as_u64().unwrap()
}

#[test]
fn a_store_that_is_full_grows_and_takes_more_and_all_commands_know_its_size() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "32M"]);
    let data = bytes::words(1..=40 * MIB / 4096, 512);
    fs::write(place.path("x.raw"), &data).unwrap();
    let text = place.fails(1, &["convert", "x.raw", "store:s#x"]);
    assert!(text.contains("no storage space") || text.contains("No space"), "{text}");
    let text = place.store_ok(&["grow", "s", "+64M"]);
    assert!(text.starts_with("s: store of 96 MiB now, was 32 MiB; "), "{text}");
    assert_eq!(
        (info(&place, "store_bytes"), fs::metadata(place.path("s")).unwrap().len()),
        (96 * MIB, 96 * MIB)
    );
    place.ok(&["convert", "--force", "x.raw", "store:s#x"]);
    // A file that others have made longer, and once more by a size.
    File::options().write(true).open(place.path("s")).unwrap().set_len(200 * MIB).unwrap();
    let grown = json(&place.store_ok(&["grow", "s", "--json"]));
    assert_eq!(
        (&grown["before_bytes"], &grown["store_bytes"]),
        (&(96 * MIB).into(), &(200 * MIB).into())
    );
    assert!(grown["free_bytes"].as_u64().unwrap() > 130 * MIB, "{grown}");
    place.store_ok(&["grow", "s", "1G"]);
    place.ok(&["compare", "x.raw", "store:s#x"]);
    let stats = json(&place.store_ok(&["stats", "s", "--json"]));
    assert_eq!(stats["distinct_bytes"], 40 * MIB);
    assert!(stats["available_bytes"].as_u64().unwrap() > 850 * MIB, "{stats}");
    for command in [&["check", "s", "--deep"][..], &["scrub", "s"]] {
        assert!(place.store_ok(command).contains("s: in order\n"));
    }
    place.store_ok(&["delete", "s#x"]);
    place.store_ok(&["gc", "s"]);
    assert!(info(&place, "free_bytes") > 950 * MIB);
    assert!(place.store_ok(&["repair", "s", "--force"]).contains("in order"));
    place.has_no_leftovers();
}

#[test]
fn what_cannot_be_says_why_and_what_to_do_and_changes_nothing() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    let before = fs::read(place.path("s")).unwrap();
    fs::write(place.path("text"), "no store at all".repeat(9999)).unwrap();
    for (code, args, why, help) in [
        (
            2,
            &["grow", "s"][..],
            "its file is no longer than the store, which has 64 MiB",
            "say a size",
        ),
        (
            2,
            &["grow", "s", "32M"],
            "it has 64 MiB now, and a store is never made smaller",
            "send | receive",
        ),
        (2, &["grow", "s", "64M"], "never made smaller: 64 MiB is no more", "+SIZE"),
        (2, &["grow", "s", "-8M"], "never made smaller", "send | receive"),
        (2, &["grow", "s", "+4K"], "too little for a part of its own", "say that size, or more"),
        (1, &["grow", "s", "1000T"], "let it have", "make a new store of that size"),
        (2, &["grow", "s#a", "1G"], "needs a whole store", "leave out #"),
        (3, &["grow", "none", "1G"], "no such file", "ferrite store create"),
        (1, &["grow", "text", "1G"], "no store", ""),
    ] {
        let text = place.store_fails(code, args);
        assert!(text.contains(why) && text.contains(help), "{args:?}: {text}");
    }
    // An opening writes the superblocks as they are.
    assert!(fs::read(place.path("s")).unwrap() == before);
}

#[test]
fn on_a_file_system_without_room_nothing_is_begun() {
    let place = Place::new();
    let script = "$F create s --size 18M --overcommit
                  head -c 9m /dev/zero > filler || true
                  if $F grow s 4G; then exit 9; fi
                  stat -c 'length %s' s
                  $F check s
                  rm filler
                  $F grow s 64M
                  $F check s";
    let Some(text) = on_a_small_disk(&place, script) else { return };
    assert!(
        text.contains("its file system has") && text.contains("the tables of what is new take"),
        "{text}"
    );
    assert!(
        text.contains("length 18874368") && text.contains("note: its file system has"),
        "{text}"
    );
    assert!(text.ends_with("s: in order\n"), "{text}");
}

#[test]
fn a_served_store_grows_beside_its_export_and_its_guests_get_the_room() {
    let world = World::new();
    let owner = world.export();
    let before = json(&world.ok(&["info", "s", "--json"]));
    let text = world.ok(&["grow", "s", "+100M"]);
    assert!(text.contains("now, was"), "{text}");
    let after = json(&world.ok(&["info", "s", "--json"]));
    let more = |key: &str| after[key].as_u64().unwrap() - before[key].as_u64().unwrap();
    assert_eq!(more("store_bytes"), 100 * MIB);
    assert!(more("free_bytes") > 90 * MIB, "{after}");
    let text = world.fails(2, &["grow", "s", "1M"]);
    assert!(text.contains("never made smaller"), "{text}");
    world.ok(&["snapshot", "s#a", "s1"]);
    world.ok(&["gc", "s"]);
    world.ok(&["check", "s"]);
    world.ok(&["scrub", "s"]);
    world.ok(&["stats", "s"]);
    end(owner, Signal::KILL);
    world.ok(&["check", "s", "--deep"]);
    assert_eq!(json(&world.ok(&["info", "s", "--json"]))["store_bytes"], after["store_bytes"]);
}

#[test]
fn a_killed_owner_or_command_leaves_the_old_size_or_the_new_one() {
    let world = World::new();
    let size = || json(&world.ok(&["info", "s", "--json"]))["store_bytes"].as_u64().unwrap();
    for round in 0..8u64 {
        let owner = world.export();
        let before = size();
        let grow = world
            .command(&["grow", "s", "+40M"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        std::thread::sleep(Duration::from_millis(round * 4));
        end(owner, Signal::KILL);
        let ended = grow.unwrap().wait_with_output().unwrap();
        world.ok(&["check", "s", "--deep"]);
        let grown = size() == before + 40 * MIB;
        assert!(grown || size() == before && !ended.status.success(), "{ended:?}");
        // At rest.
        let mut grow = world
            .command(&["grow", "s", "+40M"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(round * 4));
        let _ = grow.kill();
        grow.wait().unwrap();
        world.ok(&["check", "s", "--deep"]);
    }
}

/// As a program that is older by a feature sees it, and as this one sees one of a later program.
#[test]
fn a_store_with_a_feature_that_is_not_known_is_refused_by_name() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    let file = File::options().read(true).write(true).open(place.path("s")).unwrap();
    for at in [0, 4096] {
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, at).unwrap();
        page[32] |= 0x80;
        let sum = crate::commands::crc32c(&page[..4092]);
        page[4092..].copy_from_slice(&sum.to_le_bytes());
        file.write_all_at(&page, at).unwrap();
    }
    for args in [&["list", "s"][..], &["grow", "s", "1G"]] {
        let text = place.store_fails(1, args);
        assert!(text.contains("features that this program does not know (bits 0x80)"), "{text}");
    }
}

#[test]
fn lists_say_when_volumes_were_made_and_keep_it() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    place.store_ok(&["create", "s#a", "1G"]);
    place.store_ok(&["snapshot", "s#a", "b"]);
    place.store_ok(&["clone", "s#b", "c"]);
    let times = |names: [&str; 3]| {
        names.map(|name| {
            json(&place.store_ok(&["info", &format!("s#{name}"), "--json"]))["created_unix_s"]
                .as_u64()
                .unwrap()
        })
    };
    let made = times(["a", "b", "c"]);
    assert!(made.is_sorted() && made[0] >= now && made[2] < now + 3600, "{made:?} from {now}");
    place.store_ok(&["rollback", "s#a", "b"]);
    place.store_ok(&["rename", "s#a", "z"]);
    place.store_ok(&["resize", "s#z", "2G"]);
    assert_eq!(times(["z", "b", "c"]), made);
    let listed = json(&place.store_ok(&["list", "s", "--json"]));
    assert!(
        listed["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .all(|volume| volume["created_unix_s"] != Value::Null)
    );
    assert!(place.store_ok(&["info", "s#b"]).contains(" UTC"));
}
