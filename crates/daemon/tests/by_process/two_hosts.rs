//! A guest that is moved between two hosts: two daemons with two run directories, and one folder of
//! images (attachments.md).

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::Client;
use ferrite_testkit::{PATIENCE, images, wait_until};

use crate::host::{self, Host, works};
use crate::load::{Load, Model};
use crate::roles::{MIB, WAIT_FOR_HOST_MS, keeper, kill_pid, worker};

/// The variables by which a daemon learns of suspended guests.
const SUSPENDING: &[(&str, &str)] = &[(host::SUSPENDS, "1")];

/// A host with its daemon, and the guest's disk there.
struct Place {
    host: Host,
    daemon: Child,
    disk: DiskPaths,
}

impl Place {
    fn new(host: Host, name: &str, params: &str, variables: &[(&str, &str)]) -> Place {
        host.store().write("/local/domain/1/name", name.as_bytes()).unwrap();
        let daemon = host.spawn_with(None, &[variables, SUSPENDING].concat());
        wait_until("the daemon", || host.status().is_ok());
        let disk = host.attach(1, 0, params);
        Place { host, daemon, disk }
    }

    fn rename(&self, name: &str) {
        self.host.store().write("/local/domain/1/name", name.as_bytes()).unwrap();
    }

    /// The reason that the toolstack finds.
    fn error(&self) -> String {
        let path = "/local/domain/0/error/backend/vbd3/1/51712/error";
        self.host.store().read_string(path).unwrap().unwrap_or_default()
    }

    fn key(&self, name: &str) -> Option<String> {
        self.host.store().read_string(&format!("{}/{name}", self.disk.backend)).unwrap()
    }

    fn wait_for_error(&self, text: &str) {
        wait_until(&format!("the error {text}"), || self.error().contains(text));
    }

    /// Lets the guest run: its driver sets up rings. It does not wait for the backend.
    fn run_guest(&self) -> Frontend {
        self.rename("g");
        let mut front = self.host.frontend(&self.disk);
        front.offer(&FrontOptions::default()).unwrap();
        front
    }

    /// Suspends the guest, and waits until its image is closed.
    fn suspend(&self) {
        self.host.machine().suspend(self.disk.domid).unwrap();
        self.host.wait_for_phase(&self.disk, PhaseName::Resting);
        assert_eq!(self.host.backend_state(&self.disk), 4);
    }

    /// A client of NBD, such as QEMU. It waits until it is served.
    fn client(&self) -> Client {
        let socket = self.key("physical-device-path").unwrap();
        let mut client = Client::over(UnixStream::connect(socket).unwrap());
        client.go(true);
        client
    }

    fn resume(&self) {
        self.host.machine().resume(self.disk.domid).unwrap();
    }

    /// Destroys the guest as the toolstack does: its frontend's directory goes first.
    fn destroy(&self) {
        self.host.machine().unplug(&self.disk).unwrap();
        self.host.store().remove(&self.disk.frontend).unwrap();
        self.host.wait_for_state(&self.disk, 6);
        self.host.machine().remove_disk(&self.disk).unwrap();
    }

    /// Detaches the disk, of which nothing is left.
    fn end(&self) {
        self.host.detach(&self.disk);
        self.host.wait_for_no_disks();
    }

    fn restart_daemon(&mut self) {
        self.daemon = self.host.spawn_with(None, SUSPENDING);
        wait_until("the daemon", || self.host.status().is_ok());
    }

    fn kill_daemon(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.host.end_processes();
        let _ = self.daemon.wait();
    }
}

/// Ends the source's guest, and waits until its backend has closed the image.
fn destroy(mut front: Frontend, source: &Place) {
    front.close(PATIENCE).unwrap();
    source.host.detach(&source.disk);
}

/// Goes on with a guest that was suspended. It has read and written.
fn go_on(front: Frontend, model: Model) -> Load {
    let load = Load::go_on(front, model);
    load.wait_for_progress();
    load
}

fn connected(mut front: Frontend) -> Frontend {
    front.finish(PATIENCE).unwrap();
    front
}

/// A guest that works on the source host, and the target's disk, which is announced.
struct Move {
    image: PathBuf,
    source: Place,
    target: Place,
    load: Load,
}

