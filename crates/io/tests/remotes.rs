//! Streams on every engine, and a remote beside files.

mod common;

use std::cell::Cell;
use std::future::Future;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::{engine, on_each_engine};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Transfer};
use ferrite_io::engines::EngineKind;
use ferrite_io::reactor::{Reactor, Unheard, Wait};
use ferrite_io::remote::{Allocation, Backing};
use ferrite_io::scratch::{MIN_REGION_BYTES, Scratch};
use ferrite_testkit::remote::{Sessions, Store};

const MIB: usize = 1 << 20;

on_each_engine!(
    bytes_go_from_the_arena_through_a_socket_and_back_in_many_spans,
    a_receive_waits_for_bytes_and_a_send_for_room,
    the_end_of_a_stream_is_a_receive_of_nothing_and_a_send_to_it_fails,
    transfers_of_sockets_are_called_off_and_each_completes,
    more_transfers_of_sockets_than_both_queues_hold_all_complete,
    an_engine_is_dropped_while_it_waits_for_sockets,
    a_socket_stays_open_until_its_transfer_has_ended,
    the_hot_path_s_transfers_go_to_a_remote_and_complete_with_their_tokens,
    tasks_use_a_remote_as_a_file,
    short_transfers_of_a_remote_go_on,
    a_remote_whose_connection_is_cut_fails_all_that_is_in_flight,
    a_reactor_is_dropped_with_requests_in_flight_at_a_remote,
    a_reactor_lets_go_of_a_remote_and_goes_on_with_the_next,
    a_future_that_waits_for_a_remote_may_be_dropped,
);

fn pair() -> (Arc<OwnedFd>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Arc::new(ours.into()), theirs)
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed) >> 13) as u8).collect()
}

fn bytes_at(arena: &Arena, s: Span) -> Vec<u8> {
    let mut bytes = vec![0; s.len()];
    arena.copy_out(s, &mut bytes);
    bytes
}

/// Waits for `n` completions, in the order of their tokens.
fn wait_for(e: &mut dyn Engine, n: usize) -> Vec<Completion> {
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.len() < n {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {n} completed", out.len());
        e.wait(Some(Duration::from_secs(1))).unwrap();
        e.reap(&mut out);
    }
    out.sort_by_key(|c| c.token);
    out
}

/// The operations that complete without waiting, though the engine looks often.
fn seen(e: &mut dyn Engine) -> Vec<Completion> {
    let mut out = Vec::new();
    for _ in 0..20 {
        e.submit().unwrap();
        e.reap(&mut out);
    }
    out
}

fn stream(e: &mut dyn Engine, transfer: Transfer, socket: &Arc<OwnedFd>, bufs: &[Span]) -> i32 {
    e.push_stream(1, transfer, socket, bufs);
    let done = wait_for(e, 1);
    assert_eq!((done.len(), done[0].token, e.in_flight()), (1, 1, 0));
    done[0].raw
}

fn bytes_go_from_the_arena_through_a_socket_and_back_in_many_spans(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, mut theirs) = pair();
    let sent = pattern(MAX_VECTORED * 100, 1);
    arena.copy_in(arena.span(0, sent.len()), &sent);
    let spans = |base| -> Vec<Span> {
        (0..MAX_VECTORED).map(|i| arena.span(base + i * 100, 100)).collect()
    };
    assert_eq!(stream(&mut *e, Transfer::Write, &ours, &spans(0)), sent.len() as i32);
    let mut got = vec![0; sent.len()];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(got, sent);
    theirs.write_all(&sent).unwrap();
    assert_eq!(stream(&mut *e, Transfer::Read, &ours, &spans(MIB)), sent.len() as i32);
    assert_eq!(bytes_at(&arena, arena.span(MIB, sent.len())), sent);
    // One that is shorter than its memory, and one of no memory.
    theirs.write_all(&sent[..150]).unwrap();
    assert_eq!(stream(&mut *e, Transfer::Read, &ours, &spans(2 * MIB)), 150);
    assert_eq!(bytes_at(&arena, arena.span(2 * MIB, 151)), [&sent[..150], &[0]].concat());
    assert_eq!(stream(&mut *e, Transfer::Read, &ours, &[]), 0);
    let outside = Arena::new(8 * MIB).unwrap().span(7 * MIB, 10);
    assert_eq!(stream(&mut *e, Transfer::Read, &ours, &[outside]), -libc::EFAULT);
}

