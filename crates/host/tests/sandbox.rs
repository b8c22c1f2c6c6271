//! What a process that is locked down can still do, and what ends it.
//!
//! Each case is a process of its own: this program once more, which runs the one test `child`.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::frames::RELAY;
use ferrite_host::names::{self, Broker};
use ferrite_host::sandbox::{Lockdown, Means};
use ferrite_io::arena::Arena;
use ferrite_io::engine::{Engine, Op};
use ferrite_io::engines::EngineKind;
use ferrite_testkit::wait_until;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

const CASE: &str = "FERRITE_SANDBOX_CASE";
const ROOT: &str = "FERRITE_SANDBOX_ROOT";
const FILE: &str = "FERRITE_SANDBOX_FILE";
const DONE: &str = "it is all done";
const WAITING: &str = "it waits as ";
const USER: u32 = 0x7100_0001;
const BYTES: usize = 4096;

type Tried = fn(&File);

/// All that must not be, by name.
const FORBIDDEN: &[(&str, Tried)] = &[
    ("open", |_| drop(File::open("/"))),
    ("openat", |file| drop(rustix::fs::openat(file, "x", OFlags::RDONLY, Mode::empty()))),
    ("readlink", |_| drop(std::fs::read_link("/x"))),
    ("unlink", |_| drop(std::fs::remove_file("/x"))),
    ("mkdir", |_| drop(std::fs::create_dir("/x"))),
    ("watch", |file| {
        let _ = rustix::fs::inotify::add_watch(file, "/", WATCHED);
    }),
    ("socket", |_| drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
    ("socketpair", |_| drop(UnixStream::pair())),
    ("execve", |_| drop(std::os::unix::process::CommandExt::exec(&mut Command::new("/x")))),
    ("fork", |_| call(libc::SYS_clone, [libc::SIGCHLD as i64, 0, 0])),
    ("ptrace", |_| call(libc::SYS_ptrace, [i64::from(libc::PTRACE_TRACEME), 0, 0])),
    ("kill", |_| call(libc::SYS_kill, [1, 0, 0])),
    ("another's thread", |_| call(libc::SYS_tgkill, [1, 1, 0])),
    ("another's memory", |_| call(libc::SYS_process_vm_readv, [1, 0, 0])),
    ("another's descriptor", |_| call(libc::SYS_pidfd_open, [1, 0, 0])),
    ("a file in memory", |_| call(libc::SYS_memfd_create, [c"x".as_ptr() as i64, 0, 0])),
    ("foreign ioctl", |file| {
        // BLKROSET.
        call(libc::SYS_ioctl, [file.as_raw_fd().into(), 0x125d, 0]);
    }),
    ("an NVMe command without one", |file| {
        call(libc::SYS_ioctl, [file.as_raw_fd().into(), 0xc048_4e41, 0]);
    }),
    ("another owner of signals", |file| {
        call(libc::SYS_fcntl, [file.as_raw_fd().into(), libc::F_SETOWN.into(), 1]);
    }),
    ("code", |_| call(libc::SYS_mprotect, [0, 0, libc::PROT_EXEC.into()])),
    ("another's limits", |_| call(libc::SYS_prlimit64, [1, 0, c"".as_ptr() as i64])),
    ("a dump of itself", |_| call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0])),
    ("another user", |_| call(libc::SYS_setuid, [0, 0, 0])),
    ("another namespace", |_| call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0])),
    ("a mount", |_| call(libc::SYS_mount, [0, 0, 0])),
    ("a program for the kernel", |_| call(libc::SYS_bpf, [0, 0, 0])),
    ("keys", |_| call(libc::SYS_keyctl, [0, 0, 0])),
    ("a handle", |file| call(libc::SYS_open_by_handle_at, [file.as_raw_fd().into(), 0, 0])),
];

/// Calls that a worker may make, and a process that has nothing but sockets may not.
const OF_FILES: &[(&str, Tried)] = &[
    ("sync", |file| drop(file.sync_all())),
    ("length", |file| drop(file.set_len(0))),
    ("status", |file| drop(file.metadata())),
    ("lock", |file| {
        let _ = rustix::fs::flock(file, rustix::fs::FlockOperation::LockShared);
    }),
    ("own ring", |_| drop(IoUring::new(4))),
    ("pipe", |_| drop(std::io::pipe())),
    ("thread", |_| drop(std::thread::spawn(|| ()))),
];
/// Before the names of its cases.
const SOCKETS: &str = "sockets: ";
const ACCEPTS: &str = "accepts: ";

