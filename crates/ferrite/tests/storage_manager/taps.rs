//! `tap-ctl` with the daemon, as XAPI's storage manager calls it: what each verb prints, its exit status, and the state
//! that `list` shows. There is no Xen here: guests are clients of NBD.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use ferrite_testkit::devices::Freezable;
use ferrite_testkit::nbd::command;
use ferrite_testkit::programs::skipped;
use ferrite_testkit::{images, wait_until};

use crate::tapped::{Daemon, MIB, is_alive, read, write};

#[test]
fn stats_name_all_images_of_a_chain_and_what_was_read_from_each() {
    let daemon = Daemon::new();
    let base = daemon.image("chain", "vhd");
    let folder = Path::new(&base).parent().unwrap();
    images::write(Path::new(&base), 4096, &[1; 4096]);
    let util = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let command = command.args(["compat", "vhd-util"]).args(args).current_dir(folder);
        assert!(command.status().unwrap().success(), "{args:?}");
    };
    let name = Path::new(&base).file_name().unwrap().to_str().unwrap();
    util(&["snapshot", "-n", "middle a.vhd", "-p", name, "-e"]);
    util(&["snapshot", "-n", "leaf.vhd", "-p", "middle a.vhd", "-e"]);
    let leaf = folder.join("leaf.vhd").display().to_string();
    let middle = folder.join("middle a.vhd").display().to_string();
    daemon.says("allocate", &format!("{}/tapdisk/tapdisk-0\n", daemon.blktap().display()));
    let pid = daemon.spawn();
    daemon.says(&format!("attach -p {pid} -m 0"), "");
    daemon.says(&format!("open -p {pid} -m 0 -a vhd:{leaf}"), "");
    let stats = || -> serde_json::Value {
        let said = daemon.tap_ctl(&format!("stats -p {pid} -m 0")).stdout;
        serde_json::from_slice(&said).unwrap()
    };
    let mut client = daemon.client(pid, 0);
    let images = |hits: [[u64; 2]; 3]| {
        let driver = serde_json::json!({"type": 4, "name": "vhd", "status": null});
        let names = [&leaf, &middle, &base];
        let image = |(name, hits)| {
            let (name, hits): (&String, [u64; 2]) = (name, hits);
            serde_json::json!({"name": name, "hits": hits, "fail": [0, 0], "driver": driver})
        };
        names.into_iter().zip(hits).map(image).collect::<serde_json::Value>()
    };
    assert_eq!(stats()["images"], images([[0, 0], [0, 0], [0, 0]]));
    assert_eq!(read(&mut client), [1; 4096]);
    assert_eq!(stats()["images"], images([[0, 0], [0, 0], [8, 0]]));
    write(&mut client, 5);
    assert_eq!(read(&mut client), [5; 4096]);
    assert_eq!(stats()["images"], images([[8, 8], [0, 0], [8, 0]]));
    daemon.says(&format!("pause -p {pid} -m 0"), "");
    assert_eq!(stats()["images"], serde_json::json!([]));
    daemon.says(&format!("unpause -p {pid} -m 0"), "");
    drop(client);
    daemon.says(&format!("close -p {pid} -m 0"), "");
    daemon.says(&format!("detach -p {pid} -m 0"), "");
    daemon.says("free -m 0", "");
}

