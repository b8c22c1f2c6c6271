//! All copies and connections of a server.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::fence::Terms;
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::wire::Extent;
use ferrite_pool::{BootId, ConnId, Generation, OwnerId};
use rustix::io::Errno;

use crate::Fault;
use crate::copy::Copy;
use crate::disk::Machine;
use crate::folder::Folder;
use crate::link::Budget;
use crate::lun::{self, LunName, LunStore};

/// Most connections. Further ones are turned away.
const MAX_CONNECTIONS: usize = 512;
const STACK_BYTES: usize = 256 << 10;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A server of a pool. It ends with the process.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

/// The space of a server's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that are free.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// The state that all connections share.
pub(crate) struct Shared {
    store: Mutex<Store>,
    copies: Mutex<HashMap<String, Arc<Copy>>>,
    pub(crate) budget: Arc<Budget>,
    boot: BootId,
    connections: AtomicUsize,
    numbers: AtomicU64,
    refusals: SharedLogLimit,
}

/// The store of the copies.
pub(crate) enum Store {
    Folder(Folder),
    Lun(LunStore),
}

/// The answer to an owner that opens a copy.
pub(crate) enum Opened {
    Copy(Arc<Copy>),
    /// A later owner has had it.
    Refused(Generation),
}

impl Server {
    /// The server `name` of the pool `pool`, with its copies in `folder`. An empty folder becomes its.
    ///
    /// # Errors
    /// The folder is another server's, is served already, or is no server's and not empty.
    pub fn new(folder: &Path, pool: [u8; 16], name: &str) -> Result<Server, Fault> {
        let boot = std::fs::read(BOOT_ID).map_err(|e| {
            let what = format!("cannot read {BOOT_ID}");
            Fault::new(&what, e, "mount /proc: a server has to know when its system was started")
        })?;
        // The first bytes of a hash are as good as the whole identifier, and are a number.
        let boot =
            blake3::hash(&boot).as_bytes().first_chunk().map_or(0, |b| u64::from_be_bytes(*b));
        Ok(Server::of(
            Store::Folder(Folder::open(folder, pool, name, Machine::default())?),
            BootId(boot),
        ))
    }

    /// A server on a simulated machine, whose start is the system's.
    ///
    /// # Errors
    /// As [`new`](Server::new).
    #[cfg(feature = "testing")]
    pub fn simulated(
        folder: &Path,
        pool: [u8; 16],
        name: &str,
        power: &crate::power::Power,
    ) -> Result<Server, Fault> {
        let machine = Machine::simulated(power.clone());
        let folder = Folder::open(folder, pool, name, machine)?;
        Ok(Server::of(Store::Folder(folder), BootId(power.boot())))
    }

    /// A LUN, served to the owner that this process is. No other process of this host opens it meanwhile.
    ///
    /// # Errors
    /// It is not here, another process of this host has it, or it is not the one that is meant.
    pub fn on_lun(name: &LunName, terms: Terms) -> Result<Server, Fault> {
        // R10: answered writes are on the LUN's medium, so they outlive each start of a system.
        const ALWAYS: BootId = BootId(1);
        Ok(Server::of(Store::Lun(LunStore::open(name, terms)?), ALWAYS))
    }

    fn of(store: Store, boot: BootId) -> Server {
        Server(Arc::new(Shared {
            store: Mutex::new(store),
            copies: Mutex::default(),
            budget: Arc::default(),
            boot,
            connections: AtomicUsize::new(0),
            numbers: AtomicU64::new(1),
            refusals: SharedLogLimit::default(),
        }))
    }

