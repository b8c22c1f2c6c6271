//! A host with guests: the store, the toolstack's operations on it, and handles for all parties.
//!
//! ```
//! use ferrite_loopback::{CopyWith, Machine, machine::Disk};
//!
//! # fn main() -> Result<(), ferrite_loopback::LoopbackError> {
//! let mut machine = Machine::new()?;
//! let domid = machine.add_guest(Default::default())?;
//! let disk = machine.attach_disk(domid, Disk::xvd(0))?;
//! let hypervisor = machine.loopback(CopyWith::Memcpy)?; // the backend's way to the guests
//! let store = machine.store()?; // its way to the store
//! let guest = machine.guest(domid)?; // what a frontend needs
//! # drop((disk, hypervisor, store, guest));
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};
use rustix::event::{PollFd, PollFlags};

use super::server::home;
use super::{
    BACKEND_DOMID, BackendHandle, CopyWith, GuestHandle, GuestOptions, Loopback, LoopbackError,
    StoreServer,
};
use ferrite_xen::hypervisor::{DomId, DomainState, Domains};
use ferrite_xen::store::Store;

/// The backend kind that libxl uses for disks of a tapback-like backend (blkif.md 3.1).
pub const KIND: &str = "vbd3";

/// The toolstack's settings of a disk.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The virtual device number (blkif.md 3.1).
    pub devid: u32,
    /// The backend's `mode` key: `w` or `r`.
    pub mode: &'static str,
    /// The backend's `params` key.
    pub params: String,
    /// Further keys of the backend, such as `discard-enable`.
    pub backend_keys: Vec<(&'static str, String)>,
}

impl Disk {
    /// A writable disk, `xvda` for 0.
    pub fn xvd(index: u32) -> Disk {
        let devid = if index < 16 { 202 << 8 | index << 4 } else { 1 << 28 | index << 8 };
        Disk { devid, mode: "w", params: String::new(), backend_keys: Vec::new() }
    }

    /// The disk, read-only.
    pub fn read_only(self) -> Disk {
        Disk { mode: "r", ..self }
    }
}

/// The paths of a device in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskPaths {
    /// The guest.
    pub domid: DomId,
    /// Its number.
    pub devid: u32,
    /// The guest's directory.
    pub frontend: String,
    /// The backend's directory.
    pub backend: String,
}

impl DiskPaths {
    /// The paths of a disk served by dom0.
    pub fn new(domid: DomId, devid: u32) -> DiskPaths {
        DiskPaths {
            domid,
            devid,
            frontend: format!("{}/device/vbd/{devid}", home(domid)),
            backend: format!("{}/backend/{KIND}/{domid}/{devid}", home(BACKEND_DOMID)),
        }
    }
}

/// The toolstack's settings of a network interface.
#[derive(Clone, Debug)]
pub struct Vif {
    /// The interface's number in its guest.
    pub handle: u32,
    /// Its address, as `xx:xx:xx:xx:xx:xx`.
    pub mac: String,
    /// Which backend serves it: the name of its directory.
    pub kind: String,
    /// Further keys of the backend.
    pub backend_keys: Vec<(&'static str, String)>,
}

impl DiskPaths {
    /// The paths of a network interface served by dom0.
    pub fn of_vif(domid: DomId, vif: &Vif) -> DiskPaths {
        let (kind, devid) = (&vif.kind, vif.handle);
        DiskPaths {
            domid,
            devid,
            frontend: format!("{}/device/vif/{devid}", home(domid)),
            backend: format!("{}/backend/{kind}/{domid}/{devid}", home(BACKEND_DOMID)),
        }
    }
}

/// The host. Dropping it ends the store; a guest ends when its last handle is dropped.
pub struct Machine {
    server: StoreServer,
    /// The toolstack's connection.
    toolstack: Store,
    guests: BTreeMap<DomId, GuestHandle>,
    next_domid: u16,
}

impl Machine {
    /// A host with an empty store and no guests.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn new() -> Result<Machine, LoopbackError> {
        let server = StoreServer::start()?;
        let mut toolstack = Store::from_fd(server.connect(BACKEND_DOMID)?);
        toolstack.write(&format!("{}/name", home(BACKEND_DOMID)), b"Domain-0")?;
        Ok(Machine { server, toolstack, guests: BTreeMap::new(), next_domid: 1 })
    }

