//! A guest and its stub domain have one disk at the same time: one worker with two lines
//! (attachments.md, "A stub domain and its guest").

mod register;

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::process::take_given;
use ferrite_io::engines::test_engine;
use ferrite_keeper::{ALIVE_FD, CLIENT_CHANNEL_FD, DiskSpec, Keeper, LINE_FD, SECOND_FD};
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_serve::blkif::inflight::Table;
use ferrite_serve::blkif::lifecycle::{
    Lines, Opened, Outcome, ServeError, follow, follow_second, part, retire, work,
};
use ferrite_serve::log_limit::LogLimits;
use ferrite_serve::waker::Waker;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::processes::{CHUNK, CHUNKS, Load, RUN_DIR, env, inherited, open};
use ferrite_testkit::rig::{follow_config, work_config};
use ferrite_testkit::{PATIENCE, images, wait_until};
use ferrite_xen::hypervisor::DomId;
use register::{Event, wrong};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process, set_child_subreaper};

const GUESTS: &str = "FERRITE_TEST_GUESTS";
const IMAGE: &str = "FERRITE_TEST_IMAGE";
/// An action that has not happened in this time is taken not to happen.
const A_WHILE: Duration = Duration::from_millis(200);

fn is_of_no_role() -> bool {
    std::env::var_os(GUESTS).is_none()
}

/// Not a test: a keeper, if this program was started again for it.
#[test]
fn keeper_process() {
    if is_of_no_role() {
        return;
    }
    let guests = inherited(SECOND_FD);
    let Err(e) = ferrite_keeper::run(&guests);
    eprintln!("{e}");
    std::process::exit(1);
}

/// Not a test: a worker.
#[test]
fn worker_process() {
    if is_of_no_role() {
        return;
    }
    let [line, alive, second, client_channel] =
        [LINE_FD, ALIVE_FD, SECOND_FD, CLIENT_CHANNEL_FD].map(|fd| take_given(fd).unwrap());
    let handle = BackendHandle::from_arg(&env(GUESTS)).unwrap();
    let loopback = Loopback::new(CopyWith::Memcpy);
    for guest in &handle.guests {
        // Until the memory of a killed worker is released.
        wait_until("the end of another worker", || loopback.add(guest).is_ok());
    }
    let alive = Arc::new(alive);
    let mut open = |_| {
        let is_last = || flock(&alive, FlockOperation::NonBlockingLockExclusive).is_ok();
        wait_until("the end of its operations", is_last);
        let (kind, alive) = (test_engine(), alive.clone());
        let engine = Arc::new(move |arena, entries| {
            let mut engine = kind.open(arena, entries)?;
            engine.hold(alive.as_fd())?;
            Ok(engine)
        });
        Ok(Opened { disk: open(env(IMAGE).as_ref()), engine })
    };
    let config = work_config(DomId(1), env(RUN_DIR).into());
    let lines = Lines { first: &line, second: &second };
    let _ = work(lines, &client_channel, &loopback, &config, &mut open);
}

/// A follower of one of the lines, as a disk's thread in the daemon.
struct Follower {
    stop: Arc<Waker>,
    thread: JoinHandle<Outcome>,
}

impl Follower {
    fn stop(self) -> Outcome {
        self.stop.wake();
        self.thread.join().unwrap()
    }
}

/// A disk with two attachments, and a keeper.
struct Host {
    machine: Machine,
    disks: [DiskPaths; 2],
    dir: tempfile::TempDir,
    image: PathBuf,
}

