//! Disks that get another program while their processes are killed, at each step and at random
//! moments. The old program or the new one serves them, and their guests see pauses only.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use ferrite_daemon::Step;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{PhaseName, Upgraded};
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{PATIENCE, few_or_all, images, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::host::{self, Host, works};
use crate::load::Load;
use crate::roles::{MIB, attach, end, is_alive, keeper, kill, worker};

/// The process to kill.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Daemon,
    Keeper,
    Worker,
}

const VICTIMS: [Victim; 3] = [Victim::Daemon, Victim::Keeper, Victim::Worker];

/// A guest with a disk that is upgraded repeatedly.
struct Story {
    host: Host,
    disk: DiskPaths,
    image: PathBuf,
    /// The programs to switch between.
    programs: Vec<PathBuf>,
    daemon: Option<Child>,
    load: Option<Load>,
}

impl Story {
    fn new() -> Story {
        let host = Host::new(1);
        let folder = host.image("qcow2");
        std::fs::create_dir(&folder).unwrap();
        let image = images::make(&folder, "qcow2", 4 * MIB);
        let own = std::env::current_exe().unwrap();
        let copies = ["one", "other"].map(|name| host.dir.path().join(name));
        for copy in &copies {
            host::copy_program(&own, copy);
        }
        let daemon = Some(host.spawn(None));
        let disk = host.attach(1, 0, &format!("qcow2:{}", image.display()));
        let load = Some(Load::start(&host, &disk));
        let programs = copies.into_iter().chain([own]).collect();
        Story { host, disk, image, programs, daemon, load }
    }

    /// Requests an upgrade, and kills a process by `kill` meanwhile.
    fn upgrade(&mut self, round: usize, victim: Victim, kill: impl FnOnce(i32)) {
        let keeper = keeper(&self.host, &self.disk);
        let pid = match victim {
            Victim::Daemon => self.daemon.as_ref().unwrap().id().cast_signed(),
            Victim::Keeper => keeper,
            Victim::Worker => worker(keeper).unwrap(),
        };
        let binary = self.programs[round % 2].to_str().unwrap();
        let host = &self.host;
        std::thread::scope(|scope| {
            // The upgrade may fail or succeed.
            scope.spawn(move || ask(host, binary));
            kill(pid);
        });
        if matches!(victim, Victim::Daemon) {
            self.daemon.take().unwrap().wait().unwrap();
            self.daemon = Some(self.host.spawn(None));
            wait_until("the daemon", || self.host.status().is_ok_and(|status| status.served == 1));
        }
        wait_until("its end", || !is_alive(pid));
        self.is_whole();
    }

    /// Checks that one of the programs serves the guest.
    fn is_whole(&self) {
        self.load.as_ref().unwrap().wait_for_progress();
        let keeper = keeper(&self.host, &self.disk);
        let exe = |pid: i32| std::fs::read_link(format!("/proc/{pid}/exe"));
        wait_until("a worker that is what its keeper is", || {
            let worker = worker(keeper).map(exe);
            worker.is_some_and(|worker| worker.is_ok_and(|exe_| exe_ == exe(keeper).unwrap()))
        });
        assert!(self.programs.contains(&exe(keeper).unwrap()));
    }

    fn end(mut self) {
        self.load.take().unwrap().end();
        let keepers = [keeper(&self.host, &self.disk)];
        end(&self.host, std::slice::from_ref(&self.disk), &keepers);
        images::check(&self.image);
        kill(self.daemon.take().unwrap());
    }
}

fn ask(host: &Host, binary: &str) -> Result<Upgraded, ClientError> {
    host.call("upgrade", &json!({ "binary": binary }))
}

fn kill_now(pid: i32) {
    // The upgrade may have ended the process already.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

#[test]
fn whoever_is_killed_at_a_step_of_an_upgrade_the_disk_is_the_old_programs_or_the_new_ones() {
    for step in [Step::Retired, Step::Upgraded] {
        let mut story = Story::new();
        for (round, victim) in VICTIMS.into_iter().enumerate() {
            let at = story.host.dir.path().join("victim");
            story.upgrade(round, victim, |victim| {
                host::kill_at(&at, step, victim);
                wait_until("the step", || !Path::new(&at).exists());
            });
        }
        story.end();
    }
}

#[test]
fn whoever_is_killed_at_any_moment_of_an_upgrade_the_disk_is_the_old_programs_or_the_new_ones() {
    let mut story = Story::new();
    let mut random = SplitMix64::new(9);
    for round in 0..few_or_all(9, 120) as usize {
        let moment = Duration::from_micros(random.below(25_000));
        story.upgrade(round, VICTIMS[round % 3], |victim| {
            std::thread::sleep(moment);
            kill_now(victim);
        });
    }
    story.end();
}

#[test]
fn an_upgrade_says_of_each_disk_that_it_cannot_have_why() {
    let host = Host::new(4);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok());
    let served = attach(&host, 1);
    let empty = host.attach(2, 0, "");
    let failed = host.attach(3, 0, "vhd:/nonexistent/a.vhd");
    host.wait_for_phase(&served, PhaseName::Served);
    host.wait_for_phase(&empty, PhaseName::Empty);
    host.wait_for_phase(&failed, PhaseName::Failed);
    let binary = std::env::current_exe().unwrap();
    let done = ask(&host, binary.to_str().unwrap()).unwrap();
    assert_eq!(done.upgraded, [host::id(&served)]);
    assert_eq!(done.failed.len(), 1, "{done:?}");
    assert_eq!(done.failed[0].disk, host::id(&failed));
    assert!(done.failed[0].why.contains("/nonexistent/a.vhd"), "{done:?}");
    let one =
        host.call::<Upgraded>("upgrade", &json!({ "binary": binary, "disk": host::id(&empty) }));
    assert!(one.unwrap().failed[0].why.contains("empty drive"));
    let mut front = host.connect(&served);
    works(&mut front, 3);
    front.close(PATIENCE).unwrap();
    let keepers = [keeper(&host, &served)];
    end(&host, &[served, empty, failed], &keepers);
    kill(daemon);
}
