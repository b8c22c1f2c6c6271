//! The data of an image into its parent.
//!
//! The image is only read, and hides all that is written into its parent. So it reads the same at any moment, and so
//! does each image above, also of processes that have the chain open: see `merge/copy.rs`, of whose rules these hold
//! for a VHD. After a kill the copy is made anew. The data that it had written are right, and are written again.
//!
//! The order in the parent is that of any write (`Blocks::commit`): data and new bitmaps, `fdatasync`, then the table.

use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, Format, ImageName, SECTOR_BYTES};
use ferrite_images::Image;
use ferrite_images::vhd::Vhd;

use super::VhdChange;
use crate::copy::{Copying, Mode};
use crate::{ImageTools, broken, unsuitable};

impl ImageTools<'_> {
    /// Copies the data of a VHD into its parent. Returns the sectors of 512 bytes that were copied.
    ///
    /// # Errors
    /// It has no parent, or the parent cannot be found or is too small. Errors of the kernel. It reads the same in any
    /// case.
    pub fn coalesce_vhd(&self, path: &Path) -> Result<u64, DiskError> {
        let what = || format!("cannot coalesce {}", path.display());
        let cannot = |e| broken(what(), e);
        self.settle(path)?;
        let parent = {
            let vhd = Vhd::open(path, &self.vhd_options(true))?;
            let parent = self.parent_of_vhd(&vhd)?.ok_or_else(|| {
                unsuitable(what(), "it has no parent", "there is nothing to merge it into")
            })?;
            let format = if parent.raw { Format::Raw } else { Format::Vhd };
            if !parent.raw {
                let below = Vhd::open(&parent.path, &self.vhd_options(true))?;
                vhd.accepts_parent(&below)?;
            }
            ImageName { format, path: parent.path }
        };
        let name = ImageName { format: Format::Vhd, path: path.to_owned() };
        let upper = Disk::Image(Image::open_alone(&name, &self.vhd_options(true))?);
        let lower = self.open_large_enough(&parent, &upper, what())?;
        let mut context = Copying::context(self).map_err(cannot)?;
        let copying = Copying::new(self, &mut context, Mode::Merge, &upper, &lower);
        let copying = copying.map_err(cannot)?;
        context.run(copying.run()).map_err(cannot)?;
        Ok(copying.copied_bytes() / SECTOR_BYTES)
    }

    /// The parent, open for writing without its own parents: these may be missing, and the tables of a long chain of
    /// large disks would take much memory.
    fn open_large_enough(
        &self,
        parent: &ImageName,
        upper: &Disk,
        what: String,
    ) -> Result<Disk, DiskError> {
        let options = self.vhd_options(false);
        let open = || match parent.format {
            Format::Vhd => Image::open_alone(parent, &options).map(Disk::Image),
            _ => Disk::open_image(parent, &options),
        };
        if parent.format == Format::Vhd {
            self.settle(&parent.path)?;
        }
        let disk = open()?;
        let (has, needed) = (disk.sectors() * SECTOR_BYTES, upper.sectors() * SECTOR_BYTES);
        if has >= needed {
            return Ok(disk);
        }
        match parent.format {
            Format::Raw => self.set_size(disk, parent, needed)?,
            _ if self.look_at_vhd(&parent.path)?.room_bytes >= needed => {
                drop(disk);
                self.change_vhd(&parent.path, &VhdChange::Grow(needed))?;
            }
            _ => {
                let why = format!("its parent has {has} bytes, and {needed} are needed");
                return Err(unsuitable(what, why, "vhd-util resize -j makes the parent larger"));
            }
        }
        open()
    }
}