impl Host {
    fn new(format: &str) -> Host {
        set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let mut machine = Machine::new().unwrap();
        let disks = [(); 2].map(|()| {
            let domid = machine.add_guest(GuestOptions::default()).unwrap();
            machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap()
        });
        let dir = dir_in_memory();
        let image = images::make(dir.path(), format, CHUNKS * CHUNK);
        let host = Host { machine, disks, dir, image };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "keeper_process", "--nocapture", "--test-threads=1"]);
        let guests = host.machine.backend().unwrap().pass_to(&mut command);
        command.env(GUESTS, guests).env(IMAGE, &host.image).env(RUN_DIR, host.run_dir());
        let worker = ["--exact", "worker_process", "--nocapture", "--test-threads=1"];
        let spec = DiskSpec {
            worker: worker.map(str::to_owned).to_vec(),
            ..DiskSpec::idle(host.socket(), host.run_dir(), None)
        };
        spec.start(command).unwrap();
        host
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("keeper.sock")
    }

    fn keeper(&self) -> Keeper {
        Keeper::connect(&self.socket()).unwrap()
    }

    /// The number of the guest's follower is 0, of its stub domain's 1.
    fn follow(&self, which: usize) -> Follower {
        let mut store = self.machine.store().unwrap();
        let config = follow_config(&self.disks[which]);
        let stop = Arc::new(Waker::new().unwrap());
        let (asked, socket) = (stop.clone(), self.socket());
        let thread = spawn(move || {
            let log_limits = LogLimits::default();
            let mut lost = None;
            loop {
                let keeper = Keeper::connect(&socket).unwrap();
                let (store, config) = (&mut store, &config);
                let followed = if which == 0 {
                    let line = keeper.line(lost).unwrap();
                    lost = Some(line.start);
                    follow(store, line.fd.as_fd(), config, &log_limits, &asked)
                } else {
                    let line = keeper.second_line().unwrap();
                    follow_second(store, line.fd.as_fd(), config, &log_limits, &asked, || ())
                };
                match followed {
                    Ok(outcome) => return outcome,
                    Err(ServeError::WorkerLost(_)) => {}
                    Err(ServeError::TakeOver(_)) => return Outcome::Stopped,
                    Err(e) => panic!("{e}"),
                }
            }
        });
        Follower { stop, thread }
    }

    fn connect(&self, which: usize, options: &FrontOptions) -> Frontend {
        let disk = &self.disks[which];
        let guest = self.machine.guest(disk.domid).unwrap();
        let mut front = Frontend::new(guest, disk.devid).unwrap();
        front.connect(options, PATIENCE).unwrap();
        front
    }

    fn worker(&self) -> Pid {
        let keeper = self.keeper().line(None).unwrap().keeper;
        let mut worker = None;
        wait_until("a worker", || {
            worker = children(keeper).first().copied();
            worker.is_some()
        });
        Pid::from_raw(worker.unwrap()).unwrap()
    }

    fn kill_worker(&self) {
        self.kill_worker_when(|| true);
    }

    /// Kills it in a state that fulfils this condition: it is stopped while that is checked.
    fn kill_worker_when(&self, is_so: impl Fn() -> bool) {
        let worker = self.worker();
        wait_until("such a moment", || {
            kill_process(worker, Signal::STOP).unwrap();
            // Its threads run for another moment.
            wait_until("its stop", || is_stopped(worker));
            let is_so = is_so();
            kill_process(worker, if is_so { Signal::KILL } else { Signal::CONT }).unwrap();
            is_so
        });
        let worker = format!("/proc/{}", worker.as_raw_nonzero());
        wait_until("its end", || !Path::new(&worker).exists());
    }

    /// Keeps requests of a guest in flight for as long as the result lives.
    fn keep_busy(&self, which: usize) -> Sharing {
        let front = self.connect(which, &FrontOptions::default());
        share_on(self, which, front, &Arc::default(), &Arc::default())
    }

    /// The disk is detached from both, and nothing is left.
    fn end(mut self, fronts: [Option<Frontend>; 2], followers: [Option<Follower>; 2]) {
        for (which, (front, follower)) in fronts.into_iter().zip(followers).enumerate().rev() {
            if let Some(mut front) = front {
                front.close(PATIENCE).unwrap();
            }
            if let Some(follower) = follower {
                let disk = self.disks[which].clone();
                self.machine.unplug(&disk).unwrap();
                assert_eq!(follower.thread.join().unwrap(), Outcome::Unplugged);
            }
        }
        self.keeper().end().unwrap();
        assert!(!self.run_dir().exists());
    }
}

/// A failed test leaves no processes behind.
impl Drop for Host {
    fn drop(&mut self) {
        let _ = Keeper::connect(&self.socket()).and_then(Keeper::end);
    }
}

/// Returns whether the guest's request is answered soon.
fn is_answered(queue: &mut FrontQueue) -> bool {
    queue.wait(A_WHILE).unwrap() && queue.take().unwrap().is_some_and(|reply| reply.is_ok())
}

/// Sends a write. Returns its buffer, which must live until the answer.
#[must_use]
fn ask(front: &mut Frontend) -> Buffer {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    buffer
}

