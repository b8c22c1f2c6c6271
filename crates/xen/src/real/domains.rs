//! The states of the host's domains.

use std::io;
use std::sync::{Mutex, PoisonError};

use super::{HostProcessors, uapi};
use crate::hypervisor::{DomId, DomainState, Domains};

/// The way to ask Xen for it. It takes a control domain's rights.
#[derive(Debug)]
pub struct HostDomains(Mutex<HostProcessors>);

impl HostDomains {
    /// Opens it.
    ///
    /// # Errors
    /// A device is missing, this is no control domain, or Xen has none of the versions known here.
    pub fn open() -> io::Result<HostDomains> {
        HostProcessors::open().map(|xen| HostDomains(Mutex::new(xen)))
    }
}

impl Domains for HostDomains {
    fn state(&self, domid: DomId) -> io::Result<DomainState> {
        let mut xen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(xen.domain_flags(domid)?.map_or(DomainState::Gone, by_flags))
    }
}

fn by_flags(flags: u32) -> DomainState {
    let reason = flags >> uapi::SHUTDOWN_SHIFT & uapi::SHUTDOWN_MASK;
    match flags & uapi::DOMAIN_SHUTDOWN != 0 && reason == uapi::SHUTDOWN_SUSPEND {
        true => DomainState::Suspended,
        false => DomainState::Runs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_suspended_by_its_own_word_only() {
        // Flags of Xen 4.20: HVM and HAP are set, and the bits between are of the scheduler.
        let flags = |shutdown: u32, reason: u32| 1 << 1 | 1 << 8 | shutdown << 2 | reason << 16;
        assert_eq!(by_flags(flags(1, 2)), DomainState::Suspended);
        for (shutdown, reason) in [(0, 0), (1, 0), (1, 1), (1, 3), (0, 2)] {
            assert_eq!(by_flags(flags(shutdown, reason)), DomainState::Runs);
        }
        // One that is paused is not suspended: it may have requests in flight.
        assert_eq!(by_flags(flags(0, 0) | 1 << 3), DomainState::Runs);
    }
}
