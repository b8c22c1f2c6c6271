//! A disk that is served, with any number of frontends.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ferrite_disk::ServiceEngine;
use ferrite_disk::{Disk, DiskIdentity, Port, Raw, SyncWitness};
use ferrite_host::clock::Clock;
use ferrite_host::shm::Shm;
use rustix::io::Errno;

use super::full::{Full, OnFull, is_full};
use super::gate::{Gate, Side, Wanted};
use super::limit::{Limiter, Limits};
use super::ranges::Ranges;
use super::turns::Turns;
use crate::log_limit::{LogLimits, limited};
use crate::waker::Waker;

/// Bytes of the file that records a failed flush.
const LATCH_BYTES: usize = 64;

/// The value in the file: a flush has failed (1), or another host has taken the LUN.
const TAKEN: u32 = 2;

/// Most paths of a device: two frontends with as many queues as a frontend can have.
const MAX_PATHS: usize = 128;

/// Is told each image that a device serves, and keeps it on record for a successor.
pub trait Successor: Send + Sync {
    /// The device serves this image from now on, and nothing was written to it by the device yet.
    /// It cannot fail, and must not ask for the disk.
    fn serves(&self, image: &DiskIdentity);

    /// The device has a disk again, or none for ever.
    fn goes_on(&self) {}
}

/// The disk of a device.
pub(super) enum Slot {
    Here(Arc<Disk>),
    /// The parker has the disk.
    Away,
    /// The parker has not given a disk back.
    Lost,
}

/// The latch of a failed flush: the medium does not hold what was answered. Linux takes a failed
/// empty flush for a disk without a cache and goes on. So all later writes fail until the disk is
/// attached again (blkif.md 2, rule 3).
#[derive(Default)]
struct Latch {
    is_set: AtomicBool,
    /// Another host has the LUN: nothing succeeds, reads neither.
    is_taken: AtomicBool,
    /// The file that records the failure for successors.
    file: OnceLock<Shm>,
}

impl Latch {
    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Sets the latch. Returns whether it was not set before.
    fn set(&self) -> bool {
        if let Some(file) = self.file.get().filter(|file| file.load_u32(0) == 0) {
            file.store_u32(0, 1);
        }
        !self.is_set.swap(true, Ordering::SeqCst)
    }

    /// Sets the latch for reads, too. Returns whether it was not set so before.
    fn set_taken(&self) -> bool {
        self.set();
        if let Some(file) = self.file.get() {
            file.store_u32(0, TAKEN);
        }
        !self.is_taken.swap(true, Ordering::SeqCst)
    }

    fn refuse_writes(&self, e: &io::Error) {
        if self.set() {
            tracing::error!(
                "flush failed: {e}; what was written may be lost, and the guest cannot be told by \
                 a flush alone, so all its writes fail until the disk is attached again. Check \
                 the storage, then detach and attach the disk"
            );
        }
    }
}

impl SyncWitness for Latch {
    fn sync_has_failed(&self, e: &io::Error) {
        self.refuse_writes(e);
    }
}

/// A disk that is served, from attach to detach.
pub struct Device {
    /// The clock of all times.
    pub clock: Arc<dyn Clock>,
    /// The limits of log lines about the disk.
    pub log_limits: LogLimits,
    /// The limits of requests and bytes in a second.
    pub limiter: Limiter,
    /// Whether a flush has failed.
    failed: Arc<Latch>,
    /// Whether a path is saving metadata to the medium.
    saving: AtomicBool,
    /// The policy for requests that find no space.
    pub(super) full: Full,
    /// The disk that is served.
    pub(super) slot: Mutex<Slot>,
    /// Signalled when the slot changes or a path rests.
    pub(super) changed: Condvar,
    /// They are told which image the device serves.
    successors: Mutex<Vec<Weak<dyn Successor>>>,
    /// The disk of a resting path.
    no_disk: Arc<Disk>,
    /// Makes discards give way to everything else.
    pub(super) discards: Turns,
    /// The ranges that requests have to themselves while they write them.
    pub(super) ranges: Ranges,
    /// Excludes paths from the disk while one request needs it alone.
    gate: Gate,
    /// A predecessor's requests that have not begun again yet, while their side keeps the turn.
    expected: AtomicUsize,
    /// The wakers of the paths, by index in the gate.
    wakers: Mutex<Vec<Option<Arc<Waker>>>>,
    /// The engines for the disk's background work.
    service: OnceLock<ServiceEngine>,
}

