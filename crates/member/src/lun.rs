//! A LUN that has copies: each is a range of it, and the owner's process is its own server.
//!
//! No other process of any host writes to the LUN meanwhile: on this host it is open to one process, and it is reserved for this
//! host. A range is never used twice while the LUN is in the pool, and was zero before. Its first bytes have the copy's state, so
//! the rules are those of a server: the generation, the dirty regions and what the copy lacks are where the data are.
//!
//! The LUN stays reserved when its owner has ended, until the next one seizes it. The differences:
//! * R1: `Open` looks at the stored generation, seizes the LUN, and looks again ([`LunOpening`]). Nothing that older owners have
//!   sent is executed afterwards: their registrations are preempted, and their commands aborted. An owner of another host has no
//!   server that would end its session: it may answer reads as long as it relies on its last confirmation, and so long `Open` waits.
//! * R5: a session is confirmed by the LUN: the owner asks it for the key that holds its reservation.
//! * R10: each write is on the LUN's medium when it is answered, so no memory is lost with a host or a target.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_host::fence::{self, Direct, Refusal, Terms};
use ferrite_pool::wire::{BLOCK_BYTES, Extent, RANGE_UNIT, range_bytes, region_bytes};
use ferrite_pool::{DRIFT, Generation, LunHold, LunOpening, LunStep, OwnerId, Rules, TRUST};
use rustix::io::Errno;

use crate::Fault;
use crate::folder::{Files, hex};
use crate::medium::Medium;
use crate::state::{FileIdentity, Fixed, SLOT_BYTES, Slot, read};

/// The first bytes of a LUN.
const MAGIC: &[u8; 8] = b"FePoolLn";
const VERSION: u64 = 1;
/// Bytes of the header.
const HEAD_BYTES: usize = 4096;
const SUM_AT: usize = HEAD_BYTES - 32;
/// Which LUN is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunName {
    /// The pool.
    pub pool: [u8; 16],
    /// Its name in the pool, which stands for that of a server.
    pub server: String,
    /// Of this LUN's time in the pool.
    pub id: [u8; 16],
    /// Its own name, which it has on every host.
    pub wwid: String,
    /// Its device on the host that has added it.
    pub device: PathBuf,
}

/// The header: whose the LUN is.
fn head(pool: &[u8; 16], id: &[u8; 16]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_be_bytes());
    bytes.extend(pool);
    bytes.extend(id);
    bytes.resize(SUM_AT, 0);
    bytes.extend(blake3::hash(&bytes).as_bytes());
    bytes
}

/// A LUN that this process has open.
pub(crate) struct OpenLun {
    device: Direct,
    /// Something has failed: it may be another host's. It is opened anew then.
    has_failed: AtomicBool,
    /// The key by which it is reserved. 0: it is not yet.
    key: AtomicU64,
    /// Since when, by this process.
    hold: Mutex<LunHold>,
    opened: Instant,
}

impl OpenLun {
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.seen(self.device.read(bytes, at))
    }

    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.seen(self.device.write(bytes, at))
    }

    pub(crate) fn zero(&self, at: u64, len: u64) -> io::Result<()> {
        self.seen(self.device.zero(at, len))
    }

    /// Fails unless it is this host's still.
    pub(crate) fn confirm(&self) -> io::Result<()> {
        if self.has_failed() {
            // All copies let it go, and it is opened anew.
            return Err(io::Error::other("the LUN has failed"));
        }
        let is_held = self.device.is_held(self.key.load(Ordering::Acquire));
        self.seen(is_held.and_then(|is_held| match is_held {
            true => Ok(()),
            false => Err(io::Error::other("another host has taken the LUN")),
        }))
    }

    fn hold(&self) -> MutexGuard<'_, LunHold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since it was opened.
    fn now(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    fn seen<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if done.is_err() {
            self.has_failed.store(true, Ordering::Release);
        }
        done
    }
}

