//! Syncs data that were written to a disk's images before they became parents.
//!
//! If another program makes a child of an image whose backend was killed, the guest goes on with the child, and expects
//! a flush to cover all earlier answers. The dead process's writes may not be on the medium yet; if they only replaced
//! data, no record tells of them. So the first flush syncs the parents, too. No process writes to them from
//! then on; a toolstack's coalesce does, and syncs what it writes.

use std::fmt;
use std::io;
use std::sync::Weak;
use std::sync::atomic::{AtomicU8, Ordering};

use ferrite_disk_base::{Port, SyncWitness, Witnesses};
use ferrite_io::reactor::Unheard;
use ferrite_io::shared_lock::SharedLock;

use super::layer::Layer;

const DUE: u8 = 0;
const DONE: u8 = 1;
/// A sync has failed. The kernel reports that once.
const FAULTY: u8 = 2;

/// Whether the parents are synced; see the module text.
pub(super) struct ParentSync {
    state: AtomicU8,
    syncing: SharedLock,
    witnesses: Witnesses,
}

impl ParentSync {
    /// The state for a chain of so many layers.
    pub(super) fn new(layers: usize) -> ParentSync {
        let state = if layers > 1 { DUE } else { DONE };
        ParentSync {
            state: AtomicU8::new(state),
            syncing: SharedLock::new(),
            witnesses: Witnesses::default(),
        }
    }

    /// Sets the witness that is told first of a failed sync.
    pub(super) fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.witnesses.add(witness, || self.is_faulty());
    }

    /// Notes a failed sync: the kernel has dropped the data.
    fn fail(&self, e: &io::Error) {
        self.witnesses.tell(e, || self.state.store(FAULTY, Ordering::Release));
    }

    fn unheard(&self, how: Unheard) {
        match how {
            Unheard::Failed => {
                self.fail(&io::Error::other("a sync has failed after its task had ended"))
            }
            // The next process syncs again.
            Unheard::Unknown => self.state.store(FAULTY, Ordering::Release),
        }
    }

    /// Whether a sync has failed.
    pub(super) fn is_faulty(&self) -> bool {
        self.state.load(Ordering::Acquire) == FAULTY
    }

    /// Syncs the parents, once.
    pub(super) async fn ensure(&self, port: &Port, layers: &[Layer]) -> io::Result<()> {
        if self.state.load(Ordering::Acquire) == DONE {
            return Ok(());
        }
        let _alone = self.syncing.lock(&port.io).await?;
        match self.state.load(Ordering::Acquire) {
            DONE => return Ok(()),
            FAULTY => {
                let text = "a sync of a parent has failed, and what was written before may be lost";
                return Err(io::Error::other(text));
            }
            _ => {}
        }
        for (layer, file) in layers.iter().zip(&port.files[..]).skip(1) {
            if !layer.medium().can_sync_read_only() {
                continue;
            }
            let synced = port.io.sync_heard(*file, |how| self.unheard(how)).await;
            synced.inspect_err(|e| self.fail(e))?;
        }
        self.state.store(DONE, Ordering::Release);
        Ok(())
    }
}

impl fmt::Debug for ParentSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ParentSync").field(&self.state).finish()
    }
}
