//! A loopback machine with many guests, each with one disk, and its daemon as a process.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ferrite_daemon::control::client;
use ferrite_daemon::control::protocol::{Disks, Status};
use ferrite_disk::{ImageName, Parents};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_io::engines::EngineChoice;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::{Disk, DiskPaths};
use ferrite_loopback::{GuestOptions, Machine};
use ferrite_xen::hypervisor::DomId;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tempfile::TempDir;

/// Memory for the rings of four queues and some pages.
const GUEST: GuestOptions = GuestOptions { frames: 4096, grants: 8192, ports: 5 };
const QUEUES: u32 = 4;
const IMAGE_BYTES: u64 = 64 << 20;
/// The longest wait for one step of one disk.
const PATIENCE: Duration = Duration::from_secs(120);
/// Operations in flight while an image is made.
const ENTRIES: u32 = 16;
/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Descriptors of this process: those of all guests' event channels.
const DESCRIPTORS: u64 = 1 << 20;

/// The files of such a host, in one folder.
pub(crate) struct Places(pub(crate) PathBuf);

impl Places {
    pub(crate) fn guests(&self) -> PathBuf {
        self.0.join("guests")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.0.join("images")
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.0.join("run")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.0.join("state")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.0.join("xenstored")
    }
}

/// The machine, its toolstack, and its guests' frontends.
pub(super) struct Host {
    machine: Arc<Mutex<Machine>>,
    requests: Arc<Mutex<Vec<Arc<AtomicU64>>>>,
    daemon: Option<Child>,
    folder: TempDir,
}

impl Host {
    /// A machine with guests from 1 on, and without a daemon.
    pub(super) fn new(guests: u32) -> Result<Host> {
        let limit = getrlimit(Resource::Nofile);
        if limit.maximum.is_some_and(|most| most < DESCRIPTORS) {
            let more = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
            // In a container root may not raise it. Then fewer guests fit.
            if setrlimit(Resource::Nofile, more).is_err() {
                let all = Rlimit { current: limit.maximum, ..limit };
                setrlimit(Resource::Nofile, all).context("cannot have many descriptors")?;
            }
        }
        let folder = tempfile::Builder::new().prefix("ferrite-bench-").tempdir_in("/dev/shm")?;
        let mut machine = Machine::new()?;
        for _ in 0..guests {
            machine.add_guest(GUEST)?;
        }
        let (machine, requests) = (Arc::new(Mutex::new(machine)), Arc::default());
        let host = Host { machine, requests, daemon: None, folder };
        std::fs::create_dir(host.places().images())?;
        host.listen()?;
        Ok(host)
    }

    fn places(&self) -> Places {
        Places(self.folder.path().to_owned())
    }

