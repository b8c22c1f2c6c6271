//! The steps down to older kernels' rings: each does the same work.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use std::os::fd::AsRawFd;

use super::*;
use ferrite_host::clock::{Random, SplitMix64};

const PAGE: usize = 4096;

/// Random reads and writes of a file's pages against a model, many in flight, with waits beside
/// them, and a drop with some of everything in flight.
fn workout(mut e: Uring, arena: &Arena, seed: u64) {
    let mut random = SplitMix64::new(seed);
    let owned: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
    let file = e.add_file(owned.clone()).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    // Page i of the file belongs to token i, and so does page i of the arena.
    let mut model = [0u8; 64];
    let mut writing = [Some(0); 64];
    for page in 0..64 {
        e.push(page, page_op(file, arena, page, Some(0)));
    }
    e.push(100, Op::Timer { after: Duration::from_millis(1) });
    e.push(101, Op::Readable { fd: event.as_raw_fd() });
    let (mut out, mut left, start) = (Vec::new(), 2000, Instant::now());
    let mut waits = Vec::new();
    while left > 0 || e.in_flight() > 1 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} in flight", e.in_flight());
        match random.below(3) {
            0 => e.submit().unwrap(),
            1 => e.wait(Some(Duration::from_micros(100))).unwrap(),
            _ => e.wait(None).unwrap(),
        }
        e.reap(&mut out);
        for c in out.drain(..) {
            if c.token >= 100 {
                waits.push((c.token, c.raw));
                continue;
            }
            assert_eq!(c.raw, PAGE as i32, "{c:?}");
            let i = c.token as usize;
            match writing[i].take() {
                Some(byte) => model[i] = byte,
                None => check_page(arena, c.token, model[i]),
            }
            if left > 0 {
                left -= 1;
                writing[i] = (random.below(2) == 0).then(|| random.next_u64() as u8);
                e.push(c.token, page_op(file, arena, c.token, writing[i]));
            }
        }
    }
    assert_eq!(waits, [(100, 0)]);
    e.push(102, Op::Timer { after: Duration::from_secs(3600) });
    e.push(103, Op::Discard { file, offset: 0, len: 512 });
    for page in 0..64 {
        e.push(page, page_op(file, arena, page, Some(0xEE)));
    }
    drop(e);
    let mut bytes = vec![0; 64 * PAGE];
    File::from(owned.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|b| *b == 0xEE), "writes were lost in the drop");
}

/// A write of a byte to all of a page, or a read.
fn page_op(file: FileId, arena: &Arena, page: u64, byte: Option<u8>) -> Op {
    let buf = arena.span(page as usize * PAGE, PAGE);
    let offset = page * PAGE as u64;
    match byte {
        Some(byte) => {
            arena.fill(buf, byte);
            Op::Write { file, offset, buf }
        }
        None => {
            arena.fill(buf, 0x55);
            Op::Read { file, offset, buf }
        }
    }
}

fn check_page(arena: &Arena, page: u64, byte: u8) {
    let mut bytes = [0; PAGE];
    arena.copy_out(arena.span(page as usize * PAGE, PAGE), &mut bytes);
    assert!(bytes.iter().all(|b| *b == byte), "page {page} is not all {byte}");
}

#[test]
fn every_step_down_does_the_same_work_with_tables_and_without() {
    for step in setup::STEPS {
        for tables in [true, false] {
            let arena = Arena::new(1).unwrap();
            let Ok(mut e) = Uring::without_tables(arena.clone(), &[step], 16, false) else {
                continue; // This kernel is too old for it.
            };
            assert_eq!(e.features.single_issuer, step >= Step::SingleIssuer);
            if tables {
                e.pin(arena.span(0, arena.len()));
                e.register_files();
            }
            workout(e, &arena, step as u64);
        }
    }
}

#[test]
fn the_lowest_step_asks_for_nothing_that_linux_5_11_lacks() {
    let (ring, features) = setup::build(&[Step::Plain], 0, false).unwrap();
    assert!(ring.params().sq_entries() >= 1);
    assert!(!features.submit_all && !features.coop_taskrun && !features.defer_taskrun);
}

