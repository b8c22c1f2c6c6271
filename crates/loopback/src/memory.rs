//! A guest's memory: one memfd that frontend and backend map separately.
//!
//! Layout: a header page ([`GuestMemory`]'s words), the grant table, then the frames. Frame
//! numbers count from the first frame, so that no grant can name the header or the table.
//!
//! The memfd is sealed against shrinking and growing: an access inside the mapping never faults.
//! Sizes are read once, checked against the file, and kept privately.
//!
//! Why raw accesses are sound: each party has a mapping of its own, at addresses that no other party's pointers derive
//! from, and no `&[u8]` or `&mut [u8]` of it is ever made. Changes of the other side are like a device's writes: words
//! that decide anything are atomics, read once; data bytes are copied in and out and nothing depends on their value.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::grants::{GrantTable, MAX_FRAMES};
use super::guest::raised;
use super::{GuestOptions, LoopbackError};
use ferrite_xen::hypervisor::{DomId, PAGE_SIZE};

const MAGIC: u32 = 0x4645_4731; // "FEG1"

// Byte offsets in the header page.
const AT_MAGIC: usize = 0;
const AT_DOMID: usize = 4;
const AT_FRAMES: usize = 8;
const AT_GRANTS: usize = 12;
const AT_PORTS: usize = 16;
/// The frontend's process, for process_vm calls.
const AT_FRONT_PID: usize = 24;
/// The address at which that process has mapped the whole file.
const AT_FRONT_BASE: usize = 32;
/// The backend that serves the guest: process in the upper half, connections in the lower.
const AT_OWNER: usize = 40;
const AT_PORT_STATES: usize = 1024;

/// The most event channels of a guest: their states fill the header page.
pub const MAX_PORTS: u32 = ((PAGE_SIZE - AT_PORT_STATES) / 4) as u32;
/// The most grant references of a guest (8 MiB of table).
pub const MAX_GRANTS: u32 = 1 << 20;

/// An event channel that the frontend has not opened.
const PORT_CLOSED: u32 = 0;
/// Open, without a bound backend: `ECS_UNBOUND`.
const PORT_UNBOUND: u32 = 1;
/// A backend is bound to it: `ECS_INTERDOMAIN`.
const PORT_BOUND: u32 = 2;

/// The places in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) frames: u32,
    pub(super) grants: u32,
    pub(super) ports: u32,
}

impl Layout {
    fn check(self) -> Result<Layout, String> {
        let inside = |what, value: u32, max: u32| match value {
            0 => Err(format!("it has no {what}")),
            v if v > max => Err(format!("{v} {what} are more than {max}")),
            _ => Ok(()),
        };
        inside("frames", self.frames, MAX_FRAMES)?;
        inside("grants", self.grants, MAX_GRANTS)?;
        inside("ports", self.ports, MAX_PORTS)?;
        Ok(self)
    }

    /// First byte of frame 0.
    pub(super) fn frames_at(&self) -> usize {
        PAGE_SIZE + (self.grants as usize * 8).next_multiple_of(PAGE_SIZE)
    }

    fn file_bytes(&self) -> usize {
        self.frames_at() + self.frames as usize * PAGE_SIZE
    }
}

/// One party's mapping of a guest's memory.
pub struct GuestMemory {
    base: NonNull<u8>,
    layout: Layout,
    file: Arc<OwnedFd>,
}

