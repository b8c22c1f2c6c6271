//! The processors of the whole host, of which this domain sees its own share only
//! (processes.md 9).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::uapi;
use super::{HYPERCALL, PRIVCMD};
use crate::hypervisor::{DomId, HostTimes};

/// Xen's `NR_CPUS` at most.
const CPUS_MAX: usize = 4095;
/// Where in the buffer the processors' times begin, behind the request.
const TIMES: usize = 256;
const BUFFER_BYTES: usize = (TIMES + CPUS_MAX * 8).next_multiple_of(4096);

/// The way to ask Xen for them. It takes a control domain's rights.
#[derive(Debug)]
pub struct HostProcessors {
    privcmd: OwnedFd,
    buffer: Buffer,
    version: u32,
}

/// Memory that Xen can read and write at any time of a hypercall: no ordinary memory is.
#[derive(Debug)]
struct Buffer(NonNull<u8>);

// SAFETY: the mapping belongs to this object alone.
unsafe impl Send for Buffer {}

impl Buffer {
    fn map(device: &File) -> io::Result<Buffer> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap(ptr::null_mut(), BUFFER_BYTES, prot, MapFlags::SHARED, device, 0) }?;
        NonNull::new(base.cast()).map(Buffer).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// The address of a `T` at `offset`.
    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= BUFFER_BYTES && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: that is inside the mapping.
        unsafe { self.0.as_ptr().add(offset) }.cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: our own mapping; nothing of it is borrowed.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BUFFER_BYTES) };
    }
}

impl HostProcessors {
    /// Opens it, and finds the version of the interface that the running Xen has.
    ///
    /// # Errors
    /// A device is missing, this is no control domain, or Xen has none of the versions known here.
    pub fn open() -> io::Result<HostProcessors> {
        HostProcessors::open_at(Path::new("/"))
    }

    pub(super) fn open_at(root: &Path) -> io::Result<HostProcessors> {
        let open = |path: &str| {
            let opened =
                rustix::fs::open(root.join(path), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
            opened.map_err(|e| {
                let e = io::Error::from(e);
                io::Error::new(e.kind(), format!("/{path}: {e} (modprobe xen-privcmd)"))
            })
        };
        let privcmd = open(PRIVCMD)?;
        let buffer = Buffer::map(&File::from(open(HYPERCALL)?))?;
        let mut found = HostProcessors { privcmd, buffer, version: 0 };
        for version in uapi::SYSCTL_VERSIONS {
            found.version = version;
            match found.ask() {
                // Another version.
                Err(e) if e.raw_os_error() == Some(libc::EACCES) => {}
                asked => return asked.map(|_| found),
            }
        }
        let text = "this Xen has a version of the interface that is not known here";
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Asks now.
    ///
    /// # Errors
    /// Xen's.
    pub fn ask(&mut self) -> io::Result<HostTimes> {
        let mut sysctl = uapi::Sysctl::new(uapi::SYSCTL_PHYSINFO, self.version);
        self.call(&mut sysctl)?;
        let cpus = sysctl.words[uapi::PHYSINFO_CPUS];
        let mut sysctl = uapi::Sysctl::new(uapi::SYSCTL_GETCPUINFO, self.version);
        let times = self.buffer.at::<u64>(TIMES).addr() as u64;
        sysctl.words[uapi::CPUINFO_MAX] = CPUS_MAX as u32;
        sysctl.words[uapi::CPUINFO_TO] = times as u32;
        sysctl.words[uapi::CPUINFO_TO + 1] = (times >> 32) as u32;
        self.call(&mut sysctl)?;
        let told = (sysctl.words[uapi::CPUINFO_TOLD] as usize).min(CPUS_MAX);
        // SAFETY: each is inside the buffer, which only Xen writes to, during the call.
        let idle =
            (0..told).map(|i| unsafe { self.buffer.at::<u64>(TIMES + i * 8).read_volatile() });
        Ok(HostTimes { cpus, idle_ns: idle.fold(0, u64::wrapping_add) })
    }

    /// The flags of a domain. `None`: there is no such domain.
    pub(super) fn domain_flags(&mut self, domid: DomId) -> io::Result<Option<u32>> {
        let mut sysctl = uapi::Sysctl::new(uapi::SYSCTL_GETDOMAININFOLIST, self.version);
        let to = self.buffer.at::<u64>(TIMES).addr() as u64;
        sysctl.words[uapi::DOMAINS_FIRST] = domid.0.into();
        sysctl.words[uapi::DOMAINS_MAX] = 1;
        sysctl.words[uapi::DOMAINS_TO] = to as u32;
        sysctl.words[uapi::DOMAINS_TO + 1] = (to >> 32) as u32;
        self.call(&mut sysctl)?;
        if sysctl.words[uapi::DOMAINS_TOLD] == 0 {
            return Ok(None);
        }
        // SAFETY: both are inside the buffer, which only Xen writes to, during the call.
        let [id, flags] = [uapi::DOMAIN_ID, uapi::DOMAIN_FLAGS]
            .map(|i| unsafe { self.buffer.at::<u32>(TIMES + i * 4).read_volatile() });
        // The next domain is told where there is none of this number.
        Ok((id & 0xFFFF == u32::from(domid.0)).then_some(flags))
    }

    /// One request, and what Xen has written over it.
    fn call(&mut self, sysctl: &mut uapi::Sysctl) -> io::Result<()> {
        let at = self.buffer.at::<uapi::Sysctl>(0);
        // SAFETY: inside the buffer and aligned; no other code has it.
        unsafe { at.write_volatile(*sysctl) };
        let mut call =
            uapi::Hypercall { op: uapi::HYPERVISOR_SYSCTL, args: [at.addr() as u64, 0, 0, 0, 0] };
        // SAFETY: a structure of the kernel's layout. Xen reads the request in the buffer, and writes
        // to it and to the places behind it, of which it was told how many there is room for. Its answer
        // about one domain is far shorter than the room for all processors' times.
        unsafe { uapi::ioctl(self.privcmd.as_fd(), uapi::HYPERCALL, &raw mut call) }?;
        // SAFETY: as for the write.
        *sysctl = unsafe { at.read_volatile() };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_devices_the_error_names_the_one_that_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let error = || HostProcessors::open_at(root.path()).unwrap_err().to_string();
        assert!(error().contains("/dev/xen/privcmd"));
        std::fs::create_dir_all(root.path().join("dev/xen")).unwrap();
        std::fs::write(root.path().join(PRIVCMD), "").unwrap();
        assert!(error().contains("/dev/xen/hypercall"));
        // Plain files stand for both: they take no hypercall.
        std::fs::write(root.path().join(HYPERCALL), vec![0; BUFFER_BYTES]).unwrap();
        let e = HostProcessors::open_at(root.path()).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENOTTY));
    }
}
