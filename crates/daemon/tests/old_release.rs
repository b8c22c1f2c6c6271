//! The processes of an older commit, upgraded to this one under guests that compare what they read.
//!
//! Old daemon, keepers, workers and relay are a test program of that commit: the guests are on a
//! loopback machine, which `ferrite` itself cannot reach. `cargo xtask nightly --only upgrade` builds
//! it, and runs these tests.

mod host;
mod load;
mod roles;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;

use ferrite_daemon::control::protocol::Upgraded;
use ferrite_daemon::keepers::Keepers;
use ferrite_keeper::nbd_socket;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::Client;
use ferrite_testkit::{images, stores, wait_until};
use host::{Host, id};
use load::Load;
use roles::{MIB, Roles, end, keeper, kill, kill_keeper, kill_pid, relay_of, worker};

/// The environment variable with the old test program, whose test `process_daemon` is a daemon.
const OLD: &str = "FERRITE_TEST_OLD_DAEMON";
/// The environment variable with this commit's `ferrite`, whose `ferrite upgrade` is run.
const FERRITE: &str = "FERRITE_TEST_FERRITE";

/// Where the NBD client has its data: behind the guest's.
const CLIENTS: u64 = 2 * MIB;

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

/// A program that the environment names.
fn program(variable: &str) -> PathBuf {
    let named = std::env::var_os(variable);
    let named = named.unwrap_or_else(|| panic!("{variable} names no program"));
    let found = std::fs::canonicalize(&named);
    found.unwrap_or_else(|e| panic!("{variable} is {}: {e}", named.display()))
}

/// Guests with disks that the old program serves: an image, and two volumes of one store.
struct Story {
    host: Host,
    old: PathBuf,
    new: PathBuf,
    image: PathBuf,
    daemon: Option<Child>,
    disks: Vec<DiskPaths>,
    loads: Vec<Load>,
    nbd: Client,
    stamp: u8,
}

impl Story {
    fn new() -> Story {
        let (old, new) = (program(OLD), std::env::current_exe().unwrap());
        let host = Host::new(4);
        let folder = host.image("qcow2");
        std::fs::create_dir(&folder).unwrap();
        let image = images::make(&folder, "qcow2", 4 * MIB);
        let store = host.image("pool");
        std::fs::write(store.with_extension("guests"), "2 3 4").unwrap();
        stores::create(&store, 64 << 20, &["a", "b", "c"].map(|name| (name, 1024)));
        let daemon = Some(host.daemon_of(&old).spawn().unwrap());
        let mut disks = vec![host.attach(1, 0, &format!("qcow2:{}", image.display()))];
        disks.push(attach_volume(&host, 2, "a"));
        disks.push(attach_volume(&host, 3, "b"));
        let loads = disks.iter().map(|disk| Load::start(&host, disk)).collect();
        let nbd = client(&host, &disks[0]);
        let mut story = Story { host, old, new, image, daemon, disks, loads, nbd, stamp: 0 };
        story.goes_on();
        story.is_of(&story.old);
        story
    }

    /// Waits until each guest has read back what it had written, and so has the NBD client.
    fn goes_on(&mut self) {
        self.loads.iter().for_each(Load::wait_for_progress);
        if self.stamp > 0 {
            assert!(self.nbd.read(CLIENTS, 65536) == [self.stamp; 65536]);
        }
        self.stamp += 1;
        self.nbd.write(CLIENTS, &[self.stamp; 65536]);
        self.nbd.flush();
    }

    fn keepers(&self) -> Vec<i32> {
        let mut keepers: Vec<i32> =
            self.disks.iter().map(|disk| keeper(&self.host, disk)).collect();
        keepers.dedup();
        assert_eq!(keepers.len(), 2, "{keepers:?}");
        keepers
    }

    /// Checks that all keepers and their workers run this program.
    fn is_of(&self, program: &Path) {
        for keeper in self.keepers() {
            assert_eq!(exe(keeper), program);
            wait_until("a worker of the keeper's program", || {
                worker(keeper).is_some_and(|worker| exe(worker) == program)
            });
        }
    }

    /// Ends the daemon, and starts the one of `program`, which has to find the keepers.
    fn restart_daemon(&mut self, program: &Path) {
        let before = self.keepers();
        kill(self.daemon.take().unwrap());
        self.goes_on();
        self.start_daemon(program);
        assert_eq!(self.keepers(), before, "they were found, not started");
        self.goes_on();
    }

