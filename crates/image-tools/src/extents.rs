//! The map of a disk: the place of each part.

use std::ops::Range;

use ferrite_disk::pieces::{Piece, What, look};
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, SECTOR_BYTES};

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
        each: impl FnMut(&super::Extent) -> bool,
    ) -> Result<(), DiskError> {
        self.map_part(name, 0..u64::MAX, each)
    }

    /// [`map`](Self::map) of the bytes of the disk in `part`.
    ///
    /// # Errors
    /// The part does not begin and end with a sector. Those of [`map`](Self::map).
    pub fn map_part(
        &self,
        name: &ImageName,
        part: Range<u64>,
        mut each: impl FnMut(&super::Extent) -> bool,
    ) -> Result<(), DiskError> {
        let disk = self.open(name, true)?;
        let end = part.end.min(disk.sectors() * SECTOR_BYTES);
        if !(part.start.is_multiple_of(SECTOR_BYTES) && end.is_multiple_of(SECTOR_BYTES)) {
            let what = format!("cannot map a part of {}", name.path.display());
            let why = "it does not begin and end with a sector";
            return Err(DiskError::new(ErrorKind::Usage, what, why, "give multiples of 512"));
        }
        // Unallocated parts have gone through the whole chain.
        let deepest = disk.media().len().saturating_sub(1);
        let cannot = |e| broken(format!("cannot map {}", name.path.display()), e);
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        let done = context.run(async {
            let (mut at, mut last): (u64, Option<super::Extent>) = (part.start, None);
            while at < end {
                let piece = look(&disk, &port, at, end - at).await?;
                let next = extent(at, piece, deepest);
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

fn extent(start_bytes: u64, piece: Piece, deepest: usize) -> super::Extent {
    let (kind, offset_bytes) = match (piece.what, piece.layer) {
        (What::Data(offset), _) => (Kind::Data, Some(offset)),
        (What::Shared, _) => (Kind::Data, None),
        (What::Packed, _) => (Kind::Compressed, None),
        (What::Zeros, Some(_)) => (Kind::Zero, None),
        (What::Zeros, None) => (Kind::Unallocated, None),
    };
    let layer = piece.layer;
    let depth = layer.unwrap_or(deepest);
    super::Extent { start_bytes, length_bytes: piece.len, kind, layer, offset_bytes, depth }
}
