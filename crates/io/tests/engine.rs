//! Every engine on real files.

mod common;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{engine, on_each_engine};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Transfer};
use ferrite_io::engines::EngineKind;
use rustix::event::{EventfdFlags, eventfd};

const MIB: usize = 1 << 20;

/// A file with these bytes on disk.
fn file(bytes: &[u8]) -> Arc<OwnedFd> {
    file_in(&std::env::temp_dir(), bytes)
}

fn file_in(dir: &std::path::Path, bytes: &[u8]) -> Arc<OwnedFd> {
    let f = tempfile::tempfile_in(dir).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&f, bytes, 0).unwrap();
    Arc::new(f.into())
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

fn run(e: &mut dyn Engine, op: Op) -> i32 {
    e.push(1, op);
    let done = wait_for(e, 1);
    assert_eq!((done.len(), done[0].token, e.in_flight()), (1, 1, 0));
    done[0].raw
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
}

on_each_engine!(
    what_is_written_is_read_back_on_disk_and_on_tmpfs,
    direct_io_uses_the_registered_memory,
    a_read_at_the_end_of_the_file_is_short_and_behind_it_empty,
    the_medium_s_errors_come_back_and_the_engine_goes_on,
    what_is_wrong_with_an_operation_is_its_completion,
    holes_are_punched_and_ranges_zeroed_without_growing_the_file,
    files_are_made_longer_with_space_of_their_own_and_cut_off,
    a_discard_of_a_regular_file_is_refused_by_its_completion,
    more_operations_than_both_queues_hold_all_complete,
    a_vectored_transfer_is_one_operation_on_many_spans,
    a_vectored_read_at_the_end_of_the_file_is_short,
    more_vectored_transfers_than_the_queues_hold_keep_their_own_spans,
    what_is_wrong_with_a_vectored_transfer_is_its_completion,
    #[should_panic(expected = "17 spans")]
    a_vectored_transfer_has_a_bounded_number_of_spans,
    a_look_tells_when_there_is_something_to_reap,
    polling_finds_completions_without_waiting,
    timers_take_their_time,
    a_wait_ends_with_its_time_or_with_a_completion,
    a_signal_does_not_shorten_a_wait,
    a_descriptor_is_reported_when_it_becomes_readable_and_not_before,
    waits_are_called_off_and_data_is_not,
    an_engine_dropped_with_operations_in_flight_finishes_them_first,
    an_engine_that_was_never_used_is_dropped_without_doing_anything,
);

fn what_is_written_is_read_back_on_disk_and_on_tmpfs(kind: EngineKind) {
    for dir in ["/var/tmp", "/dev/shm"] {
        let Ok(f) = tempfile::tempfile_in(dir) else { continue };
        let (mut e, arena) = engine(kind, 8);
        let f = e.add_file(Arc::new(f.into())).unwrap();
        let (to, back) = (arena.span(5, 10_000), arena.span(MIB, 10_000));
        arena.copy_in(to, &pattern(10_000, 1));
        assert_eq!(run(e.as_mut(), Op::Write { file: f, offset: 70_000, buf: to }), 10_000);
        assert_eq!(run(e.as_mut(), Op::Sync { file: f }), 0);
        assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 70_000, buf: back }), 10_000);
        assert_eq!(bytes_at(&arena, back), pattern(10_000, 1));
    }
}

fn direct_io_uses_the_registered_memory(kind: EngineKind) {
    use std::os::unix::fs::OpenOptionsExt;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, pattern(64 << 10, 2)).unwrap();
    let mut options = File::options();
    let Ok(f) = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path) else {
        return; // A file system without O_DIRECT.
    };
    let (mut e, arena) = engine(kind, 8);
    e.pin(arena.span(0, arena.len()));
    let f = e.add_file(Arc::new(f.into())).unwrap();
    let buf = arena.span(4096, 32 << 10);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 4096, buf }), 32 << 10);
    assert_eq!(bytes_at(&arena, buf), pattern(64 << 10, 2)[4096..4096 + (32 << 10)]);
    arena.fill(buf, 3);
    assert_eq!(run(e.as_mut(), Op::Write { file: f, offset: 0, buf }), 32 << 10);
    assert_eq!(std::fs::read(&path).unwrap()[..32 << 10], [3; 32 << 10]);
    // A transfer that is not aligned to the block is refused, by an error and nothing else.
    let odd = arena.span(0, 511);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 0, buf: odd }), -libc::EINVAL);
}

