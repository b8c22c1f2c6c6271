//! A guest and its stub domain have one disk at the same time (attachments.md, "A stub domain and its
//! guest"): one keeper and one worker serve both.

use std::path::PathBuf;
use std::process::Child;

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{PhaseName, Upgraded};
use ferrite_keeper::{Keeper, socket_name};
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::blkif::inflight::Table;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::{PATIENCE, few_or_all, images, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::host::{self, A_WHILE, Host, works};
use crate::load::Load;
use crate::roles::{self, MIB, STUB, end, is_alive, keeper, kill, kill_keeper, kill_pid, worker};

/// Writes the toolstack's keys from before it attaches the disk to the stub domain.
fn be_stub_of(host: &Host, stub: u16, guest: u16) {
    let write = |path: String, number: u16| {
        host.store().write(&path, number.to_string().as_bytes()).unwrap();
    };
    write(format!("/local/domain/{guest}/image/device-model-domid"), stub);
    write(format!("/local/domain/{stub}/target"), guest);
}

/// A guest and its stub domain with one image.
struct Pair {
    host: Host,
    image: PathBuf,
    params: String,
    guest: u16,
    stub: u16,
}

impl Pair {
    fn new(format: &str, guest: u16, stub: u16) -> Pair {
        let host = Host::new(3);
        be_stub_of(&host, stub, guest);
        let folder = host.image("of-a-guest");
        std::fs::create_dir(&folder).unwrap();
        let image = images::make(&folder, format, 4 * MIB);
        let word = if format == "raw" { "aio" } else { format };
        let params = format!("{word}:{}", image.display());
        Pair { host, image, params, guest, stub }
    }

    fn spawn(&self) -> Child {
        self.host.spawn_with(None, &[(STUB, &self.stub.to_string())])
    }

    fn attach(&self) -> [DiskPaths; 2] {
        [self.guest, self.stub].map(|domid| self.host.attach(domid, 0, &self.params))
    }

    /// Connects both, the guest first.
    fn connect(&self, disks: &[DiskPaths; 2]) -> [Frontend; 2] {
        disks.each_ref().map(|disk| self.host.connect(disk))
    }

    /// The keeper that serves both.
    fn keeper(&self, disks: &[DiskPaths; 2]) -> i32 {
        let [of_guest, of_stub] = disks.each_ref().map(|disk| keeper(&self.host, disk));
        assert_eq!(of_guest, of_stub, "one keeper");
        of_guest
    }

    /// The directory of the stub domain's requests, in the run directory of its guest's disk.
    fn second(&self, disks: &[DiskPaths; 2]) -> PathBuf {
        let name = host::id(&disks[0]).file_name();
        self.host.paths().run.join(name).join("second")
    }

    /// Destroys the stub domain as the toolstack does, which may not wait for an answer.
    fn destroy_stub(&self, disks: &[DiskPaths; 2], front: Frontend, is_asked: bool) {
        if is_asked {
            self.host.machine().unplug(&disks[1]).unwrap();
        }
        drop(front);
        self.host.machine().destroy(disks[1].domid).unwrap();
        if is_asked {
            self.host.wait_for_state(&disks[1], 6);
        }
        self.host.machine().remove_disk(&disks[1]).unwrap();
    }

    /// Detaches both, the stub domain's disk first, and checks that nothing is left.
    fn end(self, disks: [DiskPaths; 2], fronts: Vec<Frontend>, daemon: Child) {
        for mut front in fronts {
            front.close(PATIENCE).unwrap();
        }
        let keepers = [self.keeper(&disks)];
        let [of_guest, of_stub] = disks;
        end(&self.host, &[of_stub, of_guest], &keepers);
        images::check(&self.image);
        kill(daemon);
    }
}

fn read(front: &mut Frontend) -> u8 {
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    queue.read(8, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    let mut data = vec![0; 4096];
    buffer.read(0, &mut data);
    assert!(are_all(&data, data[0]), "a block of several writes");
    data[0]
}

#[test]
fn a_guest_and_its_stub_domain_have_the_disk_at_once_and_see_what_the_other_writes() {
    for (format, guest, stub, early) in
        [("raw", 1, 2, false), ("vhd", 1, 2, true), ("qcow2", 2, 1, true), ("raw", 2, 1, false)]
    {
        let pair = Pair::new(format, guest, stub);
        // The daemon may find the stub domain's disk first.
        let before = early.then(|| pair.attach());
        let daemon = pair.spawn();
        let disks = before.unwrap_or_else(|| pair.attach());
        let mut fronts = pair.connect(&disks);
        for stamp in 1..10 {
            let [writer, reader] = if stamp % 2 == 0 { [0, 1] } else { [1, 0] };
            works(&mut fronts[writer], stamp);
            assert_eq!(read(&mut fronts[reader]), stamp);
        }
        let socket = format!("{}/physical-device-path", disks[1].backend);
        assert_eq!(pair.host.store().read_string(&socket).unwrap(), None);
        // Either one reconnects while the other is connected.
        for which in [0, 1, 1, 0] {
            fronts[which].close(PATIENCE).unwrap();
            works(&mut fronts[1 - which], 20 + which as u8);
            fronts[which] = pair.host.connect(&disks[which]);
            assert_eq!(read(&mut fronts[which]), 20 + which as u8);
        }
        pair.end(disks, fronts.into(), daemon);
    }
}

#[test]
fn workers_keepers_and_daemons_that_are_killed_under_both_are_pauses() {
    let pair = Pair::new("qcow2", 1, 2);
    let mut daemon = pair.spawn();
    let disks = pair.attach();
    let host = &pair.host;
    let loads = [(&disks[0], 0), (&disks[1], 256)].map(|(disk, from)| Load::from(host, disk, from));
    for round in 0..few_or_all(4, 40) {
        loads.iter().for_each(Load::wait_for_progress);
        let of_both = pair.keeper(&disks);
        match round % 4 {
            0 => worker(of_both).into_iter().for_each(kill_pid),
            1 => kill_keeper(of_both),
            2 => {
                kill(daemon);
                loads.iter().for_each(Load::wait_for_progress);
                daemon = pair.spawn();
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 2));
                assert_eq!(pair.keeper(&disks), of_both, "it was found, not started");
            }
            _ => {
                kill(daemon);
                kill_keeper(of_both);
                daemon = pair.spawn();
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 2));
            }
        }
    }
    loads.into_iter().for_each(Load::end);
    pair.end(disks, Vec::new(), daemon);
}

