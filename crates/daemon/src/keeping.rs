//! Disks that keepers keep: a keeper a disk, its worker, and the line by which this process follows
//! xenstore for it.
//!
//! A worker that ends is the keeper's to replace; its end of the line says so, and the next line is
//! followed anew. A keeper that ends takes its worker with it, and gets a successor here. This process
//! may end at any time: both go on, and the next daemon finds the keeper by its socket.

use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_disk::store::owned::StoreKey;
use ferrite_keeper::{
    DiskSpec, Group, Keeper, Line, Preopen, WorkerSandbox, name_of, nbd_socket, socket_name,
};
use ferrite_serve::blkif::lifecycle::{
    Attachment, FollowConfig, Outcome, ServeError, follow_and_tell, follow_second, forget_second,
    part, retire,
};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_serve::log_limit::LogLimits;
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Mover;
use ferrite_xen::store::{Store, StoreError};

use crate::config::DiskOptions;
use crate::state::{DiskId, id_of_name};
use crate::table::Woken;
use crate::wait::wait_for;
use crate::{Assignment, Failure, Serving, Step};

/// Workers that end one after the other before they have the image open: that is a failure of the disk
/// then, which is told, and tried again later.
const LOST_AT_ONCE: u32 = 5;

/// How long the image of a disk that is gone may take to be closed, before its worker is killed with it
/// open.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

/// How long a stub domain's disk waits for who serves its guest's, before it looks at its own again.
const FOUND_WITHIN: Duration = Duration::from_secs(2);
/// And for what it has in flight at its end.
const PARTED_WITHIN: Duration = Duration::from_secs(2);

/// How keepers and their workers are started.
pub trait Programs: Send + Sync {
    /// A command that becomes the keeper of this disk, or of its store.
    fn keeper(&self, disk: DiskId, spec: &DiskSpec) -> Command;

    /// The arguments of a worker that serves this disk; the program is the keeper's.
    ///
    /// # Errors
    /// It cannot be said in arguments.
    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure>;

    /// How the one worker of a store is started, and what it has for this disk, with this folder for run
    /// directories.
    ///
    /// # Errors
    /// It cannot be said in arguments.
    fn of_store(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        store: StoreKey,
    ) -> Result<OfStore, Failure>;

    /// What a worker with these arguments goes by, if that can be told.
    fn options(&self, worker: &[String]) -> Option<DiskOptions>;

    /// The arguments of the relay of a disk's NBD clients; the program is the keeper's.
    fn relay(&self) -> Vec<String>;

    /// What this worker may have of the host, with the folder of its run directory's files; its image to
    /// be written or only to be read. `None`: all that its keeper may.
    ///
    /// # Errors
    /// What the host says of that makes no sense.
    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, Failure>;
}

/// See [`Programs::of_store`].
#[derive(Debug)]
pub struct OfStore {
    /// The arguments of the worker.
    pub worker: Vec<String>,
    /// See [`Group::commands`].
    pub commands: Option<PathBuf>,
    /// See [`DiskSpec::preopens`].
    pub preopens: Vec<Preopen>,
}

/// How the files of a store's keeper are called. No disk's are.
fn name_of_store(StoreKey(device, inode): StoreKey) -> String {
    format!("{STORE}{device}-{inode}")
}

/// What that begins with.
const STORE: &str = "store-";

/// Serves by keepers.
pub struct Keepers {
    run: PathBuf,
    programs: Box<dyn Programs>,
    /// Held by who starts a keeper: two disks of one store start one.
    starting: Mutex<()>,
}

impl Keepers {
    /// With this folder for everything that outlives a process.
    pub fn new(run: &Path, programs: Box<dyn Programs>) -> Keepers {
        Keepers { run: run.to_owned(), programs, starting: Mutex::default() }
    }

    fn folder(&self) -> PathBuf {
        self.run.join("keepers")
    }

    fn socket(&self, id: DiskId) -> PathBuf {
        self.folder().join(socket_name(&id.file_name()))
    }

