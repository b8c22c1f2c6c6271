//! Serves all disks of a host: from when the toolstack attaches them in xenstore until it detaches
//! them.
//!
//! * [`config`]: the daemon's configuration.
//! * [`params`]: which image the toolstack has named.
//! * [`state`]: the files that tell the next daemon which disks are served.
//! * [`table`]: the disks that this daemon knows.
//! * [`control`]: the control socket.
//! * [`jobs`]: what takes longer than a second.
//!
//! The code that serves a disk is behind [`Serving`]: this crate has no rings and opens no images.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ferrite_host::clock::{Clock, SystemClock};
use ferrite_host::lock_file::lock;
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_serve::log_limit::SharedLogLimit;
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::Domains;
use ferrite_xen::store::{Store, StoreError};

mod asking;
mod assignment;
mod beside;
mod blktap;
pub mod config;
pub mod control;
mod devices;
pub mod directory;
mod exports;
mod follow;
mod hanging;
pub mod jobs;
mod joint_upgrade;
pub mod keepers;
pub mod migration;
mod moved;
pub mod new_leaf;
mod newcomers;
mod openings;
pub mod orphan;
pub mod params;
pub mod pause;
mod pending;
mod priorities;
mod siblings;
mod standalone;
pub mod state;
mod state_files;
mod step;
mod supervise;
pub mod suspended;
mod switched;
pub mod table;
mod taps;
mod tuning;
mod unserved;
mod verbs;
mod vhost;
mod wait;
mod writers;

pub use assignment::Assignment;
use blktap::Names;
use config::{Config, DiskOptions};
use devices::Devices;
use exports::Exports;
use hanging::Hanging;
use jobs::{Jobs, Means};
use migration::Migrations;
use openings::Openings;
pub use standalone::{Standalone, is_standalone};
use state::{DiskId, States};
pub use step::Step;
use switched::Switched;
use table::Table;
use taps::Taps;
use vhost::FrontEnds;
use writers::Writers;

/// The reason why a disk is not served, with the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The failed step and its reason.
    pub why: String,
    /// The next step for the administrator.
    pub help: String,
}

impl Failure {
    fn store(e: &StoreError) -> Failure {
        let help = "ferrite tries again; ferrite doctor shows what is missing".to_owned();
        Failure { why: e.to_string(), help }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.help)
    }
}

/// The use of a connection that XAPI has passed to a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// The tap is served on it, with the handshake of the old style.
    Server,
    /// The tap is served on it, with the handshake that has options.
    ServerWithOptions,
    /// The tap's writes go to the disk behind it.
    Client,
}

/// The code that serves disks.
pub trait Serving: Send + Sync {
    /// Serves a disk until it is unplugged or `stop` is woken. It takes over from a predecessor.
    ///
    /// # Errors
    /// The disk cannot be served now. Its guest was told nothing, and the caller tries again.
    fn serve(
        &self,
        disk: &Assignment<'_>,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure>;

    /// Keeps a tap open that has no guest, until `stop` is woken.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    fn hold(&self, _: &Assignment<'_>, _: &Waker) -> Result<Outcome, Failure> {
        Err(Failure { why: "taps are served by keepers".to_owned(), help: String::new() })
    }

    /// Starts a keeper that has no disk yet. Returns its process number.
    ///
    /// # Errors
    /// It cannot be started.
    fn spawn(&self) -> Result<u32, Failure> {
        Err(Failure { why: "taps are served by keepers".to_owned(), help: String::new() })
    }

