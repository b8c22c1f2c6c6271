//! State that several parts of a store in use need.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use ferrite_disk_base::{Epochs, Port};

use crate::checkpoint::{Core, lock};
use crate::index::Index;
use crate::layout::{Layout, LayoutInUse};
use crate::medium::Medium;
use crate::slots::Slots;
use crate::space::{SpacePage, UNREADABLE};

/// The medium, the core, and the structures that are read without the core's lock.
pub(super) struct Shared {
    pub(super) medium: Medium,
    layout: Arc<LayoutInUse>,
    /// The leaves in memory, for readers without the core's lock.
    pub(super) slots: Arc<Slots>,
    pub(super) index: Index,
    pub(super) epochs: Arc<Epochs>,
    core: Mutex<Core>,
}

impl Shared {
    pub(super) fn new(medium: Medium, core: Core, index: Index) -> Shared {
        Shared {
            medium,
            layout: core.in_use.clone(),
            slots: core.pages.slots().clone(),
            index,
            epochs: Epochs::new(),
            core: Mutex::new(core),
        }
    }

    /// The layout as it is now, without the core's lock.
    #[inline]
    pub(super) fn layout(&self) -> Layout {
        self.layout.now()
    }

    /// Locks the core. The caller must not wait while it holds the guard.
    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// The core with its lock, for a function that locks it several times.
    pub(super) fn core_mutex(&self) -> &Mutex<Core> {
        &self.core
    }

    /// Makes the dropped places free that no operation can refer to any more.
    pub(super) fn release(&self) {
        let ended = self.epochs.ended();
        self.core().space.release(ended);
    }

    /// Reads the space page of a segment into memory. If a checkpoint ended meanwhile, the page may be outdated.
    /// Then it is not used, and the caller must try again.
    ///
    /// # Errors
    /// The kernel's. A page that is damaged or unreadable is no error: the segment counts as fully used.
    pub(super) async fn load_bits(&self, port: &Port, segment: u64) -> io::Result<()> {
        let (checkpoint, home, id, layout) = {
            let core = self.core();
            (core.checkpoint, core.space.home(segment), core.id, core.layout)
        };
        let place = layout.space_page(segment, home as u64);
        let page = self.medium.read_each(port, place, 1).await?.remove(0);
        let page = page.map_err(|_| UNREADABLE);
        let page = page.and_then(|page| SpacePage::decode(&page, &id, &layout, segment, home));
        let mut core = self.core();
        if core.checkpoint == checkpoint {
            core.space.load(segment, page);
        }
        Ok(())
    }
}
