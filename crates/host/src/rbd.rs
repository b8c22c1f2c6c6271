//! The helper process of an image of a Ceph cluster, `ferrite-rbd`, seen from those who start it
//! (docs/internals/processes.md 16). It has librbd, whose threads, files and sockets a worker may not have, and answers
//! NBD on streams that its starter gives it.
//!
//! A process that starts helpers has one for each image, for all connections to it: an image is open once, so a flush
//! covers what came by all of them. The helper ends with its control socket: it then releases the image's lock.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use ferrite_nbd::uri::rbd::Image;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::frames::{self, Protocol};
use crate::process::{FIRST_GIVEN, Program, environment_without, spawn};

/// The program.
pub const PROGRAM: &str = "ferrite-rbd";
/// Its command that serves an image.
pub const SERVE: &str = "serve";
/// Before the image: nothing is written, and no lock is taken.
pub const READ_ONLY: &str = "--read-only";
/// Descriptor of the helper's control socket.
pub const CONTROL_FD: RawFd = FIRST_GIVEN;
/// The control socket. The starter sends [`LINK`] with a stream for each connection. Both are of one release, so there is
/// one version.
pub const CONTROL: Protocol =
    Protocol { name: "the socket of a helper for Ceph", max_bytes: 16, max_files: 1 };
/// The one message.
pub const LINK: &[u8] = b"link";
/// Streams that wait in a control socket, while the helper opens its image.
const ATTEMPTS: usize = 2;

/// Who waits for the end of a helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// This thread, which lives as long as the process: a keeper's.
    ThisThread,
    /// A thread of its own.
    OwnThread,
}

#[derive(Debug)]
struct Helper {
    pid: Option<Pid>,
    control: OwnedFd,
}

/// The running helpers of this process, each with its image, and whether it only reads it.
static HELPERS: Mutex<BTreeMap<(Image, bool), Helper>> = Mutex::new(BTreeMap::new());

/// A connection to the image: a stream whose other end its helper has, which is started if there is none. It does not
/// block. A helper that only reads takes no lock. The helper greets when it has the image open, and says on the stream why it has not.
///
/// # Errors
/// `NOENT`: there is no such program. `AGAIN`: the helper does not take connections. Otherwise the kernel's.
pub(crate) fn begin(
    image: &Image,
    read_only: bool,
    starter: Starter,
) -> rustix::io::Result<OwnedFd> {
    let key = (image.clone(), read_only);
    let failed = |e: io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    let mut helpers = HELPERS.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..ATTEMPTS {
        if !helpers.contains_key(&key) {
            helpers.insert(key.clone(), start(image, read_only, starter).map_err(failed)?);
        }
        let Some(helper) = helpers.get(&key) else { break };
        match CONTROL.try_send(&helper.control, LINK, &[theirs.as_fd()]) {
            Ok(()) => return Ok(ours),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(Errno::AGAIN),
            // It has ended.
            Err(_) => {
                let ended = helpers.remove(&key);
                reap(ended.and_then(|helper| helper.pid));
            }
        }
    }
    Err(Errno::PIPE)
}

fn start(image: &Image, read_only: bool, starter: Starter) -> io::Result<Helper> {
    reap(None);
    let program = File::open(program()?)?;
    let (control, theirs) = frames::pair()?;
    let name = image.to_string();
    let mut arguments = vec![PROGRAM, SERVE];
    arguments.extend(read_only.then_some(READ_ONLY));
    arguments.push(&name);
    let arguments = arguments.into_iter().map(CString::new).collect::<Result<_, _>>()?;
    let mut environment = environment_without("RUST_BACKTRACE");
    environment.push(c"RUST_BACKTRACE=0".into());
    let run = move || {
        let program = Program { file: program.as_fd(), arguments, environment };
        spawn(&program, &[Some(theirs.as_fd())], &[])
    };
    match starter {
        Starter::ThisThread => Ok(Helper { pid: Some(run()?), control }),
        Starter::OwnThread => {
            let (tell, told) = sync_channel(1);
            std::thread::Builder::new().name("rbd-starter".into()).spawn(|| wait_for(run, tell))?;
            told.recv().map_err(|_| io::Error::other("its thread has ended"))??;
            Ok(Helper { pid: None, control })
        }
    }
}

/// Starts a helper, and waits for its end.
fn wait_for(run: impl FnOnce() -> io::Result<Pid>, tell: SyncSender<io::Result<()>>) {
    let started = run();
    let pid = started.as_ref().ok().copied();
    let _ = tell.send(started.map(drop));
    if let Some(pid) = pid {
        while let Err(Errno::INTR) = waitpid(Some(pid), WaitOptions::empty()) {}
    }
}

/// The program beside this one.
fn program() -> io::Result<PathBuf> {
    let own = std::fs::read_link("/proc/self/exe")?;
    let beside = own.parent().map(|folder| folder.join(PROGRAM));
    // Tests are programs in a folder below.
    let above = own.parent().and_then(Path::parent).map(|folder| folder.join(PROGRAM));
    let found = beside.into_iter().chain(above).find(|path| path.is_file());
    found.ok_or_else(|| io::Error::from_raw_os_error(Errno::NOENT.raw_os_error()))
}

/// Collects the exit status of helpers that have ended, and remembers one more.
fn reap(new: Option<Pid>) {
    static ENDED: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
    let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    ended.extend(new);
    ended.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
}

/// Ends the helpers of this process, and waits until they have released their images. For programs that copy and end: the
/// next command finds no lock. Connections have to be closed before.
pub fn end_helpers() {
    let helpers = std::mem::take(&mut *HELPERS.lock().unwrap_or_else(PoisonError::into_inner));
    for helper in helpers.into_values() {
        // The helper reads this end as the wish to end, and closes its own when it has ended.
        let _ = rustix::net::shutdown(&helper.control, rustix::net::Shutdown::Write);
        tracing::debug!("waiting for the helper at {}", helper.control.as_raw_fd());
        while CONTROL.receive(&helper.control).is_ok() {}
        reap(helper.pid);
    }
}
