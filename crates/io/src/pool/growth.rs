//! Memory that a pool has for a while, when storage is slow and its own keeps too few requests under way.
//!
//! The arena has the room from the beginning, which is address space and nothing more. The memory that
//! all pools of a host may have together is handed out in [`Shares`] of [`STEP_SLABS`] slabs.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::SLAB_BYTES;
use ferrite_host::shares::Shares;

/// Slabs of one share: the unit in which pools grow.
const STEP_SLABS: u32 = 8;
/// Bytes of one share.
pub const STEP_BYTES: usize = STEP_SLABS as usize * SLAB_BYTES;

/// Storage that answers sooner is kept busy by what a pool has anyway.
const SLOW_NS: u64 = 5_000_000;

/// The memory that the pools of this host may grow by together.
#[derive(Debug)]
pub struct HostMemory {
    shares: Shares,
    /// The shares that are claimed here.
    claimed: Mutex<Vec<u32>>,
}

impl HostMemory {
    /// So many bytes for all that open the file at `path`, which is made if it is not there. Each of
    /// them heeds the number that it was given itself.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(path: &Path, bytes: u64) -> io::Result<Arc<HostMemory>> {
        let units = u32::try_from(bytes / STEP_BYTES as u64).unwrap_or(u32::MAX);
        let shares = Shares::open(path, units)?;
        Ok(Arc::new(HostMemory { shares, claimed: Mutex::default() }))
    }

    /// Bytes that are claimed here.
    pub fn claimed_bytes(&self) -> usize {
        self.claimed().len() * STEP_BYTES
    }

    fn claimed(&self) -> MutexGuard<'_, Vec<u32>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(&self) -> Option<u32> {
        let mut claimed = self.claimed();
        let unit = self.shares.claim(&claimed)?;
        claimed.push(unit);
        Some(unit)
    }

    fn release(&self, unit: u32) {
        let mut claimed = self.claimed();
        claimed.retain(|u| *u != unit);
        if let Err(e) = self.shares.release(unit) {
            tracing::warn!("cannot give a share of the host's memory for data back: {e}");
        }
    }
}

/// How far a pool may grow.
#[derive(Clone, Debug)]
pub struct Growth {
    /// Bytes that could be in use at once; more are never taken.
    pub most_bytes: usize,
    /// And no more than this leaves.
    pub host: Arc<HostMemory>,
}

impl Growth {
    /// Bytes of address space for it behind so many that the pool has anyway, one slab of which is too
    /// short for the largest request.
    pub(super) fn room(&self, own_bytes: usize) -> usize {
        let whole = own_bytes.saturating_sub(SLAB_BYTES);
        self.most_bytes.saturating_sub(whole).next_multiple_of(STEP_BYTES)
    }
}

/// The memory that a pool has grown by.
pub(super) struct Grown {
    host: Arc<HostMemory>,
    /// The first slab's number, and how many steps there is room for.
    first: u32,
    steps: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A share for each step so far.
    units: Vec<u32>,
    /// When it was tried last, and how long storage took then.
    last: Option<(u64, u64)>,
}

impl Grown {
    pub(super) fn new(host: Arc<HostMemory>, first: u32, bytes: usize) -> Grown {
        Grown { host, first, steps: bytes / STEP_BYTES, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Doubles what the pool has, or as much of that as there is, if a request says that it is worth
    /// it; the new slabs. `own` is the number of slabs that it has anyway.
    pub(super) fn grow(&self, own: u32, began_ns: u64, ended_ns: u64) -> Range<u32> {
        let took_ns = ended_ns.saturating_sub(began_ns);
        if took_ns < SLOW_NS {
            return 0..0;
        }
        let mut state = self.state();
        if !state.is_worth_it(began_ns, took_ns) {
            return 0..0;
        }
        state.last = Some((ended_ns, took_ns));
        let before = state.units.len();
        let wanted = before + (own / STEP_SLABS).max(1) as usize;
        let most = (before + wanted).min(self.steps);
        while state.units.len() < most
            && let Some(unit) = self.host.claim()
        {
            state.units.push(unit);
        }
        self.slabs(before..state.units.len())
    }

    /// The new slabs so far.
    pub(super) fn all(&self) -> Range<u32> {
        self.slabs(0..self.state().units.len())
    }

    /// Gives all shares back: these slabs are not in use, and their memory is the system's.
    pub(super) fn give_back(&self) {
        let mut state = self.state();
        state.units.drain(..).for_each(|unit| self.host.release(unit));
        state.last = None;
    }

    fn slabs(&self, steps: Range<usize>) -> Range<u32> {
        let slab = |step: usize| self.first + step as u32 * STEP_SLABS;
        slab(steps.start)..slab(steps.end)
    }
}

impl State {
    /// Whether more memory would be of use, by a request that another one waited for. Storage that takes
    /// half as long again since it got more at once had enough before. Those are asked that
    /// began when what was added had been in use for a while.
    fn is_worth_it(&self, began_ns: u64, took_ns: u64) -> bool {
        self.last.is_none_or(|(at_ns, before_ns)| {
            began_ns >= at_ns + before_ns && took_ns < before_ns + before_ns / 2
        })
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl fmt::Debug for Grown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grown").field("steps", &self.steps).field("slabs", &self.all()).finish()
    }
}
