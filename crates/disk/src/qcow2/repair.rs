//! Making refcounts and flags what the references say. What an image holds is not touched.

use std::io;

use super::check::{Fix, Report, failed, survey};
use super::header::{CORRUPT, DIRTY, Header, be64};
use super::{meta, refcount};
use crate::{DiskError, Port, Raw};

/// Changes that are in memory at a time; the rest is found by the next look.
const MAX_FIXES: usize = 1 << 20;

/// Looks until nothing is left to do.
const MAX_ROUNDS: u32 = 1 << 12;

const SECTOR: u64 = 512;

/// Mends the image in `raw`, open for writing and file 0 of the port: leaked clusters are free
/// again, refcounts are what there are references, flags what the refcounts say, and marks of an
/// unfinished use are removed. Returns what was found before. If anything was found that is not
/// [mendable](super::Problem::is_mendable), nothing is changed at all.
///
/// The order: counts; sync; flags, which depend on them; sync; marks in the header; sync. After a
/// crash in between, a repair finds what is left to do.
///
/// # Errors
/// It cannot be read or written; or clusters are in use for which there is no refcount block.
pub async fn repair(port: &Port, raw: &Raw) -> Result<Report, DiskError> {
    let (header, before) = survey(raw, |_| {}).map_err(|e| failed(raw, "repair", e))?;
    let Some(header) = header.filter(|_| before.is_mendable() && !before.is_clean()) else {
        return Ok(before);
    };
    mend(port, raw, &header).await.map_err(|e| failed(raw, "repair", e))?;
    Ok(before)
}

async fn mend(port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
    for _ in 0..MAX_ROUNDS {
        let (mut counts, mut flags) = (Vec::new(), Vec::new());
        let (_, report) = survey(raw, |fix| match fix {
            Fix::Count { cluster, found } if counts.len() < MAX_FIXES => {
                counts.push((cluster, found));
            }
            Fix::Flag { offset, entry } if flags.len() < MAX_FIXES => flags.push((offset, entry)),
            Fix::Count { .. } | Fix::Flag { .. } => {}
        })?;
        if !report.is_mendable() {
            return Err(meta::damaged("it has changed meanwhile"));
        }
        if !counts.is_empty() {
            set_counts(port, raw, header, &counts).await?;
        } else if !flags.is_empty() {
            for (offset, entry) in flags {
                let at = (offset % SECTOR) as usize;
                change(port, offset - offset % SECTOR, |sector| {
                    sector[at..at + 8].copy_from_slice(&entry.to_be_bytes());
                })
                .await?;
            }
        } else {
            break;
        }
        meta::sync(port).await?;
    }
    if header.incompatible & (DIRTY | CORRUPT) != 0 {
        let features = header.incompatible & !(DIRTY | CORRUPT);
        change(port, 0, |sector| sector[72..80].copy_from_slice(&features.to_be_bytes())).await?;
        meta::sync(port).await?;
    }
    Ok(())
}

/// Sets counts, a sector of a block at a time. They come in the order of their clusters.
async fn set_counts(
    port: &Port,
    raw: &Raw,
    header: &Header,
    counts: &[(u64, u64)],
) -> io::Result<()> {
    let (entries, order) = (header.block_entries(), header.refcount_order);
    let per_sector = refcount::entries(9, order);
    let table = raw.read_now(header.reftable_offset, header.reftable_bytes() as usize)?;
    let block_of = |cluster: u64| {
        let at = usize::try_from(cluster / entries * 8).unwrap_or(usize::MAX);
        let inside = at.checked_add(8).is_some_and(|end| end <= table.len());
        (if inside { be64(&table, at) } else { 0 }, cluster % entries / per_sector)
    };
    // Nothing is written if a block is missing: rather an image as it was than half of it mended.
    if let Some((cluster, _)) = counts.iter().find(|(cluster, _)| block_of(*cluster).0 == 0) {
        let at = cluster << header.cluster_bits;
        let text = format!("there is no refcount block for the cluster at byte {at}; convert it");
        return Err(meta::damaged(text));
    }
    for same in counts.chunk_by(|a, b| block_of(a.0) == block_of(b.0)) {
        let (block, sector) = block_of(same[0].0);
        change(port, block + sector * SECTOR, |bytes| {
            for (cluster, found) in same {
                let i = (cluster % per_sector) as usize;
                refcount::set(bytes, order, i, (*found).min(refcount::max(order)));
            }
        })
        .await?;
    }
    Ok(())
}

async fn change(port: &Port, offset: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
    let mut sector = meta::read(port, port.files[0], offset, SECTOR as usize).await?;
    change(&mut sector);
    meta::write(port, port.files[0], offset, &sector).await
}
