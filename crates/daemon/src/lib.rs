//! All disks of a host: what the toolstack attaches in xenstore is served, until it is detached.
//!
//! * [`config`]: the daemon's configuration.
//! * [`params`]: which image the toolstack means.
//! * [`state`]: what the next daemon has to know.
//! * [`table`]: what this one knows.
//! * [`control`]: how others ask for it.
//!
//! How a disk is served is behind [`Serving`]: there are no rings and no images here.

#![forbid(unsafe_code)]

use std::fmt;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ferrite_io::clock::{Clock, SystemClock};
use ferrite_io::lock_file::lock;
use ferrite_serve::blkif::lifecycle::{Attached, Outcome};
use ferrite_serve::log_limit::SharedLogLimit;
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};

mod beside;
mod blktap;
pub mod config;
pub mod control;
pub mod directory;
mod follow;
pub mod keeping;
pub mod orphan;
pub mod params;
mod round;
mod siblings;
pub mod state;
mod supervise;
pub mod table;
mod unserved;
mod wait;

use config::{Config, DiskOptions};
use params::Image;
use round::Ticket;
use state::{DiskId, States};
use table::{Phase, Table, Upgrade, Woken};

/// Why a disk is not served, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What failed, and why.
    pub why: String,
    /// The next step for the administrator.
    pub help: String,
}

impl Failure {
    fn store(e: &StoreError) -> Failure {
        let help = "it is tried again; ferrite doctor shows what is missing".to_owned();
        Failure { why: e.to_string(), help }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.help)
    }
}

/// A disk to be served.
pub struct Assignment<'a> {
    /// Which.
    pub id: DiskId,
    /// Its directory in xenstore.
    pub backend: String,
    /// Its image.
    pub image: Image,
    /// How.
    pub options: DiskOptions,
    /// QEMU opens the raw image of an HVM guest by itself, until the guest's own driver connects.
    pub qemu_first: bool,
    /// tapdisk's number of it.
    pub minor: u32,
    /// The attachment that is to be served: another one of the same name may have another image.
    pub attached: Attached,
    shared: &'a Shared,
}

impl Assignment<'_> {
    /// The daemon's configuration.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The folder for everything that outlives a process.
    pub fn run_dir(&self) -> &Path {
        &self.shared.places.run
    }

    /// This process stands for the disk, and for all of this group, if there is one. Clients of NBD find the
    /// disk by this socket.
    pub fn is_kept(&self, pid: u32, nbd: Option<PathBuf>, group: Option<PathBuf>) {
        blktap::link(&self.shared.places, self.id, pid, self.minor);
        self.shared.table.change(self.id, |entry| {
            (entry.pid, entry.nbd, entry.group) = (Some(pid), nbd, group);
        });
        (self.shared.at)(Step::Kept);
    }

    /// The image is open.
    pub fn is_served(&self) {
        self.shared.table.change(self.id, |entry| entry.was_open = true);
        self.shared.table.set(self.id, Phase::Served);
        (self.shared.at)(Step::Served);
    }

    /// Why `stop` was woken: it can be woken again then, unless it was for good.
    pub(crate) fn why_woken(&self) -> Woken {
        self.shared.table.why_woken(self.id)
    }

    /// Whether this disk of a guest is served with the image that its stub domain's is to have.
    pub(crate) fn is_beside(&self, first: DiskId) -> bool {
        self.shared.table.look(|disks| beside::are_one(disks, first, self.id))
    }

    /// A point of an upgrade is reached.
    pub(crate) fn at(&self, step: Step) {
        (self.shared.at)(step);
    }

    /// Its part in an upgrade. One that is not there was nobody else's.
    pub(crate) fn ticket(&self) -> Ticket {
        let mut ticket = None;
        self.shared.table.change(self.id, |entry| ticket = entry.ticket.take());
        ticket.or_else(|| Ticket::of(1).pop()).expect("one of one")
    }

    /// What came of it.
    pub(crate) fn upgraded(&self, outcome: Result<(), Failure>) {
        self.shared.table.change(self.id, |entry| entry.upgrade = Upgrade::Done(outcome));
    }
}

/// Who serves disks.
pub trait Serving: Send + Sync {
    /// Serves a disk until it is unplugged or `stop` is woken; goes on where a predecessor ended.
    ///
    /// # Errors
    /// It cannot be served now. Nothing was told to its guest; it is tried again.
    fn serve(
        &self,
        disk: &Assignment<'_>,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure>;

    /// The same of a stub domain's disk, by who serves its guest's, `first`.
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

    /// The stub domain's disk is no more: nothing is to be left of it with its guest's, `first`.
    ///
    /// # Errors
    /// It may be served still.
    fn part(&self, disk: DiskId, first: DiskId) -> Result<(), Failure>;

    /// The disk is no more: nothing is to be left of it.
    fn forget(&self, disk: DiskId);

    /// An older disk of this name is no more, and its end may have been missed.
    ///
    /// # Errors
    /// Somebody may serve it still.
    fn forget_older(&self, disk: DiskId) -> Result<(), Failure>;

    /// How a disk is served now, if that is known. It may have been begun with by another configuration.
    fn options(&self, _: DiskId) -> Option<DiskOptions> {
        None
    }

    /// Disks that somebody stands for whom this daemon may know nothing of.
    fn all(&self) -> Vec<DiskId>;
}

/// A way to xenstore.
pub type Connect = Box<dyn Fn() -> Result<Store, StoreError> + Send + Sync>;

/// Where the daemon keeps what outlives it.
#[derive(Clone, Debug)]
pub struct Places {
    /// On tmpfs: what is kept concerns running guests only.
    pub run: PathBuf,
}

impl Default for Places {
    fn default() -> Places {
        Places { run: PathBuf::from("/run/ferrite") }
    }
}

impl Places {
    /// The control socket.
    pub fn control(&self) -> PathBuf {
        self.run.join("control.sock")
    }

