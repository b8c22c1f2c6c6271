//! One layer of a chain: the formats, and what each of them answers.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::Below;
use super::mapping::Mapping;
use crate::journal;
use crate::name::{Format, ImageName};
use crate::qcow2::Qcow2;
use crate::size::Human;
use crate::vhd::{Uuid, Vhd};
use crate::{DiskError, ErrorKind, OpenOptions, Parents, Port, Raw, SECTOR_BYTES};

/// Memory for the tables of a chain that stay there as a whole: 32 VHDs of 2,040 GiB each.
const MAX_TABLE_BYTES: u64 = 256 << 20;

/// One open image of a chain.
#[derive(Debug)]
pub(crate) enum Layer {
    /// Byte for byte; the last of a chain.
    Raw(Raw),
    /// Microsoft's format.
    Vhd(Vhd),
    /// QEMU's format.
    Qcow2(Box<Qcow2>),
}

impl Layer {
    /// The bytes of the virtual disk that this layer knows of.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Layer::Raw(raw) => raw.sectors() * SECTOR_BYTES,
            Layer::Vhd(vhd) => vhd.bytes(),
            Layer::Qcow2(q) => q.bytes(),
        }
    }

    /// Memory for tables that stay there as a whole.
    fn table_bytes(&self) -> u64 {
        match self {
            Layer::Raw(_) => 0,
            Layer::Vhd(vhd) => vhd.table_bytes(),
            Layer::Qcow2(qcow2) => qcow2.table_bytes(),
        }
    }

    /// The file or device that it is in.
    pub(crate) fn medium(&self) -> &Raw {
        match self {
            Layer::Raw(raw) => raw,
            Layer::Vhd(vhd) => vhd.medium(),
            Layer::Qcow2(q) => q.medium(),
        }
    }

    pub(crate) fn format(&self) -> Format {
        match self {
            Layer::Raw(_) => Format::Raw,
            Layer::Vhd(_) => Format::Vhd,
            Layer::Qcow2(_) => Format::Qcow2,
        }
    }

    /// Memory for metadata that can be read again.
    fn set_metadata_bytes(&mut self, bytes: usize) {
        match self {
            Layer::Raw(_) => {}
            Layer::Vhd(vhd) => vhd.set_metadata_bytes(bytes),
            Layer::Qcow2(q) => q.set_metadata_bytes(bytes),
        }
    }

    /// For a read. No waiting, no lock.
    pub(crate) fn find(&self, offset: u64, len: u64) -> Mapping {
        match self {
            Layer::Raw(raw) => find_raw(raw, offset, len),
            Layer::Vhd(vhd) => vhd.find(offset, len),
            Layer::Qcow2(q) => q.find(offset, len),
        }
    }

    /// For a write; may set space aside. Asked of the leaf only, as all that follow.
    pub(crate) fn place(&self, below: Below<'_>, offset: u64, len: u64) -> Mapping {
        match self {
            Layer::Raw(_) => Mapping::Data { offset, len },
            Layer::Vhd(vhd) => vhd.place(offset, len),
            Layer::Qcow2(q) => q.place(below, offset, len),
        }
    }

    /// The data of a placed write was given to the kernel: it is visible from now on, in memory
    /// and in the journal.
    pub(crate) fn wrote(&self, offset: u64, len: u64) {
        match self {
            Layer::Raw(_) => {}
            Layer::Vhd(vhd) => vhd.wrote(offset, len),
            Layer::Qcow2(q) => q.wrote(offset, len),
        }
    }

    /// Reads the metadata that [`find`](Self::find) lacked at `offset`.
    pub(crate) async fn load(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        match self {
            Layer::Raw(_) => Ok(()),
            Layer::Vhd(vhd) => vhd.load(port, file, offset, len).await,
            Layer::Qcow2(q) => q.load(port, file, offset).await,
        }
    }

    /// Makes [`place`](Self::place) answer for the range: metadata loaded, space in the file, room
    /// in the journal.
    pub(crate) async fn prepare(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Layer::Raw(_) => Ok(()),
            Layer::Vhd(vhd) => vhd.prepare(port, offset, len).await,
            Layer::Qcow2(q) => q.prepare(port, offset).await,
        }
    }

    /// Writes `buf`, at most what `place` said, and copies what is around it from below.
    pub(crate) async fn write_copying(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        match self {
            Layer::Raw(_) | Layer::Vhd(_) => port.io.write_all(port.files[0], offset, buf).await,
            Layer::Qcow2(q) => q.write_copying(port, below, offset, buf).await,
        }
    }

    /// Reads compressed data.
    pub(crate) async fn unpack(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        match self {
            Layer::Raw(_) | Layer::Vhd(_) => port.io.read_exact(file, offset, buf).await,
            Layer::Qcow2(q) => q.unpack(port, file, offset, buf).await,
        }
    }

    /// Flush: everything that was answered is durable, data and metadata. Once it has failed
    /// because of a sync, the next process finds what a power cut would have left: the guest was
    /// told. Where only a write was told, it finds what was answered.
    pub(crate) async fn commit(&self, port: &Port) -> io::Result<()> {
        let done = match self {
            Layer::Raw(raw) => raw.flush(&port.io, &port.files).await,
            Layer::Vhd(vhd) => vhd.commit(port).await,
            Layer::Qcow2(q) => q.commit(port).await,
        };
        self.flushed(done)
    }

    /// The end of a flush.
    fn flushed(&self, done: io::Result<()>) -> io::Result<()> {
        match self {
            Layer::Vhd(vhd) if done.is_err() => vhd.flush_failed(),
            Layer::Qcow2(q) if done.is_err() => q.flush_failed(),
            _ => {}
        }
        done
    }

    /// See [`Disk::discard_part`](crate::Disk::discard_part).
    pub(crate) async fn discard_part(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        match self {
            Layer::Raw(raw) => raw.discard_part(&port.io, &port.files, offset, len).await,
            Layer::Vhd(vhd) => vhd.discard_part(port, offset, len).await,
            Layer::Qcow2(q) => q.discard_part(port, below, offset, len).await,
        }
    }

    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        match self {
            Layer::Raw(raw) => raw.write_zeroes(&port.io, &port.files, offset, len, zeros).await,
            Layer::Vhd(vhd) => vhd.write_zeroes(port, below, offset, len, zeros).await,
            Layer::Qcow2(q) => q.write_zeroes(port, below, offset, len, zeros).await,
        }
    }

    /// Whether there is something for [`commit`](Self::commit) to do besides a sync. A look at
    /// memory.
    pub(crate) fn is_unsaved(&self) -> bool {
        match self {
            Layer::Raw(_) => false,
            Layer::Vhd(vhd) => vhd.is_unsaved(),
            Layer::Qcow2(q) => q.is_unsaved(),
        }
    }

    /// What a reader has taken over from a process that died: parts of the disk in bytes, start and
    /// length, that are at least in part of that.
    pub(crate) fn taken_over(&self) -> Vec<(u64, u64)> {
        match self {
            Layer::Raw(_) => Vec::new(),
            Layer::Vhd(vhd) => vhd.taken_over(),
            Layer::Qcow2(q) => q.taken_over(),
        }
    }

    /// Whether a process that died has answered what is not in its file yet.
    ///
    /// # Errors
    /// Its journal cannot be looked for.
    pub(crate) fn has_journal(&self, dir: Option<&Path>) -> Result<bool, DiskError> {
        let identity = match self {
            Layer::Raw(_) => return Ok(false),
            Layer::Vhd(vhd) => vhd.journal_identity(),
            Layer::Qcow2(q) => q.journal_identity(),
        };
        let identity = identity.map_err(|e| {
            let what = format!("cannot examine {}", self.medium().path().display());
            DiskError::new(ErrorKind::Io, what, e.to_string(), "check the kernel's log (dmesg)")
        })?;
        Ok(journal::survey(dir, &identity)?.own.is_some())
    }

    /// A commit, and everything that makes the image complete for other programs. It fails as
    /// [`commit`](Self::commit) does: a cluster that was copied may be lost with what was flushed
    /// long ago, and the next process must not put it in the place of the old one.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        let done = match self {
            Layer::Raw(raw) => raw.flush(&port.io, &port.files).await,
            Layer::Vhd(vhd) => vhd.close(port).await,
            Layer::Qcow2(q) => q.close(port).await,
        };
        self.flushed(done)
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layer::Raw(raw) => raw.fmt(f),
            Layer::Vhd(vhd) => vhd.fmt(f),
            Layer::Qcow2(q) => q.fmt(f),
        }
    }
}