    /// The keeper of this disk: the one that is there, or a new one.
    fn keeper(&self, id: DiskId, spec: &DiskSpec, is_new: bool) -> Result<Keeper, Failure> {
        match Keeper::connect(&spec.socket) {
            Ok(keeper) => {
                // Of a disk that was attached just now, and of another image: its end was missed.
                let kept = keeper.spec();
                if !is_new || kept.as_ref().is_ok_and(|kept| kept == spec) {
                    return Ok(keeper);
                }
                end_closed(keeper).map_err(|e| failed("end the keeper of an older disk", &e))?;
            }
            Err(e) if is_nobody(&e) => {}
            Err(e) => return Err(failed("reach the keeper", &e)),
        }
        {
            let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            let command = self.programs.keeper(id, spec);
            spec.start(command).map_err(|e| failed("start a keeper", &e))?;
        }
        Keeper::connect(&spec.socket).map_err(|e| failed("reach the new keeper", &e))
    }

    /// How a disk is kept.
    fn spec(&self, disk: &Assignment<'_>, store: &mut Store) -> Result<DiskSpec, Failure> {
        let run_dir = disk.run_dir().join(disk.id.file_name());
        let of_store = self.of_store(disk)?;
        let (group, preopens) =
            of_store.map_or((None, Vec::new()), |(group, preopens)| (Some(group), preopens));
        Ok(DiskSpec {
            socket: self.socket(disk.id),
            worker: self.programs.worker(disk)?,
            sandbox: self.programs.sandbox(disk, &run_dir, is_written(store, disk)?)?,
            relay: Some(self.programs.relay()),
            run_dir,
            group,
            preopens,
        })
    }

    /// The group of a volume's disk: the disks of its store.
    fn of_store(&self, disk: &Assignment<'_>) -> Result<Option<(Group, Vec<Preopen>)>, Failure> {
        let Some((path, _)) = disk.image.volume() else { return Ok(None) };
        let store = StoreKey::at(path).map_err(|e| Failure {
            why: format!("cannot open {}: {e}", path.display()),
            help: "correct the disk's target; it is tried again".to_owned(),
        })?;
        let OfStore { worker, commands, preopens } =
            self.programs.of_store(disk, disk.run_dir(), store)?;
        let name = name_of_store(store);
        let socket = self.folder().join(socket_name(&name));
        let run_dir = self.run.join(name);
        Ok(Some((Group { socket, run_dir, worker, commands }, preopens)))
    }

    /// Removes what keepers of stores have left that were killed, and whose disks are gone.
    fn sweep_stores(&self) {
        for name in self.names().filter(|name| name.starts_with(STORE)) {
            let socket = self.folder().join(socket_name(&name));
            if Keeper::connect(&socket).is_err_and(|e| is_nobody(&e))
                && let Err(e) = ferrite_keeper::remove_leftovers(&socket, &self.run.join(&name))
            {
                tracing::debug!("cannot remove what the keeper of {name} has left: {e}");
            }
        }
    }

