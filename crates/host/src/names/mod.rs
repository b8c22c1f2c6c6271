//! Files that are opened, examined or changed by their names.
//!
//! A program asks the kernel itself. A worker that parses data of untrusted users has no right to: it
//! [installs](install) a socket to its keeper, which opens for it what it may have, and all of
//! these functions ask there. They take and return what their namesakes of `std::fs` and `rustix` do.
//!
//! `/proc/self/fd/N` is a descriptor of the asking process. So it is sent, and the keeper is asked for
//! what it leads to. `/proc/thread-self` is the asking thread.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::inotify::{self, WatchFlags};
use rustix::fs::{Mode, OFlags, Stat, fstat};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

mod broker;
pub mod connect;
pub mod fence;
mod handed;
pub mod policy;
pub mod server;
pub mod wire;

pub use broker::Broker;
pub use handed::{Handed, with_handed};
use wire::{Request, What};

/// The group of the kernel's own events.
const KERNEL_EVENTS: u32 = 1;

static BROKER: OnceLock<Broker> = OnceLock::new();

/// From now on, and for good, this process asks there. Called once, before there are threads that
/// ask.
///
/// # Errors
/// That was done already.
pub fn install(broker: Broker) -> io::Result<()> {
    let again = || io::Error::new(io::ErrorKind::AlreadyExists, "names are asked for elsewhere");
    BROKER.set(broker).map_err(|_| again())
}

/// Whether a keeper decides what this process may open.
pub fn are_brokered() -> bool {
    BROKER.get().is_some()
}

/// Whether a keeper refuses to look at this: it is outside the folders that this process may have.
pub fn is_refused(path: &Path) -> bool {
    are_brokered() && matches!(stat(path), Err(Errno::ACCESS))
}

/// Opens a file; close-on-exec always.
///
/// # Errors
/// The kernel's, or the keeper's (`EACCES`); so for all of these.
pub fn open(path: impl AsRef<Path>, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let (path, flags) = (path.as_ref(), flags | OFlags::CLOEXEC);
    if let Some(handed) = handed::take(path) {
        return handed;
    }
    match BROKER.get() {
        None => retry_on_intr(|| rustix::fs::open(path, flags, mode)),
        Some(broker) => broker.open(path, flags, mode),
    }
}

/// The status of the file that a name leads to.
///
/// # Errors
/// As [`open`].
pub fn stat(path: impl AsRef<Path>) -> rustix::io::Result<Stat> {
    match BROKER.get() {
        None => retry_on_intr(|| rustix::fs::stat(path.as_ref())),
        Some(broker) => fstat(broker.open(path.as_ref(), OFlags::PATH, Mode::empty())?),
    }
}

/// The same as `std::fs` has it.
///
/// # Errors
/// As [`open`].
pub fn metadata(path: impl AsRef<Path>) -> io::Result<Metadata> {
    match BROKER.get() {
        None => fs::metadata(path),
        Some(broker) => examined(broker, path.as_ref(), OFlags::PATH),
    }
}

/// The same of a link itself.
///
/// # Errors
/// As [`open`].
pub fn symlink_metadata(path: impl AsRef<Path>) -> io::Result<Metadata> {
    match BROKER.get() {
        None => fs::symlink_metadata(path),
        Some(broker) => examined(broker, path.as_ref(), OFlags::PATH | OFlags::NOFOLLOW),
    }
}

fn examined(broker: &Broker, path: &Path, flags: OFlags) -> io::Result<Metadata> {
    File::from(broker.open(path, flags, Mode::empty())?).metadata()
}

/// Whether a name leads to something that may be looked at.
pub fn exists(path: impl AsRef<Path>) -> bool {
    metadata(path).is_ok()
}

/// Whether it leads to a regular file.
pub fn is_file(path: impl AsRef<Path>) -> bool {
    metadata(path).is_ok_and(|meta| meta.is_file())
}

/// Whether it leads to a folder.
pub fn is_dir(path: impl AsRef<Path>) -> bool {
    metadata(path).is_ok_and(|meta| meta.is_dir())
}

/// The name without links of what a name leads to.
///
/// # Errors
/// As [`open`].
pub fn canonicalize(path: impl AsRef<Path>) -> io::Result<PathBuf> {
    match BROKER.get() {
        None => fs::canonicalize(path),
        Some(broker) => text(broker, What::Canonical, path.as_ref()),
    }
}

/// The target of a link.
///
/// # Errors
/// As [`open`].
pub fn read_link(path: impl AsRef<Path>) -> io::Result<PathBuf> {
    match BROKER.get() {
        None => fs::read_link(path),
        Some(broker) => text(broker, What::ReadLink, path.as_ref()),
    }
}

fn text(broker: &Broker, what: What, path: &Path) -> io::Result<PathBuf> {
    Ok(OsString::from_vec(broker.ask(&Request::of(what, path), &[])?.text).into())
}

/// The path of an open file, as the kernel says it now.
///
/// # Errors
/// As [`open`].
pub fn of_open(file: BorrowedFd<'_>) -> io::Result<PathBuf> {
    read_link(of_descriptor(file))
}

/// The name by which an open file is opened again.
pub fn of_descriptor(file: BorrowedFd<'_>) -> PathBuf {
    format!("{}{}", wire::OWN_DESCRIPTORS, file.as_raw_fd()).into()
}

/// Opens a folder that is open for its path only for more than that.
///
/// # Errors
/// As [`open`].
pub fn open_folder_again(folder: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match BROKER.get() {
        None => rustix::fs::openat(folder, ".", flags, Mode::empty()),
        Some(broker) => broker.open(&of_descriptor(folder), flags, Mode::empty()),
    }
}

