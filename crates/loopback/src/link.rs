//! [`Loopback`]: replaces the hypervisor for a set of guests.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ferrite_io::arena::Arena;

use super::copy::Copier;
use super::grants::Access;
use super::guest::{Descriptors, signal};
use super::memory::{FrameMapping, GuestMemory};
use super::pages::Between;
use super::{BACKEND_DOMID, CopyWith, GuestHandle, LoopbackError};
use ferrite_xen::hypervisor::{
    CopySegment, Direction, DomId, GrantRef, Hypervisor, HypervisorError, Link, RingMemory,
};
use ferrite_xen::mover::{Carrier, Grants, Mapping, Moving};
use ferrite_xen::pages::Pages;

/// The access to a set of guests. One process at a time serves a guest; when that process has died, in any way, the
/// next one may.
pub struct Loopback {
    copy_with: CopyWith,
    guests: Guests,
    copies: Arc<Copies>,
}

/// The guests that may be reached now.
#[derive(Clone, Default)]
pub(super) struct Guests(Arc<RwLock<HashMap<DomId, Arc<Attached>>>>);

impl Guests {
    pub(super) fn find(&self, domid: DomId) -> Option<Arc<Attached>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&domid).cloned()
    }
}

/// The copies of connections that have ended.
#[derive(Default)]
struct Copies {
    calls: AtomicU64,
    segments: AtomicU64,
}

impl Loopback {
    /// A loopback without guests.
    pub fn new(copy_with: CopyWith) -> Loopback {
        Loopback { copy_with, guests: Guests::default(), copies: Arc::default() }
    }

    /// The copy method.
    pub fn copy_with(&self) -> CopyWith {
        self.copy_with
    }

    /// The copies and their segments, of connections that have ended.
    pub fn copies(&self) -> (u64, u64) {
        let Copies { calls, segments } = &*self.copies;
        (calls.load(Ordering::Relaxed), segments.load(Ordering::Relaxed))
    }

    /// Attaches to a guest, and clears the state that a dead predecessor has left in it: uses of grants, bound ports.
    /// Xen does that when the predecessor's descriptors are closed.
    ///
    /// # Errors
    /// Another process serves the guest, or it is no guest.
    pub fn add(&self, guest: &GuestHandle) -> Result<(), LoopbackError> {
        let attached = Arc::new(Attached::new(guest)?);
        self.guests
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(guest.domid(), attached);
        Ok(())
    }

    /// Removes a guest. Its connections remain until they are dropped.
    pub fn remove(&self, domid: DomId) {
        self.guests.0.write().unwrap_or_else(PoisonError::into_inner).remove(&domid);
    }
}

impl Hypervisor for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn pages(&self) -> Result<Box<dyn Pages>, HypervisorError> {
        Ok(Box::new(Between::new(self.guests.clone())))
    }

    fn connect(
        &self,
        domid: DomId,
        ring: &[GrantRef],
        port: u32,
        moving: &Moving,
    ) -> Result<Box<dyn Link>, HypervisorError> {
        let refuse = |what: String, errno: rustix::io::Errno| {
            Err(HypervisorError::Guest { domid, what, source: errno.into() })
        };
        let Some(guest) = self.guests.find(domid) else {
            return refuse("reach it".into(), rustix::io::Errno::SRCH);
        };
        if !(1..=16).contains(&ring.len()) {
            return refuse(format!("map a ring of {} pages", ring.len()), rustix::io::Errno::INVAL);
        }
        let ring = Mapped::map(&guest, ring, true).map_err(|e| match e {
            MapError::Refused { gref, status } => HypervisorError::Guest {
                domid,
                what: format!("map ring reference {} (status {status})", gref.0),
                source: rustix::io::Errno::INVAL.into(),
            },
            MapError::Memory(source) => HypervisorError::Host {
                what: format!("map the {} ring pages of domain {domid}", ring.len()),
                source,
                hint: "check the limits on memory mappings (sysctl vm.max_map_count)",
            },
        })?;
        if !guest.memory.bind_port(port) {
            return refuse(format!("bind event channel {port}"), rustix::io::Errno::INVAL);
        }
        let copier = Copier::new(self.copy_with, &guest.memory);
        let (copies, counted) = (self.copies.clone(), (0, 0));
        let grants = GuestGrants { guest: guest.clone(), copier };
        let carrier = Carrier::new(moving);
        let link =
            LoopbackLink { carrier, ring, guest, port, grants, copies, counted, taken: false };
        // As Xen does: events may have been lost before the channel was bound (blkif.md 3.9).
        signal(link.guest.descriptors.to_back(port)).map_err(|source| HypervisorError::Host {
            what: format!("bind event channel {port} of domain {domid}"),
            source,
            hint: "the eventfd is broken; start the guest again",
        })?;
        Ok(Box::new(link))
    }
}

/// Guards the owner of a guest among the threads of one process.
static OWNERS: Mutex<()> = Mutex::new(());

/// A guest that this process serves.
pub(super) struct Attached {
    pub(super) memory: GuestMemory,
    descriptors: Arc<Descriptors>,
}

