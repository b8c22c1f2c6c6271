//! The tables of an image that is read in spite of damage. L1 entries whose tables cannot be right are replaced in memory
//! by the reason, so that reads of their parts of the disk fail. All other parts are read as usual.
//!
//! Refcounts are not needed to read, so nothing is said about those.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{OnDamage, is_damage};

use super::Qcow2;
use super::format::entry::{self, NoTable};
use super::format::header::{Flaws, Header};

/// The damaged entries that are described one by one.
const MAX_TOLD: usize = 16;

/// Replaces entries of L1 that cannot be right, and returns the clusters of all tables that are read, sorted.
pub(super) fn tables(header: &Header, l1: &mut [u64], file_bytes: u64) -> Vec<u64> {
    let bits = header.cluster_bits;
    let mut clusters = Vec::new();
    for (_, offset, len) in header.places() {
        clusters.extend(offset >> bits..(offset + len).div_ceil(header.cluster_bytes()));
    }
    clusters.sort_unstable();
    clusters.dedup();
    let fixed = clusters.len();
    for entry in l1.iter_mut().filter(|entry| **entry != 0) {
        match entry::l2_table(*entry, bits) {
            Err(_) => *entry = NoTable::BadEntry as u64,
            Ok(None) => {}
            Ok(Some((table, _))) if table >= file_bytes => *entry = NoTable::Outside as u64,
            Ok(Some((table, _))) if clusters[..fixed].binary_search(&(table >> bits)).is_ok() => {
                *entry = NoTable::Over as u64;
            }
            Ok(Some((table, _))) => clusters.push(table >> bits),
        }
    }
    clusters.sort_unstable();
    let twice = |pair: &[u64]| (pair[0] == pair[1]).then_some(pair[0]);
    let mut shared: Vec<u64> = clusters.windows(2).filter_map(twice).collect();
    shared.dedup();
    clusters.dedup();
    for entry in l1.iter_mut().filter(|_| !shared.is_empty()) {
        // Nothing tells which of the entries is right.
        if let Ok(Some((table, _))) = entry::l2_table(*entry, bits)
            && shared.binary_search(&(table >> bits)).is_ok()
        {
            *entry = NoTable::Shared as u64;
        }
    }
    clusters
}

/// The damage in words: of the header's tables, and of the first few L1 entries, and how many more there are.
pub(super) fn flaws(header: &Header, found: &Flaws, l1: &[u64]) -> Vec<String> {
    let of_header = [&found.refcounts, &found.snapshots];
    let mut lines: Vec<String> =
        of_header.into_iter().flatten().map(|e| format!("{e}; this part is not read")).collect();
    let bytes = header.l2_entries() * header.cluster_bytes();
    let bad = |(i, entry): (usize, &u64)| Some((i as u64 * bytes, NoTable::of(*entry)?));
    let mut all = l1.iter().enumerate().filter_map(bad);
    let line = |(at, why): (u64, NoTable)| format!("{bytes} bytes of the disk from {at} on: {why}");
    lines.extend(all.by_ref().take(MAX_TOLD).map(line));
    match all.count() {
        0 => {}
        more => lines.push(format!("and {more} more L1 entries")),
    }
    lines
}

impl Qcow2 {
    /// Tells the log of reads that meet damage in an image that is served in spite of that; of the first few.
    pub(super) fn tell<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if let Err(e) = &done
            && self.on_damage == OnDamage::Serve
            && is_damage(e)
            && self.told.load(Ordering::Relaxed) < MAX_TOLD
        {
            let last = match self.told.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_TOLD {
                true => "; no more of this are logged",
                false => "",
            };
            tracing::warn!(image = %self.base.medium.path().display(), "a read has failed: {e}{last}");
        }
        done
    }

    /// Replaces L2 entries that refer to tables, in place.
    pub(super) fn blank_out(&self, entries: &mut [u64]) {
        let bad = |entry: &&mut u64| self.overlaps_metadata(**entry);
        entries.iter_mut().filter(bad).for_each(|entry| *entry = entry::TO_A_TABLE);
    }
}
