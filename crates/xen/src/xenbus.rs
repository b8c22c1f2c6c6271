//! The states by which both sides of a device follow each other in xenstore.

use std::fmt;

use crate::store::{Store, StoreError};

/// The state of one side of a device: XenbusState in `xen/include/public/io/xenbus.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum XenbusState {
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

impl XenbusState {
    /// The state that a node's value names. A node that is missing or has any other value is [`XenbusState::Unknown`].
    pub fn parse(value: Option<&[u8]>) -> XenbusState {
        match value {
            Some(b"1") => XenbusState::Initialising,
            Some(b"2") => XenbusState::InitWait,
            Some(b"3") => XenbusState::Initialised,
            Some(b"4") => XenbusState::Connected,
            Some(b"5") => XenbusState::Closing,
            Some(b"6") => XenbusState::Closed,
            Some(b"7") => XenbusState::Reconfiguring,
            Some(b"8") => XenbusState::Reconfigured,
            _ => XenbusState::Unknown,
        }
    }

    /// Reads the state of the side whose directory this is. A driver domain may not read the directory of a guest
    /// that is gone: the state is unknown then.
    ///
    /// # Errors
    /// Other errors of xenstore.
    pub fn read(store: &mut Store, directory: &str) -> Result<XenbusState, StoreError> {
        match store.read(&format!("{directory}/state")) {
            Err(StoreError::Access { .. }) => Ok(XenbusState::Unknown),
            value => Ok(XenbusState::parse(value?.as_deref())),
        }
    }

    /// The number that xenstore has, 0 for [`XenbusState::Unknown`].
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for XenbusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_is_written_and_anything_else_is_unknown() {
        for number in 1..=8_u32 {
            let text = number.to_string();
            let state = XenbusState::parse(Some(text.as_bytes()));
            assert_eq!((state.number(), state.to_string()), (number, text));
        }
        for value in [None, Some(""), Some("0"), Some("9"), Some("04"), Some("4 "), Some("-1")] {
            assert_eq!(XenbusState::parse(value.map(str::as_bytes)), XenbusState::Unknown);
        }
    }
}
