//! The services of a hypervisor that a queue needs.
//!
//! One virtual call beside a system call is free, so these are trait objects; the ring itself is
//! plain memory and is not behind them.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use ferrite_io::arena::{Arena, Lender, Span};

use crate::mover::Moving;
use crate::pages::Pages;

/// A domain's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

impl DomId {
    /// No domain: Xen's `DOMID_INVALID`. No guest ever has this number.
    pub const NONE: DomId = DomId(0x7FF4);
}

impl From<DomId> for u16 {
    fn from(id: DomId) -> u16 {
        id.0
    }
}

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The processors of the whole host, as the hypervisor knows them at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTimes {
    /// Processors that are online.
    pub cpus: u32,
    /// How long they have all been idle, ever, together.
    pub idle_ns: u64,
}

impl HostTimes {
    /// How many of them were idle since `before`, so many nanoseconds ago, in thousandths.
    pub fn idle_milli(&self, before: &HostTimes, ns: u64) -> u32 {
        // It falls when one goes offline.
        let idle_ns = self.idle_ns.saturating_sub(before.idle_ns);
        let milli = u128::from(idle_ns) * 1000 / u128::from(ns.max(1));
        milli.min(u128::from(self.cpus) * 1000) as u32
    }
}

/// The state of a domain, as the hypervisor knows it at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// It runs, or has ended otherwise than by suspending itself.
    Runs,
    /// It has suspended itself to be saved or moved. It may be resumed, with the rings that it had.
    Suspended,
    /// There is no such domain.
    Gone,
}

/// The states of other domains, as a hypervisor tells them. xenstore fires `@releaseDomain` when a domain
/// suspends itself, and has no event when it is resumed.
pub trait Domains: Send + Sync {
    /// The state of a domain.
    ///
    /// # Errors
    /// The hypervisor does not tell.
    fn state(&self, domid: DomId) -> io::Result<DomainState>;
}

/// A grant reference, as the frontend wrote it. Not validated: only the hypervisor can.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrantRef(pub u32);

/// Bytes of a grant's frame: blkif granularity, whatever the guest's own page size is.
pub const PAGE_SIZE: usize = 4096;

/// Which way a batch of copies goes. One batch has one direction: the hypervisor keeps page
/// claims between neighbours of the same kind (blkif.md 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Guest memory to the arena (data of writes, indirect pages).
    FromGuest,
    /// The arena to guest memory (data of reads).
    ToGuest,
}

/// `GNTST_okay`.
pub const GNTST_OKAY: i16 = 0;
/// `GNTST_general_error`.
pub const GNTST_GENERAL_ERROR: i16 = -1;
/// `GNTST_bad_gntref`.
pub const GNTST_BAD_GNTREF: i16 = -3;
/// `GNTST_permission_denied`.
pub const GNTST_PERMISSION_DENIED: i16 = -8;
/// `GNTST_bad_copy_arg`.
pub const GNTST_BAD_COPY_ARG: i16 = -10;
/// Never given by Xen: what `status` holds until the hypervisor has written it (XSA-318).
pub const STATUS_UNTOUCHED: i16 = i16::MIN;

/// One piece of a grant copy: at most one frame on the guest's side, contiguous on ours.
#[derive(Clone, Copy, Debug)]
pub struct CopySegment {
    local: Span,
    offset: u16,
    gref: GrantRef,
    /// The hypervisor's answer; [`STATUS_UNTOUCHED`] before.
    pub status: i16,
}

impl CopySegment {
    /// A piece between `local` (all of it, 1 to 4096 bytes) and the guest's frame `gref` from
    /// byte `offset` on.
    ///
    /// # Panics
    /// If the piece is empty or leaves the frame: callers pass validated segments only.
    #[inline]
    pub fn new(local: Span, gref: GrantRef, offset: u16) -> Self {
        assert!(
            !local.is_empty() && usize::from(offset) + local.len() <= PAGE_SIZE,
            "a copy must have bytes and stay in its frame"
        );
        CopySegment { local, offset, gref, status: STATUS_UNTOUCHED }
    }

    /// Ours, in the arena given to [`Link::copy`].
    #[inline]
    pub fn local(&self) -> Span {
        self.local
    }

    /// Bytes, 1 to 4096.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    #[inline]
    pub fn len(&self) -> u16 {
        self.local.len() as u16
    }

    /// First byte in the guest's frame.
    #[inline]
    pub fn offset(&self) -> u16 {
        self.offset
    }

    /// The guest's frame.
    #[inline]
    pub fn gref(&self) -> GrantRef {
        self.gref
    }

