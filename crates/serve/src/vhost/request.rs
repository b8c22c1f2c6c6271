//! Requests of a virtio block device (virtio 1.2, 5.2.6), checked.

use ferrite_disk::SECTOR_BYTES;

use super::chain::Chain;
use super::config::MAX_RANGES;
use super::memory::{Place, Table};
use super::message::{u32_at, u64_at};
use super::ring::{Broken, Violation};
use crate::path::limit::Counted;
use crate::path::work::{Action, Work};
use ferrite_xen::abi::{OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// The status of a request that was carried out.
pub(super) const OKAY: u8 = 0;
/// That of one that has failed.
pub(super) const FAILED: u8 = 1;
/// That of one that this device does not know.
pub(super) const UNSUPPORTED: u8 = 2;

const HEADER_BYTES: u64 = 16;
/// Bytes of a range to discard or to zero.
const RANGE_BYTES: usize = 16;
/// Bytes of a disk's name.
pub(super) const ID_BYTES: usize = 20;
/// The largest part of a request for zeros, in sectors: 64 MiB.
const ZERO_SECTORS: u64 = 128 << 10;

/// The operation of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Doing {
    #[default]
    Read,
    Write,
    Flush,
    Discard,
    /// Makes ranges read as zeros, by whatever means.
    Zero,
    /// Writes zeros that take space.
    WriteZeros,
}

impl Doing {
    /// The operation's number in blkif, for the trace.
    pub(super) fn operation(self) -> u8 {
        match self {
            Doing::Read => OP_READ,
            Doing::Write | Doing::Zero | Doing::WriteZeros => OP_WRITE,
            Doing::Discard => OP_DISCARD,
            Doing::Flush => OP_FLUSH,
        }
    }

    pub(super) fn counted(self) -> Counted {
        match self {
            Doing::Read => Counted::Read,
            Doing::Flush => Counted::Not,
            _ => Counted::Write,
        }
    }

    fn changes_medium(self) -> bool {
        !matches!(self, Doing::Read | Doing::Flush)
    }
}

/// A range of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) sector: u64,
    pub(super) sectors: u64,
}

/// A checked request, and how far it is.
#[derive(Debug, Default)]
pub(super) struct Request {
    pub(super) doing: Doing,
    /// Ranges that were not handed to the path. The first may be the rest of one. A flush has an empty one.
    pub(super) left: Vec<Range>,
    /// The memory of its data.
    pub(super) data: Vec<Place>,
    /// Bytes of the data that were handed over.
    pub(super) at: u64,
    /// The place of the status.
    pub(super) status_at: Place,
    /// Bytes that the guest is told were written, if it succeeds.
    pub(super) written: u32,
    /// Number of parts on the path.
    pub(super) under_way: u32,
    pub(super) status: u8,
    /// A flush has to follow before it is answered.
    pub(super) flush_due: bool,
    /// It was counted as waiting for the disk's limit.
    pub(super) limited: bool,
}

/// The facts of the disk and its guest for the checks.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    pub(super) discards: bool,
    /// Each write is on the medium before it is answered, as the guest does not flush.
    pub(super) writes_through: bool,
    pub(super) id: &'a [u8; ID_BYTES],
}

/// A request that was looked at.
pub(super) enum Parsed {
    /// It is to be carried out.
    Work,
    /// It has its answer: the place of its status, the status, and the bytes that were written.
    Answer(Place, u8, u32),
}

/// Checks a request, and has it in `request` if it is to be carried out. Its header is copied once.
pub(super) fn parse(
    table: &Table,
    chain: &mut Chain,
    rules: &Rules<'_>,
    request: &mut Request,
) -> Result<Parsed, Broken> {
    if chain.readable_bytes < HEADER_BYTES {
        return Err(Violation::NoHeader.into());
    }
    let Some(last) = chain.writable.last_mut() else { return Err(Violation::NoStatus.into()) };
    // The status is the last byte of what may be written.
    let status_at = last.slice(last.len - 1, 1);
    *last = last.slice(0, last.len - 1);
    let mut header = [0; HEADER_BYTES as usize];
    table.gather(&chain.readable, 0, &mut header)?;
    let (kind, sector) = (u32_at(&header, 0), u64_at(&header, 8));
    let sent = chain.readable_bytes - HEADER_BYTES;
    let room = chain.writable_bytes - 1;
    let answer = |status: u8, written: u32| Ok(Parsed::Answer(status_at, status, written));
    let (doing, bytes) = match kind {
        IN => (Doing::Read, room),
        OUT => (Doing::Write, sent),
        FLUSH => (Doing::Flush, 0),
        DISCARD if rules.discards && !rules.read_only => (Doing::Discard, sent),
        WRITE_ZEROES if !rules.read_only => (Doing::Zero, sent),
        GET_ID => {
            if room < ID_BYTES as u64 {
                return answer(FAILED, 1);
            }
            table.scatter(&chain.writable, 0, rules.id)?;
            return answer(OKAY, ID_BYTES as u32 + 1);
        }
        _ => return answer(UNSUPPORTED, 1),
    };
    let (mut left, mut data) =
        (std::mem::take(&mut request.left), std::mem::take(&mut request.data));
    left.clear();
    data.clear();
    *request = Request {
        doing,
        left,
        data,
        at: 0,
        status_at,
        written: 1,
        under_way: 0,
        status: OKAY,
        flush_due: rules.writes_through && doing.changes_medium(),
        limited: false,
    };
    match doing {
        Doing::Flush => request.left.push(Range { sector: 0, sectors: 0 }),
        Doing::Discard | Doing::Zero | Doing::WriteZeros => {
            match ranges(table, chain, bytes, doing)? {
                Ok((doing, ranges)) => (request.doing, request.left) = (doing, ranges),
                Err(status) => return answer(status, 1),
            }
        }
        Doing::Read | Doing::Write => {
            if !bytes.is_multiple_of(SECTOR_BYTES) || (doing == Doing::Write && rules.read_only) {
                return answer(FAILED, 1);
            }
            request.left.push(Range { sector, sectors: bytes / SECTOR_BYTES });
            // The header's bytes are skipped, and the status is behind the data of a read.
            let places = match doing {
                Doing::Read => &mut chain.writable,
                _ => {
                    request.at = HEADER_BYTES;
                    &mut chain.readable
                }
            };
            std::mem::swap(&mut request.data, places);
        }
    }
    let is_outside = |range: &Range| {
        range.sector.checked_add(range.sectors).is_none_or(|end| end > rules.sectors)
    };
    if request.left.iter().any(is_outside) {
        return answer(FAILED, 1);
    }
    if doing == Doing::Read {
        request.written = u32::try_from(bytes + 1).unwrap_or(u32::MAX);
    }
    if doing != Doing::Flush {
        request.left.retain(|range| range.sectors > 0);
    }
    Ok(Parsed::Work)
}

