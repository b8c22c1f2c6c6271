//! The ballast: space that a store's file has behind its end, for the time when its file system is full (store.md 7, A
//! full file system below).
//!
//! A write to a hole of the file takes space of the file system. Without space, no checkpoint could be made, and no
//! garbage would ever be freed. Then the store's own work spends ballast, and new data of guests wait until the ballast
//! is whole again.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::SharedLock;

/// Ballast is asked for only if at least half of this is missing.
const LEAST_BYTES: u64 = 64 << 10;
/// The most ballast. A store with more memory for metadata than this rarely has all of it dirty.
pub const MOST_BYTES: u64 = 256 << 20;

/// The number of parts in which ballast is spent.
const PARTS: u64 = 8;

/// See the module text. Devices have none, and neither has a file whose file system keeps no space behind its end.
#[derive(Debug, Default)]
pub struct Ballast {
    /// `None`: there is no ballast.
    amount: Mutex<Option<Amount>>,
    /// Held while the ballast changes.
    changing: SharedLock,
}

#[derive(Clone, Copy, Debug)]
struct Amount {
    /// Of the file.
    end: u64,
    /// As much as there should be.
    all_bytes: u64,
    /// As much as there is: of a store that was just opened, at most.
    bytes: u64,
}

impl Ballast {
    /// Takes it behind the end of a file of so many bytes, or what there is of it.
    pub async fn hold(&self, port: &Port, end: u64, bytes: u64) {
        let all_bytes = bytes.min(MOST_BYTES);
        match port.io.preallocate(port.files[0], end, all_bytes).await {
            Ok(()) => {}
            // It may be there from before: a full XFS refuses what it would not have to allocate.
            Err(e) if is_full(&e) => drop(allocate(port, end, all_bytes).await),
            Err(_) => return,
        }
        *self.amount() = Some(Amount { end, all_bytes, bytes: all_bytes });
    }

    /// Spends a part of the ballast, if the store's own work has failed for want of space. Gives whether the work may be
    /// tried again.
    pub async fn spend(&self, port: &Port, why: &io::Error) -> bool {
        if !is_full(why) {
            return false;
        }
        let Ok(_alone) = self.changing.lock(&port.io).await else { return false };
        let Some(held) = *self.amount() else { return false };
        if held.bytes == 0 {
            return false;
        }
        // No hole: ext4 makes none behind the end. The rest of the ballast is taken again before other files get the
        // space.
        let is_cut = port.io.set_len(port.files[0], held.end).await.is_ok();
        if is_cut {
            let rest = held.bytes.saturating_sub(held.all_bytes / PARTS);
            let bytes = if rest > 0 { allocate(port, held.end, rest).await } else { 0 };
            self.has(bytes);
        }
        is_cut
    }

    /// Gives the file another length, and the ballast its place behind that. `port` is of the file.
    ///
    /// # Errors
    /// The kernel's: the file has the length that it had.
    pub async fn move_to(&self, port: &Port, end: u64) -> io::Result<()> {
        let _alone = self.changing.lock(&port.io).await?;
        port.io.set_len(port.files[0], end).await?;
        let Some(Amount { all_bytes, .. }) = *self.amount() else { return Ok(()) };
        // From here on no `spend` cuts the file off at its old end.
        *self.amount() = Some(Amount { end, all_bytes, bytes: 0 });
        let bytes = allocate(port, end, all_bytes).await;
        self.has(bytes);
        Ok(())
    }

    /// Whether some ballast was spent and not taken back yet.
    pub fn is_short(&self) -> bool {
        self.amount().is_some_and(|amount| amount.bytes < amount.all_bytes)
    }

    /// Takes back as much of the spent ballast as the file system has. Gives whether the ballast is whole, so new data may
    /// take space. No checkpoint may be under way, since it may need that space.
    pub async fn take_back(&self, port: &Port) -> bool {
        if !self.is_short() {
            return true;
        }
        let Ok(_alone) = self.changing.lock(&port.io).await else { return false };
        let Some(Amount { end, all_bytes, bytes: held }) = *self.amount() else { return true };
        let bytes = held + allocate(port, end + held, all_bytes - held).await;
        self.has(bytes);
        bytes == all_bytes
    }

    /// As many bytes as there should be; 0: there is none.
    pub fn wanted(&self) -> u64 {
        self.amount().map_or(0, |amount| amount.all_bytes)
    }

    fn amount(&self) -> MutexGuard<'_, Option<Amount>> {
        self.amount.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, bytes: u64) {
        if let Some(amount) = &mut *self.amount() {
            amount.bytes = bytes;
        }
    }
}

/// So many bytes from there on, or a part of that; how many.
async fn allocate(port: &Port, from: u64, bytes: u64) -> u64 {
    let mut bytes = bytes;
    loop {
        match port.io.preallocate(port.files[0], from, bytes).await {
            Ok(()) => return bytes,
            Err(e) if is_full(&e) && bytes > LEAST_BYTES => bytes /= 2,
            Err(_) => return 0,
        }
    }
}

fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