/// Sends a request, and waits for its answer.
fn works(front: &mut Frontend) {
    let _asked = ask(front);
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

fn children(pid: i32) -> Vec<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.unwrap_or_default().split(' ').filter_map(|c| c.parse().ok()).collect()
}

/// Whether no thread of it runs.
fn is_stopped(process: Pid) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap();
    let mut stats =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    stats.all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
}

/// Serialises tests that kill processes: each has all processors.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Places that both guests write: pages at the disk's end.
const REGISTERS: u64 = 4;
const FIRST_REGISTER: u64 = (CHUNKS * CHUNK - REGISTERS * 4096) / 512;
/// Requests in flight of a guest for these places.
const DEPTH: usize = 6;

/// Writes and reads the sectors that the other guest uses, too.
fn share(
    front: &Frontend,
    mut queue: FrontQueue,
    who: u64,
    clock: &AtomicU64,
    stop: &AtomicBool,
) -> (FrontQueue, Vec<Event>) {
    let buffers: Vec<_> = (0..DEPTH).map(|_| front.space().buffer(1).unwrap()).collect();
    let mut free: Vec<usize> = (0..DEPTH).collect();
    let (mut asked, mut events) = (HashMap::<_, (usize, Event)>::new(), Vec::new());
    let mut random = SplitMix64::new(who);
    let mut count = 0;
    loop {
        while !stop.load(Ordering::Relaxed)
            && let Some(buffer) = free.pop()
        {
            count += 1;
            let register = random.below(REGISTERS);
            // Two of its own requests for one place have no order, and a death may show both twice.
            let is_free =
                |(_, event): &(usize, Event)| !(event.is_write && event.register == register);
            let is_write = random.below(2) == 0 && asked.values().all(is_free);
            let (sector, value) = (FIRST_REGISTER + register * 8, who << 32 | count);
            let data = &buffers[buffer];
            let begin = clock.fetch_add(1, Ordering::SeqCst);
            let tag = if is_write {
                data.write(0, &value.to_le_bytes().repeat(512));
                queue.write(sector, data, 0, 4096).unwrap()
            } else {
                data.fill(0, 4096, 0xEE);
                queue.read(sector, data, 0, 4096).unwrap()
            };
            asked.insert(tag.0, (buffer, Event { register, value, is_write, begin, end: 0 }));
        }
        if queue.in_flight() == 0 {
            return (queue, events);
        }
        queue.push().unwrap();
        assert!(queue.wait(PATIENCE).unwrap(), "requests have no answer");
        while let Some(reply) = queue.take().unwrap() {
            assert!(reply.is_ok(), "{reply:?}");
            let (buffer, mut event) = asked.remove(&reply.tag.0).unwrap();
            event.end = clock.fetch_add(1, Ordering::SeqCst);
            if !event.is_write {
                let bytes = buffers[buffer].to_vec(0, 4096);
                event.value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let is_whole = bytes.chunks(8).all(|word| word == &bytes[..8]);
                assert!(is_whole, "a page is of several writes");
            }
            events.push(event);
            free.push(buffer);
        }
    }
}

/// A guest that uses the sectors that both have.
struct Sharing {
    thread: JoinHandle<(Frontend, Vec<Event>)>,
    stop: Arc<AtomicBool>,
}

