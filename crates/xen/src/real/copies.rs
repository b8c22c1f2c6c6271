//! Segments as the kernel's copies.
//!
//! A side that is a grant must not leave its page: the kernel refuses the whole call otherwise. So a
//! segment whose local side crosses the border of one of our own granted pages is cut in two. Its
//! status is the worse one.
//!
//! A failure of a grant of our own is no fault of the guest's: a segment that failed by it is copied
//! again by its address. If that works, the page is used by its address from then on.

use std::io;

use ferrite_io::arena::{Arena, Span};

use super::uapi::{self, CopyEntry};
use crate::hypervisor::{CopySegment, Direction, DomId, GNTST_OKAY, PAGE_SIZE, STATUS_UNTOUCHED};

/// Segments in one ioctl. The kernel hands 16 at a time to the hypervisor (blkif.md 4.3), so more
/// would save little; this bounds what a link keeps: 24 KiB.
const COPY_BATCH: usize = 512;

/// Marks an entry that has the rest of the segment of the entry before it. The kernel has no use for
/// the field.
const REST: u16 = 1;

/// One guest's copies.
pub(super) struct Copies {
    domid: DomId,
    /// Kept from call to call, so that none allocates.
    entries: Vec<CopyEntry>,
}

/// The call by which the kernel carries out entries.
pub(super) type Call<'a> = &'a mut dyn FnMut(&mut [CopyEntry]) -> io::Result<()>;

impl Copies {
    pub(super) fn new(domid: DomId) -> Copies {
        Copies { domid, entries: Vec::with_capacity(2 * COPY_BATCH) }
    }

    /// Carries out `segments`, and gives each its status.
    pub(super) fn copy(
        &mut self,
        call: Call<'_>,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        for batch in segments.chunks_mut(COPY_BATCH) {
            self.entries.clear();
            for segment in &*batch {
                self.push(segment, arena, direction);
            }
            call(&mut self.entries)?;
            let done = self.entries.chunk_by(|_, next| next.pad == REST);
            let mut by_own = false;
            for (segment, entries) in batch.iter_mut().zip(done) {
                let bad = entries.iter().map(|entry| entry.status).find(|s| *s != GNTST_OKAY);
                segment.status = bad.unwrap_or(GNTST_OKAY);
                by_own |= failed_by_name(segment, arena);
            }
            if by_own {
                self.copy_again(call, arena, direction, batch)?;
            }
        }
        Ok(())
    }

    /// Those that failed and had a grant of our own, by their addresses.
    #[cold]
    fn copy_again(
        &mut self,
        call: Call<'_>,
        arena: &Arena,
        direction: Direction,
        batch: &mut [CopySegment],
    ) -> io::Result<()> {
        let mut failed: Vec<&mut CopySegment> =
            batch.iter_mut().filter(|segment| failed_by_name(segment, arena)).collect();
        self.entries.clear();
        for segment in &failed {
            self.entries.push(entry(segment, arena, self.domid, direction));
        }
        call(&mut self.entries)?;
        for (segment, entry) in failed.iter_mut().zip(&self.entries) {
            segment.status = entry.status;
            if segment.is_ok() {
                tracing::debug!(
                    "a page that this domain has granted to itself is copied by address"
                );
                arena.forget(segment.local());
            }
        }
        Ok(())
    }

    fn push(&mut self, segment: &CopySegment, arena: &Arena, direction: Direction) {
        let local = segment.local();
        if !is_by_name(arena, local) {
            return self.entries.push(entry(segment, arena, self.domid, direction));
        }
        let first = (PAGE_SIZE - local.offset() % PAGE_SIZE).min(local.len());
        let parts = [(0, first, 0), (first, local.len() - first, REST)];
        for (from, len, mark) in parts.into_iter().filter(|(_, len, _)| *len > 0) {
            let part = local.slice(from, len);
            // A frame has less than 65,536 bytes.
            let offset = segment.offset() + from as u16;
            let part = CopySegment::new(part, segment.gref(), offset);
            let mut entry = entry(&part, arena, self.domid, direction);
            if let Some(name) = arena.name(local.offset() + from) {
                let within = (local.offset() + from) % PAGE_SIZE;
                by_name(&mut entry, direction, name, within as u16);
            }
            entry.pad = mark;
            self.entries.push(entry);
        }
    }
}

fn is_by_name(arena: &Arena, local: Span) -> bool {
    // At most a page long, so it touches two at most.
    let last = local.offset() + local.len() - 1;
    arena.name(local.offset()).is_some() || arena.name(last).is_some()
}

fn failed_by_name(segment: &CopySegment, arena: &Arena) -> bool {
    !segment.is_ok() && is_by_name(arena, segment.local())
}

fn entry(segment: &CopySegment, arena: &Arena, domid: DomId, direction: Direction) -> CopyEntry {
    let local = arena.ptr(segment.local()).as_ptr().expose_provenance() as u64;
    let grant = uapi::grant_side(segment.gref().0, segment.offset(), domid.0);
    let (source, dest, flags) = match direction {
        Direction::FromGuest => (grant, local, uapi::COPY_SOURCE_GREF),
        Direction::ToGuest => (local, grant, uapi::COPY_DEST_GREF),
    };
    // The status is never left over from an earlier use (XSA-318). Linux sets it to okay when it
    // takes the segment up and to the error when there was one, so what stays untouched was never
    // looked at.
    CopyEntry { source, dest, len: segment.len(), flags, status: STATUS_UNTOUCHED, pad: 0 }
}