    /// A new guest with its directory in the store, as libxl makes it.
    ///
    /// # Errors
    /// The kernel gives no memory or descriptors.
    pub fn add_guest(&mut self, options: GuestOptions) -> Result<DomId, LoopbackError> {
        let domid = DomId(self.next_domid);
        self.add_guest_numbered(domid, options)?;
        self.next_domid += 1;
        Ok(domid)
    }

    /// Adds a guest with the number of one that has ended.
    ///
    /// # Errors
    /// Those of [`add_guest`](Self::add_guest).
    pub fn add_guest_numbered(
        &mut self,
        domid: DomId,
        options: GuestOptions,
    ) -> Result<(), LoopbackError> {
        let guest = GuestHandle::create(domid, options)?;
        let path = home(domid);
        self.toolstack.transaction(|t| {
            t.mkdir(&path)?;
            t.set_permissions(&path, &[('n', BACKEND_DOMID), ('r', domid)])?;
            t.write(&format!("{path}/name"), format!("guest-{domid}").as_bytes())?;
            t.mkdir(&format!("{path}/device/vbd"))?;
            t.mkdir(&format!("{path}/data"))?;
            t.set_permissions(&format!("{path}/data"), &[('n', domid)])
        })?;
        self.guests.insert(domid, guest);
        self.server.announce_introduced();
        Ok(())
    }

    fn find(&self, domid: DomId) -> Result<&GuestHandle, LoopbackError> {
        self.guests
            .get(&domid)
            .ok_or_else(|| LoopbackError::NotAGuest(format!("domain {domid} does not exist")))
    }

    /// A handle for a frontend of this guest, with a store connection of its own.
    ///
    /// # Errors
    /// There is no such guest, or the kernel gives no socket.
    pub fn guest(&self, domid: DomId) -> Result<GuestHandle, LoopbackError> {
        Ok(self.find(domid)?.share().with_store(self.server.connect(domid)?))
    }