impl Sharing {
    /// Waits for all requests in flight.
    fn end(self) -> (Frontend, Vec<Event>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn share_on(
    host: &Host,
    which: usize,
    mut front: Frontend,
    clock: &Arc<AtomicU64>,
    stop: &Arc<AtomicBool>,
) -> Sharing {
    assert_eq!(host.disks[which].devid, 51712);
    let (clock, stopped) = (clock.clone(), stop.clone());
    let thread = spawn(move || {
        let queue = front.queues.pop().unwrap();
        let (queue, events) = share(&front, queue, which as u64 + 1, &clock, &stopped);
        front.queues.push(queue);
        (front, events)
    });
    Sharing { thread, stop: stop.clone() }
}

/// A guest with load on chunks of its own, and on the sectors that both have.
struct Busy {
    progress: Arc<AtomicU64>,
    load: JoinHandle<Load>,
    sharing: Sharing,
}

fn work_on(host: &Host, which: usize, clock: &Arc<AtomicU64>, stop: &Arc<AtomicBool>) -> Busy {
    let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
    let mut front = host.connect(which, &options);
    let own = front.queues.remove(0);
    let half = (CHUNKS - 2) / 2;
    let begin = which as u64 * half;
    let load = Load::on(&front, own, begin..begin + half, which as u64);
    let progress = Arc::new(AtomicU64::new(0));
    let (told, stopped) = (progress.clone(), stop.clone());
    let load = spawn(move || load.run(&stopped, &told));
    Busy { progress, load, sharing: share_on(host, which, front, clock, stop) }
}

#[test]
fn a_worker_of_two_guests_is_killed_twenty_times_and_no_old_write_comes_after_a_new_one() {
    for (format, kills) in [("raw", 20), ("vhd", 6), ("qcow2", 6)] {
        let _alone = alone();
        let host = Host::new(format);
        let followers = [host.follow(0), host.follow(1)];
        let (clock, stop) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicBool::new(false)));
        let guests = [0, 1].map(|which| work_on(&host, which, &clock, &stop));
        let mut random = SplitMix64::new(7);
        let mut pauses: Vec<Duration> = Vec::new();
        for _ in 0..kills {
            sleep(Duration::from_micros(random.below(60_000)));
            let begin = Instant::now();
            host.kill_worker();
            for guest in &guests {
                let before = guest.progress.load(Ordering::Relaxed);
                wait_until("an answer", || guest.progress.load(Ordering::Relaxed) > before + 100);
            }
            pauses.push(begin.elapsed());
        }
        pauses.sort_unstable();
        println!("{format}: pauses of both: {pauses:?}, median {:?}", pauses[kills / 2]);
        stop.store(true, Ordering::Relaxed);
        let (mut events, mut kept) = (Vec::new(), Vec::new());
        for Busy { load, sharing, .. } in guests {
            let load = load.join().unwrap();
            let (front, seen) = sharing.end();
            println!("{} requests for what both have", seen.len());
            events.extend(seen);
            kept.push((front, load));
        }
        assert_eq!(wrong(&events), None);
        // Answered writes count, not only flushed ones.
        host.kill_worker();
        for (which, follower) in followers.into_iter().enumerate() {
            assert_eq!(follower.stop(), Outcome::Left, "{which}");
        }
        host.keeper().end().unwrap();
        let contents = images::contents(&host.image);
        kept.iter().for_each(|(_, load)| load.check(&contents));
    }
}

/// Each is idle after every request, while the other one is served.
#[test]
fn guests_that_ask_for_one_thing_at_a_time_are_always_heard() {
    let _alone = alone();
    let host = Host::new("raw");
    let followers = [0, 1].map(|which| host.follow(which));
    let fronts = [0, 1].map(|which| host.connect(which, &FrontOptions::default()));
    let threads = fronts.map(|mut front| {
        spawn(move || {
            (0..20_000).for_each(|_| works(&mut front));
            front
        })
    });
    let fronts = threads.map(|thread| Some(thread.join().unwrap()));
    host.end(fronts, followers.map(Some));
}

/// Both have been connected, and the worker is killed when only the stub domain has requests in flight.
fn with_what_the_second_left() -> (Host, [Follower; 1], Frontend, Sharing) {
    let host = Host::new("raw");
    let [first, second] = [0, 1].map(|which| host.follow(which));
    let mut front = host.connect(0, &FrontOptions::default());
    works(&mut front);
    let sharing = host.keep_busy(1);
    works(&mut front);
    assert_eq!(second.stop(), Outcome::Left);
    let table = host.run_dir().join("second/inflight");
    host.kill_worker_when(|| Table::has_unanswered(&table));
    (host, [first], front, sharing)
}

#[test]
fn a_guest_waits_for_what_its_stub_domain_had_under_way_at_a_death() {
    let _alone = alone();
    let (host, [first], mut front, sharing) = with_what_the_second_left();
    let _asked = ask(&mut front);
    assert!(!is_answered(&mut front.queues[0]), "what is older comes after it");
    let second = host.follow(1);
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    let (other, _) = sharing.end();
    host.end([Some(front), Some(other)], [Some(first), Some(second)]);
}