/// The registration of a path with its device.
pub(super) struct Member {
    device: Arc<Device>,
    index: usize,
}

/// Held by the one path that saves a disk's metadata to its medium.
pub(super) struct Saving(Arc<Device>);

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.saving.store(false, Ordering::SeqCst);
        // The path that held this looks after it whether anything is dirty: see `claim_saving`.
        fence(Ordering::SeqCst);
    }
}

impl Device {
    /// A device whose flushes have not failed.
    pub fn new(disk: Disk, clock: Arc<dyn Clock>) -> Device {
        let failed = Arc::<Latch>::default();
        watch(&failed, &disk);
        Device {
            clock,
            log_limits: LogLimits::default(),
            limiter: Limiter::default(),
            failed,
            saving: AtomicBool::new(false),
            full: Full::default(),
            slot: Mutex::new(Slot::Here(Arc::new(disk))),
            changed: Condvar::new(),
            successors: Mutex::default(),
            no_disk: Arc::new(Disk::nothing()),
            discards: Turns::default(),
            ranges: Ranges::default(),
            gate: Gate::new(MAX_PATHS),
            expected: AtomicUsize::new(0),
            wakers: Mutex::new(vec![None; MAX_PATHS]),
            service: OnceLock::new(),
        }
    }

    /// Starts the disk's background work with these engines, as its guests are served from now on.
    pub fn begin_service(&self, engine: &ServiceEngine) {
        let engine = self.service.get_or_init(|| engine.clone());
        if let Slot::Here(disk) = &*self.slot() {
            self.start_background_work(disk, engine);
        }
    }

    /// Starts the background work of the next disk, if the work was started before.
    pub(super) fn serve_on(&self, disk: &Disk) {
        if let Some(engine) = self.service.get() {
            self.start_background_work(disk, engine);
        }
    }

    fn start_background_work(&self, disk: &Disk, engine: &ServiceEngine) {
        if let Err(e) = disk.begin_service(engine) {
            let limit = &self.log_limits.storage;
            limited!(warn, limit, self.clock.now_ns(), "the disk does no work of its own: {e}");
        }
    }

    /// Sets the limits of requests and bytes in a second. Requests that wait are looked at again.
    pub fn set_limits(&self, limits: &Limits) {
        self.limiter.set(limits, self.clock.now_ns());
        self.wake_all();
    }

    /// Whether writes are refused.
    pub fn flush_has_failed(&self) -> bool {
        self.failed.is_set()
    }

    /// Whether another host has taken the disk's LUN: all requests fail until the disk is attached again.
    pub fn is_taken(&self) -> bool {
        self.failed.is_taken.load(Ordering::SeqCst)
    }

    /// Fails all requests from now on, if the error says that another host has taken the disk's LUN.
    pub(crate) fn check_taken(&self, disk: &Disk, e: &io::Error) {
        let is_conflict = Errno::from_io_error(e) == Some(Errno::BADE);
        if is_conflict && self.failed.set_taken() {
            let holder = disk.media().into_iter().find_map(Raw::holder);
            let holder = holder.as_deref().unwrap_or("another host");
            tracing::error!(
                "{holder} has taken the LUN of this disk (reservation conflict): all its requests fail until it \
                 is attached again. End the guest here: what it has in memory is no longer what the disk has"
            );
        }
    }

    /// Refuses all writes from now on. Returns whether they were not refused before.
    pub fn latch_flush_failure(&self) -> bool {
        self.failed.set()
    }

    /// Watches the syncs of this disk, which the device serves from now on.
    pub(super) fn watch(&self, disk: &Disk) {
        watch(&self.failed, disk);
    }

    /// Flushes, and records a failure. The kernel reports a lost write once to one caller, and
    /// never again. So a flush that succeeds after a failed one proves nothing.
    pub(crate) async fn flush(&self, disk: &Disk, port: &Port) -> io::Result<()> {
        let result = disk.flush(port).await;
        if result.is_ok() && self.flush_has_failed() {
            return Err(io::Error::other("an earlier flush has failed"));
        }
        if let Err(e) = &result {
            self.check_taken(disk, e);
        }
        if let Err(e) = &result
            && !self.is_passing(disk, e)
        {
            self.failed.refuse_writes(e);
        }
        result
    }

