//! `ferrite store` on a store that is not served: its effects, and its output.

use std::fs;
use std::os::unix::fs::symlink;

use ferrite_testkit::bytes::are_all;
use serde_json::Value;

use crate::images::{MIB, Place, json};

/// A store with a volume, a snapshot and a clone.
fn place() -> Place {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    place.store_ok(&["create", "s#disk", "1G"]);
    place.store_ok(&["snapshot", "s#disk", "monday"]);
    place.store_ok(&["clone", "s#monday", "copy"]);
    place
}

fn names(listed: &Value) -> Vec<&str> {
    let all = listed["volumes"].as_array().unwrap();
    all.iter().map(|volume| volume["name"].as_str().unwrap()).collect()
}

#[test]
fn volumes_are_made_listed_and_deleted() {
    let place = place();
    let listed = json(&place.store_ok(&["list", "s", "--json"]));
    assert_eq!(names(&listed), ["copy", "disk", "monday"]);
    let volume = |name: &str| json(&place.store_ok(&["info", &format!("s#{name}"), "--json"]));
    let monday = volume("monday");
    assert_eq!((&monday["snapshot"], &monday["origin"]), (&true.into(), &"disk".into()));
    assert_eq!(monday["virtual_bytes"], 1024 * MIB);
    assert_eq!(
        (&volume("copy")["origin"], &volume("copy")["snapshot"]),
        (&"monday".into(), &false.into())
    );
    let text = place.store_ok(&["list", "s"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "NAME    KIND      SIZE   DOMAIN   FROM    CREATED");
    assert!(lines[3].starts_with("monday  snapshot  1 GiB  default  disk    2"), "{text}");
    assert!(lines[3].ends_with(" UTC"), "{text}");
    place.store_ok(&["rollback", "s#disk", "monday"]);
    // Its clones stay, and no longer name their origin: the name may be reused.
    let deleted = json(&place.store_ok(&["delete", "s#monday", "--json"]));
    assert_eq!(
        (&deleted["done"], &deleted["volume"]["name"]),
        (&"deleted".into(), &"monday".into())
    );
    assert_eq!(names(&json(&place.store_ok(&["list", "s", "--json"]))), ["copy", "disk"]);
    assert_eq!(volume("copy")["origin"], Value::Null);
    place.store_ok(&["create", "s#other", "8K"]);
    assert_eq!(volume("copy")["origin"], Value::Null);
    assert!(place.store_ok(&["check", "s"]).ends_with("s: in order\n"));
}

#[test]
fn domains_are_made_when_they_are_named() {
    let place = place();
    place.store_ok(&["create", "s#guest", "1G", "--domain", "tenant-2"]);
    let info = json(&place.store_ok(&["info", "s", "--json"]));
    assert_eq!(info["domains"], serde_json::json!(["default", "tenant-2"]));
    assert_eq!((&info["volumes"], &info["snapshots"]), (&4.into(), &1.into()));
    let text = place.store_fails(1, &["rollback", "s#guest", "monday"]);
    assert!(text.contains("the snapshot is in another domain"), "{text}");
    // The keys differ.
    let bytes = fs::read(place.path("s")).unwrap();
    // All stores have the domain `default`, so that any command finds a domain.
    place.store_ok(&["create", "t", "--size", "32M"]);
    let fresh = json(&place.store_ok(&["info", "t", "--json"]));
    assert_eq!(fresh["domains"], serde_json::json!(["default"]));
    let key = |name: &str| {
        let mut entry = vec![name.len() as u8];
        entry.extend(name.as_bytes());
        let blocks = bytes.chunks(4096).rev().filter(|block| !are_all(block, 0));
        let at = |block: &[u8]| block.windows(entry.len()).rposition(|found| found == entry);
        let mut found = blocks.filter_map(|block| at(block).map(|at| block[at - 32..at].to_vec()));
        found.next().unwrap()
    };
    assert!(key("tenant-2").iter().any(|byte| *byte != 0));
    assert_ne!(key("default"), key("tenant-2"));
}

#[test]
fn a_name_that_is_taken_is_refused_and_nothing_is_lost() {
    let place = place();
    let text = place.store_fails(1, &["create", "s", "--size", "32M"]);
    assert!(text.contains("it exists and would be lost") && text.contains("--force"), "{text}");
    for args in [
        &["create", "s#disk", "2G"][..],
        &["create", "s#monday", "2G"],
        &["create", "s#disk", "1G", "--domain", "new"],
        &["snapshot", "s#disk", "monday"],
        &["clone", "s#disk", "copy"],
        &["rename", "s#disk", "copy"],
        &["rename", "s#monday", "disk"],
        &["rename", "s#disk", "disk"],
    ] {
        let text = place.store_fails(1, args);
        assert!(text.contains(" of that name: "), "{text}");
    }
    let listed = json(&place.store_ok(&["list", "s", "--json"]));
    assert_eq!(names(&listed), ["copy", "disk", "monday"]);
    assert_eq!(listed["store"]["domains"], serde_json::json!(["default"]));
    place.store_ok(&["create", "s", "--size", "32M", "--force"]);
    assert_eq!(names(&json(&place.store_ok(&["list", "s", "--json"]))), [""; 0]);
    place.has_no_leftovers();
}

#[test]
fn names_that_cannot_be_and_arguments_that_do_not_fit_are_wrong_usage() {
    let place = place();
    let long = format!("s#{}", "x".repeat(64));
    for args in [
        &["create", "t"][..],
        &["create", "t", "64M"],
        &["create", "s#a"],
        &["create", "s#a", "--size", "64M"],
        &["create", "s#a", "1G", "--force"],
        &["create", "s#a", "1000"],
        &["create", "s#a", "0"],
        &["create", "s#a", "8192T"],
        &["create", "t", "--size", "1M"],
        &["create", &long, "1G"],
        &["create", "s#-a", "1G"],
        &["create", "s#a b", "1G"],
        &["create", "s#a\n", "1G"],
        &["create", "t\n", "--size", "64M"],
        &["create", "s#a", "1G", "--domain", ".x"],
        &["snapshot", "s", "a"],
        &["snapshot", "s#disk", "a/b"],
        &["resize", "s#disk", "0"],
        &["resize", "s#disk", "1000"],
        &["resize", "s#disk", "8192T"],
        &["resize", "s#disk", "+8191P"],
        &["resize", "s#disk", "-2G", "--shrink"],
        &["resize", "s", "2G"],
        &["rename", "s", "t"],
        &["rename", "s#disk", "a/b"],
        &["list", "s#disk"],
        &["stats", "s#disk"],
        &["create", "#a", "1G"],
    ] {
        let output = place.store(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    }
    for args in [
        &["info", "s#no"][..],
        &["delete", "s#no"],
        &["rename", "s#no", "a"],
        &["resize", "s#no", "1G"],
        &["snapshot", "s#no", "a"],
        &["rollback", "s#disk", "no"],
        &["create", "no#a", "1G"],
        &["list", "no"],
        &["create", "no/t", "--size", "64M"],
    ] {
        place.store_fails(3, args);
    }
    for (volume, to, why) in [
        ("s#disk", "copy", "to a snapshot only, and the second name is not one"),
        ("s#monday", "monday", "it is a snapshot, which never changes"),
    ] {
        let text = place.store_fails(1, &["rollback", volume, to]);
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_volume_gets_the_content_of_a_snapshot_of_another_by_force_only() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    place.store_ok(&["create", "s#web", "8M"]);
    place.store_ok(&["create", "s#db", "16M"]);
    place.store_ok(&["snapshot", "s#db", "monday"]);
    let text = place.store_fails(1, &["rollback", "s#web", "monday"]);
    assert!(text.contains("monday is a snapshot of db, not of web"), "{text}");
    assert!(place.store_ok(&["info", "s#web"]).contains("8 MiB"));
    // What a clone began with is its own, by way of another clone, too; a later snapshot of the original is not.
    place.store_ok(&["clone", "s#monday", "db2"]);
    place.store_ok(&["clone", "s#db2", "db3"]);
    place.store_ok(&["snapshot", "s#db", "tuesday"]);
    place.store_ok(&["rollback", "s#db3", "monday"]);
    place.store_fails(1, &["rollback", "s#db3", "tuesday"]);
    // Its original is gone, and with it what the snapshot was made from.
    place.store_ok(&["delete", "s#db"]);
    let text = place.store_fails(1, &["rollback", "s#web", "tuesday"]);
    assert!(text.contains("the store does not say that tuesday is a snapshot of web"), "{text}");
    let text = place.store_ok(&["rollback", "s#web", "tuesday", "--force"]);
    assert_eq!(text, "s#web: rolled back, 16 MiB now\n");
}

#[test]
fn a_store_is_found_in_another_folder_behind_a_link_and_with_a_sign_in_its_name() {
    let place = place();
    fs::create_dir(place.path("folder")).unwrap();
    symlink("../s", place.path("folder/link")).unwrap();
    place.store_ok(&["snapshot", "folder/link#disk", "tuesday"]);
    place.store_ok(&["snapshot", &format!("{}#disk", place.path("s")), "wednesday"]);
    let listed = json(&place.store_ok(&["list", "folder/link", "--json"]));
    assert_eq!(names(&listed), ["copy", "disk", "monday", "tuesday", "wednesday"]);
    // A new store does not replace a link.
    let text = place.store_fails(1, &["create", "folder/link", "--size", "64M", "--force"]);
    assert!(text.contains("no regular file"), "{text}");
    place.store_ok(&["create", "folder/a#b#", "--size", "64M"]);
    place.store_ok(&["create", "folder/a#b#disk", "1M"]);
    assert_eq!(names(&json(&place.store_ok(&["list", "folder/a#b#", "--json"]))), ["disk"]);
}

#[test]
fn stores_may_be_named_as_images_are_and_volumes_that_are_not_get_told_how() {
    let place = place();
    assert_eq!(place.store_ok(&["list", "store:s"]), place.store_ok(&["list", "s"]));
    place.store_ok(&["snapshot", "store:s#disk", "tuesday"]);
    let text = place.fails(3, &["info", "s#disk"]);
    assert!(text.contains("say store:s#disk"), "{text}");
    let text = place.fails(3, &["info", "t#disk"]);
    assert!(!text.contains("say store:"), "{text}");
    // No file is made beside the store by mistake.
    for args in [&["convert", "store:s#disk", "s#copy-of"][..], &["create", "s#new.raw", "1M"]] {
        let text = place.fails(2, args);
        assert!(text.contains("s is a store") && text.contains("say store:s#"), "{text}");
    }
    place.ok(&["create", "t#new.raw", "1M"]);
}

#[test]
fn what_is_no_store_or_a_part_of_one_is_refused_in_words() {
    let place = place();
    fs::write(place.path("text"), "no store\n".repeat(9000)).unwrap();
    fs::write(place.path("empty"), "").unwrap();
    fs::create_dir(place.path("dir")).unwrap();
    for name in ["text", "empty"] {
        let text = place.store_fails(1, &["list", name]);
        assert!(text.contains("it is no store"), "{text}");
        place.store_fails(1, &["create", &format!("{name}#a"), "1G"]);
        place.store_fails(1, &["check", name]);
    }
    place.store_fails(1, &["list", "dir"]);
    let whole = fs::read(place.path("s")).unwrap();
    // Another version, in all pages of the superblock; its checksum does not matter.
    let mut later = whole.clone();
    for at in [0, 4096, whole.len() - 8192, whole.len() - 4096] {
        later[at + 8] = 9;
        let sum = crc32c(&later[at..at + 4092]);
        later[at + 4092..at + 4096].copy_from_slice(&sum.to_le_bytes());
    }
    fs::write(place.path("later"), later).unwrap();
    for args in [&["list", "later"][..], &["check", "later"], &["delete", "later#disk"]] {
        let text = place.store_fails(1, args);
        assert!(text.contains("version 9"), "{text}");
    }
    fs::write(place.path("short"), &whole[..whole.len() / 2]).unwrap();
    let text = place.store_fails(5, &["list", "short"]);
    assert!(text.contains("longer than what it is in"), "{text}");
    assert!(text.contains(&format!("truncate -s {}", whole.len())), "{text}");
    place.store_fails(5, &["create", "short#a", "1G"]);
    let output = place.store(&["check", "short"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stdout).unwrap().contains("longer than"));
}

/// The store is opened by another page of its superblock. As a raw disk it would be overwritten by its guest.
#[test]
fn a_store_whose_first_pages_are_lost_is_no_raw_disk() {
    let place = place();
    let whole = fs::read(place.path("s")).unwrap();
    for lost in [4096, 8192] {
        let mut torn = whole.clone();
        torn[..lost].fill(0);
        fs::write(place.path("torn"), torn).unwrap();
        place.store_ok(&["list", "torn"]);
        let text = place.fails(1, &["info", "torn"]);
        assert!(text.contains("it looks like a store of volumes"), "{text}");
    }
}

/// CRC32C, bit by bit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = !0u32;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82F6_3B78 } else { 0 };
        }
    }
    !sum
}

