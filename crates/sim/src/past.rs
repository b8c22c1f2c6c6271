//! Changes of other programs to a qcow2 image before a story uses it: compressed clusters, internal snapshots, free
//! clusters between used ones, and refcounts of another width in a table with hardly any room. In such an image nearly
//! every write lowers counts, and its table of refcounts has to grow.
//!
//! The image reads as before. It is not open, and it has no snapshots yet.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use ferrite_host::clock::{Random, SplitMix64};
use flate2::{Compress, Compression, FlushCompress};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;
const ZERO: u64 = 1;
const SECTOR: u64 = 512;

/// The most bytes of leaked clusters.
const MAX_LEAKED_BYTES: u64 = 8 << 20;

/// Offsets in the header.
const VERSION: usize = 4;
const CLUSTER_BITS: usize = 20;
const DISK_BYTES: usize = 24;
const L1_ENTRIES: usize = 36;
const L1_OFFSET: usize = 40;
const REFTABLE: usize = 48;
const REFTABLE_CLUSTERS: usize = 56;
const SNAPSHOTS: usize = 60;
const SNAPSHOTS_OFFSET: usize = 64;
const REFCOUNT_ORDER: usize = 96;

/// An image that is being changed. Clusters are numbers from the start of the file.
struct Image {
    file: File,
    head: Vec<u8>,
    bits: u32,
    l1: Vec<u64>,
    /// Tables, with their places.
    tables: Vec<(u64, Vec<u64>)>,
    snapshots: u64,
    /// Clusters with a count and no reference.
    leaked: Range<u64>,
    /// The number of free clusters to leave; `None`: all of them.
    spare: Option<u64>,
    /// The first cluster that was never used.
    end: u64,
    /// The place of the next compressed data, and the end of their cluster.
    packing: (u64, u64),
}

/// Changes an image so that it fills its medium: all data are compressed, and a few clusters are free. Returns the end
/// in bytes.
pub(crate) fn give_full(file: File, random: &mut SplitMix64) -> io::Result<u64> {
    let mut image = Image::read(file)?;
    image.pack(|| true)?;
    image.spare = Some(2 + random.below(14));
    image.count_anew(4)?;
    image.file.write_all_at(&image.head, 0)?;
    Ok(image.end << image.bits)
}

/// Changes an image by the choices of `random`.
pub(crate) fn give(file: File, random: &mut SplitMix64) -> io::Result<()> {
    let mut image = Image::read(file)?;
    // Of eight clusters, the number of compressed ones.
    let share = [0, 2, 7][random.below(3) as usize];
    image.pack(|| random.below(8) < share)?;
    image.take_snapshots(random.below(3))?;
    // Wide counts need many blocks, and so a large table.
    let order =
        if image.head[VERSION + 3] < 3 { 4 } else { [4, 5, 6, 6][random.below(4) as usize] };
    if random.below(2) == 0 {
        image.leak(order, random.below(150));
    }
    image.count_anew(order)?;
    image.file.write_all_at(&image.head, 0)
}

impl Image {
    fn read(file: File) -> io::Result<Image> {
        let mut head = vec![0; SECTOR as usize];
        file.read_exact_at(&mut head, 0)?;
        let bits = number(&head, CLUSTER_BITS, 4) as u32;
        let cluster = 1 << bits;
        let (l1_at, l1_len) = (number(&head, L1_OFFSET, 8), number(&head, L1_ENTRIES, 4));
        let l1 = words(&file, l1_at, l1_len)?;
        let places = l1.iter().map(|entry| entry & OFFSET).filter(|place| *place != 0);
        let tables = places.map(|place| Ok((place, words(&file, place, cluster / 8)?)));
        let tables = tables.collect::<io::Result<Vec<_>>>()?;
        let table_at = number(&head, REFTABLE, 8);
        let table_bytes = number(&head, REFTABLE_CLUSTERS, 4) << bits;
        let blocks = words(&file, table_at, table_bytes / 8)?;
        let hosts = tables.iter().flat_map(|(at, table)| table.iter().chain([at]));
        let last = hosts.map(|entry| entry & OFFSET).chain(blocks).max().unwrap_or(0);
        let last = last.max(l1_at + l1_len * 8).max(table_at + table_bytes);
        let (end, snapshots, leaked, packing) = ((last >> bits) + 1, 0, 0..0, (0, 0));
        let spare = None;
        Ok(Image { file, head, bits, l1, tables, snapshots, leaked, spare, end, packing })
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.bits
    }

    /// Appends clusters; returns the byte at which they begin.
    fn add(&mut self, clusters: u64) -> u64 {
        self.end += clusters;
        (self.end - clusters) << self.bits
    }

