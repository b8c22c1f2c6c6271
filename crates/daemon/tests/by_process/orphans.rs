//! Workers that are killed while no daemon runs. The next worker serves the guest by itself, or
//! leaves it to the next daemon.

use std::os::fd::AsFd as _;
use std::time::Duration;

use ferrite_daemon::directory;
use ferrite_daemon::state::States;
use ferrite_keeper::{Keeper, socket_name};
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::blkif::lifecycle::{Orphan, part};
use ferrite_serve::waker::Waker;
use ferrite_testkit::{PATIENCE, few_or_all, images, wait_until};
use ferrite_xen::hypervisor::DomId;
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{self, Host, id, works};
use crate::load::Load;
use crate::roles::{MIB, attach, end, is_alive, keeper, kill, kill_pid, worker};

#[test]
fn guests_whose_workers_die_without_a_daemon_are_served_on_and_the_next_daemon_finds_them() {
    let host = Host::new(2);
    let mut daemon = host.spawn(None);
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    let image = images::make(&folder, "qcow2", 4 * MIB);
    let disks = [attach(&host, 1), host.attach(2, 0, &format!("qcow2:{}", image.display()))];
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    for _ in 0..few_or_all(1, 10) {
        kill(daemon);
        for _ in 0..3 {
            keepers.iter().filter_map(|keeper| worker(*keeper)).for_each(kill_pid);
            loads.iter().for_each(Load::wait_for_progress);
        }
        daemon = host.spawn(None);
        wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 2));
        let found: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
        assert_eq!(found, keepers);
        // This daemon takes over the workers that it finds.
        keepers.iter().filter_map(|keeper| worker(*keeper)).for_each(kill_pid);
        loads.iter().for_each(Load::wait_for_progress);
    }
    for load in loads {
        load.end();
    }
    end(&host, &disks, &keepers);
    images::check(&image);
    kill(daemon);
}

/// The next worker may have been left to the daemon, which then ended before it requested anything.
#[test]
fn a_guest_whose_worker_and_daemon_die_together_is_served_on() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let load = Load::start(&host, &disk);
    let keeper = keeper(&host, &disk);
    // The stopped daemon handles no event, and still holds its lock.
    signal(daemon.id() as i32, Signal::STOP);
    let old = worker(keeper).unwrap();
    kill_pid(old);
    wait_until("the next worker", || {
        worker(keeper).is_some_and(|next| next != old && has_no_rights(next))
    });
    kill(daemon);
    load.wait_for_progress();
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 1));
    load.end();
    end(&host, std::slice::from_ref(&disk), &[keeper]);
    kill(daemon);
}

/// Whether the worker has dropped its rights. It has looked for a daemon before that.
fn has_no_rights(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line == "Seccomp:\t2")
}

/// A daemon may know, for example, that the disk must rest.
#[test]
fn a_worker_that_a_daemon_should_ask_opens_nothing_by_itself() {
    let gone = Gone::new();
    let daemon = gone.host.spawn(None);
    wait_until("the daemon", || gone.host.status().is_ok());
    signal(daemon.id() as i32, Signal::STOP);
    assert!(!gone.is_opened());
    gone.host.end_processes();
    kill(daemon);
}

/// A disk whose daemon and worker are gone, while its keeper is stopped.
struct Gone {
    host: Host,
    disk: DiskPaths,
    front: Frontend,
    keeper: i32,
}

impl Gone {
    fn new() -> Gone {
        let host = Host::new(1);
        let daemon = host.spawn(None);
        let disk = attach(&host, 1);
        let mut front = host.connect(&disk);
        works(&mut front, 1);
        let keeper = keeper(&host, &disk);
        kill(daemon);
        signal(keeper, Signal::STOP);
        kill_pid(worker(keeper).unwrap());
        Gone { host, disk, front, keeper }
    }

