//! The requests of one disk, one by one: recorded while it is served, kept in a file, and shown as diagrams, tables and
//! a model (docs/internals/trace.md).
//!
//! * [`live`] records a running disk.
//! * [`mod@file`] is a recording.
//! * [`export`] writes it for other programs.
//! * [`model`] fits time = X + Y x size.
//! * [`report`] draws diagrams.

use std::fmt;

use ferrite_serve::trace::clients::CLIENTS;
use ferrite_serve::trace::{Doing, Record, Span, client_file, queue_file};

pub mod export;
pub mod file;
pub mod live;
pub mod model;
pub mod report;

/// The most queues of a disk.
pub const QUEUES: u16 = 64;
/// Numbers of [`Line`]s: queues, then clients of NBD.
pub const LINES: u16 = QUEUES + CLIENTS;
/// The most requests of a recording.
pub const MOST_REQUESTS: usize = 2_000_000;
/// The most spans of a recording.
pub const MOST_SPANS: usize = 4_000_000;

/// A source of requests of a disk, by its number in a recording: a queue of the guest, or a client of NBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Line {
    /// The queue with this number.
    Queue(u16),
    /// The client with this number.
    Client(u16),
}

impl Line {
    /// The line with this number in a recording.
    pub fn of(number: u16) -> Line {
        match number.checked_sub(QUEUES) {
            Some(client) => Line::Client(client),
            None => Line::Queue(number),
        }
    }

    /// The frontend of its requests.
    pub fn frontend(self) -> &'static str {
        match self {
            Line::Queue(_) => "blkif",
            Line::Client(_) => "nbd",
        }
    }

    /// Its number among the lines of its frontend.
    pub fn number(self) -> u16 {
        let (Line::Queue(number) | Line::Client(number)) = self;
        number
    }

    /// Its file in the disk's run directory.
    pub fn file(self) -> String {
        match self {
            Line::Queue(queue) => queue_file(queue),
            Line::Client(client) => client_file(client),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Queue(queue) => write!(f, "queue {queue}"),
            Line::Client(client) => write!(f, "NBD client {client}"),
        }
    }
}

/// A recording of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Its name: `vbd-DOMID-DEVID`.
    pub disk: String,
    /// The image.
    pub image: String,
    /// The beginning of the recording, in nanoseconds of the clock of all times here.
    pub from_ns: u64,
    /// The end of the recording.
    pub until_ns: u64,
    /// The beginning in nanoseconds since 1970.
    pub began_unix_ns: u64,
    /// Each request with the number of its [`Line`], in the order in which they were taken.
    pub requests: Vec<(u16, Record)>,
    /// Each span with the number of its [`Line`], in the order in which they ended.
    pub spans: Vec<(u16, Span)>,
    /// Requests that were overwritten before they were read.
    pub lost_requests: u64,
    /// Spans that were overwritten before they were read.
    pub lost_spans: u64,
}

/// The stages of a request, in their order.
pub const STAGES: [&str; 5] = ["copy in", "start", "storage", "copy out", "answer"];

/// The time of each of [`STAGES`], in nanoseconds; `None` for a stage that the request did not have. Their sum is the
/// time from the ring to the answer.
pub fn stages(record: &Record) -> [Option<u64>; 5] {
    let s = &record.stages;
    let mut before = s.taken_ns;
    [s.copied_in_ns, s.submitted_ns, s.completed_ns, s.copied_out_ns, s.answered_ns].map(|at| {
        if at == 0 {
            return None;
        }
        let took = at.saturating_sub(before);
        before = before.max(at);
        Some(took)
    })
}

/// The time from the ring to the answer, in nanoseconds.
pub fn latency_ns(record: &Record) -> u64 {
    record.stages.answered_ns.saturating_sub(record.stages.taken_ns)
}

/// An operation's name.
pub fn operation(record: &Record) -> &'static str {
    match record.operation {
        0 => "read",
        1 => "write",
        2 => "barrier",
        3 => "flush",
        5 => "discard",
        _ => "other",
    }
}

/// The owner of a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The thread that serves a line.
    Worker,
    /// The guest of a line.
    Guest,
}

/// A stretch of time of a line: a recorded span, or an interval between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The owner.
    pub whose: Whose,
    /// Its activity; `None`: the thread ran.
    pub doing: Option<Doing>,
    /// The beginning.
    pub from_ns: u64,
    /// The end.
    pub to_ns: u64,
}

impl Stretch {
    /// Its name in a word or two.
    pub fn name(&self) -> &'static str {
        match self.doing {
            None => "ran",
            Some(Doing::Polled(true)) => "polled, found something",
            Some(Doing::Polled(false)) => "polled in vain",
            Some(Doing::Slept) => "slept",
            Some(Doing::WokenByEvent) => "slept until an event",
            Some(Doing::Consumed(_)) => "has consumed answers",
        }
    }
}

/// The stretches of a line's thread and guest, in the order of their ends. Those of one owner do not overlap: a stretch
/// is cut at the beginning of the recording and at the end of another. When the thread neither polled nor slept, it
/// ran.
pub fn stretches(trace: &Trace, line: u16) -> Vec<Stretch> {
    let mut all = Vec::new();
    // The thread's state before its first stretch is unknown.
    let (mut worker_ns, mut guest_ns) = (None, trace.from_ns);
    for (_, span) in trace.spans.iter().filter(|(of, _)| *of == line) {
        let Span { doing, mut from_ns, to_ns } = *span;
        let whose = match doing {
            Doing::Consumed(_) => Whose::Guest,
            _ => Whose::Worker,
        };
        if whose == Whose::Guest {
            from_ns = from_ns.max(guest_ns);
            guest_ns = guest_ns.max(to_ns);
        } else {
            let awake_ns = worker_ns.unwrap_or(trace.from_ns);
            from_ns = from_ns.max(awake_ns);
            if worker_ns.is_some() && from_ns > awake_ns && to_ns > from_ns {
                all.push(Stretch { whose, doing: None, from_ns: awake_ns, to_ns: from_ns });
            }
            worker_ns = Some(awake_ns.max(to_ns));
        }
        if to_ns > from_ns {
            all.push(Stretch { whose, doing: Some(doing), from_ns, to_ns });
        }
    }
    all
}

