//! The state that the paths of one frontend share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_io::pool::Pool;

use super::device::Device;
use super::gate::Side;
use crate::counters::Counters;
use crate::processors::Processors;
use crate::tuning::Tuning;
use crate::waker::Waker;

/// A frontend's access to a device. It is made anew for each connection of its client.
pub struct Shared {
    /// The device.
    pub device: Arc<Device>,
    /// The buffers for data in flight.
    pub pool: Arc<Pool>,
    /// The tuning of the paths.
    pub tuning: Tuning,
    /// The limit of processor time.
    pub processors: Arc<Processors>,
    /// The counters of requests.
    pub counters: Counters,
    /// The side of the frontend's guest.
    side: Side,
    /// The queue of the pool that the first path uses.
    first_queue: usize,
    stop: AtomicBool,
    leaves: AtomicBool,
    gives_up: AtomicBool,
    wakers: Vec<Arc<Waker>>,
}

impl Shared {
    /// The state for `paths` paths. Each is made with an index below that.
    ///
    /// # Errors
    /// There are no descriptors.
    pub fn new(
        device: Arc<Device>,
        pool: Arc<Pool>,
        paths: usize,
        tuning: Tuning,
        processors: Arc<Processors>,
        counters: Counters,
    ) -> io::Result<Shared> {
        counters.open();
        Ok(Shared {
            device,
            pool,
            tuning,
            processors,
            counters,
            side: Side::First,
            first_queue: 0,
            stop: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            gives_up: AtomicBool::new(false),
            wakers: (0..paths).map(|_| Waker::new().map(Arc::new)).collect::<io::Result<_>>()?,
        })
    }

    /// Sets the side of the frontend's guest.
    pub(crate) fn on_side(self, side: Side) -> Shared {
        Shared { side, ..self }
    }

    /// Has the paths use the queues of the pool from this one on.
    pub(crate) fn with_queues_from(self, first_queue: usize) -> Shared {
        Shared { first_queue, ..self }
    }

    /// The queue of the pool that a path uses.
    pub(super) fn queue(&self, index: usize) -> usize {
        self.first_queue + index
    }

    pub(super) fn side(&self) -> Side {
        self.side
    }

    /// Counts a request of a predecessor that begins again.
    pub(crate) fn count_replay(&self) {
        self.device.count_replay(self.side);
    }

    /// Asks all paths to end their requests in flight, and to take no more.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_all();
    }

    /// Says before [`stop`](Self::stop) that there will be a successor. While the device is parked,
    /// it gets a predecessor's requests that have not begun again.
    pub fn leave(&self) {
        self.leaves.store(true, Ordering::Release);
    }

    pub(super) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Acquire)
    }

    /// Says before [`stop`](Self::stop) that there will be no successor: requests that wait for
    /// space fail.
    pub fn give_up(&self) {
        self.gives_up.store(true, Ordering::Release);
    }

    pub(super) fn gives_up(&self) -> bool {
        self.stopping() && self.gives_up.load(Ordering::Acquire)
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Whether discards are to end early, which is allowed since they are hints. The stopping code
    /// and a parker wait for them (threats.md T21).
    pub(super) fn ends_discards(&self) -> bool {
        self.stopping() || self.device.is_parking()
    }

    /// Wakes all paths.
    pub fn wake_all(&self) {
        self.wakers.iter().for_each(|waker| waker.wake());
    }

    /// The waker of a path.
    pub(super) fn waker(&self, index: usize) -> &Arc<Waker> {
        &self.wakers[index]
    }
}
