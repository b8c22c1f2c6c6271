//! Validation of private copies of guest input.
//!
//! A [`RawSegment`] becomes a [`Segment`] here, or the request is refused. No other module sees an
//! unchecked number of a guest. Rules: blkif.md 2, threats.md T10, T15, T20.

use ferrite_xen::abi::{
    DISCARD_SECURE, IndirectOp, MAX_DIRECT_SEGMENTS, Message, PlainOp, RawSegment, SECTOR_BYTES,
};
use ferrite_xen::hypervisor::{GrantRef, PAGE_SIZE};

use crate::path::work::{Action, Outcome, Work};

const SECTORS_PER_FRAME: u8 = (PAGE_SIZE as u64 / SECTOR_BYTES) as u8;

/// A checked segment: 1 to 8 sectors that lie inside one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    gref: GrantRef,
    first_sect: u8,
    sectors: u8,
}

impl Segment {
    /// Checks a segment. Returns `None` unless `first <= last <= 7` (blkif.md 1.3).
    pub fn check(raw: &RawSegment) -> Option<Segment> {
        let ok = raw.first_sect <= raw.last_sect && raw.last_sect < SECTORS_PER_FRAME;
        ok.then(|| Segment {
            gref: GrantRef(raw.gref),
            first_sect: raw.first_sect,
            sectors: raw.last_sect - raw.first_sect + 1,
        })
    }

    /// Returns the frame's grant. Only the hypervisor knows whether it is really granted.
    pub fn gref(&self) -> GrantRef {
        self.gref
    }

    /// Returns the segment's first byte in the frame.
    pub fn offset(&self) -> u16 {
        u16::from(self.first_sect) * SECTOR_BYTES as u16
    }

    /// Returns the segment's length in bytes, 512 to 4096.
    pub fn bytes(&self) -> usize {
        usize::from(self.sectors) * SECTOR_BYTES as usize
    }
}

/// The limits of the disk, and of its offer to the guest, at the moment of the check.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The disk's size, in 512-byte sectors.
    pub sectors: u64,
    /// Refuse every request that changes the medium.
    pub read_only: bool,
    /// The segments that were advertised for INDIRECT.
    pub max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub discard: bool,
}

/// Why a request was refused. The reason determines the guest's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The request has too many or too few segments for its operation.
    #[error("it has {0} segments")]
    SegmentCount(u32),
    /// A segment ends before it begins, or leaves its frame.
    #[error("segment {0} does not lie inside its frame")]
    SegmentShape(u32),
    /// The request is beyond the disk's end.
    #[error("sectors {sector}+{sectors} are not on the disk")]
    Range {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
    },
    /// The request changes a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The indirect request is neither read nor write.
    #[error("indirect operation {0} is neither read nor write")]
    IndirectOperation(u8),
    /// DISCARD was not offered.
    #[error("discard was not offered")]
    DiscardNotOffered,
    /// blkif has no such operation.
    #[error("the operation is unknown")]
    UnknownOperation,
}

impl Refusal {
    /// Returns the answer to the guest. Reads and writes of any kind fail and are never "not
    /// supported", which Windows takes for success (blkif.md 2, rule 2).
    pub fn outcome(self) -> Outcome {
        match self {
            Refusal::DiscardNotOffered | Refusal::UnknownOperation => Outcome::Unsupported,
            _ => Outcome::Failed,
        }
    }
}

/// Returns an upper bound of a request's data bytes, before its segments are known. The caller
/// reserves this much before it takes the request off the ring. It is 0 for requests that have no
/// data or will be refused.
pub fn reserve_bytes(message: &Message, max_indirect_segments: u16) -> usize {
    match *message {
        Message::Plain { nr_segments, .. } => {
            usize::from(nr_segments).min(MAX_DIRECT_SEGMENTS) * PAGE_SIZE
        }
        Message::Indirect { nr_segments, .. } if nr_segments <= max_indirect_segments => {
            usize::from(nr_segments) * PAGE_SIZE
        }
        Message::Indirect { .. } | Message::Discard { .. } | Message::Unknown => 0,
    }
}

