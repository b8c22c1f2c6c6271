//! A worker's way to names: what its keeper opens for it, and the attacks on that.

use std::fs::{self, File};
use std::io::{self, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use ferrite_host::names::Broker;
use ferrite_host::names::connect::{Server as Remote, resolve};
use ferrite_host::names::policy::{Policy, Right};
use ferrite_host::names::server::{Images, Served, Server};
use ferrite_host::names::wire::{Request, What};
use ferrite_host::naming::Handle;
use ferrite_host::place::Place;
use ferrite_nbd::address::Address;
use ferrite_testkit::devices::Loop;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

/// A host with a disk's image, its run directory, a secret, and a keeper.
struct Host {
    dir: tempfile::TempDir,
    /// Ours: what a worker has.
    socket: OwnedFd,
    keeper: JoinHandle<io::Result<Images>>,
}

const SECRET: &[u8] = b"of another guest";

fn host(writable: bool) -> Host {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for folder in ["images/below", "templates", "secret", "run/vbd-1-2", "run/journals"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    for name in ["images/disk.img", "images/parent.img", "images/below/p.img", "templates/t.img"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at("secret/disk.img"), SECRET).unwrap();
    let mut policy = Policy::of_disk(&at("images/disk.img"), writable, &[at("templates")]);
    policy.add(&at("run/vbd-1-2"), true, Right::Own);
    policy.add(&at("run/journals"), true, Right::Journals);
    policy.servers = vec![Remote { address: Address::Unix(at("run/nbd")), resolved: Vec::new() }];
    let flags = SocketFlags::CLOEXEC;
    let (socket, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let server = Server::new(theirs, policy, std::process::id());
    let keeper = std::thread::spawn(move || {
        let mut images = Images::default();
        loop {
            poll(&mut [PollFd::new(&server.fd(), PollFlags::IN)], None).unwrap();
            if server.serve_one(&mut images)? == Served::Ended {
                return Ok(images);
            }
        }
    });
    Host { dir, socket, keeper }
}

impl Host {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn broker(&self) -> Broker {
        Broker::new(self.socket.try_clone().unwrap())
    }

    fn open(&self, path: impl AsRef<Path>, flags: OFlags) -> rustix::io::Result<File> {
        let mode = Mode::RUSR | Mode::WUSR;
        self.broker().open(path.as_ref(), flags, mode).map(File::from)
    }

    fn read(&self, path: impl AsRef<Path>) -> rustix::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(path, OFlags::RDONLY)?.read_to_end(&mut bytes).unwrap();
        Ok(bytes)
    }

    fn ask(&self, what: What, path: &Path) -> rustix::io::Result<Vec<u8>> {
        Ok(self.broker().ask(&Request::of(what, path), &[])?.text)
    }

    fn rename(&self, from: &str, to: &str) -> rustix::io::Result<()> {
        let (from, to) = (self.at(from), self.at(to));
        let second = to.as_os_str().as_encoded_bytes();
        let request = Request { second, ..Request::of(What::Rename, &from) };
        self.broker().ask(&request, &[]).map(drop)
    }

    /// A message that no library of ours would send.
    fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(files)));
        let flags = SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags).map(drop)
    }

    /// How the keeper has ended with this worker.
    fn end(self) -> io::Result<Images> {
        drop(self.socket);
        self.keeper.join().unwrap()
    }
}

