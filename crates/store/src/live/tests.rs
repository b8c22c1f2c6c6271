use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::task::Poll;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::reactor::Reactor;
use ferrite_simio::{Fault, On};
use ferrite_testkit::{is_night, rounds};

use self::story::{After, Story};
use super::*;
use crate::content::DomainKey;
use crate::journal::{Name, VolumeId};
use crate::testing::{self, BYTES, Machine, SCRATCH_BYTES};

mod altering;
mod checking;
mod dropped;
mod flips;
mod growing;
mod mapping;
mod passes;
mod room;
mod scheduler;
mod story;
mod sync_records;
mod turns;
mod unreadable;

const SECTOR: usize = 512;
const PER_BLOCK: u64 = 8;
/// Of a volume, in blocks: four leaves.
const BLOCKS: u64 = 2000;
/// The blocks that stories use: the ends of a volume, and the end of a leaf.
const ZONES: [Range<u64>; 3] = [0..24, 500..524, 1976..2000];
/// Small, so that leaves go and come, and checkpoints are made for room.
const MEMORY: Memory = Memory { metadata: LEAST_METADATA, index: 1 << 12 };

/// The bytes that a sector may have.
#[derive(Clone, Debug)]
struct Sector {
    /// Read now, or after the death of the process.
    now: BTreeSet<u8>,
    /// After a power cut.
    durable: BTreeSet<u8>,
}

/// The allowed contents of volumes, by name. A sector without an entry is zeros.
type Model = BTreeMap<String, BTreeMap<u64, Sector>>;

/// A write: sectors, and the byte that they get.
#[derive(Clone, Debug)]
struct Write {
    volume: String,
    sectors: Range<u64>,
    value: u8,
}

fn zeros() -> Sector {
    Sector { now: [0].into(), durable: [0].into() }
}

/// The work that goes on beside writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Checkpoint,
    Pass,
    Check,
}

struct Process {
    live: Arc<Live>,
    port: Port,
    /// Last, as it ends the others' operations.
    reactor: Reactor,
}

type Task<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;

/// All of them side by side, until all have ended.
async fn all(mut tasks: Vec<Task<'_>>) -> Vec<io::Result<()>> {
    let mut done: Vec<Option<io::Result<()>>> = tasks.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (task, done) in tasks.iter_mut().zip(&mut done) {
            if done.is_none()
                && let Poll::Ready(value) = task.as_mut().poll(cx)
            {
                *done = Some(value);
            }
        }
        match done.iter().all(Option::is_some) {
            true => Poll::Ready(done.iter_mut().filter_map(Option::take).collect()),
            false => Poll::Pending,
        }
    })
    .await
}

impl Process {
    fn of(machine: &Machine) -> io::Result<Process> {
        Self::with(machine, MEMORY)
    }

    fn with(machine: &Machine, memory: Memory) -> io::Result<Process> {
        let (port, mut reactor) = testing::port(&machine.world, &machine.path);
        let bytes = machine.path.metadata()?.len();
        let live = reactor.block_on(async { Live::open(&port, bytes, memory).await })??;
        Ok(Process { live: Arc::new(live), port, reactor })
    }

    fn volume(&self, name: &str) -> VolumeId {
        self.live.volume(name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    fn operate(&mut self, operation: Operation) -> io::Result<u32> {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.operate(port, operation).await })?
    }

