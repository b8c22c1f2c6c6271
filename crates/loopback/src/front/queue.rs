//! One queue of a frontend: requests out, responses in, each checked as a hardened blkfront
//! checks it.

mod replies;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::super::LoopbackError;
use super::error::FrontError;
use super::persistent::{Bounce, PagePool};
use super::ring::{RawRing, RingWord};
use super::space::{Buffer, GuestSpace};
use ferrite_xen::abi::{
    DISCARD_SECURE, IndirectOp, MAX_DIRECT_SEGMENTS, MAX_INDIRECT_PAGES, Message, OP_BARRIER,
    OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, PlainOp, Protocol, RawSegment, Request, SEGMENT_BYTES,
    SEGMENTS_PER_INDIRECT_PAGE, Slot,
};
use ferrite_xen::hypervisor::{GrantRef, PAGE_SIZE};

pub use replies::Reply;

/// The options of a queue; part of [`FrontOptions`](super::FrontOptions).
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// The layout of the ring.
    pub protocol: Protocol,
    /// The ring has `2^order` pages.
    pub order: u32,
    /// The most segments of an indirect request; with 11 or fewer there are none.
    pub max_indirect: usize,
    /// Ids are the slot's number with these bits flipped: 0 looks like Linux, a kernel address
    /// like Windows.
    pub id_bits: u64,
    /// Grant each page for its request, and revoke the grant at the response, as a frontend without persistent grants
    /// does. Otherwise pages stay granted as their [`Buffer`] has them.
    pub regrant: bool,
    /// Check at each response that the backend has released the request's pages. To be switched off if requests in
    /// flight share pages.
    pub check_release: bool,
    /// Both ends use persistent grants: data goes through pages that stay granted and that the backend may keep mapped
    /// (blkif.md 4.5). For requests with the caller's own segments no release is expected either.
    pub persistent: bool,
}

/// A request's number in its queue, free for another once it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u16);

#[derive(Default)]
struct Pending {
    active: bool,
    /// The expected operation of the response.
    operation: u8,
    /// Pages of the data and of the descriptors.
    grefs: Vec<GrantRef>,
    /// `grefs` were granted for this request.
    fresh: bool,
    /// Data that goes through pages of the pool.
    bounces: Vec<Bounce>,
}

/// One connected queue. Used by one thread.
pub struct FrontQueue {
    space: Arc<GuestSpace>,
    options: QueueOptions,
    ring: Arc<RawRing>,
    /// The ring's frames and grants, last page first.
    ring_pages: Option<Buffer>,
    ring_grefs: Vec<GrantRef>,
    port: u32,
    /// The index after the last written request, and the published one.
    req_prod: u32,
    req_published: u32,
    rsp_cons: u32,
    pending: Vec<Pending>,
    free: Vec<Tag>,
    /// Pages for descriptors, by tag; made when first needed.
    indirect: Vec<Option<Buffer>>,
    /// Unused references for `regrant`.
    spare_grants: Vec<GrantRef>,
    pool: PagePool,
}

impl FrontQueue {
    /// Allocates and grants a ring, and opens a channel.
    ///
    /// # Errors
    /// The guest's resources are exhausted.
    pub fn new(space: &Arc<GuestSpace>, options: QueueOptions) -> Result<Self, LoopbackError> {
        let pages = space.buffer(1 << options.order)?;
        // Backwards, so that ring pages are not adjacent.
        let order = || (0..pages.pages()).rev();
        let frames: Vec<u32> = order().map(|page| pages.frame(page)).collect();
        let ring_grefs = order().map(|page| pages.gref(page)).collect();
        let mapping = space
            .memory()
            .map_frames(&frames, true)
            .map_err(LoopbackError::system("map a ring of the frontend's"))?;
        let ring = Arc::new(RawRing::new(mapping, options.protocol.slot_bytes()));
        let entries = ring.entries() as usize;
        Ok(FrontQueue {
            space: space.clone(),
            options,
            ring,
            ring_pages: Some(pages),
            ring_grefs,
            port: space.memory().open_port()?,
            req_prod: 0,
            req_published: 0,
            rsp_cons: 0,
            pending: std::iter::repeat_with(Pending::default).take(entries).collect(),
            free: (0..entries as u16).rev().map(Tag).collect(),
            indirect: std::iter::repeat_with(|| None).take(entries).collect(),
            spare_grants: Vec::new(),
            pool: PagePool::default(),
        })
    }

    /// Sets whether both ends support persistent grants; nothing was sent yet.
    pub(super) fn set_persistent(&mut self, persistent: bool) {
        self.options.persistent = persistent;
    }

