//! The stores that this process has open. Each is open once, however many of its volumes are in use.
//!
//! A store's index, epochs and journal are in the memory of one process (processes.md 10). A task that opens a volume
//! shares the store with the tasks that have it open. The file's lock keeps other processes away. The last user closes
//! the store.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ferrite_disk_base::{DiskError, ErrorKind, OpenOptions, Port, READ_ONLY, Raw, SCRATCH_BYTES};
use ferrite_host::names;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::engines::EngineChoice;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::background::{self, Background, ServiceEngine};
use super::journal::VolumeId;
use super::live::{Live, Memory};
use super::superblock::Unusable;

/// The most operations under way while a store is opened.
const ENTRIES: u32 = 32;

/// Makes the engine for the I/O of an opening. Later each user has its own engine.
pub type OpenEngine<'a> = &'a dyn Fn(Arc<Arena>) -> io::Result<Box<dyn Engine>>;

/// Opens and locks the file or device of a store. The caller of an opening gives it: this crate does not know the formats
/// of images, so it cannot tell whether an image uses that file.
pub type OpenMedium = fn(&Path, &OpenOptions) -> Result<Raw, DiskError>;

/// The file or device of a store: device and inode of a file, or a device's number and 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoreKey(pub u64, pub u64);

impl StoreKey {
    /// The file or device at a path now. It identifies a store, not the path.
    ///
    /// # Errors
    /// There is none (`NotFound`), or it may not be looked at.
    pub fn at(path: &Path) -> io::Result<StoreKey> {
        let stat = names::stat(path)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => StoreKey(stat.st_rdev, 0),
            _ => StoreKey(stat.st_dev, stat.st_ino),
        })
    }
}

/// The stores of this process. One is opened at a time.
static STORES: Mutex<BTreeMap<StoreKey, Weak<Owned>>> = Mutex::new(BTreeMap::new());

fn stores() -> MutexGuard<'static, BTreeMap<StoreKey, Weak<Owned>>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module text.
pub struct Owned {
    live: Live,
    raw: Raw,
    users: Mutex<Users>,
    /// Held by a task that looks up a volume's number by its name, and uses that number.
    changing: Mutex<()>,
}

#[derive(Default)]
struct Users {
    count: usize,
    volumes: BTreeMap<VolumeId, Use>,
    /// The thread of background work, while disks of the store are served.
    background: Option<Background>,
}

/// The users of a volume.
enum Use {
    Reads(usize),
    Writes,
}

impl Owned {
    /// The store in use.
    #[inline]
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// The open file that all of its I/O goes to.
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.raw.files()
    }

    /// The open file or device that the store is in.
    #[inline]
    pub fn raw(&self) -> &Raw {
        &self.raw
    }

    fn key(&self) -> StoreKey {
        let (device, inode) = self.raw.inode();
        StoreKey(device, inode)
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// While the guard is held, a name keeps its number: no other task makes or deletes volumes.
    pub fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many use the store. If `is_user`, the caller is one of them and is not counted.
    pub fn users_but(&self, is_user: bool) -> usize {
        self.users().count - usize::from(is_user)
    }

    /// Whether a disk of this process uses the volume.
    pub fn is_used(&self, volume: VolumeId) -> bool {
        self.users().volumes.contains_key(&volume)
    }
}

/// A handle on a store that this process has open. Dropping the last one closes the store.
pub struct StoreHandle {
    store: Arc<Owned>,
    /// The volume in use, and whether it is written.
    volume: Option<(VolumeId, bool)>,
}

impl StoreHandle {
    /// Opens the store at `path` for its commands, or shares it if this process has it open.
    ///
    /// # Errors
    /// As `Disk::open`.
    pub fn open(
        path: &Path,
        options: &OpenOptions,
        medium: OpenMedium,
    ) -> Result<StoreHandle, DiskError> {
        StoreHandle::open_on(path, options, medium, &|arena| {
            EngineChoice::Auto.decide()?.kind.open(arena, ENTRIES)
        })
    }