#[test]
fn each_verb_says_what_tapdisks_does_and_leaves_its_state() {
    let daemon = Daemon::new();
    let image = daemon.image("a", "vhd");
    daemon.says("list", "");
    let marker = |minor: u32| daemon.blktap().join(format!("tapdisk/tapdisk-{minor}"));
    daemon.says("allocate", &format!("{}\n", marker(0).display()));
    daemon.says("allocate", &format!("{}\n", marker(1).display()));
    assert!(marker(0).exists());
    daemon.says("list", "minor=0\nminor=1\n");
    daemon.says("free -m 0", "");
    daemon.fails("free -m 0", 2);
    let pid = daemon.spawn();
    daemon.says("list", &format!("minor=1\npid={pid}\n"));
    daemon.fails(&format!("attach -p {pid} -m 0"), 2);
    daemon.fails("attach -p 1 -m 1", 2);
    daemon.says(&format!("attach -p {pid} -m 1"), "");
    let attached = format!("pid={pid} minor=1 state=0\n");
    daemon.says("list", &attached);
    daemon.fails(&format!("attach -p {pid} -m 1"), 17);
    daemon.says(&format!("pause -p {pid} -m 1"), "");
    daemon.fails(&format!("unpause -p {pid} -m 1"), 22);
    let open = |image: &str| format!("open -p {pid} -m 1 -a {image}");
    daemon.fails(&open("vhd:"), 123);
    daemon.fails(&open("vmdk:/x"), 22);
    daemon.fails(&open("vhd:/no/such"), 2);
    fs::write(daemon.dir.path().join("garbage"), [7; 70_000]).unwrap();
    daemon.fails(&open(&format!("vhd:{}/garbage", daemon.dir.path().display())), 22);
    daemon.fails(&format!("{} -C /no/log", open(&format!("vhd:{image}"))), 2);
    daemon.fails(&format!("{} -s", open(&format!("vhd:{image}"))), 95);
    daemon.says("list", &attached);
    daemon.says(&open(&format!("vhd:{image}")), "");
    let line = |state: &str| format!("pid={pid} minor=1 state={state} args=vhd:{image}\n");
    daemon.says("list", &line("0"));
    daemon.fails(&open(&format!("vhd:{image}")), 114);
    for filter in
        [format!("-p {pid}"), "-m 1".to_owned(), "-t vhd".to_owned(), format!("-f {image}")]
    {
        daemon.says(&format!("list {filter}"), &line("0"));
    }
    let shown = daemon.disk(&["list"]) + &daemon.disk(&["show", "tap/1"]);
    assert!(shown.contains("tap/1") && !shown.contains("32756"), "{shown}");
    for filter in ["-p 1", "-m 0", "-t aio", "-f /no"] {
        daemon.says(&format!("list {filter}"), "");
    }
    let mut client = daemon.client(pid, 1);
    write(&mut client, 5);
    let stats = daemon.tap_ctl(&format!("stats -p {pid} -m 1"));
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!((&stats["name"], &stats["secs"][1]), (&format!("vhd:{image}").into(), &8.into()));
    assert_eq!((&stats["read_caching"], &stats["nbd_mirror_failed"]), (&"false".into(), &0.into()));
    assert_eq!(
        stats["images"][0]["driver"],
        serde_json::json!({"type": 4, "name": "vhd", "status": null})
    );
    daemon.says(&format!("pause -p {pid} -m 1"), "");
    daemon.says("list", &line("0x2a"));
    daemon.says(&format!("pause -p {pid} -m 1"), "");
    daemon.fails(&format!("unpause -p {pid} -m 1 -a vhd:/no/such"), 2);
    daemon.says("list", &line("0x22a").replace(&image, "/no/such"));
    daemon.says(&format!("unpause -p {pid} -m 1 -a vhd:{image}"), "");
    daemon.says("list", &line("0"));
    daemon.fails(&format!("unpause -p {pid} -m 1"), 22);
    assert_eq!(read(&mut client), [5; 4096]);
    daemon.fails(&format!("detach -p {pid} -m 1"), 22);
    daemon.fails("free -m 1", 11);
    daemon.says(&format!("close -p {pid} -m 1"), "");
    let closed = format!("pid={pid} minor=1 state=0x2\n");
    daemon.says("list", &closed);
    daemon.says(&format!("close -p {pid} -m 1"), "");
    daemon.says(&format!("pause -p {pid} -m 1"), "");
    daemon.says("list", &closed);
    daemon.says(&format!("{} -R -D -t 40", open(&format!("vhd:{image}"))), "");
    daemon.says("list", &line("0"));
    daemon.says(&format!("close -p {pid} -m 1 -t 9"), "");
    daemon.says(&format!("detach -p {pid} -m 1"), "");
    wait_until("its process's end", || !is_alive(pid));
    daemon.says("list", "minor=1\n");
    daemon.says("free -m 1", "");
    daemon.says("list", "");
    images::check(Path::new(&image));
    // A process without a disk ends by a signal, and nothing of it is left.
    let pid = daemon.spawn();
    let signalled = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(signalled, rustix::process::Signal::TERM).unwrap();
    wait_until("no row", || daemon.tap_ctl("list").stdout.is_empty());
    let keepers = daemon.dir.path().join("run/keepers");
    wait_until("no files", || fs::read_dir(&keepers).unwrap().next().is_none());
}

