//! Writes the new state, in the order that the module above has.

use std::io;

use ferrite_disk_base::{Port, Raw};

use super::Planned;
use crate::qcow2::format::header::{AUTOCLEAR_AT, Header};
use crate::qcow2::maintenance::check::Report;
use crate::qcow2::maintenance::counts::NewCounts;
use crate::qcow2::maintenance::repair::{change, give_back, unmark};
use crate::qcow2::maintenance::walk::{Counting, Course, walk};
use crate::qcow2::tables::meta;

pub(super) async fn write(port: &Port, raw: &Raw, planned: &Planned) -> io::Result<()> {
    unmark(port, &planned.old).await?;
    meta::sync(port).await?;
    let beside = write_beside(port, raw, planned).await;
    let new = match beside {
        Ok(new) => new,
        Err(e) => {
            take_back(port, raw, planned).await;
            return Err(e);
        }
    };
    switch(port, &new).await?;
    // The rest is unused space, which a repair gives back, too.
    if let Err(e) = give_back(port, raw, &new).await {
        tracing::warn!(
            "unused space of {} could not be given back: {e}; ferrite image repair --force does it",
            raw.path().display()
        );
    }
    Ok(())
}

/// Steps 2 and 3: nothing refers to what is written. Returns the header that does.
async fn write_beside(port: &Port, raw: &Raw, planned: &Planned) -> io::Result<Header> {
    let bits = planned.old.cluster_bits;
    let mut new = write_tables(port, raw, planned).await?;
    meta::sync(port).await?;
    let counts = planned.layout.with_counts(&planned.old, planned.blocks.clone())?;
    counts.write(port, raw, &new).await?;
    // The file has whole clusters.
    let end = counts.end() << bits;
    if raw.is_file() && raw.bytes_now()? < end {
        port.io.set_len(port.files[0], end).await?;
    }
    meta::sync(port).await?;
    name_counts(&mut new, &counts);
    check_new(raw, &new)?;
    Ok(new)
}

fn name_counts(new: &mut Header, counts: &NewCounts) {
    (new.reftable_offset, new.reftable_clusters) = counts.table();
}

async fn write_tables(port: &Port, raw: &Raw, planned: &Planned) -> io::Result<Header> {
    let Planned { old, tables, list, layout, .. } = planned;
    let (file, bits) = (port.files[0], old.cluster_bits);
    for (cluster, index) in (layout.first..).zip(&tables.copies) {
        let copy = tables.copy(raw, old, *index)?;
        meta::write(port, file, cluster << bits, &copy).await?;
    }
    let mut new = planned.new.clone();
    let l1 = tables.l1_with(old, layout.first, list.new_l1_entries());
    write_l1(port, old, layout.l1, &l1).await?;
    new.l1_offset = layout.l1 << bits;
    if list.new_l1_entries() > 0 {
        let of_snapshot = &l1[..list.new_l1_entries() as usize];
        write_l1(port, old, layout.snapshot_l1, of_snapshot).await?;
    }
    if !list.stays() && !list.table.is_empty() {
        let mut table = list.table_with(layout.snapshot_l1 << bits);
        table.resize(table.len().next_multiple_of(1 << bits), 0);
        meta::write(port, file, layout.list << bits, &table).await?;
        new.snapshots_offset = layout.list << bits;
    }
    Ok(new)
}

/// Writes an L1 table: whole clusters.
async fn write_l1(port: &Port, header: &Header, cluster: u64, l1: &[u64]) -> io::Result<()> {
    let mut bytes: Vec<u8> = l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(header.cluster_bytes() as usize), 0);
    meta::write(port, port.files[0], cluster << header.cluster_bits, &bytes).await
}

/// Checks the new state before the header names it.
fn check_new(raw: &Raw, new: &Header) -> io::Result<()> {
    let (mut report, mut structure) = (Report::default(), Report::default());
    let course = Course::all(Counting::Compared);
    walk(raw, new, course, (&mut report, &mut structure), &mut |_| {})?;
    match report.findings.first().or(structure.findings.first()) {
        None => Ok(()),
        Some(found) => {
            let why =
                format!("what was made of it is not in order, and was not used: {}", found.why);
            Err(meta::damaged(why))
        }
    }
}

/// Step 4.
async fn switch(port: &Port, new: &Header) -> io::Result<()> {
    change(port, 0, |sector| {
        let mut set = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
        set(24, &new.disk_bytes.to_be_bytes());
        set(36, &new.l1_entries.to_be_bytes());
        set(40, &new.l1_offset.to_be_bytes());
        set(48, &new.reftable_offset.to_be_bytes());
        set(56, &new.reftable_clusters.to_be_bytes());
        set(60, &new.snapshots.to_be_bytes());
        set(64, &new.snapshots_offset.to_be_bytes());
        if new.version > 2 {
            set(AUTOCLEAR_AT, &new.autoclear.to_be_bytes());
        }
    })
    .await?;
    meta::sync(port).await
}

/// Frees the clusters that were written and are not used, as well as possible.
async fn take_back(port: &Port, raw: &Raw, planned: &Planned) {
    let file = port.files[0];
    if !raw.is_file() {
        return;
    }
    let from = planned.layout.first << planned.old.cluster_bits;
    let end = planned.file_bytes;
    if raw.bytes_now().is_ok_and(|bytes| bytes > end) {
        let _ = port.io.set_len(file, end).await;
    }
    if from < end {
        let len = planned.needed_bytes.min(end - from);
        let _ = port.io.punch_hole(file, from, len).await;
    }
}
