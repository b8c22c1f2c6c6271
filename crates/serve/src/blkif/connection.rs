//! What the queues of one connected frontend share.

use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_xen::abi::Protocol;

use super::request::Limits;
use crate::path::shared::Shared;

/// One connection of a guest to a device: made anew at each reconnect.
pub struct Connection {
    /// Its way to the device.
    pub shared: Arc<Shared>,
    /// Layout of the slots.
    pub protocol: Protocol,
    /// Segments advertised for INDIRECT; 0 if it was not.
    pub max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub discard: bool,
}

impl Connection {
    /// What a request may ask of this disk, now.
    pub fn limits(&self, disk: &Disk) -> Limits {
        Limits {
            sectors: disk.sectors(),
            read_only: disk.read_only(),
            max_indirect_segments: self.max_indirect_segments,
            discard: self.discard,
        }
    }
}
