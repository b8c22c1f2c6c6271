//! The reactor on every engine.

mod common;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{engine, on_each_engine};
use ferrite_io::arena::Arena;
use ferrite_io::engine::{Completion, Op, Transfer};
use ferrite_io::engines::EngineKind;
use ferrite_io::executor::LocalSignal;
use ferrite_io::reactor::{Reactor, Unheard, Wait};
use rustix::event::{EventfdFlags, eventfd};

fn reactor(kind: EngineKind) -> (Reactor, Arc<Arena>) {
    let (engine, arena) = engine(kind, 64);
    (Reactor::new(engine), arena)
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
}

on_each_engine!(
    a_file_is_written_and_read_back_by_async_code,
    the_hot_path_and_tasks_share_the_engine_and_get_their_own_completions,
    a_look_at_the_reactor_sees_tasks_and_completions,
    a_look_at_the_reactor_sees_what_a_task_has_pushed_behind_the_submission,
    #[should_panic(expected = "belong to tasks")]
    a_token_of_the_hot_path_has_63_bits,
    tasks_wait_for_time_descriptors_and_each_other,
    a_task_that_wakes_itself_keeps_nothing_from_completing,
    a_dropped_future_s_operation_ends_unseen,
    block_on_keeps_the_hot_path_s_completions_for_the_next_turn,
    block_on_says_when_nothing_can_end_it,
    a_reactor_dropped_with_tasks_ends_them_and_their_operations,
    writing_to_a_full_device_is_an_error_of_that_write_only,
    a_turn_does_not_sleep_over_what_a_task_has_done_at_its_beginning,
);

fn a_file_is_written_and_read_back_by_async_code(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let io = r.io();
    let (out, back) = (arena.span(0, 100_000), arena.span(1 << 20, 100_000));
    arena.fill(out, 0x5A);
    let a = arena.clone();
    r.block_on(async move {
        io.write_all(file, 4096, out).await.unwrap();
        io.sync(file).await.unwrap();
        io.read_exact(file, 4096, back).await.unwrap();
        let e = io.read_exact(file, 4097, back).await.unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(io.read(file, 4096 + 100_000, back).await.unwrap(), 0);
        io.read_exact(file, 4096, back).await.unwrap();
    })
    .unwrap();
    let mut bytes = vec![0u8; 100_000];
    a.copy_out(back, &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0x5A));
    assert_eq!(r.in_flight(), 0);
}

/// Turns until `done` says so.
fn turn_until(r: &mut Reactor, mut done: impl FnMut() -> bool) -> Vec<Completion> {
    let (mut out, start) = (Vec::new(), Instant::now());
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "got {out:?} only");
        r.turn(Wait::Until(Some(Duration::from_millis(100))), &mut out).unwrap();
    }
    out
}

fn the_hot_path_and_tasks_share_the_engine_and_get_their_own_completions(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let finished = Rc::new(Cell::new(0));
    for i in 0..100usize {
        let (io, finished) = (r.io(), finished.clone());
        let buf = arena.span(i * 512, 512);
        r.spawn(async move {
            io.write_all(file, i as u64 * 512, buf).await.unwrap();
            io.sync(file).await.unwrap();
            finished.set(finished.get() + 1);
        });
    }
    let mut out = Vec::new();
    for token in 0..100 {
        r.push(token, Op::Read { file, offset: 0, buf: arena.span(1 << 20, 512) });
        r.turn(Wait::No, &mut out).unwrap();
    }
    while out.len() < 100 || r.tasks() > 0 {
        r.turn(Wait::Until(None), &mut out).unwrap();
    }
    let mut tokens: Vec<u64> = out.iter().map(|c| c.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..100).collect::<Vec<_>>());
    assert_eq!((finished.get(), r.in_flight()), (100, 0));
}

fn a_look_at_the_reactor_sees_tasks_and_completions(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    assert!(!r.may_reap());
    r.spawn(async {});
    assert!(r.may_reap(), "a task is ready");
    r.turn(Wait::No, &mut Vec::new()).unwrap();
    assert!(!r.may_reap());
    let bufs = [arena.span(0, 512), arena.span(4096, 512)];
    r.push_vectored(7, Transfer::Write, file, 0, &bufs);
    let io = r.io();
    r.block_on(async move { io.sleep(Duration::from_millis(1)).await }).unwrap().unwrap();
    let mut out = Vec::new();
    while out.is_empty() {
        r.turn(Wait::Until(None), &mut out).unwrap();
    }
    assert_eq!(out, [Completion { token: 7, raw: 1024 }]);
    assert!(!r.may_reap());
}

