//! Stories of disks on a machine that fails: the real code of the formats, on the simulated
//! machine of [`ferrite_simio`], against a [`model`] of what each sector may hold.
//!
//! A [`story`] is a few rounds of load on one disk, each ended by closing the disk, by the death
//! of the process or by a power cut, at any step; then the disk is opened again, looked at by its
//! own check, and compared. Everything in a story follows from its seed.
//!
//! * [`mod@format`]: what can be put to the test, and how it is made and opened.
//! * [`load`]: requests from several queues.
//! * [`machine`]: the directory, the files and the processes of a story.
//! * [`paths`]: how often each of the formats' rare paths was taken.
//! * [`plan`]: which story, and what was found in it.
//! * [`stamp`]: contents that say where they come from.
//! * [`stores`]: stories of a store with many volumes.

#![forbid(unsafe_code)]

mod devices;
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
