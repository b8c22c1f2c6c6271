//! Shares of a thing that all processes of a host have together.
//!
//! It is a file of which nothing is ever written: a process that wants a share locks a byte of it. The
//! kernel gives the locks of a process back however it ends, so there is no daemon, and nothing to repair
//! after a crash.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::{byte_locks, names};

/// One holder's way to the shares.
#[derive(Debug)]
pub struct Shares {
    file: File,
    units: u32,
}

impl Shares {
    /// So many shares for all who open the file at `path`, which is made if it is not there. Each
    /// of them heeds the number that it was given itself.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(path: &Path, units: u32) -> io::Result<Shares> {
        let flags = OFlags::RDWR | OFlags::CREATE;
        let file = names::open(path, flags, Mode::RUSR | Mode::WUSR)?.into();
        Ok(Shares { file, units })
    }

    /// How many there are.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Takes one that no other holder has, and that is not among `own`: a lock never stands in its owner's
    /// way. It looks behind the last own one first, so that other holders see the own ones as few stretches.
    pub fn claim(&self, own: &[u32]) -> Option<u32> {
        let start = own.last().map_or_else(|| std::process::id() % self.units.max(1), |u| u + 1);
        self.claim_in(start, self.units, own).or_else(|| self.claim_in(0, start, own))
    }

    fn claim_in(&self, from: u32, to: u32, own: &[u32]) -> Option<u32> {
        let mut at = from;
        while at < to {
            if own.contains(&at) {
                at += 1;
            } else if byte_locks::lock_exclusive(&self.file, at).is_ok() {
                return Some(at);
            } else {
                at = byte_locks::end_of_lock(&self.file, at);
            }
        }
        None
    }

    /// Gives one back.
    ///
    /// # Errors
    /// The kernel's.
    pub fn release(&self, unit: u32) -> io::Result<()> {
        byte_locks::unlock(&self.file, unit, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_one_holders_until_that_gives_it_back_or_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shares");
        let [a, b] = [(); 2].map(|()| Shares::open(&path, 3).unwrap());
        let mut of_a = vec![a.claim(&[]).unwrap()];
        of_a.push(a.claim(&of_a).unwrap());
        let of_b = b.claim(&[]).unwrap();
        let mut all = [of_a[0], of_a[1], of_b];
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
        assert_eq!((a.claim(&of_a), b.claim(&[of_b])), (None, None));
        a.release(of_a[0]).unwrap();
        assert_eq!(b.claim(&[of_b]), Some(of_a[0]));
        // As when its process ends.
        drop(b);
        assert!(
            a.claim(&of_a[1..]).is_some() && Shares::open(&path, 3).unwrap().claim(&[]).is_some()
        );
    }

    #[test]
    fn of_nothing_there_is_no_share() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Shares::open(&dir.path().join("shares"), 0).unwrap().claim(&[]), None);
    }
}