#[test]
fn a_user_who_may_not_drive_taps_is_told_so() {
    let daemon = Daemon::new();
    fs::set_permissions(daemon.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(daemon.dir.path().join("tap-ctl"));
    command.args(["list", "--run-dir"]).arg(daemon.dir.path().join("run")).uid(65534);
    let output = command.env_remove("XENBUS_PATH").output();
    let Ok(output) = output else {
        return skipped(
            "the build folder is closed to other users, or this one may not become them",
        );
    };
    assert_eq!(output.status.code(), Some(13));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "tap-ctl: this user may not drive taps; run it as root\n");
}

#[test]
fn names_with_blanks_and_colons_and_long_ones_are_names() {
    let daemon = Daemon::new();
    let image = daemon.image("b", "vhd");
    for name in ["a b  c:d.vhd".to_owned(), "x".repeat(200)] {
        let path = daemon.dir.path().join(name);
        fs::copy(&image, &path).unwrap();
        let path = path.to_str().unwrap();
        let created = daemon.call(&["create", "-a", &format!("vhd:{path}")]);
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        let listed = daemon.call(&["list", "-f", path]);
        let listed = String::from_utf8(listed.stdout).unwrap();
        assert!(listed.ends_with(&format!(" minor=0 state=0 args=vhd:{path}\n")), "{listed}");
        let pid = listed.split([' ', '=']).nth(1).unwrap();
        daemon.says(&format!("destroy -p {pid} -m 0"), "");
        daemon.says("list", "");
    }
}

#[test]
fn taps_outlive_the_daemon() {
    let mut daemon = Daemon::new();
    let image = daemon.image("c", "qcow2");
    for _ in 0..3 {
        daemon.tap_ctl("allocate");
    }
    let [open, closed] = [daemon.spawn(), daemon.spawn()];
    for (pid, minor) in [(open, 0), (closed, 1)] {
        daemon.says(&format!("attach -p {pid} -m {minor}"), "");
        daemon.says(&format!("open -p {pid} -m {minor} -R -a qcow2:{image}"), "");
    }
    daemon.says(&format!("close -p {closed} -m 1"), "");
    let spare = daemon.spawn();
    let mut client = daemon.client(open, 0);
    let before = daemon.tap_ctl("list").stdout;
    let expected = format!(
        "pid={open} minor=0 state=0 args=qcow2:{image}\npid={closed} minor=1 state=0x2\nminor=2\npid={spare}\n"
    );
    assert_eq!(String::from_utf8(before).unwrap(), expected);
    daemon.restart();
    wait_until("the tap", || daemon.tap_ctl("list -f /").status.success());
    daemon.says("list", &expected);
    assert_eq!(read(&mut client), [0; 4096]);
    for (pid, minor) in [(open, 0), (closed, 1)] {
        daemon.says(&format!("close -p {pid} -m {minor}"), "");
        daemon.says(&format!("detach -p {pid} -m {minor}"), "");
        daemon.says(&format!("free -m {minor}"), "");
    }
    let signalled = rustix::process::Pid::from_raw(spare as i32).unwrap();
    rustix::process::kill_process(signalled, rustix::process::Signal::TERM).unwrap();
    daemon.says("free -m 2", "");
    wait_until("no row", || daemon.tap_ctl("list").stdout.is_empty());
}