/// The ranges of a discard or of zeros; or the status of a request that makes no sense.
fn ranges(
    table: &Table,
    chain: &Chain,
    bytes: u64,
    doing: Doing,
) -> Result<Result<(Doing, Vec<Range>), u8>, Broken> {
    if bytes == 0
        || bytes > (MAX_RANGES * RANGE_BYTES) as u64
        || !bytes.is_multiple_of(RANGE_BYTES as u64)
    {
        return Ok(Err(FAILED));
    }
    let mut raw = vec![0; bytes as usize];
    table.gather(&chain.readable, HEADER_BYTES, &mut raw)?;
    let raw = || raw.chunks_exact(RANGE_BYTES);
    let flags = raw().fold(0, |flags, range| flags | u32_at(range, 12));
    let all_unmap = raw().all(|range| u32_at(range, 12) & 1 != 0);
    let doing = match doing {
        // Of zeros, the flag says that space may be freed. It means nothing for a discard.
        Doing::Discard if flags != 0 => return Ok(Err(UNSUPPORTED)),
        _ if flags & !1 != 0 => return Ok(Err(UNSUPPORTED)),
        Doing::Zero if !all_unmap => Doing::WriteZeros,
        doing => doing,
    };
    let range = |raw: &[u8]| Range { sector: u64_at(raw, 0), sectors: u32_at(raw, 8).into() };
    Ok(Ok((doing, raw().map(range).collect())))
}

/// Elements of a list that is kept for the next request.
const KEPT: usize = 64;

impl Request {
    /// Gives the memory of long lists back, before it is used for another request.
    pub(super) fn rest(&mut self) {
        self.left.clear();
        self.left.shrink_to(KEPT);
        self.data.clear();
        self.data.shrink_to(KEPT);
    }

    /// Whether no part is under way and none is left.
    pub(super) fn has_ended(&self) -> bool {
        self.under_way == 0 && self.left.is_empty()
    }

    /// Leaves out what was not handed over.
    pub(super) fn skip(&mut self) {
        self.left.clear();
    }

    /// The next part, of at most `part_sectors` if it has data. It has one left.
    pub(super) fn next_part(&self, part_sectors: u64, block_bytes: impl Fn() -> u32) -> Work {
        let Range { sector, sectors } = self.left[0];
        let part = |action: Action, sectors: u64| Work { action, sector, sectors };
        match self.doing {
            Doing::Read => part(Action::Read, sectors.min(part_sectors)),
            Doing::Write | Doing::WriteZeros => part(Action::Write, sectors.min(part_sectors)),
            Doing::Flush => part(Action::Flush, 0),
            Doing::Discard => part(Action::Discard, sectors),
            Doing::Zero => {
                let block = u64::from(block_bytes()) / SECTOR_BYTES;
                let before = sector.next_multiple_of(block) - sector;
                match () {
                    () if before > 0 => part(Action::Write, before.min(sectors)),
                    () if sectors < block => part(Action::Write, sectors),
                    () => part(Action::Zero, (sectors - sectors % block).min(ZERO_SECTORS)),
                }
            }
        }
    }

    /// Counts a part as handed over.
    pub(super) fn took(&mut self, part: &Work) {
        self.under_way += 1;
        if matches!(self.doing, Doing::Read | Doing::Write) {
            self.at += part.bytes();
        }
        let first = &mut self.left[0];
        (first.sector, first.sectors) = (first.sector + part.sectors, first.sectors - part.sectors);
        if first.sectors == 0 {
            self.left.remove(0);
        }
    }
}
