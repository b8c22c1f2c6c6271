//! The file of a switch's records: a ring with one writer, which never waits for readers.
//!
//! The first word of a record is its number plus one, and stored before the others; the head after them. The last times
//! of a record are stored later, each by itself.

use std::io;
use std::path::Path;

use ferrite_host::names;
use ferrite_host::shm::Shm;

use super::{Record, Stage, TIMES_AT, WORDS};

/// Records of a file; a power of two.
pub const RECORDS: u64 = 4096;
pub(super) const HEADER_BYTES: usize = 64;
pub(super) const RECORD_BYTES: usize = WORDS * 8;
pub(super) const FILE_BYTES: usize = HEADER_BYTES + RECORDS as usize * RECORD_BYTES;
/// The place of the number of records that were ever written.
pub(super) const HEAD_AT: usize = 24;

/// The beginning of a file.
pub(super) const MAGIC: &[u8; 8] = b"FERNET01";
/// The words behind it, which describe the file's shape.
pub(super) const SHAPE: [u64; 2] = [RECORD_BYTES as u64, RECORDS];

/// The writing end.
pub struct TraceRing {
    shm: Shm,
    records: u64,
}

impl TraceRing {
    /// Creates the file in place of an old one. Readers of the old one keep what it held.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(path: &Path) -> io::Result<TraceRing> {
        let new = path.with_extension("new-trace");
        let shm = Shm::create(&new, FILE_BYTES)?;
        for (i, word) in SHAPE.into_iter().enumerate() {
            shm.store_u64(8 + 8 * i, word);
        }
        shm.store_u64(0, u64::from_le_bytes(*MAGIC));
        names::rename(&new, path)?;
        Ok(TraceRing { shm, records: 0 })
    }

    /// Appends a record, which replaces the oldest; its number.
    #[inline]
    pub fn push(&mut self, record: &Record) -> u64 {
        let n = self.records;
        self.records = n + 1;
        let mut entry = [n + 1; WORDS];
        entry[1..].copy_from_slice(&record.words());
        self.shm.store_words(place(n), &entry);
        self.shm.store_u64(HEAD_AT, n + 1);
        n
    }

    /// Sets a time of a record, if it was not replaced yet.
    #[inline]
    pub fn set(&mut self, n: u64, stage: Stage, at_ns: u64) {
        if n < self.records && self.records - n <= RECORDS {
            self.shm.store_u64(place(n) + 8 * (TIMES_AT + stage as usize), at_ns);
        }
    }
}

fn place(n: u64) -> usize {
    HEADER_BYTES + (n % RECORDS) as usize * RECORD_BYTES
}
