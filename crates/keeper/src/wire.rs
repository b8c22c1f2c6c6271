//! The messages on a keeper's socket: JSON, one message at a time, of bounded size.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::DiskSpec;

/// Most bytes of a message.
pub(crate) const MAX_BYTES: usize = 64 << 10;

/// A request to a keeper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Send the follower's end of the line. The worker of the start `lost` is killed.
    Line {
        /// Number of the lost worker's start.
        lost: Option<u64>,
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
