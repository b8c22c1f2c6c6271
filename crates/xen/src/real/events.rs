//! One event channel through a descriptor of /dev/xen/evtchn of its own (blkif.md 5).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ferrite_host::names;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::kept::Device;
use super::uapi;
use crate::hypervisor::DomId;

/// Opens the device.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK;
    Ok(names::open(path, flags, Mode::empty())?)
}

/// From now on, and for good, `device` binds channels to `domid` only. The kernel refuses domain
/// 0 (EINVAL); old kernels know nothing of it (ENOSYS). It does it once (EACCES).
pub(super) fn restrict(device: &impl AsFd, domid: DomId) -> io::Result<()> {
    let mut request = uapi::RestrictDomid { domid: domid.0 };
    // SAFETY: a structure of the kernel's layout.
    unsafe { uapi::ioctl(device.as_fd(), uapi::RESTRICT_DOMID, &raw mut request) }.map(drop)
}

/// A bound event channel. Dropping it closes the channel: the guest's end becomes unbound, and
/// can be bound again (blkif.md 3.9).
pub(super) struct EventChannel {
    device: Device,
    /// Ours.
    port: u32,
    /// An event was taken, and the port is masked until it is written back.
    taken: bool,
}

impl EventChannel {
    /// Binds to the port that `domid` offers. The new channel has an event pending at once.
    pub(super) fn bind(device: Device, domid: DomId, remote_port: u32) -> io::Result<Self> {
        let mut request = uapi::BindInterdomain { remote_domain: u32::from(domid.0), remote_port };
        // SAFETY: a structure of the kernel's layout.
        let port =
            unsafe { uapi::ioctl(device.as_fd(), uapi::BIND_INTERDOMAIN, &raw mut request) }?;
        Ok(EventChannel { device, port: port as u32, taken: false })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// See [`Link::take_event`](crate::hypervisor::Link::take_event).
    pub(super) fn take(&mut self) -> io::Result<bool> {
        // One port is bound, and it is masked once it is in the kernel's ring: one entry at most.
        let mut ports = [0u8; 64];
        let got = loop {
            match rustix::io::read(&self.device, &mut ports) {
                Ok(n) => break n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::FBIG) => {
                    self.reset()?;
                    self.taken = true;
                    return Ok(true);
                }
                Err(e) => return Err(e.into()),
            }
        };
        let ours = self.port.to_ne_bytes();
        let is_ours = ports[..got].chunks_exact(4).any(|p| p == ours);
        self.taken |= is_ours;
        Ok(is_ours)
    }

    /// The kernel's ring of ports overflowed. Its content is lost and the port is masked, as if its
    /// event had been taken.
    fn reset(&self) -> io::Result<()> {
        // SAFETY: takes no argument.
        unsafe { uapi::ioctl(self.device.as_fd(), uapi::RESET, std::ptr::null_mut::<u8>()) }
            .map(drop)
    }

    /// See [`Link::event_taken`](crate::hypervisor::Link::event_taken). The kernel gives out no
    /// port but the one that is bound.
    pub(super) fn taken(&mut self) {
        self.taken = true;
    }

    /// See [`Link::rearm_word`](crate::hypervisor::Link::rearm_word).
    pub(super) fn rearm_word(&self) -> Option<u32> {
        self.taken.then_some(self.port)
    }

    /// See [`Link::rearmed`](crate::hypervisor::Link::rearmed).
    pub(super) fn rearmed(&mut self) {
        self.taken = false;
    }

    /// See [`Link::rearm`](crate::hypervisor::Link::rearm).
    pub(super) fn rearm(&mut self) -> io::Result<()> {
        if !self.taken {
            return Ok(());
        }
        loop {
            match rustix::io::write(&self.device, &self.port.to_ne_bytes()) {
                Ok(_) => {
                    self.taken = false;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Undoes the binding, and forgets what it has brought: the port may be the next channel's.
    fn unbind(&self) -> io::Result<()> {
        let mut request = uapi::Notify { port: self.port };
        // SAFETY: a structure of the kernel's layout, which is that of a notification.
        unsafe { uapi::ioctl(self.device.as_fd(), uapi::UNBIND, &raw mut request) }?;
        self.reset()
    }

    /// See [`Link::notify`](crate::hypervisor::Link::notify). Sending to a guest that is gone is
    /// no error.
    pub(super) fn notify(&self) -> io::Result<()> {
        let mut request = uapi::Notify { port: self.port };
        // SAFETY: a structure of the kernel's layout.
        unsafe { uapi::ioctl(self.device.as_fd(), uapi::NOTIFY, &raw mut request) }.map(drop)
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        if let Err(e) = self.unbind() {
            tracing::debug!("cannot unbind event channel {}: {e}; it is closed", self.port);
            self.device.taint();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A channel whose device is a socket: reads and writes of ports work as with the kernel's.
    fn channel(port: u32) -> (EventChannel, UnixStream) {
        let (ours, kernel) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        kernel.set_nonblocking(true).unwrap();
        (EventChannel { device: Device::once(ours.into()), port, taken: false }, kernel)
    }

    #[test]
    fn an_event_is_taken_once_and_rearmed_once() {
        let (mut channel, mut kernel) = channel(42);
        let mut back = [0u8; 8];
        assert!(!channel.take().unwrap());
        channel.rearm().unwrap();
        assert!(kernel.read(&mut back).is_err(), "nothing taken, nothing written back");

        kernel.write_all(&42u32.to_ne_bytes()).unwrap();
        assert!(channel.take().unwrap());
        assert!(!channel.take().unwrap());
        channel.rearm().unwrap();
        channel.rearm().unwrap();
        assert_eq!(kernel.read(&mut back).unwrap(), 4, "written back exactly once");
        assert_eq!(back[..4], 42u32.to_ne_bytes());
    }

    #[test]
    fn another_port_is_not_our_event() {
        let (mut channel, mut kernel) = channel(42);
        kernel.write_all(&43u32.to_ne_bytes()).unwrap();
        assert!(!channel.take().unwrap());
        channel.rearm().unwrap();
        assert!(kernel.read(&mut [0u8; 8]).is_err());
    }
}