fn a_receive_waits_for_bytes_and_a_send_for_room(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, mut theirs) = pair();
    e.push_stream(1, Transfer::Read, &ours, &[arena.span(0, 4096)]);
    assert_eq!(seen(&mut *e), []);
    theirs.write_all(b"here").unwrap();
    assert_eq!(wait_for(&mut *e, 1), [Completion { token: 1, raw: 4 }]);

    let block = arena.span(MIB, MIB);
    let mut taken = 0;
    loop {
        e.push_stream(2, Transfer::Write, &ours, &[block]);
        match seen(&mut *e)[..] {
            [] => break,
            [done] => taken += done.result().unwrap() as usize,
            _ => panic!("one was pushed"),
        }
    }
    assert!(0 < taken && taken < 64 * MIB, "a socket takes a part: {taken}");
    // It is full: neither goes on before the peer has read.
    e.push(3, Op::Writable { fd: ours.as_raw_fd() });
    assert_eq!(seen(&mut *e), []);
    theirs.read_exact(&mut vec![0; taken]).unwrap();
    let done = wait_for(&mut *e, 2);
    assert!(done[0].token == 2 && done[0].raw > 0, "{done:?}");
    assert_eq!(done[1], Completion { token: 3, raw: 0 });
}

fn the_end_of_a_stream_is_a_receive_of_nothing_and_a_send_to_it_fails(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, theirs) = pair();
    e.push_stream(1, Transfer::Read, &ours, &[arena.span(0, 4096)]);
    assert_eq!(seen(&mut *e), []);
    drop(theirs);
    assert_eq!(wait_for(&mut *e, 1), [Completion { token: 1, raw: 0 }]);
    assert_eq!(stream(&mut *e, Transfer::Read, &ours, &[arena.span(0, 4096)]), 0);
    assert_eq!(stream(&mut *e, Transfer::Write, &ours, &[arena.span(0, 4096)]), -libc::EPIPE);

    let (ours, _theirs) = pair();
    e.push_stream(1, Transfer::Read, &ours, &[arena.span(0, 4096)]);
    assert_eq!(seen(&mut *e), []);
    rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).unwrap();
    assert_eq!(wait_for(&mut *e, 1), [Completion { token: 1, raw: 0 }]);
}

fn transfers_of_sockets_are_called_off_and_each_completes(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, mut theirs) = pair();
    let block = arena.span(MIB, MIB);
    while stream_now(&mut *e, Transfer::Write, &ours, block).is_some() {}
    // The last one waits with token 1.
    e.push_stream(2, Transfer::Read, &ours, &[arena.span(0, 4096)]);
    e.push(3, Op::Writable { fd: ours.as_raw_fd() });
    e.push_stream(4, Transfer::Read, &ours, &[arena.span(4096, 4096)]);
    assert_eq!(seen(&mut *e), []);
    for token in [1, 2, 3] {
        e.cancel(token);
    }
    let called_off = |token| Completion { token, raw: -libc::ECANCELED };
    assert_eq!(wait_for(&mut *e, 3), [1, 2, 3].map(called_off));
    theirs.write_all(b"for the other").unwrap();
    assert_eq!(wait_for(&mut *e, 1), [Completion { token: 4, raw: 13 }]);
    assert_eq!(bytes_at(&arena, arena.span(0, 16)), [0; 16], "nothing came to the first");
    // One that was not submitted yet.
    e.push_stream(5, Transfer::Read, &ours, &[arena.span(0, 4096)]);
    e.cancel(5);
    assert_eq!(wait_for(&mut *e, 1), [called_off(5)]);
    assert_eq!(e.in_flight(), 0);
}

