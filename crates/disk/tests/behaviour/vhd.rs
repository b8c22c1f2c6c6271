//! VHDs against a model of their sectors: any operations, in any order, with the image closed or
//! its process dead in between.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, Extent, OpenOptions};
use ferrite_images::vhd::{NewImage, NewParent, Uuid};

use crate::common::vhd::{self, at, create, parent};
use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;
use ferrite_io::reactor::Wait;
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::rounds;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tempfile::TempDir;

/// Sectors of the disk: its last block is not whole.
const SECTORS: u64 = 5 * 2048 + 3;

/// One operation on sectors of 512 bytes.
#[derive(Clone, Debug)]
enum Step {
    Read {
        at: u64,
        n: u64,
    },
    Write {
        at: u64,
        n: u64,
        byte: u8,
    },
    Discard {
        at: u64,
        n: u64,
    },
    Zero {
        at: u64,
        n: u64,
    },
    Flush,
    /// In good order, then opened again.
    Reopen,
    /// Like kill -9, then opened again.
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    let range =
        (0..SECTORS, prop_oneof![1u64..9, 1u64..600]).prop_map(|(at, n)| (at, n.min(SECTORS - at)));
    prop_oneof![
        6 => range.clone().prop_map(|(at, n)| Step::Read { at, n }),
        10 => (range.clone(), 1u8..255).prop_map(|((at, n), byte)| Step::Write { at, n, byte }),
        2 => range.clone().prop_map(|(at, n)| Step::Discard { at, n }),
        2 => range.prop_map(|(at, n)| Step::Zero { at, n }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::Die),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    None,
    Vhd,
    Raw,
}

/// Each sector is full of one byte.
struct Model {
    below: Vec<u8>,
    now: Vec<u8>,
    /// Discarded, and not written since: as before, as below, or zeros.
    loose: Vec<bool>,
}

impl Model {
    fn check(&self, at: u64, bytes: &[u8], step: usize) {
        for (i, sector) in bytes.chunks(512).enumerate() {
            let s = at as usize + i;
            let byte = sector[0];
            assert!(sector.iter().all(|b| *b == byte), "step {step}: sector {s} is torn");
            let allowed =
                byte == self.now[s] || (self.loose[s] && (byte == 0 || byte == self.below[s]));
            assert!(allowed, "step {step}: sector {s} is {byte}, not {}", self.now[s]);
        }
    }

    fn set(&mut self, at: u64, n: u64, byte: u8) {
        self.now[at as usize..(at + n) as usize].fill(byte);
        self.loose[at as usize..(at + n) as usize].fill(false);
    }
}

/// A device by a name in the directory of its parents, as logical volumes have one.
fn symlink(dir: &TempDir, device: &Path) -> PathBuf {
    let link = at(dir, "leaf.vhd");
    std::os::unix::fs::symlink(device, &link).unwrap();
    link
}

struct World {
    leaf: PathBuf,
    options: OpenOptions,
    queue: Option<Queue>,
    model: Model,
}

impl World {
    /// `device`: the leaf is on this, which is full of garbage.
    fn new(
        dir: &TempDir,
        state: &TempDir,
        (block_bytes, base, small): (u32, Base, bool),
        device: Option<&Path>,
    ) -> World {
        let leaf = device.map_or_else(|| at(dir, "leaf.vhd"), |device| symlink(dir, device));
        let mut new = NewImage { block_bytes, ..NewImage::dynamic(SECTORS * 512) };
        let mut below = vec![0; SECTORS as usize];
        if base != Base::None {
            // Shorter than the child, and not all of it written.
            for s in (0..4 * 2048).filter(|s| s % 7 < 3) {
                below[s] = 200 + (s % 50) as u8;
            }
        }
        let filled: Vec<u8> = below.iter().flat_map(|byte| [*byte; 512]).collect();
        match base {
            Base::None => {}
            Base::Raw => {
                let path = at(dir, "base.img");
                fs::write(&path, &filled[..4 * MIB as usize]).unwrap();
                new.parent = Some(NewParent {
                    uuid: Uuid::NIL,
                    bytes: 4 * MIB,
                    modified_unix_s: 0,
                    path: path.canonicalize().unwrap(),
                });
            }
            Base::Vhd => {
                let path = at(dir, "base.vhd");
                let footer = create(&path, &NewImage::dynamic(4 * MIB)).unwrap();
                let mut queue = vhd::queue(&path);
                for mib in 0..4 {
                    let part = &filled[(mib * MIB) as usize..((mib + 1) * MIB) as usize];
                    queue.write(mib * MIB, part).unwrap();
                }
                queue.close().unwrap();
                new.parent = Some(parent(&path, &footer));
            }
        }
        match device {
            None => create(&leaf, &new).unwrap(),
            Some(_) => vhd::create_on(&leaf, &new).unwrap(),
        };
        let options = OpenOptions {
            state_dir: Some(state.path().into()),
            metadata_bytes: if small { 0 } else { 16 << 20 },
            // An image on a device has no folder of its own.
            parents: ferrite_disk::Parents::Any,
            ..vhd::options()
        };
        let loose = vec![false; SECTORS as usize];
        let model = Model { now: below.clone(), below, loose };
        let mut world = World { leaf, options, queue: None, model };
        world.open();
        world
    }

