//! Use of the host's processors by disks: the backends of a host, which are processes, share polling, and a disk that
//! has used up its processor time is delayed, alone.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::Clock;
use ferrite_host::shares::Shares;
use ferrite_io::engine::Op;
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_serve::blkif::lifecycle::{Outcome, WorkConfig, serve};
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::polling::{Budget, PollWindow};
use ferrite_serve::processors::{Limit, Processors};
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Hands, Plan, Rig, config};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::Store;
use rustix::fs::{FallocateFlags, fallocate};

const DEVID: u32 = 202 << 8;
/// The environment of the backend's process: its disk, its directory, and the number of polling processors.
const BACKEND: &str = "FERRITE_TEST_BACKEND";
const DIR: &str = "FERRITE_TEST_DIR";
const SHARED: &str = "FERRITE_TEST_SHARED";
const UNITS: &str = "FERRITE_TEST_UNITS";

/// A clock that advances by a microsecond at each reading, and by the time that the test adds. So a busy machine does
/// not make it return a unit early.
#[derive(Default)]
struct Ticks(AtomicU64);

impl Clock for Ticks {
    fn now_ns(&self) -> u64 {
        self.0.fetch_add(1000, Ordering::SeqCst)
    }

    fn sleep(&self, how_long: Duration) {
        self.0.fetch_add(how_long.as_nanos() as u64, Ordering::SeqCst);
    }
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// Not a test: the backend, if this program was started again with that environment. For each line of its input it
/// prints how often it has polled and slept; `turn` advances its clock.
#[test]
fn process_backend() {
    let Ok(handle) = std::env::var(BACKEND) else { return };
    let handle = BackendHandle::from_arg(&handle).unwrap();
    let loopback = Loopback::new(CopyWith::Memcpy);
    handle.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let dir = env(DIR);
    let image = Path::new(&dir).join("disk.img");
    let options = OpenOptions { wait_for_lock: Some(PATIENCE), ..OpenOptions::default() };
    let disk = Disk::open(image.to_str().unwrap(), &options).unwrap();
    let clock = Arc::new(Ticks::default());
    let device = Arc::new(Device::new(disk, clock.clone()));
    let shares = Shares::open(env(SHARED).as_ref(), env(UNITS).parse().unwrap()).unwrap();
    let counters = Counters::default();
    let mut config = config(&DiskPaths::new(DomId(1), DEVID), Path::new(&dir).join("run"));
    config.work = WorkConfig {
        tuning: Tuning { poll: PollWindow::Fixed(1), ..Tuning::default() },
        processors: Arc::new(Processors::new(Budget::shared(100, shares), None, None)),
        counters: counters.clone(),
        pool_bytes: 4 << 20,
        ..config.work
    };
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if line == "turn" {
                clock.sleep(Duration::from_secs(1));
            }
            let counts = counters.counts();
            println!("\npolls {} {}", counts.polls, counts.sleeps);
        }
    });
    let stop = Waker::new().unwrap();
    let outcome = serve(&mut Store::from_fd(handle.store), &loopback, &device, &config, &stop);
    assert_eq!(outcome.unwrap(), Outcome::Unplugged);
}

/// A guest, and its backend in a process.
struct Guest {
    machine: Machine,
    disk: DiskPaths,
    dir: tempfile::TempDir,
    backend: Backend,
    front: Frontend,
}

struct Backend {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Backend {
    fn start(machine: &Machine, dir: &Path, shared: &Path, units: u32) -> Backend {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let handle = machine.backend().unwrap().pass_to(&mut command);
        command
            .args(["process_backend", "--exact", "--nocapture"])
            .env(BACKEND, handle)
            .env(DIR, dir)
            .env(SHARED, shared)
            .env(UNITS, units.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Backend { child, input, output }
    }

    /// How often it has polled and slept.
    fn say(&mut self, what: &str) -> (u64, u64) {
        writeln!(self.input, "{what}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the backend has ended");
            if let Some(polls) = line.trim().strip_prefix("polls ") {
                let (polls, sleeps) = polls.split_once(' ').unwrap();
                return (polls.parse().unwrap(), sleeps.parse().unwrap());
            }
        }
    }
}

impl Guest {
    fn new(shared: &Path, units: u32) -> Guest {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(GuestOptions::default()).unwrap();
        let disk = machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap();
        let dir = dir_in_memory();
        let image = std::fs::File::create(dir.path().join("disk.img")).unwrap();
        image.set_len(1 << 20).unwrap();
        let backend = Backend::start(&machine, dir.path(), shared, units);
        let mut front = Frontend::new(machine.guest(domid).unwrap(), disk.devid).unwrap();
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        Guest { machine, disk, dir, backend, front }
    }