#[test]
fn the_number_of_a_tap_whose_process_was_killed_is_freed() {
    let daemon = Daemon::new();
    let image = daemon.image("k", "vhd");
    let cases: [&[&str]; 4] = [
        &["attach"],
        &["attach", "open"],
        &["attach", "open", "close"],
        &["attach", "open", "pause"],
    ];
    for steps in cases {
        daemon.tap_ctl("allocate");
        let pid = daemon.spawn();
        for step in steps {
            let more = if *step == "open" { format!(" -a vhd:{image}") } else { String::new() };
            daemon.says(&format!("{step} -p {pid} -m 0{more}"), "");
        }
        let killed = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
        let is_zombie = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        wait_until("its end", is_zombie);
        let freed = daemon.tap_ctl("free -m 0").status.code();
        if freed != Some(0) {
            // An open one is served on: another process has it by now.
            assert_eq!((steps.last(), freed), (Some(&"open"), Some(11)));
            wait_until("another process", || {
                daemon.tap_ctl("list -m 0").stdout.starts_with(b"pid=")
            });
            let listed = String::from_utf8(daemon.tap_ctl("list -m 0").stdout).unwrap();
            let next: u32 = listed.split([' ', '=']).nth(1).unwrap().parse().unwrap();
            assert_ne!(next, pid, "{listed}");
            daemon.says(&format!("destroy -p {next} -m 0"), "");
        }
        daemon.says("list", "");
        wait_until("an image at rest", || openers(&image).is_empty());
    }
}

/// The processes that have a file open.
fn openers(path: &str) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let has_it = |process: &fs::DirEntry| {
        let files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        files
            .map(|file| fs::read_link(file.path()))
            .any(|name| name.is_ok_and(|n| n == Path::new(path)))
    };
    let pid = |process: fs::DirEntry| process.file_name().to_str()?.parse().ok();
    processes.filter(has_it).filter_map(pid).collect()
}

#[test]
fn one_process_has_the_image_of_a_tap_open_and_that_number_finds_the_tap() {
    let daemon = Daemon::new();
    let image = daemon.image("o", "qcow2");
    daemon.tap_ctl("allocate");
    let pid = daemon.spawn();
    daemon.says(&format!("attach -p {pid} -m 0"), "");
    daemon.says(&format!("open -p {pid} -m 0 -a qcow2:{image}"), "");
    let expected = format!("pid={pid} minor=0 state=0 args=qcow2:{image}\n");
    for _ in 0..2 {
        let mut found = Vec::new();
        wait_until("one process with the image", || {
            found = openers(&image);
            found.len() == 1
        });
        daemon.says(&format!("list -p {}", found[0]), &expected);
        // The caller goes on with that number.
        daemon.says(&format!("pause -p {} -m 0", found[0]), "");
        assert!(openers(&image).is_empty());
        daemon.says(&format!("unpause -p {pid} -m 0"), "");
    }
    daemon.says(&format!("destroy -p {pid} -m 0"), "");
}

#[test]
fn a_number_is_that_of_the_error_and_not_of_words_in_a_name() {
    let daemon = Daemon::new();
    daemon.tap_ctl("allocate");
    let pid = daemon.spawn();
    daemon.says(&format!("attach -p {pid} -m 0"), "");
    let folder = daemon.dir.path().join("No space left");
    fs::create_dir(&folder).unwrap();
    let garbage = folder.join("Permission denied.vhd");
    fs::write(&garbage, [7; 70_000]).unwrap();
    let (pid, open) = (pid.to_string(), |name: &Path| format!("vhd:{}", name.display()));
    let call = |name: &Path| daemon.call(&["open", "-p", &pid, "-m", "0", "-a", &open(name)]);
    assert_eq!(call(&garbage).status.code(), Some(22));
    // The worker, and not the daemon, finds that a parent is missing.
    let folder = Path::new(&daemon.image("p", "vhd")).parent().unwrap().to_owned();
    let ferrite = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let output = command.args(words).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    ferrite(&["image", "create", "parent.vhd", "4M"]);
    ferrite(&["image", "clone", "parent.vhd", "leaf.vhd"]);
    let leaf = folder.join("leaf.vhd");
    fs::remove_file(folder.join("parent.vhd")).unwrap();
    assert_eq!(call(&leaf).status.code(), Some(2));
    daemon.says(&format!("detach -p {pid} -m 0"), "");
    daemon.says("free -m 0", "");
}

