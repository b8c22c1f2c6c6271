//! Several NBD clients: a client affects the others only through the disk's contents.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_loopback::front::FrontOptions;
use ferrite_serve::nbd::Options;
use ferrite_serve::path::device::Device;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::nbd::{Client, Served, command, is_closed, options};
use ferrite_testkit::places::{dir_in_memory, dir_on_disk};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images, programs, wait_until};
use ferrite_xen::abi::PlainOp;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;

#[test]
fn clients_see_what_others_have_flushed_and_what_they_have_only_written_too() {
    for format in ["raw"].into_iter().chain(images::FORMATS) {
        let served = Served::new(format, BYTES, options());
        let mut clients = [served.client(), served.client(), served.client()];
        for round in 0..30u64 {
            let (writer, reader) = (round as usize % 3, (round as usize + 1) % 3);
            let fill = round as u8 + 1;
            clients[writer].write(round * 4096, &[fill; 4096]);
            if round % 2 == 0 {
                clients[writer].flush();
            }
            assert_eq!(clients[reader].read(round * 4096, 4096), [fill; 4096], "{format}");
        }
    }
}

/// A guest, a client and QEMU with one device.
#[test]
fn a_guest_and_clients_have_one_disk() {
    let mut rig = Rig::new(Plan::default());
    let mut served = Served::of(dir_in_memory(), rig.device(), options());
    let mut front = rig.connect(&FrontOptions::default());
    let (mut client, uri) = (served.client(), served.uri());
    let buffer = front.space().buffer(1).unwrap();
    for round in 0..20u64 {
        let fill = round as u8 + 1;
        client.write(round * 4096, &[fill; 4096]);
        client.flush();
        let queue = &mut front.queues[0];
        queue.read(round * 8, &buffer, 0, 4096).unwrap();
        queue.push().unwrap();
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
        let mut read = [0; 4096];
        buffer.read(0, &mut read);
        assert_eq!(read, [fill; 4096]);
        buffer.write(0, &[fill + 100; 4096]);
        queue.write(round * 8, &buffer, 0, 4096).unwrap();
        queue.push().unwrap();
        queue.plain(PlainOp::Flush, 0, &[]).unwrap();
        queue.push().unwrap();
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
        assert_eq!(client.read(round * 4096, 4096), [fill + 100; 4096]);
        let command = format!("read -P {} {} 4096", fill + 100, round * 4096);
        let args = ["-f", "raw", "-c", &command, &uri];
        let Some(said) = programs::peer("qemu-io", &args) else { continue };
        assert!(!said.contains("failed"), "{said}");
    }
    drop(client);
    served.stop();
    front.close(PATIENCE).unwrap();
    rig.stop().unwrap();
}

