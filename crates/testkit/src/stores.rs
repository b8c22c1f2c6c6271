//! Stores, and volumes in them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::open_store;
use ferrite_disk::{Disk, DiskError, OpenOptions, Port};
use ferrite_io::arena::Arena;
use ferrite_io::engines::test_engine;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;
use ferrite_store::content::DomainKey;
use ferrite_store::journal::Name;
use ferrite_store::layout::Layout;
use ferrite_store::live::Operation;
use ferrite_store::medium::Medium;
use ferrite_store::opening;
use ferrite_store::owned::StoreHandle;

use crate::faulty::Faults;

/// The smallest store.
pub const SMALLEST: u64 = 18 << 20;

/// Operations in flight.
const ENTRIES: u32 = 32;

/// Little memory, so that pages are evicted.
pub fn options() -> OpenOptions {
    OpenOptions { metadata_bytes: 512 << 10, index_bytes: 1 << 20, ..OpenOptions::default() }
}

/// Runs steps on an engine of its own.
///
/// # Panics
/// There is no engine.
pub fn on_a_port<T>(
    files: Vec<Arc<std::os::fd::OwnedFd>>,
    work: impl AsyncFnOnce(&Port) -> T,
) -> T {
    on_a_port_of(&Faults::none(), files, work)
}

/// Runs steps on an engine with a test's faults and list.
///
/// # Panics
/// There is no engine.
pub fn on_a_port_of<T>(
    faults: &Faults,
    files: Vec<Arc<std::os::fd::OwnedFd>>,
    work: impl AsyncFnOnce(&Port) -> T,
) -> T {
    let arena = Arena::new(Disk::MAX_SCRATCH_BYTES).unwrap();
    let mut reactor = Reactor::new(faults.open(arena.clone(), ENTRIES).unwrap());
    let files = files.into_iter().map(|file| reactor.add_file(file).unwrap()).collect();
    let scratch = Scratch::new(arena.clone(), arena.span(0, Disk::MAX_SCRATCH_BYTES));
    let port = Port { io: reactor.io(), files, scratch };
    reactor.block_on(async { work(&port).await }).unwrap()
}

/// Makes a store, with a domain and volumes of so many blocks.
///
/// # Panics
/// It cannot be made.
pub fn create(path: &Path, bytes: u64, volumes: &[(&str, u64)]) {
    File::create_new(path).unwrap().set_len(bytes).unwrap();
    let raw = open_store(path, &OpenOptions::default()).unwrap();
    let layout = Layout::of(bytes).unwrap();
    on_a_port(raw.files(), async |port| {
        opening::create(&Medium::default(), port, &layout, [7; 16]).await
    })
    .unwrap();
    drop(raw);
    operate(path, Operation::Domain(Name::new("default").unwrap(), DomainKey([3; 32])));
    for (name, blocks) in volumes {
        operate(path, Operation::Create(Name::new(name).unwrap(), *blocks, 0));
    }
}

/// Executes an operation on whole volumes, and closes the store; returns the number of the new volume.
///
/// # Panics
/// It fails.
pub fn operate(path: &Path, operation: Operation) -> u32 {
    let handle = handle(path).unwrap();
    on_a_port(handle.store().files(), async |port| {
        let done = handle.store().live().operate(port, operation).await.unwrap();
        handle.store().live().close(port).await.unwrap();
        done
    })
}

/// Opens a store, or returns a handle if it is open in this process.
///
/// # Errors
/// See [`StoreHandle::open`].
pub fn handle(path: &Path) -> Result<StoreHandle, DiskError> {
    StoreHandle::open_on(path, &options(), open_store, &|arena| test_engine().open(arena, ENTRIES))
}