/// The copies of a LUN.
pub(crate) struct LunStore {
    pub(crate) name: LunName,
    held: Arc<OpenLun>,
    terms: Terms,
    /// Where each copy begins.
    ranges: HashMap<String, u64>,
}

/// The answer to an owner that opens a copy.
pub(crate) enum Opened {
    Files(Box<Files>),
    /// A later owner has had it.
    Refused(Generation),
}

impl LunStore {
    /// Opens the LUN, and sees that it is the pool's. It is seized when a copy is opened.
    pub(crate) fn open(name: &LunName, terms: Terms) -> Result<LunStore, Fault> {
        let what = format!("cannot open the LUN {}", name.server);
        let path = fence::find(&name.wwid, &name.device).ok_or_else(|| {
            let why = format!("this host has no LUN {}", name.wwid);
            let help = "log in to its target: iscsiadm -m node --login, nvme connect";
            Fault::new(&what, why, help).with(Errno::NODEV)
        })?;
        let device = Direct::open(&path, &name.wwid).map_err(|e| {
            let help = match e.kind() {
                io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock => {
                    "a process of this host has it: end it"
                }
                _ => "see the LUN and its paths: multipath -ll",
            };
            Fault::new(&what, format!("{}: {e}", path.display()), help).with(Errno::BUSY)
        })?;
        let mut bytes = vec![0; HEAD_BYTES];
        device
            .read(&mut bytes, 0)
            .map_err(|e| Fault::new(&what, e, "see the LUN and its paths: multipath -ll"))?;
        if bytes != head(&name.pool, &name.id) {
            let why = format!("{} does not say that it is this pool's", path.display());
            let help = "ferrite pool status shows the LUNs; replace its copies";
            return Err(Fault::new(&what, why, help).with(Errno::STALE));
        }
        let (has_failed, key) = (AtomicBool::new(false), AtomicU64::new(0));
        let (hold, opened) = (Mutex::default(), Instant::now());
        let held = Arc::new(OpenLun { device, has_failed, key, hold, opened });
        Ok(LunStore { name: name.clone(), held, terms, ranges: HashMap::new() })
    }

    pub(crate) fn held(&self) -> &Arc<OpenLun> {
        &self.held
    }

    /// Makes a copy. One that is there already is fine.
    pub(crate) fn create(&self, extent: &Extent, size: u64, is_whole: bool) -> Result<(), Fault> {
        let what = format!("cannot make the copy {} on the LUN {}", extent.name, self.name.server);
        let start = self.start(&what, extent)?;
        let fault = |e: io::Error| Fault::new(&what, e, "see the LUN and its paths: multipath -ll");
        if size == 0 || !size.is_multiple_of(BLOCK_BYTES) || size > i64::MAX as u64 {
            let why = format!("it cannot have {size} bytes");
            return Err(Fault::new(&what, why, "use a multiple of 512").with(Errno::INVAL));
        }
        self.check_range(&what, start, size)?;
        let is_there = |slot: Option<Slot>| match slot {
            Some(slot) if slot.fixed.id != extent.id => {
                Err(Fault::new(&what, "another copy is in its place", "replace it"))
            }
            Some(slot) if slot.fixed.size != size => {
                let why = format!("it is there with {} bytes", slot.fixed.size);
                Err(Fault::new(&what, why, "replace it"))
            }
            slot => Ok(slot.is_some()),
        };
        if is_there(self.state(start).map_err(fault)?)? {
            return Ok(());
        }
        // Only now it is this host's to write. Another owner may have made the copy meanwhile.
        self.seize(&what)?;
        if is_there(self.state(start).map_err(fault)?)? {
            return Ok(());
        }
        let fixed = Fixed {
            pool: self.name.pool,
            id: extent.id,
            name: extent.name.clone(),
            size,
            region_bytes: region_bytes(size),
            file: FileIdentity { inode: start, made_ns: 0 },
        };
        self.held.write(&fixed.first_slots(is_whole), start).map_err(fault)
    }