const WATCHED: rustix::fs::inotify::WatchFlags = rustix::fs::inotify::WatchFlags::MODIFY;

#[expect(unsafe_code, reason = "what the C library would not do")]
fn call(number: i64, [a, b, c]: [i64; 3]) {
    // SAFETY: none of these reads or writes memory of ours, if it is done at all.
    unsafe { libc::syscall(number, a, b, c, 0, 0) };
}

/// Goes on in a child, as tests run on a second thread. The first one ends as the child does.
#[expect(unsafe_code, reason = "a fork")]
fn end_as_a_process_with_one_thread() {
    // SAFETY: the other thread waits for this one, and holds nothing that the child needs.
    let child = unsafe { libc::fork() };
    let Some(child) = rustix::process::Pid::from_raw(child) else {
        // SAFETY: a list of one group.
        unsafe { libc::setgroups(1, &7) };
        let killed = Some(rustix::process::Signal::KILL);
        return rustix::process::set_parent_process_death_signal(killed).unwrap();
    };
    let options = rustix::process::WaitOptions::empty();
    let (_, status) = rustix::process::waitpid(Some(child), options).unwrap().unwrap();
    if let Some(signal) = status.terminating_signal() {
        call(libc::SYS_kill, [std::process::id().into(), signal.into(), 0]);
        std::thread::park();
    }
    std::process::exit(status.exit_status().unwrap_or(1));
}

fn command(case: &str, root: &Path, file: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    // The way of a backtrace to names and lines is through files.
    command.env(CASE, case).env("RUST_BACKTRACE", "0").env(ROOT, root).env(FILE, file);
    // Tests run on a second thread, whose heap would stay.
    command.env("MALLOC_ARENA_MAX", "1");
    command
}

fn run(case: &str) -> (ExitStatus, String) {
    let root = tempfile::tempdir().unwrap();
    // Its permissions keep no user from opening it.
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // On a file system with direct I/O, if the build is on one.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let output = command(case, root.path(), file.path()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status, String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let path = |name| std::env::var_os(name).unwrap();
    end_as_a_process_with_one_thread();
    let flags = OFlags::RDWR | OFlags::DIRECT;
    let file = rustix::fs::open(path(FILE), flags, Mode::empty());
    let file = file.or_else(|_| rustix::fs::open(path(FILE), OFlags::RDWR, Mode::empty()));
    let file = File::from(file.unwrap());
    let root = Path::new(&path(ROOT)).to_owned();
    let folder = rustix::fs::open(&root, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
    let folder = folder.unwrap();
    // Of a keeper that is gone.
    let (socket, _) = UnixStream::pair().unwrap();
    names::install(Broker::new(socket.into())).unwrap();
    let talking = UnixStream::pair().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let accepts = case.starts_with(ACCEPTS);
    let sockets_only = case.starts_with(SOCKETS) || accepts;
    let means = Means { sockets_only, accepts, ..Means::default() };
    let locked = Lockdown { user: USER, root, means };
    let connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    match locked.enter() {
        Ok(lacking) => println!("lacking: {lacking}"),
        Err(e) => {
            println!("not locked down: {e}");
            std::process::exit(1);
        }
    }
    let case = [SOCKETS, ACCEPTS].iter().find_map(|kind| case.strip_prefix(kind)).unwrap_or(&case);
    match FORBIDDEN.iter().chain(OF_FILES).find(|(name, _)| *name == case) {
        Some((_, tried)) => tried(&file),
        None if case == "work" => work(file),
        None if case == "talk" => talk(&talking),
        None if case == "accept" => accept(&listener, &connected),
        None => ask(case, &folder),
    }
    println!("{DONE}");
    std::process::exit(0);
}

/// The work of a worker.
fn work(file: File) {
    let file: Arc<OwnedFd> = Arc::new(file.into());
    for kind in EngineKind::ALL {
        let file = file.clone();
        let queue = std::thread::Builder::new().name("queue".into()).spawn(move || {
            let arena = Arena::new(4 << 20).unwrap();
            let mut engine = kind.open(arena.clone(), 16).unwrap();
            let file = engine.add_file(file).unwrap();
            let whole = arena.span(0, 1 << 20);
            engine.pin(whole);
            let buf = whole.slice(0, BYTES);
            arena.fill(buf, 7);
            assert_eq!(one(&mut *engine, Op::Write { file, offset: 0, buf }), BYTES as i32);
            arena.fill(buf, 0);
            assert_eq!(one(&mut *engine, Op::Read { file, offset: 0, buf }), BYTES as i32);
            let mut bytes = [0; BYTES];
            arena.copy_out(buf, &mut bytes);
            assert_eq!(bytes, [7; BYTES]);
            one(&mut *engine, Op::Timer { after: Duration::from_millis(1) });
            assert_eq!(one(&mut *engine, Op::Sync { file }), 0);
            let (offset, len) = (0, BYTES as u64);
            let allocate = |extends| Op::Allocate { file, offset, len, extends };
            for op in [Op::PunchHole { file, offset, len }, allocate(true), allocate(false)] {
                assert!([0, -libc::EOPNOTSUPP].contains(&one(&mut *engine, op)));
            }
            // A file is no device; that the kernel was asked is what counts.
            assert!(one(&mut *engine, Op::Discard { file, offset, len }) < 0);
            assert_eq!(one(&mut *engine, Op::SetLen { file, len: 1 << 20 }), 0);
            engine.unpin();
        });
        queue.unwrap().join().unwrap();
    }
    // A heap that grows and shrinks, on many threads.
    let threads = (0..16).map(|i| std::thread::spawn(move || vec![i as u8; (i + 1) << 20].len()));
    let threads: Vec<_> = threads.collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap() > 0));
    assert!(ferrite_host::processors::count() > 0);
    let hash = std::collections::HashSet::from([1]);
    assert!(hash.contains(&1));
}

