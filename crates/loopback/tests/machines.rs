//! Whole machines: a store, guests, frontends and a backend, as threads and as processes.

mod mini;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_loopback::front::{
    FrontError, FrontOptions, FrontQueue, Frontend, GuestSpace, RingKeys,
};
use ferrite_loopback::machine::{Disk, DiskPaths};
use ferrite_loopback::{
    BackendHandle, CopyWith, GuestHandle, GuestOptions, Loopback, LoopbackError, Machine,
};
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use ferrite_xen::store::Store;
use mini::{DISK_BYTES, Mini};

const LONG: Duration = Duration::from_secs(10);
const PAGE: usize = 4096;
const BOTH: [CopyWith; 2] = [CopyWith::Memcpy, CopyWith::ProcessVm];
const SMALL: GuestOptions = GuestOptions { frames: 4096, grants: 8192, ports: 8 };

fn machine() -> (Machine, DiskPaths) {
    let mut machine = Machine::new().unwrap();
    let domid = machine.add_guest(SMALL).unwrap();
    let disk = machine.attach_disk(domid, Disk::xvd(0)).unwrap();
    (machine, disk)
}

/// Serves the disk from a thread until it is unplugged.
fn serve(machine: &Machine, disk: &DiskPaths, with: CopyWith) -> std::thread::JoinHandle<()> {
    let loopback = machine.loopback(with).unwrap();
    let backend = Mini::new(machine.store().unwrap(), disk.clone());
    std::thread::spawn(move || backend.serve(&loopback))
}

/// Every fourth byte says where it belongs.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| if i % 4 == 0 { (i >> 9) as u8 ^ seed } else { (i * 7) as u8 }).collect()
}

/// Writes and reads back transfers of several sizes, to and from each queue.
fn exercise(front: &mut Frontend) {
    let buffer = front.space().buffer(64).unwrap();
    let back = front.space().buffer(64).unwrap();
    let sizes = [512, 3 * 512, PAGE, 11 * PAGE, 12 * PAGE, 31 * PAGE];
    for (q, queue) in front.queues.iter_mut().enumerate() {
        for (i, len) in sizes.into_iter().enumerate() {
            let bytes = pattern((q * 16 + i) as u8, len);
            let sector = (q * 512 + i) as u64;
            buffer.write(1024, &bytes);
            back.fill(0, back.len(), 0xEE);
            queue.write(sector, &buffer, 1024, len).unwrap();
            assert!(queue.next_reply(LONG).unwrap().is_ok());
            queue.read(sector, &back, 512, len).unwrap();
            assert!(queue.next_reply(LONG).unwrap().is_ok());
            assert_eq!(back.to_vec(512, len), bytes, "queue {q}, {len} bytes");
            assert_eq!(back.to_vec(0, 512), [0xEE; 512], "bytes before the segments");
            assert_eq!(back.to_vec(512 + len, 512), [0xEE; 512], "bytes after them");
        }
        queue.flush().unwrap();
        assert!(queue.next_reply(LONG).unwrap().is_ok());
    }
}

fn shapes() -> Vec<FrontOptions> {
    let linux = FrontOptions { max_indirect: 64, ..FrontOptions::default() };
    vec![
        linux,
        FrontOptions { queues: 2, order: 1, regrant: true, ..linux },
        FrontOptions { queues: 4, order: 4, ..linux },
        FrontOptions { protocol_key: false, max_indirect: 64, ..FrontOptions::x86_32() },
        FrontOptions { ring_keys: RingKeys::AlwaysOrder, ..linux },
        FrontOptions { ring_keys: RingKeys::NumRingPages, order: 2, ..linux },
        FrontOptions { ring_keys: RingKeys::Both, order: 3, regrant: true, ..linux },
        FrontOptions::windows(),
    ]
}

