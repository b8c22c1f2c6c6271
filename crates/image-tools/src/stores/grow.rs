//! Growth of a store itself.

use std::io;
use std::path::Path;

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::layout::{Layout, NoGrowth};
use ferrite_store::live::Live;

use super::create::overcommitted;
use super::{MEMORY, StoreGrown, failed, until_stopped};
use crate::{ImageTools, NewSize, Progress};

/// The next step where the medium is what is too small.
const LARGER_FIRST: &str =
    "make it larger first (of LVM: lvextend), and run the same command again";

impl ImageTools<'_> {
    /// Makes a store larger, durably. Without a size it gets what its file or device has.
    ///
    /// # Errors
    /// It is in use, cannot be opened, or cannot have that size: nothing has changed. Or it was stopped, or cannot be
    /// written: it has its old size, or the new one.
    pub fn grow_store(&self, store: &Path, size: Option<NewSize>) -> Result<StoreGrown, DiskError> {
        let what = cannot_grow(store);
        let (mut context, port, raw) = self.medium_of(store, &what, false)?;
        let length = raw.bytes_now().map_err(|e| failed(what.clone(), store, e))?;
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        let grown = until_stopped(&goes_on, async {
            let live = Live::open(&port, length, MEMORY).await?;
            let grown = grow_live(&live, &port, &raw, store, size).await?;
            if let Err(e) = live.close(&port).await
                && grown.is_ok()
            {
                // The size is durable: it is in a checkpoint.
                tracing::warn!(
                    "the store was not closed ({e}): the next command replays its journal"
                );
            }
            Ok(grown)
        });
        context.run(grown).map_err(|e| failed(what, store, e))?
    }
}

pub(super) fn cannot_grow(store: &Path) -> String {
    format!("cannot make store {} larger", store.display())
}

/// Makes an open store larger.
///
/// # Errors
/// The kernel's, of the store. The inner one: it cannot have that size, and nothing has changed.
pub(super) async fn grow_live(
    live: &Live,
    port: &Port,
    raw: &Raw,
    store: &Path,
    size: Option<NewSize>,
) -> io::Result<Result<StoreGrown, DiskError>> {
    let before_bytes = in_bytes(&live.layout());
    let length = raw.bytes_now()?;
    let bytes = match new_size(&live.layout(), raw, length, store, size) {
        Ok(bytes) => bytes,
        Err(e) => return Ok(Err(e)),
    };
    live.grow(port, bytes, raw.is_file().then_some(length)).await?;
    let store_bytes = in_bytes(&live.layout());
    let notes = raw.space_below().and_then(|below| overcommitted(store_bytes, below));
    Ok(Ok(StoreGrown {
        path: store.display().to_string(),
        before_bytes,
        store_bytes,
        free_bytes: live.info().free_bytes,
        notes: notes.into_iter().collect(),
    }))
}

fn in_bytes(layout: &Layout) -> u64 {
    layout.blocks * BLOCK_BYTES as u64
}

/// The size in bytes that a store gets, which it can have.
fn new_size(
    layout: &Layout,
    raw: &Raw,
    length: u64,
    store: &Path,
    size: Option<NewSize>,
) -> Result<u64, DiskError> {
    let refuse =
        |kind, why: String, help: &str| Err(DiskError::new(kind, cannot_grow(store), why, help));
    let now = in_bytes(layout);
    let bytes = size.map_or(length, |size| size.of(now));
    if size.is_none() && length < now + BLOCK_BYTES as u64 {
        return match raw.is_file() {
            true => {
                let why = format!("its file is no longer than the store, which has {}", Human(now));
                refuse(
                    ErrorKind::Usage,
                    why,
                    "say a size, for example +10G: the file grows with it",
                )
            }
            false => {
                let why = format!("the device has {}, and the store has all of it", Human(length));
                refuse(ErrorKind::Usage, why, LARGER_FIRST)
            }
        };
    }
    if !raw.is_file() && bytes > length {
        let why = format!("the device has {} ({length} bytes)", Human(length));
        return refuse(ErrorKind::Usage, why, LARGER_FIRST);
    }
    let grown = match layout.grown(bytes) {
        Ok(grown) => grown,
        Err(e) => {
            let (kind, help) = match e {
                NoGrowth::Smaller { .. } => (
                    ErrorKind::Usage,
                    "say a larger size, or +SIZE; for a smaller store make a new one, and copy the volumes \
                     (ferrite store send | receive)",
                ),
                NoGrowth::TooLittle { .. } => (ErrorKind::Usage, "say that size, or more"),
                NoGrowth::TooLarge { .. } => (
                    ErrorKind::Unsuitable,
                    "make a new store of that size, and copy the volumes (ferrite store send | receive)",
                ),
            };
            return refuse(kind, e.to_string(), help);
        }
    };
    // Before anything is written: its file system may be that of others, too.
    let pages = 2 * (grown.segments - layout.segments) + 1;
    let needed = pages * BLOCK_BYTES as u64;
    match raw.space_below() {
        Some(below) if below.free_bytes < needed => {
            let why = format!(
                "its file system has {} free, and the tables of what is new take {}",
                Human(below.free_bytes),
                Human(needed)
            );
            refuse(ErrorKind::Io, why, "make room there first, or choose a smaller size")
        }
        _ => Ok(bytes),
    }
}
