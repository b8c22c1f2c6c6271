//! The kernel's interface: ioctl numbers and structures of /dev/xen/gntdev, gntalloc, evtchn
//! and privcmd (blkif.md 4.1, 4.6 and 5; Linux include/uapi/xen/{gntdev,gntalloc,evtchn,privcmd}.h),
//! and Xen's own for what goes by the last of these (processes.md 9).

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Pages of the largest ring: order 4.
pub(super) const RING_PAGES_MAX: usize = 16;
/// Pages of the largest map request that is made here; the kernel takes 65,536.
pub(super) const MAP_PAGES_MAX: usize = 256;

/// Pages that are made at once, here.
pub(super) const ALLOC_PAGES_MAX: usize = 64;

/// As the kernel's `_IOC(_IOC_NONE, device, number, size)`, the only kind these devices use.
const fn request(device: u8, number: u32, size: usize) -> libc::Ioctl {
    ((size as u32) << 16 | (device as u32) << 8 | number) as libc::Ioctl
}

/// One page to map.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MapRef {
    pub(super) domid: u32,
    pub(super) gref: u32,
}

/// The kernel declares one reference and reads `count` of them.
#[repr(C)]
pub(super) struct MapGrantRef {
    pub(super) count: u32,
    pub(super) pad: u32,
    /// Out: the offset to give mmap(2).
    pub(super) index: u64,
    pub(super) refs: [MapRef; MAP_PAGES_MAX],
}

#[repr(C)]
pub(super) struct UnmapGrantRef {
    pub(super) index: u64,
    pub(super) count: u32,
    pub(super) pad: u32,
}

/// One side of a copy: a local address, or [`grant_side`].
pub(super) type CopySide = u64;

/// The side of a copy that is a grant: `{ref u32, offset u16, domid u16}` in memory order.
pub(super) fn grant_side(gref: u32, offset: u16, domid: u16) -> CopySide {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&gref.to_ne_bytes());
    bytes[4..6].copy_from_slice(&offset.to_ne_bytes());
    bytes[6..].copy_from_slice(&domid.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

/// The source is a grant.
pub(super) const COPY_SOURCE_GREF: u16 = 1;
/// The destination is a grant.
pub(super) const COPY_DEST_GREF: u16 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CopyEntry {
    pub(super) source: CopySide,
    pub(super) dest: CopySide,
    pub(super) len: u16,
    pub(super) flags: u16,
    pub(super) status: i16,
    pub(super) pad: u16,
}

#[repr(C)]
pub(super) struct GrantCopy {
    pub(super) count: u32,
    pub(super) pad: u32,
    pub(super) entries: *mut CopyEntry,
}

/// This domain, whatever its number.
pub(super) const DOMID_SELF: u16 = 0x7FF0;

/// The kernel declares one reference and writes `count` of them.
#[repr(C)]
pub(super) struct AllocGref {
    pub(super) domid: u16,
    pub(super) flags: u16,
    pub(super) count: u32,
    /// Out: the offset to give mmap(2).
    pub(super) index: u64,
    /// Out.
    pub(super) refs: [u32; ALLOC_PAGES_MAX],
}

/// The other side may write.
pub(super) const ALLOC_WRITABLE: u16 = 1;

#[repr(C)]
pub(super) struct DeallocGref {
    pub(super) index: u64,
    pub(super) count: u32,
    pub(super) pad: u32,
}

#[repr(C)]
pub(super) struct BindInterdomain {
    pub(super) remote_domain: u32,
    pub(super) remote_port: u32,
}

/// Of a notification, and of the end of a binding.
#[repr(C)]
pub(super) struct Notify {
    pub(super) port: u32,
}

#[repr(C)]
pub(super) struct RestrictDomid {
    pub(super) domid: u16,
}

/// A hypercall, by /dev/xen/privcmd.
#[repr(C)]
pub(super) struct Hypercall {
    pub(super) op: u64,
    pub(super) args: [u64; 5],
}

pub(super) const HYPERVISOR_SYSCTL: u64 = 35;
/// Versions of Xen's `sysctl` in which the requests made here look the same, of Xen 4.21 back to 4.13.
pub(super) const SYSCTL_VERSIONS: [u32; 4] = [0x16, 0x15, 0x14, 0x13];
pub(super) const SYSCTL_PHYSINFO: u32 = 3;
pub(super) const SYSCTL_GETCPUINFO: u32 = 8;
/// Of `words`: the processors that are online.
pub(super) const PHYSINFO_CPUS: usize = 2;
/// In: room for so many times.
pub(super) const CPUINFO_MAX: usize = 0;
/// In, two words: where to.
pub(super) const CPUINFO_TO: usize = 2;
/// Out: so many were written.
pub(super) const CPUINFO_TOLD: usize = 4;

pub(super) const SYSCTL_GETDOMAININFOLIST: u32 = 6;
/// In: the first domain that is told.
pub(super) const DOMAINS_FIRST: usize = 0;
/// In: how many are told at most.
pub(super) const DOMAINS_MAX: usize = 1;
/// In, two words: where to.
pub(super) const DOMAINS_TO: usize = 2;
/// Out: so many were written.
pub(super) const DOMAINS_TOLD: usize = 4;
/// Of what is told of a domain, as words: its number, in the lower half.
pub(super) const DOMAIN_ID: usize = 0;
/// Its flags, in the next word.
pub(super) const DOMAIN_FLAGS: usize = 1;
/// The domain has shut down. The next two are the reason.
pub(super) const DOMAIN_SHUTDOWN: u32 = 1 << 2;
pub(super) const SHUTDOWN_SHIFT: u32 = 16;
pub(super) const SHUTDOWN_MASK: u32 = 255;
pub(super) const SHUTDOWN_SUSPEND: u32 = 2;

/// A request to Xen itself, and its answer.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Sysctl {
    cmd: u32,
    version: u32,
    /// The union of all requests, as words.
    pub(super) words: [u32; 32],
}

