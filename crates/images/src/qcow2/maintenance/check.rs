//! Checks an image without changing it: every reference to a cluster is counted, and compared with the refcounts.

use std::io;

use ferrite_disk_base::{Class, Counts, DiskError, ErrorKind, ProblemKind, Raw, Stretches};

use crate::qcow2::format::header::{CORRUPT, DIRTY, HEAD_BYTES, Header, HeaderError, REFTABLE_AT};
use crate::qcow2::maintenance::walk::{Counting, Course, walk};
use crate::qcow2::tables::meta;

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// There is no valid header, and so no image.
    Header,
    /// It is marked as one whose refcounts may be wrong, or as corrupt.
    Marked,
    /// An entry of a table that cannot be decoded.
    Entry,
    /// A reference to something outside of the file.
    Outside,
    /// A cluster with more references than its refcount: it would be given out again.
    CountTooLow,
    /// A cluster with fewer references than its refcount.
    Leak,
    /// The refcount table or a block of refcounts is not in the file, is over something else, or cannot be read: the
    /// refcounts have to be made anew.
    Refcounts,
    /// An entry with a wrong flag for whether its cluster has other references.
    Flag,
    /// The list of snapshots or of bitmaps cannot be read.
    List,
    /// An unsupported version or feature: nothing else was checked.
    Unsupported,
}

impl ProblemKind for Problem {
    fn class(self) -> Class {
        match self {
            Problem::Leak => Class::Leak,
            Problem::Unsupported => Class::Unsupported,
            Problem::Header
            | Problem::Marked
            | Problem::Entry
            | Problem::Outside
            | Problem::CountTooLow
            | Problem::Refcounts
            | Problem::Flag
            | Problem::List => Class::Damage,
        }
    }

    fn is_mendable(self) -> bool {
        match self {
            Problem::Marked
            | Problem::CountTooLow
            | Problem::Leak
            | Problem::Refcounts
            | Problem::Flag => true,
            Problem::Header
            | Problem::Entry
            | Problem::Outside
            | Problem::List
            | Problem::Unsupported => false,
        }
    }
}

/// One inconsistency of a qcow2 image.
pub type Finding = ferrite_disk_base::Finding<Problem>;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The worst first, at most 1,000.
    pub findings: Vec<Finding>,
    /// All findings, listed or not.
    pub counts: Counts,
    /// The stretches of tables that are one finding each.
    stretches: Stretches<Problem>,
    /// Clusters of the disk.
    pub clusters: u64,
    /// Clusters that have a place, compressed or not.
    pub allocated_clusters: u64,
    /// Compressed ones among them.
    pub compressed_clusters: u64,
    /// Unused bytes of the file: those after the last cluster in use, and at least the space that other free clusters
    /// take on the file system. A killed program leaves them.
    pub unused_bytes: u64,
    /// A repair makes all refcounts anew, at another place.
    pub(in crate::qcow2) needs_rebuild: bool,
}

impl Report {
    pub(in crate::qcow2) fn add(&mut self, problem: Problem, offset: u64, why: impl Into<String>) {
        let finding = Finding { problem, offset, why: why.into() };
        self.stretches.add(finding, &mut self.findings, &mut self.counts);
    }

    /// Findings that are in the line of another one.
    pub fn joined(&self) -> u64 {
        self.stretches.joined
    }

    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.counts.total() == 0
    }

    /// Whether all findings can be repaired.
    pub(in crate::qcow2) fn is_mendable(&self) -> bool {
        self.counts.mendable == self.counts.total()
    }
}

/// The findings of a walk through all references: the changes that make refcounts and references agree, and the reasons
/// for them.
#[derive(Clone, Copy, Debug)]
pub(in crate::qcow2) enum Fix {
    /// The count of a cluster, as there are references.
    Count { cluster: u64, found: u64 },
    /// An entry of a table in use, at its place in the file.
    Flag { offset: u64, entry: u64 },
    /// Clusters of the file that nothing refers to, and whose counts are 0. They come in order.
    Free { first: u64, end: u64 },
    /// An entry of a table in use, whose cluster has exactly one reference.
    Own(Owned),
}

