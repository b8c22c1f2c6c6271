//! The file of a queue's records and spans: two rings with one writer.
//!
//! The writer never waits. The first word of an entry is its number and stored before the others;
//! the heads are stored after them (docs/internals/trace.md 1, rule 3).

use std::io;
use std::path::Path;

use ferrite_host::shm::Shm;

use super::{RECORD_WORDS, Record, SPAN_WORDS, Span};

/// Records in a queue's ring; a power of two.
pub const RECORDS: u64 = 1024;
/// Spans in a queue's ring; a power of two.
pub const SPANS: u64 = 1024;
/// Bytes before the first record.
const HEADER_BYTES: usize = 64;
/// Bytes of the file.
const FILE_BYTES: usize =
    HEADER_BYTES + RECORDS as usize * RECORD_WORDS * 8 + SPANS as usize * SPAN_WORDS * 8;

/// The beginning of a header.
pub(super) const MAGIC: &[u8; 8] = b"FERTRC03";
/// The words of a header that describe the file's shape.
pub(super) const SHAPE: [u64; 4] = [8 * RECORD_WORDS as u64, RECORDS, 8 * SPAN_WORDS as u64, SPANS];

/// The place of a ring in the file.
pub(super) struct Place {
    /// Offset of the number of entries that were ever written.
    pub(super) head_at: usize,
    /// Offset of the first entry.
    pub(super) first_at: usize,
    /// Number of entries.
    pub(super) entries: u64,
}

pub(super) const OF_RECORDS: Place =
    Place { head_at: 40, first_at: HEADER_BYTES, entries: RECORDS };
pub(super) const OF_SPANS: Place = Place {
    head_at: 48,
    first_at: HEADER_BYTES + RECORDS as usize * RECORD_WORDS * 8,
    entries: SPANS,
};

/// The writing end of a queue's rings.
pub struct TraceRing {
    shm: Shm,
    records: u64,
    spans: u64,
}

impl TraceRing {
    /// Creates the file in place of an old one. Readers of the old one keep its contents. If there is no space for both, the
    /// old one is removed before: its guest comes first.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(path: &Path) -> io::Result<TraceRing> {
        let new = path.with_extension("new");
        let shm = match Shm::create(&new, FILE_BYTES) {
            Err(e) if e.kind() == io::ErrorKind::StorageFull => {
                let _ = ferrite_host::names::remove_file(&new);
                match ferrite_host::names::remove_file(path) {
                    Ok(()) => Shm::create(&new, FILE_BYTES)?,
                    // Without an old one there is no space to gain.
                    Err(_) => return Err(e),
                }
            }
            created => created?,
        };
        for (i, word) in SHAPE.into_iter().enumerate() {
            shm.store_u64(8 + 8 * i, word);
        }
        shm.store_u64(0, u64::from_le_bytes(*MAGIC));
        ferrite_host::names::rename(&new, path)?;
        Ok(TraceRing { shm, records: 0, spans: 0 })
    }

    /// Appends one record, which replaces the oldest.
    #[inline]
    pub fn push(&mut self, record: &Record) {
        let [id, sector, shape, way, taken_ns, a, b, c] = record.words();
        let n = self.records;
        self.records = n + 1;
        let entry = [n + 1, id, sector, shape, way, taken_ns, a, b, c];
        store(&self.shm, &OF_RECORDS, n, &entry);
    }

    /// Appends one span, which replaces the oldest.
    #[inline]
    pub fn span(&mut self, span: &Span) {
        let [what, from_ns, to_ns] = span.words();
        let n = self.spans;
        self.spans = n + 1;
        store(&self.shm, &OF_SPANS, n, &[n + 1, what, from_ns, to_ns]);
    }
}

#[inline]
fn store<const WORDS: usize>(shm: &Shm, place: &Place, n: u64, entry: &[u64; WORDS]) {
    shm.store_words(place.first_at + (n % place.entries) as usize * WORDS * 8, entry);
    shm.store_u64(place.head_at, n + 1);
}
