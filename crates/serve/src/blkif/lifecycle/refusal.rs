//! Connections that cannot be made, sorted by their cause.

use ferrite_xen::store::StoreError;

use super::error::ServeError;
use super::messages::Failure;
use crate::blkif::negotiate::NegotiateError;

/// Why a connection was not made.
pub(super) enum Refusal {
    /// The guest is at fault. It is told, and everything else goes on.
    Guest(String),
    /// The predecessor had connected other rings.
    OtherRings(String),
    /// The predecessor had another image.
    WrongImage(String),
    /// The host is at fault.
    Host(ServeError),
}

impl From<NegotiateError> for Refusal {
    fn from(e: NegotiateError) -> Self {
        match e {
            // A guest can only forbid a read. Any other failure of xenstored is not its fault, and
            // must not cost it the disk (threats.md T6).
            NegotiateError::Store(e) if !matches!(e, StoreError::Access { .. }) => {
                Refusal::Host(e.into())
            }
            e => Refusal::Guest(e.to_string()),
        }
    }
}

impl From<ServeError> for Refusal {
    fn from(e: ServeError) -> Self {
        Refusal::Host(e)
    }
}

impl From<StoreError> for Refusal {
    fn from(e: StoreError) -> Self {
        Refusal::Host(e.into())
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(why) => Refusal::Guest(why),
            Failure::OtherRings(why) => Refusal::OtherRings(why),
            Failure::WrongImage(why) => Refusal::WrongImage(why),
            failure => Refusal::Host(failure.into()),
        }
    }
}
