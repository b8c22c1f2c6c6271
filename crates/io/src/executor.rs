//! A small executor for one thread: straight-line `async fn` for whatever has steps.
//!
//! Tasks are polled by [`Executor::run`] and nowhere else, in the order in which they were woken,
//! so the same wakings give the same history. A waker may be used on any thread, but it does not
//! end a wait in the kernel: what comes from another thread comes through a descriptor that a
//! task waits for.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// Indices of the tasks that were woken, in that order.
#[derive(Default)]
struct ReadyQueue {
    indices: Mutex<VecDeque<u32>>,
    /// The length of `indices`, for a look without the lock.
    len: AtomicUsize,
}

impl ReadyQueue {
    fn push(&self, index: u32) {
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        indices.push_back(index);
        self.len.store(indices.len(), Ordering::Release);
    }

    fn pop(&self) -> Option<u32> {
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        let index = indices.pop_front();
        self.len.store(indices.len(), Ordering::Release);
        index
    }
}

/// What a waker holds on to.
struct Task {
    index: u32,
    ready: Arc<ReadyQueue>,
    /// In the ready queue already, or ended: waking it does nothing.
    queued: AtomicBool,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.ready.push(self.index);
        }
    }
}

struct Slot {
    task: Arc<Task>,
    waker: Waker,
    /// `None` while it is being polled.
    future: Option<LocalFuture>,
}

#[derive(Default)]
struct Tasks {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
}

/// The tasks of one thread.
#[derive(Default)]
pub struct Executor {
    tasks: RefCell<Tasks>,
    ready: Arc<ReadyQueue>,
    live: Cell<usize>,
}

impl Executor {
    /// With no task.
    pub fn new() -> Executor {
        Executor::default()
    }

    /// Adds a task; it is polled for the first time in the next [`run`](Executor::run). Tasks may
    /// spawn tasks.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        let index = tasks.free.pop().unwrap_or_else(|| {
            tasks.slots.push(None);
            // One slot a living task: memory ends before 32 bits do.
            (tasks.slots.len() - 1) as u32
        });
        let task =
            Arc::new(Task { index, ready: self.ready.clone(), queued: AtomicBool::new(true) });
        let waker = Waker::from(task.clone());
        tasks.slots[index as usize] = Some(Slot { task, waker, future: Some(Box::pin(future)) });
        self.live.set(self.live.get() + 1);
        self.ready.push(index);
    }

    /// Polls tasks that were woken until there is none, or `max_polls` polls were made: a task
    /// that wakes itself must not keep its thread from everything else. Returns the polls made.
    pub fn run(&self, max_polls: usize) -> usize {
        let mut polls = 0;
        while polls < max_polls && self.has_ready() {
            let Some(index) = self.ready.pop() else { break };
            polls += usize::from(self.poll(index));
        }
        polls
    }

    fn poll(&self, index: u32) -> bool {
        let at = index as usize;
        let taken = match self.tasks.borrow_mut().slots.get_mut(at) {
            Some(Some(slot)) => {
                slot.task.queued.store(false, Ordering::Release);
                slot.future.take().map(|future| (future, slot.waker.clone()))
            }
            _ => None,
        };
        let Some((mut future, waker)) = taken else { return false };
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => {
                if let Some(Some(slot)) = self.tasks.borrow_mut().slots.get_mut(at) {
                    slot.future = Some(future);
                }
            }
            Poll::Ready(()) => {
                // Its own drop may use the executor, so nothing is borrowed during it.
                drop(future);
                let ended = {
                    let mut tasks = self.tasks.borrow_mut();
                    tasks.free.push(index);
                    tasks.slots[at].take()
                };
                if let Some(slot) = ended
                    && slot.task.queued.swap(true, Ordering::AcqRel)
                {
                    // It woke itself in its last poll; its index is in the queue once more and
                    // may find the next task of the slot there: one poll too many, no harm.
                    tracing::trace!(index, "a task was woken as it ended");
                }
                self.live.set(self.live.get() - 1);
            }
        }
        true
    }

    /// Whether a task was woken and not polled since.
    pub fn has_ready(&self) -> bool {
        self.ready.len.load(Ordering::Acquire) > 0
    }

    /// Tasks that have not ended.
    pub fn len(&self) -> usize {
        self.live.get()
    }

    /// Whether no task is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops all tasks where they stand, and those that they spawn while being dropped.
    pub fn clear(&self) {
        loop {
            let slots = std::mem::take(&mut *self.tasks.borrow_mut()).slots;
            while self.ready.pop().is_some() {}
            let dropped = slots.into_iter().flatten().map(drop).count();
            if dropped == 0 {
                break;
            }
            self.live.set(self.live.get() - dropped);
        }
    }
}

/// A flag that tasks of one thread can wait for. It stays raised until it is lowered, so no
/// wake-up is lost between a look and a wait.
#[derive(Default)]
pub struct LocalSignal {
    raised: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl LocalSignal {
    /// Lowered.
    pub fn new() -> LocalSignal {
        LocalSignal::default()
    }

    /// Raises the flag and wakes everyone who waits for it.
    pub fn raise(&self) {
        self.raised.set(true);
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    /// Lowers the flag.
    pub fn lower(&self) {
        self.raised.set(false);
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.get()
    }

    /// Waits until the flag is raised; it stays so.
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if self.is_raised() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|w| w.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}