    /// Of keepers, by their files.
    fn names(&self) -> impl Iterator<Item = String> {
        let entries = std::fs::read_dir(self.folder()).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| name_of(&name).map(str::to_owned))
    }

    /// Ends the disk's keeper, or removes what a dead one has left.
    fn end(&self, id: DiskId) -> io::Result<()> {
        let socket = self.socket(id);
        let ended = match Keeper::connect(&socket) {
            Ok(keeper) => end_closed(keeper),
            Err(e) => Err(e),
        };
        if !ended.as_ref().is_err_and(is_nobody) {
            return ended;
        }
        ferrite_keeper::remove_leftovers(&socket, &self.run.join(id.file_name()))
    }

    /// Follows one line after the other.
    fn follow(
        &self,
        disk: &Assignment<'_>,
        spec: &DiskSpec,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let config = follow_config(disk);
        let log_limits = LogLimits::default();
        let mut keeper = self.keeper(disk.id, spec, is_new(store, disk)?)?;
        let (mut lost, mut lost_at_once) = (None, 0);
        loop {
            let line = match keeper.line(lost) {
                Ok(line) => line,
                // It has ended, and its worker with it.
                Err(e) => {
                    tracing::warn!("the keeper of disk {} is gone: {e}; starting another", disk.id);
                    keeper = self.keeper(disk.id, spec, false)?;
                    keeper.line(None).map_err(|e| failed("have a worker started", &e))?
                }
            };
            lost = Some(line.start);
            let nbd = nbd_socket(&spec.run_dir);
            name_keeper(store, disk, line.keeper, Some(&nbd))?;
            let group = spec.group.as_ref().map(|group| group.socket.clone());
            disk.is_kept(line.keeper as u32, Some(nbd), group);
            lost_at_once += 1;
            let opened = || {
                lost_at_once = 0;
                disk.is_served();
            };
            let fd = line.fd.as_fd();
            match follow_and_tell(store, fd, &config, &log_limits, stop, opened) {
                Ok(Outcome::Left | Outcome::Stopped) => match disk.why_woken() {
                    Woken::End => return Ok(Outcome::Left),
                    Woken::Upgrade(binary) => {
                        disk.upgraded(upgrade(disk, &keeper, &line, &binary, stop));
                        lost = None;
                    }
                    // It lets go of the image, and keeps the guest's rings.
                    Woken::Rest => match retire(line.fd.as_fd(), stop, None) {
                        Ok(()) => return Ok(Outcome::Stopped),
                        // The next one makes the image complete, and is asked the same.
                        Err(ServeError::WorkerLost(_)) => stop.wake(),
                        Err(e) => return Err(not_served(e)),
                    },
                    Woken::Nothing => lost = None,
                },
                Ok(Outcome::Unplugged) => return Ok(Outcome::Unplugged),
                Err(ServeError::WorkerLost(why)) if lost_at_once < LOST_AT_ONCE => {
                    tracing::warn!("disk {}: {why}; its guest waits for the next worker", disk.id);
                }
                Err(ServeError::WorkerLost(why)) => return Err(all_lost(&why)),
                Err(e) => return Err(not_served(e)),
            }
        }
    }

    /// The second line of the guest's disk, when that is served with the same image.
    fn second_line(&self, disk: &Assignment<'_>, first: DiskId) -> Result<Line, Failure> {
        // Before and after: what keeps it now may be another disk's of the same name.
        if disk.is_beside(first) {
            let line = Keeper::connect(&self.socket(first)).and_then(|keeper| keeper.second_line());
            let line = line.map_err(|e| failed("reach the keeper of its guest's disk", &e))?;
            if disk.is_beside(first) {
                return Ok(line);
            }
        }
        Err(Failure {
            why: format!("disk {first}, of its guest, is not served"),
            help: "it is tried again: see to that disk (ferrite disk show)".to_owned(),
        })
    }

    /// The same, of one whose keeper or worker is about to be replaced.
    fn find_second_line(
        &self,
        disk: &Assignment<'_>,
        first: DiskId,
        stop: &Waker,
    ) -> Result<Line, Failure> {
        let end = Instant::now() + FOUND_WITHIN;
        loop {
            match self.second_line(disk, first) {
                Err(_) if Instant::now() < end => {
                    // It is asked why by whoever follows.
                    let [woken] = wait_for([stop.fd()], Some(FOUND_WITHIN / 20));
                    if woken {
                        return self.second_line(disk, first);
                    }
                }
                line => return line,
            }
        }
    }
}

impl Serving for Keepers {
    fn serve(
        &self,
        disk: &Assignment<'_>,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let spec = self.spec(disk, store)?;
        self.follow(disk, &spec, store, stop)
    }