    /// Opens the store as [`open`](StoreHandle::open) does, on another engine.
    ///
    /// # Errors
    /// As [`open`](StoreHandle::open).
    pub fn open_on(
        path: &Path,
        options: &OpenOptions,
        medium: OpenMedium,
        engine: OpenEngine<'_>,
    ) -> Result<StoreHandle, DiskError> {
        let mut stores = stores();
        if let Some(handle) =
            StoreKey::at(path).ok().and_then(|key| StoreHandle::among(&stores, key))
        {
            return Ok(handle);
        }
        let store = Arc::new(open(path, options, medium, engine)?);
        store.users().count = 1;
        stores.insert(store.key(), Arc::downgrade(&store));
        Ok(StoreHandle { store, volume: None })
    }

    /// Starts the background work, which runs until the last user leaves. This process has given up all rights that it
    /// does not need.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn serve(&self, engine: &ServiceEngine) -> io::Result<()> {
        let mut users = self.store.users();
        if users.background.is_none() {
            let (store, engine) = (self.store.clone(), engine.clone());
            let work = move |stop| {
                let engine = |arena| engine(arena, background::ENTRIES);
                background::work(&store.live, port_to(&store.raw, &engine)?, stop)
            };
            users.background = Some(Background::start(work)?);
        }
        Ok(())
    }

    /// Shares a store that this process has open. `None`: it has not.
    pub fn join(key: StoreKey) -> Option<StoreHandle> {
        StoreHandle::among(&stores(), key)
    }

    fn among(stores: &BTreeMap<StoreKey, Weak<Owned>>, key: StoreKey) -> Option<StoreHandle> {
        let store = stores.get(&key)?.upgrade()?;
        let mut users = store.users();
        // It has ended, and its last operations may be under way.
        if users.count == 0 {
            return None;
        }
        users.count += 1;
        drop(users);
        Some(StoreHandle { store, volume: None })
    }

    /// Whether this is the only user of the store.
    pub fn is_last(&self) -> bool {
        self.store.users().count == 1
    }

    /// Adds a user of a volume. `false`: another user writes the volume, or this one would write it beside others.
    pub fn take(&mut self, volume: VolumeId, writes: bool) -> bool {
        let mut users = self.store.users();
        let is_taken = match (users.volumes.entry(volume), writes) {
            (Entry::Vacant(free), true) => {
                free.insert(Use::Writes);
                true
            }
            (Entry::Vacant(free), false) => {
                free.insert(Use::Reads(1));
                true
            }
            (Entry::Occupied(mut used), false) => match used.get_mut() {
                Use::Reads(count) => {
                    *count += 1;
                    true
                }
                Use::Writes => false,
            },
            (Entry::Occupied(_), true) => false,
        };
        drop(users);
        if is_taken {
            self.volume = Some((volume, writes));
        }
        is_taken
    }

    /// The store.
    pub fn store(&self) -> &Arc<Owned> {
        &self.store
    }

    /// Ends the use of closed volumes. Other processes may open the store if that was its last use.
    pub fn leave(self) {
        let store = self.store.clone();
        drop(self);
        if store.users().count == 0 {
            store.raw.unlock();
        }
    }
}

impl Drop for StoreHandle {
    fn drop(&mut self) {
        let (mut stores, mut users) = loop {
            let stores = stores();
            let mut users = self.store.users();
            let background = if users.count == 1 { users.background.take() } else { None };
            let Some(background) = background else { break (stores, users) };
            // Others may open this store meanwhile, or another one.
            drop((users, stores));
            background.end();
        };
        if let Some((volume, _)) = self.volume {
            match users.volumes.get_mut(&volume) {
                Some(Use::Reads(count)) if *count > 1 => *count -= 1,
                _ => drop(users.volumes.remove(&volume)),
            }
        }
        users.count -= 1;
        let key = self.store.key();
        let is_it = |known: &Weak<Owned>| std::ptr::eq(known.as_ptr(), &raw const *self.store);
        if users.count == 0 && stores.get(&key).is_some_and(is_it) {
            stores.remove(&key);
        }
    }
}

fn cannot(path: &Path) -> String {
    format!("cannot open store {}", path.display())
}

