//! The lock that tasks of several threads share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ferrite_io::arena::Arena;
use ferrite_io::engines::test_engine;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::shared_lock::SharedLock;
use ferrite_testkit::errno::ENOMEM;
use ferrite_testkit::faulty::{Faults, Kind, Ops};

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

#[test]
fn who_cannot_be_woken_gets_the_lock_all_the_same() {
    let faults = Faults::none();
    faults.set([Ops::from(Kind::Wakeup).fail(ENOMEM)]);
    let mut reactor = Reactor::new(faults.open(Arena::new(1).unwrap(), 8).unwrap());
    let (io, lock) = (reactor.io(), Arc::new(SharedLock::new()));
    let held = lock.try_lock().unwrap();
    let got = Arc::new(AtomicU32::new(0));
    let (lock_, got_) = (lock.clone(), got.clone());
    reactor.spawn(async move {
        let _held = lock_.lock(&io).await.unwrap();
        got_.store(1, Ordering::SeqCst);
    });
    for _ in 0..100 {
        reactor.turn(Wait::No, &mut Vec::new()).unwrap();
        assert_eq!(got.load(Ordering::SeqCst), 0);
    }
    assert!(faults.seen(&[Kind::Wakeup]) > 1, "it tries again");
    drop(held);
    for _ in 0..100 {
        reactor.turn(Wait::No, &mut Vec::new()).unwrap();
    }
    assert_eq!(got.load(Ordering::SeqCst), 1);
    assert!(lock.try_lock().is_some());
}
