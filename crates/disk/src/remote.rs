//! A disk whose data are behind a connection: byte for byte, as a raw disk.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ferrite_disk_base::size::Human;

use ferrite_disk_base::{
    Commits, DiscardLimits, DiskError, Extent, Format, GrowthWatch, ImageName, OpenOptions, Port,
    SECTOR_BYTES, SyncWitness,
};
use ferrite_io::arena::Span;
use ferrite_io::remote::{Allocation, Backing, RemoteFactory};
use ferrite_remote::RemoteExport;

use crate::Disk;

/// Bytes that are discarded or zeroed by one operation, so that a long range lets other requests through.
const CHUNK_BYTES: u64 = 64 << 20;

/// The facts that are known of the data when the disk is opened.
#[derive(Clone, Debug)]
pub struct RemoteFacts {
    /// The name of the disk, for people and as its identity.
    pub name: String,
    /// Sectors of 512 bytes, a multiple of `block_bytes`, when it was opened.
    pub sectors: u64,
    /// Whether nothing may be changed.
    pub read_only: bool,
    /// Whether the server refuses all changes, of each client.
    pub is_write_protected: bool,
    /// The unit of all operations in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// Smaller writes may cost more.
    pub physical_block_bytes: u32,
    /// Whether it can be used by one connection at a time only, as another would not see its writes.
    pub one_queue: bool,
    /// `None`: the other side has no discard.
    pub discard: Option<DiscardLimits>,
}

impl Disk {
    /// The files and remotes that [`Extent::Data`] names by index. Every queue registers all of them,
    /// in this order, with its own reactor, and hands them to the `async` functions in a [`Port`].
    pub fn backings(&self) -> Vec<Backing> {
        match self {
            Disk::Remote(d) => vec![d.backing()],
            Disk::Mirror(d) => d.backings(),
            _ => self.files().into_iter().map(Backing::File).collect(),
        }
    }

    /// Whether no more than one queue may use it at a time.
    pub fn one_queue(&self) -> bool {
        match self {
            Disk::Remote(d) => d.facts().one_queue,
            Disk::Mirror(d) => d.source().one_queue(),
            _ => false,
        }
    }
}

/// See the module text.
#[derive(Debug)]
pub struct RemoteDisk {
    factory: Arc<dyn RemoteFactory>,
    facts: RemoteFacts,
    /// The size in sectors, which only grows, in [`refresh_size`](Self::refresh_size).
    sectors: AtomicU64,
    /// The export, which knows the size. `None`: it never grows.
    export: Option<RemoteExport>,
    /// Flushes share syncs, and none succeeds after a failed one.
    commits: Commits,
    /// The other side has no means to make zeros.
    lacks_zeros: AtomicBool,
    /// Zeros leave the space where it is.
    keeps_space: AtomicBool,
}

impl RemoteDisk {
    /// An export of an NBD server. It waits for the server for some seconds at most.
    ///
    /// # Errors
    /// See [`RemoteExport::open`].
    pub(crate) fn open(name: &str, options: &OpenOptions) -> Result<RemoteDisk, DiskError> {
        let export = RemoteExport::open(name, options)?;
        let facts = RemoteFacts {
            name: name.to_owned(),
            sectors: export.sectors(),
            read_only: export.read_only(),
            is_write_protected: export.is_write_protected(),
            block_bytes: export.block_bytes(),
            physical_block_bytes: export.physical_block_bytes(),
            discard: export.discard_limits().filter(|_| !options.keep_allocated),
            one_queue: export.one_queue(),
        };
        let mut disk = RemoteDisk::new(export.factory(), facts);
        disk.export = Some(export);
        if options.keep_allocated {
            disk.keep_allocated();
        }
        Ok(disk)
    }

    /// A disk of what the factory connects to.
    pub fn new(factory: Arc<dyn RemoteFactory>, facts: RemoteFacts) -> RemoteDisk {
        RemoteDisk {
            factory,
            sectors: AtomicU64::new(facts.sectors),
            export: None,
            facts,
            commits: Commits::new(),
            lacks_zeros: AtomicBool::new(false),
            keeps_space: AtomicBool::new(false),
        }
    }

