//! What xenstore says of both sides.

/// XenbusState, `xen/include/public/io/xenbus.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// No such node, or nothing that can be understood.
    #[default]
    Unknown = 0,
    /// 1
    Initialising = 1,
    /// 2
    InitWait = 2,
    /// 3
    Initialised = 3,
    /// 4
    Connected = 4,
    /// 5
    Closing = 5,
    /// 6
    Closed = 6,
    /// 7
    Reconfiguring = 7,
    /// 8
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

/// All states at one look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) front: State,
    /// The frontend has written its state since the last look, whatever it wrote.
    pub(super) moved: bool,
    pub(super) own: State,
    pub(super) online: bool,
    /// The toolstack's hotplug script, if it runs one, has connected the disk.
    pub(super) plugged: bool,
    /// The toolstack has removed the directory, whether or not it has made another one in its place.
    pub(super) gone: bool,
    /// The guest does not exist any more.
    pub(super) dead: bool,
}

impl Look {
    /// See [`is_in_use`].
    pub(super) fn is_in_use(&self) -> bool {
        is_in_use(self.own, self.front)
    }

    /// The disk is to go, by the toolstack's wish or with its guest.
    pub(super) fn is_unwanted(&self) -> bool {
        !self.online || self.dead
    }

    /// The frontend has not let go of it.
    pub(super) fn is_held(&self) -> bool {
        is_held(self.front)
    }

    /// Nobody has served this directory before, or a predecessor that got no further than its
    /// offer. Otherwise our state follows from the frontend's.
    pub(super) fn is_fresh(&self) -> bool {
        matches!(self.own, State::Unknown | State::Initialising | State::InitWait)
    }
}

/// A predecessor had connected this frontend, and it has not closed since: it may have requests in
/// flight. Closing on our side is the toolstack's wish to unplug; on the frontend's it need not be
/// its end: old blkfronts with a mounted file system do I/O there as before.
pub(super) fn is_in_use(own: State, front: State) -> bool {
    matches!(own, State::Connected | State::Closing) && is_held(front)
}

fn is_held(front: State) -> bool {
    matches!(front, State::Initialised | State::Connected | State::Closing)
}
