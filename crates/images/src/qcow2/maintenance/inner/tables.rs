//! The tables of the disk's next state: L1, and those L2 tables that need another flag for whether a cluster has one
//! reference.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ferrite_disk_base::Raw;

use crate::qcow2::format::entry::{self, COPIED};
use crate::qcow2::format::header::{Header, be64};
use crate::qcow2::maintenance::check::Owned;
use crate::qcow2::tables::meta;

/// The memory for flags: those of a full disk of 64 TiB, with the usual clusters.
const MAX_FLAG_BYTES: u64 = 128 << 20;

/// The entries in use whose clusters have exactly one reference.
#[derive(Default)]
pub(super) struct Flags {
    /// Entries of L1.
    tables: BTreeSet<u64>,
    /// By L1 index, one bit for each entry of the table.
    clusters: BTreeMap<u64, Box<[u64]>>,
    bytes: u64,
}

impl Flags {
    pub(super) fn add(&mut self, header: &Header, of: Owned) {
        let cluster = match of {
            Owned::Table(index) => {
                self.tables.insert(index);
                return;
            }
            Owned::Cluster(cluster) => cluster,
        };
        let entries = header.l2_entries();
        let words = entries.div_ceil(64) as usize;
        if self.is_full() {
            return;
        }
        let (table, i) = (cluster / entries, cluster % entries);
        let bytes = &mut self.bytes;
        let bits = self.clusters.entry(table).or_insert_with(|| {
            *bytes += words as u64 * 8;
            vec![0; words].into()
        });
        bits[(i / 64) as usize] |= 1 << (i % 64);
    }

    /// Whether there is no memory for more.
    pub(super) fn is_full(&self) -> bool {
        self.bytes > MAX_FLAG_BYTES
    }

    fn owns(&self, table: u64, i: usize) -> bool {
        self.clusters.get(&table).is_some_and(|bits| bits[i / 64] & 1 << (i % 64) != 0)
    }
}

/// See the module text.
pub(super) struct Tables {
    /// L1, with the old places of tables.
    pub(super) l1: Vec<u64>,
    /// The indices in L1 of the tables that are copied.
    pub(super) copies: Vec<u64>,
    /// The flags of these.
    flags: Flags,
}

impl Tables {
    /// Reads the tables that `model` names, for the image with the header `new`.
    pub(super) fn plan(
        raw: &Raw,
        model: &Header,
        new: &Header,
        mut flags: Flags,
    ) -> io::Result<Tables> {
        let bytes = meta::read_whole(raw, model.l1_offset, model.l1_entries as usize * 8)?;
        let mut l1: Vec<u64> = bytes.chunks_exact(8).map(|e| be64(e, 0)).collect();
        l1.resize(new.l1_entries as usize, 0);
        let mut copies = Vec::new();
        for (index, entry) in (0..).zip(&mut l1) {
            let table = table_of(*entry, model)?;
            *entry &= !COPIED;
            if let Some(table) = table {
                let old = read(raw, model, table)?;
                let mut new = old.clone();
                set_flags(&mut new, model, |i| flags.owns(index, i));
                if new != old {
                    copies.push(index);
                } else if flags.tables.contains(&index) {
                    *entry |= COPIED;
                }
            }
        }
        flags.clusters.retain(|index, _| copies.binary_search(index).is_ok());
        Ok(Tables { l1, copies, flags })
    }

    /// The bytes of a copy.
    pub(super) fn copy(&self, raw: &Raw, header: &Header, index: u64) -> io::Result<Vec<u8>> {
        let table = table_of(self.l1[index as usize], header)?;
        let table = table.ok_or_else(|| meta::damaged("it has changed meanwhile"))?;
        let mut bytes = read(raw, header, table)?;
        set_flags(&mut bytes, header, |i| self.flags.owns(index, i));
        Ok(bytes)
    }

    /// L1 with the copies in clusters from `first` on. A copy has one reference, unless it is `shared` with a new
    /// snapshot that has so many entries.
    pub(super) fn l1_with(&self, header: &Header, first: u64, shared: u64) -> Vec<u64> {
        let mut l1 = self.l1.clone();
        for (cluster, index) in (first..).zip(&self.copies) {
            let flag = if *index < shared { 0 } else { COPIED };
            l1[*index as usize] = cluster << header.cluster_bits | flag;
        }
        l1
    }
}

fn table_of(entry: u64, header: &Header) -> io::Result<Option<u64>> {
    let table = entry::l2_table(entry, header.cluster_bits);
    let table = table.map_err(|e| meta::damaged(format!("L1 {e}")))?;
    Ok(table.map(|(table, _)| table))
}

fn read(raw: &Raw, header: &Header, table: u64) -> io::Result<Vec<u8>> {
    meta::read_whole(raw, table, header.cluster_bytes() as usize)
}

/// Sets the flag of each entry with a place in a table.
fn set_flags(table: &mut [u8], header: &Header, owns: impl Fn(usize) -> bool) {
    let form = header.form();
    for (i, bytes) in table.chunks_exact_mut(form.entry_bytes()).enumerate() {
        let has_place = form.cluster_of(bytes).is_ok_and(|cluster| cluster.host().is_some());
        if has_place {
            let flag = if owns(i) { COPIED } else { 0 };
            let word = be64(bytes, 0) & !COPIED | flag;
            bytes[..8].copy_from_slice(&word.to_be_bytes());
        }
    }
}
