//! What can be put to the test.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_disk::Port;
use ferrite_io::arena::{Arena, Span};
use ferrite_io::sim::SimDirectory;

/// The directory of one machine, on a tmpfs.
pub struct Place {
    /// Where images are.
    pub images: PathBuf,
    /// Memory that outlives a process and not a power cut.
    pub state: PathBuf,
    /// How entries of `images` are changed.
    pub directory: SimDirectory,
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
    /// What the disk's steps run on.
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

    /// What each queue registers.
    fn files(&self) -> Vec<Arc<OwnedFd>>;

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

/// A kind of disk: how images of it are made, opened and checked.
pub trait Format {
    /// Its disks.
    type Disk: Disk;

    /// What `--format` calls it.
    fn name(&self) -> &'static str;

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
    /// What is wrong with it.
    fn check(&self, place: &Place, thorough: bool) -> Result<(), String>;

    /// Puts a new leaf of `sectors` on top of the image, which is not open, both durable.
    ///
    /// # Errors
    /// As above; and where the format has no such thing.
    fn snapshot(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let _ = (place, sectors);
        Err("there are no snapshots of this".into())
    }

    /// Whether [`snapshot`](Format::snapshot) works.
    fn has_snapshots(&self) -> bool {
        false
    }

    /// Sectors near which its metadata changes.
    fn hot_spots(&self, sectors: u64) -> Vec<u64>;
}
