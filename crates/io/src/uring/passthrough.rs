//! io_uring with NVMe passthrough: reads, writes, flushes and deallocations of `/dev/ngXnY` go to
//! the driver as NVMe commands (`IORING_OP_URING_CMD`), past the block layer.
//!
//! Commands need entries of twice the size, so they have a ring of their own beside the main one,
//! which watches it while it sleeps. With `polled`, and a kernel and driver that can, waiting
//! means to look at both, as in [`PolledUring`](super::PolledUring).

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::fs::{OFlags, fcntl_getfl, fstat, major, minor};

use super::table::{Kind, Table};
use super::{KEPT, Uring, errno_of, setup};
use crate::arena::{Arena, Span};
use crate::computing::Work;
use crate::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};
use crate::vector::Vector;
use ferrite_host::clock::{Clock, SystemClock};
use ferrite_host::nvme::{self, Command, Namespace};

/// The main ring's sleep with commands in flight where the caller names no end.
const LONG: Duration = Duration::from_secs(3600);

/// The main ring's sleep while the kernel has no memory for some commands: these do not wake the thread.
const SHORTAGE: Duration = Duration::from_millis(1);

/// A file that commands go to.
struct Target {
    fd: Arc<OwnedFd>,
    namespace: Namespace,
    writable: bool,
}

/// The memory that the kernel reads until a command has ended, at an address that stays.
#[derive(Default)]
struct Memory {
    vectors: [Vector; MAX_VECTORED],
    range: [u64; 2],
}

/// A command in flight.
#[derive(Default)]
struct Flight {
    memory: Box<Memory>,
    /// The count that its completion gives.
    bytes: u32,
}

/// The engine on two rings; see the module text.
pub struct NvmeUring {
    main: Uring,
    ring: IoUring<squeue::Entry128, cqueue::Entry32>,
    /// Whether completions are asked for,
    polled: bool,
    /// and whether they were to be.
    polls: bool,
    /// The file that the ring of commands holds, too.
    held: Option<OwnedFd>,
    /// By the main ring's numbers: those that commands go to.
    targets: Vec<Option<Target>>,
    table: Table,
    /// By index in the table.
    flights: Vec<Flight>,
    /// Entries in the ring without a completion.
    pending: usize,
    spill: VecDeque<squeue::Entry128>,
    backlog: Vec<Completion>,
    /// How often the kernel is to refuse what it is given.
    #[cfg(test)]
    refusals: u32,
    arena: Arc<Arena>,
}

impl NvmeUring {
    /// As [`Uring::new`]; `polled`: ask for completions instead of waiting for interrupts.
    ///
    /// # Errors
    /// A [`SetupError`](super::SetupError) inside, or the kernel's for the ring of commands
    /// (Linux 5.19 and newer).
    pub fn new(arena: Arc<Arena>, entries: u32, polled: bool) -> io::Result<NvmeUring> {
        let main = Uring::new(arena.clone(), entries)?;
        let ring = command_ring(entries, polled)?;
        Ok(NvmeUring {
            main,
            ring,
            polled,
            polls: polled,
            held: None,
            targets: Vec::new(),
            table: Table::default(),
            flights: Vec::new(),
            pending: 0,
            spill: VecDeque::new(),
            backlog: Vec::new(),
            #[cfg(test)]
            refusals: 0,
            arena,
        })
    }

    /// Asks for completions from now on, or waits for interrupts: a polled ring completes nothing of a
    /// driver without poll queues, and crashes older kernels. Files are added before there are
    /// commands.
    fn poll(&mut self, polled: bool) -> io::Result<()> {
        assert_eq!(self.commands_in_flight(), 0, "the ring is exchanged under its commands");
        self.ring = command_ring(self.ring.params().sq_entries(), polled)?;
        self.polled = polled;
        self.hold_by_commands()
    }

    fn hold_by_commands(&self) -> io::Result<()> {
        match &self.held {
            Some(held) => self.ring.submitter().register_files(&[held.as_raw_fd()]),
            None => Ok(()),
        }
    }

