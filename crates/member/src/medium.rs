//! The medium of a copy: files of a server's folder, or a range of a LUN.

use std::io;
use std::sync::Arc;

use ferrite_pool::wire::RANGE_UNIT;

use crate::disk::Disk;
use crate::lun::OpenLun;
use crate::state::SLOT_BYTES;

/// Bytes of a LUN's range before its data. The state is in the first ones.
const RANGE_HEAD: u64 = RANGE_UNIT;

/// The medium of a copy.
pub(crate) enum Medium {
    /// Two files.
    Files { data: Disk, state: Disk },
    /// A range of a LUN, which begins at this byte.
    Range { lun: Arc<OpenLun>, start: u64 },
}

impl Medium {
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Medium::Files { data, .. } => data.read(bytes, at),
            Medium::Range { lun, start } => lun.read(bytes, start + RANGE_HEAD + at),
        }
    }

    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        match self {
            Medium::Files { data, .. } => data.write(bytes, at),
            Medium::Range { lun, start } => lun.write(bytes, start + RANGE_HEAD + at),
        }
    }

    pub(crate) fn zero(&self, at: u64, len: u64) -> io::Result<()> {
        match self {
            Medium::Files { data, .. } => data.zero(at, len),
            Medium::Range { lun, start } => lun.zero(start + RANGE_HEAD + at, len),
        }
    }

    pub(crate) fn flush(&self) -> io::Result<()> {
        match self {
            Medium::Files { data, .. } => data.sync(),
            // Each write was on its medium before it was answered.
            Medium::Range { .. } => Ok(()),
        }
    }

    /// Writes a state durably. The one before it stays, in the other slot.
    pub(crate) fn write_state(&self, number: u64, slot: &[u8]) -> io::Result<()> {
        let at = (number - 1) % 2 * SLOT_BYTES as u64;
        match self {
            Medium::Files { state, .. } => {
                state.write(slot, at)?;
                state.sync()
            }
            Medium::Range { lun, start } => lun.write(slot, start + at),
        }
    }

    /// The LUN to ask whether another host has taken it. `None`: only one process can have the medium.
    pub(crate) fn asks_who_has_it(&self) -> Option<&Arc<OpenLun>> {
        match self {
            Medium::Files { .. } => None,
            Medium::Range { lun, .. } => Some(lun),
        }
    }

    /// Whether it is a LUN that has failed: it is opened anew when nothing has this one any more, so no thread may wait with it.
    pub(crate) fn has_failed(&self) -> bool {
        match self {
            Medium::Files { data, .. } => data.has_gone(),
            Medium::Range { lun, .. } => lun.has_failed(),
        }
    }

    /// After a failed flush the memory may have what the medium has not. A repair would find it equal.
    pub(crate) fn forget_memory(&self) {
        if let Medium::Files { data, .. } = self {
            data.forget_memory();
        }
    }
}
