//! Random sequences of changes of a running disk. Processes die between the changes and in them. A guest compares what
//! it reads all the time, and so does a client of NBD, which has a request under way in each change.
//!
//! The seed of a story that fails is printed. `FERRITE_TEST_SEED` runs that story alone.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ferrite_daemon::control::protocol::{Job, JobList, JobPhase, PhaseName};
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::programs::qemu_img;
use ferrite_testkit::{scale, wait_until};
use serde_json::json;

use crate::live::Lab;
use crate::load::Load;
use crate::roles::{self, is_alive, worker};

/// The environment variable with the seed of the only story.
const SEED: &str = "FERRITE_TEST_SEED";
/// Stories of each commit.
const STORIES: u32 = 3;
/// Changes of a story.
const CHANGES: u32 = 10;
/// The client's blocks stand behind the guest's, and before what only the lab writes.
const CLIENTS: u64 = 4 << 20;
const BLOCKS: u64 = 64;
const BLOCK: u64 = 4096;
const MAX_BYTES: u64 = 12 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Worker,
    Keeper,
    Daemon,
    /// The command that asks for the change.
    Command,
}

/// A client's request that is under way.
struct Pending {
    cookie: u64,
    block: u64,
    stamp: u8,
}

struct Story {
    lab: Lab,
    random: SplitMix64,
    load: Load,
    client: Client,
    /// What the client has written to each of its blocks.
    stamps: Vec<u8>,
    pending: Option<Pending>,
    /// Files that were made so far.
    files: u32,
    bytes: u64,
    programs: Vec<PathBuf>,
    /// The changes so far, for the message of a failure.
    said: Vec<String>,
}

impl Story {
    fn new(seed: u64) -> Story {
        let mut random = SplitMix64::new(seed);
        let first = ["a.vhd", "a.qcow2", "a.img"][random.below(3) as usize];
        let lab = Lab::new(&[first]);
        let load = Load::start(&lab.host, &lab.disk);
        let (client, bytes) = lab.client();
        let programs = ["one", "other"].map(|name| lab.host.dir.path().join(name));
        for program in &programs {
            std::fs::copy(std::env::current_exe().unwrap(), program).unwrap();
        }
        let (stamps, said) = (vec![0; BLOCKS as usize], Vec::new());
        let (programs, files, pending) = (programs.to_vec(), 0, None);
        Story { lab, random, load, client, stamps, pending, files, bytes, programs, said }
    }

    fn note(&mut self, said: String) {
        if std::env::var_os(SEED).is_some() {
            eprintln!("{said}");
        }
        self.said.push(said);
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.random.below(n) == 0
    }

    fn new_name(&mut self, extension: &str) -> String {
        self.files += 1;
        self.lab.image(&format!("f{}.{extension}", self.files))
    }

    fn leaf(&self) -> String {
        self.lab.image(&self.lab.leaf)
    }

    fn extension(&self) -> String {
        self.lab.leaf.rsplit('.').next().unwrap().to_owned()
    }

    /// Has the client write a block. Its reply is read by [`settle`](Self::settle).
    fn begin_write(&mut self) {
        let (block, stamp) = (self.random.below(BLOCKS), self.random.below(255) as u8 + 1);
        let data = [stamp; BLOCK as usize];
        let cookie =
            self.client.send(command::WRITE, 0, CLIENTS + block * BLOCK, BLOCK as u32, &data);
        self.pending = Some(Pending { cookie, block, stamp });
    }

    /// Runs a command. `victim` is killed a moment later.
    fn run(&mut self, args: &[&str], victim: Option<Victim>) -> Output {
        self.note(format!("{args:?} {victim:?}"));
        self.begin_write();
        let keeper = self.lab.host.disks().first().and_then(|disk| disk.pid);
        let keeper: i32 = keeper.map_or(0, |pid| pid.try_into().unwrap());
        let run = self.lab.host.paths().run;
        let mut asking = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        asking.args(args).args(["--run-dir", run.to_str().unwrap()]).env_remove("RUST_LOG");
        asking.env("XENSTORED_PATH", self.lab.host.store_socket());
        let asking = asking.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut asking = asking.current_dir(self.lab.host.image("")).spawn().unwrap();
        if let Some(victim) = victim {
            std::thread::sleep(Duration::from_micros(self.random.below(60_000)));
            match victim {
                Victim::Worker => worker(keeper).into_iter().for_each(kill),
                Victim::Keeper => kill(keeper),
                Victim::Command => asking.kill().unwrap(),
                Victim::Daemon => {
                    roles::kill(self.lab.daemon.take().unwrap());
                    // Some commands wait for it.
                    self.lab.daemon = Some(self.lab.host.spawn(None));
                }
            }
        }
        let done = asking.wait_with_output().unwrap();
        let host = &self.lab.host;
        wait_until("a daemon", || host.status().is_ok_and(|status| status.xen));
        if victim == Some(Victim::Keeper) {
            // Its clients have lost their connections.
            self.pending = None;
        }
        self.said.push(format!(
            "{}: {}",
            done.status,
            String::from_utf8_lossy(&done.stderr).trim()
        ));
        done
    }