impl Attached {
    fn new(guest: &GuestHandle) -> Result<Attached, LoopbackError> {
        let memory = guest.map()?;
        let _guard = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
        let me = std::process::id();
        let owner = memory.owner();
        loop {
            let word = owner.load(Ordering::Acquire);
            let (pid, users) = ((word >> 32) as u32, word as u32);
            let ours = pid == me && users > 0;
            if !ours && users > 0 && is_running(pid) {
                return Err(LoopbackError::Busy { domid: guest.domid(), pid });
            }
            let users = if ours { users + 1 } else { 1 };
            let new = u64::from(me) << 32 | u64::from(users);
            if owner.compare_exchange(word, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                if !ours {
                    memory.clear_leftovers();
                }
                return Ok(Attached { memory, descriptors: guest.descriptors().clone() });
            }
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _guard = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
        let me = std::process::id();
        // A forked child with a copy of the value owns nothing; a word that the guest has overwritten stays as it is.
        let _ = self.memory.owner().fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
            let users = (word as u32).checked_sub(1)?;
            ((word >> 32) as u32 == me).then_some(u64::from(me) << 32 | u64::from(users))
        });
    }
}

/// Whether a process runs; a zombie does not.
fn is_running(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The state follows the command's name, which is in parentheses and may have any characters.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X'))
}

/// Grants in use for as long as they are mapped.
struct Pins {
    guest: Arc<Attached>,
    grefs: Vec<GrantRef>,
}

impl Pins {
    fn add(&mut self, gref: GrantRef, access: Access) -> Result<u32, i16> {
        let memory = &self.guest.memory;
        let frame = memory.grants().pin(gref, BACKEND_DOMID, access, memory.layout().frames)?;
        self.grefs.push(gref);
        Ok(frame)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.grefs.iter().for_each(|gref| self.guest.memory.grants().unpin(*gref));
    }
}

/// The reason why pages cannot be mapped.
enum MapError {
    /// The guest's grant table refused it.
    Refused { gref: GrantRef, status: i16 },
    /// The kernel refused it.
    Memory(io::Error),
}

/// Granted pages, mapped.
struct Mapped {
    // Dropped in this order: the mapping ends before the grants count as unused.
    mapping: FrameMapping,
    _pins: Pins,
}

impl Mapped {
    /// Maps all of them or none.
    fn map(guest: &Arc<Attached>, grefs: &[GrantRef], writable: bool) -> Result<Mapped, MapError> {
        let access = if writable { Access::Write } else { Access::Read };
        let mut pins = Pins { guest: guest.clone(), grefs: Vec::with_capacity(grefs.len()) };
        let mut frames = Vec::with_capacity(grefs.len());
        for gref in grefs {
            let refused = |status| MapError::Refused { gref: *gref, status };
            frames.push(pins.add(*gref, access).map_err(refused)?);
        }
        let mapping = guest.memory.map_frames(&frames, writable).map_err(MapError::Memory)?;
        Ok(Mapped { mapping, _pins: pins })
    }
}

// SAFETY: its own mapping of whole frames, with the rights asked for, until this is dropped.
unsafe impl Mapping for Mapped {
    fn page(&self, page: usize) -> NonNull<u8> {
        self.mapping.page(page)
    }
}

/// One guest's pages, for the mover of its link.
struct GuestGrants {
    guest: Arc<Attached>,
    copier: Copier,
}

impl Grants for GuestGrants {
    type Mapping = Mapped;

    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        self.copier.copy(&self.guest.memory, arena, direction, segments)
    }

    fn map(&mut self, grefs: &[GrantRef], writable: bool) -> io::Result<Mapped> {
        Mapped::map(&self.guest, grefs, writable).map_err(|e| match e {
            MapError::Refused { .. } => io::ErrorKind::InvalidInput.into(),
            MapError::Memory(e) => e,
        })
    }
}

/// One connected queue.
///
/// [`event_fd`](Link::event_fd) is the eventfd itself. Events between [`take_event`](Link::take_event) and
/// [`rearm`](Link::rearm) accumulate in it, and `take_event` does not return them; but it polls readable, which
/// /dev/xen/evtchn would not. A backend polls it only after `rearm`, so it sees no difference.
struct LoopbackLink {
    carrier: Carrier<Mapped>,
    ring: Mapped,
    guest: Arc<Attached>,
    port: u32,
    grants: GuestGrants,
    copies: Arc<Copies>,
    /// Calls and segments of this connection, so that queues do not share a counter.
    counted: (u64, u64),
    taken: bool,
}

impl Link for LoopbackLink {
    fn ring(&self) -> RingMemory {
        // SAFETY: page aligned whole pages, mapped readable and writable until `self` is dropped.
        unsafe { RingMemory::new(self.ring.mapping.base(), self.ring.mapping.len()) }
    }

    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        self.counted.0 += 1;
        self.counted.1 += segments.len() as u64;
        self.carrier.copy(&mut self.grants, arena, direction, segments)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.guest.descriptors.to_back(self.port)
    }

    fn take_event(&mut self) -> io::Result<bool> {
        if self.taken {
            return Ok(false);
        }
        let mut count = [0; 8];
        match rustix::io::read(self.event_fd(), &mut count) {
            Ok(_) => {
                self.taken = true;
                Ok(true)
            }
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    fn rearm(&mut self) -> io::Result<()> {
        self.taken = false;
        Ok(())
    }

    fn event_taken(&mut self) {
        self.taken = true;
    }

    fn notify(&mut self) -> io::Result<()> {
        signal(self.guest.descriptors.to_front(self.port))
    }
}

impl Drop for LoopbackLink {
    fn drop(&mut self) {
        self.copies.calls.fetch_add(self.counted.0, Ordering::Relaxed);
        self.copies.segments.fetch_add(self.counted.1, Ordering::Relaxed);
        self.guest.memory.unbind_port(self.port);
    }
}

#[cfg(test)]
mod tests;
