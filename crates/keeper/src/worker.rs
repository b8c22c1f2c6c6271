//! The worker of a keeper, from its start to its end.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_io::process::{FIRST_GIVEN, Program, environment_without, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use crate::keep::VARIABLE;
use crate::member::{Member, Seat};
use crate::names::{Desk, Names};
use crate::pauses::Pauses;
use crate::roll::Caller;
use crate::tell;

/// The worker's end of the line,
pub const LINE_FD: RawFd = FIRST_GIVEN;
/// and the file that it locks before it touches the image, and registers with its rings. Both as
/// numbers of descriptors that it is started with.
pub const ALIVE_FD: RawFd = FIRST_GIVEN + 1;
/// The worker's end of the second line: of the stub domain that has the same disk as its guest, if there is
/// one.
pub const SECOND_FD: RawFd = FIRST_GIVEN + 4;
/// The name of that file in the run directory.
pub const ALIVE: &str = "alive";
/// Clients of NBD come by this descriptor: a `SOCK_SEQPACKET` socket that brings one connected stream
/// with each message.
pub const DOOR_FD: RawFd = FIRST_GIVEN + 3;

/// How often it is looked whether a worker that was killed is gone: its storage may be stuck.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(100);

/// How often it is looked whether the operations of a worker that is gone have ended.
const OPERATIONS_END: u32 = 50;

/// A panic that is caught looks for its program's files then, and who may open none is killed.
const BACKTRACES: [&[u8]; 2] = [b"RUST_BACKTRACE=", b"RUST_LIB_BACKTRACE="];

/// What there is of it.
#[derive(Debug)]
enum Stage {
    /// It is started then.
    Pause(Instant),
    /// It works, and has all disks of its group.
    Lives { pid: Pid, since: Instant, is_called: bool },
    /// It was killed, or has ended, and nobody has asked how yet.
    Ends { pid: Pid, since: Instant, look: Duration },
}

/// A worker. It has one disk, or all of a group's.
#[derive(Debug)]
pub(crate) struct Worker {
    /// How many were started, this one included.
    start: u64,
    stage: Stage,
    pauses: Pauses,
    names: Desk,
    /// How it gets the disks of its group.
    caller: Option<Caller>,
}

impl Worker {
    /// # Errors
    /// No descriptors.
    pub(crate) fn new(start: u64, has_group: bool) -> io::Result<Worker> {
        let (stage, pauses) = (Stage::Pause(Instant::now()), Pauses::default());
        let caller = has_group.then(Caller::new).transpose()?;
        Ok(Worker { start, stage, pauses, names: Desk::default(), caller })
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Readable when it asks for a name, if it has to ask.
    pub(crate) fn names(&self) -> Option<BorrowedFd<'_>> {
        self.names.fd()
    }

