//! The one rule for versions of protocols.

use std::io;

use thiserror::Error;

/// The version of a protocol that this program speaks.
///
/// A program speaks its own version of a protocol and the one before. So two programs speak the
/// lower one of theirs, and those whose versions are farther apart do not speak at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The protocol's name in texts.
    pub protocol: &'static str,
    /// This program's version, from 1.
    pub own: u32,
}

const FIRST: u32 = 1;

/// The version of messages that name none: those of protocols that had none at first.
pub fn first_version() -> u32 {
    FIRST
}

/// A peer speaks no version of a protocol that this program speaks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the other process speaks version {theirs} of {protocol}, and this one {spoken}")]
pub struct UnknownVersion {
    protocol: &'static str,
    theirs: u32,
    spoken: String,
}

impl Version {
    /// The version to speak with a peer that speaks `theirs` and the one before.
    ///
    /// # Errors
    /// The versions are farther apart than one.
    pub fn agree(&self, theirs: u32) -> Result<u32, UnknownVersion> {
        if theirs >= FIRST && theirs.abs_diff(self.own) <= 1 {
            return Ok(theirs.min(self.own));
        }
        Err(self.unknown(theirs))
    }

    /// The version of a message that is read here, if it is this program's own or the one before.
    ///
    /// # Errors
    /// It is another one.
    pub fn read(&self, theirs: u32) -> Result<u32, UnknownVersion> {
        match self.agree(theirs)? {
            version if version == theirs => Ok(version),
            _ => Err(self.unknown(theirs)),
        }
    }

    fn unknown(&self, theirs: u32) -> UnknownVersion {
        let spoken = match self.own {
            FIRST => FIRST.to_string(),
            own => format!("{} and {own}", own - 1),
        };
        UnknownVersion { protocol: self.protocol, theirs, spoken }
    }
}

impl From<UnknownVersion> for io::Error {
    /// Of the kind `Unsupported`, with the next step in its text.
    fn from(e: UnknownVersion) -> Self {
        io::Error::new(io::ErrorKind::Unsupported, format!("{e}: {}", e.help()))
    }
}

impl UnknownVersion {
    /// The next step for the administrator.
    pub fn help(&self) -> &'static str {
        "install the releases of ferrite between the two, one after the other; with each, restart the \
         daemon and run ferrite upgrade"
    }
}