    fn open(&mut self) {
        let stat = || fs::metadata(&self.leaf).map(|m| (m.len(), m.modified().unwrap())).unwrap();
        let before = stat();
        let disk = Disk::open(self.leaf.to_str().unwrap(), &self.options).unwrap();
        assert_eq!(before, stat(), "opening has written");
        self.queue = Some(Queue::new(disk));
    }

    fn open_if_closed(&mut self) {
        if self.queue.is_none() {
            self.open();
        }
    }

    fn step(&mut self, number: usize, step: &Step) {
        let queue = self.queue.as_mut().unwrap();
        match *step {
            Step::Read { at, n } => {
                let bytes = queue.read(at * 512, n as usize * 512).unwrap();
                self.model.check(at, &bytes, number);
            }
            Step::Write { at, n, byte } => {
                queue.write(at * 512, &vec![byte; n as usize * 512]).unwrap();
                self.model.set(at, n, byte);
            }
            Step::Discard { at, n } => {
                queue.discard(at * 512, n * 512).unwrap();
                self.model.loose[at as usize..(at + n) as usize].fill(true);
            }
            Step::Zero { at, n } => {
                queue.write_zeroes(at * 512, n * 512).unwrap();
                self.model.set(at, n, 0);
            }
            Step::Flush => queue.flush().unwrap(),
            Step::Reopen => {
                queue.close().unwrap();
                self.queue = None;
                assert_eq!(
                    fs::read_dir(self.options.state_dir.as_ref().unwrap()).unwrap().count(),
                    0
                );
                self.open();
            }
            Step::Die => {
                self.queue = None;
                self.open();
            }
        }
    }

