//! The NBD clients of a disk.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_host::frames::CLIENT_CHANNEL;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;

use super::buffers::ClientPool;
use super::client::Client;
use super::contexts::DirtyContexts;
use super::handshake::greet;
use super::negotiation::{Export, Manners, Offer};
use super::sessions::Sessions;
use crate::counters::{Counters, Counts};
use crate::log_limit::limited;
use crate::path::device::Device;
use crate::path::shared::Shared;
use crate::trace::clients::ClientTraces;
use crate::tuning::Tuning;
use crate::waker::{Waker, wait_for, wait_for_any};

/// The shortest time that a client gets for steps without I/O. A living client does not need more.
pub const COURTESY: Duration = Duration::from_secs(10);
/// The pause between accepts after the system had no descriptor or memory for one.
const SHORTAGE: Duration = Duration::from_millis(100);
/// Requests are best multiples of a page.
const PAGE_BYTES: u32 = 4096;
/// The largest preferred block size: NBD limits it to the length of a request.
const MAX_PREFERRED_BYTES: u32 = 32 << 20;

/// Builds the engine of a client.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// How a disk is served to NBD clients.
#[derive(Clone)]
pub struct Options {
    /// Whether clients may only read, even if the disk is writable.
    pub read_only: bool,
    /// Most clients at a time. More are turned away.
    pub max_clients: usize,
    /// Most bytes of the data in flight of each client. At least 2 MiB are allowed. Memory is taken
    /// as it is used, and all clients together take 64 MiB besides 1 MiB each, or this if it is more.
    pub client_bytes: usize,
    /// The longest negotiation of a client.
    pub greeting: Duration,
    /// The time for a client to read its last replies after it has disconnected.
    pub goodbye: Duration,
    /// The time for a client to read its last replies when the server stops.
    pub at_stop: Duration,
    /// Builds the engines for disk I/O.
    pub engine: EngineFactory,
    /// Tuning of the paths.
    pub tuning: Tuning,
    /// The counters of all clients. Without them each client has its own.
    pub counters: Option<Counters>,
    /// Whether TRIM is not offered, even if the disk supports it.
    pub keeps_all: bool,
    /// Where clients record their requests, if anywhere.
    pub traces: Option<Arc<ClientTraces>>,
    /// Whether clients are not told the exports' names: they have to know them.
    pub hides_names: bool,
    /// Whether clients come through a [`relay`](super::relay()).
    pub relayed: bool,
}

/// A disk and its name, by which clients choose it.
#[derive(Clone)]
pub struct Exported {
    /// At most 4096 bytes, and different from those of the others. The only export may have the empty name: it has any
    /// name then.
    pub name: String,
    /// The disk.
    pub device: Arc<Device>,
    /// Builds the engines for its I/O.
    pub engine: EngineFactory,
}

/// The state that the clients' threads share.
struct Common {
    exports: Vec<Exported>,
    options: Options,
    stop: Arc<Waker>,
    buffers: ClientPool,
    /// Those of clients whose connections end here. With a relay in between they do not.
    sessions: Option<Sessions>,
    /// Requests of clients that have disconnected.
    requests: AtomicU64,
}

/// The clients of one or several disks, from any source. See the module's text.
pub struct Clients {
    common: Arc<Common>,
    threads: Vec<JoinHandle<()>>,
}

/// Where clients come from.
#[derive(Debug)]
pub enum Source<'a> {
    /// A listening Unix socket.
    Unix(&'a UnixListener),
    /// A listening TCP socket, whose clients speak NBD in clear.
    Tcp(&'a TcpListener),
    /// The server's end of a client channel ([`CLIENT_CHANNEL`]): each message has a connected socket.
    Channel(&'a OwnedFd),
}

impl Source<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Source::Unix(listener) => listener.as_fd(),
            Source::Tcp(listener) => listener.as_fd(),
            Source::Channel(channel) => channel.as_fd(),
        }
    }

    fn prepare(&self) -> io::Result<()> {
        match self {
            Source::Unix(listener) => listener.set_nonblocking(true),
            Source::Tcp(listener) => listener.set_nonblocking(true),
            Source::Channel(_) => Ok(()),
        }
    }

    /// The next client, if there is one. A TCP socket is used by the calls that all stream sockets have.
    fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self {
            Source::Unix(listener) => Ok(Some(listener.accept()?.0)),
            Source::Tcp(listener) => Ok(Some(OwnedFd::from(listener.accept()?.0).into())),
            // A frame without a descriptor is of a client for which there was none free.
            Source::Channel(channel) => {
                let frame = CLIENT_CHANNEL.try_receive(channel)?;
                Ok(frame.and_then(|frame| frame.files.into_iter().next()).map(UnixStream::from))
            }
        }
    }
}

/// The clients of listening sockets.
pub struct Server {
    clients: Clients,
}

