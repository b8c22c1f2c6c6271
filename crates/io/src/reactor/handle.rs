//! Operations as `async fn`: each is pushed when its future is polled first, and has a slot of the
//! reactor's until its completion has come.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::{Kind, Shared, Slot, TASK_BIT};
use crate::arena::Span;
use crate::computing::Work;
use crate::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};
use crate::remote::Allocation;

/// How often in a row an operation may be interrupted or say "try again".
const RETRIES: u32 = 64;

/// A handle to a thread's reactor for async code on that thread.
#[derive(Clone)]
pub struct Io {
    shared: Rc<Shared>,
}

impl Io {
    pub(super) fn new(shared: Rc<Shared>) -> Io {
        Io { shared }
    }

    /// A number that tells this reactor from all others that are there now.
    pub fn id(&self) -> usize {
        Rc::as_ptr(&self.shared).addr()
    }

    fn op(&self, op: Op) -> OpFuture<'_> {
        self.begin(Begin::One(op))
    }

    fn begin<'a>(&'a self, begin: Begin<'a>) -> OpFuture<'a> {
        let kind = begin.kind(&self.shared);
        OpFuture { shared: &self.shared, kind, begin: Some(begin), slot: None }
    }

    /// The same operation until it was done or failed. One that was interrupted, or found no
    /// resources, says nothing about what it was to do.
    async fn op_to_its_end(&self, op: Op) -> io::Result<u32> {
        let mut retries = 0;
        loop {
            match self.op(op).await {
                Err(e) if is_passing(&e) && retries < RETRIES => retries += 1,
                done => return done,
            }
        }
    }

    /// Reads at most `buf.len()` bytes; 0 is end of file.
    ///
    /// # Errors
    /// The kernel's error; so for all operations here. `BrokenPipe` once the reactor is gone.
    pub async fn read(&self, file: FileId, offset: u64, buf: Span) -> io::Result<u32> {
        self.op(Op::Read { file, offset, buf }).await
    }

    /// Writes at most `buf.len()` bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn write(&self, file: FileId, offset: u64, buf: Span) -> io::Result<u32> {
        self.op(Op::Write { file, offset, buf }).await
    }

    /// Reads all of `buf`, however many operations that takes.
    ///
    /// # Errors
    /// The kernel's error; `UnexpectedEof` if the file ends before that.
    pub async fn read_exact(&self, file: FileId, offset: u64, buf: Span) -> io::Result<()> {
        let read = |offset, buf| Op::Read { file, offset, buf };
        self.transfer(offset, buf, read, io::ErrorKind::UnexpectedEof).await
    }

    /// Writes all of `buf`, however many operations that takes.
    ///
    /// # Errors
    /// The kernel's error; `WriteZero` if it takes nothing and gives no error.
    pub async fn write_all(&self, file: FileId, offset: u64, buf: Span) -> io::Result<()> {
        let write = |offset, buf| Op::Write { file, offset, buf };
        self.transfer(offset, buf, write, io::ErrorKind::WriteZero).await
    }

    async fn transfer(
        &self,
        offset: u64,
        buf: Span,
        op: impl Fn(u64, Span) -> Op,
        no_progress: io::ErrorKind,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let rest = buf.slice(done, buf.len() - done);
            match self.op_to_its_end(op(offset.saturating_add(done as u64), rest)).await? {
                0 => return Err(no_progress.into()),
                n => done += (n as usize).min(rest.len()),
            }
        }
        Ok(())
    }

    /// Reads all of `bufs`, one after the other, however many operations that takes.
    ///
    /// # Errors
    /// As [`read_exact`](Self::read_exact).
    pub async fn read_vectored(&self, file: FileId, offset: u64, bufs: &[Span]) -> io::Result<()> {
        self.transfer_vectored(Transfer::Read, file, offset, bufs).await
    }

    /// Writes all of `bufs`, one after the other, however many operations that takes.
    ///
    /// # Errors
    /// As [`write_all`](Self::write_all).
    pub async fn write_vectored(&self, file: FileId, offset: u64, bufs: &[Span]) -> io::Result<()> {
        self.transfer_vectored(Transfer::Write, file, offset, bufs).await
    }

    async fn transfer_vectored(
        &self,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) -> io::Result<()> {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        let (mut done, mut retries) = (0, 0);
        while done < bytes {
            let (rest, count) = rest(bufs, done);
            let at = offset.saturating_add(done as u64);
            let begin = Begin::Vectored(transfer, file, at, &rest[..count]);
            match self.begin(begin).await {
                Err(e) if is_passing(&e) && retries < RETRIES => retries += 1,
                Err(e) => return Err(e),
                Ok(0) if transfer == Transfer::Read => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    retries = 0;
                    done += n as usize;
                }
            }
        }
        Ok(())
    }

    /// Sends all of `bufs` on a connected stream socket, one after the other. One at a time for a socket.
    ///
    /// # Errors
    /// The kernel's error; `BrokenPipe` or `ConnectionReset` if the peer is gone.
    pub async fn send(&self, socket: &Arc<OwnedFd>, bufs: &[Span]) -> io::Result<()> {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        let mut done = 0;
        while done < bytes {
            let (rest, count) = rest(bufs, done);
            done += self.stream(Transfer::Write, socket, &rest[..count]).await? as usize;
        }
        Ok(())
    }

    /// Receives what has come, as soon as something has, into `bufs`, one after the other: at most
    /// [`MAX_VECTORED`] of them. The bytes; 0 is the end of the stream. One at a time for a socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn receive(&self, socket: &Arc<OwnedFd>, bufs: &[Span]) -> io::Result<u32> {
        self.stream(Transfer::Read, socket, &bufs[..bufs.len().min(MAX_VECTORED)]).await
    }

    /// Receives all of `bufs`.
    ///
    /// # Errors
    /// The kernel's error; `UnexpectedEof` if the stream ends before that.
    pub async fn receive_exact(&self, socket: &Arc<OwnedFd>, bufs: &[Span]) -> io::Result<()> {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        let mut done = 0;
        while done < bytes {
            let (rest, count) = rest(bufs, done);
            match self.stream(Transfer::Read, socket, &rest[..count]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => done += n as usize,
            }
        }
        Ok(())
    }

    /// One transfer of a socket. It waits for one that does not block, too.
    async fn stream(
        &self,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) -> io::Result<u32> {
        loop {
            match self.begin(Begin::Stream(transfer, socket, bufs)).await {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => match transfer {
                    Transfer::Read => self.readable(socket.as_raw_fd()).await?,
                    Transfer::Write => self.writable(socket.as_raw_fd()).await?,
                },
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Computes beside this thread, for what takes tens of microseconds and more; see
    /// [`Engine::compute`](crate::engine::Engine::compute). If this is dropped the work is done all the same.
    ///
    /// # Errors
    /// `BrokenPipe` once the reactor is gone; `EIO` if `work` has panicked; no thread can be made.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let result = Arc::new(Mutex::new(None));
        let theirs = result.clone();
        let work = Work::new(move || {
            let value = work();
            *theirs.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        });
        self.begin(Begin::Work(work)).await?;
        let value = result.lock().unwrap_or_else(PoisonError::into_inner).take();
        value.ok_or_else(|| io::ErrorKind::Other.into())
    }

    /// See [`Op::Sync`]. An error means that what was written may be lost, and is told once.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn sync(&self, file: FileId) -> io::Result<()> {
        self.op_to_its_end(Op::Sync { file }).await.map(drop)
    }

    /// [`sync`](Self::sync) for a caller that must not miss a failure: `unheard` is called if this is
    /// dropped after its beginning, unless it is known by then that the sync has succeeded.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn sync_heard(&self, file: FileId, unheard: impl Fn(Unheard)) -> io::Result<()> {
        let mut retries = 0;
        loop {
            match (Heard { op: self.op(Op::Sync { file }), unheard: &unheard }).await {
                Err(e) if is_passing(&e) && retries < RETRIES => retries += 1,
                done => return done.map(drop),
            }
        }
    }

    /// See [`Op::PunchHole`].
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn punch_hole(&self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::PunchHole { file, offset, len }).await.map(drop)
    }

    /// See [`Op::ZeroRange`].
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn zero_range(&self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::ZeroRange { file, offset, len }).await.map(drop)
    }

    /// See [`Op::Allocate`].
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn allocate(&self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::Allocate { file, offset, len, extends: true }).await.map(drop)
    }

    /// The same, also behind the end of the file, which stays where it is.
    ///
    /// # Errors
    /// The kernel's error. A block device refuses it.
    pub async fn preallocate(&self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::Allocate { file, offset, len, extends: false }).await.map(drop)
    }

    /// See [`Op::SetLen`].
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn set_len(&self, file: FileId, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::SetLen { file, len }).await.map(drop)
    }

    /// See [`Op::Discard`].
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn discard(&self, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.op_to_its_end(Op::Discard { file, offset, len }).await.map(drop)
    }

    /// Asks a remote whether the beginning of a range, which is not empty, has data.
    ///
    /// # Errors
    /// `Unsupported`: the remote does not know, or it is a file. The remote's error.
    pub async fn allocation(&self, file: FileId, offset: u64, len: u64) -> io::Result<Allocation> {
        if !self.shared.is_for_remote(|| Some(file)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let number = self.begin(Begin::Allocation(file, offset, len)).await?;
        let found = Allocation::decode(number).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Allocation { len: found.len.min(len), ..found })
    }

    /// Waits until `fd` has something to read, has hung up or is in error. It must stay open
    /// meanwhile.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn readable(&self, fd: i32) -> io::Result<()> {
        self.op(Op::Readable { fd }).await.map(drop)
    }

    /// Waits until `fd` takes bytes, is connected or is in error. It must stay open meanwhile.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn writable(&self, fd: i32) -> io::Result<()> {
        self.op(Op::Writable { fd }).await.map(drop)
    }

    /// Waits for `after`.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn sleep(&self, after: Duration) -> io::Result<()> {
        self.op(Op::Timer { after }).await.map(drop)
    }

    /// Lets everything else of this thread go first: the hot path, other tasks, and those that have
    /// yielded before. For what goes on for long without waiting for anything.
    pub async fn yield_to_others(&self) {
        let mut yielded = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            self.shared.executor.yield_to_others(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Adds a task; see [`Reactor::spawn`](super::Reactor::spawn).
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.shared.executor.spawn(future);
    }
}

