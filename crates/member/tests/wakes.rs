//! How often a server wakes its threads, and its clients.

mod peers;

use std::fs;
use std::io::Read as _;

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

/// How often the threads of the copy have gone to sleep, and how many they are.
fn sleeps(server: &Process) -> (u64, usize) {
    let tasks = format!("/proc/{}/task", server.pid().as_raw_nonzero());
    let of_copy = fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path()).filter(|task| {
        fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "copy")
    });
    let counts: Vec<u64> = of_copy
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
    let (before, threads) = sleeps(&server);
    assert!(threads > 2, "{threads} threads");
    for _ in 0..SINGLE {
        owner.done(Kind::Write, 0, 0, &data[..4096]);
    }
    let slept = sleeps(&server).0 - before;
    println!("{slept} sleeps of {threads} threads");
    // Some more for locks.
    assert!(slept <= SINGLE * 17 / 10, "{slept} for {SINGLE} requests");
}

#[test]
fn what_was_read_comes_in_one_piece_with_its_header() {
    let (_folder, _server, mut owner) = session();
    owner.done(Kind::Write, 0, 0, &[3; 512]);
    let mut bytes = [0; 4096];
    for _ in 0..SINGLE {
        owner.send(Kind::Read, 0, 512, &[]);
        assert_eq!(owner.stream.read(&mut bytes).unwrap(), HEADER_BYTES + 512);
    }
}