// SAFETY: the mapping belongs to the value, and is accessed only by atomics and by raw copies of
// bytes that nothing is decided on (see the module's documentation).
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// A new guest's file, sealed.
    pub(super) fn create(domid: DomId, o: GuestOptions) -> Result<OwnedFd, LoopbackError> {
        let layout = Layout { frames: o.frames, grants: o.grants, ports: o.ports };
        let layout = layout.check().map_err(LoopbackError::NotAGuest)?;
        let make = || -> io::Result<OwnedFd> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("ferrite-guest", flags)?;
            rustix::fs::ftruncate(&file, layout.file_bytes() as u64)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&file, seals)?;
            Ok(raised(file)?)
        };
        let file = Arc::new(make().map_err(LoopbackError::system("create a guest's memory"))?);
        let memory = Self::map(file.clone(), layout)?;
        memory.word(AT_DOMID).store(u32::from(domid.0), Ordering::Relaxed);
        memory.word(AT_FRAMES).store(layout.frames, Ordering::Relaxed);
        memory.word(AT_GRANTS).store(layout.grants, Ordering::Relaxed);
        memory.word(AT_PORTS).store(layout.ports, Ordering::Relaxed);
        memory.word(AT_MAGIC).store(MAGIC, Ordering::Release);
        drop(memory);
        Ok(Arc::into_inner(file).expect("the mapping was the only other user"))
    }

    /// Maps a guest's file; its header is checked, since any party may have written it.
    pub(super) fn attach(file: Arc<OwnedFd>) -> Result<GuestMemory, LoopbackError> {
        let refuse = |why: String| Err(LoopbackError::NotAGuest(why));
        let seals = rustix::fs::fcntl_get_seals(&file)
            .map_err(LoopbackError::system("read the seals of a guest's memory"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return refuse("it could shrink under us".into());
        }
        let bytes = rustix::fs::fstat(&file)
            .map_err(LoopbackError::system("find the size of a guest's memory"))?
            .st_size as usize;
        let smallest = Layout { frames: 1, grants: 1, ports: 1 };
        if bytes < smallest.file_bytes() {
            return refuse(format!("it has {bytes} bytes"));
        }
        let header = Self::map(file.clone(), smallest)?;
        let at = |offset| header.word(offset).load(Ordering::Acquire);
        let magic = at(AT_MAGIC);
        let layout = Layout { frames: at(AT_FRAMES), grants: at(AT_GRANTS), ports: at(AT_PORTS) };
        if magic != MAGIC {
            return refuse(format!("it begins with {magic:#x}"));
        }
        let layout = layout.check().map_err(LoopbackError::NotAGuest)?;
        if layout.file_bytes() != bytes {
            return refuse(format!("its header and its {bytes} bytes disagree"));
        }
        Self::map(file, layout)
    }

    fn map(file: Arc<OwnedFd>, layout: Layout) -> Result<GuestMemory, LoopbackError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                layout.file_bytes(),
                prot,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        }
        .map_err(LoopbackError::system("map a guest's memory"))?;
        let base = NonNull::new(base.cast()).expect("mmap never gives null");
        Ok(GuestMemory { base, layout, file })
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 <= PAGE_SIZE);
        // SAFETY: inside the header page, aligned, mapped as long as `self`, and only ever
        // accessed atomically.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn wide_word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= PAGE_SIZE);
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    /// The domain in the header.
    pub(super) fn domid(&self) -> DomId {
        DomId(self.word(AT_DOMID).load(Ordering::Relaxed) as u16)
    }

    /// The grant table.
    pub fn grants(&self) -> GrantTable<'_> {
        // SAFETY: `grants` words follow the header page, aligned and mapped as long as `self`;
        // atomics may be shared.
        let words = unsafe {
            std::slice::from_raw_parts(
                self.base.add(PAGE_SIZE).as_ptr().cast::<AtomicU64>(),
                self.layout.grants as usize,
            )
        };
        GrantTable(words)
    }

    /// A frame's first byte in this mapping.
    ///
    /// # Panics
    /// If there is no such frame: numbers from a grant have been checked when it was pinned.
    pub(super) fn frame(&self, frame: u32) -> NonNull<u8> {
        assert!(frame < self.layout.frames, "frame {frame} of {}", self.layout.frames);
        // SAFETY: inside the mapping, by the check above and Layout::file_bytes.
        unsafe { self.base.add(self.layout.frames_at() + frame as usize * PAGE_SIZE) }
    }

    /// Maps arbitrary frames contiguously. Their page-table entries are made now, as a hypervisor makes them, and not
    /// at the first access.
    pub(super) fn map_frames(&self, frames: &[u32], writable: bool) -> io::Result<FrameMapping> {
        let len = frames.len() * PAGE_SIZE;
        // SAFETY: reserves addresses of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never gives null");
        let mapping = FrameMapping { base, len };
        for (i, frame) in frames.iter().enumerate() {
            assert!(*frame < self.layout.frames, "frame {frame} of {}", self.layout.frames);
            let offset = self.layout.frames_at() + *frame as usize * PAGE_SIZE;
            let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
            let prot = ProtFlags::READ | write;
            let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
            // SAFETY: replaces one page inside the reservation, which is ours alone.
            unsafe {
                let at = base.add(i * PAGE_SIZE).as_ptr().cast();
                rustix::mm::mmap(at, PAGE_SIZE, prot, flags, &self.file, offset as u64)
            }?;
        }
        Ok(mapping)
    }

    /// Announces the address of the guest's memory for process_vm calls: in the calling process, in this mapping.
    pub(super) fn announce_frontend(&self) {
        let base = self.base.as_ptr().addr() as u64;
        self.wide_word(AT_FRONT_BASE).store(base, Ordering::Relaxed);
        self.word(AT_FRONT_PID).store(std::process::id(), Ordering::Release);
    }

    /// The frontend's announcement: process, and address of frame 0 there. Unchecked: the kernel checks both at each
    /// call.
    pub(super) fn frontend(&self) -> (u32, u64) {
        let pid = self.word(AT_FRONT_PID).load(Ordering::Acquire);
        let base = self.wide_word(AT_FRONT_BASE).load(Ordering::Relaxed);
        (pid, base.wrapping_add(self.layout.frames_at() as u64))
    }

    /// The process (upper half) that serves this guest, and the number of its users (lower half).
    pub(super) fn owner(&self) -> &AtomicU64 {
        self.wide_word(AT_OWNER)
    }

    fn port(&self, port: u32) -> Option<&AtomicU32> {
        (port < self.layout.ports).then(|| self.word(AT_PORT_STATES + port as usize * 4))
    }

    /// Opens a channel, for the frontend, that the backend can bind to.
    pub(super) fn open_port(&self) -> Result<u32, LoopbackError> {
        let change = |port: &u32| self.change_port(*port, PORT_CLOSED, PORT_UNBOUND);
        (0..self.layout.ports).find(change).ok_or(LoopbackError::Exhausted { what: "ports" })
    }

    /// Closes a channel, for the frontend; later events of the backend are lost.
    pub(super) fn close_port(&self, port: u32) {
        if let Some(state) = self.port(port) {
            state.store(PORT_CLOSED, Ordering::Release);
        }
    }

    /// Binds the backend to a channel; `false` if it is not open, or bound already.
    pub(super) fn bind_port(&self, port: u32) -> bool {
        self.change_port(port, PORT_UNBOUND, PORT_BOUND)
    }

    /// Unbinds the backend from a channel, which can be bound again.
    pub(super) fn unbind_port(&self, port: u32) {
        self.change_port(port, PORT_BOUND, PORT_UNBOUND);
    }

    fn change_port(&self, port: u32, from: u32, to: u32) -> bool {
        self.port(port).is_some_and(|state| {
            state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    /// Channels that a backend is bound to.
    pub fn bound_ports(&self) -> usize {
        let bound =
            |port: &u32| self.port(*port).is_some_and(|s| s.load(Ordering::Acquire) == PORT_BOUND);
        (0..self.layout.ports).filter(bound).count()
    }

    /// Does what the kernel and Xen do when a backend's process dies: its mappings and uses of grants end, and its
    /// channels can be bound again (blkif.md 3.9).
    pub(super) fn clear_leftovers(&self) {
        self.grants().clear_uses();
        (0..self.layout.ports).for_each(|port| self.unbind_port(port));
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; nothing that points into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.file_bytes()) };
    }
}

