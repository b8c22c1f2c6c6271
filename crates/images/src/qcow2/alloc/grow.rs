//! Sets fresh clusters aside after the last one: a run of free clusters with space.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::clusters::Run;
use crate::qcow2::format::entry::MAX_HOST_BYTES;
use crate::qcow2::tables::meta;

/// The size of the first run. Each later run is twice as long as the one before, so a disk with few writes stays small
/// and one with many waits seldom.
const FIRST_RUN_BYTES: u64 = 1 << 20;
const LONGEST_RUN_BYTES: u64 = 64 << 20;

/// The slices of refcounts without a free cluster, after the supposed last one in use, that are searched until they are
/// taken for damage.
const MAX_USED_SLICES: u32 = 4096;

/// When this is dropped, the next caller may search for a run.
struct Refilling<'a>(&'a Allocator);

impl Drop for Refilling<'_> {
    fn drop(&mut self) {
        self.0.refilling.store(false, Ordering::Release);
    }
}

impl Allocator {
    /// Sets the next run aside, unless that was done meanwhile.
    pub(in crate::qcow2) async fn set_aside(&self, port: &Port) -> io::Result<()> {
        let _done = Refilling(self);
        let _alone = self.growth.lock(&port.io).await?;
        let (known, step) = {
            let clusters = &mut self.base.state().clusters;
            if !clusters.spares.is_empty() {
                return Ok(());
            }
            // Runs that a dropped task has left.
            clusters.unclaim();
            let (shortest, longest) = (FIRST_RUN_BYTES, LONGEST_RUN_BYTES);
            let count = |bytes: u64| (bytes >> self.cluster_bits).max(4);
            clusters.step = (clusters.step * 2).clamp(count(shortest), count(longest));
            (clusters.end, clusters.step)
        };
        let end = match known {
            Some(end) => end,
            None => self.find_end(port).await?,
        };
        self.first_new.fetch_min(end << self.cluster_bits, Ordering::AcqRel);
        let found = match self.reuse(port, step).await {
            Ok(runs) if runs.is_empty() => self.extend(port, end, step).await.map(|run| vec![run]),
            found => found,
        };
        let clusters = &mut self.base.state().clusters;
        match found {
            Ok(runs) => clusters.set_aside(runs),
            // This run was ahead of its use: the present one is used up first.
            Err(e) if is_full(&e) && clusters.run.left() > 0 => clusters.step = clusters.run.left(),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// [Provides](Self::provide) space for as many clusters as possible, at least one, if there is not enough for all.
    /// The next run gets shorter, too.
    pub(super) async fn provide_some(
        &self,
        port: &Port,
        first: u64,
        end: u64,
    ) -> io::Result<(u64, bool)> {
        let mut count = end - first;
        loop {
            match self.provide(port, first, first + count).await {
                Err(e) if is_full(&e) && count > 1 => count /= 2,
                done => return done,
            }
            self.base.state().clusters.step = count;
        }
    }

    /// Sets clusters aside after those in use.
    async fn extend(&self, port: &Port, end: u64, step: u64) -> io::Result<Run> {
        let mut at = end;
        let mut looked_at = 0;
        let mut run = loop {
            at = self.cover(port, at).await?;
            self.load_refs(port, at).await?;
            match self.free_run(at, step) {
                Ok(run) => break run,
                Err(_) if looked_at == MAX_USED_SLICES => {
                    return Err(meta::damaged("refcounts behind the end of the file"));
                }
                Err(next) => at = next,
            }
            looked_at += 1;
        };
        (run.end, run.zeroed) = self.provide_some(port, run.next, run.end).await?;
        self.base.state().clusters.end = Some(run.end);
        Ok(run)
    }

    /// Claims free clusters from `at` on within its slice of refcounts, or tells where to search next.
    fn free_run(&self, at: u64, step: u64) -> Result<Run, u64> {
        let clusters = &mut self.base.state().clusters;
        let entries = clusters.refs.slice_entries();
        let slice_end = (at / entries + 1) * entries;
        let free = |cluster: &u64| clusters.refs.get(*cluster) == Some(0);
        let first = (at..slice_end).find(free).ok_or(slice_end)?;
        let count = (first..slice_end).take(step as usize).take_while(free).count();
        let run = Run { next: first, end: first + count as u64, zeroed: false };
        clusters.claimed.push(run);
        Ok(run)
    }

    /// Makes space for clusters, or for as many of them as the medium has; their end, and whether the space reads as
    /// zeros.
    pub(super) async fn provide(
        &self,
        port: &Port,
        first: u64,
        end: u64,
    ) -> io::Result<(u64, bool)> {
        let (file, bits) = (port.files[0], self.cluster_bits);
        let (from, mut to) = (first << bits, end << bits);
        if to > MAX_HOST_BYTES {
            return Err(full("the format ends at 64 PiB"));
        }
        let medium = &self.base.medium;
        let there = medium.bytes_now()?;
        if !medium.is_file() {
            to = to.min(there >> bits << bits);
            if to <= from {
                return Err(full("the device is full"));
            }
            // The device may be larger than at opening.
            self.limit.fetch_max(to, Ordering::AcqRel);
            return Ok((to >> bits, false));
        }
        let mut zeroed = true;
        if from < there {
            // Space that an unused run or a freed cluster has left may have any content.
            let old = there.min(to) - from;
            zeroed = medium.reserves_space() && port.io.zero_range(file, from, old).await.is_ok()
                || port.io.punch_hole(file, from, old).await.is_ok();
        }
        let reserved = match medium.reserves_space() {
            true => port.io.allocate(file, from, to - from).await,
            false => Err(io::ErrorKind::Unsupported.into()),
        };
        match reserved {
            Ok(()) => {}
            // Without space of its own: the file is made longer at least.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                if to > there {
                    port.io.set_len(file, to).await?;
                }
            }
            Err(e) => return Err(e),
        }
        self.limit.fetch_max(to, Ordering::AcqRel);
        Ok((end, zeroed))
    }
}

/// Whether there may be space for less.
pub(in crate::qcow2) fn is_full(e: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

pub(super) fn full(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, format!("qcow2 image: no space is left: {why}"))
}
