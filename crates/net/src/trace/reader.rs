//! A switch's records as a reader sees them, whatever the file holds.
//!
//! The file is read and not mapped: if its writer makes it shorter, the read is short and the reader goes on.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::ring::{HEAD_AT, HEADER_BYTES, MAGIC, RECORD_BYTES, SHAPE};
use super::{RECORDS, Record, WORDS};

/// Why a file is not a switch's trace that can be read.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is not a trace.
    #[error("it is no trace of a switch")]
    Foreign,
    /// The file is of another version of ferrite.
    #[error("it is of another version of ferrite")]
    Version,
    /// The file's contents are invalid.
    #[error("its contents are not valid: {0}")]
    Invalid(&'static str),
}

/// Reads a switch's records while they are written.
#[derive(Debug)]
pub struct Reader {
    file: File,
    /// The number of the next record that was not read.
    next: u64,
    /// Records that were replaced before they were read.
    lost: u64,
    /// By number. One that is read again has later times.
    records: BTreeMap<u64, Record>,
}

impl Reader {
    /// Opens a switch's file. All that is in it counts as new.
    ///
    /// # Errors
    /// The file is not a trace, or cannot be read.
    pub fn open(path: &Path) -> Result<Reader, Problem> {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(Problem::Foreign);
        }
        let [magic, shape @ ..] = words::<{ 1 + SHAPE.len() }>(&file, 0)?;
        let magic = magic.to_le_bytes();
        if magic[..6] != MAGIC[..6] {
            return Err(Problem::Foreign);
        }
        if magic != *MAGIC {
            return Err(Problem::Version);
        }
        if shape != SHAPE {
            return Err(Problem::Invalid("the shape of its ring"));
        }
        Ok(Reader { file, next: 0, lost: 0, records: BTreeMap::new() })
    }

    /// Skips all that is in the file now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn from_now_on(&mut self) -> Result<(), Problem> {
        [self.next] = words(&self.file, HEAD_AT)?;
        Ok(())
    }

    /// Reads what came since the last look, and what is still there again, as times are added later. A look is at most
    /// a ring. The number of records so far.
    ///
    /// # Errors
    /// The file cannot be read, or its contents are invalid.
    pub fn look(&mut self) -> Result<usize, Problem> {
        let [head] = words(&self.file, HEAD_AT)?;
        if head < self.next {
            return Err(Problem::Invalid("its count of records goes back"));
        }
        let oldest = head.saturating_sub(RECORDS);
        self.lost = self.lost.saturating_add(oldest.saturating_sub(self.next));
        // The records that were read before, and have a place in the ring yet.
        let known = self.records.keys().next().copied().unwrap_or(self.next).min(self.next);
        let first = oldest.max(known);
        let mut bytes = vec![0; (head - first) as usize * RECORD_BYTES];
        let slot = (first % RECORDS) as usize;
        let to_the_end = (RECORDS as usize - slot) * RECORD_BYTES;
        let (here, around) =
            bytes.split_at_mut(to_the_end.min((head - first) as usize * RECORD_BYTES));
        read_at(&self.file, here, HEADER_BYTES + slot * RECORD_BYTES)?;
        read_at(&self.file, around, HEADER_BYTES)?;
        // The writer may be writing the next record, which takes the place of the oldest.
        let [head_now] = words(&self.file, HEAD_AT)?;
        let whole_from = head_now.saturating_add(1).saturating_sub(RECORDS);
        let (all, _) = bytes.as_chunks::<8>();
        for (n, entry) in (first..head).zip(all.as_chunks::<WORDS>().0) {
            let entry = entry.map(u64::from_le_bytes);
            let [number, words @ ..] = &entry;
            if n >= whole_from && *number == n + 1 {
                self.records.insert(n, Record::of_words(words));
            } else if n >= self.next {
                self.lost = self.lost.saturating_add(1);
            }
        }
        self.next = head;
        Ok(self.records.len())
    }

    /// All records that were read, oldest first, and how many were replaced before they were read.
    pub fn finish(self) -> (Vec<Record>, u64) {
        (self.records.into_values().collect(), self.lost)
    }
}

