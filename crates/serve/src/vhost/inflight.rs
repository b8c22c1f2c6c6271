//! The table of requests in flight, in memory that the front end keeps for the next back end.
//!
//! Its form is that of the specification ("inflight I/O tracking", split rings), so that it means the same to the front
//! end: for each queue a header of 16 bytes (features u64, version u16, entries u16, last head u16, used index u16), and
//! for each descriptor 16 bytes (in flight u8, 5 unused, next u16, counter u64). Behind the queues stands which disk it is
//! of: a table of another disk would have its requests carried out on this one.
//!
//! The order of stores, of which a death may come between any two:
//! 1. A request is taken: its counter, then `in flight`. Only then is the next one taken. So the successor takes from
//!    (used index + number in flight) on.
//! 2. Requests are answered: each is linked to the one before by `next` and the header's `last head`, and put on the used
//!    ring. Then the used ring's index: from here on they are answered. Then their `in flight`, then the header's used index.
//!
//! A successor that finds the two used indexes different clears what the last step 2 has not.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferrite_io::foreign::{self, Fault, Memory};

use super::MAX_QUEUES;
use super::message::RawInflight;
use super::ring::MAX_ENTRIES;

const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Queues begin at multiples of this.
const ALIGN_BYTES: usize = 64;
/// The mark behind the queues: a magic number and the disk.
const MARK_BYTES: usize = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"ferrite1");

const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;

/// Why a table is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadTable {
    #[error(
        "the table of requests in flight has {0} queues of {1} entries, which this disk does not have"
    )]
    Shape(u16, u16),
    #[error("the table of requests in flight is too small")]
    TooSmall,
    #[error("the table of requests in flight is of another disk")]
    OtherDisk,
    #[error("the table of requests in flight makes no sense: {0}")]
    Content(&'static str),
    #[error("the table of requests in flight cannot be used: {0}")]
    System(#[from] io::Error),
}

impl From<Fault> for BadTable {
    fn from(fault: Fault) -> BadTable {
        BadTable::System(io::Error::other(fault))
    }
}

/// The table of all queues.
#[derive(Debug)]
pub(super) struct Inflight {
    memory: Memory,
    queues: u16,
    entries: u16,
}

fn queue_bytes(entries: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(entries)).next_multiple_of(ALIGN_BYTES)
}

fn check_shape(raw: &RawInflight, most_queues: u16) -> Result<usize, BadTable> {
    let fits = |count: u16, most: u16| (1..=most).contains(&count);
    match fits(raw.queues, most_queues) && fits(raw.queue_size, MAX_ENTRIES) {
        true => Ok(usize::from(raw.queues) * queue_bytes(raw.queue_size)),
        false => Err(BadTable::Shape(raw.queues, raw.queue_size)),
    }
}

/// The mark of a disk, which tells it from others, in the 56 bytes that a table has for it (FNV-1a, spread).
fn mark_of(disk: &str) -> [u8; MARK_BYTES] {
    let mut mark = [0; MARK_BYTES];
    mark[..8].copy_from_slice(&MAGIC.to_le_bytes());
    for (seed, part) in mark[8..].chunks_exact_mut(8).enumerate() {
        let begin = 0xcbf2_9ce4_8422_2325_u64 ^ seed as u64;
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        part.copy_from_slice(&disk.bytes().fold(begin, step).to_le_bytes());
    }
    mark
}

/// Memory for a table of any shape.
pub(super) fn memory() -> io::Result<File> {
    let most = usize::from(MAX_QUEUES) * queue_bytes(MAX_ENTRIES) + MARK_BYTES;
    foreign::create("ferrite-inflight", most as u64)
}

/// Makes a table for a disk, for the front end to keep: in `memory`, or in memory of its own. Returns its measures, too.
pub(super) fn create(
    raw: &RawInflight,
    most_queues: u16,
    disk: &str,
    memory: Option<&OwnedFd>,
) -> Result<(OwnedFd, RawInflight), BadTable> {
    let bytes = check_shape(raw, most_queues)?;
    let all = (bytes + MARK_BYTES) as u64;
    let file = match memory {
        Some(memory) => memory.try_clone()?,
        None => foreign::create("ferrite-inflight", all)?.into(),
    };
    let table = Memory::map(&file, 0, all)?;
    // An earlier front end may have had the same memory.
    table.zero(0, bytes)?;
    table.copy_in(bytes, &mark_of(disk))?;
    Ok((file, RawInflight { bytes: all, offset: 0, ..*raw }))
}

