//! Errors of a device, in the nodes where toolstacks read them.

use ferrite_xen::store::{Store, StoreError};

use super::Backend;
use super::attachment::error_path;

impl Backend<'_> {
    /// Writes an error where xl and the kernel's drivers do, for `xenstore-ls` and toolstacks. A
    /// guest can cause errors, so a refusal by xenstored (a quota, for example) does not end the
    /// backend.
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

    /// Removes an error that does not hold any more.
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

/// Removes a device's errors. If they were the guest's last ones, its node is removed, too: each
/// start of a guest uses another domain number.
///
/// # Errors
/// Errors of xenstore.
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
