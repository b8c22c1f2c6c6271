//! One fixed-size record a request, always on, and what the queue's thread did meanwhile.
//!
//! Each queue has a file on tmpfs, `trace-<queue>` in the disk's run directory, so that a reader in
//! another process sees it, and it outlives a crash (docs/internals/trace.md 1).
//!
//! * `ring`: the file, and its one writer.
//! * [`clients`]: the files of clients of NBD.
//! * [`read`]: what anybody reads, whatever the file holds.

use std::fmt;

pub mod clients;
pub mod read;
mod ring;

/// Words of a record in a file, its number included.
const RECORD_WORDS: usize = 9;
/// Words of a span, its number included.
const SPAN_WORDS: usize = 4;
pub use ring::{RECORDS, SPANS, TraceRing};

/// The file of a queue, in the disk's run directory.
pub fn queue_file(queue: u16) -> String {
    format!("trace-{queue}")
}

/// The file of a client of NBD, by its number.
pub fn client_file(client: u16) -> String {
    format!("trace-nbd-{client}")
}

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

/// How the queue noticed that there was a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Noticed {
    /// It looked, as it was at work anyway.
    #[default]
    Working,
    /// It was polling.
    Poll,
    /// The guest's event woke it.
    Event,
    /// It was taken by a process before this one.
    Replayed,
}

/// What a request found of an image's metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Metadata {
    /// It needed none.
    #[default]
    None,
    /// They were in memory.
    Hit,
    /// It waited for them.
    Miss,
}

impl Noticed {
    /// All of them, by their numbers in a file.
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
    /// The operation of storage that its first piece went with, by number; 0: none. Requests of one
    /// queue with the same number shared it.
    pub transfer: u32,
    /// The pieces, of this and other requests, that this operation was made of.
    pub sharing: u16,
    /// How the queue noticed it.
    pub noticed: Noticed,
    /// What it found of metadata.
    pub metadata: Metadata,
    /// The guest was sent an event with its answer.
    pub notified: bool,
    /// The ring's count of answers, this one included.
    pub answer: u32,
    /// The time of each stage.
    pub stages: Stages,
}

impl Record {
    /// As it is in a file, behind the first word.
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

    /// What such words say; any words say something.
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

/// Units of the times of a request that takes longer than four seconds: 65,536 ns, as a shift.
const COARSE: u32 = 16;

/// Whether the times of a request do not fit into 32 bits of nanoseconds.
#[inline]
fn is_long(s: &Stages) -> bool {
    s.answered_ns.wrapping_sub(s.taken_ns) >= u64::from(u32::MAX)
}

/// Times as 32 bits: 0 for none, else one more than the nanoseconds since the request was taken. So a record
/// takes fewer lines of the cache. None is behind the last, which fits.
#[inline]
fn times(s: &Stages) -> [u32; 5] {
    let before_ns = s.taken_ns.wrapping_sub(1);
    let since = |at_ns: u64| if at_ns == 0 { 0 } else { at_ns.wrapping_sub(before_ns) as u32 };
    [s.copied_in_ns, s.submitted_ns, s.completed_ns, s.copied_out_ns, s.answered_ns].map(since)
}

/// The same in long units.
#[cold]
fn long_times(s: &Stages) -> [u32; 5] {
    let units = |at_ns: u64| at_ns.wrapping_sub(s.taken_ns) >> COARSE;
    let since = |at_ns: u64| match at_ns {
        0 => 0,
        at_ns => units(at_ns).min(u64::from(u32::MAX) - 1) as u32 + 1,
    };
    [s.copied_in_ns, s.submitted_ns, s.completed_ns, s.copied_out_ns, s.answered_ns].map(since)
}

/// The opposite; a time that is none is 0.
fn at_ns(taken_ns: u64, since: u32, coarse: bool) -> u64 {
    match u64::from(since).checked_sub(1) {
        None => 0,
        Some(units) => taken_ns.wrapping_add(units << if coarse { COARSE } else { 0 }),
    }
}

/// What is known of a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doing {
    /// The queue's thread polled; whether it found something. Where it neither polled nor slept, it ran.
    Polled(bool),
    /// It slept, or waited for storage; whether the guest's event ended that.
    #[default]
    Slept,
    /// As `Slept`, and the guest's event ended it.
    WokenByEvent,
    /// The guest has consumed so many answers, by the ring's count: not at the beginning of this stretch,
    /// and at its end. It is the guest's word.
    Consumed(u32),
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// What is known of it.
    pub doing: Doing,
    /// Its beginning,
    pub from_ns: u64,
    /// and its end, of `CLOCK_MONOTONIC`.
    pub to_ns: u64,
}

impl Span {
    /// As it is in a file, behind the first word.
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

    /// What such words say; `None`: something newer.
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
        // One that took an hour: its times are rounded, and not lost.
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
