//! A record for each packet and receiver, always on: when it reached each stage on its way.
//!
//! A switch has one file of records on tmpfs, a ring with one writer, the thread that moves packets (`ring.rs`). Any
//! process of the same user may read it meanwhile ([`Reader`], docs/internals/trace.md 3).

mod reader;
mod ring;

pub use reader::{Problem, Reader};
pub use ring::{RECORDS, TraceRing};

/// Words of a record in a file, its number included.
pub(crate) const WORDS: usize = 15;
/// The first word of the times.
pub(crate) const TIMES_AT: usize = 5;

/// One end of a packet's way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// No receiver: the packet was dropped.
    #[default]
    Nobody,
    /// The network outside.
    Uplink,
    /// An interface of a guest.
    Vif {
        /// The guest's domain.
        domid: u16,
        /// The interface's number.
        handle: u32,
        /// The queue.
        queue: u8,
    },
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Nobody => f.write_str("-"),
            End::Uplink => f.write_str("uplink"),
            End::Vif { domid, handle, queue: 0 } => write!(f, "vif{domid}.{handle}"),
            End::Vif { domid, handle, queue } => write!(f, "vif{domid}.{handle}-q{queue}"),
        }
    }
}

/// How the thread noticed a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Noticed {
    /// It was at work and read the ring.
    #[default]
    Working,
    /// It polled.
    Poll,
    /// An event woke it.
    Event,
}

/// The outcome of a packet for one receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver has it.
    #[default]
    Received,
    /// Its pages could not be copied.
    Failed,
    /// There is no such receiver, or it does not take such packets.
    Dropped,
    /// The receiver had no pages for it in time.
    Starved,
    /// The sender's address is not its own.
    Refused,
}

impl Noticed {
    /// All values, in the order of their numbers in a file.
    pub const ALL: [Noticed; 3] = [Noticed::Working, Noticed::Poll, Noticed::Event];

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Noticed::Working => "working",
            Noticed::Poll => "poll",
            Noticed::Event => "event",
        }
    }
}

impl Outcome {
    /// All values, in the order of their numbers in a file.
    pub const ALL: [Outcome; 5] =
        [Outcome::Received, Outcome::Failed, Outcome::Dropped, Outcome::Starved, Outcome::Refused];

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Received => "received",
            Outcome::Failed => "failed",
            Outcome::Dropped => "dropped",
            Outcome::Starved => "starved",
            Outcome::Refused => "refused",
        }
    }
}

/// A stage of a packet's way. The order is that of its time in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Its slots were seen.
    Seen,
    /// Its first bytes were fetched.
    Fetched,
    /// Its receiver was chosen, and pages of that taken.
    Chosen,
    /// Its bytes were copied to the receiver.
    Copied,
    /// The receiver's slots were answered.
    RxAnswered,
    /// The sender's slots were answered.
    TxAnswered,
    /// The receiver was notified; never, if it did not ask.
    RxNotified,
    /// The sender was notified; never, if it did not ask.
    TxNotified,
    /// The thread saw that the receiver's guest has consumed the answers.
    RxConsumed,
    /// The thread saw that the sender's guest has consumed the answers.
    TxConsumed,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; STAGES] = [
        Stage::Seen,
        Stage::Fetched,
        Stage::Chosen,
        Stage::Copied,
        Stage::RxAnswered,
        Stage::TxAnswered,
        Stage::RxNotified,
        Stage::TxNotified,
        Stage::RxConsumed,
        Stage::TxConsumed,
    ];

    /// Its name in JSON, without the unit.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Seen => "seen",
            Stage::Fetched => "fetched",
            Stage::Chosen => "chosen",
            Stage::Copied => "copied",
            Stage::RxAnswered => "rx_answered",
            Stage::TxAnswered => "tx_answered",
            Stage::RxNotified => "rx_notified",
            Stage::TxNotified => "tx_notified",
            Stage::RxConsumed => "rx_consumed",
            Stage::TxConsumed => "tx_consumed",
        }
    }
}

/// The number of stages.
pub const STAGES: usize = 10;