impl Server {
    /// A server of this disk. It ends when `stop` is woken, which must not be cleared.
    pub fn new(device: Arc<Device>, options: Options, stop: Arc<Waker>) -> Server {
        let (name, engine) = (String::new(), options.engine.clone());
        Server::of(vec![Exported { name, device, engine }], options, stop)
    }

    /// A server of several disks, at least one. It ends as one of [`new`](Self::new).
    ///
    /// # Panics
    /// There is no disk.
    pub fn of(exports: Vec<Exported>, options: Options, stop: Arc<Waker>) -> Server {
        Server { clients: Clients::of(exports, options, stop, true) }
    }

    /// Accepts clients until `stop` is woken. When this returns, all requests that were taken are
    /// answered, and all clients' threads have ended.
    ///
    /// # Errors
    /// The listener fails. Clients are disconnected.
    pub fn run(self, listener: &UnixListener) -> io::Result<()> {
        self.run_all(&[Source::Unix(listener)])
    }

    /// As [`run`](Self::run), for clients of several sources.
    ///
    /// # Errors
    /// A source fails. Clients are disconnected.
    pub fn run_all(mut self, sources: &[Source<'_>]) -> io::Result<()> {
        let accepted = self.accept(sources);
        let requests = self.clients.end();
        tracing::info!(requests, "all clients have gone");
        accepted
    }

    fn accept(&mut self, sources: &[Source<'_>]) -> io::Result<()> {
        sources.iter().try_for_each(Source::prepare)?;
        let stop = self.clients.common.stop.clone();
        let fds: Vec<_> = sources.iter().map(Source::fd).chain([stop.fd()]).collect();
        loop {
            let ready = wait_for_any(&fds, None)?;
            if ready[sources.len()] {
                return Ok(());
            }
            for (source, _) in sources.iter().zip(&ready).filter(|(_, ready)| **ready) {
                self.accept_one(source)?;
            }
        }
    }

    fn accept_one(&mut self, source: &Source<'_>) -> io::Result<()> {
        match source.accept() {
            Ok(client) => client.into_iter().for_each(|client| self.clients.admit(client)),
            Err(e) if is_passing(&e) => {}
            Err(e) if is_shortage(&e) => {
                let common = &self.clients.common;
                let (device, stop) = (common.first(), &common.stop);
                let now_ns = device.clock.now_ns();
                let limit = &device.log_limits.connections;
                limited!(warn, limit, now_ns, "no client can be accepted now: {e}");
                wait_for([stop.fd()], Some(SHORTAGE))?;
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }
}

impl Clients {
    /// Clients of this disk, until `stop` is woken, which must not be cleared.
    pub fn new(device: Arc<Device>, options: Options, stop: Arc<Waker>) -> Clients {
        let (name, engine) = (String::new(), options.engine.clone());
        Clients::of(vec![Exported { name, device, engine }], options, stop, false)
    }

    /// Clients of several disks, at least one. `is_end`: no relay is between them and this.
    fn of(exports: Vec<Exported>, options: Options, stop: Arc<Waker>, is_end: bool) -> Clients {
        assert!(!exports.is_empty(), "a server has something to serve");
        let requests = AtomicU64::new(0);
        let buffers = ClientPool::new(options.max_clients, options.client_bytes);
        let sessions = is_end.then(Sessions::default);
        let common = Arc::new(Common { exports, options, stop, buffers, sessions, requests });
        Clients { common, threads: Vec::new() }
    }

    /// Serves a client on a thread of its own, if there is room for one more.
    pub fn admit(&mut self, socket: UnixStream) {
        self.threads.retain(|client| !client.is_finished());
        let common = self.common.clone();
        let now_ns = common.first().clock.now_ns();
        let most = common.options.max_clients;
        if self.threads.len() >= most {
            let limit = &common.first().log_limits.connections;
            limited!(warn, limit, now_ns, "a client was turned away: there are {most}");
            return;
        }
        let thread = std::thread::Builder::new().name("nbd-client".to_owned());
        match thread.spawn(move || common.serve(socket)) {
            Ok(client) => self.threads.push(client),
            Err(e) => {
                let limit = &self.common.first().log_limits.connections;
                limited!(warn, limit, now_ns, "a client was turned away: no thread: {e}");
            }
        }
    }

    /// Whether there are clients now.
    pub fn are_there(&self) -> bool {
        self.threads.iter().any(|client| !client.is_finished())
    }

    /// Ends all clients. When this returns, no request is under way: each was answered or never
    /// will be. Returns the number of requests, if each client has counted for itself.
    pub fn end(self) -> u64 {
        self.common.stop.wake();
        for client in self.threads {
            if client.join().is_err() {
                tracing::error!("a client's thread has panicked: this is a bug in ferrite");
            }
        }
        self.common.requests.load(Ordering::Relaxed)
    }
}

/// Whether the next accept may succeed.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

fn is_shortage(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    shortages.iter().any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

/// Serves one client on this thread until it disconnects or `stop` is woken. Returns its counts.
///
/// # Errors
/// Errors of the socket, the engine or the disk.
pub fn serve_one(
    device: &Arc<Device>,
    options: &Options,
    stop: &Arc<Waker>,
    socket: UnixStream,
) -> io::Result<Counts> {
    let (name, device, engine) = (String::new(), device.clone(), options.engine.clone());
    let buffers = ClientPool::new(1, options.client_bytes);
    let exports = [Exported { name, device, engine }];
    serve_chosen(&exports, options, stop, (&buffers, None), socket)
}

/// Serves one client the disk that it chooses, as [`serve_one`] does.
fn serve_chosen(
    exports: &[Exported],
    options: &Options,
    stop: &Arc<Waker>,
    (buffers, sessions): (&ClientPool, Option<&Sessions>),
    socket: UnixStream,
) -> io::Result<Counts> {
    socket.set_nonblocking(true)?;
    let offer = |Exported { name, device, .. }: &Exported| {
        // A file of maps may be read: only a parker waits for that.
        let disk = device.disk()?;
        let (export, dirty) = (Export::of(&disk, options), dirty_contexts(&disk));
        Ok(Offer { name: name.clone(), export, dirty })
    };
    let offers = exports.iter().map(offer).collect::<io::Result<Vec<_>>>()?;
    let manners = Manners { hides_names: options.hides_names, relayed: options.relayed };
    let limit = options.greeting;
    let Some(mut greeted) = greet(&socket, offers.clone(), manners, sessions, stop, limit)? else {
        return Ok(Counts::default());
    };
    let (Exported { device, engine, .. }, mut export) =
        (&exports[greeted.agreed.index], offers[greeted.agreed.index].export);
    let dirty = offers[greeted.agreed.index].dirty.clone();
    export.read_only |= greeted.agreed.read_only;
    // The last to be dropped: the client that replaces this one waits for it.
    let _session = greeted.session.take();
    let queue = buffers.take()?;
    let counters = options.counters.clone().unwrap_or_default();
    let (pool, tuning) = (queue.pool().clone(), options.tuning);
    let shared = Shared::new(device.clone(), pool, 1, tuning, Arc::default(), counters.clone())?;
    let shared = Arc::new(shared.with_queues_from(queue.index));
    device.begin_service(engine);
    let engine = engine(shared.pool.arena().clone(), ENGINE_ENTRIES)?;
    let trace = options.traces.as_ref().and_then(ClientTraces::begin);
    let client =
        Client::new(shared, engine, socket, (export, dirty), &greeted, stop.clone(), trace)?;
    if let Err(e) = client.run(options.goodbye, options.at_stop) {
        buffers.renew(&queue);
        return Err(e);
    }
    Ok(counters.counts())
}

/// Operations that an engine takes at a time.
const ENGINE_ENTRIES: u32 = 256;

impl Common {
    /// The disk whose limits of the log count for connections.
    fn first(&self) -> &Device {
        &self.exports[0].device
    }

    fn serve(&self, socket: UnixStream) {
        let shared = (&self.buffers, self.sessions.as_ref());
        match serve_chosen(&self.exports, &self.options, &self.stop, shared, socket) {
            Ok(counts) => {
                if self.options.counters.is_none() {
                    self.requests.fetch_add(counts.requests, Ordering::Relaxed);
                }
                tracing::debug!("a client has gone: {counts}");
            }
            Err(e) => {
                let device = self.first();
                let now_ns = device.clock.now_ns();
                limited!(warn, device.log_limits.connections, now_ns, "a client is lost: {e}");
            }
        }
    }
}

/// The contexts of a disk's maps. Without them a client can do all else.
fn dirty_contexts(disk: &Disk) -> DirtyContexts {
    match disk.dirty_view() {
        Ok(view) => view.map(|view| DirtyContexts::of(view.maps())).unwrap_or_default(),
        Err(e) => {
            ferrite_disk::warn_once(&format!("clients do not see the dirty maps: {e}"));
            DirtyContexts::default()
        }
    }
}

impl Export {
    fn of(disk: &Disk, options: &Options) -> Export {
        if options.keeps_all {
            disk.keep_allocated();
        }
        let preferred = disk.physical_block_bytes().max(PAGE_BYTES);
        Export {
            bytes: disk.sectors() * ferrite_disk::SECTOR_BYTES,
            read_only: options.read_only || disk.read_only(),
            trims: disk.discard_limits().is_some() && !options.keeps_all,
            preferred_bytes: preferred.next_power_of_two().min(MAX_PREFERRED_BYTES),
        }
    }
}
