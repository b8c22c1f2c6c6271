//! Xen itself, reached from user space by /dev/xen/gntdev, evtchn, gntalloc and privcmd.

mod between;
mod copies;
mod domains;
mod events;
mod grants;
mod kept;
mod own_pages;
mod probe;
mod processors;
mod uapi;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use ferrite_io::arena::{Arena, Lender};
use rustix::fs::OFlags;

pub use domains::HostDomains;
pub use probe::{APART, Probe, probe};
pub use processors::HostProcessors;

use crate::hypervisor::{
    CopySegment, Direction, DomId, GrantRef, Hypervisor, HypervisorError, Link, RingMemory,
};
use crate::mover::{Carrier, Moving};
use crate::pages::Pages;
use events::EventChannel;
use grants::{DomainGrants, GrantDevice, Granted, MapError};
use kept::{Device, Kept};
use own_pages::{OwnPages, PageDevice};

const GNTDEV: &str = "dev/xen/gntdev";
const EVTCHN: &str = "dev/xen/evtchn";
const GNTALLOC: &str = "dev/xen/gntalloc";
const PRIVCMD: &str = "dev/xen/privcmd";
const HYPERCALL: &str = "dev/xen/hypercall";

/// How many of a device there have to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One for each queue.
    OfQueue,
    /// One.
    OfProcess,
}

/// The files that [`Xen::ahead`] and [`Xen::with_own_grants`] open, and how: for a process that opens them for another.
pub fn devices() -> [(PathBuf, Kind, OFlags); 4] {
    let at = |path: &str| Path::new("/").join(path);
    [
        (at(GNTDEV), Kind::OfQueue, OFlags::RDWR),
        (at(EVTCHN), Kind::OfQueue, OFlags::RDWR | OFlags::NONBLOCK),
        (at(GNTALLOC), Kind::OfProcess, OFlags::RDWR),
        (at(probe::CAPABILITIES), Kind::OfProcess, OFlags::RDONLY),
    ]
}

/// Whether event channels are restricted to their guest's domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Restriction {
    /// No channel was opened so far.
    Unknown,
    /// The last one was.
    Restricted,
    /// The last one was not: the kernel refused, as it does for guests that are domain 0.
    Refused,
}

/// The hypervisor under this domain.
pub struct Xen {
    /// Where /dev is, for tests.
    root: PathBuf,
    restriction: AtomicU8,
    /// The devices that were opened ahead: nothing else is opened then.
    ahead: Option<Preopen>,
    /// Where pages come from that this domain grants to itself.
    own: Option<Arc<PageDevice>>,
}

/// One of each for every queue.
struct Preopen {
    grants: Arc<Kept>,
    events: Arc<Kept>,
    were_too_few: AtomicBool,
}

impl Default for Xen {
    fn default() -> Self {
        Xen::new()
    }
}

impl Xen {
    /// Opens nothing yet: each queue has descriptors of its own. See [`probe()`] for what is there.
    pub fn new() -> Xen {
        Xen::at(Path::new("/"))
    }

    fn at(root: &Path) -> Xen {
        let restriction = AtomicU8::new(Restriction::Unknown as u8);
        Xen { root: root.to_owned(), restriction, ahead: None, own: None }
    }

    /// Has data pass through pages that this domain grants to itself, as far as it may have some. The
    /// device is opened now; without it all goes on as it does without such pages.
    #[must_use]
    pub fn with_own_grants(self) -> Xen {
        let own = probe::is_control_domain(&self.root)
            .then(|| own_pages::open(&self.root.join(GNTALLOC)));
        let own = match own {
            None => None,
            Some(Ok(device)) => Some(PageDevice::new(device)),
            Some(Err(e)) => {
                tracing::info!(
                    "no pages are granted by this domain to itself: /{GNTALLOC}: {e}; data is copied \
                     a little slower (modprobe xen-gntalloc)"
                );
                None
            }
        };
        Xen { own, ..self }
    }