/// The record of a packet and one receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The sender.
    pub from: End,
    /// The intended receiver.
    pub to: End,
    /// Bytes of the frame.
    pub bytes: u32,
    /// Bytes of each segment that it is to be cut into; 0: it is not.
    pub segment_bytes: u16,
    /// Pages of the receiver.
    pub pages: u8,
    /// Pieces of the copy.
    pub pieces: u8,
    /// Packets of the turn in which it was copied.
    pub together: u16,
    /// Its outcome.
    pub outcome: Outcome,
    /// How it was noticed.
    pub noticed: Noticed,
    /// The time of each stage, in the order of [`Stage::ALL`]: nanoseconds of `CLOCK_MONOTONIC`; 0: not reached.
    pub times_ns: [u64; STAGES],
}

impl Record {
    /// When it reached a stage.
    pub fn at_ns(&self, stage: Stage) -> Option<u64> {
        Some(self.times_ns[stage as usize]).filter(|ns| *ns > 0)
    }

    /// The words in a file after the first one.
    pub(crate) fn words(&self) -> [u64; WORDS - 1] {
        let mut words = [0; WORDS - 1];
        words[0] = end_word(self.from);
        words[1] = end_word(self.to);
        words[2] = u64::from(self.bytes) << 32
            | u64::from(self.segment_bytes) << 16
            | u64::from(self.pages) << 8
            | u64::from(self.pieces);
        words[3] =
            u64::from(self.together) << 16 | (self.outcome as u64) << 8 | self.noticed as u64;
        words[TIMES_AT - 1..].copy_from_slice(&self.times_ns);
        words
    }

    /// Decodes these words. Any words are a record.
    pub(crate) fn of_words(words: &[u64; WORDS - 1]) -> Record {
        let mut times_ns = [0; STAGES];
        times_ns.copy_from_slice(&words[TIMES_AT - 1..]);
        let [shape, kind] = [words[2], words[3]];
        Record {
            from: end_of(words[0]),
            to: end_of(words[1]),
            bytes: (shape >> 32) as u32,
            segment_bytes: (shape >> 16) as u16,
            pages: (shape >> 8) as u8,
            pieces: shape as u8,
            together: (kind >> 16) as u16,
            outcome: Outcome::ALL.get(kind as usize >> 8 & 0xff).copied().unwrap_or_default(),
            noticed: Noticed::ALL.get(kind as usize & 0xff).copied().unwrap_or_default(),
            times_ns,
        }
    }
}

/// From the top: 8 bits kind, 8 bits queue, 16 bits domain, 32 bits handle.
fn end_word(end: End) -> u64 {
    match end {
        End::Nobody => 0,
        End::Uplink => 1 << 56,
        End::Vif { domid, handle, queue } => {
            2 << 56 | u64::from(queue) << 48 | u64::from(domid) << 32 | u64::from(handle)
        }
    }
}

fn end_of(word: u64) -> End {
    match word >> 56 {
        1 => End::Uplink,
        2 => {
            End::Vif { queue: (word >> 48) as u8, domid: (word >> 32) as u16, handle: word as u32 }
        }
        _ => End::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_words() {
        let record = Record {
            from: End::Vif { domid: 0x7FEF, handle: u32::MAX - 1, queue: 15 },
            to: End::Uplink,
            bytes: 65_535,
            segment_bytes: 1448,
            pages: 18,
            pieces: 33,
            together: 256,
            outcome: Outcome::Refused,
            noticed: Noticed::Event,
            times_ns: std::array::from_fn(|i| (1 << 60) + i as u64),
        };
        assert_eq!(Record::of_words(&record.words()), record);
        for outcome in Outcome::ALL {
            for noticed in Noticed::ALL {
                let record = Record { outcome, noticed, to: End::Nobody, ..record };
                assert_eq!(Record::of_words(&record.words()), record);
            }
        }
        assert_eq!(Record::of_words(&Record::default().words()), Record::default());
        // Of a newer version, or nonsense.
        let _ = Record::of_words(&[u64::MAX; WORDS - 1]);
    }

    #[test]
    fn every_stage_is_in_its_place() {
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, i);
        }
    }
}