/// Beyond the end of a raw layer there are zeros.
fn find_raw(raw: &Raw, offset: u64, len: u64) -> Mapping {
    match (raw.sectors() * SECTOR_BYTES).checked_sub(offset) {
        None | Some(0) => Mapping::Zeros { len },
        Some(left) => Mapping::Data { offset, len: len.min(left) },
    }
}

/// Opens an image and its parents. The leaf is opened as the options say, parents read-only.
pub(super) fn open_chain(name: &ImageName, options: &OpenOptions) -> Result<Vec<Layer>, DiskError> {
    match open_as_far(name, options)? {
        (layers, None) => Ok(layers),
        (_, Some(e)) => Err(e),
    }
}

/// The same, as far as it can be opened, and why it ends there.
pub(crate) fn open_as_far(
    name: &ImageName,
    options: &OpenOptions,
) -> Result<(Vec<Layer>, Option<DiskError>), DiskError> {
    let mut layers = vec![open_layer(name, options)?];
    // How many there are is known at the end; until then each gets little, so that a chain that
    // is made to harm takes little, too (threats.md T17).
    let metadata_bytes = options.metadata_bytes / 16;
    let parents = OpenOptions { read_only: true, metadata_bytes, opened: None, ..options.clone() };
    let end = loop {
        match open_parent(&layers, &parents) {
            Ok(Some(found)) => layers.push(found),
            Ok(None) => break None,
            Err(e) => break Some(e),
        }
        if let Err(e) = check_tables(&layers) {
            break Some(e);
        }
    };
    let share = options.metadata_bytes / layers.len();
    layers.iter_mut().for_each(|layer| layer.set_metadata_bytes(share));
    Ok((layers, end))
}

