//! A disk in images with metadata: a chain of layers, the leaf first.
//!
//! The first layer that has a sector wins; sectors that none has are zeros. Only the leaf is written. On the hot path
//! ([`Image::map`], [`Image::written`]) no call waits and no lock is taken, if the metadata are in memory. Missing
//! metadata, allocation and commits are `async fn`s on the caller's [`Port`].
//!
//! A write: `map` gives the place (it may allocate space), the data are written, [`Image::written`] makes them visible
//! in memory and in the journal, the guest gets the answer. The metadata reach the medium with the next
//! [`Image::flush`], in the order of the format's `commit`.

use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ferrite_disk_base::{
    DiskError, Epochs, Extent, ImageName, OnDamage, OpenOptions, Port, Raw, Reader, SECTOR_BYTES,
    SyncWitness,
};
use ferrite_io::arena::Span;

pub(crate) mod backing;
mod chain;
pub(crate) mod format;
mod layer;
pub(crate) mod mapping;
mod open;
mod parent_sync;
mod raw;
mod recovery;
mod shortcut;
#[cfg(test)]
mod tests;

pub use backing::Backing;
pub use chain::open_as_far;
pub use format::{ImageFormat, ParentNames};
pub use layer::Layer;
pub use mapping::Mapping;
pub use open::{open_medium, open_raw, open_store};
pub use recovery::Unrecovered;

use parent_sync::ParentSync;
use shortcut::{GROUP_BYTES, Owner, Owners, PAGE_BYTES, Shortcut};

/// The shortcut's share of the memory for metadata.
const SHORTCUT_SHARE: usize = 4;

/// A chain of layers, open and locked.
#[derive(Debug)]
pub struct Image {
    /// The leaf first.
    layers: Box<[Layer]>,
    /// The shortcut of a chain that is long enough for one.
    shortcut: Option<Shortcut>,
    parent_sync: ParentSync,
    /// Sectors that were found in each layer below the leaf, to be read.
    found_below: Box<[AtomicU64]>,
    /// A parent has parts that only this host's journal has; see [`recovery`].
    is_above_journal: bool,
}

/// The layers below a layer.
#[derive(Clone, Copy)]
struct Below<'a> {
    layers: &'a [Layer],
    /// Index of the first of them in the chain, and of its file.
    first: usize,
}

impl Backing for Below<'_> {
    fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    fn map(&self, offset: u64, len: u64) -> Extent {
        find(self.layers, self.first, offset, len)
    }

    async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        let map = |offset, len| self.map(offset, len);
        read(self.layers, self.first, map, port, offset, buf).await
    }
}

impl Image {
    /// Opens and locks the chain of images that begins with `name`. It writes nothing.
    ///
    /// # Errors
    /// One of the images cannot be opened; the text tells which, and why.
    pub fn open(name: &ImageName, options: &OpenOptions) -> Result<Image, DiskError> {
        let layers = chain::open_chain(name, options)?;
        if options.on_damage() == OnDamage::Serve {
            layers.iter().for_each(warn_of_damage);
        }
        let bytes = layers.first().map_or(0, Layer::bytes);
        let budget_bytes = options.metadata_bytes / SHORTCUT_SHARE;
        let shortcut = Shortcut::new(layers.len(), bytes, budget_bytes);
        Ok(Image::of(layers, shortcut))
    }

