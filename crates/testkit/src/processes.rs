//! Backends as processes, and a guest that keeps them busy and checks its answers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::{Random, SplitMix64, SystemClock};
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_serve::blkif::lifecycle::{Outcome, serve};
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::waker::Waker;
use ferrite_xen::abi::{PlainOp, RawSegment};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::Store;

use crate::devices::Loop;
use crate::places::dir_in_memory;
use crate::rig::config;
use crate::{PATIENCE, images, wait_until};

mod sandboxed;

/// Bytes of a chunk. Each chunk has one request at a time.
pub const CHUNK: u64 = 256 << 10;
/// Sectors of a chunk.
const CHUNK_SECTORS: u64 = CHUNK / 512;
/// The number of chunks of a disk.
pub const CHUNKS: u64 = 128;
const DEVID: u32 = 202 << 8;
/// The most requests in flight per queue.
const DEPTH: usize = 48;

const BACKEND: &str = "FERRITE_TEST_BACKEND";
const IMAGE: &str = "FERRITE_TEST_IMAGE";
/// The environment variable with the backend's run directory.
pub const RUN_DIR: &str = "FERRITE_TEST_RUN_DIR";
/// The environment variable for a backend with a keeper and without rights.
const SANDBOXED: &str = "FERRITE_TEST_SANDBOXED";
const COPY_WITH: &str = "FERRITE_TEST_COPY_WITH";

/// The value of a backend's environment variable.
pub fn env(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// The descriptors above this one that this process has inherited from its parent: they lead to guests, and are passed
/// on.
pub fn inherited(above: RawFd) -> Vec<RawFd> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().file_name());
    let fds = fds.filter_map(|fd| fd.into_string().unwrap().parse::<RawFd>().ok());
    // Without the close-on-exec flag.
    let is_inherited = |fd: &RawFd| {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & 0o2_000_000 == 0)
    };
    fds.filter(|fd| *fd > above && is_inherited(fd)).collect()
}

/// Runs the backend, if this program was started again with that environment. While it serves, `beside` runs in a
/// thread of its own.
pub fn be_a_backend(beside: impl FnOnce(&Arc<Device>, &Path, &Counters) + Send) {
    let Ok(handle) = std::env::var(BACKEND) else { return };
    if std::env::var_os(SANDBOXED).is_some() {
        return sandboxed::keep(|keeper| serve_as(&handle, Some(keeper), beside));
    }
    serve_as(&handle, None, beside);
}

/// Serves; with a keeper's socket, by its names and without rights.
fn serve_as(
    handle: &str,
    keeper: Option<OwnedFd>,
    beside: impl FnOnce(&Arc<Device>, &Path, &Counters) + Send,
) {
    let handle = BackendHandle::from_arg(handle).unwrap();
    let loopback = Loopback::new(env(COPY_WITH).parse::<CopyWith>().unwrap());
    let add = |guest| match &keeper {
        None => loopback.add(guest).unwrap(),
        // The worker before this one ends a moment after its keeper.
        Some(_) => wait_until("the end of another worker", || loopback.add(guest).is_ok()),
    };
    handle.guests.iter().for_each(add);
    if let Some(keeper) = keeper {
        sandboxed::give_rights_up(keeper);
    }
    let device = Arc::new(Device::new(open(env(IMAGE).as_ref()), SystemClock::shared()));
    let counters = Counters::default();
    let mut config = config(&DiskPaths::new(DomId(1), DEVID), env(RUN_DIR).into());
    config.work.counters = counters.clone();
    let mut store = Store::from_fd(handle.store);
    let stop = Waker::new().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| beside(&device, env(IMAGE).as_ref(), &counters));
        let outcome = serve(&mut store, &loopback, &device, &config, &stop).unwrap();
        assert_eq!(outcome, Outcome::Unplugged);
    });
}

/// Opens an image as a backend with a killed predecessor does.
pub fn open(image: &Path) -> Disk {
    let state_dir = Some(images::state_dir(image));
    let wait_for_lock = Some(PATIENCE);
    let options = OpenOptions { wait_for_lock, state_dir, ..OpenOptions::default() };
    Disk::open(image, &options).unwrap()
}

/// A machine whose backends are processes.
pub struct World {
    /// The machine, with its store and hypervisor.
    pub machine: Machine,
    /// The disk's paths in the store.
    pub disk: DiskPaths,
    dir: tempfile::TempDir,
    copy_with: CopyWith,
    device: Option<Loop>,
    /// An image instead of `disk.img`.
    image: RefCell<Option<PathBuf>>,
    sandboxed: bool,
}

