//! Computations beside a queue's thread, and transfers of many spans, on every engine.

mod common;

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::{engine, on_each_engine};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engines::EngineKind;
use ferrite_io::reactor::{Reactor, Wait};
use rustix::io::Errno;

fn reactor(kind: EngineKind) -> (Reactor, Arc<Arena>) {
    let (engine, arena) = engine(kind, 16);
    (Reactor::new(engine), arena)
}

on_each_engine!(
    more_work_than_threads_is_all_done_and_each_gets_its_own_result,
    work_that_panics_is_an_error_and_the_next_is_done,
    a_reactor_that_is_dropped_waits_for_what_is_computed,
    a_vectored_transfer_has_any_number_of_spans_and_bytes,
);

#[test]
fn what_is_computed_is_done_beside_the_thread_which_goes_on() {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        computes_beside(kind);
    }
}

fn computes_beside(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    let (go, wait) = channel();
    let io = r.io();
    let computed = Rc::new(RefCell::new(None));
    let found = computed.clone();
    r.spawn(async move {
        let work = move || {
            wait.recv_timeout(Duration::from_secs(20)).unwrap();
            thread::current().id()
        };
        *found.borrow_mut() = Some(io.compute(work).await.unwrap());
    });
    let io = r.io();
    // The work ends only after this has gone on.
    r.block_on(async move { io.sleep(Duration::from_millis(1)).await.unwrap() }).unwrap();
    assert!(computed.borrow().is_none());
    go.send(()).unwrap();
    while r.tasks() > 0 {
        r.turn(Wait::Until(None), &mut Vec::new()).unwrap();
    }
    let computed = computed.borrow().expect("the work was done");
    assert_ne!(computed, thread::current().id());
    assert_eq!(r.in_flight(), 0);
}

fn more_work_than_threads_is_all_done_and_each_gets_its_own_result(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    let results = Rc::new(RefCell::new(Vec::new()));
    for i in 0..200u64 {
        let (io, results) = (r.io(), results.clone());
        r.spawn(async move {
            let squared = io.compute(move || i * i).await.unwrap();
            results.borrow_mut().push((i, squared));
        });
    }
    while r.tasks() > 0 {
        r.turn(Wait::Until(None), &mut Vec::new()).unwrap();
    }
    let mut results = results.take();
    results.sort_unstable();
    assert!(results.iter().copied().eq((0..200).map(|i| (i, i * i))));
}

fn work_that_panics_is_an_error_and_the_next_is_done(kind: EngineKind) {
    let (mut r, _) = reactor(kind);
    // More of it than there are threads.
    for _ in 0..20 {
        let io = r.io();
        let (failed, next) = r
            .block_on(async move {
                let failed: io::Result<()> = io.compute(|| panic!("a test's work")).await;
                (failed, io.compute(|| 7).await)
            })
            .unwrap();
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
        assert_eq!(next.unwrap(), 7);
    }
}

fn a_reactor_that_is_dropped_waits_for_what_is_computed(kind: EngineKind) {
    let done = Arc::new(AtomicUsize::new(0));
    let (mut r, _) = reactor(kind);
    for _ in 0..8 {
        let (io, done) = (r.io(), done.clone());
        r.spawn(async move {
            let work = move || {
                thread::sleep(Duration::from_millis(5));
                done.fetch_add(1, Ordering::SeqCst);
            };
            io.compute(work).await.unwrap();
        });
    }
    r.turn(Wait::No, &mut Vec::new()).unwrap();
    drop(r);
    assert_eq!(done.load(Ordering::SeqCst), 8);
}

/// Spans of odd lengths, an empty one among them, that do not touch.
fn scattered(arena: &Arena, from: usize, n: usize) -> Vec<Span> {
    (0..n).map(|i| arena.span(from + i * 4096, if i == 3 { 0 } else { 100 + i * 7 })).collect()
}

fn a_vectored_transfer_has_any_number_of_spans_and_bytes(kind: EngineKind) {
    let (mut r, arena) = reactor(kind);
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    for n in [0, 1, 16, 17, 50] {
        let (from, to) = (scattered(&arena, 0, n), scattered(&arena, 1 << 20, n));
        for (i, span) in from.iter().enumerate() {
            arena.fill(*span, i as u8 + 1);
        }
        let (io, read) = (r.io(), to.clone());
        let behind = r
            .block_on(async move {
                io.write_vectored(file, 777, &from).await.unwrap();
                io.read_vectored(file, 777, &read).await.unwrap();
                io.read_vectored(file, 1 << 20, &read).await
            })
            .unwrap();
        for (i, span) in to.iter().enumerate() {
            let mut bytes = vec![0; span.len()];
            arena.copy_out(*span, &mut bytes);
            assert!(bytes.iter().all(|b| *b == i as u8 + 1), "span {i} of {n}");
        }
        let end = behind.err().map(|e| e.kind());
        assert_eq!(end, (n > 0).then_some(io::ErrorKind::UnexpectedEof));
    }
}