    /// Starts the daemon of `program`, and waits until all disks are served.
    fn start_daemon(&mut self, program: &Path) {
        self.daemon = Some(self.host.daemon_of(program).spawn().unwrap());
        let all = self.disks.len() as u32;
        wait_until("the daemon", || self.host.status().is_ok_and(|status| status.served == all));
    }

    /// The workers are killed under load. The keepers stay.
    fn kill_workers(&mut self) {
        for keeper in self.keepers() {
            kill_pid(worker(keeper).unwrap());
        }
        self.goes_on();
    }

    /// Runs this commit's `ferrite upgrade`. Keepers and relay stay the same processes.
    fn upgrade(&mut self) {
        let (before, relay) = (self.keepers(), relay_of(self.keepers()[0]).unwrap());
        let mut command = Command::new(program(FERRITE));
        command.args(["upgrade", "--json", "--run-dir"]).arg(self.host.paths().run);
        let output = command.arg("--binary").arg(&self.new).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let done: Upgraded = serde_json::from_slice(&output.stdout).unwrap();
        let all: Vec<_> = self.disks.iter().map(id).collect();
        assert_eq!((done.upgraded, done.failed), (all, Vec::new()));
        self.goes_on();
        assert_eq!(self.keepers(), before);
        self.is_of(&self.new);
        // The old relay stays for its clients.
        assert_eq!(relay_of(before[0]), Some(relay));
        assert_eq!(exe(relay), self.old);
    }

    /// The guests and the client end, their disks are detached, and the image is checked.
    fn end(mut self) {
        let keepers = self.keepers();
        self.loads.drain(..).for_each(Load::end);
        assert!(self.nbd.read(CLIENTS, 65536) == [self.stamp; 65536]);
        drop(self.nbd);
        wait_until("no relay without clients", || relay_of(keepers[0]).is_none());
        end(&self.host, &self.disks, &keepers);
        images::check(&self.image);
        kill(self.daemon.take().unwrap());
    }
}

fn attach_volume(host: &Host, domid: u16, name: &str) -> DiskPaths {
    let store = host.image("pool");
    host.attach(domid, 0, &format!("aio:store:{}#{name}", store.display()))
}

/// An NBD client of this disk.
fn client(host: &Host, disk: &DiskPaths) -> Client {
    let socket = nbd_socket(&host.paths().run.join(id(disk).file_name()));
    let mut client = Client::over(UnixStream::connect(socket).unwrap());
    client.go(true);
    client
}

fn exe(pid: i32) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default()
}

/// As docs/operations.md has an administrator do it.
#[test]
#[ignore = "needs an older program: cargo xtask nightly --only upgrade"]
fn the_daemon_is_restarted_and_the_disks_are_upgraded_under_their_guests() {
    let mut story = Story::new();
    story.restart_daemon(&story.new.clone());
    // The new daemon works with the old processes until `upgrade` replaces them.
    story.is_of(&story.old);
    story.kill_workers();
    story.is_of(&story.old);
    let joined = attach_volume(&story.host, 4, "c");
    story.loads.push(Load::start(&story.host, &joined));
    story.disks.push(joined);
    story.goes_on();
    story.upgrade();
    story.kill_workers();
    story.restart_daemon(&story.new.clone());
    story.end();
}

#[test]
#[ignore = "needs an older program: cargo xtask nightly --only upgrade"]
fn the_old_daemon_upgrades_the_disks_and_follows_the_new_workers_until_it_is_restarted() {
    let mut story = Story::new();
    story.upgrade();
    story.kill_workers();
    story.is_of(&story.new);
    story.restart_daemon(&story.new.clone());
    story.end();
}

#[test]
#[ignore = "needs an older program: cargo xtask nightly --only upgrade"]
fn the_new_program_takes_over_what_killed_processes_of_the_old_one_had_in_flight() {
    let mut story = Story::new();
    let keepers = story.keepers();
    kill(story.daemon.take().unwrap());
    keepers.into_iter().for_each(kill_keeper);
    story.start_daemon(&story.new.clone());
    // The relay has ended with its keeper, and its client's connection with the relay.
    story.is_of(&story.new);
    story.nbd = client(&story.host, &story.disks[0]);
    story.goes_on();
    story.end();
}