    /// The state files.
    pub fn states(&self) -> PathBuf {
        self.run.join("disks")
    }

    fn lock(&self) -> PathBuf {
        self.run.join("daemon.lock")
    }
}

/// Points at which a daemon may die: tests have it die at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A disk's state file is written, and nobody serves it.
    StateWritten,
    /// Somebody stands for the disk, and its image is not open.
    Kept,
    /// The disk's image is open, and the guest was told nothing.
    Served,
    /// The disk's image is closed for another binary.
    Retired,
    /// The other binary serves the disk, or is about to.
    Upgraded,
    /// Nobody serves the disk any more, and its state file is there.
    Forgotten,
}

/// Whether there is xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xen {
    /// It is followed.
    Connected,
    /// It is not there, for this reason.
    Gone(String),
}

/// What all threads of the daemon have.
pub(crate) struct Shared {
    config: Config,
    places: Places,
    serving: Arc<dyn Serving>,
    connect: Connect,
    states: States,
    table: Table,
    clock: Arc<dyn Clock>,
    log: SharedLogLimit,
    /// A disk's thread has ended.
    wake: Waker,
    stop: Arc<Waker>,
    xen: Mutex<Xen>,
    /// Disks that ended while nobody served them: what a predecessor left is removed with their
    /// directories.
    unswept: Mutex<Vec<DiskId>>,
    started: SystemTime,
    at: Box<dyn Fn(Step) + Send + Sync>,
}

impl Shared {
    fn set_xen(&self, xen: Xen) {
        *self.xen.lock().unwrap_or_else(PoisonError::into_inner) = xen;
    }

    /// Whether the daemon is to stop, or is told so within this time.
    fn is_stopped(&self, within: Duration) -> bool {
        let [stopped] = wait::wait_for([self.stop.fd()], Some(within));
        stopped
    }

    fn xen(&self) -> Xen {
        self.xen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What others may see of a daemon while it runs.
pub struct Glance(Arc<Shared>);

impl Glance {
    /// How it is.
    pub fn status(&self) -> control::protocol::Status {
        control::status(&self.0)
    }

    /// The disks that are attached.
    pub fn disks(&self) -> Vec<control::protocol::Disk> {
        control::list(&self.0).disks
    }
}

/// How often ended threads are looked for at the end.
const REAP: Duration = Duration::from_millis(100);

/// How long the place of a daemon is waited for.
const LOCKED: Duration = Duration::from_secs(1);

/// A daemon that has not begun.
pub struct Daemon {
    shared: Arc<Shared>,
    /// For as long as it lives, no other takes its place.
    _lock: Lock,
}

/// The place of a daemon.
struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Lock {
    fn take(path: PathBuf) -> io::Result<Lock> {
        // A process that a killed daemon was about to start has its descriptors for a moment.
        let end = Instant::now() + LOCKED;
        loop {
            match lock(&path) {
                Ok(file) => return Ok(Lock { path, _file: file }),
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                Err(_) if Instant::now() > end => {
                    return Err(io::Error::other("another ferrite daemon runs on this host"));
                }
                Err(_) => std::thread::sleep(LOCKED / 50),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is ours. One that stays keeps nobody away.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Daemon {
    /// Enters the run directory. `stop` ends the daemon: guests keep their disks, and wait or are
    /// served on, until the next daemon.
    ///
    /// # Errors
    /// The directory cannot be used, or another daemon is there.
    pub fn new(
        config: Config,
        places: Places,
        serving: Arc<dyn Serving>,
        connect: Connect,
        stop: Arc<Waker>,
    ) -> io::Result<Daemon> {
        DirBuilder::new().recursive(true).mode(0o700).create(&places.run)?;
        let lock = Lock::take(places.lock())?;
        let states = States::open(&places.states())?;
        let shared = Shared {
            config,
            places,
            serving,
            connect,
            states,
            table: Table::default(),
            clock: SystemClock::shared(),
            log: SharedLogLimit::default(),
            wake: Waker::new()?,
            stop,
            xen: Mutex::new(Xen::Gone("it was not asked for yet".to_owned())),
            unswept: Mutex::default(),
            started: SystemTime::now(),
            at: Box::new(|_| ()),
        };
        Ok(Daemon { shared: Arc::new(shared), _lock: lock })
    }

    /// With this called at each [`Step`] of each disk; to be said before anything else.
    #[must_use]
    pub fn with_steps(mut self, at: impl Fn(Step) + Send + Sync + 'static) -> Daemon {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.at = Box::new(at);
        }
        self
    }

    /// What others may see of it while it runs.
    pub fn glance(&self) -> Glance {
        Glance(self.shared.clone())
    }

    /// Serves all disks until it is stopped. `alive` is called at least every ten seconds, with what
    /// there is to say; the first time when the control socket is there.
    ///
    /// # Errors
    /// The control socket cannot be made.
    pub fn run(&self, alive: &dyn Fn(&str)) -> io::Result<()> {
        let control = control::server::Server::start(&self.shared)?;
        alive("starting");
        supervise::Supervisor { shared: &self.shared, alive }.run();
        self.shared.table.stop_all();
        drop(control);
        // Each ends what it does with xenstore; what serves the guests may go on.
        while !self.shared.table.look(|disks| disks.is_empty()) {
            self.shared.table.reap();
            wait::wait_for([self.shared.wake.fd()], Some(REAP));
            self.shared.wake.clear();
        }
        Ok(())
    }
}