    fn target(&self, file: FileId) -> Option<&Target> {
        self.targets.get(file.0 as usize).and_then(Option::as_ref)
    }

    /// Queues a command, or completes it if there is something wrong with it.
    fn queue(&mut self, token: Token, file: FileId, made: Result<Made, i32>) {
        let (target, made) = match (self.target(file), made) {
            (Some(target), Ok(made)) if target.writable || !made.changes => (target, made),
            (Some(_), Ok(_)) | (None, _) => return self.fail(token, libc::EBADF),
            (_, Err(errno)) => return self.fail(token, errno),
        };
        let fd = Fd(target.fd.as_raw_fd());
        let index = self.table.insert(token, Kind::Data);
        if self.flights.len() <= index as usize {
            self.flights.resize_with(index as usize + 1, Flight::default);
        }
        let flight = &mut self.flights[index as usize];
        flight.bytes = made.bytes;
        let mut command = made.command;
        match made.data {
            Data::Nothing => {}
            Data::At(address, bytes) => (command.address, command.data_len) = (address, bytes),
            Data::Vectors(vectors, n) => {
                flight.memory.vectors = *vectors;
                command.address = flight.memory.vectors.as_ptr() as u64;
                command.data_len = n;
            }
            Data::Range(range) => {
                flight.memory.range = range;
                command.address = flight.memory.range.as_ptr() as u64;
            }
        }
        let op = opcode::UringCmd80::new(fd, made.op).cmd(command.to_bytes());
        self.spill.push_back(op.build().user_data(u64::from(index)));
        self.unspill();
    }

    fn fail(&mut self, token: Token, errno: i32) {
        self.backlog.push(Completion { token, raw: -errno });
    }

    fn unspill(&mut self) {
        let mut queue = self.ring.submission();
        while !queue.is_full() {
            let Some(entry) = self.spill.pop_front() else { break };
            // SAFETY: data is in the arena, and vectors and ranges in self.flights, in boxes that
            // are used again only after the command has ended; `drop` waits for all of them.
            if unsafe { queue.push(&entry) }.is_err() {
                self.spill.push_front(entry);
                break;
            }
            self.pending += 1;
        }
    }

    /// Hands over the commands, and lets the kernel work off what it has for us.
    fn submit_commands(&mut self) -> io::Result<()> {
        loop {
            self.unspill();
            let (queued, due) = {
                let queue = self.ring.submission();
                (queue.len(), queue.cq_overflow() || queue.taskrun())
            };
            if queued == 0 && !due && !(self.polled && self.pending > 0) {
                return Ok(());
            }
            if !self.enter(0)? || self.spill.is_empty() {
                return Ok(());
            }
            self.collect();
        }
    }

    /// Whether there are commands that the kernel has not taken.
    fn has_unsubmitted(&mut self) -> bool {
        !self.spill.is_empty() || !self.ring.submission().is_empty()
    }

    /// Whether the kernel can take more now.
    fn enter(&mut self, want: usize) -> io::Result<bool> {
        #[cfg(test)]
        if self.refusals > 0 {
            self.refusals -= 1;
            return Ok(false);
        }
        match self.ring.submitter().submit_and_wait(want) {
            Ok(_) => Ok(true),
            Err(e) => match errno_of(&e) {
                libc::EINTR => Ok(true),
                libc::EAGAIN | libc::EBUSY => Ok(false),
                _ => Err(e),
            },
        }
    }

    /// Moves the completions of commands to the backlog.
    fn collect(&mut self) {
        for cqe in self.ring.completion() {
            self.pending -= 1;
            let index = cqe.user_data();
            let Some((token, _)) = self.table.remove(index) else { continue };
            let raw = match cqe.result() {
                0 => self.flights[index as usize].bytes as i32,
                status if status > 0 => -nvme::errno_of_status(status),
                error => error,
            };
            self.backlog.push(Completion { token, raw });
        }
    }

    fn commands_in_flight(&self) -> usize {
        self.table.len()
    }