    /// The process numbers of keepers without a disk. Files of dead ones are removed.
    fn spares(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Replaces the program of the keepers without a disk. Their process numbers stay.
    fn upgrade_spares(&self, _: &Path) {}

    /// Gives a keeper without a disk this tap. `false`: there is no such keeper.
    ///
    /// # Errors
    /// The keeper has no disk still.
    fn give(&self, _: u32, _: DiskId) -> Result<bool, Failure> {
        Ok(false)
    }

    /// Takes the image from the keeper of a tap whose worker has closed it. Returns the process number of the tap's
    /// keeper if another process keeps it from here on.
    ///
    /// # Errors
    /// The image is closed, and the next worker may open it.
    fn empty(&self, _: DiskId) -> Result<Option<u32>, Failure> {
        Ok(None)
    }

    /// Hands a client that is none of NBD to the worker of a disk, with its descriptors.
    ///
    /// # Errors
    /// There is no keeper, or it does not take the client.
    fn client(
        &self,
        _: DiskId,
        _about: &str,
        _files: &[std::os::fd::BorrowedFd<'_>],
    ) -> std::io::Result<()> {
        Err(std::io::Error::other("clients are handed over by keepers"))
    }

    /// A command that becomes the exporter of a disk. `None`: disks are not exported.
    fn exporter(&self, _: DiskId) -> Option<std::process::Command> {
        None
    }

    /// A command that becomes the process of a connection that XAPI has passed to a tap. Its standard input is the
    /// connection. `None`: there are no such processes.
    fn passing(&self, _: Passing) -> Option<std::process::Command> {
        None
    }

    /// The process number of a disk's keeper.
    fn keeper_of(&self, _: DiskId) -> Option<u32> {
        None
    }

    /// Serves a stub domain's disk with the worker of its guest's disk, `first`.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    fn serve_beside(
        &self,
        disk: &Assignment<'_>,
        first: DiskId,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure>;

    /// Removes everything that the worker of `first` has of a stub domain's disk that is gone.
    ///
    /// # Errors
    /// The disk may still be served.
    fn part(&self, disk: DiskId, first: DiskId) -> Result<(), Failure>;

    /// Has the worker of a paused disk close its image, if it is open. Its guest waits. Returns the
    /// process number of the disk's keeper, if there is one.
    ///
    /// # Errors
    /// The image may be open.
    fn close(&self, _: DiskId, _: &Waker) -> Result<Option<u32>, Failure> {
        Ok(None)
    }

    /// Replaces the program of a paused disk's keeper and worker.
    ///
    /// # Errors
    /// The old program stays.
    fn upgrade_closed(&self, _: DiskId, _: &Path) -> Result<(), Failure> {
        Ok(())
    }

    /// Removes everything that is left of a disk that is gone.
    fn remove(&self, disk: DiskId);

    /// Removes an older disk of this name. Its end may have been missed.
    ///
    /// # Errors
    /// The older disk may still be served.
    fn remove_older(&self, disk: DiskId) -> Result<(), Failure>;

    /// The options that a disk is served with, if they are known. An earlier configuration may have
    /// set them.
    fn options(&self, _: DiskId) -> Option<DiskOptions> {
        None
    }

    /// The disks that have a keeper or files of one. This daemon may not know them.
    fn kept_disks(&self) -> Vec<DiskId>;
}

/// Opens a connection to xenstore.
pub type Connect = Box<dyn Fn() -> Result<Store, StoreError> + Send + Sync>;

/// The paths of everything that outlives the daemon.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The run directory, on tmpfs: its contents concern running guests only.
    pub run: PathBuf,
}

impl Default for Paths {
    fn default() -> Paths {
        Paths { run: PathBuf::from("/run/ferrite") }
    }
}

impl Paths {
    /// The path of the control socket.
    pub fn control(&self) -> PathBuf {
        self.run.join("control.sock")
    }

    /// The directory of the state files.
    pub fn states(&self) -> PathBuf {
        self.run.join("disks")
    }

    /// The directory of the maps of mirrors.
    pub fn mirrors(&self) -> PathBuf {
        self.run.join("mirrors")
    }

    /// The directory of the state files of jobs.
    pub fn jobs(&self) -> PathBuf {
        self.run.join("jobs")
    }

    /// The folder of the files that XAPI's monitoring reads.
    pub(crate) fn shared_memory(&self) -> PathBuf {
        match self.run == Paths::default().run {
            true => PathBuf::from("/dev/shm"),
            false => self.beside("shm"),
        }
    }

    /// A folder of tapdisk's beside the run directory. A standalone daemon has its own in the run directory.
    fn beside(&self, name: &str) -> PathBuf {
        match is_standalone(&self.run) {
            true => self.run.join(name),
            false => self.run.with_file_name(name),
        }
    }

