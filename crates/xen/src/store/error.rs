//! Errors of xenstore, in words that say what to do.

use std::fmt;
use std::io;

use super::wire::{ErrorName, WireError};

/// A request as errors name it: `write /local/domain/0/backend/vbd/1/51712/state`.
#[derive(Clone, Copy, Debug)]
pub(super) struct What<'a> {
    pub(super) verb: &'static str,
    /// Empty where there is none.
    pub(super) path: &'a str,
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verb)?;
        if self.path.is_empty() {
            return Ok(());
        }
        // A path that is refused for its length must not fill the log either (threats.md T16).
        let shown: String = self.path.chars().take(256).collect();
        write!(f, " {}{}", shown.escape_debug(), if shown == self.path { "" } else { "..." })
    }
}

/// Why xenstore did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// None of the ways to xenstore is there.
    #[error(
        "cannot reach xenstore ({tried}); run in a Xen domain, as root, with xenstored started"
    )]
    Unreachable {
        /// Each way and why it failed.
        tried: String,
    },
    /// No such node, where that is an error and not an answer. xenstored says the same of
    /// permissions for a domain that does not exist.
    #[error("xenstore: cannot {what}: no such node (or, in permissions, no such domain)")]
    NotFound {
        /// The request.
        what: String,
    },
    /// The node's permissions are against it.
    #[error(
        "xenstore: cannot {what}: permission denied; the node's permissions exclude this domain"
    )]
    Access {
        /// The request.
        what: String,
    },
    /// A transaction conflicted with others each time it was tried.
    #[error(
        "xenstore: a transaction was given up after {attempts} attempts because others kept \
         changing the same nodes; try again later"
    )]
    Again {
        /// How often it was tried.
        attempts: u32,
    },
    /// A limit of xenstored.
    #[error(
        "xenstore: cannot {what}: {name}, a limit of xenstored for this domain is reached; remove \
         unused nodes and watches, or raise its quota"
    )]
    Quota {
        /// The request.
        what: String,
        /// xenstored's word.
        name: &'static str,
    },
    /// Any other refusal.
    #[error("xenstore: cannot {what}: xenstored answered {name}")]
    Refused {
        /// The request.
        what: String,
        /// xenstored's word.
        name: String,
    },
    /// An argument, or a value that was read, is not what it has to be.
    #[error("xenstore: cannot {what}: {why}")]
    Invalid {
        /// The request.
        what: String,
        /// The fault.
        why: &'static str,
    },
    /// No answer in time. The request may still be carried out.
    #[error("xenstore: cannot {what}: no answer within {seconds} s; check that xenstored runs")]
    Timeout {
        /// The request.
        what: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The connection failed. It is of no more use.
    #[error("xenstore: cannot {what}: {source}; connect again")]
    Io {
        /// The request.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The other end does not keep to the protocol. The connection is of no more use.
    #[error("xenstore: cannot {what}: the other end broke the protocol: {why}; connect again")]
    Protocol {
        /// The request.
        what: String,
        /// How.
        why: String,
    },
    /// The connection failed before, at an earlier request.
    #[error("xenstore: cannot {what}: the connection was given up earlier ({why}); connect again")]
    Dead {
        /// The request.
        what: String,
        /// The error that followed.
        why: String,
    },
}

impl StoreError {
    /// From an error reply's payload.
    pub(super) fn refused(what: What<'_>, payload: &[u8]) -> Self {
        match ErrorName::from_payload(payload) {
            Some(name) => Self::named(what, name),
            None => {
                let shown = &payload[..payload.len().min(64)];
                let name = String::from_utf8_lossy(shown).escape_debug().to_string();
                StoreError::Refused { what: what.to_string(), name }
            }
        }
    }

    /// From an error's name.
    pub(super) fn named(what: What<'_>, name: ErrorName) -> Self {
        let what = what.to_string();
        match name {
            ErrorName::NoEnt => StoreError::NotFound { what },
            ErrorName::Acces | ErrorName::Perm | ErrorName::RoFs => StoreError::Access { what },
            ErrorName::Again => StoreError::Again { attempts: 1 },
            ErrorName::NoSpc | ErrorName::Quota => StoreError::Quota { what, name: name.name() },
            _ => StoreError::Refused { what, name: name.name().to_owned() },
        }
    }

    pub(super) fn invalid(what: What<'_>, why: &'static str) -> Self {
        StoreError::Invalid { what: what.to_string(), why }
    }

    pub(super) fn protocol(what: What<'_>, why: impl Into<String>) -> Self {
        StoreError::Protocol { what: what.to_string(), why: why.into() }
    }

    /// Whether the connection is of no more use: connect again, and set all watches again.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self,
            StoreError::Unreachable { .. }
                | StoreError::Io { .. }
                | StoreError::Protocol { .. }
                | StoreError::Dead { .. }
        )
    }
}

/// Why the connection has to be given up; becomes a [`StoreError`] with the request it hit.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    Protocol(String),
}

impl Broken {
    pub(super) fn at(self, what: What<'_>) -> StoreError {
        match self {
            Broken::Io(source) => StoreError::Io { what: what.to_string(), source },
            Broken::Protocol(why) => StoreError::protocol(what, why),
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Io(source) => source.fmt(f),
            Broken::Protocol(why) => f.write_str(why),
        }
    }
}

impl From<WireError> for Broken {
    fn from(e: WireError) -> Self {
        Broken::Protocol(e.to_string())
    }
}
