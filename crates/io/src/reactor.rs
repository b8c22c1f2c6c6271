//! One thread's engine and its tasks.
//!
//! The hot path pushes operations with tokens of its own and gets their completions from
//! [`Reactor::turn`]; tasks use the same engine through [`Io`], as `async fn`, and `turn` runs
//! them. Both meet in one submission: a turn costs at most one call into the kernel.
//!
//! A file may be a remote ([`Remote`]), whose tasks are among the reactor's. Operations on it go there.
//!
//! A future of [`Io`] may be dropped at any time. A data operation that is in flight then goes
//! on, in memory of the arena that its caller must leave alone until the reactor is gone; its
//! result is discarded. Waiting for a descriptor, a socket or a time is called off, and the memory of a
//! socket's transfer must be left alone likewise: to end one and know it, shut the socket down.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::arena::Span;
use crate::engine::{Completion, Engine, FileId, Op, Token, Transfer};
use crate::executor::Executor;
use crate::remote::{Backing, Remote};
use crate::scratch::Scratch;

mod handle;
mod remotes;

pub use handle::{Io, Unheard};
use remotes::Remotes;
pub use remotes::Reply;

/// Marks the tokens of operations that a future waits for; the rest is the index of its slot.
const TASK_BIT: u64 = 1 << 63;

/// Polls of tasks in one turn, before and after the reaping each.
const POLLS_PER_TURN: usize = 256;

/// How long a turn may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until there is a completion, at most this long; `None`: as long as it takes.
    Until(Option<Duration>),
}

/// The state of one future's operation.
enum Slot {
    Free,
    InFlight(Waker, Kind),
    /// The future is gone, the operation is not.
    Abandoned(Kind),
    Done(i32),
}

/// The kinds of operations in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It touches a file, and ends by itself.
    Work,
    /// It ends when something comes, or is called off.
    Wait,
    /// A remote does it.
    Remote,
}

impl Kind {
    fn of(op: &Op) -> Kind {
        match op {
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => Kind::Wait,
            _ => Kind::Work,
        }
    }
}

/// The slots of all futures' operations. A slot is taken until its completion has come.
#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Those `InFlight` or `Abandoned`.
    in_flight: usize,
    /// Those of them that are work.
    working: usize,
}

impl Slots {
    fn take(&mut self, waker: Waker, kind: Kind) -> u32 {
        self.in_flight += 1;
        self.working += usize::from(kind == Kind::Work);
        match self.free.pop() {
            Some(i) => {
                self.slots[i as usize] = Slot::InFlight(waker, kind);
                i
            }
            None => {
                self.slots.push(Slot::InFlight(waker, kind));
                // One slot a living operation: memory ends before 32 bits do.
                (self.slots.len() - 1) as u32
            }
        }
    }

    fn release(&mut self, i: u32) {
        self.slots[i as usize] = Slot::Free;
        self.free.push(i);
    }

    /// Whom to wake, after the slots are no longer borrowed: a waker's drop may drop futures.
    fn complete(&mut self, i: u32, raw: i32) -> Option<Waker> {
        let slot = self.slots.get_mut(i as usize)?;
        match std::mem::replace(slot, Slot::Done(raw)) {
            Slot::InFlight(waker, kind) => {
                self.ended(kind);
                return Some(waker);
            }
            Slot::Abandoned(kind) => {
                self.ended(kind);
                self.release(i);
            }
            // An engine completes an operation once; a second time is not believed.
            other => *slot = other,
        }
        None
    }

    fn ended(&mut self, kind: Kind) {
        self.in_flight -= 1;
        self.working -= usize::from(kind == Kind::Work);
    }
}

impl Shared {
    /// Whether an operation on this file is for a remote.
    #[inline]
    fn is_for_remote(&self, file: impl FnOnce() -> Option<FileId>) -> bool {
        self.remotes.any.get() && file().is_some_and(|file| file.remote().is_some())
    }
}

/// The state that the reactor and its handles share.
struct Shared {
    /// `None` once the reactor was dropped.
    engine: RefCell<Option<Box<dyn Engine>>>,
    slots: RefCell<Slots>,
    executor: Executor,
    remotes: Remotes,
    /// Completions of the hot path that came beside a turn: during a
    /// [`block_on`](Reactor::block_on), or from a remote.
    stash: RefCell<Vec<Completion>>,
    /// Tasks have pushed something since the last submission.
    unsent: Cell<bool>,
}

/// One thread's engine and tasks; see the module text.
pub struct Reactor {
    shared: Rc<Shared>,
}

impl Reactor {
    /// A reactor on this thread.
    pub fn new(engine: Box<dyn Engine>) -> Reactor {
        let shared = Shared {
            engine: RefCell::new(Some(engine)),
            slots: RefCell::default(),
            executor: Executor::new(),
            remotes: Remotes::default(),
            stash: RefCell::default(),
            unsent: Cell::new(false),
        };
        Reactor { shared: Rc::new(shared) }
    }

