use std::time::Instant;

use super::*;

fn engine(polled: bool) -> (NvmeUring, Arc<Arena>) {
    let arena = Arena::new(1).unwrap();
    (NvmeUring::new(arena.clone(), 4, polled).unwrap(), arena)
}

/// A device that takes any command and does nothing, or refuses it, as a namespace.
fn add(e: &mut NvmeUring, path: &str, writable: bool) -> FileId {
    let fd: Arc<OwnedFd> = Arc::new(std::fs::File::open(path).unwrap().into());
    let id = e.main.add_file(fd.clone()).unwrap();
    let namespace = Namespace::pretended(1 << 20, 512, 8192);
    e.targets.push(Some(Target { fd, namespace, writable }));
    id
}

fn wait_for(e: &mut NvmeUring, n: usize) -> Vec<Completion> {
    let (mut out, start) = (Vec::new(), Instant::now());
    while out.len() < n {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {n} completed", out.len());
        e.wait(None).unwrap();
        e.reap(&mut out);
    }
    out.sort_by_key(|c| c.token);
    out
}

#[test]
fn files_that_are_no_namespaces_are_served_by_the_main_ring() {
    let (mut e, arena) = engine(false);
    let f = e.add_file(Arc::new(tempfile::tempfile().unwrap().into())).unwrap();
    let buf = arena.span(0, 4096);
    e.push(1, Op::Write { file: f, offset: 0, buf });
    e.push_vectored(2, Transfer::Write, f, 4096, &[buf, buf]);
    e.push(3, Op::Sync { file: f });
    e.push(4, Op::Timer { after: Duration::from_millis(1) });
    let raw: Vec<i32> = wait_for(&mut e, 4).iter().map(|c| c.raw).collect();
    assert_eq!((raw, e.in_flight()), (vec![4096, 8192, 0, 0], 0));
}

#[test]
fn commands_that_the_kernel_had_no_memory_for_are_given_to_it_again() {
    let (mut e, _) = engine(false);
    let f = add(&mut e, "/dev/null", true);
    for token in 0..10 {
        e.push(token, Op::Sync { file: f });
    }
    e.refusals = 3;
    assert!(wait_for(&mut e, 10).iter().all(|c| c.raw == 0));
    assert_eq!(e.refusals, 0);
}

#[test]
fn many_commands_complete_beside_other_operations_and_a_transfer_has_a_limit() {
    let (mut e, arena) = engine(false);
    let f = add(&mut e, "/dev/null", true);
    let buf = arena.span(0, 64 << 10);
    for token in 0..100 {
        match token % 4 {
            0 => e.push(token, Op::Read { file: f, offset: 512, buf }),
            1 => e.push(token, Op::Sync { file: f }),
            2 => e.push(token, Op::Discard { file: f, offset: 0, len: 1 << 20 }),
            _ => {
                let (a, b) = (buf.slice(0, 6144), buf.slice(8192, 4096));
                e.push_vectored(token, Transfer::Write, f, 0, &[a, b]);
            }
        }
    }
    e.push(100, Op::Timer { after: Duration::from_millis(1) });
    for c in wait_for(&mut e, 101) {
        let expected = if c.token < 100 { [8192, 0, 0, 8192][c.token as usize % 4] } else { 0 };
        assert_eq!(c.raw, expected, "{c:?}");
    }
    assert_eq!(e.in_flight(), 0);
    e.push(1, Op::Sync { file: f });
    e.submit().unwrap();
    drop(e);
}

#[test]
fn a_driver_without_poll_queues_is_waited_for() {
    let (mut e, arena) = engine(true);
    assert_eq!(e.name(), "io_uring nvme polled");
    e.poll(false).unwrap();
    let f = add(&mut e, "/dev/null", true);
    e.push(1, Op::Read { file: f, offset: 0, buf: arena.span(0, 512) });
    assert_eq!(wait_for(&mut e, 1), [Completion { token: 1, raw: 512 }]);
    assert_eq!(e.name(), "io_uring nvme");
}

#[test]
fn the_next_disk_is_polled_though_the_one_before_it_could_not_be() {
    let (mut e, _arena) = engine(true);
    e.poll(false).unwrap();
    e.clear_files().unwrap();
    assert_eq!(e.name(), "io_uring nvme polled");
}

#[test]
fn what_is_wrong_with_a_command_is_its_completion() {
    let (mut e, arena) = engine(false);
    let refusing = add(&mut e, "/dev/zero", true);
    let read_only = add(&mut e, "/dev/null", false);
    let buf = arena.span(0, 512);
    for (op, raw) in [
        (Op::Read { file: refusing, offset: 0, buf }, -libc::EOPNOTSUPP),
        (Op::Write { file: read_only, offset: 0, buf }, -libc::EBADF),
        (Op::Discard { file: read_only, offset: 0, len: 512 }, -libc::EBADF),
        (Op::Read { file: read_only, offset: 0, buf }, 512),
        (Op::Read { file: read_only, offset: 1, buf }, -libc::EINVAL),
        (Op::Read { file: read_only, offset: 0, buf: buf.slice(0, 511) }, -libc::EINVAL),
        (Op::PunchHole { file: refusing, offset: 0, len: 512 }, -libc::EOPNOTSUPP),
        (Op::Sync { file: FileId(9) }, -libc::EBADF),
    ] {
        e.push(7, op);
        assert_eq!(wait_for(&mut e, 1), [Completion { token: 7, raw }], "{op:?}");
    }
}