    /// Opens one image without its parents, to merge it into them: data that it lacks are zeros.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open_alone(name: &ImageName, options: &OpenOptions) -> Result<Image, DiskError> {
        Ok(Image::of(vec![Layer::open(name, options)?], None))
    }

    /// Opens the first `count` images of a chain, to merge them into the one below: data that they lack are zeros.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn open_stretch(
        name: &ImageName,
        options: &OpenOptions,
        count: usize,
    ) -> Result<Image, DiskError> {
        match chain::open_some(name, options, count)? {
            (layers, None) => Ok(Image::of(layers, None)),
            (_, Some(e)) => Err(e),
        }
    }

    fn of(layers: Vec<Layer>, shortcut: Option<Shortcut>) -> Image {
        let parent_sync = ParentSync::new(layers.len());
        let is_above_journal = layers.iter().skip(1).any(|parent| !parent.recovered().is_empty());
        let found_below = layers.iter().skip(1).map(|_| AtomicU64::new(0)).collect();
        Image { layers: layers.into(), shortcut, parent_sync, found_below, is_above_journal }
    }

    /// Closes the parents, and returns the leaf.
    pub fn into_leaf(self) -> Option<Layer> {
        self.layers.into_iter().next()
    }

    fn leaf(&self) -> &Layer {
        &self.layers[0]
    }

    fn below_leaf(&self) -> Below<'_> {
        Below { layers: &self.layers[1..], first: 1 }
    }

    /// The layers, the leaf first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The size in sectors of 512 bytes.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.leaf().bytes() / SECTOR_BYTES
    }

    /// The file or device of the leaf.
    #[inline]
    pub fn medium(&self) -> &Raw {
        self.leaf().medium()
    }

    /// The open files of all layers, the leaf first.
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.layers.iter().flat_map(|layer| layer.medium().files()).collect()
    }

    /// Finds the place for a write of the beginning of a range, in bytes; never blocks. An unallocated range gets a new
    /// place that no metadata refer to yet.
    pub fn reserve(&self, offset: u64, len: u64) -> Extent {
        match self.leaf().reserve(self.below_leaf(), offset, len) {
            Mapping::Data { offset, len } => Extent::Data { file: 0, offset, len },
            Mapping::Zeros { len }
            | Mapping::Backing { len }
            | Mapping::Miss { len }
            | Mapping::Compressed { len }
            | Mapping::Cow { len } => Extent::Slow { len },
        }
    }

    /// Finds the beginning of a range for a read, in bytes; never blocks. The leaf answers, or the layers below it; for
    /// a single page the shortcut does.
    pub fn map(&self, offset: u64, len: u64) -> Extent {
        let len = match self.leaf().find(offset, len) {
            Mapping::Data { offset, len } => return Extent::Data { file: 0, offset, len },
            Mapping::Zeros { len } => return Extent::Zeros { len },
            Mapping::Miss { len } | Mapping::Compressed { len } | Mapping::Cow { len } => {
                return Extent::Slow { len };
            }
            Mapping::Backing { len } => len,
        };
        let page = offset / PAGE_BYTES;
        let extent = match &self.shortcut {
            Some(shortcut) if (offset + len - 1) / PAGE_BYTES == page => {
                self.map_page(shortcut, page, offset, len)
            }
            _ => self.below_leaf().map(offset, len),
        };
        if let Extent::Data { file, len, .. } = extent
            && let Some(found) = self.found_below.get(file.wrapping_sub(1))
        {
            found.fetch_add(len.div_ceil(SECTOR_BYTES), Ordering::Relaxed);
        }
        extent
    }

    /// Sectors that [`map`](Self::map) has found in each layer below the leaf since the image was opened, the leaf's parent
    /// first. Sectors of compressed clusters do not count.
    pub fn found_below(&self) -> impl Iterator<Item = u64> + '_ {
        self.found_below.iter().map(|found| found.load(Ordering::Relaxed))
    }

    /// The answer of the layers below the leaf for a range within a page.
    fn map_page(&self, shortcut: &Shortcut, page: u64, offset: u64, len: u64) -> Extent {
        match shortcut.get(page) {
            Some(Owner::Nobody) => Extent::Zeros { len },
            // Its metadata may have been evicted since then.
            Some(Owner::Layer(layer)) => find(&self.layers[layer..=layer], layer, offset, len),
            Some(Owner::Ask) => self.below_leaf().map(offset, len),
            None => {
                let extent = self.below_leaf().map(offset, len);
                // If this page's metadata are not in memory, those of its neighbours are not either.
                if !matches!(extent, Extent::Slow { .. }) {
                    let group = offset / GROUP_BYTES;
                    let below = self.below_leaf();
                    let bytes = self.leaf().bytes();
                    shortcut.put(group, &Owners::of(below.layers, below.first, group, bytes));
                }
                extent
            }
        }
    }

    /// Makes data visible that were written to the place from [`reserve`](Self::reserve), in memory and in the journal.
    #[inline]
    pub fn written(&self, offset: u64, len: u64) {
        self.leaf().written(offset, len);
    }

    /// Fills `buf` with the disk's data at `offset`.
    ///
    /// # Errors
    /// Errors of the kernel. `InvalidData`: metadata is damaged.
    pub async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        let map = |offset, len| self.map(offset, len);
        self.while_mapped(read(&self.layers, 0, map, port, offset, buf)).await
    }

    /// A reader for a queue that maps: it tells the leaf when the queue's operations have ended. `None`: the leaf's
    /// places are not reused.
    pub fn reader(&self) -> Option<Reader> {
        self.leaf().epochs().map(Epochs::reader)
    }

    /// Runs steps that map, and use the places that they got.
    pub async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        match self.leaf().epochs() {
            Some(epochs) => epochs.during(steps).await,
            None => steps.await,
        }
    }

    /// Writes `buf` to the leaf. It is visible to readers when this returns.
    ///
    /// # Errors
    /// As [`read`](Self::read); `StorageFull`.
    pub async fn write(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        self.while_mapped(self.write_mapped(port, offset, buf)).await
    }

    async fn write_mapped(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        let (leaf, below) = (self.leaf(), self.below_leaf());
        let mut done = 0;
        while done < buf.len() {
            let (at, left) = (offset + done as u64, buf.len() - done);
            match leaf.reserve(below, at, left as u64) {
                Mapping::Data { offset: to, len } => {
                    let piece = buf.slice(done, part(len, left)?);
                    port.io.write_all(port.files[0], to, piece).await?;
                    leaf.written(at, piece.len() as u64);
                    done += piece.len();
                }
                Mapping::Cow { len } => {
                    let piece = buf.slice(done, part(len, left)?);
                    leaf.write_copying(port, below, at, piece).await?;
                    done += piece.len();
                }
                Mapping::Zeros { len }
                | Mapping::Backing { len }
                | Mapping::Miss { len }
                | Mapping::Compressed { len } => {
                    let len = part(len, left)? as u64;
                    leaf.prepare(port, at, len).await?;
                }
            }
        }
        Ok(())
    }

    /// Whether the leaf has changes of metadata that are not on the medium. Reads memory only.
    #[inline]
    pub fn is_dirty(&self) -> bool {
        self.leaf().is_dirty()
    }

    /// Tells `witness` of each failed sync that may have lost data of this disk.
    pub fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.parent_sync.witness(witness.clone());
        self.leaf().witness_syncs(witness);
    }

    /// Whether a sync has failed, so that nothing is committed any more. Reads memory only.
    #[inline]
    pub fn is_faulty(&self) -> bool {
        self.leaf().is_faulty() || self.parent_sync.is_faulty()
    }

    /// Makes all written data durable, in the leaf and in its parents.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub async fn flush(&self, port: &Port) -> io::Result<()> {
        let parent_sync = self.parent_sync.ensure(port, &self.layers).await;
        self.leaf().commit(port).await?;
        parent_sync
    }

    /// Discards the beginning of a range, and returns its bytes. Above a parent's journal nothing is discarded: the
    /// guest would read the journal's data, and other data after a power cut.
    ///
    /// # Errors
    /// As [`write`](Self::write); `Unsupported`: the medium has no discard.
    pub async fn discard_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        if self.is_above_journal {
            return Ok(len);
        }
        let steps = self.leaf().discard_part(port, self.below_leaf(), offset, len);
        self.while_mapped(steps).await
    }

    /// Makes a range read as zeros. `zeros` is memory that stays zero, for a medium that has no other means.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub async fn write_zeroes(
        &self,
        port: &Port,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let steps = self.leaf().write_zeroes(port, self.below_leaf(), offset, len, zeros);
        self.while_mapped(steps).await
    }

    /// Flushes, and makes the image complete for other programs.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub async fn close(&self, port: &Port) -> io::Result<()> {
        let parent_sync = self.parent_sync.ensure(port, &self.layers).await;
        self.leaf().close(port).await?;
        parent_sync
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.leaf())?;
        match self.layers.len() - 1 {
            0 => Ok(()),
            1 => write!(f, ", over 1 parent"),
            n => write!(f, ", over {n} parents"),
        }
    }
}

