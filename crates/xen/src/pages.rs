//! Copies between the pages of any guests, and between them and an arena.
//!
//! A side that is a grant must not leave its page: otherwise the kernel refuses the whole call with EINVAL. It has then
//! executed the batches of [`BATCH`] pieces before that one. Each piece has a status of its own, which does not tell
//! which of its two sides is at fault.

use std::io;

use ferrite_io::arena::{Arena, Span};

use crate::hypervisor::{DomId, GNTST_OKAY, GrantRef, PAGE_SIZE, STATUS_UNTOUCHED};

/// Pieces that the kernel passes to the hypervisor at a time.
pub const BATCH: usize = 16;

/// Bytes in a page that some guest has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The guest.
    pub domid: DomId,
    /// The page.
    pub gref: GrantRef,
    /// First byte in it.
    pub offset: u16,
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// In the arena that is given to [`Pages::copy`]; it has at least the piece's bytes.
    Local(Span),
    /// In a guest's page.
    Granted(Granted),
}

/// One piece of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Where the bytes are.
    pub source: Side,
    /// Where they go to.
    pub dest: Side,
    /// Bytes, at most 4096.
    pub len: u16,
    /// The hypervisor's answer; [`STATUS_UNTOUCHED`] before.
    pub status: i16,
}

impl Piece {
    /// A piece that is not copied yet. Unchecked: a side that leaves its page fails the call.
    pub fn new(source: Side, dest: Side, len: u16) -> Piece {
        Piece { source, dest, len, status: STATUS_UNTOUCHED }
    }

    /// Whether the hypervisor copied it all.
    #[inline]
    pub fn is_ok(&self) -> bool {
        self.status == GNTST_OKAY
    }

    /// The bytes of a local side that the piece touches.
    ///
    /// # Panics
    /// If the span is shorter than the piece: a bug of the caller.
    pub fn local(&self, span: Span) -> Span {
        span.slice(0, usize::from(self.len))
    }

    /// Whether a side that is a grant leaves its page.
    pub fn leaves_page(&self) -> bool {
        let leaves = |side| match side {
            Side::Local(_) => false,
            Side::Granted(g) => usize::from(g.offset) + usize::from(self.len) > PAGE_SIZE,
        };
        leaves(self.source) || leaves(self.dest)
    }
}

/// The hypervisor's copies. Used by one thread at a time.
pub trait Pages: Send {
    /// Carries out `pieces` in their order. After `Ok` each has its status: check each one.
    ///
    /// # Errors
    /// The call as a whole failed, and no status means anything. `InvalidInput`: a piece leaves its page.
    fn copy(&mut self, arena: &Arena, pieces: &mut [Piece]) -> io::Result<()>;
}