/// Contiguously mapped frames, until it is dropped.
pub(super) struct FrameMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value; see GuestMemory.
unsafe impl Send for FrameMapping {}

impl FrameMapping {
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// First byte of one of the frames, in the given order.
    pub(super) fn page(&self, page: usize) -> NonNull<u8> {
        assert!(page < self.len / PAGE_SIZE, "page {page} of {}", self.len / PAGE_SIZE);
        // SAFETY: inside the mapping.
        unsafe { self.base.add(page * PAGE_SIZE) }
    }
}

impl Drop for FrameMapping {
    fn drop(&mut self) {
        // SAFETY: the reservation that `map_frames` made, with all that was mapped over it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> GuestOptions {
        GuestOptions { frames: 8, grants: 16, ports: 2 }
    }

    fn guest() -> (Arc<OwnedFd>, GuestMemory) {
        let file = Arc::new(GuestMemory::create(DomId(3), options()).unwrap());
        let memory = GuestMemory::attach(file.clone()).unwrap();
        (file, memory)
    }

    #[test]
    fn two_mappings_show_the_same_frames() {
        let (file, a) = guest();
        let b = GuestMemory::attach(file).unwrap();
        assert_eq!(b.domid(), DomId(3));
        // SAFETY: the frame is mapped and nothing else accesses it.
        unsafe {
            a.frame(7).add(4095).write(0x5a);
            assert_eq!(b.frame(7).add(4095).read(), 0x5a);
        }
    }