/// Tells the log what is damaged in an image that is served in spite of that.
fn warn_of_damage(layer: &Layer) {
    for flaw in layer.flaws() {
        let image = layer.medium().path().display();
        tracing::warn!(%image, "it is damaged, and reads of such parts fail: {flaw}");
    }
}

/// The bytes of a layer's answer, at most `left`.
fn part(len: u64, left: usize) -> io::Result<usize> {
    match usize::try_from(len).unwrap_or(left).min(left) {
        0 => Err(io::Error::new(io::ErrorKind::InvalidData, "a layer answered for no bytes")),
        n => Ok(n),
    }
}

/// The answer of the first layer that has the beginning of a range.
fn find(layers: &[Layer], first: usize, offset: u64, len: u64) -> Extent {
    let mut len = len;
    for (i, layer) in layers.iter().enumerate() {
        match layer.find(offset, len) {
            Mapping::Data { offset, len } => return Extent::Data { file: first + i, offset, len },
            Mapping::Zeros { len } => return Extent::Zeros { len },
            Mapping::Miss { len } | Mapping::Compressed { len } | Mapping::Cow { len } => {
                return Extent::Slow { len };
            }
            Mapping::Backing { len: below } => len = below,
        }
    }
    Extent::Zeros { len }
}

/// Reads the ranges that `map` finds in these layers.
async fn read(
    layers: &[Layer],
    first: usize,
    map: impl Fn(u64, u64) -> Extent,
    port: &Port,
    offset: u64,
    buf: Span,
) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let (at, left) = (offset + done as u64, buf.len() - done);
        done += match map(at, left as u64) {
            Extent::Data { file, offset, len } => {
                let piece = buf.slice(done, part(len, left)?);
                port.io.read_exact(port.files[file], offset, piece).await?;
                piece.len()
            }
            Extent::Zeros { len } => {
                let piece = buf.slice(done, part(len, left)?);
                port.memory().fill(piece, 0);
                piece.len()
            }
            Extent::Slow { len } => {
                let piece = buf.slice(done, part(len, left)?);
                read_slow(layers, first, port, at, piece).await?
            }
        };
    }
    Ok(())
}

/// Has the layer that could not answer at once load its metadata, or unpack its data into `buf`. Returns the bytes that
/// are in `buf` now.
async fn read_slow(
    layers: &[Layer],
    first: usize,
    port: &Port,
    offset: u64,
    buf: Span,
) -> io::Result<usize> {
    let mut len = buf.len() as u64;
    for (i, layer) in layers.iter().enumerate() {
        let file = port.files[first + i];
        match layer.find(offset, len) {
            Mapping::Backing { len: below } => len = below,
            Mapping::Miss { len } => {
                layer.load(port, file, offset, len).await?;
                return Ok(0);
            }
            Mapping::Compressed { len } => {
                let piece = buf.slice(0, part(len, buf.len())?);
                layer.unpack(port, file, offset, piece).await?;
                return Ok(piece.len());
            }
            Mapping::Data { .. } | Mapping::Zeros { .. } | Mapping::Cow { .. } => return Ok(0),
        }
    }
    Ok(0)
}
