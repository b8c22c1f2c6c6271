//! Compaction of a store: orders content, and compresses it.

use std::io;
use std::path::Path;

use ferrite_disk_base::{DiskError, Port};
use ferrite_store::live::Live;
use ferrite_store::pace::Pace;
use ferrite_store::page::Packing;

use super::{MEMORY, StoreCompacted, cannot_compact, failed, until_stopped};
use crate::{ImageTools, Progress};

/// The most rounds: each makes room for the next one.
const ROUNDS: usize = 16;

impl ImageTools<'_> {
    /// Sets how content of a store is compressed from now on.
    ///
    /// # Errors
    /// It is in use, damaged, or cannot be written.
    pub fn set_packing(&self, store: &Path, packing: Option<Packing>) -> Result<(), DiskError> {
        let what = format!("cannot change store {}", store.display());
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let set = async {
            let live = Live::open(&port, bytes, MEMORY).await?;
            live.set_packing(&port, packing).await?;
            live.close(&port).await
        };
        context.run(set).map_err(|e| failed(what, store, e))
    }

    /// Rewrites content in the order in which it is read, compressed if the store is, and frees the old space.
    ///
    /// # Errors
    /// It is in use, damaged, or cannot be read or written, or was stopped: no data are lost then.
    pub fn compact_store(&self, store: &Path) -> Result<StoreCompacted, DiskError> {
        let what = cannot_compact(store);
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        let compacted = until_stopped(&goes_on, async {
            let live = Live::open(&port, bytes, MEMORY).await?;
            compact_live(&live, &port, &Pace::unbounded()).await?;
            live.close(&port).await?;
            Ok(StoreCompacted::of(store, &live))
        });
        context.run(compacted).map_err(|e| failed(what, store, e))
    }
}

/// Compacts in rounds, as long as that makes room.
pub(super) async fn compact_live(live: &Live, port: &Port, pace: &Pace) -> io::Result<()> {
    let mut moved = live.work().compaction.moved_bytes;
    for _ in 0..ROUNDS {
        live.begin_compaction();
        while live.compact(port, pace).await?.is_some() {}
        live.gc_at(port, pace).await?;
        let now = live.work().compaction.moved_bytes;
        if now == std::mem::replace(&mut moved, now) {
            break;
        }
    }
    Ok(())
}
