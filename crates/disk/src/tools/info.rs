//! What there is to know about an image, and what it takes.

use std::path::Path;

use super::files::is_write_protected;
use super::{ImageTools, Info, LayerInfo, Usage, broken, formats};
use crate::image::{Layer, open_as_far};
use crate::{Disk, DiskError, Format, ImageName, Raw, SECTOR_BYTES};

impl ImageTools<'_> {
    /// What an image and its parents say about themselves. Their data are not read.
    ///
    /// # Errors
    /// It cannot be opened, or one of its parents.
    pub fn info(&self, name: &ImageName) -> Result<Info, DiskError> {
        match self.info_as_far(name)? {
            (info, None) => Ok(info),
            (_, Some(e)) => Err(e),
        }
    }

    /// The same of as much of the chain as can be opened, and why it ends there.
    ///
    /// # Errors
    /// The image itself cannot be opened.
    pub fn info_as_far(&self, name: &ImageName) -> Result<(Info, Option<DiskError>), DiskError> {
        if name.format == Format::Raw {
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
            Disk::Null(_) => Vec::new(),
            Disk::Raw(raw) => vec![raw_info(raw)?],
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

    /// What a disk takes: in its images, and on the file systems.
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

pub(super) fn raw_info(raw: &Raw) -> Result<LayerInfo, DiskError> {
    let disk_bytes = examined(raw, raw.disk_bytes())?;
    Ok(LayerInfo {
        virtual_bytes: raw.sectors() * SECTOR_BYTES,
        allocated_bytes: Some(disk_bytes.min(raw.sectors() * SECTOR_BYTES)),
        ..of_medium(raw, Format::Raw)?
    })
}

/// What the file says.
pub(super) fn of_medium(raw: &Raw, format: Format) -> Result<LayerInfo, DiskError> {
    let path: &Path = raw.path();
    Ok(LayerInfo {
        path: path.display().to_string(),
        format: format.name(),
        kind: None,
        virtual_bytes: 0,
        allocated_bytes: None,
        file_bytes: examined(raw, raw.bytes_now())?,
        disk_bytes: examined(raw, raw.disk_bytes())?,
        unit_bytes: None,
        uuid: None,
        creator: None,
        snapshots: Vec::new(),
        journal: false,
        read_only: examined(raw, is_write_protected(path))?,
    })
}

pub(super) fn examined<T>(raw: &Raw, found: std::io::Result<T>) -> Result<T, DiskError> {
    found.map_err(|e| broken(format!("cannot examine {}", raw.path().display()), e))
}
