//! Commands on a store that this process serves. Guests go on beside them.
//!
//! Who does them has an engine and memory of its own. The store stays this process's until the last command has
//! ended, as if a disk used it.

use std::io;
use std::path::{Path, PathBuf};

use super::{Change, StoreCollected, StoreListed, StoreStats, VolumeDone, change_live, failed};
use super::{cannot_collect, cannot_look, until_stopped};
use crate::store::journal::Name;
use crate::store::live::Live;
use crate::store::owned::{OpenEngine, Seat, StoreKey};
use crate::tools::io_context::IoContext;
use crate::{DiskError, ErrorKind, Port};

/// A way to such a store. One thread's.
pub struct ServedStore {
    /// As who has asked calls it.
    path: PathBuf,
    seat: Option<Seat>,
    context: IoContext,
    port: Port,
}

impl ServedStore {
    /// Joins those who have the store. None: nobody in this process has. `path` is for texts only.
    ///
    /// # Errors
    /// There is no engine, or no memory.
    pub fn join(
        key: StoreKey,
        path: &Path,
        engine: OpenEngine<'_>,
    ) -> Option<Result<ServedStore, DiskError>> {
        let seat = Seat::join(key)?;
        let joined = || -> io::Result<ServedStore> {
            let mut context = IoContext::on(engine, 0)?;
            let port = context.port_of(seat.store().files())?;
            Ok(ServedStore { path: path.to_owned(), seat: Some(seat), context, port })
        };
        Some(joined().map_err(|e| failed(cannot_look(path), path, e)))
    }

    fn run<T>(
        &mut self,
        what: String,
        work: impl AsyncFnOnce(&Live, &Port) -> io::Result<T>,
    ) -> Result<T, DiskError> {
        let ServedStore { seat, context, port, path } = self;
        let seat = seat.as_ref().expect("it is there until the end");
        let work = work(seat.store().live(), port);
        context.run(work).map_err(|e| failed(what, path, e))
    }

    /// What the store and its volumes say of themselves.
    pub fn list(&self) -> StoreListed {
        let live = self.seat.as_ref().expect("it is there until the end").store().live();
        StoreListed {
            path: self.path.display().to_string(),
            store: live.info(),
            volumes: live.list(),
        }
    }

    /// Does something with a volume, durably. One that a disk uses is neither rolled back nor deleted.
    ///
    /// # Errors
    /// It cannot be done: nothing has changed.
    pub fn change(&mut self, volume: &Name, change: &Change) -> Result<VolumeDone, DiskError> {
        let what = change.what(&self.path, volume);
        let store = self.seat.as_ref().expect("it is there until the end").store().clone();
        // From here on its name means this volume, and no disk begins to use it.
        let _changing = store.changing();
        let number = store.live().volume(volume.as_str());
        if let Change::Rollback(_) | Change::Delete = change
            && number.is_some_and(|number| store.is_used(number))
        {
            let why = "a disk uses it";
            let help = match change {
                Change::Delete => "detach that disk first, or end the export",
                _ => {
                    "detach that disk first, or end the export; or have it go on, and make a clone of \
                     the snapshot (ferrite store clone)"
                }
            };
            return Err(DiskError::new(ErrorKind::InUse, what, why, help));
        }
        let done =
            self.run(what, async |live, port| change_live(live, port, volume, change).await)?;
        Ok(change.done(&self.path, done))
    }

    /// Finds out what no volume has any more, and frees its space. `goes_on` says when to stop.
    ///
    /// # Errors
    /// Metadata are damaged, cannot be read, or it was told to stop: nothing is lost then.
    pub fn collect(&mut self, goes_on: &dyn Fn() -> bool) -> Result<StoreCollected, DiskError> {
        let what = cannot_collect(&self.path);
        let (passed, free_bytes) = self.run(what, async |live, port| {
            let passed = until_stopped(goes_on, live.gc(port)).await?;
            Ok((passed, live.info().free_bytes))
        })?;
        Ok(StoreCollected::of(&self.path, passed, free_bytes))
    }

    /// What the store's space is for.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    pub fn stats(&mut self, goes_on: &dyn Fn() -> bool) -> Result<StoreStats, DiskError> {
        let what = cannot_look(&self.path);
        let stats =
            self.run(what, async |live, port| until_stopped(goes_on, live.stats(port)).await)?;
        Ok(StoreStats { path: self.path.display().to_string(), stats })
    }
}

impl Drop for ServedStore {
    fn drop(&mut self) {
        let Some(seat) = self.seat.take() else { return };
        if seat.is_last() {
            let (store, port) = (seat.store().clone(), &self.port);
            // What was done is durable. The next opening carries out what no checkpoint has.
            let _ = self.context.run(store.live().close(port));
        }
        seat.leave();
    }
}
