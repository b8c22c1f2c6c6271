//! Counts of one interface. "Sent" and "received" are the guest's view.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one interface, which the worker changes.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64,)* }

        /// The counts at a moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// Reads all counters.
            pub fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl Counts {
            /// The values of all counters, with their names.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets that the guest sent and that at least one receiver got.
    sent_packets,
    /// Their bytes.
    sent_bytes,
    /// Packets that the guest received.
    received_packets,
    /// Their bytes.
    received_bytes,
    /// Packets that the guest sent with an address that is not its own.
    spoofed,
    /// Packets that the guest sent in slots that contradict each other.
    malformed,
    /// Packets whose pages could not be copied, to or from this guest.
    failed,
    /// Packets of this guest without a receiver, or that their receiver could not take.
    dropped,
    /// Packets for this guest that were dropped: it had no pages for them in time.
    starved,
    /// Packets for this guest that were dropped: it did not say that it takes such.
    unsupported,
}

/// One more.
pub(crate) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// So many more.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    // One thread writes.
    counter.store(counter.load(Relaxed).wrapping_add(more), Relaxed);
}
