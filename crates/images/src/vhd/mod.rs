//! VHD: fixed, dynamic and differencing images, as of blktap's `vhd-util`, Hyper-V and QEMU.
//!
//! * `format`: the structures, as pure code over bytes.
//! * `meta`: reading and checking them from a file.
//! * [`Vhd`]: an open image, one layer of a disk.
//!
//! A dynamic image: a copy of the footer, the dynamic header, a table with the place of each
//! block, the batmap (libvhd's), parent locators, blocks (a bitmap of their sectors, then the
//! data) in any order, and the footer.

use std::fmt;
use std::io::{self, Result as IoResult};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};

use ferrite_disk_base::journal::{self, Identity, Journal};
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{
    Commits, DiskError, ErrorKind, Format, ImageName, Locking, OnDamage, OpenOptions, Port, Raw,
    SyncWitness, is_something_else,
};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::shared_lock::SharedLock;

use crate::image::backing::Backing;
use crate::image::format::{ImageFormat, ParentNames};
use crate::image::mapping::Mapping;

mod blocks;
mod by_name;
mod check;
mod close;
mod create;
mod damage;
mod edit;
mod footers;
mod format;
mod headers;
mod identity;
mod lineage;
mod meta;
mod pieces;
mod relink;
mod repair;
mod resize;
mod seen;
mod strict;
mod table;
mod verify;

pub use check::{Finding, Problem, Report, check};
pub use create::{NewImage, NewParent, way_to};
pub use edit::{cut_off, identity_in};
pub use format::batmap::KeyHash;
pub use format::footer::{Creator, Footer, Kind};
pub use format::geometry::Geometry;
pub use format::header::DEFAULT_BLOCK_BYTES;
pub(crate) use format::locator::{decode, unescape};
pub use format::{MAX_DISK_BYTES, Malformed, Stamp, Uuid};
pub use headers::{Change, Facts, ParentLink};
pub(crate) use lineage::{Head, Lineage, head, lineage};
pub use relink::MAX_MOVED;
pub use repair::{is_repairable, repair};
pub use seen::{Allocated, Seen, SeenLocator, SeenTables, SeenVolume, canonical};
pub use strict::check_strictly;
pub use verify::{Verify, verify};

use blocks::{Blocks, Opened, RECORD_WORDS, RECORDS};
use format::batmap::{Batmap, Encrypted};
use format::header::Header;
use meta::{CopyOnDevice, FooterAt, Footers};

/// A differencing image's record of its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Its identity; nil: the parent is a raw image.
    pub uuid: Uuid,
    /// Its file name, for people.
    pub name: String,
    /// Its possible paths, the likeliest first.
    pub paths: Vec<PathBuf>,
}

/// The way to find an image's sectors.
enum Body {
    /// In the order of the disk.
    Fixed,
    /// By a table.
    Sparse(Box<Sparse>),
}

struct Sparse {
    header: Header,
    batmap: Option<Batmap>,
    /// The batmap on disk has a set bit.
    full_on_disk: AtomicBool,
    /// Held by a task that changes that.
    forgetting: SharedLock,
    blocks: Blocks,
    parent: Option<Parent>,
    /// The hash of its key, if it was set since the opening.
    key: Mutex<Option<KeyHash>>,
}

/// An open image; see the module text.
pub struct Vhd {
    raw: Raw,
    /// As it was when it was opened.
    footer: Footer,
    /// As it is on the medium, or is to be there after closing.
    now: Mutex<Footer>,
    footer_at: FooterAt,
    /// Does all syncs.
    commits: Arc<Commits>,
    body: Body,
}

