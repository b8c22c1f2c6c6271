//! A disk that is exchanged under its frontends.
//!
//! [`Device::park`] has every path end its requests and rest: it takes no requests, and has closed
//! the disk and its files. Rings, tables and connections stay. The parker then owns the [`Disk`]
//! and makes another of it (other layers, another size, other files). [`Away::go_on_with`] gives
//! that to the paths. Meanwhile the guest's requests wait on its rings.
//!
//! The steps, and the state that a death in between leaves:
//! 1. `PARK` in the gate's word: no path takes requests (`gate.rs`). Requests that were taken end
//!    as always.
//! 2. A path with nothing in flight closes its files and rests. A request that waits for space is
//!    not in flight (blkif.md 2.2): it is tried again on the next disk.
//! 3. All paths rest: the parker takes the device's disk. The in-flight table has nothing in
//!    flight, except for requests of a predecessor that have not begun again.
//! 4. The parker changes the disk, in an order that a death may interrupt.
//! 5. The frontends are told the next image ([`Successor`](super::device::Successor)): the
//!    in-flight table names it. So a device is not parked before its frontends serve it.
//! 6. The device gets the next disk, and the gate's word is open: the paths load it and go on.
//!
//! Before step 5, no guest has written to the next disk. After a death the toolstack removes it,
//! makes a parent writable again (`chmod u+w`), and restarts with the old image. After step 5, it
//! restarts with the new image. The table says which one (`blkif/inflight/image.rs`): any other is
//! refused.

use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, Mark, Port, Reader};
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;

use super::RequestPath;
use super::device::{Device, Slot};

/// How often a parker checks whether all copies of the disk are gone.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Why a device was not parked, and goes on as before.
#[derive(Debug, thiserror::Error)]
pub enum NotParked {
    /// Another parker has the device.
    #[error("another change of this disk is under way; try again when it has ended")]
    Busy,
    /// Requests have not ended in time: the storage does not answer, or is too slow.
    #[error(
        "requests that are under way have not ended within {0:?}; the disk goes on as before. \
         Check its storage (dmesg), then try again"
    )]
    NotInTime(Duration),
    /// An earlier parker has lost the disk.
    #[error("the disk is gone: {0}")]
    Gone(io::Error),
}

/// Why paths cannot go on with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// Its end is before sectors that guests know.
    #[error("it has {is} sectors, and its guest knows of {was}; a disk cannot shrink in use")]
    Smaller {
        /// Sectors of the old disk, of 512 bytes.
        was: u64,
        /// Sectors of the next disk.
        is: u64,
    },
    /// Guests write to it, and it is read-only.
    #[error("it is read-only, and its guest writes to it")]
    ReadOnly,
    /// Guests may only read, and it is writable (threats.md T10).
    #[error("it is open for writing, and its guest may only read it; open it for reading only")]
    Writable,
    /// Its blocks are larger. A request of the offered size, with the blocks around it, would find
    /// no buffer.
    #[error("its blocks have {is} bytes, and those of the disk before it had {was}")]
    Blocks {
        /// Bytes of the old disk's blocks.
        was: usize,
        /// Bytes of the next disk's blocks.
        is: usize,
    },
    /// It can be used by one queue at a time, and the guest may have several.
    #[error(
        "its server does not keep several connections consistent (no multi-conn), and its guest may \
         use several queues; let the server allow it (qemu-nbd --shared=8), or attach it anew"
    )]
    OneQueue,
    /// The engines were chosen for the other kind of disk.
    #[error("only one of the two disks is served by NVMe commands (--engine)")]
    Engine,
    /// Its identity cannot be read, so it could not be recorded for successors.
    #[error("its image cannot be examined: {0}")]
    Unknown(io::ErrorKind),
}

/// The properties that the next disk has to match.
#[derive(Clone, Copy)]
struct Traits {
    sectors: u64,
    read_only: bool,
    block_bytes: usize,
    passthrough: bool,
    one_queue: bool,
    /// Not a demand: the next disk keeps its space, too.
    keeps_allocated: bool,
}

