//! Locks for tasks, in a number that never changes.
//!
//! **Blocks.** A task that changes blocks holds the locks of all of them. It takes them in the order of the locks, so
//! tasks never wait in a circle. Two blocks may share one lock: then one task waits without need.
//!
//! **The journal.** A task that writes a journal block holds one of these locks from the block's number to its end.
//! A task that holds all of them knows that no number is under way, and that none is given.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrite_io::reactor::Io;
use ferrite_io::shared_lock::{Held, SharedLock};

use super::journal::VolumeId;

/// See the module text.
pub struct Stripes {
    locks: Box<[SharedLock]>,
    /// Where the next look for a free one begins.
    next: AtomicUsize,
}

impl Stripes {
    /// `count` locks.
    pub fn new(count: usize) -> Stripes {
        let locks = (0..count).map(|_| SharedLock::new()).collect();
        Stripes { locks, next: AtomicUsize::new(0) }
    }

    /// Locks blocks of a volume.
    ///
    /// # Errors
    /// The reactor is gone.
    pub async fn lock_blocks(
        &self,
        io: &Io,
        volume: VolumeId,
        blocks: Range<u64>,
    ) -> io::Result<Vec<Held<'_>>> {
        let count = self.locks.len() as u64;
        let of = |block: u64| (block.wrapping_add(u64::from(volume).wrapping_mul(61))) % count;
        let mut numbers: Vec<u64> = match blocks.end - blocks.start < count {
            true => blocks.map(of).collect(),
            false => (0..count).collect(),
        };
        numbers.sort_unstable();
        self.lock(io, numbers.into_iter().map(|number| number as usize)).await
    }

    /// Locks any one lock, a free one if there is one.
    ///
    /// # Errors
    /// The reactor is gone.
    pub async fn lock_one(&self, io: &Io) -> io::Result<Held<'_>> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.locks.len();
        let mut all = self.locks[first..].iter().chain(&self.locks[..first]);
        match all.find_map(SharedLock::try_lock) {
            Some(held) => Ok(held),
            None => self.locks[first].lock(io).await,
        }
    }

    /// Locks all locks.
    ///
    /// # Errors
    /// The reactor is gone.
    pub async fn lock_all(&self, io: &Io) -> io::Result<Vec<Held<'_>>> {
        self.lock(io, 0..self.locks.len()).await
    }

    async fn lock(
        &self,
        io: &Io,
        numbers: impl Iterator<Item = usize>,
    ) -> io::Result<Vec<Held<'_>>> {
        let mut held = Vec::new();
        for number in numbers {
            held.push(self.locks[number].lock(io).await?);
        }
        Ok(held)
    }
}
