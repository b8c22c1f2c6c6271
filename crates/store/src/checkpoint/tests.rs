use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ferrite_disk_base::Epochs;
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::reactor::Reactor;
use ferrite_simio::{Fault, On, SimWorld};
use ferrite_testkit::{few_or_all, is_night, rounds};
use tempfile::TempDir;

use self::refused::unwritable;
use super::*;
use crate::BLOCK_BYTES;
use crate::content::DomainKey;
use crate::journal::Name;
use crate::opening;
use crate::pages::Pins;
use crate::slots::SLOT_BYTES;
use crate::superblock::Unusable;
use crate::testing::{self, BYTES, port};
use crate::tree::{Found, Link};

mod refused;

/// Of a volume: two levels of inner pages.
const BLOCKS: u64 = 300 * 512;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The first words of leaves, by volume, and the volumes' generations.
type Model = BTreeMap<u32, (u64, BTreeMap<u64, u64>)>;

/// A machine with a store.
struct Machine {
    machine: testing::Machine,
    random: SplitMix64,
}

/// A process that has opened it.
struct Process {
    core: Mutex<Core>,
    medium: Medium,
    port: Port,
    epochs: Arc<Epochs>,
    model: Model,
    /// Last, as it ends the others' operations.
    reactor: Reactor,
}

impl Machine {
    fn new(seed: u64) -> Machine {
        Machine { machine: testing::Machine::new(seed), random: SplitMix64::new(seed) }
    }

    fn open(&self) -> io::Result<Process> {
        let (port, mut reactor) = port(&self.machine.world, &self.machine.path);
        let medium = Medium::default();
        let open = async { opening::open(&medium, &port, BYTES, 200 * SLOT_BYTES, true).await };
        let core = Mutex::new(reactor.block_on(open)??);
        let epochs = Epochs::new();
        Ok(Process { core, medium, port, epochs, model: Model::new(), reactor })
    }
}

impl Process {
    /// A leaf of a volume, from memory or the medium.
    fn load(&mut self, tree: Tree, leaf: u64) -> io::Result<Found> {
        let Process { core, medium, port, reactor, .. } = self;
        let layout = lock(core).layout;
        let find = async {
            loop {
                let found = tree.find(&lock(core).pages, leaf).unwrap();
                let Found::Load(id, pointer) = found else { return Ok(found) };
                let page = load(&layout, medium, port, &id, &pointer).await?;
                assert!(lock(core).pages.install(id, &page));
            }
        };
        reactor.block_on(find)?
    }

    fn write(&mut self, volume: u32, leaf: u64, word: u64) -> io::Result<()> {
        let tree = lock(&self.core).volumes.entries()[&volume].tree;
        self.load(tree, leaf)?;
        let core = &mut *lock(&self.core);
        let promise = core.pages.promise(1).unwrap();
        let volume_now = core.volumes.get_mut(volume).unwrap();
        let mut pins = Pins::default();
        volume_now.tree.pin(&mut core.pages, leaf, &mut pins).unwrap();
        let generation = volume_now.generation;
        let changed = volume_now.tree.change(&mut core.pages, generation, leaf);
        core.pages.store(&changed.leaf, 0, &[word]);
        core.pages.unpin(pins);
        core.pages.keep_promise(promise);
        self.model.get_mut(&volume).unwrap().1.insert(leaf, word);
        Ok(())
    }

