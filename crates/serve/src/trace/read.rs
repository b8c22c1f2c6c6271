//! A queue's records and spans as a reader sees them, whatever the file holds.
//!
//! The file is read and not mapped: if its writer makes it shorter, the read is short and the
//! reader goes on. The writer does not notice its readers.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::ring::{MAGIC, OF_RECORDS, OF_SPANS, Place, SHAPE};
use super::{RECORD_WORDS, Record, SPAN_WORDS, Span};

/// Why a file is not a queue's trace that can be read.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is not a trace.
    #[error("it is no trace of a queue")]
    Foreign,
    /// The file is of another version of ferrite.
    #[error("it is of another version of ferrite ({0:?})")]
    Version(String),
    /// The file's contents are invalid.
    #[error("its contents are not valid: {0}")]
    Invalid(&'static str),
}

/// The entries since the last read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// The spans, oldest first.
    pub spans: Vec<Span>,
    /// Number of records that were overwritten before or during the read.
    pub lost_records: u64,
    /// Number of spans that were overwritten before or during the read.
    pub lost_spans: u64,
}

/// Reads a queue's trace while it is written.
#[derive(Debug)]
pub struct Reader {
    file: File,
    inode: u64,
    /// The number of the next record to read.
    record: u64,
    span: u64,
}

impl Reader {
    /// Opens a queue's file. Everything in it counts as new.
    ///
    /// # Errors
    /// The file is not a trace, or cannot be read.
    pub fn open(path: &Path) -> Result<Reader, Problem> {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        Reader::of(OpenOptions::new().read(true).custom_flags(flags).open(path)?)
    }

    /// Reads an open file. Everything in it counts as new.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(file: File) -> Result<Reader, Problem> {
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(Problem::Foreign);
        }
        let [magic, shape @ ..] = words::<{ 1 + SHAPE.len() }>(&file, 0)?;
        let magic = magic.to_le_bytes();
        if magic[..6] != MAGIC[..6] {
            return Err(Problem::Foreign);
        }
        if magic != *MAGIC {
            return Err(Problem::Version(String::from_utf8_lossy(&magic[6..]).into_owned()));
        }
        if shape != SHAPE {
            return Err(Problem::Invalid("the shape of its rings"));
        }
        Ok(Reader { file, inode: meta.ino(), record: 0, span: 0 })
    }

    /// The file's inode number.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Skips everything that is in the file now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn from_now_on(&mut self) -> Result<(), Problem> {
        [self.record] = words(&self.file, OF_RECORDS.head_at)?;
        [self.span] = words(&self.file, OF_SPANS.head_at)?;
        Ok(())
    }

    /// Reads the entries since the last read, at most a ring of each kind.
    ///
    /// # Errors
    /// The file cannot be read, or its contents are invalid.
    pub fn look(&mut self) -> Result<News, Problem> {
        let mut news = News::default();
        news.lost_records =
            collect::<RECORD_WORDS>(&self.file, &OF_RECORDS, &mut self.record, |entry| {
                let [_, words @ ..] = entry;
                news.records.push(Record::of_words(words));
            })?;
        news.lost_spans = collect::<SPAN_WORDS>(&self.file, &OF_SPANS, &mut self.span, |entry| {
            let [_, words @ ..] = entry;
            news.spans.extend(Span::of_words(words));
        })?;
        Ok(news)
    }
}

/// The records that are in a queue's file now, oldest first.
///
/// # Errors
/// As [`Reader::open`].
pub fn read(path: &Path) -> Result<Vec<Record>, Problem> {
    Ok(Reader::open(path)?.look()?.records)
}

/// Calls `give` with the entries from `next` on. Returns how many of them were lost.
fn collect<const WORDS: usize>(
    file: &File,
    place: &Place,
    next: &mut u64,
    mut give: impl FnMut(&[u64; WORDS]),
) -> Result<u64, Problem> {
    let [head] = words(file, place.head_at)?;
    if head < *next {
        return Err(Problem::Invalid("its count of entries goes back"));
    }
    let first = head.saturating_sub(place.entries).max(*next);
    let bytes = entries(file, place, first, head, WORDS * 8)?;
    // The writer may be writing the next entry, which takes the place of the oldest.
    let [head_now] = words(file, place.head_at)?;
    let whole_from = head_now.saturating_add(1).saturating_sub(place.entries);
    let mut lost = first - *next;
    let (words, _) = bytes.as_chunks::<8>();
    for (n, entry) in (first..head).zip(words.as_chunks::<WORDS>().0) {
        let entry = entry.map(u64::from_le_bytes);
        if n >= whole_from && entry[0] == n + 1 {
            give(&entry);
        } else {
            lost += 1;
        }
    }
    *next = head;
    Ok(lost)
}