    /// Compresses clusters, contiguously. Their old places become free.
    fn pack(&mut self, mut chosen: impl FnMut() -> bool) -> io::Result<()> {
        for table in 0..self.tables.len() {
            for entry in 0..self.tables[table].1.len() {
                let old = self.tables[table].1[entry];
                let data = old & OFFSET != 0 && old & (COMPRESSED | ZERO) == 0;
                if !data || !chosen() {
                    continue;
                }
                let bytes = read(&self.file, old & OFFSET, self.cluster_bytes())?;
                let new = self.put(&deflated(&bytes)?)?;
                self.tables[table].1[entry] = new;
            }
        }
        Ok(())
    }

    /// Appends compressed data; returns the entry that refers to them.
    fn put(&mut self, data: &[u8]) -> io::Result<u64> {
        let len = data.len() as u64;
        let x = 62 - (self.bits - 8);
        let more = |at: u64| (at + len - 1) / SECTOR - at / SECTOR;
        let (mut at, mut end) = self.packing;
        // An entry can express only so many sectors.
        if more(at) >> (62 - x) != 0 {
            at = at.next_multiple_of(SECTOR);
        }
        if at + len > end {
            let clusters = len.div_ceil(self.cluster_bytes());
            let place = self.add(clusters);
            // Adjacent data continue in the same cluster.
            if place != end {
                at = place;
            }
            end = place + (clusters << self.bits);
        }
        self.file.write_all_at(data, at)?;
        self.packing = (at + len, end);
        Ok(COMPRESSED | more(at) << x | at)
    }