    /// The polls of its backend while it has work and sleeps a few times, before each of which it would poll.
    fn polls(&mut self) -> u64 {
        let (polls, sleeps) = self.backend.say("");
        let end = Instant::now() + PATIENCE;
        loop {
            flushes(&mut self.front);
            let (polls_now, sleeps_now) = self.backend.say("");
            if sleeps_now > sleeps + 3 {
                return polls_now - polls;
            }
            assert!(Instant::now() < end, "the queue does not sleep");
        }
    }

    /// The polls a while later.
    fn polls_later(&mut self) -> u64 {
        self.backend.say("turn");
        self.polls()
    }

    fn kill(&mut self) {
        self.backend.child.kill().unwrap();
        self.backend.child.wait().unwrap();
    }

    fn restart(&mut self, shared: &Path, units: u32) {
        self.backend = Backend::start(&self.machine, self.dir.path(), shared, units);
    }

    fn end(mut self) {
        self.machine.unplug(&self.disk).unwrap();
        self.front.close(PATIENCE).unwrap();
        assert!(self.backend.child.wait().unwrap().success());
    }
}

fn works(front: &mut Frontend) {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

/// Without data no buffers are used, and nothing wakes an idle queue to free them.
fn flushes(front: &mut Frontend) {
    front.queues[0].flush().unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} does not happen");
    }
}

#[test]
fn as_many_backends_poll_as_the_host_has_units_and_others_follow_them() {
    let host = dir_in_memory();
    let shared = host.path().join("poll-budget");
    let mut guests = [(); 3].map(|()| Guest::new(&shared, 2));
    let [a, b, c] = &mut guests;
    assert!(a.polls() > 0 && b.polls() > 0);
    assert_eq!(c.polls(), 0, "there are two units");
    assert_eq!(c.polls_later(), 0);

    // It is killed, and another has its unit at once, also after a restart.
    a.kill();
    assert!(c.polls_later() > 0);
    a.restart(&shared, 2);
    flushes(&mut a.front);
    assert_eq!(a.polls_later(), 0);
    assert!(b.polls() > 0 && c.polls() > 0);

    // Its guest is idle, and it returns its unit. Its queue may still be in its last poll: each try advances its time,
    // too.
    wait_until("that an idle backend gives its unit back", || {
        b.backend.say("turn");
        a.polls_later() > 0
    });
    assert!(c.polls() > 0);
    assert_eq!(b.polls_later(), 0);

    // Its guest releases the disk.
    c.front.close(PATIENCE).unwrap();
    assert!(b.polls_later() > 0);
    c.front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    assert_eq!(c.polls_later(), 0);

    // Its disk is unplugged.
    let [a, b, mut c] = guests;
    a.end();
    assert!(c.polls_later() > 0);
    b.end();
    c.end();
}

/// A stopped clock, and processor time set by a test.
#[derive(Default)]
struct World {
    now: Hands,
    cpu: AtomicU64,
}

impl Clock for World {
    fn now_ns(&self) -> u64 {
        self.now.now_ns()
    }

    fn sleep(&self, how_long: Duration) {
        self.now.turn(how_long);
    }

    fn process_cpu_ns(&self) -> u64 {
        self.cpu.load(Ordering::SeqCst)
    }
}

impl World {
    /// The process uses so much processor time at once.
    fn use_up(&self, cpu: Duration) {
        self.cpu.fetch_add(cpu.as_nanos() as u64, Ordering::SeqCst);
        self.now.turn(Duration::from_millis(2));
    }
}

/// A disk with half a processor, or without a limit.
fn plan(world: &Arc<World>, limited: bool) -> Plan {
    let clock: Arc<dyn Clock> = world.clone();
    let limit = limited.then(|| Arc::new(Limit::new(50, clock.clone())));
    let processors = Arc::new(Processors::new(Budget::new(100), None, limit));
    let tuning = Tuning { poll: PollWindow::Fixed(0), ..Tuning::default() };
    Plan { bytes: 1 << 20, clock, processors, tuning, ..Plan::default() }
}

fn disk(world: &Arc<World>, limited: bool) -> Rig {
    Rig::new(plan(world, limited))
}