fn a_look_at_the_reactor_sees_what_a_task_has_pushed_behind_the_submission(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let (io, buf) = (r.io(), arena.span(0, 512));
    r.spawn(async move {
        io.write_all(file, 0, buf).await.unwrap();
        io.sync(file).await.unwrap();
    });
    let (mut unsent, mut turns) = (0, 0);
    while r.tasks() > 0 {
        // Not all engines are done with the first operation in the turn that hands it over.
        r.turn(Wait::No, &mut Vec::new()).unwrap();
        unsent += u32::from(r.has_unsent());
        turns += 1;
    }
    assert_eq!(unsent, 1, "in {turns} turns: the sync, when the write has ended");
}

fn a_token_of_the_hot_path_has_63_bits(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    r.push(1 << 63, Op::Timer { after: Duration::ZERO });
}

fn tasks_wait_for_time_descriptors_and_each_other(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    let (a, b) = (Rc::new(event()), Rc::new(event()));
    let log = Rc::new(RefCell::new(Vec::new()));
    let signal = Rc::new(LocalSignal::new());
    {
        let (io, log, a, b) = (r.io(), log.clone(), a.clone(), b.clone());
        r.spawn(async move {
            io.readable(a.as_raw_fd()).await.unwrap();
            log.borrow_mut().push("a is readable");
            ring(&b);
        });
    }
    {
        let (io, log, signal) = (r.io(), log.clone(), signal.clone());
        r.spawn(async move {
            io.readable(b.as_raw_fd()).await.unwrap();
            log.borrow_mut().push("b is readable");
            let inner = log.clone();
            io.spawn(async move {
                signal.wait().await;
                inner.borrow_mut().push("signalled");
            });
        });
    }
    let io = r.io();
    let start = Instant::now();
    let (log_, signal_) = (log.clone(), signal.clone());
    r.spawn(async move {
        io.sleep(Duration::from_millis(10)).await.unwrap();
        log_.borrow_mut().push("slept");
        ring(&a);
        io.sleep(Duration::from_millis(20)).await.unwrap();
        signal_.raise();
    });
    turn_until(&mut r, || log.borrow().len() == 4);
    assert_eq!(*log.borrow(), ["slept", "a is readable", "b is readable", "signalled"]);
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!((r.tasks(), r.in_flight()), (0, 0));
}

fn a_task_that_wakes_itself_keeps_nothing_from_completing(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    r.spawn(async {
        loop {
            let mut first = true;
            std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if std::mem::take(&mut first) {
                    return std::task::Poll::Pending;
                }
                std::task::Poll::Ready(())
            })
            .await;
        }
    });
    r.push(7, Op::Timer { after: Duration::from_millis(5) });
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.is_empty() {
        // Even though it may wait for ever: there is a task to run.
        r.turn(Wait::Until(None), &mut out).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    assert_eq!(out, [Completion { token: 7, raw: 0 }]);
    assert_eq!(r.tasks(), 1);
}

