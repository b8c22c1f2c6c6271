//! Features that only io_uring has: registered files and memory, and a thread that it belongs to.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_io::engine::{Engine, FileId, Op};
use ferrite_io::uring::{Uring, probe};
use rustix::event::{EventfdFlags, eventfd};

fn engine(entries: u32) -> (Uring, Arc<Arena>) {
    let arena = Arena::new(4 << 20).unwrap();
    (Uring::new(arena.clone(), entries).unwrap(), arena)
}

fn file(bytes: &[u8]) -> Arc<OwnedFd> {
    let f = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&f, bytes, 0).unwrap();
    Arc::new(f.into())
}

fn run(e: &mut Uring, op: Op) -> i32 {
    e.push(1, op);
    let mut out = Vec::new();
    while out.is_empty() {
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
    out[0].raw
}

#[test]
fn an_engine_is_built_on_one_thread_and_used_on_another() {
    let (mut e, arena) = engine(8);
    let f = e.add_file(file(&[3; 512])).unwrap();
    let worker = std::thread::spawn(move || {
        let done = run(&mut e, Op::Read { file: f, offset: 0, buf: arena.span(0, 512) });
        let g = e.add_file(file(&[4; 100])).unwrap();
        (done, run(&mut e, Op::Read { file: g, offset: 0, buf: arena.span(0, 512) }))
    });
    assert_eq!(worker.join().unwrap(), (512, 100));
}

#[test]
fn an_engine_dropped_on_the_wrong_thread_keeps_its_memory_for_the_kernel() {
    let (mut e, arena) = engine(8);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let e = std::thread::scope(|s| {
        s.spawn(|| {
            e.push(1, Op::Readable { fd: event.as_raw_fd() });
            e.submit().unwrap();
            e
        })
        .join()
        .unwrap()
    });
    let single_issuer = e.features().single_issuer;
    let weak = Arc::downgrade(&arena);
    drop((e, arena));
    assert_eq!(weak.upgrade().is_some(), single_issuer);
}

#[test]
fn files_beyond_the_registered_table_work_as_well() {
    let (mut e, arena) = engine(8);
    let shared = file(&[5; 512]);
    let ids: Vec<FileId> = (0..100).map(|_| e.add_file(shared.clone()).unwrap()).collect();
    assert_eq!(ids[99], FileId(99));
    for id in [ids[0], ids[63], ids[64], ids[99]] {
        assert_eq!(run(&mut e, Op::Read { file: id, offset: 0, buf: arena.span(0, 512) }), 512);
    }
}

#[test]
fn the_probe_says_what_this_kernel_has() {
    let features = probe().unwrap();
    assert!(features.sq_entries >= 8 && features.cq_entries >= 2 * features.sq_entries);
    assert!(features.missing_ops.is_empty(), "{features}");
    assert_eq!(features.fixed_buffers, features.fixed_buffers_errno.is_none());
    assert!(features.to_string().starts_with("8+32 entries"), "{features}");
}
