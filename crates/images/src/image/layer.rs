//! One layer of a chain, whatever its format is.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};

use ferrite_disk_base::{
    DiskError, Epochs, ErrorKind, Format, ImageName, OpenOptions, Port, Raw, SyncWitness, journal,
};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::backing::Backing;
use super::format::{ImageFormat, ParentNames};
use super::mapping::Mapping;
use crate::open_raw;
use crate::qcow2::Qcow2;
use crate::vhd::Vhd;

/// One open image of a chain, whatever its format is. [`ImageFormat`] is its interface.
#[derive(Debug)]
pub enum Layer {
    /// A raw image, the last of a chain.
    Raw(Raw),
    /// Microsoft's format.
    Vhd(Vhd),
    /// QEMU's format.
    Qcow2(Box<Qcow2>),
}

/// Dispatches to the layer's format: the one place for this. With `as mut` the layer is borrowed mutably.
#[macro_export]
macro_rules! each_format {
    ($layer:expr, $image:ident $(as $mut:tt)? => $done:expr) => {
        match $layer {
            $crate::Layer::Raw(image) => {
                let $image: &$($mut)? _ = image;
                $done
            }
            $crate::Layer::Vhd(image) => {
                let $image: &$($mut)? $crate::vhd::Vhd = image;
                $done
            }
            $crate::Layer::Qcow2(image) => {
                let $image: &$($mut)? $crate::qcow2::Qcow2 = image;
                $done
            }
        }
    };
}

impl Layer {
    /// Opens one image, without its parents.
    pub(super) fn open(name: &ImageName, options: &OpenOptions) -> Result<Layer, DiskError> {
        let path = &name.path;
        Ok(match name.format {
            // A layer of a chain has whole sectors: only a raw disk by itself may end inside one.
            Format::Raw => {
                let options = OpenOptions { odd_size: false, ..options.clone() };
                Layer::Raw(open_raw(path, &options)?)
            }
            Format::Vhd => Layer::Vhd(Vhd::open(path, options)?),
            Format::Qcow2 => Layer::Qcow2(Box::new(Qcow2::open(path, options)?)),
            Format::Store | Format::Nbd | Format::Rbd | Format::Pool => return Err(name.no_image()),
        })
    }

    /// The name of its format.
    pub fn format(&self) -> Format {
        each_format!(self, image => ImageFormat::format(image))
    }

    /// The size of the virtual disk of this layer, in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        each_format!(self, image => ImageFormat::bytes(image))
    }

    /// The file or device of the image.
    #[inline]
    pub fn medium(&self) -> &Raw {
        each_format!(self, image => ImageFormat::medium(image))
    }

    pub(super) fn table_bytes(&self) -> u64 {
        each_format!(self, image => ImageFormat::table_bytes(image))
    }

    /// See [`ImageFormat::flaws`].
    pub fn flaws(&self) -> Vec<String> {
        each_format!(self, image => ImageFormat::flaws(image))
    }

    pub(super) fn set_metadata_bytes(&mut self, bytes: usize) {
        each_format!(self, image as mut => ImageFormat::set_metadata_bytes(image, bytes))
    }

    /// The possible places of its parent, as the image names it. `None`: it has no parent.
    ///
    /// # Errors
    /// It has a parent, and its name cannot be read.
    pub fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        each_format!(self, image => ImageFormat::parents(image))
    }

    /// Refuses a parent that is not the one recorded in the image.
    pub(super) fn accepts_parent(&self, parent: &Layer) -> Result<(), DiskError> {
        match (self, parent) {
            (Layer::Vhd(child), Layer::Vhd(parent)) => child.accepts_parent(parent),
            _ => Ok(()),
        }
    }

    /// Finds the beginning of a range for a read, from memory alone. `offset` and `len` are in bytes of the disk.
    pub fn find(&self, offset: u64, len: u64) -> Mapping {
        each_format!(self, image => ImageFormat::find(image, offset, len))
    }

    pub(crate) fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping {
        each_format!(self, image => ImageFormat::reserve(image, below, offset, len))
    }

    pub(crate) fn written(&self, offset: u64, len: u64) {
        each_format!(self, image => ImageFormat::written(image, offset, len))
    }

    /// Reads the metadata that [`find`](Self::find) lacked.
    ///
    /// # Errors
    /// Errors of the kernel. `InvalidData`: the metadata is damaged.
    pub async fn load(&self, port: &Port, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        each_format!(self, image => ImageFormat::load(image, port, file, offset, len).await)
    }

    pub(crate) async fn prepare(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        each_format!(self, image => ImageFormat::prepare(image, port, offset, len).await)
    }

    pub(crate) async fn write_copying(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        each_format!(self, image => ImageFormat::write_copying(image, port, below, offset, buf).await)
    }

    pub(crate) async fn unpack(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        each_format!(self, image => ImageFormat::unpack(image, port, file, offset, buf).await)
    }

    pub(crate) async fn commit(&self, port: &Port) -> io::Result<()> {
        each_format!(self, image => ImageFormat::commit(image, port).await)
    }

    /// Commits, and makes the image complete for other programs.
    ///
    /// # Errors
    /// As [`ImageFormat::close`].
    pub async fn close(&self, port: &Port) -> io::Result<()> {
        each_format!(self, image => ImageFormat::close(image, port).await)
    }

    pub(crate) fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        each_format!(self, image => ImageFormat::witness_syncs(image, witness))
    }

    pub(crate) fn is_faulty(&self) -> bool {
        each_format!(self, image => ImageFormat::is_faulty(image))
    }

    pub(crate) async fn discard_part(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        each_format!(self, image => ImageFormat::discard_part(image, port, below, offset, len).await)
    }

    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        each_format!(self, image => ImageFormat::write_zeroes(image, port, below, offset, len, zeros).await)
    }

    pub(super) fn epochs(&self) -> Option<&Arc<Epochs>> {
        each_format!(self, image => ImageFormat::epochs(image))
    }

    pub(crate) fn is_dirty(&self) -> bool {
        each_format!(self, image => ImageFormat::is_dirty(image))
    }

    pub(crate) fn recovered(&self) -> Vec<(u64, u64)> {
        each_format!(self, image => ImageFormat::recovered(image))
    }

    /// Refuses an image that can be read, and must be repaired before it is written to.
    ///
    /// # Errors
    /// It is one; the text tells why.
    pub fn check_writable(&self) -> Result<(), DiskError> {
        each_format!(self, image => ImageFormat::check_writable(image))
    }

    /// Whether a dead process has left answered writes in a journal that are not in the file yet.
    ///
    /// # Errors
    /// The journal cannot be looked for.
    pub fn has_journal(&self, dir: Option<&Path>) -> Result<bool, DiskError> {
        let identity =
            each_format!(self, image => ImageFormat::journal_identity(image)).map_err(|e| {
                let what = format!("cannot examine {}", self.medium().path().display());
                DiskError::new(ErrorKind::Io, what, e.to_string(), "check the kernel's log (dmesg)")
            })?;
        match identity {
            Some(identity) => journal::has_own(dir, &identity),
            None => Ok(false),
        }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        each_format!(self, image => fmt::Display::fmt(image, f))
    }
}