/// A transfer with token 1; `None`: it waits.
fn stream_now(
    e: &mut dyn Engine,
    transfer: Transfer,
    socket: &Arc<OwnedFd>,
    buf: Span,
) -> Option<i32> {
    e.push_stream(1, transfer, socket, &[buf]);
    seen(e).first().map(|done| done.raw)
}

fn more_transfers_of_sockets_than_both_queues_hold_all_complete(kind: EngineKind) {
    const MANY: usize = 200;
    let (mut e, arena) = engine(kind, 4);
    let pairs: Vec<_> = (0..MANY).map(|_| pair()).collect();
    for (i, (ours, _)) in pairs.iter().enumerate() {
        let halves = [arena.span(i * 64, 5), arena.span(i * 64 + 32, 5)];
        e.push_stream(i as u64, Transfer::Read, ours, &halves);
        arena.copy_in(arena.span(MIB + i * 64, 10), &pattern(10, i as u32));
        let halves = [arena.span(MIB + i * 64, 4), arena.span(MIB + i * 64 + 4, 6)];
        e.push_stream((MANY + i) as u64, Transfer::Write, ours, &halves);
    }
    let sent = wait_for(&mut *e, MANY);
    assert!(sent.iter().all(|c| c.token >= MANY as u64 && c.raw == 10), "{sent:?}");
    for (i, (_, theirs)) in pairs.iter().enumerate() {
        let mut got = [0; 10];
        (&*theirs).read_exact(&mut got).unwrap();
        assert_eq!(got[..], pattern(10, i as u32));
        (&*theirs).write_all(&got).unwrap();
    }
    let received = wait_for(&mut *e, MANY);
    assert!(received.iter().all(|c| c.raw == 10), "{received:?}");
    for i in 0..MANY {
        let (first, second) = (arena.span(i * 64, 5), arena.span(i * 64 + 32, 5));
        let got = [bytes_at(&arena, first), bytes_at(&arena, second)].concat();
        assert_eq!(got, pattern(10, i as u32));
    }
}

fn an_engine_is_dropped_while_it_waits_for_sockets(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, mut theirs) = pair();
    let memory = arena.span(0, 4096);
    e.push_stream(1, Transfer::Read, &ours, &[memory]);
    e.push(2, Op::Writable { fd: ours.as_raw_fd() });
    assert_eq!(seen(&mut *e).len(), 1);
    e.push_stream(3, Transfer::Read, &ours, &[memory]);
    drop(e);
    // Nothing of it is left: neither the socket, nor who writes to the memory.
    assert_eq!((Arc::strong_count(&ours), Arc::strong_count(&arena)), (1, 1));
    theirs.write_all(b"late").unwrap();
    assert_eq!(bytes_at(&arena, arena.span(0, 4)), [0; 4]);
    drop(ours);
    assert!(theirs.write_all(b"later").is_err(), "the socket is closed");
}

