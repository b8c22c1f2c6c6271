//! Transfers of any shortness are continued, and what was interrupted is tried again, on an engine
//! whose answers are written down.

use std::io;

use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{FileId, Op};
use ferrite_io::reactor::Reactor;
use ferrite_testkit::faulty::{Fault, Faults, Null};

/// Where, the memory if there is any, the answer.
type Step = (u64, Option<Span>, i32);

/// Where an operation is, and its memory if it has any.
fn place(op: &Op) -> (u64, Option<Span>) {
    match *op {
        Op::Read { offset, buf, .. } | Op::Write { offset, buf, .. } => (offset, Some(buf)),
        Op::PunchHole { offset, .. }
        | Op::ZeroRange { offset, .. }
        | Op::Allocate { offset, .. }
        | Op::Discard { offset, .. } => (offset, None),
        Op::SetLen { len, .. } => (len, None),
        Op::Sync { .. } => (0, None),
        Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => panic!("{op:?}"),
    }
}

/// A reactor whose engine answers so, and the check that it was asked for just that.
fn answering(steps: &[Step]) -> (Reactor, impl FnOnce() + use<>) {
    let answer = |(_, _, raw): &Step| match *raw {
        0 => Fault::Nothing,
        errno @ ..0 => Fault::Errno(-errno),
        bytes => Fault::Short(bytes as usize),
    };
    let faults = Faults::none();
    faults.in_order(&steps.iter().map(answer).collect::<Vec<_>>());
    faults.list();
    let reactor = Reactor::new(faults.around(Box::new(Null::default())));
    let expected: Vec<_> = steps.iter().map(|(at, span, _)| (*at, *span)).collect();
    let check = move || {
        let asked: Vec<_> = faults.take_list().iter().map(place).collect();
        assert_eq!(asked, expected);
    };
    (reactor, check)
}

fn run(write: bool, expected: &[(u64, usize, usize, i32)]) -> io::Result<()> {
    let arena = Arena::new(1).unwrap();
    let steps: Vec<Step> = expected
        .iter()
        .map(|(at, from, len, raw)| (*at, Some(arena.span(*from, *len)), *raw))
        .collect();
    let (mut r, check) = answering(&steps);
    let (io, buf) = (r.io(), arena.span(100, 50));
    let done = r.block_on(async move {
        if write {
            io.write_all(FileId(0), 1000, buf).await
        } else {
            io.read_exact(FileId(0), 1000, buf).await
        }
    });
    check();
    done?
}

#[test]
fn a_short_transfer_is_continued_where_it_stopped() {
    for write in [true, false] {
        let steps = [(1000, 100, 50, 1), (1001, 101, 49, 29), (1030, 130, 20, 20)];
        run(write, &steps).unwrap();
    }
}

#[test]
fn an_interrupted_transfer_is_tried_again() {
    let steps = [(1000, 100, 50, 10), (1010, 110, 40, -libc::EINTR), (1010, 110, 40, 40)];
    run(true, &steps).unwrap();
}

#[test]
fn a_transfer_is_tried_again_64_times_in_a_row_and_not_for_ever() {
    for errno in [libc::EINTR, libc::EAGAIN] {
        let again =
            |at: u64, n: usize| vec![(at, at as usize - 900, 1050 - at as usize, -errno); n];
        let steps = [again(1000, 64), vec![(1000, 100, 50, 10)], again(1010, 64)].concat();
        let good = [steps.clone(), vec![(1010, 110, 40, 40)]].concat();
        run(true, &good).unwrap();
        let bad = [steps, again(1010, 1)].concat();
        assert_eq!(run(false, &bad).unwrap_err().raw_os_error(), Some(errno));
    }
}

#[test]
fn what_changes_a_file_or_syncs_it_is_tried_again_as_often() {
    let change = |which: usize, expected: Vec<Step>| {
        let (mut r, check) = answering(&expected);
        let (io, file) = (r.io(), FileId(0));
        let done = r.block_on(async move {
            match which {
                0 => io.allocate(file, 4096, 512).await,
                1 => io.punch_hole(file, 4096, 512).await,
                2 => io.zero_range(file, 4096, 512).await,
                3 => io.discard(file, 4096, 512).await,
                4 => io.set_len(file, 4096).await,
                _ => io.sync(file).await,
            }
        });
        check();
        done.unwrap()
    };
    for which in 0..6 {
        let at = if which == 5 { 0 } else { 4096 };
        for errno in [libc::EINTR, libc::EAGAIN] {
            let good = [vec![(at, None, -errno); 64], vec![(at, None, 0)]].concat();
            change(which, good).unwrap();
            let error = change(which, vec![(at, None, -errno); 65]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
        }
        let error = change(which, vec![(at, None, -libc::EIO)]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
}

#[test]
fn no_progress_is_an_error_and_not_a_loop() {
    let steps = [(1000, 100, 50, 49), (1049, 149, 1, 0)];
    assert_eq!(run(false, &steps).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(run(true, &steps).unwrap_err().kind(), io::ErrorKind::WriteZero);
}

#[test]
fn an_error_after_a_part_is_the_error_of_the_whole() {
    let steps = [(1000, 100, 50, 25), (1025, 125, 25, -libc::EIO)];
    assert_eq!(run(true, &steps).unwrap_err().raw_os_error(), Some(libc::EIO));
}

/// Spans of 50, 20 and 30 bytes, not next to each other; the first one asked for, and what was given.
fn run_vectored(write: bool, expected: &[(u64, usize, usize, i32)]) -> io::Result<()> {
    let arena = Arena::new(1).unwrap();
    let step = |(at, from, len, raw): &_| (*at, Some(arena.span(*from, *len)), *raw);
    let steps: Vec<Step> = expected.iter().map(step).collect();
    let (mut r, check) = answering(&steps);
    let io = r.io();
    let bufs = [arena.span(0, 50), arena.span(100, 20), arena.span(200, 30)];
    let done = r.block_on(async move {
        if write {
            io.write_vectored(FileId(0), 1000, &bufs).await
        } else {
            io.read_vectored(FileId(0), 1000, &bufs).await
        }
    });
    check();
    done?
}

#[test]
fn a_short_vectored_transfer_is_continued_in_the_span_where_it_stopped() {
    for write in [true, false] {
        let steps =
            [(1000, 0, 50, 60), (1060, 110, 10, 10), (1070, 200, 30, 29), (1099, 229, 1, 1)];
        run_vectored(write, &steps).unwrap();
        let again = [(1000, 0, 50, -libc::EAGAIN), (1000, 0, 50, 99), (1099, 229, 1, 1)];
        run_vectored(write, &again).unwrap();
        let error = [(1000, 0, 50, 50), (1050, 100, 20, -libc::EIO)];
        assert_eq!(run_vectored(write, &error).unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    let nothing = [(1000, 0, 50, 99), (1099, 229, 1, 0)];
    assert_eq!(run_vectored(true, &nothing).unwrap_err().kind(), io::ErrorKind::WriteZero);
    assert_eq!(run_vectored(false, &nothing).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}
