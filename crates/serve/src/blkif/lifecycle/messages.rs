//! The messages between the two halves of a backend. They are owned values only, so that a call or
//! a socket can carry them.

use std::io;
use std::time::Duration;

use ferrite_host::frames::UnknownVersion;
use serde::{Deserialize, Serialize};

use super::chain::ChainImage;
use super::error::ServeError;
use super::in_use::{ImageOrder, ImageReply};
use super::tune::Tune;
use super::volume::{VolumeOrder, VolumeReply};
use crate::blkif::negotiate::{DiskFacts, Wanted};

/// An order to a worker. It is done when its [`Reply`] comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Describe the disk for a frontend. Reply: [`Facts`](Reply::Facts).
    Describe,
    /// Read what a predecessor has recorded of failed flushes.
    Remember,
    /// Remove the files of the disk, or of an older one of its name.
    Forget,
    /// The next rings are those of this domain. The disk is open without a guest (a tap).
    Guest(u16),
    /// Enter the run directory, and create what has to be there before a guest can write.
    Enter,
    /// Connect a frontend that has nothing in flight. Reply: [`Connected`](Reply::Connected).
    Connect(Rings),
    /// Take over a predecessor's connection. Reply: [`Connected`](Reply::Connected).
    TakeOver {
        /// The rings that the predecessor had.
        rings: Rings,
        /// The size that the guest was told, in sectors.
        told_sectors: Option<u64>,
    },
    /// Answer the requests in flight, release everything of the guest's, and remove the connection.
    Detach,
    /// Answer the requests in flight, and leave the table for a successor or the next connection.
    Stop,
    /// Answer the requests on the rings without regard to the processor limit.
    Hurry,
    /// Set this on the running disk.
    Tune(Tune),
    /// Change or read the headers of the open image. Reply: [`Image`](Reply::Image).
    Image(ImageOrder),
    /// Change the open volume of a store, or tell its size. Reply: [`Volume`](Reply::Volume).
    Volume(VolumeOrder),
    /// Tell the images of the open chain. Reply: [`Chain`](Reply::Chain).
    Chain,
    /// Write to the medium what no flush has requested, as no guest is connected.
    Save,
    /// Read the medium's size. Reply: [`Size`](Reply::Size).
    CheckSize,
    /// Begin to close the image, and wait a while. A failure within that time is the reply.
    Close,
    /// Wait until the image is closed.
    EndClose,
}

/// The rings of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rings {
    /// The frontend's keys.
    pub(super) wanted: Wanted,
    /// A text that identifies the guest and device, different from any other's.
    pub(super) guest: String,
    /// Most segments that were offered for INDIRECT.
    pub(super) max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub(super) discard: bool,
}

/// The reply to an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The order was carried out.
    Done,
    /// The image is open.
    Opened {
        /// The worker's version of the line.
        version: u32,
        /// The version of the worker's program.
        program: String,
    },
    /// The facts of the disk, for a frontend.
    Facts(DiskFacts),
    /// A frontend is served.
    Connected {
        /// A description of the connection in one line, for the log.
        how: String,
        /// Number of a predecessor's requests that are repeated.
        undone: usize,
    },
    /// The medium's size.
    Size {
        /// The new number of sectors, if the medium has grown.
        grown: Option<u64>,
        /// When to send the order again. `None`: growth is reported.
        ask_again: Option<Duration>,
    },
    /// The image's headers were changed, or read.
    Image(ImageReply),
    /// The volume was changed, or not.
    Volume(VolumeReply),
    /// The images of the chain, the leaf first.
    Chain(Vec<ChainImage>),
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    /// The frontend's keys are wrong, or a predecessor's table does not belong to it.
    Refused(String),
    /// The same guest was served from the same image, by other rings than it has now.
    OtherRings(String),
    /// The guest was served from another image.
    WrongImage(String),
    /// The run directory cannot be used now.
    RunDir {
        /// The failed step.
        what: String,
        /// The reason.
        why: String,
    },
    /// A failure of this host.
    Host {
        /// The failed step.
        what: String,
        /// The reason.
        why: String,
    },
    /// Storage failed when the image was closed.
    Close(String),
    /// The image cannot be opened.
    Open(OpenFailure),
    /// The worker is gone, or has broken the protocol.
    #[serde(skip)]
    Lost(String),
    /// `stop` was woken, and the follower does not wait for the worker.
    #[serde(skip)]
    Left,
}

/// Why an image cannot be opened, for the administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFailure {
    /// The failed step.
    pub what: String,
    /// The reason.
    pub why: String,
    /// The next step.
    pub help: String,
    /// Whether another process or host has it open.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub in_use: bool,
    /// The kernel's number of the error, if it had one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub errno: Option<i32>,
}

/// An unsolicited message of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Report {
    /// A frontend has broken its ring, and the queue takes no more requests.
    Violation {
        /// The queue's number.
        queue: usize,
        /// The violation.
        why: String,
    },
    /// A queue has failed, and the disk cannot go on.
    Failed(Failure),
}

impl Failure {
    pub(super) fn host(what: impl Into<String>, source: io::Error) -> Self {
        Failure::Host { what: what.into(), why: source.to_string() }
    }

    /// The other half speaks an unknown version of these messages. The guest is served on.
    pub(super) fn version(what: &str, e: &UnknownVersion) -> Self {
        let (what, why) = (what.to_owned(), e.to_string());
        Failure::Open(OpenFailure {
            what,
            why,
            help: e.help().to_owned(),
            in_use: false,
            errno: None,
        })
    }

    /// A file in the run directory could not be written.
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
            Failure::Open(OpenFailure { what, why, help, errno, .. }) => {
                ServeError::Open { what, why, help, errno }
            }
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
        let tried = |kind| ServeError::from(Failure::run_dir("make the in-flight table", kind));
        let busy = tried(io::ErrorKind::WouldBlock.into());
        assert!(matches!(busy, ServeError::RunDir { .. }), "{busy}");
        assert_eq!(
            busy.to_string(),
            "cannot make the in-flight table: another process serves this disk"
        );
        let full = tried(io::Error::from_raw_os_error(28));
        assert!(matches!(full, ServeError::RunDir { .. }), "{full}");
        let why = "cannot make the in-flight table: No space left on device (os error 28)";
        assert_eq!(full.to_string(), why);
        let other = tried(io::ErrorKind::OutOfMemory.into());
        assert!(matches!(other, ServeError::Host { .. }), "{other}");
        assert_eq!(other.to_string(), "cannot make the in-flight table: out of memory");
    }
}