#[test]
fn the_image_is_written_what_it_may_stand_on_is_read_and_all_else_is_refused() {
    let host = host(true);
    let image = host.at("images/disk.img");
    host.open(&image, OFlags::RDWR).unwrap().write_all(b"new").unwrap();
    assert!(fs::read(&image).unwrap().starts_with(b"new"));
    for name in ["images/parent.img", "images/below/p.img", "templates/t.img"] {
        assert_eq!(host.read(host.at(name)).unwrap(), name.as_bytes());
        for flags in [OFlags::RDWR, OFlags::WRONLY] {
            assert_eq!(host.open(host.at(name), flags).unwrap_err(), Errno::ACCESS, "{name}");
        }
    }
    for flags in [OFlags::CREATE, OFlags::TRUNC, OFlags::CREATE | OFlags::EXCL] {
        let opened = host.open(&image, OFlags::RDWR | flags);
        assert_eq!(opened.unwrap_err(), Errno::ACCESS, "{flags:?}");
    }
    for flags in [OFlags::TMPFILE, OFlags::APPEND, OFlags::NOATIME] {
        assert_eq!(
            host.open(host.at("run/vbd-1-2"), OFlags::RDWR | flags).unwrap_err(),
            Errno::INVAL
        );
    }
    for path in [host.at("secret/disk.img"), host.at("secret"), "/etc/passwd".into(), "/".into()] {
        assert_eq!(host.read(&path).unwrap_err(), Errno::ACCESS, "{path:?}");
        assert_eq!(host.ask(What::Canonical, &path).unwrap_err(), Errno::ACCESS, "{path:?}");
        assert_eq!(host.open(&path, OFlags::PATH).unwrap_err(), Errno::ACCESS, "{path:?}");
    }
    assert_eq!(
        host.read("images/disk.img").unwrap_err(),
        Errno::ACCESS,
        "from the keeper's folder"
    );
    assert_eq!(host.end().unwrap().count(), 1);
}

#[test]
fn an_image_that_is_served_read_only_is_not_written() {
    let host = host(false);
    let image = host.at("images/disk.img");
    assert_eq!(host.open(&image, OFlags::RDWR).unwrap_err(), Errno::ACCESS);
    assert_eq!(host.read(&image).unwrap(), b"images/disk.img");
    assert_eq!(host.end().unwrap().count(), 0);
}

#[test]
fn dots_and_links_lead_nowhere_and_do_not_tell_what_is_there() {
    let host = host(true);
    symlink(host.at("secret/disk.img"), host.at("images/link.img")).unwrap();
    symlink(host.at("secret"), host.at("images/folder")).unwrap();
    for name in [
        "images/../secret/disk.img",
        "images/../secret/missing.img",
        "images/link.img",
        "images/folder/disk.img",
        "secret/disk.img",
        "secret/missing.img",
        "run/vbd-1-2/../../secret/disk.img",
    ] {
        assert_eq!(host.read(host.at(name)).unwrap_err(), Errno::ACCESS, "{name}");
    }
    assert_eq!(host.read(host.at("images/missing.img")).unwrap_err(), Errno::NOENT);
    // The link itself may be looked at, and one that stays inside is followed.
    let link = host.open(host.at("images/link.img"), OFlags::PATH | OFlags::NOFOLLOW).unwrap();
    assert!(link.metadata().unwrap().is_symlink());
    symlink("parent.img", host.at("images/inside.img")).unwrap();
    assert_eq!(host.read(host.at("images/inside.img")).unwrap(), b"images/parent.img");
    let found = host.ask(What::Canonical, &host.at("images/inside.img")).unwrap();
    assert_eq!(found, host.at("images/parent.img").as_os_str().as_encoded_bytes());
}

