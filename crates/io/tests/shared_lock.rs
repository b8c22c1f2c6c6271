//! The lock that tasks of several threads share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ferrite_io::arena::Arena;
use ferrite_io::engines::test_engine;
use ferrite_io::reactor::Reactor;
use ferrite_io::shared_lock::SharedLock;

fn reactor() -> Reactor {
    Reactor::new(test_engine().open(Arena::new(1).unwrap(), 8).unwrap())
}

#[test]
fn one_task_at_a_time_holds_the_lock_whatever_its_thread() {
    let lock = Arc::new(SharedLock::new());
    let (inside, done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (lock, inside, done) = (lock.clone(), inside.clone(), done.clone());
            std::thread::spawn(move || {
                let mut reactor = reactor();
                let io = reactor.io();
                let work = async {
                    for _ in 0..50 {
                        let held = lock.lock(&io).await.unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        io.sleep(std::time::Duration::from_micros(20)).await.unwrap();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                };
                reactor.block_on(work).unwrap();
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(done.load(Ordering::SeqCst), 200);
    assert!(lock.try_lock().is_some());
}

#[test]
fn who_gives_up_waiting_neither_keeps_the_lock_nor_its_place() {
    use std::future::Future;
    use std::task::{Context, Waker};
    let lock = SharedLock::new();
    let mut reactor = reactor();
    let io = reactor.io();
    let mut cx = Context::from_waker(Waker::noop());
    let held = lock.try_lock().unwrap();
    assert!(lock.try_lock().is_none());
    let mut first = Box::pin(lock.lock(&io));
    let mut second = Box::pin(lock.lock(&io));
    assert!(first.as_mut().poll(&mut cx).is_pending());
    assert!(second.as_mut().poll(&mut cx).is_pending());
    drop(held);
    assert!(lock.try_lock().is_none(), "it was handed to the first");
    drop(first);
    let held = reactor.block_on(second).unwrap().unwrap();
    assert!(lock.try_lock().is_none());
    drop(held);
    assert!(lock.try_lock().is_some());
}
