//! Attacks of guests and through xenstore on a daemon, its keepers and its workers (threats.md). An attacker loses only
//! its own disk, and other guests are served.

mod host;
mod load;
mod roles;

use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use ferrite_daemon::control::client;
use ferrite_daemon::control::protocol::Disks;
use ferrite_daemon::keepers::Keepers;
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_host::shares::Shares;
use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::trace;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::restless::Restless;
use ferrite_testkit::storm::Storm;
use ferrite_testkit::{PATIENCE, Pace, images, proc, scale, wait_until};
use ferrite_xen::hypervisor::DomId;
use host::{A_WHILE, Host, works};
use load::Load;
use roles::{MAPS, MIB, Roles, attach, end, keeper, kill, kill_keeper, kill_pid, worker};
use serde_json::json;

/// Pages of the largest request of a usual guest.
const PAGES: usize = 32;

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

/// A value in KiB from a process's status.
fn status_kib(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn descriptors(daemon: &Child) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().count()
}

/// The clock ticks that a process has used.
fn ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// An action that is repeated in a loop during the test.
struct Beside<T> {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Beside<T> {
    fn start(mut what: T, mut act: impl FnMut(&mut T) + Send + 'static) -> Beside<T> {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (end, count) = (stop.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                act(&mut what);
                count.fetch_add(1, Ordering::Relaxed);
            }
            what
        });
        Beside { stop, done, thread }
    }

    /// Stops. Returns how often the action ran, and its value.
    fn end(self) -> (u64, T) {
        self.stop.store(true, Ordering::Relaxed);
        let what = self.thread.join().unwrap();
        (self.done.load(Ordering::Relaxed), what)
    }
}

/// threats.md T3.
#[test]
fn a_guest_that_floods_xenstore_takes_no_memory_of_the_daemon_and_holds_no_other_disk_up() {
    const MOST_KIB: u64 = 4 << 10;
    let host = Host::new(3);
    let daemon = host.spawn(None);
    let disks = [attach(&host, 1), attach(&host, 2)];
    let front = host.connect(&disks[0]);
    let load = Load::start(&host, &disks[1]);
    let before_kib = status_kib(daemon.id(), "VmRSS");
    let huge = vec![b'4'; 2000];
    let flood = Beside::start(front, move |front: &mut Frontend| {
        front.set_state(4).unwrap();
        front.write_key("state-of-mind", &huge).unwrap();
    });
    for _ in 0..5 * scale() {
        load.wait_for_progress();
        // Another disk is attached, used and detached.
        let disk = attach(&host, 3);
        let space = host.machine().guest(disk.domid).unwrap();
        let mut front = Frontend::new(space, disk.devid).unwrap();
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        works(&mut front, 7);
        front.close(PATIENCE).unwrap();
        host.detach(&disk);
        wait_until("the end of it", || host.disks().len() == 2);
    }
    let (written, mut front) = flood.end();
    let taken_kib = status_kib(daemon.id(), "VmHWM").saturating_sub(before_kib);
    println!("{written} floods, {taken_kib} KiB of memory");
    assert!(written > 1000, "{written}: this was no flood");
    assert!(taken_kib < MOST_KIB, "{taken_kib} KiB");
    works(&mut front, 1);
    front.close(PATIENCE).unwrap();
    load.end();
    end(&host, &disks, &[]);
    kill(daemon);
}

/// Reads the state and the traces of the disk in a loop.
fn look(host: &Host, disk: &DiskPaths) -> Beside<u64> {
    let control = host.paths().control();
    let run_dir = host.paths().run.join(host::id(disk).file_name());
    let asked = json!({ "disk": host::id(disk) });
    let mut pace = Pace::default();
    Beside::start(0, move |read: &mut u64| {
        let listed: Disks = client::call(&control, "disk.list", &json!({}), PATIENCE).unwrap();
        assert!(listed.disks.len() <= 2);
        // The disk may be detached for a while.
        let _ = client::call::<serde_json::Value>(&control, "disk.show", &asked, PATIENCE);
        for queue in 0..4 {
            if let Ok(records) = trace::read::read(&run_dir.join(format!("trace-{queue}"))) {
                *read += 1;
                assert!(records.iter().all(|record| record.bytes <= 1 << 20));
            }
        }
        pace.after_request();
    })
}

