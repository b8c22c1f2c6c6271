//! Connections that XAPI passes to taps, for storage motion (docs/internals/mirror.md 6).
//!
//! XAPI connects two hosts, and passes its end of the connection as a descriptor. On the receiving host it goes to
//! the socket `nbdserver<pid>.<minor>`: the tap is served on that connection. On the sending host it goes to
//! `nbdclient<pid>`, with a name, by which `tap-ctl unpause -2 nbd:NAME` asks for it.
//!
//! Each connection gets a process of its own, without rights (`ferrite tunnel`), which outlives this daemon. The daemon
//! reads nothing that comes by it.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ferrite_host::limited;
use ferrite_host::sandbox::user_of_tunnel;
use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::state::DiskId;
use crate::{Passing, Paths, Shared};

/// The most connections to the server of a tap, and the most names that a tap's process knows.
const MAX_SERVED: usize = 16;
const MAX_NAMES: usize = 10;
/// The most senders that have connected and not sent yet, and how long each has.
const MAX_SENDERS: usize = 32;
const SENDS_WITHIN: Duration = Duration::from_secs(5);
/// The longest name.
const MAX_NAME: usize = 255;

/// Whether this is the name of a connection.
pub(super) fn is_name(name: &[u8]) -> bool {
    let is_control = |byte: &u8| byte.is_ascii_control();
    !name.is_empty() && name.len() <= MAX_NAME && !name.iter().any(is_control)
}

/// A socket that takes descriptors.
#[derive(Debug)]
struct Receiver {
    minor: u32,
    path: PathBuf,
    socket: UnixListener,
    passing: Passing,
}

/// A process with a connection.
#[derive(Debug)]
struct Process {
    minor: u32,
    number: u64,
    handle: OwnedFd,
    /// Of a mirror's target: its name, and the socket by which workers come.
    target: Option<(String, PathBuf)>,
}

#[derive(Default)]
struct Inner {
    receivers: Vec<Arc<Receiver>>,
    processes: Vec<Process>,
    /// The thread that takes descriptors, if it runs.
    wake: Option<Arc<Waker>>,
    /// The number of the last process.
    last: u64,
}

/// All sockets that take descriptors, and the connections.
#[derive(Default)]
pub(super) struct Passed(Mutex<Inner>);

/// The beginnings of the names of sockets that take descriptors.
const NAMES: [&str; 2] = ["nbdserver", "nbdclient"];

impl Inner {
    /// Removes the sockets of a tap.
    fn remove_receivers(&mut self, minor: u32) {
        self.receivers.retain(|receiver| {
            let stays = receiver.minor != minor;
            if !stays {
                let _ = fs::remove_file(&receiver.path);
            }
            stays
        });
    }
}

impl Process {
    fn kill(&self) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

impl Paths {
    fn passed(&self) -> PathBuf {
        self.run.join("passed")
    }

    /// The names of the sockets of a tap's process.
    fn receivers(&self, pid: u32, minor: u32) -> [(PathBuf, Passing); 3] {
        let name = |name: String| self.blktap().join(name);
        [
            (name(format!("nbdserver{pid}.{minor}")), Passing::Server),
            (name(format!("nbdserver-new{pid}.{minor}")), Passing::ServerWithOptions),
            (name(format!("nbdclient{pid}")), Passing::Client),
        ]
    }
}

impl Passed {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket of the connection of this name.
    pub(super) fn socket_of(&self, minor: u32, name: &str) -> Option<PathBuf> {
        let inner = self.lock();
        let mut targets = inner.processes.iter().filter(|process| process.minor == minor);
        targets.find_map(|process| {
            let (known, socket) = process.target.as_ref()?;
            (known == name).then(|| socket.clone())
        })
    }

    /// Ends the connection of this name.
    pub(super) fn end(&self, minor: u32, name: &str) {
        self.kill_those(|process| {
            let is_it = process.target.as_ref().is_some_and(|(known, _)| known == name);
            process.minor == minor && is_it
        });
    }

    fn kill_those(&self, is_meant: impl Fn(&Process) -> bool) {
        let mut inner = self.lock();
        inner.processes.retain(|process| {
            let is_meant = is_meant(process);
            if is_meant {
                process.kill();
            }
            !is_meant
        });
    }

