//! One open disk of any kind: the interface for everything above it.

use std::ffi::OsStr;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use ferrite_disk_base::dirty::Tracker;
use ferrite_disk_base::{
    DiscardLimits, DiskError, ErrorKind, Extent, Format, GrowthWatch, ImageName, OpenOptions, Raw,
    Reader, SCRATCH_BYTES, SECTOR_BYTES, SyncWitness,
};
use ferrite_images::{Image, Layer, open_raw};
use ferrite_io::arena::{Arena, Span};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::background::ServiceEngine;

mod steps;

use crate::elsewhere::Elsewhere;
use crate::mirror::Mirror;
use crate::null::{self, Null};
use crate::remote::RemoteDisk;
use crate::tracking;
use crate::volume::Volume;

/// Work on a disk that may wait. It is boxed once, here, for two reasons: the formats' steps are compiled into this
/// crate and not into each user of it, and a task of any caller stays small.
pub type Work<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// One open disk, shared by the threads of its queues.
#[derive(Debug)]
pub enum Disk {
    /// A file or block device, byte for byte.
    Raw(Raw),
    /// A chain of images.
    Image(Image),
    /// A volume of a store.
    Store(Volume),
    /// A volume of a store that another process has open; read-only.
    Elsewhere(Elsewhere),
    /// Data behind a connection.
    Remote(RemoteDisk),
    /// A disk whose writes go to another one, too.
    Mirror(Box<Mirror>),
    /// A disk without a medium.
    Null(Null),
}

/// Whether a range of bytes lies inside so many sectors.
#[inline]
fn is_inside(sectors: u64, offset: u64, len: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= sectors * SECTOR_BYTES)
}

impl Disk {
    /// Opens and locks `image`: `null:`, `null:SIZE`, or an [`ImageName`]. No image is ever
    /// created, truncated or written by opening.
    ///
    /// # Errors
    /// See [`ErrorKind`](crate::ErrorKind); the text names the image, the reason and the next step.
    pub fn open(
        image: &(impl AsRef<OsStr> + ?Sized),
        options: &OpenOptions,
    ) -> Result<Disk, DiskError> {
        let image = image.as_ref();
        match image.as_bytes().strip_prefix(b"null:") {
            Some(size) => Null::open(&String::from_utf8_lossy(size), options).map(Disk::Null),
            None => {
                let format_said = ImageName::says_format(image);
                let options = OpenOptions { format_said, ..options.clone() };
                Disk::open_image(&ImageName::of_existing(image, None)?, &options)
            }
        }
    }

    /// Opens and locks an image whose format is known; see [`open`](Disk::open).
    ///
    /// # Errors
    /// As [`open`](Disk::open).
    pub fn open_image(name: &ImageName, options: &OpenOptions) -> Result<Disk, DiskError> {
        let disk = match name.format {
            Format::Raw => open_raw(&name.path, options).map(Disk::Raw),
            Format::Store => match Volume::open(name, options) {
                Err(e) if e.kind() == ErrorKind::InUse && options.read_only => {
                    Elsewhere::open(name, e).map(Disk::Elsewhere)
                }
                opened => opened.map(Disk::Store),
            },
            Format::Vhd | Format::Qcow2 => Image::open(name, options).map(Disk::Image),
            Format::Nbd | Format::Rbd | Format::Pool => match name.export() {
                Some(export) => RemoteDisk::open(export, options).map(Disk::Remote),
                None => Err(name.no_image()),
            },
        }?;
        tracking::begin(&disk, options)?;
        Ok(disk)
    }

    /// A disk that stores nothing, as a placeholder.
    pub fn nothing() -> Disk {
        Disk::Null(Null::nothing())
    }

    /// Whether I/O bypasses the page cache.
    pub fn direct(&self) -> bool {
        match self {
            Disk::Mirror(d) => d.disks().all(Disk::direct),
            _ => self.medium().is_some_and(Raw::direct),
        }
    }

    /// The medium of the disk; `None` for a disk without one.
    pub(crate) fn medium(&self) -> Option<&Raw> {
        match self {
            Disk::Raw(d) => Some(d),
            Disk::Image(d) => Some(d.medium()),
            Disk::Store(d) => Some(d.medium()),
            Disk::Mirror(d) => d.source().medium(),
            Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => None,
        }
    }