    fn engine<T>(&self, f: impl FnOnce(&mut dyn Engine) -> T) -> T {
        match self.shared.engine.borrow_mut().as_mut() {
            Some(engine) => f(engine.as_mut()),
            None => unreachable!("only the reactor's drop takes the engine"),
        }
    }

    /// A handle for async code on this thread.
    pub fn io(&self) -> Io {
        Io::new(self.shared.clone())
    }

    /// Adds a file; see [`Engine::add_file`].
    ///
    /// # Errors
    /// Those of the engine.
    pub fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        self.engine(|e| e.add_file(file))
    }

    /// Adds a remote, which operations with this [`FileId`] go to from now on.
    pub fn add_remote(&mut self, remote: Rc<dyn Remote>) -> FileId {
        self.shared.remotes.add(remote)
    }

    /// Adds a file or a remote. `scratch` is memory of the engine's arena, for tasks.
    ///
    /// # Errors
    /// Those of the engine, or of the remote's factory.
    pub fn add(&mut self, backing: Backing, scratch: &Scratch) -> io::Result<FileId> {
        match backing {
            Backing::File(file) => self.add_file(file),
            Backing::Remote(factory) => {
                let remote = factory.connect(self.io(), scratch.clone())?;
                Ok(self.add_remote(remote))
            }
        }
    }

    /// Lets go of all files and remotes, on none of which an operation may be in flight; see
    /// [`Engine::clear_files`]. Tasks of remotes end in the next turns.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn clear_files(&mut self) -> io::Result<()> {
        self.shared.remotes.clear();
        self.engine(|e| e.clear_files())
    }

    /// Whether it has a remote, whose tasks may use scratch memory at any time.
    pub fn has_remotes(&self) -> bool {
        self.shared.remotes.any.get()
    }

    /// See [`Engine::drain`].
    pub fn drain(&mut self, token: Token, fd: i32, bytes: u32) -> bool {
        self.engine(|e| e.drain(token, fd, bytes))
    }

    /// See [`Engine::put`].
    pub fn put(&mut self, token: Token, fd: i32, word: u32) -> bool {
        self.engine(|e| e.put(token, fd, word))
    }

    /// See [`Engine::pin`].
    pub fn pin(&mut self, region: Span) {
        self.engine(|e| e.pin(region));
    }

    /// See [`Engine::unpin`].
    pub fn unpin(&mut self) -> bool {
        self.engine(|e| e.unpin())
    }

    /// Queues an operation of the hot path; see [`Engine::push`].
    ///
    /// # Panics
    /// If `token` is 2^63 or more.
    pub fn push(&mut self, token: Token, op: Op) {
        assert!(token & TASK_BIT == 0, "tokens from 2^63 on belong to tasks");
        if self.shared.is_for_remote(|| op.file()) {
            return self.shared.ask(token, op);
        }
        self.engine(|e| e.push(token, op));
    }

    /// Queues a vectored transfer of the hot path; see [`Engine::push_vectored`].
    ///
    /// # Panics
    /// If `token` is 2^63 or more, or there are too many spans.
    pub fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        assert!(token & TASK_BIT == 0, "tokens from 2^63 on belong to tasks");
        if self.shared.is_for_remote(|| Some(file)) {
            return self.shared.ask_vectored(token, transfer, file, offset, bufs);
        }
        self.engine(|e| e.push_vectored(token, transfer, file, offset, bufs));
    }

    /// Whether a [`turn`](Reactor::turn) that does not wait may bring something or has a task to
    /// run: a look at memory, without a system call. See [`Engine::may_reap`].
    pub fn may_reap(&self) -> bool {
        let stashed = !self.shared.stash.borrow().is_empty();
        stashed || self.shared.executor.has_ready() || self.engine(|e| e.may_reap())
    }

    /// Whether a task is ready to run, or lets others go first: a look at memory.
    pub fn has_ready(&self) -> bool {
        self.shared.executor.has_ready()
    }

    /// Whether tasks have pushed operations that only the next turn submits: a look at memory. They have
    /// no effect before, so a caller that polls first waits for nothing.
    pub fn has_unsent(&self) -> bool {
        self.shared.unsent.get()
    }

    /// Calls off a wait of the hot path; see [`Engine::cancel`].
    pub fn cancel(&mut self, token: Token) {
        self.engine(|e| e.cancel(token));
    }

    /// Adds a task. It runs inside [`turn`](Reactor::turn), until it ends or the reactor does.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.shared.executor.spawn(future);
    }

    /// Runs tasks that are ready, hands everything queued to the kernel, waits if asked, appends
    /// the completions of the hot path to `out` and runs the tasks that the others woke. The next
    /// turn submits what these push. If a task has run, or is ready, it does not wait: the caller
    /// may wait for just what a task does. It may return without a completion before the time is
    /// over.
    ///
    /// # Errors
    /// Those of the engine's submission; nothing is lost, and the next turn tries again.
    pub fn turn(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let ran = self.shared.executor.run(POLLS_PER_TURN) > 0;
        let stashed = self.unstash(out);
        let block = !ran && !stashed && !self.shared.executor.has_ready();
        let first = out.len();
        self.shared.unsent.set(false);
        let result = self.engine(|e| {
            let result = match wait {
                Wait::Until(timeout) if block => e.wait(timeout),
                _ => e.submit(),
            };
            e.reap(out);
            result
        });
        self.wake(first, out);
        self.shared.executor.run(POLLS_PER_TURN);
        // The completions that a remote's tasks have received in this turn.
        if self.shared.remotes.any.get() {
            self.unstash(out);
        }
        result
    }

    /// Moves what came beside a turn to the end of `out`; whether there was something.
    fn unstash(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut stash = self.shared.stash.borrow_mut();
        let any = !stash.is_empty();
        out.append(&mut stash);
        any
    }

    /// Gives the completions of tasks, from `first` on, to them, and keeps the others in order.
    fn wake(&mut self, first: usize, out: &mut Vec<Completion>) {
        if self.shared.slots.borrow().in_flight == 0 {
            return;
        }
        let mut keep = first;
        for i in first..out.len() {
            let c = out[i];
            if c.token & TASK_BIT != 0 {
                let slot = (c.token & !TASK_BIT) as u32;
                let waker = self.shared.slots.borrow_mut().complete(slot, c.raw);
                if let Some(waker) = waker {
                    waker.wake();
                }
            } else {
                out[keep] = c;
                keep += 1;
            }
        }
        out.truncate(keep);
    }

    /// Tasks that have not ended.
    pub fn tasks(&self) -> usize {
        self.shared.executor.len()
    }

    /// Operations in flight, of the hot path and of tasks.
    pub fn in_flight(&self) -> usize {
        self.engine(|e| e.in_flight()) + self.shared.remotes.in_flight.get()
    }

    /// Runs `future` to its end, and tasks beside it. Completions of the hot path that come
    /// meanwhile are in the next turn's.
    ///
    /// # Errors
    /// Those of [`turn`](Reactor::turn); `Deadlock` if the future waits for something that no
    /// operation in flight can bring.
    pub fn block_on<T>(&mut self, future: impl Future<Output = T>) -> io::Result<T> {
        let mut future = pin!(future);
        let woken = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut out = Vec::new();
        let result = loop {
            if woken.0.swap(false, Ordering::AcqRel)
                && let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                break Ok(value);
            }
            let idle = self.in_flight() == 0 && !self.shared.executor.has_ready();
            let ready = woken.0.load(Ordering::Acquire);
            if idle && !ready {
                let text = "block_on: the future waits, but no operation is in flight";
                break Err(io::Error::new(io::ErrorKind::Deadlock, text));
            }
            let wait = if ready { Wait::No } else { Wait::Until(None) };
            if let Err(e) = self.turn(wait, &mut out) {
                break Err(e);
            }
        };
        // The completions in `out` are older than those in the stash.
        let mut stash = self.shared.stash.borrow_mut();
        out.append(&mut stash);
        *stash = out;
        result
    }
}

