//! Changes the size of disks.

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look};
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, OpenOptions, SECTOR_BYTES};
use serde::{Deserialize, Serialize};

use super::create::done;
use super::files::is_write_protected;
use super::io_context::IoContext;
use super::{Done, ImageTools, broken, formats, refused, unsuitable};

/// The new size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NewSize {
    /// To so many bytes.
    To(u64),
    /// Larger by so many bytes.
    By(u64),
    /// Smaller by so many bytes.
    Less(u64),
}

/// The options of a resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Make the disk smaller, if nothing is allocated past its new end.
    pub shrink: bool,
    /// Resize an image that is read-only, or that others stand on.
    pub parents: bool,
    /// A guest uses the disk, though it waits now: it can only grow.
    pub in_use: bool,
}

impl From<bool> for Resize {
    fn from(force: bool) -> Resize {
        Resize { shrink: force, parents: force, in_use: false }
    }
}

impl NewSize {
    /// In bytes, of a disk that has `before` bytes.
    pub(crate) fn of(self, before: u64) -> u64 {
        match self {
            NewSize::To(bytes) => bytes,
            NewSize::By(more) => before.saturating_add(more),
            NewSize::Less(less) => before.saturating_sub(less),
        }
    }
}

impl From<u64> for NewSize {
    fn from(bytes: u64) -> NewSize {
        NewSize::To(bytes)
    }
}

impl ImageTools<'_> {
    /// Makes a disk larger, at once; or smaller, if that is allowed and nothing is allocated past its new end. A
    /// refused resize leaves no journal behind.
    ///
    /// # Errors
    /// `Refused`: data would be lost. Those of the image.
    pub fn resize(
        &self,
        name: &ImageName,
        size: impl Into<NewSize>,
        may: impl Into<Resize>,
    ) -> Result<Done, DiskError> {
        let may = may.into();
        let options = OpenOptions { even_parent: may.parents, ..self.options(false) };
        let done = self.resize_open(name, size.into(), may, &options);
        let is_refusal = |e: &DiskError| {
            matches!(e.kind(), ErrorKind::Refused | ErrorKind::Unsuitable | ErrorKind::Usage)
        };
        // It was opened for writing, which begins a journal: only closing it in good order takes that away. An
        // error here is not reported: the image is whole, and the refusal counts.
        if done.as_ref().is_err_and(is_refusal)
            && let Ok(disk) = ImageTools::open_to_write(name, &options)
        {
            let _ = self.close(&disk, &name.path);
        }
        done
    }

    fn resize_open(
        &self,
        name: &ImageName,
        size: NewSize,
        may: Resize,
        options: &OpenOptions,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot resize {}", name.path.display());
        if name.format.is_remote() {
            return Err(name.no_image());
        }
        if name.format == Format::Raw && self.is_device(&name.path) {
            let help = "resize the device (lvextend, for one)";
            return Err(unsuitable(what(), "a block device has the size that it has", help));
        }
        let protected = is_write_protected(&name.path).map_err(|e| broken(what(), e))?;
        if protected && !may.parents {
            let why =
                "it is read-only by its mode: an image that stands on it would change with it";
            return Err(refused(what(), why, "resize the leaf, or say --force"));
        }
        let disk = ImageTools::open_to_write(name, options)?;
        let before = disk.sectors() * SECTOR_BYTES;
        let bytes = size.of(before);
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || i64::try_from(bytes).is_err() {
            let why = format!("{bytes} bytes are no size of a disk");
            return Err(DiskError::new(ErrorKind::Usage, what(), why, "give a multiple of 512"));
        }
        if bytes < before && may.in_use {
            let what = format!("cannot shrink {}", name.path.display());
            let why = format!("its guest knows {}", Human(before));
            return Err(refused(what, why, "a disk in use can only grow"));
        }
        if bytes < before {
            self.check_tail(&disk, name, bytes, before, may.shrink)?;
        }
        let notes = formats::resize_notes(&disk, bytes);
        match bytes == before {
            // An interrupted resize may have got this far, and may not be durable.
            true => self.close(&disk, &name.path)?,
            false => self.set_size_and_keep_maps(disk, name, bytes)?,
        }
        Ok(done(name, bytes, notes))
    }

    /// Checks that nothing is allocated past the new end.
    fn check_tail(
        &self,
        disk: &Disk,
        name: &ImageName,
        bytes: u64,
        before: u64,
        may_shrink: bool,
    ) -> Result<(), DiskError> {
        let what = || format!("cannot shrink {}", name.path.display());
        let mut context = IoContext::new(self, 0).map_err(|e| broken(what(), e))?;
        let port = context.port(disk).map_err(|e| broken(what(), e))?;
        let data = context.run(async {
            let mut at = bytes;
            while at < before {
                let piece = look(disk, &port, at, before - at).await?;
                if piece.what != What::Zeros {
                    return Ok(Some(at));
                }
                at += piece.len;
            }
            Ok(None)
        });
        if let Some(at) = data.map_err(|e| broken(what(), e))? {
            let why = format!("there is data at byte {at}, behind its new end");
            let help = match name.format {
                // Its blocks stay allocated.
                Format::Vhd => {
                    "discard what is behind the new end in the guest (blkdiscard, fstrim), and \
                     convert the disk: the copy has nothing there, and can shrink"
                }
                _ => "discard what is behind the new end in the guest (blkdiscard, fstrim) first",
            };
            return Err(unsuitable(what(), why, help));
        }
        if !may_shrink {
            let why = format!("{} at its end would be gone", Human(before - bytes));
            let help = "nothing is allocated there: --shrink does it, if no partition ends there";
            return Err(refused(what(), why, help));
        }
        Ok(())
    }

    /// Resizes an open disk, and closes it.
    /// The order of writes is in `dirty/carry.rs`. The part that the disk grows by counts as changed.
    fn set_size_and_keep_maps(
        &self,
        disk: Disk,
        name: &ImageName,
        bytes: u64,
    ) -> Result<(), DiskError> {
        self.close(&disk, &name.path)?;
        let changing = self.begin_change(&disk)?;
        let _locked = disk.files();
        self.set_size(disk, name, bytes)?;
        changing.end(&name.path)
    }

    pub(super) fn set_size(
        &self,
        disk: Disk,
        name: &ImageName,
        bytes: u64,
    ) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot resize {}", name.path.display()), e);
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        context.run(async { Ok(formats::resize(&port, disk, bytes).await) }).map_err(cannot)?
    }
}