/// The bytes of the entries from `first` to `head`, at most a ring of them.
fn entries(
    file: &File,
    place: &Place,
    first: u64,
    head: u64,
    entry_bytes: usize,
) -> Result<Vec<u8>, Problem> {
    let mut bytes = vec![0; (head - first) as usize * entry_bytes];
    let slot = (first % place.entries) as usize;
    let to_the_end = (place.entries as usize - slot) * entry_bytes;
    let before_the_end = to_the_end.min(bytes.len());
    let (here, around) = bytes.split_at_mut(before_the_end);
    read_at(file, here, place.first_at + slot * entry_bytes)?;
    read_at(file, around, place.first_at)?;
    Ok(bytes)
}

fn read_at(file: &File, into: &mut [u8], at: usize) -> Result<(), Problem> {
    file.read_exact_at(into, at as u64).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => Problem::Invalid("its length"),
        _ => Problem::Io(e),
    })
}

fn words<const WORDS: usize>(file: &File, at: usize) -> Result<[u64; WORDS], Problem> {
    let mut bytes = [[0; 8]; WORDS];
    read_at(file, bytes.as_flattened_mut(), at)?;
    Ok(bytes.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::super::{Doing, RECORDS, SPANS, Stages, TraceRing};
    use super::*;

    fn record(id: u64) -> Record {
        let stages = Stages { taken_ns: id, answered_ns: id + 9, ..Stages::default() };
        Record { id, bytes: 1 << 20, status: -1, segments: 256, stages, ..Record::default() }
    }

    fn span(n: u64) -> Span {
        Span { doing: Doing::Consumed(n as u32), from_ns: n, to_ns: n + 1 }
    }

    fn ring() -> (tempfile::TempDir, std::path::PathBuf, TraceRing) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace-0");
        let ring = TraceRing::create(&path).unwrap();
        (dir, path, ring)
    }

    #[test]
    fn a_reader_gets_what_is_new_in_order_and_the_number_of_what_was_lost() {
        let (_dir, path, mut ring) = ring();
        let mut reader = Reader::open(&path).unwrap();
        assert_eq!(reader.look().unwrap(), News::default());
        (0..3).for_each(|id| ring.push(&record(id)));
        ring.span(&span(5));
        let news = reader.look().unwrap();
        assert_eq!(news.records, (0..3).map(record).collect::<Vec<_>>());
        assert_eq!((news.spans, news.lost_records, news.lost_spans), (vec![span(5)], 0, 0));
        assert_eq!(reader.look().unwrap(), News::default(), "nothing is new");
        // These records pass the end of the ring.
        (3..1020).for_each(|id| ring.push(&record(id)));
        assert_eq!(reader.look().unwrap().records.len(), 1017);
        (1020..1030).for_each(|id| ring.push(&record(id)));
        assert_eq!(reader.look().unwrap().records, (1020..1030).map(record).collect::<Vec<_>>());
        (0..5000).for_each(|id| ring.push(&record(id)));
        (0..SPANS).for_each(|n| ring.span(&span(n)));
        let news = reader.look().unwrap();
        // The oldest entry may be half overwritten.
        assert_eq!(news.records.first(), Some(&record(5001 - RECORDS)));
        assert_eq!((news.records.len() as u64, news.lost_records), (RECORDS - 1, 5001 - RECORDS));
        assert_eq!((news.spans.len() as u64, news.lost_spans), (SPANS - 1, 1));
        assert_eq!(read(&path).unwrap(), news.records);
    }

    #[test]
    fn what_was_there_before_is_not_new_if_that_is_asked_for() {
        let (_dir, path, mut ring) = ring();
        (0..3).for_each(|id| ring.push(&record(id)));
        let mut reader = Reader::open(&path).unwrap();
        reader.from_now_on().unwrap();
        assert_eq!(reader.look().unwrap(), News::default());
        ring.push(&record(7));
        assert_eq!(reader.look().unwrap().records, [record(7)]);
    }

    #[test]
    fn an_entry_that_is_not_whole_is_lost_and_not_shown() {
        let (_dir, path, mut ring) = ring();
        (0..3).for_each(|id| ring.push(&record(id)));
        // The file looks as if the writer were a whole round ahead in one place.
        let file = File::options().write(true).open(&path).unwrap();
        let at = OF_RECORDS.first_at + RECORD_WORDS * 8;
        file.write_all_at(&(2 + RECORDS).to_le_bytes(), at as u64).unwrap();
        let news = Reader::open(&path).unwrap().look().unwrap();
        assert_eq!((news.records, news.lost_records), (vec![record(0), record(2)], 1));
    }

    #[test]
    fn a_reader_beside_the_writer_sees_whole_records_only_and_counts_all() {
        let (_dir, path, mut ring) = ring();
        let whole = |record: &Record| {
            let id = record.id;
            record.sector == id && record.stages.answered_ns == id && record.stages.taken_ns == id
        };
        let mut reader = Reader::open(&path).unwrap();
        const ALL: u64 = 400_000;
        let writer = std::thread::spawn(move || {
            for id in 1..=ALL {
                let stages = Stages { taken_ns: id, answered_ns: id, ..Stages::default() };
                ring.push(&Record { id, sector: id, stages, ..Record::default() });
            }
        });
        let (mut seen, mut last) = (0, 0);
        while seen < ALL {
            let news = reader.look().unwrap();
            assert!(news.records.iter().all(whole));
            for record in &news.records {
                assert!(record.id > last);
                last = record.id;
            }
            seen += news.records.len() as u64 + news.lost_records;
        }
        writer.join().unwrap();
        assert_eq!((seen, reader.look().unwrap()), (ALL, News::default()));
    }

    #[test]
    fn a_ring_that_is_started_anew_leaves_its_readers_what_they_have() {
        let (dir, path, mut old) = ring();
        old.push(&record(7));
        let mut reader = Reader::open(&path).unwrap();
        TraceRing::create(&path).unwrap();
        assert_eq!(reader.look().unwrap().records, [record(7)]);
        let new = Reader::open(&path).unwrap();
        assert_ne!(new.inode(), reader.inode());
        assert_eq!(read(&path).unwrap(), []);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_trace_is_refused_whatever_it_is() {
        let (dir, path, mut ring) = ring();
        (0..5).for_each(|id| ring.push(&record(id)));
        let whole = std::fs::read(&path).unwrap();
        let other = dir.path().join("x");
        let told = |bytes: &[u8]| {
            std::fs::write(&other, bytes).unwrap();
            match Reader::open(&other).and_then(|mut reader| reader.look()) {
                Ok(news) => panic!("{} records", news.records.len()),
                Err(problem) => problem.to_string(),
            }
        };
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(told(&[0; 200_000]), "it is no trace of a queue");
        assert_eq!(told(&with(7, b'9')), "it is of another version of ferrite (\"09\")");
        assert_eq!(told(&with(16, 1)), "its contents are not valid: the shape of its rings");
        assert_eq!(told(&whole[..30]), "its contents are not valid: its length");
        assert_eq!(told(&whole[..100]), "its contents are not valid: its length");
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(Reader::open(&dir.path().join("link")).is_err());
        assert!(Reader::open(dir.path()).is_err());
        // No writer has such counts: the work is bounded, and no invented entry is shown.
        std::fs::write(&other, with(47, 0xFF)).unwrap();
        let news = Reader::open(&other).unwrap().look().unwrap();
        assert_eq!((news.records.len(), news.lost_records), (0, 0xFF00_0000_0000_0005));
        std::fs::write(&other, &whole).unwrap();
        let mut reader = Reader::open(&other).unwrap();
        assert_eq!(reader.look().unwrap().records.len(), 5);
        std::fs::write(&other, with(40, 4)).unwrap();
        assert!(reader.look().unwrap_err().to_string().contains("goes back"));
    }
}
