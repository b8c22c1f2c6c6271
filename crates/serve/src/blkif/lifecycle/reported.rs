//! What is wrong with a device, where toolstacks look for it.

use ferrite_xen::store::{Store, StoreError};

use super::Backend;
use super::attachment::error_path;

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