    /// As [`run`](Self::run), of a command that works if nothing is killed.
    fn does(&mut self, args: &[&str], victim: Option<Victim>) {
        let done = self.run(args, victim);
        assert!(victim.is_some() || done.status.success(), "{args:?}: {done:?}");
        self.settle();
    }

    /// Waits until the disk is served and no job changes it, and looks at what the guest and the client read.
    fn settle(&mut self) {
        let host = &self.lab.host;
        for job in host.call::<JobList>("job.list", &json!({})).unwrap().jobs {
            let asked = json!({ "id": job.id, "timeout_s": 60 });
            let job: Job = host.call("job.wait", &asked).unwrap();
            assert!(!matches!(job.phase, JobPhase::Running | JobPhase::Paused), "{job:?}");
        }
        self.lab.host.wait_for_phase(&self.lab.disk, PhaseName::Served);
        self.load.wait_for_progress();
        // A change whose command was killed may only have begun by then.
        let served = self.lab.host.wait_for_phase(&self.lab.disk, PhaseName::Served);
        let image = PathBuf::from(served.image.unwrap());
        image.file_name().unwrap().to_str().unwrap().clone_into(&mut self.lab.leaf);
        self.load.wait_for_progress();
        self.settle_client();
        let block = self.random.below(BLOCKS);
        let read = self.client.read(CLIENTS + block * BLOCK, BLOCK as u32);
        assert!(
            read == vec![self.stamps[block as usize]; BLOCK as usize],
            "client's block {block}"
        );
    }

    /// Reads the reply of the client's request. A client whose disk has grown, or whose keeper was killed, connects again.
    fn settle_client(&mut self) {
        let (next, bytes) = self.lab.client();
        match self.pending.take().filter(|_| bytes == self.bytes) {
            Some(Pending { cookie, block, stamp }) => {
                let reply = self.client.reply();
                assert_eq!((reply.cookie, reply.error), (cookie, 0));
                self.stamps[block as usize] = stamp;
            }
            None => {
                self.client = next;
                // A write that had no reply may be done, or not.
                for block in 0..BLOCKS {
                    let stamp = self.stamps[block as usize];
                    self.client.write(CLIENTS + block * BLOCK, &[stamp; BLOCK as usize]);
                }
            }
        }
        self.bytes = bytes;
    }

    fn victim(&mut self) -> Option<Victim> {
        let all = [Victim::Worker, Victim::Keeper, Victim::Daemon, Victim::Command];
        let victim = all[self.random.below(4) as usize];
        self.one_in(2).then_some(victim)
    }

    fn change(&mut self) {
        let victim = self.victim();
        match self.random.below(8) {
            0 | 1 => self.snapshot(victim),
            2 | 3 => self.coalesce(victim),
            4 => self.resize(victim),
            5 => self.switch(victim),
            6 => self.limit(victim),
            _ => self.upgrade(victim),
        }
    }

    fn snapshot(&mut self, victim: Option<Victim>) {
        let extension = self.extension();
        let new = self.new_name(&extension);
        let leaf = ["--leaf", "qcow2"];
        let leaf = if extension == "img" { &leaf[..] } else { &[] };
        self.does(&[&["disk", "snapshot", "web1/xvda", &new], leaf].concat(), victim);
    }

    /// Merges a stretch, while something else may be asked for.
    fn coalesce(&mut self, victim: Option<Victim>) {
        let chain = self.lab.chain();
        if chain.len() < 2 {
            return self.snapshot(victim);
        }
        let from = self.random.below(chain.len() as u64 - 1) as usize;
        let to = from + 1 + self.random.below((chain.len() - from - 1) as u64) as usize;
        let is_refused = from == 0 && chain[to].ends_with(".img");
        let [from, to] = [from, to].map(|i| self.lab.image(&chain[i]));
        let words = ["disk", "coalesce", "web1/xvda", "--from", &from, "--to", &to];
        if is_refused {
            let done = self.run(&words, victim);
            assert!(!done.status.success(), "{done:?}");
            return self.settle();
        }
        if self.one_in(2) {
            return self.does(&words, victim);
        }
        let done = self.run(&[&words[..], &["--background", "--speed", "2M"]].concat(), None);
        assert!(done.status.success(), "{done:?}");
        self.settle_client();
        // A change that is refused because of a job changes nothing.
        match self.random.below(4) {
            0 => drop(self.run(&["job", "list"], victim)),
            1 => drop(self.run(&["disk", "resize", "web1/xvda", "+1M"], victim)),
            2 => drop(self.run(&["disk", "limit", "web1/xvda", "--iops", "3000"], victim)),
            _ => {
                let job = self.lab.host.call::<JobList>("job.list", &json!({})).unwrap();
                let job = job.jobs.last().unwrap().id.to_string();
                drop(self.run(&["job", "cancel", &job], victim));
            }
        }
        self.settle();
    }