    /// All files and devices of the disk, the leaf first.
    pub fn media(&self) -> Vec<&Raw> {
        match self {
            Disk::Raw(d) => vec![d],
            Disk::Image(d) => d.layers().iter().map(Layer::medium).collect(),
            Disk::Store(d) => vec![d.medium()],
            Disk::Mirror(d) => d.disks().flat_map(Disk::media).collect(),
            Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => Vec::new(),
        }
    }

    /// The size in sectors of 512 bytes, always a multiple of [`block_bytes`](Disk::block_bytes).
    /// It only ever grows, in [`refresh_size`](Disk::refresh_size).
    pub fn sectors(&self) -> u64 {
        match self {
            Disk::Raw(d) => d.sectors(),
            Disk::Image(d) => d.sectors(),
            Disk::Store(d) => d.sectors(),
            Disk::Elsewhere(d) => d.sectors(),
            Disk::Remote(d) => d.sectors(),
            Disk::Mirror(d) => d.source().sectors(),
            Disk::Null(d) => d.sectors(),
        }
    }

    /// Whether the range lies inside the disk. Every range of a guest is checked by this before [`map`](Disk::map).
    #[inline]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        is_inside(self.sectors(), offset, len)
    }

    /// Whether writes are refused by the medium.
    pub fn read_only(&self) -> bool {
        match self {
            Disk::Raw(d) => d.read_only(),
            Disk::Image(d) => d.medium().read_only(),
            Disk::Store(d) => d.read_only(),
            Disk::Elsewhere(_) => true,
            Disk::Remote(d) => d.facts().read_only,
            Disk::Mirror(d) => d.source().read_only(),
            Disk::Null(d) => d.read_only(),
        }
    }

    /// Whether only an engine that sends NVMe commands can do its I/O.
    pub fn passthrough(&self) -> bool {
        self.medium().is_some_and(Raw::passthrough)
    }

    /// Offset, length and memory address of every data operation must be multiples of this:
    /// 512 or 4096.
    pub fn block_bytes(&self) -> u32 {
        match self {
            // It changes parts of its blocks itself.
            Disk::Store(_) => SECTOR_BYTES as u32,
            Disk::Remote(d) => d.facts().block_bytes,
            Disk::Mirror(d) => {
                d.disks().map(Disk::block_bytes).max().unwrap_or(SECTOR_BYTES as u32)
            }
            _ => self.medium().map_or(SECTOR_BYTES as u32, Raw::block_bytes),
        }
    }

    /// Smaller writes may cost the medium a read first: a hint for the guest.
    pub fn physical_block_bytes(&self) -> u32 {
        match self {
            Disk::Store(_) | Disk::Elsewhere(_) => BLOCK_BYTES as u32,
            Disk::Remote(d) => d.facts().physical_block_bytes,
            Disk::Mirror(d) => d.source().physical_block_bytes(),
            _ => self.medium().map_or(null::PHYSICAL_BLOCK_BYTES, Raw::physical_block_bytes),
        }
    }

    /// The discard values to publish; `None`: do not offer it.
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        match self {
            Disk::Raw(d) => d.discard_limits(),
            Disk::Image(d) => d.medium().discard_limits(),
            Disk::Store(d) => d.discard_limits(),
            Disk::Elsewhere(_) => None,
            Disk::Remote(d) => d.facts().discard,
            Disk::Mirror(d) => d.source().discard_limits(),
            Disk::Null(d) => d.discard_limits(),
        }
    }

    /// The open files of the disk, for callers that hold or examine them.
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        let mut files = match self {
            Disk::Raw(d) => d.files(),
            Disk::Image(d) => d.files(),
            Disk::Store(d) => d.medium().files(),
            Disk::Mirror(d) => return d.disks().flat_map(Disk::files).collect(),
            Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => Vec::new(),
        };
        files.extend(self.tracker().map(Tracker::file));
        files
    }

    /// Finds the beginning of a range for a read; never blocks. The result may be used as long as the caller is
    /// counted: by a [`Reader`], or [`while_mapped`](Disk::while_mapped).
    ///
    /// # Panics
    /// If the range is empty or not inside the disk: callers check first, with [`contains`](Disk::contains).
    #[inline]
    pub fn map(&self, offset: u64, len: u64) -> Extent {
        // One look at the kind for both the size and the place.
        let check = |sectors: u64| {
            assert!(len > 0 && is_inside(sectors, offset, len), "unchecked range {offset}+{len}");
        };
        match self {
            Disk::Raw(d) => {
                check(d.sectors());
                d.map(offset, len)
            }
            Disk::Image(d) => {
                check(d.sectors());
                d.map(offset, len)
            }
            Disk::Null(d) => {
                check(d.sectors());
                Extent::Zeros { len }
            }
            Disk::Store(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Mirror(_) => {
                check(self.sectors());
                self.map_others(offset, len)
            }
        }
    }

    fn map_others(&self, offset: u64, len: u64) -> Extent {
        match self {
            Disk::Store(d) => d.map(offset, len),
            Disk::Remote(d) => d.map(offset, len),
            Disk::Mirror(d) => d.source().map(offset, len),
            _ => Extent::Slow { len },
        }
    }

    /// Finds the place for a write of the beginning of a range; never blocks. An unallocated range gets a new place
    /// that no metadata refer to yet; after [`written`](Disk::written) the tables do. The caller is counted as for
    /// [`map`](Disk::map).
    ///
    /// # Panics
    /// As [`map`](Disk::map).
    pub fn reserve(&self, offset: u64, len: u64) -> Extent {
        assert!(len > 0 && self.contains(offset, len), "unchecked range {offset}+{len}");
        if let Some(changes) = self.changes() {
            changes.note(offset, len);
        }
        // The first write to a region takes steps: its bit is durable before its data.
        if self.tracker().is_some_and(|tracker| !tracker.is_marked(offset, len)) {
            return Extent::Slow { len };
        }
        match self {
            Disk::Raw(d) => d.map(offset, len),
            Disk::Image(d) => d.reserve(offset, len),
            Disk::Store(_) | Disk::Elsewhere(_) | Disk::Mirror(_) => Extent::Slow { len },
            Disk::Remote(d) => d.map(offset, len),
            Disk::Null(_) => Extent::Zeros { len },
        }
    }

    /// Whether [`reserve`](Disk::reserve) ever returns a place: otherwise each write takes steps.
    pub fn reserves(&self) -> bool {
        !matches!(self, Disk::Store(_) | Disk::Elsewhere(_) | Disk::Mirror(_))
    }

    /// Whether [`check`](Disk::check) applies to this disk, now and later.
    pub fn has_checks(&self) -> bool {
        match self {
            #[cfg(feature = "testing")]
            Disk::Raw(d) => d.checked.is_set(),
            Disk::Store(_) => true,
            Disk::Mirror(d) => d.source().has_checks(),
            _ => false,
        }
    }

    /// Whether data of a disk that [has checks](Disk::has_checks) are those written there. They were read from the
    /// place that [`map`](Disk::map) returned, and the caller is still counted. `false`: they are damaged, or were
    /// written meanwhile; [`read`](Disk::read) tells the two apart, and returns no wrong data. Never blocks.
    pub fn check(&self, memory: &Arena, offset: u64, data: Span) -> bool {
        match self {
            #[cfg(feature = "testing")]
            Disk::Raw(d) => d.checked.fits(memory, offset, data),
            Disk::Store(d) => d.check(memory, offset, data),
            Disk::Mirror(d) => d.source().check(memory, offset, data),
            _ => {
                let _ = (memory, offset, data);
                true
            }
        }
    }

    /// Has a test check the data of a raw disk, before they are used.
    ///
    /// # Panics
    /// If it is no raw disk, or has a check.
    #[cfg(feature = "testing")]
    pub fn set_check(&self, check: ferrite_disk_base::TestCheck) {
        match self {
            Disk::Raw(d) => d.checked.set(check),
            _ => panic!("only raw disks are checked by tests"),
        }
    }

    /// A reader for a queue that maps: it tells the disk when its operations have ended. `None`: places of this disk
    /// are not reused.
    pub fn reader(&self) -> Option<Reader> {
        match self {
            Disk::Image(d) => d.reader(),
            Disk::Store(d) => Some(d.reader()),
            Disk::Mirror(d) => d.source().reader(),
            Disk::Raw(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => None,
        }
    }

    /// Runs steps that map and use the mapped places. All [`Work`] does so itself, and must not be among these steps: a
    /// write of a store may wait for the end of all steps. If they are dropped before their end, places that are freed
    /// from then on stay unused.
    pub async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        match self {
            Disk::Image(d) => d.while_mapped(steps).await,
            Disk::Store(d) => d.while_mapped(steps).await,
            // Boxed, as this calls itself.
            Disk::Mirror(d) => Box::pin(d.source().while_mapped(steps)).await,
            Disk::Raw(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => steps.await,
        }
    }

    /// Reads whether the medium has grown. `Some`: the new size in sectors, which [`sectors`](Disk::sectors) returns
    /// from now on. A medium that has shrunk keeps its size here (I/O to the missing part fails) and is reported once
    /// in the log.
    ///
    /// # Errors
    /// The medium's size could not be read.
    pub fn refresh_size(&self) -> Result<Option<u64>, DiskError> {
        match self {
            Disk::Raw(d) => d.refresh_size(),
            Disk::Remote(d) => Ok(d.refresh_size()),
            _ => Ok(None),
        }
    }

    /// Takes QEMU's locks, unless they are held: see [`OpenOptions::qemu_first`](crate::OpenOptions). `false`: QEMU, or
    /// one of its tools, has the image open, and it can be tried again.
    pub fn shut_out_qemu(&self) -> bool {
        match self {
            Disk::Raw(d) => d.shut_out_qemu(),
            Disk::Mirror(d) => d.source().shut_out_qemu(),
            _ => true,
        }
    }

    /// A watch that notifies when [`refresh_size`](Disk::refresh_size) may have a new size.
    pub fn growth_watch(&self) -> GrowthWatch {
        match self {
            Disk::Raw(d) => d.growth_watch(),
            Disk::Remote(d) => d.growth_watch(),
            _ => GrowthWatch::never(),
        }
    }

    /// Scratch memory in bytes that a [`Port`](ferrite_disk_base::Port) to any disk needs.
    pub const MAX_SCRATCH_BYTES: usize = SCRATCH_BYTES;

    /// Scratch memory in bytes that a [`Port`](ferrite_disk_base::Port) to this disk needs; 0: none.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Disk::Image(_) | Disk::Store(_) | Disk::Remote(_) | Disk::Mirror(_) => SCRATCH_BYTES,
            Disk::Raw(d) if d.tracker().is_some() => SCRATCH_BYTES,
            Disk::Raw(_) | Disk::Elsewhere(_) | Disk::Null(_) => 0,
        }
    }

    /// Whether the disk has metadata, so that mapping can hit or miss memory.
    pub fn has_metadata(&self) -> bool {
        match self {
            Disk::Mirror(d) => d.source().has_metadata(),
            _ => matches!(self, Disk::Image(_) | Disk::Store(_)),
        }
    }

    /// Called when the kernel has been given the data of a range that [`reserve`](Disk::reserve) placed: readers see it
    /// from now on, and it survives the death of this process. Called before the write is answered. Changes memory
    /// only, never blocks.
    pub fn written(&self, offset: u64, len: u64) {
        if let Disk::Image(d) = self {
            d.written(offset, len);
        }
    }

    /// Whether there are answered changes that are only in this host's memory, because no [`flush`](Disk::flush) came
    /// since. Reads memory only.
    pub fn is_dirty(&self) -> bool {
        match self {
            Disk::Image(d) => d.is_dirty(),
            Disk::Mirror(d) => d.disks().any(Disk::is_dirty),
            _ => false,
        }
    }

    /// Whether a parent has answered writes of a killed process that are only in this host's memory:
    /// [`recover_parents`](crate::Session::recover_parents) is needed before the disk is used.
    pub fn is_unrecovered(&self) -> bool {
        matches!(self, Disk::Image(d) if !self.read_only() && !d.unrecovered().is_empty())
    }

    /// Whether a sync has failed: earlier writes may be lost, whichever disk asked for the sync. No
    /// [`flush`](Disk::flush) succeeds any more. Reads memory only.
    pub fn is_faulty(&self) -> bool {
        match self {
            Disk::Raw(d) => d.is_faulty(),
            Disk::Image(d) => d.is_faulty(),
            Disk::Store(d) => d.is_faulty(),
            Disk::Remote(d) => d.is_faulty(),
            // A target that has failed is the mirror's own trouble.
            Disk::Mirror(d) => d.source().is_faulty(),
            Disk::Elsewhere(_) | Disk::Null(_) => false,
        }
    }

    /// Has this witness told of each failed sync that may have lost data of this disk, also of one that other disks
    /// have asked for, before any request is answered with it.
    pub fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        match self {
            Disk::Raw(d) => d.witness_syncs(witness),
            Disk::Image(d) => d.witness_syncs(witness),
            Disk::Store(d) => d.store().live().witness(witness),
            Disk::Remote(d) => d.witness_syncs(witness),
            Disk::Mirror(d) => d.source().witness_syncs(witness),
            Disk::Elsewhere(_) | Disk::Null(_) => {}
        }
    }

    /// Called when guests are served, with such engines: the disk's background work begins, on a thread of its own. It
    /// ends with [`unlock`](Disk::unlock), or when the disk is dropped. The process has dropped its rights before.
    ///
    /// # Errors
    /// No thread can be made. The disk can be served nevertheless.
    pub fn begin_service(&self, engine: &ServiceEngine) -> io::Result<()> {
        match self {
            Disk::Store(d) => d.begin_service(engine),
            Disk::Mirror(d) => d.begin_service(engine),
            _ => Ok(()),
        }
    }

    /// Lets other processes open a [closed](Disk::close) disk, while this process still has it open. Nothing may be
    /// written from now on. A block device stays claimed until it is dropped.
    pub fn unlock(&self) {
        match self {
            Disk::Raw(d) => d.unlock(),
            Disk::Image(d) => d.layers().iter().for_each(|layer| layer.medium().unlock()),
            Disk::Store(d) => d.unlock(),
            Disk::Elsewhere(d) => d.unlock(),
            Disk::Mirror(d) => {
                d.end_background();
                d.disks().for_each(Disk::unlock);
            }
            Disk::Remote(_) | Disk::Null(_) => {}
        }
    }

    /// Has its media keep the space that they have where zeros are written: see [`OpenOptions::keep_allocated`].
    pub fn keep_allocated(&self) {
        match self {
            Disk::Remote(d) => d.keep_allocated(),
            Disk::Mirror(d) => return d.disks().for_each(Disk::keep_allocated),
            _ => {}
        }
        self.media().into_iter().for_each(Raw::keep_allocated);
    }

    /// Whether its medium keeps its space where zeros are written.
    pub fn keeps_allocated(&self) -> bool {
        match self {
            Disk::Remote(d) => d.keeps_allocated(),
            Disk::Mirror(d) => d.source().keeps_allocated(),
            _ => self.medium().is_some_and(Raw::keeps_allocated),
        }
    }

    /// Called when a guest is served from it. If this process dies, a keeper that has opened the image keeps it open,
    /// and locked, for the successor (docs/internals/processes.md 5). Before this call, the keeper closes it when it is
    /// dropped.
    pub fn keep(&self) {
        self.media().into_iter().for_each(Raw::keep);
    }

    /// Has a keeper close it: its locks end with this process and its last operation. The medium of a store stays open
    /// if other disks of this process use it.
    pub fn let_go(&self) {
        match self {
            Disk::Store(d) if d.is_shared() => {}
            _ => self.media().into_iter().for_each(Raw::let_go),
        }
    }

    /// Whether [`write_zeroes`](Disk::write_zeroes) takes less time than a write of as many bytes, as far as that is
    /// known beforehand. It does no I/O.
    pub fn zeroes_fast(&self) -> bool {
        match self {
            Disk::Raw(d) => d.zeroes_fast(),
            // Blocks that have a place there are zeroed in place.
            Disk::Image(d) => d.medium().zeroes_fast(),
            // Only its server knows.
            Disk::Remote(_) => false,
            Disk::Mirror(d) => d.disks().all(Disk::zeroes_fast),
            Disk::Store(_) | Disk::Elsewhere(_) | Disk::Null(_) => true,
        }
    }
}

/// One line for people: the image, its size, and how it is accessed.
impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disk::Raw(d) => d.fmt(f),
            Disk::Image(d) => d.fmt(f),
            Disk::Store(d) => d.fmt(f),
            Disk::Elsewhere(d) => d.fmt(f),
            Disk::Remote(d) => d.fmt(f),
            Disk::Mirror(d) => match d.target() {
                Some(target) => write!(f, "{}, mirrored to {target}", d.source()),
                None => write!(f, "{}, with a mirror that has no target", d.source()),
            },
            Disk::Null(d) => d.fmt(f),
        }
    }
}
