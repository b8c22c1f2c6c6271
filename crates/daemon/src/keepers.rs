//! Disks that are served by keepers. Each disk has a keeper, which has a worker. This process
//! follows xenstore for the disk and reaches the worker by a line.
//!
//! A keeper replaces a worker that ends. The end of the line shows it, and this process follows
//! anew on the next line. A keeper that ends takes its worker with it, and this process starts
//! another one. When this process ends, keeper and worker go on: the next daemon finds the keeper
//! by its socket.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_disk::StoreKey;
use ferrite_keeper::{
    DiskSpec, Group, Keeper, Line, Preopen, WorkerSandbox, name_of, nbd_socket, socket_name,
};
use ferrite_serve::blkif::lifecycle::{
    Ahead, Outcome, ServeError, follow_notifying, follow_second, hold, leave, part, remove_second,
    retire,
};
use ferrite_serve::blkif::negotiate::DiskFacts;
use ferrite_serve::log_limit::LogLimits;
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::Store;

use crate::config::DiskOptions;
use crate::state::{DiskId, id_of_name};
use crate::table::WakeReason;
use crate::wait::wait_for;
use crate::{Assignment, Failure, Passing, Paths, Serving};

mod attachment;
mod closed;
mod spare;

use attachment::{follow_config, is_new, is_weak, is_written, name_keeper};
use closed::{end_closed, upgrade};
use spare::process_of;

/// Workers in a row that end before they have opened the image. After so many the disk has failed,
/// and is tried again later.
const MAX_EARLY_LOSSES: u32 = 5;

/// How long a stub domain's disk waits for the worker of its guest's disk.
const SECOND_LINE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a stub domain's disk may take to end its requests in flight.
const PART_TIMEOUT: Duration = Duration::from_secs(2);

/// How keepers and their workers are started.
pub trait Programs: Send + Sync {
    /// A command that becomes the keeper of this disk or of its store.
    fn keeper(&self, disk: DiskId, spec: &DiskSpec) -> Command;

    /// A command that becomes the exporter of this disk. `None`: disks are not exported.
    fn exporter(&self, _: DiskId) -> Option<Command> {
        None
    }

    /// A command that becomes the process of a connection that XAPI has passed to a tap. `None`: there are none.
    fn passing(&self, _: Passing) -> Option<Command> {
        None
    }

    /// The arguments of a worker that serves this disk. Its program is the keeper's.
    ///
    /// # Errors
    /// The options cannot be expressed as arguments.
    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure>;

    /// How the one worker of a store is started, and the files that it gets for this disk.
    /// `run_dir` holds the run directories.
    ///
    /// # Errors
    /// The options cannot be expressed as arguments.
    fn store_worker(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        store: StoreKey,
    ) -> Result<StoreWorker, Failure>;

    /// The options of a worker with these arguments, if they can be parsed.
    fn options(&self, worker: &[String]) -> Option<DiskOptions>;

    /// The arguments of the relay of a disk's NBD clients. Its program is the keeper's.
    fn relay(&self) -> Vec<String>;

    /// The files that this worker may open. `run_dir` is the disk's run directory; `writable` says
    /// how the image is opened. `None`: the worker has its keeper's rights.
    ///
    /// # Errors
    /// A path of the host cannot be resolved.
    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, Failure>;
}

/// How the worker of a store is started. See [`Programs::store_worker`].
#[derive(Debug)]
pub struct StoreWorker {
    /// The worker's arguments.
    pub worker: Vec<String>,
    /// See [`Group::commands`].
    pub commands: Option<PathBuf>,
    /// See [`DiskSpec::preopens`].
    pub preopens: Vec<Preopen>,
}

/// The name of the keeper's files of a store. It differs from each disk's.
fn name_of_store(StoreKey(device, inode): StoreKey) -> String {
    format!("{STORE_PREFIX}{device}-{inode}")
}

/// Prefix of these names.
const STORE_PREFIX: &str = "store-";

/// Serves disks by keepers.
pub struct Keepers {
    run: PathBuf,
    programs: Box<dyn Programs>,
    /// Held while a keeper is started: two disks of one store must not start two.
    starting: Mutex<()>,
}

impl Keepers {
    /// Serves with `run` as the directory of all files that outlive a process.
    pub fn new(run: &Path, programs: Box<dyn Programs>) -> Keepers {
        Keepers { run: run.to_owned(), programs, starting: Mutex::default() }
    }

