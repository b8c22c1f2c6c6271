//! Changes the snapshots inside of an image that nothing uses: makes one, goes back to one, deletes one.
//!
//! The image gets new metadata beside the old: the tables that change, and all refcounts, in clusters that are free. One
//! sector of the header names all of them, and is never torn. The order:
//! 1. A mark of a dead process is removed from the header; sync. From now on free clusters are really unused: the
//!    unsynced writes of a killed process are on the medium.
//! 2. The copies of L2 tables whose flags change, L1, the new snapshot's L1, the table of snapshots; sync.
//! 3. The refcounts, counted from the new tables; sync. Then the new state is checked, as by `ferrite image check`.
//! 4. The header's first sector; sync.
//! 5. The old tables are unused then: they become holes, and the file's end is cut off if it is free.
//!
//! A power cut before the end of 4 leaves the old state, or the new one, without a leaked cluster. The writes of 2 and
//! 3 are in clusters with a refcount of 0.

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};

use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::check::{Fix, failed, references, survey};
use crate::qcow2::maintenance::counts::NewCounts;
use crate::qcow2::maintenance::snapshots::Told;
use crate::qcow2::maintenance::walk::Counting;

mod list;
mod tables;
mod write;

use list::Listed;
pub(in crate::qcow2) use list::at_snapshot;
use tables::{Flags, Tables};

/// Free ranges that are kept in memory: of more, the last one counts.
const MAX_RANGES: usize = 1 << 16;

/// A change of the snapshots inside of an image.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Keeps what the disk is now.
    Create {
        /// The name of the new snapshot.
        name: &'a str,
        /// The time since 1970, in seconds and nanoseconds.
        now: (u64, u32),
    },
    /// Makes the disk what it was at the snapshot with this identifier or name, which stays.
    Apply(&'a [u8]),
    /// Deletes the snapshot with this identifier or name.
    Delete(&'a [u8]),
}

impl Change<'_> {
    fn verb(&self) -> &'static str {
        match self {
            Change::Create { .. } => "make a snapshot inside of",
            Change::Apply(_) => "apply a snapshot inside of",
            Change::Delete(_) => "delete a snapshot inside of",
        }
    }
}

/// A change that was found to be possible. The image has not been changed yet.
pub struct Planned {
    verb: &'static str,
    old: Header,
    /// The new header, without the places of the new tables.
    new: Header,
    tables: Tables,
    list: Listed,
    /// The blocks of refcounts that the new state needs.
    blocks: BTreeSet<u64>,
    layout: Layout,
    file_bytes: u64,
    /// The snapshot that is made, applied or deleted.
    pub snapshot: Told,
    /// The bytes that are written to clusters that are free, or after the file's end.
    pub needed_bytes: u64,
}

/// The places of the new metadata, as numbers of clusters: one after the other, without gaps.
#[derive(Clone, Copy, Debug)]
struct Layout {
    first: u64,
    l1: u64,
    snapshot_l1: u64,
    list: u64,
    counts: u64,
}

impl Planned {
    /// Checks the image in `raw`, open for writing, and plans the change.
    ///
    /// # Errors
    /// It is damaged; there is no such snapshot, or one too many; a refcount would be too large for its bits; a block
    /// device has no room.
    pub fn new(raw: &Raw, change: Change<'_>) -> Result<Planned, DiskError> {
        let verb = change.verb();
        let failed = |e| failed(raw, verb, e);
        let refuse = |kind, why: String, help: &str| {
            let what = format!("cannot {verb} {}", raw.path().display());
            DiskError::new(kind, what, why, help)
        };
        let mut free = Free::default();
        let (header, report) = survey(raw, |fix| free.add(fix)).map_err(failed)?;
        let is_sound = report.counts.damage + report.counts.unsupported == 0;
        let Some(old) = header.filter(|_| is_sound) else {
            let help = "check it (ferrite image check), and mend what can be mended";
            return Err(refuse(ErrorKind::Damaged, "it is damaged".into(), help));
        };
        let found = list::change(raw, &old, change).map_err(failed)?;
        let (list, snapshot) = found.map_err(|(kind, why, help)| refuse(kind, why, help))?;
        let new = list.header(&old);
        let model = list.model(&old, &new);
        let (mut flags, mut blocks, mut most) = (Flags::default(), BTreeSet::new(), 0);
        let entries = old.block_entries();
        let course = list.course(Counting::Owned, &old);
        references(raw, &model, course, |fix| match fix {
            Fix::Count { cluster, found } => {
                blocks.insert(cluster / entries);
                most = most.max(found);
            }
            Fix::Own(of) => flags.add(&model, of),
            Fix::Flag { .. } | Fix::Free { .. } => {}
        })
        .map_err(failed)?;
        if most > refcount::max(old.refcount_order) {
            let bits = 1u32 << old.refcount_order;
            let why = format!("its refcounts have {bits} bits, too few for {most} references");
            let help = "delete other snapshots first, or keep a state as an image of its own (ferrite \
                        image snapshot DISK NEW)";
            return Err(refuse(ErrorKind::Unsuitable, why, help));
        }
        if flags.is_full() {
            let help = "qemu-img snapshot does it in less memory";
            let why = "it has more tables than the memory for them holds";
            return Err(refuse(ErrorKind::Unsuitable, why.into(), help));
        }
        let tables = Tables::plan(raw, &model, &new, flags).map_err(failed)?;
        let file_bytes = raw.bytes_now().map_err(failed)?;
        let layout = |first| Layout::at(first, &new, &tables, &list);
        let placed = free.place(raw, &old, file_bytes, |first| {
            let layout = layout(first);
            Ok(layout.with_counts(&old, blocks.clone())?.end())
        });
        let Some((first, end)) = placed.map_err(failed)? else {
            let why = "its device has no room for other tables in one piece";
            let help = "make the device larger, or keep a state as an image of its own (ferrite image \
                        clone)";
            return Err(refuse(ErrorKind::Unsuitable, why.into(), help));
        };
        let needed_bytes = (end - first) << old.cluster_bits;
        let layout = layout(first);
        Ok(Planned {
            verb,
            old,
            new,
            tables,
            list,
            blocks,
            layout,
            file_bytes,
            snapshot,
            needed_bytes,
        })
    }