    /// Opens a copy for an owner of this generation, and shuts all earlier ones out.
    pub(crate) fn open_copy(
        &self,
        extent: &Extent,
        generation: Generation,
        owner: OwnerId,
    ) -> Result<Opened, Fault> {
        let what = format!("cannot open the copy {} on the LUN {}", extent.name, self.name.server);
        let start = self.start(&what, extent)?;
        let fault = |e: io::Error| Fault::new(&what, e, "see the LUN and its paths: multipath -ll");
        let refused = |why: &str| Fault::new(&what, why, "replace this copy").with(Errno::STALE);
        let unread = || refused("its state was not read");
        let medium = Medium::Range { lun: self.held.clone(), start };
        let look = || {
            let slot = self.state(start).map_err(fault)?;
            let slot = slot.ok_or_else(|| refused("its state is damaged, or was never written"))?;
            let fixed = &slot.fixed;
            let is_it = fixed.pool == self.name.pool
                && fixed.id == extent.id
                && fixed.name == extent.name
                && fixed.file.inode == start;
            match is_it {
                true => self.check_range(&what, start, fixed.size).map(|()| slot),
                false => Err(refused(&format!("another copy is there, {}", hex(&fixed.id)))),
            }
        };
        if self.held.has_failed() {
            return Err(Fault::new(&what, "the LUN has failed", "it is opened anew"));
        }
        let trust = (TRUST + DRIFT).as_nanos() as u64;
        let mut opening = LunOpening::new(generation, owner, trust, Rules::default());
        let (mut step, mut slot) = (LunStep::Look, None);
        loop {
            step = match step {
                LunStep::Look => {
                    let found = look()?;
                    let step = opening.looked(&found.stored, *self.held.hold(), self.held.now());
                    slot = Some(found);
                    step
                }
                LunStep::Seize => {
                    self.seize(&what)?;
                    opening.seized(*self.held.hold(), self.held.now())
                }
                LunStep::Claim => {
                    let claimed = slot.as_mut().ok_or_else(unread)?;
                    claimed.number += 1;
                    (claimed.stored.generation, claimed.stored.owner) = (generation, None);
                    medium.write_state(claimed.number, &claimed.to_bytes()).map_err(fault)?;
                    opening.claimed(*self.held.hold(), self.held.now())
                }
                LunStep::Wait(from) => {
                    let wait = from.saturating_sub(self.held.now());
                    std::thread::sleep(Duration::from_nanos(wait));
                    LunStep::Open
                }
                LunStep::Refuse(stored) => return Ok(Opened::Refused(stored)),
                LunStep::Open => {
                    let slot = slot.ok_or_else(unread)?;
                    return Ok(Opened::Files(Box::new(Files { medium, slot })));
                }
            };
        }
    }

    /// Says where a copy begins.
    pub(crate) fn place(&mut self, copy: &str, start: u64) {
        self.ranges.insert(copy.to_owned(), start);
    }

    fn start(&self, what: &str, extent: &Extent) -> Result<u64, Fault> {
        let none = || Fault::new(what, "its place on the LUN was not set", "repeat it");
        self.ranges.get(&extent.name).copied().ok_or_else(none)
    }

    fn state(&self, start: u64) -> io::Result<Option<Slot>> {
        let mut bytes = vec![0; 2 * SLOT_BYTES];
        self.held.read(&mut bytes, start)?;
        Ok(read(&bytes))
    }

    fn check_range(&self, what: &str, start: u64, size: u64) -> Result<(), Fault> {
        let lun = self.held.device.bytes().map_err(|e| Fault::new(what, e, "see the LUN"))?;
        let end = start.checked_add(range_bytes(size)).filter(|end| *end <= lun);
        let is_fit = start >= RANGE_UNIT && start.is_multiple_of(RANGE_UNIT) && end.is_some();
        let why = format!("its range, {size} bytes behind {start}, is not on the LUN's {lun}");
        is_fit.then_some(()).ok_or_else(|| {
            Fault::new(what, why, "the LUN must not become smaller").with(Errno::INVAL)
        })
    }

