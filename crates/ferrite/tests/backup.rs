//! `ferrite backup`: chains of backups, what they are restored to, and what is refused.

mod images;
mod pages;

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_testkit::wait_until;
use images::{MIB, Place, json, qemu_img};

/// A disk with a chain of three backups in the folder `b`: `one`, `two`, `three`. After each the disk was copied to
/// `one.img` and so on.
fn chain(place: &Place, image: &str) {
    place.pattern("begin.img", 21 * MIB + 512, &[(0, MIB), (9 * MIB, 70_000), (21 * MIB, 512)]);
    place.ok(&["convert", "begin.img", image]);
    let writes: [&[(u64, u64)]; 3] =
        [&[(MIB, 512)], &[(5 * MIB, 4096), (21 * MIB, 512)], &[(5 * MIB, 512), (13 * MIB, MIB)]];
    for (name, writes) in ["one", "two", "three"].into_iter().zip(writes) {
        place.write(image, writes);
        place.backup_ok(&["create", image, "b", "--name", name]);
        place.ok(&["convert", image, &format!("{name}.img")]);
    }
}

#[test]
fn each_backup_of_a_chain_is_restored_as_the_disk_was() {
    for image in ["disk.qcow2", "disk.vhd", "disk.raw"] {
        let place = Place::new();
        chain(&place, image);
        let list = json(&place.backup_ok(&["list", "b", "--json"]));
        let parents: Vec<_> =
            list.as_array().unwrap().iter().map(|b| b["parent"].clone()).collect();
        assert_eq!(serde_json::json!(parents), serde_json::json!([null, "one", "two"]));
        for name in ["one", "two", "three"] {
            let to = format!("{name}-restored.img");
            place.backup_ok(&["restore", "b", &to, "--name", name]);
            assert!(place.same(&to, &format!("{name}.img")), "{image} {name}");
            if let Some(text) = qemu_img(&[
                "compare",
                "-F",
                "raw",
                &place.path(&format!("b/{name}.qcow2")),
                &place.path(&to),
            ]) {
                assert!(text.contains("identical"), "{text}");
            }
        }
        // The newest, without a name.
        place.backup_ok(&["restore", "b", "newest.vhd"]);
        place.ok(&["compare", "newest.vhd", "three.img"]);
        assert!(place.backup_ok(&["verify", "b"]).lines().all(|line| line.contains(": good")));
    }
}

#[test]
fn an_incremental_backup_copies_only_what_has_changed() {
    let place = Place::new();
    place.pattern("begin.img", 256 * MIB, &[(0, 64 * MIB)]);
    place.ok(&["convert", "begin.img", "disk.qcow2"]);
    let full = json(&place.backup_ok(&["create", "disk.qcow2", "b", "--json"]));
    place.write("disk.qcow2", &[(17 * MIB, 4096)]);
    let next = json(&place.backup_ok(&["create", "disk.qcow2", "b", "--json", "--incremental"]));
    assert_eq!(full["read_bytes"], 64 * MIB, "holes are not read");
    assert!(next["read_bytes"].as_u64().unwrap() <= 4 * MIB, "{next}");
    assert!(next["data_bytes"].as_u64().unwrap() <= MIB * 6, "{next}");
    assert_eq!(next["parent"], full["name"]);
}

#[test]
fn what_was_changed_in_a_folder_is_noticed_and_never_restored() {
    let place = Place::new();
    chain(&place, "disk.qcow2");
    // Data of the second one.
    let path = place.path("b/two.qcow2");
    let data = File::options().write(true).open(&path).unwrap();
    let disk = fs::read(place.path("two.img")).unwrap();
    let written = &disk[5 << 20..(5 << 20) + 512];
    let image = fs::read(&path).unwrap();
    let at = image.chunks(512).position(|sector| sector == written).unwrap() * 512;
    data.write_all_at(b"changed", at as u64).unwrap();
    place.backup_fails(5, &["restore", "b", "x.img", "--name", "two"]);
    assert!(!Path::new(&place.path("x.img")).exists());
    place.has_no_leftovers();
    let output = place.backup(&["verify", "b", "--json"]);
    assert_eq!(output.status.code(), Some(5));
    let found = json(&String::from_utf8(output.stdout).unwrap());
    let damaged = found
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["damaged_regions"] != serde_json::json!([]));
    assert!(damaged.map(|one| one["name"].clone()).any(|name| name == "two"), "{found}");
    place.backup_ok(&["restore", "b", "first.img", "--name", "one"]);
    assert!(place.same("first.img", "one.img"));
    // A manifest.
    let path = place.path("b/one.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("created_unix_s\":1", "created_unix_s\":2", 1)).unwrap();
    let text = place.backup_fails(5, &["restore", "b", "x.img", "--name", "one"]);
    assert!(text.contains("was changed"), "{text}");
    // A missing parent.
    fs::remove_file(path).unwrap();
    let text = place.backup_fails(1, &["restore", "b", "x.img", "--name", "two"]);
    assert!(text.contains("stands on backup one, which is missing"), "{text}");
    let text = place.backup_ok(&["list", "b"]);
    assert_eq!(text.matches("damaged").count(), 2, "{text}");
}