    pub(super) fn run(&self) -> PathBuf {
        self.places().run()
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Listens at a socket to the store, as xenstored does.
    fn listen(&self) -> Result<()> {
        let listener = UnixListener::bind(self.places().store())?;
        let (machine, requests) = (Arc::downgrade(&self.machine), self.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(machine) = machine.upgrade() else { return };
                if stream.set_nonblocking(true).is_ok() {
                    let counter = lock(&machine).serve_connection(stream.into());
                    lock(&requests).push(counter);
                }
            }
        });
        Ok(())
    }

    /// Requests of the daemon to the store so far.
    pub(super) fn store_requests(&self) -> u64 {
        lock(&self.requests).iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Starts the daemon. Returns its process number.
    pub(super) fn start_daemon(&mut self) -> Result<u32> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("host-daemon").arg(self.folder.path()).stdin(Stdio::null());
        let offers = lock(&self.machine).offers();
        let guests = offers.into_iter().map(|(domid, offer)| format!("{domid} {offer}\n"));
        std::fs::write(self.places().guests(), guests.collect::<String>())?;
        let child = command.spawn().context("cannot start the daemon")?;
        let pid = child.id();
        self.daemon = Some(child);
        self.wait_for("the daemon", |host| Ok(host.status().is_ok_and(|status| status.xen)))?;
        Ok(pid)
    }

    /// Kills the daemon. The guests' disks are served on.
    pub(super) fn kill_daemon(&mut self) -> io::Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        daemon.kill()?;
        daemon.wait().map(drop)
    }

    /// Attaches the one disk of a guest, a raw image of its own.
    pub(super) fn attach(&self, domid: u32) -> Result<DiskPaths> {
        let image = self.places().images().join(format!("{domid}.img"));
        std::fs::File::create(&image)?.set_len(IMAGE_BYTES)?;
        self.attach_image(domid, format!("aio:{}", image.display()))
    }

    /// Attaches the one disk of a guest, a new VHD of this size.
    pub(super) fn attach_thin(&self, domid: u32, bytes: u64) -> Result<DiskPaths> {
        let image = self.places().images().join(format!("{domid}.vhd"));
        let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
        let tools = ImageTools {
            fixed_size: false,
            parents: Parents::default(),
            directory: &HostDirectory,
            unlocked: false,
            engine: &|arena| EngineChoice::Auto.open(arena, ENTRIES),
            state_dir: None,
            progress: &|_| true,
        };
        let text = image.to_str().context("a path is no UTF-8")?;
        tools.create(&ImageName::parse(text)?, &new)?;
        self.attach_image(domid, format!("vhd:{}", image.display()))
    }

    fn attach_image(&self, domid: u32, params: String) -> Result<DiskPaths> {
        let disk = Disk { params, ..Disk::xvd(0) };
        Ok(lock(&self.machine).attach_disk(DomId(u16::try_from(domid)?), disk)?)
    }

    /// Connects the guest to its disk.
    pub(super) fn connect(&self, disk: &DiskPaths) -> Result<Frontend> {
        let guest = lock(&self.machine).guest(disk.domid)?;
        let mut front = Frontend::new(guest, disk.devid)?;
        let options = FrontOptions { queues: QUEUES, ..FrontOptions::default() };
        front.connect(&options, PATIENCE)?;
        Ok(front)
    }

    /// Detaches a disk as xl does.
    pub(super) fn detach(&self, disk: &DiskPaths) -> Result<()> {
        lock(&self.machine).unplug(disk)?;
        self.wait_for("the end of a disk", |host| {
            Ok(lock(&host.machine).backend_state(disk)? == 6)
        })?;
        lock(&self.machine).remove_disk(disk)?;
        Ok(())
    }

    pub(super) fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
    ) -> Result<T> {
        let socket = self.run().join("control.sock");
        client::call(&socket, method, params, 10 * PATIENCE)
            .map_err(|e| anyhow::anyhow!("{method}: {e}"))
    }

    pub(super) fn status(&self) -> Result<Status> {
        self.call("daemon.status", &json!({}))
    }

    /// The process numbers of all keepers.
    pub(super) fn keepers(&self) -> Result<Vec<u32>> {
        let disks = self.call::<Disks>("disk.list", &json!({}))?.disks;
        Ok(disks.into_iter().filter_map(|disk| disk.pid).collect())
    }

    pub(super) fn wait_for_served(&self, disks: u32) -> Result<()> {
        self.wait_for("all disks", |host| {
            let status = host.status()?;
            Ok(status.served == disks && status.disks == disks)
        })
    }

    /// Waits until the daemon asks the store for nothing more. Returns how often it has asked.
    pub(super) fn at_rest(&self) -> u64 {
        let mut last = self.store_requests();
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let now = self.store_requests();
            if now == last {
                return now;
            }
            last = now;
        }
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Host) -> Result<bool>) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !done(self)? {
            if Instant::now() > end {
                bail!("waited for {what} for {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Keepers outlive their daemon, and workers end with their keepers.
        let keepers = self.keepers().unwrap_or_default();
        let _ = self.kill_daemon();
        for pid in keepers.into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn lock<T>(it: &Mutex<T>) -> MutexGuard<'_, T> {
    it.lock().unwrap_or_else(PoisonError::into_inner)
}