/// Polls a future once and drops it.
async fn abandon(future: impl Future) {
    let mut future = Box::pin(future);
    std::future::poll_fn(|cx| {
        assert!(future.as_mut().poll(cx).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
}

fn a_dropped_future_s_operation_ends_unseen(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let event = event();
    let (io, fd, buf) = (r.io(), event.as_raw_fd(), arena.span(0, 4096));
    r.block_on(async move {
        for _ in 0..10 {
            abandon(io.write(file, 0, buf)).await;
            abandon(io.sync(file)).await;
            abandon(io.readable(fd)).await;
            abandon(io.sleep(Duration::from_secs(3600))).await;
            // The slots of those are not given to this one while they are in flight.
            assert_eq!(io.write(file, 0, buf).await.unwrap(), 4096);
        }
    })
    .unwrap();
    let (mut out, start) = (Vec::new(), Instant::now());
    while r.in_flight() > 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "{} in flight", r.in_flight());
        r.turn(Wait::Until(Some(Duration::from_millis(10))), &mut out).unwrap();
    }
    assert!(out.is_empty());
}

#[test]
fn a_sync_that_fails_is_heard_of_though_its_task_is_gone() {
    // A pipe cannot be synced.
    for (kind, fails) in
        [EngineKind::Uring, EngineKind::Aio].map(|k| [(k, false), (k, true)]).concat()
    {
        let file: OwnedFd = match fails {
            true => io::pipe().unwrap().0.into(),
            false => tempfile::tempfile().unwrap().into(),
        };
        let (mut r, _) = reactor(kind);
        let file = r.add_file(Arc::new(file)).unwrap();
        let (io, unheard) = (r.io(), Rc::new(Cell::new(false)));
        let unheard_ = unheard.clone();
        r.spawn(async move {
            let done = io.sync_heard(file, |how| unheard_.set(how == Unheard::Failed)).await;
            // Perhaps the engine was as fast as that.
            unheard_.set(done.is_err());
        });
        r.turn(Wait::No, &mut Vec::new()).unwrap();
        // It waits for the sync, and then drops the task.
        drop(r);
        assert_eq!(unheard.get(), fails);
    }
}

fn block_on_keeps_the_hot_path_s_completions_for_the_next_turn(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    for token in 0..3 {
        r.push(token, Op::Timer { after: Duration::from_millis(token) });
    }
    let io = r.io();
    let ran = Rc::new(Cell::new(false));
    let ran_ = ran.clone();
    r.spawn(async move { ran_.set(true) });
    let answer = r
        .block_on(async move {
            io.sleep(Duration::from_millis(20)).await.unwrap();
            io.sleep(Duration::from_millis(1)).await.unwrap();
            42
        })
        .unwrap();
    assert_eq!((answer, ran.get()), (42, true));
    let mut out = Vec::new();
    // They are here, so this does not wait.
    r.turn(Wait::Until(None), &mut out).unwrap();
    assert_eq!(out.iter().map(|c| c.token).collect::<Vec<_>>(), [0, 1, 2]);
}

fn block_on_says_when_nothing_can_end_it(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    let e = r.block_on(LocalSignal::new().wait()).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::Deadlock);
}

fn a_reactor_dropped_with_tasks_ends_them_and_their_operations(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let dropped = Rc::new(Cell::new(0));
    struct Count(Rc<Cell<u32>>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    for i in 0..10 {
        let (io, count, buf) = (r.io(), Count(dropped.clone()), arena.span(i << 12, 4096));
        let fd = read.as_raw_fd();
        r.spawn(async move {
            let _count = count;
            // A handle in a task is a circle that the reactor has to break.
            io.write_all(file, 0, buf).await.unwrap();
            io.readable(fd).await.unwrap();
        });
    }
    let mut out = Vec::new();
    for _ in 0..3 {
        r.turn(Wait::Until(Some(Duration::from_millis(5))), &mut out).unwrap();
    }
    let io = r.io();
    let weak = Arc::downgrade(&arena);
    drop((r, arena));
    assert_eq!(dropped.get(), 10);
    assert!(weak.upgrade().is_none(), "the engine is gone");
    drop((read, write));
    // A handle that is left answers with an error.
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let mut sleep = Box::pin(io.sleep(Duration::ZERO));
    match sleep.as_mut().poll(&mut cx) {
        std::task::Poll::Ready(Err(e)) => assert_eq!(e.kind(), io::ErrorKind::BrokenPipe),
        other => panic!("{other:?}"),
    }
}

fn writing_to_a_full_device_is_an_error_of_that_write_only(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let full = r.add_file(common::full(0)).unwrap();
    let good = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let (io, buf) = (r.io(), arena.span(0, 4096));
    r.block_on(async move {
        let e = io.write_all(full, 0, buf).await.unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EPERM));
        io.write_all(good, 0, buf).await.unwrap();
        io.zero_range(good, 0, 4096).await.unwrap_or(());
        io.punch_hole(good, 0, 4096).await.unwrap();
        assert!(io.discard(good, 0, 4096).await.is_err());
    })
    .unwrap();
}

fn a_turn_does_not_sleep_over_what_a_task_has_done_at_its_beginning(kind: EngineKind) {
    let (mut r, _arena) = reactor(kind);
    let never = event();
    r.push(7, Op::Readable { fd: never.as_raw_fd() });
    r.turn(Wait::No, &mut Vec::new()).unwrap();
    let done = Rc::new(Cell::new(false));
    r.spawn({
        let done = done.clone();
        async move { done.set(true) }
    });
    let (start, mut out) = (Instant::now(), Vec::new());
    r.turn(Wait::Until(Some(Duration::from_secs(20))), &mut out).unwrap();
    assert!(done.get() && out.is_empty());
    assert!(start.elapsed() < Duration::from_secs(10), "the caller was kept from the result");
}