    /// Each change is one, so that the generation says how many there were.
    fn change(&mut self, random: &mut SplitMix64) -> io::Result<()> {
        let volumes: Vec<u32> = self.model.keys().copied().collect();
        let count = volumes.len() as u64;
        let volume = |random: &mut SplitMix64| volumes[random.below(count) as usize];
        match random.below(20) {
            0 | 1 if count < 40 => self.create(),
            2 if count > 1 => {
                let gone = volume(random);
                lock(&self.core).volumes.remove(gone);
                self.model.remove(&gone);
            }
            3 if count > 0 && count < 40 => self.snapshot(volume(random)),
            _ if count > 0 => {
                let (volume, leaf, word) = (volume(random), random.below(300), random.next_u64());
                self.write(volume, leaf, word)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn free_number(&self) -> u32 {
        // Far from each other, so that there are several leaves and inner pages.
        (0..).map(|i| i * 1021).find(|i| !self.model.contains_key(i)).unwrap()
    }

    fn create(&mut self) {
        let number = self.free_number();
        let core = &mut *lock(&self.core);
        let name = Name::new(&format!("v{number}")).unwrap();
        let (generation, tree) = (core.generation, Tree::of_volume(BLOCKS, Link::Nothing));
        let volume = Volume {
            name,
            blocks: BLOCKS,
            domain: 0,
            generation,
            is_snapshot: false,
            origin: None,
            created_unix_s: number.is_multiple_of(2).then_some(1_700_000_000 + u64::from(number)),
            tree,
        };
        core.volumes.insert(number, volume);
        core.generation += 1;
        core.domains.insert(0, Domain { name: Name::new("all").unwrap(), key: DomainKey([3; 32]) });
        self.model.insert(number, (generation, BTreeMap::new()));
    }

    fn snapshot(&mut self, of: u32) {
        let number = self.free_number();
        let core = &mut *lock(&self.core);
        let origin = core.volumes.get_mut(of).unwrap();
        let shared = Volume {
            name: Name::new(&format!("v{number}")).unwrap(),
            generation: core.generation,
            is_snapshot: true,
            origin: Some(of),
            ..origin.clone()
        };
        origin.generation = core.generation + 1;
        core.generation += 2;
        let (a, b) = (shared.generation, origin.generation);
        core.volumes.insert(number, shared);
        let had = self.model[&of].1.clone();
        self.model.insert(number, (a, had));
        self.model.get_mut(&of).unwrap().0 = b;
    }

    fn freeze(&mut self, replay_from: u64) {
        lock(&self.core).freeze(replay_from);
    }

    fn write_checkpoint(&mut self) -> io::Result<()> {
        let Process { core, medium, port, epochs, reactor, .. } = self;
        let done =
            reactor.block_on(async { write(core, medium, port, || epochs.removed()).await })?;
        if done.is_ok() {
            lock(core).space.release(epochs.ended());
        }
        done
    }

    /// All that it has, from the medium, and that nothing of it can be given to others.
    fn contents(&mut self) -> io::Result<Model> {
        let mut model = Model::new();
        let volumes = lock(&self.core).volumes.entries().clone();
        for (number, volume) in volumes {
            let mut leaves = BTreeMap::new();
            for leaf in 0..300 {
                if let Found::Leaf(id) = self.load(volume.tree, leaf)? {
                    let [word] = lock(&self.core).pages.words(&id, 0).unwrap();
                    leaves.insert(leaf, word);
                }
            }
            self.are_taken(&volume.tree)?;
            model.insert(number, (volume.generation, leaves));
        }
        Ok(model)
    }

    fn are_taken(&mut self, tree: &Tree) -> io::Result<()> {
        let Process { core, medium, port, reactor, .. } = self;
        let Link::Written(root) = tree.root else { return Ok(()) };
        let mut left = vec![(root, tree.depth())];
        while let Some((pointer, level)) = left.pop() {
            assert_eq!(lock(core).space.is_taken(pointer.place), Some(true), "{pointer:?}");
            let layout = lock(core).layout;
            let copy = layout.copy_of(pointer.place).unwrap();
            for place in [pointer.place, copy] {
                let read = async { medium.read(port, place, 1).await };
                assert_eq!(pointer.verify(&reactor.block_on(read)??), Ok(()), "both are whole");
            }
            let read = async { medium.read_page(port, &pointer, None).await };
            let page = reactor.block_on(read)??;
            if level > 0 {
                for bytes in page.as_chunks().0 {
                    let link = Pointer::decode(bytes, &layout).unwrap();
                    left.extend(link.map(|pointer| (pointer, level - 1)));
                }
            }
        }
        Ok(())
    }
}

/// Changes and checkpoints, until the power is cut at `stop`; and so on, some times. Says whether it was.
fn story(seed: u64, stop: Option<u64>, fails: bool) -> bool {
    let mut machine = Machine::new(seed);
    let mut process = machine.open().unwrap();
    let mut whole = (0, Model::new());
    let mut was_cut = false;
    for round in 0..3 {
        let begun = machine.machine.world.step();
        machine.machine.world.stop_at(stop.map(|stop| begun + stop));
        let on = if fails { vec![fault(machine.random.below(60))] } else { Vec::new() };
        machine.machine.world.set_faults(on);
        // The state at S, if its checkpoint has begun.
        let mut at = None;
        let ended: io::Result<()> = (|| {
            for _ in 0..4 {
                for _ in 0..1 + machine.random.below(25) {
                    process.change(&mut machine.random)?;
                }
                let number = whole.0 + 1;
                process.freeze(number);
                at = Some((number, process.model.clone()));
                for _ in 0..machine.random.below(6) {
                    process.change(&mut machine.random)?;
                }
                while let Err(e) = process.write_checkpoint() {
                    let is_of_fault = matches!(e.raw_os_error(), Some(EIO | ENOSPC));
                    if machine.machine.world.stopped() || !is_of_fault {
                        return Err(e);
                    }
                    // Tried again it is the same one, whatever has changed.
                    process.change(&mut machine.random)?;
                    process.freeze(number + 100);
                }
                whole = at.take().unwrap();
            }
            Ok(())
        })();
        was_cut |= ended.is_err();
        machine.machine.world.set_faults(Vec::new());
        assert!(ended.is_ok() || machine.machine.world.stopped(), "{ended:?}");
        drop(process);
        machine.machine.world.cut_power().unwrap();
        process = machine.open().unwrap_or_else(|e| panic!("seed {seed}, round {round}: {e}"));
        let found = lock(&process.core).replay_from;
        if let Some(at) = at.filter(|at| at.0 == found) {
            whole = at;
        }
        assert_eq!(found, whole.0, "seed {seed}, stop {stop:?}, round {round}");
        let contents = process.contents().unwrap();
        assert!(contents == whole.1, "seed {seed}, stop {stop:?}, round {round}");
        process.model = contents;
    }
    was_cut
}

/// Some writes of this part of the store fail, and not for ever.
fn fault(part: u64) -> Fault {
    let range = if part < 5 { 0..BYTES } else { part * BYTES / 60..BYTES };
    // Of a block's error a checkpoint tries others.
    let errno = if part.is_multiple_of(2) { EIO } else { ENOSPC };
    Fault { on: On::Write, range, per_mille: 300, errno, times: 2 }
}

#[test]
fn after_a_cut_at_any_step_the_store_is_that_of_the_last_checkpoint_or_of_the_one_under_way() {
    let (mut cuts, seeds) = (0, few_or_all(4, 40));
    for seed in 0..u64::from(seeds) {
        for stop in 0..8 {
            cuts += u32::from(story(seed, Some(1 + stop * 37 + seed * 3), false));
        }
        assert!(!story(seed, None, false));
    }
    assert!(cuts > 5 * seeds, "{cuts}");
}

#[test]
fn each_step_of_a_short_story_can_be_the_last() {
    let mut stop = 1;
    while story(7, Some(stop), false) {
        stop += if is_night() { 1 } else { 8 };
    }
    assert!(stop > 150, "{stop}");
}

#[test]
fn a_checkpoint_that_has_failed_is_tried_again_as_it_was() {
    for seed in 0..rounds(40).into() {
        story(seed, None, true);
        story(seed, Some(10 + seed * 7), true);
    }
}

/// A store with a checkpoint that has something of everything.
fn with_something() -> (Machine, Model) {
    with_something_of(3)
}

fn with_something_of(seed: u64) -> (Machine, Model) {
    let mut machine = Machine::new(seed);
    let mut process = machine.open().unwrap();
    process.create();
    for _ in 0..60 {
        process.change(&mut machine.random).unwrap();
    }
    process.freeze(1);
    process.write_checkpoint().unwrap();
    let model = process.model.clone();
    drop(process);
    machine.machine.world.cut_power().unwrap();
    (machine, model)
}

#[test]
fn of_any_one_damaged_block_there_is_another() {
    let (machine, model) = with_something();
    let file = File::options().read(true).write(true).open(&machine.machine.path).unwrap();
    for place in 0..BYTES / BLOCK_BYTES as u64 {
        let (mut block, at) = (vec![0; BLOCK_BYTES], place * BLOCK_BYTES as u64);
        file.read_exact_at(&mut block, at).unwrap();
        if block.iter().all(|b| *b == 0) {
            continue;
        }
        let good = block.clone();
        block[(place * 97 % 4096) as usize] ^= 0x20;
        file.write_all_at(&block, at).unwrap();
        machine.machine.world.changed_outside(&file).unwrap();
        // Each look is that of a process that writes nothing, and so mends nothing.
        let (port, mut reactor) = port(&machine.machine.world, &machine.machine.path);
        let medium = Medium::default();
        let open = async { opening::open(&medium, &port, BYTES, 200 * SLOT_BYTES, false).await };
        let core = reactor.block_on(open).unwrap();
        let core = Mutex::new(core.unwrap_or_else(|e| panic!("block {place}: {e}")));
        let (epochs, model_now) = (Epochs::new(), Model::new());
        let mut process = Process { core, medium, port, epochs, model: model_now, reactor };
        for (number, (_, leaves)) in &model {
            let tree = lock(&process.core).volumes.entries()[number].tree;
            for (leaf, word) in leaves {
                let Found::Leaf(id) = process.load(tree, *leaf).unwrap() else { panic!() };
                assert_eq!(lock(&process.core).pages.words(&id, 0), Some([*word]));
            }
        }
        file.write_all_at(&good, at).unwrap();
        machine.machine.world.changed_outside(&file).unwrap();
    }
}

/// All reads of one block fail.
fn unreadable(place: u64) -> Fault {
    let at = place * BLOCK_BYTES as u64;
    let range = at..at + BLOCK_BYTES as u64;
    Fault { on: On::Read, range, per_mille: 1000, errno: 5, times: u64::MAX }
}

#[test]
fn of_any_one_block_that_cannot_be_read_there_is_another() {
    let (machine, model) = with_something();
    let bytes = std::fs::read(&machine.machine.path).unwrap();
    let is_used = |block: &[u8]| block.iter().any(|b| *b != 0);
    let used = bytes.chunks(BLOCK_BYTES).zip(0..).filter(|(block, _)| is_used(block));
    for (_, place) in used {
        machine.machine.world.set_faults(vec![unreadable(place)]);
        let mut process = machine.open().unwrap_or_else(|e| panic!("block {place}: {e}"));
        for (number, (_, leaves)) in &model {
            let tree = lock(&process.core).volumes.entries()[number].tree;
            for (leaf, word) in leaves {
                let Found::Leaf(id) = process.load(tree, *leaf).unwrap() else { panic!() };
                assert_eq!(lock(&process.core).pages.words(&id, 0), Some([*word]));
            }
        }
    }
    // Of a medium that cannot be read at all nothing is known.
    let all = Fault { range: 0..BYTES, ..unreadable(0) };
    machine.machine.world.set_faults(vec![all]);
    assert_eq!(machine.open().map(drop).unwrap_err().raw_os_error(), Some(5));
}

/// A checkpoint is in its first home only, which cannot be read when the store is opened. So the one before
/// counts, and goes on. Then it can be read again, and its places may be others'.
#[test]
fn a_superblock_that_could_not_be_read_never_counts_again() {
    let (machine, model) = with_something();
    let mut process = machine.open().unwrap();
    let (layout, before) = {
        let core = lock(&process.core);
        (core.layout, core.checkpoint)
    };
    let file = File::options().read(true).write(true).open(&machine.machine.path).unwrap();
    let second = layout.superblock(1, before + 1) * BLOCK_BYTES as u64;
    let mut old = vec![0; BLOCK_BYTES];
    file.read_exact_at(&mut old, second).unwrap();
    let range = second..second + BLOCK_BYTES as u64;
    let fault = Fault { on: On::Write, range, per_mille: 1000, errno: 5, times: u64::MAX };
    machine.machine.world.set_faults(vec![fault]);
    process.model = model;
    process.create();
    process.freeze(2);
    process.write_checkpoint().unwrap_err();
    drop(process);
    machine.machine.world.kill_process().unwrap();
    // The write that failed may have torn it.
    file.write_all_at(&old, second).unwrap();
    machine.machine.world.changed_outside(&file).unwrap();
    machine.machine.world.set_faults(vec![unreadable(layout.superblock(0, before + 1))]);
    let checkpoint = |process: &Process| lock(&process.core).checkpoint;
    assert_eq!(checkpoint(&machine.open().unwrap()), before);
    machine.machine.world.cut_power().unwrap();
    machine.machine.world.set_faults(Vec::new());
    assert_eq!(checkpoint(&machine.open().unwrap()), before);
}

/// Pages that were written again could be torn where they count, or lost with a failed sync.
#[test]
fn behind_its_first_superblock_a_checkpoint_that_has_failed_writes_nothing_else_again() {
    let (machine, model) = with_something();
    let mut process = machine.open().unwrap();
    process.model = model;
    let (layout, next) = {
        let core = lock(&process.core);
        (core.layout, core.checkpoint + 1)
    };
    let second = layout.superblock(1, next);
    machine.machine.world.set_faults(vec![unwritable(second..second + 1)]);
    process.create();
    process.freeze(2);
    process.write_checkpoint().unwrap_err();
    process.create();
    machine.machine.world.set_faults(vec![unwritable(layout.journal(0)..layout.blocks - 2)]);
    process.write_checkpoint().unwrap();
    assert_eq!(lock(&process.core).checkpoint, next);
    machine.machine.world.set_faults(Vec::new());
    process.freeze(3);
    process.write_checkpoint().unwrap();
    let model = process.model.clone();
    drop(process);
    machine.machine.world.cut_power().unwrap();
    assert!(machine.open().unwrap().contents().unwrap() == model);
}

fn failing_sync() -> Fault {
    Fault { on: On::Sync, range: 0..u64::MAX, per_mille: 1000, errno: 5, times: 1 }
}

#[test]
fn no_checkpoint_writes_anything_behind_a_failed_sync() {
    let (machine, model) = with_something();
    let mut process = machine.open().unwrap();
    process.model = model;
    process.create();
    process.freeze(2);
    machine.machine.world.set_faults(vec![failing_sync()]);
    process.write_checkpoint().unwrap_err();
    machine.machine.world.set_faults(vec![unwritable(0..BYTES / BLOCK_BYTES as u64)]);
    assert_ne!(process.write_checkpoint().unwrap_err().raw_os_error(), Some(28));
}

/// A superblock whose sync has failed is in the kernel's memory, and perhaps nowhere else.
#[test]
fn who_opens_a_store_writes_its_superblock_into_both_homes_though_they_seem_to_have_it() {
    for seed in 0..20 {
        let (machine, model) = with_something_of(seed);
        let mut process = machine.open().unwrap();
        process.model = model;
        process.create();
        process.freeze(2);
        let (world, next) = (&machine.machine.world, lock(&process.core).checkpoint + 1);
        let [first, second] = [0, 1].map(|home| lock(&process.core).layout.superblock(home, next));
        let Process { core, medium, port, reactor, .. } = &mut process;
        let write = async {
            write_pages(core, medium, port).await?;
            let superblock = lock(core).under_way.as_ref().map(UnderWay::superblock).unwrap();
            medium.write(port, first, &superblock.encode(0)).await?;
            medium.sync(port).await?;
            medium.write(port, second, &superblock.encode(1)).await?;
            world.set_faults(vec![failing_sync()]);
            medium.sync(port).await
        };
        reactor.block_on(write).unwrap().unwrap_err();
        drop(process);
        world.kill_process().unwrap();
        world.set_faults(Vec::new());
        assert_eq!(lock(&machine.open().unwrap().core).checkpoint, next);
        world.cut_power().unwrap();
        world.set_faults(vec![unreadable(first)]);
        assert_eq!(lock(&machine.open().unwrap().core).checkpoint, next, "{seed}");
    }
}

#[test]
fn what_is_no_store_or_longer_than_its_medium_is_refused_in_words() {
    let dir = TempDir::new_in("/dev/shm").unwrap();
    let path = dir.path().join("other");
    let open = |bytes: u64| {
        let world = SimWorld::new(1);
        let (port, mut reactor) = port(&world, &path);
        let medium = Medium::default();
        let open = async { opening::open(&medium, &port, bytes, 1 << 20, true).await };
        reactor.block_on(open).unwrap().map(drop).unwrap_err()
    };
    let file = File::create_new(&path).unwrap();
    for bytes in [4 * 4096, BYTES] {
        file.set_len(bytes).unwrap();
        assert_eq!(open(bytes).to_string(), Unusable::Foreign.to_string());
    }
    assert_eq!(open(0).to_string(), Unusable::Foreign.to_string());
    let (machine, _) = with_something();
    std::fs::copy(&machine.machine.path, &path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(BYTES - 4096).unwrap();
    assert!(open(BYTES - 4096).to_string().contains("longer than what it is in"));
}

#[test]
fn without_room_for_all_of_its_pages_a_checkpoint_writes_none() {
    let all = {
        let process = Machine::new(1).open().unwrap();
        std::iter::from_fn(|| lock(&process.core).space.give_page()).count()
    };
    let machine = Machine::new(1);
    let mut process = machine.open().unwrap();
    process.create();
    process.write(0, 1, 1).unwrap();
    process.freeze(1);
    // A leaf and two inner pages, and three of each table; but one.
    for _ in 0..all - 8 {
        lock(&process.core).space.give_page().unwrap();
    }
    let steps = machine.machine.world.step();
    let e = process.write_checkpoint().unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::StorageFull);
    assert_eq!(machine.machine.world.step(), steps, "nothing was written");
}
