//! From an operation to an entry of the submission queue.

use std::os::fd::AsRawFd;

use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{opcode, squeue};

use super::{Uring, timespec};
use crate::arena::Span;
use crate::engine::{FileId, MAX_VECTORED, Op, Transfer};
use crate::vector::{Message, Vector};

/// Builds the entry for a file that is fixed or not, which are different types.
macro_rules! on_file {
    ($file:expr, |$fd:ident| $op:expr) => {
        match $file {
            Target::Fixed($fd) => $op.build(),
            Target::Plain($fd) => $op.build(),
        }
    };
}

/// The vectors of vectored transfers: [`MAX_VECTORED`] for each place in the submission queue,
/// made by the first one.
#[derive(Default)]
pub(super) struct Vectors(Box<[[Vector; MAX_VECTORED]]>);

/// The message headers of what is sent, likewise.
#[derive(Default)]
pub(super) struct Messages(Box<[Message]>);

enum Target {
    Fixed(Fixed),
    Plain(Fd),
}

impl Uring {
    fn target(&self, file: FileId) -> Result<Target, i32> {
        let f = self.files.get(file.0 as usize).ok_or(libc::EBADF)?;
        let plain = || Target::Plain(Fd(f.fd.as_raw_fd()));
        Ok(if f.fixed { Target::Fixed(Fixed(file.0)) } else { plain() })
    }

    /// The registered buffer that the span is in, if it is in one.
    pub(super) fn buffer_index(&self, buf: Span) -> Option<u16> {
        let pinned = self.pinned?;
        let inside = buf.offset() >= pinned.offset()
            && buf.offset() + buf.len() <= pinned.offset() + pinned.len();
        (inside && !buf.is_empty()).then_some(0)
    }

    /// An offset that the kernel takes for one: -1 would be the file's own position.
    fn offset(offset: u64) -> Result<u64, i32> {
        i64::try_from(offset).map(|_| offset).map_err(|_| libc::EINVAL)
    }

    /// The entry for an operation, or the errno of what is wrong with it.
    pub(super) fn entry(&mut self, op: Op) -> Result<squeue::Entry, i32> {
        Ok(match op {
            Op::Read { file, offset, buf } => {
                let (file, at) = (self.target(file)?, Self::offset(offset)?);
                let ptr = self.arena.checked_ptr(buf).ok_or(libc::EFAULT)?.as_ptr();
                let len = buf.len() as u32;
                match self.buffer_index(buf) {
                    Some(i) => {
                        on_file!(file, |fd| opcode::ReadFixed::new(fd, ptr, len, i).offset(at))
                    }
                    None => on_file!(file, |fd| opcode::Read::new(fd, ptr, len).offset(at)),
                }
            }
            Op::Write { file, offset, buf } => {
                let (file, at) = (self.target(file)?, Self::offset(offset)?);
                let ptr = self.arena.checked_ptr(buf).ok_or(libc::EFAULT)?.as_ptr();
                let len = buf.len() as u32;
                match self.buffer_index(buf) {
                    Some(i) => {
                        on_file!(file, |fd| opcode::WriteFixed::new(fd, ptr, len, i).offset(at))
                    }
                    None => on_file!(file, |fd| opcode::Write::new(fd, ptr, len).offset(at)),
                }
            }
            Op::Sync { file } => {
                let flags = FsyncFlags::DATASYNC;
                on_file!(self.target(file)?, |fd| opcode::Fsync::new(fd).flags(flags))
            }
            Op::PunchHole { file, offset, len } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                self.fallocate(file, offset, len, mode)?
            }
            Op::ZeroRange { file, offset, len } => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                self.fallocate(file, offset, len, mode)?
            }
            Op::Allocate { file, offset, len, extends } => {
                let mode = if extends { 0 } else { libc::FALLOC_FL_KEEP_SIZE };
                self.fallocate(file, offset, len, mode)?
            }
            Op::Readable { fd } => opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build(),
            Op::Writable { fd } => opcode::PollAdd::new(Fd(fd), libc::POLLOUT as u32).build(),
            Op::Timer { after } => {
                let place = self.place();
                let time = &mut self.times[place];
                *time = timespec(after);
                opcode::Timeout::new(time).build()
            }
            // `push` gives it to the helper thread.
            Op::Discard { .. } | Op::SetLen { .. } => return Err(libc::EINVAL),
        })
    }

    /// The entry for a vectored transfer, or the errno of what is wrong with it. A single span
    /// needs no vector, and may be in a registered buffer.
    pub(super) fn vectored(
        &mut self,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) -> Result<squeue::Entry, i32> {
        if let [buf] = *bufs {
            return self.entry(match transfer {
                Transfer::Read => Op::Read { file, offset, buf },
                Transfer::Write => Op::Write { file, offset, buf },
            });
        }
        let (file, at) = (self.target(file)?, Self::offset(offset)?);
        let (vectors, n) = (self.fill_vectors(bufs)?.cast(), bufs.len() as u32);
        Ok(match transfer {
            Transfer::Read => on_file!(file, |fd| opcode::Readv::new(fd, vectors, n).offset(at)),
            Transfer::Write => on_file!(file, |fd| opcode::Writev::new(fd, vectors, n).offset(at)),
        })
    }

    /// The entry for a transfer of the socket of this entry of the table, or the errno of what is wrong.
    pub(super) fn stream(
        &mut self,
        index: u32,
        transfer: Transfer,
        bufs: &[Span],
    ) -> Result<squeue::Entry, i32> {
        let fd = Fd(self.table.socket(index).ok_or(libc::EBADF)?.as_raw_fd());
        let (vectors, n) = (self.fill_vectors(bufs)?, bufs.len());
        // Not RECVMSG: with its last step, long after this place has got another entry, the kernel writes
        // to the header.
        if transfer == Transfer::Read {
            return Ok(opcode::Readv::new(fd, vectors.cast(), n as u32).build());
        }
        if self.messages.0.is_empty() {
            self.messages.0 = vec![Message::default(); self.features.sq_entries as usize].into();
        }
        let place = self.place();
        self.messages.0[place] = Message::of(vectors, n);
        let message = (&raw const self.messages.0[place]).cast();
        // A peer that is gone must not end this process.
        Ok(opcode::SendMsg::new(fd, message).flags(libc::MSG_NOSIGNAL as u32).build())
    }

    /// Writes the vectors of the next entry, or says the errno of what is wrong with them.
    fn fill_vectors(&mut self, bufs: &[Span]) -> Result<*const Vector, i32> {
        if self.vectors.0.is_empty() {
            let places = self.features.sq_entries as usize;
            self.vectors.0 = vec![[Vector::default(); MAX_VECTORED]; places].into();
        }
        let place = self.place();
        let vectors = &mut self.vectors.0[place];
        Vector::fill(vectors, &self.arena, bufs)?;
        Ok(vectors.as_ptr())
    }

    fn fallocate(&self, file: FileId, at: u64, len: u64, mode: i32) -> Result<squeue::Entry, i32> {
        let (file, at, len) = (self.target(file)?, Self::offset(at)?, Self::offset(len)?);
        Ok(on_file!(file, |fd| opcode::Fallocate::new(fd, len).offset(at).mode(mode)))
    }
}
