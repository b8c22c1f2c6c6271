//! The properties of an image, and the space that it takes.

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, Format, ImageName, SECTOR_BYTES};
use ferrite_images::{Layer, open_as_far};

use super::{ImageTools, Info, LayerInfo, Usage, formats};

impl ImageTools<'_> {
    /// The properties of an image and its parents. Their data are not read.
    ///
    /// # Errors
    /// It cannot be opened, or one of its parents.
    pub fn info(&self, name: &ImageName) -> Result<Info, DiskError> {
        match self.info_as_far(name)? {
            (info, None) => Ok(info),
            (_, Some(e)) => Err(e),
        }
    }

    /// The properties of as much of the chain as can be opened, and why it ends there.
    ///
    /// # Errors
    /// The image itself cannot be opened.
    pub fn info_as_far(&self, name: &ImageName) -> Result<(Info, Option<DiskError>), DiskError> {
        if matches!(
            name.format,
            Format::Raw | Format::Store | Format::Nbd | Format::Rbd | Format::Pool
        ) {
            let disk = self.open(name, true)?;
            return Ok((self.info_of(&disk)?, None));
        }
        let (layers, end) = open_as_far(name, &self.options(true))?;
        let chain = layers.iter().map(|layer| self.layer_info(layer)).collect::<Result<_, _>>()?;
        let incomplete = end.as_ref().map(|e| e.why().to_owned());
        Ok((Info { virtual_bytes: layers[0].bytes(), chain, incomplete }, end))
    }

    pub(super) fn info_of(&self, disk: &Disk) -> Result<Info, DiskError> {
        let virtual_bytes = disk.sectors() * SECTOR_BYTES;
        let chain = match disk {
            Disk::Mirror(mirror) => return self.info_of(mirror.source()),
            Disk::Null(_) => Vec::new(),
            Disk::Remote(remote) => vec![formats::remote_info(remote, virtual_bytes)],
            Disk::Raw(raw) => vec![formats::raw_info(raw)?],
            Disk::Store(volume) => vec![formats::volume_info(volume, virtual_bytes)?],
            Disk::Elsewhere(volume) => vec![formats::elsewhere_info(volume, virtual_bytes)?],
            Disk::Image(image) => image
                .layers()
                .iter()
                .map(|layer| self.layer_info(layer))
                .collect::<Result<_, _>>()?,
        };
        Ok(Info { virtual_bytes, chain, incomplete: None })
    }

    fn layer_info(&self, layer: &Layer) -> Result<LayerInfo, DiskError> {
        let journal = layer.has_journal(self.readable_state())?;
        Ok(LayerInfo { journal, ..formats::layer_info(layer)? })
    }

    /// The space that a disk takes: in its images, and on the file systems.
    ///
    /// # Errors
    /// As [`info`](ImageTools::info).
    pub fn du(&self, name: &ImageName) -> Result<Usage, DiskError> {
        let Info { virtual_bytes, chain, .. } = self.info(name)?;
        Ok(Usage {
            virtual_bytes,
            allocated_bytes: chain.iter().map(|l| l.allocated_bytes).sum(),
            file_bytes: chain.iter().map(|l| l.file_bytes).sum(),
            disk_bytes: chain.iter().map(|l| l.disk_bytes).sum(),
            chain,
        })
    }
}
