//! The engine on Linux AIO, for kernels without a usable io_uring.
//!
//! * Reads, writes and `fdatasync` are handed over in one `io_submit`; their completions are read
//!   from the ring that the kernel maps into the process, without a system call. Direct I/O only
//!   is asynchronous: transfers through the page cache are done inside `io_submit`.
//! * Operations that AIO does not have (holes, discards, `fdatasync` before Linux 4.18) run on a
//!   helper thread.
//! * A sleep is one `ppoll` on the eventfd that every completion is added to, the helper's, and
//!   the descriptors that are waited for. Transfers of sockets are calls that do not block, made when
//!   they are submitted and when `ppoll` has found the socket ready.
//! * Dropping the engine performs what was submitted, calls off what waits, and returns when the
//!   kernel is done with the arena and the files. The kernel holds a file that it works on, and
//!   with it a lock taken by `flock`, until then: of a process that was killed, too.

mod context;
#[cfg(test)]
mod tests;
mod waits;

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::arena::{Arena, Span};
use crate::computing::Work;
use crate::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};
use crate::offload::{Call, Job, Offload};
use crate::vector::Vector;
use context::{Context, Iocb};
use ferrite_host::clock::{Clock, SystemClock};
use waits::{Stream, Waits};

/// How long to leave a kernel alone that is short of memory, in nanoseconds.
const SHORTAGE_NS: u64 = 1_000_000;

/// Submissions with something to submit or to reap that may pass before descriptors are looked
/// at: a look is a system call.
const UNSEEN_SUBMITS: u32 = 8;

/// Why there is no AIO to be had.
#[derive(Debug, thiserror::Error)]
pub enum AioError {
    /// `ENOSYS`.
    #[error(
        "this kernel has no Linux AIO: it is built without CONFIG_AIO, or a sandbox forbids it"
    )]
    Missing,
    /// `EAGAIN`: the limit for the whole machine.
    #[error(
        "no room for {0} more requests of Linux AIO on this machine: raise the sysctl fs.aio-max-nr"
    )]
    Full(u32),
    /// Anything else.
    #[error("setting up Linux AIO for {entries} requests failed: {source}")]
    Other {
        /// As asked for.
        entries: u32,
        /// The kernel's error.
        source: io::Error,
    },
}

impl From<AioError> for io::Error {
    fn from(e: AioError) -> io::Error {
        let kind = match &e {
            AioError::Missing => io::ErrorKind::Unsupported,
            AioError::Full(_) => io::ErrorKind::QuotaExceeded,
            AioError::Other { source, .. } => source.kind(),
        };
        io::Error::new(kind, e)
    }
}

/// An operation that the kernel has not taken yet.
struct Queued {
    iocb: Iocb,
    file: FileId,
    /// Where in `vectors` those of a vectored transfer are.
    vectors: Option<usize>,
}

/// The engine on Linux AIO; see the module text.
pub struct Aio {
    context: Context,
    /// Every completion is added to it.
    eventfd: OwnedFd,
    /// Whether the eventfd may be readable for completions that were taken already.
    stale: bool,
    files: Vec<Arc<OwnedFd>>,
    entries: usize,
    queued: Vec<Queued>,
    /// Of the vectored transfers in `queued`, in the same order.
    vectors: Vec<[Vector; MAX_VECTORED]>,
    /// The list that `io_submit` takes: reused by each call.
    addresses: Vec<usize>,
    /// Operations that the kernel has taken and whose completions were not.
    in_kernel: usize,
    waits: Waits,
    /// Submissions since descriptors were looked at.
    unseen: u32,
    /// Whether anything was ever asked of the kernel.
    used: bool,
    /// Completions of what never got to the kernel, or came while something else was waited for.
    backlog: Vec<Completion>,
    /// Started by the first operation that needs it.
    offload: Option<Offload>,
    /// Kept until `drop` is through.
    arena: Arc<Arena>,
}

/// Whether this kernel has Linux AIO. It makes no context: the end of one waits for an RCU grace
/// period, tens of milliseconds, which every command would pay.
///
/// # Errors
/// An [`AioError`] inside, if there is none.
pub fn probe() -> io::Result<()> {
    match Context::new(0) {
        // The kernel looks at the number, so it has the call.
        Err(libc::EINVAL) | Ok(_) => Ok(()),
        Err(errno) => Err(failed(0, errno)),
    }
}