#[test]
fn a_damaged_copy_is_told_of_and_mended_where_that_is_honest() {
    let place = place();
    assert!(place.store_ok(&["repair", "s"]).contains("in order"));
    let mut bytes = fs::read(place.path("s")).unwrap();
    bytes[100] ^= 1;
    fs::write(place.path("s"), &bytes).unwrap();
    let text = place.store_ok(&["check", "s"]);
    assert!(text.contains("superblock: at byte 0 ") && text.contains("repair mends it"), "{text}");
    let text = place.store_fails(1, &["repair", "s"]);
    assert!(text.contains("--force does it"), "{text}");
    assert_eq!(fs::read(place.path("s")).unwrap(), bytes);
    let text = place.store_ok(&["repair", "--force", "s"]);
    assert!(text.contains("in order") && text.contains("1 block written again"), "{text}");
    let checked = json(&place.store_ok(&["check", "--deep", "s", "--json"]));
    assert_eq!(checked["findings"], serde_json::json!([]));
    // Both copies: no valid one is left.
    let end = bytes.len();
    for at in [100, end - 8192 + 100] {
        bytes[at] ^= 8;
    }
    fs::write(place.path("s"), &bytes).unwrap();
    let output = place.store(&["check", "s"]);
    assert_eq!(output.status.code(), Some(2));
    place.store_fails(5, &["list", "s"]);
    place.store_fails(5, &["repair", "--force", "s"]);
}