/// Tables that stay in memory as a whole add up: a file that is all hole can have 32 MiB of them
/// (threats.md T17).
fn check_tables(layers: &[Layer]) -> Result<(), DiskError> {
    let bytes: u64 = layers.iter().map(Layer::table_bytes).sum();
    if bytes <= MAX_TABLE_BYTES {
        return Ok(());
    }
    Err(DiskError::new(
        ErrorKind::Unsuitable,
        format!("cannot open image {}", layers[0].medium().path().display()),
        format!("the tables of its first {} images take {}", layers.len(), Human(bytes)),
        "coalesce some of the chain first; at most 256 MiB are used for the tables of a chain",
    ))
}

pub(super) fn open_layer(name: &ImageName, options: &OpenOptions) -> Result<Layer, DiskError> {
    match name.format {
        Format::Raw => Raw::open(&name.path, options).map(Layer::Raw),
        Format::Vhd => Vhd::open(&name.path, options).map(Layer::Vhd),
        Format::Qcow2 => {
            let medium = Raw::open_medium(&name.path, options)?;
            Ok(Layer::Qcow2(Box::new(Qcow2::open(medium, options)?)))
        }
    }
}

/// What an image says of its parent: what that is called, and where it may be.
pub(crate) fn parent_names(child: &Layer) -> Result<Option<(String, Vec<ImageName>)>, DiskError> {
    Ok(match child {
        Layer::Raw(_) => None,
        Layer::Qcow2(child) => {
            child.parent()?.map(|parent| (parent.path.display().to_string(), vec![parent]))
        }
        Layer::Vhd(child) => child.parent().map(|parent| {
            let format = if parent.uuid == Uuid::NIL { Format::Raw } else { Format::Vhd };
            let name = |path: &PathBuf| ImageName { format, path: path.clone() };
            (parent.name.clone(), parent.paths.iter().map(name).collect())
        }),
    })
}

