//! Guests' pages through /dev/xen/gntdev: rings are mapped, data is copied or mapped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::names;
use ferrite_io::arena::Arena;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::copies::Copies;
use super::kept::Device;
use super::uapi;
use crate::hypervisor::{
    CopySegment, Direction, DomId, GNTST_OKAY, GrantRef, PAGE_SIZE, RingMemory, STATUS_UNTOUCHED,
};
use crate::mover::{BATCH, Grants, Mapping};

const _: () = assert!(BATCH <= uapi::MAP_PAGES_MAX);

/// The step that failed while mapping, which decides whose fault it is.
#[derive(Debug)]
pub(super) enum MapError {
    /// The kernel had no room for the request.
    Reserve(io::Error),
    /// The hypervisor refused a page, or had no room; the kernel does not tell which.
    Map(io::Error),
}

/// The device that all of a queue's mappings and copies go through.
pub(super) struct GrantDevice {
    device: Device,
    /// The kernel did not let go of something.
    has_rests: AtomicBool,
}

impl GrantDevice {
    pub(super) fn new(device: Device) -> Arc<GrantDevice> {
        Arc::new(GrantDevice { device, has_rests: AtomicBool::new(false) })
    }
}

impl AsFd for GrantDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Drop for GrantDevice {
    fn drop(&mut self) {
        if self.has_rests.load(Ordering::Relaxed) {
            self.device.taint();
        }
    }
}

/// Mapped pages of a guest, and the descriptor that they were mapped by.
pub(super) struct Granted {
    device: Arc<GrantDevice>,
    base: NonNull<u8>,
    pages: usize,
    /// The kernel's name for the mapping.
    index: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread, and nothing here reads or writes
// through `base`.
unsafe impl Send for Granted {}

impl Granted {
    /// Maps `refs` of `domid`, in this order, into contiguous memory.
    pub(super) fn map(
        device: &Arc<GrantDevice>,
        domid: DomId,
        refs: &[GrantRef],
        writable: bool,
    ) -> Result<Self, MapError> {
        let pages = refs.len();
        assert!((1..=uapi::MAP_PAGES_MAX).contains(&pages), "1 to 256 pages are mapped at once");
        let none = uapi::MapRef::default();
        let refs_none = [none; uapi::MAP_PAGES_MAX];
        let mut request =
            uapi::MapGrantRef { count: pages as u32, pad: 0, index: 0, refs: refs_none };
        for (to, from) in request.refs.iter_mut().zip(refs) {
            *to = uapi::MapRef { domid: u32::from(domid.0), gref: from.0 };
        }
        // SAFETY: a structure of the kernel's layout with `count` references behind its head.
        unsafe { uapi::ioctl(device.as_fd(), uapi::MAP_GRANT_REF, &raw mut request) }
            .map_err(MapError::Reserve)?;

        // The kernel maps the grants for reading only where the mapping is for reading only.
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (protection, len) = (ProtFlags::READ | write, pages * PAGE_SIZE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let mapped = unsafe {
            mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, &**device, request.index)
        };
        let base = match mapped {
            // A successful mmap without MAP_FIXED is never at address 0.
            Ok(address) => NonNull::new(address.cast::<u8>()).ok_or(rustix::io::Errno::FAULT),
            Err(e) => Err(e),
        };
        match base {
            Ok(base) => Ok(Granted { device: device.clone(), base, pages, index: request.index }),
            Err(e) => {
                unreserve(device, request.index, pages);
                Err(MapError::Map(e.into()))
            }
        }
    }

    /// The pages, as a ring; they must have been mapped writable.
    pub(super) fn ring(&self) -> RingMemory {
        // SAFETY: mmap gives whole pages, and `drop` alone unmaps them; the link owns `self`.
        unsafe { RingMemory::new(self.base, self.pages * PAGE_SIZE) }
    }
}

// SAFETY: the device maps whole pages, one behind the other, until this is dropped.
unsafe impl Mapping for Granted {
    fn page(&self, page: usize) -> NonNull<u8> {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping.
        unsafe { self.base.add(page * PAGE_SIZE) }
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this address and length, and unmapped nowhere else. The memory
        // is used only while its owner lives (`Link::ring`, `Mapping::page`).
        if let Err(e) = unsafe { munmap(self.base.as_ptr().cast(), self.pages * PAGE_SIZE) } {
            tracing::error!("cannot unmap {} pages of a guest: {e}", self.pages);
            self.device.has_rests.store(true, Ordering::Relaxed);
        }
        // After munmap: while it is mapped the kernel refuses (blkif.md 4.1).
        unreserve(&self.device, self.index, self.pages);
    }
}

/// One guest's pages, for its link's mover.
pub(super) struct DomainGrants {
    device: Arc<GrantDevice>,
    domid: DomId,
    copies: Copies,
}

impl DomainGrants {
    pub(super) fn new(device: Arc<GrantDevice>, domid: DomId) -> Self {
        DomainGrants { device, domid, copies: Copies::new(domid) }
    }
}

impl Grants for DomainGrants {
    type Mapping = Granted;