    #[test]
    fn scattered_frames_appear_one_behind_the_other() {
        let (_file, memory) = guest();
        let mapping = memory.map_frames(&[5, 2, 7], true).unwrap();
        assert_eq!(mapping.len(), 3 * PAGE_SIZE);
        for (i, frame) in [5, 2, 7].into_iter().enumerate() {
            // SAFETY: both are mapped and nothing else accesses them.
            unsafe {
                memory.frame(frame).write(frame as u8);
                assert_eq!(mapping.base().add(i * PAGE_SIZE).read(), frame as u8);
            }
        }
    }

    #[test]
    fn a_file_that_is_not_a_guest_is_refused() {
        let plain = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(GuestMemory::attach(Arc::new(plain)).is_err());

        let (file, memory) = guest();
        for (at, value) in [
            (AT_MAGIC, 1),
            (AT_FRAMES, 0),
            (AT_FRAMES, 9),
            (AT_FRAMES, u32::MAX),
            (AT_GRANTS, u32::MAX),
            (AT_PORTS, MAX_PORTS + 1),
        ] {
            let before = memory.word(at).swap(value, Ordering::Relaxed);
            let outcome = GuestMemory::attach(file.clone());
            assert!(matches!(outcome, Err(LoopbackError::NotAGuest(_))), "{at}: {value}");
            memory.word(at).store(before, Ordering::Relaxed);
        }
        assert!(GuestMemory::attach(file).is_ok());
    }

    #[test]
    fn a_port_is_bound_once_until_it_is_left() {
        let (_file, memory) = guest();
        assert!(!memory.bind_port(0), "it is not open");
        let port = memory.open_port().unwrap();
        assert!(memory.bind_port(port));
        assert!(!memory.bind_port(port));
        memory.unbind_port(port);
        assert!(memory.bind_port(port));
        assert_eq!(memory.bound_ports(), 1);
        memory.close_port(port);
        memory.unbind_port(port);
        assert!(!memory.bind_port(port), "closed by its owner");
        assert!(!memory.bind_port(u32::MAX));
        memory.open_port().unwrap();
        memory.open_port().unwrap();
        assert!(matches!(memory.open_port(), Err(LoopbackError::Exhausted { what: "ports" })));
    }
}
