//! What the two halves of a backend say to each other: owned values and nothing else, so that what
//! carries them may be a call, as here, or a socket.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::ServeError;
use crate::blkif::negotiate::{DiskFacts, Wanted};

/// What a worker is to do. It has done it when its [`Reply`] is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Say what a frontend is to be told of the disk. Reply: [`Facts`](Reply::Facts).
    Describe,
    /// Heed what a predecessor has remembered of failed flushes.
    Remember,
    /// Remove what is left of the disk, or of an older one of its name.
    Forget,
    /// Enter the run directory, with what has to be there before a guest can write.
    Enter,
    /// Connect a frontend that has nothing in flight. Reply: [`Connected`](Reply::Connected).
    Connect(Rings),
    /// Go on where a predecessor ended. Reply: [`Connected`](Reply::Connected).
    TakeOver {
        /// As the predecessor had them.
        rings: Rings,
        /// The size that the guest was told.
        told_sectors: Option<u64>,
    },
    /// Answer what is in flight, give everything of the guest's back, forget the connection.
    Detach,
    /// Answer what is in flight, and leave the table: a successor will go on, or the next connection.
    Stop,
    /// Answer what is on the rings, whatever the disk has used of processors.
    Hurry,
    /// Bring to the medium what no flush has asked for, as nobody is connected.
    Save,
    /// Ask for the medium's size. Reply: [`Size`](Reply::Size).
    CheckSize,
    /// Begin to close the image, and wait for a while. If it fails by then, that is the answer.
    Close,
    /// Wait until it is closed.
    EndClose,
}

/// A connection to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rings {
    /// What the frontend asks for.
    pub(super) wanted: Wanted,
    /// Which guest it is, in words that no other guest's device has.
    pub(super) guest: String,
    /// Segments that were offered for INDIRECT.
    pub(super) max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub(super) discard: bool,
}

/// The version of what is said between the halves, when they are two processes. It grows with each new
/// order, and with each field that the other half has to heed (processes.md 1, rule 10).
pub(super) const VERSION: u32 = 1;

/// What came of an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It is done.
    Done,
    /// The image is open.
    Opened {
        /// The worker's [`VERSION`],
        version: u32,
        /// and its program's.
        program: String,
    },
    /// What a frontend is to be told of the disk.
    Facts(DiskFacts),
    /// A frontend is served.
    Connected {
        /// How, in one line for the log.
        how: String,
        /// Requests of a predecessor's that are done again.
        undone: usize,
    },
    /// The medium's size.
    Size {
        /// It has grown to so many sectors.
        grown: Option<u64>,
        /// When to ask again if nothing is told before.
        ask_again: Option<Duration>,
    },
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    /// The frontend's doing, or what a predecessor has left does not belong to it.
    Refused(String),
    /// The same guest was served from the same image, by other rings than it has now.
    OtherRings(String),
    /// The guest was served from another image.
    WrongImage(String),
    /// The run directory cannot be used now.
    RunDir {
        /// What was tried.
        what: String,
        /// The reason.
        why: String,
    },
    /// This host's fault.
    Host {
        /// What was tried.
        what: String,
        /// The reason.
        why: String,
    },
    /// Storage failed when the image was to be closed.
    Close(String),
    /// The image cannot be opened.
    Open(OpenFailure),
    /// The worker is gone, or what it says cannot be understood.
    #[serde(skip)]
    Lost(String),
    /// We were asked to stop, and do not wait for the worker.
    #[serde(skip)]
    Left,
}

/// Why an image cannot be opened, for the administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFailure {
    /// What was tried.
    pub what: String,
    /// The reason.
    pub why: String,
    /// The next step.
    pub help: String,
}

/// What a worker says without being asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Report {
    /// A frontend broke its ring, and the queue takes nothing more.
    Violation {
        /// Which.
        queue: usize,
        /// How.
        why: String,
    },
    /// A queue has failed, and the disk cannot go on.
    Failed(Failure),
}

impl Failure {
    pub(super) fn host(what: impl Into<String>, source: io::Error) -> Self {
        Failure::Host { what: what.into(), why: source.to_string() }
    }

    /// What was to be kept in the run directory could not be.
    pub(super) fn run_dir(what: impl Into<String>, source: io::Error) -> Self {
        let what = what.into();
        match source.kind() {
            io::ErrorKind::WouldBlock => {
                Failure::RunDir { what, why: "another process serves this disk".to_owned() }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Failure::RunDir { what, why: source.to_string() }
            }
            _ => Failure::host(what, source),
        }
    }
}

impl From<Failure> for ServeError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(why) | Failure::OtherRings(why) | Failure::WrongImage(why) => {
                ServeError::TakeOver(why)
            }
            Failure::RunDir { what, why } => {
                ServeError::RunDir { what, source: io::Error::other(why) }
            }
            Failure::Host { what, why } => ServeError::Host { what, source: io::Error::other(why) },
            Failure::Close(why) => ServeError::Close(io::Error::other(why)),
            Failure::Open(OpenFailure { what, why, help }) => ServeError::Open { what, why, help },
            Failure::Lost(why) => ServeError::WorkerLost(why),
            Failure::Left => ServeError::Left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_lacks_delays_a_guest_or_ends_its_backend_in_the_same_words_as_here() {
        let tried = |kind| ServeError::from(Failure::run_dir("keep a table", kind));
        let busy = tried(io::ErrorKind::WouldBlock.into());
        assert!(matches!(busy, ServeError::RunDir { .. }), "{busy}");
        assert_eq!(busy.to_string(), "cannot keep a table: another process serves this disk");
        let full = tried(io::Error::from_raw_os_error(28));
        assert!(matches!(full, ServeError::RunDir { .. }), "{full}");
        let why = "cannot keep a table: No space left on device (os error 28)";
        assert_eq!(full.to_string(), why);
        let other = tried(io::ErrorKind::OutOfMemory.into());
        assert!(matches!(other, ServeError::Host { .. }), "{other}");
        assert_eq!(other.to_string(), "cannot keep a table: out of memory");
    }
}
