//! The protocol between a command and the process that serves the store (store.md 8): a question, and lines of JSON up
//! to the answer. Both ends bound the bytes that they read, and the time that they wait.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferrite_image_tools::stores::Change;
use ferrite_store::journal::Name;
use ferrite_store::owned::StoreKey;
use ferrite_store::page::Packing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::exit::{Code, Failure};
use crate::serve::RUN_DIR;

/// The most bytes of a question, with its newline.
pub(super) const MAX_QUESTION: usize = 64 << 10;
/// The most bytes of an answer: a store may have 65,536 volumes.
pub(super) const MAX_ANSWER: usize = 64 << 20;
/// The only version.
pub(super) const VERSION: u32 = 1;

/// How often a waiting end checks whether to go on waiting.
const LOOK: Duration = Duration::from_millis(50);

/// A question.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question<T = Ask> {
    pub(super) version: u32,
    pub(super) store: StoreKey,
    /// The client's path of the store; for texts only.
    pub(super) path: String,
    pub(super) what: T,
}

/// The command.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ask {
    List,
    Change {
        volume: Name,
        change: Change,
    },
    Collect,
    Stats,
    /// Compacts the store. A compression that is given is set first.
    Compact {
        compress: Option<Compressing>,
    },
    /// The limit in bytes a second.
    Scrub {
        rate: u64,
    },
    /// The limit in bytes of content a second; `None`: no content is read.
    Check {
        deep: bool,
        rate: Option<u64>,
    },
    Repair {
        force: bool,
    },
}

/// A compression; `None`: contents are not compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Compressing(pub(super) Option<Packing>);

/// A line of the answer. [`Reply::Begun`] and [`Reply::Progress`] are followed by others.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// The owner has understood the question.
    Begun,
    /// The progress.
    Progress {
        done_bytes: u64,
        total_bytes: u64,
    },
    /// This process has not opened the store, or has closed it.
    NotOpen,
    Done(Value),
    Failed {
        code: u8,
        what: String,
        why: String,
        help: String,
    },
}

impl From<Failure> for Reply {
    fn from(Failure { code, what, why, help }: Failure) -> Reply {
        Reply::Failed { code: code.number(), what, why, help }
    }
}

impl Reply {
    /// A failure of the command.
    pub(super) fn failure(code: u8, what: String, why: String, help: String) -> Failure {
        Failure { code: Code::of_another(code), what, why, help }
    }
}

/// The folders in which owners listen: root's, and this user's.
pub(super) fn folders() -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(|own| PathBuf::from(own).join("ferrite"));
    let all = [Some(PathBuf::from(RUN_DIR)), own];
    all.into_iter().flatten().map(|folder| folder.join("stores")).collect()
}

/// The prefix of names of sockets for this store.
pub(crate) fn prefix(StoreKey(device, inode): StoreKey) -> String {
    format!("{device}-{inode}.")
}

/// Waits for this condition, for a moment.
fn wait_for(stream: &UnixStream, flags: PollFlags) -> io::Result<()> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
    match poll(&mut [PollFd::new(stream, flags)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Whether the other end has closed the stream.
pub(super) fn is_gone(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// Reads one line of at most `most` bytes. Bytes after it stay in `buffer`. An empty line: the other end has closed the
/// stream.
///
/// # Errors
/// `TimedOut`: `goes_on` ended the wait. `InvalidData`: the line is longer.
pub(super) fn read_line(
    stream: &UnixStream,
    buffer: &mut Vec<u8>,
    most: usize,
    mut goes_on: impl FnMut() -> bool,
) -> io::Result<Vec<u8>> {
    let mut looked = 0;
    loop {
        if let Some(at) = buffer[looked..].iter().position(|byte| *byte == b'\n') {
            let rest = buffer.split_off(looked + at + 1);
            return Ok(std::mem::replace(buffer, rest));
        }
        looked = buffer.len();
        if looked >= most {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = [0; 16 << 10];
        let room = bytes.len().min(most - looked);
        match (&*stream).read(&mut bytes[..room]) {
            Ok(0) => return Ok(Vec::new()),
            Ok(read) => buffer.extend_from_slice(&bytes[..read]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if !goes_on() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                wait_for(stream, PollFlags::IN)?;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Writes one line.
///
/// # Errors
/// `TimedOut`: the other end does not read. Otherwise it has closed the stream.
pub(super) fn write_line(
    stream: &UnixStream,
    line: &impl Serialize,
    within: Duration,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(line)?;
    line.push(b'\n');
    let (mut left, end) = (&line[..], Instant::now() + within);
    while !left.is_empty() {
        match (&*stream).write(left) {
            Ok(written) => left = &left[written..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                wait_for(stream, PollFlags::OUT)?;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
