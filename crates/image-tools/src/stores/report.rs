//! The results of operations on stores, with the names that they have everywhere, also as JSON (docs/store.md).
//! Sizes and offsets are bytes.

use std::path::Path;

use ferrite_disk_base::{Counts, DiskError, ErrorKind};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::check::{Outcome, Stats, StoreFinding};
use ferrite_store::live::{Live, Passed, StoreInfo, VolumeInfo, WorkInfo};
use ferrite_store::page::Packing;
use serde::{Deserialize, Serialize};

use crate::{Verdict, refused};

/// A new store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreMade {
    /// Where it is.
    pub path: String,
    /// Its size.
    pub store_bytes: u64,
}

/// What was done with a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeDone {
    /// Where the store is.
    pub path: String,
    /// `created`, `snapshot`, `cloned`, `rolled-back` or `deleted`.
    pub done: String,
    /// What is new, or what it was done with; of what was deleted, as it was before.
    pub volume: VolumeInfo,
}

/// A store and its volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreListed {
    /// Where it is.
    pub path: String,
    /// What it says of itself.
    pub store: StoreInfo,
    /// In the order of their names.
    pub volumes: Vec<VolumeInfo>,
}

/// What a store's space is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Where it is.
    pub path: String,
    /// In bytes.
    #[serde(flatten)]
    pub stats: Stats,
    /// Of a store that is served: what it does by itself.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub work: Option<WorkInfo>,
    /// And what its last scrubbing has found.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub findings: Vec<StoreFinding>,
}

/// What compaction of a store has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCompacted {
    /// Where it is.
    pub path: String,
    /// How content is compressed.
    pub compress: Option<Packing>,
    /// Content that has another place now.
    pub moved_bytes: u64,
    /// Of that, what was compressed.
    pub packed_bytes: u64,
    /// What that takes now.
    pub packed_to_bytes: u64,
    /// Room for content that is given to nobody now.
    pub free_bytes: u64,
}

/// What a pass over a store has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCollected {
    /// Where it is.
    pub path: String,
    /// Content that volumes have.
    pub live_bytes: u64,
    /// Content that none had any more.
    pub dead_bytes: u64,
    /// Space that came free, with that of pages.
    pub freed_bytes: u64,
    /// Room for content that is given to nobody now.
    pub free_bytes: u64,
}

impl StoreCompacted {
    pub(super) fn of(store: &Path, live: &Live) -> StoreCompacted {
        let done = live.work().compaction;
        StoreCompacted {
            path: store.display().to_string(),
            compress: live.packing(),
            moved_bytes: done.moved_bytes,
            packed_bytes: done.packed_bytes,
            packed_to_bytes: done.packed_to_bytes,
            free_bytes: live.info().free_bytes,
        }
    }
}

impl StoreCollected {
    pub(super) fn of(store: &Path, passed: Passed, free_bytes: u64) -> StoreCollected {
        let in_bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        StoreCollected {
            path: store.display().to_string(),
            live_bytes: in_bytes(passed.contents),
            dead_bytes: in_bytes(passed.dead),
            freed_bytes: in_bytes(passed.freed),
            free_bytes,
        }
    }
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreChecked {
    /// Where it is.
    pub path: String,
    /// All findings, by class.
    pub counts: Counts,
    /// The worst first, at most 1,000. Empty: it is in order.
    pub findings: Vec<StoreFinding>,
    /// Findings that are not listed.
    pub more_findings: u64,
    /// Content that was read and compared.
    pub read_bytes: u64,
    /// Blocks that were written again.
    #[serde(skip)]
    pub mended: u64,
}

impl StoreChecked {
    pub(super) fn of(store: &Path, outcome: Outcome) -> StoreChecked {
        let Outcome { findings, read_bytes, mended, .. } = outcome;
        let (counts, listed) = (findings.counts, findings.listed);
        StoreChecked {
            path: store.display().to_string(),
            counts,
            more_findings: counts.total() - listed.len() as u64,
            findings: listed,
            read_bytes,
            mended,
        }
    }

    /// The verdict of all findings.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.counts)
    }
}

/// The repairs that were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRepaired {
    /// It was tried; otherwise it was only looked at.
    pub done: bool,
    /// Blocks that were written again.
    pub mended: u64,
    /// Before it.
    pub before: StoreChecked,
    /// After it.
    pub after: StoreChecked,
}

impl StoreRepaired {
    /// The findings for which `force` was needed and not given, or that nothing mends, as an error.
    ///
    /// # Errors
    /// There is something to mend, or damage.
    pub fn or_refused(&self) -> Result<(), DiskError> {
        let what = format!("cannot repair {}", self.after.path);
        if !self.done && self.after.counts.mendable > 0 {
            let help = "--force does it";
            return Err(refused(what, "blocks of the store would be overwritten", help));
        }
        if self.after.verdict() != Verdict::Damaged {
            return Ok(());
        }
        let (why, help) = ("there is damage that nothing is known to mend", "it needs a backup");
        Err(DiskError::new(ErrorKind::Damaged, what, why, help))
    }
}