#[test]
fn a_tap_that_could_not_go_on_is_told_of_by_the_next_daemon() {
    let mut daemon = Daemon::new();
    let image = daemon.image("r", "vhd");
    daemon.tap_ctl("allocate");
    let pid = daemon.spawn();
    daemon.says(&format!("attach -p {pid} -m 0"), "");
    daemon.says(&format!("open -p {pid} -m 0 -a vhd:{image}"), "");
    daemon.says(&format!("pause -p {pid} -m 0"), "");
    let garbage = daemon.dir.path().join("garbage");
    fs::write(&garbage, [7; 70_000]).unwrap();
    let garbage = garbage.to_str().unwrap();
    for (bad, errno) in [("/no/such", 2), (garbage, 22)] {
        daemon.fails(&format!("unpause -p {pid} -m 0 -a vhd:{bad}"), errno);
        let expected = format!("pid={pid} minor=0 state=0x22a args=vhd:{bad}\n");
        daemon.says("list", &expected);
        daemon.restart();
        let listed = || String::from_utf8(daemon.tap_ctl("list").stdout).unwrap();
        wait_until("the paused tap", || listed().contains("state=0x2"));
        daemon.says("list", &expected);
    }
    daemon.says(&format!("unpause -p {pid} -m 0 -a vhd:{image}"), "");
    daemon.says("list", &format!("pid={pid} minor=0 state=0 args=vhd:{image}\n"));
    // A later pause has not failed.
    daemon.says(&format!("pause -p {pid} -m 0"), "");
    daemon.says("list", &format!("pid={pid} minor=0 state=0x2a args=vhd:{image}\n"));
    daemon.says(&format!("destroy -p {pid} -m 0"), "");
}

#[test]
fn a_close_while_storage_hangs_ends_in_time_and_is_done_when_storage_answers() {
    let daemon = Daemon::new();
    let Some(storage) = Freezable::mount(&daemon.dir.path().join("hangs")) else { return };
    let image = storage.folder().join("a.img");
    fs::File::create(&image).unwrap().set_len(4 * MIB).unwrap();
    let [hangs, other] =
        [format!("aio:{}", image.display()), format!("vhd:{}", daemon.image("o", "vhd"))];
    let [pid, unaffected] = [(0, &hangs), (1, &other)].map(|(minor, image)| {
        daemon.tap_ctl("allocate");
        let pid = daemon.spawn();
        daemon.says(&format!("attach -p {pid} -m {minor}"), "");
        daemon.says(&format!("open -p {pid} -m {minor} -a {image}"), "");
        pid
    });
    let (mut client, mut others) = (daemon.client(pid, 0), daemon.client(unaffected, 1));
    write(&mut client, 1);
    storage.freeze();
    client.send(command::WRITE, 0, 4096, 4096, &[2; 4096]);
    wait_until("a request at the storage", || {
        let stats = daemon.tap_ctl(&format!("stats -p {pid} -m 0")).stdout;
        let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
        stats["reqs_outstanding"] == 1
    });
    daemon.fails(&format!("close -p {pid} -m 0 -t 2"), 110);
    daemon.says("list -m 0", &format!("pid={pid} minor=0 state=0 args={hangs}\n"));
    write(&mut others, 3);
    daemon.says(&format!("pause -p {unaffected} -m 1"), "");
    daemon.says(&format!("unpause -p {unaffected} -m 1"), "");
    assert_eq!(read(&mut others), [3; 4096]);
    daemon.says(&format!("destroy -p {unaffected} -m 1"), "");
    storage.thaw();
    let closed = format!("pid={pid} minor=0 state=0x2\n");
    wait_until("its end", || daemon.tap_ctl("list").stdout == closed.as_bytes());
    assert_eq!(fs::read(&image).unwrap()[4096..8192], [2; 4096]);
    daemon.says(&format!("destroy -p {pid} -m 0"), "");
    daemon.says("list", "");
}

