//! Disks of the daemon whose storage is full. Their guests wait, whichever process ends meanwhile,
//! and other disks are not affected. Needs root; otherwise it passes and says so.

mod host;
mod roles;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Detached, Upgraded};
use ferrite_daemon::keepers::Keepers;
use ferrite_keeper::nbd_socket;
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::places::Small;
use ferrite_testkit::{PATIENCE, images, wait_until};
use host::{Host, ON_FULL, works};
use roles::{MIB, Roles, attach, end, keeper, kill, kill_pid, worker};
use serde_json::json;

/// Number of requests of 64 KiB. There is space for a part of them.
const REQUESTS: u64 = 30;
const BYTES: usize = 64 << 10;
const SECTORS: u64 = BYTES as u64 / 512;

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

/// A disk on a file system of its own, with its guest.
struct Full {
    disk: DiskPaths,
    image: PathBuf,
    front: Frontend,
    buffers: Vec<Buffer>,
    small: Small,
}

impl Full {
    /// Attaches the first guest's disk, and puts its requests on the ring.
    fn new(host: &Host, format: &str) -> Option<Full> {
        let folder = host.image("small");
        std::fs::create_dir(&folder).unwrap();
        let small = Small::mount(&folder, "size=1m")?;
        let image = images::make(&folder, format, 8 * MIB);
        let disk = host.attach(1, 0, &format!("{format}:{}", image.display()));
        let mut front = host.frontend(&disk);
        front.connect(&FrontOptions { order: 1, ..FrontOptions::default() }, PATIENCE).unwrap();
        let buffers: Vec<Buffer> =
            (0..REQUESTS).map(|_| front.space().buffer(BYTES / 4096).unwrap()).collect();
        for (n, buffer) in (0..).zip(&buffers) {
            buffer.fill(0, BYTES, n as u8 + 1);
            front.queues[0].write(n * SECTORS, buffer, 0, BYTES).unwrap();
        }
        front.queues[0].push().unwrap();
        Some(Full { disk, image, front, buffers, small })
    }

    /// Waits until all requests without a response are reported to wait.
    fn waits(&mut self, host: &Host) -> u64 {
        let mut waits = 0;
        wait_until("a full disk", || {
            while let Some(reply) = self.front.queues[0].take().unwrap() {
                assert!(reply.is_ok());
            }
            let shown = host.show(&self.disk).ok();
            waits = shown.and_then(|shown| shown.disk.full).map_or(0, |full| full.requests);
            waits > 0 && waits == self.front.queues[0].in_flight() as u64
        });
        waits
    }

    fn is_written(&mut self) {
        let queue = &mut self.front.queues[0];
        while queue.in_flight() > 0 {
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        }
        for (n, buffer) in (0..).zip(&self.buffers) {
            buffer.fill(0, BYTES, 0xEE);
            queue.read(n * SECTORS, buffer, 0, BYTES).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
            assert!(are_all(&buffer.to_vec(0, BYTES), n as u8 + 1), "{n}");
        }
    }
}

#[test]
fn requests_wait_for_space_whoever_ends_meanwhile_and_other_disks_go_on() {
    for format in ["raw", "vhd", "qcow2"] {
        let host = Host::new(2);
        let wait = [(ON_FULL, "wait")];
        let mut daemon = host.spawn_with(None, &wait);
        let Some(mut full) = Full::new(&host, format) else { return kill(daemon) };
        let other = attach(&host, 2);
        let mut beside = host.connect(&other);
        full.waits(&host);
        works(&mut beside, 1);
        let kept = keeper(&host, &full.disk);
        kill_pid(worker(kept).unwrap());
        full.waits(&host);
        works(&mut beside, 2);
        kill(daemon);
        daemon = host.spawn_with(None, &wait);
        full.waits(&host);
        let binary = std::env::current_exe().unwrap();
        let done: Upgraded = host.call("upgrade", &json!({ "binary": binary })).unwrap();
        assert_eq!(done.upgraded.len(), 2, "{:?}", done.failed);
        full.waits(&host);
        // A request that is being retried is not counted as waiting.
        let waits =
            |why: Option<String>| why.is_some_and(|why| why.contains("space on its storage"));
        wait_until("why it waits", || waits(host.show(&full.disk).unwrap().waits_for));
        wait_until("one full disk", || host.disks()[0].full.is_some());
        assert!(host.disks()[1].full.is_none());
        works(&mut beside, 3);
        full.small.change("size=16m");
        full.is_written();
        wait_until("nothing waits", || host.disks()[0].full.is_none());
        full.front.close(PATIENCE).unwrap();
        beside.close(PATIENCE).unwrap();
        let keepers = [&full.disk, &other].map(|disk| keeper(&host, disk));
        end(&host, &[full.disk, other], &keepers);
        images::check(&full.image);
        kill(daemon);
    }
}