#[test]
fn what_would_lose_something_is_refused() {
    let place = Place::new();
    chain(&place, "disk.qcow2");
    let text = place.backup_fails(1, &["create", "disk.qcow2", "b", "--name", "two"]);
    assert!(text.contains("there is a backup of this name"), "{text}");
    place.backup_fails(2, &["create", "disk.qcow2", "b", "--name", "../x"]);
    place.backup_fails(1, &["restore", "b", "one.img"]);
    place.backup_ok(&["restore", "b", "one.img", "--force"]);
    assert!(place.same("one.img", "three.img"));
    place.ok(&["create", "small.img", "8M"]);
    place.backup_fails(2, &["restore", "b", "small.img", "-n"]);
    place.ok(&["create", "large.img", "32M"]);
    place.backup_ok(&["restore", "b", "large.img", "-n"]);
    place.ok(&["compare", "large.img", "three.img"]);
    fs::write(place.path("file"), "x").unwrap();
    let text = place.backup_fails(1, &["create", "disk.qcow2", "file"]);
    assert!(text.contains("a file has that name"), "{text}");
    place.backup_fails(3, &["restore", "b", "x.img", "--name", "four"]);
    place.backup_fails(3, &["list", "none"]);
    // The map of this folder's backups is not that of another one's.
    let text = place.backup_fails(1, &["create", "disk.qcow2", "other"]);
    assert!(text.contains("belongs to no usable backup in other"), "{text}");
    place.backup_ok(&["create", "disk.qcow2", "other", "--map", "other"]);
    place.write("disk.qcow2", &[(2 * MIB, 512)]);
    for (folder, map) in [("b", "backup"), ("other", "other")] {
        place.backup_ok(&["create", "disk.qcow2", folder, "--map", map, "--incremental"]);
        place.backup_ok(&["restore", folder, &format!("{folder}.img")]);
        place.ok(&["compare", &format!("{folder}.img"), "disk.qcow2"]);
    }
    // A copy of the image has no map, so its backup is a full one.
    fs::copy(place.path("disk.qcow2"), place.path("copy.qcow2")).unwrap();
    let name = "disk.qcow2.ferrite-dirty";
    fs::copy(place.path(name), place.path("copy.qcow2.ferrite-dirty")).unwrap();
    place.backup_fails(1, &["create", "copy.qcow2", "b", "--incremental"]);
    let output = place.backup(&["create", "copy.qcow2", "b", "--json"]);
    // The log says that the map is void.
    assert!(output.status.success(), "{output:?}");
    let done = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(done["parent"], serde_json::Value::Null);
    let text = place.backup_fails(2, &["restore", "b", "x.img"]);
    assert!(text.contains("several disks"), "{text}");
}

#[test]
fn removing_a_backup_orphans_none() {
    let place = Place::new();
    chain(&place, "disk.qcow2");
    let text = place.backup_fails(1, &["prune", "b", "--keep", "1"]);
    assert!(text.contains("backup three, which is kept, stands on it"), "{text}");
    place.backup_fails(1, &["prune", "b", "--name", "one"]);
    place.backup_ok(&["merge", "b", "two"]);
    place.backup_fails(1, &["merge", "b", "two"]);
    place.backup_ok(&["prune", "b", "--name", "one"]);
    for name in ["two", "three"] {
        place.backup_ok(&["restore", "b", "x.img", "--force", "--name", name]);
        assert!(place.same("x.img", &format!("{name}.img")));
    }
    let text = place.backup_ok(&["prune", "b", "--keep", "1", "--merge"]);
    assert!(text.contains("three: a full backup now") && text.contains("two: removed"), "{text}");
    place.backup_ok(&["verify", "b"]);
    // The chain goes on.
    place.write("disk.qcow2", &[(3 * MIB, 512)]);
    place.backup_ok(&["create", "disk.qcow2", "b", "--name", "four", "--incremental"]);
    place.backup_ok(&["restore", "b", "x.img", "--force"]);
    place.ok(&["compare", "x.img", "disk.qcow2"]);
    assert_eq!(fs::read_dir(place.path("b")).unwrap().count(), 4);
}

