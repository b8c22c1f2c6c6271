//! Makes all refcounts anew, where their table or blocks are lost: from the references, which say all that refcounts do.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ferrite_disk_base::{Port, Raw};

use crate::qcow2::format::header::{Header, MAX_REFTABLE_BYTES, REFTABLE_AT};
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::check::{Fix, references};
use crate::qcow2::maintenance::repair::change;
use crate::qcow2::tables::meta;

/// The bytes of blocks that are made in one pass over the references.
const PASS_BYTES: u64 = 8 << 20;

/// The new structure, adjacent clusters of the file that nothing refers to: the blocks, then the table.
struct Plan {
    header: Header,
    /// The numbers of the blocks.
    blocks: Vec<u64>,
    first: u64,
    table_clusters: u64,
}

/// Makes new refcounts for the image in `raw`, open for writing and file 0 of the port.
///
/// The order: the blocks and the table, in unused space: of a file, after its end; sync; the header's sector that names
/// the table; sync. A crash before the last step leaves the old structure named, which is as broken as before, and
/// unused space. Another repair finds both.
///
/// # Errors
/// It cannot be read or written; a block device has no room for the refcounts.
pub(super) async fn rebuild(port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
    let plan = Plan::new(raw, header)?;
    let file = port.files[0];
    let bits = plan.header.cluster_bits;
    let per_pass = (PASS_BYTES >> bits).max(1) as usize;
    for (pass, numbers) in plan.blocks.chunks(per_pass).enumerate() {
        let at = plan.first + (pass * per_pass) as u64;
        let bytes = plan.blocks_of(raw, numbers)?.into_values().collect::<Vec<_>>().concat();
        meta::write(port, file, at << bits, &bytes).await?;
    }
    meta::write(port, file, plan.table_at() << bits, &plan.table()).await?;
    meta::sync(port).await?;
    change(port, 0, |sector| {
        let (at, clusters) = (plan.table_at() << bits, plan.table_clusters as u32);
        let field = REFTABLE_AT as usize;
        sector[field..field + 8].copy_from_slice(&at.to_be_bytes());
        sector[field + 8..field + 12].copy_from_slice(&clusters.to_be_bytes());
    })
    .await?;
    meta::sync(port).await
}

impl Plan {
    fn new(raw: &Raw, header: &Header) -> io::Result<Plan> {
        let (entries, most) = (header.block_entries(), MAX_REFTABLE_BYTES / 8);
        let (mut room, mut blocks) = ((0, 0), BTreeSet::new());
        let header = references(raw, |fix| match fix {
            // Blocks beyond the largest refcount table are refused below.
            Fix::Count { cluster, .. } => {
                blocks.insert((cluster / entries).min(most));
            }
            Fix::Free { first, end } if end - first > room.1 - room.0 => room = (first, end),
            Fix::Free { .. } | Fix::Flag { .. } => {}
        })?;
        let end = raw.bytes_now()?.div_ceil(header.cluster_bytes());
        let first = if raw.is_file() { end } else { room.0 };
        let table_clusters = Plan::count_itself(&header, &mut blocks, first)?;
        let plan = Plan { header, blocks: blocks.into_iter().collect(), first, table_clusters };
        if !raw.is_file() && plan.end() > room.1 {
            return Err(meta::damaged(
                "its refcounts have to be made anew, and the device is full",
            ));
        }
        Ok(plan)
    }

    /// Adds the blocks that count the new structure itself, and returns the clusters of its table.
    fn count_itself(header: &Header, blocks: &mut BTreeSet<u64>, first: u64) -> io::Result<u64> {
        loop {
            let count = blocks.len();
            let entries = blocks.last().map_or(1, |last| last + 1);
            let table_clusters = (entries * 8).div_ceil(header.cluster_bytes());
            let table_bytes = table_clusters << header.cluster_bits;
            if table_bytes > MAX_REFTABLE_BYTES.max(header.cluster_bytes()) {
                let why = "clusters lie so far apart that no table can count them";
                return Err(meta::damaged(why));
            }
            let last = first + count as u64 + table_clusters - 1;
            blocks.extend(first / header.block_entries()..=last / header.block_entries());
            if blocks.len() == count {
                return Ok(table_clusters);
            }
        }
    }

    fn table_at(&self) -> u64 {
        self.first + self.blocks.len() as u64
    }

    fn end(&self) -> u64 {
        self.table_at() + self.table_clusters
    }

    /// The table: whole clusters.
    fn table(&self) -> Vec<u8> {
        let mut bytes = vec![0; (self.table_clusters << self.header.cluster_bits) as usize];
        for (i, block) in self.blocks.iter().enumerate() {
            let offset = (self.first + i as u64) << self.header.cluster_bits;
            let at = *block as usize * 8;
            bytes[at..at + 8].copy_from_slice(&offset.to_be_bytes());
        }
        bytes
    }

    /// The bytes of these blocks, by number.
    fn blocks_of(&self, raw: &Raw, numbers: &[u64]) -> io::Result<BTreeMap<u64, Vec<u8>>> {
        let (entries, order) = (self.header.block_entries(), self.header.refcount_order);
        let empty = || vec![0; self.header.cluster_bytes() as usize];
        let mut blocks: BTreeMap<u64, Vec<u8>> = numbers.iter().map(|n| (*n, empty())).collect();
        let mut set = |cluster: u64, count: u64| {
            if let Some(block) = blocks.get_mut(&(cluster / entries)) {
                let i = (cluster % entries) as usize;
                refcount::set(block, order, i, count.min(refcount::max(order)));
            }
        };
        references(raw, |fix| {
            if let Fix::Count { cluster, found } = fix {
                set(cluster, found);
            }
        })?;
        (self.first..self.end()).for_each(|cluster| set(cluster, 1));
        Ok(blocks)
    }
}