    /// Ends all of a tap that is detached.
    pub(super) fn forget(&self, minor: u32) {
        self.kill_those(|process| process.minor == minor);
        let mut inner = self.lock();
        inner.remove_receivers(minor);
        inner.wake.iter().for_each(|wake| wake.wake());
    }

    /// Removes the sockets of processes that keep no tap: a daemon before made them, and the processes were killed.
    pub(super) fn sweep(&self, paths: &Paths) {
        let inner = self.lock();
        let Ok(found) = fs::read_dir(paths.blktap()) else { return };
        for path in found.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str());
            let is_receiver = name.is_some_and(|name| NAMES.iter().any(|of| name.starts_with(of)));
            if is_receiver && !inner.receivers.iter().any(|receiver| receiver.path == path) {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

/// Makes the sockets of an attached tap, in place of those of the process that kept it before.
pub(super) fn listen(shared: &Arc<Shared>, pid: u32, minor: u32) {
    if shared.serving.passing(Passing::Client).is_none() {
        return;
    }
    shared.taps.passed.lock().remove_receivers(minor);
    for (path, passing) in shared.paths.receivers(pid, minor) {
        let receiver =
            bind(&path).map(|socket| Receiver { minor, path: path.clone(), socket, passing });
        match receiver {
            Ok(receiver) => shared.taps.passed.lock().receivers.push(Arc::new(receiver)),
            Err(e) => {
                tracing::warn!("storage motion cannot reach {minor}: {}: {e}", path.display());
            }
        }
    }
    let mut inner = shared.taps.passed.lock();
    match &inner.wake {
        Some(wake) => wake.wake(),
        None => match begin(shared) {
            Ok(wake) => inner.wake = Some(wake),
            Err(e) => tracing::warn!("storage motion does not work: cannot start a thread: {e}"),
        },
    }
}

fn bind(path: &PathBuf) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}

fn begin(shared: &Arc<Shared>) -> io::Result<Arc<Waker>> {
    let wake = Arc::new(Waker::new()?);
    let (shared, theirs) = (shared.clone(), wake.clone());
    std::thread::Builder::new()
        .name("descriptors".to_owned())
        .spawn(move || receive(&shared, &theirs))?;
    Ok(wake)
}

/// A client of the socket that has connected and not yet sent a descriptor.
struct Sender {
    stream: UnixStream,
    receiver: Arc<Receiver>,
    until: Instant,
}

/// Takes descriptors until the daemon stops.
fn receive(shared: &Arc<Shared>, wake: &Waker) {
    let mut senders: VecDeque<Sender> = VecDeque::new();
    loop {
        let receivers = shared.taps.passed.lock().receivers.clone();
        let now = Instant::now();
        senders.retain(|sender| sender.until > now);
        let next = senders.iter().map(|sender| sender.until - now).min();
        let fds = [shared.stop.fd(), wake.fd()].into_iter();
        let fds = fds.chain(receivers.iter().map(|receiver| receiver.socket.as_fd()));
        let fds = fds.chain(senders.iter().map(|sender| sender.stream.as_fd()));
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let within = next.map(|left| Timespec { tv_sec: left.as_secs() as i64 + 1, tv_nsec: 0 });
        if poll(&mut fds, within.as_ref()).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return;
        }
        wake.clear();
        let (of_receivers, of_senders) = ready[2..].split_at(receivers.len());
        let mut of_senders = of_senders.iter();
        senders.retain(|sender| {
            let is_ready = of_senders.next() == Some(&true);
            if is_ready {
                take(shared, sender);
            }
            !is_ready
        });
        for (receiver, _) in receivers.iter().zip(of_receivers).filter(|(_, ready)| **ready) {
            let Ok((stream, _)) = receiver.socket.accept() else { continue };
            // A sender that sends nothing makes room for others.
            if senders.len() >= MAX_SENDERS {
                senders.pop_front();
            }
            let until = Instant::now() + SENDS_WITHIN;
            senders.push_back(Sender { stream, receiver: receiver.clone(), until });
        }
    }
}

/// Takes the message of a sender.
fn take(shared: &Arc<Shared>, sender: &Sender) {
    let minor = sender.receiver.minor;
    let done =
        read(&sender.stream).and_then(|(fd, name)| start(shared, &sender.receiver, fd, &name));
    if let Err(why) = done {
        let now_ns = shared.clock.now_ns();
        limited!(warn, shared.log, now_ns, "a descriptor for tap/{minor} is not taken: {why}");
    }
}

/// Reads a descriptor and a name.
fn read(stream: &UnixStream) -> Result<(OwnedFd, Vec<u8>), String> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut text = [0; MAX_NAME + 1];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(stream, &mut [IoSliceMut::new(&mut text)], &mut control, flags)
        .map_err(|e| format!("it cannot be received: {e}"))?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.by_ref().flatten().next().ok_or("the message has none")?;
    // XAPI's own sender is a C function, and others count its end.
    let name = text[..got.bytes].split(|byte| matches!(byte, 0 | b'\n')).next();
    Ok((file, name.unwrap_or_default().to_vec()))
}