    /// Answers it. One that does not keep to the rules is ended.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub(crate) fn answer(&mut self, members: &mut [Member]) -> io::Result<()> {
        match self.names.answer() {
            true => Ok(()),
            false => self.end(members),
        }
    }

    /// Disks have come, or gone: it may have what is theirs, and nothing else.
    ///
    /// # Errors
    /// A folder of theirs cannot be made.
    pub(crate) fn allow(&mut self, members: &[Member]) -> io::Result<()> {
        names_of(members).try_for_each(|(names, _)| Desk::make_folders(names))?;
        self.names.allow(names_of(members));
        Ok(())
    }

    /// Has it do a command on what it serves.
    pub(crate) fn command(&self, client: BorrowedFd<'_>) {
        if let Some(caller) = &self.caller {
            caller.command(client);
        }
    }

    /// What ends with it, while it lives.
    pub(crate) fn end_fd<'a>(&'a self, members: &'a [Member]) -> Option<&'a OwnedFd> {
        let lives = matches!(self.stage, Stage::Lives { .. });
        match &self.caller {
            _ if !lives => None,
            Some(caller) => Some(caller.fd()),
            None => members.first().map(|member| &member.seat.lines[0]),
        }
    }

    /// When to call [`go_on`](Self::go_on) again at the latest.
    pub(crate) fn due(&self) -> Option<Duration> {
        match self.stage {
            Stage::Pause(until) => Some(until.saturating_duration_since(Instant::now())),
            Stage::Lives { is_called, .. } => (!is_called).then_some(LOOK_AGAIN),
            Stage::Ends { look, .. } => Some(look),
        }
    }

    /// Kills it, if it lives. The lines are the next one's from now on.
    ///
    /// # Errors
    /// No descriptors: it is as before.
    pub(crate) fn end(&mut self, members: &mut [Member]) -> io::Result<()> {
        let Stage::Lives { pid, since, .. } = self.stage else { return Ok(()) };
        let seats = members.iter().map(|_| Seat::new()).collect::<io::Result<Vec<_>>>()?;
        let caller = self.caller.as_ref().map(|_| Caller::new()).transpose()?;
        // Fails if it has ended.
        let _ = kill_process(pid, Signal::KILL);
        members.iter_mut().zip(seats).for_each(|(member, seat)| member.seat = seat);
        self.caller = caller;
        self.start += 1;
        self.names.end();
        self.stage = Stage::Ends { pid, since, look: LOOK_AGAIN };
        Ok(())
    }

    /// Ends it, if it has ended by itself and that was not seen yet.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub(crate) fn look(&mut self, members: &mut [Member]) -> io::Result<()> {
        match self.end_fd(members).is_some_and(has_hung_up) {
            true => self.end(members),
            false => Ok(()),
        }
    }

    /// A disk has come that it is to be called.
    pub(crate) fn has_another(&mut self) {
        if let Stage::Lives { is_called, .. } = &mut self.stage {
            *is_called = false;
        }
    }

    /// Goes on as far as that is possible now.
    ///
    /// # Errors
    /// The next one cannot be started now. It is tried again.
    pub(crate) fn go_on(
        &mut self,
        members: &mut [Member],
        binary: &OwnedFd,
        also: &[RawFd],
    ) -> io::Result<()> {
        self.look(members)?;
        self.reap(true);
        if matches!(self.stage, Stage::Pause(until) if until <= Instant::now()) {
            self.begin(members, binary, also).inspect_err(|_| {
                // As much later as if it had ended at once.
                let now = Instant::now();
                self.stage = Stage::Pause(now + self.pauses.after(Duration::ZERO, now).0);
            })?;
        }
        if let (Stage::Lives { is_called, .. }, Some(caller)) = (&mut self.stage, &mut self.caller)
            && !*is_called
        {
            let disks = members.iter_mut().map(|member| (&member.keep, &mut member.seat));
            *is_called = caller.call(disks);
        }
        Ok(())
    }

    /// Asks how it has ended, if it has. An end that nobody has asked for is told.
    fn reap(&mut self, is_told: bool) {
        let Stage::Ends { pid, since, look } = self.stage else { return };
        let status = match waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => {
                let look = (look * 2).min(LOOK_AGAIN_MAX);
                self.stage = Stage::Ends { pid, since, look };
                return;
            }
            Ok(Some((_, status))) => Some(status),
            // Somebody else has asked: nobody does that.
            Err(_) => None,
        };
        let now = Instant::now();
        let (pause, told) = self.pauses.after(now.duration_since(since), now);
        if let Some(untold) = told.filter(|_| is_told) {
            let how = status.map_or_else(|| "somehow".to_owned(), how_ended);
            let more = if untold > 0 { format!(" (and {untold} before)") } else { String::new() };
            tell(&format!("the worker has ended{more}, {how}: the next one is started"));
        }
        self.stage = Stage::Pause(now + pause);
    }

    fn begin(
        &mut self,
        members: &mut [Member],
        binary: &OwnedFd,
        also: &[RawFd],
    ) -> io::Result<()> {
        if self.caller.is_none()
            && let Some(only) = members.first_mut()
            && only.seat.own_ends.is_none()
        {
            only.seat = Seat::new()?;
        }
        let Some(first) = members.first() else { return Ok(()) };
        let group = first.keep.group.as_ref();
        let (arguments, run_dir) = match group {
            Some(group) => (&group.worker, &group.run_dir),
            None => (&first.keep.worker, &first.keep.run_dir),
        };
        let alive = alive(run_dir)?;
        let name = std::iter::once("ferrite").chain(arguments.iter().map(String::as_str));
        let arguments = name.map(CString::new).collect::<Result<_, _>>()?;
        let mut environment = environment_without(VARIABLE);
        environment.retain(|pair| !BACKTRACES.iter().any(|name| pair.to_bytes().starts_with(name)));
        let asks = first.keep.names.as_ref().map(|names| {
            environment.extend(names.environment()?);
            Desk::ends(names)
        });
        let asks = asks.transpose()?;
        names_of(members).try_for_each(|(names, _)| Desk::make_folders(names))?;
        let program = Program { file: binary.as_fd(), arguments, environment };
        let alive = Some(alive.as_fd());
        let their_names = asks.as_ref().map(|(theirs, _)| theirs.as_fd());
        let pid = match (&self.caller, &first.seat.own_ends) {
            (Some(caller), _) => {
                let roll = caller.theirs.as_ref().map(AsFd::as_fd);
                spawn(&program, &[roll, alive, their_names], also)?
            }
            (None, Some(ends)) => {
                let [line, second, door] = ends.each_ref().map(|end| Some(end.as_fd()));
                spawn(&program, &[line, alive, their_names, door, second], also)?
            }
            (None, None) => return Ok(()),
        };
        // No copy of these stays here: with the worker the line ends, and the lock comes free.
        match &mut self.caller {
            Some(caller) => caller.theirs = None,
            None => members.iter_mut().for_each(|only| only.seat.own_ends = None),
        }
        let is_called = self.caller.is_none();
        self.stage = Stage::Lives { pid, since: Instant::now(), is_called };
        if let Some((_, ours)) = asks {
            self.names.begin(ours, pid.as_raw_nonzero().get().cast_unsigned());
            self.names.allow(names_of(members));
        }
        Ok(())
    }

    /// Whether it is gone for good, after [`end`](Self::end).
    pub(crate) fn has_ended(&mut self) -> bool {
        self.reap(false);
        matches!(self.stage, Stage::Pause(_))
    }
}

