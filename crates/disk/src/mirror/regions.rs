//! The regions of a mirror, and the writes to them that are under way (docs/internals/mirror.md 2).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_io::reactor::Io;
use rustix::event::{EventfdFlags, eventfd};

use super::map::{Map, REGION_BYTES};
use super::settling::Settling;

/// How often one that cannot be woken looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The regions of a mirror.
#[derive(Debug)]
pub(super) struct Regions {
    pub(super) map: Map,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// Regions that are written or copied now, and those that are equal and whose bit is still set. Any other region
    /// is equal if its bit is clear.
    open: BTreeMap<u64, Region>,
    /// Regions that the target lacks.
    left: u64,
    /// It counts the flushes of the target.
    epoch: u64,
    /// The target has failed: writes go to the source alone.
    is_behind: bool,
    /// How often it has failed.
    failures: u64,
    waiting: VecDeque<Arc<OwnedFd>>,
    /// Groups of regions whose durable bits are about to be cleared.
    settling: Settling,
}

#[derive(Debug, Default)]
struct Region {
    /// The ranges that are written now.
    writes: Vec<(u64, u64)>,
    /// The target has all that was written and has ended. A flush of it may be missing.
    is_equal: bool,
    is_copied: bool,
    /// The epoch of its last write.
    last: u64,
}

/// The regions of a range.
fn of(offset: u64, len: u64) -> std::ops::Range<u64> {
    offset / REGION_BYTES..(offset + len).div_ceil(REGION_BYTES)
}

impl Regions {
    /// All regions whose bits are set count as different.
    pub(super) fn new(map: Map, is_behind: bool) -> Regions {
        let left = map.count();
        let (open, waiting) = (BTreeMap::new(), VecDeque::new());
        let settling = Settling::default();
        let table =
            Mutex::new(Table { open, left, epoch: 1, is_behind, failures: 0, waiting, settling });
        Regions { map, table }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Regions that the target lacks.
    pub(super) fn left(&self) -> u64 {
        self.table().left
    }

    pub(super) fn is_behind(&self) -> bool {
        self.table().is_behind
    }

    /// Whether writes wait for a flush of the target, so that their bits can be cleared.
    pub(super) fn has_unflushed(&self) -> bool {
        self.table().open.values().any(|region| region.is_equal && region.writes.is_empty())
    }

    /// Begins a change of a range, of both disks if `of_both` and the target has all of the range. Waits for changes that
    /// overlap it, and for the copy of its regions. The bits are set when this returns.
    pub(super) async fn change(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        of_both: bool,
    ) -> io::Result<Change<'_>> {
        loop {
            let wait = {
                let mut table = self.table();
                match table.begin(&self.map, (offset, len), of_both) {
                    Some(both) => {
                        return Ok(Change { regions: self, range: (offset, len), both, ok: false });
                    }
                    None => table.wait(),
                }
            };
            waited(io, wait).await?;
        }
    }

    /// Begins the copy of the next region from `from` on that the target lacks. `None`: it lacks none, or others copy
    /// them.
    pub(super) async fn copy(&self, io: &Io, from: u64) -> io::Result<Option<Copy<'_>>> {
        let Some((region, failures)) = self.table().begin_copy(&self.map, from) else {
            return Ok(None);
        };
        let copy = Copy { regions: self, region, failures, ok: false };
        loop {
            let wait = {
                let mut table = self.table();
                match table.open.get(&region).is_none_or(|open| open.writes.is_empty()) {
                    true => return Ok(Some(copy)),
                    false => table.wait(),
                }
            };
            waited(io, wait).await?;
        }
    }

    /// Begins a flush of the target; returns its number.
    pub(super) fn begin_flush(&self) -> u64 {
        let mut table = self.table();
        table.epoch += 1;
        table.epoch - 1
    }

    /// The target is flushed: regions that were equal when the flush began are durable, and their bits are cleared.
    pub(super) fn flushed(&self, number: u64) {
        let mut table = self.table();
        table.open.retain(|at, region| {
            let is_durable = region.is_equal && region.writes.is_empty() && region.last <= number;
            if is_durable {
                self.map.clear(*at);
            }
            !is_durable
        });
    }

    /// The target has failed: regions that it may have lost since its last flush count as different. Returns whether it
    /// had not failed before.
    pub(super) fn fail(&self) -> bool {
        let mut table = self.table();
        let mut lost = 0;
        table.open.retain(|_, region| {
            lost += u64::from(std::mem::take(&mut region.is_equal));
            region.is_copied || !region.writes.is_empty()
        });
        table.left += lost;
        table.failures += 1;
        !std::mem::replace(&mut table.is_behind, true)
    }

    /// Notes groups that both disks have and that no write changes now, among those of a range that `of` returns: it is
    /// asked which groups are at rest. Groups that were written since the call before the last one are left out, unless
    /// it is the end. Returns how many there are.
    pub(super) fn begin_settling(
        &self,
        at_end: bool,
        of: impl FnOnce(std::ops::Range<u64>, &dyn Fn(u64) -> bool) -> Vec<u64>,
    ) -> usize {
        let mut table = self.table();
        let range = table.settling.turn(self.map.groups());
        let found = match at_end {
            true => of(0..self.map.groups(), &|group| self.map.is_group_clear(group)),
            false => {
                of(range, &|group| !table.settling.is_hot(group) && self.map.is_group_clear(group))
            }
        };
        table.settling.begin(&found);
        found.len()
    }

    /// Both disks are flushed: of the noted groups, those that were not written since. Writes to them wait until
    /// [`settled`](Self::settled).
    pub(super) fn hold_settled(&self) -> Vec<u64> {
        self.table().settling.hold()
    }

    /// Writes to held groups go on. Without `hold_settled` before, none is settled.
    pub(super) fn settled(&self) {
        let mut table = self.table();
        table.settling.end();
        table.wake_all();
    }

    /// The target works again.
    pub(super) fn catch_up(&self) {
        self.table().is_behind = false;
    }
}