#[test]
fn frontends_of_every_shape_connect_one_after_the_other() {
    for with in BOTH {
        let (mut machine, disk) = machine();
        let backend = serve(&machine, &disk, with);
        let mut front = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
        let before = front.space().free_counts();
        for options in shapes() {
            front.connect(&options, LONG).unwrap();
            assert_eq!(front.features().sectors, DISK_BYTES as u64 / 512);
            exercise(&mut front);
            front.close(LONG).unwrap();
            assert_eq!(front.space().memory().grants().users(), 0, "{options:?}");
            assert_eq!(front.space().memory().bound_ports(), 0, "{options:?}");
            assert_eq!(front.space().free_counts(), before, "{options:?}");
        }
        machine.unplug(&disk).unwrap();
        backend.join().unwrap();
        machine.remove_disk(&disk).unwrap();
    }
}

#[test]
fn a_guest_that_starts_another_kernel_connects_without_having_closed() {
    let (mut machine, disk) = machine();
    let backend = serve(&machine, &disk, CopyWith::Memcpy);
    let mut first = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
    first.connect(&FrontOptions::default(), LONG).unwrap();
    exercise(&mut first);
    first.queues.drain(..).for_each(FrontQueue::abandon);
    drop(first);
    let mut second = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
    second.connect(&FrontOptions { queues: 2, ..FrontOptions::x86_32() }, LONG).unwrap();
    exercise(&mut second);
    second.close(LONG).unwrap();
    machine.unplug(&disk).unwrap();
    backend.join().unwrap();
}

#[test]
fn a_hostile_frontend_can_publish_anything_in_place_of_its_keys() {
    let (machine, disk) = machine();
    let mut store = machine.store().unwrap();
    store.write(&format!("{}/state", disk.backend), b"2").unwrap();
    let mut front = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
    let options = FrontOptions { queues: 2, order: 2, exceed_offer: true, ..Default::default() };
    front
        .offer_edited(&options, |keys| {
            assert_eq!(keys.get("ring-page-order"), Some("2"));
            assert!(keys.get("queue-1/ring-ref3").is_some());
            keys.set("ring-page-order", "4294967297");
            keys.set_bytes("queue-0/event-channel", b"1\0");
            keys.remove("queue-1/ring-ref3");
        })
        .unwrap();
    let mut key = |name: &str| store.read(&format!("{}/{name}", disk.frontend)).unwrap();
    assert_eq!(key("ring-page-order"), Some(b"4294967297".to_vec()));
    assert_eq!(key("queue-0/event-channel"), Some(b"1\0".to_vec()));
    assert_eq!(key("queue-1/ring-ref3"), None);
    assert!(key("queue-1/ring-ref2").is_some());
    assert_eq!(key("state"), Some(b"3".to_vec()));
    // The next connection leaves nothing of this one.
    front.offer(&FrontOptions::default()).unwrap();
    assert_eq!((key("ring-page-order"), key("queue-0/event-channel")), (None, None));
    assert!(key("ring-ref").is_some() && key("queue-1").is_none());
}

#[test]
fn two_disks_of_one_guest_share_its_memory() {
    let (mut machine, a) = machine();
    let b = machine.attach_disk(a.domid, Disk::xvd(1)).unwrap();
    let backends = [&a, &b].map(|disk| serve(&machine, disk, CopyWith::Memcpy));
    let space = GuestSpace::attach(&machine.guest(a.domid).unwrap()).unwrap();
    let threads = [&a, &b].map(|disk| {
        let store = machine.guest_store(disk.domid).unwrap();
        let mut front = Frontend::on(space.clone(), store, disk.devid).unwrap();
        std::thread::spawn(move || {
            front.connect(&FrontOptions { queues: 2, ..FrontOptions::default() }, LONG).unwrap();
            exercise_queues_in_threads(&mut front);
            front.close(LONG).unwrap();
        })
    });
    threads.into_iter().for_each(|t| t.join().unwrap());
    for (disk, backend) in [&a, &b].into_iter().zip(backends) {
        machine.unplug(disk).unwrap();
        backend.join().unwrap();
    }
    assert_eq!(space.memory().grants().users(), 0);
}