    fn flush(&mut self) -> io::Result<()> {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.flush(port).await })??;
        self.run_durability_work();
        Ok(())
    }

    /// Durability work, whose errors are ignored.
    fn run_durability_work(&mut self) {
        let Process { live, port, reactor } = self;
        let _ = reactor.block_on(async { live.run_durability_work(port).await });
    }

    /// Sectors of a volume.
    fn read(&mut self, name: &str, sectors: Range<u64>) -> io::Result<Vec<u8>> {
        let volume = self.volume(name);
        let Process { live, port, reactor } = self;
        let bytes = (sectors.end - sectors.start) as usize * SECTOR;
        let span = port.memory().span(SCRATCH_BYTES, bytes);
        let read = async { live.read(port, volume, sectors.start * SECTOR as u64, span).await };
        reactor.block_on(read)??;
        let mut found = vec![0; bytes];
        port.memory().copy_out(span, &mut found);
        self.read_as_queues_do(name, sectors.start, &found)?;
        let one = |sector: &[u8]| {
            assert!(sector.iter().all(|b| *b == sector[0]), "a sector of two writes");
            sector[0]
        };
        Ok(found.chunks(SECTOR).map(one).collect())
    }

    /// Writes side by side, perhaps beside a checkpoint.
    fn write(&mut self, writes: &[Write], beside: bool) -> io::Result<Vec<io::Result<()>>> {
        self.write_beside(writes, if beside { Beside::Checkpoint } else { Beside::Nothing })
    }

    fn write_beside(
        &mut self,
        writes: &[Write],
        beside: Beside,
    ) -> io::Result<Vec<io::Result<()>>> {
        let done = self.only_write(writes, beside)?;
        self.run_durability_work();
        Ok(done)
    }

    fn only_write(&mut self, writes: &[Write], beside: Beside) -> io::Result<Vec<io::Result<()>>> {
        let volumes: Vec<VolumeId> = writes.iter().map(|w| self.volume(&w.volume)).collect();
        let Process { live, port, reactor } = self;
        let mut tasks: Vec<Task> = Vec::new();
        let mut memory = SCRATCH_BYTES;
        for (write, volume) in writes.iter().zip(volumes) {
            let bytes = (write.sectors.end - write.sectors.start) as usize * SECTOR;
            let offset = write.sectors.start * SECTOR as u64;
            let (live, port) = (&*live, &*port);
            if write.value == 0 {
                tasks.push(Box::pin(live.write_zeros(port, volume, offset, bytes as u64)));
                continue;
            }
            let span = port.memory().span(memory, bytes);
            memory += bytes;
            port.memory().fill(span, write.value);
            tasks.push(Box::pin(live.write(port, volume, offset, span)));
        }
        match beside {
            Beside::Nothing => {}
            Beside::Checkpoint => tasks.push(Box::pin(live.checkpoint(port))),
            Beside::Pass => tasks.push(Box::pin(async { live.gc(port).await.map(drop) })),
            Beside::Check => tasks.push(Box::pin(checking::all_is_in_order(live, port))),
        }
        let mut done = reactor.block_on(all(tasks))?;
        if matches!(beside, Beside::Pass | Beside::Check) {
            done.pop().unwrap()?;
        }
        done.truncate(writes.len());
        Ok(done)
    }
}

#[test]
fn after_any_end_volumes_have_what_they_may_have() {
    let (mut stopped, seeds) = (0, rounds(24));
    for seed in 0..u64::from(seeds) {
        stopped += Story::new(seed, None).tell(None, 2);
        for stop in 0..4 {
            let at = 3 + stop * 211 + seed * 17;
            stopped += Story::new(seed, None).tell(Some(at), 3);
        }
    }
    assert!(stopped > 6 * seeds, "{stopped}");
}

#[test]
fn a_write_that_fails_changes_nothing_of_others() {
    for seed in 100..100 + u64::from(rounds(30)) {
        Story::new(seed, Some(On::Write)).tell(None, 2);
        Story::new(seed, Some(On::Write)).tell(Some(50 + seed * 7), 2);
    }
}

#[test]
fn after_a_failed_sync_the_next_process_refers_to_nothing_that_is_lost() {
    for seed in 200..200 + u64::from(rounds(40)) {
        Story::new(seed, Some(On::Sync)).tell(None, 3);
    }
}

/// A process with one volume, `v0`.
fn with_a_volume() -> (Machine, Process) {
    let story = Story::new(1, None);
    let process = Process::of(&story.machine).unwrap();
    (story.machine, process)
}

fn write(volume: &str, sectors: Range<u64>, value: u8) -> Write {
    Write { volume: volume.into(), sectors, value }
}

#[test]
fn equal_blocks_of_one_domain_take_one_place_and_zeros_none() {
    let (_machine, mut process) = with_a_volume();
    let free = |process: &Process| process.live.shared.core().space.free();
    let before = free(&process);
    let put = |process: &mut Process, writes: &[Write]| {
        process.write(writes, false).unwrap().into_iter().for_each(|done| done.unwrap());
        before - free(process)
    };
    assert_eq!(put(&mut process, &[write("v0", 0..64, 0)]), 0);
    assert_eq!(put(&mut process, &[write("v0", 0..64, 5)]), 1, "equal blocks of one write");
    assert_eq!(put(&mut process, &[write("v0", 4000..4400, 5)]), 1, "found by its hash");
    assert_eq!(put(&mut process, &[write("v1", 0..8, 5)]), 2, "of another domain");
    assert_eq!(put(&mut process, &[write("v0", 8..16, 6)]), 3);
}

#[test]
fn parts_of_one_block_that_are_written_at_once_are_all_there() {
    let (_machine, mut process) = with_a_volume();
    let writes: Vec<Write> = (0..8).map(|i| write("v0", i..i + 1, i as u8 + 1)).collect();
    process.write(&writes, false).unwrap().into_iter().for_each(|done| done.unwrap());
    assert_eq!(process.read("v0", 0..9).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8, 0]);
}