    /// Whether the hypervisor copied it all.
    #[inline]
    pub fn is_ok(&self) -> bool {
        self.status == GNTST_OKAY
    }
}

/// Why a hypervisor call failed.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// The guest's grants or ports are not what it says; its own fault, and only its own.
    #[error("domain {domid}: cannot {what}: {source}; the frontend offered a bad reference")]
    Guest {
        /// Which guest.
        domid: DomId,
        /// The step that was tried, as in "map ring reference 8".
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// This host cannot do it.
    #[error("cannot {what}: {source}; {hint}")]
    Host {
        /// The step that was tried.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
        /// The next step for the administrator.
        hint: &'static str,
    },
}

/// A way to reach guests.
pub trait Hypervisor: Send + Sync {
    /// Its name in reports: `xen` or `loopback`.
    fn name(&self) -> &'static str;

    /// Whether this process lacks for good what connecting takes, and only the next one may have it.
    fn is_used_up(&self) -> bool {
        false
    }

    /// For one pool: pages that links copy to and from at less cost than others, where there are such.
    fn lender(&self) -> Option<Box<dyn Lender>> {
        None
    }

    /// A way to copy between the pages of any guests, for one thread.
    ///
    /// # Errors
    /// This host cannot do it.
    fn pages(&self) -> Result<Box<dyn Pages>, HypervisorError> {
        Err(HypervisorError::Host {
            what: "copy from guest to guest".into(),
            source: io::ErrorKind::Unsupported.into(),
            hint: "use a hypervisor that can",
        })
    }

    /// Maps the ring pages (1 to 16, contiguous in the order given), binds the port. Data will
    /// move as `moving` says.
    ///
    /// # Errors
    /// [`HypervisorError::Guest`] where the guest's references are at fault.
    fn connect(
        &self,
        domid: DomId,
        ring: &[GrantRef],
        port: u32,
        moving: &Moving,
    ) -> Result<Box<dyn Link>, HypervisorError>;
}

/// The mapped pages of one ring; shared with a guest that may write them at any moment.
#[derive(Clone, Copy, Debug)]
pub struct RingMemory {
    base: NonNull<u8>,
    len: usize,
}

impl RingMemory {
    /// # Safety
    /// `base` is page aligned, and `len` bytes (whole pages) from it are mapped readable and
    /// writable for as long as the [`Link`] that hands this out lives.
    pub unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        RingMemory { base, len }
    }

    /// First byte, page aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes, a multiple of [`PAGE_SIZE`].
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// One connected queue: its ring memory, its event channel, and copies from and to its guest.
/// Used by one thread at a time; dropping it unmaps the ring and closes the event channel.
pub trait Link: Send {
    /// The ring's pages; they stay mapped as long as `self` lives.
    fn ring(&self) -> RingMemory;

    /// Carries out `segments`, whose local sides lie in `arena`, each with its own status, by this
    /// link's [mover](crate::mover). After `Ok` every status has been written by the hypervisor or
    /// the mover, or is still [`STATUS_UNTOUCHED`]: check each one.
    ///
    /// # Errors
    /// The call as a whole failed, and no status means anything.
    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> std::io::Result<()>;

    /// Readable when the guest has sent an event that [`take_event`](Link::take_event) has not
    /// taken.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Takes a pending event, without waiting. While it is taken and not
    /// [rearmed](Link::rearm), further events are held back and merged (late EOI, XSA-332).
    fn take_event(&mut self) -> std::io::Result<bool>;

    /// Lets events through again; one that came meanwhile is delivered. To be called after the
    /// final check of the ring. Does nothing if no event was taken.
    fn rearm(&mut self) -> std::io::Result<()>;

    /// Says that up to 8 bytes were read from [`event_fd`](Link::event_fd), there being some: in
    /// place of [`take_event`](Link::take_event), for callers that can read more cheaply.
    fn event_taken(&mut self);

    /// Whether none is signalled from one event until [`rearm`](Link::rearm): then it may be read after
    /// the final check of the ring, too. Otherwise the one for a request behind that check could be
    /// read with it, and the backend would not look for that request.
    fn is_shut_by_event(&self) -> bool {
        false
    }

    /// If [`rearm`](Link::rearm) would do nothing but write four bytes to
    /// [`event_fd`](Link::event_fd): those bytes. The caller may write them itself, and say so
    /// with [`rearmed`](Link::rearmed).
    fn rearm_word(&self) -> Option<u32> {
        None
    }

    /// The caller has written, or is about to write, what [`rearm_word`](Link::rearm_word) gave.
    fn rearmed(&mut self) {}

    /// Sends the guest an event.
    fn notify(&mut self) -> std::io::Result<()>;
}