/// An entry of a table in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qcow2) enum Owned {
    /// That of L1 with this index.
    Table(u64),
    /// That of this cluster of the disk.
    Cluster(u64),
}

/// Checks the image in `raw`, which no process has open for writing. Reads all tables.
///
/// # Errors
/// It cannot be read; damage is in the report.
pub fn check(raw: &Raw) -> Result<Report, DiskError> {
    let (_, report) = survey(raw, |_| {}).map_err(|e| failed(raw, "check", e))?;
    Ok(report)
}

pub(in crate::qcow2) fn failed(raw: &Raw, verb: &str, e: io::Error) -> DiskError {
    let what = format!("cannot {verb} {}", raw.path().display());
    let help = "check the medium below it and the kernel's log (dmesg)";
    DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
}

/// Checks, and passes each possible repair to `fix`. If the refcounts cannot be reached, or lie over something else, they
/// have to be [rebuilt](super::rebuild): then nothing is said of single counts, and there are no repairs.
pub(in crate::qcow2) fn survey(
    raw: &Raw,
    mut fix: impl FnMut(Fix),
) -> io::Result<(Option<Header>, Report)> {
    let (mut report, mut structure) = (Report::default(), Report::default());
    let Some(header) = header_of(raw, &mut report, &mut structure)? else {
        return Ok((None, report));
    };
    if structure.is_clean() {
        let course = Course::all(Counting::Compared);
        walk(raw, &header, course, (&mut report, &mut structure), &mut fix)?;
    }
    if structure.is_clean() {
        return Ok((Some(header), report));
    }
    let mut report = Report { needs_rebuild: true, ..structure };
    note_header(&header, &mut report);
    let header = header.without_refcounts();
    let course = Course::all(Counting::Alone);
    walk(raw, &header, course, (&mut report, &mut Report::default()), &mut |_| {})?;
    Ok((Some(header), report))
}

/// Passes the number of references of each cluster that has any to `each`, in order, and the ranges that have none. A
/// course through all of the image has free ones, too.
///
/// # Errors
/// It cannot be read, or has changed since it was found to be mendable.
pub(in crate::qcow2) fn references(
    raw: &Raw,
    header: &Header,
    course: Course,
    mut each: impl FnMut(Fix),
) -> io::Result<()> {
    let (mut report, mut structure) = (Report::default(), Report::default());
    let header = header.without_refcounts();
    walk(raw, &header, course, (&mut report, &mut structure), &mut each)?;
    match report.is_mendable() {
        true => Ok(()),
        false => Err(meta::damaged("it has changed meanwhile")),
    }
}

/// Reads the header, and notes in `structure` if the refcounts are not where it says.
fn header_of(raw: &Raw, report: &mut Report, structure: &mut Report) -> io::Result<Option<Header>> {
    let head = raw.read_now(0, HEAD_BYTES as usize)?;
    let parsed = Header::parse_in_spite(&head, raw.bytes_now()?);
    let parsed = parsed.and_then(|(header, flaws)| match flaws.snapshots {
        Some(e) => Err(e),
        None => Ok((header, flaws.refcounts)),
    });
    match parsed {
        Ok((header, refcounts)) => {
            if let Some(e) = refcounts {
                structure.add(Problem::Refcounts, REFTABLE_AT, e.to_string());
            }
            note_header(&header, report);
            Ok(Some(header))
        }
        Err(e) => {
            let problem = match e {
                HeaderError::Unsupported(_) => Problem::Unsupported,
                HeaderError::NotQcow2(_) | HeaderError::Damaged(_) => Problem::Header,
            };
            report.add(problem, 0, e.to_string());
            Ok(None)
        }
    }
}

fn note_header(header: &Header, report: &mut Report) {
    if header.incompatible & (DIRTY | CORRUPT) != 0 {
        report.add(Problem::Marked, 72, "it is marked as one whose refcounts may be wrong");
    }
    report.clusters = header.guest_clusters();
}
