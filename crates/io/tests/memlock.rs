//! Without the right to lock memory: alone in its process, since it lowers a limit.

use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_io::engine::{Engine, Op};
use ferrite_io::uring::Uring;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

#[test]
fn the_engine_works_without_fixed_buffers_where_memory_may_not_be_locked() {
    let limit = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..limit }).unwrap();
    // The limit binds only those without the capability; this thread gives it up.
    let mut caps = capabilities(None).unwrap();
    caps.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, caps).unwrap();

    let arena = Arena::new(16 << 20).unwrap();
    let mut e = Uring::new(arena.clone(), 8).unwrap();
    e.pin(arena.span(0, arena.len()));
    let features = e.features();
    assert!(!features.fixed_buffers);
    assert_eq!(features.fixed_buffers_errno, Some(libc::ENOMEM));
    assert!(features.to_string().contains("memlock limit"), "{features}");

    let f = e.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    arena.fill(arena.span(0, 4096), 7);
    e.push(1, Op::Write { file: f, offset: 0, buf: arena.span(0, 4096) });
    e.wait(None).unwrap();
    e.push(2, Op::Read { file: f, offset: 0, buf: arena.span(8192, 4096) });
    let mut out = Vec::new();
    while out.len() < 2 {
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
    assert!(out.iter().all(|c| c.raw == 4096), "{out:?}");
    let mut back = [0; 4096];
    arena.copy_out(arena.span(8192, 4096), &mut back);
    assert_eq!(back, [7; 4096]);
}
