//! A disk for a guest of QEMU or another virtual-machine monitor, by vhost-user (virtio block device).
//!
//! The front end connects to a Unix socket, gives the guest's memory and the places of its queues, and then only its guest
//! and the queues' threads are at work. One front end is served at a time. The way of a request behind the queue is that
//! of every other frontend ([`path`](crate::path)).
//!
//! * `message`: the bytes of messages; `socket`: whole messages in and out; `session`: the reactions to them.
//! * `memory`: the memory table; `ring` and `chain`: a virtqueue; `request`: a virtio block request, checked.
//! * `queue`: the loop of a queue's thread; `inflight`: the table from which a successor takes over.
//! * `config`: the offer.
//!
//! Nothing that the front end or its guest sends is trusted: descriptors are copied before they are checked, and data are
//! copied to the disk's own memory before they are written. Any error ends this front end, or one queue of it.

mod chain;
mod config;
mod inflight;
mod look;
mod memory;
mod message;
mod queue;
mod request;
mod ring;
mod session;
mod socket;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_io::pool::Pool;

use crate::counters::Counters;
use crate::log_limit::limited;
use crate::nbd::EngineFactory;
use crate::path::device::Device;
use crate::path::work::Work;
use crate::tuning::Tuning;
use crate::waker::{Waker, wait_for};

use session::Session;

/// Most queues of a disk.
pub const MAX_QUEUES: u16 = 16;
/// Bytes of the name that a guest can ask a disk for.
pub const ID_BYTES: usize = request::ID_BYTES;

/// How a disk is served.
#[derive(Clone)]
pub struct Options {
    /// Whether guests may only read, even if the disk is writable.
    pub read_only: bool,
    /// Number of queues, at most [`MAX_QUEUES`]. Each has a thread while the guest uses it.
    pub queues: u16,
    /// Bytes for data in flight; at least 1 MiB for each queue is taken.
    pub memory: usize,
    /// The name that a guest can ask for, padded with zeros.
    pub id: [u8; ID_BYTES],
    /// Builds the engines for disk I/O.
    pub engine: EngineFactory,
    /// Tuning of the queues.
    pub tuning: Tuning,
    /// The counters of all queues. Without them growth is looked for once a second.
    pub counters: Option<Counters>,
}

/// Serves front ends, one after the other, until `stop` is woken, which must not be cleared. All requests that were taken
/// are answered then.
///
/// # Errors
/// The listener fails, or there is no memory. A front end that fails is logged, and the next one is served.
pub fn serve(
    device: &Arc<Device>,
    options: &Options,
    listener: &UnixListener,
    stop: &Waker,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let queues = usize::from(options.queues);
    let pool = Pool::with_scratch(options.memory, queues, Disk::MAX_SCRATCH_BYTES)?;
    device.begin_service(&options.engine);
    loop {
        let [_, stopped] = wait_for([listener.as_fd(), stop.fd()], None)?;
        if stopped {
            return Ok(());
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if is_passing(&e) => continue,
            Err(e) => return Err(e),
        };
        tracing::debug!("a front end has connected");
        let session = Session::new(stream, device, options, pool.clone());
        match session.and_then(|session| session.run(stop)) {
            Ok(()) => tracing::debug!("the front end has gone"),
            Err(e) => {
                let now_ns = device.clock.now_ns();
                let limit = &device.log_limits.connections;
                limited!(warn, limit, now_ns, "the front end was disconnected: {e}");
            }
        }
    }
}

/// Serves one front end, until it disconnects or `stop` is woken.
///
/// # Errors
/// As [`serve_one_with`].
pub fn serve_one(
    device: &Arc<Device>,
    options: &Options,
    stream: UnixStream,
    stop: &Waker,
) -> io::Result<()> {
    serve_one_with(device, options, stream, None, stop)
}

/// As [`serve_one`], of a process that can make no memory for other processes: a table of requests in flight is made in
/// `memory`, which is [`table_memory`] of another one.
///
/// # Errors
/// The front end has done what makes no sense, or a queue cannot go on. It is disconnected.
pub fn serve_one_with(
    device: &Arc<Device>,
    options: &Options,
    stream: UnixStream,
    memory: Option<OwnedFd>,
    stop: &Waker,
) -> io::Result<()> {
    let queues = usize::from(options.queues);
    let pool = Pool::with_scratch(options.memory, queues, Disk::MAX_SCRATCH_BYTES)?;
    Session::new(stream, device, options, pool)?.with_table_memory(memory).run(stop)
}

/// Memory for the table of requests in flight of any front end. It has no pages yet.
///
/// # Errors
/// The kernel's.
pub fn table_memory() -> io::Result<OwnedFd> {
    Ok(inflight::memory()?.into())
}

/// The first part of each request on a queue at the beginning of this memory, as a running queue takes them from it; with the
/// bytes of memory that its data have, if it has data. The queue has its descriptors, its available and its used ring behind
/// each other. It is how tests see what a queue makes of any bytes.
///
/// # Errors
/// There is no memory.
pub fn requests_in(
    memory: &[u8],
    entries: u16,
    sectors: u64,
    read_only: bool,
) -> io::Result<Vec<(Work, Option<u64>)>> {
    look::requests_in(memory, entries, sectors, read_only)
}

/// Whether the next accept may succeed.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted)
}
