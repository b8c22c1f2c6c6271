//! A running disk whose images are changed by the daemon and the program's own steps.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::PhaseName;
use ferrite_daemon::jobs::{LeafBytes, Means, Tools};
use ferrite_daemon::keepers::{Keepers, Programs};
use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_io::engines::test_engine;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::Client;
use ferrite_testkit::wait_until;
use serde_json::Value;

use crate::host::{self, Host};
use crate::roles::{Roles, end, keeper, kill};

pub const BYTES: usize = 8 << 20;
/// The guest writes below it. Each image of a chain has as much, and more, of its own.
pub const STATIC: usize = 1 << 20;

/// A daemon's variable: the data in a leaf that is merged at once.
pub const SMALL_LEAF: &str = "FERRITE_TEST_SMALL_LEAF";
/// A daemon's variable: a step of the program that is killed when it begins.
pub const KILLED_STEP: &str = "FERRITE_TEST_KILLED_STEP";

/// A test has images locked that another test's new process would have open for a moment.
static ALONE: Mutex<()> = Mutex::new(());

/// The daemon, whose changes are made by the program.
pub fn be_a_daemon() {
    be_a_daemon_of(Box::new(Roles));
}

/// As [`be_a_daemon`], whose keepers are started by these programs.
pub fn be_a_daemon_of(programs: Box<dyn Programs>) {
    let mut leaf = LeafBytes::default();
    if let Ok(small) = std::env::var(SMALL_LEAF) {
        leaf.small = small.parse().unwrap();
    }
    let means = Means::default().with_tools(Arc::new(Program)).with_leaf_bytes(leaf);
    host::be_a_daemon_as(
        |run| Arc::new(Keepers::new(run, programs)),
        |daemon| daemon.with_jobs(means),
    );
}

struct Program;

