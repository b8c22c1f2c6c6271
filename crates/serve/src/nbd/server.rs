//! The clients of a disk.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::pool::Pool;

use super::client::Client;
use super::handshake::greet;
use super::negotiation::{Export, MIN_BLOCK_BYTES};
use crate::counters::{Counters, Counts};
use crate::log_limit::limited;
use crate::path::device::Device;
use crate::path::shared::Shared;
use crate::trace::clients::ClientTraces;
use crate::tuning::Tuning;
use crate::waker::{Waker, wait_for};

/// What clients have at least for what needs no I/O; more helps nobody who is alive.
pub const COURTESY: Duration = Duration::from_secs(10);
/// How long nobody is accepted after the system had no descriptor or memory for one.
const SHORTAGE: Duration = Duration::from_millis(100);
/// Requests prefer whole pages.
const PAGE_BYTES: u32 = 4096;
/// The largest block that is told of: NBD's own limit is the length of a request.
const MAX_PREFERRED_BYTES: u32 = 32 << 20;

/// Builds the engine of a client.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// How a disk is served.
#[derive(Clone)]
pub struct Options {
    /// Clients may not write, even where the disk could be written.
    pub read_only: bool,
    /// Clients at once; more are turned away.
    pub max_clients: usize,
    /// Memory in bytes for the data of each client; 2 MiB at least are taken.
    pub client_bytes: usize,
    /// What a client may take to say what it wants,
    pub greeting: Duration,
    /// to read its last answers when it has said its last,
    pub goodbye: Duration,
    /// and to read them when the server stops.
    pub at_stop: Duration,
    /// What does the disk I/O.
    pub engine: EngineFactory,
    /// How requests are gone about.
    pub tuning: Tuning,
    /// Where all that clients do is counted; without, each client counts for itself.
    pub counters: Option<Counters>,
    /// TRIM is not offered, whatever the disk can.
    pub keeps_all: bool,
    /// Where clients leave what became of their requests, if anywhere.
    pub traces: Option<Arc<ClientTraces>>,
}

/// What the threads share.
struct Common {
    device: Arc<Device>,
    options: Options,
    stop: Arc<Waker>,
    /// Of clients that have gone.
    requests: AtomicU64,
}

/// A disk's clients, however they come; see the module's text.
pub struct Clients {
    common: Arc<Common>,
    threads: Vec<JoinHandle<()>>,
}

/// Those that come to a socket.
pub struct Server {
    clients: Clients,
}

impl Server {
    /// A server of this disk, which ends when `stop` is woken; nobody may clear that.
    pub fn new(device: Arc<Device>, options: Options, stop: Arc<Waker>) -> Server {
        Server { clients: Clients::new(device, options, stop) }
    }

    /// Accepts clients until it is told to stop. When this returns, all that was taken is answered,
    /// and no thread of a client is left.
    ///
    /// # Errors
    /// The listener fails; clients are sent away.
    pub fn run(mut self, listener: &UnixListener) -> io::Result<()> {
        let accepted = self.accept(listener);
        let requests = self.clients.end();
        tracing::info!(requests, "all clients have gone");
        accepted
    }

    fn accept(&mut self, listener: &UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let common = self.clients.common.clone();
        loop {
            let [_, stop] = wait_for([listener.as_fd(), common.stop.fd()], None)?;
            if stop {
                return Ok(());
            }
            match listener.accept() {
                Ok((socket, _)) => self.clients.admit(socket),
                Err(e) if is_passing(&e) => {}
                Err(e) if is_shortage(&e) => {
                    let Common { device, stop, .. } = &*common;
                    let now_ns = device.clock.now_ns();
                    let limit = &device.log_limits.connections;
                    limited!(warn, limit, now_ns, "no client can be accepted now: {e}");
                    wait_for([stop.fd()], Some(SHORTAGE))?;
                }
                Err(e) => return Err(e),
            }
        }
    }
}

