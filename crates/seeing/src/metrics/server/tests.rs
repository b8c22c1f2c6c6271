//! Clients of the metrics' socket, valid and invalid.

use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;

use ferrite_serve::counters::{Counters, FOLDER, stats_file};
use ferrite_testkit::{PATIENCE, openmetrics, proc, wait_until};

use super::*;
use crate::metrics::Attached;

fn host() -> Host {
    let disk = |domid| Attached { domid, devid: 51712, phase: "served", ..Attached::default() };
    Host { phases: &["served", "failed"], disks: vec![disk(1), disk(2)], ..Host::default() }
}

/// A server with its folder.
struct Rig {
    dir: tempfile::TempDir,
    _server: Server,
}

impl Rig {
    fn new(patience: Duration) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("metrics.sock");
        let folder = dir.path().join(FOLDER);
        let server = serve_for(&socket, &folder, Box::new(host), patience).unwrap();
        Rig { dir, _server: server }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join("metrics.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = self.connect();
        // A rejected client may be disconnected before its request.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    /// The metrics, once a slot is free.
    fn scrape(&self) -> Vec<openmetrics::Family> {
        let mut answer = String::new();
        wait_until("an answer", || {
            answer = self.ask("GET /metrics HTTP/1.1\r\nHost: ferrite\r\n\r\n");
            !answer.starts_with("HTTP/1.1 503 ")
        });
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        let content = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8";
        assert!(head.lines().any(|line| line == content), "{head}");
        openmetrics::parse(body).unwrap()
    }

    fn disk(&self, name: &str) -> PathBuf {
        let run_dir = self.dir.path().join(name);
        Counters::default().keep_in(&run_dir, "/a");
        stats_file(&run_dir)
    }
}

/// The values of a metric by disk.
fn values(families: &[openmetrics::Family], sample: &str) -> Vec<(String, f64)> {
    let samples = families.iter().flat_map(|family| &family.samples);
    let of = samples.filter(|one| one.name == sample);
    of.map(|one| (one.labels.get("disk").cloned().unwrap_or_default(), one.value)).collect()
}

#[test]
fn disks_come_and_go_and_what_is_no_disk_is_counted() {
    let rig = Rig::new(CLIENT);
    let alive =
        |disks: &[&str]| disks.iter().map(|disk| ((*disk).to_owned(), 1.0)).collect::<Vec<_>>();
    assert_eq!(values(&rig.scrape(), "ferrite_disk_worker_alive"), alive(&[]));
    let first = rig.disk("vbd-1-51712");
    rig.disk("vbd-2-51712");
    let torn = rig.disk("vbd-3-51712");
    File::options().write(true).open(torn).unwrap().set_len(100).unwrap();
    let seen = rig.scrape();
    assert_eq!(values(&seen, "ferrite_disk_worker_alive"), alive(&["vbd-1-51712", "vbd-2-51712"]));
    assert_eq!(values(&seen, "ferrite_skipped_files"), [(String::new(), 1.0)]);
    assert_eq!(values(&seen, "ferrite_disk_phase").len(), 4, "two disks, two phases");
    std::fs::remove_file(first).unwrap();
    assert_eq!(values(&rig.scrape(), "ferrite_disk_worker_alive"), alive(&["vbd-2-51712"]));
}

#[test]
fn a_client_that_says_nothing_has_a_short_time_and_its_own_place() {
    let rig = Rig::new(Duration::from_millis(300));
    let silent: Vec<UnixStream> = (0..MAX_CLIENTS).map(|_| rig.connect()).collect();
    wait_until("a full house", || rig.ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 503 "));
    // Idle clients lose their slots, and others are served.
    rig.scrape();
    for mut stream in silent {
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "it was sent away");
    }
}

#[test]
fn a_client_that_does_not_read_has_a_short_time_and_little_memory() {
    const NAME: &str = "a_client_that_does_not_read_has_a_short_time_and_little_memory";
    if !proc::runs_alone(&format!("metrics::server::tests::{NAME}")) {
        return;
    }
    let rig = Rig::new(Duration::from_millis(300));
    // Their text is far more than the kernel buffers for a client.
    (0..100).for_each(|n| drop(rig.disk(&format!("vbd-{n}-51712"))));
    let memory = proc::Memory::watch();
    let mut deaf: Vec<UnixStream> = (0..MAX_CLIENTS).map(|_| rig.connect()).collect();
    for stream in &mut deaf {
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
    }
    for mut stream in deaf {
        // Its time is over before it reads on.
        wait_until("the end of its time", || hung_up(&stream));
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(!answer.is_empty() && !answer.ends_with(b"# EOF\n"));
    }
    let taken = memory.taken_kib();
    assert!(taken < 8 << 10, "{taken} KiB");
    assert_eq!(values(&rig.scrape(), "ferrite_disk_worker_alive").len(), 100);
}

/// Whether the other end is closed, even with unread data.
fn hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default())).unwrap();
    fds[0].revents().contains(PollFlags::HUP)
}

#[test]
fn requests_without_an_end_and_drops_of_one_are_cut_off() {
    let rig = Rig::new(CLIENT);
    let endless = "GET /metrics HTTP/1.1\r\nX: ".to_owned() + &"x".repeat(MAX_HEAD);
    let mut stream = rig.connect();
    // The rest is not received.
    let _ = stream.write_all(endless.as_bytes());
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, b"HTTP/1.1 431");
    let mut drops = rig.connect();
    for byte in b"GET /metrics HTTP/1.1\r\n\r\n" {
        drops.write_all(&[*byte]).unwrap();
    }
    let mut answer = String::new();
    drops.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("# EOF\n"));

    let rig = Rig::new(Duration::from_millis(300));
    let mut slow = rig.connect();
    let slept = (0..1000).find(|_| {
        std::thread::sleep(Duration::from_millis(20));
        slow.write_all(b"x").is_err()
    });
    assert!(slept.is_some(), "a drop now and then does not lengthen its time");
    rig.scrape();
}

#[test]
fn the_socket_is_its_users_and_takes_the_place_of_a_dead_one_only() {
    let rig = Rig::new(CLIENT);
    let socket = rig.dir.path().join("metrics.sock");
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let next = serve_for(&socket, rig.dir.path(), Box::new(host), CLIENT).unwrap();
    rig.scrape();
    drop(next);
    assert!(!socket.exists());
    std::fs::write(&socket, "precious").unwrap();
    let refused = serve_for(&socket, rig.dir.path(), Box::new(host), CLIENT);
    assert!(refused.is_err_and(|e| e.to_string().contains("no socket")));
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
}
