//! Frontends that cannot be connected, and whose fault that is.

use ferrite_xen::store::StoreError;

use super::error::ServeError;
use super::messages::Failure;
use crate::blkif::negotiate::NegotiateError;

/// Why a connection was not made.
pub(super) enum Refusal {
    /// The guest's doing; it is told, and everything else goes on.
    Guest(String),
    /// The predecessor had connected other rings.
    OtherRings(String),
    /// The predecessor had another image.
    WrongImage(String),
    /// Ours.
    Host(ServeError),
}

impl From<NegotiateError> for Refusal {
    fn from(e: NegotiateError) -> Self {
        match e {
            // A guest can do no more to our reading than forbid it; any other want of xenstored's
            // is none of its doing, and must not cost it the disk (threats.md T6).
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
