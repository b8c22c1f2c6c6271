//! A loopback machine with one guest and one disk that a real backend serves. Lifecycle, queues and storage engine are
//! those of production; only the hypervisor is the loopback's.

#![allow(dead_code, unreachable_pub, reason = "a unit test of the backend has it as a module, too")]

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions, TestCheck};
use ferrite_host::clock::{Clock, SystemClock};
use ferrite_io::engines::test_engine;
use ferrite_io::pool::HostMemory;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{CopyWith, GuestOptions, Machine};
use ferrite_serve::blkif::lifecycle::{
    Attachment, Config, EngineFactory, ExpectedAttachment, FollowConfig, Outcome, ServeError,
    WAIT_FOR_HOST, WorkConfig, run_dir_name, serve,
};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::path::limit::Limits;
use ferrite_serve::processors::Processors;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::{PATIENCE, images};
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use ferrite_xen::mover::{Budget, Counts, DISK_MAPPINGS, Maps, Mover, Moving};
use ferrite_xen::store::Store;
use tempfile::TempDir;

/// The mover of the tests.
pub fn mover() -> Mover {
    let mover = std::env::var("FERRITE_TEST_MOVER").ok();
    mover.map_or(Mover::Copy, |m| m.parse().expect("FERRITE_TEST_MOVER is a mover"))
}

/// Moves data by that mover, within that budget.
pub fn moving(mover: Mover, budget: Budget) -> Moving {
    Moving { mover, maps: Maps::new(budget, SystemClock::shared()) }
}

/// The features that disks offer.
pub fn offer() -> Offer {
    Offer {
        max_queues: 4,
        max_ring_order: 4,
        max_indirect_segments: 256,
        persistent: mover() == Mover::Persistent,
    }
}

/// A factory that makes one engine for each queue.
pub fn engines() -> EngineFactory {
    let kind = test_engine();
    Arc::new(move |arena, entries| kind.open(arena, entries))
}

/// The usual configuration of a backend for this disk.
pub fn config(disk: &DiskPaths, run_dir: PathBuf) -> Config {
    Config {
        follow: follow_config(disk),
        work: work_config(disk.domid, run_dir),
        engine: engines(),
    }
}

/// The configuration of the half that follows the store.
pub fn follow_config(disk: &DiskPaths) -> FollowConfig {
    let backend = disk.backend.clone();
    FollowConfig {
        backend,
        domid: disk.domid,
        devid: disk.devid,
        offer: offer(),
        attached: ExpectedAttachment::Any,
        ahead: None,
        defers: false,
    }
}

/// The configuration of the half that serves.
pub fn work_config(domid: DomId, run_dir: PathBuf) -> WorkConfig {
    WorkConfig {
        domid,
        wait_for_host: WAIT_FOR_HOST,
        pool_bytes: 8 << 20,
        host_memory: None,
        run_dir,
        closes: true,
        stays: false,
        tuning: Tuning::default(),
        on_full: OnFull::default(),
        limits: Limits::default(),
        processors: Arc::default(),
        counters: Counters::default(),
        moving: moving(mover(), Budget::of_disk(DISK_MAPPINGS)),
    }
}

/// A clock that a test advances.
#[derive(Default)]
pub struct Hands(AtomicU64);

