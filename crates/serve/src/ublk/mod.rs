//! A disk as a block device of this host, by the kernel's ublk driver.
//!
//! The driver gives requests of `/dev/ublkbN` to the threads of this frontend, one for each queue ([`ferrite_io::ublk`]).
//! The way of a request behind the queue is that of every other frontend ([`path`](crate::path)).
//!
//! Requests that were taken and not answered stay with the driver. When this process has gone, they wait with all later
//! ones for the next process, which gets them again: none of them was answered, so no other request relies on them.
//!
//! The kernel is trusted to be whole, and not more: a range is checked against the disk, as the disk may be another one
//! than the device was made for.

mod queue;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, SECTOR_BYTES};
use ferrite_io::pool::Pool;
use ferrite_io::ublk::{Channel, Parameters};

use crate::counters::Counters;
use crate::nbd::EngineFactory;
use crate::path::device::Device;
use crate::path::largest_request;
use crate::path::shared::Shared;
use crate::tuning::Tuning;
use crate::waker::Waker;

use queue::Queue;

/// Most bytes of a read or write.
pub const MAX_BYTES: u32 = 1 << 20;
/// How often the queues are looked at that are to be ready.
const LOOK: Duration = Duration::from_millis(20);
/// Operations in flight of a queue, at most.
const ENGINE_ENTRIES: u32 = 256;

/// Opens the channel of a queue, on the thread that serves it.
pub type Opener = Box<dyn FnOnce() -> io::Result<Box<dyn Channel>> + Send>;

/// How a disk is served.
#[derive(Clone)]
pub struct Options {
    /// Whether writes fail, even if the disk is writable.
    pub read_only: bool,
    /// Bytes for data in flight; at least 1 MiB for each queue is taken.
    pub memory: usize,
    /// Builds the engines for disk I/O.
    pub engine: EngineFactory,
    /// Tuning of the queues.
    pub tuning: Tuning,
    /// The counters of all queues.
    pub counters: Option<Counters>,
}

/// The properties of a device of this disk.
pub fn parameters(disk: &Disk, read_only: bool) -> Parameters {
    let most = (MAX_BYTES as usize).min(largest_request(disk)) as u64;
    // The driver takes powers of two.
    let max_bytes = 1 << most.ilog2();
    let read_only = read_only || disk.read_only();
    Parameters {
        read_only,
        sectors: disk.sectors(),
        max_sectors: (max_bytes / SECTOR_BYTES) as u32,
        best_bytes: disk.block_bytes().clamp(512, 4096),
        discards: disk
            .discard_limits()
            .filter(|_| !read_only)
            .map(|limits| limits.granularity_bytes.max(512)),
    }
}

/// The threads that serve a device.
pub struct Service {
    shared: Arc<Shared>,
    ended: Arc<Waker>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    /// One message of each queue whose tags wait for requests.
    ready: Receiver<()>,
}

impl Service {
    /// Begins to serve, with a queue for each opener. `ended` is woken when a queue has ended.
    ///
    /// # Errors
    /// There is no memory, or no thread.
    pub fn start(
        device: &Arc<Device>,
        options: &Options,
        openers: Vec<Opener>,
        ended: Arc<Waker>,
    ) -> io::Result<Service> {
        let queues = openers.len();
        let pool = Pool::with_scratch(options.memory, queues, Disk::MAX_SCRATCH_BYTES)?;
        device.begin_service(&options.engine);
        let counters = options.counters.clone().unwrap_or_default();
        let (device, tuning) = (device.clone(), options.tuning);
        let shared = Shared::new(device, pool, queues, tuning, Arc::default(), counters)?;
        let shared = Arc::new(shared);
        let (tell, ready) = sync_channel(queues);
        let mut service = Service { shared: shared.clone(), ended, threads: Vec::new(), ready };
        for (number, open) in openers.into_iter().enumerate() {
            let (shared, engine) = (shared.clone(), options.engine.clone());
            let (ended, read_only) = (service.ended.clone(), options.read_only);
            let tell = tell.clone();
            let run = move || {
                let arena = shared.pool.arena().clone();
                let made = open().and_then(|channel| {
                    let engine = engine(arena, ENGINE_ENTRIES)?;
                    Queue::new(shared, number, channel, engine, read_only)
                });
                let ready = Box::new(move || {
                    // No thread has to wait for it.
                    let _ = tell.try_send(());
                });
                let result = made.and_then(|queue| queue.when_ready(ready).run());
                ended.wake();
                result
            };
            let thread = std::thread::Builder::new().name(format!("ublk {number}")).spawn(run);
            match thread {
                Ok(thread) => service.threads.push(thread),
                Err(e) => {
                    // Those that run end.
                    let _ = service.stop();
                    return Err(e);
                }
            }
        }
        Ok(service)
    }

    /// Waits until all tags of all queues wait for requests: the device may be started then. `false`: a queue has ended,
    /// or it is not so within `limit`.
    pub fn is_ready_within(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut missing = self.threads.len();
        while missing > 0 && !self.has_ended() {
            let left = until.saturating_duration_since(Instant::now());
            match self.ready.recv_timeout(left.min(LOOK)) {
                Ok(()) => missing -= 1,
                Err(_) if left.is_zero() => return false,
                Err(_) => {}
            }
        }
        missing == 0
    }

    /// Whether a queue has ended: the device was stopped, or the queue cannot go on.
    pub fn has_ended(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }

    /// Takes no more requests, answers those that were taken, and ends. Later ones stay with the driver.
    ///
    /// # Errors
    /// A queue could not go on; the first one's.
    pub fn stop(self) -> io::Result<()> {
        self.shared.stop();
        self.join()
    }

    /// Waits until all queues have ended, which they do when the device is stopped.
    ///
    /// # Errors
    /// As [`stop`](Self::stop).
    pub fn join(self) -> io::Result<()> {
        let mut first = Ok(());
        for thread in self.threads {
            let result = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a queue's thread has panicked")));
            if first.is_ok() {
                first = result;
            }
        }
        first
    }
}