impl Sysctl {
    pub(super) fn new(cmd: u32, version: u32) -> Sysctl {
        Sysctl { cmd, version, words: [0; 32] }
    }
}

const MAP_GRANT_REF_BYTES: usize = offset_of!(MapGrantRef, refs) + size_of::<MapRef>();

pub(super) const MAP_GRANT_REF: libc::Ioctl = request(b'G', 0, MAP_GRANT_REF_BYTES);
pub(super) const UNMAP_GRANT_REF: libc::Ioctl = request(b'G', 1, size_of::<UnmapGrantRef>());
pub(super) const GRANT_COPY: libc::Ioctl = request(b'G', 8, size_of::<GrantCopy>());
/// The head with one reference.
const ALLOC_GREF_BYTES: usize =
    (offset_of!(AllocGref, refs) + size_of::<u32>()).next_multiple_of(8);
pub(super) const ALLOC_GREF: libc::Ioctl = request(b'G', 5, ALLOC_GREF_BYTES);
pub(super) const DEALLOC_GREF: libc::Ioctl = request(b'G', 6, size_of::<DeallocGref>());
pub(super) const BIND_INTERDOMAIN: libc::Ioctl = request(b'E', 1, size_of::<BindInterdomain>());
pub(super) const UNBIND: libc::Ioctl = request(b'E', 3, size_of::<Notify>());
pub(super) const NOTIFY: libc::Ioctl = request(b'E', 4, size_of::<Notify>());
pub(super) const RESET: libc::Ioctl = request(b'E', 5, 0);
pub(super) const RESTRICT_DOMID: libc::Ioctl = request(b'E', 6, size_of::<RestrictDomid>());
pub(super) const HYPERCALL: libc::Ioctl = request(b'P', 0, size_of::<Hypercall>());

// Against the numbers of the kernel's own headers, compiled by a C compiler.
const _: () = {
    assert!(MAP_GRANT_REF == 0x0018_4700);
    assert!(UNMAP_GRANT_REF == 0x0010_4701);
    assert!(GRANT_COPY == 0x0010_4708);
    assert!(ALLOC_GREF == 0x0018_4705);
    assert!(DEALLOC_GREF == 0x0010_4706);
    assert!(BIND_INTERDOMAIN == 0x0008_4501);
    assert!(UNBIND == 0x0004_4503);
    assert!(NOTIFY == 0x0004_4504);
    assert!(RESET == 0x4505);
    assert!(RESTRICT_DOMID == 0x0002_4506);
    assert!(HYPERCALL == 0x0030_5000);

    assert!(offset_of!(MapGrantRef, index) == 8 && offset_of!(MapGrantRef, refs) == 16);
    assert!(size_of::<CopyEntry>() == 24);
    assert!(offset_of!(CopyEntry, dest) == 8 && offset_of!(CopyEntry, len) == 16);
    assert!(offset_of!(CopyEntry, flags) == 18 && offset_of!(CopyEntry, status) == 20);
    assert!(offset_of!(GrantCopy, entries) == 8);
    assert!(size_of::<Sysctl>() == 136 && offset_of!(Sysctl, words) == 8);
};

/// ioctl(2), again if a signal came.
///
/// # Safety
/// `argument` is what `request` takes: the kernel may read and write all that it refers to.
pub(super) unsafe fn ioctl<T>(
    fd: BorrowedFd<'_>,
    request: libc::Ioctl,
    argument: *mut T,
) -> io::Result<i32> {
    loop {
        // SAFETY: the descriptor is open as long as it is borrowed; the rest is the caller's.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) };
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
