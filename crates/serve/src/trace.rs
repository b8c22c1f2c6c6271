//! One fixed-size record a request, always on (ARCHITECTURE.md, "A request's way").
//!
//! Each queue has a ring of records in a file on tmpfs, `trace-<queue>` in the disk's run
//! directory, so that a reader in another process sees them and they outlive a crash. The writer
//! never waits for readers: a reader takes `head` before and after and drops what was lapped.

use std::io;
use std::path::Path;

use ferrite_io::shm::Shm;

/// Records in a queue's ring; a power of two.
pub const RECORDS: u64 = 1024;
/// Bytes of a record: nine 64-bit words.
pub const RECORD_BYTES: usize = 8 * RECORD_WORDS;
const RECORD_WORDS: usize = 9;
/// Bytes before the first record: magic, record size, record count, head.
const HEADER_BYTES: usize = 64;
/// "FERTRC02"
const MAGIC: u64 = u64::from_le_bytes(*b"FERTRC02");
const HEAD_AT: usize = 24;

/// When a request reached each stage, in nanoseconds of `CLOCK_MONOTONIC`; 0 where it did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Taken off the ring and checked.
    pub taken_ns: u64,
    /// Its data (or indirect pages) copied from the guest.
    pub copied_in_ns: u64,
    /// Handed to the storage engine.
    pub submitted_ns: u64,
    /// Completed by storage.
    pub completed_ns: u64,
    /// Its data copied to the guest.
    pub copied_out_ns: u64,
    /// Its response published.
    pub answered_ns: u64,
}

/// A request's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// As the guest chose it.
    pub id: u64,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Data bytes.
    pub bytes: u32,
    /// Operation byte of the response.
    pub operation: u8,
    /// Status of the response.
    pub status: i16,
    /// Grant segments.
    pub segments: u16,
    /// The time of each stage.
    pub stages: Stages,
}

impl Record {
    fn words(&self) -> [u64; RECORD_WORDS] {
        let shape = u64::from(self.bytes) << 32
            | u64::from(self.segments) << 16
            | u64::from(self.status as u8) << 8
            | u64::from(self.operation);
        let s = &self.stages;
        [
            self.id,
            self.sector,
            shape,
            s.taken_ns,
            s.copied_in_ns,
            s.submitted_ns,
            s.completed_ns,
            s.copied_out_ns,
            s.answered_ns,
        ]
    }

    fn from_words(w: &[u64; RECORD_WORDS]) -> Record {
        Record {
            id: w[0],
            sector: w[1],
            bytes: (w[2] >> 32) as u32,
            segments: (w[2] >> 16) as u16,
            status: i16::from((w[2] >> 8) as i8),
            operation: w[2] as u8,
            stages: Stages {
                taken_ns: w[3],
                copied_in_ns: w[4],
                submitted_ns: w[5],
                completed_ns: w[6],
                copied_out_ns: w[7],
                answered_ns: w[8],
            },
        }
    }
}

/// The writing end of a queue's ring.
pub struct TraceRing {
    shm: Shm,
    head: u64,
}

impl TraceRing {
    /// Creates the file, in place of one that is there: whoever reads that one goes on with what
    /// it held (emptied under a reader, it would be a SIGBUS).
    ///
    /// # Errors
    /// The file system's.
    pub fn create(path: &Path) -> io::Result<TraceRing> {
        let new = path.with_extension("new");
        let shm = Shm::create(&new, HEADER_BYTES + RECORDS as usize * RECORD_BYTES)?;
        shm.store_u64(8, RECORD_BYTES as u64);
        shm.store_u64(16, RECORDS);
        shm.store_u64(HEAD_AT, 0);
        shm.store_u64(0, MAGIC);
        ferrite_io::names::rename(&new, path)?;
        Ok(TraceRing { shm, head: 0 })
    }

    /// Appends one record; the oldest gives way.
    pub fn push(&mut self, record: &Record) {
        let at = HEADER_BYTES + (self.head % RECORDS) as usize * RECORD_BYTES;
        self.shm.store_words(at, &record.words());
        self.head += 1;
        self.shm.store_u64(HEAD_AT, self.head);
    }
}

/// Reads the records that are in a queue's ring now, oldest first.
///
/// # Errors
/// The file system's; `InvalidData` if the file is not a trace ring of this version.
pub fn read(path: &Path) -> io::Result<Vec<Record>> {
    let shm = Shm::open(path)?;
    let size = HEADER_BYTES + RECORDS as usize * RECORD_BYTES;
    if shm.len() < size || shm.load_u64(0) != MAGIC || shm.load_u64(16) != RECORDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a trace ring"));
    }
    let head = shm.load_u64(HEAD_AT);
    let first = head.saturating_sub(RECORDS);
    let records: Vec<(u64, Record)> = (first..head)
        .map(|n| {
            let at = HEADER_BYTES + (n % RECORDS) as usize * RECORD_BYTES;
            (n, Record::from_words(&std::array::from_fn(|i| shm.load_u64(at + 8 * i))))
        })
        .collect();
    // One more than lapped: the writer may be in the middle of the next one.
    let lapped = (shm.load_u64(HEAD_AT) + 1).saturating_sub(RECORDS);
    Ok(records.into_iter().filter(|(n, _)| *n >= lapped).map(|(_, r)| r).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_finds_the_newest_records_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace-0");
        let mut ring = TraceRing::create(&path).unwrap();
        let record = |id| Record {
            id,
            sector: 8,
            bytes: 1 << 20,
            operation: 1,
            status: -1,
            segments: 256,
            stages: Stages { taken_ns: id, answered_ns: id + 9, ..Stages::default() },
        };
        (0..3).for_each(|id| ring.push(&record(id)));
        assert_eq!(read(&path).unwrap(), (0..3).map(record).collect::<Vec<_>>());
        (3..5000).for_each(|id| ring.push(&record(id)));
        let seen = read(&path).unwrap();
        assert_eq!(seen.last(), Some(&record(4999)));
        assert_eq!(seen.len() as u64, RECORDS - 1, "the oldest may be half overwritten");
    }

    #[test]
    fn a_ring_that_is_started_anew_leaves_its_readers_what_they_have() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace-0");
        let mut old = TraceRing::create(&path).unwrap();
        old.push(&Record { id: 7, ..Record::default() });
        let reader = Shm::open(&path).unwrap();
        TraceRing::create(&path).unwrap();
        assert_eq!((reader.load_u64(0), reader.load_u64(HEADER_BYTES)), (MAGIC, 7));
        assert_eq!(read(&path).unwrap(), []);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_file_is_not_taken_for_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, vec![0u8; 200_000]).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
