//! Commands on a store that this process serves. Guests go on meanwhile.
//!
//! The thread of a command has an engine and memory of its own. The store stays open in this process until the last
//! command has ended, as if a disk used it.

mod reading;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk_base::{DiskError, ErrorKind, Port};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::check::Outcome;
use ferrite_store::journal::Name;
use ferrite_store::live::{Live, ScrubInfo};
use ferrite_store::owned::{OpenEngine, StoreHandle, StoreKey};
use ferrite_store::pace::{Pace, Stop};
use ferrite_store::page::{P2M_ENTRIES, Packing};

use super::compact::compact_live;
use super::grow::{cannot_grow, grow_live};
use super::{
    Change, StoreCheck, StoreChecked, StoreCollected, StoreCompacted, StoreGrown, StoreListed,
    StoreRepaired, StoreStats, VolumeDone,
};
use super::{
    cannot_check, cannot_collect, cannot_compact, cannot_look, change_live, failed, repaired,
    until_stopped,
};
use crate::io_context::IoContext;
use crate::{NewSize, Progress};

pub use reading::VolumeReader;

/// How often long work checks whether to go on.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A handle to such a store, for one thread.
pub struct ServedStore {
    /// The client's path of the store.
    path: PathBuf,
    handle: Option<StoreHandle>,
    context: IoContext,
    port: Port,
}

impl ServedStore {
    /// A handle to an open store. `None`: it is not open in this process. `path` is for texts only.
    ///
    /// # Errors
    /// There is no engine, or no memory.
    pub fn join(
        key: StoreKey,
        path: &Path,
        engine: OpenEngine<'_>,
    ) -> Option<Result<ServedStore, DiskError>> {
        ServedStore::join_with(key, path, engine, 0)
    }

    /// As [`join`](Self::join), with memory for so many buffers.
    fn join_with(
        key: StoreKey,
        path: &Path,
        engine: OpenEngine<'_>,
        buffers: usize,
    ) -> Option<Result<ServedStore, DiskError>> {
        let handle = StoreHandle::join(key)?;
        let joined = || -> io::Result<ServedStore> {
            let mut context = IoContext::on(engine, buffers)?;
            let port = context.port_of(handle.store().files())?;
            Ok(ServedStore { path: path.to_owned(), handle: Some(handle), context, port })
        };
        Some(joined().map_err(|e| failed(cannot_look(path), path, e)))
    }

    fn run<T>(
        &mut self,
        what: String,
        work: impl AsyncFnOnce(&Live, &Port) -> io::Result<T>,
    ) -> Result<T, DiskError> {
        let ServedStore { handle, context, port, path } = self;
        let handle = handle.as_ref().expect("it is there until the end");
        let work = work(handle.store().live(), port);
        context.run(work).map_err(|e| failed(what, path, e))
    }

    /// The properties of the store and its volumes.
    pub fn list(&self) -> StoreListed {
        let live = self.handle.as_ref().expect("it is there until the end").store().live();
        StoreListed {
            path: self.path.display().to_string(),
            store: live.info(),
            volumes: live.list(),
        }
    }

    /// Changes a volume, durably. A volume that a disk uses is neither rolled back nor deleted, and keeps its name and size.
    ///
    /// # Errors
    /// The change is impossible: nothing has changed.
    pub fn change(&mut self, volume: &Name, change: &Change) -> Result<VolumeDone, DiskError> {
        let what = change.what(&self.path, volume);
        let store = self.handle.as_ref().expect("it is there until the end").store().clone();
        // From here on the name stays with this volume, and no disk begins to use it.
        let _changing = store.changing();
        let number = store.live().volume(volume.as_str());
        if let Some(help) = change.help_in_use()
            && number.is_some_and(|number| store.is_used(number))
        {
            return Err(DiskError::new(ErrorKind::InUse, what, "a disk uses it", help));
        }
        let done =
            self.run(what, async |live, port| change_live(live, port, volume, change).await)?;
        Ok(change.done(&self.path, done))
    }

    /// Makes the store larger, durably, while guests go on. Without a size it gets what its file or device has.
    ///
    /// # Errors
    /// It cannot have that size: nothing has changed. Or it cannot be written: it has its old size, or the new one.
    pub fn grow(&mut self, size: Option<NewSize>) -> Result<StoreGrown, DiskError> {
        let path = self.path.clone();
        let store = self.handle.as_ref().expect("it is there until the end").store().clone();
        self.run(cannot_grow(&path), async |live, port| {
            grow_live(live, port, store.raw(), &path, size).await
        })?
    }

    /// Frees the space of content that no volume references. `goes_on` says when to stop.
    ///
    /// # Errors
    /// Metadata are damaged, cannot be read, or it was stopped: no data are lost then.
    pub fn collect(&mut self, goes_on: &dyn Fn() -> bool) -> Result<StoreCollected, DiskError> {
        let what = cannot_collect(&self.path);
        let (passed, free_bytes) = self.run(what, async |live, port| {
            let ends = Ends::new(None)?;
            let passed = ends.early(port, goes_on, live.gc_at(port, &ends.pace)).await?;
            Ok((passed, live.info().free_bytes))
        })?;
        Ok(StoreCollected::of(&self.path, passed, free_bytes))
    }