async fn waited(io: &Io, wait: Option<Arc<OwnedFd>>) -> io::Result<()> {
    let woken = match &wait {
        Some(wake) => io.readable(wake.as_raw_fd()).await,
        None => io.sleep(LOOK_AGAIN).await,
    };
    match woken {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(e),
        Err(_) => {
            io.yield_to_others().await;
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

impl Table {
    /// Notes a waiter, who looks again when it is woken. `None`: there was no descriptor for it.
    fn wait(&mut self) -> Option<Arc<OwnedFd>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let wake = Arc::new(wake);
        self.waiting.push_back(wake.clone());
        Some(wake)
    }

    fn wake_all(&mut self) {
        for wake in self.waiting.drain(..) {
            // It can fail only if the counter is full, and then it wakes already.
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        }
    }

    fn is_equal(&self, map: &Map, region: u64) -> bool {
        self.open.get(&region).map_or_else(|| !map.is_set(region), |open| open.is_equal)
    }

    /// Whether the change goes to both disks. `None`: it has to wait.
    fn begin(&mut self, map: &Map, range: (u64, u64), of_both: bool) -> Option<bool> {
        let (offset, len) = range;
        let overlaps = |(at, bytes): &(u64, u64)| *at < offset + len && offset < at + bytes;
        let is_taken = |open: &Region| open.is_copied || open.writes.iter().any(overlaps);
        if self.open.range(of(offset, len)).any(|(_, open)| is_taken(open)) {
            return None;
        }
        if !self.settling.begin_change(of(offset, len)) {
            return None;
        }
        let both =
            of_both && !self.is_behind && of(offset, len).all(|region| self.is_equal(map, region));
        for at in of(offset, len) {
            let was_equal = self.is_equal(map, at);
            // The bit comes before the data of either disk: if this process dies, they may differ.
            map.set(at);
            self.left += u64::from(was_equal && !both);
            let region = self.open.entry(at).or_default();
            region.is_equal = both;
            region.last = self.epoch;
            region.writes.push(range);
        }
        Some(both)
    }

    fn end(&mut self, range: (u64, u64), is_equal: bool) {
        for at in of(range.0, range.1) {
            let Some(region) = self.open.get_mut(&at) else { continue };
            region.writes.retain(|write| *write != range);
            // A flush that began meanwhile may lack it.
            region.last = self.epoch;
            if !is_equal && std::mem::take(&mut region.is_equal) {
                self.left += 1;
            }
            if !region.is_equal && !region.is_copied && region.writes.is_empty() {
                self.open.remove(&at);
            }
        }
        self.wake_all();
    }

    fn begin_copy(&mut self, map: &Map, from: u64) -> Option<(u64, u64)> {
        let is_wanted = |at: &u64| self.open.get(at).is_none_or(|r| !r.is_equal && !r.is_copied);
        let mut at = from;
        let region = loop {
            let found = map.first_set(at)?;
            if is_wanted(&found) {
                break found;
            }
            at = found + 1;
        };
        // Later changes wait; those that have begun end first.
        self.open.entry(region).or_default().is_copied = true;
        Some((region, self.failures))
    }

    fn end_copy(&mut self, at: u64, failures: u64, ok: bool) {
        // The target may have lost the data that it had before it failed.
        let ok = ok && failures == self.failures;
        if let Some(region) = self.open.get_mut(&at) {
            region.is_copied = false;
            region.last = self.epoch;
            if ok && !region.is_equal {
                region.is_equal = true;
                self.left -= 1;
            }
            if !region.is_equal && region.writes.is_empty() {
                self.open.remove(&at);
            }
        }
        self.wake_all();
    }
}

/// A change that is under way. If it is dropped before [`done`](Change::done), the disks may differ there.
pub(super) struct Change<'a> {
    regions: &'a Regions,
    range: (u64, u64),
    /// Whether it goes to both disks.
    pub(super) both: bool,
    ok: bool,
}

impl Change<'_> {
    /// Both disks have it.
    pub(super) fn done(mut self) {
        self.ok = true;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.regions.table().end(self.range, self.ok);
    }
}

/// A copy that is under way: no write to the region is begun meanwhile.
pub(super) struct Copy<'a> {
    regions: &'a Regions,
    pub(super) region: u64,
    /// The failures of the target when it began.
    failures: u64,
    ok: bool,
}

impl Copy<'_> {
    /// The target has the region.
    pub(super) fn done(mut self) {
        self.ok = true;
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        self.regions.table().end_copy(self.region, self.failures, self.ok);
    }
}
