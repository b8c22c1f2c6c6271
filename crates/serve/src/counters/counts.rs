//! The counters of a queue besides the kinds and latencies of its requests.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::layout::{PAGE_WORDS, SPACE_SINCE_AT};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Offsets in a queue's page.
        #[allow(non_camel_case_types)]
        enum Place {
            $($name,)*
            Count,
        }

        const _: () = assert!(Place::Count as usize <= SPACE_SINCE_AT);

        /// One queue's counters.
        #[derive(Clone, Copy)]
        pub(crate) struct QueueCounters<'a> {
            $(pub(crate) $name: Counter<'a>,)*
        }

        impl<'a> QueueCounters<'a> {
            /// The counters in a queue's page.
            #[inline]
            pub(super) fn of(page: &'a [AtomicU64; PAGE_WORDS]) -> QueueCounters<'a> {
                QueueCounters { $($name: Counter(&page[Place::$name as usize]),)* }
            }
        }

        /// The counters of a disk at one moment, of all queues and connections together.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            /// Adds a queue's page. The file may hold anything, so sums wrap.
            pub(super) fn add(&mut self, page: &[u64; PAGE_WORDS]) {
                $(self.$name = self.$name.wrapping_add(page[Place::$name as usize]);)*
            }

            /// The counts since `earlier`.
            pub fn since(&self, earlier: &Counts) -> Counts {
                Counts { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// The sum of the counts of two disks.
            pub fn plus(&self, other: &Counts) -> Counts {
                Counts { $($name: self.$name.wrapping_add(other.$name),)* }
            }

            /// Names and values in the order of their definition, for reports.
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
    /// Data operations given to the storage engine.
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
    /// Polls that found work.
    hits,
    /// Time spent polling, in nanoseconds.
    polled_ns,
    /// Sleeps.
    sleeps,
    /// Times that no requests were taken since the disk had used its processor time.
    throttles,
    /// Duration of these times, in nanoseconds.
    throttled_ns,
    /// Events taken from the guest.
    events,
    /// Times that the guest's events were held back, as they came without requests.
    held_events,
    /// Events sent to the guest.
    notifications,
    /// Times that buffers were given back to the system, after a while without requests.
    releases,
    /// Requests that were refused: the disk does not have or do what they ask for.
    refused,
    /// Times that no buffer was free for a request.
    shortages,
    /// Requests that had to wait for space, as their storage was full.
    space_waits,
    /// Requests that have stopped waiting for space.
    space_waits_ended,
    /// Entries of a store's V2P that were looked up in memory.
    v2p_hits,
    /// Leaves of V2P that had to be read.
    v2p_misses,
    /// Entries of a store's P2M that were looked up in memory.
    p2m_hits,
    /// Leaves of P2M that had to be read.
    p2m_misses,
    /// Requests that had to wait for the disk's limit of requests or bytes in a second.
    limit_waits,
    /// Time that queues took no requests for that reason, in nanoseconds.
    limit_waited_ns,
}

impl Counts {
    /// Requests that wait for space now.
    pub fn waiting_for_space(&self) -> u64 {
        self.space_waits.saturating_sub(self.space_waits_ended)
    }
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
        if self.limit_waits > 0 {
            let ms = self.limit_waited_ns / 1_000_000;
            write!(f, "; {} requests waited for the limit, for {ms} ms", self.limit_waits)?;
        }
        match (self.metadata_hits, self.metadata_misses) {
            // The disk is a raw one.
            (0, 0) => Ok(()),
            (hits, misses) => {
                write!(f, "; metadata: {hits} requests had it in memory, {misses} waited for it")
            }
        }
    }
}

/// A counter with one writer.
#[derive(Clone, Copy)]
pub(crate) struct Counter<'a>(&'a AtomicU64);

impl Counter<'_> {
    #[inline]
    pub(crate) fn add(self, n: u64) {
        add(self.0, n);
    }

    /// The current value.
    pub(super) fn value(self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Adds to a word with one writer: one instruction, without a lock.
#[inline]
pub(super) fn add(word: &AtomicU64, n: u64) {
    word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_spoken_of_where_a_disk_has_some() {
        let raw = Counts { requests: 7, ..Counts::default() };
        assert!(!raw.to_string().contains("metadata"), "{raw}");
        let image = Counts { metadata_hits: 5, metadata_misses: 2, ..raw };
        let text = image.to_string();
        assert!(text.ends_with("metadata: 5 requests had it in memory, 2 waited for it"), "{text}");
    }
}
