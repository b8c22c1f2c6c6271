//! A disk that is served, whichever frontends it has.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ferrite_disk::ServiceEngine;
use ferrite_disk::{Disk, DiskIdentity, Port, SyncWitness};
use ferrite_io::clock::Clock;
use ferrite_io::shm::Shm;

use super::full::{Full, OnFull, is_full};
use super::gate::{Gate, Side, Wanted};
use super::turns::Turns;
use crate::log_limit::{LogLimits, limited};
use crate::waker::Waker;

/// Bytes of the file that remembers a failed flush.
const LATCH_BYTES: usize = 64;

/// Most paths of a device: two frontends with as many queues as a frontend can have.
const SEATS: usize = 128;

/// A frontend that has to know which image it serves.
pub trait Heir: Send + Sync {
    /// From now on it is this one. Nobody has written to it as the device's disk. It cannot fail, and
    /// must not ask for the disk.
    fn serves(&self, image: &DiskIdentity);

    /// The device has a disk again, or none for ever.
    fn goes_on(&self) {}
}

/// The disk of a device.
pub(super) enum Slot {
    Here(Arc<Disk>),
    /// It is the parker's.
    Away,
    /// The parker gave none back.
    Lost,
}

/// A flush has failed: what the medium holds is not what was answered. Linux takes a failed empty flush for a
/// disk without a cache and goes on, so all later writes fail until the disk is attached again (blkif.md 2,
/// rule 3).
#[derive(Default)]
struct Latch {
    is_set: AtomicBool,
    /// Where that is remembered for successors.
    file: OnceLock<Shm>,
}

impl Latch {
    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// `true` the first time.
    fn set(&self) -> bool {
        if let Some(file) = self.file.get() {
            file.store_u32(0, 1);
        }
        !self.is_set.swap(true, Ordering::SeqCst)
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
    /// Where times come from.
    pub clock: Arc<dyn Clock>,
    /// What may be logged about it.
    pub log_limits: LogLimits,
    /// Whether a flush has failed.
    failed: Arc<Latch>,
    /// Somebody sees to it that metadata gets to the medium.
    saving: AtomicBool,
    /// What requests do where there is no space.
    pub(super) full: Full,
    /// What is served.
    pub(super) slot: Mutex<Slot>,
    /// The slot has changed, or a path rests.
    pub(super) changed: Condvar,
    /// Who is told which image that is.
    heirs: Mutex<Vec<Weak<dyn Heir>>>,
    /// What a path has that rests.
    no_disk: Arc<Disk>,
    /// How discards give way to everything else.
    pub(super) discards: Turns,
    /// Exclusion across all paths.
    gate: Gate,
    /// Requests of a predecessor's that were not begun again yet, while the turn is kept for them.
    expected: AtomicUsize,
    /// What wakes them, by seat.
    wakers: Mutex<Vec<Option<Arc<Waker>>>>,
    /// What the disk's own work is done with.
    service: OnceLock<ServiceEngine>,
}

/// A path's place among those of its device, as long as it lives.
pub(super) struct Seat {
    device: Arc<Device>,
    index: usize,
}

/// The duty to bring a disk's metadata to its medium, of one queue at a time.
pub(super) struct Saving(Arc<Device>);

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.saving.store(false, Ordering::SeqCst);
        // Who had the duty asks again after this whether anything is dirty: see `take_saving`.
        fence(Ordering::SeqCst);
    }
}

impl Device {
    /// A device in good order.
    pub fn new(disk: Disk, clock: Arc<dyn Clock>) -> Device {
        let failed = Arc::<Latch>::default();
        watch(&failed, &disk);
        Device {
            clock,
            log_limits: LogLimits::default(),
            failed,
            saving: AtomicBool::new(false),
            full: Full::default(),
            slot: Mutex::new(Slot::Here(Arc::new(disk))),
            changed: Condvar::new(),
            heirs: Mutex::default(),
            no_disk: Arc::new(Disk::nothing()),
            discards: Turns::default(),
            gate: Gate::new(SEATS),
            expected: AtomicUsize::new(0),
            wakers: Mutex::new(vec![None; SEATS]),
            service: OnceLock::new(),
        }
    }