    /// The space for its copies. Of a LUN the map knows it.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn space(&self) -> std::io::Result<Space> {
        match &*self.0.store() {
            Store::Folder(folder) => folder.space().map(|(free, total)| Space { free, total }),
            Store::Lun(_) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// Says where on the LUN a copy begins.
    pub fn place(&self, copy: &str, start: u64) {
        if let Store::Lun(lun) = &mut *self.0.store() {
            lun.place(copy, start);
        }
    }

    /// Whether the LUN has failed, or is another host's: it has to be opened anew, when nothing has this one any more.
    pub fn has_failed(&self) -> bool {
        matches!(&*self.0.store(), Store::Lun(lun) if lun.held().has_failed())
    }

    /// Removes the files of a copy that the map has not any more, also if an owner has a session of it. One that is not
    /// there is fine.
    ///
    /// # Errors
    /// The files stay.
    pub fn discard(&self, extent: &Extent) -> Result<(), Fault> {
        let store = self.0.store();
        let Store::Folder(folder) = &*store else { return Ok(()) };
        let known = self.0.copies().get(&extent.name).cloned();
        match known {
            Some(copy) if copy.id() == extent.id => {
                copy.discard(folder)?;
                self.0.copies().remove(&extent.name);
                Ok(())
            }
            // Another copy has that name.
            Some(_) => Ok(()),
            None => match folder.open_copy(extent) {
                Ok(files) => folder.remove(&files.slot.fixed),
                Err(fault) if fault.errno == Errno::NOENT => Ok(()),
                Err(fault) => Err(fault),
            },
        }
    }

    /// The start of the system in which it runs, as a number.
    pub fn boot(&self) -> u64 {
        self.0.boot.0
    }

    /// Serves a connection, on threads of its own. `peer`: the other side, for the log.
    pub fn connect(&self, socket: OwnedFd, peer: String) {
        let shared = self.0.clone();
        if shared.connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            shared.connections.fetch_sub(1, Ordering::Relaxed);
            shared.log(&format!("{peer} was turned away: there are {MAX_CONNECTIONS} connections"));
            return;
        }
        let conn = ConnId(shared.numbers.fetch_add(1, Ordering::Relaxed));
        let thread = std::thread::Builder::new().name("owner".to_owned());
        let of = shared.clone();
        let thread = thread.stack_size(STACK_BYTES).spawn(move || {
            if let Err(e) = crate::connection::serve(&of, conn, socket) {
                of.log(&format!("{peer}: {e}"));
            }
            of.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(e) = thread {
            shared.connections.fetch_sub(1, Ordering::Relaxed);
            shared.log(&format!("a connection was turned away: no thread: {e}"));
        }
    }
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its pool, and its name.
    pub(crate) fn identity(&self) -> ([u8; 16], String) {
        match &*self.store() {
            Store::Folder(folder) => (folder.pool, folder.server.clone()),
            Store::Lun(lun) => (lun.name.pool, lun.name.server.clone()),
        }
    }

    /// Makes a copy. One that is there already, with the same identifier and size, is fine.
    pub(crate) fn create(&self, extent: &Extent, size: u64, is_whole: bool) -> Result<(), Fault> {
        match &*self.store() {
            Store::Folder(folder) => folder.create(extent, size, is_whole),
            Store::Lun(lun) => lun.create(extent, size, is_whole),
        }
    }

    fn copies(&self) -> MutexGuard<'_, HashMap<String, Arc<Copy>>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copy that an owner of this generation means. Its files are looked at each time: one may have been replaced in use.
    pub(crate) fn copy(
        &self,
        extent: &Extent,
        generation: Generation,
        owner: OwnerId,
    ) -> Result<Opened, Fault> {
        // One lock behind the other, always in this order: a copy is opened once.
        let store = self.store();
        let files = match &*store {
            Store::Folder(folder) => folder.open_copy(extent)?,
            Store::Lun(lun) => match lun.open_copy(extent, generation, owner)? {
                lun::Opened::Files(files) => *files,
                lun::Opened::Refused(stored) => return Ok(Opened::Refused(stored)),
            },
        };
        let mut copies = self.copies();
        let new = || Arc::new(Copy::new(files, self.boot));
        Ok(Opened::Copy(copies.entry(extent.name.clone()).or_insert_with(new).clone()))
    }

    /// Removes a copy for good.
    pub(crate) fn remove(&self, copy: &Arc<Copy>, conn: ConnId) -> Result<(), Fault> {
        match &*self.store() {
            Store::Folder(folder) => copy.remove(conn, folder)?,
            Store::Lun(_) => {
                let why = "the ranges of a LUN are given back together";
                return Err(Fault::new("cannot remove a copy", why, "ferrite pool remove-lun"));
            }
        }
        self.copies().retain(|_, known| !Arc::ptr_eq(known, copy));
        Ok(())
    }

    fn log(&self, text: &str) {
        limited!(warn, self.refusals, SystemClock.now_ns(), "{text}");
    }
}
