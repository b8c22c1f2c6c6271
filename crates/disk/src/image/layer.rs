//! One layer of a chain: the formats, and what each of them answers.

use std::fmt;
use std::io;

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::Below;
use crate::name::{Format, ImageName};
use crate::{DiskError, ErrorKind, OpenOptions, Port, Raw, SECTOR_BYTES};

/// What a layer knows about the beginning of a range. Lengths are bytes from its start, never 0;
/// offsets are in the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is there. For a write: write it there, then say so with [`Layer::wrote`].
    Data { offset: u64, len: u64 },
    /// It reads as zeros.
    Zeros { len: u64 },
    /// This layer has nothing: ask the one below.
    Below { len: u64 },
    /// It takes I/O to know: [`Layer::load`], for a write [`Layer::prepare`], then ask again.
    Slow { len: u64 },
    /// It is compressed: only [`Layer::unpack`] reads it.
    Packed { len: u64 },
    /// A write needs what is around it copied: only [`Layer::write_copying`] writes it.
    Copy { len: u64 },
}

/// One open image of a chain.
#[derive(Debug)]
pub(crate) enum Layer {
    /// Byte for byte; the last of a chain.
    Raw(Raw),
}

impl Layer {
    /// The bytes of the virtual disk that this layer knows of.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Layer::Raw(raw) => raw.sectors() * SECTOR_BYTES,
        }
    }

    /// The file or device that it is in.
    pub(crate) fn medium(&self) -> &Raw {
        match self {
            Layer::Raw(raw) => raw,
        }
    }

    pub(crate) fn format(&self) -> Format {
        match self {
            Layer::Raw(_) => Format::Raw,
        }
    }

    /// For a read. No waiting, no lock.
    pub(crate) fn find(&self, offset: u64, len: u64) -> Found {
        match self {
            Layer::Raw(raw) => find_raw(raw, offset, len),
        }
    }

    /// For a write; may set space aside. Asked of the leaf only, as all that follow.
    pub(crate) fn place(&self, below: Below<'_>, offset: u64, len: u64) -> Found {
        let _ = below;
        match self {
            Layer::Raw(_) => Found::Data { offset, len },
        }
    }

    /// The data of a placed write was given to the kernel: it is visible from now on, in memory
    /// and in the journal.
    pub(crate) fn wrote(&self, offset: u64, len: u64) {
        let _ = (offset, len);
        match self {
            Layer::Raw(_) => {}
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
        let _ = (port, file, offset, len);
        match self {
            Layer::Raw(_) => Ok(()),
        }
    }

    /// Makes [`place`](Self::place) answer for the range: metadata loaded, space in the file, room
    /// in the journal.
    pub(crate) async fn prepare(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let _ = (port, below, offset, len);
        match self {
            Layer::Raw(_) => Ok(()),
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
        let _ = below;
        match self {
            Layer::Raw(_) => port.io.write_all(port.files[0], offset, buf).await,
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
            Layer::Raw(_) => port.io.read_exact(file, offset, buf).await,
        }
    }

    /// Flush: everything that was answered is durable, data and metadata.
    pub(crate) async fn commit(&self, port: &Port) -> io::Result<()> {
        match self {
            Layer::Raw(raw) => raw.flush(&port.io, &port.files).await,
        }
    }

    pub(crate) async fn discard(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let _ = below;
        match self {
            Layer::Raw(raw) => raw.discard(&port.io, &port.files, offset, len).await,
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
        let _ = below;
        match self {
            Layer::Raw(raw) => raw.write_zeroes(&port.io, &port.files, offset, len, zeros).await,
        }
    }

    /// A commit, and everything that makes the image complete for other programs.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        match self {
            Layer::Raw(_) => self.commit(port).await,
        }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layer::Raw(raw) => raw.fmt(f),
        }
    }
}

/// Beyond the end of a raw layer there are zeros.
fn find_raw(raw: &Raw, offset: u64, len: u64) -> Found {
    match (raw.sectors() * SECTOR_BYTES).checked_sub(offset) {
        None | Some(0) => Found::Zeros { len },
        Some(left) => Found::Data { offset, len: len.min(left) },
    }
}

/// Opens an image and its parents. The leaf is opened as the options say, parents read-only.
pub(super) fn open_chain(name: &ImageName, options: &OpenOptions) -> Result<Vec<Layer>, DiskError> {
    match name.format {
        Format::Raw => Ok(vec![Layer::Raw(Raw::open(&name.path, options)?)]),
        format @ (Format::Vhd | Format::Qcow2) => Err(DiskError::new(
            ErrorKind::Unsuitable,
            format!("cannot open image {}", name.path.display()),
            format!("images in format {format} are not served by this build"),
            "use a raw image",
        )),
    }
}
