//! The worker channel: how the one worker of a group gets its disks (docs/internals/processes.md
//! 10).
//!
//! It is a socket with one message for each disk. When the worker closes a disk's line, only the
//! service of that disk ends. When the keeper ends, the channel ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ferrite_host::frames::{self, Frame, MAX_FILES, Protocol};
use ferrite_host::names::Handed;
use ferrite_host::process::{FIRST_GIVEN, take_given};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::member::Connections;
use crate::spec::{DiskSpec, Preopen};

/// Descriptor of the worker's end.
pub(crate) const CHANNEL_FD: RawFd = FIRST_GIVEN;
/// Keeper and worker are one program, so there is one version.
const CHANNEL: Protocol =
    Protocol { name: "the worker channel", max_bytes: 64 << 10, max_files: MAX_FILES };
/// Each disk comes with three connections: both lines and the client channel.
const CONNECTIONS: usize = 3;

/// A message on the channel, as JSON.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// The worker shall serve a disk with these arguments. `preopens` lists for each path the
    /// number of open files that come along, and the error number that kept the keeper from opening
    /// more.
    Disk {
        arguments: Vec<String>,
        #[serde(rename = "ahead")]
        preopens: Vec<(PathBuf, usize, Option<i32>)>,
    },
    /// All disks have come that the keeper had when it started the worker.
    All,
    /// A client wants a command done. Its connection comes along.
    Command,
}

/// The keeper's end of one worker's channel.
#[derive(Debug)]
pub(crate) struct ChannelSender {
    keeper_end: OwnedFd,
    /// The worker's end, until the worker has it.
    pub(crate) worker_end: Option<OwnedFd>,
    all_sent: bool,
}

impl ChannelSender {
    pub(crate) fn new() -> io::Result<ChannelSender> {
        let (keeper_end, worker_end) = frames::pair()?;
        Ok(ChannelSender { keeper_end, worker_end: Some(worker_end), all_sent: false })
    }

    /// The keeper's end. It hangs up when the worker ends.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.keeper_end
    }

    /// Sends the disks that the worker has not got yet, as far as the channel has room. Returns
    /// whether it has got all.
    pub(crate) fn send_disks<'a>(
        &mut self,
        members: impl Iterator<Item = (&'a DiskSpec, &'a mut Connections)>,
    ) -> bool {
        for (spec, connections) in members {
            let Some(ends) = &connections.worker_ends else { continue };
            if !self.has_room() || self.send_disk(spec, ends).is_err() {
                return false;
            }
            connections.worker_ends = None;
        }
        if !self.all_sent {
            self.all_sent = self.has_room() && self.send(&Message::All, &[]).is_ok();
        }
        self.all_sent
    }

    fn send_disk(&self, spec: &DiskSpec, ends: &[OwnedFd; CONNECTIONS]) -> io::Result<()> {
        let (mut opened, mut preopens) = (Vec::new(), Vec::new());
        for wanted in &spec.preopens {
            let (files, why) = open_files(wanted, MAX_FILES - CONNECTIONS - opened.len());
            preopens.push((wanted.path.clone(), files.len(), why));
            opened.extend(files);
        }
        let files: Vec<BorrowedFd<'_>> = ends.iter().chain(&opened).map(|fd| fd.as_fd()).collect();
        self.send(&Message::Disk { arguments: spec.worker.clone(), preopens }, &files)
    }

    /// Hands a command's client to the worker. If that fails the client sees its connection end.
    pub(crate) fn command(&self, client: BorrowedFd<'_>) {
        let _ = self.send(&Message::Command, &[client]);
    }

    fn send(&self, message: &Message, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        CHANNEL.try_send(&self.keeper_end, &serde_json::to_vec(message)?, files)
    }

    /// Whether a message would be taken now. It is asked first, so that files are not opened in
    /// vain.
    fn has_room(&self) -> bool {
        let mut fds = [PollFd::new(&self.keeper_end, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// Opens a file at most `most` times. Returns the error number that kept it from opening more.
fn open_files(preopen: &Preopen, most: usize) -> (Vec<OwnedFd>, Option<i32>) {
    let mut files = Vec::new();
    for _ in 0..preopen.count.min(most) {
        let mut options = File::options();
        // The flags say how to open. `OpenOptions` refuses to open without one of these set, too.
        let flags = rustix::fs::OFlags::from_bits_retain(preopen.flags);
        let writes = flags.intersects(rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::RDWR);
        let makes = flags.contains(rustix::fs::OFlags::CREATE);
        options.read(true).write(writes).create(makes).mode(0o600);
        match options.custom_flags(preopen.flags.cast_signed()).open(&preopen.path) {
            Ok(file) => files.push(file.into()),
            Err(e) => return (files, e.raw_os_error()),
        }
    }
    (files, (preopen.count > most).then_some(Errno::MFILE.raw_os_error()))
}

/// The worker's end of the channel.
#[derive(Debug)]
pub struct WorkerChannel(OwnedFd);

/// A message of the keeper's to its worker.
#[derive(Debug)]
pub enum WorkerEvent {
    /// A disk to serve.
    Disk(Box<AssignedDisk>),
    /// All disks have come that the keeper had when it started this worker. The worker need wait
    /// for no other one before it gives up its rights.
    All,
    /// The connection of a client that wants a command done.
    Command(UnixStream),
}

/// A disk that this worker serves from now on.
#[derive(Debug)]
pub struct AssignedDisk {
    /// The disk's arguments.
    pub arguments: Vec<String>,
    /// The worker's end of the line. The disk is this worker's until the line ends.
    pub line: OwnedFd,
    /// The worker's end of the second line.
    pub second: OwnedFd,
    /// The worker's end of the client channel, which brings NBD clients.
    pub client_channel: OwnedFd,
    /// The files that the keeper has opened for the disk.
    pub handed: Handed,
}

impl WorkerChannel {
    /// Takes the channel that this process was started with.
    ///
    /// # Errors
    /// It was started without one.
    pub fn take() -> io::Result<WorkerChannel> {
        Ok(WorkerChannel(take_given(CHANNEL_FD)?))
    }

    /// Waits for the keeper's next message.
    ///
    /// # Errors
    /// `UnexpectedEof`: the keeper has ended, and so must this process. `InvalidData`: the message
    /// is malformed or lacks descriptors.
    pub fn next(&self) -> io::Result<WorkerEvent> {
        let Frame { bytes, mut files } = CHANNEL.receive(&self.0)?;
        let lacks = || io::Error::new(io::ErrorKind::InvalidData, "descriptors are missing");
        Ok(match serde_json::from_slice(&bytes)? {
            Message::All => WorkerEvent::All,
            Message::Command => WorkerEvent::Command(files.pop().ok_or_else(lacks)?.into()),
            Message::Disk { arguments, preopens } => {
                let mut files = files.into_iter();
                let mut next = || files.next().ok_or_else(lacks);
                let (line, second, client_channel) = (next()?, next()?, next()?);
                let mut handed = Handed::default();
                for (path, count, why) in preopens {
                    // `Handed` gives the last one first, so the error goes in before the files.
                    if let Some(why) = why {
                        handed.add(path.clone(), Err(Errno::from_raw_os_error(why)));
                    }
                    for _ in 0..count {
                        handed.add(path.clone(), Ok(next()?));
                    }
                }
                WorkerEvent::Disk(Box::new(AssignedDisk {
                    arguments,
                    line,
                    second,
                    client_channel,
                    handed,
                }))
            }
        })
    }
}
