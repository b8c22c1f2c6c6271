//! The results of operations on stores, with the field names of the JSON output (docs/store.md). Sizes and offsets are
//! bytes.

use std::collections::BTreeMap;
use std::path::Path;

use ferrite_disk_base::{Counts, DiskError, ErrorKind, SpaceBelow};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::check::{Outcome, Stats, StoreFinding};
use ferrite_store::live::{Live, Passed, StoreInfo, VolumeInfo, WorkInfo};
use ferrite_store::page::Packing;
use serde::{Deserialize, Serialize};

use crate::{Verdict, refused};

/// A new store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreMade {
    /// Its path.
    pub path: String,
    /// Its size.
    pub store_bytes: u64,
    /// Notes for its user: its file system cannot hold all of it.
    pub notes: Vec<String>,
}

/// A store that is larger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreGrown {
    /// Its path.
    pub path: String,
    /// The size that it had.
    pub before_bytes: u64,
    /// Its size.
    pub store_bytes: u64,
    /// Free room for content.
    pub free_bytes: u64,
    /// Notes for its user: its file system cannot hold all of it.
    pub notes: Vec<String>,
}

/// The result of a change of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeDone {
    /// The path of the store.
    pub path: String,
    /// `created`, `snapshot`, `cloned`, `rolled-back`, `deleted`, `renamed`, `resized` or `received`.
    pub done: String,
    /// The new volume, or the changed one; for a deletion, its last state.
    pub volume: VolumeInfo,
}

/// A store and its volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreListed {
    /// Its path.
    pub path: String,
    /// The properties of the store.
    pub store: StoreInfo,
    /// The volumes in the order of their names.
    pub volumes: Vec<VolumeInfo>,
}

impl StoreListed {
    /// Adds how much of each volume is not zeros. A volume that was made since the count has no figure.
    pub fn count(&mut self, stats: &StoreStats) {
        let counted = stats.stats.volumes.iter().map(|of| (of.name.as_str(), of.mapped_bytes));
        let counted: BTreeMap<&str, u64> = counted.collect();
        for volume in &mut self.volumes {
            volume.mapped_bytes = counted.get(volume.name.as_str()).copied();
        }
    }
}

/// The use of a store's space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Its path.
    pub path: String,
    /// The statistics, in bytes.
    #[serde(flatten)]
    pub stats: Stats,
    /// The free space of the file system that the store's file is on. `None`: it is on a device.
    #[serde(default)]
    pub file_system_free_bytes: Option<u64>,
    /// The background work of a served store.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub work: Option<WorkInfo>,
    /// The findings of its last scrub.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub findings: Vec<StoreFinding>,
}

/// The result of a compaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCompacted {
    /// Its path.
    pub path: String,
    /// The compression of content.
    pub compress: Option<Packing>,
    /// Content that was moved.
    pub moved_bytes: u64,
    /// Moved content that was compressed.
    pub packed_bytes: u64,
    /// Its size after compression.
    pub packed_to_bytes: u64,
    /// Free room for content.
    pub free_bytes: u64,
}

/// The result of a garbage collection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCollected {
    /// Its path.
    pub path: String,
    /// Content that volumes reference.
    pub live_bytes: u64,
    /// Content that no volume referenced any more.
    pub dead_bytes: u64,
    /// Space that was freed, with that of pages.
    pub freed_bytes: u64,
    /// Free room for content.
    pub free_bytes: u64,
}

impl StoreStats {
    pub(super) fn of(store: &Path, mut stats: Stats, below: Option<SpaceBelow>) -> StoreStats {
        below.into_iter().for_each(|below| stats.bound_by(below));
        StoreStats {
            path: store.display().to_string(),
            stats,
            file_system_free_bytes: below.map(|below| below.free_bytes),
            work: None,
            findings: Vec::new(),
        }
    }
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

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreChecked {
    /// Its path.
    pub path: String,
    /// All findings, by class.
    pub counts: Counts,
    /// The worst first, at most 1,000. Empty: the store is intact.
    pub findings: Vec<StoreFinding>,
    /// Findings that are not listed.
    pub more_findings: u64,
    /// Content that was read and compared.
    pub read_bytes: u64,
    /// Blocks that were rewritten.
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
    /// Repairs were made; otherwise they were only reported.
    pub done: bool,
    /// Blocks that were rewritten.
    pub mended: u64,
    /// The findings before.
    pub before: StoreChecked,
    /// The findings after.
    pub after: StoreChecked,
}

impl StoreRepaired {
    /// The findings for which `force` was needed and not given, or that cannot be repaired, as an error.
    ///
    /// # Errors
    /// There is something to repair, or damage.
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
