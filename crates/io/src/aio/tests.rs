//! Cases that only AIO has: the mapped ring, or none; a context that is full.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use super::*;

const PAGE: usize = 4096;

fn engine(entries: u32) -> (Aio, Arc<Arena>) {
    let arena = Arena::new(4 << 20).unwrap();
    (Aio::new(arena.clone(), entries).unwrap(), arena)
}

fn file(bytes: &[u8]) -> Arc<OwnedFd> {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    Arc::new(file.into())
}

fn wait_for(e: &mut Aio, n: usize) -> Vec<Completion> {
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.len() < n {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {n} completed", out.len());
        e.wait(Some(Duration::from_secs(1))).unwrap();
        e.reap(&mut out);
    }
    out.sort_by_key(|c| c.token);
    out
}

#[test]
fn this_kernel_s_ring_is_read_without_a_system_call() {
    let (mut e, arena) = engine(8);
    assert!(e.context.has_ring());
    let f = e.add_file(file(&[1; PAGE])).unwrap();
    e.push(1, Op::Read { file: f, offset: 0, buf: arena.span(0, PAGE) });
    e.submit().unwrap();
    let start = Instant::now();
    while !e.may_reap() {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    let mut out = Vec::new();
    e.reap(&mut out);
    assert_eq!(out, [Completion { token: 1, raw: PAGE as i32 }]);
    assert!(!e.may_reap());
}

/// With the ring and without, many more operations than it holds, with waits beside them.
#[test]
fn completions_are_asked_for_where_the_ring_is_unknown() {
    for known in [true, false] {
        let (mut e, arena) = engine(4);
        if !known {
            e.context.forget_ring();
        }
        let bytes: Vec<u8> = (0..64u8).flat_map(|page| [page; PAGE]).collect();
        let f = e.add_file(file(&bytes)).unwrap();
        e.push(1000, Op::Timer { after: Duration::from_millis(1) });
        for page in 0..64 {
            let (offset, buf) = (page * PAGE as u64, arena.span(page as usize * PAGE, PAGE));
            e.push(page, Op::Read { file: f, offset, buf });
            e.push(100 + page, Op::Sync { file: f });
        }
        let done = wait_for(&mut e, 129);
        assert!(done[..64].iter().all(|c| c.raw == PAGE as i32), "{done:?}");
        assert!(done[64..].iter().all(|c| c.raw == 0), "{done:?}");
        let mut back = vec![0; 64 * PAGE];
        arena.copy_out(arena.span(0, 64 * PAGE), &mut back);
        assert_eq!(back, bytes);
        assert_eq!(e.in_flight(), 0);
        e.wait(Some(Duration::from_millis(5))).unwrap();
    }
}

#[test]
fn what_the_context_has_no_room_for_goes_there_later() {
    let (mut e, arena) = engine(1);
    let f = e.add_file(file(&[7; PAGE])).unwrap();
    // Syncs end on the kernel's own threads, so they do fill the context.
    for token in 0..2000 {
        match token % 2 {
            0 => e.push(token, Op::Sync { file: f }),
            _ => e.push(token, Op::Write { file: f, offset: 0, buf: arena.span(0, PAGE) }),
        }
    }
    e.submit().unwrap();
    assert_eq!(e.in_flight(), 2000);
    let done = wait_for(&mut e, 2000);
    assert!(done.iter().enumerate().all(|(i, c)| c.token == i as u64 && c.raw >= 0));
}

#[test]
fn vectors_of_what_the_kernel_has_taken_are_let_go() {
    let (mut e, arena) = engine(1);
    let f = e.add_file(file(&[7; 3 * PAGE])).unwrap();
    let (mut out, mut pushed, mut reaps) = (Vec::new(), 0, 0);
    while reaps < 5 {
        let bufs = [arena.span(0, PAGE), arena.span(2 * PAGE, PAGE)];
        e.push_vectored(pushed, Transfer::Read, f, pushed % 2 * PAGE as u64, &bufs);
        pushed += 1;
        assert_eq!(e.vectors.len(), e.queued.len());
        // Room for a part of what waits.
        if e.queued.len() > e.in_kernel {
            e.reap(&mut out);
            reaps += 1;
        }
    }
    let left = pushed as usize - out.len();
    out.extend(wait_for(&mut e, left));
    assert!(out.iter().all(|c| c.raw == 2 * PAGE as i32), "{out:?}");
}

#[test]
fn an_operation_that_the_kernel_refuses_takes_no_other_with_it() {
    let (mut e, arena) = engine(8);
    let good = e.add_file(file(&[7; PAGE])).unwrap();
    // Neither reads nor syncs: an eventfd has no such operations.
    let bad = e.add_file(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())).unwrap();
    let buf = arena.span(0, PAGE);
    for (token, file) in [(0, good), (1, bad), (2, bad), (3, good)] {
        e.push(token, Op::Write { file, offset: 0, buf });
        e.push(10 + token, Op::Sync { file });
    }
    let done = wait_for(&mut e, 8);
    let raw: Vec<i32> = done.iter().map(|c| c.raw).collect();
    let refused = -libc::EINVAL;
    assert_eq!(raw, [PAGE as i32, refused, refused, PAGE as i32, 0, refused, refused, 0]);
}