impl Vhd {
    /// Opens the image in `raw`. Its whole table is read and checked; nothing is written.
    pub(crate) fn of(raw: Raw, options: &OpenOptions) -> Result<Vhd, DiskError> {
        let path = raw.path().to_owned();
        let bad = |e: meta::MetaError| e.for_image(&path);
        if let Some(other) = is_something_else(&raw, Format::Vhd) {
            return Err(other);
        }
        let footers = Footers::read(&raw).map_err(bad)?;
        let (footer, footer_at) =
            footers.choose(CopyOnDevice::of(options)).map_err(|e| match footers.end {
                Err(_) if !raw.is_file() && !e.unsupported => no_footer(&raw, &footers, &e),
                _ => bad(e.into()),
            })?;
        if let FooterAt::Taken(_) = footer_at
            && footers.is_taken
        {
            tracing::warn!(
                image = %path.display(),
                "tapdisk had it open and did not close it; its copy of the footer counts until it is \
                 closed, as its format was said",
            );
        }
        let commits = Arc::new(Commits::new());
        let body = match footer.kind {
            Kind::Fixed => fixed(&footer, footers.end_at).map_err(|e| bad(e.into()))?,
            Kind::Dynamic | Kind::Differencing => {
                let room = footer_at.room(footers.medium_bytes);
                let sparse = match options.on_damage() {
                    OnDamage::Refuse => meta::read_sparse(&raw, &footer, room, encrypted(options)),
                    OnDamage::Serve | OnDamage::Salvage => damage::read_sparse(&raw, &footer, room),
                };
                let sparse = sparse.map_err(bad)?;
                let parent = match footer.kind {
                    Kind::Differencing => {
                        Some(by_name::parent(&raw, &footer, &sparse.header).map_err(bad)?)
                    }
                    _ => None,
                };
                Body::Sparse(Box::new(self::sparse(
                    &raw, &footers, &footer, sparse, parent, &commits, options,
                )?))
            }
        };
        let now = Mutex::new(footer.clone());
        Ok(Vhd { raw, footer, now, footer_at, commits, body })
    }

    /// Bytes of the virtual disk.
    pub fn bytes(&self) -> u64 {
        self.footer.current_size
    }

    /// The file or device of the image.
    pub fn medium(&self) -> &Raw {
        &self.raw
    }

    /// Its footer.
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Bytes of a block; `None` for a fixed image.
    pub fn block_bytes(&self) -> Option<u32> {
        match &self.body {
            Body::Fixed => None,
            Body::Sparse(sparse) => Some(sparse.header.block_bytes),
        }
    }

    /// Bytes of the disk that have space in the image: whole blocks.
    pub fn allocated_bytes(&self) -> u64 {
        match &self.body {
            Body::Fixed => self.bytes(),
            Body::Sparse(sparse) => {
                u64::from(sparse.blocks.allocated()) * u64::from(sparse.header.block_bytes)
            }
        }
    }

    /// Its parent, if it is a differencing image.
    pub fn parent(&self) -> Option<&Parent> {
        match &self.body {
            Body::Fixed => None,
            Body::Sparse(sparse) => sparse.parent.as_ref(),
        }
    }

    /// Whether `parent` is the parent that this image was made on. A parent with this image's own identity is one, too:
    /// a coalesce was interrupted after its last step, and the parent, which has all of this image's sectors, is to be
    /// renamed over it.
    ///
    /// # Errors
    /// It is not; the text tells both identities.
    pub fn accepts_parent(&self, parent: &Vhd) -> Result<(), DiskError> {
        let expected = self.parent().map_or(Uuid::NIL, |p| p.uuid);
        let found = parent.footer.uuid;
        if found == expected {
            return Ok(());
        }
        if found == self.footer.uuid {
            tracing::warn!(
                image = %self.raw.path().display(),
                parent = %parent.raw.path().display(),
                "an unfinished coalesce: the parent had all of this image; run ferrite image \
                 coalesce again to finish it",
            );
            return Ok(());
        }
        Err(DiskError::new(
            ErrorKind::Unsuitable,
            format!("cannot open image {}", self.raw.path().display()),
            format!(
                "its parent {} has the UUID {found}, but the image was made on {expected}",
                parent.raw.path().display()
            ),
            "find the image with that UUID (ferrite image info); if the parent was replaced on \
             purpose, the image has to be made anew on it",
        ))
    }
}

impl ImageFormat for Vhd {
    fn format(&self) -> Format {
        Format::Vhd
    }

    fn bytes(&self) -> u64 {
        self.footer.current_size
    }

    fn medium(&self) -> &Raw {
        &self.raw
    }

    fn table_bytes(&self) -> u64 {
        match &self.body {
            Body::Fixed => 0,
            Body::Sparse(sparse) => sparse.blocks.table_bytes(),
        }
    }

    fn flaws(&self) -> Vec<String> {
        match &self.body {
            Body::Fixed => Vec::new(),
            Body::Sparse(sparse) => sparse.blocks.flaws(),
        }
    }

