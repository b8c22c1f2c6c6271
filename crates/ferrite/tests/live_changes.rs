//! A running disk gets a snapshot, grows, and is switched to another image by the daemon and the program's own steps.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../../daemon/tests/load/mod.rs"]
mod load;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Attached, PhaseName};
use ferrite_daemon::jobs::{Means, Tools};
use ferrite_daemon::keepers::Keepers;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::wait_until;
use host::{Host, works};
use load::Load;
use roles::{Roles, end, keeper, kill};
use serde_json::{Value, json};

/// A test has images locked that another test's new process would have open for a moment.
static ALONE: Mutex<()> = Mutex::new(());

/// Not a test: the daemon, whose changes are made by the program.
#[test]
fn process_daemon() {
    host::be_a_daemon_as(
        |run| Arc::new(Keepers::new(run, Box::new(Roles))),
        |daemon| daemon.with_jobs(Means::default().with_tools(Arc::new(Program))),
    );
}

struct Program;

impl Tools for Program {
    fn image(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("image");
        command
    }
}

struct Lab {
    host: Host,
    disk: DiskPaths,
    params: String,
    daemon: Option<Child>,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    /// A host whose guest has a disk of this name, of 8 MiB.
    fn new(name: &str) -> Lab {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let host = Host::new(1);
        host.store().write("/local/domain/1/name", b"web1").unwrap();
        let image = host.image(name);
        let made = program(&host, &["image", "create", image.to_str().unwrap(), "8M"]);
        assert!(made.status.success(), "{made:?}");
        let format = match name.rsplit('.').next().unwrap() {
            "img" => "aio",
            format => format,
        };
        let params = format!("{format}:{}", image.display());
        let daemon = Some(host.spawn(None));
        let disk = host.attach(1, 0, &params);
        let lab = Lab { host, disk, params, daemon, _alone: alone };
        lab.is_served();
        lab
    }

    fn is_served(&self) {
        wait_until("a daemon", || self.host.status().is_ok_and(|status| status.xen));
        self.host.wait_for_phase(&self.disk, PhaseName::Served);
    }

    /// Kills the daemon, and starts one that dies at this step.
    fn restart(&mut self, die_at: Option<Step>) {
        kill(self.daemon.take().unwrap());
        self.daemon = Some(self.host.spawn(die_at));
        wait_until("a daemon", || self.host.status().is_ok_and(|status| status.xen));
        self.host.wait_for_phase(&self.disk, PhaseName::Served);
    }

    fn run(&self, args: &[&str]) -> Output {
        let run = self.host.paths().run;
        let mut words = args.to_vec();
        if args[0] != "image" {
            words.extend(["--run-dir", run.to_str().unwrap()]);
        }
        program(&self.host, &words)
    }

    /// Runs a command that works, and returns what it has said.
    fn does(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// Runs a command that is refused for this reason, and checks that the guest is served on.
    fn refuses(&self, args: &[&str], why: &str) {
        let done = self.run(args);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(why), "{args:?}: {done:?}");
        self.host.wait_for_phase(&self.disk, PhaseName::Served);
    }

    fn image(&self, name: &str) -> String {
        self.host.image(name).to_str().unwrap().to_owned()
    }

    /// The names of the chain's images, the leaf first.
    fn chain(&self, leaf: &str) -> Vec<String> {
        let told = self.does(&["image", "info", "-U", &self.image(leaf), "--json"]);
        let told: Value = serde_json::from_str(&told).unwrap();
        let name = |image: &Value| {
            let path = image["path"].as_str().unwrap_or_else(|| panic!("{told}"));
            path.rsplit('/').next().unwrap().to_owned()
        };
        told["chain"].as_array().unwrap().iter().map(name).collect()
    }

    fn end(mut self, leaf: &str) {
        let kept = keeper(&self.host, &self.disk);
        end(&self.host, std::slice::from_ref(&self.disk), &[kept]);
        kill(self.daemon.take().unwrap());
        self.does(&["image", "check", "--chain", &self.image(leaf)]);
    }
}

fn program(host: &Host, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG").current_dir(host.image(""));
    command.env("XENSTORED_PATH", host.store_socket()).output().unwrap()
}

/// The blocks of the page, with this test's folder and guest.
#[test]
fn the_recipes_of_the_manual_work_while_the_guest_writes() {
    let lab = Lab::new("web1.qcow2");
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    let page = include_str!("../../../docs/operations.md");
    let titles =
        ["Snapshot a running guest", "Grow a disk", "Pause a disk, or serve it from another image"];
    for title in titles {
        let (_, recipe) = page.split_once(&format!("## {title}\n")).unwrap();
        let recipe = recipe.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
        for line in recipe.lines().map(|line| line.split(" #").next().unwrap()) {
            let line = line.replace("/srv/", &lab.image(""));
            let words: Vec<&str> = line.split_whitespace().skip(1).collect();
            lab.does(&words);
            if words[1] == "resume" || !title.starts_with("Pause") {
                load.wait_for_progress();
            }
        }
    }
    assert_eq!(lab.chain("web1.qcow2"), ["web1.qcow2", "tuesday.qcow2"]);
    let shown = lab.does(&["image", "info", "-U", &lab.image("web1.qcow2"), "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["virtual-size"], json!(10 << 20));
    let sectors = format!("{}/sectors", lab.disk.backend);
    wait_until("the guest's new size", || {
        lab.host.store().read_string(&sectors).unwrap().as_deref() == Some("20480")
    });
    load.wait_for_progress();
    load.end();
    lab.end("web1.qcow2");
}

/// The daemon dies when the image is closed for the change. The next one ends the pause.
#[test]
fn a_change_whose_daemon_dies_leaves_the_disk_as_it_was_and_can_be_made_again() {
    let mut lab = Lab::new("a.vhd");
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
        assert_eq!(lab.daemon.as_mut().unwrap().wait().unwrap().signal(), Some(9));
        let length = lab.chain("a.vhd").len();
        lab.daemon = Some(lab.host.spawn(None));
        lab.is_served();
        load.wait_for_progress();
        assert_eq!(lab.chain("a.vhd").len(), length);
        lab.host.call::<Attached>(&method, &asked).unwrap();
        load.wait_for_progress();
    }
    assert_eq!(lab.chain("a.vhd"), ["a.vhd", "old.vhd"]);
    load.end();
    lab.end("a.vhd");
}

#[test]
fn what_cannot_be_done_is_refused_with_the_reason_and_the_guest_is_served_on() {
    let lab = Lab::new("a.qcow2");
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
    assert!(program(&lab.host, &["image", "create", &other, "8M"]).status.success());
    load.wait_for_progress();
    lab.refuses(&["disk", "switch", "web1/xvda", &other, "--compare"], "differ");
    load.wait_for_progress();
    load.end();
    lab.end("a.qcow2");
}

#[test]
fn a_guest_that_is_started_again_has_the_image_that_its_disk_was_switched_to() {
    let mut lab = Lab::new("a.vhd");
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
    kill(lab.daemon.take().unwrap());
    lab.daemon = Some(lab.host.spawn(None));
    lab.disk = lab.host.attach(1, 0, &lab.params);
    lab.is_served();
    let listed = lab.host.wait_for_phase(&lab.disk, PhaseName::Served);
    assert_eq!(listed.image.as_deref(), Some(next.as_str()));
    let mut front = lab.host.connect(&lab.disk);
    works(&mut front, 3);
    front.close(ferrite_testkit::PATIENCE).unwrap();
    lab.end("b.qcow2");
}
