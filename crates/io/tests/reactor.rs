//! The reactor on real io_uring.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_io::arena::Arena;
use ferrite_io::engine::{Completion, Op};
use ferrite_io::executor::LocalSignal;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::uring::Uring;
use rustix::event::{EventfdFlags, eventfd};

fn reactor() -> (Reactor, Arc<Arena>) {
    let arena = Arena::new(4 << 20).unwrap();
    (Reactor::new(Box::new(Uring::new(arena.clone(), 64).unwrap())), arena)
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
}

#[test]
fn a_file_is_written_and_read_back_by_async_code() {
    let (mut r, arena) = reactor();
    let file = r.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let io = r.io();
    let (out, back) = (arena.span(0, 100_000), arena.span(1 << 20, 100_000));
    arena.fill(out, 0x5A);
    let a = arena.clone();
    r.block_on(async move {
        io.write_all(file, 4096, out).await.unwrap();
        io.sync(file).await.unwrap();
        io.read_exact(file, 4096, back).await.unwrap();
        let e = io.read_exact(file, 4097, back).await.unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(io.read(file, 4096 + 100_000, back).await.unwrap(), 0);
        io.read_exact(file, 4096, back).await.unwrap();
    })
    .unwrap();
    let mut bytes = vec![0u8; 100_000];
    a.copy_out(back, &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0x5A));
    assert_eq!(r.in_flight(), 0);
}
