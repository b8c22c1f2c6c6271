//! The duties of a format as a layer of a chain.
//!
//! A new format is a folder with a type that does this, a variant of [`Format`] and of
//! [`Layer`](super::Layer), and what the tools want to know of it (`tools/formats/`).

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
    /// The parent's name there.
    pub(crate) name: String,
    /// Where it may be, the likeliest first.
    pub candidates: Vec<ImageName>,
}

/// What an open image does as a layer of a chain. Of what reads and writes, all but `find`, `load` and `unpack`
/// is asked of the leaf only.
#[allow(async_fn_in_trait, reason = "the futures stay on the thread that makes them")]
pub trait ImageFormat: fmt::Display {
    /// Its name.
    fn format(&self) -> Format;

    /// The bytes of the virtual disk that this layer knows of.
    fn bytes(&self) -> u64;

    /// The file or device that it is in.
    fn medium(&self) -> &Raw;

    /// Memory for tables that stay there as a whole.
    fn table_bytes(&self) -> u64 {
        0
    }

    /// Memory for metadata that can be read again.
    fn set_metadata_bytes(&mut self, _: usize) {}

    /// Its names of its parent; none: it has none.
    fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        Ok(None)
    }

    /// For a read. No waiting, no lock.
    fn find(&self, offset: u64, len: u64) -> Mapping;

    /// For a write; may set space aside.
    fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping;

    /// The data of a placed write was given to the kernel: it is visible from now on, in memory
    /// and in the journal.
    fn written(&self, _offset: u64, _len: u64) {}

    /// Reads the metadata that [`find`](Self::find) lacked at `offset`.
    async fn load(&self, _: &Port, _: FileId, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Makes [`reserve`](Self::reserve) answer for the range: metadata loaded, space in the file, room
    /// in the journal.
    async fn prepare(&self, _: &Port, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Writes `buf`, at most what `reserve` said, and copies what is around it from below.
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

    /// Flush: everything that was answered is durable, data and metadata. Once it has failed
    /// because of a sync, the next process finds what a power cut would have left: the guest was
    /// told. Where only a write was told, it finds what was answered.
    async fn commit(&self, port: &Port) -> io::Result<()>;

    /// See `Disk::witness_syncs`.
    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>);

    /// Whether a sync has failed, and so nothing is committed any more. A look at memory.
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

    /// Who hears of operations' ends; none: its places never become another's while it is open.
    fn epochs(&self) -> Option<&Arc<Epochs>> {
        None
    }

    /// Whether there is something for [`commit`](Self::commit) to do besides a sync. A look at
    /// memory.
    fn is_dirty(&self) -> bool {
        false
    }

    /// The parts that a reader has recovered of a process that died: ranges of the disk in bytes,
    /// start and length, that are at least in part of that.
    fn recovered(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }

    /// By which its journal is found; none: it has no journal.
    fn journal_identity(&self) -> io::Result<Option<Identity>> {
        Ok(None)
    }

    /// A commit, and everything that makes the image complete for other programs. It fails as
    /// [`commit`](Self::commit) does: a cluster that was copied may be lost with what was flushed
    /// long ago, and the next process must not put it in the place of the old one.
    async fn close(&self, port: &Port) -> io::Result<()>;
}