fn read_at(file: &File, into: &mut [u8], at: usize) -> Result<(), Problem> {
    file.read_exact_at(into, at as u64).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => Problem::Invalid("its length"),
        _ => Problem::Io(e),
    })
}

fn words<const N: usize>(file: &File, at: usize) -> Result<[u64; N], Problem> {
    let mut bytes = [[0; 8]; N];
    read_at(file, bytes.as_flattened_mut(), at)?;
    Ok(bytes.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::super::{Stage, TraceRing};
    use super::*;

    fn record(n: u64) -> Record {
        let mut record = Record { bytes: n as u32, ..Record::default() };
        record.times_ns[0] = n + 1;
        record
    }

    fn ring() -> (tempfile::TempDir, std::path::PathBuf, TraceRing) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lan.trace");
        let ring = TraceRing::create(&path).unwrap();
        (dir, path, ring)
    }

    #[test]
    fn a_reader_gets_all_in_order_counts_what_was_lost_and_sees_later_times() {
        let (_dir, path, mut ring) = ring();
        let mut reader = Reader::open(&path).unwrap();
        (0..3).for_each(|n| assert_eq!(ring.push(&record(n)), n));
        assert_eq!(reader.look().unwrap(), 3);
        ring.set(1, Stage::TxConsumed, 77);
        (3..4000).for_each(|n| assert_eq!(ring.push(&record(n)), n));
        assert_eq!(reader.look().unwrap(), 4000);
        // Past the end of the ring, and more than it holds.
        (4000..10_000).for_each(|n| assert_eq!(ring.push(&record(n)), n));
        ring.set(1, Stage::TxNotified, 78);
        reader.look().unwrap();
        let (records, lost) = reader.finish();
        let mut second = record(1);
        second.times_ns[Stage::TxConsumed as usize] = 77;
        assert_eq!(records[1], second, "a replaced record is not changed any more");
        assert_eq!(records.last(), Some(&record(9999)));
        // The oldest may be half replaced.
        assert_eq!(records.len() as u64 + lost, 10_000);
        assert_eq!(lost, 10_000 - 4000 - (RECORDS - 1));
        let mut late = Reader::open(&path).unwrap();
        late.from_now_on().unwrap();
        assert_eq!(late.look().unwrap(), 0);
        ring.push(&record(7));
        assert_eq!(late.look().unwrap(), 1);
    }

    #[test]
    fn what_is_no_trace_is_refused_whatever_it_is() {
        let (dir, path, mut ring) = ring();
        (0..5).for_each(|n| assert_eq!(ring.push(&record(n)), n));
        let whole = std::fs::read(&path).unwrap();
        let other = dir.path().join("x");
        let told = |bytes: &[u8]| {
            std::fs::write(&other, bytes).unwrap();
            match Reader::open(&other).and_then(|mut reader| reader.look()) {
                Ok(records) => panic!("{records} records"),
                Err(problem) => problem.to_string(),
            }
        };
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(told(&[0; 200_000]), "it is no trace of a switch");
        assert_eq!(told(&with(7, b'9')), "it is of another version of ferrite");
        assert_eq!(told(&with(8, 1)), "its contents are not valid: the shape of its ring");
        assert_eq!(told(&whole[..20]), "its contents are not valid: its length");
        assert_eq!(told(&whole[..100]), "its contents are not valid: its length");
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(Reader::open(&dir.path().join("link")).is_err());
        // No writer has such a count: the work is bounded, and no invented record is shown.
        std::fs::write(&other, with(31, 0xFF)).unwrap();
        let mut reader = Reader::open(&other).unwrap();
        assert_eq!(reader.look().unwrap(), 0);
        let mut reader = Reader::open(&path).unwrap();
        reader.look().unwrap();
        std::fs::write(&other, &whole).unwrap();
        let mut reader = Reader::open(&other).unwrap();
        assert_eq!(reader.look().unwrap(), 5);
        std::fs::write(&other, with(24, 4)).unwrap();
        assert!(reader.look().unwrap_err().to_string().contains("goes back"));
    }
}
