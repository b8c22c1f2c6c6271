//! The guest's side of grants and event channels, played by this domain for itself.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::time::Duration;

use ferrite_xen::hypervisor::{DomId, GrantRef, PAGE_SIZE};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The domain that grants, and that it grants to.
pub(crate) const OWN: DomId = DomId(0);

/// `IOCTL_GNTALLOC_ALLOC_GREF`.
const ALLOC_GREF: libc::Ioctl = 0x0018_4705;
/// `IOCTL_EVTCHN_BIND_UNBOUND_PORT`.
const BIND_UNBOUND: libc::Ioctl = 0x0004_4502;
/// `IOCTL_EVTCHN_NOTIFY`.
const NOTIFY: libc::Ioctl = 0x0004_4504;

const PAGES_MAX: usize = 32;

#[repr(C)]
struct AllocGref {
    domid: u16,
    /// 1: the other side may write.
    flags: u16,
    count: u32,
    index: u64,
    refs: [u32; PAGES_MAX],
}

/// Pages of this domain, granted.
pub(crate) struct Pages {
    _device: File,
    base: *mut u8,
    refs: Vec<GrantRef>,
}

impl Pages {
    pub(crate) fn new(count: usize, is_writable: bool) -> Pages {
        let device = OpenOptions::new().read(true).write(true).open("/dev/xen/gntalloc").unwrap();
        let mut request = AllocGref {
            domid: OWN.0,
            flags: u16::from(is_writable),
            count: count as u32,
            index: 0,
            refs: [0; PAGES_MAX],
        };
        assert!(count <= PAGES_MAX);
        // SAFETY: a structure of the kernel's layout with room for `count` references.
        let result = unsafe { libc::ioctl(device.as_raw_fd(), ALLOC_GREF, &raw mut request) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                count * PAGE_SIZE,
                protection,
                MapFlags::SHARED,
                &device,
                request.index,
            )
        };
        let refs = request.refs[..count].iter().map(|r| GrantRef(*r)).collect();
        Pages { _device: device, base: base.unwrap().cast(), refs }
    }

    pub(crate) fn refs(&self) -> &[GrantRef] {
        &self.refs
    }

    pub(crate) fn len(&self) -> usize {
        self.refs.len() * PAGE_SIZE
    }

    pub(crate) fn get(&self, at: usize) -> u8 {
        assert!(at < self.len());
        // SAFETY: within the mapping.
        unsafe { self.base.add(at).read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, byte: u8) {
        assert!(at < self.len());
        // SAFETY: within the mapping; no references into it exist.
        unsafe { self.base.add(at).write_volatile(byte) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, used through `self` only.
        unsafe { munmap(self.base.cast(), self.len()) }.unwrap();
    }
}

/// An event channel that waits for its other end.
pub(crate) struct Port {
    device: File,
    pub(crate) number: u32,
}

impl Port {
    pub(crate) fn new() -> Port {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/xen/evtchn")
            .unwrap();
        let mut remote = u32::from(OWN.0);
        // SAFETY: takes a domain's number.
        let port = unsafe { libc::ioctl(device.as_raw_fd(), BIND_UNBOUND, &raw mut remote) };
        assert!(port > 0, "{}", io::Error::last_os_error());
        Port { device, number: port as u32 }
    }

    pub(crate) fn notify(&self) {
        let mut port = self.number;
        // SAFETY: takes a port's number.
        let result = unsafe { libc::ioctl(self.device.as_raw_fd(), NOTIFY, &raw mut port) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }

    /// Takes an event and lets the next one through.
    pub(crate) fn take(&self) -> bool {
        let mut port = [0u8; 4];
        match (&self.device).read(&mut port) {
            Ok(4) => {
                (&self.device).write_all(&port).unwrap();
                u32::from_ne_bytes(port) == self.number
            }
            _ => false,
        }
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// Whether `fd` becomes readable.
pub(crate) fn is_readable(fd: impl AsFd, within: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}