fn failed(entries: u32, errno: i32) -> io::Error {
    let error = match errno {
        libc::ENOSYS | libc::EPERM => AioError::Missing,
        libc::EAGAIN => AioError::Full(entries),
        _ => AioError::Other { entries, source: io::Error::from_raw_os_error(errno) },
    };
    error.into()
}

impl Aio {
    /// An engine for `entries` operations in the kernel at once, on the memory of `arena`; more
    /// may be pushed, and wait for room.
    ///
    /// # Errors
    /// An [`AioError`] inside, if this kernel has no usable AIO.
    pub fn new(arena: Arc<Arena>, entries: u32) -> io::Result<Aio> {
        let entries = entries.max(1);
        Ok(Aio {
            context: Context::new(entries).map_err(|errno| failed(entries, errno))?,
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stale: false,
            files: Vec::new(),
            entries: entries as usize,
            queued: Vec::new(),
            vectors: Vec::new(),
            addresses: Vec::new(),
            in_kernel: 0,
            waits: Waits::default(),
            unseen: 0,
            used: false,
            backlog: Vec::new(),
            offload: None,
            arena,
        })
    }

    fn fail(&mut self, token: Token, errno: i32) {
        self.backlog.push(Completion { token, raw: -errno });
    }

    /// The iocb that all operations on a file have in common, or the errno of what is wrong.
    fn iocb(&self, token: Token, opcode: u16, file: FileId, offset: u64) -> Result<Iocb, i32> {
        let file = self.files.get(file.0 as usize).ok_or(libc::EBADF)?;
        Ok(Iocb {
            data: token,
            opcode,
            fd: file.as_raw_fd() as u32,
            offset: i64::try_from(offset).map_err(|_| libc::EINVAL)?,
            flags: context::FLAG_RESFD,
            eventfd: self.eventfd.as_raw_fd() as u32,
            ..Iocb::default()
        })
    }

    fn queue(&mut self, token: Token, queued: Result<Queued, i32>) {
        match queued {
            Ok(queued) => self.queued.push(queued),
            Err(errno) => return self.fail(token, errno),
        }
        if self.queued.len() >= self.entries {
            self.used = true;
            self.hand_over();
        }
    }

    fn transfer(
        &self,
        token: Token,
        opcode: u16,
        file: FileId,
        at: u64,
        buf: Span,
    ) -> Result<Queued, i32> {
        let iocb = self.iocb(token, opcode, file, at)?;
        let address = self.arena.checked_ptr(buf).ok_or(libc::EFAULT)?.as_ptr() as u64;
        let iocb = Iocb { address, len: buf.len() as u64, ..iocb };
        Ok(Queued { iocb, file, vectors: None })
    }

    fn vectored(
        &mut self,
        token: Token,
        opcode: u16,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) -> Result<Queued, i32> {
        let iocb = Iocb { len: bufs.len() as u64, ..self.iocb(token, opcode, file, offset)? };
        let mut vectors = [Vector::default(); MAX_VECTORED];
        Vector::fill(&mut vectors, &self.arena, bufs)?;
        self.vectors.push(vectors);
        Ok(Queued { iocb, file, vectors: Some(self.vectors.len() - 1) })
    }

    /// Gives the operation to the helper thread.
    fn offload(&mut self, token: Token, file: FileId, call: Call) {
        let Some(file) = self.files.get(file.0 as usize).cloned() else {
            return self.fail(token, libc::EBADF);
        };
        if let Some(offload) = self.helper(token) {
            offload.give(Job { id: token, file, call });
        }
    }

    fn compute_beside(&mut self, token: Token, work: Work) {
        if let Some(offload) = self.helper(token) {
            offload.compute(token, work);
        }
    }