/// The work of a relay.
fn talk((one, other): &(UnixStream, UnixStream)) {
    RELAY.try_send(one, b"there", &[one.as_fd()]).unwrap();
    let mut fds = [PollFd::new(other, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 30, tv_nsec: 0 })).unwrap(), 1);
    let came = RELAY.try_receive(other).unwrap().unwrap();
    assert_eq!((came.bytes.as_slice(), came.files.len()), (b"there".as_slice(), 1));
    // Memory that comes and goes.
    (0..16).for_each(|i| assert!(vec![1u8; (i + 1) << 20].iter().all(|byte| *byte == 1)));
    assert!(std::time::Instant::now().elapsed() < Duration::from_secs(60));
}

/// The work of a tunnel: a client, a thread for it, bytes both ways, and the end.
fn accept(listener: &std::net::TcpListener, mut connected: &std::net::TcpStream) {
    use std::io::{Read as _, Write as _};
    let (mut client, _) = listener.accept().unwrap();
    let threads: Vec<_> = (0..8u8)
        .map(|i| {
            let thread = std::thread::Builder::new().name("tls-client".into());
            thread.spawn(move || vec![i; 1 << 20].len()).unwrap()
        })
        .collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap() == 1 << 20));
    client.write_all(b"there").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = Vec::new();
    connected.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"there");
    std::thread::sleep(Duration::from_millis(1));
}

fn one(engine: &mut dyn Engine, op: Op) -> i32 {
    engine.push(1, op);
    let mut out = Vec::new();
    while out.is_empty() {
        engine.wait(None).unwrap();
        engine.reap(&mut out);
    }
    out[0].raw
}

