//! Helper processes of disks, seen from those who start them (docs/internals/processes.md 16): `ferrite-rbd` has an image of
//! a Ceph cluster open, `ferrite pool own` a disk of a pool of servers. They have threads, files and connections that a worker
//! may not have, and answer NBD on streams that their starter gives them.
//!
//! A process that starts helpers has one for each disk, for all connections to it: a disk is open once, so a flush
//! covers what came by all of them. The helper ends with its control socket: it then gives the disk back.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use ferrite_nbd::address::Helped;
use ferrite_nbd::uri::pool::{Disk, Security};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::frames::{self, Protocol};
use crate::process::{FIRST_GIVEN, Program, environment_without, spawn};

/// The program of images on Ceph.
pub const RBD: &str = "ferrite-rbd";
/// Its command that serves an image.
pub const SERVE: &str = "serve";
/// An argument of each helper: nothing is written, and no lock on Ceph is taken.
pub const READ_ONLY: &str = "--read-only";
/// The program of a pool's disks.
const OWNER: &str = "ferrite";
/// Descriptor of the helper's control socket.
pub const CONTROL_FD: RawFd = FIRST_GIVEN;
/// The control socket. The starter sends [`LINK`] with a stream for each connection. Both are of one release, so there is
/// one version.
pub const CONTROL: Protocol =
    Protocol { name: "the socket of a disk's helper", max_bytes: 16, max_files: 1 };
/// The one message.
pub const LINK: &[u8] = b"link";
/// Bytes that a stream holds in each direction. The kernel counts its own needs, too, and takes twice as much for both.
const STREAM_BYTES: usize = 1 << 20;
/// Streams that wait in a control socket, while the helper opens its disk.
const ATTEMPTS: usize = 2;

/// The thread that waits for the end of a helper.
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

/// The running helpers of this process, each with its disk, and whether it only reads it.
static HELPERS: Mutex<BTreeMap<(Helped, bool), Helper>> = Mutex::new(BTreeMap::new());

/// A connection to the disk: a stream whose other end its helper has, which is started if there is none. It does not
/// block. The helper greets when it has the disk open, and says on the stream why it has not.
///
/// # Errors
/// `NOENT`: there is no such program. `AGAIN`: the helper does not take connections. Otherwise the kernel's.
pub(crate) fn begin(
    disk: &Helped,
    read_only: bool,
    starter: Starter,
) -> rustix::io::Result<OwnedFd> {
    let key = (disk.clone(), read_only);
    let failed = |e: io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    [&ours, &theirs].into_iter().for_each(make_room);
    let mut helpers = HELPERS.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..ATTEMPTS {
        if !helpers.contains_key(&key) {
            helpers.insert(key.clone(), start(disk, read_only, starter).map_err(failed)?);
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

/// Has a stream take a request of the usual size as a whole. With less room both sides wake each other several times for it.
fn make_room(socket: &OwnedFd) {
    // Above the host's limit it takes a right that not every user has. Less is slower, and works.
    if set_socket_send_buffer_size_force(socket, STREAM_BYTES).is_err() {
        let _ = set_socket_send_buffer_size(socket, STREAM_BYTES);
    }
}

fn start(disk: &Helped, read_only: bool, starter: Starter) -> io::Result<Helper> {
    reap(None);
    let arguments = arguments(disk, read_only);
    let program = program(&arguments[0])?;
    let (control, theirs) = frames::pair()?;
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
            std::thread::Builder::new().name("starter".into()).spawn(|| wait_for(run, tell))?;
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

/// The program's name and what follows it.
fn arguments(disk: &Helped, read_only: bool) -> Vec<String> {
    let read_only = read_only.then(|| READ_ONLY.to_owned());
    match disk {
        Helped::Rbd(image) => {
            let begin = [RBD, SERVE].map(str::to_owned).into_iter();
            begin.chain(read_only).chain([image.to_string()]).collect()
        }
        Helped::Pool(disk) => owner_arguments(disk).into_iter().chain(read_only).collect(),
    }
}

/// Without a place of etcd the helper looks into the host's configuration.
fn owner_arguments(disk: &Disk) -> Vec<String> {
    let mut words = [OWNER, "pool", "own"].map(str::to_owned).to_vec();
    words.extend(disk.experimental.then(|| "--experimental".to_owned()));
    words.extend([format!("--pool={}", disk.pool), format!("--disk={}", disk.disk)]);
    if let Some(access) = &disk.access {
        words.push(format!("--etcd={}", access.etcd.join(",")));
        words.push(match &access.security {
            Security::Plain => "--plain".to_owned(),
            Security::Tls(folder) => format!("--tls={}", folder.display()),
        });
    }
    words
}

/// A program of Ferrite: this one, if it is that, otherwise the one beside it.
fn program(name: &str) -> io::Result<File> {
    let own = std::fs::read_link("/proc/self/exe")?;
    // Also if its file was replaced meanwhile, which shows in its name.
    let is_own = own.file_name().and_then(|own| own.to_str()).is_some_and(|own| {
        own == name || own.strip_prefix(name).is_some_and(|rest| rest == " (deleted)")
    });
    if is_own {
        return File::open("/proc/self/exe");
    }
    let beside = own.parent().map(|folder| folder.join(name));
    // Tests are programs in a folder below.
    let above = own.parent().and_then(Path::parent).map(|folder| folder.join(name));
    let found = beside.into_iter().chain(above).find(|path| path.is_file());
    let none = || io::Error::from_raw_os_error(Errno::NOENT.raw_os_error());
    File::open(found.ok_or_else(none)?)
}

/// Collects the exit status of helpers that have ended, and remembers one more.
fn reap(new: Option<Pid>) {
    static ENDED: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
    let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    ended.extend(new);
    ended.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
}

/// Ends the helpers of this process, and waits until they have given their disks back. For programs that copy and end: the
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

#[cfg(test)]
mod tests {
    use ferrite_nbd::uri::rbd::Image;

    use super::*;

    #[test]
    fn a_stream_takes_a_large_request_as_a_whole() {
        let (ours, _theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        make_room(&ours);
        let is_limited = !rustix::process::geteuid().is_root();
        let request = vec![7; 28 + (512 << 10)];
        let sent = rustix::io::write(&ours, &request).unwrap();
        assert!(sent == request.len() || is_limited, "{sent} of {}", request.len());
    }

    #[test]
    fn a_helper_is_told_its_disk_and_where_that_is() {
        let pool = |text: &str| Helped::Pool(Disk::parse(text).unwrap());
        let words = |disk: &Helped, read_only| arguments(disk, read_only).join(" ");
        let plain = pool("lab/a?etcd=http://h:1,http://i:1&plain=yes&experimental=yes");
        let begin = "ferrite pool own --experimental --pool=lab --disk=a";
        assert_eq!(words(&plain, false), format!("{begin} --etcd=http://h:1,http://i:1 --plain"));
        let tls = pool("lab/a?etcd=https://h:1&tls=/t s&experimental=yes");
        assert_eq!(words(&tls, true), format!("{begin} --etcd=https://h:1 --tls=/t s --read-only"));
        let configured = words(&pool("lab/a"), false);
        assert_eq!(configured, "ferrite pool own --pool=lab --disk=a");
        let image = Helped::Rbd(Image::parse("p/i?conf=/c").unwrap());
        let words = words(&image, true);
        assert_eq!(words, "ferrite-rbd serve --read-only p/i?conf=%2fc&id=admin&deadline_s=60");
    }
}
