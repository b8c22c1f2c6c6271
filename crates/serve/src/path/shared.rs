//! What the paths of one frontend share.

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

/// A frontend's way to a device: made anew for each connection of its client.
pub struct Shared {
    /// The device.
    pub device: Arc<Device>,
    /// Buffers for the data in flight.
    pub pool: Arc<Pool>,
    /// How the paths work.
    pub tuning: Tuning,
    /// What they may use of processors.
    pub processors: Arc<Processors>,
    /// What they have done.
    pub counters: Counters,
    /// Whose they are.
    side: Side,
    stop: AtomicBool,
    leaves: AtomicBool,
    gives_up: AtomicBool,
    wakers: Vec<Arc<Waker>>,
}

impl Shared {
    /// For so many paths, each of which is made with its index below that.
    ///
    /// # Errors
    /// Out of descriptors.
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
            stop: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            gives_up: AtomicBool::new(false),
            wakers: (0..paths).map(|_| Waker::new().map(Arc::new)).collect::<io::Result<_>>()?,
        })
    }

    /// The same of a guest on this side.
    pub(crate) fn on_side(self, side: Side) -> Shared {
        Shared { side, ..self }
    }

    pub(super) fn side(&self) -> Side {
        self.side
    }

    /// A request that a predecessor left is begun again.
    pub(crate) fn begins_again(&self) {
        self.device.begins_again(self.side);
    }

    /// Asks all paths to end what they have in flight, and to take nothing more.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_all();
    }

    /// Says that a successor goes on, before [`stop`](Self::stop): while the device is parked, what a
    /// predecessor left and nobody has begun again is for that one.
    pub fn leave(&self) {
        self.leaves.store(true, Ordering::Release);
    }

    pub(super) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Acquire)
    }

    /// Says that no successor goes on, before [`stop`](Self::stop): what waits for space fails.
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

    /// Whether discards are to end early, as hints may: who stops the paths waits for them, and who
    /// parks the device, too (threats.md T21).
    pub(super) fn ends_discards(&self) -> bool {
        self.stopping() || self.device.is_parking()
    }

    /// Wakes all of them.
    pub fn wake_all(&self) {
        self.wakers.iter().for_each(|waker| waker.wake());
    }

    /// The waker that a path listens to.
    pub(super) fn waker(&self, index: usize) -> &Arc<Waker> {
        &self.wakers[index]
    }
}