#[test]
fn a_disk_gets_another_program_with_its_stub_domains() {
    let pair = Pair::new("vhd", 1, 2);
    let daemon = pair.spawn();
    let disks = pair.attach();
    let host = &pair.host;
    let loads = [(&disks[0], 0), (&disks[1], 256)].map(|(disk, from)| Load::from(host, disk, from));
    let of_both = pair.keeper(&disks);
    let binary = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &binary);
    let ask = |disk: Option<&DiskPaths>| -> Result<Upgraded, ClientError> {
        let disk = disk.map(host::id);
        host.call("upgrade", &json!({ "binary": binary.to_str().unwrap(), "disk": disk }))
    };
    for _ in 0..3 {
        loads.iter().for_each(Load::wait_for_progress);
        let done = ask(None).unwrap();
        assert_eq!(done.upgraded, [host::id(&disks[0])], "{:?}", done.failed);
        assert!(done.failed.is_empty());
        assert_eq!(pair.keeper(&disks), of_both);
    }
    loads.iter().for_each(Load::wait_for_progress);
    assert_eq!(std::fs::read_link(format!("/proc/{of_both}/exe")).unwrap(), binary);
    let done = ask(Some(&disks[1])).unwrap();
    assert!(done.failed[0].help.contains("1/51712"), "{:?}", done.failed);
    loads.into_iter().for_each(Load::end);
    pair.end(disks, Vec::new(), daemon);
}