fn a_read_at_the_end_of_the_file_is_short_and_behind_it_empty(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let f = e.add_file(file(&[9; 1000])).unwrap();
    let buf = arena.span(0, 4096);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 0, buf }), 1000);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 999, buf }), 1);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 1000, buf }), 0);
    let nothing = arena.span(0, 0);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 0, buf: nothing }), 0);
}

fn the_medium_s_errors_come_back_and_the_engine_goes_on(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let full = e.add_file(common::full(512)).unwrap();
    // Write-only.
    let broken = e.add_file(Arc::new(File::create("/dev/null").unwrap().into())).unwrap();
    let good = e.add_file(file(&[7; 512])).unwrap();
    let buf = arena.span(0, 512);
    assert_eq!(run(e.as_mut(), Op::Write { file: full, offset: 512, buf }), -libc::EPERM);
    assert_eq!(run(e.as_mut(), Op::Read { file: broken, offset: 0, buf }), -libc::EBADF);
    assert_eq!(run(e.as_mut(), Op::Read { file: good, offset: 0, buf }), 512);
}

fn what_is_wrong_with_an_operation_is_its_completion(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let f = e.add_file(file(&[0; 512])).unwrap();
    let buf = arena.span(0, 512);
    let other = Arena::new(8 * MIB).unwrap();
    let outside = other.span(8 * MIB - 512, 512);
    let no_file = FileId(77);
    let cases = [
        (Op::Read { file: no_file, offset: 0, buf }, libc::EBADF),
        (Op::Discard { file: no_file, offset: 0, len: 512 }, libc::EBADF),
        (Op::Read { file: f, offset: 0, buf: outside }, libc::EFAULT),
        // -1 would mean the file's own position.
        (Op::Write { file: f, offset: u64::MAX, buf }, libc::EINVAL),
        (Op::PunchHole { file: f, offset: 0, len: u64::MAX }, libc::EINVAL),
        (Op::PunchHole { file: f, offset: 0, len: 0 }, libc::EINVAL),
        (Op::Readable { fd: -1 }, libc::EBADF),
    ];
    for (op, errno) in cases {
        assert_eq!(run(e.as_mut(), op), -errno, "{op:?}");
    }
}

fn holes_are_punched_and_ranges_zeroed_without_growing_the_file(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let owned = file(&[7; 64 << 10]);
    let f = e.add_file(owned.clone()).unwrap();
    let blocks = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_blocks;
    let before = blocks(&owned);
    assert_eq!(run(e.as_mut(), Op::PunchHole { file: f, offset: 4096, len: 16 << 10 }), 0);
    assert!(blocks(&owned) < before);
    assert_eq!(run(e.as_mut(), Op::PunchHole { file: f, offset: 0, len: 1 << 20 }), 0);
    let zeroed = run(e.as_mut(), Op::ZeroRange { file: f, offset: 0, len: 1 << 20 });
    assert!(zeroed == 0 || zeroed == -libc::EOPNOTSUPP, "{zeroed}");
    assert_eq!(rustix::fs::fstat(&owned).unwrap().st_size, 64 << 10);
    let buf = arena.span(0, 64 << 10);
    arena.fill(buf, 1);
    assert_eq!(run(e.as_mut(), Op::Read { file: f, offset: 0, buf }), 64 << 10);
    assert_eq!(bytes_at(&arena, buf), vec![0; 64 << 10]);
}

fn files_are_made_longer_with_space_of_their_own_and_cut_off(kind: EngineKind) {
    let (mut e, _) = engine(kind, 8);
    let owned = file(&[7; 4096]);
    let f = e.add_file(owned.clone()).unwrap();
    let stat = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap();
    let allocate = |extends| Op::Allocate { file: f, offset: 4096, len: 1 << 20, extends };
    // Space behind the end is there until the file is cut off, at its end, too.
    assert_eq!(run(e.as_mut(), allocate(false)), 0);
    assert_eq!(stat(&owned).st_size, 4096);
    assert!(stat(&owned).st_blocks * 512 >= 1 << 20);
    assert_eq!(run(e.as_mut(), Op::SetLen { file: f, len: 4096 }), 0);
    assert!(stat(&owned).st_blocks * 512 <= 64 << 10);
    assert_eq!(run(e.as_mut(), allocate(true)), 0);
    assert_eq!(stat(&owned).st_size, (1 << 20) + 4096);
    assert!(stat(&owned).st_blocks * 512 >= 1 << 20);
    assert_eq!(run(e.as_mut(), Op::SetLen { file: f, len: 512 }), 0);
    assert_eq!(stat(&owned).st_size, 512);
    assert_eq!(run(e.as_mut(), Op::SetLen { file: f, len: u64::MAX }), -libc::EINVAL);
}