    fn serve_beside(
        &self,
        disk: &Assignment<'_>,
        first: DiskId,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let mut config = follow_config(disk);
        // QEMU has one at a time, and a worker's devices of Xen are counted.
        config.offer.max_queues = 1;
        let log_limits = LogLimits::default();
        let mut lost_at_once = 0;
        loop {
            let line = self.find_second_line(disk, first, stop)?;
            name_keeper(store, disk, line.keeper, None)?;
            disk.is_kept(line.keeper as u32, None, None);
            lost_at_once += 1;
            let mut joined = false;
            let opened = || {
                (joined, lost_at_once) = (true, 0);
                disk.is_served();
            };
            match follow_second(store, line.fd.as_fd(), &config, &log_limits, stop, opened) {
                Ok(Outcome::Unplugged) => return Ok(Outcome::Unplugged),
                Ok(Outcome::Left | Outcome::Stopped) => match disk.why_woken() {
                    Woken::End => return Ok(Outcome::Left),
                    _ if joined => {}
                    _ => {
                        let why = format!("disk {first}, of its guest, is not open yet");
                        let help = "it is tried again".to_owned();
                        return Err(Failure { why, help });
                    }
                },
                Err(ServeError::WorkerLost(why)) if lost_at_once < LOST_AT_ONCE => {
                    tracing::warn!("disk {}: {why}; its guest waits for the next worker", disk.id);
                }
                Err(ServeError::WorkerLost(why)) => return Err(all_lost(&why)),
                Err(e) => return Err(not_served(e)),
            }
        }
    }

    fn part(&self, disk: DiskId, first: DiskId) -> Result<(), Failure> {
        let parted = || -> io::Result<()> {
            let socket = self.socket(first);
            let mut keeper = Keeper::connect(&socket);
            if keeper.as_ref().is_err_and(is_nobody) {
                forget_second(&self.run.join(first.file_name()))?;
                // A keeper may have come before that, and its worker may have looked.
                keeper = Keeper::connect(&socket);
            }
            let line = match keeper {
                Err(e) if is_nobody(&e) => return Ok(()),
                keeper => keeper?.second_line()?,
            };
            part(line.fd.as_fd(), DomId(disk.domid), &Waker::new()?, Some(PARTED_WITHIN))
                .map_err(io::Error::other)
        };
        parted().map_err(|e| failed("have its guest's disk served without it", &e))
    }

    fn forget(&self, disk: DiskId) {
        if let Err(e) = self.end(disk) {
            tracing::warn!("cannot end the keeper of disk {disk}: {e}");
        }
    }

    fn forget_older(&self, disk: DiskId) -> Result<(), Failure> {
        self.end(disk).map_err(|e| failed("end the keeper of an older disk", &e))
    }

    fn options(&self, disk: DiskId) -> Option<DiskOptions> {
        let spec = Keeper::connect(&self.socket(disk)).and_then(|keeper| keeper.spec()).ok()?;
        self.programs.options(&spec.worker)
    }

    fn all(&self) -> Vec<DiskId> {
        self.sweep_stores();
        self.names().filter_map(|name| id_of_name(&name)).collect()
    }
}

/// Ends a keeper whose disk is gone. Its end may have been missed, so the image may be open: nobody but
/// this worker knows what has to be written before others may use it.
fn end_closed(keeper: Keeper) -> io::Result<()> {
    let line = keeper.line(None)?;
    let why = match retire(line.fd.as_fd(), &Waker::new()?, Some(CLOSED_WITHIN)) {
        // Others of its worker's go on.
        Ok(()) => return keeper.leave(),
        // One that is lost has nothing open any more.
        Err(ServeError::WorkerLost(_)) => return keeper.end(),
        Err(ServeError::Left) => format!("it took more than {} s", CLOSED_WITHIN.as_secs()),
        Err(e) => e.to_string(),
    };
    tracing::warn!(
        "the image of a disk that is gone was not closed: {why}; what was answered is kept on this \
         host, and is there when ferrite opens the image"
    );
    keeper.end()
}

/// The image is closed first, so that nothing is left to the next binary but the image itself; so of all disks
/// that the worker serves.
fn upgrade(
    disk: &Assignment<'_>,
    keeper: &Keeper,
    line: &Line,
    binary: &Path,
    stop: &Waker,
) -> Result<(), Failure> {
    let ticket = disk.ticket();
    let let_go = match retire(line.fd.as_fd(), stop, None) {
        // A worker that is gone has left what the next one recovers from.
        Ok(()) | Err(ServeError::WorkerLost(_)) => Ok(()),
        Err(e) => Err(not_served(e)),
    };
    if let_go.is_ok() {
        disk.at(Step::Retired);
    }
    let exchange = || {
        keeper.upgrade(binary).map_err(|e| Failure {
            why: format!("cannot become {}: {e}", binary.display()),
            help: "the disk is served by the program that it was served by".to_owned(),
        })?;
        disk.at(Step::Upgraded);
        Ok(())
    };
    ticket.meet(let_go, exchange, || wait_for([stop.fd()], Some(Duration::ZERO)) == [true])
}

