//! One fixed-size record for each request, always on, and spans of what the queue's thread did
//! meanwhile.
//!
//! Each queue has a file on tmpfs, `trace-<queue>` in the disk's run directory. So a reader in
//! another process sees it, and it outlives a crash (docs/internals/trace.md 1).
//!
//! * `ring`: the file and its one writer.
//! * [`clients`]: the files of NBD clients.
//! * [`read`]: reads any file safely.

use std::fmt;

pub mod clients;
pub mod read;
mod ring;

/// Words of a record in a file, its number included.
const RECORD_WORDS: usize = 9;
/// Words of a span, its number included.
const SPAN_WORDS: usize = 4;
pub use ring::{RECORDS, SPANS, TraceRing};

/// The name of a queue's file in the disk's run directory.
pub fn queue_file(queue: u16) -> String {
    format!("trace-{queue}")
}

/// The name of an NBD client's file, by the client's number.
pub fn client_file(client: u16) -> String {
    format!("trace-nbd-{client}")
}

/// The time when a request reached each stage, in nanoseconds of `CLOCK_MONOTONIC`; 0 if it did
/// not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// It was taken off the ring and checked.
    pub taken_ns: u64,
    /// Its data or indirect pages were copied from the guest.
    pub copied_in_ns: u64,
    /// It was handed to the storage engine.
    pub submitted_ns: u64,
    /// Storage completed it.
    pub completed_ns: u64,
    /// Its data were copied to the guest.
    pub copied_out_ns: u64,
    /// Its response was published.
    pub answered_ns: u64,
}

/// How the queue noticed a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Noticed {
    /// The queue was at work and read the ring.
    #[default]
    Working,
    /// The queue polled.
    Poll,
    /// The guest's event woke the queue.
    Event,
    /// An earlier process had taken the request.
    Replayed,
}

/// How a request found an image's metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Metadata {
    /// The request needed none.
    #[default]
    None,
    /// The metadata were in memory.
    Hit,
    /// The request waited for metadata.
    Miss,
}

impl Noticed {
    /// All values, in the order of their numbers in a file.
    pub const ALL: [Noticed; 4] =
        [Noticed::Working, Noticed::Poll, Noticed::Event, Noticed::Replayed];
}

impl fmt::Display for Noticed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Noticed::Working => "working",
            Noticed::Poll => "poll",
            Noticed::Event => "event",
            Noticed::Replayed => "replayed",
        })
    }
}

impl Metadata {
    fn of(bits: u64) -> Metadata {
        match bits & 3 {
            1 => Metadata::Hit,
            2 => Metadata::Miss,
            _ => Metadata::None,
        }
    }
}

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Metadata::None => "-",
            Metadata::Hit => "hit",
            Metadata::Miss => "miss",
        })
    }
}

/// The record of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The identifier that the guest chose.
    pub id: u64,
    /// The first sector, of 512 bytes.
    pub sector: u64,
    /// Bytes of data.
    pub bytes: u32,
    /// The operation byte of the response.
    pub operation: u8,
    /// The status of the response.
    pub status: i16,
    /// Number of grant segments.
    pub segments: u16,
    /// Number of the storage operation of its first piece; 0: none. Requests of one queue with the
    /// same number shared the operation.
    pub transfer: u32,
    /// Number of pieces of this and other requests in that operation.
    pub sharing: u16,
    /// How the queue noticed it.
    pub noticed: Noticed,
    /// How it found metadata.
    pub metadata: Metadata,
    /// Whether the guest was sent an event with its response.
    pub notified: bool,
    /// The ring's count of responses, this one included.
    pub answer: u32,
    /// The time of each stage.
    pub stages: Stages,
}

impl Record {
    /// The words in a file after the first one.
    #[inline]
    pub fn words(&self) -> [u64; RECORD_WORDS - 1] {
        let shape = u64::from(self.bytes) << 32
            | u64::from(self.segments) << 16
            | u64::from(self.status as u8) << 8
            | u64::from(self.operation);
        let s = &self.stages;
        let coarse = is_long(s);
        let flags = self.noticed as u64
            | (self.metadata as u64) << 2
            | u64::from(self.notified) << 4
            | u64::from(coarse) << 5;
        let way = u64::from(self.transfer) << 32 | u64::from(self.sharing) << 16 | flags;
        let [copied_in, submitted, completed, copied_out, answered] =
            if coarse { long_times(s) } else { times(s) };
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            self.id,
            self.sector,
            shape,
            way,
            s.taken_ns,
            pair(copied_in, submitted),
            pair(completed, copied_out),
            pair(answered, self.answer),
        ]
    }

    /// Decodes these words. Any words are a record.
    pub fn of_words(w: &[u64; RECORD_WORDS - 1]) -> Record {
        let coarse = w[3] >> 5 & 1 == 1;
        let at = |since: u64| at_ns(w[4], since as u32, coarse);
        Record {
            id: w[0],
            sector: w[1],
            bytes: (w[2] >> 32) as u32,
            segments: (w[2] >> 16) as u16,
            status: i16::from((w[2] >> 8) as i8),
            operation: w[2] as u8,
            transfer: (w[3] >> 32) as u32,
            sharing: (w[3] >> 16) as u16,
            noticed: Noticed::ALL[w[3] as usize & 3],
            metadata: Metadata::of(w[3] >> 2),
            notified: w[3] >> 4 & 1 == 1,
            answer: w[7] as u32,
            stages: Stages {
                taken_ns: w[4],
                copied_in_ns: at(w[5] >> 32),
                submitted_ns: at(w[5]),
                completed_ns: at(w[6] >> 32),
                copied_out_ns: at(w[6]),
                answered_ns: at(w[7] >> 32),
            },
        }
    }
}