    /// Its guests are served from now on, with such engines: what the disk does by itself begins.
    pub fn begin_service(&self, engine: &ServiceEngine) {
        let engine = self.service.get_or_init(|| engine.clone());
        if let Slot::Here(disk) = &*self.slot() {
            self.tend(disk, engine);
        }
    }

    /// The next disk does so, too.
    pub(super) fn serve_on(&self, disk: &Disk) {
        if let Some(engine) = self.service.get() {
            self.tend(disk, engine);
        }
    }

    fn tend(&self, disk: &Disk, engine: &ServiceEngine) {
        if let Err(e) = disk.begin_service(engine) {
            let limit = &self.log_limits.storage;
            limited!(warn, limit, self.clock.now_ns(), "the disk does no work of its own: {e}");
        }
    }

    /// Whether writes are to be refused.
    pub fn flush_has_failed(&self) -> bool {
        self.failed.is_set()
    }

    /// Refuses all writes from now on; `true` the first time.
    pub fn latch_flush_failure(&self) -> bool {
        self.failed.set()
    }

    /// The device goes on with this disk.
    pub(super) fn watch(&self, disk: &Disk) {
        watch(&self.failed, disk);
    }

    /// A flush whose failure is not forgotten: the kernel reports a lost write once, to one caller,
    /// and then never again. So one that succeeds after another has failed says nothing.
    pub(crate) async fn flush(&self, disk: &Disk, port: &Port) -> io::Result<()> {
        let result = disk.flush(port).await;
        if result.is_ok() && self.flush_has_failed() {
            return Err(io::Error::other("an earlier flush has failed"));
        }
        if let Err(e) = &result
            && !self.is_passing(disk, e)
        {
            self.failed.refuse_writes(e);
        }
        result
    }

    /// Whether a flush that has failed of this may be done again: metadata had no space, are dirty as
    /// before, and no sync has failed.
    fn is_passing(&self, disk: &Disk, e: &io::Error) -> bool {
        self.full.policy == OnFull::Wait && is_full(e) && !disk.is_faulty()
    }

    /// A request has failed, or the disk changes hands. If a sync has failed that no flush has asked
    /// for (a write that takes space makes one), it counts as a failed flush.
    pub(crate) fn hear(&self, disk: &Disk) {
        if disk.is_faulty() && !self.flush_has_failed() {
            self.failed.refuse_writes(&io::Error::other("a sync of the image has failed"));
        }
    }

