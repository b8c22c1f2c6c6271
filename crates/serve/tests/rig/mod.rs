//! A loopback machine with one guest and one disk that a real backend serves: the lifecycle, the
//! queues and a storage engine as in production, only the hypervisor is the loopback's.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_io::clock::SystemClock;
use ferrite_io::uring::Uring;
use ferrite_serve::connection::{Device, Waker};
use ferrite_serve::lifecycle::{Config, EngineFactory, Outcome, ServeError, serve};
use ferrite_serve::negotiate::Offer;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::loopback::front::{FrontOptions, Frontend};
use ferrite_xen::loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_xen::loopback::{CopyWith, GuestOptions, Machine};
use tempfile::TempDir;

/// Long enough for anything that ends at all, on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What to build.
pub struct Plan {
    /// Bytes of the image.
    pub bytes: u64,
    pub offer: Offer,
    pub pool_bytes: usize,
    pub read_only: bool,
    pub copy_with: CopyWith,
    pub engine: EngineFactory,
    /// In place of a fresh sparse file.
    pub image: Option<PathBuf>,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            bytes: 64 << 20,
            offer: Offer { max_queues: 4, max_ring_order: 4, max_indirect_segments: 256 },
            pool_bytes: 8 << 20,
            read_only: false,
            copy_with: CopyWith::Memcpy,
            engine: Arc::new(|arena, entries| Ok(Box::new(Uring::new(arena, entries)?))),
            image: None,
        }
    }
}

/// The machine, and the backend in a thread of this process.
pub struct Rig {
    pub machine: Machine,
    pub domid: DomId,
    pub disk: DiskPaths,
    pub dir: TempDir,
    pub image: PathBuf,
    plan: Plan,
    backend: Option<(Arc<Waker>, JoinHandle<Result<Outcome, ServeError>>)>,
}

impl Rig {
    /// A machine whose backend runs and waits for a frontend.
    pub fn new(plan: Plan) -> Rig {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(GuestOptions::default()).unwrap();
        let disk = machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let image = plan.image.clone().unwrap_or_else(|| dir.path().join("disk.img"));
        if plan.image.is_none() {
            std::fs::File::create(&image).unwrap().set_len(plan.bytes).unwrap();
        }
        let mut rig = Rig { machine, domid, disk, dir, image, plan, backend: None };
        rig.start();
        rig
    }

    /// Starts a backend (again).
    pub fn start(&mut self) {
        let options = OpenOptions { read_only: self.plan.read_only, wait_for_lock: Some(PATIENCE) };
        let disk = Disk::open(self.image.to_str().unwrap(), &options).unwrap();
        let device = Arc::new(Device::new(disk, SystemClock::shared()));
        let stop = Arc::new(Waker::new().unwrap());
        let mut store = self.machine.store().unwrap();
        let hypervisor = self.machine.loopback(self.plan.copy_with).unwrap();
        let config = Config {
            backend: self.disk.backend.clone(),
            domid: self.domid,
            devid: self.disk.devid,
            offer: self.plan.offer,
            pool_bytes: self.plan.pool_bytes,
            run_dir: self.dir.path().to_owned(),
            engine: self.plan.engine.clone(),
        };
        let stopper = stop.clone();
        let thread =
            std::thread::spawn(move || serve(&mut store, &hypervisor, &device, &config, &stop));
        self.backend = Some((stopper, thread));
    }

    /// Asks the backend to stop, and gives what it ended with.
    pub fn stop(&mut self) -> Result<Outcome, ServeError> {
        let (stop, thread) = self.backend.take().expect("a backend runs");
        stop.wake();
        thread.join().expect("the backend does not panic")
    }

    /// Waits for a backend that ends by itself.
    pub fn join(&mut self) -> Result<Outcome, ServeError> {
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

    /// What the medium holds.
    pub fn medium(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }

    /// The backend's run directory.
    pub fn run_dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.backend.take() {
            stop.wake();
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.expect("the backend does not panic").unwrap();
            }
        }
    }
}
