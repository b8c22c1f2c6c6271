//! Counters of a disk's queues.
//!
//! One line of counters a queue, each with one writer, so that counting costs a store; readers
//! take what is there, and may see one counter a moment before another.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Most queues that a disk can have.
const QUEUES: usize = 64;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One queue's counters, alone on their cache lines.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(crate) struct QueueCounters {
            $(pub(crate) $name: Counter,)*
        }

        /// The counters of a disk at one moment, all queues and all connections together.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            fn add(&mut self, queue: &QueueCounters) {
                $(self.$name += queue.$name.get();)*
            }

            /// The counts since `earlier`.
            pub fn since(&self, earlier: &Counts) -> Counts {
                Counts { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// Those of two disks together.
            pub fn plus(&self, other: &Counts) -> Counts {
                Counts { $($name: self.$name + other.$name,)* }
            }

            /// Names and values, in the order of their definition, for reports.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Requests answered.
    requests,
    /// Sweeps that took at least one request off a ring.
    sweeps,
    /// Operations given to the storage engine for data.
    transfers,
    /// Requests that shared such an operation with another.
    merged,
    /// Requests whose place was known from metadata in memory.
    metadata_hits,
    /// Requests for which metadata had to be read or changed first.
    metadata_misses,
    /// Parts that discards were done in.
    discard_parts,
    /// Polls for work before a sleep.
    polls,
    /// Polls that found some.
    hits,
    /// Time spent polling, in nanoseconds.
    polled_ns,
    /// Sleeps.
    sleeps,
    /// Times that nothing was taken as the disk had used its processor time.
    throttles,
    /// How long that was, in nanoseconds.
    throttled_ns,
    /// Events taken from the guest.
    events,
    /// Times that the guest's events were held back, as they came without requests.
    held_events,
    /// Events sent to the guest.
    notifications,
    /// Times that buffers were given back to the system, after a while without requests.
    releases,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = 100 * self.hits / self.polls.max(1);
        write!(
            f,
            "{} requests in {} sweeps, {} transfers ({} requests merged); {} events taken ({} times \
             held back), {} sent; polled {} times for {} ms ({rate} % found work), slept {} times",
            self.requests,
            self.sweeps,
            self.transfers,
            self.merged,
            self.events,
            self.held_events,
            self.notifications,
            self.polls,
            self.polled_ns / 1_000_000,
            self.sleeps,
        )?;
        if self.throttles > 0 {
            let ms = self.throttled_ns / 1_000_000;
            write!(f, "; held back {} times for {ms} ms (--cpu)", self.throttles)?;
        }
        match (self.metadata_hits, self.metadata_misses) {
            // A raw disk.
            (0, 0) => Ok(()),
            (hits, misses) => {
                write!(f, "; metadata: {hits} requests had it in memory, {misses} waited for it")
            }
        }
    }
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A disk's counters; they go on from connection to connection.
#[derive(Clone, Debug)]
pub struct Counters(Arc<[QueueCounters]>);

impl Default for Counters {
    fn default() -> Self {
        Counters((0..QUEUES).map(|_| QueueCounters::default()).collect())
    }
}

impl Counters {
    pub(crate) fn queue(&self, index: usize) -> &QueueCounters {
        &self.0[index]
    }

    /// All queues' together.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.0.iter().for_each(|queue| counts.add(queue));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_queues_are_added_up() {
        let counters = Counters::default();
        counters.queue(0).requests.add(3);
        let before = counters.counts();
        counters.queue(63).requests.add(4);
        counters.queue(63).hits.add(1);
        let counts = counters.counts();
        assert_eq!((counts.requests, counts.hits), (7, 1));
        assert_eq!(counts.since(&before).requests, 4);
        assert!(counts.named().any(|named| named == ("requests", 7)));
    }

    #[test]
    fn metadata_is_spoken_of_where_a_disk_has_some() {
        let raw = Counts { requests: 7, ..Counts::default() };
        assert!(!raw.to_string().contains("metadata"), "{raw}");
        let image = Counts { metadata_hits: 5, metadata_misses: 2, ..raw };
        let text = image.to_string();
        assert!(text.ends_with("metadata: 5 requests had it in memory, 2 waited for it"), "{text}");
    }
}
