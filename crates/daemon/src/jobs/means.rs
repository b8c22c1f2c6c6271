//! The means of jobs: programs, pauses of disks, and the time.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::run::Halt;
use crate::Failure;
use crate::params::Image;
use crate::state::DiskId;

/// The programs that do the work of jobs.
pub trait Tools: Send + Sync {
    /// The command `ferrite image`, without its arguments.
    fn image(&self) -> Command;
}

/// Pauses disks for jobs.
pub trait Pausing: Send + Sync {
    /// Closes a disk's image, while its guest waits. A disk that is paused by the same job is left so.
    ///
    /// # Errors
    /// The disk is served as before, or is not served at all.
    fn pause(&self, disk: DiskId, by: &str) -> Result<(), Failure>;

    /// Serves a paused disk again, with the image of the same name.
    ///
    /// # Errors
    /// The disk stays paused.
    fn resume(&self, disk: DiskId, by: &str) -> Result<(), Failure>;

    /// As [`resume`](Pausing::resume), with another image if one is named.
    ///
    /// # Errors
    /// The disk stays paused, with the image that it had.
    fn resume_as(&self, disk: DiskId, by: &str, image: Option<&Image>) -> Result<(), Failure> {
        match image {
            None => self.resume(disk, by),
            Some(_) => Err(lacking()),
        }
    }
}

/// The mirror that a worker opens with its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorSpec {
    /// The target, as `FORMAT:PATH` or the URI of an export.
    pub target: String,
    /// The file of the map.
    pub map: PathBuf,
}

/// How much data may be in a leaf that is merged while its guest waits.
#[derive(Clone, Copy, Debug)]
pub struct LeafBytes {
    /// With so much it is merged at once: a pause of some tens of milliseconds.
    pub small: u64,
    /// With so much it is merged if it does not become smaller: a pause of a second on a slow disk.
    pub most: u64,
}

impl Default for LeafBytes {
    fn default() -> LeafBytes {
        LeafBytes { small: 8 << 20, most: 128 << 20 }
    }
}

/// The means of jobs.
pub struct Means {
    pub(super) tools: Option<Arc<dyn Tools>>,
    pub(super) pausing: Option<Arc<dyn Pausing>>,
    pub(super) leaf: LeafBytes,
    pub(super) now: Box<dyn Fn() -> SystemTime + Send + Sync>,
}

impl Default for Means {
    fn default() -> Means {
        let (tools, pausing, leaf) = (None, None, LeafBytes::default());
        Means { tools, pausing, leaf, now: Box::new(SystemTime::now) }
    }
}

impl Means {
    /// Jobs use these programs.
    #[must_use]
    pub fn with_tools(self, tools: Arc<dyn Tools>) -> Means {
        Means { tools: Some(tools), ..self }
    }

    /// Jobs pause disks in this way, and not by the daemon. For tests.
    #[must_use]
    pub fn with_pausing(self, pausing: Arc<dyn Pausing>) -> Means {
        Means { pausing: Some(pausing), ..self }
    }

    /// A leaf is merged with so much data in it. For tests.
    #[must_use]
    pub fn with_leaf_bytes(self, leaf: LeafBytes) -> Means {
        Means { leaf, ..self }
    }

    /// The time of day. Tests have one of their own.
    #[must_use]
    pub fn with_time(self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Means {
        Means { now: Box::new(now), ..self }
    }

    pub(super) fn tools(&self) -> Result<&dyn Tools, Halt> {
        self.tools.as_deref().ok_or_else(|| Halt::Failed(lacking()))
    }

    pub(super) fn now_s(&self) -> u64 {
        (self.now)().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

fn lacking() -> Failure {
    let help = "jobs are for ferrite daemon: look which program serves this host";
    Failure { why: "this daemon has no programs for jobs".to_owned(), help: help.to_owned() }
}