    /// Whether a failed flush may be repeated: metadata found no space and are still dirty, and no
    /// sync has failed.
    fn is_passing(&self, disk: &Disk, e: &io::Error) -> bool {
        self.full.policy() == OnFull::Wait && is_full(e) && !disk.is_faulty()
    }

    /// Counts a failed sync as a failed flush, even if no flush requested it: a write that takes
    /// space makes one. It is called when a request fails or the disk changes hands.
    pub(crate) fn check_failed_sync(&self, disk: &Disk) {
        if disk.is_faulty() && !self.flush_has_failed() {
            self.failed.refuse_writes(&io::Error::other("a sync of the image has failed"));
        }
    }

    /// Tells `successor` each image that the device serves, while it exists.
    pub fn add_successor<H: Successor + 'static>(&self, successor: &Arc<H>) {
        let successor: Weak<dyn Successor> = Arc::downgrade(successor) as Weak<H>;
        let mut successors = self.successors.lock().unwrap_or_else(PoisonError::into_inner);
        successors.retain(|successor| successor.strong_count() > 0);
        successors.push(successor);
    }

    /// Tells all of them the next image.
    pub(super) fn tell_successors(&self, image: &DiskIdentity) {
        let successors = self.successors.lock().unwrap_or_else(PoisonError::into_inner);
        successors.iter().filter_map(Weak::upgrade).for_each(|successor| successor.serves(image));
    }

    /// Tells all of them that the device is not parked any more.
    pub(super) fn resume_successors(&self) {
        let successors = self.successors.lock().unwrap_or_else(PoisonError::into_inner);
        successors.iter().filter_map(Weak::upgrade).for_each(|successor| successor.goes_on());
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<Option<Arc<Waker>>>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a path, whose thread `waker` wakes.
    ///
    /// # Errors
    /// There are too many paths.
    pub(super) fn join(
        self: &Arc<Device>,
        side: Side,
        waker: Arc<Waker>,
        one_queue: bool,
    ) -> io::Result<Member> {
        let mut wakers = self.wakers();
        if one_queue && wakers.iter().any(Option::is_some) {
            let text = "the disk can be used by one queue or client at a time, and another one uses it: \
                        its server does not keep several connections consistent (no multi-conn). End \
                        the other use, or let the server allow it (qemu-nbd --shared=8)";
            return Err(io::Error::other(text));
        }
        let index = self.gate.join(side).ok_or_else(|| {
            io::Error::other(format!("the disk has {MAX_PATHS} queues, and no more can be served"))
        })?;
        wakers[index] = Some(waker);
        Ok(Member { device: self.clone(), index })
    }

    /// Wakes the paths of these members, if they have not ended.
    pub(super) fn wake(&self, members: &[usize]) {
        if members.is_empty() {
            return;
        }
        let wakers = self.wakers();
        members.iter().filter_map(|member| wakers[*member].as_ref()).for_each(|waker| waker.wake());
    }

    pub(crate) fn wake_all(&self) {
        self.wakers().iter().flatten().for_each(|waker| waker.wake());
    }

    /// Asks all paths to rest. Returns whether they were not asked before.
    pub(super) fn ask_to_rest(&self) -> bool {
        let asked = self.gate.park();
        self.wake_all();
        asked
    }

    /// Lets all paths go on.
    pub(super) fn end_parking(&self) {
        self.gate.unpark();
        self.wake_all();
    }

    /// Keeps the turn for this side, whose requests a predecessor has left: the other side waits
    /// until they have begun again. Call it before there is a path.
    pub(crate) fn keep_for(&self, side: Side) {
        self.gate.keep_for(side);
    }

    /// Sets the number of requests of this side that will be repeated: see
    /// [`count_replay`](Self::count_replay).
    pub(crate) fn expect_replays(&self, side: Side, unanswered: usize) {
        if self.gate.is_kept_for(side) {
            self.expected.store(unanswered, Ordering::SeqCst);
            if unanswered == 0 {
                self.share(side);
            }
        }
    }

    /// Counts one repeated request of this side.
    pub(crate) fn count_replay(&self, side: Side) {
        if self.gate.is_kept_for(side) && self.expected.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.share(side);
        }
    }

    fn share(&self, side: Side) {
        if self.gate.share(side) {
            self.wake_all();
        }
    }

    pub(super) fn is_parking(&self) -> bool {
        self.gate.is_parking()
    }

    pub(super) fn all_rest(&self) -> bool {
        self.gate.all_rest()
    }

    pub(super) fn no_disk(&self) -> Arc<Disk> {
        self.no_disk.clone()
    }

    /// Claims the saving of metadata that no flush has requested. `None`: there is nothing to save,
    /// or another path does it.
    pub(super) fn claim_saving(self: &Arc<Device>, disk: &Disk) -> Option<Saving> {
        if !disk.is_dirty() {
            return None;
        }
        // Pairs with the fence in `Saving::drop`: one of the two paths sees what the other did.
        fence(Ordering::SeqCst);
        let free =
            !self.saving.load(Ordering::Relaxed) && !self.saving.swap(true, Ordering::SeqCst);
        free.then(|| Saving(self.clone()))
    }

    /// Records a failed flush in this file from now on, which outlives the process. Further calls
    /// do nothing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn record_failed_flushes_in(&self, path: &Path) -> io::Result<()> {
        if self.failed.file.get().is_some() {
            return Ok(());
        }
        let latch = match Shm::open(path).ok().filter(|latch| latch.len() >= LATCH_BYTES) {
            Some(latch) => latch,
            None => Shm::create(path, LATCH_BYTES)?,
        };
        if latch.load_u32(0) != 0 {
            self.failed.is_set.store(true, Ordering::SeqCst);
        }
        if latch.load_u32(0) == TAKEN {
            self.failed.is_taken.store(true, Ordering::SeqCst);
        }
        // Only one thread calls this for a device.
        let _ = self.failed.file.set(latch);
        // Another disk's sync may have failed before the file existed.
        if self.failed.is_set() {
            self.failed.set();
        }
        Ok(())
    }
}

