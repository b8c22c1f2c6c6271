//! The worker of a keeper, from its start to its end.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_host::process::{FIRST_GIVEN, Program, environment_without, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use crate::backoff::RestartBackoff;
use crate::channel::ChannelSender;
use crate::log;
use crate::member::{Connections, Member};
use crate::sandbox::{NameService, WorkerSandbox};
use crate::spec::VARIABLE;

/// Descriptor of the worker's end of the line.
pub const LINE_FD: RawFd = FIRST_GIVEN;
/// Descriptor of the file that the worker locks before it touches the image, and registers with its
/// rings.
pub const ALIVE_FD: RawFd = FIRST_GIVEN + 1;
/// Descriptor of the worker's end of the second line: of a stub domain that has the same disk as
/// its guest.
pub const SECOND_FD: RawFd = FIRST_GIVEN + 4;
/// The name of the worker's lock file in the run directory. See [`ALIVE_FD`].
pub const ALIVE: &str = "alive";
/// Descriptor of the client channel: a `SOCK_SEQPACKET` socket that brings one connected NBD client
/// with each message.
pub const CLIENT_CHANNEL_FD: RawFd = FIRST_GIVEN + 3;

/// The first interval between checks of a killed worker. Its storage may be stuck, so the intervals
/// grow.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The longest interval between checks of a killed worker.
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(100);

/// Checks whether a dead worker's I/O has ended, before its lock is left in place.
const LOCK_POLLS: u32 = 50;

/// These variables are not passed on. A panic that is caught would open the program's files for its
/// backtrace, and a worker that may open none is killed for it.
const BACKTRACES: [&[u8]; 2] = [b"RUST_BACKTRACE=", b"RUST_LIB_BACKTRACE="];

/// The state of a worker.
#[derive(Debug)]
enum Stage {
    /// No worker runs. The next one is started at this time.
    Pause(Instant),
    /// The worker runs. `has_all_disks` says whether it has been sent all disks of its group.
    Lives { pid: Pid, since: Instant, has_all_disks: bool },
    /// The worker was killed or has ended, and its exit status was not collected yet.
    Ends { pid: Pid, since: Instant, poll_after: Duration },
}

/// The worker of a disk, or of all disks of a group.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Number of workers started so far, this one included.
    start: u64,
    stage: Stage,
    backoff: RestartBackoff,
    /// Whether the worker was killed to be replaced, which is no failure of it.
    is_replaced: bool,
    name_service: NameService,
    /// The channel that brings a group's worker its disks.
    channel: Option<ChannelSender>,
}

impl Worker {
    /// Prepares the first worker.
    ///
    /// # Errors
    /// There are no descriptors for its channel.
    pub(crate) fn new(start: u64, has_group: bool) -> io::Result<Worker> {
        let (stage, backoff) = (Stage::Pause(Instant::now()), RestartBackoff::default());
        let channel = has_group.then(ChannelSender::new).transpose()?;
        let (is_replaced, name_service) = (false, NameService::default());
        Ok(Worker { start, stage, backoff, is_replaced, name_service, channel })
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// A descriptor that is readable when the worker requests a file. `None` if it has all its
    /// rights.
    pub(crate) fn names_fd(&self) -> Option<BorrowedFd<'_>> {
        self.name_service.fd()
    }