    /// Makes identical snapshots of the present state.
    fn take_snapshots(&mut self, count: u64) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let (mut table, l1_bytes) = (Vec::new(), self.l1.len() as u64 * 8);
        for i in 0..count {
            let clusters = l1_bytes.div_ceil(self.cluster_bytes());
            let l1 = self.add(clusters);
            // Flags do not count in snapshots.
            let entries: Vec<u64> = self.l1.iter().map(|entry| entry & !COPIED).collect();
            self.write(l1, &entries)?;
            let id = (i + 1).to_string();
            let mut entry = l1.to_be_bytes().to_vec();
            entry.extend((self.l1.len() as u32).to_be_bytes());
            entry.extend((id.len() as u16).to_be_bytes());
            entry.extend((id.len() as u16).to_be_bytes());
            entry.extend([0; 20]);
            entry.extend(16u32.to_be_bytes());
            entry.extend([0; 8]);
            entry.extend(number(&self.head, DISK_BYTES, 8).to_be_bytes());
            entry.extend([id.as_bytes(), id.as_bytes()].concat());
            entry.resize(entry.len().next_multiple_of(8), 0);
            table.extend(entry);
        }
        let at = self.add((table.len() as u64).div_ceil(self.cluster_bytes()));
        self.file.write_all_at(&table, at)?;
        self.head[SNAPSHOTS..SNAPSHOTS + 4].copy_from_slice(&(count as u32).to_be_bytes());
        self.head[SNAPSHOTS_OFFSET..SNAPSHOTS_OFFSET + 8].copy_from_slice(&at.to_be_bytes());
        self.snapshots = count;
        Ok(())
    }

    /// Leaks so many clusters that the table of refcounts has room for about `left` more, unless that takes too many.
    fn leak(&mut self, order: u32, left: u64) {
        let per_table = (self.cluster_bytes() / 8) << (self.bits + 3 - order);
        // A cluster of the table, and its blocks.
        let left = left + (self.end / per_table + 1) * (1 + self.cluster_bytes() / 8);
        let end = (self.end + left).next_multiple_of(per_table) - left;
        if (end - self.end) << self.bits <= MAX_LEAKED_BYTES {
            self.leaked = self.end..end;
            self.end = end;
        }
    }

    /// References to each cluster, except for those to the counts' own clusters.
    fn references(&self) -> io::Result<Vec<u64>> {
        let mut refs = vec![0; self.end as usize];
        refs[self.leaked.start as usize..self.leaked.end as usize].fill(1);
        let mut refer = |at: u64, len: u64, times: u64| {
            for cluster in at >> self.bits..(at + len).div_ceil(1 << self.bits) {
                refs[cluster as usize] += times;
            }
        };
        let l1_bytes = self.l1.len() as u64 * 8;
        refer(0, 1, 1);
        refer(number(&self.head, L1_OFFSET, 8), l1_bytes, 1);
        if self.snapshots > 0 {
            let mut at = number(&self.head, SNAPSHOTS_OFFSET, 8);
            let entry_bytes = (40 + 16 + 2u64).next_multiple_of(8);
            refer(at, self.snapshots * entry_bytes, 1);
            for _ in 0..self.snapshots {
                refer(words(&self.file, at, 1)?[0], l1_bytes, 1);
                at += entry_bytes;
            }
        }
        let times = 1 + self.snapshots;
        let x = 62 - (self.bits - 8);
        for (at, table) in &self.tables {
            refer(*at, 1, times);
            for entry in table {
                if entry & COMPRESSED != 0 {
                    let (at, more) = (entry & ((1 << x) - 1), (entry & (COMPRESSED - 1)) >> x);
                    refer(at, (more + 1) * SECTOR - at % SECTOR, times);
                } else if entry & OFFSET != 0 {
                    refer(entry & OFFSET, 1, times);
                }
            }
        }
        if let Some(spare) = self.spare {
            let free = refs.iter_mut().filter(|count| **count == 0);
            free.skip(spare as usize).for_each(|count| *count = 1);
        }
        Ok(refs)
    }

    /// Writes new counts after everything else, in a table that is just large enough, and the flags for counts of one.
    fn count_anew(&mut self, order: u32) -> io::Result<()> {
        let mut refs = self.references()?;
        let per_block = 1u64 << (self.bits + 3 - order);
        let (mut blocks, mut table_clusters) = (BTreeSet::new(), 1);
        loop {
            let total = self.end + table_clusters + blocks.len() as u64;
            let used = |c: &u64| refs.get(*c as usize).is_none_or(|n| *n > 0);
            let needed: BTreeSet<u64> = (0..total).filter(used).map(|c| c / per_block).collect();
            let clusters = ((total - 1) / per_block + 1).div_ceil(self.cluster_bytes() / 8);
            if needed.len() == blocks.len() && clusters == table_clusters {
                break;
            }
            (blocks, table_clusters) = (needed, clusters);
        }
        let at = self.add(table_clusters);
        let first = self.add(blocks.len() as u64);
        refs.resize(self.end as usize, 1);
        let mut table = vec![0; (table_clusters << self.bits) as usize / 8];
        for (i, block) in blocks.iter().enumerate() {
            let place = first + ((i as u64) << self.bits);
            table[*block as usize] = place;
            let width = 1usize << (order - 3);
            let counts = (block * per_block..(block + 1) * per_block).flat_map(|cluster| {
                let count = refs.get(cluster as usize).copied().unwrap_or(0);
                count.to_be_bytes()[8 - width..].to_vec()
            });
            self.file.write_all_at(&counts.collect::<Vec<u8>>(), place)?;
        }
        self.write(at, &table)?;
        self.head[REFTABLE..REFTABLE + 8].copy_from_slice(&at.to_be_bytes());
        let clusters = (table_clusters as u32).to_be_bytes();
        self.head[REFTABLE_CLUSTERS..REFTABLE_CLUSTERS + 4].copy_from_slice(&clusters);
        if self.head[VERSION + 3] >= 3 {
            self.head[REFCOUNT_ORDER..REFCOUNT_ORDER + 4].copy_from_slice(&order.to_be_bytes());
        }
        self.write_tables(&refs)
    }

    fn write_tables(&mut self, refs: &[u64]) -> io::Result<()> {
        let bits = self.bits;
        let flagged = |entry: u64| match entry & OFFSET {
            _ if entry & COMPRESSED != 0 => entry,
            0 => entry,
            host if refs[(host >> bits) as usize] == 1 => entry | COPIED,
            _ => entry & !COPIED,
        };
        for (at, table) in &self.tables {
            let table: Vec<u64> = table.iter().map(|entry| flagged(*entry)).collect();
            self.write(*at, &table)?;
        }
        let l1: Vec<u64> = self.l1.iter().map(|entry| flagged(*entry)).collect();
        self.write(number(&self.head, L1_OFFSET, 8), &l1)?;
        // A file ends with its last cluster.
        let end = self.end << bits;
        if self.file.metadata()?.len() < end { self.file.set_len(end) } else { Ok(()) }
    }

    fn write(&self, at: u64, words: &[u64]) -> io::Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.file.write_all_at(&bytes, at)
    }
}

/// A deflate stream without a header.
fn deflated(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 64 + 64);
    let mut stream = Compress::new(Compression::fast(), false);
    stream.compress_vec(bytes, &mut out, FlushCompress::Finish).map_err(io::Error::other)?;
    Ok(out)
}

/// The bytes of a file; zeros past its end.
fn read(file: &File, at: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    let there = file.metadata()?.len().saturating_sub(at).min(len) as usize;
    file.read_exact_at(&mut bytes[..there], at)?;
    Ok(bytes)
}

fn words(file: &File, at: u64, count: u64) -> io::Result<Vec<u64>> {
    let bytes = read(file, at, count * 8)?;
    Ok(bytes.chunks_exact(8).map(|word| number(word, 0, 8)).collect())
}

/// A number of some bytes, big endian.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |n, byte| n << 8 | u64::from(*byte))
}