    /// In the kernel's batches.
    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        let device = &*self.device;
        let mut call = |entries: &mut [uapi::CopyEntry]| copy_entries(device, entries);
        self.copies.copy(&mut call, arena, direction, segments)
    }

    fn map(&mut self, grefs: &[GrantRef], writable: bool) -> io::Result<Granted> {
        Granted::map(&self.device, self.domid, grefs, writable).map_err(|e| match e {
            MapError::Reserve(e) | MapError::Map(e) => e,
        })
    }
}

fn unreserve(device: &GrantDevice, index: u64, pages: usize) {
    let mut request = uapi::UnmapGrantRef { index, count: pages as u32, pad: 0 };
    // SAFETY: a structure of the kernel's layout.
    let result = unsafe { uapi::ioctl(device.as_fd(), uapi::UNMAP_GRANT_REF, &raw mut request) };
    if let Err(e) = result {
        // Closing the device releases it as well, and has to follow.
        device.has_rests.store(true, Ordering::Relaxed);
        tracing::debug!("cannot release {pages} grants: {e}");
    }
}

/// Opens the device; there is one descriptor a queue, since the kernel locks each.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(names::open(path, OFlags::RDWR, Mode::empty())?)
}

/// Whether the kernel can copy grants, found by copying none.
pub(super) fn can_copy(device: &impl AsFd) -> io::Result<()> {
    copy_entries(device, &mut [])
}

/// Copies within a page that this domain has granted to itself.
pub(super) fn copy_within(device: &impl AsFd, own: u32) -> io::Result<()> {
    let side = |offset| uapi::grant_side(own, offset, uapi::DOMID_SELF);
    let flags = uapi::COPY_SOURCE_GREF | uapi::COPY_DEST_GREF;
    let (source, dest, status) = (side(0), side(2048), STATUS_UNTOUCHED);
    let mut entries = [uapi::CopyEntry { source, dest, len: 512, flags, status, pad: 0 }];
    copy_entries(device, &mut entries)?;
    match entries[0].status {
        GNTST_OKAY => Ok(()),
        status => Err(io::Error::other(format!("the hypervisor's status is {status}"))),
    }
}

pub(super) fn copy_entries(device: &impl AsFd, entries: &mut [uapi::CopyEntry]) -> io::Result<()> {
    let count = entries.len() as u32;
    let mut request = uapi::GrantCopy { count, pad: 0, entries: entries.as_mut_ptr() };
    // SAFETY: `count` entries of the kernel's layout. Their local sides are ranges of an
    // arena (`copies.rs`), bounds-checked, that outlives the call and that nothing holds references into.
    unsafe { uapi::ioctl(device.as_fd(), uapi::GRANT_COPY, &raw mut request) }.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use tracing::field::Field;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    #[test]
    fn a_device_that_cannot_copy_says_so() {
        let (not_gntdev, _writer) = std::io::pipe().unwrap();
        let error = can_copy(&OwnedFd::from(not_gntdev)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }

    /// Says how often the kernel refused to let go of grants.
    #[derive(Clone, Default)]
    struct Refused(Arc<AtomicU32>);

    impl Subscriber for Refused {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut text = |_: &Field, value: &dyn std::fmt::Debug| {
                let refused = format!("{value:?}").contains("cannot release 2 grants");
                self.0.fetch_add(u32::from(refused), Ordering::SeqCst);
            };
            event.record(&mut text);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// Without Xen, the kernel's refusal shows that it was asked: a grant that is unmapped and not let
    /// go of keeps a dead domain's pages (threats.md T7).
    #[test]
    fn pages_that_are_unmapped_are_let_go_of() {
        let (not_gntdev, _writer) = std::io::pipe().unwrap();
        let (len, none) = (2 * PAGE_SIZE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ, none) };
        let base = NonNull::new(base.unwrap().cast()).unwrap();
        let device = GrantDevice::new(Device::once(not_gntdev.into()));
        let refused = Refused::default();
        tracing::subscriber::with_default(refused.clone(), || {
            drop(Granted { device, base, pages: 2, index: 0 });
        });
        assert_eq!(refused.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_device_that_cannot_map_undoes_nothing() {
        let (not_gntdev, _writer) = std::io::pipe().unwrap();
        let device = GrantDevice::new(Device::once(not_gntdev.into()));
        let mapped = Granted::map(&device, DomId(1), &[GrantRef(8)], true);
        assert!(matches!(mapped.err(), Some(MapError::Reserve(_))));
    }
}