/// What these disks' workers may have.
fn names_of(members: &[Member]) -> impl Iterator<Item = (&Names, &Path)> {
    members
        .iter()
        .filter_map(|member| Some((member.keep.names.as_ref()?, member.keep.run_dir.as_path())))
}

fn has_hung_up(line: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(line, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}

/// The file that the next worker locks: open anew for each, since a lock belongs to what was opened.
fn alive(run_dir: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
    let flags = OFlags::NOFOLLOW.bits() as i32;
    let mut options = File::options();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(flags);
    options.open(run_dir.join(ALIVE))
}

/// Removes what [`alive`] has made. Not while operations of a dead worker are under way: then the next
/// one of this name has to wait for them, too. Most are over a moment after the worker.
///
/// # Errors
/// `ResourceBusy`: they are. Otherwise the file system's.
pub(crate) fn remove_alive(run_dir: &Path) -> io::Result<()> {
    let path = run_dir.join(ALIVE);
    let file = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let mut looks = 0;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if looks == OPERATIONS_END {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        looks += 1;
        std::thread::sleep(LOOK_AGAIN_MAX / 5);
    }
    std::fs::remove_file(path)?;
    // What else is there is a successor's, or was forgotten before.
    let _ = std::fs::remove_dir(run_dir);
    Ok(())
}

fn how_ended(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("with code {code}"),
        (None, Some(signal)) => format!("by signal {signal}"),
        (None, None) => "somehow".to_owned(),
    }
}