/// A guest's request that must be alone on the disk, and a thread that parks the disk.
fn everybody_gets_the_disk(rig: &Rig) {
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    queue.plain(PlainOp::Barrier, 120_000, &[buffer.segment(0, 0, 7)]).unwrap();
    queue.push().unwrap();
    let replies = queue.drain(PATIENCE).expect("the gate is held by a client that stalls");
    assert!(replies.iter().all(|reply| reply.is_ok()));
    let device = rig.device();
    let (disk, away) = device.park(PATIENCE).expect("a client that stalls does not rest");
    away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_client_that_does_not_read_its_answers_holds_nothing_but_its_own() {
    let mut rig = Rig::new(Plan::default());
    let mut served = Served::of(dir_in_memory(), rig.device(), options());
    let mut other = served.client();
    other.write(0, &vec![7; 8 << 20]);
    for structured in [true, false] {
        let mut stalled = served.connect();
        stalled.go(structured);
        // More than socket, buffers and table can hold.
        let cookies: Vec<u64> =
            (0..40).map(|_| stalled.send(command::READ, 0, 0, 2 << 20, &[])).collect();
        everybody_gets_the_disk(&rig);
        other.write(32 * MIB, &vec![8; 8 << 20]);
        assert_eq!(other.read(32 * MIB, 8 << 20), vec![8; 8 << 20]);
        // The client was only slow.
        for _ in cookies {
            let reply = stalled.reply();
            assert!(reply.error == 0 && reply.data == vec![7; 2 << 20]);
        }
    }
    drop(other);
    served.stop();
    rig.stop().unwrap();
}

/// Memory is freed after five seconds without a request, but not unsent data.
#[test]
#[ignore = "nightly: it waits for twelve seconds"]
fn answers_that_are_read_late_are_what_they_were() {
    let served = Served::new("raw", BYTES, options());
    let mut client = served.client();
    client.write(0, &vec![7; 2 << 20]);
    client.send(command::READ, 0, 0, 2 << 20, &[]);
    std::thread::sleep(Duration::from_secs(6));
    assert!(client.reply().data == vec![7; 2 << 20]);
    std::thread::sleep(Duration::from_secs(6));
    assert!(client.read(0, 1 << 20) == vec![7; 1 << 20]);
}

#[test]
fn a_client_that_does_not_send_what_it_writes_holds_nothing_and_writes_nothing() {
    let mut rig = Rig::new(Plan::default());
    let mut served = Served::of(dir_in_memory(), rig.device(), options());
    let mut stalled = served.client();
    stalled.send(command::WRITE, 0, 0, 4096, &[1; 4000]);
    everybody_gets_the_disk(&rig);
    let mut other = served.client();
    assert_eq!(other.read(0, 4096), [0; 4096]);
    stalled.say(&[1; 96]);
    assert_eq!(stalled.reply().error, 0);
    assert_eq!(other.read(0, 4096), [1; 4096]);
    // The client disconnects after a part of a write with many parts.
    stalled.send(command::WRITE, 0, 8 * MIB, 4 << 20, &vec![2; (3 << 20) + 77]);
    drop(stalled);
    served.stop();
    rig.stop().unwrap();
}

#[test]
fn a_disk_that_is_parked_again_and_again_loses_nothing_of_its_clients() {
    for format in ["raw"].into_iter().chain(images::FORMATS) {
        let served = Served::new(format, BYTES, options());
        std::thread::scope(|scope| {
            let work = |index: u64| {
                let mut client = served.client();
                scope.spawn(move || {
                    for round in 0..200u64 {
                        let at = index * 16 * MIB + round * 8192;
                        client.write(at, &[round as u8 + 1; 8192]);
                        assert_eq!(client.read(at, 8192), [round as u8 + 1; 8192]);
                    }
                })
            };
            let workers = [work(0), work(1)];
            while !workers.iter().all(|worker| worker.is_finished()) {
                let (disk, away) = served.device.park(PATIENCE).unwrap();
                away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
            }
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
    }
}

#[test]
fn who_says_nothing_is_let_go_and_who_is_one_too_many_is_turned_away() {
    let greeting = Duration::from_millis(200);
    let mut served = Served::new("raw", BYTES, Options { greeting, ..options() });
    let mut silent = UnixStream::connect(&served.socket).unwrap();
    let mut greeting = Vec::new();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    silent.read_to_end(&mut greeting).expect("the time for a handshake ends");
    assert_eq!(greeting.len(), 18);
    // A client that sends one byte after the other has no more time than one that sends none.
    let mut slow = UnixStream::connect(&served.socket).unwrap();
    let options_of_a_minute =
        [&[0, 0, 0, 3][..], &b"IHAVEOPT\0\0\0\x03\0\0\0\0".repeat(75)].concat();
    let sent = options_of_a_minute.iter().take_while(|byte| {
        std::thread::sleep(Duration::from_millis(50));
        slow.write_all(std::slice::from_ref(*byte)).is_ok()
    });
    assert!(sent.count() < options_of_a_minute.len());
    served.stop();
    let mut served = Served::new("raw", BYTES, Options { max_clients: 2, ..options() });
    let (mut one, two) = (served.client(), served.client());
    assert!(is_closed(&UnixStream::connect(&served.socket).unwrap()));
    one.flush();
    drop(two);
    // Its thread needs a moment.
    wait_until("room for another", || !is_closed(&UnixStream::connect(&served.socket).unwrap()));
    one.flush();
    served.stop();
}

#[test]
fn a_server_that_stops_answers_what_it_has_and_waits_for_nobody_for_ever() {
    let faults = Faults::none();
    let factory = faults.clone();
    let engine = Arc::new(move |arena, entries| factory.open(arena, entries));
    let at_stop = Duration::from_millis(200);
    let mut served = Served::new("raw", BYTES, Options { engine, at_stop, ..options() });
    let (mut client, mut silent) = (served.client(), served.client());
    let _unsaid = served.connect();
    silent.send(command::READ, 0, 0, 32 << 20, &[]);
    let held = faults.hold();
    faults.forget();
    faults.set([Ops::from(Kind::Write).meet(Fault::Held(None))]);
    let cookie = client.send(command::WRITE, 0, 0, 4096, &[1; 4096]);
    faults.wait_for(Kind::Write, 1);
    std::thread::scope(|scope| {
        let stopped = scope.spawn(|| served.stop());
        drop(held);
        assert_eq!((client.reply().cookie, client.is_closed()), (cookie, true));
        stopped.join().unwrap();
    });
}

#[test]
fn a_failed_flush_is_told_and_nobody_writes_after_it() {
    let faults = Faults::none();
    let factory = faults.clone();
    let engine = Arc::new(move |arena, entries| factory.open(arena, entries));
    let served = Served::new("raw", BYTES, Options { engine, ..options() });
    let (mut one, mut two) = (served.client(), served.client());
    one.write(0, &[1; 512]);
    faults.once(Kind::Sync, Fault::Errno(5));
    assert_eq!(one.call(command::WRITE, 1, 0, 512, &[2; 512]).error, 5);
    for client in [&mut one, &mut two] {
        assert_eq!(client.call(command::FLUSH, 0, 0, 0, &[]).error, 5);
        assert_eq!(client.call(command::WRITE, 0, 0, 512, &[3; 512]).error, 5);
        assert_eq!(client.call(command::TRIM, 0, 0, 512, &[]).error, 5);
        assert_eq!(client.read(0, 512), [2; 512]);
    }
}

#[test]
fn storage_that_fails_is_an_error_of_that_request_and_not_of_its_neighbours() {
    let faults = Faults::none();
    let factory = faults.clone();
    let engine = Arc::new(move |arena, entries| factory.open(arena, entries));
    let served = Served::new("raw", BYTES, Options { engine, ..options() });
    for structured in [true, false] {
        let mut client = served.connect();
        client.go(structured);
        client.write(0, &vec![4; 8 << 20]);
        faults.set([
            Ops::from(Kind::Write).at(MIB).fail(28),
            Ops::from(Kind::Read).touching(3 * MIB..3 * MIB + 1).fail(5),
        ]);
        assert_eq!(client.call(command::WRITE, 0, MIB, 4096, &[5; 4096]).error, 28);
        assert_eq!(client.call(command::WRITE, 0, 0, 3 << 20, &vec![5; 3 << 20]).error, 28);
        assert_eq!(client.call(command::READ, 0, 3 * MIB, 512, &[]).error, 5);
        client.write(0, &[6; 512]);
        assert_eq!(client.read(0, 512), [6; 512]);
        let long = client.send(command::READ, 0, 2 * MIB, 4 << 20, &[]);
        if structured {
            let reply = client.reply();
            assert_eq!((reply.cookie, reply.error), (long, 5));
            client.flush();
        } else {
            // Its head has promised the data, so only the end of the stream can report the failure.
            let mut all = Vec::new();
            let _ = client.stream.read_to_end(&mut all);
            assert!(all.len() < (4 << 20), "{} bytes", all.len());
        }
        faults.clear();
    }
}

#[test]
fn what_was_answered_is_on_the_medium_soon_after_the_last_client_has_gone() {
    for format in images::FORMATS {
        let served = Served::new(format, BYTES, options());
        let mut client = served.client();
        client.write(0, &[1; 4096]);
        let is_dirty = || served.device.disk().unwrap().is_dirty();
        assert!(is_dirty(), "{format}");
        drop(client);
        wait_until("the table is written", || !is_dirty());
    }
}

/// Writes of parts of a block, by independent clients.
#[test]
fn sectors_of_a_device_with_larger_blocks_are_written_one_by_one() {
    let dir = dir_on_disk();
    let path = ferrite_testkit::places::image(&dir, BYTES);
    let Some(device) = Loop::attach(&path, 4096) else { return };
    let disk = Disk::open(&device.0, &OpenOptions::default()).unwrap();
    let served = Served::of(dir, Arc::new(Device::new(disk, SystemClock::shared())), options());
    let write = |index: u64| {
        let mut client = served.client();
        move || {
            for sector in (index..256).step_by(2) {
                client.write(sector * 512, &[sector as u8; 512]);
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(write(0));
        scope.spawn(write(1));
    });
    let mut client = served.client();
    let read = client.read(512, 255 * 512);
    assert!(
        read.chunks(512).enumerate().all(|(n, sector)| sector.iter().all(|b| *b == n as u8 + 1))
    );
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 512, 64 << 10, &[]).error, 0);
    assert_eq!(client.read(0, 1024), [0; 1024]);
    assert_eq!(client.read((64 << 10) + 512, 512), [129; 512]);
    drop(client);
    drop(served);
}

/// nbdcopy and qemu-img convert zero the rest of a disk that they copy to.
#[test]
fn zeros_that_may_be_holes_leave_a_thin_disk_thin() {
    const NO_HOLE: u16 = 1 << 1;
    let space = |path: &Path| std::fs::metadata(path).unwrap().blocks() * 512;
    for (format, keeps_all) in [("raw", false), ("vhd", false), ("qcow2", false), ("raw", true)] {
        let served = Served::new(format, BYTES, Options { keeps_all, ..options() });
        let path = served.device.disk().unwrap().media()[0].path().to_owned();
        let mut client = served.client();
        client.write(MIB, &[7; MIB as usize]);
        let zero = |client: &mut Client, flags| {
            assert_eq!(client.call(command::WRITE_ZEROES, flags, 0, BYTES as u32, &[]).error, 0);
            client.flush();
            assert!(client.read(MIB, MIB as u32).iter().all(|byte| *byte == 0));
        };
        zero(&mut client, 0);
        let thin = space(&path);
        if keeps_all {
            assert!(thin >= BYTES, "{format}: {thin}");
            continue;
        }
        // An image has set space aside for what comes next.
        let most = if format == "raw" { MIB } else { 40 * MIB };
        assert!(thin < most, "{format}: {thin}");
        zero(&mut client, NO_HOLE);
        assert!(space(&path) >= BYTES, "{format}: {} bytes", space(&path));
    }
}