impl Hands {
    /// Advances the clock.
    pub fn turn(&self, how_far: Duration) {
        self.0.fetch_add(how_far.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for Hands {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn sleep(&self, how_long: Duration) {
        self.turn(how_long);
    }
}

/// Makes a disk, each time a backend starts.
pub type MakeDisk = Box<dyn Fn() -> Disk + Send>;

/// The properties of a rig.
pub struct Plan {
    /// Bytes of the image.
    pub bytes: u64,
    /// The offered features.
    pub offer: Offer,
    /// Memory for data.
    pub pool_bytes: usize,
    /// The budget by which that may grow.
    pub host_memory: Option<Arc<HostMemory>>,
    /// Whether the image is opened read-only.
    pub read_only: bool,
    /// The hypervisor's method of grant copies.
    pub copy_with: CopyWith,
    /// The factory of the engines of all queues.
    pub engine: EngineFactory,
    /// The options of queues.
    pub tuning: Tuning,
    /// The handling of requests without space.
    pub on_full: OnFull,
    /// The disk's limits of the host's processors.
    pub processors: Arc<Processors>,
    /// The clock of the disk's limits.
    pub clock: Arc<dyn Clock>,
    /// The mover of `FERRITE_TEST_MOVER`, grant copy if it is not set.
    pub moving: Moving,
    /// An image instead of a new sparse file.
    pub image: Option<PathBuf>,
    /// The function that makes the disk, instead of opening an image.
    pub disk: Option<MakeDisk>,
    /// The size of the guest.
    pub guest: GuestOptions,
    /// The check of its data.
    pub check: Option<TestCheck>,
    /// Additional keys of the backend from the toolstack.
    pub backend_keys: Vec<(&'static str, String)>,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            bytes: 64 << 20,
            offer: offer(),
            pool_bytes: 8 << 20,
            host_memory: None,
            read_only: false,
            copy_with: CopyWith::Memcpy,
            engine: engines(),
            tuning: Tuning::default(),
            on_full: OnFull::default(),
            processors: Arc::default(),
            clock: SystemClock::shared(),
            moving: moving(mover(), Budget::of_disk(DISK_MAPPINGS)),
            image: None,
            disk: None,
            guest: GuestOptions::default(),
            check: None,
            backend_keys: Vec::new(),
        }
    }
}

impl Plan {
    fn virtual_disk(&self) -> VirtualDisk {
        VirtualDisk { backend_keys: self.backend_keys.clone(), ..VirtualDisk::xvd(0) }
    }
}

type Running = JoinHandle<Result<Outcome, ServeError>>;

/// The machine, and the backend in a thread of this process.
pub struct Rig {
    /// The machine, with its store and hypervisor.
    pub machine: Machine,
    /// The guest.
    pub domid: DomId,
    /// The disk's paths in the store.
    pub disk: DiskPaths,
    /// The directory with the run directory, and with the image if the plan has none.
    pub dir: TempDir,
    /// The served image.
    pub image: PathBuf,
    /// The counters of all queues.
    pub counters: Counters,
    run_dir: PathBuf,
    plan: Plan,
    backend: Option<(Arc<Waker>, Running)>,
    /// The device that was started last.
    device: Weak<Device>,
}

impl Rig {
    /// A machine whose backend runs and waits for a frontend.
    pub fn new(plan: Plan) -> Rig {
        let mut rig = Rig::without_backend(plan);
        rig.start();
        rig
    }

    /// A machine whose backend is not started.
    pub fn without_backend(plan: Plan) -> Rig {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(plan.guest).unwrap();
        let disk = machine.attach_disk(domid, plan.virtual_disk()).unwrap();
        let dir = dir_in_memory();
        let image = plan.image.clone().unwrap_or_else(|| dir.path().join("disk.img"));
        if plan.image.is_none() {
            std::fs::File::create(&image).unwrap().set_len(plan.bytes).unwrap();
        }
        let counters = Counters::default();
        let run_dir = dir.path().join(run_dir_name(domid, disk.devid));
        Rig {
            machine,
            domid,
            disk,
            dir,
            image,
            counters,
            run_dir,
            plan,
            backend: None,
            device: Weak::new(),
        }
    }

    /// Attaches the disk (again), as the toolstack does.
    pub fn attach(&mut self) {
        self.disk = self.machine.attach_disk(self.domid, self.plan.virtual_disk()).unwrap();
    }

    /// Restarts the guest under another number, with a new disk.
    pub fn reboot(&mut self) {
        self.machine.destroy(self.domid).unwrap();
        assert_eq!(self.join().unwrap(), Outcome::Unplugged);
        self.machine.remove_disk(&self.disk.clone()).unwrap();
        self.domid = self.machine.add_guest(self.plan.guest).unwrap();
        self.attach();
        self.run_dir = self.dir.path().join(run_dir_name(self.domid, self.disk.devid));
    }

    /// Starts a backend (again).
    pub fn start(&mut self) {
        let store = self.machine.store().unwrap();
        let hypervisor = self.machine.loopback(self.plan.copy_with).unwrap();
        self.start_with(store, Box::new(hypervisor));
    }

    /// Starts a backend with another connection to the store or to the guest.
    pub fn start_with(&mut self, mut store: Store, hypervisor: Box<dyn Hypervisor>) {
        let attachment = Attachment::read(&mut store, &self.disk.backend, self.domid);
        let options = OpenOptions {
            read_only: self.plan.read_only || matches!(attachment, Ok(Some(a)) if a.read_only),
            wait_for_lock: Some(PATIENCE),
            state_dir: Some(images::state_dir(&self.image)),
            ..OpenOptions::default()
        };
        let disk = match &self.plan.disk {
            Some(make) => make(),
            None => Disk::open(self.image.to_str().unwrap(), &options).unwrap(),
        };
        if let Some(check) = &self.plan.check {
            disk.set_check(check.clone());
        }
        let device = Device::new(disk, self.plan.clock.clone()).on_full(self.plan.on_full);
        let device = Arc::new(device);
        self.device = Arc::downgrade(&device);
        let stop = Arc::new(Waker::new().unwrap());
        let config = Config {
            follow: FollowConfig { offer: self.plan.offer, ..follow_config(&self.disk) },
            work: WorkConfig {
                pool_bytes: self.plan.pool_bytes,
                host_memory: self.plan.host_memory.clone(),
                tuning: self.plan.tuning,
                processors: self.plan.processors.clone(),
                counters: self.counters.clone(),
                moving: self.plan.moving.clone(),
                ..work_config(self.domid, self.run_dir.clone())
            },
            engine: self.plan.engine.clone(),
        };
        let stopper = stop.clone();
        let thread =
            std::thread::spawn(move || serve(&mut store, &*hypervisor, &device, &config, &stop));
        self.backend = Some((stopper, thread));
    }

    /// The served device. Not to be kept.
    pub fn device(&self) -> Arc<Device> {
        self.device.upgrade().unwrap()
    }

    /// Stops the backend; returns its result.
    pub fn stop(&mut self) -> Result<Outcome, ServeError> {
        let (stop, thread) = self.backend.take().expect("a backend runs");
        stop.wake();
        thread.join().expect("the backend does not panic")
    }

    /// Waits for a backend that ends by itself.
    pub fn join(&mut self) -> Result<Outcome, ServeError> {
        let end = Instant::now() + PATIENCE;
        while self.is_running() {
            assert!(Instant::now() < end, "the backend does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (_, thread) = self.backend.take().expect("a backend runs");
        thread.join().expect("the backend does not panic")
    }

    /// Whether the backend still runs.
    pub fn is_running(&self) -> bool {
        self.backend.as_ref().is_some_and(|(_, thread)| !thread.is_finished())
    }

    /// A frontend that has not begun its handshake.
    pub fn frontend(&self) -> Frontend {
        Frontend::new(self.machine.guest(self.domid).unwrap(), self.disk.devid).unwrap()
    }

    /// A connected frontend.
    pub fn connect(&self, options: &FrontOptions) -> Frontend {
        let mut front = self.frontend();
        front.connect(options, PATIENCE).unwrap();
        front
    }

    /// The error that the backend has reported in the store; reading removes it.
    pub fn take_error(&mut self) -> Option<String> {
        let path = self.disk.backend.replace("/local/domain/0/", "/local/domain/0/error/");
        let path = format!("{path}/error");
        let mut store = self.machine.store().unwrap();
        let said = store.read_string(&path).unwrap();
        if said.is_some() {
            store.remove(&path).unwrap();
        }
        said
    }

    /// Waits for [`take_error`](Self::take_error) to give one.
    pub fn wait_for_error(&mut self) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(said) = self.take_error() {
                return said;
            }
            assert!(Instant::now() < end, "no error was reported");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The content of the medium.
    pub fn medium(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }

    /// The content of the medium from a sector on.
    pub fn sectors(&self, sector: u64, bytes: usize) -> Vec<u8> {
        let mut file = std::fs::File::open(&self.image).unwrap();
        file.seek(SeekFrom::Start(sector * 512)).unwrap();
        let mut data = vec![0; bytes];
        file.read_exact(&mut data).unwrap();
        data
    }

    /// Sets the mover of the next backend.
    pub fn change_mover(&mut self, mover: Mover) {
        self.plan.moving = moving(mover, Budget::of_disk(DISK_MAPPINGS));
        self.plan.offer.persistent = mover == Mover::Persistent;
    }

    /// Sets the offered features of the next backend.
    pub fn change_offer(&mut self, offer: Offer) {
        self.plan.offer = offer;
    }

    /// Sets the data memory of the next backend.
    pub fn change_pool(&mut self, bytes: usize) {
        self.plan.pool_bytes = bytes;
    }

    /// The mappings that its movers have claimed from the budget.
    pub fn claimed_mappings(&self) -> usize {
        self.plan.moving.maps.budget().claimed()
    }

    /// The counts of its movers.
    pub fn counts(&self) -> Counts {
        self.plan.moving.maps.counts()
    }

    /// The backend's run directory.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.backend.take() {
            stop.wake();
            // A test that has failed because the backend hangs would hang, too.
            if !std::thread::panicking() {
                thread.join().expect("the backend does not panic").unwrap();
            }
        }
    }
}