/// Each queue in a thread of its own, with as much in flight as its ring takes.
fn exercise_queues_in_threads(front: &mut Frontend) {
    let space = front.space().clone();
    let queues = std::mem::take(&mut front.queues);
    let work = |(q, mut queue): (usize, FrontQueue)| {
        let space = space.clone();
        std::thread::spawn(move || {
            let n = queue.entries() as usize;
            let buffer = space.buffer(n).unwrap();
            for round in 0..20 {
                buffer.write(0, &pattern(round, n * PAGE));
                let sector = |i: usize| ((q * n + i) * 8) as u64;
                for i in 0..n {
                    queue.write(sector(i), &buffer, i * PAGE, PAGE).unwrap();
                }
                assert!(queue.drain(LONG).unwrap().iter().all(|r| r.is_ok()));
                buffer.fill(0, n * PAGE, 0);
                for i in 0..n {
                    queue.read(sector(i), &buffer, i * PAGE, PAGE).unwrap();
                }
                assert!(queue.drain(LONG).unwrap().iter().all(|r| r.is_ok()));
                assert_eq!(buffer.to_vec(0, n * PAGE), pattern(round, n * PAGE));
            }
            queue
        })
    };
    let threads: Vec<_> = queues.into_iter().enumerate().map(work).collect();
    front.queues = threads.into_iter().map(|t| t.join().unwrap()).collect();
}

// The following tests run this test program again as another process: a test that does nothing unless
// the environment names what it shall do.

const GUEST: &str = "FERRITE_TEST_GUEST";
const BACKEND: &str = "FERRITE_TEST_BACKEND";
const STALL_AT: &str = "FERRITE_TEST_STALL_AT";
/// The disk that process tests use.
const DEVID: u32 = 202 << 8;

fn this_program(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env_remove(GUEST).env_remove(BACKEND).stdin(Stdio::null());
    command
}

#[test]
fn process_frontend() {
    let Ok(guest) = std::env::var(GUEST) else { return };
    let mut front = Frontend::new(GuestHandle::from_arg(&guest).unwrap(), DEVID).unwrap();
    assert!(GuestHandle::from_arg(&guest).is_err(), "descriptors are taken once");
    let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
    front.connect(&options, LONG).unwrap();
    exercise(&mut front);
    exercise_queues_in_threads(&mut front);
    if std::env::var(STALL_AT).is_ok() {
        println!("connected");
        std::thread::sleep(LONG);
    }
    front.close(LONG).unwrap();
}

#[test]
fn process_backend() {
    let Ok(backend) = std::env::var(BACKEND) else { return };
    let handle = BackendHandle::from_arg(&backend).unwrap();
    let loopback = Loopback::new(CopyWith::ProcessVm);
    handle.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let mut mini = Mini::new(Store::from_fd(handle.store), DiskPaths::new(DomId(1), DEVID));
    mini.stall_at = std::env::var(STALL_AT).ok().map(|v| v.parse().unwrap());
    mini.serve(&loopback);
}

#[test]
fn a_frontend_in_a_process_of_its_own_is_served_with_either_copy() {
    for with in BOTH {
        let (mut machine, disk) = machine();
        let backend = serve(&machine, &disk, with);
        let mut command = this_program("process_frontend");
        let text = machine.guest(disk.domid).unwrap().pass_to(&mut command);
        let output = command.env(GUEST, text).output().unwrap();
        assert!(output.status.success(), "{with}: {}", String::from_utf8_lossy(&output.stdout));
        machine.unplug(&disk).unwrap();
        backend.join().unwrap();
        let memory = machine.guest(disk.domid).unwrap().map().unwrap();
        assert_eq!((memory.grants().users(), memory.bound_ports()), (0, 0));
    }
}

