//! Virtual disks: where a guest's blocks really are.
//!
//! A disk is a *translation*. [`Disk::map`] answers from memory, without waiting, where a range
//! of the disk lies; the caller merges neighbours and does the I/O on its own queue. Whatever has
//! to wait (flush, discard, writing zeros) is an `async fn` on the caller's [`Port`].
//!
//! * [`Raw`]: a regular file or a block device, byte for byte.
//! * [`Image`]: a chain of images with metadata: allocation, snapshots, clones.
//! * [`Volume`]: of a store, which holds equal blocks once.
//! * [`Null`]: reads zeros, forgets writes; for measuring everything above it.

#![forbid(unsafe_code)]

mod allocation;
mod children;
mod content;
mod disk;
mod epochs;
mod error;
mod extent;
mod finding;
mod format;
mod identity;
mod image;
mod name;
mod null;
mod options;
mod parents;
mod pieces;
mod plain;
mod port;
pub mod qcow2;
mod rare;
mod raw;
mod session;
pub mod size;
pub mod store;
pub mod tools;
pub mod vhd;
mod volume;
mod volume_name;
mod writeback;

pub use allocation::Allocation;
pub use disk::Disk;
pub use epochs::{Mark, Reader};
pub use error::{DiskError, ErrorKind};
pub use extent::{DiscardLimits, Extent};
pub use finding::{Class, Counts, Finding, Kind as ProblemKind};
pub use format::Format;
pub use identity::DiskIdentity;
pub use image::{Image, open_medium, open_raw, open_store};
pub use name::ImageName;
pub use null::Null;
pub use options::{INDEX_BYTES, MAX_LAYERS, METADATA_BYTES, OpenOptions};
pub use parents::{CONFIGURED as CONFIGURED_PARENTS, Parents};
pub use port::Port;
pub use rare::Rare;
#[cfg(feature = "testing")]
pub use raw::TestCheck;
pub use raw::{GrowthWatch, Raw};
pub use session::Session;
pub use volume::Volume;
pub use writeback::SyncWitness;

/// Bytes of a sector, the unit of sizes on the wire (blkif.md 3.3), whatever the medium has.
pub const SECTOR_BYTES: u64 = 512;