    fn set_metadata_bytes(&mut self, bytes: usize) {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.blocks.set_metadata_bytes(bytes);
        }
    }

    fn find(&self, offset: u64, len: u64) -> Mapping {
        match &self.body {
            Body::Fixed => match self.bytes().checked_sub(offset) {
                None | Some(0) => Mapping::Zeros { len },
                Some(left) => Mapping::Data { offset, len: len.min(left) },
            },
            Body::Sparse(sparse) => sparse.blocks.find(offset, len),
        }
    }

    fn reserve(&self, _: impl Backing, offset: u64, len: u64) -> Mapping {
        match &self.body {
            Body::Fixed => Mapping::Data { offset, len },
            Body::Sparse(sparse) => sparse.blocks.reserve(offset, len),
        }
    }

    fn written(&self, offset: u64, len: u64) {
        if let Body::Sparse(sparse) = &self.body {
            sparse.blocks.written(offset, len);
        }
    }

    async fn load(&self, port: &Port, file: FileId, offset: u64, len: u64) -> IoResult<()> {
        match &self.body {
            Body::Fixed => Ok(()),
            Body::Sparse(sparse) => sparse.blocks.load(port, file, offset, len).await,
        }
    }

    async fn prepare(&self, port: &Port, offset: u64, len: u64) -> IoResult<()> {
        match &self.body {
            Body::Fixed => Ok(()),
            Body::Sparse(sparse) => sparse.blocks.prepare(port, &self.raw, offset, len).await,
        }
    }

    async fn commit(&self, port: &Port) -> IoResult<()> {
        match &self.body {
            _ if self.raw.read_only() => Ok(()),
            Body::Fixed => self.commits.join(&port.io, self.commits.sync(port)).await,
            Body::Sparse(sparse) => sparse.blocks.commit(port).await,
        }
    }

    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.commits.witness(witness);
    }

    fn is_faulty(&self) -> bool {
        self.commits.is_faulty()
    }

    async fn discard_part(
        &self,
        port: &Port,
        _: impl Backing,
        offset: u64,
        len: u64,
    ) -> IoResult<u64> {
        match &self.body {
            Body::Fixed => self.raw.discard_part(&port.io, &port.files, offset, len).await,
            Body::Sparse(sparse) => {
                self.forget_full(port, sparse).await?;
                sparse.blocks.discard_part(port, &self.raw, offset, len).await
            }
        }
    }

    async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> IoResult<()> {
        let (raw, files) = (&self.raw, &port.files);
        match &self.body {
            Body::Fixed => raw.empty(&port.io, files, offset, len, zeros).await,
            Body::Sparse(sparse) => {
                sparse.blocks.write_zeroes(port, raw, below, offset, len, zeros).await
            }
        }
    }

    fn is_dirty(&self) -> bool {
        matches!(&self.body, Body::Sparse(sparse) if sparse.blocks.is_dirty())
    }

    fn recovered(&self) -> Vec<(u64, u64)> {
        match &self.body {
            Body::Sparse(sparse) if self.raw.read_only() => sparse.blocks.dirty_parts(),
            _ => Vec::new(),
        }
    }

    fn journal_identity(&self) -> IoResult<Option<Identity>> {
        Identity::of(&self.raw, Format::Vhd, self.footer.uuid.0).map(Some)
    }

    async fn close(&self, port: &Port) -> IoResult<()> {
        self.complete(port).await
    }

    fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        Ok(self.parent().map(|parent| {
            let format = if parent.uuid == Uuid::NIL { Format::Raw } else { Format::Vhd };
            let name = |path: &PathBuf| ImageName { format, path: path.clone() };
            ParentNames {
                name: parent.name.clone(),
                candidates: parent.paths.iter().map(name).collect(),
            }
        }))
    }
}

/// The error for a device without a footer. A device may have grown below the image, or lost its footer when another
/// program crashed (tapdisk removes it while it has an image open). Only its owner knows where it ended before, and
/// whether it has a fixed disk: a guest may have written a fake footer within a fixed disk.
fn no_footer(raw: &Raw, footers: &Footers, bad: &Malformed) -> DiskError {
    let (path, seek) = (raw.path().display(), footers.end_at / format::SECTOR);
    let taken = match footers.is_taken {
        true => format!(
            "tapdisk has it open, or had when its host crashed: end that, and name it vhd:{path}; \
             or else "
        ),
        false => String::new(),
    };
    let help = format!(
        "{taken}check that a VHD is on it; if the device has grown, the footer is in the last sector that \
         it had before (number OLD); an image that you know to be dynamic or differencing has a \
         copy in sector 0, while a fixed one's guest writes there what it likes: dd if={path} \
         of={path} bs=512 count=1 conv=notrunc skip=OLD seek={seek}"
    );
    DiskError::new(ErrorKind::Damaged, format!("cannot open image {path}"), bad.to_string(), help)
}

