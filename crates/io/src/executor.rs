//! A small executor for one thread: straight-line `async fn` for whatever has steps.
//!
//! Tasks are polled by [`Executor::run`] and nowhere else, in the order in which they were woken,
//! so the same wakings give the same history. A waker may be used on any thread, but it does not
//! end a wait in the kernel: news from another thread come through a descriptor that a task
//! waits for.

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
    /// The length of `indices`, and tasks that have yielded: for a look without the lock.
    len: AtomicUsize,
}

impl ReadyQueue {
    fn push(&self, index: u32) {
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        indices.push_back(index);
        self.len.fetch_add(1, Ordering::Release);
    }

    fn pop(&self) -> Option<u32> {
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        let index = indices.pop_front()?;
        self.len.fetch_sub(1, Ordering::Release);
        Some(index)
    }
}

/// The part of a task that a waker holds on to.
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
    /// Tasks that let everything else go first, in that order.
    yielded: RefCell<VecDeque<Waker>>,
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
    /// that wakes itself must not keep its thread from everything else. The first of those that
    /// have yielded is one of them. Returns the polls and wakings made.
    pub fn run(&self, max_polls: usize) -> usize {
        let mut polls = usize::from(self.has_ready() && self.resume_one());
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
                if let Some(slot) = ended {
                    // Wakers that are left do nothing from now on. If it woke itself in its last
                    // poll, its index is queued once more, and the next task with that index gets
                    // a poll too many: no harm.
                    slot.task.queued.store(true, Ordering::Release);
                }
                self.live.set(self.live.get() - 1);
            }
        }
        true
    }

    /// Wakes `waker` in one of the next [`run`](Executor::run)s, when those before it had theirs: one
    /// run wakes one. So what many tasks do at length takes a bounded part of their thread's time.
    pub fn yield_to_others(&self, waker: &Waker) {
        self.yielded.borrow_mut().push_back(waker.clone());
        self.ready.len.fetch_add(1, Ordering::Release);
    }

    fn resume_one(&self) -> bool {
        let Some(waker) = self.yielded.borrow_mut().pop_front() else { return false };
        self.ready.len.fetch_sub(1, Ordering::Release);
        waker.wake();
        true
    }

    /// Whether a task was woken, or has yielded, and was not polled since.
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
            let yielded = self.yielded.take();
            self.ready.len.fetch_sub(yielded.len(), Ordering::Release);
            drop(yielded);
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

    /// Raises the flag and wakes all tasks that wait for it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    /// Gives up its turn `n` times.
    async fn yields(n: usize) {
        let mut left = n;
        poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    #[test]
    fn of_the_tasks_that_yield_each_run_polls_one_in_turn_and_all_others_that_are_ready() {
        let e = Rc::new(Executor::new());
        let turns: Rc<RefCell<Vec<u32>>> = Rc::default();
        for task in 0..3 {
            let (executor, turns) = (e.clone(), turns.clone());
            e.spawn(async move {
                for _ in 0..4 {
                    turns.borrow_mut().push(task);
                    let mut yielded = false;
                    poll_fn(|cx| {
                        if std::mem::replace(&mut yielded, true) {
                            return Poll::Ready(());
                        }
                        executor.yield_to_others(cx.waker());
                        Poll::Pending
                    })
                    .await;
                }
            });
        }
        e.run(100);
        assert_eq!(turns.take(), [0, 1, 2], "their first polls");
        let other = Rc::new(Cell::new(0));
        for run in 1..=9 {
            assert!(e.has_ready());
            let counted = other.clone();
            e.spawn(async move { counted.set(counted.get() + 1) });
            e.run(100);
            assert_eq!((turns.borrow().len(), other.get()), (run, run));
        }
        assert_eq!(turns.take(), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(e.len(), 3, "each has its last turn to come");
        e.clear();
        assert!(e.is_empty() && !e.has_ready());
    }

    #[test]
    fn tasks_run_in_the_order_in_which_they_were_woken() {
        let e = Rc::new(Executor::new());
        let log = Rc::new(RefCell::new(Vec::new()));
        for i in 0..3 {
            let log = log.clone();
            e.spawn(async move {
                log.borrow_mut().push(i);
                yields(1).await;
                log.borrow_mut().push(i + 10);
            });
        }
        assert!(log.borrow().is_empty() && e.len() == 3);
        assert_eq!(e.run(usize::MAX), 6);
        assert_eq!(*log.borrow(), [0, 1, 2, 10, 11, 12]);
        assert!(e.is_empty() && !e.has_ready());
    }

    #[test]
    fn a_run_makes_no_more_polls_than_it_may() {
        let e = Executor::new();
        e.spawn(yields(1000));
        assert_eq!(e.run(10), 10);
        assert!(e.has_ready());
        assert_eq!(e.run(usize::MAX), 991);
        assert_eq!((e.len(), e.run(usize::MAX)), (0, 0));
    }

    #[test]
    fn a_task_woken_often_is_polled_once() {
        let e = Executor::new();
        let signal = Rc::new(LocalSignal::new());
        let polls = Rc::new(Cell::new(0));
        let (s, p) = (signal.clone(), polls.clone());
        e.spawn(async move {
            let mut wait = std::pin::pin!(s.wait());
            poll_fn(|cx| {
                p.set(p.get() + 1);
                wait.as_mut().poll(cx)
            })
            .await;
        });
        e.run(usize::MAX);
        let wakers = signal.waiting.borrow().clone();
        wakers.iter().chain(&wakers).for_each(Waker::wake_by_ref);
        assert_eq!((e.run(usize::MAX), polls.get()), (1, 2));
        signal.raise();
        e.run(usize::MAX);
        assert_eq!((e.len(), polls.get()), (0, 3));
    }

    #[test]
    fn a_waker_that_outlives_its_task_does_nothing() {
        let e = Executor::new();
        let kept = Rc::new(RefCell::new(None));
        let k = kept.clone();
        e.spawn(async move {
            poll_fn(|cx| {
                *k.borrow_mut() = Some(cx.waker().clone());
                Poll::Ready(())
            })
            .await;
        });
        e.run(usize::MAX);
        kept.take().unwrap().wake();
        assert!(!e.has_ready());
    }

    #[test]
    fn a_waker_works_from_another_thread() {
        let e = Executor::new();
        let kept = Arc::new(Mutex::new(None::<Waker>));
        let k = kept.clone();
        let mut polls = 0;
        e.spawn(poll_fn(move |cx| {
            *k.lock().unwrap() = Some(cx.waker().clone());
            polls += 1;
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        }));
        e.run(usize::MAX);
        let waker = kept.lock().unwrap().take().unwrap();
        std::thread::spawn(move || waker.wake()).join().unwrap();
        assert_eq!((e.run(usize::MAX), e.len()), (1, 0));
    }

    #[test]
    fn clear_drops_tasks_and_those_that_they_spawn_while_dropped() {
        struct Spawner(Rc<Executor>, u32);
        impl Drop for Spawner {
            fn drop(&mut self) {
                if self.1 > 0 {
                    let next = Spawner(self.0.clone(), self.1 - 1);
                    self.0.spawn(async move {
                        let _next = next;
                        std::future::pending::<()>().await;
                    });
                }
            }
        }
        let e = Rc::new(Executor::new());
        drop(Spawner(e.clone(), 3));
        e.run(usize::MAX);
        assert_eq!(e.len(), 1);
        e.clear();
        assert_eq!((e.len(), Rc::strong_count(&e)), (0, 1));
        e.spawn(async {});
        assert_eq!((e.run(usize::MAX), e.len()), (1, 0));
    }

    #[test]
    fn a_signal_stays_raised_until_it_is_lowered() {
        let e = Executor::new();
        let signal = Rc::new(LocalSignal::new());
        signal.raise();
        for (raised, left) in [(true, 0), (false, 1)] {
            if !raised {
                signal.lower();
            }
            let s = signal.clone();
            e.spawn(async move { s.wait().await });
            e.run(usize::MAX);
            assert_eq!(e.len(), left);
        }
        signal.raise();
        e.run(usize::MAX);
        assert!(e.is_empty() && signal.is_raised());
    }
}
