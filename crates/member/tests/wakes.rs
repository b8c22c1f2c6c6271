//! How often a server wakes its threads, and its clients.

mod peers;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::time::{Duration, Instant};

use ferrite_pool::wire::{HEADER_BYTES, Kind};
use peers::{Owner, Process};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SINGLE: u64 = 200;

/// Not a test by itself: the server's process.
#[test]
fn a_server_process() {
    peers::be_server();
}

/// A server with a copy, and an owner of it.
fn session() -> (TempDir, Process, Owner) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let server = Process::start(folder.path());
    let made = Owner::create(&server, "d", 64 * MIB);
    assert_eq!(made.header.kind, Kind::Done, "{}", made.text());
    let (owner, _) = Owner::open(&server, "d", 1, 7);
    (folder, server, owner)
}

/// How often the threads of this name have gone to sleep, and how many they are.
fn sleeps(server: &Process, of: &str) -> (u64, usize) {
    let tasks = format!("/proc/{}/task", server.pid().as_raw_nonzero());
    let named = fs::read_dir(tasks)
        .unwrap()
        .map(|task| task.unwrap().path())
        .filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == of));
    let counts: Vec<u64> = named
        .filter_map(|task| fs::read_to_string(task.join("status")).ok())
        .map(|status| {
            let line =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse::<u64>().unwrap()
        })
        .collect();
    (counts.iter().sum(), counts.len())
}

#[test]
fn a_single_request_wakes_one_of_several_idle_threads() {
    let (_folder, server, mut owner) = session();
    let data = vec![5; 256 << 10];
    let many = || (0..64).map(|at| at * MIB);
    // All threads have work. The first write of a region makes its bit durable, later ones find it.
    for at in many().chain(many()) {
        owner.send(Kind::Write, at, 0, &data[..4096]);
    }
    for _ in many().chain(many()) {
        owner.answer().unwrap();
    }
    for at in many().take(16) {
        owner.send(Kind::Write, at, 0, &data);
    }
    for _ in many().take(16) {
        owner.answer().unwrap();
    }
    let threads = sleeps(&server, "copy").1;
    assert!(threads > 2, "{threads} threads");
    let mut round = || {
        let before = sleeps(&server, "copy").0;
        for _ in 0..SINGLE {
            owner.done(Kind::Write, 0, 0, &data[..4096]);
        }
        sleeps(&server, "copy").0 - before
    };
    // On a busy machine they sleep for locks, too: not in all rounds as often.
    let least = (0..10).map(|_| round()).min().unwrap();
    assert!(least * 2 <= SINGLE * 3, "{least} for {SINGLE} requests");
}

#[test]
fn small_answers_are_sent_by_the_thread_that_has_them() {
    let (_folder, server, mut owner) = session();
    owner.done(Kind::Write, 0, 0, &[3; 4096]);
    let until = Instant::now() + Duration::from_secs(30);
    while sleeps(&server, "answers").1 > 1 {
        assert!(Instant::now() < until, "the connection that has made the copy stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = sleeps(&server, "answers").0;
    for _ in 0..SINGLE {
        owner.done(Kind::Write, 0, 0, &[4; 4096]);
        assert_eq!(owner.done(Kind::Read, 0, 4096, &[]), [4; 4096]);
    }
    // It may just have begun to wait.
    let slept = sleeps(&server, "answers").0 - before;
    assert!(slept <= 1, "{slept}");
}

#[test]
fn answers_come_whole_when_the_owner_takes_them_late() {
    let (_folder, _server, mut owner) = session();
    let small = 16 << 10;
    owner.done(Kind::Write, 0, 0, &vec![6; small]);
    owner.done(Kind::Write, MIB, 0, &vec![7; MIB as usize]);
    // More than the sockets take: a large one that waits, with small ones behind it; and small ones until one does not fit.
    let large = [1 << 20, 1 << 20, 1 << 20, 512 << 10];
    for sizes in [[&large[..], &[small; 8]].concat(), vec![small; 500]] {
        let ask = |len: &usize| {
            let start = if *len > small { MIB } else { 0 };
            (owner.send(Kind::Read, start, *len as u64, &[]), *len)
        };
        let asked: BTreeMap<u64, usize> = sizes.iter().map(ask).collect();
        std::thread::sleep(Duration::from_millis(50));
        for _ in &asked {
            let answer = owner.answer().unwrap();
            let len = asked[&answer.header.op];
            let byte = if len > small { 7 } else { 6 };
            assert!(answer.payload == vec![byte; len], "{:?}", answer.header);
        }
    }
}

#[test]
fn what_was_read_comes_in_one_piece_with_its_header() {
    let (_folder, _server, mut owner) = session();
    let mut bytes = vec![0; 128 << 10];
    // Sent by the thread that has it, and by the one that sends.
    for len in [512, 20 << 10] {
        owner.done(Kind::Write, 0, 0, &vec![3; len]);
        for _ in 0..SINGLE {
            owner.send(Kind::Read, 0, len as u64, &[]);
            let first = owner.stream.read(&mut bytes).unwrap();
            assert!(first > HEADER_BYTES, "{first}");
            let rest = HEADER_BYTES + len - first;
            owner.stream.read_exact(&mut bytes[..rest]).unwrap();
        }
    }
}