impl Traits {
    fn of(disk: &Disk) -> Traits {
        Traits {
            sectors: disk.sectors(),
            read_only: disk.read_only(),
            block_bytes: disk.block_bytes() as usize,
            passthrough: disk.passthrough(),
            one_queue: disk.one_queue(),
            keeps_allocated: disk.keeps_allocated(),
        }
    }

    /// Why a disk with these properties cannot follow. `None`: it can.
    fn keeps_out(&self, next: &Traits) -> Option<Unfit> {
        if next.sectors < self.sectors {
            Some(Unfit::Smaller { was: self.sectors, is: next.sectors })
        } else if next.read_only != self.read_only {
            Some(if next.read_only { Unfit::ReadOnly } else { Unfit::Writable })
        } else if next.block_bytes > self.block_bytes {
            Some(Unfit::Blocks { was: self.block_bytes, is: next.block_bytes })
        } else if next.one_queue && !self.one_queue {
            Some(Unfit::OneQueue)
        } else {
            (next.passthrough != self.passthrough).then_some(Unfit::Engine)
        }
    }
}

/// A disk that paths cannot go on with.
pub struct Refused {
    /// The parked device, whose guests still wait.
    pub away: Away,
    /// The refused disk.
    pub disk: Disk,
    /// The reason.
    pub unfit: Unfit,
}

/// A parked device. If it is dropped without a disk, the device has none, and its frontends fail as
/// if their backend had died.
#[must_use = "guests wait until their disk is back"]
pub struct Away {
    device: Arc<Device>,
    /// The properties of the disk that was taken.
    was: Traits,
    /// Whether another disk was given back: the slot may be the next parker's then.
    done: bool,
}

impl Device {
    pub(super) fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, as soon as it is not parked. It is for callers other than paths, which have their
    /// own copy. Do not keep it: a parker waits until it is dropped.
    ///
    /// # Errors
    /// A parker has lost the disk.
    pub fn disk(&self) -> io::Result<Arc<Disk>> {
        self.with_disk(Arc::clone)
    }

    /// The disk, without waiting. `None`: a parker has it. See [`disk`](Self::disk).
    ///
    /// # Errors
    /// A parker has lost the disk.
    pub fn disk_now(&self) -> io::Result<Option<Arc<Disk>>> {
        match &*self.slot() {
            Slot::Here(disk) => Ok(Some(disk.clone())),
            Slot::Away => Ok(None),
            Slot::Lost => Err(lost()),
        }
    }

