//! Hosts with many disks: what a disk costs does not depend on how many others there are.

mod host;
mod roles;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferrite_daemon::Step;
use ferrite_daemon::control::client;
use ferrite_daemon::control::protocol::{Disks, PhaseName, Upgraded};
use ferrite_daemon::keepers::Keepers;
use ferrite_daemon::state::DiskId;
use ferrite_disk::{Disk, OpenOptions};
use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::devices::Freezable;
use ferrite_testkit::programs::installed;
use ferrite_testkit::{PATIENCE, images, wait_until};
use host::{Host, works};
use roles::{Roles, end, keeper, kill, worker};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

const BYTES: u64 = 4 << 20;
/// A guest with one disk of one queue.
const SMALL: GuestOptions = GuestOptions { frames: 1024, grants: 2048, ports: 4 };

fn attach(host: &Host, domid: u16) -> DiskPaths {
    let image = host.make_image(&format!("{domid}.img"), BYTES);
    host.attach(domid, 0, &format!("aio:{}", image.display()))
}

/// A disk whose guest has not come looks once more after a second.
const LAST_LOOK: Duration = Duration::from_millis(1500);
const QUIET: Duration = Duration::from_millis(400);

/// Waits until the daemon asks xenstore for nothing for this time. Returns how often it has asked until then.
fn at_rest(host: &Host, quiet: Duration) -> u64 {
    let mut last = host.store_requests();
    wait_until("rest", || {
        std::thread::sleep(quiet);
        let now = host.store_requests();
        std::mem::replace(&mut last, now) == now
    });
    last
}

/// The requests to xenstore for a disk that is attached, used and detached beside so many others. A disk that is refused
/// and goes is counted, too.
fn requests_beside(others: u16) -> (u64, u64) {
    let mut host = Host::with_guests(u32::from(others) + 1, SMALL);
    (2..others + 2).for_each(|domid| drop(attach(&host, domid)));
    host.start();
    wait_until("the others", || host.status().unwrap().served == u32::from(others));
    let before = at_rest(&host, LAST_LOOK);
    let disk = attach(&host, 1);
    host.wait_for_phase(&disk, PhaseName::Served);
    let mut front = host.connect(&disk);
    works(&mut front, 3);
    front.close(PATIENCE).unwrap();
    host.detach(&disk);
    wait_until("its end", || host.disks().len() == usize::from(others));
    let served = at_rest(&host, QUIET);
    let refused = host.attach(1, 1, "aio:/nowhere/none.img");
    host.wait_for_phase(&refused, PhaseName::Failed);
    host.detach(&refused);
    wait_until("its end", || host.disks().len() == usize::from(others));
    let all = at_rest(&host, QUIET);
    host.stop();
    (served - before, all - served)
}

#[test]
fn a_disk_comes_and_goes_at_the_same_cost_beside_forty_as_beside_four() {
    let beside = std::thread::spawn(|| requests_beside(4));
    let (many, many_refused) = requests_beside(40);
    let (few, few_refused) = beside.join().unwrap();
    // The number of requests that are repeated after a pause differs from run to run. It is far less than that of
    // the disks.
    assert!(many <= few + 30, "{many} requests beside 40 disks, {few} beside 4");
    assert!(many_refused <= few_refused + 30, "{many_refused} beside 40, {few_refused} beside 4");
}

#[test]
fn disks_that_were_attached_before_the_daemon_or_while_xenstore_was_away_are_found() {
    let mut host = Host::with_guests(6, SMALL);
    let first = attach(&host, 1);
    host.start();
    host.wait_for_phase(&first, PhaseName::Served);
    // Events are missed while the daemon's own connection is away: the first of all.
    host.cut_store_connections(..1);
    let others: Vec<DiskPaths> = (2..6).map(|domid| attach(&host, domid)).collect();
    for disk in &others {
        host.wait_for_phase(disk, PhaseName::Served);
    }
    host.stop();
}

#[test]
fn a_directory_that_comes_again_at_once_is_served_again() {
    let mut host = Host::with_guests(1, SMALL);
    host.start();
    for round in 0..4 {
        let disk = attach(&host, 1);
        let mut front = host.connect(&disk);
        works(&mut front, round + 1);
        front.close(PATIENCE).unwrap();
        host.machine().unplug(&disk).unwrap();
        host.wait_for_state(&disk, 6);
        // The next one comes before the daemon has noticed the end of this one.
        host.machine().remove_disk(&disk).unwrap();
    }
    host.wait_for_no_disks();
    host.stop();
}

