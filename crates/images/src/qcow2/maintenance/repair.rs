//! Repairs: corrects refcounts and flags by the references, and frees unused space. The content of the disk is not
//! changed.

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::{DiskError, Port, Raw};

use crate::qcow2::format::header::{
    AUTOCLEAR_AT, CORRUPT, DIRTY, Header, MAX_REFTABLE_BYTES, be64,
};
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::check::{Fix, Report, failed, survey};
use crate::qcow2::maintenance::rebuild::rebuild;
use crate::qcow2::tables::meta;

/// Changes that are in memory at a time; the next pass finds the rest.
const MAX_FIXES: usize = 1 << 20;

/// The most passes until nothing is left to repair.
const MAX_ROUNDS: u32 = 1 << 12;

const SECTOR: u64 = 512;

/// Repairs the image in `raw`, open for writing and file 0 of the port. It frees leaked clusters, sets refcounts to the
/// number of references and flags by the refcounts, and removes marks of an unfinished use. Then it returns unused
/// space of the file. Returns the findings from before the repair. If a finding is not
/// [mendable](ferrite_disk_base::ProblemKind::is_mendable), nothing is changed at all.
///
/// Refcounts that are lost are made anew first: see `rebuild.rs`.
///
/// The order: counts; sync; flags, which depend on them; sync; marks in the header; sync. After a crash in between,
/// another repair finds the rest.
///
/// # Errors
/// It cannot be read or written; a block device has no room for missing refcounts.
pub async fn repair(port: &Port, raw: &Raw) -> Result<Report, DiskError> {
    let (before, planned) = plan(raw)?;
    let Some(header) = planned else { return Ok(before) };
    let mended = async {
        unmark(port, &header).await?;
        if before.needs_rebuild {
            rebuild(port, raw, &header).await?;
        }
        if !before.is_clean() {
            mend(port, raw, &header).await?;
        }
        give_back(port, raw, &header).await
    };
    mended.await.map_err(|e| failed(raw, "repair", e))?;
    Ok(before)
}

/// Whether [`repair`] would change the image in `raw`, which is only read.
///
/// # Errors
/// It cannot be read.
pub fn is_repairable(raw: &Raw) -> Result<bool, DiskError> {
    plan(raw).map(|(_, planned)| planned.is_some())
}

/// The findings, and the header of an image that a repair changes; `None`: it changes nothing.
fn plan(raw: &Raw) -> Result<(Report, Option<Header>), DiskError> {
    let (header, before) = survey(raw, |_| {}).map_err(|e| failed(raw, "repair", e))?;
    let has_work = !before.is_clean() || before.unused_bytes > 0;
    let planned = header.filter(|_| before.is_mendable() && has_work);
    Ok((before, planned))
}

pub(super) async fn unmark(port: &Port, header: &Header) -> io::Result<()> {
    if let Some(mark) = header.mark() {
        // A journal does not know of these changes.
        let (at, features) = (AUTOCLEAR_AT, header.autoclear & !mark);
        change(port, 0, |head| head[at..at + 8].copy_from_slice(&features.to_be_bytes())).await?;
        meta::sync(port).await?;
    }
    Ok(())
}

