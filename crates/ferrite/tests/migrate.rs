//! A running disk moves to the daemon of another host, while its guest writes and either side dies.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
mod live;
#[path = "../../daemon/tests/load/mod.rs"]
mod load;
mod migrations;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;
#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod tls;

use std::fs;
use std::process::Command;

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Details, Holder, Migration, PhaseName};
use ferrite_testkit::programs::peer;
use ferrite_testkit::wait_until;
use live::Lab;
use load::Load;
use migrations::{Cable, Places, There};

const PAGE: &str = include_str!("../../../docs/access.md");

/// Not a test: a daemon of either host.
#[test]
fn process_daemon() {
    migrations::be_a_daemon();
}

fn image_of(lab: &Lab) -> String {
    let details: Details = lab.host.show(&lab.disk).unwrap();
    details.disk.image.unwrap()
}

/// Both images have the same contents, as QEMU reads them. They are at rest.
fn are_equal(lab: &Lab, there: &There, name: &str) {
    let (own, other) = (lab.image(&lab.leaf), there.image(name));
    lab.does(&["image", "compare", &own, &other]);
    if peer("qemu-img", &["--version"]).is_some() {
        let compared = Command::new("qemu-img").args(["compare", &own, &other]).output().unwrap();
        assert!(compared.status.success(), "{compared:?}");
    }
}

/// No program of Ferrite opens the retired image for writing.
fn is_retired(lab: &Lab) {
    let own = lab.image(&lab.leaf);
    let run = lab.host.paths().run;
    let at = |words: &[&str]| {
        let done = lab.program(words);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains("moved"), "{words:?}: {done:?}");
    };
    at(&["image", "resize", &own, "+1M"]);
    at(&["image", "dirty", "add", &own, "x"]);
    at(&["export", "nbd", "--socket", &lab.image("x.sock"), &own]);
    at(&["image", "convert", "-n", &lab.image("base.qcow2"), &own]);
    // It can be read.
    lab.does(&["image", "info", &own]);
    let _ = run;
}

#[test]
fn a_running_disk_moves_to_another_daemon_while_its_guest_writes() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let there = places.there(None);
    lab.does(&["disk", "dirty", "add", "web1/xvda", "nightly"]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    // The recipe of the manual.
    lab.follows_on(PAGE, "Move a running disk to another host", |_| load.wait_for_progress());
    let said = lab.does(&["migrate", "status", "web1/xvda"]);
    assert!(said.contains("the other host has the disk"), "{said}");
    assert!(image_of(&lab).starts_with("nbds://localhost:"), "{}", image_of(&lab));
    // The guest reads and writes there.
    load.wait_for_progress();
    is_retired(&lab);
    assert_eq!(lab.files().iter().filter(|name| name.ends_with(".ferrite-moved")).count(), 1);
    assert_eq!(there.only().holder, Holder::Here);
    // The daemons and workers of either host may go.
    there.kill_workers();
    load.wait_for_progress();
    lab.restart(None);
    load.wait_for_progress();
    load.end();
    lab.detach();
    // The disk is not used any more: its export ends. The map has gone on there.
    let id = there.only().id;
    let done = there.run(&["migrate", "forget", &id]);
    assert!(done.status.success(), "{done:?}");
    lab.does(&["image", "check", &there.image("web1.qcow2")]);
    let maps = lab.does(&["image", "dirty", "list", &there.image("web1.qcow2")]);
    assert!(maps.contains("nightly") && !maps.contains("void"), "{maps}");
    assert!(
        maps.contains("4.0 MiB") || maps.contains("8.0 MiB") || maps.contains("4 MiB"),
        "{maps}"
    );
}