/// Cases that the kernel answers, without any harm.
fn ask(case: &str, folder: &OwnedFd) {
    match case {
        "wait" => {
            println!("\n{WAITING}{}", std::process::id());
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        "root" => assert!(std::fs::metadata("/proc").is_err() && std::fs::metadata("/").is_ok()),
        "ring" => foreign_ring(folder.as_raw_fd()),
        "panic" => {
            std::panic::catch_unwind(|| panic!("once")).unwrap_err();
        }
        "abort" => std::process::abort(),
        _ => panic!("no case: {case}"),
    }
}

#[test]
fn each_thing_that_a_worker_must_not_do_ends_it() {
    for (case, _) in FORBIDDEN {
        let (status, text) = run(case);
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{case}: {status}, {text}");
        assert!(!text.contains(DONE), "{case}: {text}");
    }
}

#[test]
fn a_process_of_sockets_has_no_files() {
    for (case, _) in FORBIDDEN.iter().chain(OF_FILES) {
        let (status, text) = run(&format!("{SOCKETS}{case}"));
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{case}: {status}, {text}");
    }
    let (status, text) = run(&format!("{SOCKETS}talk"));
    assert!(status.success() && text.contains(DONE), "{status}: {text}");
}

#[test]
fn a_process_that_accepts_clients_has_no_files_either_and_makes_no_connection() {
    // It starts threads.
    let of_files = OF_FILES.iter().filter(|(case, _)| *case != "thread");
    for (case, _) in FORBIDDEN.iter().chain(of_files) {
        let (status, text) = run(&format!("{ACCEPTS}{case}"));
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{case}: {status}, {text}");
    }
    let (status, text) = run(&format!("{ACCEPTS}accept"));
    assert!(status.success() && text.contains(DONE), "{status}: {text}");
}

#[test]
fn what_a_worker_does_it_can_do_on_each_engine() {
    let (status, text) = run("work");
    assert!(status.success() && text.contains(DONE), "{status}: {text}");
}

/// A ring without restrictions, of an attacker that has taken the process over. seccomp sees nothing of it.
#[expect(unsafe_code, reason = "an operation of the kernel's")]
fn foreign_ring(folder: i32) {
    let mut ring = IoUring::new(4).unwrap();
    let names = [(folder, c"."), (libc::AT_FDCWD, c"/"), (libc::AT_FDCWD, c"/proc/self/exe")];
    for (folder, name) in names {
        let entry = opcode::OpenAt::new(Fd(folder), name.as_ptr()).build();
        // SAFETY: the name is a constant.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        let result = ring.completion().next().unwrap().result();
        assert!([-libc::EACCES, -libc::ENOENT].contains(&result), "{name:?}: {result}");
    }
}

#[test]
fn a_ring_of_its_own_opens_nothing_either() {
    let (status, text) = run("ring");
    // Without it the empty root has to do, which an open folder leads out of.
    let has_landlock = !text.contains("no landlock");
    assert!(status.success() && text.contains(DONE) || !has_landlock, "{status}: {text}");
}

/// A line of the kernel's status of a process, by its name.
fn status_of(pid: &str, name: &str) -> String {
    let all = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

#[test]
fn it_has_no_rights_and_no_network_and_ends_with_its_keeper() {
    let root = tempfile::tempdir().unwrap();
    // Its permissions keep no user from opening it.
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = command("wait", root.path(), file.path());
    let mut outer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(outer.stdout.take().unwrap()).lines();
    let said =
        |line: std::io::Result<String>| Some(line.unwrap().strip_prefix(WAITING)?.to_owned());
    let pid = lines.into_iter().find_map(said).expect("it says when it waits");

    for user in ["Uid", "Gid"] {
        assert!(status_of(&pid, user).split_whitespace().all(|id| id == USER.to_string()));
    }
    assert_eq!(status_of(&pid, "Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_of(&pid, set), "0000000000000000", "{set}");
    }
    assert_eq!((&*status_of(&pid, "NoNewPrivs"), &*status_of(&pid, "Seccomp")), ("1", "2"));
    let has = status_of(&pid, "Speculation_Store_Bypass");
    assert!(!has.contains("force mitigated"), "{has}");
    let network = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(network(&pid), network("self"));
    // Its files there belong to root if it cannot be looked into by its own user.
    let meta = std::fs::metadata(format!("/proc/{pid}/environ")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), 0);

    // Open until the end: it is not what it ends by.
    let _stdin = outer.stdin.take();
    outer.kill().unwrap();
    outer.wait().unwrap();
    let is_gone = || {
        !Path::new(&format!("/proc/{pid}")).exists() || status_of(&pid, "State").starts_with('Z')
    };
    wait_until("its end", is_gone);
}

#[test]
fn its_root_is_empty_and_it_may_panic_and_abort() {
    for case in ["root", "panic"] {
        let (status, text) = run(case);
        assert!(status.success() && text.contains(DONE), "{case}: {status}: {text}");
    }
    let (status, text) = run("abort");
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{text}");
}