#[test]
fn only_a_span_inside_the_pinned_region_is_in_a_fixed_buffer() {
    let arena = Arena::new(1).unwrap();
    let mut e = Uring::new(arena.clone(), 4).unwrap();
    assert_eq!(e.buffer_index(arena.span(0, PAGE)), None);
    e.pin(arena.span(4 * PAGE, 4 * PAGE));
    let at = |e: &Uring, from, len| e.buffer_index(arena.span(from, len));
    assert_eq!(at(&e, 4 * PAGE, 4 * PAGE), Some(0));
    for (from, len) in
        [(4 * PAGE - 1, 2), (8 * PAGE - 1, 2), (0, PAGE), (8 * PAGE, 1), (5 * PAGE, 0)]
    {
        assert_eq!(at(&e, from, len), None, "{from}+{len}");
    }
    assert!(e.unpin());
    assert_eq!(at(&e, 4 * PAGE, PAGE), None);
}

#[test]
fn pinning_comes_and_goes_between_transfers_and_while_something_waits() {
    let arena = Arena::new(1).unwrap();
    let mut e = Uring::new(arena.clone(), 8).unwrap();
    let file = e.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let (read_end, _write_end) = std::io::pipe().unwrap();
    e.push(99, Op::Readable { fd: read_end.as_raw_fd() });
    let mut out = Vec::new();
    for round in 0..5 {
        e.pin(arena.span(0, 8 * PAGE));
        for (token, op) in [(1, Some(round as u8 + 1)), (2, None)] {
            e.push(token, page_op(file, &arena, 3, op));
            while out.len() < token as usize {
                e.wait(None).unwrap();
                e.reap(&mut out);
            }
        }
        assert!(out.drain(..).all(|c| c.raw == PAGE as i32));
        check_page(&arena, 3, round as u8 + 1);
        assert!(e.unpin());
        arena.release(arena.span(0, 8 * PAGE));
        check_page(&arena, 3, 0);
    }
    assert_eq!(e.in_flight(), 1);
}

#[test]
fn events_are_read_and_let_through_with_the_next_submission() {
    use rustix::event::{EventfdFlags, eventfd};
    let mut e = Uring::new(Arena::new(1).unwrap(), 8).unwrap();
    let event = eventfd(5, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (read_end, write_end) = std::io::pipe().unwrap();
    let mut out = Vec::new();
    if !e.drain(7, event.as_raw_fd(), 8) {
        return; // Before Linux 5.17.
    }
    // Nothing completes, and so a wait is not ended by it. Operations that are queued later find nothing to read.
    assert!(e.put(9, write_end.as_raw_fd(), 0x0403_0201));
    e.push(3, Op::Readable { fd: event.as_raw_fd() });
    e.wait(Some(Duration::from_millis(5))).unwrap();
    e.reap(&mut out);
    assert_eq!((out.len(), e.in_flight()), (0, 1));
    let mut word = [0; 4];
    rustix::io::read(&read_end, &mut word).unwrap();
    assert_eq!(u32::from_ne_bytes(word), 0x0403_0201);
    assert!(e.put(9, read_end.as_raw_fd(), 1) && e.drain(7, write_end.as_raw_fd(), 4));
    e.submit().unwrap();
    e.reap(&mut out);
    assert_eq!(out, [9, 7].map(|token| Completion { token, raw: -libc::EBADF }));
    // As many as there are: the kernel tells of one that got fewer.
    out.clear();
    for (there, asked, told) in [(4, 4, 0), (4, 8, 1)] {
        rustix::io::write(&write_end, &[1; 8][..there]).unwrap();
        assert!(e.drain(7, read_end.as_raw_fd(), asked));
        e.submit().unwrap();
        e.reap(&mut out);
        assert_eq!(out, vec![Completion { token: 7, raw: there as i32 }; told], "{asked}");
    }
    // One that the kernel keeps, as there is nothing yet, is called off with the ring.
    assert!(e.drain(7, event.as_raw_fd(), 8));
    e.submit().unwrap();
}

/// An attacker that takes a worker over finds a ring that opens nothing (threats.md T27).
#[test]
fn a_ring_does_nothing_that_it_is_not_for() {
    let mut e = Uring::new(Arena::new(1).unwrap(), 8).unwrap();
    let name = c"/dev/null";
    let token = |e: &mut Uring| u64::from(e.table.insert(5, Kind::Data));
    let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), name.as_ptr()).build();
    let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_DGRAM, 0).build();
    for entry in [open, socket] {
        let index = token(&mut e);
        e.hand_over(&entry.user_data(index));
        let mut out = Vec::new();
        while out.is_empty() {
            e.wait(None).unwrap();
            e.reap(&mut out);
        }
        assert_eq!(out, [Completion { token: 5, raw: -libc::EACCES }]);
    }
    let refused = e.ring.submitter().register_eventfd(0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
}