/// Nobody has begun with this attachment.
fn is_new(store: &mut Store, disk: &Assignment<'_>) -> Result<bool, Failure> {
    let state = store.read(&format!("{}/state", disk.backend)).map_err(|e| Failure::store(&e))?;
    Ok(state.as_deref() == Some(b"1"))
}

/// Whether the toolstack lets the guest write. A worker that is only to read has no right to write.
fn is_written(store: &mut Store, disk: &Assignment<'_>) -> Result<bool, Failure> {
    match Attachment::read(store, &disk.backend, DomId(disk.id.domid)).map_err(not_served)? {
        Some(attachment) => Ok(!attachment.read_only),
        None => Err(Failure {
            why: "the toolstack has not written all of its directory".to_owned(),
            help: "it is tried again; look at the toolstack's directory of the disk (xenstore-ls)"
                .to_owned(),
        }),
    }
}

/// Toolstacks set this process's priority, and look for its statistics. They give QEMU the socket, by
/// which an HVM guest boots: so it is named before anybody says that the disk is there.
fn name_keeper(
    store: &mut Store,
    disk: &Assignment<'_>,
    pid: i32,
    nbd: Option<&Path>,
) -> Result<(), Failure> {
    let dir = &disk.backend;
    let socket = format!("{dir}/physical-device-path");
    let named = store.transaction(|tx| {
        // Not where the directory has gone meanwhile: it would be there again.
        match tx.read(&format!("{dir}/state"))? {
            Some(_) => tx.write(&format!("{dir}/kthread-pid"), pid.to_string().as_bytes())?,
            None => return Ok(()),
        }
        // A script's own name for it stays.
        match (nbd, tx.read(&socket)?) {
            (Some(nbd), None) => tx.write(&socket, nbd.as_os_str().as_encoded_bytes()),
            _ => Ok(()),
        }
    });
    match named {
        // A quota, say: nobody is served worse for that.
        Err(e) if !e.is_fatal() => {
            tracing::debug!("cannot name the keeper of disk {}: {e}", disk.id);
            Ok(())
        }
        named => named.map_err(|e: StoreError| Failure::store(&e)),
    }
}

fn follow_config(disk: &Assignment<'_>) -> FollowConfig {
    let options = &disk.options;
    let offer = Offer {
        max_queues: options.queues,
        max_ring_order: options.ring_order,
        max_indirect_segments: options.indirect,
        persistent: options.mover == Mover::Persistent,
    };
    let backend = disk.backend.clone();
    let (domid, devid) = (DomId(disk.id.domid), disk.id.devid);
    FollowConfig { backend, domid, devid, offer, attached: disk.attached.clone() }
}

/// There is no keeper.
fn is_nobody(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn failed(what: &str, e: &io::Error) -> Failure {
    let help = "it is tried again; the daemon's log has more (journalctl -u ferrite)".to_owned();
    Failure { why: format!("cannot {what}: {e}"), help }
}

fn all_lost(why: &str) -> Failure {
    let why = format!("workers are lost at once, one after the other: {why}");
    let help = "it is tried again; the log has the reason (journalctl -u ferrite)".to_owned();
    Failure { why, help }
}

fn not_served(e: ServeError) -> Failure {
    let help = match &e {
        ServeError::Open { what, why, help } => {
            return Failure { why: format!("{what}: {why}"), help: help.clone() };
        }
        ServeError::Close(_) => {
            "what was answered is kept on this host: mend the storage; it is tried again"
        }
        ServeError::TakeOver(_) => {
            "if the guest cannot be served as it is, detach the disk (xl block-detach) and attach it \
             again; requests in flight are lost then"
        }
        ServeError::Attachment(_) => "look at the toolstack's directory of the disk (xenstore-ls)",
        _ => "the guest waits, and it is tried again; ferrite doctor shows what is missing",
    };
    Failure { why: e.to_string(), help: help.to_owned() }
}
