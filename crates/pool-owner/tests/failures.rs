//! A disk of a pool in use, on real servers and a real etcd: its owner, its servers and etcd fail.

mod pooled;

use std::time::{Duration, Instant};

use ferrite_testkit::bytes::runs;
use ferrite_testkit::nbd_client::command;
use pooled::{BLOCK, MIB, Model, Pool, STRIPE};
use rustix::process::Signal;

const FUA: u16 = 1;

/// The servers and owners of the other tests: each is this program.
#[test]
fn another_process() {
    pooled::be_other();
}

#[test]
fn a_disk_of_stripes_and_copies_keeps_what_is_written() {
    let Some(pool) = Pool::new("trip", 3) else { return };
    pool.create("d", 16 * MIB, 2, 2);
    let owner = pool.own("d", false).unwrap();
    let mut model = Model::new(16 * MIB);
    let mut client = owner.client();
    for _ in 0..40 {
        model.turn(&mut client);
    }
    // A long request, and zeros across stripes.
    let data = runs(4 << 20, 511, |n| n as u8);
    let at = 3 * STRIPE + 512;
    assert_eq!(client.call(command::WRITE, FUA, at as u64, 4 << 20, &data).error, 0);
    model.content[at..at + data.len()].copy_from_slice(&data);
    for (what, at, len) in
        [(command::WRITE_ZEROES, STRIPE - BLOCK, 5 * STRIPE), (command::TRIM, 8 << 20, STRIPE)]
    {
        assert_eq!(client.call(what, 0, at as u64, len as u32, &[]).error, 0);
        model.content[at..at + len].fill(0);
    }
    // A range behind the disk's end, and a part of a block.
    assert_eq!(client.call(command::READ, 0, 16 * MIB - 512, 1024, &[]).error, 22);
    assert_ne!(client.call(command::READ, 0, 1, 512, &[]).error, 0);
    client.flush();
    model.is_on(&mut client);
    assert_ne!(pool.record("d", 0).owner, 0);
    let second = pool.own("d", false).err().unwrap();
    assert!(second.contains("in use by another process of this host"), "{second}");
    drop(client);
    owner.process.end();

    assert_eq!(pool.record("d", 1).owner, 0, "it is given back");
    pool.files_are("d", &model.content);
    let owner = pool.own("d", false).unwrap();
    model.is_on(&mut owner.client());
}