/// Checks a request whose segments are in its slot. Writes the checked segments to `segments`.
///
/// # Errors
/// Fails with the [`Refusal`] to answer with.
pub fn check_direct(
    message: &Message,
    limits: &Limits,
    segments: &mut Vec<Segment>,
) -> Result<Work, Refusal> {
    segments.clear();
    match *message {
        Message::Plain { op, nr_segments, sector, segments: ref raw } => {
            let count = usize::from(nr_segments);
            let data_optional = matches!(op, PlainOp::Flush | PlainOp::Barrier);
            if count > MAX_DIRECT_SEGMENTS || (count == 0 && !data_optional) {
                return Err(Refusal::SegmentCount(nr_segments.into()));
            }
            let action = match (op, count) {
                (PlainOp::Read, _) => Action::Read,
                (PlainOp::Write, _) => Action::Write,
                (PlainOp::Barrier, _) => Action::Barrier,
                (PlainOp::Flush, 0) => Action::Flush,
                (PlainOp::Flush, _) => Action::FlushThenWrite,
            };
            check_data(action, sector, raw[..count].iter().copied(), limits, segments)
        }
        Message::Discard { sector, nr_sectors, flag } => {
            // Secure erase is never offered, so its flag means nothing (blkif.md 2, T20).
            let _ignored = flag & DISCARD_SECURE;
            if limits.read_only {
                return Err(Refusal::ReadOnly);
            }
            if !limits.discard {
                return Err(Refusal::DiscardNotOffered);
            }
            check_range(Action::Discard, sector, nr_sectors, limits)
        }
        Message::Indirect { op, nr_segments, .. } => match op {
            IndirectOp::Other(byte) => Err(Refusal::IndirectOperation(byte)),
            IndirectOp::Read | IndirectOp::Write => Err(Refusal::SegmentCount(nr_segments.into())),
        },
        Message::Unknown => Err(Refusal::UnknownOperation),
    }
}

/// The checked head of an INDIRECT request, before its segments are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectHead {
    /// [`Action::Read`] or [`Action::Write`].
    pub action: Action,
    /// First sector.
    pub sector: u64,
    /// Number of segments: 1 to the advertised limit.
    pub nr_segments: u16,
}

/// Checks the part of an INDIRECT request that is in the slot. Returns `None` if it must not be
/// carried out; [`check_direct`] then returns the reason.
pub fn check_indirect_head(message: &Message, limits: &Limits) -> Option<IndirectHead> {
    let Message::Indirect { op, nr_segments, sector, .. } = *message else { return None };
    let action = match op {
        IndirectOp::Read => Action::Read,
        IndirectOp::Write => Action::Write,
        IndirectOp::Other(_) => return None,
    };
    (1..=limits.max_indirect_segments).contains(&nr_segments).then_some(IndirectHead {
        action,
        sector,
        nr_segments,
    })
}

/// Checks segments (from the slot, or from private copies of indirect pages) and their range.
///
/// # Errors
/// Fails with the [`Refusal`] to answer with.
pub fn check_data(
    action: Action,
    sector: u64,
    raw: impl Iterator<Item = RawSegment>,
    limits: &Limits,
    segments: &mut Vec<Segment>,
) -> Result<Work, Refusal> {
    segments.clear();
    let mut sectors = 0;
    for (i, raw) in raw.enumerate() {
        let segment = Segment::check(&raw).ok_or(Refusal::SegmentShape(i as u32))?;
        sectors += u64::from(segment.sectors);
        segments.push(segment);
    }
    if limits.read_only && action.changes_medium() {
        return Err(Refusal::ReadOnly);
    }
    check_range(action, sector, sectors, limits)
}

