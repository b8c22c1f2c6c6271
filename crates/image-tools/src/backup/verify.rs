//! Compares backups with the hashes of their manifests.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use ferrite_disk::Disk;
use ferrite_disk::pieces::look_at_first;
use ferrite_disk_base::dirty::REGION_BYTES;
use ferrite_disk_base::{DiskError, ErrorKind, Port, SECTOR_BYTES};

use super::Verified;
use super::folder::{Entries, Folder, hashes};
use super::manifest::{Hash, Manifest};
use super::regions::{Plan, Regions};
use crate::{ImageTools, broken};

impl ImageTools<'_> {
    /// Verifies these backups. Of each the regions are read that it has in its manifest or in its data; the others are
    /// those of its parent.
    pub(super) fn verify_each(
        &self,
        folder: &Folder,
        entries: &Entries,
        names: &[String],
    ) -> Result<Vec<Verified>, DiskError> {
        let mut all = Vec::new();
        for name in names {
            all.push(match self.verify_one(folder, entries, name) {
                Ok(verified) => verified,
                Err(e) if e.kind() == ErrorKind::Interrupted => return Err(e),
                Err(e) => Verified {
                    name: name.clone(),
                    read_bytes: 0,
                    damaged_regions: Vec::new(),
                    why: Some(e.why().to_owned()),
                },
            });
        }
        Ok(all)
    }

    fn verify_one(
        &self,
        folder: &Folder,
        entries: &Entries,
        name: &str,
    ) -> Result<Verified, DiskError> {
        let cannot = |e| broken(format!("cannot verify backup {name}"), e);
        let chain = folder.chain(entries, Some(name))?;
        let disk = self.open_chain(folder, &chain)?;
        let bytes = disk.sectors() * SECTOR_BYTES;
        let expected = hashes(&chain);
        let mut context = Regions::context(self).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        let ranges = context.run(own(&disk, &port, chain[0], bytes)).map_err(cannot)?;
        let plan = Plan {
            from: &disk,
            to: None,
            ranges,
            done: BTreeMap::<u32, Hash>::new(),
            expected: Some(&expected),
            same: None,
            zeros_have_hashes: false,
            total: (0, bytes),
        };
        let regions = Regions::new(self, &mut context, plan).map_err(cannot)?;
        context.run(regions.run(u64::MAX)).map_err(cannot)?;
        Ok(Verified {
            name: name.to_owned(),
            read_bytes: regions.read_bytes(),
            damaged_regions: regions.wrong(),
            why: None,
        })
    }
}

/// The regions that a backup's manifest names, and those in which its own data have something.
async fn own(
    disk: &Disk,
    port: &Port,
    manifest: &Manifest,
    bytes: u64,
) -> io::Result<Vec<Range<u64>>> {
    let mut numbers: Vec<u32> = manifest.regions.iter().map(|region| region.0).collect();
    if let Disk::Image(image) = disk {
        let first = &image.layers()[..1];
        let mut at = 0;
        while at < bytes {
            let (piece, below) = look_at_first(first, port, at, bytes - at).await?;
            let len = piece.map_or(below, |piece| piece.len).max(1);
            if piece.is_some() {
                let regions = at / REGION_BYTES..(at + len).div_ceil(REGION_BYTES);
                for number in regions {
                    numbers.push(u32::try_from(number).map_err(io::Error::other)?);
                }
            }
            at += len;
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    let range = |number: &u32| {
        let start = u64::from(*number) * REGION_BYTES;
        start..(start + REGION_BYTES).min(bytes)
    };
    Ok(numbers.iter().map(range).collect())
}
