//! What the queues of one connected disk share.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};

use ferrite_disk::{Disk, Port};
use ferrite_io::clock::Clock;
use ferrite_io::pool::Pool;
use ferrite_io::shm::Shm;
use ferrite_xen::abi::Protocol;
use rustix::event::{EventfdFlags, eventfd};

use crate::counters::Counters;
use crate::gate::Gate;
use crate::log_limit::LogLimits;
use crate::processors::Processors;
use crate::request::Limits;
use crate::tuning::Tuning;

/// Bytes of the file that remembers a failed flush.
const LATCH_BYTES: usize = 64;

/// A disk that is served, from attach to detach.
pub struct Device {
    /// What is served.
    pub disk: Arc<Disk>,
    /// Where times come from.
    pub clock: Arc<dyn Clock>,
    /// What may be logged about it.
    pub log_limits: LogLimits,
    /// A flush has failed: what the medium holds is not what was answered. Linux takes a failed
    /// empty flush for a disk without a cache and goes on, so all later writes fail until the
    /// disk is attached again (blkif.md 2, rule 3).
    flush_failed: AtomicBool,
    /// Where that is remembered for successors.
    latch: OnceLock<Shm>,
    /// Somebody sees to it that metadata gets to the medium.
    saving: AtomicBool,
}

/// The duty to bring a disk's metadata to its medium, of one queue at a time.
pub(crate) struct Saving(Arc<Device>);

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.saving.store(false, Ordering::SeqCst);
        // Who had the duty asks again after this whether anything is unsaved: see `take_saving`.
        fence(Ordering::SeqCst);
    }
}

impl Device {
    /// A device in good order.
    pub fn new(disk: Disk, clock: Arc<dyn Clock>) -> Device {
        Device {
            disk: Arc::new(disk),
            clock,
            log_limits: LogLimits::default(),
            flush_failed: AtomicBool::new(false),
            latch: OnceLock::new(),
            saving: AtomicBool::new(false),
        }
    }

    /// Whether writes are to be refused.
    pub fn flush_has_failed(&self) -> bool {
        self.flush_failed.load(Ordering::SeqCst)
    }

    /// Refuses all writes from now on; `true` the first time.
    pub fn latch_flush_failure(&self) -> bool {
        if let Some(latch) = self.latch.get() {
            latch.store_u32(0, 1);
        }
        !self.flush_failed.swap(true, Ordering::SeqCst)
    }

    /// A flush whose failure is not forgotten: the kernel reports a lost write once, to one caller,
    /// and then never again. So one that succeeds after another has failed says nothing.
    pub(crate) async fn flush(&self, port: &Port) -> io::Result<()> {
        let result = self.disk.flush(port).await;
        if result.is_ok() && self.flush_has_failed() {
            return Err(io::Error::other("an earlier flush has failed"));
        }
        if let Err(e) = &result
            && self.latch_flush_failure()
        {
            tracing::error!(
                "flush failed: {e}; what was written may be lost, and the guest cannot be told by \
                 a flush alone, so all its writes fail until the disk is attached again. Check \
                 the storage, then detach and attach the disk"
            );
        }
        result
    }

    /// The duty to save what no flush has asked for, if there is something and nobody has it.
    pub(crate) fn take_saving(self: &Arc<Device>) -> Option<Saving> {
        if !self.disk.is_unsaved() {
            return None;
        }
        // Together with that of who gives the duty back: one of the two sees what the other did.
        fence(Ordering::SeqCst);
        let free =
            !self.saving.load(Ordering::Relaxed) && !self.saving.swap(true, Ordering::SeqCst);
        free.then(|| Saving(self.clone()))
    }

    /// From now on remembers a failed flush in this file, which outlives the process; `anew` for a
    /// disk that was just attached, with nothing to remember. Does nothing after that was done once.
    ///
    /// # Errors
    /// The file system's.
    pub fn remember_in(&self, path: &Path, anew: bool) -> io::Result<()> {
        if self.latch.get().is_some() {
            return Ok(());
        }
        let kept = if anew { None } else { Shm::open(path).ok() };
        let latch = match kept.filter(|latch| latch.len() >= LATCH_BYTES) {
            Some(latch) => latch,
            None => Shm::create(path, LATCH_BYTES)?,
        };
        if latch.load_u32(0) != 0 {
            self.flush_failed.store(true, Ordering::SeqCst);
        }
        // The caller serves a device once.
        let _ = self.latch.set(latch);
        Ok(())
    }
}

/// An eventfd: wakes a queue's thread, or the control thread.
pub struct Waker(OwnedFd);

impl Waker {
    /// A waker that nobody has used.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        // Can fail only with a full counter, and then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a backend and a frontend have agreed on, as far as requests depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Layout of the slots.
    pub protocol: Protocol,
    /// Segments advertised for INDIRECT; 0 if it was not.
    pub max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub discard: bool,
    /// Rings.
    pub queues: usize,
}

/// One connection of a guest to a device: made anew at each reconnect.
pub struct Connection {
    /// The device.
    pub device: Arc<Device>,
    /// Buffers for the data in flight.
    pub pool: Arc<Pool>,
    /// Exclusion across queues.
    pub gate: Gate,
    /// Layout of the slots.
    pub protocol: Protocol,
    /// Segments advertised for INDIRECT; 0 if it was not.
    pub max_indirect_segments: u16,
    /// Whether DISCARD was offered.
    pub discard: bool,
    /// How the queues work.
    pub tuning: Tuning,
    /// What they may use of processors.
    pub processors: Arc<Processors>,
    /// What they have done.
    pub counters: Counters,
    stop: AtomicBool,
    wakers: Vec<Waker>,
}

impl Connection {
    /// The shared part of a connection of that shape.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(
        device: Arc<Device>,
        pool: Arc<Pool>,
        shape: Shape,
        tuning: Tuning,
        processors: Arc<Processors>,
        counters: Counters,
    ) -> io::Result<Connection> {
        Ok(Connection {
            device,
            pool,
            gate: Gate::new(shape.queues),
            protocol: shape.protocol,
            max_indirect_segments: shape.max_indirect_segments,
            discard: shape.discard,
            tuning,
            processors,
            counters,
            stop: AtomicBool::new(false),
            wakers: (0..shape.queues).map(|_| Waker::new()).collect::<io::Result<_>>()?,
        })
    }

    /// What a request may ask for, now.
    pub fn limits(&self) -> Limits {
        Limits {
            sectors: self.device.disk.sectors(),
            read_only: self.device.disk.read_only(),
            max_indirect_segments: self.max_indirect_segments,
            discard: self.discard,
        }
    }

    /// Asks all queues to answer what they have in flight and end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_all();
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Wakes one queue's thread.
    pub fn wake(&self, queue: usize) {
        self.wakers[queue].wake();
    }

    /// Wakes all of them.
    pub fn wake_all(&self) {
        self.wakers.iter().for_each(Waker::wake);
    }

    /// The waker that `queue` listens to.
    pub fn waker(&self, queue: usize) -> &Waker {
        &self.wakers[queue]
    }
}
