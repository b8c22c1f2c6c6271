//! The map of a disk: the place of each part.

use ferrite_disk::pieces::{Piece, What, look};
use ferrite_disk_base::{DiskError, ImageName, SECTOR_BYTES};

use super::io_context::IoContext;
use super::{ImageTools, Kind, broken};

impl ImageTools<'_> {
    /// Passes each extent of a disk to `each`, in order, adjacent ones of a kind merged. `false`: stop.
    ///
    /// # Errors
    /// The image cannot be opened or its metadata not be read.
    pub fn map(
        &self,
        name: &ImageName,
        mut each: impl FnMut(&super::Extent) -> bool,
    ) -> Result<(), DiskError> {
        let disk = self.open(name, true)?;
        let cannot = |e| broken(format!("cannot map {}", name.path.display()), e);
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        let done = context.run(async {
            let end = disk.sectors() * SECTOR_BYTES;
            let (mut at, mut last): (u64, Option<super::Extent>) = (0, None);
            while at < end {
                let piece = look(&disk, &port, at, end - at).await?;
                let next = extent(at, piece);
                at += piece.len;
                match &mut last {
                    Some(extent) if extent.continues_with(&next) => {
                        extent.length_bytes += next.length_bytes;
                    }
                    Some(extent) if !each(extent) => return Ok(()),
                    _ => last = Some(next),
                }
            }
            if let Some(extent) = &last {
                each(extent);
            }
            Ok(())
        });
        done.map_err(cannot)
    }
}

fn extent(start_bytes: u64, piece: Piece) -> super::Extent {
    let (kind, offset_bytes) = match (piece.what, piece.layer) {
        (What::Data(offset), _) => (Kind::Data, Some(offset)),
        (What::Shared, _) => (Kind::Data, None),
        (What::Packed, _) => (Kind::Compressed, None),
        (What::Zeros, Some(_)) => (Kind::Zero, None),
        (What::Zeros, None) => (Kind::Unallocated, None),
    };
    let layer = piece.layer;
    super::Extent { start_bytes, length_bytes: piece.len, kind, layer, offset_bytes }
}