impl Clients {
    /// Of this disk, until `stop` is woken; nobody may clear that.
    pub fn new(device: Arc<Device>, options: Options, stop: Arc<Waker>) -> Clients {
        let requests = AtomicU64::new(0);
        let common = Arc::new(Common { device, options, stop, requests });
        Clients { common, threads: Vec::new() }
    }

    /// A thread for a client, if there is room for one more.
    pub fn admit(&mut self, socket: UnixStream) {
        self.threads.retain(|client| !client.is_finished());
        let common = self.common.clone();
        let now_ns = common.device.clock.now_ns();
        let most = common.options.max_clients;
        if self.threads.len() >= most {
            let limit = &common.device.log_limits.connections;
            limited!(warn, limit, now_ns, "a client was turned away: there are {most}");
            return;
        }
        let thread = std::thread::Builder::new().name("nbd-client".to_owned());
        match thread.spawn(move || common.serve(socket)) {
            Ok(client) => self.threads.push(client),
            Err(e) => {
                let limit = &self.common.device.log_limits.connections;
                limited!(warn, limit, now_ns, "a client was turned away: no thread: {e}");
            }
        }
    }

    /// Ends them all. When this returns, all that was taken is answered or will never be, and nothing
    /// of it is under way. So many requests there were, where each has counted for itself.
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

/// Whether the next client may have more luck.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

fn is_shortage(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    shortages.iter().any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

/// Serves one client on this thread until it goes or `stop` is woken; what was counted where it
/// counts.
///
/// # Errors
/// Of the socket, the engine or the disk.
pub fn serve_one(
    device: &Arc<Device>,
    options: &Options,
    stop: &Arc<Waker>,
    socket: UnixStream,
) -> io::Result<Counts> {
    socket.set_nonblocking(true)?;
    let export = device.with_disk(|disk| Export::of(disk, options))?;
    let Some(greeted) = greet(&socket, export, stop, options.greeting)? else {
        return Ok(Counts::default());
    };
    let pool = Pool::with_scratch(options.client_bytes, 1, Disk::MAX_SCRATCH_BYTES)?;
    let counters = options.counters.clone().unwrap_or_default();
    let tuning = options.tuning;
    let shared = Shared::new(device.clone(), pool, 1, tuning, Arc::default(), counters.clone())?;
    let shared = Arc::new(shared);
    device.begin_service(&options.engine);
    let engine = (options.engine)(shared.pool.arena().clone(), ENGINE_ENTRIES)?;
    let trace = options.traces.as_ref().and_then(ClientTraces::begin);
    let client = Client::new(shared, engine, socket, export, &greeted, stop.clone(), trace)?;
    client.run(options.goodbye, options.at_stop)?;
    Ok(counters.counts())
}

/// Operations that an engine takes at once.
const ENGINE_ENTRIES: u32 = 256;

impl Common {
    fn serve(&self, socket: UnixStream) {
        match serve_one(&self.device, &self.options, &self.stop, socket) {
            Ok(counts) => {
                if self.options.counters.is_none() {
                    self.requests.fetch_add(counts.requests, Ordering::Relaxed);
                }
                tracing::debug!("a client has gone: {counts}");
            }
            Err(e) => {
                let device = &self.device;
                let now_ns = device.clock.now_ns();
                limited!(warn, device.log_limits.connections, now_ns, "a client is lost: {e}");
            }
        }
    }
}

impl Export {
    fn of(disk: &Disk, options: &Options) -> Export {
        let preferred = disk.physical_block_bytes().max(PAGE_BYTES).max(MIN_BLOCK_BYTES);
        Export {
            bytes: disk.sectors() * ferrite_disk::SECTOR_BYTES,
            read_only: options.read_only || disk.read_only(),
            trims: disk.discard_limits().is_some() && !options.keeps_all,
            preferred_bytes: preferred.next_power_of_two().min(MAX_PREFERRED_BYTES),
        }
    }
}