fn encrypted(options: &OpenOptions) -> Encrypted {
    if options.as_libvhd { Encrypted::Opened } else { Encrypted::Refused }
}

fn fixed(footer: &Footer, end_at: u64) -> Result<Body, Malformed> {
    if footer.current_size > end_at {
        let why = format!("footer: a disk of {} bytes in {end_at}", footer.current_size);
        return Err(Malformed::new(end_at, why));
    }
    Ok(Body::Fixed)
}

fn sparse(
    raw: &Raw,
    footers: &Footers,
    footer: &Footer,
    meta: meta::Sparse,
    parent: Option<Parent>,
    commits: &Arc<Commits>,
    options: &OpenOptions,
) -> Result<Sparse, DiskError> {
    let (journal, records, name) = journal_of(raw, footer, options)?;
    let full_on_disk = AtomicBool::new(meta.full.iter().any(|bits| *bits != 0));
    let mut blocks = Blocks::new(Opened {
        layout: meta.layout,
        table_offset: meta.header.table_offset,
        disk_bytes: footer.current_size,
        differencing: footer.kind == Kind::Differencing,
        is_file: raw.is_file(),
        footer: footer.bytes(),
        copy_whole: footers.start.as_ref() == Ok(footer),
        last_sector: footers.end_at,
        places: meta.places,
        full: meta.full,
        damage: meta.damage,
        metadata_bytes: options.metadata_bytes,
        journal,
        commits: Arc::clone(commits),
    });
    if !records.is_empty() {
        tracing::info!(
            image = %raw.path().display(),
            records = records.len(),
            "recovering what the last process had answered and not flushed",
        );
        let written = records.iter().map(|record| record.key >> 32).collect();
        blocks.replay(records, !options.read_only).map_err(|why| {
            let parts =
                journal::parts(written, meta.header.block_bytes.into(), footer.current_size);
            let what = format!("cannot open image {}", raw.path().display());
            journal::lost(&what, &name, &parts).with_source(io::Error::other(why))
        })?;
    }
    let (header, batmap, forgetting) = (meta.header, meta.batmap, SharedLock::new());
    let key = Mutex::new(None);
    Ok(Sparse { header, batmap, full_on_disk, forgetting, blocks, parent, key })
}

/// The image's journal, the records that a dead process has left in it, and its name. A copy has the UUID of its
/// original, and nothing in it tells whether it was made before or after the journal's records.
fn journal_of(
    raw: &Raw,
    footer: &Footer,
    options: &OpenOptions,
) -> Result<(Journal, Vec<journal::Record>, String), DiskError> {
    let dir = options.state_dir.as_deref();
    let warn = || {
        if options.unseen_state {
            journal::warn_unseen(raw);
        }
    };
    if dir.is_none() {
        warn();
        return Ok((Journal::without(RECORD_WORDS, RECORDS), Vec::new(), String::new()));
    }
    let identity = Identity::of(raw, Format::Vhd, footer.uuid.0);
    let identity = identity.map_err(|e| meta::MetaError::Io(0, e).for_image(raw.path()))?;
    journal::survey(dir, &identity)?.check(raw.path())?;
    let (journal, records) = match options.read_only {
        false => match Journal::open(dir, &identity, RECORD_WORDS, RECORDS) {
            Err(e) if e.kind() == ErrorKind::InUse && options.locking == Locking::Toolstack => {
                tracing::warn!(
                    image = %raw.path().display(),
                    "another process of this host has it open for writing: what this one answers \
                     is lost if it dies before a flush",
                );
                (Journal::without(RECORD_WORDS, RECORDS), Vec::new())
            }
            opened => opened?,
        },
        true => {
            let records = match options.locking {
                Locking::Ours => Journal::peek(dir, &identity, RECORD_WORDS, RECORDS),
                Locking::Toolstack => Journal::peek_left(dir, &identity, RECORD_WORDS, RECORDS),
            };
            (Journal::without(RECORD_WORDS, RECORDS), records?)
        }
    };
    if records.is_empty() {
        warn();
    }
    Ok((journal, records, identity.name()))
}

/// One line for people: the kind, the size, and the medium.
impl fmt::Display for Vhd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.footer.kind;
        write!(f, "{kind} VHD of {} in {}", Human(self.bytes()), self.raw)
    }
}

impl fmt::Debug for Vhd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vhd").field("raw", &self.raw).field("footer", &self.footer).finish()
    }
}
