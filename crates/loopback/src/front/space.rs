//! A frontend's bookkeeping of its memory: frames, grants and ports in use, and buffers.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::guest::{Descriptors, GuestHandle, signal};
use super::super::memory::GuestMemory;
use super::super::{BACKEND_DOMID, LoopbackError};
use crate::grants::InUse;
use ferrite_xen::abi::{RawSegment, SECTOR_BYTES};
use ferrite_xen::hypervisor::{DomId, GrantRef, PAGE_SIZE};

/// Xen keeps the first references for the console and the store.
const FIRST_GRANT: u32 = 8;
/// 512-byte sectors in a frame.
pub(super) const SECTORS_PER_PAGE: usize = PAGE_SIZE / SECTOR_BYTES as usize;

/// The unused frames and grants.
struct Free {
    /// Free frames as (first, count), in order, never adjacent.
    frames: Vec<(u32, u32)>,
    grants: Vec<GrantRef>,
    /// Pages that were dropped while the backend had them mapped: frame and grant.
    held: Vec<(u32, GrantRef)>,
}

impl Free {
    fn give_frames(&mut self, first: u32, count: u32) {
        let frames = &mut self.frames;
        let i = frames.partition_point(|(f, _)| *f < first);
        frames.insert(i, (first, count));
        if let Some((next, n)) = frames.get(i + 1).copied()
            && first + count == next
        {
            frames[i].1 += n;
            frames.remove(i + 1);
        }
        if i > 0 && frames[i - 1].0 + frames[i - 1].1 == first {
            frames[i - 1].1 += frames[i].1;
            frames.remove(i);
        }
    }
}

/// One guest, as its frontends use it. Frontends in threads of one process share it; all frontends of a guest are in
/// one process.
pub struct GuestSpace {
    domid: DomId,
    memory: GuestMemory,
    descriptors: Arc<Descriptors>,
    free: Mutex<Free>,
}

impl GuestSpace {
    /// Attaches to a guest and announces this process as its frontend. Frames and references that an earlier frontend
    /// has left granted are not reused.
    ///
    /// # Errors
    /// Those of the kernel, or it is no guest.
    pub fn attach(guest: &GuestHandle) -> Result<Arc<GuestSpace>, LoopbackError> {
        let memory = guest.map()?;
        memory.announce_frontend();
        let layout = memory.layout();
        let table = memory.grants();
        let mut grants: Vec<GrantRef> = (FIRST_GRANT..layout.grants).map(GrantRef).collect();
        let mut taken: Vec<u32> = grants.iter().filter_map(|g| table.granted_frame(*g)).collect();
        grants.retain(|g| table.raw(*g) == Some(0));
        // The lowest are used first.
        grants.reverse();
        taken.sort_unstable();
        let mut frames = Vec::new();
        let mut from = 0;
        for frame in taken.into_iter().chain([layout.frames]) {
            if frame > from {
                frames.push((from, frame - from));
            }
            from = from.max(frame + 1);
        }
        let free = Mutex::new(Free { frames, grants, held: Vec::new() });
        let descriptors = guest.descriptors().clone();
        Ok(Arc::new(GuestSpace { domid: guest.domid(), memory, descriptors, free }))
    }

    /// The guest's domain.
    pub fn domid(&self) -> DomId {
        self.domid
    }

