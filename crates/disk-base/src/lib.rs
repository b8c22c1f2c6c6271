//! The basis of images and stores.
//!
//! * [`Extent`]: the place of a part of a disk. [`Port`]: one thread's access to a disk's files.
//! * [`Raw`]: a regular file or a block device, byte for byte, open and locked.
//! * [`Commits`], [`journal`]: metadata that was answered for and is not durable yet.
//! * [`dirty`]: the durable map of what has changed on a disk.
//! * [`changes`]: the changed blocks of a tap, in tapdisk's log.
//! * [`moved`]: the durable mark of an image whose disk is on another host now.
//! * [`Epochs`]: when a freed place is no longer in use.
//! * [`ImageName`], [`OpenOptions`], [`Parents`]: which disk is opened, and how.
//! * [`DiskError`], [`Finding`]: errors and damage, in words for people.

#![forbid(unsafe_code)]

pub mod changes;
mod content;
pub mod dirty;
mod epochs;
mod error;
mod extent;
mod fencing;
mod finding;
mod format;
pub mod moved;
mod name;
mod options;
mod parents;
pub mod plain;
mod port;
mod rare;
mod raw;
pub mod size;
mod volume_name;
mod writeback;

pub use content::{STORE_BLOCK_BYTES, STORE_MAGIC, is_something_else, store_of_volume};
#[cfg(any(test, feature = "testing"))]
pub use epochs::ShuttledEpochs;
pub use epochs::{Epochs, Mark, Reader};
pub use error::{DiskError, ErrorKind, READ_ONLY, is_damage, warn_once};
pub use extent::{DiscardLimits, Extent};
pub use fencing::Fencing;
pub use finding::{Class, Counts, Finding, Kind as ProblemKind, Stretches};
pub use format::Format;
pub use name::ImageName;
pub use options::{INDEX_BYTES, Locking, MAX_LAYERS, METADATA_BYTES, OnDamage, OpenOptions};
pub use parents::{CONFIGURED as CONFIGURED_PARENTS, Parents, to_allow};
pub use port::{Port, SCRATCH_BYTES};
pub use rare::Rare;
#[cfg(feature = "testing")]
pub use raw::questions;
#[cfg(feature = "testing")]
pub use raw::{Checked, TestCheck};
pub use raw::{GrowthWatch, Raw, Run, SpaceBelow, Unopened};
pub use volume_name::VolumeName;
pub use writeback::{Commits, Failure, SyncWitness, Void, Witnesses, journal};

/// Bytes of a sector, the unit of sizes on the wire (blkif.md 3.3), whatever the medium has.
pub const SECTOR_BYTES: u64 = 512;
