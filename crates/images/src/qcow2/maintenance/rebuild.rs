//! Makes all refcounts anew, where their table or blocks are lost.

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::{Port, Raw};

use crate::qcow2::format::header::{Header, MAX_REFTABLE_BYTES, REFTABLE_AT};
use crate::qcow2::maintenance::check::{Fix, references};
use crate::qcow2::maintenance::counts::NewCounts;
use crate::qcow2::maintenance::repair::change;
use crate::qcow2::maintenance::walk::{Counting, Course};
use crate::qcow2::tables::meta;

/// Makes new refcounts for the image in `raw`, open for writing and file 0 of the port.
///
/// The order: the blocks and the table, in unused space: of a file, after its end; sync; the header's sector that names
/// the table; sync. A crash before the last step leaves the old structure named, which is as broken as before, and
/// unused space. Another repair finds both.
///
/// # Errors
/// It cannot be read or written; a block device has no room for the refcounts.
pub(super) async fn rebuild(port: &Port, raw: &Raw, header: &Header) -> io::Result<()> {
    let counts = plan(raw, header)?;
    counts.write(port, raw, header).await?;
    meta::sync(port).await?;
    change(port, 0, |sector| {
        let (at, clusters) = counts.table();
        let field = REFTABLE_AT as usize;
        sector[field..field + 8].copy_from_slice(&at.to_be_bytes());
        sector[field + 8..field + 12].copy_from_slice(&clusters.to_be_bytes());
    })
    .await?;
    meta::sync(port).await
}

fn plan(raw: &Raw, header: &Header) -> io::Result<NewCounts> {
    let (entries, most) = (header.block_entries(), MAX_REFTABLE_BYTES / 8);
    let (mut room, mut blocks) = ((0, 0), BTreeSet::new());
    references(raw, header, Course::all(Counting::Alone), |fix| match fix {
        // Blocks beyond the largest refcount table are refused below.
        Fix::Count { cluster, .. } => {
            blocks.insert((cluster / entries).min(most));
        }
        Fix::Free { first, end } if end - first > room.1 - room.0 => room = (first, end),
        Fix::Free { .. } | Fix::Flag { .. } | Fix::Own(_) => {}
    })?;
    let end = raw.bytes_now()?.div_ceil(header.cluster_bytes());
    let first = if raw.is_file() { end } else { room.0 };
    let counts = NewCounts::plan(header, blocks, first)?;
    if !raw.is_file() && counts.end() > room.1 {
        return Err(meta::damaged("its refcounts have to be made anew, and the device is full"));
    }
    Ok(counts)
}