    fn lock(&self) -> PathBuf {
        self.run.join("daemon.lock")
    }
}

/// The state of the connection to xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xen {
    /// xenstore is followed.
    Connected,
    /// There is no connection, for this reason.
    Gone(String),
}

/// The state that all threads of the daemon share.
pub(crate) struct Shared {
    config: Config,
    paths: Paths,
    serving: Arc<dyn Serving>,
    connect: Connect,
    states: States,
    switched: Switched,
    table: Table,
    /// The names by which tapdisk's tools find the disks.
    names: Names,
    openings: Openings,
    hanging: Hanging,
    /// Held by an upgrade of all disks.
    upgrading: Mutex<()>,
    jobs: Jobs,
    taps: Taps,
    devices: Devices,
    exports: Exports,
    front_ends: FrontEnds,
    writers: Writers,
    migration: Migrations,
    /// The view of the guests that the hypervisor gives this domain, if it gives one.
    domains: Option<Arc<dyn Domains>>,
    clock: Arc<dyn Clock>,
    log: SharedLogLimit,
    /// Woken when a disk's thread has ended.
    wake: Waker,
    stop: Arc<Waker>,
    xen: Mutex<Xen>,
    /// Disks that ended without being served. Files of a predecessor are removed when the toolstack
    /// has removed the disks' directories.
    unswept: Mutex<Vec<DiskId>>,
    started: SystemTime,
    on_step: Box<dyn Fn(Step) + Send + Sync>,
}

impl Shared {
    /// Ends exports and devices of an earlier disk that had the number of this new one. Call it without a lock.
    fn end_of_earlier(&self, disk: DiskId) {
        exports::end_of_earlier(self, disk);
        vhost::end_of_earlier(self, disk);
        devices::end_of_earlier(self, disk);
    }

    fn set_xen(&self, xen: Xen) {
        *self.xen.lock().unwrap_or_else(PoisonError::into_inner) = xen;
    }

    /// Whether the daemon is to stop. Waits for that for the time `within`.
    fn is_stopped(&self, within: Duration) -> bool {
        let [stopped] = wait::wait_for([self.stop.fd()], Some(within));
        stopped
    }