/// All of a file.
///
/// # Errors
/// As [`open`].
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::from(open(path, OFlags::RDONLY, Mode::empty())?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The same of a text.
///
/// # Errors
/// As [`open`]; it is not UTF-8.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::new();
    File::from(open(path, OFlags::RDONLY, Mode::empty())?).read_to_string(&mut text)?;
    Ok(text)
}

/// One name in a folder.
#[derive(Clone, Debug)]
pub struct Entry {
    folder: PathBuf,
    name: OsString,
}

impl Entry {
    /// Folder and name.
    pub fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// The name in its folder.
    pub fn file_name(&self) -> OsString {
        self.name.clone()
    }
}

/// The names in a folder.
///
/// # Errors
/// As [`open`].
pub fn read_dir(path: impl AsRef<Path>) -> io::Result<Entries> {
    let folder = path.as_ref().to_owned();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    // Of the descriptor itself: `Dir::read_from` opens the folder by another name.
    let entries = rustix::fs::Dir::new(open(&folder, flags, Mode::empty())?)?;
    Ok(Entries { folder, entries })
}

/// See [`read_dir`].
#[derive(Debug)]
pub struct Entries {
    folder: PathBuf,
    entries: rustix::fs::Dir,
}

impl Iterator for Entries {
    type Item = io::Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = match self.entries.next()? {
                Err(e) => return Some(Err(e.into())),
                Ok(entry) => entry,
            };
            let name = entry.file_name().to_bytes();
            if ![&b"."[..], b".."].contains(&name) {
                let name = OsString::from_vec(name.to_vec());
                return Some(Ok(Entry { folder: self.folder.clone(), name }));
            }
        }
    }
}

/// Makes a folder, and those above it that are not there.
///
/// # Errors
/// As [`open`].
pub fn create_dir_all(path: impl AsRef<Path>, mode: Mode) -> io::Result<()> {
    let path = path.as_ref();
    match BROKER.get() {
        None => fs::DirBuilder::new().recursive(true).mode(mode.bits()).create(path),
        Some(broker) => {
            let request = Request { mode: mode.bits(), ..Request::of(What::CreateDirs, path) };
            broker.ask(&request, &[]).map(drop).map_err(io::Error::from)
        }
    }
}

/// Takes a file's name away.
///
/// # Errors
/// As [`open`].
pub fn remove_file(path: impl AsRef<Path>) -> io::Result<()> {
    match BROKER.get() {
        None => fs::remove_file(path),
        Some(broker) => done(broker, &Request::of(What::RemoveFile, path.as_ref())),
    }
}

/// Removes an empty folder.
///
/// # Errors
/// As [`open`].
pub fn remove_dir(path: impl AsRef<Path>) -> io::Result<()> {
    match BROKER.get() {
        None => fs::remove_dir(path),
        Some(broker) => done(broker, &Request::of(What::RemoveDir, path.as_ref())),
    }
}

/// Gives a file another name in place of the one that it has.
///
/// # Errors
/// As [`open`].
pub fn rename(from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    match BROKER.get() {
        None => fs::rename(from, to),
        Some(broker) => {
            let second = to.as_ref().as_os_str().as_bytes();
            done(broker, &Request { second, ..Request::of(What::Rename, from.as_ref()) })
        }
    }
}

/// Gives a file one name more. A process that asks a keeper may not do that: a file with a second name in
/// a folder of that process would be its own.
///
/// # Errors
/// As [`open`].
pub fn hard_link(from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    match are_brokered() {
        false => fs::hard_link(from, to),
        true => Err(Errno::ACCESS.into()),
    }
}

fn done(broker: &Broker, request: &Request<'_>) -> io::Result<()> {
    Ok(broker.ask(request, &[]).map(drop)?)
}

/// The file with a handle on the file system of `folder`, to be examined. `ask` asks the kernel.
pub(crate) fn by_handle(
    folder: BorrowedFd<'_>,
    handle: &[u8],
    ask: impl Fn() -> io::Result<OwnedFd>,
) -> io::Result<OwnedFd> {
    let Some(broker) = BROKER.get() else { return ask() };
    let request = Request { first: handle, ..Request::of(What::ByHandle, Path::new("")) };
    Ok(broker.ask(&request, &[folder])?.file()?)
}

/// Has `notify`, of inotify, tell of changes of an open file; the number of the watch.
///
/// # Errors
/// As [`open`].
pub fn watch(notify: BorrowedFd<'_>, file: BorrowedFd<'_>) -> rustix::io::Result<i32> {
    match BROKER.get() {
        // The file itself, whatever has become of its name.
        None => inotify::add_watch(notify, of_descriptor(file), WatchFlags::MODIFY),
        Some(broker) => {
            let request = Request::of(What::Watch, Path::new(""));
            Ok(broker.ask(&request, &[notify, file])?.number)
        }
    }
}

/// Lets go of an image that is closed, and that this process may have open still. A keeper holds it
/// open otherwise, for the next worker.
pub fn release(image: BorrowedFd<'_>) {
    if let Some(broker) = BROKER.get() {
        // A keeper that is gone holds nothing.
        let _ = broker.ask(&Request::of(What::Release, Path::new("")), &[image]);
    }
}

/// A socket by which the kernel tells of its devices (netlink(7), `NETLINK_KOBJECT_UEVENT`).
///
/// # Errors
/// As [`open`].
pub fn device_events() -> rustix::io::Result<OwnedFd> {
    if let Some(broker) = BROKER.get() {
        return broker.ask(&Request::of(What::DeviceEvents, Path::new("")), &[])?.file();
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL_EVENTS))?;
    Ok(socket)
}