#[test]
fn images_of_a_stub_domains_disk_are_merged_by_its_guests() {
    let pair = Pair::new("vhd", 1, 2);
    let daemon = pair.spawn();
    let disks = pair.attach();
    let fronts = pair.connect(&disks);
    let asked = json!({ "disk": host::id(&disks[1]) });
    match pair.host.call::<Value>("disk.coalesce", &asked) {
        Err(ClientError::Refused(e)) => {
            assert_eq!(e.message, "disk 2/51712 is a stub domain's");
            assert!(e.data.is_some_and(|data| data.help.contains("disk 1/51712")));
        }
        answered => panic!("{answered:?}"),
    }
    pair.end(disks, fronts.into(), daemon);
}

#[test]
fn a_stub_domain_that_is_gone_leaves_the_disk_to_its_guest() {
    for is_asked in [true, false] {
        let pair = Pair::new("vhd", 1, 2);
        let daemon = pair.spawn();
        let disks = pair.attach();
        let [mut front, other] = pair.connect(&disks);
        works(&mut front, 1);
        assert!(pair.second(&disks).exists());
        pair.destroy_stub(&disks, other, is_asked);
        works(&mut front, 2);
        wait_until("the end of its thread", || pair.host.disks().len() == 1);
        assert!(!pair.second(&disks).join("inflight").exists(), "{is_asked}");
        let keepers = [keeper(&pair.host, &disks[0])];
        front.close(PATIENCE).unwrap();
        end(&pair.host, &disks[..1], &keepers);
        images::check(&pair.image);
        kill(daemon);
    }
}

/// The image is closed with the guest's disk. Later requests of the stub domain get no answer.
#[test]
fn a_guests_disk_that_is_gone_is_closed_and_its_stub_domains_is_detached_later() {
    let pair = Pair::new("qcow2", 1, 2);
    let mut daemon = pair.spawn();
    let disks = pair.attach();
    let [mut front, mut other] = pair.connect(&disks);
    works(&mut other, 1);
    let keeper = pair.keeper(&disks);
    front.close(PATIENCE).unwrap();
    pair.host.detach(&disks[0]);
    images::check(&pair.image);
    wait_until("no keeper", || !is_alive(keeper));
    let buffer = other.space().buffer(1).unwrap();
    other.queues[0].write(8, &buffer, 0, 4096).unwrap();
    other.queues[0].push().unwrap();
    let failed = pair.host.wait_for_phase(&disks[1], PhaseName::Failed);
    assert!(failed.why.unwrap().contains("1/51712"));
    // The next daemon does not serve the stub domain's disk alone, either.
    kill(daemon);
    daemon = pair.spawn();
    wait_until("the daemon", || pair.host.status().is_ok());
    let failed = pair.host.wait_for_phase(&disks[1], PhaseName::Failed);
    assert!(failed.why.unwrap().contains("1/51712"));
    assert!(!other.queues[0].wait(A_WHILE).unwrap());
    pair.destroy_stub(&disks, other, true);
    pair.host.wait_for_no_disks();
    images::check(&pair.image);
    kill(daemon);
}