    /// The offload to other threads. `None`: it cannot be made, and the operation has failed.
    fn helper(&mut self, token: Token) -> Option<&mut Offload> {
        if self.offload.is_none() {
            match Offload::new() {
                Ok(offload) => self.offload = Some(offload),
                Err(e) => self.fail(token, e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
        self.offload.as_mut()
    }

    /// Hands what is queued to the kernel, as far as it takes it. Whether there was anything.
    fn hand_over(&mut self) -> bool {
        let mut done = 0;
        while done < self.queued.len() {
            self.addresses.clear();
            for queued in &mut self.queued[done..] {
                if let Some(i) = queued.vectors {
                    queued.iocb.address = self.vectors[i].as_ptr() as u64;
                }
                self.addresses.push(&raw mut queued.iocb as usize);
            }
            // SAFETY: the iocbs are in self.queued and their vectors in self.vectors, which stay
            // as they are during the call. Data is in the arena, which, as the eventfd, `drop`
            // keeps until every operation has ended.
            match unsafe { self.context.submit(&self.addresses) } {
                // No room, or no memory: the remaining operations wait for a completion.
                Ok(0) | Err(libc::EAGAIN | libc::EINTR) => break,
                Ok(n) => {
                    self.in_kernel += n;
                    done += n;
                }
                Err(errno) => {
                    let (iocb, file) = (self.queued[done].iocb, self.queued[done].file);
                    done += 1;
                    self.refused(&iocb, file, errno);
                }
            }
        }
        // Both lists are in the order in which they were pushed.
        let vectors = self.queued.drain(..done).filter(|q| q.vectors.is_some()).count();
        if vectors > 0 {
            self.vectors.drain(..vectors);
            self.queued.iter_mut().filter_map(|q| q.vectors.as_mut()).for_each(|i| *i -= vectors);
        }
        done > 0
    }

    /// The kernel does not take this operation at all.
    fn refused(&mut self, iocb: &Iocb, file: FileId, errno: i32) {
        match (iocb.opcode, errno) {
            // Older than 4.18.
            (context::FDSYNC, libc::EINVAL | libc::EOPNOTSUPP) => {
                self.offload(iocb.data, file, Call::Sync);
            }
            _ => self.fail(iocb.data, errno),
        }
    }

    /// Takes all completions that are there, of the kernel and of the helper thread.
    fn collect(&mut self, out: &mut Vec<Completion>) {
        if self.in_kernel > 0 {
            let taken = self.context.take(&mut |event| {
                let raw = i32::try_from(event.result).unwrap_or(i32::MAX);
                out.push(Completion { token: event.data, raw });
            });
            self.in_kernel = self.in_kernel.saturating_sub(taken);
            self.stale |= taken > 0;
        }
        if let Some(offload) = self.offload.as_mut().filter(|o| o.has_results()) {
            out.extend(offload.take().into_iter().map(|(token, raw)| Completion { token, raw }));
        }
    }

    /// Whether a reap would find something, the kernel asked if need be.
    fn has_completions(&mut self) -> bool {
        if !self.context.has_ring() {
            let mut backlog = std::mem::take(&mut self.backlog);
            self.collect(&mut backlog);
            self.backlog = backlog;
        }
        self.may_reap()
    }

    /// Looks at the descriptors that are waited for, without waiting; now and then only while
    /// there is other work.
    fn look(&mut self, working: bool) {
        if !self.waits.has_descriptors() {
            return;
        }
        if self.unseen < UNSEEN_SUBMITS && (working || self.may_reap()) {
            self.unseen += 1;
            return;
        }
        self.unseen = 0;
        self.waits.poll(&self.arena, &[], Some(0), &mut self.backlog);
    }

    /// Waits for anything to happen, until `deadline_ns` at most.
    fn sleep(&mut self, deadline_ns: Option<u64>) {
        if self.stale {
            self.stale = false;
            let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
            // Completions from before the read do not wake any more.
            if self.has_completions() {
                return;
            }
        }
        let due_ns = self.waits.next_due_ns();
        let until_ns = [deadline_ns, due_ns].into_iter().flatten().min();
        let mut limit_ns = until_ns.map(|t| t.saturating_sub(SystemClock.now_ns()));
        if !self.queued.is_empty() && self.in_kernel == 0 {
            limit_ns = Some(limit_ns.map_or(SHORTAGE_NS, |ns| ns.min(SHORTAGE_NS)));
        }
        let completions = self.eventfd.as_raw_fd();
        let helper = self.offload.as_ref().filter(|o| o.outstanding > 0).map(Offload::wake_fd);
        let others = [completions, helper.unwrap_or(-1)];
        let others = &others[..1 + usize::from(helper.is_some())];
        // Seen: a completion, or what is left of one that was taken before it was added.
        self.stale |= self.waits.poll(&self.arena, others, limit_ns, &mut self.backlog).first;
        self.unseen = 0;
    }

    fn wait_until(&mut self, deadline_ns: Option<u64>) {
        loop {
            self.sleep(deadline_ns);
            self.hand_over();
            self.waits.expire(&mut self.backlog);
            if self.has_completions() || deadline_ns.is_some_and(|d| SystemClock.now_ns() >= d) {
                return;
            }
        }
    }
}

impl Engine for Aio {
    fn name(&self) -> &'static str {
        "aio"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let id = u32::try_from(self.files.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.files.push(file);
        Ok(FileId(id))
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.files.clear();
        Ok(())
    }

    fn push(&mut self, token: Token, op: Op) {
        match op {
            Op::Read { file, offset, buf } => {
                let queued = self.transfer(token, context::PREAD, file, offset, buf);
                self.queue(token, queued);
            }
            Op::Write { file, offset, buf } => {
                let queued = self.transfer(token, context::PWRITE, file, offset, buf);
                self.queue(token, queued);
            }
            Op::Sync { file } => {
                let iocb = self.iocb(token, context::FDSYNC, file, 0);
                self.queue(token, iocb.map(|iocb| Queued { iocb, file, vectors: None }));
            }
            Op::PunchHole { file, .. }
            | Op::ZeroRange { file, .. }
            | Op::Allocate { file, .. }
            | Op::SetLen { file, .. }
            | Op::Discard { file, .. } => match Call::of(op) {
                Some(call) => self.offload(token, file, call),
                None => self.fail(token, libc::EINVAL),
            },
            Op::Readable { fd } | Op::Writable { fd } if fd < 0 => self.fail(token, libc::EBADF),
            Op::Readable { fd } => self.waits.add_descriptor(fd, libc::POLLIN, token),
            Op::Writable { fd } => self.waits.add_descriptor(fd, libc::POLLOUT, token),
            Op::Timer { after } => self.waits.add_timer(deadline_ns(after), token),
        }
    }

    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
        let opcode = match transfer {
            Transfer::Read => context::PREADV,
            Transfer::Write => context::PWRITEV,
        };
        let queued = self.vectored(token, opcode, file, offset, bufs);
        self.queue(token, queued);
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
        if bufs.is_empty() {
            self.backlog.push(Completion { token, raw: 0 });
        } else if bufs.iter().any(|buf| self.arena.checked_ptr(*buf).is_none()) {
            self.fail(token, libc::EFAULT);
        } else {
            self.waits.add_stream(Stream::new(transfer, socket.clone(), bufs), token);
        }
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.compute_beside(token, work);
    }

    fn cancel(&mut self, token: Token) {
        self.waits.cancel(token, &mut self.backlog);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.used = true;
        let working = self.hand_over();
        self.waits.attempt(&self.arena, &mut self.backlog);
        self.waits.expire(&mut self.backlog);
        self.look(working);
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let idle = self.in_flight() == 0 && timeout.is_none();
        self.used = true;
        let working = self.hand_over();
        self.waits.attempt(&self.arena, &mut self.backlog);
        self.waits.expire(&mut self.backlog);
        if idle || timeout == Some(Duration::ZERO) || self.has_completions() {
            self.look(working);
        } else {
            self.wait_until(timeout.map(deadline_ns));
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.backlog);
        self.collect(out);
    }

    fn may_reap(&mut self) -> bool {
        !self.backlog.is_empty()
            || self.context.ring_has_events()
            || self.offload.as_ref().is_some_and(Offload::has_results)
    }

    fn in_flight(&self) -> usize {
        let helper = self.offload.as_ref().map_or(0, |o| o.outstanding);
        self.queued.len() + self.in_kernel + self.waits.len() + helper + self.backlog.len()
    }
}

/// A time from now, in nanoseconds of the monotonic clock.
fn deadline_ns(after: Duration) -> u64 {
    let ns = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
    SystemClock.now_ns().saturating_add(ns)
}

impl Drop for Aio {
    fn drop(&mut self) {
        if !self.used {
            self.queued.clear();
        }
        while !self.queued.is_empty() {
            self.hand_over();
            if self.queued.is_empty() {
                break;
            }
            // A completion makes room; with none to come, the kernel is short of memory.
            match self.in_kernel {
                0 => SystemClock.sleep(Duration::from_nanos(SHORTAGE_NS)),
                _ => {
                    let taken = self.context.ask(1, &mut drop);
                    self.in_kernel = self.in_kernel.saturating_sub(taken.unwrap_or(0));
                }
            }
        }
        // The fields' drops, in this order, wait for the kernel (`context`) and for the helper
        // thread, and only then let go of the files and the memory.
    }
}

impl fmt::Debug for Aio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aio")
            .field("entries", &self.entries)
            .field("mapped_ring", &self.context.has_ring())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