/// Opens a store that this process does not have open. Its journal is replayed, so the store is written even for a
/// reader.
fn open(
    path: &Path,
    options: &OpenOptions,
    medium: OpenMedium,
    engine: OpenEngine<'_>,
) -> Result<Owned, DiskError> {
    let refuse =
        |why: &str, help: &str| Err(DiskError::new(ErrorKind::Usage, cannot(path), why, help));
    if options.unlocked {
        return refuse(
            "a store in use is looked at by its owner only",
            "leave -U out when no process uses it",
        );
    }
    let to_write = OpenOptions { read_only: false, opened: None, ..options.clone() };
    let raw = medium(path, &to_write).map_err(|e| match e.kind() {
        ErrorKind::InUse => in_use(path, &e),
        _ => DiskError::new(e.kind(), cannot(path), e.why(), help_of(&e)),
    })?;
    let memory = Memory { metadata: options.metadata_bytes, index: options.index_bytes };
    let live = start(&raw, memory, engine).map_err(|e| unusable(path, e))?;
    let (users, changing) = Default::default();
    Ok(Owned { live, raw, users, changing })
}

fn start(raw: &Raw, memory: Memory, engine: OpenEngine<'_>) -> io::Result<Live> {
    let (mut reactor, port) = port_to(raw, engine)?;
    let bytes = raw.bytes_now()?;
    reactor.block_on(async { Live::open(&port, bytes, memory).await })?
}

/// A way of this thread's to what a store is in.
pub(super) fn port_to(raw: &Raw, engine: OpenEngine<'_>) -> io::Result<(Reactor, Port)> {
    let arena = Arena::new(SCRATCH_BYTES)?;
    let mut reactor = Reactor::new(engine(arena.clone())?);
    let files = raw.files().into_iter().map(|file| reactor.add_file(file));
    let files = files.collect::<io::Result<_>>()?;
    let region = arena.span(0, SCRATCH_BYTES);
    let port = Port { io: reactor.io(), files, scratch: Scratch::new(arena, region) };
    Ok((reactor, port))
}

/// The next step for a user where there is no store.
pub const CHECK_PATH: &str = "check the path; ferrite store create makes a store";

/// The next step for a user where the store's own work finds no space.
pub const MAKE_ROOM: &str =
    "make a few MiB of room on its file system; then ferrite store delete and gc make more";

/// The next step for a user where the file of a store cannot be opened.
pub fn help_of(e: &DiskError) -> &str {
    match e.kind() {
        ErrorKind::NotFound => CHECK_PATH,
        ErrorKind::Permission if e.help().contains(READ_ONLY) => {
            "copy it to storage that can be written: opening a store carries out what its journal has"
        }
        _ => e.help(),
    }
}

/// The error if another process has the store open.
fn in_use(path: &Path, e: &DiskError) -> DiskError {
    let help = "only one process can have a store open: stop that process, or let it serve this volume, too (several \
                IMAGE --xen pairs of ferrite serve, several images of ferrite export nbd). Commands on stores work meanwhile, and a snapshot is read \
                through it (ferrite image convert, or ferrite export nbd --read-only)";
    DiskError::new(ErrorKind::InUse, cannot(path), e.why(), help)
}

fn unusable(path: &Path, e: io::Error) -> DiskError {
    let inner = e.get_ref().and_then(|inner| inner.downcast_ref::<Unusable>());
    let (kind, help) = match inner {
        Some(Unusable::Foreign) => {
            (ErrorKind::Unsuitable, "name a file that ferrite store create has made".to_owned())
        }
        Some(Unusable::Version { .. } | Unusable::Features { .. }) => {
            (ErrorKind::Unsuitable, "it was written by another program: use that, or a later one".to_owned())
        }
        _ if e.kind() == io::ErrorKind::InvalidInput => {
            (ErrorKind::Usage, "give it more; 16M is the default".to_owned())
        }
        _ if e.kind() == io::ErrorKind::InvalidData => (
            ErrorKind::Damaged,
            "nothing was changed: look for errors of its storage (dmesg), or restore it from a backup"
                .to_owned(),
        ),
        _ if e.kind() == io::ErrorKind::StorageFull => (ErrorKind::Io, MAKE_ROOM.to_owned()),
        _ => (ErrorKind::Io, "check the medium below it and the kernel's log (dmesg)".to_owned()),
    };
    DiskError::new(kind, cannot(path), e.to_string(), help).with_source(e)
}