#[test]
#[ignore = "half a minute: cargo xtask nightly --only migrate"]
fn a_disk_that_moves_onto_a_base_of_the_other_host_stays_as_thin_as_it_was() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let there = places.there(None);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let onto = |base| ["migrate", "web1/xvda", "b", "--name", "web1.qcow2", "--base", base];
    // Other hosts read no file that a host has not named.
    lab.fails(&onto("other.qcow2"), "is not one of that host's bases");
    lab.fails(&onto("../base.qcow2"), "is not one of that host's bases");
    lab.fails(&onto("base.qcow2"), "no such file");
    std::fs::copy(lab.image("base.qcow2"), there.image("base.qcow2")).unwrap();
    lab.does(&onto("base.qcow2"));
    load.wait_for_progress();
    is_retired(&lab);
    load.end();
    lab.detach();
    let done = there.run(&["migrate", "forget", &there.only().id]);
    assert!(done.status.success(), "{done:?}");
    let info = lab.does(&["image", "info", "--json", &there.image("web1.qcow2")]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["chain"].as_array().unwrap().len(), 2, "{info}");
    assert_eq!(lab.layer_of_the_bases_own(&there.image("web1.qcow2")), 1);
}

/// The names of an image's chain, the leaf first.
fn chain_of(lab: &Lab, image: &str) -> Vec<String> {
    let info = lab.does(&["image", "info", "--json", image]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let name = |of: &serde_json::Value| {
        let path = of["path"].as_str().unwrap().to_owned();
        path.rsplit('/').next().unwrap().to_owned()
    };
    info["chain"].as_array().unwrap().iter().map(name).collect()
}

/// The points at which the sender's daemon is killed, and the parents that stay at the receiver.
const PARENTS: [(&str, &[&str]); 4] = [
    ("parent-copied", &[]),
    ("parent-begun", &[]),
    ("parent-agreed", &[]),
    ("agreed", &["base.qcow2", "mid.qcow2"]),
];

/// A disk moves with its parents, after its daemon has died at these points.
fn moves_with_its_parents(points: &[(&'static str, &[&str])]) {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab_of(&["base.qcow2", "mid.qcow2", "a.qcow2"], "localhost", &[]);
    let there = places.there(None);
    let load = Load::start(&lab.host, &lab.disk);
    let chain = ["migrate", "web1/xvda", "b", "--chain"];
    for (point, left) in points {
        lab.restart(Some(Step::Migration(point)));
        load.wait_for_progress();
        let failed = lab.run(&chain);
        assert!(!failed.status.success(), "{point}: {failed:?}");
        lab.is_dead(point);
        lab.start(None);
        if *point == "agreed" {
            lab.does(&["migrate", "abort", "web1/xvda"]);
        }
        wait_until(&format!("an end after {point}"), || there.has(left));
        load.wait_for_progress();
    }
    lab.fails(&[&chain[..], &["--base", "other.qcow2"]].concat(), "none of the disk's parents");
    match there.has(&[]) {
        true => drop(lab.does(&chain)),
        // A complete parent stays, and may be named.
        false => {
            lab.fails(&chain, "there is an image");
            fs::remove_file(there.image("mid.qcow2")).unwrap();
            lab.does(&[&chain[..], &["--base", "base.qcow2"]].concat());
        }
    }
    load.wait_for_progress();
    is_retired(&lab);
    load.end();
    lab.detach();
    let is_it = |it: &Migration| it.holder == Holder::Here && it.image.ends_with("a.qcow2");
    let moved = migrations::list(&there.host).into_iter().find(is_it).unwrap();
    let done = there.run(&["migrate", "forget", &moved.id]);
    assert!(done.status.success(), "{done:?}");
    let leaf = there.image("a.qcow2");
    assert_eq!(chain_of(&lab, &leaf), ["a.qcow2", "mid.qcow2", "base.qcow2"]);
    lab.does(&["image", "check", "--chain", &leaf]);
    assert_eq!(lab.layer_of_the_bases_own(&leaf), 2);
    // That host has named the parents itself, which are marked.
    assert!(there.images().contains(&"base.qcow2.ferrite-children".to_owned()));
    lab.fails(&["image", "resize", &there.image("base.qcow2"), "+1M"], "stands on it");
    // The parents are not marked here: other disks may stand on them.
    let marks = lab.files().into_iter().filter(|name| name.ends_with(".ferrite-moved"));
    assert_eq!(marks.collect::<Vec<_>>(), ["a.qcow2.ferrite-moved"]);
}

#[test]
fn a_disk_moves_with_its_parents_and_half_a_parent_is_given_up() {
    moves_with_its_parents(&PARENTS[..1]);
}

#[test]
#[ignore = "half a minute: cargo xtask nightly --only migrate"]
fn a_disk_moves_with_its_parents_whatever_daemon_dies_while_they_are_copied() {
    moves_with_its_parents(&PARENTS);
}

#[test]
fn a_guest_that_leaves_finds_its_disk_at_the_other_host() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let there = places.there(None);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    // Its requests would wait: the guest of this test sends none.
    let (front, _) = load.suspend();
    // The recipe of the manual.
    lab.follows_on(PAGE, "Move the guest, too", |words| {
        assert_eq!(fs::exists(there.image("a.qcow2")).unwrap(), words[1] == "commit", "{words:?}");
    });
    lab.host.wait_for_phase(&lab.disk, PhaseName::Paused);
    are_equal(&lab, &there, "a.qcow2");
    is_retired(&lab);
    lab.fails(&["disk", "resume", "web1/xvda"], "moved");
    // The guest goes on there.
    let disk = there.host.attach(1, 0, &format!("qcow2:{}", there.image("a.qcow2")));
    there.host.wait_for_phase(&disk, PhaseName::Served);
    let mut other = there.host.connect(&disk);
    host::works(&mut other, 7);
    other.close(ferrite_testkit::PATIENCE).unwrap();
    there.host.detach(&disk);
    drop(front);
    lab.host.end_processes();
    roles::kill(lab.daemon.take().unwrap());
}

/// The points at which the sender's daemon is killed, and whether the disk moves all the same.
const SENDER: [(Step, bool); 9] = [
    (Step::Migration("begun"), false),
    (Step::Migration("agreed"), false),
    (Step::Job("mirror"), true),
    (Step::Migration("leaving"), true),
    (Step::Migration("marked"), true),
    (Step::Job("left"), true),
    (Step::Migration("answered"), true),
    (Step::Migration("decided"), true),
    (Step::Migration("written"), true),
];
/// The steps of the receiver's daemon, and whether the disk has moved when the daemon dies there.
const RECEIVER: [(Step, bool); 7] = [
    (Step::Migration("noted"), false),
    (Step::Migration("made"), false),
    (Step::Migration("opened"), false),
    (Step::Migration("prepared"), false),
    (Step::Migration("closed"), true),
    (Step::Migration("named"), true),
    (Step::Migration("answering"), true),
];

/// Moves a disk while the daemon of one side dies at a point. Afterwards exactly one host has the disk, and its guest
/// goes on with all that it has written.
fn dies(places: &Places, at: (Option<Step>, Option<Step>), moves: bool) {
    let mut lab = places.lab();
    let mut there = places.there(at.1);
    if at.0.is_some() {
        lab.restart(at.0);
    }
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let (front, model) = load.suspend();
    // It waits for a daemon that is started again, or ends with it.
    let mut command = lab.begins(&["migrate", "web1/xvda", "b"]);
    if at.0.is_some() {
        lab.is_dead(&format!("{at:?}"));
        lab.start_again();
        // A migration that was begun and not committed is given up, or goes on.
        if let Some(open) = migrations::list(&lab.host).into_iter().find(|it| !it.over)
            && open.job.is_none()
            && open.holder == Holder::Here
        {
            lab.does(&["migrate", "abort", &open.id]);
        } else {
            let _ = lab.run(&["migrate", "commit", "web1/xvda"]);
        }
    }
    if at.1.is_some() {
        wait_until("the death of the receiver", || there.has_died());
        there.start(None);
    }
    wait_until(&format!("a decision after {at:?}"), || {
        let own = migrations::list(&lab.host);
        let other = migrations::list(&there.host);
        own.iter().chain(&other).all(|it| it.over && it.holder != Holder::Doubt)
    });
    let own = migrations::list(&lab.host).pop().unwrap().holder;
    let other = migrations::list(&there.host).pop().map_or(Holder::There, |it| it.holder);
    assert!((own == Holder::Here) != (other == Holder::Here), "{at:?}: {own:?} {other:?}");
    assert_eq!(own == Holder::There, moves, "{at:?}");
    assert_eq!(fs::exists(there.image("a.qcow2")).unwrap(), moves, "{at:?}");
    wait_until("the guest's disk", || {
        let is_served = lab.host.show(&lab.disk).unwrap().disk.phase == PhaseName::Served;
        is_served && image_of(&lab).starts_with("nbds://") == moves
    });
    let load = Load::go_on(front, model);
    load.wait_for_progress();
    let _ = command.kill();
    command.wait().unwrap();
    load.end();
    if moves {
        there.restart();
        let after = there.only();
        assert!(after.over && after.holder == Holder::Here, "{at:?}: {after:?}");
    }
    lab.detach();
}

#[test]
fn exactly_one_host_has_the_disk_when_the_senders_daemon_dies_at_the_token() {
    let Some(places) = Places::new() else { return };
    dies(&places, (Some(Step::Migration("marked")), None), true);
}

#[test]
fn exactly_one_host_has_the_disk_when_the_receivers_daemon_dies_at_the_token() {
    let Some(places) = Places::new() else { return };
    dies(&places, (None, Some(Step::Migration("taken"))), true);
}

#[test]
#[ignore = "many deaths: cargo xtask nightly --only migrate"]
fn exactly_one_host_has_the_disk_wherever_the_senders_daemon_dies() {
    let Some(places) = Places::new() else { return };
    for (step, moves) in SENDER {
        dies(&places, (Some(step), None), moves);
    }
}

#[test]
#[ignore = "many deaths: cargo xtask nightly --only migrate"]
fn exactly_one_host_has_the_disk_wherever_the_receivers_daemon_dies() {
    let Some(places) = Places::new() else { return };
    for (step, moves) in RECEIVER {
        dies(&places, (None, Some(step)), moves);
    }
}

#[test]
#[ignore = "a minute, until the sender gives up waiting: cargo xtask nightly --only migrate"]
fn a_disk_whose_receiver_is_lost_in_between_is_in_doubt_until_somebody_says_where_it_is() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let mut there = places.there(Some(Step::Migration("closed")));
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    // Its requests would wait for longer than the guest of this test does.
    let (front, model) = load.suspend();
    lab.does(&["migrate", "prepare", "web1/xvda", "b"]);
    lab.does(&["migrate", "run", "web1/xvda"]);
    let asked = serde_json::json!({ "disk": host::id(&lab.disk), "keep": true });
    lab.host
        .call::<ferrite_daemon::control::protocol::Migration>("migrate.commit", &asked)
        .unwrap();
    wait_until("the death of the receiver", || there.has_died());
    wait_until("doubt", || migrations::list(&lab.host).iter().any(|it| it.holder == Holder::Doubt));
    // Neither opens, also after a restart of the sender.
    is_retired(&lab);
    assert!(!fs::exists(there.image("a.qcow2")).unwrap());
    let said = lab.does(&["migrate", "status", "web1/xvda"]);
    assert!(said.contains("not known which host"), "{said}");
    // The administrator knows that the receiver is gone for good.
    lab.does(&["migrate", "resolve", "web1/xvda", "--here"]);
    wait_until("the disk", || {
        lab.host.show(&lab.disk).is_ok_and(|it| it.disk.phase == PhaseName::Served)
    });
    assert_eq!(image_of(&lab), lab.image("a.qcow2"));
    let load = Load::go_on(front, model);
    load.wait_for_progress();
    // The receiver comes back, and is told the same.
    there.start(None);
    let id = there.only().id;
    assert!(there.run(&["migrate", "resolve", &id, "--there"]).status.success());
    assert_eq!(there.only().holder, Holder::There);
    assert!(!fs::exists(there.image("a.qcow2")).unwrap());
    let said = lab.fails(&["migrate", "resolve", &id, "--there"], "not in doubt");
    assert!(said.contains("migrate"), "{said}");
    load.wait_for_progress();
    load.end();
    lab.detach();
}

#[test]
fn a_migration_that_is_given_up_leaves_the_disk_and_no_image_there() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let there = places.there(None);
    let load = Load::start(&lab.host, &lab.disk);
    for steps in 1..=2 {
        lab.does(&["migrate", "prepare", "web1/xvda", "b"]);
        lab.refuses(&["migrate", "prepare", "web1/xvda", "b"], "is migrated already");
        if steps == 2 {
            lab.does(&["migrate", "run", "web1/xvda"]);
            load.wait_for_progress();
        }
        let said = lab.does(&["migrate", "abort", "web1/xvda"]);
        assert!(said.contains("this host has the disk"), "{said}");
        load.wait_for_progress();
        assert_eq!(image_of(&lab), lab.image("a.qcow2"));
        wait_until("an empty folder there", || there.images().is_empty());
    }
    load.end();
    lab.detach();
}

