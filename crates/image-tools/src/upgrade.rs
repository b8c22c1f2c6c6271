//! Upgrades images to later versions of their formats, in place.

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, Format, ImageName, journal};
use ferrite_images::{Image, open_medium, qcow2};

use super::create::done;
use super::io_context::IoContext;
use super::{Done, ImageTools, broken, unsuitable};

impl ImageTools<'_> {
    /// Converts a qcow2 image of version 2 to version 3. The journal of a killed backend is written into it first.
    ///
    /// # Errors
    /// It is of another format, is damaged, or has a feature that prevents it. Those of the image.
    pub fn upgrade(&self, name: &ImageName) -> Result<Done, DiskError> {
        let what = || format!("cannot amend {}", name.path.display());
        if name.format != Format::Qcow2 {
            let help = "ferrite image convert makes a qcow2 copy of it";
            return Err(unsuitable(what(), "only qcow2 has versions to choose from", help));
        }
        // Its parents are not opened: they may be missing.
        let disk = Disk::Image(Image::open_alone(name, &self.options(false))?);
        self.close(&disk, &name.path)?;
        let bytes = disk.sectors() * ferrite_disk_base::SECTOR_BYTES;
        drop(disk);
        let raw = open_medium(&name.path, &self.medium_options(false))?;
        if journal::any_at(self.readable_state(), &raw)? {
            let why = "a backend has used it just now, and was killed";
            return Err(unsuitable(what(), why, "run the same command again"));
        }
        let mut context = IoContext::new(self, 0).map_err(|e| broken(what(), e))?;
        let port = context.port_of(raw.files()).map_err(|e| broken(what(), e))?;
        let changed = context.run(async { Ok(qcow2::upgrade(&port, &raw).await) });
        let notes = match changed.map_err(|e| broken(what(), e))?? {
            true => Vec::new(),
            false => vec!["it was of version 3 before".to_owned()],
        };
        Ok(done(name, bytes, notes))
    }
}