    /// Serves one request for a file. A worker that sends a malformed request is killed.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub(crate) fn serve_name_request(&mut self, members: &mut [Member]) -> io::Result<()> {
        match self.name_service.serve_request() {
            true => Ok(()),
            false => self.kill(members),
        }
    }

    /// Allows the worker the files of these disks and no others, after disks have come or gone.
    ///
    /// # Errors
    /// A directory of these files cannot be created.
    pub(crate) fn allow(&mut self, members: &[Member]) -> io::Result<()> {
        sandboxes_of(members).try_for_each(|(sandbox, _)| NameService::make_folders(sandbox))?;
        self.name_service.allow(sandboxes_of(members));
        Ok(())
    }

    /// Closes the images that are held for the next worker: there is none.
    pub(crate) fn drop_images(&mut self) {
        self.name_service.drop_images();
    }

    /// Hands a command's client to the worker.
    pub(crate) fn command(&self, client: BorrowedFd<'_>) {
        if let Some(channel) = &self.channel {
            channel.command(client);
        }
    }

    /// A descriptor that hangs up when the worker ends. `None` if none runs.
    pub(crate) fn end_fd<'a>(&'a self, members: &'a [Member]) -> Option<&'a OwnedFd> {
        let lives = matches!(self.stage, Stage::Lives { .. });
        match &self.channel {
            _ if !lives => None,
            Some(channel) => Some(channel.fd()),
            None => members.first().map(|member| &member.connections.lines[0]),
        }
    }

    /// When to call [`advance`](Self::advance) again at the latest.
    pub(crate) fn due(&self, is_idle: bool) -> Option<Duration> {
        match self.stage {
            // Without a disk there is nothing to start.
            Stage::Pause(_) if is_idle => None,
            Stage::Pause(until) => Some(until.saturating_duration_since(Instant::now())),
            Stage::Lives { has_all_disks, .. } => (!has_all_disks).then_some(POLL_INTERVAL),
            Stage::Ends { poll_after, .. } => Some(poll_after),
        }
    }

    /// Kills the worker, if it runs. New lines for the next one replace its lines.
    ///
    /// # Errors
    /// There are no descriptors for the new lines, and the worker goes on.
    pub(crate) fn kill(&mut self, members: &mut [Member]) -> io::Result<()> {
        let Stage::Lives { pid, since, .. } = self.stage else { return Ok(()) };
        let connections =
            members.iter().map(|_| Connections::new()).collect::<io::Result<Vec<_>>>()?;
        let channel = self.channel.as_ref().map(|_| ChannelSender::new()).transpose()?;
        // The kill fails if the worker has ended already.
        let _ = kill_process(pid, Signal::KILL);
        members
            .iter_mut()
            .zip(connections)
            .for_each(|(member, connections)| member.connections = connections);
        self.channel = channel;
        self.start += 1;
        self.name_service.end();
        self.stage = Stage::Ends { pid, since, poll_after: POLL_INTERVAL };
        Ok(())
    }

    /// Kills the worker as [`kill`](Self::kill), which is no failure of it: the next one is started
    /// without a pause.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub(crate) fn replace(&mut self, members: &mut [Member]) -> io::Result<()> {
        self.kill(members)?;
        self.is_replaced = matches!(self.stage, Stage::Ends { .. });
        Ok(())
    }

    /// Notices that the worker has ended by itself, and replaces its lines.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub(crate) fn check_exit(&mut self, members: &mut [Member]) -> io::Result<()> {
        match self.end_fd(members).is_some_and(has_hung_up) {
            true => self.kill(members),
            false => Ok(()),
        }
    }

    /// A disk has joined: it has to be sent to the worker.
    pub(crate) fn disk_added(&mut self) {
        if let Stage::Lives { has_all_disks, .. } = &mut self.stage {
            *has_all_disks = false;
        }
    }

    /// Does what is possible now: notices an exit, starts the next worker, sends it disks.
    ///
    /// # Errors
    /// The next worker cannot be started now. It is tried again later.
    pub(crate) fn advance(
        &mut self,
        members: &mut [Member],
        binary: &OwnedFd,
        also: &[RawFd],
    ) -> io::Result<()> {
        self.check_exit(members)?;
        self.reap(true);
        if matches!(self.stage, Stage::Pause(until) if until <= Instant::now()) {
            self.start_process(members, binary, also).inspect_err(|_| {
                // The pause is as long as after a worker that ended at once.
                let now = Instant::now();
                self.stage = Stage::Pause(now + self.backoff.after(Duration::ZERO, now).0);
            })?;
        }
        if let (Stage::Lives { has_all_disks, .. }, Some(channel)) =
            (&mut self.stage, &mut self.channel)
            && !*has_all_disks
        {
            let disks = members.iter_mut().map(|member| (&member.spec, &mut member.connections));
            *has_all_disks = channel.send_disks(disks);
        }
        Ok(())
    }

    /// Collects the exit status of an ended worker. `is_logged`: logs an exit that was not
    /// requested.
    fn reap(&mut self, is_logged: bool) {
        let Stage::Ends { pid, since, poll_after } = self.stage else { return };
        let status = match waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => {
                let poll_after = (poll_after * 2).min(POLL_INTERVAL_MAX);
                self.stage = Stage::Ends { pid, since, poll_after };
                return;
            }
            Ok(Some((_, status))) => Some(status),
            // No other code waits for this process, so there is no status to lose.
            Err(_) => None,
        };
        let now = Instant::now();
        if std::mem::take(&mut self.is_replaced) {
            self.stage = Stage::Pause(now);
            return;
        }
        let (pause, report) = self.backoff.after(now.duration_since(since), now);
        if let Some(unlogged) = report.filter(|_| is_logged) {
            let how = status.map_or_else(|| "for an unknown reason".to_owned(), how_ended);
            let more =
                if unlogged > 0 { format!(" (and {unlogged} before)") } else { String::new() };
            log(&format!("the worker has ended{more}, {how}: the next one is started"));
        }
        self.stage = Stage::Pause(now + pause);
    }

    fn start_process(
        &mut self,
        members: &mut [Member],
        binary: &OwnedFd,
        also: &[RawFd],
    ) -> io::Result<()> {
        if self.channel.is_none()
            && let Some(only) = members.first_mut()
            && only.connections.worker_ends.is_none()
        {
            only.connections = Connections::new()?;
        }
        let Some(first) = members.first().filter(|first| !first.spec.is_idle()) else {
            return Ok(());
        };
        let group = first.spec.group.as_ref();
        let (arguments, run_dir) = match group {
            Some(group) => (&group.worker, &group.run_dir),
            None => (&first.spec.worker, &first.spec.run_dir),
        };
        let alive = alive(run_dir)?;
        let name = std::iter::once("ferrite").chain(arguments.iter().map(String::as_str));
        let arguments = name.map(CString::new).collect::<Result<_, _>>()?;
        let mut environment = environment_without(VARIABLE);
        environment.retain(|pair| !BACKTRACES.iter().any(|name| pair.to_bytes().starts_with(name)));
        let name_sockets = first.spec.sandbox.as_ref().map(|sandbox| {
            environment.extend(sandbox.environment()?);
            NameService::ends(sandbox)
        });
        let name_sockets = name_sockets.transpose()?;
        sandboxes_of(members).try_for_each(|(sandbox, _)| NameService::make_folders(sandbox))?;
        let program = Program { file: binary.as_fd(), arguments, environment };
        let alive = Some(alive.as_fd());
        let names_fd = name_sockets.as_ref().map(|(worker_end, _)| worker_end.as_fd());
        let pid = match (&self.channel, &first.connections.worker_ends) {
            (Some(channel), _) => {
                let channel = channel.worker_end.as_ref().map(AsFd::as_fd);
                spawn(&program, &[channel, alive, names_fd], also)?
            }
            (None, Some(ends)) => {
                let [line, second, client_channel] = ends.each_ref().map(|kill| Some(kill.as_fd()));
                spawn(&program, &[line, alive, names_fd, client_channel, second], also)?
            }
            (None, None) => return Ok(()),
        };
        // The keeper drops its copies: the line ends and the lock comes free when the worker ends.
        match &mut self.channel {
            Some(channel) => channel.worker_end = None,
            None => members.iter_mut().for_each(|only| only.connections.worker_ends = None),
        }
        let has_all_disks = self.channel.is_none();
        self.stage = Stage::Lives { pid, since: Instant::now(), has_all_disks };
        if let Some((_, keeper_end)) = name_sockets {
            self.name_service.begin(keeper_end, pid.as_raw_nonzero().get().cast_unsigned());
            self.name_service.allow(sandboxes_of(members));
        }
        Ok(())
    }

    /// Whether the worker has exited, after [`kill`](Self::kill).
    pub(crate) fn has_exited(&mut self) -> bool {
        self.reap(false);
        matches!(self.stage, Stage::Pause(_))
    }
}