/// Watches a disk's syncs. The next process has to know of a failed sync, whatever has requested it
/// (blkif.md 2, rule 3). Syncs of other disks may be this one's, too (processes.md 10, rule 11).
fn watch(failed: &Arc<Latch>, disk: &Disk) {
    let failed: Weak<dyn SyncWitness> = Arc::downgrade(failed) as Weak<Latch>;
    disk.witness_syncs(failed);
}

impl Member {
    /// The member's index, which no other path of the device has now.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.device.gate
    }

    pub(super) fn enter(&self) -> bool {
        self.device.gate.enter(self.index)
    }

    /// As [`enter`](Self::enter), for requests that were taken before.
    pub(super) fn go_on(&self) -> bool {
        self.device.gate.go_on(self.index)
    }

    /// Has the path woken when it may try again. It could not enter, and is idle.
    pub(super) fn wish(&self) {
        if self.device.gate.wish(self.index) {
            self.device.wake_all();
        }
    }

    /// Whether there is no other guest to wait for.
    pub(super) fn is_at_home(&self) -> bool {
        self.device.gate.is_at_home(self.index)
    }

    /// Marks the path as idle, except for requests that wait (`waits`) to be alone or for space.
    /// Wakes the paths that wait for that.
    pub(super) fn leave(&self, waits: bool) {
        if let Some(Wanted { holder, parker, side }) = self.device.gate.leave(self.index, waits) {
            if side {
                self.device.wake_all();
            }
            if let Some(holder) = holder {
                let wakers = self.device.wakers();
                wakers[holder].as_ref().inspect(|waker| waker.wake());
            }
            if parker {
                self.device.changed.notify_all();
            }
        }
    }

    pub(super) fn close(&self) -> bool {
        self.device.gate.close(self.index)
    }

    pub(super) fn others_idle(&self) -> bool {
        self.device.gate.others_idle(self.index)
    }

    pub(super) fn open(&self) {
        self.device.gate.open(self.index);
        self.device.wake_all();
    }

    pub(super) fn rest(&self) {
        self.device.gate.rest(self.index);
        self.device.changed.notify_all();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.device.wakers()[self.index] = None;
        self.device.wake(&self.device.ranges.forget(self.index));
        self.device.gate.forfeit(self.index);
        self.device.wake_all();
        self.device.changed.notify_all();
    }
}
