//! The durable map of changed regions of a disk, in a file beside its image: `IMAGE.ferrite-dirty`.
//!
//! The file has one or more named maps. Each says which regions of [`REGION_BYTES`] may have changed since it was
//! begun. A map may name too many regions after a power cut, and never too few.
//!
//! * [`layout`]: the file as bytes.
//! * [`found`]: the file as it is found, and why it may be void.
//! * [`tracker`]: the maps of a disk that is open for writing.
//! * [`view`]: the maps of an open disk, for those who ask.
//! * `fine.rs`: which blocks of [`BLOCK_BYTES`] have changed, in memory that survives the process and no power cut.
//!
//! # Order of writes
//! A write to a region that is not marked yet, of an opening that has marked nothing yet or has:
//! 1. The file's head says that the image is open, and the region's bit is set in all maps. Both are written in any
//!    order: neither is wrong without the other, since no data follow before step 2 has ended.
//! 2. The file is synced.
//! 3. The block's bit is set in memory (`fine.rs`). From now on the region counts as marked.
//! 4. The data are written.
//!
//! At the end of an orderly use:
//! 1. The image is flushed and complete. Blocks are not marked any more, so that a later write begins with step 1 above.
//! 2. The head says that the image is closed, and when the image was last changed. The file is synced.
//!
//! Beginning, ending and clearing a map makes another file (`image-tools/src/dirty/`), while the image is locked and
//! no queue writes to it:
//! 1. The image is flushed and complete. Otherwise a power cut could take back data that no map names.
//! 2. The new file is written under another name, and synced.
//! 3. It gets the name of the old one, and the directory is synced.
//!
//! A mirror clears bits of its own map while the disk is in use: `tracker/clearing.rs`.
//!
//! The file's random identifier is part of the checksum of each sector with bits, so no
//! sector of an earlier file counts.
//!
//! # The identity of an image
//! A file has its inode's number and the time at which it was made (`inode N made T`): a copy, a restored file and a
//! new file of the same number have another. Where the file system has no such time, the number remains. After an
//! orderly end the time of the last change must be what the head says: a program that writes to the image and
//! does not update the map changes that time. After a kill or a power cut the head does not have it. Then Ferrite has to be the next
//! that opens the image for writing (docs/images.md).
//!
//! A map that does not fit is void: the head says so durably before the image is written, and the log says why. Void
//! means that everything may have changed.
//!
//! Regions beyond the size that the file knows have no bits, and count as changed: a disk may grow at any time.
//!
//! # Failures
//! If the file cannot be written, the map is made void and the guest goes on. If it cannot be made void either, the
//! write fails: an answered write that no map names would be missing from the next backup.

pub(crate) mod fine;
pub mod found;
pub mod layout;
pub mod tracker;
pub mod view;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use found::{Blocks, Found, Seen, forget_blocks, image_at, look};
pub use layout::{Content, Image, Map, MapId};
pub use tracker::Tracker;
pub use view::{AtRest, KnownMap, Stretch, View};

/// The unit of the durable bits.
pub const REGION_BYTES: u64 = 4 << 20;
/// The unit of the bits in memory: 64 in a region.
pub const BLOCK_BYTES: u64 = 64 << 10;
/// The largest disk that can have maps.
pub const MAX_DISK_BYTES: u64 = 64 << 40;
/// The most maps of a disk.
pub const MAX_MAPS: usize = 16;
/// The beginning of the names of maps that mirrors have for themselves, and that no client is told of.
pub const MIRROR_MAP: &str = "mirror-";
/// The end of the file's name.
pub const EXTENSION: &str = ferrite_host::names::policy::DIRTY_EXTENSION;

/// The path of the maps of the image at `image`.
pub fn path_of(image: &Path) -> PathBuf {
    let mut name = OsString::from(image);
    name.push(EXTENSION);
    name.into()
}