/// Starts the process of a connection.
fn start(
    shared: &Arc<Shared>,
    receiver: &Receiver,
    fd: OwnedFd,
    name: &[u8],
) -> Result<(), String> {
    let minor = receiver.minor;
    match sockopt::socket_type(&fd) {
        Ok(rustix::net::SocketType::STREAM) => {}
        _ => return Err("it is no connection".to_owned()),
    }
    let passed = &shared.taps.passed;
    let count = |is_target: bool| {
        let inner = passed.lock();
        let of = |p: &&Process| p.minor == minor && p.target.is_some() == is_target;
        inner.processes.iter().filter(of).count()
    };
    let (inside, target) = if receiver.passing == Passing::Client {
        if !is_name(name) {
            return Err("its name has no bytes, more than 255, or control characters".to_owned());
        }
        let name = String::from_utf8_lossy(name).into_owned();
        // A second one of the same name replaces the first.
        passed.end(minor, &name);
        if count(true) >= MAX_NAMES {
            return Err(format!("{MAX_NAMES} others are there already"));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let socket = shared.paths.passed().join(format!("{minor}-{:x}", since.as_nanos()));
        let listener = bind(&socket).map_err(|e| format!("{}: {e}", socket.display()))?;
        (OwnedFd::from(listener), Some((name, socket)))
    } else {
        if count(false) >= MAX_SERVED {
            return Err(format!("{MAX_SERVED} others are served already"));
        }
        let server = shared.paths.nbd_socket(DiskId::tap(minor));
        let stream = UnixStream::connect(&server);
        (stream.map_err(|e| format!("{}: {e}", server.display()))?.into(), None)
    };
    let child = spawn(shared, receiver.passing, fd, inside).map_err(|e| {
        if let Some((_, socket)) = &target {
            let _ = fs::remove_file(socket);
        }
        format!("its process cannot be started: {e}")
    })?;
    watch(shared, child, minor, target).map_err(|e| format!("its process is not watched: {e}"))
}

fn spawn(
    shared: &Shared,
    passing: Passing,
    outside: OwnedFd,
    inside: OwnedFd,
) -> io::Result<Child> {
    let command = shared.serving.passing(passing);
    let mut command = command.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
    if rustix::process::geteuid().is_root() {
        let root = shared.paths.run.join("empty");
        DirBuilder::new().recursive(true).mode(0o755).create(&root)?;
        let user = user_of_tunnel(std::process::id());
        command.arg("--user").arg(user.to_string()).arg("--root").arg(root);
    }
    // It outlives the daemon, and a Ctrl-C that is meant for that.
    command.stdin(Stdio::from(outside)).stdout(Stdio::from(inside)).process_group(0).spawn()
}

/// Records a process, and waits for its end in a thread.
fn watch(
    shared: &Arc<Shared>,
    mut child: Child,
    minor: u32,
    target: Option<(String, PathBuf)>,
) -> io::Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("a process without a number"))?;
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    let socket = target.as_ref().map(|(_, socket)| socket.clone());
    let number = {
        let mut inner = shared.taps.passed.lock();
        inner.last += 1;
        let number = inner.last;
        inner.processes.push(Process { minor, number, handle, target });
        number
    };
    let theirs = shared.clone();
    std::thread::Builder::new().name("connection".to_owned()).spawn(move || {
        let _ = child.wait();
        if let Some(socket) = socket {
            let _ = fs::remove_file(socket);
        }
        let mut inner = theirs.taps.passed.lock();
        inner.processes.retain(|process| process.number != number);
    })?;
    Ok(())
}