/// Its requests in flight cannot be repeated, so the guest's disk does not wait for them.
#[test]
fn a_stub_domain_that_went_while_nobody_looked_keeps_nobody_waiting() {
    let pair = Pair::new("raw", 1, 2);
    let daemon = pair.spawn();
    let disks = pair.attach();
    let mut front = pair.host.connect(&disks[0]);
    let load = Load::from(&pair.host, &disks[1], 256);
    works(&mut front, 1);
    load.wait_for_progress();
    let keeper = pair.keeper(&disks);
    kill(daemon);
    let table = pair.second(&disks).join("inflight");
    let worker = Pid::from_raw(worker(keeper).unwrap()).unwrap();
    wait_until("a moment with requests under way", || {
        kill_process(worker, Signal::STOP).unwrap();
        let is_so = Table::has_unanswered(&table);
        kill_process(worker, if is_so { Signal::KILL } else { Signal::CONT }).unwrap();
        is_so
    });
    pair.host.machine().remove_disk(&disks[1]).unwrap();
    let daemon = pair.spawn();
    works(&mut front, 2);
    wait_until("the end of the other's", || pair.host.disks().len() == 1);
    assert!(!pair.second(&disks).exists());
    let keepers = [roles::keeper(&pair.host, &disks[0])];
    front.close(PATIENCE).unwrap();
    end(&pair.host, &disks[..1], &keepers);
    kill(daemon);
    // Its guest waits for ever.
    std::mem::forget(load);
}

#[test]
fn a_stub_domain_that_may_not_write_beside_a_guest_that_may_is_refused() {
    let pair = Pair::new("raw", 1, 2);
    let daemon = pair.spawn();
    let of_guest = pair.host.attach(1, 0, &pair.params);
    let mut front = pair.host.connect(&of_guest);
    let of_stub = pair.host.attach_with(2, 0, &pair.params, &[("mode", "r")]);
    let failed = pair.host.wait_for_phase(&of_stub, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("only one of the two may write"));
    works(&mut front, 1);
    let keepers = [keeper(&pair.host, &of_guest)];
    front.close(PATIENCE).unwrap();
    end(&pair.host, &[of_stub, of_guest], &keepers);
    kill(daemon);
}

#[test]
fn a_guest_has_one_stub_domain_at_a_time() {
    let pair = Pair::new("raw", 1, 2);
    let daemon = pair.spawn();
    let disks = pair.attach();
    let mut fronts = pair.connect(&disks);
    be_stub_of(&pair.host, 3, 1);
    let third = pair.host.attach(3, 0, &pair.params);
    let failed = pair.host.wait_for_phase(&third, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("2/51712"));
    for (stamp, front) in (1..).zip(&mut fronts) {
        works(front, stamp);
    }
    pair.host.detach(&third);
    pair.end(disks, fronts.into(), daemon);
}

/// Only the toolstack can write either key (threats.md T30), and one of them is not enough.
#[test]
fn who_is_no_stub_domain_of_the_guest_does_not_get_its_disk() {
    let claims: [&[(&str, &str)]; 6] = [
        &[],
        &[("2/target", "1")],
        &[("1/image/device-model-domid", "2")],
        &[("2/target", "1"), ("1/image/device-model-domid", "3")],
        &[("2/target", "3"), ("1/image/device-model-domid", "2")],
        &[("2/target", "x"), ("1/image/device-model-domid", "2")],
    ];
    for claim in claims {
        let host = Host::new(3);
        let daemon = host.spawn(None);
        let image = host.make_image("a.img", 4 * MIB);
        let params = format!("aio:{}", image.display());
        for (path, value) in claim {
            host.store().write(&format!("/local/domain/{path}"), value.as_bytes()).unwrap();
        }
        let of_guest = host.attach(1, 0, &params);
        let mut front = host.connect(&of_guest);
        works(&mut front, 1);
        let other = host.attach(2, 0, &params);
        host.wait_for_phase(&other, PhaseName::Starting);
        std::thread::sleep(A_WHILE);
        let socket = socket_name(&host::id(&other).file_name());
        let socket = host.paths().run.join("keepers").join(socket);
        wait_until("a keeper of its own", || Keeper::connect(&socket).is_ok());
        assert_ne!(host.backend_state(&other), 4);
        works(&mut front, 2);
        front.close(PATIENCE).unwrap();
        host.detach(&of_guest);
        let mut front = host.connect(&other);
        assert_eq!(read(&mut front), 2);
        front.close(PATIENCE).unwrap();
        end(&host, &[other], &[]);
        kill(daemon);
    }
}

