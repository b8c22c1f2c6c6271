//! A simulated machine with a store, for tests.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk_base::Port;
use ferrite_io::arena::Arena;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::{MIN_REGION_BYTES, Scratch};
use ferrite_simio::SimWorld;
use tempfile::TempDir;

use super::layout::Layout;
use super::medium::Medium;
use super::{StoreId, opening};

/// Of the store: the smallest there is.
pub(super) const BYTES: u64 = 18 << 20;
/// The store's.
pub(super) const ID: StoreId = [9; 16];
/// Memory for scratch, at the beginning of a process's arena. The rest is the test's.
pub(super) const SCRATCH_BYTES: usize = 8 * MIN_REGION_BYTES;

/// A machine with a new store.
pub(super) struct Machine {
    _dir: TempDir,
    pub(super) path: PathBuf,
    pub(super) world: SimWorld,
}

/// A process's way to a file.
pub(super) fn port(world: &SimWorld, path: &Path) -> (Port, Reactor) {
    let arena = Arena::new(2 << 20).unwrap();
    let mut reactor = Reactor::new(world.engine(arena.clone()));
    let file = File::options().read(true).write(true).open(path).unwrap();
    let files = [reactor.add_file(Arc::new(file.into())).unwrap()].into();
    let region = arena.span(0, SCRATCH_BYTES);
    (Port { io: reactor.io(), files, scratch: Scratch::new(arena, region) }, reactor)
}

impl Machine {
    pub(super) fn new(seed: u64) -> Machine {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let path = dir.path().join("store");
        File::create_new(&path).unwrap().set_len(BYTES).unwrap();
        let world = SimWorld::new(seed);
        let (port, mut reactor) = port(&world, &path);
        let layout = Layout::of(BYTES).unwrap();
        let create = async { opening::create(&Medium::default(), &port, &layout, ID).await };
        reactor.block_on(create).unwrap().unwrap();
        Machine { _dir: dir, path, world }
    }
}