impl World {
    /// A machine with a guest and a raw disk.
    pub fn new(copy_with: CopyWith) -> World {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(GuestOptions::default()).unwrap();
        let disk = machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap();
        assert_eq!((disk.domid, disk.devid), (DomId(1), DEVID));
        let dir = dir_in_memory();
        let image = std::fs::File::create(dir.path().join("disk.img")).unwrap();
        image.set_len(CHUNKS * CHUNK).unwrap();
        World {
            machine,
            disk,
            dir,
            copy_with,
            device: None,
            image: RefCell::default(),
            sandboxed: false,
        }
    }

    /// The run directory of backends.
    pub fn run_dir(&self) -> &Path {
        self.dir.path()
    }

    /// A machine with an image of this format.
    pub fn with_format(format: &str) -> World {
        let world = World::new(CopyWith::Memcpy);
        let image = images::make(world.dir.path(), format, CHUNKS * CHUNK);
        world.serve_from(image);
        world
    }

    /// A machine with a medium with blocks of 4096 bytes, if possible.
    pub fn with_large_blocks(copy_with: CopyWith) -> Option<World> {
        let world = World::new(copy_with);
        let device = Some(Loop::attach(&world.image(), 4096)?);
        Some(World { device, ..world })
    }

    /// Later backends have a keeper each, and no rights.
    pub fn sandboxed(self) -> World {
        World { sandboxed: true, ..self }
    }

    /// The served image.
    pub fn image(&self) -> PathBuf {
        match (&self.device, &*self.image.borrow()) {
            (Some(device), _) => device.0.clone(),
            (None, Some(image)) => image.clone(),
            (None, None) => self.dir.path().join("disk.img"),
        }
    }

    /// Later backends serve this image.
    pub fn serve_from(&self, image: PathBuf) {
        self.image.replace(Some(image));
    }

    /// Starts a backend: this program, with the test `process_backend`.
    pub fn spawn(&self) -> Child {
        self.spawn_with(&[])
    }

    /// Starts a backend with additional environment variables.
    pub fn spawn_with(&self, more: &[(&str, &str)]) -> Child {
        self.command(more).spawn().unwrap()
    }

    /// The command of a backend.
    pub fn command(&self, more: &[(&str, &str)]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process_backend", "--nocapture", "--test-threads=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let handle = self.machine.backend().unwrap().pass_to(&mut command);
        command.env(BACKEND, handle).env(COPY_WITH, self.copy_with.to_string());
        command.env(IMAGE, self.image()).env(RUN_DIR, self.dir.path());
        if self.sandboxed {
            // A backtrace reads files, and so does the heap of a test's thread.
            command.env(SANDBOXED, "yes").env("RUST_BACKTRACE", "0").env("MALLOC_ARENA_MAX", "1");
        }
        command.envs(more.iter().copied());
        command
    }

    /// Starts backends and kills all but the last one, each after some progress or even before.
    pub fn kill_backends(
        &self,
        kills: u32,
        progress: &AtomicU64,
        random: &mut SplitMix64,
    ) -> Child {
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

    /// Ends the disk, and checks that its last backend ends successfully.
    pub fn end(mut self, mut front: Frontend, mut last: Child) {
        let space = front.space().clone();
        front.close(PATIENCE).unwrap();
        self.machine.unplug(&self.disk.clone()).unwrap();
        assert!(last.wait().unwrap().success());
        assert_eq!((space.memory().grants().users(), space.memory().bound_ports()), (0, 0));
        assert!(!self.dir.path().join("inflight").exists());
    }
}

/// The content of a sector: its writer, and its place.
pub fn word(stamp: u32, sector: u64) -> [u8; 8] {
    (u64::from(stamp) << 32 | sector).to_le_bytes()
}

fn assert_sector(bytes: &[u8], stamp: u32, sector: u64, what: &str) {
    let expected = if stamp == 0 { [0; 8] } else { word(stamp, sector) };
    let ok = bytes == expected.repeat(bytes.len() / 8);
    assert!(ok, "{what}: sector {sector} is not that of write {stamp}: {:x?}", &bytes[..16]);
}

/// A request in flight.
struct Asked {
    chunk: usize,
    write: Option<u32>,
    sector: u64,
    sectors: u64,
    buffer: usize,
}

/// The load of one queue, on chunks of its own, each with one request at a time. So the expected data of each read are
/// known to the byte.
pub struct Load {
    queue: FrontQueue,
    /// The writer of each sector.
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
        let chunks = CHUNKS / queues;
        Load::on(front, queue, index * chunks..(index + 1) * chunks, seed + index)
    }