#[test]
fn a_server_is_killed_under_writes_and_comes_back_with_all_of_them() {
    let Some(mut pool) = Pool::new("kill", 2) else { return };
    pool.create("d", 16 * MIB, 2, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(16 * MIB);
    let mut turns = |model: &mut Model, time: Duration| {
        let began = Instant::now();
        while began.elapsed() < time {
            model.turn(&mut client);
        }
    };
    turns(&mut model, Duration::from_millis(300));
    pool.kill(1);
    turns(&mut model, Duration::from_secs(2));
    println!("longest turn: {:?}", model.longest);
    assert_eq!(pool.record("d", 0).out, [1].into());
    pool.start(1);
    turns(&mut model, Duration::from_secs(1));
    pool.until_whole("d");
    turns(&mut model, Duration::from_millis(200));
    model.is_on(&mut client);
    client.flush();
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}

#[test]
fn the_successor_of_a_killed_owner_has_what_was_flushed() {
    let Some(pool) = Pool::new("next", 2) else { return };
    pool.create("d", 8 * MIB, 2, 1);
    let mut model = Model::new(8 * MIB);
    for _ in 0..3 {
        let owner = pool.own("d", false).unwrap();
        let mut client = owner.client();
        model.is_on(&mut client);
        for _ in 0..10 {
            model.turn(&mut client);
        }
        client.flush();
        // It has no time to give the disk back.
        drop(owner);
    }
    let owner = pool.own("d", false).unwrap();
    model.is_on(&mut owner.client());
}

#[test]
fn nothing_of_an_owner_that_was_stopped_lands_behind_its_successor() {
    let Some(pool) = Pool::new("fence", 2) else { return };
    pool.create("d", 8 * MIB, 2, 1);
    let old = pool.own("d", false).unwrap();
    let mut late = old.client();
    late.write(0, &[1; BLOCK]);
    late.flush();
    old.process.stop();
    // They wait in its socket.
    for i in 0..16 {
        late.send(command::WRITE, 0, i * BLOCK as u64, BLOCK as u32, &[2; BLOCK]);
    }
    let new = pool.own("d", true).unwrap();
    let mut client = new.client();
    assert!(client.read(0, BLOCK as u32) == [1; BLOCK], "it has what was flushed");
    client.write(0, &[3; 2 * BLOCK]);
    old.process.signal(Signal::CONT);
    for _ in 0..16 {
        assert_eq!(late.reply().error, 5, "a write of the old owner is answered");
    }
    assert_eq!(late.call(command::READ, 0, 0, BLOCK as u32, &[]).error, 5);
    assert_eq!(late.call(command::FLUSH, 0, 0, 0, &[]).error, 5);
    let mut expected = vec![0; 16 * BLOCK];
    expected[..2 * BLOCK].fill(3);
    assert!(client.read(0, 16 * BLOCK as u32) == expected, "a late write is there");
    client.flush();
    drop(client);
    new.process.end();
    for copy in &pool.files("d")[0] {
        assert!(copy[..16 * BLOCK] == expected);
    }
}

#[test]
fn requests_go_on_while_etcd_is_away() {
    let Some(pool) = Pool::new("etcd", 2) else { return };
    pool.create("d", 8 * MIB, 2, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(8 * MIB);
    pool.etcd.stop(0);
    // Longer than a confirmed generation may be relied on.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        model.turn(&mut client);
    }
    client.flush();
    assert!(model.longest < Duration::from_secs(2), "{:?}", model.longest);
    pool.etcd.go_on(0);
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}

#[test]
fn a_copy_is_replaced_while_the_disk_is_written() {
    let Some(mut pool) = Pool::new("replace", 2) else { return };
    pool.create("d", 16 * MIB, 2, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(16 * MIB);
    (0..50).for_each(|_| model.turn(&mut client));
    // After this no region is dirty, and one becomes so again: the bits of the others do not say what a new copy lacks.
    client.flush();
    model.within = MIB as usize;
    pool.add();
    // One server is lost with its disk, and another one gets its copy.
    pool.kill(1);
    let replaced = pool.access.replace("d", "b", None).unwrap();
    assert_eq!((replaced[0].to.as_str(), replaced[0].done), ("c", false));
    let copies = || {
        let state = pool.access.state().unwrap();
        let (set, _) = state.disks["d"].sets().next().unwrap();
        set.copies.iter().map(|copy| copy.server.clone()).collect::<Vec<_>>()
    };
    let began = Instant::now();
    while copies() != ["a", "c"] {
        model.turn(&mut client);
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", pool.record("d", 0));
    }
    assert_eq!(pool.record("d", 0).in_sync, [0, 2].into());
    // The new one has all of it: it serves alone.
    pool.kill(0);
    (0..5).for_each(|_| model.turn(&mut client));
    model.is_on(&mut client);
    pool.start(0);
    pool.until_whole("d");
    client.flush();
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}

#[test]
#[ignore = "nightly: a server is silent for seconds"]
fn a_server_that_is_stopped_leaves_and_one_that_lost_its_files_gets_all_again() {
    let Some(mut pool) = Pool::new("silent", 3) else { return };
    pool.create("d", 8 * MIB, 3, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(8 * MIB);
    let mut turns = |model: &mut Model, time: Duration| {
        let began = Instant::now();
        while began.elapsed() < time {
            model.turn(&mut client);
        }
    };
    turns(&mut model, Duration::from_millis(200));
    pool.signal(1, Signal::STOP);
    turns(&mut model, Duration::from_secs(5));
    assert_eq!(pool.record("d", 0).out, [1].into());
    println!("longest turn: {:?}", model.longest);
    pool.signal(1, Signal::CONT);
    pool.kill(2);
    pool.lose_files(2);
    pool.start(2);
    turns(&mut model, Duration::from_secs(2));
    pool.until_whole("d");
    turns(&mut model, Duration::from_millis(200));
    model.is_on(&mut client);
    client.flush();
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}

#[test]
#[ignore = "nightly: nothing is answered for seconds"]
fn requests_wait_while_a_server_and_etcd_are_away_together() {
    let Some(mut pool) = Pool::new("both", 2) else { return };
    pool.create("d", 8 * MIB, 2, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(8 * MIB);
    model.turn(&mut client);
    pool.etcd.stop(0);
    pool.kill(1);
    // It would be answered by one copy alone, and the record says that both have it.
    client.send(command::WRITE, 0, 0, BLOCK as u32, &[9; BLOCK]);
    model.content[..BLOCK].fill(9);
    client.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let answer = std::io::Read::read(&mut client.stream, &mut [0]);
    assert!(answer.is_err(), "it is answered: {answer:?}");
    pool.etcd.go_on(0);
    client.stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    assert_eq!(client.reply().error, 0);
    assert_eq!(pool.record("d", 0).out, [1].into());
    model.turn(&mut client);
    pool.start(1);
    pool.until_whole("d");
    model.is_on(&mut client);
    client.flush();
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}