    /// Lets the keeper go on. Returns whether the next worker has opened the image when it handles
    /// requests.
    fn is_opened(&self) -> bool {
        signal(self.keeper, Signal::CONT);
        let name = socket_name(&id(&self.disk).file_name());
        let keeper = Keeper::connect(&self.host.paths().run.join("keepers").join(name)).unwrap();
        // The request changes nothing.
        wait_until("a worker that answers", || {
            let line = keeper.second_line().unwrap();
            part(line.fd.as_fd(), DomId(99), &Waker::new().unwrap(), Some(PATIENCE)).is_ok()
        });
        let open = std::fs::read_dir(format!("/proc/{}/fd", worker(self.keeper).unwrap())).unwrap();
        let image = self.host.image("1.img");
        open.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path == image))
    }

    fn store(&self, key: &str, value: &[u8]) {
        self.host.store().write(key, value).unwrap();
    }
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn a_worker_without_a_daemon_opens_the_image_for_a_guest_that_has_it_still_and_for_no_other() {
    type Change = fn(&mut Gone);
    let changes: [(&str, bool, Change); 7] = [
        ("nothing", true, |_| ()),
        ("the guest has closed it", false, |gone| gone.front.set_state(6).unwrap()),
        ("the guest has begun anew", false, |gone| gone.front.set_state(1).unwrap()),
        ("the toolstack has attached it anew", false, |gone| {
            let key = format!("{}/state", gone.disk.backend);
            gone.store(&key, b"1");
        }),
        ("the toolstack has removed it", false, |gone| {
            gone.host.machine().remove_disk(&gone.disk).unwrap();
        }),
        ("the guest was destroyed", false, |gone| {
            gone.host.machine().destroy(gone.disk.domid).unwrap();
        }),
        ("it rests for another", false, |gone| {
            let states = States::open(&gone.host.paths().states()).unwrap();
            let state = states.read(id(&gone.disk)).unwrap().unwrap();
            let later = ferrite_daemon::state::DiskId { domid: 2, devid: state.id.devid };
            states.write(&state.resting_for(Some(later))).unwrap();
        }),
    ];
    for (what, opens, change) in changes {
        let mut gone = Gone::new();
        change(&mut gone);
        assert_eq!(gone.is_opened(), opens, "{what}");
        gone.host.end_processes();
    }
}

/// The guest may have reused the pages of its old rings, so no worker may read them.
#[test]
fn a_guest_that_has_set_up_other_rings_meanwhile_waits_for_a_daemon_and_has_lost_nothing() {
    let mut gone = Gone::new();
    let options = FrontOptions::default();
    gone.front.set_state(1).unwrap();
    gone.front.offer(&options).unwrap();
    assert!(gone.is_opened(), "it looks at its table before it refuses");
    let Gone { host, disk, mut front, keeper: pid } = gone;
    let old = worker(pid).unwrap();
    let daemon = host.spawn(None);
    front.finish(PATIENCE).unwrap();
    works(&mut front, 2);
    assert_eq!(keeper(&host, &disk), pid);
    assert_eq!(worker(pid), Some(old));
    front.close(PATIENCE).unwrap();
    end(&host, std::slice::from_ref(&disk), &[pid]);
    assert!(!is_alive(pid));
    kill(daemon);
}

/// The guest writes these keys: invalid ones describe no connection.
#[test]
fn rings_that_make_no_sense_and_a_store_that_does_not_answer_are_left_to_a_daemon() {
    let gone = Gone::new();
    let (domid, devid) = (gone.disk.domid, gone.disk.devid);
    let backend = directory::path(id(&gone.disk));
    let look = || Orphan::find(&mut gone.host.store(), &backend, domid, devid);
    assert!(look().unwrap().is_some());
    gone.store(&format!("{}/ring-ref", gone.disk.frontend), b"no number");
    assert_eq!(look().unwrap(), None);
    gone.host.silence_store(true);
    let mut store = host::connect(&gone.host.store_socket())().unwrap();
    store = store.with_timeout(Duration::from_millis(20));
    assert!(Orphan::find(&mut store, &backend, domid, devid).is_err());
    gone.host.silence_store(false);
    gone.host.end_processes();
}