    /// Has all paths rest, and takes the disk. It waits for `patience` at most. Guests wait from
    /// now until [`Away::go_on_with`].
    ///
    /// # Errors
    /// The device goes on as before.
    pub fn park(self: &Arc<Device>, patience: Duration) -> Result<(Disk, Away), NotParked> {
        let end = Instant::now() + patience;
        if !self.ask_to_rest() {
            return Err(NotParked::Busy);
        }
        let mut slot = self.slot();
        loop {
            if let Slot::Lost = &*slot {
                self.end_parking();
                return Err(NotParked::Gone(lost()));
            }
            if self.all_rest() {
                match std::mem::replace(&mut *slot, Slot::Away) {
                    Slot::Here(disk) => match Arc::try_unwrap(disk) {
                        Ok(disk) => {
                            // A failed sync of this disk has to be recorded now, since the next
                            // disk does not know it.
                            self.check_failed_sync(&disk);
                            let away = Away::from(self, &disk);
                            return Ok((disk, away));
                        }
                        Err(disk) => *slot = Slot::Here(disk),
                    },
                    other => *slot = other,
                }
            }
            let Some(left) = end.checked_duration_since(Instant::now()) else {
                drop(slot);
                self.end_parking();
                return Err(NotParked::NotInTime(patience));
            };
            let waited = self.changed.wait_timeout(slot, left.min(LOOK_AGAIN));
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Calls `work` with the disk, as soon as it is not parked. It cannot be parked meanwhile.
    ///
    /// # Errors
    /// A parker has lost the disk.
    pub fn with_disk<T>(&self, work: impl FnOnce(&Arc<Disk>) -> T) -> io::Result<T> {
        let mut slot = self.slot();
        loop {
            match &*slot {
                Slot::Here(disk) => return Ok(work(disk)),
                Slot::Lost => return Err(lost()),
                Slot::Away => {
                    slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn put(&self, slot: Slot) {
        *self.slot() = slot;
        self.changed.notify_all();
        self.end_parking();
        self.resume_successors();
    }
}

fn lost() -> io::Error {
    io::Error::other("a change of the disk has failed, and nothing was left to serve")
}

impl Away {
    fn from(device: &Arc<Device>, disk: &Disk) -> Away {
        Away { device: device.clone(), was: Traits::of(disk), done: false }
    }

    /// Lets all paths go on with this disk.
    ///
    /// # Errors
    /// The disk is refused and comes back. The guests still wait.
    pub fn go_on_with(mut self, disk: Disk) -> Result<(), Box<Refused>> {
        let unfit = match (self.was.keeps_out(&Traits::of(&disk)), disk.identity()) {
            (None, Ok(image)) => {
                if self.was.keeps_allocated {
                    disk.keep_allocated();
                }
                self.device.tell_successors(&image);
                // After this the slot may be the next parker's.
                self.done = true;
                self.device.serve_on(&disk);
                self.device.watch(&disk);
                self.device.put(Slot::Here(Arc::new(disk)));
                return Ok(());
            }
            (Some(unfit), _) => unfit,
            (None, Err(e)) => Unfit::Unknown(e.kind()),
        };
        Err(Box::new(Refused { away: self, disk, unfit }))
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        if !self.done {
            self.device.put(Slot::Lost);
        }
    }
}

/// The disk of one path.
pub(super) struct Medium {
    pub(super) disk: Arc<Disk>,
    pub(super) port: Port,
    /// Reports the end of operations to a disk that needs it.
    reader: Option<Reader>,
    /// The mark of the mapping under way.
    mapping: Option<Mark>,
    /// Whether data that were read are checked.
    pub(super) has_checks: bool,
    /// Whether a lookup in the disk's metadata can miss memory.
    pub(super) has_metadata: bool,
    /// Bytes of the disk's blocks.
    pub(super) block_bytes: usize,
    /// Whether the path rests and has no disk.
    resting: bool,
}

impl Medium {
    pub(super) fn load(
        disk: Arc<Disk>,
        reactor: &mut Reactor,
        scratch: Scratch,
    ) -> io::Result<Medium> {
        let backings = disk.backings().into_iter();
        let files: Vec<_> =
            backings.map(|b| reactor.add(b, &scratch)).collect::<io::Result<_>>()?;
        let port = Port { io: reactor.io(), files: files.into(), scratch };
        let block_bytes = disk.block_bytes() as usize;
        Ok(Medium {
            reader: disk.reader(),
            has_checks: disk.has_checks(),
            has_metadata: disk.has_metadata(),
            disk,
            port,
            mapping: None,
            block_bytes,
            resting: false,
        })
    }

    pub(super) fn is_resting(&self) -> bool {
        self.resting
    }

    /// Begins to ask for places of the disk, until [`end_mapping`](Self::end_mapping).
    pub(super) fn begin_mapping(&mut self) {
        self.mapping = self.reader.as_ref().map(Reader::enter);
    }

    pub(super) fn end_mapping(&mut self) {
        if let Some(mark) = self.mapping.take() {
            self.unmap(mark);
        }
    }

    /// Keeps the places of a request's operations until [`unmap`](Self::unmap).
    pub(super) fn keep_mapped(&self) -> Option<Mark> {
        Some(self.reader.as_ref()?.keep(self.mapping?))
    }

    pub(super) fn unmap(&self, mark: Mark) {
        if let Some(reader) = &self.reader {
            reader.leave(mark);
        }
    }
}

impl RequestPath {
    /// Rests while the device is parked, as soon as nothing is in flight. Goes on with the device's
    /// disk afterwards. Call it at the beginning of each turn.
    ///
    /// # Errors
    /// The engine cannot add or remove a file, or there is no disk any more. The path cannot go on.
    pub fn follow(&mut self) -> io::Result<()> {
        if self.shared.gives_up() {
            self.give_up_waiting();
        }
        match (self.member.gate().is_parking(), self.medium.resting) {
            (false, false) | (true, true) => Ok(()),
            (true, false) => self.rest(),
            (false, true) => self.load(),
        }
    }

    fn rest(&mut self) -> io::Result<()> {
        let waiting = self.flights.set_aside() + self.behind_space();
        let in_flight = self.flights.in_use() - waiting;
        if in_flight > 0 || self.saver.is_under_way() {
            return Ok(());
        }
        self.reactor.clear_files()?;
        self.saver.forget();
        self.medium.reader = None;
        self.medium.disk = self.member.device().no_disk();
        self.medium.port.files = [].into();
        self.medium.resting = true;
        self.member.rest();
        Ok(())
    }

    fn load(&mut self) -> io::Result<()> {
        let disk = match &*self.member.device().slot() {
            Slot::Here(disk) => disk.clone(),
            Slot::Lost => return Err(lost()),
            // The device is parked again already.
            Slot::Away => return Ok(()),
        };
        let scratch = self.medium.port.scratch.clone();
        self.medium = Medium::load(disk, &mut self.reactor, scratch)?;
        self.saver.remember(&self.medium);
        // A path that is not idle does not count as resting.
        self.leave_if_idle();
        self.save_soon();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ferrite_disk::OpenOptions;
    use ferrite_host::clock::SystemClock;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn device() -> Arc<Device> {
        let disk = Disk::open("null:1M", &OpenOptions::default()).unwrap();
        Arc::new(Device::new(disk, SystemClock::shared()))
    }

    #[test]
    fn who_has_given_a_disk_back_does_not_take_it_from_the_next_who_parks() {
        let device = device();
        let (disk, mut first) = device.park(PATIENCE).unwrap();
        // `go_on_with` sets this before it returns, and another parker need not wait for that.
        first.done = true;
        device.put(Slot::Here(Arc::new(disk)));
        let (disk, second) = device.park(PATIENCE).unwrap();
        drop(first);
        assert!(matches!(&*device.slot(), Slot::Away));
        assert!(matches!(device.park(PATIENCE), Err(NotParked::Busy)));
        second.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
        assert!(device.disk().is_ok());
    }

    const WAS: Traits = Traits {
        sectors: 100,
        read_only: false,
        block_bytes: 512,
        passthrough: false,
        one_queue: false,
        keeps_allocated: false,
    };

    #[test]
    fn the_next_disk_is_no_smaller_and_of_the_same_kind() {
        assert_eq!(WAS.keeps_out(&Traits { sectors: 101, ..WAS }), None);
        let smaller = Some(Unfit::Smaller { was: 100, is: 99 });
        assert_eq!(WAS.keeps_out(&Traits { sectors: 99, ..WAS }), smaller);
        let by_commands = Traits { passthrough: true, ..WAS };
        assert_eq!(WAS.keeps_out(&by_commands), Some(Unfit::Engine));
        assert_eq!(by_commands.keeps_out(&WAS), Some(Unfit::Engine));
        let of_one_queue = Traits { one_queue: true, ..WAS };
        assert_eq!(WAS.keeps_out(&of_one_queue), Some(Unfit::OneQueue));
        assert_eq!(of_one_queue.keeps_out(&WAS), None);
    }

    #[test]
    fn the_next_disk_has_no_larger_blocks_than_requests_were_offered_for() {
        let larger = Traits { block_bytes: 4096, ..WAS };
        let unfit = Some(Unfit::Blocks { was: 512, is: 4096 });
        assert_eq!(WAS.keeps_out(&larger), unfit);
        assert_eq!(larger.keeps_out(&WAS), None);
    }

    #[test]
    fn a_guest_that_may_only_read_gets_no_disk_that_can_be_written() {
        let read_only = Traits { read_only: true, ..WAS };
        assert_eq!(read_only.keeps_out(&WAS), Some(Unfit::Writable));
        assert_eq!(WAS.keeps_out(&read_only), Some(Unfit::ReadOnly));
        assert_eq!(read_only.keeps_out(&read_only), None);
    }
}
