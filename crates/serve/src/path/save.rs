//! Saves metadata to the medium without a flush of the guest.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, Port};

use super::RequestPath;
use super::parking::Medium;

/// The longest time that metadata may stay unsaved if no flush comes.
const SAVE_AFTER: Duration = Duration::from_secs(2);

/// The state of a path's saving task. It holds no disk while it sleeps.
#[derive(Clone, Default)]
pub(super) struct Saver(Rc<State>);

#[derive(Default)]
struct State {
    /// Whether a flush that no request asked for is under way.
    under_way: Cell<bool>,
    /// The current disk of the path.
    current: RefCell<Option<(Arc<Disk>, Port)>>,
}

impl Saver {
    pub(super) fn is_under_way(&self) -> bool {
        self.0.under_way.get()
    }

    /// Sets the current disk.
    pub(super) fn remember(&self, medium: &Medium) {
        self.0.current.replace(Some((medium.disk.clone(), medium.port.clone())));
    }

    /// Removes the disk.
    pub(super) fn forget(&self) {
        self.0.current.replace(None);
    }
}

impl RequestPath {
    /// Saves the metadata of answered requests after a while, if no flush comes. Until then a crash
    /// of the host would lose them, even if they were written long ago.
    pub(super) fn save_soon(&mut self) {
        let mut claim = self.member.device().claim_saving(&self.medium.disk);
        if claim.is_none() {
            return;
        }
        let (device, io) = (self.member.device().clone(), self.medium.port.io.clone());
        let Saver(state) = self.saver.clone();
        self.reactor.spawn(async move {
            while let Some(saving) = claim {
                // A failed sleep ends at once.
                let _ = io.sleep(SAVE_AFTER).await;
                // The parker saves everything that was answered before.
                let Some((disk, port)) = state.current.borrow().clone() else { break };
                state.under_way.set(true);
                let saved = device.flush(&disk, &port).await;
                state.under_way.set(false);
                drop(saving);
                // Writes that were answered meanwhile found the saving claimed. A flush that failed
                // for good was logged. One that lacked space may succeed the next time.
                let again = saved.is_ok() || !device.flush_has_failed();
                claim = if again { device.claim_saving(&disk) } else { None };
            }
        });
    }
}