#[test]
fn a_frontend_process_that_is_killed_harms_nobody() {
    let (mut machine, disk) = machine();
    let backend = serve(&machine, &disk, CopyWith::ProcessVm);
    let mut command = this_program("process_frontend");
    let text = machine.guest(disk.domid).unwrap().pass_to(&mut command);
    let mut child =
        command.env(GUEST, text).env(STALL_AT, "").stdout(Stdio::piped()).spawn().unwrap();
    wait_for_line(&mut child, "connected");
    child.kill().unwrap();
    child.wait().unwrap();
    // Its rings are there still; the toolstack ends the disk.
    machine.destroy(disk.domid).unwrap();
    machine.unplug(&disk).unwrap();
    backend.join().unwrap();
}

fn wait_for_line(child: &mut std::process::Child, line: &str) {
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let found = stdout.lines().map_while(Result::ok).any(|l| l.contains(line));
    assert!(found, "the child ended without saying {line:?}");
}

fn spawn_backend(machine: &Machine, stall_at: Option<u64>) -> std::process::Child {
    let mut command = this_program("process_backend");
    let text = machine.backend().unwrap().pass_to(&mut command);
    if let Some(sector) = stall_at {
        command.env(STALL_AT, sector.to_string());
    }
    command.env(BACKEND, text).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_backend_process_that_is_killed_can_be_followed_by_another() {
    const SECTOR: u64 = 800;
    let (mut machine, disk) = machine();
    assert_eq!((disk.domid, disk.devid), (DomId(1), DEVID));
    let mut first = spawn_backend(&machine, Some(SECTOR));
    let mut front = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
    front.connect(&FrontOptions::default(), LONG).unwrap();

    let buffer = front.space().buffer(1).unwrap();
    let bytes = pattern(9, PAGE);
    buffer.write(0, &bytes);
    front.queues[0].write(SECTOR, &buffer, 0, PAGE).unwrap();
    front.queues[0].push().unwrap();
    wait_for_line(&mut first, "stalled");
    assert!(matches!(machine.loopback(CopyWith::Memcpy), Err(LoopbackError::Busy { .. })));
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(front.space().memory().grants().users() > 0, "left over by the killed process");

    let mut second = spawn_backend(&machine, None);
    // It saw an event at once, found the request unanswered, and did it again.
    assert!(front.queues[0].next_reply(LONG).unwrap().is_ok());
    buffer.fill(0, PAGE, 0);
    front.queues[0].read(SECTOR, &buffer, 0, PAGE).unwrap();
    assert!(front.queues[0].next_reply(LONG).unwrap().is_ok());
    assert_eq!(buffer.to_vec(0, PAGE), bytes);
    exercise(&mut front);
    front.close(LONG).unwrap();
    assert_eq!(front.space().memory().grants().users(), 0);
    machine.unplug(&disk).unwrap();
    assert!(second.wait().unwrap().success());
}

#[test]
fn a_child_that_was_passed_nothing_inherits_nothing() {
    let (machine, disk) = machine();
    let guest = machine.guest(disk.domid).unwrap();
    // The text names descriptors of this process, but this command was not given them.
    let text = guest.share().pass_to(&mut Command::new("true"));
    let output = this_program("process_frontend").env(GUEST, text).output().unwrap();
    assert!(!output.status.success());
}

#[test]
fn a_frontend_says_what_it_waits_for() {
    let (machine, disk) = machine();
    let mut front = Frontend::new(machine.guest(disk.domid).unwrap(), disk.devid).unwrap();
    let outcome = front.connect(&FrontOptions::default(), Duration::from_millis(30));
    let Err(FrontError::Loopback(LoopbackError::Timeout { what, ms: 30 })) = outcome else {
        panic!("{outcome:?}")
    };
    assert!(what.contains(&disk.backend), "{what}");
    let missing = Frontend::new(machine.guest(disk.domid).unwrap(), 1);
    assert!(matches!(missing, Err(FrontError::Store(_))));
    let hypervisor: &dyn Hypervisor = &machine.loopback(CopyWith::Memcpy).unwrap();
    assert_eq!(hypervisor.name(), "loopback");
}
