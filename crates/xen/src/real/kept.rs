//! Devices that outlive the connections that they serve.
//!
//! A worker opens all that it may need while it may, and gives up the right to open anything. A device
//! of one connection goes to the next one, and nothing of the guest may be left in it. Where something
//! could not be undone, the device is closed, which undoes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::hypervisor::DomId;

/// Devices of one kind that are not in use now.
#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<Vec<(OwnedFd, Option<DomId>)>>);

impl Kept {
    pub(super) fn new(devices: Vec<OwnedFd>) -> Arc<Kept> {
        Arc::new(Kept(Mutex::new(devices.into_iter().map(|device| (device, None)).collect())))
    }

    /// One that serves no other domain. None: all are in use.
    pub(super) fn take(self: &Arc<Kept>, domid: DomId) -> Option<Device> {
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = devices.iter().position(|(_, of)| of.is_none_or(|of| of == domid))?;
        let (device, _) = devices.swap_remove(at);
        Some(Device {
            device: Some(device),
            of: Some(domid),
            is_clean: true,
            home: Some(self.clone()),
        })
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// A device in use. It goes back to where it was kept, or is closed.
#[derive(Debug)]
pub(super) struct Device {
    /// Taken by `drop` only.
    device: Option<OwnedFd>,
    of: Option<DomId>,
    is_clean: bool,
    home: Option<Arc<Kept>>,
}

impl Device {
    /// One that is closed when it is dropped.
    pub(super) fn once(device: OwnedFd) -> Device {
        Device { device: Some(device), of: None, is_clean: true, home: None }
    }

    /// Something of the guest may be left in it: only its close takes that away.
    pub(super) fn taint(&mut self) {
        self.is_clean = false;
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_ref().expect("only `drop` takes it").as_fd()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let Some(device) = self.device.take() else { return };
        match &self.home {
            Some(home) if self.is_clean => {
                home.0.lock().unwrap_or_else(PoisonError::into_inner).push((device, self.of));
            }
            Some(_) => {
                tracing::warn!("a device of Xen is closed: the guest may have left something in it")
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Arc<Kept> {
        Kept::new([(); 2].map(|()| std::io::pipe().unwrap().0.into()).into())
    }

    #[test]
    fn a_device_goes_back_and_serves_the_same_domain_only() {
        let kept = kept();
        let [a, b] = [(); 2].map(|()| kept.take(DomId(1)).unwrap());
        assert!(kept.take(DomId(1)).is_none() && kept.count() == 0);
        drop((a, b));
        assert_eq!(kept.count(), 2);
        assert!(kept.take(DomId(2)).is_none());
        assert!(kept.take(DomId(1)).is_some());
    }

    #[test]
    fn what_could_not_be_undone_is_closed() {
        let kept = kept();
        let mut device = kept.take(DomId(1)).unwrap();
        device.taint();
        drop(device);
        assert_eq!(kept.count(), 1);
    }
}