#[test]
fn the_commands_of_the_manual_work() {
    let daemon = Daemon::new();
    let page = include_str!("../../../../docs/xapi.md");
    let script = |heading: &str| {
        let (_, section) = page.split_once(&format!("\n## {heading}\n")).unwrap();
        let (_, block) = section.split_once("```sh\n").unwrap();
        block.split("```").next().unwrap()
    };
    let at = |name: &str| daemon.dir.path().join(name);
    // The page's commands are for the daemon of the host.
    let wrapper = format!(
        "#!/bin/sh\nexec {} \"$@\" --run-dir {}\n",
        at("tap-ctl").display(),
        at("run").display()
    );
    fs::create_dir(at("path")).unwrap();
    fs::write(at("path/tap-ctl"), wrapper).unwrap();
    fs::set_permissions(at("path/tap-ctl"), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["a", "b"] {
        fs::copy(daemon.image(&format!("of-{name}"), "vhd"), at(&format!("{name}.vhd"))).unwrap();
    }
    std::os::unix::fs::symlink(at("cbt-util"), at("path/cbt-util")).unwrap();
    let path = format!("{}:{}", at("path").display(), std::env::var("PATH").unwrap());
    for heading in ["Taps", "Changed blocks"] {
        let mut command = Command::new("sh");
        command.args(["-e", "-c", script(heading)]).env("PATH", &path).env_remove("XENBUS_PATH");
        let output = command.current_dir(daemon.dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        daemon.says("list", "");
    }
    assert_eq!(fs::read(at("blocks")).unwrap(), [0; 8]);
}

#[test]
fn taps_on_volumes_of_a_store_are_closed_and_opened_again_beside_each_other() {
    let daemon = Daemon::new();
    let store = daemon.dir.path().join("pool").display().to_string();
    for words in [
        &["create", &store, "--size", "64M"][..],
        &["create", &format!("{store}#a"), "4M"],
        &["create", &format!("{store}#b"), "4M"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let done = command.arg("store").args(words).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
    // A tap's number of today, as `tap-ctl list` has it. The disks of a store have one keeper.
    let pid = |minor: u32| -> u32 {
        let listed = String::from_utf8(daemon.tap_ctl("list").stdout).unwrap();
        let line = listed.lines().find(|line| line.contains(&format!(" minor={minor} "))).unwrap();
        line.split(' ').next().unwrap().strip_prefix("pid=").unwrap().parse().unwrap()
    };
    let first = daemon.spawn();
    for (minor, spawned) in [first, daemon.spawn()].into_iter().enumerate() {
        assert!(daemon.tap_ctl("allocate").status.success());
        daemon.says(&format!("attach -p {spawned} -m {minor}"), "");
        let volume = ["a", "b"][minor];
        daemon.says(&format!("open -p {spawned} -m {minor} -a store:{store}#{volume}"), "");
    }
    assert_eq!(pid(0), pid(1));
    let mut other = daemon.client(pid(1), 1);
    write(&mut other, 1);
    // The number from before the image was opened is known, too.
    daemon.says(&format!("close -p {first} -m 0"), "");
    assert!(pid(0) != pid(1) && is_alive(pid(0)));
    write(&mut other, 2);
    daemon.says(&format!("open -p {} -m 0 -a store:{store}#a", pid(0)), "");
    assert_eq!(pid(0), pid(1));
    write(&mut daemon.client(pid(0), 0), 3);
    drop(other);
    for minor in [0, 1] {
        daemon.says(&format!("close -p {} -m {minor}", pid(minor)), "");
        let kept = pid(minor);
        daemon.says(&format!("detach -p {kept} -m {minor}"), "");
        daemon.says(&format!("free -m {minor}"), "");
        wait_until("the end of its keeper", || !is_alive(kept));
    }
    daemon.says("list", "");
}
