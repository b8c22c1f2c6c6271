//! How operations become requests.

use std::rc::Rc;
use std::time::Instant;

use ferrite_io::arena::Span;
use ferrite_io::reactor::Reply;
use ferrite_io::remote::{Remote, Request};
use ferrite_nbd::client::Command;
use ferrite_nbd::wire::can;
use rustix::io::Errno;

use super::op::{Op, Part, Success};
use super::{Phase, Session, libc_eio};

/// Requests of one operation, at most: a bound for memory. Disks ask for less than 1 GiB at once.
const MAX_PARTS: u32 = 4096;
/// The most bytes of a request without data: servers count in 32 bits, and some with a sign.
const MAX_RANGE_BYTES: u64 = 1 << 30;

impl Session {
    /// Enters an operation of requests of at most `most` bytes each.
    fn enter(&self, op: Rc<Op>, (offset, len): (u64, u64), most: u64, kind: Kind) {
        // A flush has no range, and is one request.
        let count = len.div_ceil(most).max(1);
        let Some(count) = u32::try_from(count).ok().filter(|count| *count <= MAX_PARTS) else {
            return op.fail(errno(Errno::INVAL));
        };
        if self.has_ended.get() || self.disk.has_failed() || self.phase.get() == Phase::Refuses {
            return op.fail(libc_eio());
        }
        op.expect(count);
        let mut inner = self.inner.borrow_mut();
        for i in 0..u64::from(count) {
            let done = i * most;
            // It fits: `most` is below 2^31.
            let part = (len - done).min(most) as u32;
            let (command, skip) = (kind.command(offset + done, part), done as usize);
            let part = Part { op: op.clone(), command, skip, sent: false, since: op.born };
            inner.waiting.push_back(part);
        }
        drop(inner);
        self.to_send.raise();
    }

    fn transfer(&self, kind: Kind, offset: u64, bufs: &[Span], reply: Reply) {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        let Ok(moved) = u32::try_from(bytes) else { return reply.errno(errno(Errno::INVAL)) };
        let most = u64::from(self.disk.export.max_block_bytes);
        let op = Op::new(reply, Success::Bytes(moved), bufs, Instant::now());
        self.enter(op, (offset, bytes as u64), most, kind);
    }

    fn range(&self, flag: u16, kind: Kind, offset: u64, len: u64, reply: Reply) {
        if !self.disk.export.can(flag) {
            return reply.errno(errno(Errno::OPNOTSUPP));
        }
        if len == 0 {
            return reply.done(0);
        }
        let op = Op::new(reply, Success::Bytes(0), &[], Instant::now());
        self.enter(op, (offset, len), MAX_RANGE_BYTES, kind);
    }

    /// Asks for the extents of the beginning of a range.
    fn ask_for_extents(&self, offset: u64, len: u64, reply: Reply) {
        if self.disk.export.allocation.is_none() {
            return reply.errno(errno(Errno::OPNOTSUPP));
        }
        let op = Op::new(reply, Success::Allocation, &[], Instant::now());
        self.enter(op, (offset, len.min(MAX_RANGE_BYTES)), MAX_RANGE_BYTES, Kind::Status);
    }
}

fn errno(errno: Errno) -> i32 {
    errno.raw_os_error()
}

/// A command without its range.
#[derive(Clone, Copy)]
enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    Zero { allocate: bool },
    Status,
}

impl Kind {
    fn command(self, offset: u64, len: u32) -> Command {
        match self {
            Kind::Read => Command::Read { offset, len },
            Kind::Write => Command::Write { offset, len },
            Kind::Flush => Command::Flush,
            Kind::Trim => Command::Trim { offset, len },
            Kind::Zero { allocate } => Command::WriteZeroes { offset, len, allocate },
            Kind::Status => Command::Status { offset, len },
        }
    }
}

impl Remote for Session {
    fn begin(&self, request: Request<'_>, reply: Reply) {
        let changes =
            !matches!(request, Request::Read { .. } | Request::Sync | Request::Allocation { .. });
        if changes && self.disk.read_only() {
            return reply.errno(errno(Errno::PERM));
        }
        match request {
            Request::Read { offset, bufs } => self.transfer(Kind::Read, offset, bufs, reply),
            Request::Write { offset, bufs } => self.transfer(Kind::Write, offset, bufs, reply),
            // Without caches there is nothing to flush.
            Request::Sync if !self.disk.export.can(can::FLUSH) => reply.done(0),
            Request::Sync => {
                let op = Op::new(reply, Success::Bytes(0), &[], Instant::now());
                self.enter(op, (0, 0), MAX_RANGE_BYTES, Kind::Flush);
            }
            Request::PunchHole { offset, len } => {
                let kind = Kind::Zero { allocate: false };
                self.range(can::WRITE_ZEROES, kind, offset, len, reply);
            }
            Request::ZeroRange { offset, len } => {
                let kind = Kind::Zero { allocate: true };
                self.range(can::WRITE_ZEROES, kind, offset, len, reply);
            }
            Request::Allocation { offset, len } => self.ask_for_extents(offset, len, reply),
            Request::Discard { offset, len } => {
                self.range(can::TRIM, Kind::Trim, offset, len, reply);
            }
        }
    }

    fn end(&self) {
        if !self.has_ended.replace(true) {
            self.fail_all(libc_eio());
            self.disk.give_back(self.number);
            self.to_end.raise();
        }
    }
}