fn check_range(
    action: Action,
    sector: u64,
    sectors: u64,
    limits: &Limits,
) -> Result<Work, Refusal> {
    // An empty flush or barrier has no range: Linux leaves its sector uninitialised.
    if sectors == 0 && action != Action::Discard {
        return Ok(Work { action, sector: 0, sectors: 0 });
    }
    match sector.checked_add(sectors) {
        Some(end) if end <= limits.sectors => Ok(Work { action, sector, sectors }),
        _ => Err(Refusal::Range { sector, sectors }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits =
        Limits { sectors: 1000, read_only: false, max_indirect_segments: 256, discard: true };

    fn plain(op: PlainOp, nr: u8, sector: u64) -> Message {
        let segment = RawSegment { gref: 9, first_sect: 0, last_sect: 7 };
        Message::Plain { op, nr_segments: nr, sector, segments: [segment; MAX_DIRECT_SEGMENTS] }
    }

    fn check(message: &Message, limits: &Limits) -> Result<Work, Refusal> {
        check_direct(message, limits, &mut Vec::new())
    }

    #[test]
    fn the_last_sector_may_be_read_and_the_next_may_not() {
        assert!(check(&plain(PlainOp::Read, 1, 992), &LIMITS).is_ok());
        let refused = check(&plain(PlainOp::Read, 1, 993), &LIMITS);
        assert_eq!(refused, Err(Refusal::Range { sector: 993, sectors: 8 }));
        let wrapped = check(&plain(PlainOp::Write, 1, u64::MAX - 3), &LIMITS);
        assert!(matches!(wrapped, Err(Refusal::Range { .. })));
    }

    #[test]
    fn nothing_that_changes_the_medium_passes_on_a_read_only_disk() {
        let ro = Limits { read_only: true, ..LIMITS };
        for message in [
            plain(PlainOp::Write, 1, 0),
            plain(PlainOp::Barrier, 1, 0),
            plain(PlainOp::Barrier, 0, 0),
            plain(PlainOp::Flush, 1, 0),
            Message::Discard { sector: 0, nr_sectors: 8, flag: 0 },
            Message::Discard { sector: 0, nr_sectors: 8, flag: DISCARD_SECURE },
        ] {
            assert_eq!(check(&message, &ro), Err(Refusal::ReadOnly), "{message:?}");
        }
        assert!(check(&plain(PlainOp::Read, 1, 0), &ro).is_ok());
        assert!(check(&plain(PlainOp::Flush, 0, 0), &ro).is_ok());
    }

    #[test]
    fn segment_counts_are_bounded_by_operation() {
        for (op, nr) in [(PlainOp::Read, 0), (PlainOp::Write, 0), (PlainOp::Read, 12)] {
            let refused = check(&plain(op, nr, 0), &LIMITS);
            assert_eq!(refused, Err(Refusal::SegmentCount(nr.into())));
        }
        assert_eq!(
            check(&plain(PlainOp::Flush, 255, 0), &LIMITS).unwrap_err().outcome(),
            Outcome::Failed
        );
    }

    #[test]
    fn a_discard_of_everything_to_the_end_of_time_is_out_of_range() {
        let message = Message::Discard { sector: 1, nr_sectors: u64::MAX, flag: 0xFF };
        assert!(matches!(check(&message, &LIMITS), Err(Refusal::Range { .. })));
        let message = Message::Discard { sector: 0, nr_sectors: 1000, flag: 0xFF };
        assert_eq!(check(&message, &LIMITS).unwrap().action, Action::Discard);
    }

    #[test]
    fn only_operations_that_may_be_missing_are_called_not_supported() {
        let none = Limits { discard: false, ..LIMITS };
        let message = Message::Discard { sector: 0, nr_sectors: 8, flag: 0 };
        assert_eq!(check(&message, &none).unwrap_err().outcome(), Outcome::Unsupported);
        assert_eq!(check(&Message::Unknown, &LIMITS).unwrap_err().outcome(), Outcome::Unsupported);
        let pages = [GrantRef(0); 8];
        for op in [IndirectOp::Read, IndirectOp::Write, IndirectOp::Other(6)] {
            let message = Message::Indirect { op, nr_segments: 0, sector: 0, pages };
            assert!(check_indirect_head(&message, &LIMITS).is_none());
            assert_eq!(check(&message, &LIMITS).unwrap_err().outcome(), Outcome::Failed);
        }
    }

    proptest! {
        /// Every request that passes lies on the disk and in its frames.
        #[test]
        fn what_passes_is_inside_the_disk(
            sector in prop_oneof![0u64..1100, any::<u64>()],
            raw in proptest::collection::vec((any::<u32>(), 0u8..10, 0u8..10), 1..40),
        ) {
            let raw = raw.iter().map(|&(gref, first_sect, last_sect)| {
                RawSegment { gref, first_sect, last_sect }
            });
            let mut segments = Vec::new();
            match check_data(Action::Write, sector, raw.clone(), &LIMITS, &mut segments) {
                Ok(work) => {
                    prop_assert!(work.sector + work.sectors <= LIMITS.sectors);
                    let bytes: usize = segments.iter().map(Segment::bytes).sum();
                    prop_assert_eq!(bytes as u64, work.bytes());
                    for s in &segments {
                        prop_assert!(usize::from(s.offset()) + s.bytes() <= PAGE_SIZE);
                    }
                }
                Err(Refusal::SegmentShape(_)) => {
                    prop_assert!(raw.clone().any(|r| r.first_sect > r.last_sect || r.last_sect > 7));
                }
                Err(Refusal::Range { sectors, .. }) => {
                    prop_assert!(sector.checked_add(sectors).is_none_or(|end| end > 1000));
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }
}