/// A disk with the same number and another image is another disk.
#[test]
fn a_stub_domains_disk_of_another_image_is_its_own() {
    let pair = Pair::new("raw", 1, 2);
    let daemon = pair.host.spawn(None);
    let other = pair.host.make_image("b.img", 4 * MIB);
    let of_guest = pair.host.attach(1, 0, &pair.params);
    let of_stub = pair.host.attach(2, 0, &format!("aio:{}", other.display()));
    let mut fronts = [&of_guest, &of_stub].map(|disk| pair.host.connect(disk));
    for (stamp, front) in (1..).zip(&mut fronts) {
        works(front, stamp);
    }
    assert_eq!(fronts.each_mut().map(read), [1, 2]);
    let keepers = [&of_guest, &of_stub].map(|disk| keeper(&pair.host, disk));
    assert_ne!(keepers[0], keepers[1]);
    for front in &mut fronts {
        front.close(PATIENCE).unwrap();
    }
    end(&pair.host, &[of_stub, of_guest], &keepers);
    kill(daemon);
}

/// The stub domain's requests are for the image that it was attached with.
#[test]
fn a_stub_domain_has_nothing_of_another_image_that_its_guest_gets() {
    let pair = Pair::new("raw", 1, 2);
    let daemon = pair.spawn();
    let disks = pair.attach();
    let [mut front, mut other] = pair.connect(&disks);
    works(&mut other, 1);
    front.close(PATIENCE).unwrap();
    pair.host.detach(&disks[0]);
    let image = pair.host.make_image("b.img", 4 * MIB);
    let of_guest = pair.host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = pair.host.connect(&of_guest);
    works(&mut front, 2);
    let buffer = other.space().buffer(1).unwrap();
    other.queues[0].write(8, &buffer, 0, 4096).unwrap();
    other.queues[0].push().unwrap();
    let tries = || pair.host.wait_for_phase(&disks[1], PhaseName::Failed).starts;
    let before = tries();
    // Two tries, since one of them may have begun while the guest had that image.
    wait_until("two tries", || tries() >= before + 2);
    let failed = pair.host.wait_for_phase(&disks[1], PhaseName::Failed);
    assert!(failed.why.unwrap().contains("1/51712 of the guest is not served"));
    assert!(!other.queues[0].wait(A_WHILE).unwrap());
    assert_eq!(read(&mut front), 2);
    pair.destroy_stub(&disks, other, true);
    let keepers = [keeper(&pair.host, &of_guest)];
    front.close(PATIENCE).unwrap();
    end(&pair.host, &[of_guest], &keepers);
    kill(daemon);
}

/// Its requests in flight are in a table of its own.
#[test]
fn a_disk_that_was_served_alone_stays_so_though_its_guests_is_attached() {
    let pair = Pair::new("raw", 1, 2);
    let mut daemon = pair.host.spawn(None);
    let of_stub = pair.host.attach(2, 0, &pair.params);
    let mut other = pair.host.connect(&of_stub);
    works(&mut other, 1);
    let of_guest = pair.host.attach(1, 0, &pair.params);
    pair.host.wait_for_phase(&of_guest, PhaseName::Starting);
    let own = keeper(&pair.host, &of_stub);
    for stamp in 2..4 {
        kill(daemon);
        daemon = pair.host.spawn(None);
        wait_until("the daemon", || pair.host.status().is_ok_and(|status| status.disks == 2));
        works(&mut other, stamp);
        assert_eq!(keeper(&pair.host, &of_stub), own);
    }
    other.close(PATIENCE).unwrap();
    pair.host.detach(&of_stub);
    let mut front = pair.host.connect(&of_guest);
    assert_eq!(read(&mut front), 3);
    let keepers = [keeper(&pair.host, &of_guest)];
    front.close(PATIENCE).unwrap();
    end(&pair.host, &[of_guest], &keepers);
    kill(daemon);
}