/// threats.md T4.
#[test]
fn a_restless_guest_is_served_or_unplugged_as_it_ends_and_nothing_is_left_of_it() {
    // The guest loses rings that it drops while their grants are in use.
    let options = GuestOptions { frames: 96 << 10, grants: 128 << 10, ports: 64 };
    let host = Host::with_guests(2, options);
    let daemon = host.spawn(None);
    wait_until("the daemon's connection", || host.status().is_ok_and(|status| status.xen));
    let before = descriptors(&daemon);
    let (mut disk, quiet) = (attach(&host, 1), attach(&host, 2));
    let load = Load::start(&host, &quiet);
    let mut guest = Restless::new(host.frontend(&disk), 31);
    guest.reconnect();
    let served = descriptors(&daemon);
    let mut traces = 0;
    for round in 0..6 * u64::from(scale()) {
        let looks = look(&host, &disk);
        (0..200).for_each(|_| guest.act());
        if round % 3 == 2 {
            host.machine().unplug(&disk).unwrap();
            (0..200).for_each(|_| guest.act());
            // The ways in which a guest ends after the toolstack's request.
            match round % 2 {
                0 => guest.front.set_state(6).unwrap(),
                _ => guest.front.remove_key("state").unwrap(),
            }
            host.wait_for_state(&disk, 6);
            host.machine().remove_disk(&disk).unwrap();
            wait_until("the end of the disk", || host.disks().len() == 1);
            assert_eq!(guest.front.space().memory().bound_ports(), 0);
            guest.front.queues.clear();
            disk = attach(&host, 1);
        }
        guest.reconnect();
        load.wait_for_progress();
        traces += looks.end().1;
        wait_until("the daemon's descriptors back", || descriptors(&daemon) <= served);
    }
    assert!(traces > 0, "no trace was read");
    load.end();
    end(&host, &[disk, quiet], &[]);
    wait_until("all descriptors back", || descriptors(&daemon) <= before);
    kill(daemon);
}

/// threats.md T8.
#[test]
fn a_storm_of_events_costs_a_worker_little_and_disturbs_no_other_disk() {
    let host = Host::new(2);
    let daemon = host.spawn(None);
    let disks = [attach(&host, 1), attach(&host, 2)];
    let mut front = host.connect(&disks[0]);
    works(&mut front, 1);
    let load = Load::start(&host, &disks[1]);
    let worker = worker(keeper(&host, &disks[0])).unwrap();
    let storm = Storm::new(front.space(), 1);
    let before = ticks(worker);
    storm.rage(&front.queues);
    let sent_for = || proc::threads_named("storm").iter().filter_map(|id| proc::ticks(id)).max();
    // The load runs for a second.
    while sent_for() < Some(100) {
        load.wait_for_progress();
    }
    let (used, raged) = (ticks(worker) - before, sent_for().unwrap());
    println!("{used} ticks of the worker beside {raged} of the storm");
    assert!(used * 4 < raged, "{used} ticks of the worker beside {raged} of the storm");
    works(&mut front, 2);
    storm.end();
    front.close(PATIENCE).unwrap();
    load.end();
    end(&host, &disks, &[]);
    kill(daemon);
}

/// threats.md T9.
#[test]
fn guests_that_want_all_mappings_of_the_host_share_what_it_gives_and_leave_nothing_of_it() {
    // Pages of guests, in claims of 32.
    const OF_HOST: u32 = 320;
    let host = Host::new(3);
    let maps = format!("{OF_HOST}/256");
    let daemon = host.spawn_with(None, &[("FERRITE_TEST_MOVER", "map"), (MAPS, &maps)]);
    let disks: Vec<DiskPaths> = (1..=3).map(|domid| attach(&host, domid)).collect();
    let windows = FrontOptions { queues: 4, ..FrontOptions::windows() };
    let mut fronts: Vec<Frontend> = disks.iter().map(|disk| host.frontend(disk)).collect();
    fronts.iter_mut().for_each(|front| front.connect(&windows, PATIENCE).unwrap());
    for round in 0..2 {
        for (disk, front) in fronts.iter_mut().enumerate() {
            let buffer = front.space().buffer(256).unwrap();
            for (q, queue) in front.queues.iter_mut().enumerate() {
                let byte = (1 + round + 2 * (4 * disk + q)) as u8;
                buffer.fill(0, buffer.len(), byte);
                queue.write(q as u64 * 2048, &buffer, 0, buffer.len()).unwrap();
                assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                buffer.fill(0, buffer.len(), 0);
                queue.read(q as u64 * 2048, &buffer, 0, buffer.len()).unwrap();
                assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                assert!(are_all(&buffer.to_vec(0, buffer.len()), byte));
            }
        }
        // The guests together have all mappings of the host.
        assert_eq!(free_shares(&host, OF_HOST), 0);
    }
    for front in &mut fronts {
        front.close(PATIENCE).unwrap();
        assert_eq!(front.space().memory().grants().users(), 0);
    }
    wait_until("all given back", || free_shares(&host, OF_HOST) == OF_HOST / 32);
    end(&host, &disks, &[]);
    kill(daemon);
}

