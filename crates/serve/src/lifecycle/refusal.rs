//! Frontends that cannot be connected, and whose fault that is.

use ferrite_xen::store::StoreError;

use super::ServeError;
use crate::negotiate::NegotiateError;

/// A frontend that was refused is left alone until it moves: no loop of errors.
#[derive(Default)]
pub(super) struct Refused {
    waiting: bool,
}

impl Refused {
    pub(super) fn refuse(&mut self) {
        self.waiting = true;
    }

    pub(super) fn reset(&mut self) {
        self.waiting = false;
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting
    }
}

/// Why a connection was not made.
pub(super) enum Refusal {
    /// The guest's doing; it is told, and everything else goes on.
    Guest(String),
    /// Ours.
    Host(ServeError),
}

impl From<NegotiateError> for Refusal {
    fn from(e: NegotiateError) -> Self {
        match e {
            // A guest can do no more to our reading than forbid it; any other want of xenstored's
            // is none of its doing, and must not cost it the disk (security.md T6).
            NegotiateError::Store(e) if !matches!(e, StoreError::Access { .. }) => {
                Refusal::Host(e.into())
            }
            e => Refusal::Guest(e.to_string()),
        }
    }
}
