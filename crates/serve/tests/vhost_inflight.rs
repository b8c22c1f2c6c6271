//! A server of vhost-user that is killed under its guest. The front end connects to the next one with the same memory, rings
//! and table of requests in flight: each request is answered once, and what was answered is on the disk.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ferrite_host::clock::{Random, SplitMix64, SystemClock};
use ferrite_serve::nbd::bind;
use ferrite_serve::path::device::Device;
use ferrite_serve::vhost;
use ferrite_serve::waker::Waker;
use ferrite_testkit::vhost::{Ask, Driver, FrontEnd, Guest, kind, message, options};
use ferrite_testkit::{images, places, processes, rounds};

const IMAGE: &str = "FERRITE_TEST_VHOST_IMAGE";
const SOCKET: &str = "FERRITE_TEST_VHOST_SOCKET";
const QUEUES: u16 = 2;
const ENTRIES: u16 = 64;
const BYTES: u64 = 64 << 20;
/// Bytes of a slot's part of the disk.
const CHUNK: usize = 256 << 10;

/// Not a test: the server.
#[test]
fn process_server() {
    let (Ok(image), Ok(socket)) = (std::env::var(IMAGE), std::env::var(SOCKET)) else { return };
    let disk = processes::open(Path::new(&image));
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let bound = bind(Path::new(&socket)).unwrap();
    vhost::serve(&device, &options(), &bound.listener, &Waker::new().unwrap()).unwrap();
}

/// A server that is killed when this is dropped.
struct Server(Child);

impl Server {
    fn start(image: &Path, socket: &Path) -> Server {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process_server", "--exact", "--nocapture"]).stdout(Stdio::null());
        Server(command.env(IMAGE, image).env(SOCKET, socket).spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a slot waits for: the byte that it writes, or that it has to read.
#[derive(Clone, Copy, PartialEq)]
enum Busy {
    No,
    Writes(u8),
    Reads,
    Flushes,
}

struct Slot {
    busy: Busy,
    holds: u8,
}

/// Connects with the table of before, as QEMU does it.
fn connect(
    socket: &Path,
    guest: &Guest,
    drivers: &[Driver],
    table: &(Vec<u8>, std::os::fd::OwnedFd),
) -> FrontEnd {
    let front = FrontEnd::connect(socket);
    front.agree(0);
    front.give(guest);
    assert!(front.order(message::SET_INFLIGHT_FD, &table.0, &[table.1.as_fd()]));
    for driver in drivers {
        assert!(front.start(driver, driver.used_index()));
    }
    front
}

fn story(format: &str, seed: u64, kills: u32) {
    let dir = places::dir_in_memory();
    let image = images::make(dir.path(), format, BYTES);
    let socket = dir.path().join("vhost.sock");
    let guest = Guest::new(Driver::memory_bytes(QUEUES, ENTRIES));
    let mut random = SplitMix64::new(seed);
    let mut server = Server::start(&image, &socket);
    let first = FrontEnd::connect(&socket);
    let features = first.agree(0);
    let table = first.new_inflight(QUEUES, ENTRIES);
    drop(first);
    let mut drivers: Vec<_> =
        (0..QUEUES).map(|number| Driver::new(&guest, number, ENTRIES, features)).collect();
    let mut front = connect(&socket, &guest, &drivers, &table);
    let slots = drivers[0].slots();
    let slot = || Slot { busy: Busy::No, holds: 0 };
    let mut all: Vec<Vec<_>> = (0..QUEUES).map(|_| (0..slots).map(|_| slot()).collect()).collect();
    let sector = |queue: usize, slot: usize| ((queue * slots + slot) * CHUNK / 512) as u64;
    for kill in 0..=kills {
        let last = kill == kills;
        let mut left = 20 + random.next_u64() % 200;
        while left > 0 {
            for (queue, driver) in drivers.iter_mut().enumerate() {
                driver.indirect = random.next_u64().is_multiple_of(2);
                for (index, slot) in all[queue].iter_mut().enumerate() {
                    if slot.busy != Busy::No {
                        continue;
                    }
                    let at = sector(queue, index);
                    let ask = match random.next_u64() % 8 {
                        0..4 => {
                            slot.busy = Busy::Writes(slot.holds.wrapping_add(1));
                            Ask::write(at, &vec![slot.holds.wrapping_add(1); CHUNK])
                        }
                        7 => {
                            slot.busy = Busy::Flushes;
                            Ask { kind: kind::FLUSH, ..Ask::flush() }
                        }
                        _ => {
                            slot.busy = Busy::Reads;
                            Ask::read(at, CHUNK)
                        }
                    };
                    let head = driver.prepare(index, &ask);
                    driver.offer(head);
                }
            }
            for (queue, driver) in drivers.iter_mut().enumerate() {
                check(driver, &mut all[queue]);
                left = left.saturating_sub(1);
            }
        }
        if !last {
            // It is killed in the middle of its work, and not at the end of the connection.
            drop(server);
            drop(front);
            server = Server::start(&image, &socket);
            front = connect(&socket, &guest, &drivers, &table);
        }
    }
    // All that is left is answered, and nothing else.
    for (queue, driver) in drivers.iter_mut().enumerate() {
        while all[queue].iter().any(|slot| slot.busy != Busy::No) {
            check(driver, &mut all[queue]);
        }
        assert_eq!(driver.next_used(), None);
        for (index, slot) in all[queue].iter().enumerate() {
            let (status, read) = driver.call(&Ask::read(sector(queue, index), CHUNK));
            assert!(status == 0 && read.iter().all(|byte| *byte == slot.holds));
        }
    }
    drop((front, server));
    images::check(&image);
}

/// Takes an answer off the queue, which is of a request that waits for one, and compares it.
fn check(driver: &mut Driver, slots: &mut [Slot]) {
    let (head, _) = driver.wait_used();
    let index = driver.slot_of(head);
    let slot = &mut slots[index];
    assert_eq!(driver.status(index), 0);
    match std::mem::replace(&mut slot.busy, Busy::No) {
        Busy::No => panic!("slot {index} is answered twice"),
        Busy::Writes(fill) => slot.holds = fill,
        Busy::Reads => {
            let read = driver.data(index, CHUNK);
            assert!(read.iter().all(|byte| *byte == slot.holds), "slot {index}");
        }
        Busy::Flushes => {}
    }
}

#[test]
fn a_killed_servers_requests_are_answered_once_by_the_next_one() {
    for (seed, format) in ["raw", "qcow2"].into_iter().enumerate() {
        story(format, seed as u64, rounds(25));
    }
}
