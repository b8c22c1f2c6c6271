//! Volumes of a store that queues read where `map` says, while others write and discard, and passes give places
//! to others (store.md 6 and 7; threats.md T18).

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ferrite_disk::{Disk, Extent, OpenOptions};
use ferrite_store::content::DomainKey;
use ferrite_store::journal::Name;
use ferrite_store::live::Operation;

use crate::common::{Queue, dir_in_memory};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_testkit::stores::{SMALLEST, create, handle, on_a_port, operate, options};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 48;
/// Each is new content, several times as much as the store has room for.
const WRITES: u64 = 9000;
/// A write with such a number is a discard.
const DISCARDS: u64 = 7;

/// The possible contents of a block: from the number of its last write that was answered to the last that was begun.
struct Model([(AtomicU64, AtomicU64); BLOCKS as usize]);

impl Model {
    fn new() -> Model {
        Model(std::array::from_fn(|_| Default::default()))
    }

    fn answered(&self, block: u64) -> u64 {
        self.0[block as usize].0.load(SeqCst)
    }

    fn begun(&self, block: u64) -> u64 {
        self.0[block as usize].1.load(SeqCst)
    }
}

/// All words of a block have this; 0: zeros.
fn word(volume: u64, block: u64, write: u64) -> u64 {
    match write.is_multiple_of(DISCARDS) {
        true => 0,
        false => (volume + 1) << 56 | block << 40 | write,
    }
}

fn open(store: &Path, volume: u64) -> Arc<Disk> {
    let name = format!("store:{}#v{volume}", store.display());
    Arc::new(Disk::open(&name, &OpenOptions { read_only: false, ..options() }).unwrap())
}

fn write_all(disk: &Arc<Disk>, volume: u64, model: &Model) {
    let mut queue = Queue::of(disk.clone());
    let mut random = SplitMix64::new(volume);
    for write in 1..=WRITES {
        let block = random.next_u64() % BLOCKS;
        let at = block * BLOCK as u64;
        model.0[block as usize].1.store(write, SeqCst);
        match word(volume, block, write) {
            0 => queue.discard(at, BLOCK as u64).unwrap(),
            word => queue.write(at, &word.to_le_bytes().repeat(BLOCK / 8)).unwrap(),
        }
        model.0[block as usize].0.store(write, SeqCst);
    }
}

/// How often reads were answered by `map`, and how many of those the check did not believe.
#[derive(Debug, Default)]
struct Seen {
    mapped: u64,
    doubtful: u64,
}

/// Reads as queues do, until `ends`.
fn read_all(disk: &Arc<Disk>, volume: u64, model: &Model, ends: &AtomicBool, seed: u64) -> Seen {
    let mut queue = Queue::of(disk.clone());
    let (mut random, mut seen) = (SplitMix64::new(seed), Seen::default());
    let reader = disk.reader().unwrap();
    let port = queue.port();
    let buffer = queue.buffer(BLOCK);
    let span = buffer.span().slice(0, BLOCK);
    let mut bytes = vec![0; BLOCK];
    while !ends.load(SeqCst) {
        let block = random.next_u64() % BLOCKS;
        let at = block * BLOCK as u64;
        let answered = model.answered(block);
        let sweep = reader.enter();
        let extent = disk.map(at, BLOCK as u64);
        let operation = reader.keep(sweep);
        reader.leave(sweep);
        if random.next_u64().is_multiple_of(8) {
            // As if storage took its time.
            thread::sleep(Duration::from_micros(500));
        }
        let mut is_sure = true;
        match extent {
            Extent::Zeros { .. } => queue.pool.arena().fill(span, 0),
            Extent::Data { file, offset, .. } => {
                let port = port.clone();
                let read = async move { port.io.read_exact(port.files[file], offset, span).await };
                queue.reactor.block_on(read).unwrap().unwrap();
                is_sure = disk.check(queue.pool.arena(), at, span);
                seen.mapped += 1;
                seen.doubtful += u64::from(!is_sure);
            }
            Extent::Slow { .. } => is_sure = false,
        }
        reader.leave(operation);
        if !matches!(extent, Extent::Slow { .. }) {
            // Whatever the check says, a reader that is counted reads what the block had.
            queue.pool.arena().copy_out(span, &mut bytes);
            assert_is_one_of(&bytes, volume, block, answered..=model.begun(block));
        }
        if !is_sure {
            let (port, disk) = (port.clone(), disk.clone());
            let answered = model.answered(block);
            let read = async move { disk.read(&port, at, span).await };
            queue.reactor.block_on(read).unwrap().unwrap();
            queue.pool.arena().copy_out(span, &mut bytes);
            assert_is_one_of(&bytes, volume, block, answered..=model.begun(block));
        }
    }
    seen
}

fn assert_is_one_of(bytes: &[u8], volume: u64, block: u64, mut writes: RangeInclusive<u64>) {
    let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|word| word == &bytes[..8]), "a block of two writes");
    assert!(
        writes.any(|write| word(volume, block, write) == found),
        "block {block} of volume {volume} has {found:x}, between writes {writes:?}"
    );
}

#[test]
fn who_maps_while_places_are_given_again_never_reads_anothers_data() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("v0", BLOCKS)]);
    let name = |name| Name::new(name).unwrap();
    let other = operate(&store, Operation::Domain(name("other"), DomainKey([4; 32])));
    operate(&store, Operation::Create(name("v1"), BLOCKS, other as u16));
    let disks = [open(&store, 0), open(&store, 1)];
    let models = [Model::new(), Model::new()];
    let ends = AtomicBool::new(false);
    let (mut freed, mut failed, mut seen) = (0, None, Vec::new());
    thread::scope(|scope| {
        let (models, ends, disks) = (&models, &ends, &disks);
        let readers: Vec<_> = (0..2u64)
            .map(|i| {
                let read =
                    move || read_all(&disks[i as usize], i, &models[i as usize], ends, 100 + i);
                scope.spawn(read)
            })
            .collect();
        let writers: Vec<_> = (0..2u64)
            .map(|i| scope.spawn(move || write_all(&disks[i as usize], i, &models[i as usize])))
            .collect();
        let handle = handle(&store).unwrap();
        on_a_port(handle.store().files(), async |port| {
            while failed.is_none() && !writers.iter().all(thread::ScopedJoinHandle::is_finished) {
                match handle.store().live().gc(port).await {
                    Ok(passed) => freed += passed.freed,
                    Err(e) => failed = Some(e),
                }
            }
        });
        ends.store(true, SeqCst);
        seen.extend(readers.into_iter().map(|reader| reader.join().unwrap()));
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    assert!(failed.is_none(), "{failed:?}");
    assert!(freed > 2 * SMALLEST / BLOCK as u64, "{freed} places were given again");
    assert!(seen.iter().all(|seen| seen.mapped > 1000), "{seen:?}");
    assert!(seen.iter().any(|seen| seen.doubtful > 0), "{seen:?}");
}