    /// A connection to the store that acts for dom0: a backend's, or a test's own.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn store(&self) -> Result<Store, LoopbackError> {
        Ok(Store::from_fd(self.server.connect(BACKEND_DOMID)?))
    }

    /// A connection for dom0, with a counter of its requests.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn counted_store(&self) -> Result<(Store, Arc<AtomicU64>), LoopbackError> {
        let (socket, requests) = self.server.connect_counted(BACKEND_DOMID)?;
        Ok((Store::from_fd(socket), requests))
    }

    /// Serves a connection that another process has made to a socket of the store, for dom0. It must not block.
    /// Returns the counter of its requests.
    pub fn serve_connection(&self, socket: OwnedFd) -> Arc<AtomicU64> {
        self.server.serve(BACKEND_DOMID, socket)
    }

    /// A connection to the store that acts for a guest.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn guest_store(&self, domid: DomId) -> Result<Store, LoopbackError> {
        Ok(Store::from_fd(self.server.connect(domid)?))
    }

    /// This process's access to all present guests.
    ///
    /// # Errors
    /// Another process serves one of them.
    pub fn loopback(&self, copy_with: CopyWith) -> Result<Loopback, LoopbackError> {
        let loopback = Loopback::new(copy_with);
        self.guests.values().try_for_each(|guest| loopback.add(guest))?;
        Ok(loopback)
    }

    /// A handle for a backend in a process of its own, to serve all present guests.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn backend(&self) -> Result<BackendHandle, LoopbackError> {
        Ok(BackendHandle {
            store: self.server.connect(BACKEND_DOMID)?,
            guests: self.guests.values().map(GuestHandle::share).collect(),
        })
    }

    /// The texts by which other processes take the guests from this one, with their domains
    /// ([`GuestHandle::offer`]).
    pub fn offers(&self) -> Vec<(DomId, String)> {
        self.guests.values().map(|guest| (guest.domid(), guest.offer())).collect()
    }

    /// Writes both directories of a disk, with the keys and permissions that libxl gives them.
    ///
    /// # Errors
    /// The store's.
    pub fn attach_disk(&mut self, domid: DomId, disk: Disk) -> Result<DiskPaths, LoopbackError> {
        let paths = DiskPaths::new(domid, disk.devid);
        let letter = char::from(b'a' + (disk.devid >> 4 & 0xF) as u8);
        self.toolstack.transaction(|t| {
            let (front, back) = (&paths.frontend, &paths.backend);
            // Removes the remains of an earlier device.
            t.remove(front)?;
            t.mkdir(front)?;
            t.set_permissions(front, &[('n', domid), ('r', BACKEND_DOMID)])?;
            t.remove(back)?;
            t.mkdir(back)?;
            t.set_permissions(back, &[('n', BACKEND_DOMID), ('r', domid)])?;
            let mut put = |dir: &str, key: &str, value: &str| {
                t.write(&format!("{dir}/{key}"), value.as_bytes())
            };
            put(front, "backend", back)?;
            put(front, "backend-id", "0")?;
            put(front, "virtual-device", &disk.devid.to_string())?;
            put(front, "device-type", "disk")?;
            put(front, "state", "1")?;
            put(back, "frontend", front)?;
            put(back, "frontend-id", &domid.to_string())?;
            put(back, "params", &disk.params)?;
            put(back, "mode", disk.mode)?;
            put(back, "dev", &format!("xvd{letter}"))?;
            put(back, "device-type", "disk")?;
            put(back, "removable", "0")?;
            put(back, "bootable", "1")?;
            put(back, "online", "1")?;
            for (key, value) in &disk.backend_keys {
                put(back, key, value)?;
            }
            put(back, "state", "1")
        })?;
        Ok(paths)
    }

    /// Writes both directories of a network interface, with the keys and permissions that libxl gives them.
    ///
    /// # Errors
    /// The store's.
    pub fn attach_vif(&mut self, domid: DomId, vif: &Vif) -> Result<DiskPaths, LoopbackError> {
        let paths = DiskPaths::of_vif(domid, vif);
        self.toolstack.transaction(|t| {
            let (front, back) = (&paths.frontend, &paths.backend);
            for (path, owner, reader) in
                [(front, domid, BACKEND_DOMID), (back, BACKEND_DOMID, domid)]
            {
                t.remove(path)?;
                t.mkdir(path)?;
                t.set_permissions(path, &[('n', owner), ('r', reader)])?;
            }
            let mut put = |dir: &str, key: &str, value: &str| {
                t.write(&format!("{dir}/{key}"), value.as_bytes())
            };
            put(front, "backend", back)?;
            put(front, "backend-id", "0")?;
            put(front, "handle", &vif.handle.to_string())?;
            put(front, "mac", &vif.mac)?;
            put(front, "state", "1")?;
            put(back, "frontend", front)?;
            put(back, "frontend-id", &domid.to_string())?;
            put(back, "handle", &vif.handle.to_string())?;
            put(back, "mac", &vif.mac)?;
            put(back, "online", "1")?;
            for (key, value) in &vif.backend_keys {
                put(back, key, value)?;
            }
            put(back, "state", "1")
        })?;
        Ok(paths)
    }

    /// Requests the backend to close the disk, as `xl block-detach` does (blkif.md 3.6).
    ///
    /// # Errors
    /// The store's.
    pub fn unplug(&mut self, disk: &DiskPaths) -> Result<(), LoopbackError> {
        Ok(self.toolstack.transaction(|t| {
            t.write(&format!("{}/online", disk.backend), b"0")?;
            t.write(&format!("{}/state", disk.backend), b"5")
        })?)
    }

    /// Removes both directories, as the toolstack does once the backend is in state 6.
    ///
    /// # Errors
    /// The store's.
    pub fn remove_disk(&mut self, disk: &DiskPaths) -> Result<(), LoopbackError> {
        Ok(self.toolstack.transaction(|t| {
            t.remove(&disk.frontend)?;
            t.remove(&disk.backend)
        })?)
    }

    /// Destroys the guest: its directory, and the handle here. Its memory remains while other parties have it.
    ///
    /// # Errors
    /// The store's.
    pub fn destroy(&mut self, domid: DomId) -> Result<(), LoopbackError> {
        self.guests.remove(&domid);
        self.toolstack.remove(&home(domid))?;
        self.server.announce_released();
        Ok(())
    }

    /// Suspends the guest, as its own kernel does when the toolstack asks for it. The test sees to it
    /// that the guest's frontends rest.
    ///
    /// # Errors
    /// The store's.
    pub fn suspend(&mut self, domid: DomId) -> Result<(), LoopbackError> {
        self.toolstack.write(&suspended(domid), b"")?;
        self.server.announce_released();
        Ok(())
    }

    /// Resumes a guest that was suspended, with the rings that it had. No process is told.
    ///
    /// # Errors
    /// The store's.
    pub fn resume(&mut self, domid: DomId) -> Result<(), LoopbackError> {
        Ok(self.toolstack.remove(&suspended(domid))?)
    }

    /// The number in a `state` node of the backend's directory; 0 if there is none.
    ///
    /// # Errors
    /// The store's.
    pub fn backend_state(&mut self, disk: &DiskPaths) -> Result<u32, LoopbackError> {
        state(&mut self.toolstack, &format!("{}/state", disk.backend))
    }

    /// Waits until the backend is in one of `states`; returns the state.
    ///
    /// # Errors
    /// [`LoopbackError::Timeout`].
    pub fn wait_for_backend(
        &mut self,
        disk: &DiskPaths,
        states: &[u32],
        timeout: Duration,
    ) -> Result<u32, LoopbackError> {
        let path = format!("{}/state", disk.backend);
        wait_for_state(&mut self.toolstack, &path, states, timeout)
    }
}

