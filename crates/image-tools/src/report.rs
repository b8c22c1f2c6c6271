//! The results of operations, with the names that they have everywhere, also as JSON
//! (docs/images.md). Sizes and offsets are bytes.

use serde::Serialize;

pub use ferrite_disk_base::journal::JournalState;
use ferrite_disk_base::{Class, Counts};

/// An image and what it stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Info {
    /// Of the virtual disk.
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
    /// Where it is.
    pub path: String,
    /// `raw`, `vhd`, `qcow2` or `store`.
    pub format: &'static str,
    /// The format's own kinds: fixed, dynamic, differencing; the version of qcow2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Of the virtual disk that it knows of.
    pub virtual_bytes: u64,
    /// Of the disk, with space in the image; none: more of it would have to be read than is
    /// sensible.
    pub allocated_bytes: Option<u64>,
    /// Of the file's length.
    pub file_bytes: u64,
    /// Of space that the file takes on its file system.
    pub disk_bytes: u64,
    /// The unit of allocation: a block of VHD, a cluster of qcow2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_bytes: Option<u64>,
    /// Its identity, if the format has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The program that made it, if the format says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creator: Option<String>,
    /// The snapshots inside of it, the first thousand.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// Answered writes of a backend that is running or was killed are not in its metadata yet.
    pub journal: bool,
    /// Nobody but root may write it: the mode of a parent. Nobody may write a snapshot in a store.
    pub read_only: bool,
}

/// A snapshot inside of a qcow2 image: other programs make them, and they are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotInfo {
    /// By which other programs know it.
    pub id: String,
    /// By which people do.
    pub name: String,
    /// Of its disk.
    pub virtual_bytes: u64,
    /// When it was made, in seconds since 1970.
    pub created_unix_s: u64,
    /// Of a machine's memory and devices that were saved with it.
    pub vm_state_bytes: u64,
}

/// The space that a disk takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of the virtual disk.
    pub virtual_bytes: u64,
    /// Of data in all layers.
    pub allocated_bytes: Option<u64>,
    /// Of all files' lengths.
    pub file_bytes: u64,
    /// Of space that all files take on their file systems.
    pub disk_bytes: u64,
    /// By layer, the leaf first.
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
    /// A layer says that it is zeros, or its file has a hole there.
    Zero,
    /// No layer has it: it reads as zeros.
    Unallocated,
}

/// A part of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Where it begins in the disk.
    pub start_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
    /// The kind of content.
    pub kind: Kind,
    /// The index in the chain of the layer that has it, 0 for the leaf.
    pub layer: Option<usize>,
    /// Where it begins in the layer's file.
    pub offset_bytes: Option<u64>,
}

impl Extent {
    pub(super) fn continues_with(&self, next: &Extent) -> bool {
        let offset = self.offset_bytes.map(|offset| offset + self.length_bytes);
        (self.kind, self.layer, offset) == (next.kind, next.layer, next.offset_bytes)
    }
}

/// How two disks compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// They read the same; where only the longer one has anything, that is zeros.
    pub identical: bool,
    /// The first byte that differs.
    pub first_difference_bytes: Option<u64>,
    /// Their sizes.
    pub virtual_bytes: [u64; 2],
}

/// The image after an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Where the image is.
    pub path: String,
    /// `raw`, `vhd` or `qcow2`.
    pub format: &'static str,
    /// Of the virtual disk.
    pub virtual_bytes: u64,
    /// The steps besides those that were asked for, and those that are left to do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One inconsistency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where in the file.
    pub offset_bytes: Option<u64>,
    /// The kind of problem, in one word.
    pub kind: String,
    /// The reason.
    pub why: String,
    /// How bad it is.
    pub class: Class,
    /// The image can be used, and reads what it should.
    pub harmless: bool,
    /// `repair` mends it.
    pub mendable: bool,
}

/// The findings of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Where it is.
    pub path: String,
    /// `raw`, `vhd` or `qcow2`.
    pub format: &'static str,
    /// All findings, by class.
    pub counts: Counts,
    /// The worst first, at most 1,000. Empty: it is in order.
    pub findings: Vec<Finding>,
    /// Findings that are not listed.
    pub more_findings: u64,
    /// Of the file, that no cluster in use has (qcow2), at least: `repair` gives it back. No finding, as
    /// other programs leave such space, too.
    pub unused_bytes: u64,
}

impl Checked {
    /// Adds damage, before everything else.
    pub(super) fn add_last(&mut self, finding: Finding) {
        self.counts.add(finding.class, finding.mendable);
        self.findings.push(finding);
    }

    pub(super) fn add_first(&mut self, finding: Finding) {
        self.counts.add(finding.class, finding.mendable);
        self.findings.insert(0, finding);
    }

    /// Whether it reads what it should.
    pub fn is_usable(&self) -> bool {
        self.counts.damage == 0 && self.counts.unsupported == 0
    }

    /// The verdict of all findings.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.counts)
    }
}

impl Verdict {
    /// The verdict of so many findings.
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

/// The verdict of a check: it decides how a program ends that was asked for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It reads what it should, and has no space that nothing refers to.
    InOrder,
    /// It reads what it should; there is space that nothing refers to.
    Leaks,
    /// It could not be checked: it has what is not supported.
    Unsupported,
    /// Another program refuses it, which was asked for.
    Refused,
    /// It does not read what it should.
    Damaged,
}

/// The findings of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// All images read what they should.
    pub usable: bool,
    /// The worst of all images'.
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
    /// It was tried; otherwise it was only looked at.
    pub done: bool,
    /// Before it.
    pub before: Checked,
    /// After it.
    pub after: Checked,
}

/// Writes that a backend, killed or running, has answered and not put into an image yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JournalInfo {
    /// By which it is dropped.
    pub name: String,
    /// `vhd` or `qcow2`; none: another version of this program made it, or it is not complete.
    pub format: Option<&'static str>,
    /// Where the image was.
    pub path: String,
    /// Answered changes of metadata; without any, nothing is lost with it.
    pub records: u64,
    /// The fate of the journal.
    pub state: JournalState,
}
