//! The messages on a keeper's socket: JSON, one message at a time, of bounded size.
//!
//! Keeper and daemon may be of different versions. Both say theirs when the daemon asks for the line,
//! which it does first.

use std::path::PathBuf;

use ferrite_host::frames::{Protocol, Version, first_version};
use serde::{Deserialize, Serialize};

use crate::spec::DiskSpec;

/// Requests and replies. The reply to a request for a line has a descriptor, and a client comes with up to three.
pub(crate) const KEEPER: Protocol =
    Protocol { name: "a keeper's socket", max_bytes: 64 << 10, max_files: 3 };
/// The version of these messages. It grows with each request that a keeper of the version before
/// does not know.
pub(crate) const VERSION: Version = Version { protocol: KEEPER.name, own: 2 };

/// A request to a keeper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Send the follower's end of the line. The worker of the start `lost` is killed.
    Line {
        /// Number of the lost worker's start.
        lost: Option<u64>,
        /// The requester's [`VERSION`].
        #[serde(default = "first_version")]
        version: u32,
    },
    /// Send the follower's end of the second line. No worker is killed for it.
    SecondLine,
    /// Send the description of the disk.
    #[serde(rename = "Keep")]
    Spec,
    /// Kill the worker and stop keeping the disk. The keeper ends with its last disk; otherwise the
    /// next worker goes on with the other disks of the group.
    End,
    /// Stop keeping a disk that the worker has closed. The worker goes on with the others.
    Leave,
    /// Add this disk to the group. Only the group's socket takes it.
    Join(Box<DiskSpec>),
    /// Kill the worker, which has closed the image, and start the next ones by this description.
    Change(Box<DiskSpec>),
    /// Become the keeper of this disk. Only a keeper that has no worker does.
    Become(Box<DiskSpec>),
    /// Hand the worker a client that is none of NBD. Its descriptors come along.
    Client {
        /// The description of it for the worker.
        about: String,
    },
    /// Kill the worker, and go on with this program.
    Upgrade {
        /// Path of the program.
        binary: PathBuf,
    },
}

/// A keeper's reply.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The line of this start comes along as a descriptor.
    Line {
        /// Number of the worker's start.
        start: u64,
        /// Process number of the keeper.
        keeper: i32,
        /// The keeper's [`VERSION`].
        #[serde(default = "first_version")]
        version: u32,
    },
    /// The description of the disk.
    #[serde(rename = "Keep")]
    Spec(Box<DiskSpec>),
    /// The request was carried out.
    Done,
    /// The request failed, with the reason.
    #[serde(rename = "No")]
    Failed(String),
}
