//! What each half of a backend is told of the disk.

use std::path::PathBuf;
use std::sync::Arc;

use ferrite_io::pool::HostMemory;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Moving;

use super::attached::EngineFactory;
use crate::blkif::negotiate::Offer;
use crate::counters::Counters;
use crate::path::full::OnFull;
use crate::processors::Processors;
use crate::tuning::Tuning;

/// What is served to whom, and how, with both halves in one process.
pub struct Config {
    /// What is followed.
    pub follow: FollowConfig,
    /// What serves.
    pub work: WorkConfig,
    /// Storage engines.
    pub engine: EngineFactory,
}

/// Which attachment is meant. Names are used again: the toolstack may remove a directory at any time,
/// and make another one of that name, with another image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attached {
    /// The one that is there, or the next one that comes.
    Any,
    /// The one with these `params`, while its state is the toolstack's 1. It is not waited for.
    New(Vec<u8>),
    /// The one whose state is not 1 any more. It is not waited for.
    Begun,
}

/// What the half is told that follows xenstore.
#[derive(Clone, Debug)]
pub struct FollowConfig {
    /// The backend's directory in xenstore, absolute or relative to our domain:
    /// `backend/vbd3/<domid>/<devid>`.
    pub backend: String,
    /// The guest.
    pub domid: DomId,
    /// Its virtual-device number.
    pub devid: u32,
    /// What is offered.
    pub offer: Offer,
    /// Of all that may stand in the directory, this is served and nothing else.
    pub attached: Attached,
}

/// What the half is told that serves.
#[derive(Clone)]
pub struct WorkConfig {
    /// The guest.
    pub domid: DomId,
    /// How data moves, and what may be mapped for it.
    pub moving: Moving,
    /// Bytes of the disk's buffer pool.
    pub pool_bytes: usize,
    /// By what it may grow when storage is slow, up to what the guest's rings can hold; none: it does not.
    pub host_memory: Option<Arc<HostMemory>>,
    /// A directory on tmpfs for the in-flight table and the trace rings.
    pub run_dir: PathBuf,
    /// No other guest has the disk: it is closed when it is unplugged, before that is announced.
    pub closes: bool,
    /// How queues work.
    pub tuning: Tuning,
    /// What requests get for which there is no space. Heeded by a worker that opens its image; a device
    /// that is served in one process has its own.
    pub on_full: OnFull,
    /// What they may use of processors.
    pub processors: Arc<Processors>,
    /// Where they count what they do; the caller may look at any time.
    pub counters: Counters,
}
