//! The interface of a format as a layer of a chain.
//!
//! A new format is a folder with a type that implements it, a variant of [`Format`] and of [`Layer`](super::Layer), and
//! the functions that the tools need (`tools/formats/`).

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

use ferrite_disk_base::journal::Identity;
use ferrite_disk_base::{DiskError, Epochs, Format, ImageName, Port, Raw, SyncWitness};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::backing::Backing;
use super::mapping::Mapping;

/// An image's names of its parent.
pub struct ParentNames {
    /// The parent's name in the image.
    pub(crate) name: String,
    /// The possible places of the parent, the likeliest first.
    pub candidates: Vec<ImageName>,
}

/// An open image as a layer of a chain. Of the methods for reading and writing, only `find`, `load` and `unpack` are
/// called for parents; the others for the leaf only.
#[allow(async_fn_in_trait, reason = "the futures stay on the thread that makes them")]
pub trait ImageFormat: fmt::Display {
    /// Its name.
    fn format(&self) -> Format;

    /// The size of the virtual disk of this layer, in bytes.
    fn bytes(&self) -> u64;

    /// The file or device of the image.
    fn medium(&self) -> &Raw;

    /// Memory for tables that are kept completely.
    fn table_bytes(&self) -> u64 {
        0
    }

    /// Sets the memory for metadata that can be read again.
    fn set_metadata_bytes(&mut self, _: usize) {}

    /// The damage of an image that is open in spite of it, a line each; at most a few, and how many more there are.
    /// Damage in tables that are read later is not among them.
    fn flaws(&self) -> Vec<String> {
        Vec::new()
    }

    /// Its names of its parent; `None`: it has no parent.
    fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        Ok(None)
    }

    /// Finds a range for a read. It does not wait and takes no lock.
    fn find(&self, offset: u64, len: u64) -> Mapping;

    /// Finds a place for a write; it may allocate space.
    fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping;

    /// Called when the data of a placed write were given to the kernel. They become visible, in memory and in the
    /// journal.
    fn written(&self, _offset: u64, _len: u64) {}

    /// Reads the metadata that [`find`](Self::find) lacked at `offset`.
    async fn load(&self, _: &Port, _: FileId, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Enables [`reserve`](Self::reserve) to answer for the range: it loads metadata, and makes space in the file and
    /// room in the journal.
    async fn prepare(&self, _: &Port, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Writes `buf`, no more than `reserve` said, and copies the data around it from below.
    async fn write_copying(
        &self,
        port: &Port,
        _: impl Backing,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        port.io.write_all(port.files[0], offset, buf).await
    }

    /// Reads compressed data.
    async fn unpack(&self, port: &Port, file: FileId, offset: u64, buf: Span) -> io::Result<()> {
        port.io.read_exact(file, offset, buf).await
    }

    /// Flush: all answered writes become durable, data and metadata. If it failed because of a sync, the next process
    /// finds the state after a power cut: the guest got an error. If only a write failed, the next process finds all
    /// answered writes.
    async fn commit(&self, port: &Port) -> io::Result<()>;

    /// See `Disk::witness_syncs`.
    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>);

    /// Whether a sync has failed, so that nothing is committed any more. Reads memory only.
    fn is_faulty(&self) -> bool;

    /// See `Disk::discard_part`.
    async fn discard_part(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64>;

    /// See `Disk::write_zeroes`.
    async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()>;

    /// The epochs that are told when operations end; `None`: places are not reused while the image is open.
    fn epochs(&self) -> Option<&Arc<Epochs>> {
        None
    }

    /// Whether [`commit`](Self::commit) has to do more than a sync. Reads memory only.
    fn is_dirty(&self) -> bool {
        false
    }

    /// The parts that a reader has recovered from a dead process's journal: ranges of the disk in bytes, start and
    /// length. At least a part of each was recovered.
    fn recovered(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }

    /// Refuses an image that is read, and must be repaired before it is written to.
    fn check_writable(&self) -> Result<(), DiskError> {
        Ok(())
    }

    /// The identity by which its journal is found; `None`: it has no journal.
    fn journal_identity(&self) -> io::Result<Option<Identity>> {
        Ok(None)
    }

    /// Commits, and makes the image complete for other programs. After [`commit`](Self::commit) has failed it fails,
    /// too: a copied cluster may be lost together with data that were flushed long ago, and the next process must not
    /// use it in place of the old one.
    async fn close(&self, port: &Port) -> io::Result<()>;
}