    /// The use of the store's space.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    pub fn stats(&mut self, goes_on: &dyn Fn() -> bool) -> Result<StoreStats, DiskError> {
        let what = cannot_look(&self.path);
        let (stats, work, found) = self.run(what, async |live, port| {
            let stats = until_stopped(goes_on, live.stats(port)).await?;
            Ok((stats, live.work(), live.scrub_findings()))
        })?;
        let store = self.handle.as_ref().expect("it is there until the end").store();
        let stats = StoreStats::of(&self.path, stats, store.raw().space_below());
        Ok(StoreStats { work: Some(work), findings: found.listed, ..stats })
    }

    /// Sets the compression, if one is given, and rewrites content in the order in which it is read.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    pub fn compact(
        &mut self,
        packing: Option<Option<Packing>>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<StoreCompacted, DiskError> {
        let (what, path) = (cannot_compact(&self.path), self.path.clone());
        self.run(what, async |live, port| {
            if let Some(packing) = packing {
                live.set_packing(port, packing).await?;
            }
            let ends = Ends::new(None)?;
            ends.early(port, goes_on, compact_live(live, port, &ends.pace)).await?;
            Ok(StoreCompacted::of(&path, live))
        })
    }

    /// Checks the state of a new checkpoint. `goes_on` gets the progress.
    ///
    /// # Errors
    /// It cannot be read, it was stopped, or a write waits for room. Damage is in the report.
    pub fn check(
        &mut self,
        how: StoreCheck,
        goes_on: &dyn Fn(Progress) -> bool,
    ) -> Result<StoreChecked, DiskError> {
        let outcome = self.run(cannot_check(&self.path), async |live, port| {
            let ends = Ends::new(how.rate)?;
            let far = Cell::new(Progress { done_bytes: 0, total_bytes: 0 });
            let told = |done_bytes, total_bytes| {
                far.set(Progress { done_bytes, total_bytes });
                true
            };
            let check = live.check_store(port, how, &ends.pace, &told);
            ends.early(port, &|| goes_on(far.get()), check).await
        })?;
        Ok(StoreChecked::of(&self.path, outcome))
    }

    /// Restores damaged metadata from its second copy, if `force` is set, while guests go on.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn repair(
        &mut self,
        force: bool,
        goes_on: &dyn Fn(Progress) -> bool,
    ) -> Result<StoreRepaired, DiskError> {
        repaired(force, |how| self.check(how, goes_on))
    }

    /// Reads all content, at most so many bytes a second: continues the present round of scrubbing, or starts a new
    /// one. `goes_on` gets the progress; a round that is stopped continues as background work.
    ///
    /// # Errors
    /// A tree cannot be read. Damage is in the report.
    pub fn scrub(
        &mut self,
        rate: Option<u64>,
        goes_on: &dyn Fn(Progress) -> bool,
    ) -> Result<StoreChecked, DiskError> {
        let outcome = self.run(cannot_check(&self.path), async |live, port| {
            let ends = Ends::new(rate)?;
            let before = live.scrub_info().read_bytes;
            live.begin_scrub();
            let far = || {
                let ScrubInfo { done, all, .. } = live.scrub_info();
                let bytes = |pages: u64| pages * (P2M_ENTRIES * BLOCK_BYTES) as u64;
                Progress { done_bytes: bytes(done), total_bytes: bytes(all) }
            };
            let round = async {
                while let Some(bytes) = live.scrub_in_turn(port, &ends.pace).await? {
                    ends.pace.used(&port.io, bytes).await?;
                }
                Ok(())
            };
            ends.early(port, &|| goes_on(far()), round).await?;
            let read_bytes = live.scrub_info().read_bytes - before;
            Ok(Outcome { findings: live.scrub_findings(), read_bytes, ..Outcome::default() })
        })?;
        Ok(StoreChecked::of(&self.path, outcome))
    }
}

/// Ends long work on request. The work is never dropped: it may be in an epoch, which would then never end.
struct Ends {
    stop: Arc<Stop>,
    pace: Pace,
}

impl Ends {
    fn new(bytes_a_second: Option<u64>) -> io::Result<Ends> {
        let stop = Stop::new()?;
        let pace = Pace::bounded(bytes_a_second, Some(stop.clone()));
        Ok(Ends { stop, pace })
    }

    /// Has work with this pace end when `goes_on` says so.
    async fn early<T>(
        &self,
        port: &Port,
        goes_on: &dyn Fn() -> bool,
        work: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        let asks = async {
            while goes_on() && port.io.sleep(LOOK_AGAIN).await.is_ok() {}
            self.stop.ask();
        };
        let (mut work, mut asks, mut has_asked) = (pin!(work), pin!(asks), false);
        poll_fn(|cx| {
            has_asked = has_asked || asks.as_mut().poll(cx).is_ready();
            work.as_mut().poll(cx)
        })
        .await
    }
}

impl Drop for ServedStore {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        if handle.is_last() {
            let (store, port) = (handle.store().clone(), &self.port);
            // All changes are durable. The next opening replays those without a checkpoint.
            let _ = self.context.run(store.live().close(port));
        }
        handle.leave();
    }
}