#[test]
fn a_damaged_block_is_an_error_and_never_data() {
    let (machine, mut process) = with_a_volume();
    process.write(&[write("v0", 0..8, 7), write("v0", 8..16, 8)], false).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let at = bytes.chunks(BLOCK_BYTES).position(|block| block.iter().all(|b| *b == 7)).unwrap();
    file.write_all_at(&[6], (at * BLOCK_BYTES + 77) as u64).unwrap();
    machine.world.changed_outside(&file).unwrap();
    assert_eq!(process.read("v0", 0..8).unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(process.read("v0", 8..16).unwrap(), [8; 8], "others are read");
}

#[test]
fn a_checkpoint_is_made_behind_an_operation_that_has_failed_and_before_one_behind_a_failed_write() {
    let (machine, mut process) = with_a_volume();
    let put = |process: &mut Process, value| {
        process.only_write(&[write("v0", 0..8, value)], Beside::Nothing).unwrap().remove(0)
    };
    let layout = process.live.shared.core().layout;
    let journal = layout.journal(0)..layout.journal(0) + layout.journal_blocks;
    let bytes = journal.start * BLOCK_BYTES as u64..journal.end * BLOCK_BYTES as u64;
    let fail_once = || {
        let range = bytes.clone();
        let fault = Fault { on: On::Write, range, per_mille: 1000, errno: 5, times: 1 };
        machine.world.set_faults(vec![fault]);
    };
    let checkpoint = |process: &Process| process.live.shared.core().checkpoint;
    put(&mut process, 7).unwrap();
    let before = checkpoint(&process);
    fail_once();
    let volume = process.volume("v0");
    process.operate(Operation::Delete(volume)).unwrap_err();
    // Zeros ask for no checkpoint of their own.
    put(&mut process, 0).unwrap();
    assert_eq!(checkpoint(&process), before + 1, "a replay could delete what is written now");
    fail_once();
    put(&mut process, 7).unwrap_err();
    assert_eq!(checkpoint(&process), before + 1);
    process.operate(Operation::Snapshot(Name::new("s").unwrap(), volume)).unwrap();
    assert_eq!(checkpoint(&process), before + 2, "a replay could write before the snapshot");
    assert_eq!(process.read("s", 0..8).unwrap(), [0; 8]);
}

#[test]
fn what_cannot_be_done_with_volumes_is_refused_and_changes_nothing() {
    let (_machine, mut process) = with_a_volume();
    let name = |name| Name::new(name).unwrap();
    let (a, b) = (process.volume("v0"), process.volume("v1"));
    let snapshot = process.operate(Operation::Snapshot(name("s"), a)).unwrap();
    let cases = [
        (Operation::Create(name("v0"), 1, 0), VolumeError::Exists),
        (Operation::Create(name("x"), 1, 9), VolumeError::NoDomain),
        (Operation::Create(name("x"), 0, 0), VolumeError::BadSize),
        (Operation::Clone(name("x"), 99), VolumeError::Missing),
        (Operation::Snapshot(name("s"), b), VolumeError::Exists),
        (Operation::Rollback(a, b), VolumeError::NotASnapshot),
        (Operation::Rollback(b, snapshot), VolumeError::OtherDomain),
        (Operation::Rollback(snapshot, snapshot), VolumeError::IsASnapshot),
        (Operation::Delete(99), VolumeError::Missing),
        (Operation::Domain(name("a"), DomainKey([0; 32])), VolumeError::Exists),
    ];
    let before = process.live.shared.core().volumes.entries().clone();
    for (operation, why) in cases {
        let e = process.operate(operation.clone()).unwrap_err();
        assert_eq!(e.to_string(), why.to_string(), "{operation:?}");
    }
    assert_eq!(*process.live.shared.core().volumes.entries(), before);
    let done = process.write(&[write("s", 0..8, 1), write("v0", 15_999..16_001, 1)], false);
    let kinds = done.unwrap().into_iter().map(|done| done.unwrap_err().kind());
    let refused = [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidInput];
    assert_eq!(kinds.collect::<Vec<_>>(), refused);
}

#[test]
fn what_was_closed_is_opened_without_a_record() {
    let (machine, mut process) = with_a_volume();
    process.write(&[write("v0", 0..8, 7)], false).unwrap();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.close(port).await }).unwrap().unwrap();
    drop(process);
    machine.world.cut_power().unwrap();
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let steps = machine.world.step();
    let live = reactor.block_on(async { Live::open(&port, BYTES, MEMORY).await }).unwrap().unwrap();
    let replay =
        reactor.block_on(async { recovery::scan(&live.shared, &port).await }).unwrap().unwrap();
    assert!(replay.blocks.is_empty() && machine.world.step() > steps);
    let mut process = Process { live: Arc::new(live), port, reactor };
    assert_eq!(process.read("v0", 0..8).unwrap(), [7; 8]);
}

#[test]
fn threads_share_a_store() {
    fn are_shared<T: Send + Sync>() {}
    are_shared::<Live>();
}