/// Killed at many points, a backup is continued or begun again, and no change is lost.
#[test]
fn a_backup_that_is_killed_anywhere_loses_no_change() {
    let place = Place::new();
    place.pattern("begin.img", 96 * MIB, &[(0, 80 * MIB)]);
    place.ok(&["convert", "begin.img", "disk.qcow2"]);
    let mut killed = 0;
    for round in 0..12_u64 {
        place.write("disk.qcow2", &[((round * 7 % 90) * MIB, 64 << 10)]);
        let full = if round % 4 == 3 { &["--full"][..] } else { &[] };
        let mut command = place.command_of("backup", &["create", "disk.qcow2", "b"]);
        command.args(full).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(10 + round * 9));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        if round % 3 == 2 {
            place.backup_ok(&["create", "disk.qcow2", "b"]);
            place.backup_ok(&["restore", "b", "x.img", "--force"]);
            place.ok(&["compare", "x.img", "disk.qcow2"]);
        }
    }
    assert!(killed > 0, "none was killed");
    place.backup_ok(&["create", "disk.qcow2", "b"]);
    place.backup_ok(&["verify", "b"]);
    place.backup_ok(&["restore", "b", "x.img", "--force"]);
    place.ok(&["compare", "x.img", "disk.qcow2"]);
}