/// `variables`: those of the target's daemon and its workers.
fn prepare(format: &str, variables: &[(&str, &str)]) -> Move {
    let host = Host::new(1);
    let other = host.another(1);
    let folder = host.image("of-guest");
    std::fs::create_dir(&folder).unwrap();
    let image = images::make(&folder, format, 4 * MIB);
    let params = format!("{}:{}", if format == "raw" { "aio" } else { format }, image.display());
    let source = Place::new(host, "g", &params, &[]);
    let load = Load::start(&source.host, &source.disk);
    load.wait_for_progress();
    let target = Place::new(other, "g--incoming", &params, variables);
    target.host.wait_for_state(&target.disk, 2);
    Move { image, source, target, load }
}

/// The order of `xl migrate` if the source's backend is late: the target is announced while the
/// source's guest writes, and waits until the source has let go of the image.
#[test]
fn a_target_is_announced_while_its_source_writes_and_opens_the_image_when_its_guest_runs() {
    for format in ["raw", "qcow2", "vhd"] {
        let Move { image, source, target, load } = prepare(format, &[]);
        assert_eq!(target.key("sectors"), Some((4 * MIB / 512).to_string()));
        // These writes change the image's metadata, and the target was announced before.
        load.wait_for_progress();
        let (front, model) = load.suspend();
        let waiting = target.run_guest();
        target.wait_for_error("cannot serve the guest yet");
        assert!(target.error().contains("has 10 s to close the image"), "{}", target.error());
        assert_eq!(target.host.backend_state(&target.disk), 2);
        destroy(front, &source);
        let load = go_on(connected(waiting), model);
        assert_eq!(target.error(), "");
        load.end();
        target.end();
        images::check(&image);
    }
}

#[test]
fn a_target_takes_the_size_that_the_image_has_when_its_guest_runs() {
    let Move { image, source, target, load } = prepare("raw", &[]);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(8 * MIB).unwrap();
    let sectors = Some((8 * MIB / 512).to_string());
    wait_until("the source's growth", || source.key("sectors") == sectors);
    let (front, model) = load.suspend();
    destroy(front, &source);
    assert_ne!(target.key("sectors"), sectors);
    let front = connected(target.run_guest());
    assert_eq!(target.key("sectors"), sectors);
    go_on(front, model).end();
}

#[test]
fn a_target_whose_source_keeps_the_image_fails_with_the_reason_and_goes_on_later() {
    let Move { source, target, load, .. } = prepare("raw", &[(WAIT_FOR_HOST_MS, "100")]);
    let waiting = target.run_guest();
    let failed = target.host.wait_for_phase(&target.disk, PhaseName::Failed);
    let why = failed.why.unwrap();
    assert!(why.contains("has locked it"), "{why}");
    target.wait_for_error(&why);
    // The source has lost nothing.
    load.wait_for_progress();
    let (front, model) = load.suspend();
    destroy(front, &source);
    go_on(connected(waiting), model).end();
    target.end();
}

/// The metadata of a qcow2 image are outdated when the guest comes. A process that dies while it
/// waits has kept nothing.
#[test]
fn a_target_whose_worker_or_daemon_ends_before_its_guest_runs_is_the_same() {
    let Move { image, source, mut target, load } = prepare("qcow2", &[]);
    let pid = keeper(&target.host, &target.disk);
    kill_pid(worker(pid).unwrap());
    load.wait_for_progress();
    keeper(&target.host, &target.disk);
    target.kill_daemon();
    load.wait_for_progress();
    target.restart_daemon();
    target.host.wait_for_phase(&target.disk, PhaseName::Served);
    assert_eq!(target.host.backend_state(&target.disk), 2);
    let (front, model) = load.suspend();
    destroy(front, &source);
    let load = go_on(connected(target.run_guest()), model);
    // A connected guest is taken over, whatever its domain is called.
    target.rename("g--incoming");
    kill_pid(worker(pid).unwrap());
    load.wait_for_progress();
    load.end();
    target.end();
    images::check(&image);
}

/// The target is destroyed before its guest has run. The source has not noticed it.
#[test]
fn a_migration_that_fails_early_leaves_no_trace() {
    let Move { source, target, load, .. } = prepare("vhd", &[]);
    target.end();
    load.wait_for_progress();
    load.end();
    source.end();
}

/// Only a migration's target is announced without its image.
#[test]
fn a_guest_that_is_not_moved_is_not_announced_while_another_host_has_its_image() {
    let host = Host::new(1);
    let other = host.another(1);
    let image = host.make_image("a.img", MIB);
    let params = format!("aio:{}", image.display());
    let first = Place::new(host, "g", &params, &[]);
    let mut front = first.host.connect(&first.disk);
    works(&mut front, 1);
    let second = Place::new(other, "g", &params, &[]);
    second.host.wait_for_phase(&second.disk, PhaseName::Starting);
    std::thread::sleep(host::A_WHILE);
    assert_eq!(second.host.backend_state(&second.disk), 1);
    destroy(front, &first);
    works(&mut second.host.connect(&second.disk), 2);
}

