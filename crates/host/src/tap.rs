//! TAP devices: network interfaces of this host whose frames a process reads and writes (linux/if_tun.h).

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;

/// `_IOW('T', 202, int)`: which interface a descriptor belongs to.
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
/// `_IOW('T', 208, unsigned int)`: what the process does to frames that it reads.
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
const IFF_TAP: i16 = 0x0002;
/// No protocol before each frame.
const IFF_NO_PI: i16 = 0x1000;
const IFF_MULTI_QUEUE: i16 = 0x0100;
const IFF_VNET_HDR: i16 = 0x4000;
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;
/// `IFNAMSIZ` without the byte that ends a name.
const NAME_BYTES_MAX: usize = 15;

/// Bytes of `struct virtio_net_hdr`, which is before each frame.
pub const VNET_BYTES: usize = 10;

/// `struct ifreq` as TUNSETIFF reads it.
#[repr(C)]
struct Request {
    name: [u8; NAME_BYTES_MAX + 1],
    flags: i16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<Request>() == 40);

/// One queue of a TAP device. The kernel may leave TCP and UDP checksums out, and may hand over TCP over IPv4 and IPv6
/// in one piece. Reads and writes never wait.
#[derive(Debug)]
pub struct Tap {
    file: File,
}

impl Tap {
    /// Attaches to the interface of this name, or makes it. An interface that is made here goes with its last queue.
    ///
    /// # Errors
    /// The name is none, this host has no TAP devices, the process has no right to, or another process has the device.
    pub fn open(name: &str) -> io::Result<Tap> {
        let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_graphic() && !b"/%:".contains(&b));
        if !is_name {
            let why = "an interface's name has 1 to 15 letters and digits";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // A device with one queue refuses the flag of several, and the other way around.
        match Tap::attach(name, IFF_MULTI_QUEUE) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Tap::attach(name, 0),
            attached => attached,
        }
    }

    fn attach(name: &str, queues: i16) -> io::Result<Tap> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
        let file = options.open("/dev/net/tun")?;
        let flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | queues;
        let mut request = Request { name: [0; NAME_BYTES_MAX + 1], flags, rest: [0; 22] };
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        // SAFETY: the kernel reads and writes `struct ifreq`, 40 bytes, within the call.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let offloads = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
        // SAFETY: the argument is a number.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, offloads) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Tap { file })
    }

    /// Hands a frame to the kernel, after its header.
    ///
    /// # Errors
    /// The kernel's, such as `WouldBlock`.
    pub fn write(&self, header: &[u8; VNET_BYTES], frame: &[u8]) -> io::Result<()> {
        let parts = [IoSlice::new(header), IoSlice::new(frame)];
        rustix::io::writev(&self.file, &parts)?;
        Ok(())
    }

    /// Takes a frame from the kernel. Returns its bytes; those without room in `frame` are lost.
    ///
    /// # Errors
    /// The kernel's, such as `WouldBlock`.
    pub fn read(&self, header: &mut [u8; VNET_BYTES], frame: &mut [u8]) -> io::Result<usize> {
        let mut parts = [IoSliceMut::new(header), IoSliceMut::new(frame)];
        let read = rustix::io::readv(&self.file, &mut parts)?;
        read.checked_sub(VNET_BYTES).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
