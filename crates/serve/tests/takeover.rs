//! Backends that are killed at any moment, and their successors (blkif.md 3.9): the guest sees a
//! pause. No error, no lost or wrong byte, no request without an answer or with two.

mod rig;

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_io::clock::{Random, SplitMix64, SystemClock};
use ferrite_serve::connection::{Device, Waker};
use ferrite_serve::counters::Counters;
use ferrite_serve::lifecycle::{Config, Outcome, ServeError, serve};
use ferrite_serve::tuning::Tuning;
use ferrite_xen::abi::{PlainOp, RawSegment};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, RingWord};
use ferrite_xen::loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_xen::loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_xen::mover::{Budget, DISK_MAPPINGS};
use ferrite_xen::store::Store;

use rig::{Loop, PATIENCE, Plan, Rig, dir_in_memory, engines, images, mover, moving, offer, scale};

/// Bytes and sectors that one request at a time works on.
const CHUNK: u64 = 256 << 10;
const CHUNK_SECTORS: u64 = CHUNK / 512;
const CHUNKS: u64 = 128;
const DEVID: u32 = 202 << 8;
/// Most requests in flight a queue.
const DEPTH: usize = 48;

const BACKEND: &str = "FERRITE_TEST_BACKEND";
const IMAGE: &str = "FERRITE_TEST_IMAGE";
const RUN_DIR: &str = "FERRITE_TEST_RUN_DIR";
const COPY_WITH: &str = "FERRITE_TEST_COPY_WITH";