#[test]
fn ten_images_that_cannot_be_opened_for_long_keep_no_other_disk_waiting() {
    let mut host = Host::with_guests(14, SMALL);
    // Each opening waits for a lock, as for storage that hangs.
    let locked = |domid: u16| {
        let image = host.make_image(&format!("{domid}.img"), BYTES);
        let name = format!("raw:{}", image.display());
        Disk::open(&name, &OpenOptions::default()).unwrap()
    };
    let held: Vec<Disk> = (1..11).map(locked).collect();
    host.start();
    let attach_held = |domid: u16| {
        let image = host.image(&format!("{domid}.img"));
        host.attach(domid, 0, &format!("aio:{}", image.display()))
    };
    let slow: Vec<DiskPaths> = (1..11).map(attach_held).collect();
    for disk in &slow {
        host.wait_for_phase(disk, PhaseName::Starting);
    }
    let others: Vec<DiskPaths> = (11..15).map(|domid| attach(&host, domid)).collect();
    for disk in &others {
        host.wait_for_phase(disk, PhaseName::Served);
        works(&mut host.connect(disk), 5);
    }
    // The list names those that wait.
    let waiting = host.disks().iter().filter(|disk| disk.phase == PhaseName::Starting).count();
    assert_eq!(waiting, 10);
    drop(held);
    for disk in &slow {
        host.wait_for_phase(disk, PhaseName::Served);
    }
    host.stop();
}

/// How often the threads of these processes have gone to sleep.
fn sleeps(pids: &[i32]) -> u64 {
    let of_task = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|count| count.trim().parse::<u64>().ok())
    };
    let tasks = |pid: &i32| std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    pids.iter().flat_map(tasks).filter_map(of_task).sum()
}

/// Longer than any process of a disk once slept at rest.
const AT_REST: Duration = Duration::from_millis(2500);

#[test]
fn nothing_wakes_the_keeper_and_the_worker_of_a_disk_at_rest() {
    let host = Host::with_guests(2, SMALL);
    let daemon = host.spawn(None);
    // The file of a raw disk is watched: it may grow. That of another format is not.
    let qcow2 = images::make(&host.image("."), "qcow2", BYTES);
    let disks = [attach(&host, 1), host.attach(2, 0, &format!("qcow2:{}", qcow2.display()))];
    let mut fronts = disks.each_ref().map(|disk| host.connect(disk));
    fronts.iter_mut().for_each(|front| works(front, 1));
    let keepers = disks.each_ref().map(|disk| keeper(&host, disk));
    let workers = keepers.map(|keeper| worker(keeper).unwrap());
    let pids = [keepers, workers].concat();
    let mut last = sleeps(&pids);
    wait_until("rest", || {
        std::thread::sleep(AT_REST);
        let now = sleeps(&pids);
        std::mem::replace(&mut last, now) == now
    });
    for mut front in fronts {
        works(&mut front, 2);
        front.close(PATIENCE).unwrap();
    }
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn the_list_of_disks_waits_for_no_process_of_a_disk() {
    let host = Host::with_guests(4, SMALL);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    let guests = attach_many(&host, 4);
    let keepers: Vec<i32> = guests.iter().map(|(disk, _)| keeper(&host, disk)).collect();
    let workers = keepers.iter().map(|keeper| worker(*keeper).unwrap());
    let all: Vec<Pid> = keepers.iter().copied().chain(workers).filter_map(Pid::from_raw).collect();
    let signal = |signal| all.iter().for_each(|pid| kill_process(*pid, signal).unwrap());
    signal(Signal::STOP);
    // A keeper that does not answer is given up after twenty seconds.
    let within = Duration::from_secs(15);
    let listed: Result<Disks, _> =
        client::call(&host.paths().control(), "disk.list", &json!({}), within);
    signal(Signal::CONT);
    let listed = listed.unwrap().disks;
    assert_eq!(listed.iter().filter(|disk| disk.phase == PhaseName::Served).count(), 4);
    end_all(&host, guests);
    kill(daemon);
}

/// The threads of a process that work for its disks: not the one that looks at all of them every few seconds.
fn threads_for_disks(process: u32) -> BTreeSet<String> {
    let named = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        (name != "priorities\n").then(|| task.file_name().into_string().unwrap())
    };
    std::fs::read_dir(format!("/proc/{process}/task"))
        .unwrap()
        .flatten()
        .filter_map(named)
        .collect()
}