impl Drop for Reactor {
    /// Waits for what tasks have given to the kernel, drops the tasks, then the engine, which
    /// waits for everything else that is in flight. An [`Io`] that is left gets errors from now on.
    ///
    /// A task's locks are free with it, and another thread does again what it had begun. A write
    /// of the task's must not come behind that thread's. Requests of tasks to a remote are not waited for:
    /// they may take as long as its server likes, and [`Remote::end`] says what follows.
    fn drop(&mut self) {
        let mut out = Vec::new();
        while self.shared.slots.borrow().working > 0 {
            let waited = self.engine(|e| {
                let waited = e.wait(None);
                e.reap(&mut out);
                waited
            });
            self.wake(0, &mut out);
            if waited.is_err() {
                break;
            }
        }
        self.shared.remotes.close();
        self.shared.executor.clear();
        let engine = self.shared.engine.borrow_mut().take();
        drop(engine);
        // Wakers may hold on to what holds on to the slots.
        let slots = self.shared.slots.take();
        drop(slots);
    }
}

/// The waker of `block_on`.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::uring::Uring;

    #[test]
    fn slots_of_dropped_futures_are_used_again_once_their_operations_have_ended() {
        let arena = Arena::new(1).unwrap();
        let mut r = Reactor::new(Box::new(Uring::new(arena, 8).unwrap()));
        let io = r.io();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..5 {
            let mut sleeps: Vec<_> =
                (0..4).map(|_| Box::pin(io.sleep(Duration::from_secs(3600)))).collect();
            sleeps.iter_mut().for_each(|s| assert!(s.as_mut().poll(&mut cx).is_pending()));
            drop(sleeps);
            assert_eq!(r.shared.slots.borrow().in_flight, 4);
            while r.in_flight() > 0 {
                r.turn(Wait::Until(None), &mut Vec::new()).unwrap();
            }
            let slots = r.shared.slots.borrow();
            assert_eq!((slots.in_flight, slots.free.len(), slots.slots.len()), (0, 4, 4));
        }
    }
}