#[test]
fn a_link_that_is_swapped_while_it_is_opened_never_leads_to_the_secret() {
    let host = host(true);
    let (link, next) = (host.at("images/link.img"), host.at("images/next"));
    let targets = [host.at("images/parent.img"), host.at("secret/disk.img")];
    symlink(&targets[0], &link).unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let swapper = std::thread::spawn({
        let (link, ends) = (link.clone(), ends.clone());
        move || {
            for target in targets.iter().cycle() {
                symlink(target, &next).unwrap();
                fs::rename(&next, &link).unwrap();
                if ends.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    });
    for _ in 0..2000 {
        match host.read(&link) {
            Ok(bytes) => assert_eq!(bytes, b"images/parent.img"),
            Err(e) => assert_eq!(e, Errno::ACCESS),
        }
    }
    ends.store(true, Ordering::Relaxed);
    swapper.join().unwrap();
}

#[test]
fn nothing_gets_a_name_outside_of_the_run_directory() {
    let host = host(true);
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    host.open(host.at("run/vbd-1-2/new"), new).unwrap();
    for (from, to) in [
        ("secret/disk.img", "run/vbd-1-2/mine"),
        ("images/disk.img", "run/vbd-1-2/mine"),
        ("run/vbd-1-2/new", "images/new.img"),
        ("run/vbd-1-2/new", "images/disk.img"),
        ("run/vbd-1-2/new", "run/vbd-1-3"),
    ] {
        let renamed = host.rename(from, to);
        assert_eq!(renamed, Err(Errno::ACCESS), "{from} {to}");
    }
    for name in ["images/disk.img", "images/new.img", "run/vbd-1-3", "secret/disk.img"] {
        for what in [What::RemoveFile, What::RemoveDir, What::CreateDirs] {
            let done = host.ask(what, &host.at(name));
            assert_eq!(done.unwrap_err(), Errno::ACCESS, "{what:?} {name}");
        }
    }
    symlink(host.at("secret/disk.img"), host.at("run/vbd-1-2/link")).unwrap();
    for flags in [OFlags::CREATE, OFlags::TRUNC] {
        let opened = host.open(host.at("run/vbd-1-2/link"), OFlags::RDWR | flags);
        assert_eq!(opened.unwrap_err(), Errno::LOOP);
    }
    assert_eq!(fs::read(host.at("secret/disk.img")).unwrap(), SECRET);
}

#[test]
fn in_its_run_directory_a_worker_makes_and_removes_what_it_needs() {
    let host = host(true);
    let (dir, table) = (host.at("run/vbd-1-2"), host.at("run/vbd-1-2/table"));
    fs::remove_dir(&dir).unwrap();
    for _ in 0..2 {
        let request = Request { mode: 0o700, ..Request::of(What::CreateDirs, &dir) };
        host.broker().ask(&request, &[]).unwrap();
    }
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o7777, 0o700);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
    host.open(host.at("run/vbd-1-2/table.new"), flags).unwrap().write_all(b"12").unwrap();
    host.rename("run/vbd-1-2/table.new", "run/vbd-1-2/table").unwrap();
    let meta = fs::metadata(&table).unwrap();
    assert_eq!((meta.len(), meta.permissions().mode() & 0o7777), (2, 0o600));
    assert_eq!(host.open(&table, flags).unwrap().metadata().unwrap().len(), 0);
    host.ask(What::RemoveFile, &table).unwrap();
    host.ask(What::RemoveDir, &dir).unwrap();
    assert!(!dir.exists());
    // The folder that it is in is there.
    host.ask(What::CreateDirs, &host.at("run")).unwrap();
    host.ask(What::CreateDirs, &host.at("run/other")).unwrap_err();
}

#[test]
fn what_is_no_file_and_no_block_device_is_not_opened_and_waited_for() {
    let host = host(true);
    let fifos = ["images/fifo", "run/vbd-1-2/fifo"].map(|name| host.at(name));
    for fifo in &fifos {
        rustix::fs::mknodat(rustix::fs::CWD, fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .unwrap();
    }
    symlink("/dev/zero", host.at("run/vbd-1-2/zero")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.at("images/socket")).unwrap();
    let [first, second] = fifos;
    for path in [first, second, host.at("images/socket"), host.at("run/vbd-1-2/zero")] {
        for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::WRONLY | OFlags::CREATE] {
            let e = host.open(&path, flags).unwrap_err();
            assert!([Errno::ACCESS, Errno::LOOP, Errno::NXIO].contains(&e), "{path:?}: {e}");
        }
    }
    for path in ["/dev/null", "/dev/zero", "/dev/tty", "/dev/mem", "/dev/ptmx"] {
        assert_eq!(host.open(path, OFlags::RDWR).unwrap_err(), Errno::ACCESS, "{path}");
    }
}

#[test]
fn the_keepers_own_descriptors_and_processes_are_no_way_either() {
    let host = host(true);
    let secret = File::open(host.at("secret/disk.img")).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&secret);
    let pid = std::process::id();
    // Said as the keeper would take it, where the library sends its own descriptor.
    for name in [
        format!("/proc/./self/fd/{number}"),
        format!("/proc/{pid}/fd/{number}"),
        format!("/proc/{pid}/root{}", host.at("secret/disk.img").display()),
        format!("/proc/{pid}/cwd"),
        "/proc/self/environ".into(),
        format!("/proc/{pid}/mem"),
        "/proc/sysrq-trigger".into(),
        "/sys/kernel/uevent_seqnum".into(),
    ] {
        assert_eq!(host.read(&name).unwrap_err(), Errno::ACCESS, "{name}");
        assert!(host.open(&name, OFlags::RDWR).is_err(), "{name}");
    }
    // A worker's own one is where it is, and what is outside is not opened again.
    let own = format!("/proc/self/fd/{number}");
    assert_eq!(host.read(&own).unwrap_err(), Errno::ACCESS);
    symlink(format!("/proc/self/fd/{number}"), host.at("images/magic")).unwrap();
    assert_eq!(host.read(host.at("images/magic")).unwrap_err(), Errno::ACCESS);
    let parent = File::open(host.at("images/parent.img")).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&parent);
    let own = format!("/proc/self/fd/{number}");
    assert_eq!(host.read(&own).unwrap(), b"images/parent.img");
    let place = host.ask(What::ReadLink, own.as_ref()).unwrap();
    assert_eq!(place, host.at("images/parent.img").as_os_str().as_encoded_bytes());
}

