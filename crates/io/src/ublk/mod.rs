//! The kernel's driver for block devices whose requests a process serves (`/dev/ublkbN`, Linux 6.0 and newer).
//!
//! * `wire`: numbers and bytes of the interface, from `linux/ublk_cmd.h`.
//! * [`Control`]: makes, starts, stops and removes devices, by `/dev/ublk-control`.
//! * [`Channel`]: the part of the driver that the thread of a queue needs. [`Queue`] is that of `/dev/ublkcN`.
//!
//! A queue has `depth` tags. For each the thread says once that it waits for a request (*fetch*). The command ends when
//! there is one, whose description is then in memory that the driver shares. The answer (*commit*) is at the same time the
//! wish for the next request. Data are read from and written to the character device, at a place that tells queue, tag and
//! offset; the driver never touches memory of this process (`UBLK_F_USER_COPY`).

use std::io;
use std::os::fd::RawFd;

use crate::arena::{Arena, Span};

mod control;
mod queue;
mod wire;

pub use control::Control;
pub use queue::Queue;
pub use wire::{Description, Info, MAX_DEPTH, Operation, Parameters, State, USER_COPY, flag};

/// The end of a command on a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The tag.
    pub tag: u16,
    /// 0: there is a request. Otherwise `-errno`: no more come on this tag; `ENODEV` if the device is stopped.
    pub result: i32,
}

/// The part of the driver that the thread of a queue needs.
///
/// Nothing of it waits, except that copies may wait for memory.
pub trait Channel {
    /// Number of tags.
    fn depth(&self) -> u16;

    /// Waits for the first request of a tag.
    fn fetch(&mut self, tag: u16);

    /// Answers the request of a tag, and waits for the next: the bytes of a read or write, 0 for others, or `-errno`.
    fn commit(&mut self, tag: u16, result: i32);

    /// Hands all commands to the driver.
    ///
    /// # Errors
    /// The ring's.
    fn submit(&mut self) -> io::Result<()>;

    /// Adds the commands that have ended to `out`.
    fn reap(&mut self, out: &mut Vec<Ended>);

    /// A descriptor that is readable when a command has ended.
    fn fd(&self) -> RawFd;

    /// The description of the request of a tag. It is copied once.
    fn describe(&self, tag: u16) -> Description;

    /// Copies data of a write, from byte `at` of the request on, to `to`.
    ///
    /// # Errors
    /// The driver gives fewer.
    fn copy_in(&self, tag: u16, at: u64, arena: &Arena, to: Span) -> io::Result<()>;

    /// Copies data of a read, for byte `at` of the request on, from `from`.
    ///
    /// # Errors
    /// The driver takes fewer.
    fn copy_out(&self, tag: u16, at: u64, arena: &Arena, from: Span) -> io::Result<()>;

    /// Gives zeros as data of a read.
    ///
    /// # Errors
    /// As [`copy_out`](Self::copy_out).
    fn zero(&self, tag: u16, at: u64, bytes: u64) -> io::Result<()>;
}