/// Whether the same operation may well succeed the next time.
fn is_passing(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// The rest of `bufs` after so many bytes, as far as one operation takes it: spans and their number.
fn rest(bufs: &[Span], mut done: usize) -> ([Span; MAX_VECTORED], usize) {
    // One that is not empty is left, as the caller has not done all.
    let (mut rest, mut count) = ([bufs[0]; MAX_VECTORED], 0);
    for buf in bufs {
        let skipped = done.min(buf.len());
        done -= skipped;
        if skipped < buf.len() && count < MAX_VECTORED {
            rest[count] = buf.slice(skipped, buf.len() - skipped);
            count += 1;
        }
    }
    (rest, count)
}

/// The operation that a future begins.
enum Begin<'a> {
    One(Op),
    Vectored(Transfer, FileId, u64, &'a [Span]),
    Stream(Transfer, &'a Arc<OwnedFd>, &'a [Span]),
    Allocation(FileId, u64, u64),
    Work(Work),
}

impl Begin<'_> {
    fn kind(&self, shared: &Shared) -> Kind {
        match self {
            _ if shared.is_for_remote(|| self.file()) => Kind::Remote,
            Begin::One(op) => Kind::of(op),
            Begin::Stream(..) => Kind::Wait,
            Begin::Vectored(..) | Begin::Allocation(..) | Begin::Work(_) => Kind::Work,
        }
    }

    fn file(&self) -> Option<FileId> {
        match self {
            Begin::One(op) => op.file(),
            Begin::Vectored(_, file, ..) | Begin::Allocation(file, ..) => Some(*file),
            Begin::Stream(..) | Begin::Work(_) => None,
        }
    }

    /// Pushes what is for the engine.
    fn push(self, engine: &mut dyn Engine, token: Token) {
        match self {
            Begin::One(op) => engine.push(token, op),
            Begin::Vectored(transfer, file, offset, bufs) => {
                engine.push_vectored(token, transfer, file, offset, bufs);
            }
            Begin::Stream(transfer, socket, bufs) => {
                engine.push_stream(token, transfer, socket, bufs);
            }
            Begin::Allocation(..) => unreachable!("only remotes are asked"),
            Begin::Work(work) => engine.compute(token, work),
        }
    }

    /// Asks a remote, with the reply to go to this token.
    fn ask(self, shared: &Rc<Shared>, token: Token) {
        match self {
            Begin::One(op) => shared.ask(token, op),
            Begin::Vectored(transfer, file, offset, bufs) => {
                shared.ask_vectored(token, transfer, file, offset, bufs);
            }
            Begin::Allocation(file, offset, len) => shared.ask_allocation(token, file, offset, len),
            Begin::Stream(..) | Begin::Work(_) => unreachable!("these have no file"),
        }
    }
}