#[test]
fn texts_of_the_kernels_are_read_and_not_written() {
    let host = host(true);
    assert!(!host.read("/proc/self/mountinfo").unwrap().is_empty());
    host.read("/proc/locks").unwrap();
    assert_eq!(host.open("/proc/locks", OFlags::RDWR).unwrap_err(), Errno::ACCESS);
    // It is that of this thread, although the keeper opens it.
    let status = host.open("/proc/thread-self/schedstat", OFlags::RDONLY);
    assert!(matches!(status, Ok(_) | Err(Errno::NOENT)), "{status:?}");
    let devices = host.open("/sys/block", OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
    assert!(devices.metadata().unwrap().is_dir());
}

#[test]
fn names_with_ends_in_them_and_endless_ones_are_nonsense() {
    let long = "x".repeat(5000);
    let broken = Path::new("/a\0b");
    let host = self::host(true);
    assert_eq!(host.read(&long).unwrap_err(), Errno::NAMETOOLONG);
    assert_eq!(host.read(broken).unwrap_err(), Errno::INVAL);
    let four = format!("{}/{}", host.at("images").display(), "y/".repeat(2100));
    assert!(host.read(&four[..4095]).is_err());
    assert_eq!(host.read(host.at("images/parent.img")).unwrap(), b"images/parent.img");
    host.end().unwrap();

    let whole = Request::of(What::Open, Path::new("/etc/passwd")).to_bytes(1).unwrap();
    let mut with_end = whole.clone();
    with_end[29] = 0;
    let mut of_nobody = whole.clone();
    of_nobody[0] = 200;
    let mut too_long = whole.clone();
    too_long[16..20].copy_from_slice(&5000u32.to_ne_bytes());
    let mut overflowing = whole.clone();
    overflowing[16..24].fill(0xff);
    let cut = whole[..10].to_vec();
    let large = [&whole[..], &[b'x'; 20_000]].concat();
    for bytes in [with_end, of_nobody, too_long, overflowing, cut, large] {
        let host = self::host(true);
        host.send(&bytes, &[]).unwrap();
        let error = host.end().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{} bytes", bytes.len());
    }
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let host = host(true);
    let (mut reader, writer) = io::pipe().unwrap();
    let request = Request::of(What::Canonical, Path::new("/")).to_bytes(1).unwrap();
    for count in [1, 2, 3, 250] {
        let files: Vec<BorrowedFd<'_>> = (0..count).map(|_| writer.as_fd()).collect();
        host.send(&request, &files).unwrap();
    }
    drop(writer);
    // No process has its other end any more.
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
    host.end().unwrap();
}

#[test]
fn a_worker_that_does_not_read_its_answers_is_given_up() {
    let host = host(true);
    let image = host.at("images/parent.img");
    let request = Request::of(What::Open, &image).to_bytes(1).unwrap();
    while host.send(&request, &[]).is_ok() {}
    let error = host.end().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
}

#[test]
fn the_next_worker_gets_the_open_image_until_it_is_released() {
    let host = host(true);
    let image = host.at("images/disk.img");
    let first = host.open(&image, OFlags::RDWR).unwrap();
    flock(&first, FlockOperation::NonBlockingLockExclusive).unwrap();
    drop(first);
    // The keeper holds it, and so its lock, which the next one has at once.
    let other = File::open(&image).unwrap();
    let refused = flock(&other, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(refused.unwrap_err(), Errno::AGAIN);
    let next = host.open(&image, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
    flock(&next, FlockOperation::NonBlockingLockExclusive).unwrap();
    drop(next);
    // Another image with that name is another one.
    fs::write(host.at("images/new"), "").unwrap();
    fs::rename(host.at("images/new"), &image).unwrap();
    let replaced = host.open(&image, OFlags::RDWR).unwrap();
    assert_eq!(replaced.metadata().unwrap().ino(), fs::metadata(&image).unwrap().ino());
    let refused = flock(&other, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(refused.unwrap_err(), Errno::AGAIN);
    // It was closed in good order, and the other one was not.
    host.broker().ask(&Request::of(What::Release, Path::new("")), &[other.as_fd()]).unwrap();
    flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(host.end().unwrap().count(), 1);
}

/// Those of its image, whatever that is now (docs/internals/processes.md 5).
#[test]
fn of_all_journals_those_of_the_image_are_written_and_the_others_are_read() {
    let host = host(true);
    let image = host.at("images/disk.img");
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let journal =
        |image: &Path| format!("run/journals/01{}", Place::at(image).unwrap().journal_end());
    let (own, other) = (journal(&image), journal(&host.at("images/parent.img")));
    host.open(host.at(&own), new).unwrap().write_all(b"x").unwrap();
    assert_eq!(host.open(host.at(&other), new).unwrap_err(), Errno::ACCESS);
    fs::write(host.at(&other), "y").unwrap();
    assert_eq!(host.read(host.at(&other)).unwrap(), b"y");
    host.ask(What::CreateDirs, &host.at("run/journals")).unwrap();
    for (from, to) in [(&own, &other), (&other, &own)] {
        assert_eq!(host.rename(from, to), Err(Errno::ACCESS));
    }
    for what in [What::RemoveFile, What::RemoveDir] {
        assert_eq!(host.ask(what, &host.at(&other)).unwrap_err(), Errno::ACCESS);
        assert!(host.ask(what, &host.at("run/journals")).is_err());
    }
    assert_eq!(host.open(host.at(&other), OFlags::RDWR).unwrap_err(), Errno::ACCESS);
    // Another image with that name has other journals.
    fs::rename(host.at("images/parent.img"), &image).unwrap();
    host.ask(What::RemoveFile, &host.at(&other)).unwrap();
    assert_eq!(host.ask(What::RemoveFile, &host.at(&own)).unwrap_err(), Errno::ACCESS);
    let read_only = self::host(false);
    let own = journal(&read_only.at("images/disk.img"));
    assert_eq!(read_only.open(read_only.at(&own), new).unwrap_err(), Errno::ACCESS);
}

/// By which a loop device is called, so that its journals are (docs/internals/processes.md 5).
#[test]
fn the_file_of_a_loop_device_is_examined_and_not_opened() {
    let host = host(true);
    let secret = host.at("secret/disk.img");
    assert_eq!(host.open(&secret, OFlags::PATH).unwrap_err(), Errno::ACCESS);
    fs::write(&secret, vec![1; 1 << 20]).unwrap();
    let Some(_device) = Loop::attach(&secret, 512) else { return };
    let examined = host.open(&secret, OFlags::PATH).unwrap();
    assert_eq!(examined.metadata().unwrap().ino(), fs::metadata(&secret).unwrap().ino());
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&examined));
    for path in [secret.clone(), again.into()] {
        for flags in [OFlags::RDONLY, OFlags::RDWR] {
            assert_eq!(host.open(&path, flags).unwrap_err(), Errno::ACCESS, "{path:?}");
        }
    }
    assert_eq!(host.ask(What::Canonical, &secret).unwrap_err(), Errno::ACCESS);
    assert_eq!(host.open(host.at("secret"), OFlags::PATH).unwrap_err(), Errno::ACCESS);
}

#[test]
fn a_handle_leads_to_what_may_be_read_and_to_nothing_else() {
    let host = host(true);
    let folder = File::open(host.at("images")).unwrap();
    let ask = |name: &str| {
        let file = File::open(host.at(name)).unwrap();
        let handle = Handle::of(file.as_fd()).unwrap()?.to_bytes();
        let request = Request { first: &handle, ..Request::of(What::ByHandle, Path::new("")) };
        Some(host.broker().ask(&request, &[folder.as_fd()]).map(drop))
    };
    // The test's file system may have no handles that last.
    let Some(found) = ask("images/parent.img") else { return };
    found.unwrap();
    assert_eq!(ask("secret/disk.img").unwrap().unwrap_err(), Errno::ACCESS);
}

#[test]
fn growth_and_devices_are_told_of() {
    use rustix::fs::inotify;
    let host = host(true);
    let image = host.open(host.at("images/disk.img"), OFlags::RDWR).unwrap();
    let notify = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let request = Request::of(What::Watch, Path::new(""));
    let answer = host.broker().ask(&request, &[notify.as_fd(), image.as_fd()]).unwrap();
    assert!(answer.number > 0);
    File::options().write(true).open(host.at("images/disk.img")).unwrap().write_all(b"x").unwrap();
    let mut space = [MaybeUninit::uninit(); 512];
    let watched = inotify::Reader::new(&notify, &mut space).next().unwrap().wd();
    assert_eq!(watched, answer.number);
    let events = Request::of(What::DeviceEvents, Path::new(""));
    host.broker().ask(&events, &[]).unwrap().file().unwrap();
}

/// Its reading was cut off by an error, say.
#[test]
fn an_answer_that_nobody_has_read_is_not_the_next_requests() {
    let host = host(true);
    let broker = host.broker();
    for number in [0, 100, u32::MAX] {
        let other = Request::of(What::Open, &host.at("templates/t.img")).to_bytes(number).unwrap();
        host.send(&other, &[]).unwrap();
        let opened = broker.open(&host.at("images/parent.img"), OFlags::RDONLY, Mode::empty());
        let mut text = String::new();
        File::from(opened.unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "images/parent.img");
    }
}

#[test]
fn many_threads_that_ask_get_each_its_own_answer() {
    let host = host(true);
    let broker = host.broker();
    for i in 0..8 {
        fs::write(host.at(&format!("templates/{i}")), i.to_string()).unwrap();
    }
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (broker, path) = (&broker, host.at(&format!("templates/{i}")));
            scope.spawn(move || {
                for _ in 0..200 {
                    let file = broker.open(&path, OFlags::RDONLY, Mode::empty()).unwrap();
                    let mut text = String::new();
                    File::from(file).read_to_string(&mut text).unwrap();
                    assert_eq!(text, i.to_string());
                }
            });
        }
    });
}