    /// Opens now what so many queues of one guest need. It is kept over connections, and nothing is
    /// opened later: for a process that will have no right to.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub fn ahead(queues: usize) -> Result<Xen, HypervisorError> {
        Xen::ahead_at(Path::new("/"), queues)
    }

    fn ahead_at(root: &Path, queues: usize) -> Result<Xen, HypervisorError> {
        let xen = Xen::at(root);
        let grants = (0..queues).map(|_| xen.open_grants()).collect::<Result<_, _>>()?;
        let events = (0..queues).map(|_| xen.open_events()).collect::<Result<_, _>>()?;
        let (grants, events) = (Kept::new(grants), Kept::new(events));
        let ahead = Preopen { grants, events, were_too_few: AtomicBool::new(false) };
        Ok(Xen { ahead: Some(ahead), ..xen })
    }

    /// One that connects no guest, and [is used up](Hypervisor::is_used_up): nothing could be opened ahead.
    pub fn nothing() -> Xen {
        let [grants, events] = [(); 2].map(|()| Kept::new(Vec::new()));
        let ahead = Preopen { grants, events, were_too_few: AtomicBool::new(true) };
        Xen { ahead: Some(ahead), ..Xen::new() }
    }

    /// Whether the last queue's event channel was restricted to its guest.
    pub fn restriction(&self) -> Restriction {
        match self.restriction.load(Ordering::Relaxed) {
            r if r == Restriction::Restricted as u8 => Restriction::Restricted,
            r if r == Restriction::Refused as u8 => Restriction::Refused,
            _ => Restriction::Unknown,
        }
    }

    fn open(
        &self,
        device: &str,
        open: fn(&Path) -> io::Result<OwnedFd>,
        hint: &'static str,
    ) -> Result<OwnedFd, HypervisorError> {
        let path = self.root.join(device);
        open(&path).map_err(|source| HypervisorError::Host {
            what: format!("open {}", path.display()),
            source,
            hint,
        })
    }

    fn open_grants(&self) -> Result<OwnedFd, HypervisorError> {
        let hint = "run as root in a Xen domain, with the module xen-gntdev loaded";
        self.open(GNTDEV, grants::open, hint)
    }

    fn open_events(&self) -> Result<OwnedFd, HypervisorError> {
        let hint = "run as root in a Xen domain, with the module xen-evtchn loaded";
        self.open(EVTCHN, events::open, hint)
    }

    /// One of what was opened ahead, or a new one.
    fn device(
        &self,
        kept: fn(&Preopen) -> &Arc<Kept>,
        open: fn(&Xen) -> Result<OwnedFd, HypervisorError>,
        domid: DomId,
    ) -> Result<Device, HypervisorError> {
        let Some(ahead) = &self.ahead else { return open(self).map(Device::once) };
        kept(ahead).take(domid).ok_or_else(|| {
            ahead.were_too_few.store(true, Ordering::Relaxed);
            HypervisorError::Host {
                what: format!("connect one queue more to domain {domid}"),
                source: io::ErrorKind::ResourceBusy.into(),
                hint: "all devices of Xen that were opened ahead are in use or spoiled: start anew",
            }
        })
    }

    fn map(
        &self,
        device: &Arc<GrantDevice>,
        domid: DomId,
        ring: &[GrantRef],
    ) -> Result<Granted, HypervisorError> {
        Granted::map(device, domid, ring, true).map_err(|e| match e {
            MapError::Map(source) if source.raw_os_error() != Some(libc::ENOMEM) => {
                HypervisorError::Guest { domid, what: map_text(ring), source }
            }
            MapError::Map(source) | MapError::Reserve(source) => HypervisorError::Host {
                what: map_text(ring),
                source,
                hint: "check this domain's free memory and xen-gntdev's limit",
            },
        })
    }

    fn bind(&self, domid: DomId, port: u32) -> Result<EventChannel, HypervisorError> {
        let device = self.device(|ahead| &ahead.events, Xen::open_events, domid)?;
        self.restrict(&device, domid);
        EventChannel::bind(device, domid, port).map_err(|source| {
            let what = format!("bind event channel {port}");
            match source.raw_os_error() {
                Some(libc::ENOSPC | libc::ENOMEM) => HypervisorError::Host {
                    what,
                    source,
                    hint: "this domain has no event channels left; see max_event_channels",
                },
                _ => HypervisorError::Guest { domid, what, source },
            }
        })
    }

    fn restrict(&self, device: &Device, domid: DomId) {
        let now = match events::restrict(device, domid) {
            Ok(()) => Restriction::Restricted,
            // To the same domain: `Kept` gives it to no other one.
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => Restriction::Restricted,
            Err(e) => {
                if self.restriction() != Restriction::Refused {
                    tracing::debug!(
                        "event channels are not restricted to domain {domid}: {e}; going on"
                    );
                }
                Restriction::Refused
            }
        };
        self.restriction.store(now as u8, Ordering::Relaxed);
    }
}

