//! The configurations of both halves of a backend.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::pool::HostMemory;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Moving;

use super::connected::EngineFactory;
use crate::blkif::negotiate::Offer;
use crate::counters::Counters;
use crate::path::full::OnFull;
use crate::path::limit::Limits;
use crate::processors::Processors;
use crate::tuning::Tuning;

/// The usual [`WorkConfig::wait_for_host`].
pub const WAIT_FOR_HOST: Duration = Duration::from_secs(10);

/// The configuration of a backend with both halves in one process.
pub struct Config {
    /// The configuration of the half that follows xenstore.
    pub follow: FollowConfig,
    /// The configuration of the half that serves.
    pub work: WorkConfig,
    /// Builds storage engines.
    pub engine: EngineFactory,
}

/// Which attachment to serve. The toolstack may remove a directory at any time, and make another
/// one of the same name with another image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedAttachment {
    /// The current attachment, or the next one that comes.
    Any,
    /// The attachment with these `params`, while its state is the toolstack's 1. It is not waited
    /// for.
    New(Vec<u8>),
    /// The attachment whose state is not 1 any more. It is not waited for.
    Begun,
}

/// A disk whose image is open without a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Whether the image is open for reading only.
    pub read_only: bool,
    /// Whether the toolstack does the locking of its images.
    pub toolstack_locks: bool,
}

/// The configuration of the half that follows xenstore.
#[derive(Clone, Debug)]
pub struct FollowConfig {
    /// The path of the backend's directory, absolute or relative to this domain:
    /// `backend/vbd3/<domid>/<devid>`.
    pub backend: String,
    /// The guest.
    pub domid: DomId,
    /// The virtual-device number.
    pub devid: u32,
    /// The features to offer.
    pub offer: Offer,
    /// The attachment to serve. Any other one in the directory is left alone.
    pub attached: ExpectedAttachment,
    /// Whether the image is open before the guest comes, and in which mode. Otherwise it is opened
    /// in the guest's.
    pub ahead: Option<Ahead>,
    /// Whether the guest comes from another host, which has the image until this one connects: the
    /// worker opens it then, and only looks at it before (attachments.md).
    pub defers: bool,
}

/// The configuration of the half that serves.
#[derive(Clone)]
pub struct WorkConfig {
    /// The guest.
    pub domid: DomId,
    /// How long a guest that comes from another host waits for that host to close the image.
    pub wait_for_host: Duration,
    /// The mover, and the limits of its mappings.
    pub moving: Moving,
    /// Bytes of the disk's buffer pool.
    pub pool_bytes: usize,
    /// The host's budget by which the pool may grow while storage is slow, up to the size of all
    /// requests on the rings. `None`: it does not grow.
    pub host_memory: Option<Arc<HostMemory>>,
    /// The run directory on tmpfs, for the in-flight table and the trace rings.
    pub run_dir: PathBuf,
    /// Whether the image is closed when this disk is unplugged, before that is announced. It is not
    /// for a disk that another guest has.
    pub closes: bool,
    /// Whether the disk stays when its guest is gone, and may get another guest.
    pub stays: bool,
    /// Tuning of the queues.
    pub tuning: Tuning,
    /// The policy for requests that find no space. It is used by a worker that opens its image. A
    /// device in one process has its own policy.
    pub on_full: OnFull,
    /// The limits of requests and bytes in a second, from the start.
    pub limits: Limits,
    /// The limit of processor time.
    pub processors: Arc<Processors>,
    /// The counters, which the caller may read at any time.
    pub counters: Counters,
}
