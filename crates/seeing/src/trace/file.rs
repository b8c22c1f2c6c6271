//! A recording in a file (docs/internals/trace.md 2).

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write};
use std::path::Path;

use ferrite_serve::trace::{Record, Span};
use flate2::Crc;

use super::{LINES, MOST_REQUESTS, MOST_SPANS, Trace};

const MAGIC: &[u8; 8] = b"FERTRF01";
/// Words before the texts.
const HEADER: usize = 10;
/// Words of a request and of a span, their queue included.
const REQUEST: usize = 9;
const SPAN: usize = 4;
/// The most bytes of the names of a disk and of an image.
const TEXTS: [usize; 2] = [128, 4096];
/// The most bytes of a file.
const MOST_BYTES: usize =
    8 * (HEADER + 1 + REQUEST * MOST_REQUESTS + SPAN * MOST_SPANS) + TEXTS[0] + TEXTS[1];

/// The reason why a file is no recording.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It has another format.
    #[error("it is no trace that ferrite has recorded")]
    Foreign,
    /// It is of another version of this program.
    #[error("it is of version {0:?} of such files, and this program reads version \"01\"")]
    Version(String),
    /// It is damaged.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
}

/// Writes a recording.
///
/// # Errors
/// The writer's.
pub fn write(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = Summed { to: BufWriter::new(to), crc: Crc::new() };
    let texts = [cut(&trace.disk, TEXTS[0]), cut(&trace.image, TEXTS[1])];
    out.words(&[
        u64::from_le_bytes(*MAGIC),
        trace.requests.len() as u64,
        trace.spans.len() as u64,
        trace.lost_requests,
        trace.lost_spans,
        trace.from_ns,
        trace.until_ns,
        trace.began_unix_ns,
        texts[0].len() as u64,
        texts[1].len() as u64,
    ])?;
    for text in texts {
        out.bytes(text.as_bytes())?;
        out.bytes(&[0; 8][..text.len().next_multiple_of(8) - text.len()])?;
    }
    for (queue, record) in &trace.requests {
        out.words(&[u64::from(*queue)])?;
        out.words(&record.words())?;
    }
    for (queue, span) in &trace.spans {
        out.words(&[u64::from(*queue)])?;
        out.words(&span.words())?;
    }
    let sum = u64::from(out.crc.sum());
    out.words(&[sum])?;
    out.to.flush()
}

/// The beginning of a text, in whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

struct Summed<W: Write> {
    to: BufWriter<W>,
    crc: Crc,
}

impl<W: Write> Summed<W> {
    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.to.write_all(bytes)
    }

    fn words(&mut self, words: &[u64]) -> io::Result<()> {
        words.iter().try_for_each(|word| self.bytes(&word.to_le_bytes()))
    }
}

/// The bytes with the checksum of a valid recording, as in a file that was damaged on purpose.
pub fn with_sum(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some(end) = bytes.len().checked_sub(8) {
        let mut crc = Crc::new();
        crc.update(&bytes[..end]);
        bytes[end..].copy_from_slice(&u64::from(crc.sum()).to_le_bytes());
    }
    bytes
}

/// Reads a recording.
///
/// # Errors
/// The reason why it is none.
pub fn read(path: &Path) -> Result<Trace, Problem> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    // A longer file than any recording is not read to its end.
    file.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    parse(&bytes)
}

