//! Copies between the pages of any guests of a machine, with Xen's rules and the kernel's: pieces in batches, EINVAL for
//! the call when one leaves its page, and a status for each.

use std::io;
use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_xen::hypervisor::{DomId, GNTST_OKAY};
use ferrite_xen::pages::{BATCH, Granted, Pages, Piece, Side};

use super::BACKEND_DOMID;
use super::grants::Access;
use super::link::{Attached, Guests};

/// `GNTST_bad_domain`: there is no such guest.
pub const GNTST_BAD_DOMAIN: i16 = -2;

/// The copies of one thread.
pub(super) struct Between {
    guests: Guests,
    /// The guests of the last copies, so that they are not looked up for each piece.
    known: Vec<(DomId, Arc<Attached>)>,
}

impl Between {
    pub(super) fn new(guests: Guests) -> Between {
        Between { guests, known: Vec::new() }
    }

    fn find(&mut self, domid: DomId) -> Result<Arc<Attached>, i16> {
        if let Some((_, guest)) = self.known.iter().find(|(known, _)| *known == domid) {
            return Ok(guest.clone());
        }
        let guest = self.guests.find(domid).ok_or(GNTST_BAD_DOMAIN)?;
        self.known.push((domid, guest.clone()));
        Ok(guest)
    }

    fn pin(&mut self, side: Side, access: Access) -> Result<Option<Pin>, i16> {
        let Side::Granted(granted) = side else { return Ok(None) };
        let guest = self.find(granted.domid)?;
        let frames = guest.memory.layout().frames;
        let frame = guest.memory.grants().pin(granted.gref, BACKEND_DOMID, access, frames)?;
        Ok(Some(Pin { guest, granted, frame }))
    }

    fn one(&mut self, arena: &Arena, piece: &Piece) -> Result<(), i16> {
        let source = self.pin(piece.source, Access::Read)?;
        let dest = self.pin(piece.dest, Access::Write)?;
        let address = |pin: &Option<Pin>, side: Side| match (pin, side) {
            (Some(pin), _) => pin.address(),
            (None, Side::Local(span)) => arena.ptr(piece.local(span)).as_ptr(),
            (None, Side::Granted(_)) => unreachable!("a grant was pinned"),
        };
        let (from, to) = (address(&source, piece.source), address(&dest, piece.dest));
        // SAFETY: `leaves_page` and the arena checked the bounds; both stay mapped as long as the pins and the arena.
        // They may be the same page: `copy` allows overlaps. Others may write the bytes: nothing is decided on them.
        unsafe { std::ptr::copy(from, to, usize::from(piece.len)) };
        Ok(())
    }
}

impl Pages for Between {
    fn copy(&mut self, arena: &Arena, pieces: &mut [Piece]) -> io::Result<()> {
        self.known.clear();
        for batch in pieces.chunks_mut(BATCH) {
            if batch.iter().any(Piece::leaves_page) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            for piece in batch {
                piece.status = self.one(arena, piece).err().unwrap_or(GNTST_OKAY);
            }
        }
        self.known.clear();
        Ok(())
    }
}

/// A frame in use, until it is dropped.
struct Pin {
    guest: Arc<Attached>,
    granted: Granted,
    frame: u32,
}

impl Pin {
    fn address(&self) -> *mut u8 {
        // SAFETY: the offset is inside the frame (`leaves_page`).
        unsafe { self.guest.memory.frame(self.frame).add(usize::from(self.granted.offset)) }
            .as_ptr()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.guest.memory.grants().unpin(self.granted.gref);
    }
}

#[cfg(test)]
mod tests {
    use ferrite_xen::hypervisor::{
        GNTST_BAD_GNTREF, GNTST_GENERAL_ERROR, GrantRef, Hypervisor, PAGE_SIZE, STATUS_UNTOUCHED,
    };

    use super::*;
    use crate::front::{Buffer, GuestSpace};
    use crate::{CopyWith, Machine};

    struct Two {
        _machine: Machine,
        pages: Box<dyn Pages>,
        arena: Arc<Arena>,
        /// A page pair of each guest.
        buffers: [(DomId, Buffer); 2],
    }