/// The order of `xl migrate`: the source's guest is suspended, and is destroyed when the target's
/// runs.
#[test]
fn a_source_closes_its_image_when_its_guest_is_suspended() {
    for format in ["raw", "qcow2", "vhd"] {
        let Move { image, source, target, load } = prepare(format, &[]);
        let (_rings, model) = load.suspend();
        source.suspend();
        let load = go_on(connected(target.run_guest()), model);
        source.host.machine().destroy(source.disk.domid).unwrap();
        source.destroy();
        load.wait_for_progress();
        load.end();
        target.end();
        images::check(&image);
    }
}

#[test]
fn a_target_whose_guest_runs_first_is_served_as_soon_as_its_source_has_closed_the_image() {
    let Move { image, source, target, load } = prepare("qcow2", &[]);
    let waiting = target.run_guest();
    target.wait_for_error("cannot serve the guest yet");
    let (_rings, model) = load.suspend();
    source.suspend();
    go_on(connected(waiting), model).end();
    source.destroy();
    target.end();
    images::check(&image);
}

#[test]
fn a_migration_that_fails_goes_on_at_its_source_with_the_same_rings() {
    let Move { image, mut source, target, load } = prepare("qcow2", &[]);
    let (mut front, mut model) = load.suspend();
    for _ in 0..2 {
        source.suspend();
        source.resume();
        let load = go_on(front, model);
        (front, model) = load.suspend();
    }
    source.suspend();
    target.end();
    source.resume();
    let load = go_on(front, model);
    // The next daemon does not compare the image any more.
    source.kill_daemon();
    source.restart_daemon();
    source.host.wait_for_phase(&source.disk, PhaseName::Served);
    load.wait_for_progress();
    load.end();
    source.end();
    images::check(&image);
}

/// The source's guest knows nothing of these data.
#[test]
fn a_source_does_not_go_on_when_its_target_has_written() {
    let Move { source, target, load, .. } = prepare("raw", &[]);
    let (_rings, model) = load.suspend();
    source.suspend();
    go_on(connected(target.run_guest()), model).end();
    source.resume();
    let failed = source.host.wait_for_phase(&source.disk, PhaseName::Failed);
    let why = failed.why.unwrap();
    assert!(why.contains("was written while the guest was suspended"), "{why}");
    source.wait_for_error("was written while the guest was suspended");
    source.destroy();
    target.end();
}

/// The image was as it had been left until the target wrote, and the source waited for its lock then.
#[test]
fn a_source_that_waits_for_the_lock_sees_what_its_target_has_written_before() {
    let Move { source, target, load, .. } = prepare("raw", &[]);
    let (_rings, model) = load.suspend();
    source.suspend();
    let front = connected(target.run_guest());
    source.resume();
    source.host.wait_for_phase(&source.disk, PhaseName::Starting);
    let worker = worker(keeper_of(&source)).unwrap();
    wait_until("a try to open the image", || has_open(worker, &source.host.image("of-guest")));
    go_on(front, model).end();
    target.end();
    let failed = source.host.wait_for_phase(&source.disk, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("was written while the guest was suspended"));
    // Nothing of it is open, so another host can use it.
    wait_until("the end of its lock", || !has_open(worker, &source.host.image("of-guest")));
    source.destroy();
}

fn keeper_of(place: &Place) -> i32 {
    place.host.show(&place.disk).unwrap().disk.pid.unwrap().try_into().unwrap()
}

/// Whether the process has a file of this folder open.
fn has_open(pid: i32, folder: &Path) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    names.any(|name| name.starts_with(folder))
}

#[test]
fn a_source_goes_on_when_its_target_has_let_go_without_a_write() {
    let Move { source, target, load, .. } = prepare("raw", &[]);
    let (rings, model) = load.suspend();
    source.suspend();
    let mut front = connected(target.run_guest());
    source.resume();
    // Its worker waits for the lock.
    source.host.wait_for_phase(&source.disk, PhaseName::Starting);
    front.close(PATIENCE).unwrap();
    target.end();
    go_on(rings, model).end();
    source.end();
}

