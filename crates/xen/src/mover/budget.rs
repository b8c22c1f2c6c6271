//! How many pages of guests may be mapped: by one disk, and by all of this host's.
//!
//! Xen keeps a record of each mapping in a table that the whole backend domain shares, all guests
//! and all backends together: 262,144 entries by default, and a PV domain needs two a page
//! (blkif.md 4.2). One guest must not use it up for the others (XSA-300, threats.md T9).
//!
//! The host's budget is handed out in [`Shares`] of [`UNIT`] pages.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_host::shares::Shares;

use super::Maps;

/// Pages of one claim: the step in which budgets are handed out.
pub(super) const UNIT: usize = 32;

/// The pages that a disk may map by default: four queues' worth.
pub const DISK_MAPPINGS: u32 = 4 * super::QUEUE_MAPPINGS as u32;
/// The pages that all disks of a host together may map by default: half of Xen's default table in a PV
/// domain, and a quarter in others.
pub const HOST_MAPPINGS: u32 = 65_536;

/// A disk's budget.
pub struct Budget {
    disk_units: usize,
    host: Option<Shares>,
    /// The units that are claimed: their places in the host's file, if there is one.
    claimed: Mutex<Vec<u32>>,
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages for this disk", self.disk_units * UNIT)?;
        match &self.host {
            Some(host) => write!(f, ", {} for all of this host", host.units() as usize * UNIT),
            None => Ok(()),
        }
    }
}

impl Budget {
    /// So many mappings for this disk, whatever others have.
    pub fn of_disk(mappings: u32) -> Budget {
        let disk_units = mappings as usize / UNIT;
        Budget { disk_units, host: None, claimed: Mutex::new(Vec::with_capacity(disk_units)) }
    }

    /// So many mappings for this disk, and so many for all that share the file at `path`, which is
    /// made if it is not there. Each of them heeds the number that it was given itself.
    ///
    /// # Errors
    /// The file system's.
    pub fn of_host(path: &Path, host_mappings: u32, disk_mappings: u32) -> io::Result<Budget> {
        let host = Shares::open(path, host_mappings / UNIT as u32)?;
        Ok(Budget { host: Some(host), ..Budget::of_disk(disk_mappings) })
    }

    /// Mappings that are claimed now.
    pub fn claimed(&self) -> usize {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).len() * UNIT
    }

    fn claim(&self) -> Option<u32> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if claimed.len() >= self.disk_units {
            return None;
        }
        let unit = match &self.host {
            Some(host) => host.claim(&claimed)?,
            None => 0,
        };
        claimed.push(unit);
        Some(unit)
    }

    fn release(&self, unit: u32) {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = claimed.iter().position(|u| *u == unit) else { return };
        claimed.swap_remove(at);
        if let Some(Err(e)) = self.host.as_ref().map(|host| host.release(unit)) {
            tracing::warn!("cannot give a share of the mapping budget back: {e}");
        }
    }
}

/// After a refusal, how long not to ask again.
const REFUSED_NS: u64 = 100_000_000;

/// A queue's part of its disk's budget; given back when it is dropped.
pub(super) struct Claims {
    maps: Arc<Maps>,
    units: Vec<u32>,
    refused_until_ns: u64,
}

impl Claims {
    pub(super) fn new(maps: Arc<Maps>) -> Claims {
        Claims { maps, units: Vec::new(), refused_until_ns: 0 }
    }

    /// Pages that may be mapped.
    pub(super) fn pages(&self) -> usize {
        self.units.len() * UNIT
    }

    /// Whether there is room for one page more than `used`, claimed if need be.
    pub(super) fn has_room(&mut self, used: usize, now_ns: u64) -> bool {
        if used < self.pages() {
            return true;
        }
        if now_ns < self.refused_until_ns {
            return false;
        }
        match self.maps.budget.claim() {
            Some(unit) => self.units.push(unit),
            None => {
                self.refused_until_ns = now_ns + REFUSED_NS;
                self.maps.tell_exhausted();
            }
        }
        used < self.pages()
    }

    /// Gives back what `used` pages do not need, but for one unit.
    pub(super) fn shrink(&mut self, used: usize) {
        while self.pages() >= used + 2 * UNIT
            && let Some(unit) = self.units.pop()
        {
            self.maps.budget.release(unit);
        }
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.units.drain(..).for_each(|unit| self.maps.budget.release(unit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("ferrite-budget-{}-{name}", std::process::id()))
    }

    fn claim_all(budget: &Budget) -> Vec<u32> {
        std::iter::from_fn(|| budget.claim()).collect()
    }

    #[test]
    fn a_disk_gets_its_budget_and_no_more() {
        let budget = Budget::of_disk(100);
        assert_eq!(claim_all(&budget).len(), 3);
        assert_eq!(budget.claimed(), 96);
        budget.release(0);
        assert_eq!(budget.claimed(), 64);
        assert!(budget.claim().is_some() && budget.claim().is_none());
        assert!(Budget::of_disk(31).claim().is_none());
    }

    #[test]
    fn the_disks_of_a_host_share_and_get_back_what_others_leave() {
        let path = path("share");
        let [a, b, c] = [(); 3].map(|()| Budget::of_host(&path, 640, 384).unwrap());
        let (of_a, of_b) = (claim_all(&a), claim_all(&b));
        assert_eq!((of_a.len(), of_b.len(), claim_all(&c).len()), (12, 8, 0));
        let mut all: Vec<u32> = of_a.iter().chain(&of_b).copied().collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..20), "no place twice, and all of them");
        a.release(of_a[5]);
        b.release(of_b[0]);
        let mut got = claim_all(&c);
        got.sort_unstable();
        let mut left = [of_a[5], of_b[0]];
        left.sort_unstable();
        assert_eq!(got, left);
        // As when its process ends.
        drop(a);
        assert_eq!(claim_all(&c).len(), 10);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_queue_claims_as_it_grows_and_gives_back_as_it_shrinks() {
        let maps = Maps::new(Budget::of_disk(96), ferrite_host::clock::SystemClock::shared());
        let mut claims = Claims::new(maps.clone());
        for used in 0..96 {
            assert!(claims.has_room(used, 1), "{used}");
            assert_eq!(claims.pages(), (used / UNIT + 1) * UNIT);
        }
        assert!(!claims.has_room(96, 1));
        claims.shrink(96);
        assert_eq!(maps.budget().claimed(), 96);
        claims.shrink(33);
        assert_eq!(maps.budget().claimed(), 96, "one unit is kept");
        claims.shrink(31);
        assert_eq!(maps.budget().claimed(), 64);
        drop(claims);
        assert_eq!(maps.budget().claimed(), 0);
    }

    #[test]
    fn who_was_refused_does_not_ask_again_at_once() {
        let maps = Maps::new(Budget::of_disk(32), ferrite_host::clock::SystemClock::shared());
        let (mut first, mut second) = (Claims::new(maps.clone()), Claims::new(maps.clone()));
        assert!(first.has_room(0, 0));
        assert!(!second.has_room(0, 0));
        drop(first);
        assert!(!second.has_room(0, REFUSED_NS - 1));
        assert!(second.has_room(0, REFUSED_NS));
    }
}