/// The claims on mappings that are free.
fn free_shares(host: &Host, of_host: u32) -> u32 {
    let shares = Shares::open(&host.paths().run.join("map-budget"), of_host / 32).unwrap();
    let mut own = Vec::new();
    while let Some(unit) = shares.claim(&own) {
        own.push(unit);
    }
    own.iter().for_each(|unit| shares.release(*unit).unwrap());
    own.len() as u32
}

/// threats.md T12: a guest has ended without closing, and another one has its number and its device's.
#[test]
fn a_number_that_another_guest_gets_leads_to_that_guests_image_and_not_to_the_old_ones() {
    for is_kept in [true, false] {
        let host = Host::new(2);
        let quiet = attach(&host, 2);
        let old = attach(&host, 1);
        let daemon = host.spawn(None);
        let mut front = host.connect(&old);
        works(&mut front, 0xA1);
        let old_keeper = keeper(&host, &old);
        let load = Load::start(&host, &quiet);
        kill(daemon);
        let image = host.image("1.img");
        let data = std::fs::read(&image).unwrap();
        if !is_kept {
            kill_keeper(old_keeper);
        }
        front.queues.drain(..).for_each(|queue| queue.abandon());
        drop(front);
        host.machine().destroy(DomId(1)).unwrap();
        host.machine().add_guest_numbered(DomId(1), GuestOptions::default()).unwrap();
        let other = host.make_image("other.img", 4 * MIB);
        let new = host.attach(1, 0, &format!("aio:{}", other.display()));
        let daemon = host.spawn(None);
        let mut front = host.connect(&new);
        let buffer = front.space().buffer(1).unwrap();
        buffer.fill(0, 4096, 0x55);
        front.queues[0].read(8, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        assert!(are_all(&buffer.to_vec(0, 4096), 0), "the old guest's data");
        works(&mut front, 0xB2);
        assert!(!is_kept || !roles::is_alive(old_keeper));
        assert!(std::fs::read(&image).unwrap() == data, "the old guest's image has changed");
        front.close(PATIENCE).unwrap();
        load.end();
        end(&host, &[new, quiet], &[old_keeper]);
        kill(daemon);
    }
}

/// threats.md T12.
#[test]
fn events_of_xenstore_that_mean_nothing_and_silence_of_it_change_nothing_for_a_guest() {
    let host = Host::new(3);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let load = Load::start(&host, &disk);
    let kept = keeper(&host, &disk);
    let params = host.store().read(&format!("{}/params", disk.backend)).unwrap().unwrap();
    for round in 0..10 {
        let write = |key: &str, value: &[u8]| {
            host.store().write(&format!("{}/{key}", disk.backend), value).unwrap();
        };
        write("note", b"1");
        write("online", b"1");
        write("state", b"4");
        write("params", &params);
        if round == 3 {
            // A domain is released: the event does not say which.
            host.machine().destroy(DomId(3)).unwrap();
        }
        load.wait_for_progress();
    }
    host.silence_store(true);
    std::thread::sleep(A_WHILE);
    for _ in 0..20 {
        load.wait_for_progress();
    }
    // Requests that need no xenstore are answered meanwhile.
    assert_eq!(host.disks().len(), 1);
    host.silence_store(false);
    let second = attach(&host, 2);
    let mut front = host.connect(&second);
    works(&mut front, 2);
    front.close(PATIENCE).unwrap();
    let listed = host.disks();
    assert_eq!((listed[0].starts, keeper(&host, &disk)), (1, kept), "{listed:?}");
    load.end();
    end(&host, &[disk, second], &[kept]);
    kill(daemon);
}

/// threats.md T18. A raw image is truncated, and three quarters of a qcow2 image were never written.
#[test]
fn guests_whose_storage_fails_see_nothing_of_each_other() {
    const CUT: u64 = 512 << 10;
    let host = Host::new(2);
    let daemon = host.spawn(None);
    let qcow2 = images::make(&host.image("."), "qcow2", 4 * MIB);
    let disks = [attach(&host, 1), host.attach(2, 0, &format!("qcow2:{}", qcow2.display()))];
    let mut fronts = disks.each_ref().map(|disk| host.connect(disk));
    let guests = [(0xA1u8, CUT), (0xB2, MIB)];
    for (front, (byte, _)) in fronts.iter_mut().zip(guests) {
        fill(front, byte);
    }
    let image = std::fs::File::options().write(true).open(host.image("1.img")).unwrap();
    image.set_len(CUT).unwrap();
    let mut random = SplitMix64::new(41);
    let mut failed = 0;
    for _ in 0..200 * scale() {
        for (front, (own, filled)) in fronts.iter_mut().zip(guests) {
            let buffer = front.space().buffer(PAGES).unwrap();
            buffer.fill(0, buffer.len(), !own);
            let len = 512 * (1 + random.below(256)) as usize;
            let at = 512 * random.below((2 * MIB - len as u64) / 512);
            let bad = (random.below(4) == 0).then(|| random.below(len.div_ceil(4096) as u64));
            if let Some(page) = bad {
                buffer.revoke(page as usize).unwrap();
            }
            let queue = &mut front.queues[0];
            queue.read(at / 512, &buffer, 0, len).unwrap();
            let is_ok = queue.next_reply(PATIENCE).unwrap().is_ok();
            assert!(!is_ok || bad.is_none());
            failed += u32::from(!is_ok);
            let data = buffer.to_vec(0, buffer.len());
            let is_its = |part: &[u8]| [own, !own, 0].into_iter().any(|byte| are_all(part, byte));
            assert!(data.chunks(512).all(is_its), "a byte is another's");
            let is_right =
                |(i, part): (u64, &[u8])| are_all(part, own * u8::from(at + i * 512 < filled));
            assert!(!is_ok || (0..).zip(data[..len].chunks(512)).all(is_right), "at byte {at}");
        }
    }
    assert!(failed > 20, "{failed} requests have failed");
    fronts.into_iter().for_each(|mut front| front.close(PATIENCE).unwrap());
    end(&host, &disks, &[]);
    kill(daemon);
}

/// Writes the first MiB of the disk.
fn fill(front: &mut Frontend, byte: u8) {
    let buffer = front.space().buffer(PAGES).unwrap();
    buffer.fill(0, buffer.len(), byte);
    for sector in (0..MIB / 512).step_by(PAGES * 8) {
        front.queues[0].write(sector, &buffer, 0, buffer.len()).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    }
}

/// threats.md T19.
#[test]
fn what_was_flushed_is_in_the_image_and_what_was_answered_is_there_when_all_are_killed() {
    for format in ["raw", "vhd", "qcow2"] {
        let host = Host::new(1);
        let mut daemon = host.spawn(None);
        let folder = host.image(format);
        std::fs::create_dir(&folder).unwrap();
        let (image, params) = make(&host, format, &folder);
        let disk = host.attach(1, 0, &params);
        let mut front = host.connect(&disk);
        let mut random = SplitMix64::new(51);
        let mut model = vec![0u8; 4 << 20];
        for round in 1..=3 * scale() as u8 {
            write_some(&mut front, &mut random, &mut model, round);
            front.queues[0].flush().unwrap();
            assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
            let flushed = model.clone();
            let pid = keeper(&host, &disk);
            // The files of a host without the journal and the processes. Nothing else was written
            // after the flush.
            let copy = folder.join(format!("copy.{}", image.extension().unwrap().display()));
            std::fs::copy(&image, &copy).unwrap();
            assert!(images::contents(&copy) == flushed, "{format}, round {round}");
            write_some(&mut front, &mut random, &mut model, round | 0x80);
            match round % 3 {
                0 => kill_pid(worker(pid).unwrap()),
                1 => kill_keeper(pid),
                _ => {
                    kill(daemon);
                    kill_keeper(pid);
                    daemon = host.spawn(None);
                }
            }
            read_all(&mut front, &model, format);
        }
        front.close(PATIENCE).unwrap();
        end(&host, std::slice::from_ref(&disk), &[]);
        assert!(images::contents(&image) == model, "{format}");
        kill(daemon);
    }
}

/// Creates an image of 4 MiB. Returns its path and the toolstack's `params`.
fn make(host: &Host, format: &str, folder: &std::path::Path) -> (PathBuf, String) {
    match format {
        "raw" => {
            let image = host.make_image("raw/a.img", 4 * MIB);
            let params = format!("aio:{}", image.display());
            (image, params)
        }
        format => {
            let image = images::make(folder, format, 4 * MIB);
            let params = format!("{format}:{}", image.display());
            (image, params)
        }
    }
}

/// Writes to random places, several at a time.
fn write_some(front: &mut Frontend, random: &mut SplitMix64, model: &mut [u8], byte: u8) {
    let buffer = front.space().buffer(4).unwrap();
    buffer.fill(0, buffer.len(), byte);
    for _ in 0..20 {
        let queue = &mut front.queues[0];
        for i in 0..8 {
            // The eight requests do not overlap, so their order does not matter.
            let sector = i * 1024 + random.below(1000);
            let len = 512 * (1 + random.below(24)) as usize;
            queue.write(sector, &buffer, 0, len).unwrap();
            model[sector as usize * 512..][..len].fill(byte);
        }
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    }
}

fn read_all(front: &mut Frontend, model: &[u8], what: &str) {
    let buffer = front.space().buffer(PAGES).unwrap();
    for (i, expected) in model.chunks(PAGES * 4096).enumerate() {
        front.queues[0].read((i * PAGES * 8) as u64, &buffer, 0, expected.len()).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        assert!(buffer.to_vec(0, expected.len()) == expected, "{what}: part {i}");
    }
}