/// The unit of the times of a request that takes longer than four seconds: 65,536 ns, as a shift.
const COARSE: u32 = 16;

/// Whether the times of a request do not fit into 32 bits of nanoseconds.
#[inline]
fn is_long(s: &Stages) -> bool {
    s.answered_ns.wrapping_sub(s.taken_ns) >= u64::from(u32::MAX)
}

/// The times as 32 bits: 0 for none, else one more than the nanoseconds since the request was
/// taken. So a record takes fewer cache lines. No time is after the last one, which fits.
#[inline]
fn times(s: &Stages) -> [u32; 5] {
    let before_ns = s.taken_ns.wrapping_sub(1);
    let since = |at_ns: u64| if at_ns == 0 { 0 } else { at_ns.wrapping_sub(before_ns) as u32 };
    [s.copied_in_ns, s.submitted_ns, s.completed_ns, s.copied_out_ns, s.answered_ns].map(since)
}

/// The times in long units.
#[cold]
fn long_times(s: &Stages) -> [u32; 5] {
    let units = |at_ns: u64| at_ns.wrapping_sub(s.taken_ns) >> COARSE;
    let since = |at_ns: u64| match at_ns {
        0 => 0,
        at_ns => units(at_ns).min(u64::from(u32::MAX) - 1) as u32 + 1,
    };
    [s.copied_in_ns, s.submitted_ns, s.completed_ns, s.copied_out_ns, s.answered_ns].map(since)
}

/// Decodes a time. A missing time is 0.
fn at_ns(taken_ns: u64, since: u32, coarse: bool) -> u64 {
    match u64::from(since).checked_sub(1) {
        None => 0,
        Some(units) => taken_ns.wrapping_add(units << if coarse { COARSE } else { 0 }),
    }
}

/// The activity in a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doing {
    /// The queue's thread polled, with or without success. Where it neither polled nor slept, it
    /// ran.
    Polled(bool),
    /// The thread slept or waited for storage, and the guest's event did not end that.
    #[default]
    Slept,
    /// The thread slept or waited for storage, and the guest's event ended that.
    WokenByEvent,
    /// The guest's count of consumed responses: it reached this value during this span. The value
    /// is the guest's own.
    Consumed(u32),
}

/// A span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The activity.
    pub doing: Doing,
    /// The beginning, in nanoseconds of `CLOCK_MONOTONIC`.
    pub from_ns: u64,
    /// The end, in nanoseconds of `CLOCK_MONOTONIC`.
    pub to_ns: u64,
}

impl Span {
    /// The words in a file after the first one.
    #[inline]
    pub fn words(&self) -> [u64; SPAN_WORDS - 1] {
        let what = match self.doing {
            Doing::Polled(false) => 0,
            Doing::Polled(true) => 1,
            Doing::Slept => 2,
            Doing::WokenByEvent => 3,
            Doing::Consumed(answers) => 4 | u64::from(answers) << 32,
        };
        [what, self.from_ns, self.to_ns]
    }

    /// Decodes these words. `None`: a newer version has written them.
    pub fn of_words(w: &[u64; SPAN_WORDS - 1]) -> Option<Span> {
        let doing = match w[0] as u32 {
            0 => Doing::Polled(false),
            1 => Doing::Polled(true),
            2 => Doing::Slept,
            3 => Doing::WokenByEvent,
            4 => Doing::Consumed((w[0] >> 32) as u32),
            _ => return None,
        };
        Some(Span { doing, from_ns: w[1], to_ns: w[2] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_words() {
        let record = Record {
            id: u64::MAX - 1,
            sector: 8,
            bytes: 1 << 20,
            operation: 1,
            status: -2,
            segments: 256,
            transfer: u32::MAX,
            sharing: 513,
            noticed: Noticed::Event,
            metadata: Metadata::Miss,
            notified: true,
            answer: 0x8000_0001,
            stages: Stages {
                taken_ns: 1 << 50,
                copied_in_ns: 0,
                submitted_ns: 1 << 50,
                completed_ns: (1 << 50) + 4,
                copied_out_ns: (1 << 50) + 5,
                answered_ns: (1 << 50) + u64::from(u32::MAX) - 1,
            },
        };
        assert_eq!(Record::of_words(&record.words()), record);
        // The request took an hour: its times are rounded, and not lost.
        let answered_ns = (1 << 50) + 3_600_000_000_000;
        let slow = Record { stages: Stages { answered_ns, ..record.stages }, ..record };
        let stages = Record::of_words(&slow.words()).stages;
        assert!(answered_ns - stages.answered_ns < 1 << COARSE);
        assert_eq!((stages.copied_in_ns, stages.completed_ns), (0, 1 << 50));
        for noticed in Noticed::ALL {
            let record = Record { noticed, ..record };
            assert_eq!(Record::of_words(&record.words()), record);
        }
        assert_eq!(Record::of_words(&Record::default().words()), Record::default());
    }

    #[test]
    fn a_span_is_its_words() {
        for doing in [
            Doing::Polled(false),
            Doing::Polled(true),
            Doing::Slept,
            Doing::WokenByEvent,
            Doing::Consumed(u32::MAX),
        ] {
            let span = Span { doing, from_ns: 7, to_ns: 9 };
            assert_eq!(Span::of_words(&span.words()), Some(span));
        }
        assert_eq!(Span::of_words(&[5, 0, 0]), None);
    }
}
