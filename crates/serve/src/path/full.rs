//! Full storage: the policy for it, and the number of a device's requests that wait for space.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// The policy for a request whose storage has no space for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// It fails with an error.
    #[default]
    Error,
    /// It is not answered until there is space.
    Wait,
}

impl fmt::Display for OnFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnFull::Error => "error",
            OnFull::Wait => "wait",
        })
    }
}

impl FromStr for OnFull {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "error" => Ok(OnFull::Error),
            "wait" => Ok(OnFull::Wait),
            _ => {
                Err(format!("{s:?} is nothing that can be done on a full disk; use error or wait"))
            }
        }
    }
}

/// Whether an error says that there is no space, or no more of it for this user.
pub(super) fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A device's policy for full storage, and its waiting requests.
#[derive(Debug, Default)]
pub(super) struct Full {
    /// Whether requests wait for space. If not, they fail.
    waits_for_space: AtomicBool,
    waits: Mutex<Waits>,
}

/// The requests of all paths that wait for space, and since when.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pub(super) requests: usize,
    pub(super) since_ns: u64,
}

impl Full {
    pub(super) fn policy(&self) -> OnFull {
        if self.waits_for_space.load(Relaxed) { OnFull::Wait } else { OnFull::Error }
    }

    pub(super) fn set_policy(&self, policy: OnFull) {
        self.waits_for_space.store(policy == OnFull::Wait, Relaxed);
    }

    pub(super) fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_said_as_they_are_read() {
        for policy in [OnFull::Error, OnFull::Wait] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("panic".parse::<OnFull>().is_err());
    }

    #[test]
    fn a_quota_is_space_too() {
        for (errno, full) in [(28, true), (122, true), (5, false)] {
            assert_eq!(is_full(&io::Error::from_raw_os_error(errno)), full);
        }
    }
}