#[cfg(test)]
pub(crate) mod tests {
    use ferrite_serve::trace::{Doing, Metadata, Noticed, Stages};

    use super::*;

    /// A recording of so many requests, each 10 us after the one before: reads and writes of one to eight blocks on two
    /// queues. Storage takes 20 us and 1 us per KiB.
    pub(crate) fn trace(requests: u64) -> Trace {
        let mut trace = Trace {
            disk: "vbd-3-51712".to_owned(),
            image: "/srv/</script>&.vhd".to_owned(),
            from_ns: 1_000_000,
            until_ns: 1_000_000 + (requests + 10) * 10_000,
            began_unix_ns: 1_700_000_000_000_000_000,
            ..Trace::default()
        };
        for n in 0..requests {
            let taken_ns = 1_000_000 + n * 10_000;
            let (write, kib) = (n % 2 == 1, 4 * (1 + n % 8));
            let copied_in_ns = if write { taken_ns + 300 } else { 0 };
            let submitted_ns = taken_ns + 500;
            let completed_ns = submitted_ns + 20_000 + kib * 1_000;
            let copied_out_ns = if write { 0 } else { completed_ns + 400 };
            let answered_ns = completed_ns + 900;
            let stages = Stages {
                taken_ns,
                copied_in_ns,
                submitted_ns,
                completed_ns,
                copied_out_ns,
                answered_ns,
            };
            let record = Record {
                id: n,
                sector: n * 64,
                bytes: kib as u32 * 1024,
                operation: u8::from(write),
                segments: kib as u16 / 4,
                transfer: 1 + n as u32 / 2,
                sharing: 2,
                noticed: Noticed::ALL[n as usize % 3],
                metadata: if n % 4 == 0 { Metadata::Miss } else { Metadata::Hit },
                notified: n % 3 == 0,
                answer: 1 + n as u32 / 2,
                stages,
                ..Record::default()
            };
            trace.requests.push(((n % 2) as u16, record));
            let span = |doing, from_ns, to_ns| ((n % 2) as u16, Span { doing, from_ns, to_ns });
            trace.spans.push(span(Doing::Polled(n % 2 == 0), taken_ns + 1_000, taken_ns + 2_000));
            trace.spans.push(span(Doing::WokenByEvent, taken_ns + 2_000, taken_ns + 9_000));
            let consumed = Doing::Consumed(1 + n as u32 / 2);
            trace.spans.push(span(consumed, answered_ns, answered_ns + 5_000));
        }
        trace
    }

    #[test]
    fn a_thread_that_neither_polled_nor_slept_ran_and_nothing_overlaps() {
        let span = |doing, from_ns, to_ns| (0, Span { doing, from_ns, to_ns });
        let trace = Trace {
            from_ns: 100,
            spans: vec![
                span(Doing::Slept, 50, 120),
                (1, Span { doing: Doing::Slept, from_ns: 100, to_ns: 130 }),
                span(Doing::Consumed(3), 90, 140),
                span(Doing::Polled(true), 130, 150),
                // Only a broken worker writes this.
                span(Doing::Polled(false), 60, 140),
                span(Doing::WokenByEvent, 140, 170),
                span(Doing::Consumed(4), 130, 180),
            ],
            ..Trace::default()
        };
        let (worker, guest) = (Whose::Worker, Whose::Guest);
        let is = |whose, doing, from_ns, to_ns| Stretch { whose, doing, from_ns, to_ns };
        let expected = [
            is(worker, Some(Doing::Slept), 100, 120),
            is(guest, Some(Doing::Consumed(3)), 100, 140),
            is(worker, None, 120, 130),
            is(worker, Some(Doing::Polled(true)), 130, 150),
            is(worker, Some(Doing::WokenByEvent), 150, 170),
            is(guest, Some(Doing::Consumed(4)), 140, 180),
        ];
        assert_eq!(stretches(&trace, 0), expected);
    }

    #[test]
    fn lines_are_queues_and_then_clients() {
        assert_eq!(
            (Line::of(63).file(), Line::of(64).file()),
            ("trace-63".to_owned(), "trace-nbd-0".to_owned())
        );
        assert_eq!(Line::of(LINES - 1), Line::Client(63));
        assert_eq!((Line::of(2).frontend(), Line::of(66).frontend()), ("blkif", "nbd"));
    }

    #[test]
    fn stages_are_what_lies_between_the_times_and_together_the_latency() {
        let trace = trace(2);
        let [read, write] = [&trace.requests[0].1, &trace.requests[1].1];
        assert_eq!(stages(read), [None, Some(500), Some(24_000), Some(400), Some(500)]);
        assert_eq!(stages(write), [Some(300), Some(200), Some(28_000), None, Some(900)]);
        for record in [read, write] {
            assert_eq!(stages(record).iter().flatten().sum::<u64>(), latency_ns(record));
        }
        // Times that go back: only a broken worker writes them.
        let stages = Stages { completed_ns: 5, answered_ns: 3, taken_ns: 9, ..Stages::default() };
        let odd = Record { stages, ..Record::default() };
        assert_eq!(super::stages(&odd), [None, None, Some(0), None, Some(0)]);
        assert_eq!(latency_ns(&odd), 0);
    }
}