/// The parent of the last layer, if it has one.
fn open_parent(layers: &[Layer], options: &OpenOptions) -> Result<Option<Layer>, DiskError> {
    let Some(child) = layers.last() else { return Ok(None) };
    let Some((name, names)) = parent_names(child)? else { return Ok(None) };
    let child_path = child.medium().path();
    let refuse = |why: String, help: &str| -> Result<Option<Layer>, DiskError> {
        let what = format!("cannot open image {}", child_path.display());
        Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
    };
    if layers.len() >= options.max_layers {
        let number = layers.len();
        let why = format!("it has a parent, and is number {number} of its chain already");
        let help =
            format!("make the chain shorter: ferrite image coalesce {}", child_path.display());
        return refuse(why, &help);
    }
    let mut last = None;
    for candidate in names.iter().filter(|candidate| candidate.path.exists()) {
        if is_layer(layers, &candidate.path) {
            let path = candidate.path.display();
            let why = format!("its parent {path} is itself or one of its children");
            return refuse(why, "the chain is damaged: find the image that it was made on");
        }
        if is_no_medium(&candidate.path) {
            let why = format!("its parent {} is no file or device", candidate.path.display());
            let help = "put the parent back to where it was when the image was made";
            last = last.or(refuse(why, help).err());
            continue;
        }
        let leaf = layers[0].medium().path();
        if !options.parents.allow(leaf, &candidate.path).unwrap_or(false) {
            last = last.or(Some(Parents::refusal(child_path, &candidate.path)));
            continue;
        }
        let accepted = open_layer(candidate, options).and_then(|layer| {
            check_opened(&layers[0], child_path, &candidate.path, &layer, &options.parents)?;
            if let (Layer::Vhd(child), Layer::Vhd(parent)) = (child, &layer) {
                child.accepts_parent(parent)?;
            }
            Ok(layer)
        });
        match accepted {
            Ok(layer) => return Ok(Some(layer)),
            Err(e) => last = last.or(Some(e)),
        }
    }
    let paths: Vec<_> = names.iter().map(|candidate| &candidate.path).collect();
    match last {
        Some(e) => Err(e),
        None => refuse(
            format!("its parent {name:?} is at none of {paths:?}"),
            "put the parent back to where it was when the image was made",
        ),
    }
}

/// Whether there is a folder, a pipe or a socket.
fn is_no_medium(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| {
        let kind = meta.file_type();
        kind.is_dir() || kind.is_fifo() || kind.is_socket()
    })
}

/// Whether what was opened by a parent's name may be one: the name may have led elsewhere when it
/// was checked, since whoever has a folder can swap links in it at any moment.
fn check_opened(
    leaf: &Layer,
    child: &Path,
    path: &Path,
    parent: &Layer,
    parents: &Parents,
) -> Result<(), DiskError> {
    match parents.allow_opened(leaf.medium().fd(), path, parent.medium().fd()) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => Err(Parents::refusal(child, path)),
    }
}

/// Whether `path` is open as one of the layers.
fn is_layer(layers: &[Layer], path: &Path) -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let Ok(meta) = path.metadata() else { return false };
    let inode = match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    };
    layers.iter().any(|layer| layer.medium().inode() == inode)
}
