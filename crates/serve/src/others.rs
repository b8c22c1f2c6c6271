//! Clients of a worker that speak no NBD: front ends of vhost-user, and devices of ublk.
//!
//! The daemon accepts or opens what a client is, and its keeper passes that to the worker: a worker opens nothing. With
//! each client comes the worker's end of a *status* socket, where it says what has become of the client. It closes the
//! socket when it does not serve the client any more. So the daemon also learns of the worker's death there.
//!
//! Each client has a thread, which starts the threads of its queues.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_host::frames::{Frame, Protocol};
use ferrite_io::ublk::{self as driver, Channel, Parameters};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::log_limit::limited;
use crate::nbd::EngineFactory;
use crate::path::device::Device;
use crate::tuning::Tuning;
use crate::waker::{Waker, wait_for};
use crate::{ublk, vhost};

/// The protocol of a status socket.
const STATUS: Protocol = Protocol { name: "the status of a client", max_bytes: 1024, max_files: 0 };
/// Most clients of each kind at a time: one, and the one before that is about to end.
const MAX_CLIENTS: usize = 2;
/// How long the queues of a device may take until they wait for requests.
const READY: Duration = Duration::from_secs(5);
/// The longest text on a status socket.
const MAX_TEXT: usize = 500;

/// A client, as the daemon describes it. Descriptors that come along: the status socket, then the client's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Newcomer {
    /// A question what a device of this disk is like. Nothing comes along.
    Question {
        /// Whether the device is for reading only.
        read_only: bool,
    },
    /// A device of ublk. Its character device comes along. Without that it is asked whether the device is served.
    Device {
        /// The device's number.
        number: u32,
        /// Its queues.
        queues: u16,
        /// The tags of each.
        depth: u16,
        /// Whether it is for reading only.
        read_only: bool,
    },
    /// A front end of vhost-user. Its connection comes along, and memory for its requests in flight. Without that it is asked whether one is served.
    FrontEnd {
        /// The number of queues that it is offered.
        queues: u16,
        /// Whether its guest may only read.
        read_only: bool,
        /// The name that its guest can ask for: ASCII, at most [`vhost::ID_BYTES`].
        name: String,
    },
    /// The end of all front ends. Nothing comes along; the status socket is closed when they are not served any more.
    NoFrontEnd,
}

impl Newcomer {
    /// The device's number, of a device.
    fn number(&self) -> Option<u32> {
        match self {
            Newcomer::Device { number, .. } => Some(*number),
            _ => None,
        }
    }
}

/// A worker's message about a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// The properties of a device of this disk.
    Device {
        /// Whether nothing may be written.
        read_only: bool,
        /// Its size in sectors of 512 bytes.
        sectors: u64,
        /// Most sectors of a read or write.
        max_sectors: u32,
        /// The best size of a request in bytes.
        best_bytes: u32,
        /// The granularity of discards in bytes. `None`: there are none.
        discards: Option<u32>,
    },
    /// It is served. A device may be started: all its tags wait for requests.
    Served {
        /// The worker's process number.
        pid: u32,
    },
    /// It is not served, for this reason.
    Refused(String),
}

impl Told {
    fn of(parameters: &Parameters) -> Told {
        let Parameters { read_only, sectors, max_sectors, best_bytes, discards } = *parameters;
        Told::Device { read_only, sectors, max_sectors, best_bytes, discards }
    }

    /// The parameters of a device, if it was asked for them.
    pub fn parameters(&self) -> Option<Parameters> {
        match *self {
            Told::Device { read_only, sectors, max_sectors, best_bytes, discards } => {
                Some(Parameters { read_only, sectors, max_sectors, best_bytes, discards })
            }
            _ => None,
        }
    }
}

/// Waits for what a worker says of a client, at the daemon's end of its status socket.
///
/// # Errors
/// `UnexpectedEof`: the worker has ended, or does not know the client's kind. `WouldBlock`: it says nothing within
/// `limit`.
pub fn told(status: &OwnedFd, limit: Duration) -> io::Result<Told> {
    set_socket_timeout(status, Timeout::Recv, Some(limit))?;
    Ok(serde_json::from_slice(&STATUS.receive(status)?.bytes)?)
}

