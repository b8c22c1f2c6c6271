//! Commands on the store that this process serves: its socket, and the threads that run them (store.md 8).
//!
//! A store's owner listens in a folder of such sockets, under the store's device and inode. So a command finds it by
//! the store's identity, whatever the path. A socket exists before the store is open; a process that has not opened it
//! answers so. A killed owner's socket refuses connections, and is removed by the next process that finds it: the next
//! owner, or a command.
//!
//! Each command has a thread, an engine and memory of its own, so it has no queue wait. So has each reader of a volume.

mod reading;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_disk::ImageName;
use ferrite_host::clock;
use ferrite_host::frames::lines::{self, Lines};
use ferrite_image_tools::Progress;
use ferrite_image_tools::stores::served::ServedStore;
use ferrite_serve::blkif::lifecycle::EngineFactory;
use ferrite_serve::waker::Waker;
use ferrite_store::owned::StoreKey;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, socket_with,
};
use serde_json::Value;

use reading::{Reader, Readers};

use super::of_contents;
use super::wire::{self, Ask, Compressing, MAX_QUESTION, Question, Reply, VERSION};
use crate::exit::{Code, Failure};

/// The most commands at a time, besides readers.
const MAX_COMMANDS: usize = 8;
/// The most operations of one command in flight.
const ENTRIES: u32 = 32;
/// How long a client may take to send its question, and to read the answer.
const COURTESY: Duration = Duration::from_secs(5);
/// How often a client gets the progress.
const TELL_AGAIN: Duration = Duration::from_millis(200);
/// How often the end of the server checks whether its commands have ended.
const END_AGAIN: Duration = Duration::from_millis(5);
/// The pause after the kernel gave no descriptor.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A socket for commands on a store.
pub(crate) struct Place {
    listener: UnixListener,
    key: StoreKey,
    path: PathBuf,
}

impl Place {
    /// One place for each store that these images are volumes of. A store is served without one if it cannot be made.
    pub(crate) fn of<'a>(images: impl Iterator<Item = &'a OsStr>) -> Vec<Place> {
        let stores = images.filter_map(|image| {
            let name = ImageName::parse(image).ok()?;
            let store = name.volume()?.0.to_owned();
            Some((StoreKey::at(&store).ok()?, store))
        });
        let stores: BTreeMap<StoreKey, PathBuf> = stores.collect();
        let place = |(key, store): (StoreKey, PathBuf)| {
            let made = Place::make(key).map_err(|e| {
                tracing::warn!(
                    "no socket for commands on store {}: {e}; they will find it in use",
                    store.display()
                );
            });
            made.ok()
        };
        stores.into_iter().filter_map(place).collect()
    }

    /// Makes the socket in the first folder that this user can write to.
    fn make(key: StoreKey) -> io::Result<Place> {
        let mut made = Err(io::ErrorKind::NotFound.into());
        for folder in wire::folders() {
            made = Place::make_in(&folder, key);
            if made.is_ok() {
                break;
            }
        }
        made
    }

    fn make_in(folder: &Path, key: StoreKey) -> io::Result<Place> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        remove_left(folder);
        let number = u64::from_ne_bytes(clock::secret()?);
        // The socket gets its name only when it is listened at.
        let unnamed = folder.join(format!("new.{number:016x}"));
        let listener = UnixListener::bind(&unnamed)?;
        let path = folder.join(format!("{}{number:016x}", wire::prefix(key)));
        let made = fs::set_permissions(&unnamed, Permissions::from_mode(0o600))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| fs::rename(&unnamed, &path));
        made.inspect_err(|_| drop(fs::remove_file(&unnamed)))?;
        Ok(Place { listener, key, path })
    }

    /// The store's identity.
    pub(crate) fn key(&self) -> StoreKey {
        self.key
    }

    /// Removes the socket: this process does not open the store.
    pub(crate) fn give_up(self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Serves commands there, on engines of this kind, for as long as the result lives.
    pub(crate) fn serve(self, engine: &EngineFactory) -> Option<Serving> {
        let (is_ending, engine) = (Arc::new(AtomicBool::new(false)), engine.clone());
        let path = self.path.clone();
        let served = || {
            let wake = Arc::new(Waker::new()?);
            let server = CommandServer(Arc::new(What {
                key: self.key,
                engine,
                is_ending: is_ending.clone(),
                end: wake.clone(),
                readers: Readers::default(),
            }));
            let end = wake.clone();
            let body = move || accept(&self.listener, &server, &end);
            let thread =
                std::thread::Builder::new().name("store-commands".to_owned()).spawn(body)?;
            Ok::<_, io::Error>((wake, thread))
        };
        match served() {
            Ok((wake, thread)) => Some(Serving { is_ending, wake, thread: Some(thread), path }),
            Err(e) => {
                tracing::warn!("commands on the store are not served: {e}");
                None
            }
        }
    }
}