fn env(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// Not a test: the backend, when this program is run again with the environment that says so.
#[test]
fn process_backend() {
    let Ok(handle) = std::env::var(BACKEND) else { return };
    let handle = BackendHandle::from_arg(&handle).unwrap();
    let loopback = Loopback::new(env(COPY_WITH).parse::<CopyWith>().unwrap());
    handle.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let state_dir = Some(images::state_dir(env(IMAGE).as_ref()));
    let wait_for_lock = Some(PATIENCE);
    let options = OpenOptions { wait_for_lock, state_dir, ..OpenOptions::default() };
    let disk = Disk::open(&env(IMAGE), &options).unwrap();
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let config = Config {
        backend: DiskPaths::new(DomId(1), DEVID).backend,
        domid: DomId(1),
        devid: DEVID,
        offer: offer(),
        moving: moving(mover(), Budget::of_disk(DISK_MAPPINGS)),
        pool_bytes: 8 << 20,
        run_dir: env(RUN_DIR).into(),
        served_raw: None,
        engine: engines(),
        closes: true,
        tuning: Tuning::default(),
        processors: Arc::default(),
        counters: Counters::default(),
    };
    let mut store = Store::from_fd(handle.store);
    let stop = Waker::new().unwrap();
    let outcome = serve(&mut store, &loopback, &device, &config, &stop).unwrap();
    assert_eq!(outcome, Outcome::Unplugged);
}

/// A machine whose backends are processes.
struct World {
    machine: Machine,
    disk: DiskPaths,
    dir: tempfile::TempDir,
    copy_with: CopyWith,
    device: Option<Loop>,
    /// In place of `disk.img`.
    image: Option<PathBuf>,
}

impl World {
    fn new(copy_with: CopyWith) -> World {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(GuestOptions::default()).unwrap();
        let disk = machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap();
        assert_eq!((disk.domid, disk.devid), (DomId(1), DEVID));
        let dir = dir_in_memory();
        let image = std::fs::File::create(dir.path().join("disk.img")).unwrap();
        image.set_len(CHUNKS * CHUNK).unwrap();
        World { machine, disk, dir, copy_with, device: None, image: None }
    }

    /// The same on an image of this format.
    fn with_format(format: &str) -> World {
        let world = World::new(CopyWith::Memcpy);
        let image = images::make(world.dir.path(), format, CHUNKS * CHUNK);
        World { image: Some(image), ..world }
    }

    /// The same on a medium with blocks of 4096 bytes, if there can be one.
    fn with_large_blocks(copy_with: CopyWith) -> Option<World> {
        let world = World::new(copy_with);
        let device = Some(Loop::attach(&world.image())?);
        Some(World { device, ..world })
    }

    fn image(&self) -> PathBuf {
        match (&self.device, &self.image) {
            (Some(device), _) => device.0.clone(),
            (None, Some(image)) => image.clone(),
            (None, None) => self.dir.path().join("disk.img"),
        }
    }

    fn spawn(&self) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process_backend", "--nocapture", "--test-threads=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let handle = self.machine.backend().unwrap().pass_to(&mut command);
        command.env(BACKEND, handle).env(COPY_WITH, self.copy_with.to_string());
        command.env(IMAGE, self.image()).env(RUN_DIR, self.dir.path());
        command.spawn().unwrap()
    }

    /// Runs backends and kills all but the last one, each after it has done something, or even
    /// before.
    fn kill_backends(&self, kills: u32, progress: &AtomicU64, random: &mut SplitMix64) -> Child {
        for kill in 0..kills {
            let mut child = self.spawn();
            if random.below(4) > 0 {
                let before = progress.load(Ordering::Relaxed);
                let end = Instant::now() + PATIENCE;
                while progress.load(Ordering::Relaxed) == before {
                    assert!(Instant::now() < end, "backend {kill} serves nothing");
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            std::thread::sleep(Duration::from_micros(random.below(60_000)));
            child.kill().unwrap();
            let status = child.wait().unwrap();
            assert_eq!(status.signal(), Some(9), "backend {kill} ended by itself: {status}");
        }
        self.spawn()
    }

    /// Ends the disk, and sees its last backend end well.
    fn end(mut self, mut front: Frontend, mut last: Child) {
        let space = front.space().clone();
        front.close(PATIENCE).unwrap();
        self.machine.unplug(&self.disk.clone()).unwrap();
        assert!(last.wait().unwrap().success());
        assert_eq!((space.memory().grants().users(), space.memory().bound_ports()), (0, 0));
        assert!(!self.dir.path().join("inflight").exists());
    }
}

/// What a sector holds: who wrote it, and where it belongs.
fn word(stamp: u32, sector: u64) -> [u8; 8] {
    (u64::from(stamp) << 32 | sector).to_le_bytes()
}

fn assert_sector(bytes: &[u8], stamp: u32, sector: u64, what: &str) {
    let expected = if stamp == 0 { [0; 8] } else { word(stamp, sector) };
    let ok = bytes.chunks_exact(8).all(|word| word == expected);
    assert!(ok, "{what}: sector {sector} is not that of write {stamp}: {:x?}", &bytes[..16]);
}

/// One request on its way.
struct Asked {
    chunk: usize,
    write: Option<u32>,
    sector: u64,
    sectors: u64,
    buffer: usize,
}

/// One queue's load, on chunks of its own, each with one request at a time: so that what a read
/// has to give is known to the byte.
struct Load {
    queue: FrontQueue,
    /// Who wrote each sector.
    written: Vec<Vec<u32>>,
    first_chunk: u64,
    idle: Vec<usize>,
    buffers: Vec<Buffer>,
    free_buffers: Vec<usize>,
    asked: HashMap<u16, Option<Asked>>,
    random: SplitMix64,
    stamp: u32,
}

impl Load {
    fn new(front: &Frontend, queue: FrontQueue, index: u64, queues: u64, seed: u64) -> Load {
        let chunks = (CHUNKS / queues) as usize;
        let depth = DEPTH.min(queue.free_slots());
        Load {
            queue,
            written: vec![vec![0; CHUNK_SECTORS as usize]; chunks],
            first_chunk: index * chunks as u64,
            idle: (0..chunks).collect(),
            buffers: (0..depth).map(|_| front.space().buffer(64).unwrap()).collect(),
            free_buffers: (0..depth).collect(),
            asked: HashMap::new(),
            random: SplitMix64::new(seed + index),
            stamp: 0,
        }
    }

    fn ask(&mut self) {
        if self.random.below(32) == 0 {
            let tag = self.queue.flush().unwrap();
            self.asked.insert(tag.0, None);
            return;
        }
        let buffer = self.free_buffers.pop().unwrap();
        let at = self.random.below(self.idle.len() as u64) as usize;
        let chunk = self.idle.swap_remove(at);
        // Mostly small, some as large as they can be.
        let most = if self.random.below(4) == 0 { CHUNK_SECTORS } else { 64 };
        let sectors = 1 + self.random.below(most);
        let from = self.random.below(CHUNK_SECTORS - sectors + 1);
        let sector = (self.first_chunk + chunk as u64) * CHUNK_SECTORS + from;
        let bytes = sectors as usize * 512;
        let data = &self.buffers[buffer];
        let (tag, write) = if self.random.below(2) == 0 {
            self.stamp += 1;
            for s in 0..sectors {
                data.write(s as usize * 512, &word(self.stamp, sector + s).repeat(64));
            }
            // Now and then as a barrier, which needs the disk for itself.
            let barrier = sectors == 8 || self.random.below(100) == 0 && sectors <= 64;
            let segments: Vec<RawSegment> = (0..sectors.div_ceil(8) as usize)
                .map(|p| data.segment(p, 0, (sectors - p as u64 * 8).min(8) as u8 - 1))
                .collect();
            let tag = match barrier {
                true => self.queue.plain(PlainOp::Barrier, sector, &segments).unwrap(),
                false => self.queue.write(sector, data, 0, bytes).unwrap(),
            };
            (tag, Some(self.stamp))
        } else {
            data.fill(0, bytes, 0xEE);
            (self.queue.read(sector, data, 0, bytes).unwrap(), None)
        };
        self.asked.insert(tag.0, Some(Asked { chunk, write, sector, sectors, buffer }));
    }

    fn take(&mut self) -> u64 {
        let mut taken = 0;
        while let Some(reply) = self.queue.take().unwrap() {
            assert!(reply.is_ok(), "an error reached the guest: {reply:?}");
            taken += 1;
            let asked = self.asked.remove(&reply.tag.0).expect("asked and not answered");
            let Some(asked) = asked else { continue };
            let written = &mut self.written[asked.chunk];
            let from = (asked.sector % CHUNK_SECTORS) as usize;
            let written = &mut written[from..from + asked.sectors as usize];
            match asked.write {
                Some(stamp) => written.fill(stamp),
                None => {
                    let bytes = asked.sectors as usize * 512;
                    let data = self.buffers[asked.buffer].to_vec(0, bytes);
                    for (i, (data, stamp)) in data.chunks(512).zip(written).enumerate() {
                        assert_sector(data, *stamp, asked.sector + i as u64, "read");
                    }
                }
            }
            self.idle.push(asked.chunk);
            self.free_buffers.push(asked.buffer);
        }
        taken
    }

    /// Keeps the queue full until told to stop, then waits for what is in flight; sleeps like a
    /// guest does, until an event comes.
    fn run(mut self, stop: &AtomicBool, progress: &AtomicU64) -> Load {
        let mut total = 0;
        loop {
            let stopping = stop.load(Ordering::Relaxed);
            while !stopping && !self.free_buffers.is_empty() && self.queue.free_slots() > 0 {
                self.ask();
            }
            if self.queue.in_flight() == 0 {
                println!("{total} requests");
                return self;
            }
            self.queue.push().unwrap();
            let in_flight = self.queue.in_flight();
            assert!(self.queue.wait(PATIENCE).unwrap(), "{in_flight} requests have no answer");
            let taken = self.take();
            total += taken;
            progress.fetch_add(taken, Ordering::Relaxed);
        }
    }

    fn check(&self, image: &[u8]) {
        for (chunk, written) in self.written.iter().enumerate() {
            for (i, stamp) in written.iter().enumerate() {
                let sector = (self.first_chunk + chunk as u64) * CHUNK_SECTORS + i as u64;
                assert_sector(&image[sector as usize * 512..][..512], *stamp, sector, "image");
            }
        }
    }
}

fn killed_under_load(world: World, options: FrontOptions, kills: u32, seed: u64) {
    let mut front =
        Frontend::new(world.machine.guest(world.disk.domid).unwrap(), world.disk.devid).unwrap();
    let mut first = world.spawn();
    front.connect(&options, PATIENCE).unwrap();
    let (stop, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let queues = std::mem::take(&mut front.queues);
    let count = queues.len() as u64;
    let threads: Vec<_> = queues
        .into_iter()
        .enumerate()
        .map(|(i, queue)| {
            let load = Load::new(&front, queue, i as u64, count, seed);
            let (stop, progress) = (stop.clone(), progress.clone());
            std::thread::spawn(move || load.run(&stop, &progress))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(30));
    first.kill().unwrap();
    first.wait().unwrap();
    let mut random = SplitMix64::new(seed ^ 0xD1E);
    let last = world.kill_backends(kills, &progress, &mut random);
    let before = progress.load(Ordering::Relaxed);
    let end = Instant::now() + PATIENCE;
    while progress.load(Ordering::Relaxed) < before + 200 {
        assert!(Instant::now() < end, "the last backend serves nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    stop.store(true, Ordering::Relaxed);
    let loads: Vec<Load> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    // A last time before the image is looked at: what was answered counts, not what was flushed.
    let mut last = last;
    last.kill().unwrap();
    last.wait().unwrap();
    let contents = images::contents(&world.image());
    loads.iter().for_each(|load| load.check(&contents));
    let last = world.spawn();
    front.queues.extend(loads.into_iter().map(|load| load.queue));
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        queue.read(0, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "the last backend serves");
    }
    assert_eq!(front.backend_state().unwrap(), 4);
    world.end(front, last);
}

#[test]
fn a_killed_backend_is_a_pause_on_images_and_what_it_answered_is_there() {
    for (i, format) in images::FORMATS.into_iter().enumerate() {
        let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
        killed_under_load(World::with_format(format), options, 6 * scale(), 10 + i as u64);
    }
}

#[test]
fn a_killed_backend_is_a_pause_with_one_small_ring() {
    let options = FrontOptions { regrant: true, max_indirect: 64, ..FrontOptions::default() };
    killed_under_load(World::new(CopyWith::Memcpy), options, 20 * scale(), 1);
}

#[test]
fn a_killed_backend_is_a_pause_with_two_large_rings_and_copies_by_the_kernel() {
    let options = FrontOptions { queues: 2, ..FrontOptions::windows() };
    killed_under_load(World::new(CopyWith::ProcessVm), options, 20 * scale(), 2);
}

#[test]
fn a_killed_backend_is_a_pause_for_a_32_bit_guest() {
    let options = FrontOptions {
        queues: 2,
        order: 2,
        regrant: true,
        max_indirect: 64,
        ..FrontOptions::x86_32()
    };
    killed_under_load(World::new(CopyWith::Memcpy), options, 8 * scale(), 3);
}

/// Killed between the reading and the writing of a block, of which a part was to change.
#[test]
fn a_killed_backend_is_a_pause_on_blocks_of_4096_bytes() {
    let Some(world) = World::with_large_blocks(CopyWith::Memcpy) else { return };
    let options = FrontOptions { queues: 2, order: 1, max_indirect: 64, ..FrontOptions::default() };
    killed_under_load(world, options, 8 * scale(), 4);
}

/// Killed while states are written and rings are mapped: each step is taken up again.
#[test]
fn a_backend_killed_in_a_handshake_is_followed_by_one_that_goes_on_with_it() {
    let world = World::new(CopyWith::Memcpy);
    let mut front =
        Frontend::new(world.machine.guest(world.disk.domid).unwrap(), world.disk.devid).unwrap();
    let (stop, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let thread = std::thread::spawn({
        let (stop, progress) = (stop.clone(), progress.clone());
        move || {
            let mut rounds = 0u32;
            while !stop.load(Ordering::Relaxed) {
                rounds += 1;
                let options = FrontOptions { queues: 1 + rounds % 2, ..FrontOptions::default() };
                front.connect(&options, PATIENCE).unwrap();
                let buffer = front.space().buffer(1).unwrap();
                buffer.write(0, &word(rounds, 0).repeat(512));
                for queue in &mut front.queues {
                    queue.write(0, &buffer, 0, 4096).unwrap();
                    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                }
                progress.fetch_add(1, Ordering::Relaxed);
                front.close(PATIENCE).unwrap();
            }
            front.connect(&FrontOptions::default(), PATIENCE).unwrap();
            println!("{rounds} connections");
            front
        }
    });
    let mut random = SplitMix64::new(7);
    let last = world.kill_backends(12 * scale(), &progress, &mut random);
    stop.store(true, Ordering::Relaxed);
    let front = thread.join().unwrap();
    world.end(front, last);
}

/// A rig with one request in flight that nobody has answered.
fn interrupted() -> (Rig, Frontend, Buffer) {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    buffer.fill(0, 4096, 7);
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    (rig, front, buffer)
}

/// Sees the take-over refused because of `why`, and nothing changed.
fn refused(rig: &mut Rig, front: &mut Frontend, why: &str) {
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
    assert!(error.to_string().contains(why), "{error} does not say {why:?}");
    assert_eq!(front.backend_state().unwrap(), 4, "the guest would lose its disk");
    assert_eq!(front.queues[0].ring().load(RingWord::RspProd), 0);
    assert_eq!(front.queues[0].in_flight(), 1);
    let memory = front.space().memory();
    assert_eq!((memory.grants().users(), memory.bound_ports()), (0, 0));
    assert_eq!(rig.take_error(), None);
}

#[test]
fn without_the_right_table_nothing_is_taken_over_and_nothing_touched() {
    let (mut rig, mut front, _buffer) = interrupted();
    let path = rig.run_dir().join("inflight");
    let right = std::fs::read(&path).unwrap();
    let aside = rig.run_dir().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    refused(&mut rig, &mut front, "inflight");

    let changed = |at: usize, byte: u8| {
        let mut wrong = right.clone();
        wrong[at] ^= byte;
        wrong
    };
    let wrong = [
        (Vec::new(), "inflight"),
        (vec![0; right.len()], "not a table"),
        (changed(0, 1), "not a table"),
        // Somewhere in the text of whose it is.
        (changed(70, 1), "does not belong"),
        (right[..right.len() - 64].to_vec(), "does not belong"),
        (right[..100].to_vec(), "not a table"),
    ];
    for (bytes, why) in wrong {
        std::fs::write(&path, bytes).unwrap();
        refused(&mut rig, &mut front, why);
    }
    std::fs::write(&path, &right).unwrap();
    // The guest names other rings than those that the table is of.
    let ring = front.queues[0].ring_grefs()[0].0;
    front.write_key("ring-ref", b"8191").unwrap();
    refused(&mut rig, &mut front, "does not belong");
    front.write_key("ring-ref", ring.to_string().as_bytes()).unwrap();
    // Another guest by the same number.
    let vm = format!("/local/domain/{}/vm", rig.domid);
    let mut store = rig.machine.store().unwrap();
    store.write(&vm, b"/vm/another").unwrap();
    refused(&mut rig, &mut front, "does not belong");
    store.remove(&vm).unwrap();

    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(rig.sectors(0, 4096), vec![7; 4096]);
    front.close(PATIENCE).unwrap();
}

/// Old blkfronts go to 5 while a file system is mounted ("Device in use; refusing to close"), and
/// do I/O as before.
#[test]
fn a_guest_that_closes_and_is_not_done_is_taken_over() {
    let (mut rig, mut front, _buffer) = interrupted();
    front.set_state(5).unwrap();
    for _ in 0..2 {
        // Our state is 4 the first time, 5 the second.
        rig.start();
        front.wait_for_backend(&[5], PATIENCE).unwrap();
        let replies = front.queues[0].drain(PATIENCE).unwrap();
        assert!(replies.len() == 1 && replies[0].is_ok());
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        front.queues[0].flush().unwrap();
        front.queues[0].push().unwrap();
    }
    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
    // With nothing to take over the guest is let go.
    for state in [4, 5] {
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        std::fs::remove_file(rig.run_dir().join("inflight")).unwrap();
        let path = format!("{}/state", rig.disk.backend);
        let state = state.to_string();
        rig.machine.store().unwrap().write(&path, state.as_bytes()).unwrap();
        front.set_state(5).unwrap();
        rig.start();
        front.close(PATIENCE).unwrap();
    }
}

/// A guest that was resumed while nobody served it (3.8): it is at 3, with rings that no backend
/// has seen.
#[test]
fn a_resumed_guest_whose_rings_are_new_is_connected() {
    let (mut rig, mut front, _buffer) = interrupted();
    for with_table in [true, false] {
        if !with_table {
            std::fs::remove_file(rig.run_dir().join("inflight")).unwrap();
        }
        front.offer(&FrontOptions { queues: 2, ..FrontOptions::default() }).unwrap();
        rig.start();
        let buffer = front.space().buffer(1).unwrap();
        for queue in &mut front.queues {
            queue.read(0, &buffer, 0, 4096).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        }
        front.finish(PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    }
    rig.start();
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_ring_that_was_changed_meanwhile_is_not_taken_over() {
    let (mut rig, mut front, _buffer) = interrupted();
    let ring = front.queues[0].ring();
    for scribble in [1, 1 << 31, u32::MAX] {
        ring.store(RingWord::RspProd, scribble);
        rig.start();
        let error = rig.join().unwrap_err();
        assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
        assert_eq!(ring.load(RingWord::RspProd), scribble);
        assert_eq!(front.backend_state().unwrap(), 4);
    }
    ring.store(RingWord::RspProd, 0);
    ring.store(RingWord::ReqProd, 1 << 20);
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
    ring.store(RingWord::ReqProd, 1);
    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
}

/// Of `inflight.rs`: where the words of the only queue stand in its file.
const PUBLISHED_AT: u64 = (16 << 10) + 4;
const ENTRIES_AT: u64 = (16 << 10) + 64;
const REQ_INDEX_AT: u64 = 4;
const RSP_INDEX_AT: u64 = 8;
const TAKEN: u32 = 1;
const ANSWERING: u32 = 2;

/// Killed with one answer published and its entry not yet free, two requests in hand. One answer
/// more on the ring would leave these two with room for one.
#[test]
fn a_guest_that_answers_itself_after_a_kill_is_refused_at_every_restart() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(3).unwrap();
    for page in 0..3 {
        front.queues[0].read(0, &buffer, page * 4096, 4096).unwrap();
    }
    assert_eq!(front.queues[0].drain(PATIENCE).unwrap().len(), 3);
    let end = rig.stop().unwrap();
    assert_eq!(end, Outcome::Stopped);

    let path = rig.run_dir().join("inflight");
    let entry_bytes = (std::fs::metadata(&path).unwrap().len() - ENTRIES_AT) / 32;
    let table = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let word = |at| {
        let mut bytes = [0; 4];
        table.read_exact_at(&mut bytes, at).unwrap();
        u32::from_le_bytes(bytes)
    };
    let set = |at, value: u32| table.write_all_at(&value.to_le_bytes(), at).unwrap();
    assert_eq!(word(PUBLISHED_AT), 3);
    set(PUBLISHED_AT, 1);
    // How many entries were used depends on how many requests a sweep found: one is the model of all.
    let mut used = vec![0; entry_bytes as usize];
    table.read_exact_at(&mut used, ENTRIES_AT).unwrap();
    assert!(used[16..16 + 64].iter().any(|byte| *byte != 0), "the first entry was not used");
    for (entry, state) in [ANSWERING, TAKEN, TAKEN].into_iter().enumerate() {
        let at = ENTRIES_AT + entry as u64 * entry_bytes;
        table.write_all_at(&used, at).unwrap();
        set(at + REQ_INDEX_AT, entry as u32);
        set(at + RSP_INDEX_AT, entry as u32);
        set(at, state);
    }
    let ring = front.queues[0].ring();
    for _ in 0..2 {
        for lie in [0, 2, 3, 4] {
            ring.store(RingWord::RspProd, lie);
            rig.start();
            let end = Instant::now() + PATIENCE;
            while rig.is_running() {
                assert!(Instant::now() < end, "{lie} was taken over");
                std::thread::sleep(Duration::from_millis(1));
            }
            let error = rig.join().unwrap_err();
            assert!(matches!(error, ServeError::TakeOver(_)), "{lie}: {error}");
            assert_eq!(front.backend_state().unwrap(), 4);
        }
    }
    ring.store(RingWord::RspProd, 1);
    rig.start();
    let end = Instant::now() + PATIENCE;
    while ring.load(RingWord::RspProd) != 3 {
        assert!(Instant::now() < end, "two requests are left to be answered");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.stop().unwrap();
}