    fn folder(&self) -> PathBuf {
        self.run.join("keepers")
    }

    /// The path of the socket for NBD clients: in tapdisk's folder, where it gets its other names.
    fn public_socket(&self, id: DiskId) -> PathBuf {
        let paths = Paths { run: self.run.clone() };
        paths.blktap().join(format!(".{}", id.file_name()))
    }

    fn socket(&self, id: DiskId) -> PathBuf {
        self.folder().join(socket_name(&id.file_name()))
    }

    /// Connects to the keeper of this disk, and starts one if there is none.
    fn keeper(&self, id: DiskId, spec: &DiskSpec, is_new: bool) -> Result<Keeper, Failure> {
        match Keeper::connect(&spec.socket) {
            Ok(keeper) => {
                // A new attachment with another image: the end of the older disk was missed.
                let kept = keeper.spec();
                if !is_new || kept.as_ref().is_ok_and(|kept| kept == spec) {
                    return Ok(keeper);
                }
                end_closed(keeper).map_err(|e| failure("end the keeper of an older disk", &e))?;
            }
            Err(e) if has_no_listener(&e) => {}
            Err(e) => return Err(failure("reach the keeper", &e)),
        }
        {
            let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            let command = self.programs.keeper(id, spec);
            spec.start(command).map_err(|e| failure("start a keeper", &e))?;
        }
        Keeper::connect(&spec.socket).map_err(|e| failure("reach the new keeper", &e))
    }

    /// Describes how the disk is kept.
    fn spec(&self, disk: &Assignment<'_>, written: bool) -> Result<DiskSpec, Failure> {
        let run_dir = disk.run_dir().join(disk.id.file_name());
        let of_store = self.group_of_store(disk)?;
        let (group, preopens) =
            of_store.map_or((None, Vec::new()), |(group, preopens)| (Some(group), preopens));
        Ok(DiskSpec {
            socket: self.socket(disk.id),
            worker: self.programs.worker(disk)?,
            sandbox: self.programs.sandbox(disk, &run_dir, written)?,
            relay: Some(self.programs.relay()),
            public: Some(self.public_socket(disk.id)),
            run_dir,
            group,
            preopens,
        })
    }

    /// The group of a volume's disk: all disks of its store.
    fn group_of_store(
        &self,
        disk: &Assignment<'_>,
    ) -> Result<Option<(Group, Vec<Preopen>)>, Failure> {
        let Some((path, _)) = disk.image.volume() else { return Ok(None) };
        let store = StoreKey::at(path).map_err(|e| Failure {
            why: format!("cannot open {}: {e}", path.display()),
            help: "correct the disk's target; ferrite tries again".to_owned(),
        })?;
        let StoreWorker { worker, commands, preopens } =
            self.programs.store_worker(disk, disk.run_dir(), store)?;
        let name = name_of_store(store);
        let socket = self.folder().join(socket_name(&name));
        let run_dir = self.run.join(name);
        Ok(Some((Group { socket, run_dir, worker, commands }, preopens)))
    }

    /// Removes the files of killed keepers of stores that have no disks any more.
    fn sweep_stores(&self) {
        for name in self.names().filter(|name| name.starts_with(STORE_PREFIX)) {
            let socket = self.folder().join(socket_name(&name));
            if Keeper::connect(&socket).is_err_and(|e| has_no_listener(&e))
                && let Err(e) = ferrite_keeper::remove_leftovers(&socket, &self.run.join(&name))
            {
                tracing::debug!("cannot remove what the keeper of {name} has left: {e}");
            }
        }
    }

