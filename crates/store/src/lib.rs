//! A store of volumes that holds equal blocks once: its parts, from the medium up. The contract
//! is `docs/internals/store.md`, whose words are used here.
//!
//! * [`content`]: the content of a block, and its name.
//! * [`layout`]: the places of the parts of a store of a given size.
//! * [`superblock`]: the beginning of everything, and which of four pages it is.
//! * [`packing`]: groups of blocks that are compressed.
//! * [`page`]: pointers to pages, and the entries of leaves.
//! * [`pages`]: pages of trees in memory, and which a checkpoint has to write.
//! * [`tree`]: trees of pages, copied on write by generation.
//! * [`free_numbers`]: which numbers of contents can be given.
//! * [`index`]: which numbers may have a content.
//! * [`slots`]: leaves in memory, read without a lock.
//! * [`table`]: volumes and domains.
//! * [`medium`]: the file or device, its blocks and syncs.
//! * [`ballast`]: space for its own work on a file system that is full.
//! * [`background`]: the thread of a store in service that does its background work.
//! * [`check`]: the check of a store, and the use of its space.
//! * [`checkpoint`]: the state at one number of the journal, whole on the medium.
//! * [`name`]: names of stores and volumes.
//! * [`opening`]: makes stores and opens them.
//! * [`pace`]: the pace of background work, and how it is ended.
//! * [`numbers`]: which journal blocks are under way, and below which all is durable.
//! * [`stripes`]: locks of blocks, and of journal blocks under way.
//! * [`live`]: a store in use: requests, operations on volumes, passes, scrubbing, compaction, and recovery.
//! * [`owned`]: the stores that this process has open, and the users of their volumes.
//! * [`space`]: which places are in use, and when they become free.
//! * [`journal`]: blocks of records, and which of them count after an end without a close.

#![forbid(unsafe_code)]

pub mod background;
pub mod ballast;
pub mod check;
pub mod checkpoint;
pub mod content;
mod fields;
pub mod free_numbers;
pub mod index;
pub mod journal;
pub mod layout;
pub mod live;
pub mod lookups;
pub mod medium;
pub mod name;
pub mod numbers;
pub mod opening;
pub mod owned;
pub mod pace;
pub mod packing;
pub mod page;
pub mod pages;
mod side_by_side;
mod signpost;
pub mod slots;
pub mod space;
pub mod stripes;
pub mod superblock;
pub mod table;
#[cfg(test)]
mod testing;
pub mod tree;

pub use ferrite_disk_base::{STORE_BLOCK_BYTES as BLOCK_BYTES, STORE_MAGIC as MAGIC};

/// A store's random identifier. Pages with another identifier are not part of the store.
pub type StoreId = [u8; 16];

/// The medium is damaged: what, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store is damaged: {0}")]
pub struct Damaged(pub &'static str);
