//! Futures of one task that are under way at once.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

/// A future, and what it has given.
struct Running<F: Future> {
    future: Pin<Box<F>>,
    done: Option<F::Output>,
}

/// Runs all of them, until the last has ended. The results are in their order.
pub(super) async fn all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let running = |future| Running { future: Box::pin(future), done: None };
    let mut all: Vec<Running<F>> = futures.map(running).collect();
    poll_fn(|cx| {
        let mut is_done = true;
        for Running { future, done } in all.iter_mut().filter(|one| one.done.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *done = Some(value),
                Poll::Pending => is_done = false,
            }
        }
        if is_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().filter_map(|one| one.done).collect()
}

/// Two of them.
pub(super) async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut done_a, mut done_b) = (None, None);
    poll_fn(|cx| {
        if done_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(cx)
        {
            done_a = Some(value);
        }
        if done_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(cx)
        {
            done_b = Some(value);
        }
        match (done_a.take(), done_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (done_a, done_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}
