//! Virtual disks: the places of a guest's blocks.
//!
//! A disk is a *translation*. [`Disk::map`] answers from memory, without waiting, the place of a range of the disk; the
//! caller merges adjacent requests and does the I/O on its own queue. Operations that wait (flush, discard, writing
//! zeros) is [`Work`] on the caller's [`Port`].
//!
//! * [`Raw`]: a regular file or a block device, byte for byte.
//! * [`Image`]: a chain of images with metadata: allocation, snapshots, clones.
//! * [`Volume`]: of a store, which holds equal blocks once.
//! * [`Elsewhere`]: a volume of a store that another process has open, read through that process.
//! * [`RemoteDisk`]: data behind a connection, byte for byte.
//! * [`Mirror`]: a disk whose writes go to another one, too.
//! * [`Null`]: reads zeros, discards writes; for measuring everything above it.
//!
//! Items of the crates below that a disk's interface uses are re-exported here.

#![forbid(unsafe_code)]

mod allocation;
mod changes;
mod disk;
pub mod elsewhere;
mod headers;
mod identity;
mod mirror;
mod null;
pub mod pieces;
mod remote;
mod session;
mod tracking;
mod volume;

pub use allocation::Allocation;
pub use changes::Repeated;
pub use disk::{Disk, Work};
pub use elsewhere::Elsewhere;
#[cfg(feature = "testing")]
pub use ferrite_disk_base::TestCheck;
pub use ferrite_disk_base::changes as change_log;
pub use ferrite_disk_base::{
    CONFIGURED_PARENTS, Class, Counts, DiscardLimits, DiskError, ErrorKind, Extent, Fencing,
    Finding, Format, GrowthWatch, INDEX_BYTES, ImageName, Locking, MAX_LAYERS, METADATA_BYTES,
    Mark, OnDamage, OpenOptions, Parents, Port, ProblemKind, Rare, Raw, Reader, SECTOR_BYTES,
    SyncWitness, dirty, moved, size, warn_once,
};
pub use ferrite_images::vhd::{
    Change as HeaderChange, Facts as HeaderFacts, KeyHash, ParentLink, Uuid,
};
pub use ferrite_images::{Image, open_medium, open_raw, open_store};
pub use ferrite_remote::{client_of, server_of};
pub use ferrite_store::{background::ServiceEngine, lookups as store_lookups, owned::StoreKey};
pub use headers::ChainImage;
pub use identity::DiskIdentity;
pub use mirror::{
    Mirror, MirrorFile, MirrorOptions, MirrorState, MirrorStatus, REGION_BYTES, check_target,
    mirror_target, target_identity,
};
pub use null::Null;
pub use remote::{RemoteDisk, RemoteFacts};
pub use session::Session;
pub use volume::Volume;
