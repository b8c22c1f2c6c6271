//! Streams on every engine, and a remote beside files.

mod common;

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{engine, on_each_engine};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Engine, MAX_VECTORED, Op, Transfer};
use ferrite_io::engines::EngineKind;

const MIB: usize = 1 << 20;

on_each_engine!(
    bytes_go_from_the_arena_through_a_socket_and_back_in_many_spans,
    a_receive_waits_for_bytes_and_a_send_for_room,
    the_end_of_a_stream_is_a_receive_of_nothing_and_a_send_to_it_fails,
    transfers_of_sockets_are_called_off_and_each_completes,
    more_transfers_of_sockets_than_both_queues_hold_all_complete,
    an_engine_is_dropped_while_it_waits_for_sockets,
    a_socket_stays_open_until_its_transfer_has_ended,
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

/// What completes without waiting, though the engine looks often.
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
