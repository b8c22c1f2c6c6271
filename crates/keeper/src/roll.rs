//! The roll: how the one worker of a group gets its disks (docs/internals/processes.md 10).
//!
//! It is a socket of the worker's, with one message for each disk. The worker's end of a disk's line ends what
//! serves that disk, and the roll's end is the keeper's.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ferrite_io::names::Handed;
use ferrite_io::process::{
    FIRST_GIVEN, MOST_SENT, receive_all_with, send_all_with, send_with, take_given,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use crate::keep::{Ahead, Keep};
use crate::member::Seat;
use crate::wire::MAX_BYTES;

/// The worker's end, as the number of a descriptor that it is started with.
pub(crate) const ROLL_FD: RawFd = FIRST_GIVEN;
/// Both lines and the door come first with each disk.
const WAYS: usize = 3;

/// What is said on it.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    /// A disk comes, with these arguments; of the files that were opened for it, how many there are of each, and
    /// why not more.
    Disk { arguments: Vec<String>, ahead: Vec<(PathBuf, usize, Option<i32>)> },
    /// All disks have come that the keeper had when the worker was started.
    All,
    /// Somebody wants to have a command done.
    Command,
}

/// The keeper's end, of one worker.
#[derive(Debug)]
pub(crate) struct Caller {
    ours: OwnedFd,
    /// Until the worker has it.
    pub(crate) theirs: Option<OwnedFd>,
    all_said: bool,
}

impl Caller {
    pub(crate) fn new() -> io::Result<Caller> {
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        Ok(Caller { ours, theirs: Some(theirs), all_said: false })
    }

    /// It ends with the worker.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.ours
    }

    /// Calls the disks that the worker has not yet, as far as there is room. Whether it has all.
    pub(crate) fn call<'a>(
        &mut self,
        members: impl Iterator<Item = (&'a Keep, &'a mut Seat)>,
    ) -> bool {
        for (keep, seat) in members {
            let Some(ends) = &seat.own_ends else { continue };
            if !self.has_room() || self.call_one(keep, ends).is_err() {
                return false;
            }
            seat.own_ends = None;
        }
        if !self.all_said {
            self.all_said = self.has_room() && self.say(&Said::All, &[]).is_ok();
        }
        self.all_said
    }

    fn call_one(&self, keep: &Keep, ends: &[OwnedFd; WAYS]) -> io::Result<()> {
        let (mut opened, mut ahead) = (Vec::new(), Vec::new());
        for wanted in &keep.ahead {
            let (files, why) = open(wanted, MOST_SENT - WAYS - opened.len());
            ahead.push((wanted.path.clone(), files.len(), why));
            opened.extend(files);
        }
        let files: Vec<BorrowedFd<'_>> = ends.iter().chain(&opened).map(|fd| fd.as_fd()).collect();
        self.say(&Said::Disk { arguments: keep.worker.clone(), ahead }, &files)
    }

    /// Has the worker do a command. Who asks for it sees the end if that cannot be.
    pub(crate) fn command(&self, client: BorrowedFd<'_>) {
        if let Ok(bytes) = serde_json::to_vec(&Said::Command) {
            let _ = send_with(&self.ours, &bytes, Some(client));
        }
    }

    fn say(&self, said: &Said, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_all_with(&self.ours, &serde_json::to_vec(said)?, files)
    }

    /// So that nothing is opened in vain, again and again.
    fn has_room(&self) -> bool {
        let mut fds = [PollFd::new(&self.ours, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// At most so many of them, and why there are not more.
fn open(ahead: &Ahead, most: usize) -> (Vec<OwnedFd>, Option<i32>) {
    let mut files = Vec::new();
    for _ in 0..ahead.count.min(most) {
        let mut options = File::options();
        // The flags say it; without one of these it is refused.
        let flags = rustix::fs::OFlags::from_bits_retain(ahead.flags);
        let writes = flags.intersects(rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::RDWR);
        let makes = flags.contains(rustix::fs::OFlags::CREATE);
        options.read(true).write(writes).create(makes).mode(0o600);
        match options.custom_flags(ahead.flags.cast_signed()).open(&ahead.path) {
            Ok(file) => files.push(file.into()),
            Err(e) => return (files, e.raw_os_error()),
        }
    }
    (files, (ahead.count > most).then_some(Errno::MFILE.raw_os_error()))
}

/// The worker's end.
#[derive(Debug)]
pub struct Roll(OwnedFd);

/// What comes by it.
#[derive(Debug)]
pub enum Called {
    /// A disk.
    Disk(Box<CalledDisk>),
    /// All disks have come that were there when this worker was started: it has to wait for no other one before it
    /// gives its rights up.
    All,
    /// Somebody who wants to have a command done.
    Command(UnixStream),
}

/// A disk that this worker is to serve from now on.
#[derive(Debug)]
pub struct CalledDisk {
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The worker's end of its line. The disk is this worker's until the line ends.
    pub line: OwnedFd,
    /// The worker's end of the second line.
    pub second: OwnedFd,
    /// By it clients of NBD come.
    pub door: OwnedFd,
    /// What the keeper has opened for it.
    pub handed: Handed,
}

impl Roll {
    /// That which this process was started with.
    ///
    /// # Errors
    /// It was started with none.
    pub fn take() -> io::Result<Roll> {
        Ok(Roll(take_given(ROLL_FD)?))
    }

    /// Waits for what comes next.
    ///
    /// # Errors
    /// The keeper has ended, and so must this process; or it says what makes no sense.
    pub fn next(&self) -> io::Result<Called> {
        let (bytes, mut files) = receive_all_with(&self.0, MAX_BYTES)?;
        if bytes.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper has ended"));
        }
        let lacks = || io::Error::new(io::ErrorKind::InvalidData, "descriptors are missing");
        Ok(match serde_json::from_slice(&bytes)? {
            Said::All => Called::All,
            Said::Command => Called::Command(files.pop().ok_or_else(lacks)?.into()),
            Said::Disk { arguments, ahead } => {
                let mut files = files.into_iter();
                let mut next = || files.next().ok_or_else(lacks);
                let (line, second, door) = (next()?, next()?, next()?);
                let mut handed = Handed::default();
                for (path, count, why) in ahead {
                    // It is taken from the end.
                    if let Some(why) = why {
                        handed.add(path.clone(), Err(Errno::from_raw_os_error(why)));
                    }
                    for _ in 0..count {
                        handed.add(path.clone(), Ok(next()?));
                    }
                }
                Called::Disk(Box::new(CalledDisk { arguments, line, second, door, handed }))
            }
        })
    }
}
