//! A running disk gets a snapshot, grows, and is switched to another image by the daemon and the program's own steps.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
mod live;
#[path = "../../daemon/tests/load/mod.rs"]
mod load;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Attached, PhaseName};
use ferrite_testkit::wait_until;
use host::works;
use live::Lab;
use load::Load;
use roles::{end, keeper};
use serde_json::{Value, json};

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    live::be_a_daemon();
}

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
    let kept = keeper(&lab.host, &lab.disk);
    end(&lab.host, std::slice::from_ref(&lab.disk), &[kept]);
    std::fs::remove_dir_all(lab.host.paths().run.join("disks")).unwrap();
    lab.disk = lab.host.attach(1, 0, &lab.params);
    lab.restart(None);
    let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
    assert_eq!(listed.image.as_deref(), Some(next.as_str()));
    let mut front = lab.host.connect(&lab.disk);
    works(&mut front, 3);
    front.close(ferrite_testkit::PATIENCE).unwrap();
    lab.leaf = "b.qcow2".to_owned();
    lab.end();
}