#[test]
fn what_cannot_come_is_refused_with_words_and_the_guest_goes_on() {
    let Some(places) = Places::new() else { return };
    let mut lab = places.lab();
    let there = places.there(None);
    let load = Load::start(&lab.host, &lab.disk);
    fs::write(there.image("taken.qcow2"), b"x").unwrap();
    let to = |more: &[&'static str]| [&["migrate", "web1/xvda"], more].concat();
    for (more, why) in [
        (&["b", "--name", "taken.qcow2"][..], "there is an image"),
        (&["b", "--name", "../x.qcow2"], "cannot be the name"),
        (&["b", "--name", ".x"], "cannot be the name"),
        (&["c"], "no host that is known"),
        (&["gone"], "localhost:1"),
        // The certificate is of localhost, and this name is another one.
        (&["wrong"], "certificate"),
    ] {
        lab.refuses(&to(more), why);
        load.wait_for_progress();
    }
    // All that was begun is over, and nothing is left there.
    wait_until("the end", || migrations::list(&there.host).iter().all(|it| it.over));
    assert_eq!(there.images(), ["taken.qcow2"]);
    // A host that may not come.
    there.host.end_processes();
    drop(there);
    let strict = places.there_from("other.example");
    lab.refuses(&["migrate", "web1/xvda", "b"], "");
    assert!(migrations::list(&strict.host).is_empty());
    load.wait_for_progress();
    load.end();
    lab.detach();
}

/// The network is cut one way at a point of one side's, and mended later. In between none opens the disk, or one does.
fn is_cut(places: &Places, cable: &Cable, at: (&'static str, bool), way: &str) {
    let (point, of_receiver) = at;
    let when = vec![(host::DO_AT, format!("{:?}={}", Step::Migration(point), cable.cut(way)))];
    let (own, other) = if of_receiver { (Vec::new(), when) } else { (when, Vec::new()) };
    let own: Vec<(&'static str, &str)> = own.iter().map(|(k, v)| (*k, v.as_str())).collect();
    let mut lab = places.lab_to(migrations::THERE, &own);
    let there = places.there_behind(cable, other);
    let load = Load::start(&lab.host, &lab.disk);
    lab.does(&["migrate", "prepare", "web1/xvda", "b"]);
    lab.does(&["migrate", "run", "web1/xvda"]);
    load.wait_for_progress();
    let (front, model) = load.suspend();
    let asked = serde_json::json!({ "disk": host::id(&lab.disk), "keep": true });
    let begun =
        lab.host.call::<ferrite_daemon::control::protocol::Migration>("migrate.commit", &asked);
    begun.unwrap();
    wait_until("doubt", || migrations::list(&lab.host).iter().any(|it| it.holder == Holder::Doubt));
    if of_receiver {
        wait_until("the token", || there.only().holder == Holder::Here);
    }
    // The sender's next daemon does not open it either.
    lab.restart_unserved();
    assert_eq!(migrations::list(&lab.host)[0].holder, Holder::Doubt);
    is_retired(&lab);
    cable.mend();
    wait_until("a decision", || migrations::list(&lab.host)[0].over);
    assert_eq!(migrations::list(&lab.host)[0].holder, Holder::There);
    assert_eq!(there.only().holder, Holder::Here);
    wait_until("the guest's disk", || {
        let is_served = lab.host.show(&lab.disk).unwrap().disk.phase == PhaseName::Served;
        is_served && image_of(&lab).starts_with("nbds://")
    });
    let load = Load::go_on(front, model);
    load.wait_for_progress();
    load.end();
    lab.detach();
}

#[test]
#[ignore = "root's, and half a minute: cargo xtask nightly --only migrate"]
fn exactly_one_host_has_the_disk_when_the_network_is_cut_one_way() {
    let (Some(places), Some(cable)) = (Places::new(), Cable::new()) else { return };
    for way in ["input", "output"] {
        is_cut(&places, &cable, ("marked", false), way);
        is_cut(&places, &cable, ("taken", true), way);
    }
}