/// There is no guest, as before an HVM guest has its driver.
#[test]
fn a_client_of_nbd_waits_for_space_whoever_ends_meanwhile() {
    let host = Host::new(1);
    let daemon = host.spawn_with(None, &[(ON_FULL, "wait")]);
    let Some(mut full) = Full::new(&host, "raw") else { return kill(daemon) };
    full.waits(&host);
    let socket = nbd_socket(&host.paths().run.join(host::id(&full.disk).file_name()));
    let mut client = Client::over(UnixStream::connect(&socket).unwrap());
    client.go(true);
    // A disconnected client's request must not overwrite others' data when there is space.
    let mut dead = Client::over(UnixStream::connect(&socket).unwrap());
    dead.go(true);
    dead.send(command::WRITE, 0, 6 * MIB, BYTES as u32, &[0xDD; BYTES]);
    let data = [0xCC; BYTES];
    let asked = client.send(command::WRITE, 0, 6 * MIB, BYTES as u32, &data);
    let guests = full.front.queues[0].in_flight() as u64;
    let waits = || host.show(&full.disk).unwrap().disk.full.map_or(0, |full| full.requests);
    wait_until("both clients wait, too", || waits() == guests + 2);
    drop(dead);
    wait_until("one client waits", || waits() == guests + 1);
    kill_pid(worker(keeper(&host, &full.disk)).unwrap());
    assert_eq!(client.read(7 * MIB, 512), [0; 512]);
    wait_until("both wait again", || waits() == guests + 1);
    full.small.change("size=16m");
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (asked, 0));
    assert_eq!(client.read(6 * MIB, BYTES as u32), data);
    full.is_written();
    drop(client);
    full.front.close(PATIENCE).unwrap();
    let kept = keeper(&host, &full.disk);
    end(&host, std::slice::from_ref(&full.disk), &[kept]);
    kill(daemon);
}

#[test]
fn a_disk_with_requests_that_wait_is_detached_by_force_and_by_nothing_else() {
    let host = Host::new(1);
    let daemon = host.spawn_with(None, &[(ON_FULL, "wait")]);
    let Some(mut full) = Full::new(&host, "vhd") else { return kill(daemon) };
    full.waits(&host);
    let detach = |force: bool| -> Result<Detached, ClientError> {
        let disk = host::id(&full.disk);
        host.call("disk.detach", &json!({ "disk": disk, "force": force, "timeout_s": 1 }))
    };
    let refused = detach(false).unwrap_err().to_string();
    assert!(refused.contains("the guest") && refused.contains("space on its storage"), "{refused}");
    assert!(detach(true).unwrap().forced);
    host.wait_for_no_disks();
    images::check(&full.image);
    kill(daemon);
}

#[test]
fn without_the_option_a_full_disk_is_an_error() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let Some(mut full) = Full::new(&host, "qcow2") else { return kill(daemon) };
    let queue = &mut full.front.queues[0];
    let replies: Vec<bool> =
        (0..REQUESTS).map(|_| queue.next_reply(PATIENCE).unwrap().is_ok()).collect();
    assert!(replies.contains(&true) && replies.contains(&false));
    assert_eq!(host.show(&full.disk).unwrap().disk.full, None);
    full.front.close(PATIENCE).unwrap();
    let kept = keeper(&host, &full.disk);
    end(&host, std::slice::from_ref(&full.disk), &[kept]);
    images::check(&full.image);
    kill(daemon);
}
