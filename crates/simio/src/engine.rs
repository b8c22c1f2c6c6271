//! The engine of a simulated world.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl};

use crate::fault::{Deferred, Lie, On};
use crate::file::SECTOR_BYTES;
use crate::{SimWorld, State};
use ferrite_host::clock::{Clock, Random};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::computing::Work;
use ferrite_io::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};
use ferrite_io::socket;

/// The longest time, in nanoseconds, by which one poll of the completions advances the clock.
const LOOK_NS: u64 = 20_000;

/// An operation in flight.
pub(super) struct InFlight {
    token: Token,
    op: Op,
    /// The spans of a vectored transfer.
    bufs: Vec<Span>,
    /// A transfer of a real socket, which `op` waits for.
    stream: Option<(Transfer, Arc<OwnedFd>)>,
    /// The memory of these spans.
    arena: Arc<Arena>,
    /// Its index in the world's table; `None`: the operation names a file that is not registered, or would change one
    /// that was opened read-only.
    file: Option<usize>,
    /// The step of its submission.
    since: u64,
    /// The end of a timer, in nanoseconds of the world's clock.
    due_ns: u64,
    cancelled: bool,
}

/// A file that is kept open, as by the kernel.
struct Opened {
    _file: Arc<OwnedFd>,
    /// Its index in the world's table.
    index: usize,
    writable: bool,
}

/// See [`SimWorld::engine`].
pub(super) struct SimEngine {
    world: SimWorld,
    arena: Arc<Arena>,
    number: u64,
    life: u64,
    files: Vec<Opened>,
    queued: Vec<InFlight>,
    /// Running computations: they die with their process, and use no file.
    computing: Vec<(Token, Work)>,
    done: Vec<Completion>,
}

impl SimEngine {
    pub(super) fn new(world: SimWorld, arena: Arc<Arena>) -> SimEngine {
        let mut state = world.state();
        state.next_engine += 1;
        let (number, life) = (state.next_engine, state.life);
        state.in_flight.insert(number, Vec::new());
        drop(state);
        let (files, queued, done) = (Vec::new(), Vec::new(), Vec::new());
        let computing = Vec::new();
        SimEngine { world, arena, number, life, files, queued, computing, done }
    }

    fn queue(
        &mut self,
        token: Token,
        op: Op,
        bufs: Vec<Span>,
        stream: Option<(Transfer, Arc<OwnedFd>)>,
    ) {
        let file = op.file().and_then(|f| self.files.get(f.0 as usize));
        let reads = matches!(op, Op::Read { .. } | Op::Sync { .. });
        let file = file.filter(|f| reads || f.writable).map(|f| f.index);
        let arena = self.arena.clone();
        let (since, due_ns, cancelled) = (0, 0, false);
        self.queued.push(InFlight {
            token,
            op,
            bufs,
            stream,
            arena,
            file,
            since,
            due_ns,
            cancelled,
        });
    }

    /// Whether the process of this engine is alive in a world that has not stopped.
    fn check(&self, state: &State) -> io::Result<()> {
        if self.life != state.life {
            return Err(io::Error::other("the process of this engine is dead"));
        }
        state.check()
    }

    /// Completes one operation, if possible; whether it did.
    fn complete_one(&mut self) -> io::Result<bool> {
        let state = &mut *self.world.state.borrow_mut();
        let now_ns = self.world.clock.now_ns();
        let mine = state.in_flight.entry(self.number).or_default();
        let ready: Vec<usize> = (0..mine.len()).filter(|i| mine[*i].may_end(now_ns)).collect();
        let all = ready.len() + self.computing.len();
        if all == 0 {
            return Ok(false);
        }
        let i = state.random.below(all as u64) as usize;
        if i >= ready.len() {
            let (token, work) = self.computing.swap_remove(i - ready.len());
            state.next_step();
            state.check()?;
            self.done.push(Completion { token, raw: work.run() });
            return Ok(true);
        }
        let op = mine.swap_remove(ready[i]);
        let step = state.next_step();
        let raw = state.perform(&op, step)?;
        // The last step of a world is done, but not reported.
        state.check()?;
        self.done.push(Completion { token: op.token, raw });
        Ok(true)
    }