#[test]
fn a_source_whose_worker_or_daemon_ends_leaves_the_image_closed() {
    let Move { mut source, target, load, .. } = prepare("vhd", &[]);
    let pid = keeper(&source.host, &source.disk);
    let (rings, model) = load.suspend();
    source.suspend();
    source.kill_daemon();
    let killed = worker(pid).unwrap();
    kill_pid(killed);
    wait_until("the next worker", || worker(pid).is_some_and(|next| next != killed));
    std::thread::sleep(host::A_WHILE);
    let front = connected(target.run_guest());
    source.restart_daemon();
    source.host.wait_for_phase(&source.disk, PhaseName::Resting);
    drop(front);
    target.host.machine().destroy(target.disk.domid).unwrap();
    target.destroy();
    source.resume();
    go_on(rings, model).end();
    source.end();
}

/// As an HVM guest's QEMU, which boots from the disk.
#[test]
fn a_client_of_a_target_waits_for_the_image_too() {
    let Move { source, target, load, .. } = prepare("qcow2", &[]);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut client = target.client();
            client.write(3 * MIB, &[7; 4096]);
            client.flush();
        });
        load.wait_for_progress();
        assert!(!waiting.is_finished());
        assert_eq!(target.host.backend_state(&target.disk), 2);
        let (_rings, model) = load.suspend();
        source.suspend();
        waiting.join().unwrap();
        let front = connected(target.run_guest());
        assert_eq!(target.client().read(3 * MIB, 4096), [7; 4096]);
        go_on(front, model).end();
    });
    target.end();
}

/// QEMU has its disks flushed when its guest is suspended, and its state is saved after that.
#[test]
fn a_suspended_guests_image_stays_open_while_there_are_clients() {
    let host = Host::new(1);
    let params = format!("aio:{}", host.make_image("a.img", MIB).display());
    let source = Place::new(host, "g", &params, &[]);
    let mut front = source.host.connect(&source.disk);
    works(&mut front, 1);
    let mut client = source.client();
    source.host.machine().suspend(source.disk.domid).unwrap();
    for _ in 0..3 {
        client.write(8192, &[7; 4096]);
        client.flush();
        std::thread::sleep(host::A_WHILE);
    }
    source.host.wait_for_phase(&source.disk, PhaseName::Served);
    drop(client);
    source.resume();
    works(&mut front, 2);
    front.close(PATIENCE).unwrap();
    source.end();
}

#[test]
fn requests_that_are_in_flight_when_a_guest_is_suspended_are_answered_once() {
    let host = Host::new(1);
    let image = host.make_image("a.img", MIB);
    let source = Place::new(host, "g", &format!("aio:{}", image.display()), &[]);
    let mut front = source.host.connect(&source.disk);
    let buffer = front.space().buffer(8).unwrap();
    for block in 0..8 {
        buffer.write(block * 4096, &[block as u8 + 1; 4096]);
        front.queues[0].write(block as u64 * 8, &buffer, block * 4096, 4096).unwrap();
    }
    source.suspend();
    // The guest puts one more on the ring as soon as it goes on.
    source.resume();
    front.queues[0].write(64, &buffer, 0, 4096).unwrap();
    for _ in 0..9 {
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    }
    let data = std::fs::read(&image).unwrap();
    for block in 0..9 {
        let stamp = if block == 8 { 1 } else { block as u8 + 1 };
        assert_eq!(data[block * 4096..][..4096], [stamp; 4096], "block {block}");
    }
    works(&mut front, 2);
}

/// Both domains are on this host, so the source's disk rests for the target's.
#[test]
fn a_guest_that_is_moved_within_a_host_is_suspended_too() {
    let host = Host::new(2);
    for domid in [1, 2] {
        host.store().write(&format!("/local/domain/{domid}/vm"), b"/vm/of-both").unwrap();
    }
    host.store().write("/local/domain/2/name", b"g--incoming").unwrap();
    let params = format!("aio:{}", host.make_image("a.img", MIB).display());
    let source = Place::new(host, "g", &params, &[]);
    let mut front = source.host.connect(&source.disk);
    works(&mut front, 1);
    for round in 2..4 {
        source.suspend();
        let target = source.host.attach(2, 0, &params);
        source.host.wait_for_phase(&target, PhaseName::Served);
        let waits = source.host.show(&source.disk).unwrap().waits_for.unwrap();
        assert!(waits.contains("2/51712"), "{waits}");
        // The migration fails.
        source.host.detach(&target);
        source.resume();
        works(&mut front, round);
    }
    source.suspend();
    let target = source.host.attach(2, 0, &params);
    source.host.wait_for_phase(&target, PhaseName::Served);
    let mut moved = source.host.connect(&target);
    works(&mut moved, 4);
    source.destroy();
    works(&mut moved, 5);
    moved.close(PATIENCE).unwrap();
    source.host.detach(&target);
    source.host.wait_for_no_disks();
}
