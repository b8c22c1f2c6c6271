//! Images of a running disk's chain are merged by the daemon's jobs and the program's own steps, while its guest writes.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../../daemon/tests/load/mod.rs"]
mod load;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Job, JobPhase};
use ferrite_daemon::jobs::{Means, Tools};
use ferrite_daemon::keepers::Keepers;
use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_io::engines::test_engine;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::wait_until;
use host::Host;
use load::Load;
use roles::{Roles, end, keeper, kill};
use serde_json::{Value, json};

const BYTES: usize = 8 << 20;
/// The guest writes below it.
const STATIC: usize = 1 << 20;

/// The points of a job at which its daemon is killed, each in a merge of its own.
const POINTS: [&str; 7] = ["plan", "copy", "relink", "paused", "changed", "resumed", "clean"];

/// A test has locked images open, which another test's new process would have for a moment.
static ALONE: Mutex<()> = Mutex::new(());

/// Not a test: the daemon, whose jobs are done by the program.
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
    leaf: String,
    model: Vec<u8>,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    /// A host whose guest has a chain of images of these names, the base first.
    fn new(chain: &[&str]) -> Lab {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (host, model) = (Host::new(1), vec![0; BYTES]);
        let leaf = chain.last().unwrap().to_string();
        let mut lab = Lab { host, leaf, model, _alone: alone };
        lab.program(&["image", "create", chain[0], "8M"]);
        for (i, name) in chain.iter().enumerate() {
            if i > 0 {
                lab.program(&["image", "create", "--parent", chain[i - 1], name]);
            }
            lab.fill(name, i);
        }
        lab
    }

    /// Writes data that only this image has, and data over those of the one below.
    fn fill(&mut self, name: &str, i: usize) {
        let name = ImageName::parse(self.host.image(name).to_str().unwrap()).unwrap();
        let disk = Disk::open_image(&name, &OpenOptions::default()).unwrap();
        let mut session =
            Session::new(Arc::new(disk), |arena| test_engine().open(arena, 8)).unwrap();
        for (at, len) in [((2 << 20) + (i << 19), 70_000 / 512 * 512), ((7 << 20) + i * 4096, 8192)]
        {
            let data = vec![i as u8 + 1; len];
            session.write(at as u64, &data).unwrap();
            self.model[at..at + len].copy_from_slice(&data);
        }
        session.close().unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(args).env_remove("RUST_LOG").current_dir(self.host.image(""));
        command.env("XENSTORED_PATH", self.host.store_socket());
        command
    }

    fn program(&self, args: &[&str]) -> Output {
        let output = self.command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        output
    }

    fn attach(&self) -> DiskPaths {
        self.host.attach(1, 0, &format!("qcow2:{}", self.host.image(&self.leaf).display()))
    }

    /// The names of the chain's images, the leaf first.
    fn chain(&self) -> Vec<String> {
        let told = self.program(&["image", "info", "-U", &self.leaf, "--json"]).stdout;
        let told: Value = serde_json::from_slice(&told).unwrap();
        let name = |image: &Value| {
            let path = image["path"].as_str().unwrap_or_else(|| panic!("{told}"));
            path.rsplit('/').next().unwrap().to_owned()
        };
        told["chain"].as_array().unwrap().iter().map(name).collect()
    }

    /// Checks the chain, and what the guest has not written.
    fn is_right(&self) {
        self.program(&["image", "check", "--chain", &self.leaf]);
        self.program(&["image", "convert", "-O", "raw", &self.leaf, "all.img"]);
        let bytes = std::fs::read(self.host.image("all.img")).unwrap();
        assert!(bytes[STATIC..] == self.model[STATIC..], "the disk reads differently");
        let left = std::fs::read_dir(self.host.image("")).unwrap();
        let names = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = names.filter(|name| name.contains("partial")).collect();
        assert!(left.is_empty(), "{left:?}");
        std::fs::remove_file(self.host.image("all.img")).unwrap();
    }
}

fn wait_for_daemon(lab: &Lab) {
    wait_until("a daemon", || lab.host.status().is_ok_and(|status| status.served == 1));
}

/// The block of the page, with this test's folder and guest.
#[test]
fn the_recipe_of_the_manual_merges_old_snapshots_while_the_guest_writes() {
    let lab = Lab::new(&[
        "sunday.qcow2",
        "monday.qcow2",
        "tuesday.qcow2",
        "wednesday.qcow2",
        "web1.qcow2",
    ]);
    lab.host.store().write("/local/domain/1/name", b"web1").unwrap();
    let daemon = lab.host.spawn(None);
    let disk = lab.attach();
    wait_for_daemon(&lab);
    let load = Load::start(&lab.host, &disk);
    load.wait_for_progress();
    let kept = keeper(&lab.host, &disk);
    let page = include_str!("../../../docs/operations.md");
    let (_, recipe) = page.split_once("## Merge old snapshots\n").unwrap();
    let recipe = recipe.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let (folder, run) = (lab.host.image("").display().to_string(), lab.host.paths().run);
    for line in recipe.lines().map(|line| line.split(" #").next().unwrap()) {
        let line = line.replace("/srv/", &folder);
        let mut words: Vec<&str> = line.split_whitespace().skip(1).collect();
        if words[0] != "image" {
            words.extend(["--run-dir", run.to_str().unwrap()]);
        }
        lab.program(&words);
        load.wait_for_progress();
    }
    assert_eq!(lab.chain(), ["web1.qcow2", "sunday.qcow2"]);
    load.end();
    end(&lab.host, &[disk], &[kept]);
    kill(daemon);
    lab.is_right();
}

#[test]
fn a_merge_goes_on_after_the_death_of_the_daemon_at_each_step_and_the_guest_sees_nothing() {
    let names: Vec<String> = (0..=POINTS.len() + 1).map(|i| format!("i{i}.qcow2")).collect();
    let lab = Lab::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut daemon = lab.host.spawn(None);
    let disk = lab.attach();
    wait_for_daemon(&lab);
    let load = Load::start(&lab.host, &disk);
    let kept = keeper(&lab.host, &disk);
    for (i, point) in POINTS.into_iter().enumerate() {
        kill(daemon);
        let mut victim = lab.host.spawn(Some(Step::Job(point)));
        wait_for_daemon(&lab);
        load.wait_for_progress();
        // It may die before the answer.
        let asked = json!({ "disk": host::id(&disk) });
        let _ = lab.host.call::<Job>("disk.coalesce", &asked);
        assert_eq!(victim.wait().unwrap().signal(), Some(9), "{point}");
        daemon = lab.host.spawn(None);
        wait_until("a daemon", || lab.host.status().is_ok_and(|status| status.xen));
        let waited = lab.host.call("job.wait", &json!({ "id": i + 1, "timeout_s": 60 }));
        let job: Job = waited.unwrap();
        assert_eq!((job.phase, &job.why), (JobPhase::Done, &None), "{point}");
        load.wait_for_progress();
    }
    assert_eq!(lab.chain(), [lab.leaf.as_str(), "i0.qcow2"]);
    load.end();
    end(&lab.host, &[disk], &[kept]);
    kill(daemon);
    lab.is_right();
}