fn connected(host: &Host, address: &Address) -> rustix::io::Result<OwnedFd> {
    let (first, second) = address.to_bytes();
    let what = What::Connect;
    let request = Request { what, flags: 0, mode: 0, first: &first, second };
    host.broker().ask(&request, &[])?.file()
}

#[test]
fn a_worker_is_connected_to_the_server_of_its_disk_and_to_no_other() {
    let host = host(true);
    let ours = Address::Unix(host.at("run/nbd"));
    // The keeper does not wait for a server that is not there.
    assert_eq!(connected(&host, &ours).err(), Some(Errno::NOENT));
    let listener = std::os::unix::net::UnixListener::bind(host.at("run/nbd")).unwrap();
    let stream = std::os::unix::net::UnixStream::from(connected(&host, &ours).unwrap());
    let (mut server, _) = listener.accept().unwrap();
    server.write_all(b"hello").unwrap();
    let mut said = [0; 5];
    stream.set_nonblocking(false).unwrap();
    (&stream).read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello");
    let _other = std::os::unix::net::UnixListener::bind(host.at("secret/nbd")).unwrap();
    for other in [
        Address::Unix(host.at("secret/nbd")),
        Address::Unix(host.at("run/../run/nbd")),
        Address::Tcp { host: "127.0.0.1".into(), port: 22 },
    ] {
        assert_eq!(connected(&host, &other).err(), Some(Errno::ACCESS), "{other:?}");
    }
    let nonsense = Request { what: What::Connect, flags: 0, mode: 0, first: b"x", second: &[] };
    assert_eq!(host.broker().ask(&nonsense, &[]).err(), Some(Errno::INVAL));
}

#[test]
fn a_host_has_the_addresses_of_its_name() {
    let all = resolve("127.0.0.1", 10809).unwrap();
    assert_eq!(all, ["127.0.0.1:10809".parse().unwrap()]);
    assert!(resolve("nowhere.invalid", 1).is_err());
}