#[test]
fn a_kernel_that_cannot_sync_has_it_done_by_the_helper() {
    let (mut e, _) = engine(8);
    let f = e.add_file(file(&[7; PAGE])).unwrap();
    let iocb = e.iocb(5, context::FDSYNC, f, 0).unwrap();
    e.refused(&iocb, f, libc::EINVAL);
    assert_eq!(e.offload.as_ref().unwrap().outstanding, 1);
    assert_eq!(wait_for(&mut e, 1), [Completion { token: 5, raw: 0 }]);
    e.refused(&iocb, f, libc::EBADF);
    assert_eq!(wait_for(&mut e, 1), [Completion { token: 5, raw: -libc::EBADF }]);
}

/// A signal of the eventfd that comes after its completion was taken must not keep the engine
/// from sleeping for ever.
#[test]
fn a_late_signal_of_the_eventfd_wakes_once() {
    let (mut e, _) = engine(8);
    rustix::io::write(&e.eventfd, &1u64.to_ne_bytes()).unwrap();
    e.sleep(Some(deadline_ns(Duration::from_secs(3600))));
    assert!(e.stale);
    let start = Instant::now();
    e.sleep(Some(deadline_ns(Duration::from_millis(20))));
    assert!(start.elapsed() >= Duration::from_millis(20) && !e.stale);
}

#[test]
fn descriptors_are_seen_although_completions_never_end() {
    let (mut e, arena) = engine(8);
    let f = e.add_file(file(&[7; PAGE])).unwrap();
    let event = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    e.push(100, Op::Readable { fd: event.as_raw_fd() });
    let (mut out, mut turns) = (Vec::new(), 0);
    while !out.iter().any(|c: &Completion| c.token == 100) {
        assert!(turns <= UNSEEN_SUBMITS, "the descriptor starves");
        turns += 1;
        e.push(1, Op::Read { file: f, offset: 0, buf: arena.span(0, PAGE) });
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
}

#[test]
fn a_drop_waits_for_the_helper_too() {
    let (mut e, arena) = engine(8);
    let owned = file(&[7; PAGE]);
    let f = e.add_file(owned.clone()).unwrap();
    let nap = Duration::from_millis(60);
    let start = Instant::now();
    e.offload(0, f, Call::Nap(nap));
    e.push(7, Op::Write { file: f, offset: 0, buf: arena.span(0, PAGE) });
    assert_eq!(wait_for(&mut e, 1)[0].token, 7, "the write waited for the call");
    drop(e);
    assert!(start.elapsed() >= nap);
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
fn errors_of_the_setup_say_what_to_do() {
    let e: io::Error = AioError::Full(100).into();
    assert!(e.to_string().contains("fs.aio-max-nr"), "{e}");
    // The kernel refuses this many with EINVAL or, by its limit, EAGAIN.
    let e = Aio::new(Arena::new(1).unwrap(), u32::MAX).unwrap_err();
    assert!(e.to_string().contains("AIO"), "{e}");
}