    /// Reserves the LUN for this host, and takes the reservation from any other.
    fn seize(&self, what: &str) -> Result<(), Fault> {
        let held = &self.held;
        if held.key.load(Ordering::Acquire) != 0 && !held.has_failed() {
            return Ok(());
        }
        let seized = fence::seize(held.device.as_fd(), &self.terms);
        let seized = seized.map_err(|e| unreserved(what, &self.name.server, &e))?;
        held.hold().taken(seized.was_ours, held.now());
        held.key.store(seized.held.key, Ordering::Release);
        Ok(())
    }
}

fn unreserved(what: &str, lun: &str, e: &Refusal) -> Fault {
    Fault::new(what, e, &e.help(lun)).with(Errno::BUSY)
}

/// A LUN, before it is a pool's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLun {
    /// Its own name.
    pub wwid: String,
    /// Its bytes.
    pub bytes: u64,
}

/// Makes a LUN a pool's: reserved, zero, and with a header. `commit` is called when all is done; if it fails, the header goes
/// again.
///
/// # Errors
/// The LUN cannot be had or written; it has content, and not `erase`; or `commit`'s.
pub fn prepare<E: From<Fault>>(
    name: &LunName,
    terms: &Terms,
    erase: bool,
    check: impl FnOnce(&NewLun) -> Result<(), E>,
    commit: impl FnOnce(&NewLun) -> Result<(), E>,
) -> Result<(), E> {
    let what = format!("cannot use {}", name.device.display());
    let fault =
        |e: io::Error| Fault::new(&what, e, "name the LUN's device; no process may have it");
    let device = Direct::open(&name.device, &name.wwid).map_err(fault)?;
    let new = NewLun { wwid: name.wwid.clone(), bytes: device.bytes().map_err(fault)? };
    if new.bytes < 3 * RANGE_UNIT {
        return Err(Fault::new(&what, "it is too small", "a LUN has 3 MiB or more").into());
    }
    let shown = name.device.display().to_string();
    let reserved = |e: Refusal| Fault::new(&what, &e, &e.help(&shown));
    fence::take(device.as_fd(), terms).map_err(reserved)?;
    (|| {
        // While it is reserved: no other host adds it meanwhile.
        check(&new)?;
        let mut first = vec![0; RANGE_UNIT as usize];
        device.read(&mut first, 0).map_err(fault)?;
        if first.iter().any(|byte| *byte != 0) && !erase {
            let help = "with --erase all of it is lost";
            return Err(Fault::new(&what, "there is something on it", help).into());
        }
        let mut at = 0;
        while at < new.bytes {
            let len = (new.bytes - at).min(1 << 30) / BLOCK_BYTES * BLOCK_BYTES;
            if len == 0 {
                break;
            }
            device.zero(at, len).map_err(fault)?;
            at += len;
        }
        device.write(&head(&name.pool, &name.id), 0).map_err(fault)?;
        commit(&new).inspect_err(|_| {
            // So the next attempt does not find something on it.
            let _ = device.zero(0, HEAD_BYTES as u64);
        })
    })()
    .inspect_err(|_| {
        // Nothing of a pool is there.
        let _ = fence::release(device.as_fd(), &terms.records);
    })
}

/// Takes the header from a LUN that no pool has any more. It stays reserved for this host: an owner that was shut out could
/// write to it otherwise.
///
/// # Errors
/// It is not here, in use, or not the one that is meant.
pub fn clear(name: &LunName, terms: Terms) -> Result<(), Fault> {
    let store = LunStore::open(name, terms)?;
    let what = format!("cannot clear the LUN {}", name.server);
    store.seize(&what)?;
    let cleared = store.held.zero(0, HEAD_BYTES as u64);
    cleared.map_err(|e| Fault::new(&what, e, "see the LUN and its paths: multipath -ll"))
}