#[test]
fn a_guest_that_has_let_go_or_cannot_be_served_keeps_its_stub_domain_waiting_for_nothing() {
    let _alone = alone();
    for can_be_served in [true, false] {
        let host = Host::new("raw");
        let [first, second] = [0, 1].map(|which| host.follow(which));
        let mut other = host.connect(1, &FrontOptions::default());
        let sharing = host.keep_busy(0);
        works(&mut other);
        assert_eq!(first.stop(), Outcome::Left);
        let table = host.run_dir().join("inflight");
        host.kill_worker_when(|| Table::has_unanswered(&table));
        let write = |key: &str, value: &[u8]| {
            let path = format!("{}/{key}", host.disks[0].frontend);
            host.machine.store().unwrap().write(&path, value).unwrap();
        };
        let _asked = ask(&mut other);
        assert!(!is_answered(&mut other.queues[0]), "no worker looked at the guest's states");
        if can_be_served {
            write("state", b"6");
        } else {
            write("ring-ref", b"nonsense");
            assert_eq!(host.follow(0).thread.join().unwrap(), Outcome::Stopped);
        }
        let first = can_be_served.then(|| host.follow(0));
        assert!(other.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        // Its requests have no answer, ever.
        std::mem::forget(sharing);
        write("state", b"6");
        let first = first.unwrap_or_else(|| host.follow(0));
        host.end([None, Some(other)], [Some(first), Some(second)]);
    }
}

#[test]
fn a_stub_domain_that_is_gone_for_good_is_not_waited_for() {
    let _alone = alone();
    let (host, [first], mut front, sharing) = with_what_the_second_left();
    let _asked = ask(&mut front);
    assert!(!is_answered(&mut front.queues[0]));
    let line = host.keeper().second_line().unwrap();
    let domid = host.disks[1].domid;
    part(line.fd.as_fd(), domid, &Waker::new().unwrap(), None).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    drop(sharing);
    host.end([Some(front), None], [Some(first), None]);
}

#[test]
fn a_stub_domain_comes_and_goes_beside_its_guest() {
    let _alone = alone();
    let host = Host::new("vhd");
    let second = host.follow(1);
    sleep(A_WHILE);
    let first = host.follow(0);
    let [mut front, mut other] = [0, 1].map(|which| host.connect(which, &FrontOptions::default()));
    works(&mut front);
    works(&mut other);
    other.close(PATIENCE).unwrap();
    works(&mut front);
    other.connect(&FrontOptions::default(), PATIENCE).unwrap();
    front.close(PATIENCE).unwrap();
    works(&mut other);
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    // With a follower that is another one, too.
    assert_eq!(second.stop(), Outcome::Left);
    works(&mut other);
    let second = host.follow(1);
    works(&mut other);
    host.end([Some(front), Some(other)], [Some(first), Some(second)]);
}

#[test]
fn a_worker_retires_with_both_guests_and_both_go_on() {
    let _alone = alone();
    let host = Host::new("qcow2");
    let followers = [0, 1].map(|which| host.follow(which));
    let mut fronts = [0, 1].map(|which| host.connect(which, &FrontOptions::default()));
    let [first, second] = followers;
    assert_eq!(first.stop(), Outcome::Left);
    let line = host.keeper().line(None).unwrap();
    retire(line.fd.as_fd(), &Waker::new().unwrap(), None).unwrap();
    images::check(&host.image);
    let _asked: Vec<_> = fronts.iter_mut().map(ask).collect();
    assert!(fronts.iter_mut().all(|front| !is_answered(&mut front.queues[0])));
    let first = host.follow(0);
    for front in &mut fronts {
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        works(front);
    }
    host.end(fronts.map(Some), [Some(first), Some(second)]);
}

/// Only the guest's end is that of the disk: its image is closed then, and the stub domain's requests wait.
#[test]
fn a_disk_is_closed_with_its_guest_although_the_stub_domain_has_it_still() {
    let _alone = alone();
    let mut host = Host::new("qcow2");
    let [first, second] = [0, 1].map(|which| host.follow(which));
    let [mut front, mut other] = [0, 1].map(|which| host.connect(which, &FrontOptions::default()));
    works(&mut other);
    front.close(PATIENCE).unwrap();
    let disk = host.disks[0].clone();
    host.machine.unplug(&disk).unwrap();
    assert_eq!(first.thread.join().unwrap(), Outcome::Unplugged);
    images::check(&host.image);
    let _asked = ask(&mut other);
    assert!(!is_answered(&mut other.queues[0]));
    assert_eq!(second.stop(), Outcome::Left);
    host.keeper().end().unwrap();
}