    /// Bytes of the disk after the change.
    pub fn disk_bytes(&self) -> u64 {
        self.new.disk_bytes
    }

    /// The dirty bitmaps that were up to date, and are not any more.
    pub fn lost_bitmaps(&self) -> u32 {
        self.old.valid_bitmaps() - self.new.valid_bitmaps()
    }

    /// Makes the change in `raw`, file 0 of the port. See the module text.
    ///
    /// # Errors
    /// Those of the medium: the image is as before, or changed.
    pub async fn write(self, port: &Port, raw: &Raw) -> Result<(), DiskError> {
        let done = write::write(port, raw, &self).await;
        done.map_err(|e| failed(raw, self.verb, e))
    }
}

impl Layout {
    fn at(first: u64, new: &Header, tables: &Tables, list: &Listed) -> Layout {
        let clusters = |bytes: u64| bytes.div_ceil(new.cluster_bytes());
        let l1 = first + tables.copies.len() as u64;
        let snapshot_l1 = l1 + clusters(tables.l1.len() as u64 * 8);
        let list_at = snapshot_l1 + clusters(list.new_l1_entries() * 8);
        let counts = list_at + clusters(list.table.len() as u64);
        Layout { first, l1, snapshot_l1, list: list_at, counts }
    }

    /// The refcounts after the tables, with the blocks that count these.
    fn with_counts(&self, header: &Header, mut blocks: BTreeSet<u64>) -> io::Result<NewCounts> {
        let entries = header.block_entries();
        blocks.extend(self.first / entries..=self.counts / entries);
        NewCounts::plan(header, blocks, self.counts)
    }
}

/// Free clusters of the file.
#[derive(Default)]
struct Free {
    ranges: Vec<(u64, u64)>,
}

impl Free {
    fn add(&mut self, fix: Fix) {
        let Fix::Free { first, end } = fix else { return };
        let is_full = self.ranges.len() == MAX_RANGES;
        match self.ranges.last_mut() {
            // Two windows may each have a part of one range.
            Some(last) if last.1 == first => last.1 = end,
            Some(last) if is_full => *last = (first, end),
            _ => self.ranges.push((first, end)),
        }
    }

    /// The first place for clusters whose end `end_of` tells. The end of a file has room; `None`: a device has none.
    fn place(
        &self,
        raw: &Raw,
        header: &Header,
        file_bytes: u64,
        end_of: impl Fn(u64) -> io::Result<u64>,
    ) -> io::Result<Option<(u64, u64)>> {
        let bits = header.cluster_bits;
        let (whole, file_end) = (file_bytes >> bits, file_bytes.div_ceil(1 << bits));
        let last = self.ranges.last().filter(|last| last.1 == file_end).map(|last| last.0);
        let behind = if raw.is_file() { last.unwrap_or(file_end) } else { whole };
        // Elsewhere they take about as much.
        let about = end_of(behind)? - behind;
        for (first, end) in self.ranges.iter().map(|(first, end)| (*first, (*end).min(whole))) {
            if end.saturating_sub(first) + 2 >= about {
                let needed = end_of(first)?;
                if needed <= end {
                    return Ok(Some((first, needed)));
                }
            }
        }
        match raw.is_file() {
            true => Ok(Some((behind, behind + about))),
            false => Ok(None),
        }
    }
}