fn a_discard_of_a_regular_file_is_refused_by_its_completion(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let f = e.add_file(file(&[7; 8192])).unwrap();
    assert_eq!(run(e.as_mut(), Op::Discard { file: f, offset: 0, len: 4096 }), -libc::ENOTTY);
    // Many at once, among others.
    for token in 0..100 {
        e.push(token, Op::Discard { file: f, offset: 0, len: 4096 });
        let buf = arena.span(token as usize * 512, 512);
        e.push(1000 + token, Op::Read { file: f, offset: 0, buf });
    }
    let done = wait_for(e.as_mut(), 200);
    assert!(done[..100].iter().all(|c| c.raw == -libc::ENOTTY));
    assert!(done[100..].iter().all(|c| c.raw == 512));
    assert_eq!(e.in_flight(), 0);
}

fn more_operations_than_both_queues_hold_all_complete(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    // io_uring's completion queue has four times the entries of its submission queue.
    let n = (8 + 4 * 8) * 20u64;
    let f = e.add_file(file(&pattern(8192, 5))).unwrap();
    for token in 0..n {
        let offset = token % 8192;
        let buf = arena.span(token as usize, 1);
        e.push(u64::MAX - token, Op::Read { file: f, offset, buf });
    }
    assert_eq!(e.in_flight() as u64, n);
    // All of them complete before one is reaped: those that the queue cannot hold must not be
    // lost.
    e.submit().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let done = wait_for(e.as_mut(), n as usize);
    assert!(done.iter().all(|c| c.raw == 1));
    let tokens: Vec<u64> = done.iter().map(|c| u64::MAX - c.token).rev().collect();
    assert_eq!(tokens, (0..n).collect::<Vec<_>>());
    let expected = pattern(8192, 5).into_iter().cycle().take(n as usize).collect::<Vec<_>>();
    assert_eq!(bytes_at(&arena, arena.span(0, n as usize)), expected);
}

/// `n` spans of odd lengths all over the arena, in no order, and their bytes together.
fn scattered(arena: &Arena, n: usize) -> (Vec<Span>, usize) {
    let span = |i: usize| arena.span((i * 7 % 16) * 8192 + i, 100 + i * 37);
    let spans: Vec<Span> = (0..n).map(span).collect();
    let bytes = spans.iter().map(Span::len).sum();
    (spans, bytes)
}

fn a_vectored_transfer_is_one_operation_on_many_spans(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 4);
    let f = e.add_file(file(&[0; 16])).unwrap();
    for n in [1, 2, MAX_VECTORED] {
        let (spans, len) = scattered(&arena, n);
        let bytes = pattern(len, n as u32);
        let mut at = 0;
        for s in &spans {
            arena.copy_in(*s, &bytes[at..at + s.len()]);
            at += s.len();
        }
        e.push_vectored(1, Transfer::Write, f, 3000, &spans);
        assert_eq!(wait_for(e.as_mut(), 1), [Completion { token: 1, raw: len as i32 }]);
        arena.fill(arena.span(0, MIB), 0xEE);
        e.push_vectored(2, Transfer::Read, f, 3000, &spans);
        assert_eq!(wait_for(e.as_mut(), 1), [Completion { token: 2, raw: len as i32 }]);
        let back: Vec<u8> = spans.iter().flat_map(|s| bytes_at(&arena, *s)).collect();
        assert_eq!(back, bytes, "{n} spans");
    }
}

fn a_vectored_read_at_the_end_of_the_file_is_short(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 4);
    let f = e.add_file(file(&[9; 1000])).unwrap();
    let spans = [arena.span(0, 512), arena.span(4096, 512)];
    arena.fill(arena.span(0, 8192), 1);
    e.push_vectored(1, Transfer::Read, f, 100, &spans);
    assert_eq!(wait_for(e.as_mut(), 1), [Completion { token: 1, raw: 900 }]);
    assert_eq!(bytes_at(&arena, spans[1])[386..390], [9, 9, 1, 1]);
}

fn more_vectored_transfers_than_the_queues_hold_keep_their_own_spans(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 4);
    let bytes = pattern(64 << 10, 8);
    let f = e.add_file(file(&bytes)).unwrap();
    let spans = |i: usize| [arena.span(i * 64, 10), arena.span(i * 64 + 20, 30)];
    for i in 0..1000 {
        e.push_vectored(i as u64, Transfer::Read, f, i as u64 * 50, &spans(i));
    }
    let done = wait_for(e.as_mut(), 1000);
    assert!(done.iter().all(|c| c.raw == 40));
    for i in 0..1000 {
        let [a, b] = spans(i);
        assert_eq!(bytes_at(&arena, a), bytes[i * 50..i * 50 + 10]);
        assert_eq!(bytes_at(&arena, b), bytes[i * 50 + 10..i * 50 + 40]);
    }
}

