use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, FileId, Transfer};

use super::*;
use crate::errno::{EAGAIN, EIO, ENOSPC};

/// An engine without a medium, and memory.
fn engine(faults: &Faults) -> (Box<dyn Engine>, Arc<Arena>) {
    (faults.around(Box::new(Null::default())), Arena::new(1 << 20).unwrap())
}

fn ends(engine: &mut dyn Engine) -> Vec<i32> {
    let mut done = Vec::new();
    engine.reap(&mut done);
    done.iter().map(|Completion { raw, .. }| *raw).collect()
}

fn ask(engine: &mut dyn Engine, op: Op) -> i32 {
    engine.push(1, op);
    let [raw] = ends(engine)[..] else { panic!("it has one end") };
    raw
}

const FILE: FileId = FileId(0);

fn write(offset: u64, buf: Span) -> Op {
    Op::Write { file: FILE, offset, buf }
}

#[test]
fn the_first_rule_that_has_something_to_say_says_it() {
    let faults = Faults::none();
    let (mut engine, arena) = engine(&faults);
    let buf = arena.span(0, 4096);
    faults.set([
        Ops::from(Kind::Write).at(4096).fail(EIO),
        Ops::from(Kind::Write).fail(EAGAIN).after(1).times(2),
        Ops::storage().touching(8191..8192).on(FILE).fail(ENOSPC),
    ]);
    let ends: Vec<_> = [0, 4096, 0, 0, 4096, 4095, 8192]
        .map(|offset| ask(&mut *engine, write(offset, buf)))
        .to_vec();
    assert_eq!(ends, [4096, -EIO, -EAGAIN, -EAGAIN, -EIO, 4096, 4096]);
    let hole = |offset| Op::PunchHole { file: FILE, offset, len: 4096 };
    assert_eq!([4095, 4096, 8192].map(|at| ask(&mut *engine, hole(at))), [0, -ENOSPC, 0]);
    assert_eq!(faults.seen(&[Kind::Write]), 7);
    assert_eq!(faults.seen(&Kind::STORAGE), 10);
    faults.clear();
    assert_eq!(ask(&mut *engine, write(4096, buf)), 4096);
}

#[test]
fn a_transfer_in_pieces_is_as_long_as_all_of_them() {
    let faults = Faults::none();
    let (mut engine, arena) = engine(&faults);
    let bufs = [arena.span(0, 4096), arena.span(8192, 4096)];
    let mut ask = || {
        engine.push_vectored(1, Transfer::Write, FILE, 0, &bufs);
        ends(&mut *engine)
    };
    faults.in_order(&[Fault::Short(5000), Fault::Half, Fault::Nothing, Fault::None]);
    assert_eq!([ask(), ask(), ask(), ask()].concat(), [5000, 4096, 0, 8192]);
    faults.set([Ops::from(Kind::Write).touching(8191..8192).fail(EIO)]);
    assert_eq!(ask(), [-EIO]);
}

#[test]
fn a_part_is_neither_nothing_nor_all_but_of_what_is_small() {
    let faults = Faults::none();
    let (mut engine, arena) = engine(&faults);
    faults.set([Ops::among(&Kind::TRANSFERS).meet(Fault::Part)]);
    for _ in 0..100 {
        assert!((512..4096).contains(&ask(&mut *engine, write(0, arena.span(0, 4096)))));
        assert_eq!(ask(&mut *engine, write(0, arena.span(0, 512))), 512);
    }
}

#[test]
fn what_is_not_a_transfer_is_never_short() {
    let faults = Faults::none();
    let (mut engine, _) = engine(&faults);
    faults.list();
    faults.in_order(&[Fault::Half, Fault::Short(1), Fault::Errno(EIO)]);
    let sync = Op::Sync { file: FILE };
    assert_eq!([(); 3].map(|()| ask(&mut *engine, sync)), [0, 0, -EIO]);
    assert_eq!(faults.take_list(), [sync; 3]);
}

#[test]
fn calls_of_the_engine_fail_when_it_is_their_turn() {
    let faults = Faults::none();
    let (mut engine, _) = engine(&faults);
    faults.set([Ops::from(Kind::Submit).fail(EIO).after(1).once()]);
    engine.submit().unwrap();
    assert_eq!(engine.submit().unwrap_err().raw_os_error(), Some(EIO));
    engine.submit().unwrap();
    engine.wait(None).unwrap();
    assert_eq!(faults.seen(&[Kind::Submit, Kind::Wait]), 4);
}