/// How a worker serves these clients.
#[derive(Clone)]
pub struct Options {
    /// Bytes for the data in flight of each client.
    pub memory: usize,
    /// Builds the engines for disk I/O.
    pub engine: EngineFactory,
    /// Tuning of the queues.
    pub tuning: Tuning,
    /// The counters of all queues.
    pub counters: Counters,
}

/// The worker's end of a status socket. A message that cannot be sent is dropped.
struct Status(OwnedFd);

impl Status {
    fn say(&self, told: &Told) {
        if let Ok(bytes) = serde_json::to_vec(told) {
            let _ = STATUS.try_send(&self.0, &bytes, &[]);
        }
    }

    fn refuse(&self, why: impl std::fmt::Display) {
        let mut why = why.to_string();
        why.truncate((0..=MAX_TEXT).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0));
        self.say(&Told::Refused(why));
    }
}

/// Those who have asked for a client that is served.
#[derive(Default)]
struct Askers {
    is_served: bool,
    all: Vec<Status>,
}

/// A client's thread.
struct Client {
    /// A device's number.
    number: Option<u32>,
    askers: Arc<Mutex<Askers>>,
    stop: Arc<Waker>,
    thread: JoinHandle<()>,
}

/// The clients of a disk.
pub struct Others {
    device: Arc<Device>,
    options: Options,
    clients: Vec<Client>,
}

impl Others {
    /// No clients yet.
    pub fn new(device: Arc<Device>, options: Options) -> Others {
        Others { device, options, clients: Vec::new() }
    }

    /// Serves the client of a frame of the client channel. One that makes no sense is dropped with its descriptors.
    pub fn admit(&mut self, frame: Frame) {
        let Ok(newcomer) = serde_json::from_slice::<Newcomer>(&frame.bytes) else { return };
        let mut files = frame.files.into_iter();
        let Some(status) = files.next().map(Status) else { return };
        self.clients.retain(|client| !client.thread.is_finished());
        if let Newcomer::Question { read_only } = newcomer {
            return match self.device.with_disk(|disk| ublk::parameters(disk, read_only)) {
                Ok(parameters) => status.say(&Told::of(&parameters)),
                Err(e) => status.refuse(e),
            };
        }
        match (newcomer, files.next()) {
            (Newcomer::NoFrontEnd, _) => {
                let front_ends = self.clients.iter().filter(|client| client.number.is_none());
                front_ends.for_each(|client| client.stop.wake());
                self.ask(None, status);
            }
            (newcomer, Some(file)) => self.begin(newcomer, status, (file, files.next())),
            (newcomer, None) => self.ask(newcomer.number(), status),
        }
    }

    /// Says whether a device or a front end is served, and keeps the socket of the asker as long as it is served.
    fn ask(&self, number: Option<u32>, status: Status) {
        let mut same = self.clients.iter().filter(|client| client.number == number);
        let found = same.find_map(|client| {
            let askers = lock(&client.askers);
            askers.is_served.then_some(askers)
        });
        match found {
            Some(mut askers) => {
                status.say(&served());
                askers.all.push(status);
            }
            None => status.refuse("it is not served here"),
        }
    }

    fn begin(&mut self, newcomer: Newcomer, status: Status, files: Files) {
        let number = newcomer.number();
        let is_like = |client: &&Client| client.number.is_some() == number.is_some();
        if self.clients.iter().filter(is_like).count() >= MAX_CLIENTS {
            return status.refuse("it serves another one");
        }
        let stop = match Waker::new() {
            Ok(stop) => Arc::new(stop),
            Err(e) => return status.refuse(e),
        };
        let askers = Arc::new(Mutex::new(Askers::default()));
        let served = Served {
            device: self.device.clone(),
            options: self.options.clone(),
            stop: stop.clone(),
            askers: askers.clone(),
        };
        // It goes with the thread, whatever that does.
        let run = move || served.run(&newcomer, status, files);
        match std::thread::Builder::new().name("client".to_owned()).spawn(run) {
            Ok(thread) => self.clients.push(Client { number, askers, stop, thread }),
            Err(e) => tracing::warn!("a client was turned away: no thread: {e}"),
        }
    }

    /// Whether there are clients now.
    pub fn are_there(&self) -> bool {
        self.clients.iter().any(|client| !client.thread.is_finished())
    }

    /// Ends all clients: requests that were taken are answered when this returns.
    pub fn end(self) {
        self.clients.iter().for_each(|client| client.stop.wake());
        for client in self.clients {
            if client.thread.join().is_err() {
                tracing::error!("a client's thread has panicked: this is a bug in ferrite");
            }
        }
    }
}