    /// The mapping, with the grant table, for hostile tests.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The descriptor on which the backend's events arrive.
    pub(crate) fn event_fd(&self, port: u32) -> BorrowedFd<'_> {
        self.descriptors.to_front(port)
    }

    /// Sends the backend an event on `port`, also without a ring.
    ///
    /// # Errors
    /// Those of the kernel; a full counter is none.
    pub fn notify(&self, port: u32) -> std::io::Result<()> {
        signal(self.descriptors.to_back(port))
    }

    /// The free ones, including those that the backend has released meanwhile.
    fn free(&self) -> MutexGuard<'_, Free> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if !free.held.is_empty() {
            let table = self.memory.grants();
            let (gone, held): (Vec<_>, Vec<_>) =
                free.held.drain(..).partition(|(_, gref)| table.revoke(*gref).is_ok());
            free.held = held;
            for (frame, gref) in gone {
                free.give_frames(frame, 1);
                free.grants.push(gref);
            }
        }
        free
    }

    /// Takes contiguous frames.
    pub(super) fn take_frames(&self, count: u32) -> Result<u32, LoopbackError> {
        let mut free = self.free();
        let fits = free.frames.iter().position(|(_, n)| *n >= count);
        let Some(i) = fits else { return Err(LoopbackError::Exhausted { what: "frames" }) };
        let (first, n) = free.frames[i];
        if n == count {
            free.frames.remove(i);
        } else {
            free.frames[i] = (first + count, n - count);
        }
        Ok(first)
    }

    pub(super) fn give_frames(&self, first: u32, count: u32) {
        self.free().give_frames(first, count);
    }

    /// Returns a page, now or once the backend has released it.
    fn give_page(&self, frame: u32, gref: GrantRef) {
        let revoked = self.memory.grants().revoke(gref).is_ok();
        let mut free = self.free();
        if revoked {
            free.give_frames(frame, 1);
            free.grants.push(gref);
        } else {
            free.held.push((frame, gref));
        }
    }

    /// Fills `to` up with `count` unused references.
    pub(super) fn take_grants(
        &self,
        count: usize,
        to: &mut Vec<GrantRef>,
    ) -> Result<(), LoopbackError> {
        let mut free = self.free();
        let Some(rest) = free.grants.len().checked_sub(count) else {
            return Err(LoopbackError::Exhausted { what: "grants" });
        };
        to.extend(free.grants.drain(rest..).rev());
        Ok(())
    }

    pub(super) fn give_grants(&self, grants: impl IntoIterator<Item = GrantRef>) {
        self.free().grants.extend(grants);
    }

    /// Grants the backend a frame.
    pub fn grant(&self, gref: GrantRef, frame: u32, read_only: bool) {
        self.memory.grants().grant(gref, BACKEND_DOMID, frame, read_only);
    }

    /// The numbers of unused frames and references; if they are the same before and after, nothing leaked.
    pub fn free_counts(&self) -> (u32, usize) {
        let free = self.free();
        (free.frames.iter().map(|(_, n)| n).sum(), free.grants.len())
    }

    /// A frame that another thread changes, as a hostile guest's other processor.
    pub fn alias(self: &Arc<Self>, frame: u32) -> Alias {
        Alias { space: self.clone(), frame }
    }

    /// `pages` pages, each granted to the backend for reading and writing.
    ///
    /// # Errors
    /// [`LoopbackError::Exhausted`].
    pub fn buffer(self: &Arc<Self>, pages: usize) -> Result<Buffer, LoopbackError> {
        let mut grefs = Vec::with_capacity(pages);
        let first = self.take_frames(pages as u32)?;
        if let Err(e) = self.take_grants(pages, &mut grefs) {
            self.give_frames(first, pages as u32);
            return Err(e);
        }
        let buffer = Buffer { space: self.clone(), first, grefs };
        (0..pages).for_each(|page| buffer.grant(page, false));
        Ok(buffer)
    }
}

/// A frame that another thread changes; see [`GuestSpace::alias`].
pub struct Alias {
    space: Arc<GuestSpace>,
    frame: u32,
}

impl Alias {
    /// Writes bytes, one store each.
    ///
    /// # Panics
    /// If they are not in the frame: a bug of the test.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= PAGE_SIZE);
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: inside a frame that stays mapped as long as the space; others write it, too, and nothing is
            // decided on it.
            unsafe { self.space.memory.frame(self.frame).add(at + i).write_volatile(*byte) };
        }
    }
}

/// Contiguous pages of the guest, each with a grant reference of its own. Bytes are copied in and out; the backend may
/// be changing them.
pub struct Buffer {
    space: Arc<GuestSpace>,
    first: u32,
    grefs: Vec<GrantRef>,
}