#[test]
fn what_is_written_to_a_volume_that_is_deleted_is_an_error_and_no_damage() {
    let (machine, mut process) = with_a_volume();
    let volume = process.volume("v0");
    let Process { live, port, reactor } = &mut process;
    let (live, port) = (&*live, &*port);
    let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
    port.memory().fill(span, 7);
    // More than can have a number at once, and some that come while the operation waits for theirs.
    let write = async |block: u64| {
        for _ in 0..block {
            port.io.yield_to_others().await;
        }
        live.write(port, volume, block * BLOCK_BYTES as u64, span).await
    };
    let delete = async { live.operate(port, Operation::Delete(volume)).await.map(drop) };
    let mut tasks: Vec<Task> = vec![Box::pin(delete)];
    tasks.extend((0..300).map(|block| Box::pin(write(block)) as Task));
    let done = reactor.block_on(all(tasks)).unwrap();
    assert!(done[..2].iter().all(Result::is_ok) && done.iter().any(Result::is_err));
    drop(process);
    machine.world.kill_process().unwrap();
    assert_eq!(Process::of(&machine).unwrap().live.volume("v0"), None);
}

#[test]
fn nothing_is_told_of_a_volume_behind_a_failed_sync_of_its_new_size() {
    let mut grown = 0;
    for seed in 0..20 {
        let machine = Machine::new(seed);
        let mut process = Process::of(&machine).unwrap();
        let name = |name| Name::new(name).unwrap();
        process.operate(Operation::Domain(name("d"), DomainKey([1; 32]))).unwrap();
        let small = process.operate(Operation::Create(name("v0"), 8, 0)).unwrap();
        let large = process.operate(Operation::Create(name("v1"), 2000, 0)).unwrap();
        let snapshot = process.operate(Operation::Snapshot(name("s"), large)).unwrap();
        // There is a sync before the operation, too.
        let fault = Fault { on: On::Sync, range: 0..BYTES, per_mille: 500, errno: 5, times: 1 };
        machine.world.set_faults(vec![fault]);
        if process.operate(Operation::Rollback(small, snapshot)).is_ok() {
            continue;
        }
        grown += u32::from(process.live.volume_called("v0").unwrap().blocks == 2000);
        let told = process.only_write(&[write("v0", 8000..8008, 7)], Beside::Nothing).unwrap();
        drop(process);
        machine.world.cut_power().unwrap();
        let process = Process::of(&machine).unwrap();
        assert!(process.live.volume("v0").is_some());
        assert!(told[0].is_err(), "it may be of a volume that is smaller after a cut");
    }
    assert!(grown > 2, "{grown}");
}

#[test]
fn places_come_free_though_nothing_new_is_written() {
    let (_machine, mut process) = with_a_volume();
    let mut free = Vec::new();
    for round in 0..1500 {
        let value = round % 2 * 7;
        process.write(&[write("v0", 0..8, value as u8)], true).unwrap().remove(0).unwrap();
        let Process { live, port, reactor } = &mut process;
        let made = reactor.block_on(async { live.checkpoint(port).await }).unwrap();
        made.unwrap_or_else(|e| panic!("checkpoint {round}: {e}"));
        free.push(live.shared.core().space.free());
    }
    // By checkpoints alone. Garbage collection would free them, too, once the store is almost full.
    assert!(free[1499] + 16 > free[1], "{} places were free, and {} are", free[1], free[1499]);
}

#[test]
fn a_store_with_the_least_memory_makes_the_largest_change_and_with_less_it_is_refused() {
    let (machine, mut process) = with_a_volume();
    process.write(&[write("v0", 0..8, 7)], false).unwrap().remove(0).unwrap();
    let Process { live, port, reactor } = &mut process;
    let is_made = std::cell::Cell::new(false);
    let leaves = (0..MAX_LEAVES as u64).map(|i| match i {
        0..16 => super::leaf::Leaf::P2m(i),
        _ => super::leaf::Leaf::Hashes(i),
    });
    let leaves = leaves.collect();
    let claim = async {
        live.changes.claim(port, &leaves).await?;
        is_made.set(true);
        Ok(())
    };
    let watch = async {
        for _ in 0..1000 {
            port.io.sleep(std::time::Duration::from_millis(1)).await?;
            if is_made.get() {
                return Ok(());
            }
        }
        panic!("the change waits for ever");
    };
    let done = reactor.block_on(all(vec![Box::pin(claim), Box::pin(watch)])).unwrap();
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    drop(process);
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let memory = Memory { metadata: LEAST_METADATA - 1, ..MEMORY };
    let opened = reactor.block_on(async { Live::open(&port, BYTES, memory).await }).unwrap();
    let e = opened.map(drop).unwrap_err();
    assert!(e.to_string().starts_with("a store needs 359 KiB of metadata memory at least"), "{e}");
}
