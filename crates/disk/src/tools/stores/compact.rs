//! Content of a store put in order, and compressed.

use std::path::Path;

use super::{MEMORY, StoreCompacted, failed};
use crate::DiskError;
use crate::store::live::Live;
use crate::store::pace::Pace;
use crate::store::page::Packing;
use crate::tools::{ImageTools, Progress};

/// Rounds at most: each makes room for the next one.
const ROUNDS: usize = 16;

impl ImageTools<'_> {
    /// Chooses how content of a store is compressed from now on.
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

    /// Puts content into the order in which it is read, compressed if the store is, and frees what it leaves.
    ///
    /// # Errors
    /// It is in use, damaged, or cannot be read or written, or was told to stop: nothing is lost then.
    pub fn compact_store(&self, store: &Path) -> Result<StoreCompacted, DiskError> {
        let what = format!("cannot compact store {}", store.display());
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let compacted = async {
            let live = Live::open(&port, bytes, MEMORY).await?;
            let (pace, mut moved) = (Pace::unbounded(), 0);
            for _ in 0..ROUNDS {
                live.begin_compaction();
                while live.compact(&port, &pace).await?.is_some() {
                    let now = Progress { done_bytes: 0, total_bytes: 0 };
                    if !(self.progress)(now) {
                        return Err(std::io::ErrorKind::Interrupted.into());
                    }
                }
                live.gc(&port).await?;
                let now = live.work().compaction.moved_bytes;
                if now == std::mem::replace(&mut moved, now) {
                    break;
                }
            }
            live.close(&port).await?;
            Ok((live.work().compaction, live.packing(), live.info().free_bytes))
        };
        let (done, compress, free_bytes) =
            context.run(compacted).map_err(|e| failed(what, store, e))?;
        Ok(StoreCompacted {
            path: store.display().to_string(),
            compress,
            moved_bytes: done.moved_bytes,
            packed_bytes: done.packed_bytes,
            packed_to_bytes: done.packed_to_bytes,
            free_bytes,
        })
    }
}
