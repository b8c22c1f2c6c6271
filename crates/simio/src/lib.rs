//! A simulated machine: its files lose unsynced data when the power is cut.
//!
//! Everything in it follows from one seed. A [`SimWorld`] outlives its engines, as a machine outlives processes. The
//! files are real ones on a tmpfs, opened and locked as usual, and have what a process reads now. The world records the
//! states that a medium might have instead, down to single sectors of 512 bytes. [`SimWorld::cut_power`] puts one such
//! state into the files, [`SimWorld::kill_process`] ends operations in flight. Programs that open the files afterwards,
//! ours or others, need no knowledge of this.
//!
//! Rules of durability (see `docs/simulator.md`):
//! * A write takes effect when it completes, in an order that the seed chooses. Until a sync that was submitted after
//!   that has completed, a power cut leaves any content that the sector had since, each sector independently.
//! * Changes of size, holes and directory entries become durable in the order in which they were
//!   made, a file or the directories each by themselves, as in a journalled file system.
//! * A failed sync leaves each sector either durable or forgotten: a later one does not write it.
//!
//! Files can be made devices ([`SimWorld::set_device`]): they keep their size, have no holes and nothing to allocate,
//! and a write past their end fails.
//!
//! The world counts steps: each submission, each completion, each directory operation. It can be stopped at any of
//! them, and from then on nothing moves until it is cut or killed.

#![forbid(unsafe_code)]

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::fstat;

use ferrite_host::clock::{Clock, Random, SplitMix64};
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;

mod directory;
mod engine;
mod fault;
mod file;
#[cfg(test)]
mod tests;

pub use directory::SimDirectory;
pub use fault::{Fault, Lie, On};

use directory::Entries;
use engine::{InFlight, SimEngine};
use fault::Faults;
pub use file::Device;
use file::{Fate, SimFile};

/// Device and inode number of a file.
type Identity = (u64, u64);

/// The syncs that count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyncAfter {
    /// All of them.
    Anything,
    /// Those before which these bytes of a file were written, since the last sync.
    Write(Range<u64>),
    /// Those after a fault.
    Fault,
}

/// See [`SimWorld::stop_at_sync`].
struct StopAtSync {
    after: SyncAfter,
    /// Whether the next sync counts.
    counts: bool,
    left: u64,
    steps: u64,
}

/// A simulated machine; see the module text. Clones are the same machine.
#[derive(Clone)]
pub struct SimWorld {
    state: Rc<RefCell<State>>,
    clock: Arc<SimClock>,
}

/// The state of a world, and whether it is stopped.
struct State {
    random: SplitMix64,
    /// In the order of their registration: inode numbers differ from run to run.
    files: Vec<(Identity, SimFile)>,
    /// The files that are devices, for ever.
    devices: Vec<(Identity, Device)>,
    entries: Entries,
    faults: Faults,
    step: u64,
    stop_at: Option<u64>,
    stop_at_sync: Option<StopAtSync>,
    /// The number of the present process: engines of earlier ones are dead.
    life: u64,
    next_engine: u64,
    /// The operations of all engines of this process, by their numbers.
    in_flight: BTreeMap<u64, Vec<InFlight>>,
}

impl SimWorld {
    /// A machine whose whole future follows from `seed` and its requests.
    pub fn new(seed: u64) -> SimWorld {
        let state = State {
            random: SplitMix64::new(seed),
            files: Vec::new(),
            devices: Vec::new(),
            entries: Entries::default(),
            faults: Faults::default(),
            step: 0,
            stop_at: None,
            stop_at_sync: None,
            life: 0,
            next_engine: 0,
            in_flight: BTreeMap::new(),
        };
        let clock = Arc::new(SimClock(AtomicU64::new(0)));
        SimWorld { state: Rc::new(RefCell::new(state)), clock }
    }

    /// An engine of the present process, on the memory of `arena`.
    pub fn engine(&self, arena: Arc<Arena>) -> Box<dyn Engine> {
        Box::new(SimEngine::new(self.clone(), arena))
    }

    /// The machine's clock: it advances when its engines work, and by [`Clock::sleep`].
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    /// Makes a file a device, of its present size; or notes that the device is larger now.
    ///
    /// # Errors
    /// The real file could not be examined.
    pub fn set_device(&self, fd: impl AsFd, device: Device) -> io::Result<()> {
        let state = &mut *self.state();
        let stat = fstat(&fd)?;
        let identity = (stat.st_dev, stat.st_ino);
        state.devices.retain(|(other, _)| *other != identity);
        state.devices.push((identity, device));
        if let Some((_, file)) = state.files.iter_mut().find(|(other, _)| *other == identity) {
            file.become_device(device)?;
        }
        Ok(())
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.state().faults.list = faults;
    }

    /// Sets the false answers of the medium; `None`: there are none.
    pub fn set_lie(&self, lie: Option<Lie>) {
        self.state().faults.lie = lie;
    }

    /// Sets the partial transfers, and the operations that the kernel asks to retry, of a thousand each.
    pub fn set_nuisances(&self, short: u64, again: u64) {
        let mut state = self.state();
        state.faults.short = short;
        state.faults.again = again;
    }

    /// Steps so far.
    pub fn step(&self) -> u64 {
        self.state().step
    }

    /// Stops the world as soon as this step has been made; `None`: never.
    pub fn stop_at(&self, step: Option<u64>) {
        let mut state = self.state();
        (state.stop_at, state.stop_at_sync) = (step, None);
    }