impl Tools for Program {
    fn image(&self) -> Command {
        let program = env!("CARGO_BIN_EXE_ferrite");
        let Ok(step) = std::env::var(KILLED_STEP) else {
            let mut command = Command::new(program);
            command.arg("image");
            return command;
        };
        let script = format!("test \"$2\" = {step} && kill -9 $$; exec {program} image \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]);
        command
    }
}

pub struct Lab {
    pub host: Host,
    pub disk: DiskPaths,
    pub params: String,
    pub leaf: String,
    pub daemon: Option<Child>,
    model: Vec<u8>,
    environment: Vec<(&'static str, String)>,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    /// A host whose guest has a disk of 8 MiB with a chain of these names, the base first.
    pub fn new(chain: &[&str]) -> Lab {
        Lab::with(chain, &[])
    }

    /// A host as [`new`](Self::new) makes it, whose daemons have these variables.
    pub fn with(chain: &[&str], environment: &[(&'static str, &str)]) -> Lab {
        let mut lab = Lab::not_served(chain);
        lab.environment = environment.iter().map(|(name, to)| (*name, (*to).to_owned())).collect();
        lab.start(None);
        lab
    }

    /// A host as [`new`](Self::new) makes it, without a daemon.
    pub fn not_served(chain: &[&str]) -> Lab {
        let leaf = (*chain.last().unwrap()).to_owned();
        let (alone, host) = Lab::host();
        let image = host.image(&leaf);
        let format = match leaf.rsplit('.').next().unwrap() {
            "img" => "aio",
            format => format,
        };
        let params = format!("{format}:{}", image.display());
        let mut lab = Lab::attached(alone, host, &params, &leaf);
        lab.does(&["image", "create", &lab.image(chain[0]), "8M"]);
        for (i, name) in chain.iter().enumerate() {
            if i > 0 {
                let [parent, child] = [chain[i - 1], name].map(|name| lab.image(name));
                lab.does(&["image", "create", "--parent", &parent, &child]);
            }
            if chain.len() > 1 {
                lab.fill(name, i);
            }
        }
        lab
    }

    /// A host whose guest has the volume `web` of a store `pool`, of 8 MiB, and a daemon.
    pub fn of_volume() -> Lab {
        let (alone, host) = Lab::host();
        let volume = format!("{}#web", host.image("pool").display());
        std::fs::write(host.image("pool.guests"), "1").unwrap();
        let mut lab = Lab::attached(alone, host, &format!("aio:store:{volume}"), "pool#web");
        for words in
            [["create", &lab.image("pool"), "--size", "64M"], ["create", &volume, "8M", "-q"]]
        {
            let done = lab.program(&[&["store"], &words[..]].concat());
            assert!(done.status.success(), "{done:?}");
        }
        lab.start(None);
        lab
    }

    fn host() -> (MutexGuard<'static, ()>, Host) {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let host = Host::new(1);
        host.store().write("/local/domain/1/name", b"web1").unwrap();
        (alone, host)
    }

    fn attached(alone: MutexGuard<'static, ()>, host: Host, params: &str, leaf: &str) -> Lab {
        let disk = host.attach(1, 0, params);
        let (params, leaf) = (params.to_owned(), leaf.to_owned());
        let (daemon, environment, model) = (None, Vec::new(), vec![0; BYTES]);
        Lab { host, disk, params, leaf, daemon, model, environment, _alone: alone }
    }

    /// A client of the disk's NBD socket, with the size that it is told.
    pub fn client(&self) -> (Client, u64) {
        let mut stream = None;
        // A keeper may have been killed just now.
        wait_until("a server", || {
            let socket = self.host.show(&self.disk).ok().and_then(|details| details.nbd);
            stream = socket.and_then(|socket| UnixStream::connect(socket).ok());
            stream.is_some()
        });
        let mut client = Client::over(stream.unwrap());
        let (bytes, _) = client.go(true);
        (client, bytes)
    }

    /// Writes data that only this image has, and data over those of the one below.
    fn fill(&mut self, name: &str, i: usize) {
        let name = ImageName::parse(&self.image(name)).unwrap();
        let disk = Disk::open_image(&name, &OpenOptions::default()).unwrap();
        let mut session =
            Session::new(Arc::new(disk), |arena| test_engine().open(arena, 8)).unwrap();
        let own = ((2 << 20) + (i << 18), 70_000 / 512 * 512);
        for (at, len) in [(STATIC, 1 << 20), own, ((7 << 20) + i * 4096, 8192)] {
            let data = vec![i as u8 + 1; len];
            session.write(at as u64, &data).unwrap();
            self.model[at..at + len].copy_from_slice(&data);
        }
        session.close().unwrap();
    }

    /// Which image of a chain has the data that only the base had: 0 is the leaf.
    pub fn layer_of_the_bases_own(&self, image: &str) -> u64 {
        let map = self.does(&["image", "map", "--json", image]);
        let map: Value = serde_json::from_str(&map).unwrap();
        let begins_before = |part: &&Value| part["start_bytes"].as_u64().unwrap() <= 2 << 20;
        let part = map.as_array().unwrap().iter().rfind(begins_before).unwrap();
        part["layer"].as_u64().unwrap()
    }

    /// Starts a daemon, which dies at this step.
    pub fn start(&mut self, die_at: Option<Step>) {
        let more: Vec<(&str, &str)> =
            self.environment.iter().map(|(name, to)| (*name, to.as_str())).collect();
        self.daemon = Some(self.host.spawn_with(die_at, &more));
        self.is_served();
    }

    /// Starts a daemon, and waits for no disk.
    pub fn start_again(&mut self) {
        let more: Vec<(&str, &str)> =
            self.environment.iter().map(|(name, to)| (*name, to.as_str())).collect();
        self.daemon = Some(self.host.spawn_with(None, &more));
        wait_until("a daemon", || self.host.status().is_ok_and(|status| status.xen));
    }

    /// Kills the daemon, and starts one without the variables of this one's steps. It waits for no disk.
    pub fn restart_unserved(&mut self) {
        kill(self.daemon.take().unwrap());
        self.environment.retain(|(name, _)| *name != host::DO_AT);
        self.start_again();
    }

    pub fn is_served(&self) {
        wait_until("a daemon", || self.host.status().is_ok_and(|status| status.xen));
        self.host.wait_for_phase(&self.disk, PhaseName::Served);
    }

    /// Kills the daemon, and starts one that dies at this step.
    pub fn restart(&mut self, die_at: Option<Step>) {
        kill(self.daemon.take().unwrap());
        self.start(die_at);
    }

    /// Kills the daemon, and starts one with these variables.
    pub fn restart_with(&mut self, environment: &[(&'static str, &str)]) {
        self.environment = environment.iter().map(|(name, to)| (*name, (*to).to_owned())).collect();
        self.restart(None);
    }

    /// Waits until the daemon has killed itself.
    pub fn is_dead(&mut self, why: &str) {
        assert_eq!(self.daemon.as_mut().unwrap().wait().unwrap().signal(), Some(9), "{why}");
    }

    pub fn run(&self, args: &[&str]) -> Output {
        let run = self.host.paths().run;
        let mut words = args.to_vec();
        let asks_daemon = args[0] != "image" && (args[0] != "backup" || args[1] == "create");
        if asks_daemon {
            words.extend(["--run-dir", run.to_str().unwrap()]);
        }
        self.program(&words)
    }

    pub fn program(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).env_remove("RUST_LOG").current_dir(self.host.image(""));
        command.env("XENSTORED_PATH", self.host.store_socket()).output().unwrap()
    }

    /// Begins a command of the daemon's.
    pub fn begins(&self, words: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).env_remove("RUST_LOG").arg("--run-dir").arg(self.host.paths().run);
        command.env("XENSTORED_PATH", self.host.store_socket()).spawn().unwrap()
    }

    /// Runs a command that works, and returns what it has said.
    pub fn does(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// Runs a command that is refused for this reason, and checks that the guest is served on.
    pub fn refuses(&self, args: &[&str], why: &str) {
        self.fails(args, why);
        self.host.wait_for_phase(&self.disk, PhaseName::Served);
    }

    /// Runs a command that fails for this reason. Returns its error.
    pub fn fails(&self, args: &[&str], why: &str) -> String {
        let done = self.run(args);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(why), "{args:?}: {done:?}");
        said.into_owned()
    }

    /// Runs the first block of this title of the page, with this test's folder and guest. `each` is
    /// called after each command.
    pub fn follows(&self, title: &str, each: impl Fn(&[&str])) {
        self.follows_on(include_str!("../../../../docs/operations.md"), title, each);
    }

    /// As [`follows`](Self::follows), of another page.
    pub fn follows_on(&self, page: &str, title: &str, each: impl Fn(&[&str])) {
        let (_, recipe) = page.split_once(&format!("## {title}\n")).unwrap();
        let recipe = recipe.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
        for line in recipe.lines().map(|line| line.split(" #").next().unwrap()) {
            let line = line.replace("/srv/", &self.image(""));
            let words: Vec<&str> = line.split_whitespace().skip(1).collect();
            self.does(&words);
            each(&words);
        }
    }

    pub fn image(&self, name: &str) -> String {
        self.host.image(name).to_str().unwrap().to_owned()
    }

    /// The names of the chain's images, the leaf first.
    pub fn chain(&self) -> Vec<String> {
        let told = self.does(&["image", "info", "-U", &self.image(&self.leaf), "--json"]);
        let told: Value = serde_json::from_str(&told).unwrap();
        let name = |image: &Value| {
            let path = image["path"].as_str().unwrap_or_else(|| panic!("{told}"));
            path.rsplit('/').next().unwrap().to_owned()
        };
        told["chain"].as_array().unwrap().iter().map(name).collect()
    }

    /// Detaches the disk, whose guest has left, and ends the daemon.
    pub fn detach(&mut self) {
        let kept = keeper(&self.host, &self.disk);
        end(&self.host, std::slice::from_ref(&self.disk), &[kept]);
        kill(self.daemon.take().unwrap());
    }

    /// Starts the guest, which has left, and the daemon again, with the configuration that they had.
    pub fn start_guest_again(&mut self) {
        self.detach();
        std::fs::remove_dir_all(self.host.paths().run.join("disks")).unwrap();
        self.disk = self.host.attach(1, 0, &self.params);
        self.start(None);
    }

    /// The names of all files in the folder of images.
    pub fn files(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.host.image("")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// The contents of an image or a volume.
    pub fn contents(&self, name: &str) -> Vec<u8> {
        let all = self.image("contents.img");
        self.does(&["image", "convert", "-O", "raw", name, &all]);
        let bytes = std::fs::read(&all).unwrap();
        std::fs::remove_file(&all).unwrap();
        bytes
    }

    /// Detaches the disk, and checks its chain and what the guest has not written.
    pub fn end(mut self) {
        self.detach();
        let leaf = self.image(&self.leaf);
        self.does(&["image", "check", "--chain", &leaf]);
        let bytes = self.contents(&leaf);
        assert!(bytes[STATIC..BYTES] == self.model[STATIC..], "the disk reads differently");
        self.has_no_litter();
    }

    /// Checks that no file of an unfinished change is left.
    pub fn has_no_litter(&self) {
        let is_litter = |name: &String| name.contains("partial") || name.contains("ferrite-job");
        let left: Vec<String> = self.files().into_iter().filter(is_litter).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