/// How many system calls that take a path or read a directory the threads make that `work` returns, in the meantime.
fn file_calls(process: u32, folder: &Path, work: impl FnOnce() -> BTreeSet<String>) -> u64 {
    let log = folder.join("calls");
    let tracer = Command::new("strace")
        .args(["-f", "-q", "-e", "trace=%file,getdents64", "-p", &process.to_string(), "-o"])
        .arg(&log)
        .spawn()
        .unwrap();
    let is_traced = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        !status.contains("TracerPid:\t0\n")
    };
    wait_until("the tracer", || {
        std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten().all(is_traced)
    });
    let threads = work();
    kill_process(Pid::from_child(&tracer), Signal::INT).unwrap();
    tracer.wait_with_output().unwrap();
    let calls = std::fs::read_to_string(log).unwrap();
    // A call that another one interrupts has a second line.
    let is_call = |line: &&str| line.contains('(') && !line.contains(" resumed>");
    let is_of = |line: &&str| line.split(' ').next().is_some_and(|id| threads.contains(id));
    calls.lines().filter(is_call).filter(is_of).count() as u64
}

/// The [`file_calls`] of the daemon for a disk that is attached, used and detached beside so many others.
fn file_calls_beside(others: u16) -> u64 {
    let host = Host::with_guests(u32::from(others) + 1, SMALL);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    let is_served = |disks| host.status().is_ok_and(|it| it.served == disks && it.disks == disks);
    let attach_other = |domid| {
        let disk = attach(&host, domid);
        wait_until("another disk", || is_served(u32::from(domid) - 1));
        disk
    };
    let guests: Vec<DiskPaths> = (2..others + 2).map(attach_other).collect();
    let keepers: Vec<i32> = guests.iter().map(|disk| keeper(&host, disk)).collect();
    let calls = file_calls(daemon.id(), host.dir.path(), || {
        let disk = attach(&host, 1);
        wait_until("the disk", || is_served(u32::from(others) + 1));
        let mut front = host.connect(&disk);
        works(&mut front, 3);
        let threads = threads_for_disks(daemon.id());
        front.close(PATIENCE).unwrap();
        host.detach(&disk);
        wait_until("its end", || is_served(others.into()));
        threads
    });
    end(&host, &guests, &keepers);
    kill(daemon);
    calls
}

#[test]
#[ignore = "it takes long: cargo xtask nightly --only host"]
fn a_disk_takes_as_many_system_calls_for_files_beside_a_hundred_as_beside_ten() {
    if installed("strace", Command::new("strace").arg("-V").output()).is_none() {
        return;
    }
    let (few, many) = (file_calls_beside(10), file_calls_beside(100));
    assert!(
        (1..=few + 20).contains(&many),
        "{many} system calls beside 100 disks, {few} beside 10"
    );
}

#[test]
fn a_worker_has_the_io_priority_that_its_keeper_is_given() {
    let host = Host::with_guests(1, SMALL);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    let disk = attach(&host, 1);
    host.wait_for_phase(&disk, PhaseName::Served);
    let keeper = keeper(&host, &disk);
    let ionice = |words: &[&str], pid: i32| {
        let done = Command::new("ionice").args(words).arg("-p").arg(pid.to_string()).output();
        String::from_utf8(done.unwrap().stdout).unwrap()
    };
    for level in ["7", "2"] {
        ionice(&["-c", "2", "-n", level], keeper);
        let expected = format!("best-effort: prio {level}\n");
        wait_until("the worker's priority", || ionice(&[], worker(keeper).unwrap()) == expected);
    }
    end(&host, &[disk], &[keeper]);
    kill(daemon);
}

fn attach_many(host: &Host, guests: u16) -> Vec<(DiskPaths, Frontend)> {
    let disks: Vec<DiskPaths> = (1..guests + 1).map(|domid| attach(host, domid)).collect();
    let connect = |disk: DiskPaths| {
        let front = host.connect(&disk);
        (disk, front)
    };
    disks.into_iter().map(connect).collect()
}

/// Closes all, and checks that nothing is left.
fn end_all(host: &Host, guests: Vec<(DiskPaths, Frontend)>) {
    let keepers: Vec<i32> = guests.iter().map(|(disk, _)| keeper(host, disk)).collect();
    let disks: Vec<DiskPaths> = guests
        .into_iter()
        .map(|(disk, mut front)| {
            front.close(PATIENCE).unwrap();
            disk
        })
        .collect();
    end(host, &disks, &keepers);
}

fn runs(keeper: i32, binary: &Path) -> bool {
    std::fs::read_link(format!("/proc/{keeper}/exe")).is_ok_and(|exe| exe == binary)
}

#[test]
fn an_upgrade_that_its_daemon_did_not_end_is_gone_on_with_by_the_next() {
    const GUESTS: u16 = 20;
    let host = Host::with_guests(u32::from(GUESTS), SMALL);
    // It dies when the first disk has the program.
    let mut daemon = host.spawn(Some(Step::Upgraded));
    let mut guests = attach_many(&host, GUESTS);
    let binary = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &binary);
    let keepers: Vec<i32> = guests.iter().map(|(disk, _)| keeper(&host, disk)).collect();
    let upgraded = || keepers.iter().filter(|keeper| runs(**keeper, &binary)).count();
    assert!(host.call::<Upgraded>("upgrade", &json!({ "binary": binary })).is_err());
    daemon.wait().unwrap();
    assert!((1..keepers.len()).contains(&upgraded()));
    let daemon = host.spawn(None);
    wait_until("all", || upgraded() == keepers.len());
    guests.iter_mut().for_each(|(_, front)| works(front, 3));
    wait_until("its end", || !host.paths().run.join("upgrade/all.json").exists());
    end_all(&host, guests);
    kill(daemon);
}

