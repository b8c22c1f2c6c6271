//! `ferrite backup create` of a disk that a guest writes to: by the program, a daemon, and a guest that verifies what it
//! reads.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::places::Small;
use ferrite_testkit::{is_night, wait_until};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::live::Lab;
use crate::load::Load;
use crate::roles::{self, keeper, kill_pid, worker};

/// The place of a block that a client writes, behind those of the guest. It is in another region than these.
const AT: u64 = 5 << 20;
/// A speed at which a backup of both regions of the disk lasts long enough to be looked at.
const SLOW: &str = "8M";
const DISK: &str = "web1/xvda";

fn ok(lab: &Lab, words: &[&str]) -> String {
    let done = lab.program(words);
    assert!(done.status.success(), "{words:?}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

fn list(lab: &Lab) -> Value {
    serde_json::from_str(&ok(lab, &["backup", "list", "b", "--json"])).unwrap()
}

/// Makes a backup of the running disk.
fn backup(lab: &Lab, more: &[&str]) -> Value {
    let words = [&["backup", "create", DISK, "b", "--json"], more].concat();
    serde_json::from_str(&lab.does(&words)).unwrap()
}

fn start(lab: &Lab, more: &[&str]) -> Child {
    let run = lab.host.paths().run;
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["backup", "create", DISK, "b", "--run-dir", run.to_str().unwrap()]).args(more);
    command.env_remove("RUST_LOG").env("XENSTORED_PATH", lab.host.store_socket());
    command.current_dir(lab.host.image("")).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn ended(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

/// The name of the disk's snapshot while a backup is made.
fn snapshot(lab: &Lab) -> String {
    let (stem, extension) = lab.leaf.split_once('.').unwrap();
    lab.image(&format!("{stem}.ferrite-backup.{extension}"))
}

/// A backup that is being made, stopped while it copies from the snapshot.
fn stopped(lab: &Lab, more: &[&str]) -> Child {
    let child = start(lab, &[&["--speed", SLOW], more].concat());
    let is_copying = || {
        let files = std::fs::read_dir(lab.image("b")).into_iter().flatten();
        let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".json.partial")).count() > 0
    };
    wait_until("the copy", is_copying);
    signal(&child, Signal::STOP);
    assert!(Path::new(&snapshot(lab)).exists(), "the backup was faster than this test");
    child
}

/// Makes a backup, and keeps what was frozen for it as `NAME.img`.
fn observed(lab: &Lab, name: &str) {
    let child = stopped(lab, &["--name", name]);
    ok(lab, &["image", "convert", "-U", "-O", "raw", &snapshot(lab), &format!("{name}.img")]);
    signal(&child, Signal::CONT);
    let done = ended(child);
    assert!(done.status.success(), "{done:?}");
}

fn is_restored(lab: &Lab, name: &str) {
    let to = format!("{name}-restored.img");
    ok(lab, &["backup", "restore", "b", &to, "--name", name]);
    let same =
        [&to, &format!("{name}.img")].map(|name| std::fs::read(lab.host.image(name)).unwrap());
    assert!(same[0] == same[1], "{name}");
    let mut compare = Command::new("qemu-img");
    compare.args(["compare", "-F", "raw", &lab.image(&format!("b/{name}.qcow2"))]);
    if let Ok(done) = compare.arg(lab.image(&format!("{name}.img"))).output() {
        assert!(done.status.success(), "{name}: {done:?}");
    }
    for name in [to, format!("{name}.img")] {
        std::fs::remove_file(lab.host.image(&name)).unwrap();
    }
}

/// Nothing of a backup is left beside the image.
fn has_nothing_left(lab: &Lab) {
    let left: Vec<String> =
        lab.files().into_iter().filter(|name| name.contains("ferrite-backup")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!lab.host.image("b/backup.begun").exists());
}

/// Ends the lab, and compares the newest backup, made at last of the disk at rest, with the disk.
fn end(mut lab: Lab, load: Load) {
    load.wait_for_progress();
    load.end();
    lab.detach();
    ok(&lab, &["backup", "create", &lab.leaf, "b", "--name", "last", "--incremental"]);
    ok(&lab, &["backup", "verify", "b"]);
    ok(&lab, &["backup", "restore", "b", "last.img", "--name", "last"]);
    ok(&lab, &["image", "compare", "last.img", &lab.leaf]);
    ok(&lab, &["image", "check", "--chain", &lab.leaf]);
    has_nothing_left(&lab);
    lab.has_no_litter();
}

const PAGE: &str = include_str!("../../../../docs/backup.md");

#[test]
fn the_commands_of_the_manual_back_up_a_running_disk_every_night() {
    let lab = Lab::new(&["web1.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    lab.follows_on(PAGE, "Back up a running disk", |_| load.wait_for_progress());
    let (_, nightly) = PAGE.split_once("## Every night\n").unwrap();
    let nightly = nightly.split("\n## ").next().unwrap().replace("/srv/", &lab.image(""));
    let unit = nightly.lines().filter_map(|line| line.strip_prefix("ExecStart="));
    let cron = nightly.lines().find_map(|line| line.strip_prefix("30 2 * * *  root  ")).unwrap();
    let commands: Vec<&str> = unit.chain(cron.split(" && ")).collect();
    assert_eq!(commands.len(), 4);
    for command in commands {
        load.wait_for_progress();
        let words: Vec<&str> = command.split_whitespace().skip(1).collect();
        lab.does(&words);
    }
    let said = ok(&lab, &["backup", "list", "backup", "--json"]);
    let list: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 4);
    assert_eq!(lab.chain(), ["web1.qcow2"]);
    load.end();
    lab.end();
}

#[test]
fn each_backup_of_a_running_disk_is_restored_as_the_disk_was_at_one_moment() {
    for leaf in ["a.qcow2", "a.vhd"] {
        let lab = Lab::new(&[leaf]);
        let load = Load::start(&lab.host, &lab.disk);
        let (mut client, _) = lab.client();
        let names = ["one", "two", "three", "four"];
        let names = &names[..if is_night() { 4 } else { 2 }];
        for (i, name) in names.iter().copied().enumerate() {
            load.wait_for_progress();
            client.write(AT, &[i as u8 + 1; 4096]);
            observed(&lab, name);
            assert_eq!(lab.chain(), [leaf], "{name}");
            has_nothing_left(&lab);
        }
        let list = list(&lab);
        let parents: Vec<Value> =
            list.as_array().unwrap().iter().map(|backup| backup["parent"].clone()).collect();
        let befores = [json!(null), json!("one"), json!("two"), json!("three")];
        assert_eq!(parents, befores[..names.len()]);
        for name in names {
            is_restored(&lab, name);
        }
        drop(client);
        end(lab, load);
    }
}

#[test]
#[ignore = "it takes longer: cargo xtask nightly --only backups"]
fn a_backup_that_is_killed_at_any_step_loses_no_change_and_the_next_one_cleans_up() {
    let lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    backup(&lab, &[]);
    let record = lab.host.image("a.qcow2.ferrite-backup-record");
    let copied = |name: &str| lab.host.image(&format!("b/{name}.json"));
    let mut found = [0; 3];
    for round in 0..6_u8 {
        load.wait_for_progress();
        client.write(AT, &[round + 1; 4096]);
        let name = format!("n{round}");
        let child = start(&lab, &["--name", &name]);
        match round % 3 {
            0 => wait_until("the record", || record.exists()),
            1 => wait_until("the snapshot", || Path::new(&snapshot(&lab)).exists()),
            _ => wait_until("the manifest", || copied(&name).exists()),
        }
        signal(&child, Signal::KILL);
        assert!(!ended(child).status.success(), "{round}");
        found[usize::from(round % 3)] += u8::from(record.exists());
        // A snapshot that the daemon makes just now is not in the way either.
        wait_until("the next one", || lab.run(&["backup", "create", DISK, "b"]).status.success());
        assert_eq!(lab.chain(), ["a.qcow2"], "{round}");
        has_nothing_left(&lab);
        client.write(AT + 4096, &[round; 4096]);
        backup(&lab, &["--incremental", "--name", &format!("i{round}")]);
        ok(&lab, &["backup", "restore", "b", "x.img", "--force", "--name", &format!("i{round}")]);
        let bytes = std::fs::read(lab.host.image("x.img")).unwrap();
        let at = AT as usize;
        assert_eq!((bytes[at], bytes[at + 4096]), (round + 1, round));
        std::fs::remove_file(lab.host.image("x.img")).unwrap();
    }
    assert!(found.iter().all(|found| *found > 0), "{found:?}");
    drop(client);
    end(lab, load);
}

#[test]
#[ignore = "it takes longer: cargo xtask nightly --only backups"]
fn a_backup_goes_on_without_its_worker_and_its_daemon() {
    let mut lab = Lab::new(&["a.vhd"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    client.write(AT, &[1; 4096]);
    drop(client);
    let child = stopped(&lab, &[]);
    kill_pid(worker(keeper(&lab.host, &lab.disk)).unwrap());
    load.wait_for_progress();
    signal(&child, Signal::CONT);
    assert!(ended(child).status.success());
    let (mut client, _) = lab.client();
    client.write(AT, &[2; 4096]);
    drop(client);
    let child = stopped(&lab, &["--name", "two"]);
    roles::kill(lab.daemon.take().unwrap());
    signal(&child, Signal::CONT);
    lab.start(None);
    let done = ended(child);
    assert!(done.status.success(), "{done:?}");
    load.wait_for_progress();
    assert_eq!(lab.chain(), ["a.vhd"]);
    has_nothing_left(&lab);
    end(lab, load);
}

#[test]
fn a_backup_that_fails_or_is_interrupted_leaves_the_disk_as_it_was_and_is_continued() {
    let lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    client.write(AT, &[1; 64 << 10]);
    load.wait_for_progress();
    // Ctrl-C.
    let child = stopped(&lab, &["--name", "one"]);
    signal(&child, Signal::INT);
    signal(&child, Signal::CONT);
    let done = ended(child);
    assert_eq!(done.status.code(), Some(130), "{done:?}");
    assert_eq!(lab.chain(), ["a.qcow2"]);
    assert_eq!(list(&lab)[0]["state"], "unfinished");
    client.write(AT, &[2; 4096]);
    let two = backup(&lab, &[]);
    assert_eq!((&two["resumed"], &two["name"]), (&json!(true), &json!("one")));
    has_nothing_left(&lab);
    // Two at a time, and a job.
    let child = stopped(&lab, &["--name", "two"]);
    lab.fails(&["backup", "create", DISK, "b"], "another backup of this disk is being made");
    signal(&child, Signal::CONT);
    assert!(ended(child).status.success());
    // A folder without room, and one that cannot be written.
    client.write(AT, &[3; 64 << 10]);
    std::fs::create_dir(lab.host.image("full")).unwrap();
    if let Some(small) = Small::mount(&lab.host.image("full"), "size=512k") {
        let words = ["backup", "create", DISK, "full", "--map", "full"];
        let said = lab.fails(&words, "No space left");
        assert!(said.contains("make room"), "{said}");
        assert_eq!(lab.chain(), ["a.qcow2"]);
        drop(small);
    }
    std::fs::write(lab.host.image("file"), "x").unwrap();
    lab.fails(&["backup", "create", DISK, "file"], "a file has that name");
    lab.fails(&["backup", "create", DISK, "-"], "into a folder");
    lab.fails(&["backup", "create", "web1/xvdz", "b"], "there is no such disk");
    for name in ["file", "full"] {
        let path = lab.host.image(name);
        let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
    }
    drop(client);
    end(lab, load);
}

#[test]
#[ignore = "it takes longer: cargo xtask nightly --only backups"]
fn a_disk_that_grows_or_is_detached_meanwhile_is_backed_up_as_it_was() {
    let mut lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    client.write(AT, &[1; 4096]);
    let child = stopped(&lab, &["--name", "one"]);
    lab.does(&["disk", "resize", DISK, "16M"]);
    load.wait_for_progress();
    signal(&child, Signal::CONT);
    let done = ended(child);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(lab.chain(), ["a.qcow2"]);
    drop(client);
    let (mut client, _) = lab.client();
    client.write(AT, &[2; 4096]);
    drop(client);
    load.wait_for_progress();
    load.end();
    let child = stopped(&lab, &["--name", "two"]);
    let kept = keeper(&lab.host, &lab.disk);
    roles::end(&lab.host, std::slice::from_ref(&lab.disk), &[kept]);
    signal(&child, Signal::CONT);
    let done = ended(child);
    assert!(done.status.success(), "{done:?}");
    roles::kill(lab.daemon.take().unwrap());
    assert_eq!(lab.chain(), ["a.qcow2"]);
    has_nothing_left(&lab);
    for (name, bytes) in [("one", 8 << 20), ("two", 16 << 20)] {
        ok(&lab, &["backup", "restore", "b", &format!("{name}.img"), "--name", name]);
        assert_eq!(lab.host.image(&format!("{name}.img")).metadata().unwrap().len(), bytes);
    }
    // Nothing was written since.
    ok(&lab, &["image", "compare", "two.img", "a.qcow2"]);
    ok(&lab, &["backup", "create", "a.qcow2", "b", "--name", "last", "--incremental"]);
}

#[test]
#[ignore = "it takes longer: cargo xtask nightly --only backups"]
fn a_raw_disk_is_backed_up_from_its_qcow2_image_and_only_if_that_is_asked_for() {
    let mut lab = Lab::new(&["a.img"]);
    let load = Load::start(&lab.host, &lab.disk);
    lab.refuses(&["backup", "create", DISK, "b"], "--leaf qcow2");
    load.wait_for_progress();
    let one = backup(&lab, &["--leaf", "qcow2", "--name", "one"]);
    assert!(one["notes"].to_string().contains("a.base.img"), "{one}");
    lab.leaf = "a.qcow2".to_owned();
    assert_eq!(lab.chain(), ["a.qcow2", "a.base.img"]);
    for name in ["two", "three"] {
        load.wait_for_progress();
        let next = backup(&lab, &["--name", name]);
        assert!(next["parent"].is_string(), "{next}");
        assert_eq!(lab.chain(), ["a.qcow2", "a.base.img"]);
    }
    end(lab, load);
}

#[test]
fn what_a_killed_backup_has_left_is_named_and_a_backup_at_rest_merges_it() {
    let mut lab = Lab::new(&["a.vhd"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    client.write(AT, &[1; 4096]);
    let child = stopped(&lab, &["--name", "one"]);
    signal(&child, Signal::KILL);
    ended(child);
    let run = lab.host.paths().run.display().to_string();
    let said = String::from_utf8(lab.program(&["doctor", "--run-dir", &run]).stdout).unwrap();
    for words in ["interrupted", "a.ferrite-backup.vhd", "ferrite backup create web1/xvda"] {
        assert!(said.contains(words), "{said}");
    }
    let said = ok(&lab, &["backup", "list", "b"]);
    assert!(said.contains("unfinished") && said.contains("a.ferrite-backup.vhd"), "{said}");
    client.write(AT, &[2; 4096]);
    drop(client);
    load.wait_for_progress();
    load.end();
    lab.detach();
    assert_eq!(lab.chain().len(), 2);
    let said = ok(&lab, &["backup", "create", "a.vhd", "b"]);
    assert!(said.contains("continued") && said.contains("is merged"), "{said}");
    assert_eq!(lab.chain(), ["a.vhd"]);
    has_nothing_left(&lab);
    ok(&lab, &["backup", "restore", "b", "x.img"]);
    ok(&lab, &["image", "compare", "x.img", "a.vhd"]);
}
