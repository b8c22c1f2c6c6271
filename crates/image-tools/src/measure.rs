//! The room that an image takes in a format, before it is made.

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look};
use ferrite_disk_base::{DiskError, Format, ImageName, SECTOR_BYTES};
use serde::Serialize;

use super::io_context::IoContext;
use super::{ImageTools, NewImage, broken};

/// A qcow2's clusters and a VHD's blocks, unless others are asked for.
const CLUSTER_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4096;

/// The length of a file for an image, with the names that `qemu-img measure` has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measured {
    /// With the data that the disk has now.
    pub required: u64,
    /// With data everywhere.
    pub fully_allocated: u64,
}

impl Measured {
    /// Of a disk of `bytes` without data, in an image with these properties.
    pub fn of_empty(bytes: u64, format: Format, new: &NewImage) -> Measured {
        Measured::of(bytes, 0, format, new)
    }

    /// `units` have data.
    fn of(bytes: u64, units: u64, format: Format, new: &NewImage) -> Measured {
        let unit = unit_of(format, new.unit_bytes);
        let all = bytes.div_ceil(unit);
        let of = |units| match format {
            Format::Raw | Format::Store | Format::Nbd | Format::Rbd | Format::Pool => bytes,
            // The footer.
            Format::Vhd if new.fixed => bytes + SECTOR_BYTES,
            Format::Vhd => vhd_bytes(all, units, unit),
            Format::Qcow2 => qcow2_bytes(all, units, unit, if new.extended_l2 { 16 } else { 8 }),
        };
        Measured { required: of(units), fully_allocated: of(all) }
    }
}

fn unit_of(format: Format, unit: Option<u32>) -> u64 {
    let usual = if format == Format::Qcow2 { CLUSTER_BYTES } else { BLOCK_BYTES };
    unit.map_or(usual, u64::from)
}

/// Two footers, the header, the table of blocks; and blocks, each with a bitmap of its sectors.
fn vhd_bytes(all: u64, units: u64, unit: u64) -> u64 {
    let sectors = |bytes: u64| bytes.next_multiple_of(SECTOR_BYTES);
    let bitmap = sectors((unit / SECTOR_BYTES).div_ceil(8));
    let tables = SECTOR_BYTES + 1024 + sectors(4 * all);
    // Data begin with a page of the file; an image without any has room for a block.
    let blocks = match units {
        0 => tables + bitmap + unit,
        _ => {
            let first = (tables + bitmap).next_multiple_of(PAGE_BYTES) + unit;
            first + (units - 1) * (bitmap.next_multiple_of(PAGE_BYTES) + unit)
        }
    };
    blocks + SECTOR_BYTES
}

/// The header, L1, L2 for the whole disk, clusters with data; and refcounts of 16 bits for all clusters there would be.
fn qcow2_bytes(all: u64, units: u64, unit: u64, entry_bytes: u64) -> u64 {
    let tables = all.div_ceil(unit / entry_bytes);
    let l1 = (tables * 8).div_ceil(unit);
    let counted = 1 + l1 + tables + all;
    // Refcounts are counted, too.
    let mut refcounts = 0;
    loop {
        let blocks = (counted + refcounts).div_ceil(unit / 2);
        let more = blocks + (blocks * 8).div_ceil(unit);
        if more == refcounts {
            return (counted + refcounts - all + units) * unit;
        }
        refcounts = more;
    }
}

impl ImageTools<'_> {
    /// Of a copy of a disk in an image with these properties.
    ///
    /// # Errors
    /// It cannot be opened, or its metadata not be read.
    pub fn measure(
        &self,
        name: &ImageName,
        format: Format,
        new: &NewImage,
    ) -> Result<Measured, DiskError> {
        let disk = self.open(name, true)?;
        let unit = unit_of(format, new.unit_bytes);
        let units = self.units(&disk, name, unit)?;
        Ok(Measured::of(disk.sectors() * SECTOR_BYTES, units, format, new))
    }

    /// How many units of a disk have data.
    fn units(&self, disk: &Disk, name: &ImageName, unit: u64) -> Result<u64, DiskError> {
        let cannot = |e| broken(format!("cannot measure {}", name.path.display()), e);
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(disk).map_err(cannot)?;
        let end = disk.sectors() * SECTOR_BYTES;
        let counted = context.run(async {
            // The end of the units that have been counted.
            let (mut at, mut units, mut done) = (0, 0, 0u64);
            while at < end {
                let piece = look(disk, &port, at, end - at).await?;
                let to = at + piece.len;
                if piece.what != What::Zeros {
                    let (first, last) = ((at / unit).max(done), to.div_ceil(unit));
                    units += last.saturating_sub(first);
                    done = done.max(last);
                }
                at = to;
            }
            Ok(units)
        });
        counted.map_err(cannot)
    }
}
