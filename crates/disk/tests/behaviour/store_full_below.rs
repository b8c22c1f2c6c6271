//! A store in a file whose file system is full: reads and the store's own work go on, and so do writes when something
//! was deleted (store.md 7, A full file system below). Tests that mount one need root; without it they pass and say so.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use ferrite_disk::Disk;
use ferrite_image_tools::stores::{Change, StoreCheck};
use ferrite_store::journal::Name;
use ferrite_store::live::Operation;

use crate::common::{MIB, Queue, dir_in_memory, work};
use ferrite_testkit::errno::ENOSPC;
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use ferrite_testkit::places::Small;
use ferrite_testkit::stores::{SMALLEST, create, handle, on_a_port, on_a_port_of, options};
use tempfile::TempDir;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 8192;

/// No other block of any test has this.
fn content(volume: u64, block: u64) -> Vec<u8> {
    (volume << 32 | (block + 1)).to_le_bytes().repeat(BLOCK / 8)
}

/// A store that is longer than its file system, with two volumes.
struct Host {
    dir: TempDir,
    _small: Small,
    store: PathBuf,
}

impl Host {
    fn new() -> Option<Host> {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let small = Small::mount(dir.path(), "size=48m")?;
        let store = dir.path().join("s");
        create(&store, 128 * MIB, &[("a", BLOCKS), ("b", BLOCKS)]);
        Some(Host { dir, _small: small, store })
    }

    fn open(&self, volume: &str) -> Queue {
        let name = format!("store:{}#{volume}", self.store.display());
        Queue::new(Disk::open(&name, &options()).unwrap())
    }

    /// Fills the file system: not a page is left.
    fn fill(&self) {
        let other = self.dir.path().join("other");
        let mut other = File::options().create(true).append(true).open(other).unwrap();
        while other.write(&[7; BLOCK]).is_ok() {}
    }

    fn change(&self, volume: &str, change: Change) {
        let volume = Name::new(volume).unwrap();
        work(None, |tools| tools.change_volume(&self.store, &volume, change)).unwrap();
    }

    fn is_whole(&self) {
        let checked =
            work(None, |tools| tools.check_store(&self.store, StoreCheck::default())).unwrap();
        assert!(checked.findings.is_empty(), "{checked:?}");
    }
}

/// Content of a volume's in these blocks, for which there is room.
fn some(queue: &mut Queue, volume: u64, blocks: Range<u64>) {
    for block in blocks {
        queue.write(block * BLOCK as u64, &content(volume, block)).unwrap();
    }
}

/// New content from this block on, until there is no room; the first block that has none.
fn write(queue: &mut Queue, volume: u64, from: u64) -> u64 {
    for block in from..BLOCKS {
        if let Err(e) = queue.write(block * BLOCK as u64, &content(volume, block)) {
            assert_eq!(e.kind(), ErrorKind::StorageFull, "{e}");
            return block;
        }
    }
    BLOCKS
}

fn has(queue: &mut Queue, volume: u64, blocks: Range<u64>) {
    for block in blocks {
        let found = queue.read(block * BLOCK as u64, BLOCK).unwrap();
        assert!(found == content(volume, block), "block {block} of volume {volume}");
    }
}

#[test]
fn a_deleted_volume_makes_room_for_another_one() {
    let Some(host) = Host::new() else { return };
    let mut b = host.open("b");
    assert_eq!(write(&mut b, 2, 0), BLOCKS);
    b.close().unwrap();
    b.disk.unlock();
    let mut a = host.open("a");
    some(&mut a, 1, 0..100);
    host.fill();
    let full = write(&mut a, 1, 100);
    assert!((100..BLOCKS).contains(&full), "{full}");
    // The store's passes have spent some of its ballast. Other files get nothing of the rest.
    host.fill();
    // Nothing of it is lost, and no write takes what passes need.
    for _ in 0..5 {
        assert_eq!(write(&mut a, 1, full), full);
    }
    has(&mut a, 1, 0..full);
    a.flush().unwrap();
    let deleted = handle(&host.store).unwrap();
    let live = deleted.store().live();
    let delete = Operation::Delete(live.volume_called("b").unwrap().number);
    on_a_port(deleted.store().files(), async |port| live.operate(port, delete).await.unwrap());
    let more = write(&mut a, 1, full);
    assert!(more > full, "{more} {full}");
    has(&mut a, 1, 0..more);
    a.close().unwrap();
    a.disk.unlock();
    drop((a, deleted));
    host.is_whole();
    has(&mut host.open("a"), 1, 0..more);
}

#[test]
fn a_store_that_was_left_full_is_opened_and_its_commands_make_room() {
    let Some(host) = Host::new() else { return };
    let mut a = host.open("a");
    some(&mut a, 1, 0..1000);
    host.fill();
    // As by a death: its writes are in the journal.
    drop(a);
    let mut a = host.open("a");
    has(&mut a, 1, 0..1000);
    drop(a);
    // The next process has the ballast that the one before has spent and not used.
    host.fill();
    let mut a = host.open("a");
    let full = write(&mut a, 1, 1000);
    drop(a);
    host.fill();
    has(&mut host.open("a"), 1, 0..full);
    host.change("a", Change::Snapshot(Name::new("then").unwrap()));
    host.fill();
    host.change("a", Change::Delete);
    host.fill();
    host.change("then", Change::Delete);
    host.fill();
    let before = fs::metadata(&host.store).unwrap().blocks();
    work(None, |tools| tools.collect_store(&host.store)).unwrap();
    let after = fs::metadata(&host.store).unwrap().blocks();
    assert!(512 * (before - after) > full / 2 * BLOCK as u64, "{before} {after}");
    host.is_whole();
    let mut b = host.open("b");
    assert!(write(&mut b, 2, 0) > full / 2);
    b.close().unwrap();
}

#[test]
fn new_data_wait_until_what_a_checkpoint_has_spent_is_there_again() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256)]);
    let handle = handle(&store).unwrap();
    let live = handle.store().live();
    let a = live.volume("a").unwrap();
    let faults = Faults::none();
    on_a_port_of(&faults, handle.store().files(), async |port| {
        let write = async |block: u64| {
            let piece = port.scratch.take(BLOCK).await;
            piece.copy_in(&content(1, block));
            live.write(port, a, block * BLOCK as u64, piece.span()).await
        };
        write(0).await.unwrap();
        let no_space = Ops::from(Kind::Allocate).fail(ENOSPC);
        faults.set([Ops::from(Kind::Write).fail(ENOSPC).once(), no_space]);
        live.checkpoint(port).await.unwrap();
        assert_eq!(write(1).await.unwrap_err().kind(), ErrorKind::StorageFull);
        live.write_zeros(port, a, 0, BLOCK as u64).await.unwrap();
        live.flush(port).await.unwrap();
        faults.clear();
        write(1).await.unwrap();
    });
}