impl Hypervisor for Xen {
    fn name(&self) -> &'static str {
        "xen"
    }

    /// Nothing is opened later, and what was spoiled does not come back.
    fn is_used_up(&self) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| ahead.were_too_few.load(Ordering::Relaxed))
    }

    fn lender(&self) -> Option<Box<dyn Lender>> {
        let own = self.own.clone()?;
        Some(Box::new(OwnPages::new(own)))
    }

    fn pages(&self) -> Result<Box<dyn Pages>, HypervisorError> {
        // Of any guests: the kernel ties no descriptor for copies to one.
        let device = self.device(|ahead| &ahead.grants, Xen::open_grants, DomId::NONE)?;
        Ok(Box::new(between::Between::new(GrantDevice::new(device))))
    }

    fn connect(
        &self,
        domid: DomId,
        ring: &[GrantRef],
        port: u32,
        moving: &Moving,
    ) -> Result<Box<dyn Link>, HypervisorError> {
        if !(1..=uapi::RING_PAGES_MAX).contains(&ring.len()) {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            let what = format!("map a ring of {} pages", ring.len());
            return Err(HypervisorError::Guest { domid, what, source });
        }
        // Each step undoes itself when a later one fails.
        let device = self.device(|ahead| &ahead.grants, Xen::open_grants, domid)?;
        let device = GrantDevice::new(device);
        let ring = self.map(&device, domid, ring)?;
        let events = self.bind(domid, port)?;
        let grants = DomainGrants::new(device, domid);
        Ok(Box::new(XenLink { carrier: Carrier::new(moving), ring, events, grants }))
    }
}

fn map_text(ring: &[GrantRef]) -> String {
    let refs: Vec<String> = ring.iter().map(|r| r.0.to_string()).collect();
    format!("map ring reference {}", refs.join(", "))
}

/// Fields are dropped in this order: the guest finds its pages released before its channel closes.
struct XenLink {
    carrier: Carrier<Granted>,
    ring: Granted,
    events: EventChannel,
    grants: DomainGrants,
}

impl Link for XenLink {
    fn ring(&self) -> RingMemory {
        self.ring.ring()
    }

    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        self.carrier.copy(&mut self.grants, arena, direction, segments)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    fn take_event(&mut self) -> io::Result<bool> {
        self.events.take()
    }

    fn rearm(&mut self) -> io::Result<()> {
        self.events.rearm()
    }

    fn event_taken(&mut self) {
        self.events.taken();
    }

    /// The kernel's driver masks the channel until its port is written.
    fn is_shut_by_event(&self) -> bool {
        true
    }

    fn rearm_word(&self) -> Option<u32> {
        self.events.rearm_word()
    }

    fn rearmed(&mut self) {
        self.events.rearmed();
    }

    fn notify(&mut self) -> io::Result<()> {
        self.events.notify()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_devices_the_error_says_what_to_do() {
        let xen = Xen::at(Path::new("/nonexistent"));
        let Err(error) = xen.connect(DomId(1), &[GrantRef(8)], 3, &Moving::copy()) else {
            panic!("connected")
        };
        assert!(matches!(error, HypervisorError::Host { .. }));
        let text = error.to_string();
        assert!(text.contains("/nonexistent/dev/xen/gntdev") && text.contains("xen-gntdev"));
        assert_eq!(xen.restriction(), Restriction::Unknown);
    }

    #[test]
    fn a_ring_of_no_or_too_many_pages_is_the_guests_fault() {
        let xen = Xen::at(Path::new("/nonexistent"));
        for pages in [0, 17, 1000] {
            let result = xen.connect(DomId(1), &vec![GrantRef(8); pages], 3, &Moving::copy());
            assert!(matches!(result.err(), Some(HypervisorError::Guest { .. })), "{pages}");
        }
    }

    /// Plain files stand for the devices: they cannot map, which leaves nothing to undo.
    #[test]
    fn what_was_opened_ahead_is_used_again_and_nothing_else_is_opened() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("dev/xen")).unwrap();
        for device in [GNTDEV, EVTCHN] {
            std::fs::write(root.path().join(device), "").unwrap();
        }
        let xen = Xen::ahead_at(root.path(), 2).unwrap();
        drop(root);
        let ahead = xen.ahead.as_ref().unwrap();
        let count = || (ahead.grants.count(), ahead.events.count());
        for _ in 0..3 {
            assert!(xen.connect(DomId(1), &[GrantRef(8)], 3, &Moving::copy()).is_err());
            assert_eq!(count(), (2, 2));
        }
        assert!(!xen.is_used_up());
        let held = [(); 2].map(|()| ahead.grants.take(DomId(1)).unwrap());
        let error = xen.connect(DomId(1), &[GrantRef(8)], 3, &Moving::copy()).err().unwrap();
        assert!(error.to_string().contains("were opened ahead"), "{error}");
        assert!(xen.is_used_up() && Xen::nothing().is_used_up());
        drop(held);
        assert_eq!(count(), (2, 2));
    }

    #[test]
    fn pages_are_lent_where_this_is_the_control_domain_and_the_device_is_there() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let lender = || Xen::at(root.path()).with_own_grants().lender();
        write(GNTALLOC, "");
        assert!(lender().is_none());
        write("proc/xen/capabilities", "control_d\n");
        assert!(lender().is_some());
        assert!(Xen::at(root.path()).lender().is_none(), "it was not asked for");
        std::fs::remove_file(root.path().join(GNTALLOC)).unwrap();
        assert!(lender().is_none());
    }
}