    fn xen(&self) -> Xen {
        self.xen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A view of a running daemon.
pub struct DaemonView(Arc<Shared>);

impl DaemonView {
    /// The daemon's status.
    pub fn status(&self) -> control::protocol::Status {
        control::status(&self.0)
    }

    /// All jobs.
    pub fn jobs(&self) -> Vec<control::protocol::Job> {
        control::jobs(&self.0).jobs
    }

    /// The number of jobs that have ended since the daemon was started, by kind and result.
    pub fn ended_jobs(&self) -> Vec<(&'static str, &'static str, u64)> {
        self.0.jobs.ended()
    }

    /// The attached disks.
    pub fn disks(&self) -> Vec<control::protocol::Disk> {
        control::list(&self.0).disks
    }
}

/// How often ended threads are collected at the end.
const REAP_INTERVAL: Duration = Duration::from_millis(100);

/// How long a new daemon waits for the lock of the one before.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// A daemon that has not started yet.
pub struct Daemon {
    shared: Arc<Shared>,
    /// No other daemon starts while this lock is held.
    _lock: Lock,
}

/// The lock that only one daemon of a host holds.
struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Lock {
    fn take(path: PathBuf) -> io::Result<Lock> {
        // A child that a killed daemon was about to start holds a copy of the lock's descriptor for
        // a moment.
        let end = Instant::now() + LOCK_TIMEOUT;
        loop {
            match lock(&path) {
                Ok(file) => return Ok(Lock { path, _file: file }),
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                Err(_) if Instant::now() > end => {
                    let why = "another ferrite daemon runs on this host";
                    return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
                }
                Err(_) => std::thread::sleep(LOCK_TIMEOUT / 50),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is removed while the lock is held. A file that stays blocks no later daemon.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Daemon {
    /// Enters the run directory. Waking `stop` ends the daemon. Guests keep their disks: they are
    /// served on or wait for the next daemon.
    ///
    /// # Errors
    /// The directory cannot be used, or another daemon runs.
    pub fn new(
        config: Config,
        paths: Paths,
        serving: Arc<dyn Serving>,
        connect: Connect,
        stop: Arc<Waker>,
    ) -> io::Result<Daemon> {
        DirBuilder::new().recursive(true).mode(0o700).create(&paths.run)?;
        let lock = Lock::take(paths.lock())?;
        let states = States::open(&paths.states())?;
        let switched = Switched::new(&config.state_folder);
        let migration = Migrations::of(&config.state_folder);
        let jobs = Jobs::open(&paths.jobs(), Means::default())?;
        let shared = Shared {
            config,
            paths,
            serving,
            connect,
            states,
            switched,
            table: Table::default(),
            names: Names::default(),
            openings: Openings::default(),
            hanging: Hanging::default(),
            upgrading: Mutex::default(),
            jobs,
            taps: Taps::default(),
            devices: Devices::default(),
            exports: Exports::default(),
            front_ends: FrontEnds::default(),
            writers: Writers::default(),
            migration,
            domains: None,
            clock: SystemClock::shared(),
            log: SharedLogLimit::default(),
            wake: Waker::new()?,
            stop,
            xen: Mutex::new(Xen::Gone("the daemon has not connected to xenstore yet".to_owned())),
            unswept: Mutex::default(),
            started: SystemTime::now(),
            on_step: Box::new(|_| ()),
        };
        Ok(Daemon { shared: Arc::new(shared), _lock: lock })
    }

    /// Calls `on_step` at each [`Step`] of each disk. Call this before everything else.
    #[must_use]
    pub fn with_steps(mut self, on_step: impl Fn(Step) + Send + Sync + 'static) -> Daemon {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.on_step = Box::new(on_step);
        }
        self
    }

    /// Gives jobs what they need. Call this before everything else.
    #[must_use]
    pub fn with_jobs(mut self, means: Means) -> Daemon {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.jobs.set_means(means);
        }
        self
    }

    /// Has the images of suspended guests closed, as `domains` tells of them. Call this before
    /// everything else.
    #[must_use]
    pub fn with_domains(mut self, domains: Arc<dyn Domains>) -> Daemon {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.domains = Some(domains);
        }
        self
    }

    /// A view of the daemon that can be used while it runs.
    pub fn view(&self) -> DaemonView {
        DaemonView(self.shared.clone())
    }

    /// Serves all disks until the daemon is stopped. `alive` is called with a status text at least
    /// every ten seconds, and first when the control socket exists.
    ///
    /// # Errors
    /// The control socket cannot be made.
    pub fn run(&self, alive: &dyn Fn(&str)) -> io::Result<()> {
        let control = self.begin()?;
        alive("starting");
        let alive = |status: &str| {
            self.shared.jobs.expire();
            alive(status);
        };
        let leaving = Cell::new(false);
        let refused = RefCell::default();
        let pending = RefCell::default();
        supervise::Supervisor { shared: &self.shared, alive: &alive, leaving, refused, pending }
            .run();
        self.end(control);
        Ok(())
    }

    /// Takes up what a predecessor has left, and opens the control socket.
    fn begin(&self) -> io::Result<control::server::Server> {
        taps::restore(&self.shared);
        devices::restore(&self.shared);
        exports::restore(&self.shared);
        vhost::restore(&self.shared);
        self.shared.jobs.begin(&self.shared);
        migration::begin(&self.shared);
        let control = control::server::Server::start(&self.shared)?;
        suspended::watch(&self.shared)?;
        priorities::watch(&self.shared)?;
        control::upgrades::go_on(&self.shared);
        Ok(control)
    }

    fn end(&self, control: control::server::Server) {
        // Jobs come to rest while disks can still be resumed.
        self.shared.jobs.stop();
        self.shared.table.stop_all();
        drop(control);
        // Each thread finishes its work with xenstore. Keepers and workers go on.
        while !self.shared.table.read(|disks| disks.is_empty()) {
            self.shared.table.reap();
            wait::wait_for([self.shared.wake.fd()], Some(REAP_INTERVAL));
            self.shared.wake.clear();
        }
    }
}