impl Inflight {
    /// The table that the front end has kept.
    pub(super) fn open(
        raw: &RawInflight,
        file: &OwnedFd,
        most_queues: u16,
        disk: &str,
    ) -> Result<Inflight, BadTable> {
        let bytes = check_shape(raw, most_queues)?;
        if raw.bytes < (bytes + MARK_BYTES) as u64 {
            return Err(BadTable::TooSmall);
        }
        let memory = Memory::map(file, raw.offset, (bytes + MARK_BYTES) as u64)?;
        let mut mark = [0; MARK_BYTES];
        memory.copy_out(bytes, &mut mark)?;
        if mark != mark_of(disk) {
            return Err(BadTable::OtherDisk);
        }
        Ok(Inflight { memory, queues: raw.queues, entries: raw.queue_size })
    }
}

/// The part of one queue.
pub(super) struct QueueTable {
    table: Arc<Inflight>,
    base: usize,
    counter: u64,
}

/// A queue's part, and the requests that a predecessor has left.
pub(super) struct Resumed {
    pub(super) table: QueueTable,
    /// The requests in flight, oldest first; `None`: the queue begins anew.
    pub(super) left: Option<Vec<u16>>,
}

impl QueueTable {
    /// The part of a queue of `entries`, whose used ring is at `used`.
    pub(super) fn resume(
        table: Arc<Inflight>,
        queue: u16,
        entries: u16,
        used: u16,
    ) -> Result<Resumed, BadTable> {
        if queue >= table.queues || entries > table.entries {
            return Err(BadTable::Shape(table.queues, table.entries));
        }
        let base = usize::from(queue) * queue_bytes(table.entries);
        let mut queue = QueueTable { table, base, counter: 0 };
        let left = match queue.load(VERSION_AT)? {
            0 => {
                queue.begin(entries, used)?;
                None
            }
            VERSION => Some(queue.left(entries, used)?),
            _ => return Err(BadTable::Content("its version is unknown")),
        };
        Ok(Resumed { table: queue, left })
    }

    fn begin(&mut self, entries: u16, used: u16) -> Result<(), Fault> {
        self.table.memory.zero(self.base, HEADER_BYTES + ENTRY_BYTES * usize::from(entries))?;
        self.store(ENTRIES_AT, entries)?;
        self.store(USED_AT, used)?;
        // The version comes last: without it the rest is nothing.
        self.store(VERSION_AT, VERSION)
    }

    /// Finishes what a predecessor had begun to answer, and finds what it had not.
    fn left(&mut self, entries: u16, used: u16) -> Result<Vec<u16>, BadTable> {
        if self.load(ENTRIES_AT)? != entries {
            return Err(BadTable::Content("its queue has another size"));
        }
        let answered = used.wrapping_sub(self.load(USED_AT)?);
        if answered > entries {
            return Err(BadTable::Content("its queue is another one"));
        }
        let mut head = self.load(LAST_AT)?;
        for _ in 0..answered {
            if head >= entries {
                return Err(BadTable::Content("an answer is of no request"));
            }
            self.set_in_flight(head, 0)?;
            head = self.load(Self::entry(head) + 6)?;
        }
        self.store(USED_AT, used)?;
        let mut left = Vec::new();
        for head in 0..entries {
            let mut entry = [0; ENTRY_BYTES];
            self.table.memory.copy_out(self.base + Self::entry(head), &mut entry)?;
            if entry[0] != 0 {
                left.push((super::message::u64_at(&entry, 8), head));
            }
        }
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(left.into_iter().map(|(_, head)| head).collect())
    }

    /// Notes that a request was taken, before anything is done for it.
    pub(super) fn took(&mut self, head: u16) -> Result<(), Fault> {
        let at = self.base + Self::entry(head);
        self.table.memory.store_u64(at + 8, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, 1)
    }

    /// Links a request to those that are answered with it. It is on the used ring, which is not published.
    pub(super) fn answers(&self, head: u16) -> Result<(), Fault> {
        self.store(Self::entry(head) + 6, self.load(LAST_AT)?)?;
        self.store(LAST_AT, head)
    }

    /// Notes that these were answered, up to this index of the used ring, which is published.
    pub(super) fn answered(&self, heads: &[u16], used: u16) -> Result<(), Fault> {
        heads.iter().try_for_each(|head| self.set_in_flight(*head, 0))?;
        self.store(USED_AT, used)
    }

    /// Notes that the queue has ended with all requests answered. Another one may come in its place.
    pub(super) fn end(&self) -> Result<(), Fault> {
        self.store(VERSION_AT, 0)
    }