/// The sandboxes of these disks' workers, with their run directories.
fn sandboxes_of(members: &[Member]) -> impl Iterator<Item = (&WorkerSandbox, &Path)> {
    members
        .iter()
        .filter_map(|member| Some((member.spec.sandbox.as_ref()?, member.spec.run_dir.as_path())))
}

fn has_hung_up(line: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(line, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}

/// Opens the lock file of the next worker. Each worker gets it opened anew, since a lock belongs to
/// an open file.
fn alive(run_dir: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
    let flags = OFlags::NOFOLLOW.bits() as i32;
    let mut options = File::options();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(flags);
    options.open(run_dir.join(ALIVE))
}

/// Removes the lock file that [`alive`] has made, but not while I/O of a dead worker is under way:
/// the next worker of this name has to wait for that. Most I/O ends a moment after its worker.
///
/// # Errors
/// `ResourceBusy`: I/O is under way. Otherwise errors of the file system.
pub(crate) fn remove_alive(run_dir: &Path) -> io::Result<()> {
    let path = run_dir.join(ALIVE);
    let file = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let _ = std::fs::remove_dir(run_dir);
            return Ok(());
        }
        file => file?,
    };
    let mut looks = 0;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if looks == LOCK_POLLS {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        looks += 1;
        std::thread::sleep(POLL_INTERVAL_MAX / 5);
    }
    std::fs::remove_file(path)?;
    // Whatever else the directory holds belongs to a successor, or stays from before.
    let _ = std::fs::remove_dir(run_dir);
    Ok(())
}

fn how_ended(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("with code {code}"),
        (None, Some(signal)) => format!("by signal {signal}"),
        (None, None) => "for an unknown reason".to_owned(),
    }
}
