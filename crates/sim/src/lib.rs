//! Stories of disks on a machine that fails: the real code of the formats, on the simulated machine of
//! [`ferrite_simio`], compared with a [`model`] of the allowed contents of each sector.
//!
//! A [`story`] is a few rounds of load on one disk. Each round ends by closing the disk, by the death of the process or
//! by a power cut, at any step. Then the disk is opened again, checked, and compared. Everything in a story follows
//! from its seed.
//!
//! * [`dirty`]: stories of the maps of what has changed on a disk.
//! * [`mod@format`]: the formats under test, and how images are made and opened.
//! * [`load`]: requests from several queues.
//! * [`machine`]: the directory, the files and the processes of a story.
//! * [`paths`]: how often each rare path of the formats was taken.
//! * [`plan`]: the choice of a story, and its findings.
//! * [`stamp`]: contents that identify their write.
//! * [`stores`]: stories of a store with many volumes.

#![forbid(unsafe_code)]

pub mod backup;
mod devices;
pub mod dirty;
mod disk;
pub mod format;
pub mod images;
pub mod load;
pub mod machine;
pub mod model;
mod packed;
mod past;
pub mod paths;
pub mod plan;
mod qemu;
pub mod stamp;
pub mod stores;
pub mod story;
mod tails;
