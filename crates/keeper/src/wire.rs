//! What is said on a keeper's socket: JSON, one message at a time, bounded.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::keep::Keep;

/// Most bytes of a message.
pub(crate) const MAX_BYTES: usize = 64 << 10;

/// What is asked.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The follower's end of the line. `lost`: the worker of this start is of no use any more.
    Line {
        /// A start's number.
        lost: Option<u64>,
    },
    /// The follower's end of the second line. The worker is not ended for it.
    SecondLine,
    /// What is kept.
    Keep,
    /// End, and the worker before. Of a group: the disk is kept no longer, and the worker goes on with the
    /// others as after a death.
    End,
    /// The disk is kept no longer. The worker has nothing of it open, and goes on with the others.
    Leave,
    /// Keep this disk, too. Asked at a group's socket.
    Join(Box<Keep>),
    /// End the worker, and go on with this binary.
    Upgrade {
        /// Its path.
        binary: PathBuf,
    },
}

/// What is answered.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The line of this start goes along.
    Line {
        /// The number of the worker's start.
        start: u64,
        /// The keeper's process.
        keeper: i32,
    },
    /// What is kept.
    Keep(Box<Keep>),
    /// It is done.
    Done,
    /// It could not be done.
    No(String),
}
