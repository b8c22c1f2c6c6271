//! The results of operations, with the field names of the JSON output (docs/images.md). Sizes and offsets are bytes.

use std::mem;

use serde::Serialize;

pub use ferrite_disk_base::journal::JournalState;
use ferrite_disk_base::{Class, Counts};
use ferrite_images::qcow2::Properties;

/// An image and its parents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Info {
    /// Bytes of the virtual disk.
    pub virtual_bytes: u64,
    /// The layers, the image itself first.
    pub chain: Vec<LayerInfo>,
    /// Why the chain ends before its last image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerInfo {
    /// Its path.
    pub path: String,
    /// `raw`, `vhd`, `qcow2`, `store` or `nbd`.
    pub format: &'static str,
    /// The format's own kinds: fixed, dynamic, differencing; the version of qcow2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Bytes of the layer's virtual disk.
    pub virtual_bytes: u64,
    /// Bytes of the disk that have space in the image; `None`: too many tables would have to be read.
    pub allocated_bytes: Option<u64>,
    /// Length of the file.
    pub file_bytes: u64,
    /// Space that the file takes on its file system.
    pub disk_bytes: u64,
    /// The unit of allocation: a block of VHD, a cluster of qcow2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_bytes: Option<u64>,
    /// Its identity, if the format has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The program that made it, if the format records that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creator: Option<String>,
    /// The properties that only a qcow2 image has.
    #[serde(skip)]
    pub qcow2: Option<Properties>,
    /// The internal snapshots, the first thousand.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// The dirty bitmaps of a qcow2 image: other programs make them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
    /// Answered writes of a running or killed backend are not in its metadata yet.
    pub journal: bool,
    /// Only root may write it: the mode of a parent. A snapshot in a store cannot be written at all.
    pub read_only: bool,
}

/// A dirty bitmap of a qcow2 image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// How many bytes one bit stands for.
    pub granularity_bytes: u64,
    /// Whether it is up to date.
    pub valid: bool,
    /// Whether writers are to track their writes in it.
    pub enabled: bool,
}

/// An internal snapshot of a qcow2 image: other programs make them, and they are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotInfo {
    /// Its identifier.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Bytes of its disk.
    pub virtual_bytes: u64,
    /// When it was made, in seconds since 1970.
    pub created_unix_s: u64,
    /// Bytes of saved memory and devices of the machine.
    pub vm_state_bytes: u64,
}

/// The space that a disk takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Bytes of the virtual disk.
    pub virtual_bytes: u64,
    /// Bytes of data in all layers.
    pub allocated_bytes: Option<u64>,
    /// Length of all files.
    pub file_bytes: u64,
    /// Space that all files take on their file systems.
    pub disk_bytes: u64,
    /// The layers, the leaf first.
    pub chain: Vec<LayerInfo>,
}

/// The kinds of [`Extent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Bytes of a file.
    Data,
    /// Compressed bytes of a file.
    Compressed,
    /// Zeros by a layer's metadata, or by a hole in its file.
    Zero,
    /// No layer has data: it reads as zeros.
    Unallocated,
}

/// A part of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Its offset in the disk.
    pub start_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// The kind of content.
    pub kind: Kind,
    /// The index in the chain of the layer that has it, 0 for the leaf.
    pub layer: Option<usize>,
    /// Its offset in the layer's file.
    pub offset_bytes: Option<u64>,
    /// How many images of the chain were asked before it was known, as `qemu-img map` counts them: those above its
    /// layer, or all but one.
    pub depth: usize,
}

impl Extent {
    pub(super) fn continues_with(&self, next: &Extent) -> bool {
        let offset = self.offset_bytes.map(|offset| offset + self.length_bytes);
        (self.kind, self.layer, offset) == (next.kind, next.layer, next.offset_bytes)
    }
}

/// The kind of a difference between two disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Difference {
    /// They read differently.
    Content,
    /// They have different sizes, and were compared strictly.
    Size,
    /// They read the same, and have different parts allocated: they were compared strictly.
    Allocation,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// They read the same; the rest of the longer one is zeros.
    pub identical: bool,
    /// The first byte that differs.
    pub first_difference_bytes: Option<u64>,
    /// The kind of the difference there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Difference>,
    /// Their sizes.
    pub virtual_bytes: [u64; 2],
}

/// The image after an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Its path.
    pub path: String,
    /// `raw`, `vhd` or `qcow2`.
    pub format: &'static str,
    /// Bytes of the virtual disk.
    pub virtual_bytes: u64,
    /// The additional steps that were done, and those that are left to the user.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// An image whose snapshots were changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InnerDone {
    /// The image.
    #[serde(flatten)]
    pub done: Done,
    /// The snapshot inside of it that was made, applied or deleted.
    pub snapshot: SnapshotInfo,
}

/// The copy of a disk that may be damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Salvaged {
    /// The copy.
    #[serde(flatten)]
    pub done: Done,
    /// Bytes of the disk that could not be read: zeros in the copy.
    pub damaged_bytes: u64,
    /// Their ranges, in order, at most 1,000.
    pub ranges: Vec<DamagedRange>,
    /// Ranges that are not listed.
    pub more_ranges: u64,
}

/// A part of a disk that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DamagedRange {
    /// Its offset in the disk.
    pub start_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// The image of the chain that is damaged there.
    pub path: String,
    /// The reason, for the beginning of the range.
    pub why: String,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its offset in the file.
    pub offset_bytes: Option<u64>,
    /// The kind of problem, in one word.
    pub kind: String,
    /// The reason.
    pub why: String,
    /// Its class.
    pub class: Class,
    /// The image can be used, and reads correctly.
    pub harmless: bool,
    /// `repair` can repair it.
    pub mendable: bool,
}