    fn spin(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline_ns = timeout.map(|t| {
            let ns = u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
            SystemClock.now_ns().saturating_add(ns)
        });
        loop {
            self.main.submit()?;
            self.submit_commands()?;
            self.collect();
            let found = !self.backlog.is_empty() || self.main.has_backlog_or_completions();
            if found || deadline_ns.is_some_and(|d| SystemClock.now_ns() >= d) {
                return Ok(());
            }
        }
    }
}

/// The ring for commands; `polled`: completions are found only by asking for them.
fn command_ring(
    entries: u32,
    polled: bool,
) -> io::Result<IoUring<squeue::Entry128, cqueue::Entry32>> {
    let mut builder = IoUring::<squeue::Entry128, cqueue::Entry32>::builder();
    builder.setup_clamp().dontfork().setup_cqsize(entries.max(1).saturating_mul(4));
    builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    if polled {
        builder.setup_iopoll();
    }
    builder.setup_r_disabled();
    let built = builder.build(entries.max(1)).and_then(|ring| {
        setup::restrict(&ring, [opcode::UringCmd80::CODE].into_iter())?;
        ring.submitter().register_enable_rings()?;
        Ok(ring)
    });
    built.map_err(|e| {
        let text = format!("no io_uring for NVMe commands (Linux 5.19 or newer is needed): {e}");
        io::Error::new(e.kind(), text)
    })
}

/// A command before it has its place.
struct Made {
    op: u32,
    command: Command,
    data: Data,
    /// The count that its completion gives.
    bytes: u32,
    /// Whether it changes the medium.
    changes: bool,
}

enum Data {
    Nothing,
    At(u64, u32),
    Vectors(Box<[Vector; MAX_VECTORED]>, u32),
    Range([u64; 2]),
}

/// One read or write, shortened to what a command can transfer.
fn transfer(target: &Target, arena: &Arena, write: bool, at: u64, buf: Span) -> Result<Made, i32> {
    let buf = buf.slice(0, buf.len().min(target.namespace.max_transfer_bytes as usize));
    let address = arena.checked_ptr(buf).ok_or(libc::EFAULT)?.as_ptr() as u64;
    let bytes = buf.len() as u32;
    let command = target.namespace.transfer(write, at, u64::from(bytes))?;
    let data = Data::At(address, bytes);
    Ok(Made { op: nvme::URING_IO, command, data, bytes, changes: write })
}

/// The same by vectors.
fn vectored(
    target: &Target,
    arena: &Arena,
    write: bool,
    at: u64,
    bufs: &[Span],
) -> Result<Made, i32> {
    let mut left = target.namespace.max_transfer_bytes as usize;
    let cut = |buf: &Span| {
        let buf = buf.slice(0, buf.len().min(left));
        left -= buf.len();
        buf
    };
    let bufs: Vec<Span> = bufs.iter().map(cut).filter(|buf| !buf.is_empty()).collect();
    let bytes = bufs.iter().map(Span::len).sum::<usize>() as u32;
    let command = target.namespace.transfer(write, at, u64::from(bytes))?;
    let mut vectors = Box::new([Vector::default(); MAX_VECTORED]);
    Vector::fill(&mut vectors, arena, &bufs)?;
    let data = Data::Vectors(vectors, bufs.len() as u32);
    Ok(Made { op: nvme::URING_IO_VEC, command, data, bytes, changes: write })
}