    fn two() -> Two {
        let mut machine = Machine::new().unwrap();
        let ids = [(); 2].map(|()| machine.add_guest(crate::GuestOptions::default()).unwrap());
        let buffers = ids.map(|domid| {
            let space = GuestSpace::attach(&machine.guest(domid).unwrap()).unwrap();
            (domid, space.buffer(2).unwrap())
        });
        let pages = machine.loopback(CopyWith::Memcpy).unwrap().pages().unwrap();
        Two { _machine: machine, pages, arena: Arena::new(PAGE_SIZE).unwrap(), buffers }
    }

    impl Two {
        fn side(&self, guest: usize, page: usize, offset: u16) -> Side {
            let (domid, buffer) = &self.buffers[guest];
            Side::Granted(Granted { domid: *domid, gref: buffer.gref(page), offset })
        }

        fn copy(&mut self, pieces: &mut [Piece]) -> io::Result<()> {
            self.pages.copy(&self.arena, pieces)
        }
    }

    #[test]
    fn bytes_go_from_guest_to_guest_and_between_them_and_us() {
        let mut two = two();
        two.buffers[0].1.write(100, b"from the first");
        let span = two.arena.span(0, 14);
        let mut pieces = [
            Piece::new(two.side(0, 0, 100), two.side(1, 1, 4082), 14),
            Piece::new(two.side(1, 1, 4082), Side::Local(span), 14),
            Piece::new(Side::Local(span), two.side(0, 1, 0), 14),
        ];
        two.copy(&mut pieces).unwrap();
        assert!(pieces.iter().all(Piece::is_ok));
        assert_eq!(two.buffers[1].1.to_vec(PAGE_SIZE + 4082, 14), b"from the first");
        assert_eq!(two.buffers[0].1.to_vec(PAGE_SIZE, 14), b"from the first");
        assert!(two.buffers.iter().all(|(_, b)| b.revoke(0).is_ok() && b.revoke(1).is_ok()));
    }

    #[test]
    fn a_piece_that_leaves_its_page_ends_the_call_before_its_batch() {
        let mut two = two();
        for crosses in [0, 15, 16, 20] {
            for side in 0..2 {
                let offset = |i, s| if i == crosses && s == side { 4090 } else { 0 };
                let mut pieces: Vec<Piece> = (0..24)
                    .map(|i| {
                        let (from, to) =
                            (two.side(0, 0, offset(i, 0)), two.side(1, 0, offset(i, 1)));
                        Piece::new(from, to, 7)
                    })
                    .collect();
                let error = two.copy(&mut pieces).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
                let done = pieces.iter().take_while(|piece| piece.is_ok()).count();
                assert_eq!(done, crosses / BATCH * BATCH);
                assert!(pieces[done..].iter().all(|piece| piece.status == STATUS_UNTOUCHED));
            }
        }
    }

    #[test]
    fn each_piece_has_its_own_status() {
        let mut two = two();
        let (domid, buffer) = &two.buffers[1];
        buffer.grant(1, true);
        let grant = |domid, gref| Side::Granted(Granted { domid, gref: GrantRef(gref), offset: 0 });
        let mut pieces = [
            Piece::new(two.side(0, 0, 0), two.side(1, 1, 0), 10),
            Piece::new(two.side(0, 0, 0), grant(*domid, u32::MAX), 10),
            Piece::new(grant(DomId(99), 8), two.side(1, 0, 0), 10),
            Piece::new(grant(*domid, 9000), two.side(1, 0, 0), 10),
            Piece::new(two.side(0, 0, 0), two.side(1, 0, 0), 10),
        ];
        two.copy(&mut pieces).unwrap();
        let expected =
            [GNTST_GENERAL_ERROR, GNTST_BAD_GNTREF, GNTST_BAD_DOMAIN, GNTST_GENERAL_ERROR, 0];
        assert_eq!(pieces.map(|piece| piece.status), expected);
        assert_eq!(two.buffers[0].1.revoke(0), Ok(()), "a failed piece keeps no page");
    }
}
