//! The protocol between a command and the process that serves the store (store.md 8): a question, and lines of JSON up
//! to the answer. Both ends bound the bytes that they read, and the time that they wait.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use ferrite_host::frames::{Version, lines};
use ferrite_image_tools::NewSize;
use ferrite_image_tools::stores::Change;
use ferrite_store::journal::Name;
use ferrite_store::owned::StoreKey;
use ferrite_store::page::Packing;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::exit::{Code, Failure};
use crate::serve::RUN_DIR;

/// The most bytes of a question, with its newline.
pub(super) const MAX_QUESTION: usize = 64 << 10;
/// The most bytes of an answer: a store may have 65,536 volumes.
pub(super) const MAX_ANSWER: usize = 64 << 20;
/// The version of questions and answers. An owner of the version before reads no newer question: one
/// that it can answer is asked in its version.
pub(super) const VERSION: Version = Version { protocol: "commands on a store", own: 1 };

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
    /// Makes the store larger. `None`: as large as its file or device.
    Grow {
        size: Option<NewSize>,
    },
    /// Reads a volume. After the answer, a [`Reading`], the stream has requests of
    /// [`elsewhere`](ferrite_disk::elsewhere) and their answers. The client's process number is for texts only.
    Read {
        volume: Name,
        process: u32,
    },
}

/// The volume that is read from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) bytes: u64,
    pub(super) snapshot: bool,
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
    fn from(Failure { code, what, why, help, .. }: Failure) -> Reply {
        Reply::Failed { code: code.number(), what, why, help }
    }
}

impl Reply {
    /// A failure of the command.
    pub(super) fn failure(code: u8, what: String, why: String, help: String) -> Failure {
        Failure::new(what, why, help).with_code(Code::of_another(code))
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

/// Writes one line.
///
/// # Errors
/// `TimedOut`: the other end does not read. Otherwise it has closed the stream.
pub(super) fn write_line(
    stream: &UnixStream,
    line: &impl Serialize,
    within: Duration,
) -> io::Result<()> {
    lines::send(stream, serde_json::to_vec(line)?, within)
}