    /// Tells this one of each image that the device goes on with, as long as it is there.
    pub fn add_heir<H: Heir + 'static>(&self, heir: &Arc<H>) {
        let heir: Weak<dyn Heir> = Arc::downgrade(heir) as Weak<H>;
        let mut heirs = self.heirs.lock().unwrap_or_else(PoisonError::into_inner);
        heirs.retain(|heir| heir.strong_count() > 0);
        heirs.push(heir);
    }

    /// Tells all of them.
    pub(super) fn tell_heirs(&self, image: &DiskIdentity) {
        let heirs = self.heirs.lock().unwrap_or_else(PoisonError::into_inner);
        heirs.iter().filter_map(Weak::upgrade).for_each(|heir| heir.serves(image));
    }

    /// Tells all of them that the device is not parked any more.
    pub(super) fn heirs_go_on(&self) {
        let heirs = self.heirs.lock().unwrap_or_else(PoisonError::into_inner);
        heirs.iter().filter_map(Weak::upgrade).for_each(|heir| heir.goes_on());
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<Option<Arc<Waker>>>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more path, on the thread that this wakes.
    ///
    /// # Errors
    /// There are too many.
    pub(super) fn join(self: &Arc<Device>, side: Side, waker: Arc<Waker>) -> io::Result<Seat> {
        let mut wakers = self.wakers();
        let index = self.gate.join(side).ok_or_else(|| {
            io::Error::other(format!("the disk has {SEATS} queues, and no more can be served"))
        })?;
        wakers[index] = Some(waker);
        Ok(Seat { device: self.clone(), index })
    }

    pub(super) fn wake_all(&self) {
        self.wakers().iter().flatten().for_each(|waker| waker.wake());
    }

    /// Asks all paths to rest; `false` if they were asked already.
    pub(super) fn ask_to_rest(&self) -> bool {
        let asked = self.gate.park();
        self.wake_all();
        asked
    }

    /// The opposite.
    pub(super) fn let_go_on(&self) {
        self.gate.unpark();
        self.wake_all();
    }

    /// A predecessor has left requests of this side: until they are begun again, the other side has to
    /// wait. To be called before there is a path.
    pub(crate) fn keep_for(&self, side: Side) {
        self.gate.keep_for(side);
    }

    /// So many requests of this side will be [begun again](Self::begins_again), and no others.
    pub(crate) fn expects(&self, side: Side, unanswered: usize) {
        if self.gate.is_kept_for(side) {
            self.expected.store(unanswered, Ordering::SeqCst);
            if unanswered == 0 {
                self.share(side);
            }
        }
    }

    /// One of them was.
    pub(crate) fn begins_again(&self, side: Side) {
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

    /// The duty to save what no flush has asked for, if there is something and nobody has it.
    pub(super) fn take_saving(self: &Arc<Device>, disk: &Disk) -> Option<Saving> {
        if !disk.is_dirty() {
            return None;
        }
        // Together with that of who gives the duty back: one of the two sees what the other did.
        fence(Ordering::SeqCst);
        let free =
            !self.saving.load(Ordering::Relaxed) && !self.saving.swap(true, Ordering::SeqCst);
        free.then(|| Saving(self.clone()))
    }

    /// From now on remembers a failed flush in this file, which outlives the process. Does nothing
    /// after that was done once.
    ///
    /// # Errors
    /// The file system's.
    pub fn remember_in(&self, path: &Path) -> io::Result<()> {
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
        // The caller serves a device once.
        let _ = self.failed.file.set(latch);
        // Another disk's sync may have failed before there was a file, or while it was made.
        if self.failed.is_set() {
            self.failed.set();
        }
        Ok(())
    }
}

/// The next process has to know of a failed sync, whoever has asked for it (blkif.md 2, rule 3), and the syncs
/// of other disks may be this one's, too (processes.md 10, rule 11).
fn watch(failed: &Arc<Latch>, disk: &Disk) {
    let failed: Weak<dyn SyncWitness> = Arc::downgrade(failed) as Weak<Latch>;
    disk.witness_syncs(failed);
}

impl Seat {
    /// Below that of all seats; no other path of the device has it now.
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

    /// As [`enter`](Self::enter), for what was taken before.
    pub(super) fn go_on(&self) -> bool {
        self.device.gate.go_on(self.index)
    }

    /// It could not enter, and is idle. It is woken when it may try again.
    pub(super) fn wish(&self) {
        if self.device.gate.wish(self.index) {
            self.device.wake_all();
        }
    }

    /// Whether no other guest is to be heeded.
    pub(super) fn is_at_home(&self) -> bool {
        self.device.gate.is_at_home(self.index)
    }

    /// Nothing of the path is under way, but what `waits` to be alone or for space; whoever waits for that
    /// is woken.
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

impl Drop for Seat {
    fn drop(&mut self) {
        self.device.wakers()[self.index] = None;
        self.device.gate.forfeit(self.index);
        self.device.wake_all();
        self.device.changed.notify_all();
    }
}