/// A ring that kept one would keep its lock, too.
#[test]
fn files_behind_one_that_was_not_registered_are_let_go_of() {
    let mut e = Uring::new(Arena::new(1).unwrap(), 8).unwrap();
    assert!(e.features().fixed_files > 0);
    let locked = tempfile::NamedTempFile::new().unwrap();
    let open =
        |flags| Arc::new(open(locked.path(), flags | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let last = open(OFlags::RDWR);
    flock(&last, FlockOperation::NonBlockingLockExclusive).unwrap();
    // The kernel registers no descriptor that is for its name only.
    for file in [open(OFlags::RDWR), open(OFlags::PATH), last] {
        e.add_file(file).unwrap();
    }
    let registered: Vec<_> = e.files.iter().map(|file| file.fixed).collect();
    assert_eq!(registered, [true, false, true]);
    e.clear_files().unwrap();
    // That may take the kernel a moment.
    let (mine, start) = (open(OFlags::RDWR), Instant::now());
    while flock(&mine, FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "the ring has kept a file");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn errors_of_the_setup_say_what_to_do() {
    let e: io::Error = SetupError::Forbidden.into();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
    assert!(e.to_string().contains("kernel.io_uring_disabled"));
    let e: io::Error = SetupError::TooOld("IORING_FEAT_EXT_ARG").into();
    assert_eq!(e.kind(), io::ErrorKind::Unsupported);
}

#[test]
fn indices_that_the_kernel_cannot_know_are_ignored() {
    let mut table = Table::default();
    let index = table.insert(7, Kind::Data);
    for bogus in [1, u64::from(u32::MAX), u64::MAX] {
        assert_eq!(table.remove(bogus), None);
    }
    assert_eq!(table.remove(u64::from(index)), Some((7, Kind::Data)));
    assert_eq!((table.remove(u64::from(index)), table.len()), (None, 0));
}

#[test]
fn a_call_that_blocks_keeps_nothing_waiting_but_the_drop() {
    let arena = Arena::new(1).unwrap();
    let mut e = Uring::new(arena.clone(), 8).unwrap();
    let owned: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
    let file = e.add_file(owned.clone()).unwrap();
    let nap = Duration::from_millis(60);
    let start = Instant::now();
    for token in 0..2 {
        let index = e.table.insert(token, Kind::Offloaded);
        e.offload(index, file, Call::Nap(nap));
    }
    e.push(7, page_op(file, &arena, 0, Some(1)));
    let mut out = Vec::new();
    while out.is_empty() {
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
    assert_eq!(out[0].token, 7, "the write waited for the call");
    while out.len() < 2 {
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
    assert_eq!((out[1], e.in_flight()), (Completion { token: 0, raw: 0 }, 1));
    drop(e);
    assert!(start.elapsed() >= 2 * nap, "the drop did not wait for the second call");
    assert_eq!(Arc::strong_count(&owned), 1);
}

/// A byte that is written at once wakes a watch: the kernel has work to do for that on this thread.
#[test]
fn what_is_done_at_once_is_there_when_its_submission_returns() {
    let mut e = Uring::new(Arena::new(1).unwrap(), 8).unwrap();
    let (read_end, write_end) = std::io::pipe().unwrap();
    e.push(3, Op::Readable { fd: read_end.as_raw_fd() });
    e.submit().unwrap();
    if !e.put(9, write_end.as_raw_fd(), 1) {
        return; // Before Linux 5.17.
    }
    e.submit().unwrap();
    assert!(e.has_completions());
    let mut out = Vec::new();
    e.reap(&mut out);
    assert_eq!(out.pop().map(|c| c.token), Some(3));
}
