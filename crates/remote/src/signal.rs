//! Signals between tasks of one thread.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Poll, Waker};

/// A flag that one task waits for and others raise.
#[derive(Default)]
pub(crate) struct Signal {
    raised: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

impl Signal {
    /// Wakes the task that waits, or spares the next one its wait.
    pub(crate) fn raise(&self) {
        self.raised.set(true);
        let waiting = self.waiting.take();
        if let Some(waker) = waiting {
            waker.wake();
        }
    }

    /// Waits until it is raised, and lowers it.
    pub(crate) async fn wait(&self) {
        poll_fn(|cx| {
            if self.raised.replace(false) {
                return Poll::Ready(());
            }
            self.waiting.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

/// The result of the future that ends first; the other one is dropped.
pub(crate) async fn first<T>(a: impl Future<Output = T>, b: impl Future<Output = T>) -> T {
    let (mut a, mut b) = (pin!(a), pin!(b));
    poll_fn(|cx| match a.as_mut().poll(cx) {
        Poll::Pending => b.as_mut().poll(cx),
        ready => ready,
    })
    .await
}
