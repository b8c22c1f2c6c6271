//! A running disk is mirrored to a second one, while its guest writes and processes die.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Details, Job, JobPhase};
use ferrite_disk::{
    Disk, ImageName, MirrorFile, MirrorOptions, MirrorState, OpenOptions, ServiceEngine,
};
use ferrite_io::engines::test_engine;
use ferrite_testkit::places::Small;
use ferrite_testkit::{is_night, wait_until};
use serde_json::json;

use crate::host;
use crate::live::{BYTES, Lab};
use crate::load::Load;
use crate::roles::{keeper, worker};

/// A served disk with a chain of two images, and a target of its size.
fn lab() -> Lab {
    let lab = Lab::new(&["base.qcow2", "a.qcow2"]);
    lab.does(&["image", "create", &lab.image("t.qcow2"), "8M"]);
    lab
}

fn start(lab: &Lab, target: &str, more: &serde_json::Value) -> u64 {
    let mut asked = json!({ "disk": host::id(&lab.disk), "target": target });
    asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    lab.host.call::<Job>("disk.mirror", &asked).unwrap().id
}

fn show(lab: &Lab, id: u64) -> Job {
    lab.host.call("job.show", &json!({ "id": id })).unwrap()
}

fn wait_for_step(lab: &Lab, id: u64, step: &str) {
    wait_until(step, || {
        let job = lab.host.call::<Job>("job.show", &json!({ "id": id }));
        let Ok(job) = job else { return false };
        assert!(!job.phase.has_ended(), "{job:?}");
        job.step == step
    });
}

fn ended(lab: &Lab, id: u64) -> Job {
    lab.host.call("job.wait", &json!({ "id": id, "timeout_s": 60 })).unwrap()
}

fn image_of(lab: &Lab) -> String {
    let details: Details = lab.host.show(&lab.disk).unwrap();
    details.disk.image.unwrap()
}

fn target(lab: &Lab) -> String {
    format!("qcow2:{}", lab.image("t.qcow2"))
}