/// Parses the bytes of a file.
///
/// # Errors
/// The reason why it is no recording.
pub fn parse(bytes: &[u8]) -> Result<Trace, Problem> {
    let magic = bytes.get(..MAGIC.len()).ok_or(Problem::Foreign)?;
    if magic[..6] != MAGIC[..6] {
        return Err(Problem::Foreign);
    }
    if magic != MAGIC {
        return Err(Problem::Version(String::from_utf8_lossy(&magic[6..]).into_owned()));
    }
    let cut = Problem::Damaged("its end is missing, or there is more behind it");
    let (words, rest) = bytes.as_chunks::<8>();
    if words.len() < HEADER + 1 || !rest.is_empty() {
        return Err(cut);
    }
    let word = |at: usize| u64::from_le_bytes(words[at]);
    let below = |at: usize, most: usize, what| {
        usize::try_from(word(at)).ok().filter(|n| *n <= most).ok_or(Problem::Damaged(what))
    };
    let requests = below(1, MOST_REQUESTS, "its number of requests")?;
    let spans = below(2, MOST_SPANS, "its number of spans")?;
    let disk = below(8, TEXTS[0], "the name of its disk")?;
    let image = below(9, TEXTS[1], "the name of its image")?;
    let image_at = HEADER + disk.div_ceil(8);
    let requests_at = image_at + image.div_ceil(8);
    let spans_at = requests_at + requests * REQUEST;
    let sum_at = spans_at + spans * SPAN;
    if words.len() != sum_at + 1 {
        return Err(cut);
    }
    let mut crc = Crc::new();
    crc.update(&bytes[..8 * sum_at]);
    if word(sum_at) != u64::from(crc.sum()) {
        return Err(Problem::Damaged("its sum is another one"));
    }
    let text = |at: usize, len: usize| {
        let text = std::str::from_utf8(&bytes[8 * at..8 * at + len]);
        text.map(str::to_owned).map_err(|_| Problem::Damaged("a name is no text"))
    };
    Ok(Trace {
        disk: text(HEADER, disk)?,
        image: text(image_at, image)?,
        from_ns: word(5),
        until_ns: word(6),
        began_unix_ns: word(7),
        requests: entries::<REQUEST, _>(&words[requests_at..spans_at], |[_, words @ ..]| {
            Ok(Record::of_words(words))
        })?,
        spans: entries::<SPAN, _>(&words[spans_at..sum_at], |[_, words @ ..]| {
            Span::of_words(words).ok_or(Problem::Damaged("the kind of a span"))
        })?,
        lost_requests: word(3),
        lost_spans: word(4),
    })
}

/// Parses entries, whose first word has the queue.
fn entries<const WORDS: usize, T>(
    words: &[[u8; 8]],
    of: impl Fn(&[u64; WORDS]) -> Result<T, Problem>,
) -> Result<Vec<(u16, T)>, Problem> {
    let (entries, _) = words.as_chunks::<WORDS>();
    let entry = |entry: &[[u8; 8]; WORDS]| {
        let entry = entry.map(u64::from_le_bytes);
        let queue = u16::try_from(entry[0]).ok().filter(|queue| *queue < LINES);
        Ok((queue.ok_or(Problem::Damaged("the number of a queue"))?, of(&entry)?))
    };
    entries.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::trace;
    use super::*;

    fn bytes(trace: &Trace) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(trace, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        for requests in [0, 1, 100] {
            let mut trace = trace(requests);
            (trace.lost_requests, trace.lost_spans) = (7, u64::MAX);
            assert_eq!(parse(&bytes(&trace)).unwrap(), trace);
        }
        let long = Trace { disk: "ü".repeat(100), image: "x".repeat(5000), ..Trace::default() };
        let read = parse(&bytes(&long)).unwrap();
        assert_eq!((read.disk.len(), read.image.len()), (128, 4096));
    }

    #[test]
    fn a_file_that_is_not_whole_is_refused_wherever_it_is_damaged() {
        let whole = bytes(&trace(3));
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert!(parse(&damaged).is_err(), "byte {at}");
        }
        let told = |bytes: &[u8]| parse(bytes).unwrap_err().to_string();
        assert_eq!(told(b"something else"), "it is no trace that ferrite has recorded");
        let mut newer = whole.clone();
        newer[7] = b'2';
        assert!(told(&newer).contains("version \"02\""));
        assert!(told(&[&whole[..], &[0; 8]].concat()).contains("more behind it"));
    }

    #[test]
    fn numbers_that_no_recording_has_are_refused_though_the_sum_is_right() {
        let whole = bytes(&trace(3));
        let told = |word: usize, value: u64| {
            let mut bytes = whole.clone();
            bytes[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
            parse(&with_sum(&bytes)).unwrap_err().to_string()
        };
        assert!(told(1, u64::MAX).contains("its number of requests"));
        assert!(told(1, MOST_REQUESTS as u64).contains("its end is missing"));
        assert!(told(2, u64::MAX).contains("its number of spans"));
        assert!(told(8, 129).contains("the name of its disk"));
        assert!(told(9, 1 << 40).contains("the name of its image"));
        let first = HEADER + 2 + "/srv/</script>&.vhd".len().div_ceil(8);
        assert!(told(first, u64::from(LINES)).contains("the number of a queue"));
        assert!(told(first + 3 * REQUEST + 1, 99).contains("the kind of a span"));
        assert!(told(HEADER, u64::MAX).contains("a name is no text"));
    }
}
