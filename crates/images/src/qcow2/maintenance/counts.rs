//! New refcounts in unused space: all blocks and their table, made from the references, which say all that refcounts do.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ferrite_disk_base::{Port, Raw};

use crate::qcow2::format::header::{Header, MAX_REFTABLE_BYTES};
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::check::{Fix, references};
use crate::qcow2::maintenance::walk::{Counting, Course};
use crate::qcow2::tables::meta;

/// The bytes of blocks that are made in one pass over the references.
const PASS_BYTES: u64 = 8 << 20;

/// A new structure of refcounts, in adjacent clusters of the file that nothing refers to: the blocks, then the table.
pub(super) struct NewCounts {
    /// The image that is counted.
    header: Header,
    /// The numbers of the blocks.
    blocks: Vec<u64>,
    /// Its first cluster.
    first: u64,
    table_clusters: u64,
}

impl NewCounts {
    /// A structure at cluster `first`, with these blocks and those that count itself.
    ///
    /// # Errors
    /// `InvalidData`: no table can count clusters so far apart.
    pub(super) fn plan(
        header: &Header,
        mut blocks: BTreeSet<u64>,
        first: u64,
    ) -> io::Result<NewCounts> {
        let table_clusters = count_itself(header, &mut blocks, first)?;
        let blocks = blocks.into_iter().collect();
        Ok(NewCounts { header: header.clone(), blocks, first, table_clusters })
    }

    /// Place and clusters of the table, as the header has them.
    pub(super) fn table(&self) -> (u64, u32) {
        (self.table_at() << self.header.cluster_bits, self.table_clusters as u32)
    }

    fn table_at(&self) -> u64 {
        self.first + self.blocks.len() as u64
    }

    /// The cluster after its last one.
    pub(super) fn end(&self) -> u64 {
        self.table_at() + self.table_clusters
    }

    /// Counts the references from the tables that `header` names, and writes the structure. Nothing is synced.
    ///
    /// # Errors
    /// Those of the medium; the tables are damaged.
    pub(super) async fn write(&self, port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
        let (file, bits) = (port.files[0], self.header.cluster_bits);
        let per_pass = (PASS_BYTES >> bits).max(1) as usize;
        for (pass, numbers) in self.blocks.chunks(per_pass).enumerate() {
            let at = self.first + (pass * per_pass) as u64;
            let blocks = self.blocks_of(raw, header, numbers)?;
            let bytes = blocks.into_values().collect::<Vec<_>>().concat();
            meta::write(port, file, at << bits, &bytes).await?;
        }
        meta::write(port, file, self.table_at() << bits, &self.table_bytes()).await
    }

    /// The table: whole clusters.
    fn table_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; (self.table_clusters << self.header.cluster_bits) as usize];
        for (i, block) in self.blocks.iter().enumerate() {
            let offset = (self.first + i as u64) << self.header.cluster_bits;
            let at = *block as usize * 8;
            bytes[at..at + 8].copy_from_slice(&offset.to_be_bytes());
        }
        bytes
    }

    /// The bytes of these blocks, by number.
    fn blocks_of(
        &self,
        raw: &Raw,
        header: &Header,
        numbers: &[u64],
    ) -> io::Result<BTreeMap<u64, Vec<u8>>> {
        let (entries, order) = (self.header.block_entries(), self.header.refcount_order);
        let empty = || vec![0; self.header.cluster_bytes() as usize];
        let mut blocks: BTreeMap<u64, Vec<u8>> = numbers.iter().map(|n| (*n, empty())).collect();
        let mut set = |cluster: u64, count: u64| {
            if let Some(block) = blocks.get_mut(&(cluster / entries)) {
                let i = (cluster % entries) as usize;
                refcount::set(block, order, i, count.min(refcount::max(order)));
            }
        };
        let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else {
            return Ok(BTreeMap::new());
        };
        // One pass looks only for references to the clusters that its blocks count.
        let clusters = first * entries..(last + 1) * entries;
        let course = Course { clusters, ..Course::all(Counting::Alone) };
        references(raw, header, course, |fix| {
            if let Fix::Count { cluster, found } = fix {
                set(cluster, found);
            }
        })?;
        (self.first..self.end()).for_each(|cluster| set(cluster, 1));
        Ok(blocks)
    }
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