fn what_is_wrong_with_a_vectored_transfer_is_its_completion(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 4);
    let f = e.add_file(file(&[0; 512])).unwrap();
    let good = arena.span(0, 512);
    let outside = Arena::new(8 * MIB).unwrap().span(8 * MIB - 512, 512);
    for (f, offset, bufs, raw) in [
        (FileId(77), 0, [good, good], -libc::EBADF),
        (f, 0, [good, outside], -libc::EFAULT),
        (f, u64::MAX, [good, good], -libc::EINVAL),
        (f, 0, [good, good], 512),
    ] {
        e.push_vectored(1, Transfer::Read, f, offset, &bufs);
        assert_eq!(wait_for(e.as_mut(), 1), [Completion { token: 1, raw }]);
    }
}

fn a_vectored_transfer_has_a_bounded_number_of_spans(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 4);
    e.push_vectored(1, Transfer::Read, FileId(0), 0, &[arena.span(0, 512); MAX_VECTORED + 1]);
}

fn a_look_tells_when_there_is_something_to_reap(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let (never, mut out) = (event(), Vec::new());
    let f = e.add_file(file(&[1; 512])).unwrap();
    assert!(!e.may_reap());
    e.push(9, Op::Readable { fd: never.as_raw_fd() });
    e.submit().unwrap();
    assert!(!e.may_reap(), "nothing has happened yet");
    let buf = arena.span(0, 512);
    for (op, raw) in [
        (Op::Read { file: f, offset: 0, buf }, 512),
        (Op::Sync { file: f }, 0),
        (Op::Discard { file: f, offset: 0, len: 512 }, -libc::ENOTTY),
        (Op::Readable { fd: -1 }, -libc::EBADF),
        (Op::Read { file: FileId(9), offset: 0, buf }, -libc::EBADF),
    ] {
        e.push(1, op);
        e.submit().unwrap();
        let start = Instant::now();
        while !e.may_reap() {
            assert!(start.elapsed() < Duration::from_secs(20), "the look does not see {op:?}");
        }
        e.submit().unwrap();
        e.reap(&mut out);
        assert_eq!(out.pop(), Some(Completion { token: 1, raw }), "{op:?}");
        assert!(out.is_empty() && !e.may_reap());
    }
}

fn polling_finds_completions_without_waiting(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let f = e.add_file(file(&[1; 4096])).unwrap();
    let event = event();
    e.push(1, Op::Sync { file: f });
    e.push(2, Op::Readable { fd: event.as_raw_fd() });
    e.push(3, Op::Read { file: f, offset: 0, buf: arena.span(0, 4096) });
    ring(&event);
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.len() < 3 {
        assert!(start.elapsed() < Duration::from_secs(20), "polling found only {out:?}");
        e.submit().unwrap();
        e.reap(&mut out);
    }
}

fn timers_take_their_time(kind: EngineKind) {
    let (mut e, _) = engine(kind, 8);
    let start = Instant::now();
    // More than the submission queue holds, and the shortest last: each keeps its own time.
    for i in (0..40u64).rev() {
        e.push(i, Op::Timer { after: Duration::from_millis(20 + i) });
    }
    let (mut out, mut ended) = (Vec::new(), 0);
    while ended < 40 {
        e.wait(None).unwrap();
        e.reap(&mut out);
        for c in out.drain(..) {
            assert_eq!(c.raw, 0);
            assert!(start.elapsed() >= Duration::from_millis(20 + c.token), "{c:?} is early");
            ended += 1;
        }
    }
    assert!(start.elapsed() < Duration::from_secs(10));
}

fn a_wait_ends_with_its_time_or_with_a_completion(kind: EngineKind) {
    let (mut e, _) = engine(kind, 8);
    let start = Instant::now();
    e.wait(None).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "nothing is in flight");
    e.wait(Some(Duration::from_millis(30))).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
    // An engine may count from the push on: so does this.
    let start = Instant::now();
    e.push(1, Op::Timer { after: Duration::from_millis(10) });
    e.wait(Some(Duration::MAX)).unwrap();
    assert!((Duration::from_millis(10)..Duration::from_secs(20)).contains(&start.elapsed()));
    let mut out = Vec::new();
    e.reap(&mut out);
    assert_eq!(out, [Completion { token: 1, raw: 0 }]);
}

