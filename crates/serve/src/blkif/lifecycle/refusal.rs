//! Frontends that cannot be connected, and whose fault that is.

use ferrite_xen::store::{Store, StoreError};

use super::attachment::error_path;
use super::messages::Failure;
use super::{Backend, ServeError};
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

impl Backend<'_> {
    /// Where xl and the kernel's drivers leave errors, for `xenstore-ls` and toolstacks. A guest
    /// can cause it, so that xenstored refuses it (a quota, say) is no reason to end.
    pub(super) fn report_error(&mut self, why: &str) -> Result<(), StoreError> {
        let path = error_path(self.backend);
        match self.store.write(&path, format!("1 {why}").as_bytes()) {
            Err(e) if !e.is_fatal() => {
                tracing::debug!("cannot report an error in xenstore: {e}");
                Ok(())
            }
            result => result,
        }
    }

    /// What was reported holds no longer.
    pub(super) fn clear_error(&mut self) -> Result<(), StoreError> {
        match clear_error(self.store, self.backend) {
            Err(e) if !e.is_fatal() => {
                tracing::debug!("cannot remove an error from xenstore: {e}");
                Ok(())
            }
            result => result,
        }
    }
}

/// Removes what was reported of the device with this directory, and the node of its guest if that
/// was all: domain numbers are used up, one a start.
///
/// # Errors
/// xenstore's.
pub fn clear_error(store: &mut Store, backend: &str) -> Result<(), StoreError> {
    let error = error_path(backend);
    if store.read(&error)?.is_none() {
        return Ok(());
    }
    let of_device = error.rsplit_once('/').map_or("", |(dir, _)| dir);
    let of_guest = of_device.rsplit_once('/').map_or("", |(dir, _)| dir);
    store.transaction(|tx| {
        tx.remove(of_device)?;
        match tx.list(of_guest) {
            Ok(devices) if devices.is_empty() => tx.remove(of_guest),
            Ok(_) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    })
}