    /// The ring's grants, in the order of its pages.
    pub fn ring_grefs(&self) -> &[GrantRef] {
        &self.ring_grefs
    }

    /// The event channel.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The ring's memory, for hostile tests.
    pub fn ring(&self) -> Arc<RawRing> {
        self.ring.clone()
    }

    /// Slots.
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Requests that can be submitted before one is answered.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Requests that are not answered yet.
    pub fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Index of the next request.
    pub fn req_prod(&self) -> u32 {
        self.req_prod
    }

    /// The id on the wire of the request with this tag.
    pub fn id(&self, tag: Tag) -> u64 {
        u64::from(tag.0) ^ self.options.id_bits
    }

    /// Reads `len` bytes at `sector` into the buffer from byte `at` on; direct up to 11 pages,
    /// indirect above.
    ///
    /// # Errors
    /// [`FrontError::Full`], [`FrontError::TooManySegments`].
    pub fn read(
        &mut self,
        sector: u64,
        buffer: &Buffer,
        at: usize,
        len: usize,
    ) -> Result<Tag, FrontError> {
        self.transfer(IndirectOp::Read, sector, buffer, at, len)
    }

    /// Writes them.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(
        &mut self,
        sector: u64,
        buffer: &Buffer,
        at: usize,
        len: usize,
    ) -> Result<Tag, FrontError> {
        self.transfer(IndirectOp::Write, sector, buffer, at, len)
    }

    /// An empty flush.
    ///
    /// # Errors
    /// [`FrontError::Full`].
    pub fn flush(&mut self) -> Result<Tag, FrontError> {
        self.plain(PlainOp::Flush, 0, &[])
    }

    /// A discard.
    ///
    /// # Errors
    /// [`FrontError::Full`].
    pub fn discard(
        &mut self,
        sector: u64,
        nr_sectors: u64,
        secure: bool,
    ) -> Result<Tag, FrontError> {
        let flag = if secure { DISCARD_SECURE } else { 0 };
        self.message(OP_DISCARD, Message::Discard { sector, nr_sectors, flag })
    }

    /// A request of the plain layout with these segments, unchecked.
    ///
    /// # Errors
    /// [`FrontError::Full`], [`FrontError::TooManySegments`].
    pub fn plain(
        &mut self,
        op: PlainOp,
        sector: u64,
        segments: &[RawSegment],
    ) -> Result<Tag, FrontError> {
        let limit = MAX_DIRECT_SEGMENTS;
        if segments.len() > limit {
            return Err(FrontError::TooManySegments { segments: segments.len(), limit });
        }
        let tag = self.take_tag()?;
        self.note_pages(tag, segments);
        let mut all = [RawSegment::default(); MAX_DIRECT_SEGMENTS];
        all[..segments.len()].copy_from_slice(segments);
        self.put_plain(tag, op, sector, segments.len() as u8, all);
        Ok(tag)
    }

    /// An indirect request with these segments, unchecked.
    ///
    /// # Errors
    /// [`FrontError::Full`], [`FrontError::TooManySegments`], or the guest has no page left.
    pub fn indirect(
        &mut self,
        op: IndirectOp,
        sector: u64,
        segments: &[RawSegment],
    ) -> Result<Tag, FrontError> {
        let limit = MAX_INDIRECT_PAGES * SEGMENTS_PER_INDIRECT_PAGE;
        if segments.len() > limit {
            return Err(FrontError::TooManySegments { segments: segments.len(), limit });
        }
        let tag = self.take_tag()?;
        if let Err(e) = self.make_indirect_pages(tag, segments.len()) {
            self.free.push(tag);
            return Err(e);
        }
        self.note_pages(tag, segments);
        for (i, segment) in segments.iter().enumerate() {
            self.put_descriptor(tag, i, segment);
        }
        self.put_indirect(tag, op, sector, segments.len() as u16);
        Ok(tag)
    }

    /// Any request; its id is replaced. The pages that it names are not checked.
    ///
    /// # Errors
    /// [`FrontError::Full`].
    pub fn message(&mut self, response_op: u8, message: Message) -> Result<Tag, FrontError> {
        let tag = self.take_tag()?;
        self.put(tag, response_op, message);
        Ok(tag)
    }

    /// Any bytes in the next slot. Nothing is recorded: [`take_raw`](Self::take_raw) takes a response to it.
    pub fn raw_request(&mut self, slot: &Slot) {
        self.ring.put_slot(self.req_prod, &slot.0[..self.options.protocol.slot_bytes()]);
        self.req_prod = self.req_prod.wrapping_add(1);
    }

    fn transfer(
        &mut self,
        op: IndirectOp,
        sector: u64,
        buffer: &Buffer,
        at: usize,
        len: usize,
    ) -> Result<Tag, FrontError> {
        let pages = buffer.pieces(at, len).count();
        let limit = self.options.max_indirect.max(MAX_DIRECT_SEGMENTS);
        if pages > limit {
            return Err(FrontError::TooManySegments { segments: pages, limit });
        }
        let is_indirect = pages > MAX_DIRECT_SEGMENTS;
        let tag = self.take_tag()?;
        let ready = match self.options.persistent {
            true => self.pool.reserve(&self.space, pages),
            false => self.reserve_grants(pages),
        };
        let ready = ready.and_then(|()| match is_indirect {
            true => self.make_indirect_pages(tag, pages),
            false => Ok(()),
        });
        if let Err(e) = ready {
            self.free.push(tag);
            return Err(e);
        }
        let mut all = [RawSegment::default(); MAX_DIRECT_SEGMENTS];
        self.pending[tag.0 as usize].fresh = self.options.regrant && !self.options.persistent;
        for (i, (page, first, last)) in buffer.pieces(at, len).enumerate() {
            let gref = match self.options.persistent {
                true => self.bounce(tag, buffer, (page, first, last), op),
                false => self.page_grant(tag, buffer, page, op == IndirectOp::Write),
            };
            let segment = RawSegment { gref: gref.0, first_sect: first, last_sect: last };
            match is_indirect {
                true => self.put_descriptor(tag, i, &segment),
                false => all[i] = segment,
            }
        }
        if is_indirect {
            self.put_indirect(tag, op, sector, pages as u16);
        } else {
            let op = if op == IndirectOp::Read { PlainOp::Read } else { PlainOp::Write };
            self.put_plain(tag, op, sector, pages as u8, all);
        }
        Ok(tag)
    }

    fn take_tag(&mut self) -> Result<Tag, FrontError> {
        let in_ring = self.req_prod.wrapping_sub(self.rsp_cons);
        let full = FrontError::Full { entries: self.entries() };
        if in_ring >= self.entries() {
            return Err(full);
        }
        let tag = self.free.pop().ok_or(full)?;
        let pending = &mut self.pending[tag.0 as usize];
        pending.grefs.clear();
        pending.fresh = false;
        debug_assert!(pending.bounces.is_empty(), "taken out with the response");
        Ok(tag)
    }

    /// Reserves references, so that granting a request's pages cannot fail halfway.
    fn reserve_grants(&mut self, pages: usize) -> Result<(), FrontError> {
        if self.options.regrant && self.spare_grants.len() < pages {
            self.space.take_grants(pages.max(64), &mut self.spare_grants)?;
        }
        Ok(())
    }

    fn page_grant(&mut self, tag: Tag, buffer: &Buffer, page: usize, read_only: bool) -> GrantRef {
        let gref = match self.options.regrant {
            true => self.spare_grants.pop().expect("reserved before"),
            false => buffer.gref(page),
        };
        if self.options.regrant {
            self.space.grant(gref, buffer.frame(page), read_only);
        }
        self.pending[tag.0 as usize].grefs.push(gref);
        gref
    }

    /// Replaces the caller's page by one of the pool, with its data for a write.
    fn bounce(
        &mut self,
        tag: Tag,
        buffer: &Buffer,
        piece: (usize, u8, u8),
        op: IndirectOp,
    ) -> GrantRef {
        let page = self.pool.take();
        let gref = page.gref(0);
        let bounce = Bounce::new(page, buffer, piece, op);
        self.pending[tag.0 as usize].bounces.push(bounce);
        gref
    }

    fn note_pages(&mut self, tag: Tag, segments: &[RawSegment]) {
        let grefs = segments.iter().map(|s| GrantRef(s.gref));
        self.pending[tag.0 as usize].grefs.extend(grefs);
    }

    fn make_indirect_pages(&mut self, tag: Tag, segments: usize) -> Result<(), FrontError> {
        let pages = segments.div_ceil(SEGMENTS_PER_INDIRECT_PAGE).max(1);
        let place = &mut self.indirect[tag.0 as usize];
        if place.as_ref().is_none_or(|b| b.pages() < pages) {
            let buffer = self.space.buffer(pages)?;
            // A page that may stay mapped is granted for reading and writing, whatever its use.
            let read_only = !self.options.persistent;
            (0..pages).for_each(|page| buffer.grant(page, read_only));
            *place = Some(buffer);
        }
        Ok(())
    }

    fn put_descriptor(&self, tag: Tag, i: usize, segment: &RawSegment) {
        let page = self.indirect[tag.0 as usize].as_ref().expect("made before");
        page.write(i * SEGMENT_BYTES, &segment.encode());
    }

    fn put_plain(
        &mut self,
        tag: Tag,
        op: PlainOp,
        sector: u64,
        nr_segments: u8,
        segments: [RawSegment; MAX_DIRECT_SEGMENTS],
    ) {
        let response_op = match op {
            PlainOp::Read => OP_READ,
            PlainOp::Write => OP_WRITE,
            PlainOp::Barrier => OP_BARRIER,
            PlainOp::Flush => OP_FLUSH,
        };
        self.put(tag, response_op, Message::Plain { op, nr_segments, sector, segments });
    }

    fn put_indirect(&mut self, tag: Tag, op: IndirectOp, sector: u64, nr_segments: u16) {
        let buffer = self.indirect[tag.0 as usize].as_ref().expect("made before");
        let used = usize::from(nr_segments).div_ceil(SEGMENTS_PER_INDIRECT_PAGE);
        let mut pages = [GrantRef(0); MAX_INDIRECT_PAGES];
        for (i, page) in pages.iter_mut().enumerate().take(used) {
            *page = buffer.gref(i);
        }
        self.put(tag, op.byte(), Message::Indirect { op, nr_segments, sector, pages });
    }

    fn put(&mut self, tag: Tag, response_op: u8, message: Message) {
        let pending = &mut self.pending[tag.0 as usize];
        pending.active = true;
        pending.operation = response_op;
        let request = Request { id: self.id(tag), response_op, message };
        let protocol = self.options.protocol;
        self.ring.put_slot(self.req_prod, &request.encode(protocol).0[..protocol.slot_bytes()]);
        self.req_prod = self.req_prod.wrapping_add(1);
    }

    /// RING_PUSH_REQUESTS_AND_CHECK_NOTIFY: publishes the requests, and sends an event if the backend asked for one;
    /// returns whether it did.
    ///
    /// # Errors
    /// The kernel's, about the event.
    pub fn push(&mut self) -> Result<bool, FrontError> {
        let (old, new) = (self.req_published, self.req_prod);
        if old == new {
            return Ok(false);
        }
        self.ring.store(RingWord::ReqProd, new);
        self.req_published = new;
        // blkif.md 1.4: the store above before the load of req_event.
        fence(Ordering::SeqCst);
        let req_event = self.ring.load(RingWord::ReqEvent);
        let wanted = new.wrapping_sub(req_event) < new.wrapping_sub(old);
        if wanted {
            self.notify()?;
        }
        Ok(wanted)
    }

    /// Sends the backend an event, whether it wants one or not.
    ///
    /// # Errors
    /// The kernel's.
    pub fn notify(&self) -> Result<(), FrontError> {
        Ok(self.space.notify(self.port)?)
    }

    /// Closes the channel and takes the ring back, once the backend has disconnected.
    ///
    /// # Errors
    /// [`FrontError::StillMapped`]: the ring's memory is not used again.
    pub fn release(mut self) -> Result<(), FrontError> {
        let Some(pages) = self.ring_pages.take() else { return Ok(()) };
        (0..pages.pages()).try_for_each(|page| pages.revoke(page)).map_err(FrontError::StillMapped)
    }

    /// Drops the queue with all its grants in place, as a guest does that starts another kernel or resumes elsewhere.
    /// Only its channel is closed.
    pub fn abandon(mut self) {
        std::mem::forget(self.ring_pages.take());
        self.indirect.drain(..).for_each(std::mem::forget);
        self.pending.drain(..).for_each(|pending| std::mem::forget(pending.bounces));
    }
}

impl Drop for FrontQueue {
    /// Frames that the backend has released can be reused, the ring's pages (a [`Buffer`]) too.
    fn drop(&mut self) {
        self.space.memory().close_port(self.port);
        self.space.give_grants(self.spare_grants.drain(..));
        let table = self.space.memory().grants();
        let granted = self.pending.iter().filter(|p| p.fresh).flat_map(|p| &p.grefs);
        self.space.give_grants(granted.copied().filter(|gref| table.revoke(*gref).is_ok()));
    }
}

const _: () = assert!(SEGMENTS_PER_INDIRECT_PAGE * SEGMENT_BYTES == PAGE_SIZE);
