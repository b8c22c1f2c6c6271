//! The durable map of a mirror: a dirty map of its source (docs/internals/mirror.md 5).
//!
//! # Order
//! A write:
//! 1. The bit of its region of 4 MiB is durable in the source's dirty maps.
//! 2. The data go to both disks, or to the source.
//!
//! Clearing, by the thread that copies:
//! 1. Groups are found that both disks have: no bit of the map on tmpfs is set, so no write to them is under way. A
//!    write to one of them from now on takes it out again.
//! 2. Both disks are flushed.
//! 3. Writes to the groups that are left wait. Their bits are cleared (`disk-base/src/dirty/tracker/clearing.rs`).
//! 4. The writes go on, beginning with step 1 of a write.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;

use ferrite_disk_base::Port;

use super::map::GROUP;
use super::{Disk, Pair};

/// Most groups whose bits are cleared at a time: writes to them wait meanwhile.
const AT_ONCE: usize = 1024;
/// Groups that are looked at in one turn: 1 TiB.
const LOOKED_AT: u64 = 1 << 18;

/// The state of groups in the table of regions.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// Groups that were written lately: since the last turn, and between the last two.
    hot: [BTreeSet<u64>; 2],
    /// Groups that wait for the flushes, in this state.
    noted: BTreeMap<u64, Noted>,
    /// Where the next turn begins to look.
    next: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noted {
    Quiet,
    Held,
}

/// Most groups that are known as hot: a guest that writes to more pays more syncs.
const MOST_HOT: usize = 1 << 16;

impl Settling {
    /// Begins a turn; returns the groups to look at, of so many.
    pub(super) fn turn(&mut self, groups: u64) -> Range<u64> {
        self.hot.swap(0, 1);
        self.hot[0].clear();
        let from = if self.next < groups { self.next } else { 0 };
        self.next = (from + LOOKED_AT).min(groups);
        from..self.next
    }

    pub(super) fn is_hot(&self, group: u64) -> bool {
        self.hot.iter().any(|hot| hot.contains(&group))
    }

    pub(super) fn begin(&mut self, groups: &[u64]) {
        self.noted = groups.iter().map(|group| (*group, Noted::Quiet)).collect();
    }

    /// Notes a change of regions. `false`: it has to wait.
    pub(super) fn begin_change(&mut self, regions: Range<u64>) -> bool {
        let groups = regions.start / GROUP..regions.end.div_ceil(GROUP);
        if self.noted.range(groups.clone()).any(|(_, noted)| *noted == Noted::Held) {
            return false;
        }
        for group in groups {
            self.noted.remove(&group);
            if self.hot[0].len() < MOST_HOT {
                self.hot[0].insert(group);
            }
        }
        true
    }

    pub(super) fn hold(&mut self) -> Vec<u64> {
        self.noted.values_mut().for_each(|noted| *noted = Noted::Held);
        self.noted.keys().copied().collect()
    }

    pub(super) fn end(&mut self) {
        self.noted.clear();
    }
}

/// Lets the writes to held groups go on, however the clearing ends.
struct Going<'a>(&'a Pair);

impl Drop for Going<'_> {
    fn drop(&mut self) {
        self.0.regions.settled();
    }
}

/// Takes regions whose durable bit is clear for equal: that bit never says too little. Returns the index of the map.
pub(super) fn join(source: &Disk, map: &super::Map) -> Option<usize> {
    let (name, tracker) = (map.name()?, source.tracker()?);
    let index = tracker.map_of(&name)?;
    for group in (0..map.groups()).filter(|group| !tracker.is_set(index, *group)) {
        map.clear_group(group);
    }
    Some(index)
}

impl Pair {
    /// Clears durable bits of groups that both disks have. At the end of the mirror's use: of all such groups; nothing
    /// is under way then. Otherwise of groups that are not written often, and of a part of a large disk.
    ///
    /// # Errors
    /// The source cannot be flushed.
    pub(super) async fn settle_groups(&self, port: &Port, at_end: bool) -> io::Result<()> {
        let (Some(index), Some(tracker)) = (self.durable, self.source.tracker()) else {
            return Ok(());
        };
        let most = if at_end { usize::MAX } else { AT_ONCE };
        let found = self.regions.begin_settling(at_end, |range, is_quiet| {
            tracker.set_regions(index, range, most, is_quiet)
        });
        if found == 0 {
            return Ok(());
        }
        let going = Going(self);
        let source = self.source_port(port);
        // The target was flushed when the bits on tmpfs were cleared.
        self.source.flush(&source).await?;
        let held = self.regions.hold_settled();
        if let Err(e) = tracker.clear(&source, index, &held).await {
            tracing::warn!("the mirror's dirty map names too much from now on: {e}");
        }
        drop(going);
        Ok(())
    }
}
