//! A daemon of one disk, as `ferrite serve --control` runs it, with a guest that writes while its disk is changed, and
//! while each process is killed.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../../daemon/tests/load/mod.rs"]
mod load;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;

use std::path::Path;
use std::process::{Child, Command, Output};
use std::sync::Arc;

use ferrite_daemon::config::Config;
use ferrite_daemon::jobs::{Means, Tools};
use ferrite_daemon::keepers::Keepers;
use ferrite_daemon::params::Params;
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Daemon, Paths, Standalone};
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::waker::Waker;
use ferrite_testkit::wait_until;
use host::Host;
use load::Load;
use roles::{Roles, is_alive, kill, kill_keeper, kill_pid, worker};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// The daemon's variable: the image of the disk, which is 1/xvda.
const IMAGE: &str = "FERRITE_TEST_IMAGE";

struct Program;

impl Tools for Program {
    fn image(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("image");
        command
    }
}

/// Not a test: the daemon of one disk.
#[test]
fn process_daemon() {
    let Ok(image) = std::env::var(IMAGE) else { return };
    let env = |name: &str| std::env::var(name).unwrap();
    let run = env(host::RUN);
    let Params::Image(image) = Params::parse(image.as_bytes()) else { panic!("{image}") };
    let guest = Some(DiskId { domid: 1, devid: 51712 });
    let disk = Standalone { image, read_only: false, guest, export: None, socket: None };
    disk.prepare(run.as_ref()).unwrap();
    let state_folder = Path::new(&run).join("state");
    let image_folders = vec![env(host::IMAGES).into()];
    let config = Config { image_folders, state_folder, ..Config::default() };
    let keepers = Arc::new(Keepers::new(run.as_ref(), Box::new(Roles)));
    let (connect, end) =
        (host::connect(env(host::STORE).as_ref()), Arc::new(Waker::new().unwrap()));
    let daemon = Daemon::new(config, Paths { run: run.into() }, keepers, connect, end).unwrap();
    let daemon = daemon.with_jobs(Means::default().with_tools(Arc::new(Program)));
    let stop = Arc::new(Waker::new().unwrap());
    let (wake, mut signals) = (stop.clone(), signal_hook::iterator::Signals::new([15]).unwrap());
    std::thread::spawn(move || signals.forever().for_each(|_| wake.wake()));
    daemon.run_standalone(&disk, &stop, &|_, _| ()).unwrap();
}

/// A guest's disk that a process with a control folder serves.
struct Served {
    host: Host,
    disk: DiskPaths,
    image: String,
    process: Option<Child>,
}

impl Served {
    fn new(image: &str) -> Served {
        let host = Host::new(1);
        let path = host.image(image).to_str().unwrap().to_owned();
        let (_, format) = image.rsplit_once('.').unwrap();
        let image = format!("{format}:{path}");
        let disk = host.attach(1, 0, &image);
        let mut served = Served { host, disk, image, process: None };
        served.does(&["image", "create", &path, "8M"]);
        served.start();
        served
    }

    fn start(&mut self) {
        self.process = Some(self.host.spawn_with(None, &[(IMAGE, &self.image)]));
        wait_until("a process that is asked", || self.host.status().is_ok());
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).env_remove("RUST_LOG").current_dir(self.host.image(""));
        if words[0] != "image" {
            command.arg("--run-dir").arg(self.host.paths().run);
        }
        command.env("XENSTORED_PATH", self.host.store_socket()).output().unwrap()
    }

    #[track_caller]
    fn does(&self, words: &[&str]) -> String {
        let done = self.run(words);
        assert!(done.status.success(), "{words:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    fn keeper(&self) -> i32 {
        let mut keeper = 0;
        wait_until("a keeper with a worker", || {
            let shown = self.run(&["disk", "show", "tap/0", "--json"]);
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
            keeper = shown["disk"]["pid"].as_i64().unwrap_or_default() as i32;
            keeper != 0
                && shown["disk"]["phase"] == json!("served")
                && is_alive(keeper)
                && worker(keeper).is_some_and(is_alive)
        });
        keeper
    }

    fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        kill_process(Pid::from_child(&process), Signal::TERM).unwrap();
        assert!(process.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.host.end_processes();
    }
}

#[test]
fn a_served_disk_is_changed_while_its_guest_writes_and_processes_are_killed() {
    let mut served = Served::new("web.qcow2");
    let load = Load::start(&served.host, &served.disk);
    load.wait_for_progress();
    let tap = |verb: &'static str, more: &[&'static str]| [&["disk", verb, "tap/0"], more].concat();
    served.does(&tap("pause", &[]));
    served.does(&["image", "check", "web.qcow2"]);
    served.does(&tap("resume", &[]));
    load.wait_for_progress();
    served.does(&tap("snapshot", &["monday.qcow2"]));
    load.wait_for_progress();
    kill_pid(worker(served.keeper()).unwrap());
    load.wait_for_progress();
    served.does(&tap("snapshot", &["tuesday.qcow2"]));
    kill_keeper(served.keeper());
    load.wait_for_progress();
    served.does(&tap("resize", &["+2M"]));
    let sectors = format!("{}/sectors", served.disk.backend);
    wait_until("the guest's new size", || {
        served.host.store().read_string(&sectors).unwrap().as_deref() == Some("20480")
    });
    kill(served.process.take().unwrap());
    load.wait_for_progress();
    served.start();
    served.keeper();
    served.does(&tap("coalesce", &["--from", "tuesday.qcow2", "--to", "monday.qcow2"]));
    load.wait_for_progress();
    served.does(&tap("limit", &["--iops", "100000"]));
    load.wait_for_progress();
    served.does(&tap("pause", &[]));
    served.does(&["image", "convert", "web.qcow2", "other.vhd"]);
    served.does(&tap("resume", &["other.vhd"]));
    load.wait_for_progress();
    load.end();
    served.host.detach(&served.disk);
    // Its guest has left, so the process ends.
    assert!(served.process.take().unwrap().wait().unwrap().success());
    served.does(&["image", "check", "--chain", "web.qcow2"]);
    wait_until("no process", || served.host.processes().is_empty());
}

#[test]
fn a_guest_waits_for_the_next_process_when_one_is_stopped() {
    let mut served = Served::new("web.vhd");
    let load = Load::start(&served.host, &served.disk);
    load.wait_for_progress();
    served.stop();
    wait_until("no process", || served.host.processes().is_empty());
    served.does(&["image", "check", "web.vhd"]);
    served.start();
    load.wait_for_progress();
    load.end();
    served.host.detach(&served.disk);
    assert!(served.process.take().unwrap().wait().unwrap().success());
}
