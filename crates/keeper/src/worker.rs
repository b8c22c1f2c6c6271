//! The worker of a keeper, from its start to its end.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_io::process::{FIRST_GIVEN, Program, environment_without, send_with, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use crate::keep::{Keep, VARIABLE};
use crate::names::Desk;
use crate::pauses::Pauses;
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
    /// It works.
    Lives { pid: Pid, since: Instant },
    /// It was killed, or has ended, and nobody has asked how yet.
    Ends { pid: Pid, since: Instant, look: Duration },
}

/// A worker, and the line to it. There is always a line: what is said on it before the worker is there
/// waits for it.
#[derive(Debug)]
pub(crate) struct Worker {
    /// How many were started, this one included.
    start: u64,
    /// The followers' ends of both lines.
    lines: [OwnedFd; 2],
    /// What brings it clients.
    door: OwnedFd,
    /// Its own ends of all three, until it is started.
    own_ends: Option<[OwnedFd; 3]>,
    stage: Stage,
    pauses: Pauses,
    names: Desk,
}

impl Worker {
    pub(crate) fn new(start: u64) -> io::Result<Worker> {
        let ([first, second, door], own_ends) = ends()?;
        let stage = Stage::Pause(Instant::now());
        let (own_ends, pauses) = (Some(own_ends), Pauses::default());
        let names = Desk::default();
        Ok(Worker { start, lines: [first, second], door, own_ends, stage, pauses, names })
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// The follower's end of the line.
    pub(crate) fn line(&self) -> &OwnedFd {
        &self.lines[0]
    }

    /// The same of the second line.
    pub(crate) fn second_line(&self) -> &OwnedFd {
        &self.lines[1]
    }

    /// Has it serve this client, as soon as it can.
    ///
    /// # Errors
    /// As many wait for it as there is room for.
    pub(crate) fn admit(&self, client: BorrowedFd<'_>) -> io::Result<()> {
        send_with(&self.door, b"client", Some(client))
    }

    /// Readable when it asks for a name, if it has to ask.
    pub(crate) fn names(&self) -> Option<BorrowedFd<'_>> {
        self.names.fd()
    }

    /// Answers it. One that does not keep to the rules is ended.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub(crate) fn answer(&mut self) -> io::Result<()> {
        match self.names.answer() {
            true => Ok(()),
            false => self.end(),
        }
    }

    /// Whether the end of the line is to be watched.
    pub(crate) fn lives(&self) -> bool {
        matches!(self.stage, Stage::Lives { .. })
    }

    /// When to call [`go_on`](Self::go_on) again at the latest.
    pub(crate) fn due(&self) -> Option<Duration> {
        match self.stage {
            Stage::Pause(until) => Some(until.saturating_duration_since(Instant::now())),
            Stage::Lives { .. } => None,
            Stage::Ends { look, .. } => Some(look),
        }
    }

    /// Kills it, if it lives. The line is the next one's from now on.
    ///
    /// # Errors
    /// No descriptors: it is as before.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        let Stage::Lives { pid, since } = self.stage else { return Ok(()) };
        let ([first, second, door], own_ends) = ends()?;
        // Fails if it has ended.
        let _ = kill_process(pid, Signal::KILL);
        (self.lines, self.door) = ([first, second], door);
        self.own_ends = Some(own_ends);
        self.start += 1;
        self.names.end();
        self.stage = Stage::Ends { pid, since, look: LOOK_AGAIN };
        Ok(())
    }

    /// Ends it, if it has ended by itself and that was not seen yet.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub(crate) fn look(&mut self) -> io::Result<()> {
        match self.lives() && has_hung_up(self.line()) {
            true => self.end(),
            false => Ok(()),
        }
    }

    /// Goes on as far as that is possible now.
    ///
    /// # Errors
    /// The next one cannot be started now. It is tried again.
    pub(crate) fn go_on(
        &mut self,
        keep: &Keep,
        binary: &OwnedFd,
        also: &[RawFd],
    ) -> io::Result<()> {
        self.look()?;
        self.reap(true);
        if matches!(self.stage, Stage::Pause(until) if until <= Instant::now()) {
            return self.begin(keep, binary, also).inspect_err(|_| {
                // As much later as if it had ended at once.
                let now = Instant::now();
                self.stage = Stage::Pause(now + self.pauses.after(Duration::ZERO, now).0);
            });
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

    fn begin(&mut self, keep: &Keep, binary: &OwnedFd, also: &[RawFd]) -> io::Result<()> {
        if self.own_ends.is_none() {
            let ([first, second, door], own_ends) = ends()?;
            (self.lines, self.door) = ([first, second], door);
            self.own_ends = Some(own_ends);
        }
        let alive = alive(&keep.run_dir)?;
        let name = std::iter::once("ferrite").chain(keep.worker.iter().map(String::as_str));
        let arguments = name.map(CString::new).collect::<Result<_, _>>()?;
        let mut environment = environment_without(VARIABLE);
        environment.retain(|pair| !BACKTRACES.iter().any(|name| pair.to_bytes().starts_with(name)));
        let names =
            keep.names.as_ref().map(|names| Ok::<_, io::Error>((names, Desk::ends(names)?)));
        let names = names.transpose()?;
        if let Some((names, _)) = &names {
            environment.extend(names.environment()?);
        }
        let program = Program { file: binary.as_fd(), arguments, environment };
        let Some([first, second, door]) = &self.own_ends else { return Ok(()) };
        let asks = names.as_ref().map(|(_, (theirs, _))| theirs.as_fd());
        let (first, alive) = (Some(first.as_fd()), Some(alive.as_fd()));
        let given = [first, alive, asks, Some(door.as_fd()), Some(second.as_fd())];
        let pid = spawn(&program, &given, also)?;
        if let Some((names, (_, ours))) = names {
            self.names.begin(
                names,
                &keep.run_dir,
                ours,
                pid.as_raw_nonzero().get().cast_unsigned(),
            );
        }
        // No copy of these stays here: with the worker the line ends, and the lock comes free.
        self.own_ends = None;
        self.stage = Stage::Lives { pid, since: Instant::now() };
        Ok(())
    }

    /// Whether it is gone for good, after [`end`](Self::end).
    pub(crate) fn has_ended(&mut self) -> bool {
        self.reap(false);
        matches!(self.stage, Stage::Pause(_))
    }
}

/// Two lines and a door: our ends, and the worker's.
fn ends() -> io::Result<([OwnedFd; 3], [OwnedFd; 3])> {
    let pair = || {
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    };
    let ((first, own_first), (second, own_second)) = (pair()?, pair()?);
    let (door, own_door) = pair()?;
    Ok(([first, second, door], [own_first, own_second, own_door]))
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