    /// Advances the clock to the first timer of this engine; whether there is one.
    fn next_timer(&self) -> bool {
        let state = self.world.state();
        let mine = state.in_flight.get(&self.number).into_iter().flatten();
        let due = mine.filter(|op| matches!(op.op, Op::Timer { .. })).map(|op| op.due_ns).min();
        if let Some(due_ns) = due {
            self.world.clock.advance(due_ns.saturating_sub(self.world.clock.now_ns()));
        }
        due.is_some()
    }
}

impl Engine for SimEngine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let mut state = self.world.state();
        self.check(&state)?;
        let index = state.add_file(&file)?;
        drop(state);
        let writable = fcntl_getfl(&file)?.intersects(OFlags::WRONLY | OFlags::RDWR);
        self.files.push(Opened { _file: file, index, writable });
        Ok(FileId(self.files.len() as u32 - 1))
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.files.clear();
        Ok(())
    }

    fn push(&mut self, token: Token, op: Op) {
        let bufs = match op {
            Op::Read { buf, .. } | Op::Write { buf, .. } => vec![buf],
            _ => Vec::new(),
        };
        self.queue(token, op, bufs, None);
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
        let buf = bufs.first().copied().unwrap_or_else(|| self.arena.span(0, 0));
        let op = match transfer {
            Transfer::Read => Op::Read { file, offset, buf },
            Transfer::Write => Op::Write { file, offset, buf },
        };
        self.queue(token, op, bufs.to_vec(), None);
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
        let fd = socket.as_raw_fd();
        let op = match transfer {
            Transfer::Read => Op::Readable { fd },
            Transfer::Write => Op::Writable { fd },
        };
        self.queue(token, op, bufs.to_vec(), Some((transfer, socket.clone())));
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.computing.push((token, work));
    }

    fn cancel(&mut self, token: Token) {
        let mut state = self.world.state();
        let flying = state.in_flight.entry(self.number).or_default();
        for op in self.queued.iter_mut().chain(flying) {
            if op.token == token && op.op.file().is_none() {
                op.cancelled = true;
            }
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut state = self.world.state();
        self.check(&state)?;
        let now_ns = self.world.clock.now_ns();
        while !self.queued.is_empty() {
            let mut op = self.queued.remove(0);
            op.since = state.next_step();
            if matches!(op.op, Op::Sync { .. }) {
                state.sync_begins();
            }
            if let Op::Timer { after } = op.op {
                op.due_ns = now_ns.saturating_add(after.as_nanos() as u64);
            }
            state.in_flight.entry(self.number).or_default().push(op);
            state.check()?;
        }
        self.world.clock.advance(state.random.below(LOOK_NS));
        let flying = state.in_flight.get(&self.number).map_or(0, Vec::len) + self.computing.len();
        let ending = state.random.below(flying as u64 + 1);
        drop(state);
        for _ in 0..ending {
            self.complete_one()?;
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        while self.done.is_empty() && self.in_flight() > 0 {
            if self.complete_one()? || self.next_timer() {
                continue;
            }
            let Some(timeout) = timeout else {
                let text = "nothing in this world will end the wait";
                return Err(io::Error::new(io::ErrorKind::Deadlock, text));
            };
            self.world.clock.sleep(timeout);
            return Ok(());
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }

    fn may_reap(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn in_flight(&self) -> usize {
        let state = self.world.state();
        let flying = state.in_flight.get(&self.number).map_or(0, Vec::len);
        self.queued.len() + flying + self.computing.len() + self.done.len()
    }
}

impl Drop for SimEngine {
    /// As with real engines, operations in flight end before the files are closed.
    fn drop(&mut self) {
        let state = &mut *self.world.state.borrow_mut();
        // In a stopped world they stay in flight, for the cut to decide about.
        if self.check(state).is_err() {
            return;
        }
        let flying = state.in_flight.remove(&self.number).unwrap_or_default();
        // Transfers of sockets are called off, as they may wait for ever.
        for op in flying.into_iter().filter(|op| op.stream.is_none()) {
            let step = state.next_step();
            let _ = state.perform(&op, step);
        }
    }
}

impl InFlight {
    /// Whether it needs no event from outside.
    fn may_end(&self, now_ns: u64) -> bool {
        match self.op {
            _ if self.cancelled => true,
            Op::Readable { .. } | Op::Writable { .. } => self.op.is_ready(),
            Op::Timer { .. } => self.due_ns <= now_ns,
            _ => true,
        }
    }

    fn len(&self) -> u64 {
        self.bufs.iter().map(|b| b.len() as u64).sum()
    }

    /// The bytes that it changes or transfers; empty for other operations.
    fn range(&self) -> std::ops::Range<u64> {
        match self.op {
            Op::Read { offset, .. } | Op::Write { offset, .. } => offset..offset + self.len(),
            Op::PunchHole { offset, len, .. }
            | Op::ZeroRange { offset, len, .. }
            | Op::Allocate { offset, len, .. }
            | Op::Discard { offset, len, .. } => offset..offset.saturating_add(len),
            Op::SetLen { len, .. } => len..len + 1,
            _ => 0..0,
        }
    }

    /// The first `len` bytes of its memory.
    fn data(&self, len: u64) -> Vec<u8> {
        let mut data = vec![0; self.len() as usize];
        let mut at = 0;
        for buf in &self.bufs {
            self.arena.copy_out(*buf, &mut data[at..at + buf.len()]);
            at += buf.len();
        }
        data.truncate(len as usize);
        data
    }

    fn fill(&self, data: &[u8]) {
        let mut at = 0;
        for buf in &self.bufs {
            let len = buf.len().min(data.len() - at);
            self.arena.copy_in(buf.slice(0, len), &data[at..at + len]);
            at += len;
        }
    }
}

impl State {
    pub(super) fn check(&self) -> io::Result<()> {
        if self.stopped() {
            let text = format!("the simulated world stands still since step {}", self.step);
            return Err(io::Error::other(text));
        }
        Ok(())
    }

    /// Executes an operation; returns its result. Errors are the simulator's.
    fn perform(&mut self, op: &InFlight, step: u64) -> io::Result<i32> {
        let Some(on) = On::of(&op.op) else {
            let failed = matches!(op.op, Op::Readable { fd } | Op::Writable { fd } if fd < 0);
            if let (Some((transfer, socket)), false) = (&op.stream, op.cancelled) {
                return Ok(
                    match socket::transfer(*transfer, socket.as_fd(), &op.arena, &op.bufs) {
                        Ok(bytes) => bytes as i32,
                        Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
                    },
                );
            }
            return Ok(match op.cancelled {
                true => -libc::ECANCELED,
                false if failed => -libc::EBADF,
                false => 0,
            });
        };
        let Some(index) = op.file else { return Ok(-libc::EBADF) };
        if let Some(errno) = self.faults.nuisance(&mut self.random) {
            return Ok(-errno);
        }
        if let Some(errno) = self.faults.hit(on, op.range(), &mut self.random) {
            self.failed();
            match on {
                On::Sync => self.files[index].1.fail_sync(op.since, &mut self.random),
                _ => self.apply_parts(op, step)?,
            }
            return Ok(-errno);
        }
        let len = self.faults.shorten(op.len(), &mut self.random);
        let file = &mut self.files[index].1;
        if let Some(errno) = file.refuses(&op.op) {
            return Ok(-errno);
        }
        match op.op {
            Op::Read { offset, .. } => {
                let mut data = vec![0; len as usize];
                let read = file.read(offset, &mut data)?;
                op.fill(&data[..read]);
                return Ok(read as i32);
            }
            Op::Write { offset, .. } => {
                let len = file.room(offset, len);
                if len == 0 && op.len() > 0 {
                    return Ok(-libc::ENOSPC);
                }
                if !self.faults.drops_write(&mut self.random) {
                    self.write(index, step, offset, &op.data(len))?;
                }
                return Ok(len as i32);
            }
            Op::Sync { .. } => self.sync(index, op.since),
            _ => self.apply_all(op, step)?,
        }
        Ok(0)
    }

    fn write(&mut self, index: usize, step: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        if let (Some(Lie::SyncBefore(range)), Some(Deferred { file, .. })) =
            (&self.faults.lie, self.faults.deferred)
            && file == index
            && range.start < offset + data.len() as u64
            && offset < range.end
        {
            self.faults.deferred = None;
        }
        self.written(offset..offset + data.len() as u64);
        self.files[index].1.write(step, offset, data)
    }

    /// Answers a sync.
    fn sync(&mut self, index: usize, since: u64) {
        self.make_deferred_sync();
        if self.faults.ignores_sync() {
            return;
        }
        match self.faults.lie {
            Some(Lie::SyncBefore(_)) => {
                self.faults.deferred = Some(Deferred { file: index, since });
            }
            _ => self.files[index].1.sync(since),
        }
    }

    /// Makes a deferred sync: no write has come that would show it as wrong.
    pub(super) fn make_deferred_sync(&mut self) {
        if let Some(Deferred { file, since }) = self.faults.deferred.take() {
            self.files[file].1.sync(since);
        }
    }

    /// Applies the part of an operation in flight that remains after a death or a power cut. `some`: at most parts of
    /// it; else all of it, from which the cut then takes some.
    pub(super) fn apply_torn(&mut self, op: &InFlight, some: bool) -> io::Result<()> {
        if op.file.is_none() {
            return Ok(());
        }
        let step = self.next_step();
        if some { self.apply_parts(op, step) } else { self.apply_all(op, step) }
    }

    fn apply_all(&mut self, op: &InFlight, step: u64) -> io::Result<()> {
        let Some(index) = op.file else { return Ok(()) };
        let file = &mut self.files[index].1;
        if file.refuses(&op.op).is_some() {
            return Ok(());
        }
        match op.op {
            Op::Write { offset, .. } => {
                let len = file.room(offset, op.len());
                self.write(index, step, offset, &op.data(len))
            }
            Op::Discard { offset, len, .. } => file.discard(step, offset, len, &mut self.random),
            Op::PunchHole { offset, len, .. } | Op::ZeroRange { offset, len, .. } => {
                file.zero(step, offset, len)
            }
            Op::Allocate { offset, len, extends: true, .. } => {
                file.allocate(step, offset.saturating_add(len))
            }
            Op::SetLen { len, .. } => file.set_len(step, len),
            _ => Ok(()),
        }
    }

    /// Applies some of the sectors of a write, in runs; another change is applied or not.
    fn apply_parts(&mut self, op: &InFlight, step: u64) -> io::Result<()> {
        let (Op::Write { offset, .. }, Some(index)) = (op.op, op.file) else {
            return if self.random.below(2) == 0 { self.apply_all(op, step) } else { Ok(()) };
        };
        let data = op.data(self.files[index].1.room(offset, op.len()));
        let end = offset + data.len() as u64;
        let mut at = offset;
        while at < end {
            let sectors = 1 + self.random.below(16) * self.random.below(2);
            let next = ((at / SECTOR_BYTES + sectors) * SECTOR_BYTES).min(end);
            if self.random.below(2) == 0 {
                let part = &data[(at - offset) as usize..(next - offset) as usize];
                self.write(index, step, at, part)?;
            }
            at = next;
        }
        Ok(())
    }
}