/// One operation: pushed when it is polled first.
struct OpFuture<'a> {
    shared: &'a Rc<Shared>,
    kind: Kind,
    /// Until then.
    begin: Option<Begin<'a>>,
    /// Taken by the operation in flight.
    slot: Option<u32>,
}

impl OpFuture<'_> {
    fn start(&mut self, waker: &Waker) -> io::Result<()> {
        let mut engine = self.shared.engine.borrow_mut();
        let Some(engine_there) = engine.as_mut() else {
            let text = "the reactor of this handle is gone";
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, text));
        };
        // A future that has ended is not polled again.
        let Some(begin) = self.begin.take() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let slot = self.shared.slots.borrow_mut().take(waker.clone(), self.kind);
        let token = TASK_BIT | u64::from(slot);
        self.slot = Some(slot);
        if self.kind == Kind::Remote {
            // It may use the engine, and reply at once.
            drop(engine);
            begin.ask(self.shared, token);
        } else {
            begin.push(engine_there.as_mut(), token);
            self.shared.unsent.set(true);
        }
        Ok(())
    }
}

impl Future for OpFuture<'_> {
    type Output = io::Result<u32>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(i) = self.slot else {
            return match self.start(cx.waker()) {
                Ok(()) => Poll::Pending,
                Err(e) => Poll::Ready(Err(e)),
            };
        };
        let mut slots = self.shared.slots.borrow_mut();
        match slots.slots.get_mut(i as usize) {
            Some(Slot::Done(raw)) => {
                let done = Completion { token: 0, raw: *raw };
                slots.release(i);
                drop(slots);
                self.slot = None;
                Poll::Ready(done.result())
            }
            Some(Slot::InFlight(waker, _)) => {
                let other = !waker.will_wake(cx.waker());
                let old = other.then(|| std::mem::replace(waker, cx.waker().clone()));
                drop(slots);
                drop(old);
                Poll::Pending
            }
            _ => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

/// How an operation ended that was dropped before its outcome was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unheard {
    /// With an error.
    Failed,
    /// It was still under way.
    Unknown,
}