fn a_signal_does_not_shorten_a_wait(kind: EngineKind) {
    extern "C" fn ignore(_: libc::c_int) {}
    let handler = ignore as extern "C" fn(libc::c_int);
    // SAFETY: a handler that does nothing, for a signal that nothing else here uses.
    unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
    let (mut e, _) = engine(kind, 8);
    // SAFETY: no preconditions.
    let this = unsafe { libc::pthread_self() } as usize;
    let start = Instant::now();
    std::thread::scope(|s| {
        s.spawn(move || {
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(10));
                // SAFETY: the thread is alive: it joins this one.
                unsafe { libc::pthread_kill(this as libc::pthread_t, libc::SIGUSR2) };
            }
        });
        e.wait(Some(Duration::from_millis(100))).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(100));
    });
}

fn a_descriptor_is_reported_when_it_becomes_readable_and_not_before(kind: EngineKind) {
    let (mut e, _) = engine(kind, 8);
    let event = event();
    e.push(4, Op::Readable { fd: event.as_raw_fd() });
    e.wait(Some(Duration::from_millis(20))).unwrap();
    let mut out = Vec::new();
    e.reap(&mut out);
    assert!(out.is_empty() && e.in_flight() == 1);
    ring(&event);
    assert_eq!(wait_for(e.as_mut(), 1), [Completion { token: 4, raw: 0 }]);
}

fn waits_are_called_off_and_data_is_not(kind: EngineKind) {
    let (mut e, arena) = engine(kind, 8);
    let f = e.add_file(file(&[1; 512])).unwrap();
    let event = event();
    for token in [1, 2] {
        e.push(token, Op::Readable { fd: event.as_raw_fd() });
    }
    e.push(3, Op::Timer { after: Duration::from_secs(3600) });
    e.submit().unwrap();
    e.push(4, Op::Timer { after: Duration::from_secs(3600) });
    e.push(5, Op::Read { file: f, offset: 0, buf: arena.span(0, 512) });
    for token in [1, 3, 4, 5, 99] {
        e.cancel(token);
    }
    let done = wait_for(e.as_mut(), 4);
    let cancelled = -libc::ECANCELED;
    let expected = [(1, cancelled), (3, cancelled), (4, cancelled), (5, 512)];
    assert_eq!(done.iter().map(|c| (c.token, c.raw)).collect::<Vec<_>>(), expected);
    // A descriptor whose wait was called off is free: the last close reaches the other end.
    let (read, write) = std::io::pipe().unwrap();
    e.push(6, Op::Readable { fd: read.as_raw_fd() });
    e.submit().unwrap();
    e.cancel(6);
    wait_for(e.as_mut(), 1);
    drop(read);
    let err = io::Write::write(&mut &write, &[0]).unwrap_err();
    assert_eq!(err.kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(e.in_flight(), 1, "the other wait for the event goes on");
}

fn an_engine_dropped_with_operations_in_flight_finishes_them_first(kind: EngineKind) {
    let bytes = pattern(MIB, 9);
    for entries in [4, 256] {
        let owned = file(&[0; 16]);
        let event = event();
        let (mut e, arena) = engine(kind, entries);
        let f = e.add_file(owned.clone()).unwrap();
        arena.copy_in(arena.span(0, MIB), &bytes);
        e.push(1, Op::Readable { fd: event.as_raw_fd() });
        e.push(2, Op::Timer { after: Duration::from_secs(3600) });
        for i in 0..64u64 {
            let (offset, buf) = (i << 14, arena.span((i as usize) << 14, 1 << 14));
            e.push(i, Op::Write { file: f, offset, buf });
            e.push(i, Op::Discard { file: f, offset: 0, len: 512 });
        }
        e.push(3, Op::Sync { file: f });
        e.submit().unwrap();
        let weak = Arc::downgrade(&arena);
        drop(arena);
        assert!(weak.upgrade().is_some(), "the engine keeps its memory");
        let start = Instant::now();
        drop(e);
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(weak.upgrade().is_none());
        let mut back = vec![0; MIB];
        let f = File::from(owned.try_clone().unwrap());
        std::os::unix::fs::FileExt::read_exact_at(&f, &mut back, 0).unwrap();
        assert_eq!(back, bytes);
    }
}

fn an_engine_that_was_never_used_is_dropped_without_doing_anything(kind: EngineKind) {
    let owned = file(&[1; 512]);
    let (mut e, arena) = engine(kind, 4);
    let f = e.add_file(owned.clone()).unwrap();
    e.push(1, Op::Write { file: f, offset: 0, buf: arena.span(0, 512) });
    drop(e);
    let mut back = [0; 512];
    let f = File::from(owned.try_clone().unwrap());
    std::os::unix::fs::FileExt::read_exact_at(&f, &mut back, 0).unwrap();
    assert_eq!(back, [1; 512]);
}