impl Buffer {
    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.grefs.len() * PAGE_SIZE
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.grefs.len()
    }

    /// The guest of the pages.
    pub(super) fn space(&self) -> &GuestSpace {
        &self.space
    }

    /// A page's grant.
    pub fn gref(&self, page: usize) -> GrantRef {
        self.grefs[page]
    }

    /// A page's frame number.
    pub fn frame(&self, page: usize) -> u32 {
        assert!(page < self.grefs.len());
        self.first + page as u32
    }

    /// Grants a page again, perhaps with other rights.
    pub fn grant(&self, page: usize, read_only: bool) {
        self.space.grant(self.gref(page), self.frame(page), read_only);
    }

    /// Revokes a page's grant.
    ///
    /// # Errors
    /// [`InUse`]; it is still granted then.
    pub fn revoke(&self, page: usize) -> Result<(), InUse> {
        self.space.memory.grants().revoke(self.gref(page))
    }

    /// A segment of 512-byte sectors `first..=last` of a page.
    pub fn segment(&self, page: usize, first: u8, last: u8) -> RawSegment {
        RawSegment { gref: self.gref(page).0, first_sect: first, last_sect: last }
    }

    /// Bytes `from..from + len` as segments, one per page; both are multiples of 512.
    pub(super) fn pieces(
        &self,
        from: usize,
        len: usize,
    ) -> impl Iterator<Item = (usize, u8, u8)> + use<> {
        let sector = SECTOR_BYTES as usize;
        assert!(from.is_multiple_of(sector) && len.is_multiple_of(sector));
        assert!(from + len <= self.len(), "{from} + {len} of {}", self.len());
        let (mut at, end) = (from / sector, (from + len) / sector);
        std::iter::from_fn(move || {
            let page = at / SECTORS_PER_PAGE;
            let stop = end.min((page + 1) * SECTORS_PER_PAGE);
            let piece = (page, at % SECTORS_PER_PAGE, stop.wrapping_sub(1) % SECTORS_PER_PAGE);
            let more = at < end;
            at = stop;
            more.then_some((piece.0, piece.1 as u8, piece.2 as u8))
        })
    }

    fn ptr(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len()));
        // SAFETY: inside this buffer's frames, which are one behind the other in the mapping.
        unsafe { self.space.memory.frame(self.first).add(at) }.as_ptr()
    }

    /// Copies bytes in.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let to = self.ptr(at, bytes.len());
        // SAFETY: `ptr` checked the bounds; guest memory never overlaps a slice of ours.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Copies bytes out.
    pub fn read(&self, at: usize, bytes: &mut [u8]) {
        let from = self.ptr(at, bytes.len());
        // SAFETY: as in `write`.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies bytes out.
    pub fn to_vec(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes);
        bytes
    }

    /// Sets bytes.
    pub fn fill(&self, at: usize, len: usize, byte: u8) {
        let to = self.ptr(at, len);
        // SAFETY: as in `write`.
        unsafe { to.write_bytes(byte, len) };
    }

    /// Sets one byte, in one volatile store, for changes while a backend reads.
    pub fn poke(&self, at: usize, byte: u8) {
        // SAFETY: `ptr` checked the bounds.
        unsafe { self.ptr(at, 1).write_volatile(byte) };
    }
}

impl Drop for Buffer {
    /// A page that the backend is still using, and its reference, are reused only after the backend has released them.
    fn drop(&mut self) {
        for (i, gref) in self.grefs.iter().enumerate() {
            self.space.give_page(self.first + i as u32, *gref);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestOptions;

    fn space() -> Arc<GuestSpace> {
        let options = GuestOptions { frames: 64, grants: 64, ports: 2 };
        GuestSpace::attach(&GuestHandle::create(DomId(1), options).unwrap()).unwrap()
    }

    #[test]
    fn buffers_come_and_go_without_a_trace() {
        let space = space();
        let before = space.free_counts();
        assert_eq!(before, (64, 56));
        let a = space.buffer(3).unwrap();
        let b = space.buffer(5).unwrap();
        let c = space.buffer(1).unwrap();
        assert_eq!(space.free_counts(), (55, 47));
        drop(b);
        drop(a);
        assert_eq!(space.buffer(8).unwrap().frame(0), 0, "neighbours were joined");
        drop(c);
        assert_eq!(space.free_counts(), before);
        assert_eq!(space.memory().grants().raw(GrantRef(FIRST_GRANT)), Some(0));
    }

    #[test]
    fn what_is_used_up_is_said() {
        let space = space();
        assert!(matches!(space.buffer(65), Err(LoopbackError::Exhausted { what: "frames" })));
        assert!(matches!(space.buffer(60), Err(LoopbackError::Exhausted { what: "grants" })));
        assert_eq!(space.free_counts(), (64, 56));
    }

    #[test]
    fn a_later_frontend_leaves_alone_what_an_earlier_one_has_granted() {
        let options = GuestOptions { frames: 64, grants: 64, ports: 2 };
        let guest = GuestHandle::create(DomId(1), options).unwrap();
        let first = GuestSpace::attach(&guest).unwrap();
        let (_gone, _gap) = (first.buffer(1).unwrap(), first.buffer(2).unwrap());
        let kept = first.buffer(3).unwrap();
        drop(_gap);
        let second = GuestSpace::attach(&guest).unwrap();
        assert_eq!(second.free_counts(), (60, 52));
        let new = second.buffer(2).unwrap();
        assert_eq!(new.frame(0), 1);
        assert_ne!(new.gref(0), kept.gref(0));
    }

    #[test]
    fn a_buffer_is_cut_into_segments_at_its_pages() {
        let space = space();
        let buffer = space.buffer(3).unwrap();
        let pieces = |from, len| buffer.pieces(from, len).collect::<Vec<_>>();
        assert_eq!(pieces(0, 512), [(0, 0, 0)]);
        assert_eq!(pieces(0, 8192), [(0, 0, 7), (1, 0, 7)]);
        assert_eq!(pieces(3584, 1024), [(0, 7, 7), (1, 0, 0)]);
        assert_eq!(pieces(512, 11264), [(0, 1, 7), (1, 0, 7), (2, 0, 6)]);
        assert_eq!(pieces(4096, 0), []);
    }
}
