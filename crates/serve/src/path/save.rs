//! Metadata gets to the medium though no flush asks for it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, Port};

use super::RequestPath;
use super::parking::Medium;

/// How long metadata may stay behind what was answered if no flush comes.
const SAVE_AFTER: Duration = Duration::from_secs(2);

/// What a path's task for this knows. It holds no disk while it sleeps.
#[derive(Clone, Default)]
pub(super) struct Saver(Rc<State>);

#[derive(Default)]
struct State {
    /// A flush that no request asked for is under way.
    under_way: Cell<bool>,
    /// The disk that the path has now.
    current: RefCell<Option<(Arc<Disk>, Port)>>,
}

impl Saver {
    pub(super) fn is_under_way(&self) -> bool {
        self.0.under_way.get()
    }

    /// The path has this disk from now on.
    pub(super) fn remember(&self, medium: &Medium) {
        self.0.current.replace(Some((medium.disk.clone(), medium.port.clone())));
    }

    /// It has none.
    pub(super) fn forget(&self) {
        self.0.current.replace(None);
    }
}

impl RequestPath {
    /// Sees to it that what was answered gets into the image's metadata though no flush asks for
    /// it: until then a crash of the host would lose it, however long ago it was written.
    pub(super) fn save_soon(&mut self) {
        let mut duty = self.seat.device().take_saving(&self.medium.disk);
        if duty.is_none() {
            return;
        }
        let (device, io) = (self.seat.device().clone(), self.medium.port.io.clone());
        let Saver(state) = self.saver.clone();
        self.reactor.spawn(async move {
            while let Some(saving) = duty {
                // A sleep that fails is none.
                let _ = io.sleep(SAVE_AFTER).await;
                // Whoever parks the disk sees to what was answered before.
                let Some((disk, port)) = state.current.borrow().clone() else { break };
                state.under_way.set(true);
                let saved = device.flush(&disk, &port).await;
                state.under_way.set(false);
                drop(saving);
                // Writes that were answered meanwhile found somebody at it. A flush that failed
                // for good has told so; one that lacked space may have some the next time.
                let again = saved.is_ok() || !device.flush_has_failed();
                duty = if again { device.take_saving(&disk) } else { None };
            }
        });
    }
}
