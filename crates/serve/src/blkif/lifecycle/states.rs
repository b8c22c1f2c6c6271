//! The xenbus states of both sides.

/// XenbusState, `xen/include/public/io/xenbus.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The node is missing or invalid.
    #[default]
    Unknown = 0,
    /// Initialising, 1.
    Initialising = 1,
    /// Initialised for waiting, 2.
    InitWait = 2,
    /// Initialised, 3.
    Initialised = 3,
    /// Connected, 4.
    Connected = 4,
    /// Closing, 5.
    Closing = 5,
    /// Closed, 6.
    Closed = 6,
    /// Reconfiguring, 7.
    Reconfiguring = 7,
    /// Reconfigured, 8.
    Reconfigured = 8,
}

impl State {
    pub(super) fn parse(value: Option<&[u8]>) -> State {
        match value {
            Some(b"1") => State::Initialising,
            Some(b"2") => State::InitWait,
            Some(b"3") => State::Initialised,
            Some(b"4") => State::Connected,
            Some(b"5") => State::Closing,
            Some(b"6") => State::Closed,
            Some(b"7") => State::Reconfiguring,
            Some(b"8") => State::Reconfigured,
            _ => State::Unknown,
        }
    }
}

/// All states, read at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) front: State,
    /// The frontend has written its state since the last read, whatever the value.
    pub(super) frontend_changed: bool,
    pub(super) own: State,
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
        matches!(self.own, State::Unknown | State::Initialising | State::InitWait)
    }
}

/// Whether a predecessor had connected this frontend and it has not closed since: it may have
/// requests in flight. Closing on the backend's side is the toolstack's wish to unplug. On the
/// frontend's side it need not be the end: old blkfronts with a mounted file system go on with I/O.
pub(super) fn is_in_use(own: State, front: State) -> bool {
    matches!(own, State::Connected | State::Closing) && is_held(front)
}

fn is_held(front: State) -> bool {
    matches!(front, State::Initialised | State::Connected | State::Closing)
}