    /// The facts that were known when it was opened.
    pub fn facts(&self) -> &RemoteFacts {
        &self.facts
    }

    /// The size in sectors of 512 bytes.
    #[inline]
    pub(crate) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }

    /// Takes the size that the last connection has. `Some`: it has grown, in whole blocks.
    pub(crate) fn refresh_size(&self) -> Option<u64> {
        let block = u64::from(self.facts.block_bytes) / SECTOR_BYTES;
        let now = self.export.as_ref()?.sectors() / block * block;
        let before = self.sectors.fetch_max(now, Ordering::Relaxed);
        (now > before).then_some(now)
    }

    /// See [`Disk::growth_watch`].
    pub(crate) fn growth_watch(&self) -> GrowthWatch {
        self.export.as_ref().map_or_else(GrowthWatch::never, RemoteExport::growth_watch)
    }

    /// The format that its name says.
    pub fn format(&self) -> Format {
        ImageName::parse(&self.facts.name).map_or(Format::Nbd, |name| name.format)
    }

    /// The backing that each queue registers.
    pub(crate) fn backing(&self) -> Backing {
        Backing::Remote(self.factory.clone())
    }

    #[inline]
    pub(crate) fn map(&self, offset: u64, len: u64) -> Extent {
        Extent::Data { file: 0, offset, len }
    }

    pub(crate) async fn flush(&self, port: &Port) -> io::Result<()> {
        if self.facts.read_only {
            return Ok(());
        }
        self.commits.join(&port.io, self.commits.sync(port)).await
    }

    /// The allocation of the beginning of a range; all of it has data if the other side does not tell.
    pub(crate) async fn allocation(
        &self,
        port: &Port,
        offset: u64,
        len: u64,
    ) -> io::Result<Allocation> {
        match port.io.allocation(port.files[0], offset, len).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                Ok(Allocation { len, zeros: false })
            }
            found => found,
        }
    }

    pub(crate) fn is_faulty(&self) -> bool {
        self.commits.is_faulty()
    }

    pub(crate) fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.commits.witness(witness);
    }

    pub(crate) fn keep_allocated(&self) {
        self.keeps_space.store(true, Ordering::Relaxed);
    }

    pub(crate) fn keeps_allocated(&self) -> bool {
        self.keeps_space.load(Ordering::Relaxed)
    }

    pub(crate) async fn discard_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        if self.facts.discard.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if self.keeps_allocated() {
            return Ok(len);
        }
        let len = len.min(CHUNK_BYTES);
        port.io.discard(port.files[0], offset, len).await?;
        Ok(len)
    }

    /// `zeros` is memory that stays zero, for another side that has no means of its own.
    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        mut offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let block = u64::from(self.facts.block_bytes);
        if [offset, len, zeros.len() as u64].iter().any(|n| !n.is_multiple_of(block))
            || zeros.is_empty()
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let end = offset + len;
        while offset < end {
            offset += self.zero_part(port, offset, end - offset, zeros).await?;
        }
        Ok(())
    }

    /// Makes the beginning of a range zeros; returns its bytes.
    async fn zero_part(&self, port: &Port, offset: u64, len: u64, zeros: Span) -> io::Result<u64> {
        let file = port.files[0];
        if !self.lacks_zeros.load(Ordering::Relaxed) {
            let len = len.min(CHUNK_BYTES);
            let done = match self.keeps_allocated() {
                true => port.io.zero_range(file, offset, len).await,
                false => port.io.punch_hole(file, offset, len).await,
            };
            match done {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                    self.lacks_zeros.store(true, Ordering::Relaxed);
                }
                done => return done.map(|()| len),
            }
        }
        let len = len.min(zeros.len() as u64);
        port.io.write_all(file, offset, zeros.slice(0, len as usize)).await?;
        Ok(len)
    }
}

impl fmt::Display for RemoteDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RemoteFacts { name, sectors, read_only, .. } = &self.facts;
        let mode = if *read_only { "read-only" } else { "read-write" };
        write!(f, "remote {name}, {}, {mode}, ", Human(sectors * SECTOR_BYTES))?;
        match &self.facts.discard {
            Some(limits) => write!(f, "discard in units of {} bytes", limits.granularity_bytes),
            None => write!(f, "no discard"),
        }
    }
}