    /// Stops the world so many `steps` after the beginning of a sync: the `sync`-th counting one from now on, from 1.
    /// So all writes before a sync whose order does not matter are still uncertain.
    pub fn stop_at_sync(&self, after: SyncAfter, sync: u64, steps: u64) {
        let counts = after == SyncAfter::Anything;
        self.state().stop_at_sync = Some(StopAtSync { after, counts, left: sync, steps });
    }

    /// Notes that another program has changed a file, or a device, that no engine uses. All of its present content is
    /// durable.
    ///
    /// # Errors
    /// The real file could not be opened.
    pub fn changed_outside(&self, fd: impl AsFd) -> io::Result<()> {
        let state = &mut *self.state();
        let index = state.add_file(&fd)?;
        state.files[index].1.changed_outside()
    }

    /// Whether the world has stopped. All requests to its engines and directories fail then.
    pub fn stopped(&self) -> bool {
        self.state().stopped()
    }

    /// A number below `bound` from the machine's own seed.
    pub fn below(&self, bound: u64) -> u64 {
        self.state().random.below(bound)
    }

    /// Cuts the power: all processes end, and the files get one of the states that the rules in the module text allow.
    /// Earlier engines are dead and can only be dropped.
    ///
    /// # Errors
    /// The real files could not be changed.
    pub fn cut_power(&self) -> io::Result<()> {
        let state = &mut *self.state();
        (state.stop_at, state.stop_at_sync) = (None, None);
        for op in state.take_in_flight() {
            state.apply_torn(&op, false)?;
        }
        state.make_deferred_sync();
        let fate = Fate::choose(&mut state.random);
        for (_, file) in &mut state.files {
            file.cut(fate, &mut state.random)?;
        }
        state.entries.cut(&mut state.random)?;
        state.files.clear();
        Ok(())
    }

    /// Kills the process: completed operations stay, those in flight are done in part. Earlier engines are dead and can
    /// only be dropped.
    ///
    /// # Errors
    /// The real files could not be changed.
    pub fn kill_process(&self) -> io::Result<()> {
        let state = &mut *self.state();
        (state.stop_at, state.stop_at_sync) = (None, None);
        for op in state.take_in_flight() {
            state.apply_torn(&op, true)?;
        }
        Ok(())
    }

    /// Whether some content can be read that a sync has failed to write, and no later one will write, though it
    /// succeeds. Only the failed sync reported that.
    pub fn has_forgotten(&self) -> bool {
        self.state().files.iter().any(|(_, file)| file.has_forgotten())
    }

    /// Whether a power cut now would change nothing.
    pub fn is_durable(&self) -> bool {
        let state = self.state();
        state.entries.is_durable() && state.files.iter().all(|(_, file)| file.is_durable())
    }

    fn state(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }
}

impl State {
    fn stopped(&self) -> bool {
        self.stop_at.is_some_and(|at| self.step >= at)
    }

    /// Notes that a sync was submitted.
    fn sync_begins(&mut self) {
        let Some(stop) = self.stop_at_sync.as_mut().filter(|stop| stop.counts) else { return };
        stop.left -= 1;
        if stop.left == 0 {
            self.stop_at = Some(self.step + stop.steps);
            self.stop_at_sync = None;
        } else if let SyncAfter::Write(_) = stop.after {
            stop.counts = false;
        }
    }

    /// Notes that these bytes of a file were written.
    fn written(&mut self, bytes: Range<u64>) {
        if let Some(stop) = &mut self.stop_at_sync
            && let SyncAfter::Write(range) = &stop.after
        {
            stop.counts |= range.start < bytes.end && bytes.start < range.end;
        }
    }

    /// Notes a fault.
    fn failed(&mut self) {
        if let Some(stop) = &mut self.stop_at_sync {
            stop.counts |= stop.after == SyncAfter::Fault;
        }
    }

    /// Makes a step; returns its number.
    fn next_step(&mut self) -> u64 {
        self.step += 1;
        self.step
    }

    /// Takes the operations of all engines, which end. The order of the operations is the seed's.
    fn take_in_flight(&mut self) -> Vec<InFlight> {
        self.life += 1;
        let mut ops: Vec<InFlight> =
            std::mem::take(&mut self.in_flight).into_values().flatten().collect();
        for i in (1..ops.len()).rev() {
            ops.swap(i, self.random.below(i as u64 + 1) as usize);
        }
        ops
    }

    /// Adds a file to the world, if it is not there; its present content is durable. The index is valid until the power
    /// is cut.
    fn add_file(&mut self, fd: impl AsFd) -> io::Result<usize> {
        let stat = fstat(&fd)?;
        let identity = (stat.st_dev, stat.st_ino);
        if let Some(i) = self.files.iter().position(|(other, _)| *other == identity) {
            return Ok(i);
        }
        // A descriptor of our own has none of the caller's flags, and may write a file that was opened read-only.
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        let file = match File::options().read(true).write(true).open(&path) {
            // The file cannot be written.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => File::open(path)?,
            file => file?,
        };
        let mut file = SimFile::new(file)?;
        if let Some((_, device)) = self.devices.iter().find(|(other, _)| *other == identity) {
            file.become_device(*device)?;
        }
        self.files.push((identity, file));
        Ok(self.files.len() - 1)
    }
}

/// The clock of a simulated machine.
struct SimClock(AtomicU64);

impl SimClock {
    fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clock for SimClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn sleep(&self, how_long: Duration) {
        self.advance(how_long.as_nanos() as u64);
    }
}