/// The findings of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Its path.
    pub path: String,
    /// `raw`, `vhd` or `qcow2`.
    pub format: &'static str,
    /// All findings, by class.
    pub counts: Counts,
    /// The worst first, at most 1,000. Empty: the image is intact.
    pub findings: Vec<Finding>,
    /// Findings that are not listed.
    pub more_findings: u64,
    /// Bytes of the file that no cluster in use has (qcow2), at least: `repair` returns them. This is no finding, as
    /// other programs leave such space, too.
    pub unused_bytes: u64,
    /// A server uses it, or was killed: its completed writes are in a journal and not in the image yet.
    pub journal: bool,
}

impl Checked {
    /// Adds damage, before all other findings.
    pub(super) fn add_last(&mut self, finding: Finding) {
        self.counts.add(finding.class, finding.mendable);
        self.findings.push(finding);
    }

    pub(super) fn add_first(&mut self, finding: Finding) {
        self.counts.add(finding.class, finding.mendable);
        self.findings.insert(0, finding);
    }

    /// Joins all leaks into one harmless finding, as the image has a journal: its completed writes have space that
    /// nothing in the image refers to yet. Other leaks are known when those writes are in the image.
    pub(super) fn expect_journal(&mut self) {
        let leaks = mem::take(&mut self.counts.leaks);
        if leaks == 0 {
            return;
        }
        let is_leak = |found: &Finding| found.class == Class::Leak;
        let (listed, mut others): (Vec<_>, Vec<_>) =
            mem::take(&mut self.findings).into_iter().partition(is_leak);
        let mendable = if listed.iter().all(|found| found.mendable) { leaks } else { 0 };
        self.counts.mendable = self.counts.mendable.saturating_sub(mendable);
        self.more_findings = self.more_findings.saturating_sub(leaks - listed.len() as u64);
        self.counts.add(Class::Harmless, false);
        others.push(Finding {
            offset_bytes: None,
            kind: "journal".into(),
            why: format!(
                "nothing in the image refers to {leaks} allocated places yet: completed writes of the \
                 journal may be there"
            ),
            class: Class::Harmless,
            harmless: true,
            mendable: false,
        });
        self.findings = others;
    }

    /// Whether it reads correctly.
    pub fn is_usable(&self) -> bool {
        self.counts.damage == 0 && self.counts.unsupported == 0
    }

    /// The verdict of all findings.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.counts)
    }
}

impl Verdict {
    /// The verdict for these counts.
    pub fn of(counts: &Counts) -> Verdict {
        match *counts {
            Counts { damage: 1.., .. } => Verdict::Damaged,
            Counts { foreign: 1.., .. } => Verdict::Refused,
            Counts { unsupported: 1.., .. } => Verdict::Unsupported,
            Counts { leaks: 1.., .. } => Verdict::Leaks,
            _ => Verdict::InOrder,
        }
    }
}

/// The verdict of a check. It decides the exit code of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It reads correctly, and has no space that nothing refers to.
    InOrder,
    /// It reads correctly; there is space that nothing refers to.
    Leaks,
    /// It could not be checked: it has an unsupported feature.
    Unsupported,
    /// Another program, whose rules were checked, refuses it.
    Refused,
    /// It does not read correctly.
    Damaged,
}

/// The findings of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// All images read correctly.
    pub usable: bool,
    /// The worst verdict of all images.
    pub verdict: Verdict,
    /// The image, and its parents if they were asked for.
    pub images: Vec<Checked>,
}

impl CheckReport {
    pub(super) fn of(images: Vec<Checked>) -> CheckReport {
        let verdict = images.iter().map(Checked::verdict).max().unwrap_or(Verdict::InOrder);
        CheckReport { usable: images.iter().all(Checked::is_usable), verdict, images }
    }
}

/// The repairs that were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Repairs were made; otherwise they were only reported.
    pub done: bool,
    /// The journal of a killed backend had answered writes, which `force` brings into the image.
    pub journal: bool,
    /// The image is one that `force` changes: where some damage cannot be mended, nothing else may be either.
    pub mendable: bool,
    /// The findings before.
    pub before: Checked,
    /// The findings after.
    pub after: Checked,
}

/// Writes that a killed or running backend has answered and not written into an image yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JournalInfo {
    /// The name for `drop`.
    pub name: String,
    /// `vhd` or `qcow2`; `None`: another version of this program made it, or it is not complete.
    pub format: Option<&'static str>,
    /// The image's path.
    pub path: String,
    /// Answered changes of metadata; with 0, dropping it loses nothing.
    pub records: u64,
    /// The state of the journal.
    pub state: JournalState,
}

/// The maps of what has changed on a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirtyMaps {
    /// Bytes of the virtual disk.
    pub virtual_bytes: u64,
    /// The path of their file, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why they do not fit the image: everything counts as changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub void: Option<String>,
    /// Damaged parts of the file: all of their regions count as changed.
    pub damaged_sectors: usize,
    /// The maps.
    pub maps: Vec<DirtyMap>,
}

/// One map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirtyMap {
    /// Its name.
    pub name: String,
    /// Its identifier, which no other map has: 32 hexadecimal digits.
    pub id: String,
    /// When it was begun, in seconds since 1970.
    pub begun_s: u64,
    /// Bytes of the disk that may have changed since.
    pub changed_bytes: u64,
    /// Their ranges, in order.
    pub changed: Vec<Changed>,
}

/// A range that may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// Its first byte.
    pub start_bytes: u64,
    /// Bytes.
    pub length_bytes: u64,
}
