//! `/dev/ublk-control`: devices are made, started, stopped and removed.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::fs::{Mode, OFlags, open};

use super::wire::{
    ADD, BEGIN_RECOVERY, DELETE, END_RECOVERY, GET_INFO, GET_PARAMETERS, INFO_BYTES, Info,
    PARAMETER_BYTES, Parameters, SET_PARAMETERS, START, STOP, control_bytes,
};

const PATH: &str = "/dev/ublk-control";

/// The driver's control device. Each command waits for its end, however long the driver takes.
pub struct Control {
    file: OwnedFd,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// A command could not be waited for: its end would be taken for that of the next one.
    lost_one: bool,
}

impl Control {
    /// Opens it.
    ///
    /// # Errors
    /// `NotFound`: the kernel's driver is not there or not loaded. `PermissionDenied`. There is no ring for commands of
    /// 128 bytes (Linux 5.19).
    pub fn open() -> io::Result<Control> {
        let file = open(PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let ring = IoUring::builder().dontfork().build(4)?;
        Ok(Control { file, ring, lost_one: false })
    }

    /// Makes a device. The driver chooses its number if that is `u32::MAX`, and leaves features out that it does not have.
    ///
    /// # Errors
    /// `AlreadyExists`: the number is taken. Others of the driver.
    pub fn add(&mut self, wanted: &Info) -> io::Result<Info> {
        let mut bytes = wanted.to_bytes();
        self.command(ADD, wanted.number, &mut bytes, 0)?;
        Ok(Info::of(&bytes))
    }

    /// The driver's description of a device.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn info(&mut self, device: u32) -> io::Result<Info> {
        let mut bytes = [0; INFO_BYTES];
        self.command(GET_INFO, device, &mut bytes, 0)?;
        Ok(Info::of(&bytes))
    }

    /// Says what a device is like, before it is started.
    ///
    /// # Errors
    /// The driver does not take them.
    pub fn set_parameters(&mut self, device: u32, parameters: &Parameters) -> io::Result<()> {
        self.command(SET_PARAMETERS, device, &mut parameters.to_bytes(), 0)
    }

    /// The size of a device in sectors of 512 bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn sectors(&mut self, device: u32) -> io::Result<u64> {
        let mut bytes = [0; PARAMETER_BYTES];
        bytes[..4].copy_from_slice(&(PARAMETER_BYTES as u32).to_ne_bytes());
        self.command(GET_PARAMETERS, device, &mut bytes, 0)?;
        Ok(Parameters::sectors_of(&bytes))
    }

    /// Starts a device, which appears as `/dev/ublkbN`. It waits until all tags wait for requests. `pid` is the process that
    /// serves it.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(&mut self, device: u32, pid: u32) -> io::Result<()> {
        self.command(START, device, &mut [], pid.into())
    }

    /// Stops a device: its block device goes, and all tags end.
    ///
    /// # Errors
    /// The driver's.
    pub fn stop(&mut self, device: u32) -> io::Result<()> {
        self.command(STOP, device, &mut [], 0)
    }

    /// Removes a device. It waits until no process has the character device open.
    ///
    /// # Errors
    /// The driver's.
    pub fn delete(&mut self, device: u32) -> io::Result<()> {
        self.command(DELETE, device, &mut [], 0)
    }

    /// Begins to serve a device whose server has gone. The character device may be opened then.
    ///
    /// # Errors
    /// `ResourceBusy`: the driver has not noticed yet that the server has gone. `InvalidInput`: it was begun before, and no
    /// tag waits for a request since then; what follows may follow.
    pub fn begin_recovery(&mut self, device: u32) -> io::Result<()> {
        self.command(BEGIN_RECOVERY, device, &mut [], 0)
    }

    /// Lets requests come again. It waits until all tags wait for requests. `pid` is the process that serves them.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_recovery(&mut self, device: u32, pid: u32) -> io::Result<()> {
        self.command(END_RECOVERY, device, &mut [], pid.into())
    }

    fn command(&mut self, op: u32, device: u32, buf: &mut [u8], value: u64) -> io::Result<()> {
        if self.lost_one {
            return Err(io::Error::other("an earlier command could not be waited for"));
        }
        let mut own: Box<[u8]> = Box::from(&*buf);
        let buffer = match own.len() {
            0 => (0, 0),
            len => (own.as_mut_ptr() as u64, len as u16),
        };
        let fd = Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, op).cmd(control_bytes(device, buffer, value));
        // SAFETY: the entry names the file, which lives as long as the ring, and a buffer of this function's own, which is
        // read again after the command's end only, and never freed if that end is not seen.
        unsafe { self.ring.submission().push(&entry.build()) }
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let result = loop {
            match self.ring.submit_and_wait(1) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => {
                    // The kernel may have the buffer still.
                    Box::leak(own);
                    self.lost_one = true;
                    return Err(e);
                }
                _ => {}
            }
            if let Some(ended) = self.ring.completion().next() {
                break ended.result();
            }
        };
        buf.copy_from_slice(&own);
        match result {
            error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
            _ => Ok(()),
        }
    }
}