/// The names of the dirty maps of an image.
fn maps(lab: &Lab, name: &str) -> Vec<String> {
    let told = lab.does(&["image", "--json", "dirty", "list", "-U", &lab.image(name)]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let maps = told["maps"].as_array().unwrap().iter();
    maps.map(|map| map["name"].as_str().unwrap().to_owned()).collect()
}

/// Both disks have the same contents. The disk is at rest.
fn are_equal(lab: &Lab, a: &str, b: &str) {
    lab.does(&["image", "compare", &lab.image(a), &lab.image(b)]);
}

/// A daemon ends with the guest's disk in this image.
fn end_with(mut lab: Lab, leaf: &str) {
    leaf.clone_into(&mut lab.leaf);
    lab.end();
}

#[test]
fn a_disk_moves_to_the_target_of_its_mirror_while_its_guest_writes() {
    let lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    lab.does(&["disk", "dirty", "add", "web1/xvda", "nightly"]);
    let said = lab.does(&["mirror", "web1/xvda", &lab.image("t.qcow2")]);
    assert!(said.starts_with("the target has all"), "{said}");
    load.wait_for_progress();
    let listed = lab.does(&["job", "list"]);
    assert!(listed.contains("mirror") && listed.contains("100%"), "{listed}");
    let listed = lab.does(&["disk", "list"]);
    assert!(
        listed.contains("job 1: mirror to qcow2:/") && listed.contains("step mirror"),
        "{listed}"
    );
    let listed = lab.does(&["disk", "list", "--json"]);
    assert!(listed.contains("\"job\"") && listed.contains("\"kind\": \"mirror\""), "{listed}");
    let usual = load.take_longest_us();
    let said = lab.does(&["mirror", "complete", "web1/xvda"]);
    assert_eq!(said, "job 1 is done\n");
    let switched = load.take_longest_us();
    println!("longest answers: {usual} us until the switch-over, {switched} us with it");
    assert_eq!(image_of(&lab), lab.image("t.qcow2"));
    // The disk's maps move with it.
    assert_eq!(maps(&lab, "t.qcow2"), ["nightly"]);
    assert_eq!(maps(&lab, "a.qcow2"), ["nightly"]);
    // The guest reads from the target from here on.
    load.wait_for_progress();
    load.end();
    end_with(lab, "t.qcow2");
}

const PAGE: &str = include_str!("../../../../docs/access.md");

#[test]
fn the_recipe_of_the_manual_moves_a_disk() {
    let lab = Lab::new(&["base.qcow2", "a.qcow2"]);
    let load = Load::start(&lab.host, &lab.disk);
    let page = PAGE.replace("new.qcow2 64G", "new.qcow2 8M");
    lab.follows_on(&page, "Move a running disk", |_| load.wait_for_progress());
    assert_eq!(image_of(&lab), lab.image("new.qcow2"));
    load.end();
    end_with(lab, "new.qcow2");
}

#[test]
fn the_recipe_of_the_manual_replicates_a_disk() {
    let mut lab = Lab::new(&["base.qcow2", "a.qcow2"]);
    lab.does(&["image", "create", &lab.image("replica.img"), "8M"]);
    // The first command of the recipe stays in the foreground.
    let (_, recipe) = PAGE.split_once("## Replicate to a second host\n").unwrap();
    let line = recipe.lines().find(|line| line.starts_with("ferrite export")).unwrap();
    let line = line.replace("/srv/", &lab.image(""));
    let server =
        serve_by(&lab, &line.split_whitespace().skip(1).collect::<Vec<_>>(), "replica.sock");
    let load = Load::start(&lab.host, &lab.disk);
    lab.follows_on(
        &PAGE.replace(&format!("{}\n", line.replace(&lab.image(""), "/srv/")), ""),
        "Replicate to a second host",
        |_| load.wait_for_progress(),
    );
    load.end();
    lab.does(&["job", "cancel", "1"]);
    lab.detach();
    drop(server);
    are_equal(&lab, "a.qcow2", "replica.img");
}

#[test]
fn a_mirror_that_is_cancelled_leaves_the_source_and_an_equal_target() {
    let mut lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    let id = start(&lab, &target(&lab), &json!({}));
    wait_for_step(&lab, id, "mirror");
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    assert_eq!(image_of(&lab), lab.image("a.qcow2"));
    lab.detach();
    are_equal(&lab, "a.qcow2", "t.qcow2");
    // The map is gone with its mirror.
    assert_eq!(std::fs::read_dir(lab.host.paths().mirrors()).unwrap().count(), 0);
}

#[test]
fn a_target_on_the_same_base_gets_only_what_differs_from_it() {
    let mut lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let target = lab.image("t.qcow2");
    std::fs::remove_file(&target).unwrap();
    lab.does(&["image", "clone", &lab.image("base.qcow2"), &target]);
    // Blocks that the base has, and the disk has not any more, have to be written.
    lab.does(&["mirror", "web1/xvda", &target, "--compare"]);
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", "1"]);
    wait_until("the end", || ended(&lab, 1).phase == JobPhase::Cancelled);
    lab.detach();
    are_equal(&lab, "a.qcow2", "t.qcow2");
    assert_eq!(lab.layer_of_the_bases_own(&target), 1);
}

/// All files in /run are lost, as by a power cut, and the guest is started again.
fn lose_memory(lab: &mut Lab) {
    lab.detach();
    for folder in ["disks", "jobs", "mirrors", "images"] {
        let _ = std::fs::remove_dir_all(lab.host.paths().run.join(folder));
    }
    lab.disk = lab.host.attach(1, 0, &lab.params);
    lab.start(None);
}

#[test]
fn a_mirror_goes_on_after_the_loss_of_memory_and_copies_only_what_the_target_lacks() {
    let mut lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    let id = start(&lab, &target(&lab), &json!({}));
    wait_for_step(&lab, id, "mirror");
    load.wait_for_progress();
    let written = load.leave();
    let names = maps(&lab, "a.qcow2");
    assert!(names.len() == 1 && names[0].starts_with("mirror-"), "{names:?}");
    lose_memory(&mut lab);
    // A whole copy would take hours.
    let slow = ["mirror", "web1/xvda", &lab.image("t.qcow2"), "--resume", "--speed", "1000"];
    lab.does(&slow);
    // The guest writes without a mirror, and that is copied.
    lose_memory(&mut lab);
    let load = Load::go_on(lab.host.connect(&lab.disk), written);
    load.wait_for_progress();
    lab.does(&["mirror", "web1/xvda", &lab.image("t.qcow2"), "--resume"]);
    load.wait_for_progress();
    load.end();
    // The end of the mirror ends its map, and then no map says what the target lacks.
    lab.does(&["job", "cancel", "1"]);
    wait_until("the end", || ended(&lab, 1).phase == JobPhase::Cancelled);
    assert_eq!(maps(&lab, "a.qcow2"), [""; 0]);
    lab.fails(&slow, "it is not known what the target lacks");
    lab.detach();
    are_equal(&lab, "a.qcow2", "t.qcow2");
}

#[test]
#[ignore = "many deaths: cargo xtask nightly --only mirrors"]
fn a_mirror_is_cancelled_while_it_copies_and_the_guest_goes_on() {
    let lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    let id = start(&lab, &target(&lab), &json!({ "speed": 1000 }));
    wait_for_step(&lab, id, "copy");
    load.wait_for_progress();
    let job = show(&lab, id);
    assert!(job.done < job.all && job.all == BYTES as u64, "{job:?}");
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    load.wait_for_progress();
    load.end();
    end_with(lab, "a.qcow2");
}

#[test]
#[ignore = "many deaths: cargo xtask nightly --only mirrors"]
fn a_mirror_goes_on_after_the_death_of_workers_and_keepers() {
    let mut lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    let id = start(&lab, &target(&lab), &json!({ "speed": 2 << 20 }));
    wait_for_step(&lab, id, "copy");
    for i in 0..5 {
        let kept = keeper(&lab.host, &lab.disk);
        kill_process(if i == 3 { kept } else { worker(kept).unwrap() });
        load.wait_for_progress();
        if i == 2 {
            lab.does(&["job", "limit", &id.to_string(), "none"]);
            wait_for_step(&lab, id, "mirror");
        }
    }
    wait_for_step(&lab, id, "mirror");
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    lab.detach();
    are_equal(&lab, "a.qcow2", "t.qcow2");
}

fn kill_process(pid: i32) {
    use rustix::process::{Pid, Signal};
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// The points of a job at which its daemon is killed.
const POINTS: [&str; 8] =
    ["check", "attach", "paused", "changed", "resumed", "copy", "switch", "ended"];

#[test]
fn a_disk_moves_to_the_target_although_the_daemon_dies_at_each_step() {
    let mut lab = lab();
    let load = Load::start(&lab.host, &lab.disk);
    let images = ["a.qcow2", "t.qcow2"];
    let points = if is_night() { &POINTS[..] } else { &["paused", "copy", "switch"] };
    for (i, point) in points.iter().copied().enumerate() {
        let to = images[(i + 1) % 2];
        lab.restart(Some(Step::Job(point)));
        load.wait_for_progress();
        // The target is another disk's now: its content does not count.
        std::fs::remove_file(lab.image(to)).unwrap();
        lab.does(&["image", "create", &lab.image(to), "8M"]);
        let asked = json!({ "disk": host::id(&lab.disk), "switch": true,
            "target": format!("qcow2:{}", lab.image(to)) });
        // It may die before the answer.
        let _ = lab.host.call::<Job>("disk.mirror", &asked);
        lab.is_dead(point);
        lab.start(None);
        let job = ended(&lab, i as u64 + 1);
        assert_eq!((job.phase, &job.why), (JobPhase::Done, &None), "{point}");
        assert_eq!(image_of(&lab), lab.image(to), "{point}");
        load.wait_for_progress();
    }
    load.end();
    end_with(lab, images[points.len() % 2]);
}

/// A server of an image, which is killed when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends a server in good order.
fn end_server(mut server: Server) {
    use rustix::process::{Pid, Signal};
    rustix::process::kill_process(Pid::from_child(&server.0), Signal::TERM).unwrap();
    assert!(server.0.wait().unwrap().success());
}

fn serve(lab: &Lab, image: &str) -> Server {
    let [socket, image] = ["nbd.sock", image].map(|name| lab.image(name));
    serve_by(lab, &["export", "nbd", "--socket", &socket, &image], "nbd.sock")
}

fn serve_by(lab: &Lab, words: &[&str], socket: &str) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let server = Server(command.args(words).env_remove("RUST_LOG").spawn().unwrap());
    wait_until("a server", || UnixStream::connect(lab.image(socket)).is_ok());
    server
}

#[test]
fn a_target_that_is_killed_and_comes_back_gets_what_it_lacks_and_the_guest_sees_nothing() {
    let mut lab = lab();
    lab.does(&["image", "create", &lab.image("far.img"), "8M"]);
    let server = serve(&lab, "far.img");
    let load = Load::start(&lab.host, &lab.disk);
    let uri = format!("nbd+unix:///?socket={}", lab.image("nbd.sock"));
    let id = start(&lab, &uri, &json!({}));
    wait_for_step(&lab, id, "mirror");
    load.wait_for_progress();
    drop(server);
    // The guest's writes are answered without the target.
    load.wait_for_progress();
    wait_until("trouble", || show(&lab, id).why.is_some_and(|why| why.contains("lacks")));
    assert_eq!(show(&lab, id).phase, JobPhase::Running);
    load.wait_for_progress();
    let server = serve(&lab, "far.img");
    wait_until("the target", || {
        let job = show(&lab, id);
        job.step == "mirror" && job.why.is_none() && job.done == job.all
    });
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    lab.detach();
    drop(server);
    are_equal(&lab, "a.qcow2", "far.img");
}

#[test]
fn a_volume_of_a_store_is_a_target_by_nbd_and_refused_by_its_name() {
    let mut lab = lab();
    let pool = lab.image("pool");
    let volume = format!("{pool}#t");
    for words in [&["create", &pool, "--size", "64M"][..], &["create", &volume, "8M", "-q"]] {
        let done = lab.program(&[&["store"], words].concat());
        assert!(done.status.success(), "{done:?}");
    }
    let named = format!("store:{volume}");
    lab.refuses(&["mirror", "web1/xvda", &named], "ferrite export nbd --socket");
    let socket = lab.image("nbd.sock");
    let server = serve_by(&lab, &["export", "nbd", "--socket", &socket, &named], "nbd.sock");
    let load = Load::start(&lab.host, &lab.disk);
    lab.does(&["mirror", "web1/xvda", &format!("nbd+unix:///?socket={socket}")]);
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", "1"]);
    assert_eq!(ended(&lab, 1).phase, JobPhase::Cancelled);
    lab.detach();
    end_server(server);
    assert!(lab.contents(&named) == lab.contents(&lab.image("a.qcow2")));
}

#[test]
fn a_target_that_fills_up_gets_what_it_lacks_when_there_is_room_and_can_be_cancelled_before() {
    let mut lab = lab();
    let folder = lab.host.image("small");
    std::fs::create_dir(&folder).unwrap();
    let Some(small) = Small::mount(&folder, "size=16m") else { return };
    lab.does(&["image", "create", &lab.image("small/t.qcow2"), "8M"]);
    let fill = || {
        let mut filler = std::fs::File::create(folder.join("filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
    };
    fill();
    let load = Load::start(&lab.host, &lab.disk);
    let target = format!("qcow2:{}", lab.image("small/t.qcow2"));
    let is_full = |id| {
        let why = show(&lab, id).why;
        why.is_some_and(|why| why.contains("No space left") && why.contains("the target lacks"))
    };
    let id = start(&lab, &target, &json!({}));
    wait_until("a full target", || is_full(id));
    load.wait_for_progress();
    let listed = lab.does(&["disk", "list"]);
    assert!(listed.contains("No space left"), "{listed}");
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    load.wait_for_progress();
    let id = start(&lab, &target, &json!({}));
    wait_until("a full target", || is_full(id));
    std::fs::remove_file(folder.join("filler")).unwrap();
    wait_until("the target", || {
        let job = show(&lab, id);
        job.step == "mirror" && job.why.is_none()
    });
    load.wait_for_progress();
    load.end();
    lab.does(&["job", "cancel", &id.to_string()]);
    assert_eq!(ended(&lab, id).phase, JobPhase::Cancelled);
    lab.detach();
    are_equal(&lab, "a.qcow2", "small/t.qcow2");
    drop(small);
}

#[test]
fn what_cannot_be_a_target_is_refused_with_words_and_the_guest_goes_on() {
    let lab = lab();
    let [small, read_only] = ["small.img", "ro.img"].map(|name| lab.image(name));
    lab.does(&["image", "create", &small, "4M"]);
    lab.does(&["image", "create", &read_only, "8M"]);
    let clone = lab.image("child.qcow2");
    lab.does(&["image", "create", "--parent", &read_only, &clone]);
    let folder = lab.image("");
    let other = lab.image("other.img");
    lab.does(&["image", "create", &other, "8M"]);
    lab.refuses(&["mirror", "web1/xvda", &other, "--resume"], "it is not known what the target");
    for (target, why) in [
        (&small, "it has 4194304 bytes, and the disk has 8388608"),
        (&lab.image("none.qcow2"), "No such file"),
        (&lab.image("a.qcow2"), "has locked it"),
        (&lab.image("base.qcow2"), ""),
        (&read_only, ""),
        (&folder, ""),
        (&"/etc/hosts".to_owned(), "image folder"),
        (&"nbd+unix:///?socket=/nowhere".to_owned(), "/nowhere"),
    ] {
        lab.refuses(&["mirror", "web1/xvda", target], why);
    }
    // One mirror a disk, and one a target.
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let id = start(&lab, &target(&lab), &json!({}));
    wait_for_step(&lab, id, "mirror");
    lab.refuses(&["mirror", "web1/xvda", &lab.image("t.qcow2")], "changes this disk already");
    lab.refuses(&["disk", "snapshot", "web1/xvda", &lab.image("s.qcow2")], "changes this disk");
    lab.refuses(&["disk", "resize", "web1/xvda", "+1M"], "job");
    lab.does(&["job", "cancel", &id.to_string()]);
    lab.fails(&["mirror", "complete", "web1/xvda"], "it has none");
    load.wait_for_progress();
    load.end();
    end_with(lab, "a.qcow2");
}

/// A worker that takes over opens a mirror with an empty disk of a server's, which does not know it, and begins to copy.
fn taken_over(map: &Path, source: &str, target: &str) -> Arc<Disk> {
    let options = OpenOptions { taken_over: true, ..OpenOptions::default() };
    let disk = Disk::open(&format!("raw:{source}"), &OpenOptions::default()).unwrap();
    let mirror = MirrorOptions { target: ImageName::parse(target).unwrap(), map: map.to_owned() };
    let disk = disk.mirrored(&mirror, &options).unwrap();
    let engine: ServiceEngine = Arc::new(|arena, entries| test_engine().open(arena, entries));
    disk.begin_service(&engine).unwrap();
    Arc::new(disk)
}

#[test]
fn only_a_target_that_no_worker_has_had_is_written_before_its_server_was_quiet_for_long() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let [far, socket] = ["far.img", "far.sock"].map(path);
    std::fs::write(&far, vec![0; 1 << 20]).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["export", "nbd", "--socket", &socket, &far]).env_remove("RUST_LOG");
    let _server = Server(command.spawn().unwrap());
    wait_until("a server", || UnixStream::connect(&socket).is_ok());
    let target = format!("nbd+unix:///?socket={socket}&drain_s=86400");
    let map = dir.path().join("map");
    for (is_fresh, opened_before) in [(false, false), (true, true), (true, false)] {
        // The one before is open until the end.
        let source = path(&format!("source-{is_fresh}-{opened_before}.img"));
        std::fs::write(&source, vec![7; 1 << 20]).unwrap();
        MirrorFile::create(&map, 1 << 20).unwrap().set_fresh(is_fresh).unwrap();
        if opened_before {
            // A worker that was killed before it copied anything. Its writes could come late.
            let options = OpenOptions::default();
            let disk = Disk::open(&format!("raw:{source}"), &options).unwrap();
            let target = ImageName::parse(&target).unwrap();
            drop(disk.mirrored(&MirrorOptions { target, map: map.clone() }, &options).unwrap());
        }
        let disk = taken_over(&map, &source, &target);
        if is_fresh && !opened_before {
            let state = || MirrorFile::open(&map).unwrap().status().unwrap().state;
            wait_until("the copy", || state() == MirrorState::InStep);
            assert!(std::fs::read(&far).unwrap() == vec![7; 1 << 20]);
        } else {
            // It may be looked at too early, and then finds nothing. It is never wrong.
            std::thread::sleep(std::time::Duration::from_millis(300));
            assert!(std::fs::read(&far).unwrap() == vec![0; 1 << 20], "{is_fresh} {opened_before}");
        }
        // Its end would wait for as long.
        std::mem::forget(disk);
    }
}