    fn check_all(&mut self, number: usize) {
        for at in (0..SECTORS).step_by(2048) {
            self.step(number, &Step::Read { at, n: 2048.min(SECTORS - at) });
        }
    }
}

fn run(dir: impl Fn() -> TempDir, cases: u32) {
    let kinds = prop_oneof![Just(Base::None), Just(Base::Vhd), Just(Base::Raw)];
    let blocks = prop_oneof![Just(512u32), Just(4096), Just(65536), Just(2 << 20)];
    let all = (kinds, blocks, any::<bool>(), proptest::collection::vec(step(), 1..60));
    let mut runner = TestRunner::new(Config { cases, ..Config::default() });
    runner
        .run(&all, |(base, block_bytes, small, steps)| {
            let (dir, state) = (dir(), dir_in_memory());
            let mut world = World::new(&dir, &state, (block_bytes, base, small), None);
            for (i, step) in steps.iter().enumerate() {
                world.step(i, step);
            }
            for last in [Step::Die, Step::Reopen] {
                world.step(steps.len(), &last);
                world.check_all(steps.len());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn an_image_on_disk_is_what_its_model_says() {
    run(dir_on_disk, rounds(16));
}

#[test]
fn an_image_in_memory_is_what_its_model_says() {
    run(dir_in_memory, rounds(64));
}

#[test]
fn an_image_without_a_place_for_its_journal_keeps_what_was_flushed() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage::dynamic(SECTORS * 512)).unwrap();
    let mut queue = vhd::queue(&path);
    queue.write(512, &[1; 512]).unwrap();
    queue.flush().unwrap();
    queue.write(4 * MIB, &[2; 512]).unwrap();
    drop(queue);
    let mut queue = vhd::queue(&path);
    assert_eq!(queue.read(512, 512).unwrap(), [1; 512]);
    assert_eq!(queue.read(4 * MIB, 512).unwrap(), [0; 512]);
    // The space that the dead process had set aside is used again, and reads as zeros.
    queue.write(4 * MIB + 512, &[3; 512]).unwrap();
    assert_eq!(queue.read(4 * MIB, 512).unwrap(), [0; 512]);
}

/// A queue ends when its guest lets go of it, with whatever it does of its own accord.
#[test]
fn what_a_queue_was_committing_when_it_ended_is_committed_by_the_next() {
    let dir = dir_on_disk();
    for turns in 0..12 {
        let path = at(&dir, &format!("{turns}.vhd"));
        create(&path, &NewImage::dynamic(SECTORS * 512)).unwrap();
        let disk = Disk::open(path.to_str().unwrap(), &vhd::options()).unwrap();
        let mut ends = Queue::new(disk);
        let disk = ends.disk.clone();
        ends.write(2 * MIB, &[1; 512]).unwrap();
        let port = ends.port();
        let flushed = disk.clone();
        ends.reactor.spawn(async move {
            let _ = flushed.flush(&port).await;
        });
        for _ in 0..turns {
            ends.reactor.turn(Wait::No, &mut Vec::new()).unwrap();
        }
        drop(ends);
        let mut next = Queue::of(disk);
        next.flush().unwrap();
        assert!(!next.disk.is_dirty());
        drop(next);
        let found = vhd::queue(&path).read(2 * MIB, 512).unwrap();
        assert!(found == [1; 512], "after {turns} turns");
    }
}

/// The kernel tells of a lost write once: here to a commit that made room for a write.
#[test]
fn after_a_sync_that_failed_within_a_write_no_flush_succeeds() {
    for flushed in [false, true] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let mut world = World::new(&dir, &state, (4096, Base::Raw, true), None);
        let disk = world.queue.take().unwrap().disk;
        let faults = Faults::none();
        faults.once(Kind::Sync, Fault::Errno(EIO));
        let mut queue = Queue::on(disk, |inner| faults.around(inner));
        let below: Vec<_> = (0..200).map(|i| queue.read(i * 4096, 512).unwrap()).collect();
        let failed = (0..200).find(|i| queue.write(i * 4096, &[1; 512]).is_err());
        assert!(failed.is_some(), "no write needs a commit");
        if flushed {
            queue.flush().unwrap_err();
        }
        queue.close().unwrap_err();
        drop(queue);
        // The next process that opens the image finds the answered writes, until a flush has said that they may be
        // lost.
        world.open();
        for i in 0..failed.unwrap() {
            let found = world.queue.as_mut().unwrap().read(i * 4096, 512).unwrap();
            assert_eq!(found, if flushed { below[i as usize].clone() } else { vec![1; 512] });
        }
    }
}

/// One of two table sectors is written, and with it the place of a block that gets more data.
#[test]
fn after_a_commit_that_failed_data_is_durable_before_the_bitmap_that_says_so() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let mut world = World::new(&dir, &state, (4096, Base::Raw, false), None);
    let disk = world.queue.take().unwrap().disk;
    let far = 8 * 128 * 4096;
    let faults = Faults::none();
    faults.once(Ops::from(Kind::Write).at(1536 + 8 * 512), Fault::Errno(EIO));
    let mut queue = Queue::on(disk, |inner| faults.around(inner));
    queue.write(0, &[1; 512]).unwrap();
    queue.write(far, &[1; 512]).unwrap();
    queue.flush().unwrap_err();
    queue.write(1024, &[2; 512]).unwrap();
    faults.list();
    // Writes and syncs, and which of the two.
    let change = |op: &Op| match *op {
        Op::Write { file, .. } => Some((file, false)),
        Op::Sync { file } => Some((file, true)),
        _ => None,
    };
    for syncs in [3, 1] {
        queue.flush().unwrap();
        let ops: Vec<_> = faults.take_list().iter().filter_map(change).collect();
        let (file, _) = ops[0];
        assert!(ops.iter().all(|op| op.0 == file) && ops[0].1, "{ops:?}");
        assert_eq!(ops.iter().filter(|op| op.1).count(), syncs);
    }
}

/// The process dies in a commit that has written the table, and not told the journal yet.
#[test]
fn a_block_that_was_placed_and_not_written_shows_what_is_below() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let mut world = World::new(&dir, &state, (2 << 20, Base::Vhd, false), None);
    let mut queue = world.queue.take().unwrap();
    let end = SECTORS * 512;
    queue.write(end - 512, &[1; 512]).unwrap();
    world.model.set(SECTORS - 1, 1, 1);
    let placed = queue.disk.reserve(0, 512);
    assert!(matches!(placed, Extent::Data { .. }), "{placed:?}");
    let mut journals = fs::read_dir(state.path()).unwrap();
    let journal = journals.next().unwrap().unwrap().path();
    let before = fs::read(&journal).unwrap();
    queue.flush().unwrap();
    drop(queue);
    fs::write(&journal, before).unwrap();
    for last in [Step::Flush, Step::Die] {
        world.open_if_closed();
        world.step(0, &last);
        world.check_all(0);
    }
}