async fn mend(port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
    for _ in 0..MAX_ROUNDS {
        let (mut counts, mut flags) = (Vec::new(), Vec::new());
        let (header, report) = survey(raw, |fix| match fix {
            Fix::Count { cluster, found } if counts.len() < MAX_FIXES => {
                counts.push((cluster, found));
            }
            Fix::Flag { offset, entry } if flags.len() < MAX_FIXES => flags.push((offset, entry)),
            Fix::Count { .. } | Fix::Flag { .. } | Fix::Free { .. } | Fix::Own(_) => {}
        })?;
        let is_mendable = report.is_mendable() && !report.needs_rebuild;
        let Some(header) = header.filter(|_| is_mendable) else {
            return Err(meta::damaged("it has changed meanwhile"));
        };
        if !counts.is_empty() {
            set_counts(port, raw, &header, &counts).await?;
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

/// Cuts the file off after the last cluster in use, and punches holes at other free clusters.
///
/// The order: sync; the holes and the file's end; sync. Without the first one, a power cut could bring back an older
/// entry that refers to a cluster which has lost its data: writes of a killed process are visible here, and may not be
/// on the medium.
pub(super) async fn give_back(port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
    let mut free: Vec<(u64, u64)> = Vec::new();
    let (_, report) = survey(raw, |fix| {
        let Fix::Free { first, end } = fix else { return };
        let has_room = free.len() < MAX_FIXES;
        // Two windows may each have a part of one range.
        match free.last_mut().filter(|last| last.1 == first) {
            Some(last) => last.1 = end,
            None if has_room => free.push((first, end)),
            None => {}
        }
    })?;
    if report.unused_bytes == 0 || !report.is_clean() {
        return Ok(());
    }
    meta::sync(port).await?;
    let (file, bits) = (port.files[0], header.cluster_bits);
    let file_end = raw.bytes_now()?;
    for (first, end) in free {
        let (from, to) = (first << bits, end << bits);
        if to >= file_end {
            port.io.set_len(file, from).await?;
        } else {
            match port.io.punch_hole(file, from, to - from).await {
                // The file keeps its size.
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
                done => done?,
            }
        }
    }
    meta::sync(port).await
}

/// Sets counts, a sector of a block at a time, in the order of their clusters. Missing blocks are made first.
async fn set_counts(
    port: &Port,
    raw: &Raw,
    header: &Header,
    counts: &[(u64, u64)],
) -> io::Result<()> {
    let (entries, order) = (header.block_entries(), header.refcount_order);
    let per_sector = refcount::entries(9, order);
    let mut table = raw.read_now(header.reftable_offset, header.reftable_bytes() as usize)?;
    // The file may end before its last cluster does.
    table.resize(header.reftable_bytes() as usize, 0);
    let table: Vec<u64> = table.chunks_exact(8).map(|e| be64(e, 0)).collect();
    let block_of = |cluster: u64| table.get((cluster / entries) as usize).copied().unwrap_or(0);
    let missing: BTreeSet<u64> = counts
        .iter()
        .filter(|(cluster, _)| block_of(*cluster) == 0)
        .map(|(cluster, _)| cluster / entries)
        .collect();
    if !missing.is_empty() {
        return make_blocks(port, raw, header, table, missing).await;
    }
    let place = |cluster: u64| (block_of(cluster), cluster % entries / per_sector);
    for same in counts.chunk_by(|a, b| place(a.0) == place(b.0)) {
        let (block, sector) = place(same[0].0);
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

/// Makes empty blocks of refcounts after the end of the file, where nothing refers to, the blocks that count them, and
/// a longer table if the present one is too short. The next pass finds their counts.
///
/// The order: blocks and a longer table; sync; the entries of the table, or the header's sector that names the longer
/// one. A crash before that leaves unused space after the end of the file.
async fn make_blocks(
    port: &Port,
    raw: &Raw,
    header: &Header,
    mut table: Vec<u64>,
    mut missing: BTreeSet<u64>,
) -> io::Result<()> {
    let (bits, entries) = (header.cluster_bits, header.block_entries());
    let first = raw.bytes_now()?.div_ceil(header.cluster_bytes());
    let present = |table: &[u64], block: u64| table.get(block as usize).is_some_and(|o| *o != 0);
    // New blocks and the table need counts themselves.
    let (used, table_clusters) = loop {
        let blocks = missing.len() as u64;
        let needed = missing.last().map_or(0, |last| last + 1).max(table.len() as u64);
        let table_clusters = match needed > table.len() as u64 {
            true => (needed * 8).div_ceil(header.cluster_bytes()),
            false => 0,
        };
        let used = blocks + table_clusters;
        let counting = first / entries..=(first + used - 1) / entries;
        missing.extend(counting.filter(|block| !present(&table, *block)));
        if missing.len() as u64 == blocks {
            break (used, table_clusters);
        }
    };
    let table_bytes = table_clusters << bits;
    if table_bytes > MAX_REFTABLE_BYTES.max(header.cluster_bytes()) {
        return Err(meta::damaged("clusters lie so far apart that no table can count them"));
    }
    if !raw.is_file() && (first + used) << bits > raw.bytes_now()? {
        return Err(meta::damaged("a block of refcounts is missing, and the device is full"));
    }
    meta::write_zeros(port, port.files[0], first << bits, used << bits).await?;
    table.resize(table.len().max((table_bytes / 8) as usize), 0);
    for (i, block) in missing.iter().enumerate() {
        table[*block as usize] = (first + i as u64) << bits;
    }
    let bytes: Vec<u8> = table.iter().flat_map(|e| e.to_be_bytes()).collect();
    if table_clusters == 0 {
        meta::sync(port).await?;
        return meta::write(port, port.files[0], header.reftable_offset, &bytes).await;
    }
    let offset = (first + missing.len() as u64) << bits;
    meta::write(port, port.files[0], offset, &bytes).await?;
    meta::sync(port).await?;
    change(port, 0, |sector| {
        sector[48..56].copy_from_slice(&offset.to_be_bytes());
        sector[56..60].copy_from_slice(&(table_clusters as u32).to_be_bytes());
    })
    .await
}

pub(super) async fn change(
    port: &Port,
    offset: u64,
    change: impl FnOnce(&mut [u8]),
) -> io::Result<()> {
    let mut sector = meta::read(port, port.files[0], offset, SECTOR as usize).await?;
    change(&mut sector);
    meta::write(port, port.files[0], offset, &sector).await
}