#[test]
fn stats_say_what_can_be_written_what_is_kept_and_what_the_file_system_has() {
    let place = place();
    let text = place.store_ok(&["stats", "s"]);
    for line in ["ratio       -", "available   ", "reserved    ", "file system "] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line}: {text}");
    }
    let stats = json(&place.store_ok(&["stats", "s", "--json"]));
    let bytes = |name: &str| stats[name].as_u64().unwrap();
    assert!(bytes("file_system_free_bytes") > 0);
    assert!(bytes("available_bytes") > 0 && bytes("reserved_bytes") > 0);
    assert!(bytes("available_bytes") + bytes("reserved_bytes") <= bytes("free_bytes"));
}

#[test]
fn a_volume_is_resized_and_renamed_and_what_was_made_of_it_stays_as_it_is() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    place.pattern("x.raw", 4 * MIB, &[(0, 8192), (3 * MIB, 4096)]);
    place.ok(&["convert", "x.raw", "store:s#web"]);
    place.store_ok(&["snapshot", "s#web", "s10"]);
    place.store_ok(&["clone", "s#web", "copy"]);
    let resized = json(&place.store_ok(&["resize", "s#web", "8M", "--json"]));
    assert_eq!(
        (&resized["done"], &resized["volume"]["virtual_bytes"]),
        (&"resized".into(), &(8 * MIB).into())
    );
    // The loss of data has to be allowed.
    for (of, args) in
        [("store", ["resize", "s#web", "2M"]), ("image", ["resize", "store:s#web", "2M"])]
    {
        let output = place.command_of(of, &args).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains("--shrink does it"), "{text}");
        assert!(text.contains("6 MiB at its end would be gone"), "{text}");
    }
    assert_eq!(place.store_ok(&["resize", "s#web", "-6M", "--shrink"]), "s#web: 2 MiB now\n");
    assert_eq!(place.ok(&["resize", "store:s#web", "+6M"]), "s#web: 8 MiB now\n");
    let text = place.store_fails(1, &["resize", "s#s10", "8M"]);
    assert!(text.contains("a snapshot, which keeps its size"), "{text}");
    assert_eq!(place.store_ok(&["rename", "s#web", "www"]), "s#www: renamed, 8 MiB\n");
    place.store_ok(&["rename", "s#s10", "s2"]);
    let text = place.store_fails(1, &["rename", "s#www", "www.partial"]);
    assert!(text.contains("does not end in .partial"), "{text}");
    // The old name is free.
    place.store_ok(&["create", "s#s10", "1M"]);
    let before = fs::read(place.path("x.raw")).unwrap();
    let mut cut = before.clone();
    cut[2 * MIB as usize..].fill(0);
    cut.resize(8 * MIB as usize, 0);
    for (name, content) in [("www", &cut), ("s2", &before), ("copy", &before)] {
        place.ok(&["convert", &format!("store:s#{name}"), &format!("{name}.raw")]);
        assert!(fs::read(place.path(&format!("{name}.raw"))).unwrap() == *content, "{name}");
    }
    let text = place.store_ok(&["list", "s", "--used"]);
    let columns = text.lines().map(|line| line.split_at(46.min(line.len())).0.trim_end());
    let text: String = columns.map(|line| line.to_owned() + "\n").collect();
    let expected = "NAME  KIND      SIZE   USED     DOMAIN   FROM
copy  volume    4 MiB  12 KiB   default  www
s2    snapshot  4 MiB  12 KiB   default  www
s10   volume    1 MiB  0 bytes  default  -
www   volume    8 MiB  8 KiB    default  -
";
    assert_eq!(text, expected);
    let listed = json(&place.store_ok(&["list", "s", "--used", "--json"]));
    assert_eq!(listed["volumes"][3]["mapped_bytes"], 8192);
    assert!(place.store_ok(&["check", "s", "--deep"]).contains("s: in order\n"));
}