    /// The names of all keepers, by their files.
    fn names(&self) -> impl Iterator<Item = String> {
        let entries = std::fs::read_dir(self.folder()).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| name_of(&name).map(str::to_owned))
    }

    /// Ends the disk's keeper, or removes the files of a dead one.
    fn end(&self, id: DiskId) -> io::Result<()> {
        let socket = self.socket(id);
        let ended = match Keeper::connect(&socket) {
            Ok(keeper) => end_closed(keeper),
            Err(e) => Err(e),
        };
        if !ended.as_ref().is_err_and(has_no_listener) {
            return ended;
        }
        ferrite_keeper::remove_leftovers(&socket, &self.run.join(id.file_name()))
    }

    /// Follows the disk on one line after the other. Without a store it has no guest.
    fn follow(
        &self,
        disk: &Assignment<'_>,
        spec: &DiskSpec,
        mut store: Option<&mut Store>,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let config = follow_config(disk);
        let log_limits = LogLimits::default();
        let is_new = match &mut store {
            Some(store) if disk.ahead.is_none() => is_new(store, disk)?,
            _ => false,
        };
        let mut keeper = self.keeper(disk.id, spec, is_new)?;
        // The keeper of a tap is there before its image is named.
        let waits = |keeper: &Keeper| keeper.spec().is_ok_and(|spec| spec.is_idle());
        if disk.resumes() || (disk.ahead.is_some() && waits(&keeper)) {
            keeper = self.adapt(disk, keeper, spec)?;
        }
        disk.set_weak(keeper.spec().is_ok_and(|kept| is_weak(&*self.programs, &kept)));
        let (mut lost, mut early_losses) = (None, 0);
        loop {
            let line = match keeper.line(lost) {
                Ok(line) => line,
                // It keeps its worker, which serves the guest.
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                    return Err(failure("follow the worker", &e));
                }
                // The keeper has ended, and its worker with it.
                Err(e) => {
                    tracing::warn!("the keeper of disk {} is gone: {e}; starting another", disk.id);
                    keeper = self.keeper(disk.id, spec, false)?;
                    disk.set_weak(is_weak(&*self.programs, spec));
                    keeper.line(None).map_err(|e| failure("have a worker started", &e))?
                }
            };
            lost = Some(line.start);
            let nbd = nbd_socket(&spec.run_dir);
            if let Some(store) = &mut store {
                name_keeper(store, disk, line.keeper, Some(&nbd))?;
            }
            let group = spec.group.as_ref().map(|group| group.socket.clone());
            disk.set_keeper(line.keeper as u32, Some(nbd), group);
            early_losses += 1;
            let tune = disk.tune();
            let opened = |facts: &DiskFacts, tuned| {
                early_losses = 0;
                disk.tuned(&tune, tuned);
                disk.opened(facts).map_err(|Failure { why, help }| {
                    let what = "cannot serve the disk".to_owned();
                    ServeError::Open { what, why, help, errno: None }
                })?;
                disk.ask_worker(line.fd.as_fd(), stop)
            };
            let fd = line.fd.as_fd();
            let followed = match (&mut store, disk.ahead) {
                (Some(store), _) => {
                    follow_notifying(store, fd, &config, &log_limits, stop, &tune, opened)
                }
                (None, ahead) => {
                    let ahead = ahead.unwrap_or(Ahead { read_only: true, toolstack_locks: true });
                    hold(fd, ahead, stop, &tune, opened).map(|()| Outcome::Left)
                }
            };
            match followed {
                Ok(Outcome::Left | Outcome::Stopped) => match disk.wake_reason() {
                    WakeReason::End => return Ok(Outcome::Left),
                    WakeReason::Upgrade(binary) => {
                        disk.upgraded(upgrade(disk, &keeper, &line, &binary, stop));
                        lost = None;
                    }
                    // The worker closes the image, and keeps the guest's rings.
                    WakeReason::Rest => match retire(line.fd.as_fd(), stop, None) {
                        Ok(()) => return Ok(Outcome::Stopped),
                        // The request was withdrawn meanwhile, or there is another one. The waker
                        // is still set.
                        Err(ServeError::Left) => lost = None,
                        // The next worker completes the image, and is asked to rest as well.
                        Err(ServeError::WorkerLost(_)) => stop.wake(),
                        Err(e) => return Err(not_served(e)),
                    },
                    WakeReason::Leave => match leave(line.fd.as_fd(), stop) {
                        Ok(()) => return Ok(Outcome::Stopped),
                        Err(ServeError::Left) => lost = None,
                        Err(ServeError::WorkerLost(_)) => stop.wake(),
                        Err(e) => {
                            disk.keep_image(&e);
                            lost = None;
                        }
                    },
                    // A tap's guest may have come.
                    WakeReason::Nothing if disk.ahead.is_some() => return Ok(Outcome::Left),
                    WakeReason::Nothing => lost = None,
                },
                Ok(Outcome::Unplugged) => return Ok(Outcome::Unplugged),
                Err(ServeError::WorkerLost(why)) if early_losses < MAX_EARLY_LOSSES => {
                    tracing::warn!("disk {}: {why}; its guest waits for the next worker", disk.id);
                }
                Err(ServeError::WorkerLost(why)) => return Err(all_lost(&why)),
                Err(e) => {
                    disk.record_errno(&e);
                    return Err(not_served(e));
                }
            }
        }
    }

    /// Has the keeper of a paused disk start its workers for the image that the disk goes on with.
    /// The worker has closed the image, so it may be replaced.
    fn adapt(
        &self,
        disk: &Assignment<'_>,
        keeper: Keeper,
        spec: &DiskSpec,
    ) -> Result<Keeper, Failure> {
        let kept = keeper.spec().map_err(|e| failure("ask the keeper", &e))?;
        if kept == *spec {
            return Ok(keeper);
        }
        if kept.group.is_none() && spec.group.is_none() {
            keeper.change(spec).map_err(|e| failure("name the image to the keeper", &e))?;
            return Ok(keeper);
        }
        // The worker of a store serves other disks, too. Clients of NBD have to connect again.
        end_closed(keeper).map_err(|e| failure("leave the keeper of the store", &e))?;
        self.keeper(disk.id, spec, false)
    }

    /// Requests the second line of the guest's disk, if that is served with the same image.
    fn second_line(&self, disk: &Assignment<'_>, first: DiskId) -> Result<Line, Failure> {
        // It is checked before and after: the keeper may belong to another disk of the same name by
        // now.
        if disk.is_beside(first) {
            let line = Keeper::connect(&self.socket(first)).and_then(|keeper| keeper.second_line());
            let line = line.map_err(|e| failure("reach the keeper of its guest's disk", &e))?;
            if disk.is_beside(first) {
                return Ok(line);
            }
        }
        Err(Failure {
            why: format!("disk {first} of the guest is not served"),
            help: format!("ferrite tries again; ferrite disk show {first} has the reason"),
        })
    }

    /// Requests the second line, and waits a while for a keeper or worker that is being replaced.
    fn find_second_line(
        &self,
        disk: &Assignment<'_>,
        first: DiskId,
        stop: &Waker,
    ) -> Result<Line, Failure> {
        let end = Instant::now() + SECOND_LINE_TIMEOUT;
        loop {
            match self.second_line(disk, first) {
                Err(_) if Instant::now() < end => {
                    // The caller reads the reason of the wake-up.
                    let [woken] = wait_for([stop.fd()], Some(SECOND_LINE_TIMEOUT / 20));
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
        let written = match disk.ahead {
            Some(ahead) => !ahead.read_only,
            None => is_written(store, disk)?,
        };
        let spec = self.spec(disk, written)?;
        self.follow(disk, &spec, Some(store), stop)
    }

    fn hold(&self, disk: &Assignment<'_>, stop: &Waker) -> Result<Outcome, Failure> {
        let written = disk.ahead.is_some_and(|ahead| !ahead.read_only);
        let spec = self.spec(disk, written)?;
        self.follow(disk, &spec, None, stop)
    }

    fn spawn(&self) -> Result<u32, Failure> {
        self.spawn_spare()
    }

    fn spares(&self) -> Vec<u32> {
        self.live_spares().into_iter().map(|(pid, _)| pid).collect()
    }

    fn upgrade_spares(&self, binary: &Path) {
        for (pid, keeper) in self.live_spares() {
            if let Err(e) = keeper.upgrade(binary) {
                tracing::warn!(
                    "keeper {pid}, which has no disk, goes on with its old program: {e}"
                );
            }
        }
    }

    fn give(&self, pid: u32, disk: DiskId) -> Result<bool, Failure> {
        self.give_spare(pid, disk)
    }

    fn empty(&self, disk: DiskId) -> Result<Option<u32>, Failure> {
        self.empty_keeper(disk)
    }

    fn keeper_of(&self, disk: DiskId) -> Option<u32> {
        process_of(&Keeper::connect(&self.socket(disk)).ok()?).ok()
    }

    fn serve_beside(
        &self,
        disk: &Assignment<'_>,
        first: DiskId,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let mut config = follow_config(disk);
        // QEMU uses one queue, and the worker has few devices of Xen.
        config.offer.max_queues = 1;
        let log_limits = LogLimits::default();
        let mut early_losses = 0;
        loop {
            let line = self.find_second_line(disk, first, stop)?;
            name_keeper(store, disk, line.keeper, None)?;
            disk.set_keeper(line.keeper as u32, None, None);
            early_losses += 1;
            let mut joined = false;
            let opened = || {
                (joined, early_losses) = (true, 0);
                disk.set_served();
            };
            match follow_second(store, line.fd.as_fd(), &config, &log_limits, stop, opened) {
                Ok(Outcome::Unplugged) => return Ok(Outcome::Unplugged),
                Ok(Outcome::Left | Outcome::Stopped) => match disk.wake_reason() {
                    WakeReason::End => return Ok(Outcome::Left),
                    _ if joined => {}
                    _ => {
                        let why = format!("disk {first} of the guest is not open yet");
                        let help = "ferrite tries again".to_owned();
                        return Err(Failure { why, help });
                    }
                },
                Err(ServeError::WorkerLost(why)) if early_losses < MAX_EARLY_LOSSES => {
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
            if keeper.as_ref().is_err_and(has_no_listener) {
                remove_second(&self.run.join(first.file_name()))?;
                // A keeper may have started before the removal, and its worker may have read the
                // files.
                keeper = Keeper::connect(&socket);
            }
            let line = match keeper {
                Err(e) if has_no_listener(&e) => return Ok(()),
                keeper => keeper?.second_line()?,
            };
            part(line.fd.as_fd(), DomId(disk.domid), &Waker::new()?, Some(PART_TIMEOUT))
                .map_err(io::Error::other)
        };
        parted().map_err(|e| failure("remove it from its guest's disk", &e))
    }

    fn client(&self, disk: DiskId, about: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        Keeper::connect(&self.socket(disk))?.client(about, files)
    }

    fn exporter(&self, disk: DiskId) -> Option<Command> {
        self.programs.exporter(disk)
    }

    fn passing(&self, passing: Passing) -> Option<Command> {
        self.programs.passing(passing)
    }

    fn remove(&self, disk: DiskId) {
        if let Err(e) = self.end(disk) {
            tracing::warn!("cannot end the keeper of disk {disk}: {e}");
        }
    }

    fn remove_older(&self, disk: DiskId) -> Result<(), Failure> {
        self.end(disk).map_err(|e| failure("end the keeper of an older disk", &e))
    }

    fn close(&self, disk: DiskId, stop: &Waker) -> Result<Option<u32>, Failure> {
        closed::close(&self.socket(disk), &self.run.join(disk.file_name()), stop)
    }

    fn upgrade_closed(&self, disk: DiskId, binary: &Path) -> Result<(), Failure> {
        closed::upgrade_closed(&self.socket(disk), binary)
    }

    fn options(&self, disk: DiskId) -> Option<DiskOptions> {
        let spec = Keeper::connect(&self.socket(disk)).and_then(|keeper| keeper.spec()).ok()?;
        self.programs.options(&spec.worker)
    }

    fn kept_disks(&self) -> Vec<DiskId> {
        self.sweep_stores();
        self.names().filter_map(|name| id_of_name(&name)).collect()
    }
}

/// Whether the error of a connection means that no keeper runs.
fn has_no_listener(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn failure(what: &str, e: &io::Error) -> Failure {
    let help = "ferrite tries again; the daemon's log has more (journalctl -u ferrite)".to_owned();
    Failure { why: format!("cannot {what}: {e}"), help }
}

fn all_lost(why: &str) -> Failure {
    let why = format!("workers are lost at once, {MAX_EARLY_LOSSES} in a row: {why}");
    let help = "ferrite tries again; the log has the reason (journalctl -u ferrite)".to_owned();
    Failure { why, help }
}

fn not_served(e: ServeError) -> Failure {
    let help = match &e {
        ServeError::Open { what, why, help, .. } => {
            return Failure { why: format!("{what}: {why}"), help: help.clone() };
        }
        ServeError::Close(_) => {
            "answered writes are kept on this host: repair the storage; ferrite tries again"
        }
        ServeError::TakeOver(_) => {
            "if the guest cannot be served as it is, detach the disk (xl block-detach) and attach it \
             again; requests in flight are lost then"
        }
        ServeError::Attachment(_) => "look at the toolstack's directory of the disk (xenstore-ls)",
        _ => "the guest waits, and ferrite tries again; ferrite doctor shows what is missing",
    };
    Failure { why: e.to_string(), help: help.to_owned() }
}