/// Has the local side be one of our own grants, from byte `within` of its page on.
fn by_name(entry: &mut CopyEntry, direction: Direction, name: u32, within: u16) {
    let own = uapi::grant_side(name, within, uapi::DOMID_SELF);
    match direction {
        Direction::FromGuest => entry.dest = own,
        Direction::ToGuest => entry.source = own,
    }
    entry.flags = uapi::COPY_SOURCE_GREF | uapi::COPY_DEST_GREF;
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::hypervisor::{GNTST_BAD_GNTREF, GNTST_PERMISSION_DENIED, GrantRef};

    #[test]
    fn a_segment_becomes_the_kernels_24_bytes_in_either_direction() {
        let arena = Arena::new(PAGE_SIZE).unwrap();
        let span = arena.span(512, 1024);
        let mut segment = CopySegment::new(span, GrantRef(0x0102_0304), 2048);
        segment.status = 0;
        let local = arena.ptr(span).as_ptr() as u64;
        let grant = 0x0007_0800_0102_0304;

        let e = entry(&segment, &arena, DomId(7), Direction::FromGuest);
        assert_eq!((e.source, e.dest, e.len, e.flags), (grant, local, 1024, 1));
        let e = entry(&segment, &arena, DomId(7), Direction::ToGuest);
        assert_eq!((e.source, e.dest, e.len, e.flags), (local, grant, 1024, 2));
        assert_eq!(e.status, STATUS_UNTOUCHED);
    }

    /// The pages with these names, one behind the other; page 0 of the arena has none.
    const NAMES: [u32; 2] = [70, 80];
    const GUEST: DomId = DomId(7);

    /// The kernel and the hypervisor, with one page for each of some references.
    struct Xen {
        pages: HashMap<(u16, u32), Vec<u8>>,
        bad: HashMap<u32, i16>,
        calls: Vec<usize>,
    }

    impl Xen {
        /// A guest's pages 1 to 8, and ours.
        fn new() -> Xen {
            let guest = (1..=8u32).map(|gref| ((GUEST.0, gref), vec![gref as u8; PAGE_SIZE]));
            let own = NAMES.map(|name| ((uapi::DOMID_SELF, name), vec![name as u8; PAGE_SIZE]));
            let pages = guest.chain(own).collect();
            Xen { pages, bad: HashMap::new(), calls: Vec::new() }
        }

        fn grant(side: u64) -> (u16, u32, usize) {
            let bytes = side.to_ne_bytes();
            let gref = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
            let offset = u16::from_ne_bytes([bytes[4], bytes[5]]);
            (u16::from_ne_bytes([bytes[6], bytes[7]]), gref, usize::from(offset))
        }

        /// Copies between grants only; of a local address it sees to the status alone. As the kernel,
        /// it does nothing of a call that has a piece across a border.
        fn call(&mut self, entries: &mut [CopyEntry]) -> io::Result<()> {
            self.calls.push(entries.len());
            let sides = |e: &CopyEntry| [(e.source, e.flags & 1), (e.dest, e.flags & 2)];
            let crosses = |e: &CopyEntry, side| Xen::grant(side).2 + usize::from(e.len) > PAGE_SIZE;
            if entries.iter().any(|e| sides(e).into_iter().any(|(s, is)| is > 0 && crosses(e, s))) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            for entry in entries {
                let grants = sides(entry).into_iter().filter(|(_, is)| *is > 0);
                let bad = grants.filter_map(|(side, _)| self.bad.get(&Xen::grant(side).1)).next();
                entry.status = bad.copied().unwrap_or(GNTST_OKAY);
                if entry.status == GNTST_OKAY && entry.flags == 3 {
                    let (domid, gref, from) = Xen::grant(entry.source);
                    let bytes =
                        self.pages[&(domid, gref)][from..][..usize::from(entry.len)].to_vec();
                    let (domid, gref, to) = Xen::grant(entry.dest);
                    let page = self.pages.get_mut(&(domid, gref)).unwrap();
                    page[to..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
            Ok(())
        }

        fn copy(&mut self, arena: &Arena, way: Direction, segments: &mut [CopySegment]) {
            let mut copies = Copies::new(GUEST);
            copies.copy(&mut |entries| self.call(entries), arena, way, segments).unwrap();
        }
    }

    fn arena() -> std::sync::Arc<Arena> {
        let device = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
        device.set_len(2 * PAGE_SIZE as u64).unwrap();
        let arena = Arena::new(1).unwrap();
        arena.put(arena.span(PAGE_SIZE, 2 * PAGE_SIZE), device.as_fd(), 0, &NAMES).unwrap();
        arena
    }

    #[test]
    fn a_segment_is_cut_where_a_page_of_ours_ends_at_any_offset() {
        let arena = arena();
        for at in [1, 511, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 12287] {
            for len in [1, 2, 511, 513, 4096] {
                for offset in [0, 1, 3583].into_iter().filter(|o| o + len <= PAGE_SIZE) {
                    let mut xen = Xen::new();
                    let segment = CopySegment::new(arena.span(at, len), GrantRef(5), offset as u16);
                    xen.copy(&arena, Direction::FromGuest, &mut [segment]);
                    for (page, name) in NAMES.into_iter().enumerate() {
                        let first = (page + 1) * PAGE_SIZE;
                        let got = &xen.pages[&(uapi::DOMID_SELF, name)];
                        for (k, byte) in got.iter().enumerate() {
                            let is_copied = (at..at + len).contains(&(first + k));
                            let expected = if is_copied { 5 } else { name as u8 };
                            assert_eq!(*byte, expected, "{at} {len} {offset}: {name}, byte {k}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_go_to_the_guest_from_where_they_are() {
        let (arena, mut xen) = (arena(), Xen::new());
        // The last 96 bytes of 70, the first 404 of 80.
        let local = arena.span(2 * PAGE_SIZE - 96, 500);
        let mut segments = [CopySegment::new(local, GrantRef(2), 1001)];
        xen.copy(&arena, Direction::ToGuest, &mut segments);
        assert!(segments[0].is_ok());
        let page = &xen.pages[&(GUEST.0, 2)];
        let expected = |k: usize| match k {
            1001..1097 => 70,
            1097..1501 => 80,
            _ => 2,
        };
        assert!(page.iter().enumerate().all(|(k, byte)| *byte == expected(k)));
        assert_eq!(xen.calls, [2]);
    }

    #[test]
    fn each_segment_has_the_status_of_its_own_pieces() {
        let (arena, mut xen) = (arena(), Xen::new());
        xen.bad.insert(3, GNTST_BAD_GNTREF);
        // By address, cut, one page of ours, across the end of ours.
        let locals = [(0, 512), (6000, 4096), (4096, 4096), (12000, 1000)];
        for bad in 0..locals.len() {
            let mut segments = [0, 1, 2, 3].map(|i| {
                let (at, len) = locals[i];
                CopySegment::new(arena.span(at, len), GrantRef(if i == bad { 3 } else { 4 }), 0)
            });
            xen.copy(&arena, Direction::FromGuest, &mut segments);
            for (i, segment) in segments.iter().enumerate() {
                let status = if i == bad { GNTST_BAD_GNTREF } else { GNTST_OKAY };
                assert_eq!(segment.status, status, "{bad} is bad: {i}");
            }
        }
        assert_eq!(arena.name(PAGE_SIZE), Some(70), "the guest's fault says nothing of our grant");
    }

    #[test]
    fn a_grant_of_ours_that_is_refused_costs_the_guest_nothing_and_is_not_used_again() {
        let mut xen = Xen::new();
        for status in [GNTST_BAD_GNTREF, GNTST_PERMISSION_DENIED, STATUS_UNTOUCHED] {
            xen.bad.insert(80, status);
            let arena = arena();
            let mut segments = [(4096, 4096), (6000, 4096), (8192, 100), (8292, 100)]
                .map(|(at, len)| CopySegment::new(arena.span(at, len), GrantRef(4), 0));
            xen.calls.clear();
            xen.copy(&arena, Direction::FromGuest, &mut segments);
            assert!(segments.iter().all(CopySegment::is_ok), "{status}: {segments:?}");
            assert_eq!(xen.calls, [5, 3]);
            // The page before it shared a segment with it.
            assert_eq!([4096, 8192].map(|byte| arena.name(byte)), [None, None]);
            xen.calls.clear();
            xen.copy(&arena, Direction::FromGuest, &mut segments);
            assert_eq!(xen.calls, [4]);
        }
    }

    #[test]
    fn a_rest_that_fails_fails_its_segment() {
        let arena = arena();
        let mut xen = Xen::new();
        xen.bad.insert(80, GNTST_BAD_GNTREF);
        let mut segments = [CopySegment::new(arena.span(6000, 4096), GrantRef(4), 0)];
        let mut first_only = |entries: &mut [CopyEntry]| {
            xen.call(entries)?;
            // By its address it fails, too.
            if let [alone] = entries {
                alone.status = GNTST_PERMISSION_DENIED;
            }
            Ok(())
        };
        let mut copies = Copies::new(GUEST);
        copies.copy(&mut first_only, &arena, Direction::FromGuest, &mut segments).unwrap();
        assert_eq!(segments[0].status, GNTST_PERMISSION_DENIED);
        assert_eq!(arena.name(8192), Some(80));
    }

    #[test]
    fn a_call_that_fails_is_an_error() {
        let (arena, mut copies) = (arena(), Copies::new(GUEST));
        let mut fails = |_: &mut [CopyEntry]| Err(io::ErrorKind::InvalidInput.into());
        let mut segments = [CopySegment::new(arena.span(4096, 1), GrantRef(4), 0)];
        copies.copy(&mut fails, &arena, Direction::ToGuest, &mut segments).unwrap_err();
    }
}
