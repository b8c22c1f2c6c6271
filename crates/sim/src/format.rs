//! The formats and media that can be put to the test.

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
    /// Where images are.
    pub images: PathBuf,
    /// Memory that outlives a process and not a power cut.
    pub state: PathBuf,
    /// How entries of `images` are changed.
    pub directory: SimDirectory,
    /// Where engines are from.
    pub world: SimWorld,
    /// The choices that a format is free to make follow from it.
    pub seed: u64,
    /// Devices are too small for all that their disks can have.
    pub tight: bool,
    /// Units of allocation are those that images usually have.
    pub usual_units: bool,
}

impl Place {
    /// An image by its name.
    pub fn image(&self, name: &str) -> PathBuf {
        self.images.join(name)
    }
}

/// One queue's way to the disk.
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

    /// Tells this one of a failed sync before anybody else is told.
    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>);

    /// Reads all of `to`.
    fn read(&self, queue: &Queue, offset: u64, to: Span) -> impl Future<Output = io::Result<()>>;

    /// Writes all of `from`.
    fn write(&self, queue: &Queue, offset: u64, from: Span)
    -> impl Future<Output = io::Result<()>>;

    /// All that was answered is durable.
    fn flush(&self, queue: &Queue) -> impl Future<Output = io::Result<()>>;

    /// The range is not needed any more.
    fn discard(&self, queue: &Queue, offset: u64, len: u64)
    -> impl Future<Output = io::Result<()>>;

    /// The range becomes zeros.
    fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>>;

    /// The end of its use; it promises what a flush does.
    fn close(&self, queue: &Queue) -> impl Future<Output = io::Result<()>>;
}

/// The changes to an image that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A new image of so many sectors.
    Create(u64),
    /// A new leaf on top; what was the leaf gets this number, which no other layer has.
    Snapshot(u64),
    /// The leaf's contents go into its parent, which is the leaf from then on.
    Coalesce,
    /// So many sectors instead of fewer.
    Grow(u64),
    /// Another image on top of the leaf, which stays as it is. The number is its own.
    Clone(u64),
    /// Another image with all that the leaf has. The number is its own.
    Convert(u64),
    /// As [`Snapshot`](Operation::Snapshot), by a program that knows nothing of journals, whatever
    /// state the image is in.
    Overlay(u64),
    /// The contents of the leaf's parent go into the parent of that, in a chain of so many layers: the
    /// leaf stays.
    CoalesceInner(u64),
}

/// A kind of disk: how images of it are made, opened and checked.
pub trait Format {
    /// Its disks.
    type Disk: Disk;

    /// The part of a command line that says which it is.
    fn name(&self) -> String;

    /// Makes an image of `sectors`, durable, before the story begins.
    ///
    /// # Errors
    /// A text for people; so for all of these.
    fn create(&self, place: &Place, sectors: u64) -> Result<(), String>;

    /// Opens the disk for writing.
    ///
    /// # Errors
    /// As above.
    fn open(&self, place: &Place) -> Result<Self::Disk, String>;

    /// Checks the image, which is not open. `thorough`: also by other people's programs.
    ///
    /// # Errors
    /// Its fault.
    fn check(&self, place: &Place, thorough: bool) -> Result<(), String>;

    /// The further changes that can be made to an image of it that is not open.
    fn can(&self, operation: Operation) -> bool {
        let _ = operation;
        false
    }

    /// Does it. An operation that was interrupted can be done again.
    ///
    /// # Errors
    /// As above; and where the format cannot.
    fn operate(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let _ = place;
        Err(format!("{operation:?} is not for this format"))
    }

    /// Whether there is an image.
    fn exists(&self, place: &Place) -> bool {
        let _ = place;
        true
    }

    /// Opens what [`Operation::Clone`] or [`Operation::Convert`] have made, for reading, once it is
    /// checked; none: it is not there yet.
    ///
    /// # Errors
    /// As above.
    fn open_copy(&self, place: &Place, operation: Operation) -> Result<Option<Self::Disk>, String> {
        let _ = (place, operation);
        Ok(None)
    }

    /// Takes away what such an operation has left.
    ///
    /// # Errors
    /// As above.
    fn remove_copy(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let _ = (place, operation);
        Ok(())
    }

    /// Does to the image, which is not open and all durable, what other programs do and ours do
    /// not. Its contents stay.
    ///
    /// # Errors
    /// As above.
    fn change_by_others(&self, place: &Place, random: &mut SplitMix64) -> Result<(), String> {
        let _ = (place, random);
        Ok(())
    }

    /// Does to an image that is not open what other programs do, durably: it reads as before. False:
    /// nothing can be done.
    ///
    /// # Errors
    /// As above.
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

    /// The same, durably, to an image that fills its medium then: a write may find no space. False:
    /// nothing can be done.
    ///
    /// # Errors
    /// As above.
    fn fill_up(&self, place: &Place) -> Result<bool, String> {
        let _ = place;
        Ok(false)
    }

    /// Whether a disk whose flush has failed can be used on: a later flush fails, too, unless all
    /// that was answered is durable with it.
    fn can_go_on(&self, place: &Place) -> bool {
        let _ = place;
        false
    }

    /// The means to make the leaf's device larger while the disk is open; none: it is large enough.
    fn enlarger(&self, place: &Place, sectors: u64) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        let _ = (place, sectors);
        None
    }

    /// The administrator's steps after a crash, which the documents demand.
    ///
    /// # Errors
    /// As above.
    fn administer(&self, place: &Place) -> io::Result<()> {
        let _ = place;
        Ok(())
    }

    /// The bytes of its first table.
    fn first_table(&self) -> Range<u64> {
        0..16 << 10
    }

    /// Sectors near which its metadata changes.
    fn hot_spots(&self, place: &Place, sectors: u64) -> Vec<u64>;
}