/// The data of a backup get their name by a second one, and lose the first: it may be killed between the two.
#[test]
fn a_backup_whose_data_have_both_names_is_continued() {
    let place = Place::new();
    place.pattern("begin.img", 96 * MIB, &[(0, 80 * MIB)]);
    place.ok(&["convert", "begin.img", "disk.qcow2"]);
    let mut command = place.command_of("backup", &["create", "disk.qcow2", "b", "--name", "one"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // The unfinished manifest comes when the file of the data is there.
    let [unfinished, partial, data] =
        ["b/one.json.partial", "b/one.qcow2.partial", "b/one.qcow2"].map(|name| place.path(name));
    wait_until("an unfinished backup", || Path::new(&unfinished).exists());
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "it was done before it was killed");
    fs::hard_link(&partial, &data).unwrap();
    let done = json(&place.backup_ok(&["create", "disk.qcow2", "b", "--json"]));
    assert!(done["name"] == "one" && done["resumed"] == true, "{done}");
    assert!(!Path::new(&partial).exists() && !Path::new(&unfinished).exists());
    place.backup_ok(&["verify", "b"]);
    place.backup_ok(&["restore", "b", "x.img"]);
    place.ok(&["compare", "x.img", "disk.qcow2"]);
}

#[test]
fn a_backup_without_room_is_not_called_good_and_is_continued() {
    let place = Place::new();
    place.pattern("begin.img", 64 * MIB, &[(0, 40 * MIB)]);
    place.ok(&["convert", "begin.img", "disk.qcow2"]);
    let folder = place.path("small");
    fs::create_dir(&folder).unwrap();
    let mount = |options: &str| {
        let mut done = Command::new("mount");
        done.args(["-t", "tmpfs", "-o", options, "none", &folder]);
        done.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    if !mount("size=16m") {
        eprintln!("skipped: this user cannot mount a file system");
        return;
    }
    let text = place.backup_fails(1, &["create", "disk.qcow2", "small"]);
    let list = json(&place.backup_ok(&["list", "small", "--json"]));
    let grown = mount("remount,size=128m");
    let done = place.backup(&["create", "disk.qcow2", "small", "--json"]);
    let restored = place.backup(&["restore", "small", "x.img"]);
    let unmounted = Command::new("umount").arg(&folder).status().unwrap().success();
    assert!(unmounted && grown);
    assert!(text.contains("make room"), "{text}");
    assert_eq!(list[0]["state"], "unfinished", "{list}");
    assert!(done.status.success() && restored.status.success());
    assert_eq!(json(&String::from_utf8(done.stdout).unwrap())["resumed"], true);
    place.ok(&["compare", "x.img", "disk.qcow2"]);
}

#[test]
fn a_backup_goes_through_a_pipe_and_half_of_one_is_refused() {
    let place = Place::new();
    chain(&place, "disk.qcow2");
    let stream = place.backup(&["create", "disk.qcow2", "-"]);
    assert!(stream.status.success());
    let restore = |name: &str, bytes: &[u8]| {
        fs::write(place.path("stream"), bytes).unwrap();
        let mut command = place.command_of("backup", &["restore", "-", name]);
        command.stdin(File::open(place.path("stream")).unwrap()).output().unwrap()
    };
    let all = &stream.stdout[..];
    assert!(restore("x.qcow2", all).status.success());
    place.ok(&["compare", "x.qcow2", "disk.qcow2"]);
    let mut changed = all.to_vec();
    changed[1000] ^= 1;
    for bad in [&all[..all.len() / 2], &all[..all.len() - 3], &changed, b"x", b""] {
        assert_eq!(restore("y.qcow2", bad).status.code(), Some(5));
        assert!(!Path::new(&place.path("y.qcow2")).exists());
    }
    place.has_no_leftovers();
}

#[test]
fn volumes_of_stores_are_backed_up_by_what_differs_from_their_last_backup() {
    const VOLUME: &str = "store:s.store#v";
    let place = Place::new();
    place.pattern("begin.img", 17 * MIB, &[(0, MIB), (9 * MIB, 4096)]);
    place.store_ok(&["create", "s.store", "--size", "128M"]);
    place.ok(&["convert", "begin.img", VOLUME]);
    place.backup_fails(1, &["create", VOLUME, "b", "--incremental"]);
    place.backup_ok(&["create", VOLUME, "b", "--name", "one"]);
    // Data where there were none, other data, and zeros where there were data.
    fs::copy(place.path("begin.img"), place.path("two.img")).unwrap();
    let two = File::options().write(true).open(place.path("two.img")).unwrap();
    two.write_all_at(&[7; 4096], 13 * MIB).unwrap();
    two.write_all_at(&[7; 512], 512).unwrap();
    two.write_all_at(&[0; 4096], 9 * MIB).unwrap();
    let make = |from: &str| {
        place.store_ok(&["delete", "s.store#v"]);
        place.ok(&["convert", from, VOLUME]);
    };
    make("two.img");
    place.backup_ok(&["create", VOLUME, "b", "--name", "two", "--incremental"]);
    // It grows, with data behind its old end, in the region that was not whole.
    fs::copy(place.path("two.img"), place.path("three.img")).unwrap();
    let grown = File::options().write(true).open(place.path("three.img")).unwrap();
    grown.set_len(25 * MIB).unwrap();
    grown.write_all_at(&[9; 512], 17 * MIB).unwrap();
    make("three.img");
    let three = json(&place.backup_ok(&["create", VOLUME, "b", "--name", "three", "--json"]));
    assert_eq!(three["parent"], "two");
    place.backup_ok(&["create", VOLUME, "b", "--name", "same", "--incremental"]);
    for (name, model) in
        [("one", "begin.img"), ("two", "two.img"), ("three", "three.img"), ("same", "three.img")]
    {
        place.backup_ok(&["restore", "b", "x.img", "--name", name, "--force"]);
        place.ok(&["compare", "x.img", model]);
    }
    assert!(place.backup_ok(&["verify", "b"]).lines().all(|line| line.contains(": good")));
    let regions = |name: &str| {
        let text = fs::read_to_string(place.path(&format!("b/{name}.json"))).unwrap();
        json(&text)["regions"].as_array().unwrap().len()
    };
    assert_eq!(["one", "two", "three", "same"].map(regions), [2, 3, 1, 0]);
    // Of another disk, nothing.
    place.ok(&["convert", "begin.img", "store:s.store#w"]);
    let said = place.backup_ok(&["create", "store:s.store#w", "b"]);
    assert!(said.contains(": full") && said.contains("no backup of this disk"), "{said}");
    place.backup_ok(&["restore", "b", "store:s.store#x", "--name", "three"]);
    place.ok(&["compare", "store:s.store#x", "three.img"]);
}

#[test]
fn the_commands_of_the_manual_restore_a_disk_and_one_file() {
    let page = include_str!("../../../docs/backup.md");
    let commands = pages::commands(page);
    let (disk, file) = commands.split_once("truncate ").unwrap();
    pages::run(disk);
    let has = |program: &str| Command::new(program).arg("-V").output().is_ok();
    let missing = ["nbdfuse", "debugfs", "mkfs.ext4", "fusermount3"].into_iter().find(|p| !has(p));
    match missing {
        Some(missing) => eprintln!("skipped: {missing} is not installed"),
        None if fs::File::open("/dev/fuse").is_err() => eprintln!("skipped: this user has no FUSE"),
        None => pages::run(&format!("truncate {file}")),
    }
}