impl Engine for NvmeUring {
    fn name(&self) -> &'static str {
        if self.polled { "io_uring nvme polled" } else { "io_uring nvme" }
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let id = self.main.add_file(file.clone())?;
        let stat = fstat(&file)?;
        let target = match nvme::block_device((major(stat.st_rdev), minor(stat.st_rdev))) {
            None => None,
            Some(_) => {
                if self.polled
                    && let Some(why) = nvme::not_polled(&file)
                {
                    tracing::warn!("file {} of the disk is not polled: {why}", id.0);
                    self.poll(false)?;
                }
                let namespace = Namespace::of(file.as_fd())?;
                // The kernel lets a privileged process write by commands whatever the mode is.
                let writable = fcntl_getfl(&file)?.intersects(OFlags::RDWR | OFlags::WRONLY);
                Some(Target { fd: file, namespace, writable })
            }
        };
        self.targets.push(target);
        Ok(id)
    }

    fn hold(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.main.hold(file)?;
        self.held = Some(file.try_clone_to_owned()?);
        self.hold_by_commands()
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.targets.clear();
        // The next files may be of a driver with poll queues.
        if self.polls && !self.polled {
            self.poll(true)?;
        }
        self.main.clear_files()
    }

    fn push(&mut self, token: Token, op: Op) {
        let Some(file) = op.file() else { return self.main.push(token, op) };
        let Some(target) = self.target(file) else { return self.main.push(token, op) };
        let made = match op {
            Op::Read { offset, buf, .. } => transfer(target, &self.arena, false, offset, buf),
            Op::Write { offset, buf, .. } => transfer(target, &self.arena, true, offset, buf),
            Op::Sync { .. } => Ok(Made {
                op: nvme::URING_IO,
                command: target.namespace.flush(),
                data: Data::Nothing,
                bytes: 0,
                changes: false,
            }),
            Op::Discard { offset, len, .. } => {
                target.namespace.deallocate(offset, len).map(|(command, range)| Made {
                    op: nvme::URING_IO,
                    command,
                    data: Data::Range(range),
                    bytes: 0,
                    changes: true,
                })
            }
            // Deallocated blocks need not read as zeros.
            _ => Err(libc::EOPNOTSUPP),
        };
        self.queue(token, file, made);
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
        match self.target(file) {
            Some(target) => {
                let write = transfer == Transfer::Write;
                let made = vectored(target, &self.arena, write, offset, bufs);
                self.queue(token, file, made);
            }
            None => self.main.push_vectored(token, transfer, file, offset, bufs),
        }
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        self.main.push_stream(token, transfer, socket, bufs);
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.main.compute(token, work);
    }

    fn cancel(&mut self, token: Token) {
        self.main.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.submit_commands()?;
        self.main.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.commands_in_flight() == 0 && self.backlog.is_empty() {
            return self.main.wait(timeout);
        }
        if self.polled {
            return self.spin(timeout);
        }
        self.submit_commands()?;
        self.collect();
        if !self.backlog.is_empty() {
            return self.main.submit();
        }
        self.main.watch_ring(self.ring.as_raw_fd());
        let timeout = timeout.unwrap_or(LONG);
        let short = self.has_unsubmitted();
        self.main.wait(Some(if short { timeout.min(SHORTAGE) } else { timeout }))
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.collect();
        out.append(&mut self.backlog);
        self.main.reap(out);
    }

    fn may_reap(&mut self) -> bool {
        if !self.backlog.is_empty() || (self.polled && self.pending > 0) || self.main.may_reap() {
            return true;
        }
        let due = {
            let queue = self.ring.submission();
            queue.taskrun() || queue.cq_overflow()
        };
        due || !self.ring.completion().is_empty()
    }

    fn in_flight(&self) -> usize {
        self.commands_in_flight() + self.backlog.len() + self.main.in_flight()
    }
}

impl Drop for NvmeUring {
    /// Sees all commands to their end; the main ring's own drop follows.
    fn drop(&mut self) {
        while self.pending > 0 || !self.spill.is_empty() {
            self.unspill();
            if let Err(e) = self.enter(1) {
                tracing::error!(
                    "NVMe commands in flight cannot be waited for, memory is kept: {e}"
                );
                KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(self.arena.clone());
                std::mem::forget(std::mem::take(&mut self.flights));
                return;
            }
            self.collect();
            self.backlog.clear();
        }
    }
}

impl fmt::Debug for NvmeUring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeUring")
            .field("main", &self.main)
            .field("polled", &self.polled)
            .field("commands", &self.commands_in_flight())
            .finish()
    }
}

#[cfg(test)]
mod tests;
