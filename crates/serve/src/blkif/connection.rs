//! The state that the queues of one connected frontend share.

use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_xen::abi::Protocol;
use ferrite_xen::hypervisor::PAGE_SIZE;

use super::request::Limits;
use crate::path;
use crate::path::shared::Shared;

/// One connection of a guest to a device. Each reconnect makes a new one.
pub struct Connection {
    /// The connection's link to the device.
    pub shared: Arc<Shared>,
    /// The layout of the ring's slots.
    pub protocol: Protocol,
    /// The advertised segments of an INDIRECT request; 0 if it was not offered.
    pub max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub discard: bool,
}

/// Returns the segments of the largest request that finds a buffer when no other is in flight.
pub fn largest_request(disk: &Disk) -> u16 {
    (path::largest_request(disk) / PAGE_SIZE) as u16
}

impl Connection {
    /// Returns the current limits for a request to this disk.
    pub fn limits(&self, disk: &Disk) -> Limits {
        Limits {
            sectors: disk.sectors(),
            read_only: disk.read_only(),
            // A request that finds no buffer is refused instead of waiting, even if it was within
            // the offer.
            max_indirect_segments: self.max_indirect_segments.min(largest_request(disk)),
            discard: self.discard,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_disk::OpenOptions;
    use ferrite_host::clock::SystemClock;
    use ferrite_io::pool::{Pool, SLAB_BYTES};
    use ferrite_xen::abi::{IndirectOp, Message};
    use ferrite_xen::hypervisor::GrantRef;

    use super::*;
    use crate::blkif::request::{Refusal, check_direct, check_indirect_head, reserve_bytes};
    use crate::counters::Counters;
    use crate::path::device::Device;
    use crate::path::work::Outcome;
    use crate::tuning::Tuning;

    #[test]
    fn a_request_that_no_buffer_would_hold_is_refused_whatever_was_offered() {
        let disk = Disk::open("null:16M", &OpenOptions::default()).unwrap();
        let device = Arc::new(Device::new(disk, SystemClock::shared()));
        let pool = Pool::new(SLAB_BYTES, 1).unwrap();
        let (processors, counters) = (Arc::default(), Counters::default());
        let shared =
            Shared::new(device.clone(), pool, 1, Tuning::default(), processors, counters).unwrap();
        let connection = Connection {
            shared: Arc::new(shared),
            protocol: Protocol::X86_64,
            max_indirect_segments: 4096,
            discard: false,
        };
        let limits = connection.limits(&device.disk().unwrap());
        let request = |nr_segments| Message::Indirect {
            op: IndirectOp::Write,
            nr_segments,
            sector: 0,
            pages: [GrantRef(1); 8],
        };
        let bytes = |message: &Message| reserve_bytes(message, limits.max_indirect_segments);
        assert_eq!(bytes(&request(256)), SLAB_BYTES);
        let larger = request(257);
        assert_eq!(bytes(&larger), 0);
        assert!(check_indirect_head(&larger, &limits).is_none());
        let refusal = check_direct(&larger, &limits, &mut Vec::new()).unwrap_err();
        assert_eq!(refusal, Refusal::SegmentCount(257));
        assert_eq!(refusal.outcome(), Outcome::Failed);
    }
}