/// An operation whose failure must not be missed.
struct Heard<'a, F: Fn(Unheard)> {
    op: OpFuture<'a>,
    unheard: &'a F,
}

impl<F: Fn(Unheard)> Future for Heard<'_, F> {
    type Output = io::Result<u32>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.op).poll(cx)
    }
}

impl<F: Fn(Unheard)> Drop for Heard<'_, F> {
    fn drop(&mut self) {
        let Some(i) = self.op.slot else { return };
        let slots = self.op.shared.slots.borrow();
        let unheard = match slots.slots.get(i as usize) {
            Some(Slot::Done(raw)) if *raw >= 0 => None,
            Some(Slot::Done(_)) => Some(Unheard::Failed),
            _ => Some(Unheard::Unknown),
        };
        drop(slots);
        unheard.into_iter().for_each(self.unheard);
    }
}

impl Drop for OpFuture<'_> {
    fn drop(&mut self) {
        let Some(i) = self.slot else { return };
        let mut slots = self.shared.slots.borrow_mut();
        match slots.slots.get_mut(i as usize) {
            Some(Slot::Done(_)) => slots.release(i),
            Some(slot @ Slot::InFlight(..)) => {
                let waker = std::mem::replace(slot, Slot::Abandoned(self.kind));
                drop(slots);
                drop(waker);
                if self.kind == Kind::Wait
                    && let Some(engine) = self.shared.engine.borrow_mut().as_mut()
                {
                    engine.cancel(TASK_BIT | u64::from(i));
                }
            }
            _ => {}
        }
    }
}
