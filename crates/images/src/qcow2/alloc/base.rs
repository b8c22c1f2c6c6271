//! State that the allocator shares with the tables: the medium, its syncs, and the lock of mutable state.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::{Commits, Port, Raw};

use crate::qcow2::alloc::state::State;
use crate::qcow2::tables::meta;

/// See the module text.
pub(in crate::qcow2) struct Base {
    pub(in crate::qcow2) medium: Raw,
    pub(in crate::qcow2) commits: Commits,
    state: Mutex<State>,
}

impl Base {
    pub(in crate::qcow2) fn new(medium: Raw, state: State) -> Base {
        let commits = Commits::new();
        commits.end_with(state.changes.journal.void());
        Base { medium, commits, state: Mutex::new(state) }
    }

    pub(in crate::qcow2) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs. After a failed sync, entries that refer to copied clusters must not reach the disk: old data in these may
    /// be lost, too.
    pub(in crate::qcow2) async fn sync(&self, port: &Port) -> io::Result<()> {
        self.commits.sync(port).await
    }

    /// Changes the header's first sector, which has all of its fields, and syncs it. A sector is never torn. One caller
    /// at a time: while the image is in use, it holds `growth`.
    pub(in crate::qcow2) async fn patch_header(
        &self,
        port: &Port,
        change: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let mut sector = meta::read(port, port.files[0], 0, 512).await?;
        change(&mut sector);
        meta::write(port, port.files[0], 0, &sector).await?;
        self.sync(port).await
    }
}