/// The node that stands for the hypervisor's knowledge of a suspended guest. No guest can read it.
fn suspended(domid: DomId) -> String {
    format!("/tool/suspended/{domid}")
}

/// The states of the guests of a machine, as the hypervisor tells them to any process with a connection
/// to its store.
pub struct LoopbackDomains(Mutex<Store>);

impl LoopbackDomains {
    /// Asks by this connection.
    pub fn new(store: Store) -> LoopbackDomains {
        LoopbackDomains(Mutex::new(store))
    }
}

impl Domains for LoopbackDomains {
    fn state(&self, domid: DomId) -> io::Result<DomainState> {
        let mut store = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut has = |path: &str| match store.read(path) {
            Ok(node) => Ok(node.is_some()),
            Err(e) => Err(io::Error::other(e)),
        };
        Ok(match (has(&home(domid))?, has(&suspended(domid))?) {
            (false, _) => DomainState::Gone,
            (true, true) => DomainState::Suspended,
            (true, false) => DomainState::Runs,
        })
    }
}

/// The number in the node; 0, which is Unknown, if there is none.
pub(super) fn state(store: &mut Store, path: &str) -> Result<u32, LoopbackError> {
    let value = store.read(path)?.unwrap_or_default();
    Ok(std::str::from_utf8(&value).ok().and_then(|v| v.parse().ok()).unwrap_or(0))
}

/// Waits until the node has one of these numbers. Takes every event of this connection.
pub(crate) fn wait_for_state(
    store: &mut Store,
    path: &str,
    states: &[u32],
    timeout: Duration,
) -> Result<u32, LoopbackError> {
    let token = format!("wait:{path}");
    store.watch(path, &token)?;
    let outcome = wait_watched(store, path, states, timeout);
    store.unwatch(path, &token)?;
    outcome
}