    /// A load on these chunks, of [`CHUNKS`].
    pub fn on(front: &Frontend, queue: FrontQueue, chunks: Range<u64>, seed: u64) -> Load {
        let first_chunk = chunks.start;
        let chunks = (chunks.end - chunks.start) as usize;
        let depth = DEPTH.min(queue.free_slots());
        Load {
            queue,
            written: vec![vec![0; CHUNK_SECTORS as usize]; chunks],
            first_chunk,
            idle: (0..chunks).collect(),
            buffers: (0..depth).map(|_| front.space().buffer(64).unwrap()).collect(),
            free_buffers: (0..depth).collect(),
            asked: HashMap::new(),
            random: SplitMix64::new(seed),
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
        // Mostly small, some of the largest size.
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
            // At times a barrier, which must be alone on the disk.
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

    /// Keeps the queue full until told to stop, then waits for requests in flight; sleeps as a guest does, until an
    /// event comes.
    pub fn run(mut self, stop: &AtomicBool, progress: &AtomicU64) -> Load {
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

    /// Checks that answered writes are in the image.
    pub fn check(&self, image: &[u8]) {
        for (chunk, written) in self.written.iter().enumerate() {
            for (i, stamp) in written.iter().enumerate() {
                let sector = (self.first_chunk + chunk as u64) * CHUNK_SECTORS + i as u64;
                assert_sector(&image[sector as usize * 512..][..512], *stamp, sector, "image");
            }
        }
    }
}

/// Keeps a guest busy while its backends are killed, and compares the answered data.
pub fn killed_under_load(world: World, options: FrontOptions, kills: u32, seed: u64) {
    let mut random = SplitMix64::new(seed ^ 0xD1E);
    under_load(world, options, seed, |world, progress| {
        world.kill_backends(kills, progress, &mut random)
    });
}

/// Keeps a guest busy while `deaths` replaces backends, the last of which serves; compares the answered data.
pub fn under_load(
    world: World,
    options: FrontOptions,
    seed: u64,
    deaths: impl FnOnce(&World, &AtomicU64) -> Child,
) {
    let mut first = world.spawn();
    let guest = Guest::connect(&world, &options, seed);
    std::thread::sleep(Duration::from_millis(30));
    first.kill().unwrap();
    first.wait().unwrap();
    let last = deaths(&world, &guest.progress);
    guest.wait_for(200);
    let (front, loads) = guest.stop();
    // Killed once more before the image is compared: answered writes count, not only flushed ones.
    let mut last = last;
    last.kill().unwrap();
    last.wait().unwrap();
    let contents = images::contents(&world.image());
    loads.iter().for_each(|load| load.check(&contents));
    let last = world.spawn();
    let front = go_on(front, loads);
    world.end(front, last);
}

/// A guest that keeps its disk busy.
pub struct Guest {
    front: Frontend,
    stop: Arc<AtomicBool>,
    /// The number of answered requests.
    pub progress: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<Load>>,
}

impl Guest {
    /// A guest whose backend exists, or will be started.
    pub fn connect(world: &World, options: &FrontOptions, seed: u64) -> Guest {
        Guest::of(&world.machine, &world.disk, options, seed)
    }

    /// The guest of a disk with [`CHUNKS`].
    pub fn of(machine: &Machine, disk: &DiskPaths, options: &FrontOptions, seed: u64) -> Guest {
        let guest = machine.guest(disk.domid).unwrap();
        let mut front = Frontend::new(guest, disk.devid).unwrap();
        front.connect(options, PATIENCE).unwrap();
        let (stop, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let queues = std::mem::take(&mut front.queues);
        let count = queues.len() as u64;
        let threads = queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| {
                let load = Load::new(&front, queue, i as u64, count, seed);
                let (stop, progress) = (stop.clone(), progress.clone());
                std::thread::spawn(move || load.run(&stop, &progress))
            })
            .collect();
        Guest { front, stop, progress, threads }
    }

    /// Waits for so many more answers.
    pub fn wait_for(&self, answers: u64) {
        let before = self.progress.load(Ordering::Relaxed);
        let end = Instant::now() + PATIENCE;
        while self.progress.load(Ordering::Relaxed) < before + answers {
            assert!(Instant::now() < end, "the backend serves nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until all of its requests are answered.
    pub fn stop(self) -> (Frontend, Vec<Load>) {
        self.stop.store(true, Ordering::Relaxed);
        let loads = self.threads.into_iter().map(|thread| thread.join().unwrap());
        (self.front, loads.collect())
    }
}

/// Continues a guest whose backend serves on, with its earlier load.
pub fn go_on(mut front: Frontend, loads: Vec<Load>) -> Frontend {
    front.queues.extend(loads.into_iter().map(|load| load.queue));
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        queue.read(0, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "the last backend serves");
    }
    assert_eq!(front.backend_state().unwrap(), 4);
    front
}
