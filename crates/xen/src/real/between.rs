//! Copies between the pages of any guests, as the kernel's.

use std::io;
use std::sync::Arc;

use ferrite_io::arena::Arena;

use super::grants::{GrantDevice, copy_entries};
use super::uapi::{self, CopyEntry};
use crate::hypervisor::STATUS_UNTOUCHED;
use crate::pages::{Pages, Piece, Side};

/// Pieces in one ioctl: this bounds the room that is kept, 24 KiB.
const IOCTL_PIECES: usize = 1024;

/// The device, and room for the arguments of a call.
pub(super) struct Between {
    device: Arc<GrantDevice>,
    entries: Vec<CopyEntry>,
}

impl Between {
    pub(super) fn new(device: Arc<GrantDevice>) -> Between {
        Between { device, entries: Vec::with_capacity(IOCTL_PIECES) }
    }
}

impl Pages for Between {
    fn copy(&mut self, arena: &Arena, pieces: &mut [Piece]) -> io::Result<()> {
        for batch in pieces.chunks_mut(IOCTL_PIECES) {
            self.entries.clear();
            self.entries.extend(batch.iter().map(|piece| entry(piece, arena)));
            copy_entries(&*self.device, &mut self.entries)?;
            for (piece, entry) in batch.iter_mut().zip(&self.entries) {
                piece.status = entry.status;
            }
        }
        Ok(())
    }
}

fn entry(piece: &Piece, arena: &Arena) -> CopyEntry {
    let side = |side: Side, flag: u16| match side {
        Side::Local(span) => {
            // Bounds-checked by the arena; the length by `Piece::local`.
            (arena.ptr(piece.local(span)).as_ptr().expose_provenance() as u64, 0)
        }
        Side::Granted(g) => (uapi::grant_side(g.gref.0, g.offset, g.domid.0), flag),
    };
    let (source, by_source) = side(piece.source, uapi::COPY_SOURCE_GREF);
    let (dest, by_dest) = side(piece.dest, uapi::COPY_DEST_GREF);
    let flags = by_source | by_dest;
    // The status is never left over from an earlier use (XSA-318).
    CopyEntry { source, dest, len: piece.len, flags, status: STATUS_UNTOUCHED, pad: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::{DomId, GrantRef};
    use crate::pages::Granted;

    #[test]
    fn each_side_is_a_grant_of_its_own_guest_or_an_address() {
        let arena = Arena::new(4096).unwrap();
        let span = arena.span(64, 200);
        let local = arena.ptr(span).as_ptr() as u64;
        let one =
            Side::Granted(Granted { domid: DomId(7), gref: GrantRef(0x0102_0304), offset: 2048 });
        let two = Side::Granted(Granted { domid: DomId(9), gref: GrantRef(5), offset: 0 });
        let e = entry(&Piece::new(one, two, 1024), &arena);
        assert_eq!(
            (e.source, e.dest, e.len, e.flags),
            (0x0007_0800_0102_0304, 9 << 48 | 5, 1024, 3)
        );
        assert_eq!(e.status, STATUS_UNTOUCHED);
        let e = entry(&Piece::new(Side::Local(span), two, 200), &arena);
        assert_eq!((e.source, e.dest, e.flags), (local, 9 << 48 | 5, 2));
        let e = entry(&Piece::new(one, Side::Local(span), 200), &arena);
        assert_eq!((e.source, e.dest, e.flags), (0x0007_0800_0102_0304, local, 1));
    }
}
