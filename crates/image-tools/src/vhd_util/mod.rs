//! What `vhd-util` does to VHDs, for XAPI's storage manager.
//!
//! The storage manager does the locking. It changes images that other processes read, and makes children of images that
//! other images stand on. So nothing here takes a lock or refuses an image that is in use; no mode is changed, and no
//! list of children is kept. An image in use by a writer is changed by that writer ([`VhdChange`]).

use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, OpenOptions, Parents, Port};
use ferrite_images::Image;
use ferrite_images::vhd::{self, KeyHash, Kind, ParentLink, Vhd, way_to};
use serde::{Deserialize, Serialize};

use super::io_context::IoContext;
use super::{ImageTools, broken, unsuitable};

mod coalesce;
mod make;
mod resize;

pub use make::{NewVhd, VhdParent};

/// Bytes of bitmaps that are kept of each open image: all of a coalesce takes 64 MiB at most.
const METADATA_BYTES: usize = 4 << 20;

/// Bytes that `vhd-util` rounds sizes up to: a block.
const ROUND_BYTES: u64 = 2 << 20;

/// A change of the headers of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VhdChange {
    /// Whether it is only a parent.
    Hidden(u8),
    /// A number that means nothing here.
    Marker(u8),
    /// The hash of the key that its data will be encrypted with.
    Key {
        /// The bytes that were hashed together with the key.
        nonce: [u8; 32],
        /// SHA-256 of both.
        hash: [u8; 32],
    },
    /// Another parent, by its canonical path. It reads as the old one, or hides what is different.
    Parent(VhdParent),
    /// A larger disk, within the room of its table: bytes, rounded up to whole blocks.
    Grow(u64),
    /// Its footer ends at so many bytes of the medium.
    End(u64),
    /// All its data are forgotten.
    Empty,
    /// Its footers are written, whole.
    Mend,
}

/// The properties of a VHD that its changes depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdSeen {
    /// The size of its disk.
    pub bytes: u64,
    /// It has blocks, and a table of them.
    pub has_table: bool,
    /// The size that its disk can grow to within its table.
    pub room_bytes: u64,
    /// The hash of the key of its data, if they are encrypted.
    pub key: Option<KeyHash>,
}

impl ImageTools<'_> {
    /// The options by which images are opened here: without a lock, and in any folder.
    fn vhd_options(&self, read_only: bool) -> OpenOptions {
        OpenOptions {
            unlocked: true,
            as_libvhd: true,
            format_said: true,
            parents: Parents::Any,
            metadata_bytes: METADATA_BYTES,
            ..ImageTools::even_parents(self.medium_options(read_only))
        }
    }

    /// Looks at a VHD.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn look_at_vhd(&self, path: &Path) -> Result<VhdSeen, DiskError> {
        let vhd = Vhd::open(path, &self.vhd_options(true))?;
        let block = u64::from(vhd.block_bytes().unwrap_or(0));
        Ok(VhdSeen {
            bytes: vhd.bytes(),
            has_table: vhd.table_entries().is_some(),
            room_bytes: vhd.table_entries().map_or(vhd.bytes(), |n| u64::from(n) * block),
            key: vhd.key(),
        })
    }

    /// A parent as a child names it that another process changes.
    ///
    /// # Errors
    /// The parent cannot be opened, or either one's folder cannot be found.
    pub fn link_of_vhd(&self, child: &Path, parent: &VhdParent) -> Result<ParentLink, DiskError> {
        let found = parent.look(self)?;
        let what = || format!("cannot name the parent of {}", child.display());
        let relative = way_to(child, &found.path)
            .map_err(|e| unsuitable(what(), &e, "name one that is there"))?;
        Ok(ParentLink { uuid: found.uuid, modified_unix_s: found.modified_unix_s, relative })
    }

    /// Changes the headers of a VHD, at once. After a crash they are the old or the new ones.
    ///
    /// # Errors
    /// It cannot be opened, or cannot have that; nothing was changed. Errors of the kernel.
    pub fn change_vhd(&self, path: &Path, change: &VhdChange) -> Result<(), DiskError> {
        let what = || format!("cannot change {}", path.display());
        let parent = match change {
            VhdChange::Parent(parent) => Some(parent.look(self)?),
            _ => None,
        };
        self.settle(path)?;
        let vhd = Vhd::open(path, &self.vhd_options(false))?;
        if parent.is_some() && vhd.footer().kind != Kind::Differencing {
            return Err(unsuitable(what(), "it has no parent", "name one that has a parent"));
        }
        self.on_vhd(vhd, what, async |vhd, port| match change {
            VhdChange::Hidden(hidden) => vhd.set_hidden(port, *hidden).await,
            VhdChange::Marker(marker) => vhd.set_marker(port, *marker).await,
            VhdChange::Key { nonce, hash } => {
                vhd.set_key(port, &KeyHash { nonce: *nonce, hash: *hash }).await
            }
            VhdChange::Parent(_) => match &parent {
                // Other processes may read the image: its blocks stay where they are.
                Some(parent) => vhd.relink(port, parent, 0).await,
                None => Ok(()),
            },
            VhdChange::Grow(bytes) => vhd.grow_in_table(port, rounded(*bytes)).await,
            VhdChange::End(bytes) => vhd.set_end(port, *bytes).await,
            VhdChange::Empty => vhd.empty(port).await,
            VhdChange::Mend => vhd.mend_footers(port).await,
        })
    }

    /// Runs steps on an open image, whose medium is file 0 of the port.
    fn on_vhd(
        &self,
        vhd: Vhd,
        what: impl Fn() -> String,
        steps: impl AsyncFnOnce(Vhd, &Port) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        let cannot = |e| failed(what(), e);
        let files = vhd.medium().files();
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(files).map_err(cannot)?;
        context.run(steps(vhd, &port)).map_err(cannot)
    }

    /// Puts the answered writes of a process that died into the image, before it is changed. If a process has it open
    /// or reads it, they are left: that process has them.
    fn settle(&self, path: &Path) -> Result<(), DiskError> {
        let Some(dir) = self.readable_state() else { return Ok(()) };
        let name = ImageName { format: Format::Vhd, path: path.to_owned() };
        let image = Image::open_alone(&name, &self.vhd_options(true))?;
        if image.layers().iter().all(|layer| matches!(layer.has_journal(Some(dir)), Ok(false))) {
            return Ok(());
        }
        drop(image);
        let options = OpenOptions { as_libvhd: true, ..self.options(false) };
        match Image::open_alone(&name, &ImageTools::even_parents(options)) {
            Ok(image) => self.close(&Disk::Image(image), path),
            Err(e) if e.kind() == ErrorKind::InUse => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// A size, rounded up to whole blocks.
pub fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ROUND_BYTES).unwrap_or(bytes)
}

/// The error of steps on an image.
fn failed(what: String, e: io::Error) -> DiskError {
    match e.kind() {
        io::ErrorKind::InvalidInput => {
            let help = "look at it with vhd-util query";
            unsuitable(what, e.to_string(), help).with_source(e)
        }
        _ => broken(what, e),
    }
}

/// The path by which libvhd names a file: without links, but a volume by its name in /dev/mapper, as a relative path
/// from one volume to another is meant from there.
///
/// # Errors
/// It cannot be found.
pub fn libvhd_path(path: &Path) -> io::Result<PathBuf> {
    vhd::canonical(path)
}
