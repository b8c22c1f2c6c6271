//! The xenbus states of both sides.

use ferrite_xen::xenbus::XenbusState;

/// All states, read at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) front: XenbusState,
    /// The frontend has written its state since the last read, whatever the value.
    pub(super) frontend_changed: bool,
    pub(super) own: XenbusState,
    pub(super) online: bool,
    /// The toolstack's hotplug script, if there is one, has connected the disk.
    pub(super) plugged: bool,
    /// The toolstack has removed the directory. It may have made another one in its place.
    pub(super) gone: bool,
    /// The guest does not exist any more.
    pub(super) dead: bool,
}

impl Snapshot {
    /// Whether a predecessor had connected the frontend, see [`is_in_use`].
    pub(super) fn is_in_use(&self) -> bool {
        is_in_use(self.own, self.front)
    }

    /// Whether the disk is to go, by the toolstack's wish or with its guest.
    pub(super) fn is_unwanted(&self) -> bool {
        !self.online || self.dead
    }

    /// Whether the frontend has not let go of the disk.
    pub(super) fn is_held(&self) -> bool {
        is_held(self.front)
    }

    /// Whether this directory was not served before, or a predecessor got no further than its
    /// offer. Otherwise the backend's state follows from the frontend's.
    pub(super) fn is_fresh(&self) -> bool {
        matches!(self.own, XenbusState::Unknown | XenbusState::Initialising | XenbusState::InitWait)
    }
}

/// Whether a predecessor had connected this frontend and it has not closed since: it may have
/// requests in flight. Closing on the backend's side is the toolstack's wish to unplug. On the
/// frontend's side it need not be the end: old blkfronts with a mounted file system go on with I/O.
pub(super) fn is_in_use(own: XenbusState, front: XenbusState) -> bool {
    matches!(own, XenbusState::Connected | XenbusState::Closing) && is_held(front)
}

fn is_held(front: XenbusState) -> bool {
    matches!(front, XenbusState::Initialised | XenbusState::Connected | XenbusState::Closing)
}