/// A device of so many bytes, none of them zero.
fn garbage(dir: &TempDir, bytes: u64) -> Option<Loop> {
    garbage_in_blocks(dir, bytes, 512)
}

fn garbage_in_blocks(dir: &TempDir, bytes: u64, block_bytes: u32) -> Option<Loop> {
    let file = at(dir, "device");
    fs::write(&file, vec![0xEE; bytes as usize]).unwrap();
    Loop::attach(&file, block_bytes)
}

#[test]
fn an_image_on_a_block_device_is_what_its_model_says() {
    let steps = proptest::collection::vec(step(), 1..60);
    let blocks = prop_oneof![Just(4096u32), Just(65536), Just(2 << 20)];
    let bases = prop_oneof![Just(Base::None), Just(Base::Vhd)];
    let media = prop_oneof![Just(512u32), Just(4096)];
    let mut runner = TestRunner::new(Config { cases: rounds(12), ..Config::default() });
    let kinds = (blocks, bases, any::<bool>());
    runner
        .run(&(media, kinds, steps), |(medium, kind, steps)| {
            let (dir, state) = (dir_on_disk(), dir_in_memory());
            let device = garbage_in_blocks(&dir, 16 * MIB, medium);
            let Some(device) = device else { return Ok(()) };
            let mut world = World::new(&dir, &state, kind, Some(&device.0));
            for (i, step) in steps.iter().enumerate() {
                world.step(i, step);
            }
            for last in [Step::Die, Step::Reopen] {
                world.step(steps.len(), &last);
                world.check_all(steps.len());
            }
            world.queue = None;
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_device_that_is_full_says_so_and_keeps_what_it_has() {
    let dir = dir_on_disk();
    let Some(device) = garbage(&dir, 8 * MIB) else { return };
    vhd::create_on(&device.0, &NewImage::dynamic(64 * MIB)).unwrap();
    let mut disk = vhd::queue(&device.0);
    for block in 0..3u64 {
        disk.write(block * 2 * MIB, &[1 + block as u8; 512]).unwrap();
    }
    let full = disk.write(30 * MIB, &[9; 512]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    disk.write(MIB, &[7; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let mut disk = vhd::queue(&device.0);
    assert_eq!(disk.read(MIB, 512).unwrap(), [7; 512]);
    assert_eq!(disk.read(4 * MIB, 1024).unwrap(), [[3; 512], [0; 512]].concat());
    assert_eq!(disk.read(30 * MIB, 512).unwrap(), [0; 512]);
    drop(disk);
    // A device that is too small for what is not even data.
    let large = NewImage::dynamic(2040 << 30);
    let small = garbage(&dir_on_disk(), MIB);
    if let Some(small) = small {
        assert!(vhd::create_on(&small.0, &large).unwrap_err().to_string().contains("are needed"));
    }
}

#[test]
fn several_queues_see_each_others_writes() {
    const QUEUES: usize = 4;
    for (block_bytes, base, small) in [
        (4096, Base::Vhd, true),
        (65536, Base::Vhd, true),
        (2 << 20, Base::Raw, false),
        (4096, Base::None, true),
    ] {
        let (dir, state) = (dir_in_memory(), dir_in_memory());
        let mut world = World::new(&dir, &state, (block_bytes, base, small), None);
        let disk = world.queue.take().unwrap().disk;
        // Each queue has every fourth sector, so that all share blocks, bitmaps and table sectors.
        let mine: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let work = |queue: usize| {
                let (disk, below) = (Arc::clone(&disk), world.model.below.clone());
                scope.spawn(move || write_own_sectors(Queue::of(disk), queue, QUEUES, below))
            };
            let threads: Vec<_> = (0..QUEUES).map(work).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for s in 0..SECTORS as usize {
            world.model.now[s] = mine[s % QUEUES][s];
        }
        drop(disk);
        for last in [Step::Die, Step::Reopen] {
            world.open_if_closed();
            world.step(0, &last);
            world.check_all(0);
        }
    }
}

/// Writes sectors that no other queue writes, reads them again, flushes now and then. Returns what
/// is in them at the end.
fn write_own_sectors(mut disk: Queue, queue: usize, queues: usize, below: Vec<u8>) -> Vec<u8> {
    let mut now = below;
    let mut random = SplitMix64::new(queue as u64);
    let turns = SECTORS / queues as u64;
    for turn in 0..3000 {
        let s = random.below(turns) as usize * queues + queue;
        match random.below(40) {
            0 => disk.flush().unwrap(),
            1 => {
                disk.write_zeroes(s as u64 * 512, 512).unwrap();
                now[s] = 0;
            }
            2..20 => {
                let byte = 1 + random.below(250) as u8;
                disk.write(s as u64 * 512, &[byte; 512]).unwrap();
                now[s] = byte;
            }
            _ => {
                let found = disk.read(s as u64 * 512, 512).unwrap();
                assert!(found == [now[s]; 512], "queue {queue}, turn {turn}, sector {s}");
            }
        }
    }
    now
}

#[test]
fn the_last_sector_of_an_open_file_is_never_a_guests() {
    let dir = dir_in_memory();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage { block_bytes: 4096, ..NewImage::dynamic(64 * MIB) }).unwrap();
    let mut disk = vhd::queue(&path);
    let footer = fs::read(&path).unwrap();
    let mut forged = vec![0; 4096];
    forged[3584..].copy_from_slice(&footer[footer.len() - 512..]);
    for block in 0..5000u64 {
        disk.write(block * 4096, &forged).unwrap();
        if block % 499 == 0 {
            let bytes = fs::read(&path).unwrap();
            assert!(bytes[bytes.len() - 512..].iter().all(|b| *b == 0), "{block}");
        }
    }
}