    fn resize(&mut self, victim: Option<Victim>) {
        if self.bytes >= MAX_BYTES {
            return self.limit(victim);
        }
        let before = self.bytes;
        self.does(&["disk", "resize", "web1/xvda", "+1M"], victim);
        let (size, grown) = (self.bytes, before + (1 << 20));
        assert!(size == grown || victim.is_some() && size == before, "{size}, not {grown}");
    }

    /// Pauses the disk, and goes on with a copy in another format.
    fn switch(&mut self, victim: Option<Victim>) {
        let (old, chain) = (self.lab.leaf.clone(), self.lab.chain());
        let extension = ["vhd", "qcow2", "img"][self.random.below(3) as usize];
        let new = self.new_name(extension);
        self.pause();
        self.lab.does(&["image", "convert", &self.leaf(), &new]);
        let _ = self.run(&["disk", "resume", "web1/xvda", &new], victim);
        let host = &self.lab.host;
        let mut phase = None;
        wait_until("the end of the pause, or none", || {
            phase = host.disks().first().map(|disk| disk.phase);
            matches!(phase, Some(PhaseName::Served | PhaseName::Paused))
        });
        if phase == Some(PhaseName::Paused) {
            let done = self.lab.run(&["disk", "resume", "web1/xvda"]);
            // The daemon goes on with what a killed command has asked for.
            assert!(done.status.success() || victim == Some(Victim::Command), "{done:?}");
        }
        self.settle();
        // No disk has the other files.
        if self.lab.leaf == old {
            std::fs::remove_file(&new).unwrap();
        } else {
            chain.iter().for_each(|name| std::fs::remove_file(self.lab.image(name)).unwrap());
        }
    }

    fn pause(&mut self) {
        self.note("pause".to_owned());
        self.lab.does(&["disk", "pause", "web1/xvda"]);
    }

    fn limit(&mut self, victim: Option<Victim>) {
        let words = ["disk", "limit", "web1/xvda"];
        let limit = if self.one_in(2) { &["--iops", "4000"][..] } else { &["--none"] };
        self.does(&[&words[..], limit].concat(), victim);
    }

    fn upgrade(&mut self, victim: Option<Victim>) {
        let program = self.programs[self.random.below(2) as usize].clone();
        let words = ["upgrade", "web1/xvda", "--binary", program.to_str().unwrap()];
        self.does(&words, victim);
    }

    /// Checks the chain by this program and by QEMU's, what is in it, and that nothing is left.
    fn end(self) {
        let Story { mut lab, load, client, stamps, .. } = self;
        drop(client);
        load.end();
        lab.detach();
        let leaf = lab.image(&lab.leaf);
        lab.does(&["image", "check", "--chain", &leaf]);
        let mut chain = lab.chain();
        for image in chain.iter().filter(|name| !name.ends_with("img")) {
            let format = if image.ends_with("vhd") { "vpc" } else { "qcow2" };
            // QEMU checks no VHDs.
            if format == "qcow2"
                && let Some((is_clean, said)) = qemu_img(&["check", &lab.image(image)])
            {
                assert!(is_clean, "{image}: {said}");
            }
        }
        let contents = lab.contents(&leaf);
        let clients = &contents[CLIENTS as usize..][..(BLOCKS * BLOCK) as usize];
        for (i, block) in clients.chunks(BLOCK as usize).enumerate() {
            assert!(are_all(block, stamps[i]), "client's block {i}");
        }
        chain.sort();
        // A merge that was cancelled has noted its progress beside the lower end, for the next one.
        let is_note = |file: &String| {
            let image = file.split(".ferrite-merge.partial.json").next().unwrap();
            image != file && chain.iter().any(|name| name == image)
        };
        let mut files = lab.files();
        files.retain(|file| !is_note(file));
        assert_eq!(files, chain, "files are left");
        wait_until("no processes", || lab.host.processes().is_empty());
    }
}

fn kill(pid: i32) {
    if is_alive(pid) {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Tells the seed and the changes of a story that fails.
struct Teller<'a>(u64, &'a mut Story);

impl Drop for Teller<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let disk = self.1.lab.host.show(&self.1.lab.disk);
            eprintln!("{SEED}={}:\n{}\n{disk:#?}", self.0, self.1.said.join("\n"));
        }
    }
}

/// Tells the seed of a story that fails, also at its end.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{SEED}={}", self.0);
        }
    }
}

fn tell(seed: u64) {
    let _seed = Seed(seed);
    let mut story = Story::new(seed);
    {
        let teller = Teller(seed, &mut story);
        for _ in 0..CHANGES {
            teller.1.change();
        }
    }
    story.end();
}

#[test]
fn random_changes_and_deaths_lose_nothing_that_guest_or_client_has_written() {
    if let Ok(seed) = std::env::var(SEED) {
        return tell(seed.parse().expect("FERRITE_TEST_SEED is a number"));
    }
    for seed in 0..u64::from(STORIES * scale()) {
        tell(seed);
    }
}
