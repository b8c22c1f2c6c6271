//! The formats and media that can be tested.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use ferrite_disk::{Port, SyncWitness};
use ferrite_host::clock::SplitMix64;
use ferrite_io::arena::{Arena, Span};
use ferrite_simio::{SimDirectory, SimWorld};

/// The directory of one machine, on a tmpfs.
#[derive(Clone)]
pub struct Place {
    /// The folder of images.
    pub images: PathBuf,
    /// Memory that outlives a process and not a power cut.
    pub state: PathBuf,
    /// The directory operations on `images`.
    pub directory: SimDirectory,
    /// The source of engines.
    pub world: SimWorld,
    /// The seed of the format's free choices.
    pub seed: u64,
    /// Devices are too small for the full content of their disks.
    pub tight: bool,
    /// Images have the usual units of allocation.
    pub usual_units: bool,
}

impl Place {
    /// The path of an image.
    pub fn image(&self, name: &str) -> PathBuf {
        self.images.join(name)
    }
}

/// One queue's access to the disk.
#[derive(Clone)]
pub struct Queue {
    /// The port that the disk's steps run on.
    pub port: Port,
    /// A page of zeros.
    pub zeros: Span,
}

impl Queue {
    /// The memory of all data.
    pub fn memory(&self) -> &Arc<Arena> {
        self.port.memory()
    }
}

/// An open disk. Offsets and lengths are bytes, whole sectors.
pub trait Disk: 'static {
    /// Its size.
    fn sectors(&self) -> u64;

    /// The files that each queue registers.
    fn files(&self) -> Vec<Arc<OwnedFd>>;

    /// Sets the witness that is told of a failed sync before any request is answered with it.
    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>);

    /// Reads all of `to`.
    fn read(&self, queue: &Queue, offset: u64, to: Span) -> impl Future<Output = io::Result<()>>;

    /// Writes all of `from`.
    fn write(&self, queue: &Queue, offset: u64, from: Span)
    -> impl Future<Output = io::Result<()>>;

    /// Makes all answered writes durable.
    fn flush(&self, queue: &Queue) -> impl Future<Output = io::Result<()>>;

    /// Discards the range.
    fn discard(&self, queue: &Queue, offset: u64, len: u64)
    -> impl Future<Output = io::Result<()>>;

    /// Makes the range zeros.
    fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>>;

    /// Closes the disk, which promises as much as a flush.
    fn close(&self, queue: &Queue) -> impl Future<Output = io::Result<()>>;
}

/// The changes of an image that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Make an image of so many sectors.
    Create(u64),
    /// Make a new leaf on top; the old leaf gets this number, which no other layer has.
    Snapshot(u64),
    /// Merge the leaf into its parent, which becomes the leaf.
    Coalesce,
    /// Enlarge to so many sectors.
    Grow(u64),
    /// Make another child of the leaf, which stays unchanged. The number identifies it.
    Clone(u64),
    /// Copy the leaf's content to another image. The number identifies it.
    Convert(u64),
    /// As [`Snapshot`](Operation::Snapshot), by a program that does not know journals, in any state of the image.
    Overlay(u64),
    /// Merge the leaf's parent into the parent of that, in a chain of so many layers; the leaf stays.
    CoalesceInner(u64),
    /// Merge as [`CoalesceInner`](Operation::CoalesceInner) does, by the steps of a merge of a running disk.
    MergeStretch(u64),
}

/// A kind of disk: how its images are made, opened and checked.
pub trait Format {
    /// The type of its disks.
    type Disk: Disk;

    /// The name on a command line.
    fn name(&self) -> String;

    /// Makes an image of `sectors`, durable, before the story begins.
    ///
    /// # Errors
    /// A text for people; also for the other methods.
    fn create(&self, place: &Place, sectors: u64) -> Result<(), String>;

    /// Opens the disk for writing.
    ///
    /// # Errors
    /// A text for people.
    fn open(&self, place: &Place) -> Result<Self::Disk, String>;

    /// Checks the image, which is not open. `thorough`: also by other programs.
    ///
    /// # Errors
    /// The damage.
    fn check(&self, place: &Place, thorough: bool) -> Result<(), String>;

    /// Whether the format supports this operation.
    fn can(&self, operation: Operation) -> bool {
        let _ = operation;
        false
    }

    /// Executes an operation. An interrupted operation can be repeated.
    ///
    /// # Errors
    /// A text for people; also if the format does not support it.
    fn operate(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let _ = place;
        Err(format!("{operation:?} is not for this format"))
    }

    /// Whether the image exists.
    fn exists(&self, place: &Place) -> bool {
        let _ = place;
        true
    }

    /// Checks and opens the image that [`Operation::Clone`] or [`Operation::Convert`] has made, for reading; `None`: it
    /// does not exist yet.
    ///
    /// # Errors
    /// A text for people.
    fn open_copy(&self, place: &Place, operation: Operation) -> Result<Option<Self::Disk>, String> {
        let _ = (place, operation);
        Ok(None)
    }

    /// Removes the image of such an operation.
    ///
    /// # Errors
    /// A text for people.
    fn remove_copy(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let _ = (place, operation);
        Ok(())
    }

    /// Changes the image as other programs do and ours do not. It is not open and all durable. Its content stays.
    ///
    /// # Errors
    /// A text for people.
    fn change_by_others(&self, place: &Place, random: &mut SplitMix64) -> Result<(), String> {
        let _ = (place, random);
        Ok(())
    }

    /// Changes an image as other programs do, durably: it reads as before. `false`: not supported. The image is not
    /// open.
    ///
    /// # Errors
    /// A text for people.
    fn give_past(&self, place: &Place) -> Result<bool, String> {
        let _ = place;
        Ok(false)
    }

    /// The steps of a backend before a guest connects.
    ///
    /// # Errors
    /// The medium's.
    fn begin_use(&self, place: &Place, disk: Self::Disk) -> io::Result<Self::Disk> {
        let _ = place;
        Ok(disk)
    }

    /// Changes an image as other programs do, durably, so that it fills its medium: a write may find no space. `false`:
    /// not supported.
    ///
    /// # Errors
    /// A text for people.
    fn fill_up(&self, place: &Place) -> Result<bool, String> {
        let _ = place;
        Ok(false)
    }

    /// Whether a disk may be used after a failed flush: a later flush fails, too, unless it makes all answered writes
    /// durable.
    fn can_go_on(&self, place: &Place) -> bool {
        let _ = place;
        false
    }

    /// Enlarges the leaf's device while the disk is open; `None`: it is large enough.
    fn enlarger(&self, place: &Place, sectors: u64) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        let _ = (place, sectors);
        None
    }

    /// The first step of [`MergeStretch`](Operation::MergeStretch), which is taken while the disk is open; `None`: the
    /// chain of so many layers has none.
    fn live_copy(&self, place: &Place, layers: u64) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        let _ = (place, layers);
        None
    }

    /// The administrator's steps after a crash, as the documents require.
    ///
    /// # Errors
    /// A text for people.
    fn administer(&self, place: &Place) -> io::Result<()> {
        let _ = place;
        Ok(())
    }

    /// The byte range of its first table.
    fn first_table(&self) -> Range<u64> {
        0..16 << 10
    }

    /// Sectors near which its metadata change.
    fn hot_spots(&self, place: &Place, sectors: u64) -> Vec<u64>;
}
