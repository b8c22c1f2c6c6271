//! A running disk gets a snapshot, grows, and is switched to another image by the daemon and the program's own steps.

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Attached, PhaseName};
use ferrite_testkit::places::Small;
use ferrite_testkit::{is_night, wait_until};
use serde_json::{Value, json};

use crate::host::{self, works};
use crate::live::Lab;
use crate::load::Load;
use crate::roles::{self, keeper, worker};

/// The blocks of the page, with this test's folder and guest.
#[test]
fn the_recipes_of_the_manual_work_while_the_guest_writes() {
    let lab = Lab::new(&["web1.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let titles =
        ["Snapshot a running guest", "Grow a disk", "Pause a disk, or serve it from another image"];
    for title in titles {
        lab.follows(title, |words| {
            if words[1] == "resume" || !title.starts_with("Pause") {
                load.wait_for_progress();
            }
        });
    }
    assert_eq!(lab.chain(), ["web1.qcow2", "tuesday.qcow2"]);
    let shown = lab.does(&["image", "info", "-U", &lab.image("web1.qcow2"), "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["virtual-size"], json!(10 << 20));
    let sectors = format!("{}/sectors", lab.disk.backend);
    wait_until("the guest's new size", || {
        lab.host.store().read_string(&sectors).unwrap().as_deref() == Some("20480")
    });
    load.wait_for_progress();
    load.end();
    lab.end();
}

/// The contents of a block of the volume or snapshot of this name, when the store is at rest.
fn block(lab: &Lab, name: &str, at: usize) -> u8 {
    let bytes = lab.contents(&format!("store:{}#{name}", lab.image("pool")));
    assert!(bytes[at..at + 4096].iter().all(|byte| *byte == bytes[at]));
    bytes[at]
}

#[test]
fn a_volume_gets_a_snapshot_and_grows_while_its_guest_and_a_client_write() {
    let mut lab = Lab::of_volume();
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, bytes) = lab.client();
    assert_eq!(bytes, 8 << 20);
    let (at, end) = (4 << 20, 12 << 20);
    let words = ["disk", "snapshot", "web1/xvda"];
    let kept = keeper(&lab.host, &lab.disk);
    let before = worker(kept);
    for (name, stamp) in [("monday", 1), ("tuesday", 2)] {
        client.write(at, &[stamp; 4096]);
        lab.does(&[&words[..], &[name]].concat());
        client.write(at, &[9; 4096]);
        load.wait_for_progress();
    }
    for (name, why) in [
        ("monday", "there is a volume of that name"),
        ("web", "there is a volume of that name"),
        ("mon/day", "is no name"),
        ("a.partial", "copies that are not complete"),
    ] {
        lab.refuses(&[&words[..], &[name]].concat(), why);
    }
    let resize = ["disk", "resize", "web1/xvda"];
    for size in ["10M", "+2M"] {
        lab.does(&[&resize[..], &[size]].concat());
        load.wait_for_progress();
    }
    lab.refuses(&[&resize[..], &["1M"]].concat(), "cannot shrink");
    lab.refuses(&[&resize[..], &["12582913"]].concat(), "whole blocks of 4 KiB");
    lab.refuses(&[&resize[..], &["16P"]].concat(), "between one block and 4 PiB");
    let sectors = format!("{}/sectors", lab.disk.backend);
    wait_until("the guest's new size", || {
        lab.host.store().read_string(&sectors).unwrap() == Some((end / 512).to_string())
    });
    let (mut wide, bytes) = lab.client();
    assert_eq!(bytes, end);
    wide.write(end - 4096, &[3; 4096]);
    load.wait_for_progress();
    assert_eq!((keeper(&lab.host, &lab.disk), worker(kept)), (kept, before), "nothing was started");
    load.end();
    lab.detach();
    let at = usize::try_from(at).unwrap();
    assert_eq!(["monday", "tuesday", "web"].map(|name| block(&lab, name, at)), [1, 2, 9]);
    assert_eq!(block(&lab, "web", (12 << 20) - 4096), 3);
    assert!(lab.program(&["store", "check", &lab.image("pool")]).status.success());
}

#[test]
fn a_change_of_a_volume_is_made_once_whichever_process_dies_meanwhile() {
    let mut lab = Lab::of_volume();
    let load = Load::start(&lab.host, &lab.disk);
    let rounds = if is_night() { 8_u32 } else { 4 };
    for round in 0..rounds {
        load.wait_for_progress();
        let kept = keeper(&lab.host, &lab.disk);
        let victim = if round % 2 == 0 { worker(kept).unwrap() } else { kept };
        let name = format!("s{round}");
        let words = match round % 4 {
            0 | 1 => ["disk", "snapshot", "web1/xvda", &name],
            _ => ["disk", "resize", "web1/xvda", "+1M"],
        };
        std::thread::scope(|scope| {
            let changed = scope.spawn(|| lab.does(&words));
            std::thread::sleep(std::time::Duration::from_millis(3 * u64::from(round)));
            roles::kill_pid(victim);
            changed.join().unwrap();
        });
    }
    load.wait_for_progress();
    load.end();
    lab.detach();
    let listed = lab.program(&["store", "list", &lab.image("pool"), "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let volumes = listed["volumes"].as_array().unwrap();
    let names: Vec<&str> = volumes.iter().map(|volume| volume["name"].as_str().unwrap()).collect();
    let snapshots = ["s0", "s1", "s4", "s5"].into_iter().take(rounds as usize / 2);
    assert_eq!(names, snapshots.chain(["web"]).collect::<Vec<_>>());
    assert_eq!(volumes.last().unwrap()["virtual_bytes"], json!((8 + rounds / 2) << 20));
    assert!(lab.program(&["store", "check", &lab.image("pool")]).status.success());
}

const SNAPSHOT_OF_RAW: [&str; 5] = ["disk", "snapshot", "web1/xvda", "--leaf", "qcow2"];

#[test]
fn a_raw_disk_goes_on_in_a_leaf_and_a_guest_that_is_started_again_has_that() {
    let mut lab = Lab::new(&["web1.img"]);
    let load = Load::start(&lab.host, &lab.disk);
    let (mut client, _) = lab.client();
    let (at, [monday, tuesday]) =
        (4 << 20, ["monday.img", "tuesday.qcow2"].map(|name| lab.image(name)));
    lab.refuses(&["disk", "snapshot", "web1/xvda", &monday], "--leaf qcow2");
    client.write(at, &[1; 4096]);
    lab.does(&[&SNAPSHOT_OF_RAW[..], &[&monday]].concat());
    client.write(at, &[2; 4096]);
    load.wait_for_progress();
    lab.leaf = "web1.qcow2".to_owned();
    assert_eq!(lab.chain(), ["web1.qcow2", "monday.img"]);
    let mode = std::fs::metadata(&monday).unwrap().permissions();
    assert!(mode.readonly() && !lab.host.image("web1.img").exists());
    let was = lab.contents(&format!("raw:{monday}"));
    assert!(was[at as usize..][..4096] == [1; 4096]);
    // From here on it is a disk like others.
    lab.refuses(&["disk", "snapshot", "web1/xvda", &monday], "exists");
    lab.does(&["disk", "snapshot", "web1/xvda", &tuesday]);
    lab.does(&["disk", "coalesce", "web1/xvda"]);
    load.wait_for_progress();
    assert_eq!(lab.chain(), ["web1.qcow2", "monday.img"]);
    let leaf = lab.image("web1.qcow2");
    let refused = lab.fails(&["disk", "coalesce", "web1/xvda", "--from", &leaf], "raw");
    assert!(refused.contains("help: "), "{refused}");
    assert_eq!(client.read(at, 4096), [2; 4096]);
    // The lab expects zeros there.
    client.write(at, &[0; 4096]);
    drop(client);
    load.end();
    lab.start_guest_again();
    let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
    assert_eq!(listed.image.as_deref(), Some(leaf.as_str()));
    let mut front = lab.host.connect(&lab.disk);
    works(&mut front, 3);
    front.close(ferrite_testkit::PATIENCE).unwrap();
    lab.end();
}

#[test]
fn a_snapshot_of_a_raw_disk_that_cannot_be_made_leaves_the_disk_and_its_folder_as_they_were() {
    let lab = Lab::new(&["a.img"]);
    let load = Load::start(&lab.host, &lab.disk);
    let below = lab.host.image("below");
    std::fs::create_dir(&below).unwrap();
    let fails = |new: &str, why: &str| {
        lab.refuses(&[&SNAPSHOT_OF_RAW[..], &[new]].concat(), why);
        load.wait_for_progress();
    };
    fails(&lab.image("a.img"), "exists");
    fails(&lab.image("below/b.img"), "in another folder");
    fails(lab.host.dir.path().join("b.img").to_str().unwrap(), "none of the folders");
    std::fs::write(lab.image("a.qcow2"), "theirs").unwrap();
    fails(&lab.image("b.img"), "a.qcow2 exists");
    assert_eq!(std::fs::read(lab.image("a.qcow2")).unwrap(), b"theirs");
    std::fs::remove_file(lab.image("a.qcow2")).unwrap();
    std::fs::remove_dir(below).unwrap();
    assert_eq!(lab.files(), ["a.img"]);
    load.end();
    lab.end();
}

#[test]
fn a_snapshot_of_a_raw_disk_is_made_or_not_whichever_process_dies_in_it() {
    use Step::{Kept, LeafMade, Paused, Recorded, Served, StateWritten};
    let daemons = [LeafMade, StateWritten, Paused, Recorded, Kept, Served].map(|step| (step, 0));
    let workers = [LeafMade, Served].map(|step| (step, 1));
    let keeper_dies = [(LeafMade, 2)];
    let deaths = match is_night() {
        true => [&daemons[..], &workers, &keeper_dies].concat(),
        false => [&daemons[..2], &workers[..1], &keeper_dies].concat(),
    };
    for (step, who) in deaths {
        let mut lab = Lab::new(&["a.img"]);
        let load = Load::start(&lab.host, &lab.disk);
        load.wait_for_progress();
        let kept = keeper(&lab.host, &lab.disk);
        let daemon = lab.daemon.as_ref().unwrap().id().try_into().unwrap();
        let victim = [daemon, worker(kept).unwrap(), kept][who];
        host::kill_at(&lab.host.dir.path().join("victim"), step, victim);
        let new = lab.image("b.img");
        let asked = [&SNAPSHOT_OF_RAW[..], &[&new]].concat();
        let done = lab.run(&asked);
        if who == 0 {
            lab.is_dead(&format!("{step:?}"));
            lab.start(None);
        }
        load.wait_for_progress();
        if lab.files() == ["a.img"] {
            assert!(!done.status.success(), "{step:?}");
            lab.does(&asked);
            load.wait_for_progress();
        }
        assert_eq!(lab.files(), ["a.qcow2", "b.img"], "{step:?} {who}");
        lab.leaf = "a.qcow2".to_owned();
        assert_eq!(lab.chain(), ["a.qcow2", "b.img"]);
        load.end();
        lab.start_guest_again();
        let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
        assert_eq!(listed.image, Some(lab.image("a.qcow2")), "{step:?} {who}");
        lab.end();
    }
}

/// The record comes before the switch.
#[test]
fn a_switch_whose_daemon_dies_before_it_is_none_for_a_guest_that_is_started_again() {
    let mut lab = Lab::new(&["a.img"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let other = lab.image("b.img");
    lab.does(&["image", "create", &other, "8M"]);
    lab.restart(Some(Step::Recorded));
    assert!(!lab.run(&["disk", "switch", "web1/xvda", &other]).status.success());
    lab.is_dead("recorded");
    lab.start(None);
    load.wait_for_progress();
    load.end();
    lab.start_guest_again();
    let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
    assert_eq!(listed.image, Some(lab.image("a.img")));
    lab.end();
}

/// The daemon dies when the image is closed for the change. The next one ends the pause.
#[test]
fn a_change_whose_daemon_dies_leaves_the_disk_as_it_was_and_can_be_made_again() {
    let mut lab = Lab::new(&["a.vhd"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let disk = host::id(&lab.disk);
    for (verb, asked) in [
        ("snapshot", json!({ "disk": disk, "name": lab.image("old.vhd") })),
        ("resize", json!({ "disk": disk, "bytes": 10 << 20 })),
    ] {
        lab.restart(Some(Step::Paused));
        let method = format!("disk.{verb}");
        assert!(lab.host.call::<Attached>(&method, &asked).is_err());
        lab.is_dead(verb);
        let length = lab.chain().len();
        lab.start(None);
        load.wait_for_progress();
        assert_eq!(lab.chain().len(), length);
        lab.host.call::<Attached>(&method, &asked).unwrap();
        load.wait_for_progress();
    }
    assert_eq!(lab.chain(), ["a.vhd", "old.vhd"]);
    load.end();
    lab.end();
}

/// The change that the dead daemon has begun may be in the way for a while.
#[test]
fn the_next_daemon_tries_again_to_end_the_pause_of_a_change() {
    let mut lab = Lab::new(&["a.img"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    lab.restart(Some(Step::Paused));
    let asked = json!({ "disk": host::id(&lab.disk), "bytes": 10 << 20 });
    assert!(lab.host.call::<Attached>("disk.resize", &asked).is_err());
    lab.is_dead("paused");
    let (image, away) = (lab.image("a.img"), lab.image("away"));
    std::fs::rename(&image, &away).unwrap();
    lab.start_again();
    wait_until("two tries", || lab.host.disks().first().is_some_and(|disk| disk.starts >= 2));
    std::fs::rename(&away, &image).unwrap();
    load.wait_for_progress();
    load.end();
    lab.end();
}

#[test]
fn what_cannot_be_done_is_refused_with_the_reason_and_the_guest_is_served_on() {
    let lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let [own, there] = ["a.qcow2", "there.qcow2"].map(|name| lab.image(name));
    std::fs::write(&there, "x").unwrap();
    let elsewhere = lab.host.dir.path().join("b.qcow2");
    let elsewhere = elsewhere.to_str().unwrap();
    lab.refuses(&["disk", "snapshot", "web1/xvda", &there], "exists");
    lab.refuses(&["disk", "snapshot", "web1/xvda", &own], "exists");
    lab.refuses(&["disk", "snapshot", "web1/xvda", elsewhere], "none of the folders");
    lab.refuses(&["disk", "snapshot", "web1/xvda", &lab.image("no/b.qcow2")], "no: No such file");
    let failing = ["disk", "snapshot", "web1/xvda", &lab.image("b.qcow2"), "--quiesce", "false"];
    lab.refuses(&failing, "--quiesce has failed (before)");
    assert!(!lab.host.image("b.qcow2").exists());
    lab.refuses(&["disk", "resize", "web1/xvda", "1M"], "cannot shrink");
    lab.refuses(&["disk", "resize", "web1/xvda", "1M"], "help: a disk in use can only grow");
    lab.refuses(&["disk", "resize", "web1/xvda", "x"], "is no size");
    let other = lab.image("other.qcow2");
    lab.does(&["image", "create", &other, "8M"]);
    load.wait_for_progress();
    lab.refuses(&["disk", "switch", "web1/xvda", &other, "--compare"], "differ");
    load.wait_for_progress();
    load.end();
    lab.end();
}

#[test]
fn a_guest_that_is_started_again_has_the_image_that_its_disk_was_switched_to() {
    let mut lab = Lab::new(&["a.vhd"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let next = lab.image("b.qcow2");
    lab.does(&["disk", "pause", "web1/xvda"]);
    lab.does(&["image", "convert", &lab.image("a.vhd"), &next]);
    lab.does(&["disk", "resume", "web1/xvda", &next]);
    load.wait_for_progress();
    // The next pause ends with the image that the disk has now.
    for _ in 0..2 {
        lab.does(&["disk", "pause", "web1/xvda"]);
        lab.does(&["disk", "resume", "web1/xvda"]);
        load.wait_for_progress();
        let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
        assert_eq!(listed.image.as_deref(), Some(next.as_str()));
    }
    load.end();
    lab.start_guest_again();
    let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
    assert_eq!(listed.image.as_deref(), Some(next.as_str()));
    let mut front = lab.host.connect(&lab.disk);
    works(&mut front, 3);
    front.close(ferrite_testkit::PATIENCE).unwrap();
    lab.leaf = "b.qcow2".to_owned();
    lab.end();
}

#[test]
fn a_guest_that_is_not_thawed_has_its_snapshot_and_the_error_says_so() {
    let lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let snapshot = |name: &str| {
        let new = lab.image(name);
        ["disk", "snapshot", "web1/xvda", &new, "--quiesce", "test before ="].map(str::to_owned)
    };
    let words = snapshot("b.qcow2");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let stays = "the snapshot is made and stays, and the command of --quiesce has failed (after)";
    lab.refuses(&words, stays);
    assert_eq!(lab.chain(), ["a.qcow2", "b.qcow2"]);
    // Both fail.
    lab.refuses(&words, "exists; and the command of --quiesce has failed (after): exit status: 1");
    lab.refuses(&words, "the guest's file systems may be frozen");
    load.wait_for_progress();
    load.end();
    lab.end();
}

#[test]
fn a_paused_disk_is_named_with_its_time_and_its_person_by_stat_and_doctor() {
    let lab = Lab::new(&["a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let run = lab.host.paths().run;
    let (stats, run) = (run.join("stats").display().to_string(), run.display().to_string());
    let said = |words: &[&str]| String::from_utf8(lab.program(words).stdout).unwrap();
    let stat = ["stat", "--stats", &stats];
    let doctor = ["doctor", "--run-dir", &run];
    for words in [&stat, &doctor] {
        assert!(!said(words).contains("paused"));
    }
    lab.does(&["disk", "pause", "web1/xvda", "--by", "alice"]);
    for words in [&stat, &doctor] {
        let told = said(words);
        assert!(told.contains("web1/xvda is paused by alice for "), "{told}");
        assert!(told.contains("to go on: ferrite disk resume web1/xvda"), "{told}");
    }
    let told: Value = serde_json::from_str(&said(&[&stat[..], &["--json"]].concat())).unwrap();
    assert_eq!((&told["paused"][0]["by"], &told["paused"][1]), (&json!("alice"), &Value::Null));
    assert!(told["paused"][0]["since"].as_u64().is_some_and(|since| since > 0), "{told}");
    lab.does(&["disk", "resume", "web1/xvda"]);
    load.wait_for_progress();
    assert!(!said(&stat).contains("paused"));
    load.end();
    lab.end();
}

#[test]
fn a_disk_does_not_get_another_image_while_a_job_changes_its_own() {
    let lab = Lab::new(&["a.qcow2", "b.qcow2", "c.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let other = lab.image("other.qcow2");
    lab.does(&["image", "create", &other, "8M"]);
    lab.does(&["disk", "coalesce", "web1/xvda", "--speed", "1", "--background"]);
    wait_until("the copy", || lab.does(&["job", "show", "1"]).contains("step copy"));
    lab.does(&["disk", "pause", "web1/xvda"]);
    lab.fails(&["disk", "resume", "web1/xvda", &other], "job 1 changes the images of this disk");
    lab.host.wait_for_phase(&lab.disk, PhaseName::Paused);
    lab.does(&["disk", "resume", "web1/xvda", &lab.image("c.qcow2")]);
    load.wait_for_progress();
    lab.does(&["job", "cancel", "1"]);
    lab.does(&["disk", "pause", "web1/xvda"]);
    lab.does(&["disk", "resume", "web1/xvda"]);
    load.end();
    // A merge that is cancelled can go on where it was.
    for file in ["json", "json.new"] {
        let file = lab.host.image(&format!("a.qcow2.ferrite-merge.partial.{file}"));
        std::fs::remove_file(file).unwrap();
    }
    lab.end();
}

/// A folder has the name under which a file is written first.
#[test]
fn a_state_that_cannot_be_written_is_an_error_with_the_reason_and_the_guest_is_served_on() {
    let lab = Lab::new(&["a.qcow2", "b.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let (run, new) = (lab.host.paths().run, lab.image("new.qcow2"));
    let snapshot = ["disk", "snapshot", "web1/xvda", &new];
    for (folder, words, why, help) in [
        ("run/disks/vbd-1-51712.new", &snapshot[..], "cannot write the disk's state", "make room"),
        ("run/disks/vbd-1-51712.new", &["disk", "pause", "web1/xvda"], "cannot write the", "make"),
        (
            "run/jobs/1.new",
            &["disk", "coalesce", "web1/xvda"],
            "write the job's state",
            "make room",
        ),
        (
            "state/switched.new",
            &["disk", "switch", "web1/xvda", &new],
            "cannot record",
            "state_folder",
        ),
    ] {
        if folder.starts_with("state") {
            lab.does(&["image", "create", &new, "8M"]);
        }
        let folder = run.parent().unwrap().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        lab.refuses(words, why);
        lab.refuses(words, help);
        load.wait_for_progress();
        std::fs::remove_dir(&folder).unwrap();
    }
    assert_eq!(lab.chain(), ["b.qcow2", "a.qcow2"]);
    lab.does(&["disk", "pause", "web1/xvda"]);
    lab.does(&["disk", "resume", "web1/xvda"]);
    load.wait_for_progress();
    load.end();
    lab.end();
}

#[test]
fn changes_work_with_a_full_run_folder_and_a_job_is_refused_with_the_reason() {
    let mut lab = Lab::not_served(&["a.qcow2", "b.qcow2"]);
    let run = lab.host.paths().run;
    std::fs::create_dir_all(&run).unwrap();
    let Some(_small) = Small::mount(&run, "size=16m") else { return };
    lab.start(None);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let mut filler = std::fs::File::create(run.join("filler")).unwrap();
    while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
    let new = lab.image("new.qcow2");
    for words in [
        &["disk", "pause", "web1/xvda"][..],
        &["disk", "resume", "web1/xvda"],
        &["disk", "snapshot", "web1/xvda", &new],
        &["disk", "resize", "web1/xvda", "+1M"],
        &["disk", "switch", "web1/xvda", &lab.image("b.qcow2")],
    ] {
        lab.does(words);
        if words[1] != "pause" {
            load.wait_for_progress();
        }
    }
    lab.refuses(&["disk", "coalesce", "web1/xvda"], "No space left on device");
    lab.refuses(&["disk", "coalesce", "web1/xvda"], "help: make room on the file system of /run");
    load.wait_for_progress();
    load.end();
    std::fs::remove_file(run.join("filler")).unwrap();
    lab.end();
}