/// Removes sockets at which no process listens.
fn remove_left(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        drop(connect(&entry.path()));
    }
}

/// Connects to an owner, without blocking. A dead owner's socket is removed.
///
/// # Errors
/// No owner is there, or none that accepts.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let connected = rustix::net::connect(&socket, &SocketAddrUnix::new(path)?);
    // A socket that does not have its name yet is about to be listened at.
    let is_new = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"new."));
    if connected == Err(Errno::CONNREFUSED) && !is_new {
        let _ = fs::remove_file(path);
    }
    connected?;
    Ok(UnixStream::from(socket))
}

/// Serves commands as long as it lives. Its drop waits for those in flight for a while; long ones are interrupted.
pub(crate) struct Serving {
    is_ending: Arc<AtomicBool>,
    wake: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        self.is_ending.store(true, Ordering::Relaxed);
        self.wake.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The server of commands on one store.
pub(crate) struct CommandServer(Arc<What>);

/// The shared data of the threads.
struct What {
    key: StoreKey,
    engine: EngineFactory,
    is_ending: Arc<AtomicBool>,
    /// Woken when readers have to end.
    end: Arc<Waker>,
    readers: Readers,
}

fn accept(listener: &UnixListener, server: &CommandServer, end: &Waker) {
    let mut commands: Vec<JoinHandle<()>> = Vec::new();
    loop {
        let listening = PollFd::new(listener, PollFlags::IN);
        let mut fds = [listening, PollFd::from_borrowed_fd(end.fd(), PollFlags::IN)];
        // The following calls report what fails.
        let _ = poll(&mut fds, None);
        if server.0.is_ending.load(Ordering::Relaxed) {
            break;
        }
        match accept_with(listener.as_fd(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(stream) => server.take(stream.into(), &mut commands),
            Err(Errno::AGAIN | Errno::CONNABORTED) => {}
            Err(e) => {
                tracing::debug!("cannot take a command: {e}");
                std::thread::sleep(EXHAUSTED);
            }
        }
    }
    // Commands that take longer end with the process.
    let until = Instant::now() + COURTESY;
    while !commands.iter().all(JoinHandle::is_finished) && Instant::now() < until {
        std::thread::sleep(END_AGAIN);
    }
}

impl CommandServer {
    /// A server for this store, on engines of this kind, for as long as the process lives.
    ///
    /// # Errors
    /// Fails without free descriptors.
    pub(crate) fn new(key: StoreKey, engine: &EngineFactory) -> io::Result<CommandServer> {
        let (engine, is_ending, end) = (engine.clone(), Arc::default(), Arc::new(Waker::new()?));
        let readers = Readers::default();
        Ok(CommandServer(Arc::new(What { key, engine, is_ending, end, readers })))
    }

    /// Runs the command of a new client on a thread of its own, besides those in flight.
    pub(crate) fn take(&self, stream: UnixStream, commands: &mut Vec<JoinHandle<()>>) {
        commands.retain(|command| !command.is_finished());
        if commands.len() >= MAX_COMMANDS + self.0.readers.count() {
            let why = format!("{MAX_COMMANDS} commands on the store are under way");
            let failure = Failure::new("cannot do that now", why, "try again when one has ended");
            // A socket has room for its first line.
            let reply = Reply::from(failure.with_code(Code::BUSY));
            let _ = wire::write_line(&stream, &reply, Duration::ZERO);
            return;
        }
        let what = self.0.clone();
        let command = std::thread::Builder::new().name("store-command".to_owned());
        // A client that gets no thread sees the end of its stream.
        commands.extend(command.spawn(move || what.serve(&stream)).ok());
    }
}

impl What {
    /// Answers one question. Clients that do not ask, or do not read, are disconnected.
    fn serve(&self, stream: &UnixStream) {
        let end = Instant::now() + COURTESY;
        let waits = || Instant::now() < end && !self.is_ending.load(Ordering::Relaxed);
        let reply = match Lines::default().receive(stream, MAX_QUESTION, waits) {
            Ok(line) => match self.answer(stream, &line) {
                Some(reply) => reply,
                None => return,
            },
            Err(e) if e.kind() == io::ErrorKind::InvalidData => not_understood("it is too long"),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => not_understood("it has no end"),
            Err(_) => return,
        };
        let _ = wire::write_line(stream, &reply, COURTESY);
    }

    /// Answers a question. `None`: it was a reader's, which has ended.
    fn answer(&self, stream: &UnixStream, line: &[u8]) -> Option<Reply> {
        let (path, what) = match self.understand(line) {
            Ok(understood) => understood,
            Err(reply) => return Some(reply),
        };
        match what {
            Ask::Read { volume, process } => {
                reading::serve(self, stream, &path, Reader { volume, process })
            }
            what => Some(self.command(stream, &path, what)),
        }
    }

    /// The client's path of the store, and the command.
    fn understand(&self, line: &[u8]) -> Result<(PathBuf, Ask), Reply> {
        let why = |e: serde_json::Error| not_understood(&e.to_string());
        let asked = serde_json::from_slice::<Question<Value>>(line).map_err(why)?;
        VERSION.read(asked.version).map_err(|e| not_understood(&e.to_string()))?;
        let what = serde_json::from_value::<Ask>(asked.what).map_err(why)?;
        match asked.store == self.key {
            true => Ok((PathBuf::from(asked.path), what)),
            false => Err(Reply::NotOpen),
        }
    }

    fn command(&self, stream: &UnixStream, path: &Path, what: Ask) -> Reply {
        let engine = |arena| (self.engine)(arena, ENTRIES);
        let Some(store) = ServedStore::join(self.key, path, &engine) else {
            return Reply::NotOpen;
        };
        if wire::write_line(stream, &Reply::Begun, COURTESY).is_err() {
            return Reply::NotOpen;
        }
        let goes_on = || !self.is_ending.load(Ordering::Relaxed) && !lines::has_ended(stream);
        let told = Cell::new(Instant::now());
        let far = |Progress { done_bytes, total_bytes }| {
            let now = Instant::now();
            if now.duration_since(told.get()) < TELL_AGAIN {
                return goes_on();
            }
            told.set(now);
            let reply = Reply::Progress { done_bytes, total_bytes };
            goes_on() && wire::write_line(stream, &reply, COURTESY).is_ok()
        };
        let volume = match &what {
            Ask::Change { volume, .. } => Some(volume.clone()),
            _ => None,
        };
        let done = store
            .map_err(Failure::from)
            .and_then(|mut store| carry_out(&mut store, what, &goes_on, &far))
            .map_err(|failure| self.readers.name_in(failure, volume.as_ref()));
        match done {
            Ok(done) => Reply::Done(done),
            // This process is stopping and interrupted the command.
            Err(failure) if failure.code == Code::INTERRUPTED => {
                let (why, help) =
                    ("the process that serves the store ends", "run the same command again");
                Failure::new(failure.what, why, help).into()
            }
            Err(failure) => failure.into(),
        }
    }
}

fn carry_out(
    store: &mut ServedStore,
    what: Ask,
    goes_on: &dyn Fn() -> bool,
    far: &dyn Fn(Progress) -> bool,
) -> Result<Value, Failure> {
    let done = match what {
        Ask::List => serde_json::to_value(store.list()),
        Ask::Change { volume, change } => serde_json::to_value(store.change(&volume, &change)?),
        Ask::Collect => serde_json::to_value(store.collect(goes_on)?),
        Ask::Stats => serde_json::to_value(store.stats(goes_on)?),
        Ask::Compact { compress } => {
            let packing = compress.map(|Compressing(packing)| packing);
            serde_json::to_value(store.compact(packing, goes_on)?)
        }
        Ask::Scrub { rate } => serde_json::to_value(store.scrub(Some(rate.max(1)), far)?),
        Ask::Check { deep, rate } => {
            serde_json::to_value(store.check(of_contents(deep, rate), far)?)
        }
        Ask::Repair { force } => serde_json::to_value(store.repair(force, far)?),
        Ask::Grow { size } => serde_json::to_value(store.grow(size)?),
        // `answer` has served it.
        Ask::Read { .. } => Ok(Value::Null),
    };
    done.map_err(|e| Failure::new("cannot answer", e, "this is a bug in ferrite"))
}

fn not_understood(why: &str) -> Reply {
    let help = "the store is served by another version of this program: use that";
    Failure::new("cannot understand the question", why, help).into()
}

#[cfg(test)]
mod tests;