#[test]
fn a_disk_that_has_used_its_processor_time_is_held_back_and_its_neighbour_is_not() {
    let world = Arc::new(World::default());
    let (mut limited, mut other) = (disk(&world, true), disk(&world, false));
    let mut front = limited.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let mut neighbour = other.connect(&FrontOptions::default());
    (0..100).for_each(|_| works(&mut front));
    assert_eq!(limited.counters.counts().throttles, 0);

    // 50 ms were saved: 150 are owed, and earned in 300.
    world.use_up(Duration::from_millis(200));
    let buffer = front.space().buffer(4).unwrap();
    let held = hold(&mut front, &mut neighbour, &buffer);
    assert!(held > 0, "the second queue has been asleep all the time");
    let before = limited.counters.counts().requests;
    for (i, queue) in front.queues.iter_mut().enumerate() {
        queue.write(8 * i as u64, &buffer, 0, 4096).unwrap();
        queue.discard(64, 64, false).unwrap();
        queue.push().unwrap();
    }
    (0..500).for_each(|_| works(&mut neighbour));
    world.now.turn(Duration::from_millis(250));
    (0..500).for_each(|_| works(&mut neighbour));
    assert!(front.queues.iter_mut().all(|queue| queue.take().unwrap().is_none()));
    assert_eq!(limited.counters.counts().requests, before);

    world.now.turn(Duration::from_millis(100));
    for queue in &mut front.queues {
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    }
    let counts = limited.counters.counts();
    assert_eq!(counts.requests, before + held + 4);
    assert!(counts.throttles >= 1 && counts.throttled_ns >= 250_000_000, "{counts:?}");
    assert_eq!(other.counters.counts().throttles, 0);

    // In debt again, for long: it is stopped, and its guest waits for the next one.
    world.use_up(Duration::from_secs(3600));
    hold(&mut front, &mut neighbour, &buffer);
    let before = limited.counters.counts().requests;
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    (0..100).for_each(|_| works(&mut neighbour));
    assert_eq!(limited.stop().unwrap(), Outcome::Stopped);
    assert_eq!(limited.counters.counts().requests, before);
    neighbour.close(PATIENCE).unwrap();
    assert_eq!(other.stop().unwrap(), Outcome::Stopped);
}

/// Waits until the queues know of the debt: a queue that was about to read its ring may still take requests. Returns
/// the number of delayed requests.
fn hold(front: &mut Frontend, neighbour: &mut Frontend, buffer: &Buffer) -> u64 {
    for queue in &mut front.queues {
        queue.write(8, buffer, 0, 4096).unwrap();
        queue.push().unwrap();
    }
    (0..500).for_each(|_| works(neighbour));
    let answered = front.queues.iter_mut().filter_map(|queue| queue.take().unwrap());
    let answered = answered.filter(|reply| reply.is_ok()).count();
    (front.queues.len() - answered) as u64
}