fn served() -> Told {
    Told::Served { pid: std::process::id() }
}

fn lock(askers: &Mutex<Askers>) -> MutexGuard<'_, Askers> {
    askers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The client's descriptor, and that of its memory.
type Files = (OwnedFd, Option<OwnedFd>);

/// The state of a client's thread.
struct Served {
    device: Arc<Device>,
    options: Options,
    stop: Arc<Waker>,
    askers: Arc<Mutex<Askers>>,
}

impl Served {
    fn run(&self, newcomer: &Newcomer, status: Status, (file, memory): Files) {
        let ended = match newcomer {
            Newcomer::Device { queues, depth, read_only, .. } => {
                self.serve_device(status, file, [*queues, *depth], *read_only)
            }
            Newcomer::FrontEnd { queues, read_only, name } => {
                self.serve_front_end(status, (file, memory), *queues, *read_only, name)
            }
            Newcomer::Question { .. } | Newcomer::NoFrontEnd => return,
        };
        if let Err(e) = ended {
            let (limit, now_ns) = (&self.device.log_limits.connections, self.device.clock.now_ns());
            limited!(warn, limit, now_ns, "a client is lost: {e}");
        }
    }

    fn serve_device(
        &self,
        status: Status,
        file: OwnedFd,
        [queues, depth]: [u16; 2],
        read_only: bool,
    ) -> io::Result<()> {
        let file = Arc::new(file);
        let opener = |number| -> ublk::Opener {
            let file = file.clone();
            Box::new(move || {
                Ok(Box::new(driver::Queue::new(file, number, depth)?) as Box<dyn Channel>)
            })
        };
        let openers = (0..queues).map(opener).collect();
        let options = ublk::Options {
            read_only,
            memory: self.options.memory,
            engine: self.options.engine.clone(),
            tuning: self.options.tuning,
            counters: Some(self.options.counters.clone()),
        };
        // The queues have the descriptor alone, and close it with their end: the driver waits for that.
        drop(file);
        let started = ublk::Service::start(&self.device, &options, openers, self.stop.clone());
        let service = started.inspect_err(|e| status.refuse(e))?;
        if !service.is_ready_within(READY) {
            let ended = service.stop();
            match &ended {
                Err(e) => status.refuse(e),
                Ok(()) => status.refuse("its queues are not ready in time"),
            }
            return ended;
        }
        self.is_served_for(status);
        let waited = wait_for([self.stop.fd()], None);
        lock(&self.askers).is_served = false;
        let ended = service.stop();
        // The character device is closed now.
        lock(&self.askers).all.clear();
        waited.and(ended)
    }

    /// Says that the client is served, and keeps its status socket until it is not.
    fn is_served_for(&self, status: Status) {
        status.say(&served());
        let mut askers = lock(&self.askers);
        askers.is_served = true;
        askers.all.push(status);
    }

    fn serve_front_end(
        &self,
        status: Status,
        (file, memory): Files,
        queues: u16,
        read_only: bool,
        name: &str,
    ) -> io::Result<()> {
        let mut id = [0; vhost::ID_BYTES];
        let graphic = name.bytes().filter(u8::is_ascii_graphic);
        id.iter_mut().zip(graphic).for_each(|(to, byte)| *to = byte);
        let options = vhost::Options {
            read_only,
            queues: queues.clamp(1, vhost::MAX_QUEUES),
            memory: self.options.memory,
            id,
            engine: self.options.engine.clone(),
            tuning: self.options.tuning,
            counters: Some(self.options.counters.clone()),
        };
        self.device.begin_service(&options.engine);
        self.is_served_for(status);
        let stream = UnixStream::from(file);
        let served = vhost::serve_one_with(&self.device, &options, stream, memory, &self.stop);
        *lock(&self.askers) = Askers::default();
        served
    }
}

/// A status socket: the end of the worker, then that of the daemon.
///
/// # Errors
/// The kernel's.
pub fn status() -> io::Result<[OwnedFd; 2]> {
    let (worker, daemon) = ferrite_host::frames::pair()?;
    Ok([worker, daemon])
}

/// Whether the other end of a status socket is closed: the client is not served any more.
pub fn is_over(status: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(status.as_fd(), PollFlags::RDHUP)];
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