#[test]
#[ignore = "it takes long: cargo xtask nightly --only host"]
fn a_disk_whose_storage_hangs_is_named_and_no_other_is() {
    let host = Host::with_guests(3, SMALL);
    let Some(storage) = Freezable::mount(&host.image("hangs")) else { return };
    let image = host.make_image("hangs/1.img", BYTES);
    let daemon = host.spawn(None);
    let hung = host.attach(1, 0, &format!("aio:{}", image.display()));
    let others = [attach(&host, 2), attach(&host, 3)];
    let mut front = host.connect(&hung);
    works(&mut front, 1);
    let mut fronts = others.each_ref().map(|disk| host.connect(disk));
    storage.freeze();
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(64, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    let named = || {
        let named =
            host.disks().into_iter().filter_map(|disk| Some((disk.disk, disk.hangs?.requests)));
        named.collect::<Vec<_>>()
    };
    wait_until("its name", || {
        fronts.iter_mut().for_each(|front| works(front, 2));
        !named().is_empty()
    });
    assert_eq!(named(), [(DiskId { domid: 1, devid: hung.devid }, 1)]);
    storage.thaw();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(named(), []);
    let guests = [hung].into_iter().chain(others).zip([front].into_iter().chain(fronts));
    end_all(&host, guests.collect());
    drop(storage);
    kill(daemon);
}

#[test]
#[ignore = "it takes long: cargo xtask nightly --only host"]
fn an_upgrade_of_two_hundred_disks_goes_on_after_the_daemons_death() {
    const GUESTS: u16 = 200;
    let host = Host::with_guests(u32::from(GUESTS), SMALL);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    let mut guests = attach_many(&host, GUESTS);
    let binary = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &binary);
    let keepers: Vec<i32> = guests.iter().map(|(disk, _)| keeper(&host, disk)).collect();
    let upgraded = || keepers.iter().filter(|keeper| runs(**keeper, &binary)).count();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let asked = json!({ "binary": binary });
            assert!(host.call::<Upgraded>("upgrade", &asked).is_err(), "the daemon was killed");
        });
        wait_until("a part of the upgrade", || upgraded() > 20);
        kill(daemon);
    });
    assert!(upgraded() < GUESTS.into());
    // Guests whose images were closed for the upgrade wait for the next daemon.
    let daemon = host.spawn(None);
    wait_until("all", || host.status().is_ok_and(|it| it.served == u32::from(GUESTS)));
    guests.iter_mut().for_each(|(_, front)| works(front, 3));
    let done = host.call::<Upgraded>("upgrade", &json!({ "binary": binary })).unwrap();
    assert_eq!((done.upgraded.len(), done.failed), (GUESTS.into(), Vec::new()));
    assert_eq!(upgraded(), usize::from(GUESTS));
    guests.iter_mut().for_each(|(_, front)| works(front, 4));
    end_all(&host, guests);
    kill(daemon);
}

#[test]
#[ignore = "it takes long: cargo xtask nightly --only host"]
fn ten_stopped_workers_of_two_hundred_disturb_neither_the_others_nor_the_daemon() {
    const GUESTS: u16 = 200;
    let host = Host::with_guests(u32::from(GUESTS), SMALL);
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    let mut guests = attach_many(&host, GUESTS);
    let stopped = guests[..10].iter().map(|(disk, _)| worker(keeper(&host, disk)).unwrap());
    let stopped: Vec<Pid> = stopped.map(|pid| Pid::from_raw(pid).unwrap()).collect();
    stopped.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
    for round in 0..10 {
        guests[10..].iter_mut().for_each(|(_, front)| works(front, round + 1));
        assert_eq!(host.disks().len(), usize::from(GUESTS));
        // Disks come and go meanwhile.
        let (disk, mut front) = guests.pop().unwrap();
        let domid = disk.domid.0;
        front.close(PATIENCE).unwrap();
        host.detach(&disk);
        wait_until("its end", || host.disks().len() < usize::from(GUESTS));
        let disk = attach(&host, domid);
        let front = host.connect(&disk);
        guests.push((disk, front));
    }
    stopped.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
    guests.iter_mut().for_each(|(_, front)| works(front, 9));
    end_all(&host, guests);
    kill(daemon);
}
