//! All copies and connections of a server.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::wire::Extent;
use ferrite_pool::{BootId, ConnId};

use crate::Fault;
use crate::copy::Copy;
use crate::folder::Folder;
use crate::link::Budget;

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

/// What all connections share.
pub(crate) struct Shared {
    folder: Mutex<Folder>,
    copies: Mutex<HashMap<String, Arc<Copy>>>,
    pub(crate) budget: Arc<Budget>,
    boot: BootId,
    connections: AtomicUsize,
    numbers: AtomicU64,
    refusals: SharedLogLimit,
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
        Ok(Server(Arc::new(Shared {
            folder: Mutex::new(Folder::open(folder, pool, name)?),
            copies: Mutex::default(),
            budget: Arc::default(),
            boot: BootId(boot),
            connections: AtomicUsize::new(0),
            numbers: AtomicU64::new(1),
            refusals: SharedLogLimit::default(),
        })))
    }

    /// The space for its copies.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn space(&self) -> std::io::Result<Space> {
        self.0.folder().space().map(|(free, total)| Space { free, total })
    }

    /// The start of the system in which it runs, as a number.
    pub fn boot(&self) -> u64 {
        self.0.boot.0
    }

    /// Serves a connection, on threads of its own. `peer`: who that is, for the log.
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
    pub(crate) fn folder(&self) -> MutexGuard<'_, Folder> {
        self.folder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copies(&self) -> MutexGuard<'_, HashMap<String, Arc<Copy>>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copy that an owner means. Its files are looked at each time: one may have been replaced in use.
    pub(crate) fn copy(&self, extent: &Extent) -> Result<Arc<Copy>, Fault> {
        // One lock behind the other, always in this order: a copy is opened once.
        let folder = self.folder();
        let files = folder.open_copy(extent)?;
        let mut copies = self.copies();
        let new = || Arc::new(Copy::new(files, self.boot));
        Ok(copies.entry(extent.name.clone()).or_insert_with(new).clone())
    }

    /// Removes a copy for good.
    pub(crate) fn remove(&self, copy: &Arc<Copy>, conn: ConnId) -> Result<(), Fault> {
        let folder = self.folder();
        copy.remove(conn, &folder)?;
        self.copies().retain(|_, known| !Arc::ptr_eq(known, copy));
        Ok(())
    }

    fn log(&self, text: &str) {
        limited!(warn, self.refusals, SystemClock.now_ns(), "{text}");
    }
}