    fn entry(head: u16) -> usize {
        HEADER_BYTES + ENTRY_BYTES * usize::from(head)
    }

    fn set_in_flight(&self, head: u16, value: u16) -> Result<(), Fault> {
        // The byte behind it is unused.
        self.store(Self::entry(head), value)
    }

    fn load(&self, at: usize) -> Result<u16, Fault> {
        self.table.memory.load_u16(self.base + at)
    }

    fn store(&self, at: usize, value: u16) -> Result<(), Fault> {
        self.table.memory.store_u16(self.base + at, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: RawInflight = RawInflight { bytes: 0, offset: 0, queues: 2, queue_size: 8 };

    fn table() -> (OwnedFd, RawInflight) {
        create(&RAW, 4, "disk", None).unwrap()
    }

    /// The requests that the next process finds for queue 1, whose used index is that.
    fn next(file: &OwnedFd, raw: &RawInflight, used: u16) -> Result<Option<Vec<u16>>, BadTable> {
        let table = Arc::new(Inflight::open(raw, file, 4, "disk")?);
        QueueTable::resume(table, 1, 8, used).map(|resumed| resumed.left)
    }

    fn begin(file: &OwnedFd, raw: &RawInflight, used: u16) -> QueueTable {
        let table = Arc::new(Inflight::open(raw, file, 4, "disk").unwrap());
        QueueTable::resume(table, 1, 8, used).unwrap().table
    }

    #[test]
    fn a_successor_finds_what_was_taken_and_not_published_wherever_its_predecessor_ended() {
        let used = 65_534;
        for step in 0..6 {
            let (file, raw) = table();
            let mut queue = begin(&file, &raw, used);
            for head in [5, 2, 7] {
                queue.took(head).unwrap();
            }
            // 2 and 5 are answered, in that order; the used index is published at step 3.
            let steps: [&dyn Fn(); 5] = [
                &|| queue.answers(2).unwrap(),
                &|| queue.answers(5).unwrap(),
                &|| {},
                &|| queue.set_in_flight(2, 0).unwrap(),
                &|| queue.answered(&[2, 5], 0).unwrap(),
            ];
            steps[..step.min(5)].iter().for_each(|step| step());
            let published = step >= 3;
            let now = if published { used.wrapping_add(2) } else { used };
            let expected = if published { vec![7] } else { vec![5, 2, 7] };
            assert_eq!(next(&file, &raw, now).unwrap(), Some(expected.clone()), "{step}");
            // The one after it finds the same, and a new request comes behind the old ones.
            let mut queue = begin(&file, &raw, now);
            queue.took(0).unwrap();
            let expected = [expected, vec![0]].concat();
            assert_eq!(next(&file, &raw, now).unwrap(), Some(expected), "{step}");
        }
    }

    #[test]
    fn a_queue_that_has_ended_begins_anew_on_any_ring() {
        let (file, raw) = table();
        let mut queue = begin(&file, &raw, 9);
        assert_eq!(next(&file, &raw, 9).unwrap(), Some(vec![]));
        queue.took(1).unwrap();
        queue.answers(1).unwrap();
        queue.answered(&[1], 10).unwrap();
        queue.end().unwrap();
        assert_eq!(next(&file, &raw, 0).unwrap(), None);
    }

    #[test]
    fn tables_of_other_disks_or_shapes_or_without_sense_are_refused() {
        let (file, raw) = table();
        let other = |raw: RawInflight, disk: &str| Inflight::open(&raw, &file, 4, disk).is_err();
        assert!(!other(raw, "disk"));
        assert!(other(raw, "another"));
        assert!(other(RawInflight { queues: 5, ..raw }, "disk"));
        assert!(other(RawInflight { queues: 1, ..raw }, "disk"));
        assert!(other(RawInflight { queue_size: 4096, ..raw }, "disk"));
        assert!(other(RawInflight { bytes: raw.bytes - 1, ..raw }, "disk"));
        assert!(other(RawInflight { offset: 4096, ..raw }, "disk"));
        let queue = begin(&file, &raw, 0);
        for (at, value) in [(VERSION_AT, 2), (ENTRIES_AT, 4), (USED_AT, 100), (LAST_AT, 8)] {
            let before = queue.load(at).unwrap();
            queue.store(at, value).unwrap();
            // One answer is to be found, so that the last head matters.
            assert!(next(&file, &raw, 1).is_err(), "{at}");
            queue.store(at, before).unwrap();
            queue.store(USED_AT, 0).unwrap();
        }
    }
}