#[test]
fn a_disk_in_debt_is_unplugged_at_once() {
    let world = Arc::new(World::default());
    let mut rig = disk(&world, true);
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    works(&mut front);
    world.use_up(Duration::from_secs(3600));
    let buffer = front.space().buffer(1).unwrap();
    front.queues[1].write(8, &buffer, 0, 4096).unwrap();
    front.queues[1].push().unwrap();
    let disk = rig.disk.clone();
    rig.machine.remove_disk(&disk).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

/// A queue that waits for a buffer ignores its guest. While its disk is in debt it does not see that a buffer is free
/// again, and no other thread wakes it.
#[test]
fn a_disk_in_debt_that_was_out_of_buffers_goes_on_when_it_has_paid() {
    const AT_ONCE: u64 = 30;
    let world = Arc::new(World::default());
    let faults = Faults::none();
    let small = Plan {
        engine: faults.factory(),
        bytes: 4 << 20,
        pool_bytes: 1 << 20,
        ..plan(&world, true)
    };
    let rig = Rig::new(small);
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(32 * AT_ONCE as usize).unwrap();
    works(&mut front);
    let before = rig.counters.counts().requests;
    let held = faults.hold();
    faults.forget();
    faults.once(Kind::Read, Fault::Held(None));
    for i in 0..AT_ONCE {
        let to = (i as usize) << 17;
        front.queues[0].read(i * 256, &buffer, to, 128 << 10).unwrap();
    }
    front.queues[0].push().unwrap();
    faults.wait_for(Kind::Read, 1);
    world.use_up(Duration::from_millis(200));
    drop(held);
    wait_until("that those are answered that have buffers", || {
        rig.counters.counts().requests > before
    });
    assert!(rig.counters.counts().requests < before + AT_ONCE, "all of them had buffers");
    world.now.turn(Duration::from_secs(1));
    assert!(front.queues[0].drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    assert_eq!(rig.counters.counts().requests, before + AT_ONCE);
    front.close(PATIENCE).unwrap();
}

/// A discard of a million parts, in a file with space to free.
#[test]
fn a_discard_pauses_while_its_disk_is_in_debt_and_ends_when_that_is_unplugged() {
    const BYTES: u64 = 1 << 50;
    let dir = dir_in_memory();
    let image = dir.path().join("disk.img");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(BYTES).unwrap();
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 65 << 20).unwrap();
    let world = Arc::new(World::default());
    let mut rig = Rig::new(Plan { image: Some(image), ..plan(&world, true) });
    let other = disk(&world, false);
    let mut front = rig.connect(&FrontOptions::default());
    let mut neighbour = other.connect(&FrontOptions::default());
    // The discard excludes the allocated space, so that there is always some to free.
    front.queues[0].discard(1 << 20, BYTES / 512 - (1 << 20), false).unwrap();
    front.queues[0].push().unwrap();
    let counters = rig.counters.clone();
    let parts = || counters.counts().discard_parts;
    wait_until("that a discard is begun", || parts() > 0);
    world.use_up(Duration::from_secs(3600));
    (0..100).for_each(|_| works(&mut neighbour));
    let before = parts();
    (0..500).for_each(|_| works(&mut neighbour));
    // The present part ends in any case.
    assert!(parts() <= before + 1, "{} parts, and {before} before", parts());
    assert!(front.queues[0].take().unwrap().is_none());
    rig.machine.remove_disk(&rig.disk.clone()).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert!(parts() < 1 << 19, "{} parts were done", parts());
    neighbour.close(PATIENCE).unwrap();
}

/// A backend in debt. Its predecessor's engine has failed with 16 writes in flight, the first of which was answered
/// since. Their pages are the guest's as long as it has the buffer.
fn with_writes_to_do_again(world: &Arc<World>) -> (Rig, Frontend, Buffer) {
    let faults = Faults::none();
    let large = Plan { engine: faults.factory(), bytes: 4 << 20, ..plan(world, true) };
    let mut rig = Rig::new(large);
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(32).unwrap();
    works(&mut front);
    buffer.fill(0, 128 << 10, 0x42);
    // A request on the ring together with a write is taken before the engine gets the write.
    let broken = faults.clone();
    faults.before_each(move |op| {
        if matches!(op, Op::Write { .. }) {
            broken.break_engine("queue-0");
        }
    });
    // As many as are taken at once.
    for i in 0..16 {
        front.queues[0].write(i * 256, &buffer, 0, 128 << 10).unwrap();
    }
    front.queues[0].push().unwrap();
    rig.join().unwrap_err();
    faults.before_each(|_| {});
    faults.break_engine("");
    world.use_up(Duration::from_secs(3600));
    rig.change_pool(1 << 20);
    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    (rig, front, buffer)
}

/// The requests that a predecessor took are executed before the queue ends. They do not all fit into this backend's
/// memory at once.
#[test]
fn a_disk_in_debt_with_requests_to_do_again_is_unplugged_at_once() {
    let world = Arc::new(World::default());
    let (mut rig, _front, _buffer) = with_writes_to_do_again(&world);
    rig.machine.remove_disk(&rig.disk.clone()).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert!(rig.sectors(0, 2 << 20).iter().all(|byte| *byte == 0x42));
}

/// In debt the backend has not begun its predecessor's requests, and with its disk parked it cannot.
#[test]
fn a_parked_disk_with_requests_to_do_again_is_stopped_at_once_and_leaves_them() {
    let world = Arc::new(World::default());
    let (mut rig, mut front, _buffer) = with_writes_to_do_again(&world);
    let device = rig.device();
    let (disk, away) = device.park(PATIENCE).unwrap();
    let (told, tells) = std::sync::mpsc::channel();
    let backend = &mut rig;
    let stopped = std::thread::scope(|scope| {
        scope.spawn(move || told.send(backend.stop().unwrap()));
        let stopped = tells.recv_timeout(PATIENCE);
        away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
        stopped
    });
    assert_eq!(stopped, Ok(Outcome::Stopped), "it waits for its parker");
    drop(device);
    world.now.turn(Duration::from_secs(7200));
    rig.start();
    assert!(front.queues[0].drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    front.close(PATIENCE).unwrap();
}

/// Linux closes a disk at once, and cannot remove it while a request of its rings is unanswered.
#[test]
fn a_disk_in_debt_that_is_to_be_unplugged_answers_what_is_on_its_rings() {
    let world = Arc::new(World::default());
    let (mut rig, mut other) = (disk(&world, true), disk(&world, false));
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let mut neighbour = other.connect(&FrontOptions::default());
    works(&mut front);
    world.use_up(Duration::from_secs(3600));
    let buffer = front.space().buffer(1).unwrap();
    assert!(hold(&mut front, &mut neighbour, &buffer) > 0, "nothing is held back");
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    for queue in &mut front.queues {
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    }
    // The guest has not closed the disk, so requests from now on are charged.
    world.use_up(Duration::from_secs(3600));
    assert!(hold(&mut front, &mut neighbour, &buffer) > 0);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    neighbour.close(PATIENCE).unwrap();
    assert_eq!(other.stop().unwrap(), Outcome::Stopped);
}