fn a_socket_stays_open_until_its_transfer_has_ended(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (ours, mut theirs) = pair();
    arena.copy_in(arena.span(0, 5), b"hello");
    e.push_stream(1, Transfer::Write, &ours, &[arena.span(0, 5)]);
    // It was not submitted yet, and its number must not become another file's.
    drop(ours);
    let (_other, mut others) = pair();
    assert_eq!(wait_for(&mut *e, 1), [Completion { token: 1, raw: 5 }]);
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"hello");
    others.set_nonblocking(true).unwrap();
    assert_eq!(others.read(&mut [0; 5]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// A reactor with a file and a remote of so many bytes, on 4 MiB.
struct Both {
    store: Arc<Store>,
    arena: Arc<Arena>,
    scratch: Scratch,
    file: FileId,
    remote: FileId,
    reactor: Reactor,
}

fn both(kind: EngineKind, bytes: usize) -> Both {
    let (e, arena) = engine(kind, 16);
    let mut reactor = Reactor::new(e);
    let store = Store::new(bytes);
    let scratch = Scratch::new(arena.clone(), arena.span(3 * MIB, MIN_REGION_BYTES));
    let file = Backing::File(Arc::new(tempfile::tempfile().unwrap().into()));
    let file = reactor.add(file, &scratch).unwrap();
    let sessions = Backing::Remote(Arc::new(Sessions(store.clone())));
    let remote = reactor.add(sessions, &scratch).unwrap();
    Both { store, arena, scratch, file, remote, reactor }
}

/// Turns until so many completions of the hot path have come, in the order of their tokens.
fn turn_for(reactor: &mut Reactor, n: usize) -> Vec<Completion> {
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.len() < n {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {n} completed", out.len());
        reactor.turn(Wait::Until(Some(Duration::from_secs(1))), &mut out).unwrap();
    }
    out.sort_by_key(|c| c.token);
    out
}

/// As many requests in flight at once as that.
const DEPTH: u64 = 64;

/// Pushes writes of 4096 bytes to the remote and to the file, in one span and in two.
fn push_writes(b: &mut Both) {
    for i in 0..DEPTH {
        let (offset, buf) = (i * 4096, b.arena.span(i as usize * 4096, 4096));
        b.arena.copy_in(buf, &pattern(4096, i as u32));
        b.reactor.push(i, Op::Write { file: b.remote, offset, buf });
        let (offset, halves) = ((DEPTH + i) * 4096, [buf.slice(0, 1000), buf.slice(1000, 3096)]);
        b.reactor.push_vectored(DEPTH + i, Transfer::Write, b.remote, offset, &halves);
        b.reactor.push(2 * DEPTH + i, Op::Write { file: b.file, offset: i * 4096, buf });
    }
}

fn the_hot_path_s_transfers_go_to_a_remote_and_complete_with_their_tokens(kind: EngineKind) {
    let mut b = both(kind, MIB);
    b.store.hold();
    push_writes(&mut b);
    let of_file = turn_for(&mut b.reactor, DEPTH as usize);
    assert!(of_file.iter().all(|c| c.token >= 2 * DEPTH && c.raw == 4096), "{of_file:?}");
    let mut out = Vec::new();
    while b.store.received() < 2 * DEPTH as usize {
        b.reactor.turn(Wait::Until(Some(Duration::from_millis(1))), &mut out).unwrap();
    }
    assert_eq!((out, b.reactor.in_flight() >= 2 * DEPTH as usize), (Vec::new(), true));
    b.store.release();
    let done = turn_for(&mut b.reactor, 2 * DEPTH as usize);
    assert!(done.iter().enumerate().all(|(i, c)| (c.token, c.raw) == (i as u64, 4096)), "{done:?}");
    for i in 0..DEPTH as usize {
        let want = pattern(4096, i as u32);
        assert_eq!(b.store.bytes(i * 4096, 4096), want);
        assert_eq!(b.store.bytes((DEPTH as usize + i) * 4096, 4096), want);
    }
    for i in 0..DEPTH {
        let (one, two) =
            (b.arena.span(MIB, 4096), b.arena.span(MIB + (i as usize + 1) * 8192, 8192));
        let buf = one.slice(0, 100);
        b.reactor.push(i, Op::Read { file: b.remote, offset: i * 4096, buf });
        let halves = [two.slice(0, 10), two.slice(4096, 4086)];
        let at = (DEPTH + i) * 4096;
        b.reactor.push_vectored(DEPTH + i, Transfer::Read, b.remote, at, &halves);
    }
    let done = turn_for(&mut b.reactor, 2 * DEPTH as usize);
    assert!(done.iter().all(|c| c.raw == if c.token < DEPTH { 100 } else { 4096 }), "{done:?}");
    for i in 0..DEPTH as usize {
        let two = MIB + (i + 1) * 8192;
        let (first, second) = (b.arena.span(two, 10), b.arena.span(two + 4096, 4086));
        let got = [bytes_at(&b.arena, first), bytes_at(&b.arena, second)].concat();
        assert_eq!(got, pattern(4096, i as u32));
    }
    // The end of the data, and a remote that there is not.
    let buf = b.arena.span(0, 4096);
    b.reactor.push(1, Op::Read { file: b.remote, offset: MIB as u64 - 512, buf });
    b.reactor.push(2, Op::Read { file: b.remote, offset: MIB as u64, buf });
    b.reactor.push(3, Op::Read { file: FileId(b.remote.0 + 1), offset: 0, buf });
    b.reactor.push(4, Op::SetLen { file: b.remote, len: 0 });
    let raw: Vec<i32> = turn_for(&mut b.reactor, 4).iter().map(|c| c.raw).collect();
    assert_eq!(raw, [512, 0, -libc::EBADF, -libc::EOPNOTSUPP]);
}

fn tasks_use_a_remote_as_a_file(kind: EngineKind) {
    let Both { store, arena, file, remote, mut reactor, .. } = both(kind, MIB);
    let io = reactor.io();
    let (from, to) = (arena.span(0, 300_000), arena.span(MIB, 300_000));
    let bytes = pattern(300_000, 7);
    arena.copy_in(from, &bytes);
    let pieces: Vec<Span> = (0..300).map(|i| to.slice(i * 1000, 1000)).collect();
    reactor
        .block_on(async {
            io.write_all(remote, 4096, from).await.unwrap();
            io.sync(remote).await.unwrap();
            io.read_vectored(remote, 4096, &pieces).await.unwrap();
            io.punch_hole(remote, 4096, 1000).await.unwrap();
            io.zero_range(remote, 5096, 1000).await.unwrap();
            io.discard(remote, 6096, 1000).await.unwrap();
            let zeros = io.allocation(remote, 0, 1 << 40).await.unwrap();
            assert_eq!(zeros, Allocation { len: 7096, zeros: true });
            let data = io.allocation(remote, 7096, 1).await.unwrap();
            assert_eq!(data, Allocation { len: 1, zeros: false });
            let refused = [
                io.allocation(file, 0, 1).await.unwrap_err(),
                io.set_len(remote, 1).await.unwrap_err(),
                io.allocate(remote, 0, 4096).await.unwrap_err(),
            ];
            assert!(refused.iter().all(|e| e.kind() == io::ErrorKind::Unsupported), "{refused:?}");
            let end = io.read_exact(remote, MIB as u64 - 10, to).await.unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
            store.fail(Some(libc::ENOSPC));
            let full = io.write_all(remote, 0, from).await.unwrap_err();
            assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        })
        .unwrap();
    assert_eq!(bytes_at(&arena, to.slice(1000, 1000)), bytes[1000..2000]);
    assert_eq!(store.bytes(4096, 3000), [0; 3000]);
    assert_eq!((store.bytes(7096, 297_000), store.syncs()), (bytes[3000..].to_vec(), 1));
}

fn short_transfers_of_a_remote_go_on(kind: EngineKind) {
    let Both { store, arena, remote, mut reactor, .. } = both(kind, MIB);
    let io = reactor.io();
    store.shorten(700);
    let (from, to) = (arena.span(0, 10_000), arena.span(MIB, 10_000));
    arena.copy_in(from, &pattern(10_000, 3));
    let halves = [to.slice(0, 1234), to.slice(1234, 10_000 - 1234)];
    reactor
        .block_on(async {
            io.write_all(remote, 5, from).await.unwrap();
            io.read_vectored(remote, 5, &halves).await.unwrap();
        })
        .unwrap();
    assert_eq!(bytes_at(&arena, to), pattern(10_000, 3));
    assert_eq!(store.received(), 2 * 10_000usize.div_ceil(700));
}

fn a_remote_whose_connection_is_cut_fails_all_that_is_in_flight(kind: EngineKind) {
    let mut b = both(kind, MIB);
    b.store.hold();
    push_writes(&mut b);
    turn_for(&mut b.reactor, DEPTH as usize);
    let io = b.reactor.io();
    let (remote, buf) = (b.remote, b.arena.span(MIB, 100));
    let failed = Rc::new(Cell::new(false));
    let failed_ = failed.clone();
    b.reactor.spawn(async move {
        failed_.set(io.read(remote, 0, buf).await.is_err());
    });
    b.reactor.turn(Wait::No, &mut Vec::new()).unwrap();
    b.store.cut();
    let done = turn_for(&mut b.reactor, 2 * DEPTH as usize);
    assert!(done.iter().all(|c| c.raw == -libc::EIO), "{done:?}");
    // From now on each fails, and files go on.
    push_writes(&mut b);
    let done = turn_for(&mut b.reactor, 3 * DEPTH as usize);
    assert!(done.iter().all(|c| c.raw == if c.token < 2 * DEPTH { -libc::EIO } else { 4096 }));
    assert!(failed.get() && b.reactor.tasks() == 0);
    b.store.wait_for_the_end();
}

fn a_reactor_is_dropped_with_requests_in_flight_at_a_remote(kind: EngineKind) {
    let mut b = both(kind, MIB);
    b.store.hold();
    push_writes(&mut b);
    let (io, remote, buf) = (b.reactor.io(), b.remote, b.arena.span(MIB, 100));
    let (io_, unheard) = (io.clone(), Rc::new(Cell::new(None)));
    let unheard_ = unheard.clone();
    b.reactor.spawn(async move {
        io_.sync_heard(remote, |how| unheard_.set(Some(how))).await.unwrap();
    });
    let mut out = Vec::new();
    while b.store.received() < DEPTH as usize {
        b.reactor.turn(Wait::Until(Some(Duration::from_millis(1))), &mut out).unwrap();
    }
    let Both { store, arena, scratch, reactor, .. } = b;
    drop(reactor);
    drop(scratch);
    // It did not wait for the other side, and nothing holds on to the memory.
    assert_eq!(unheard.get(), Some(Unheard::Unknown));
    assert_eq!(Arc::strong_count(&arena), 1);
    store.release();
    store.wait_for_the_end();
    let mut late = pin!(io.read(remote, 0, buf));
    let mut cx = Context::from_waker(Waker::noop());
    let Poll::Ready(late) = late.as_mut().poll(&mut cx) else { panic!("it waits for nothing") };
    assert_eq!(late.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

fn a_reactor_lets_go_of_a_remote_and_goes_on_with_the_next(kind: EngineKind) {
    let mut b = both(kind, MIB);
    let mut out = Vec::new();
    for round in 0..5u8 {
        let (io, remote, buf) = (b.reactor.io(), b.remote, b.arena.span(0, 4096));
        b.arena.fill(buf, round + 1);
        b.reactor.block_on(io.write_all(remote, 0, buf)).unwrap().unwrap();
        assert_eq!(b.store.bytes(0, 4096), [round + 1; 4096]);
        let old = std::mem::replace(&mut b.store, Store::new(MIB));
        b.reactor.clear_files().unwrap();
        b.reactor.push(1, Op::Read { file: remote, offset: 0, buf });
        assert_eq!(turn_for(&mut b.reactor, 1)[0].raw, -libc::EBADF);
        while b.reactor.tasks() > 0 {
            b.reactor.turn(Wait::Until(Some(Duration::from_millis(10))), &mut out).unwrap();
        }
        old.wait_for_the_end();
        let next = Backing::Remote(Arc::new(Sessions(b.store.clone())));
        assert_eq!(b.reactor.add(next, &b.scratch).unwrap(), remote, "the first again");
    }
    assert_eq!(out, []);
}

fn a_future_that_waits_for_a_remote_may_be_dropped(kind: EngineKind) {
    let mut b = both(kind, MIB);
    let (io, remote, buf) = (b.reactor.io(), b.remote, b.arena.span(0, 4096));
    b.store.hold();
    let mut cx = Context::from_waker(Waker::noop());
    {
        let mut read = pin!(io.read(remote, 0, buf));
        assert!(read.as_mut().poll(&mut cx).is_pending());
    }
    let other = b.arena.span(4096, 4096);
    let mut next = Box::pin(io.read(remote, 4096, other));
    assert!(next.as_mut().poll(&mut cx).is_pending());
    b.store.release();
    // The reply to the first one is not taken for that to the second.
    assert_eq!(b.reactor.block_on(next).unwrap().unwrap(), 4096);
    b.reactor.push(5, Op::Read { file: remote, offset: 0, buf });
    assert_eq!(turn_for(&mut b.reactor, 1), [Completion { token: 5, raw: 4096 }]);
}