fn wait_watched(
    store: &mut Store,
    path: &str,
    states: &[u32],
    timeout: Duration,
) -> Result<u32, LoopbackError> {
    let clock = SystemClock;
    let end_ns = clock.now_ns().saturating_add(timeout.as_nanos() as u64);
    loop {
        while store.poll_event()?.is_some() {}
        let now = state(store, path)?;
        if states.contains(&now) {
            return Ok(now);
        }
        let left = Duration::from_nanos(end_ns.saturating_sub(clock.now_ns()));
        if left.is_zero() {
            let ms = timeout.as_millis() as u64;
            let what = format!("{path} did not become one of {states:?} (it is {now})");
            return Err(LoopbackError::Timeout { what, ms });
        }
        // The descriptor does not signal events that came with a reply, so check again soon.
        wait_readable(store, left.min(Duration::from_millis(20)))?;
    }
}

fn wait_readable(store: &Store, timeout: Duration) -> Result<(), LoopbackError> {
    let mut fds = [PollFd::from_borrowed_fd(store.fd(), PollFlags::IN)];
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(LoopbackError::system("wait for the store")(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_xen::store::StoreError;

    fn machine_with_disk() -> (Machine, DiskPaths) {
        let mut machine = Machine::new().unwrap();
        let domid = machine.add_guest(GuestOptions::default()).unwrap();
        let disk = machine.attach_disk(domid, Disk::xvd(1).read_only()).unwrap();
        (machine, disk)
    }

    #[test]
    fn a_disk_has_the_directories_that_libxl_makes() {
        let (machine, disk) = machine_with_disk();
        let mut store = machine.store().unwrap();
        assert_eq!(disk.frontend, "/local/domain/1/device/vbd/51728");
        assert_eq!(disk.backend, "/local/domain/0/backend/vbd3/1/51728");
        let mut key = |path: String| store.read_string(&path).unwrap().unwrap_or_default();
        assert_eq!(key(format!("{}/backend", disk.frontend)), disk.backend);
        assert_eq!(key(format!("{}/frontend", disk.backend)), disk.frontend);
        assert_eq!(key(format!("{}/mode", disk.backend)), "r");
        assert_eq!(key(format!("{}/dev", disk.backend)), "xvdb");
        assert_eq!(key(format!("{}/online", disk.backend)), "1");
    }

    #[test]
    fn each_side_writes_its_own_directory_and_reads_the_other() {
        let (machine, disk) = machine_with_disk();
        let mut guest = machine.guest_store(disk.domid).unwrap();
        guest.write(&format!("{}/state", disk.frontend), b"3").unwrap();
        assert!(guest.read(&format!("{}/state", disk.backend)).unwrap().is_some());
        let foreign = guest.write(&format!("{}/state", disk.backend), b"6");
        assert!(matches!(foreign, Err(StoreError::Access { .. })));
        let name = guest.write(&format!("{}/name", home(disk.domid)), b"other");
        assert!(matches!(name, Err(StoreError::Access { .. })));
    }

    #[test]
    fn waiting_for_a_state_sees_changes_and_ends_in_time() {
        let (mut machine, disk) = machine_with_disk();
        let mut backend = machine.store().unwrap();
        let path = format!("{}/state", disk.backend);
        let late = machine.wait_for_backend(&disk, &[2, 4], Duration::from_millis(10));
        assert!(matches!(late, Err(LoopbackError::Timeout { .. })));
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            backend.write(&path, b"4").unwrap();
        });
        let state = machine.wait_for_backend(&disk, &[2, 4], Duration::from_secs(5)).unwrap();
        assert_eq!(state, 4);
        thread.join().unwrap();
    }

    #[test]
    fn unplugging_and_removing_leave_nothing() {
        let (mut machine, disk) = machine_with_disk();
        machine.unplug(&disk).unwrap();
        assert_eq!(machine.backend_state(&disk).unwrap(), 5);
        machine.remove_disk(&disk).unwrap();
        assert_eq!(machine.backend_state(&disk).unwrap(), 0);
        machine.destroy(disk.domid).unwrap();
        assert!(machine.guest(disk.domid).is_err());
        machine.remove_disk(&disk).unwrap();
    }
}
