//! Passes: nothing that is live is lost, and nothing that is dead is left after two of them.

use std::cell::Cell;
use std::pin::pin;

use super::super::leaf::Leaf;
use super::*;
use crate::page::{HASHES, P2M_ENTRIES, V2P_ENTRIES, Whereabouts};
use crate::tree::{Tree, Way};

impl Process {
    pub(super) fn gc(&mut self) -> io::Result<Passed> {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.gc(port).await })?
    }

    /// Numbers that volumes have, by a look at each of their blocks.
    fn live_numbers(&mut self) -> BTreeSet<u64> {
        let volumes = self.live.shared.core().volumes.entries().clone();
        let Process { live, port, reactor } = self;
        let mut numbers = BTreeSet::new();
        for (number, volume) in volumes {
            for block in 0..volume.blocks {
                let leaf = Leaf::of_block(number, block);
                let words = async { live.leaves.words::<1>(port, leaf).await };
                numbers.insert(reactor.block_on(words).unwrap().unwrap()[0]);
            }
        }
        numbers.remove(&0);
        numbers
    }

    pub(super) fn whereabouts(&mut self, number: u64) -> Whereabouts {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.leaves.whereabouts(port, number).await }).unwrap().unwrap()
    }

    /// Places of all pages that the trees lead to, and of their copies.
    fn places_of_pages(&mut self) -> BTreeSet<u64> {
        let (layout, trees, mut places) = {
            let core = self.live.shared.core();
            let of_volume =
                |v: &crate::table::Volume| (v.tree, v.blocks.div_ceil(V2P_ENTRIES as u64));
            let mut trees: Vec<(Tree, u64)> =
                core.volumes.entries().values().map(of_volume).collect();
            trees.push((core.p2m, core.layout.places().div_ceil(P2M_ENTRIES as u64)));
            trees.push((core.hashes, core.layout.places().div_ceil(HASHES as u64)));
            let tables = core.volumes.places().chain(core.domains.places());
            (core.layout, trees, tables.collect::<BTreeSet<u64>>())
        };
        let Process { live, port, reactor } = self;
        for (tree, leaves) in trees {
            for leaf in 0..leaves {
                loop {
                    let way = tree.way(&live.shared.core().pages, leaf).unwrap();
                    match way {
                        Way::Places(way) => break places.extend(way),
                        Way::Load(id, pointer) => {
                            let load = async {
                                crate::checkpoint::load(
                                    &layout,
                                    &live.shared.medium,
                                    port,
                                    &id,
                                    &pointer,
                                )
                                .await
                            };
                            let page = reactor.block_on(load).unwrap().unwrap();
                            assert!(live.shared.core().pages.install(id, &page));
                        }
                    }
                }
            }
        }
        places
    }

    /// Places that are not to be given, as the bits say.
    fn taken(&mut self) -> BTreeSet<u64> {
        let layout = self.live.shared.core().layout;
        let Process { live, port, reactor } = self;
        let mut taken = BTreeSet::new();
        for segment in 0..layout.segments {
            while !live.shared.core().space.is_loaded(segment) {
                reactor
                    .block_on(async { live.shared.load_bits(port, segment).await })
                    .unwrap()
                    .unwrap();
            }
            let first = layout.first_place(segment);
            let places = first..first + layout.segment_blocks;
            taken.extend(places.filter(|p| live.shared.core().space.is_taken(*p) == Some(true)));
        }
        taken
    }
}

/// All that the store has is what a count from scratch finds.
pub(super) fn nothing_is_lost_and_nothing_left(process: &mut Process) {
    process.gc().unwrap();
    let passed = process.gc().unwrap();
    let live = process.live_numbers();
    let end = process.live.shared.core().numbers_end;
    let mut places = process.places_of_pages();
    // With those that they stand for, which are lower.
    let (mut needed, mut groups) = (live.clone(), BTreeSet::new());
    for number in (1..end).rev() {
        match process.whereabouts(number) {
            Whereabouts::Plain { place, .. } => {
                assert!(needed.contains(&number), "{number} is dead, and has a place");
                assert!(places.insert(place), "{place} has two contents, or a page");
            }
            Whereabouts::Packed { place, places: count, .. } => {
                assert!(needed.contains(&number), "{number} is dead, and has a place");
                let is_new = groups.insert(place);
                let all = place..place + u64::from(count);
                all.for_each(|place| assert!(places.insert(place) || !is_new));
            }
            Whereabouts::SameAs { number: lower } => {
                assert!(needed.contains(&number), "{number} is dead, and stands for {lower}");
                needed.insert(lower);
            }
            found => assert!(!needed.contains(&number), "{number} is live, and is {found:?}"),
        }
    }
    assert_eq!(passed.contents, needed.len() as u64);
    let taken = process.taken();
    let lost: Vec<_> = places.difference(&taken).collect();
    assert!(lost.is_empty(), "places in use that can be given: {lost:?}");
    let left: Vec<_> = taken.difference(&places).collect();
    assert!(left.is_empty(), "unused places that cannot be given: {left:?}");
}

/// Blocks of a volume from one on get contents that the store lacks.
pub(super) fn write_new(
    process: &mut Process,
    name: &str,
    block: u64,
    count: usize,
    value: u64,
) -> io::Result<()> {
    let volume = process.volume(name);
    let Process { live, port, reactor } = process;
    let span = port.memory().span(SCRATCH_BYTES, count * BLOCK_BYTES);
    for i in 0..count {
        let content: Vec<u8> = (value + i as u64).to_le_bytes().repeat(BLOCK_BYTES / 8);
        port.memory().copy_in(span.slice(i * BLOCK_BYTES, BLOCK_BYTES), &content);
    }
    let write = async { live.write(port, volume, block * BLOCK_BYTES as u64, span).await };
    reactor.block_on(write)?
}

/// The word that all of a block has.
pub(super) fn read_one(process: &mut Process, name: &str, block: u64) -> u64 {
    let volume = process.volume(name);
    let Process { live, port, reactor } = process;
    let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
    let read = async { live.read(port, volume, block * BLOCK_BYTES as u64, span).await };
    reactor.block_on(read).unwrap().unwrap();
    let mut found = vec![0; BLOCK_BYTES];
    port.memory().copy_out(span, &mut found);
    assert!(found.chunks(8).all(|word| word == &found[..8]));
    u64::from_le_bytes(found[..8].try_into().unwrap())
}

fn passes(process: &Process) -> crate::space::Passes {
    process.live.collector.passes()
}

#[test]
fn content_that_is_found_again_at_any_time_of_a_pass_stays() {
    let (_machine, mut process) = with_a_volume();
    let (mut found, mut new) = (0, 0);
    for delay in 0..300 {
        process.write(&[write("v0", 0..8, 7)], false).unwrap().remove(0).unwrap();
        process.write(&[write("v0", 0..8, 0)], false).unwrap().remove(0).unwrap();
        let numbers = process.live.shared.core().numbers_end;
        let volume = process.volume("v0");
        let Process { live, port, reactor } = &mut process;
        let (live, port) = (&*live, &*port);
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        port.memory().fill(span, 7);
        let late = async {
            for _ in 0..delay {
                port.io.yield_to_others().await;
            }
            live.write(port, volume, 0, span).await
        };
        let gc = async { live.gc(port).await.map(drop) };
        let done = reactor.block_on(all(vec![Box::pin(gc), Box::pin(late)])).unwrap();
        assert!(done.iter().all(Result::is_ok), "{done:?}");
        match process.live.shared.core().numbers_end == numbers {
            true => found += 1,
            false => new += 1,
        }
        assert_eq!(process.read("v0", 0..8).unwrap(), [7; 8], "after {delay}");
    }
    assert!(found > 10, "it was found {found} times, and was new {new} times");
    nothing_is_lost_and_nothing_left(&mut process);
}

/// Each block of a volume gets a content of its own: the number behind its own.
fn write_numbered(process: &mut Process, name: &str) -> io::Result<()> {
    for block in (0..BLOCKS).step_by(16) {
        write_new(process, name, block, 16.min((BLOCKS - block) as usize), 1 + block)?;
    }
    Ok(())
}

#[test]
fn a_full_store_looks_for_what_is_there_twice_before_a_write_fails() {
    let (machine, mut process) = with_a_volume();
    write_numbered(&mut process, "v0").unwrap();
    let twin = Operation::Create(Name::new("twin").unwrap(), BLOCKS, 0);
    process.operate(twin).unwrap();
    process.flush().unwrap();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    // The next process has not read what the store has: it stores the same again.
    let memory = Memory { index: 1 << 16, ..MEMORY };
    let mut process = Process::with(&machine, memory).unwrap();
    let e = write_numbered(&mut process, "twin").unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::StorageFull);
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.load_whole_index(port).await }).unwrap().unwrap();
    let begun = passes(&process).count();
    write_new(&mut process, "twin", 0, 16, 1 << 40).unwrap();
    assert!(passes(&process).count() >= begun + 2, "one that looks for garbage only comes first");
    for block in [16, 31] {
        assert_eq!(read_one(&mut process, "twin", block), 1 + block);
        assert_eq!(read_one(&mut process, "v0", block), 1 + block);
    }
    nothing_is_lost_and_nothing_left(&mut process);
    let free = process.live.shared.core().space.free();
    assert!(free > BLOCKS / 4, "{free} places are free");
}

#[test]
fn a_full_store_lets_writes_wait_for_a_pass_and_fails_them_if_there_is_no_garbage() {
    let (machine, mut process) = with_a_volume();
    let mut value = 1;
    let mut fill = |process: &mut Process, name: &str| {
        for block in (0..BLOCKS).step_by(16) {
            write_new(process, name, block, 16.min((BLOCKS - block) as usize), value)?;
            value += 16;
        }
        io::Result::Ok(value - 16)
    };
    for round in 0..4 {
        fill(&mut process, "v0").unwrap_or_else(|e| panic!("round {round}: {e}"));
    }
    assert!(passes(&process).count() > 0, "four times as much as there is room for");
    let e = fill(&mut process, "v1").unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::StorageFull);
    let begun = passes(&process).count();
    let finds_none = |process: &mut Process, passes_since: u64, why: &str| {
        let e = write_new(process, "v1", 0, 1, 1 << 40).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::StorageFull);
        assert_eq!(passes(process).count(), begun + passes_since, "{why}");
    };
    finds_none(&mut process, 0, "nothing has changed since the last one");
    // Operations that take no room go on.
    let snapshot = process
        .operate(Operation::Snapshot(Name::new("s").unwrap(), process.volume("v0")))
        .unwrap();
    finds_none(&mut process, 2, "it has waited for one, and then for one that looks for all");
    process.write(&[write("v0", 0..PER_BLOCK * BLOCKS, 0)], false).unwrap().remove(0).unwrap();
    assert_eq!(read_one(&mut process, "v0", 5), 0);
    assert_ne!(read_one(&mut process, "s", 5), 0);
    process.operate(Operation::Delete(snapshot)).unwrap();
    let last = fill(&mut process, "v1").unwrap();
    for end in 0..2 {
        assert_eq!(read_one(&mut process, "v1", BLOCKS - 1), last + 15);
        assert_eq!(read_one(&mut process, "v1", 0), last + 16 - BLOCKS);
        nothing_is_lost_and_nothing_left(&mut process);
        if end == 0 {
            process.flush().unwrap();
            drop(process);
            machine.world.cut_power().unwrap();
            process = Process::of(&machine).unwrap();
        } else {
            break;
        }
    }
}

/// A store of which no number is left that never was given, with a volume whose numbers are among all others, and
/// those that are free.
fn with_all_numbers_given() -> (Machine, Process) {
    let (machine, mut process) = with_a_volume();
    write_numbered(&mut process, "v0").unwrap();
    let Process { live, .. } = &process;
    let places = live.shared.core().layout.places();
    live.shared.core().numbers_end = places;
    for round in 0..12 {
        process.gc().unwrap();
        for block in (round % 3..BLOCKS).step_by(3) {
            write_new(&mut process, "v0", block, 1, (1 + round) * BLOCKS + block).unwrap();
        }
    }
    process.gc().unwrap();
    assert_eq!(process.live.shared.core().numbers_end, places);
    (machine, process)
}

#[test]
fn an_opened_store_finds_free_numbers_before_a_pass_has() {
    let (machine, mut process) = with_all_numbers_given();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    let before = read_one(&mut process, "v0", 16);
    write_new(&mut process, "v0", 0, 16, 1 << 40).unwrap();
    assert_eq!(passes(&process).count(), 0);
    assert_eq!(read_one(&mut process, "v0", 15), (1 << 40) + 15);
    assert_eq!(read_one(&mut process, "v0", 16), before);
    nothing_is_lost_and_nothing_left(&mut process);
}

/// Polls one future until another one has ended.
async fn beside<T>(one: impl Future, other: impl Future<Output = T>) -> T {
    let (mut one, mut other, mut has_ended) = (pin!(one), pin!(other), false);
    poll_fn(|cx| {
        has_ended = has_ended || one.as_mut().poll(cx).is_ready();
        other.as_mut().poll(cx)
    })
    .await
}

/// Blocks of all parts of `v0`: each page of P2M has numbers that come free in the next pass.
fn write_everywhere(process: &mut Process, first: u64, value: u64) {
    for block in (first % 11..BLOCKS).step_by(11) {
        write_new(process, "v0", block, 1, value + block).unwrap();
    }
}

/// The first blocks of a volume get these values, behind so many turns of others.
async fn write_late(
    live: &Live,
    port: &Port,
    volume: VolumeId,
    delay: u64,
    values: Range<u64>,
) -> io::Result<()> {
    for _ in 0..delay {
        port.io.yield_to_others().await;
    }
    let count = (values.end - values.start) as usize;
    let span = port.memory().span(SCRATCH_BYTES, count * BLOCK_BYTES);
    for (i, value) in values.enumerate() {
        let content = value.to_le_bytes().repeat(BLOCK_BYTES / 8);
        port.memory().copy_in(span.slice(i * BLOCK_BYTES, BLOCK_BYTES), &content);
    }
    live.write(port, volume, 0, span).await
}

/// Replay takes a number with two contents for damage: so one that a pass has found free is given when that is in a
/// checkpoint.
#[test]
fn a_death_behind_writes_in_a_pass_is_survived_whatever_numbers_they_got() {
    let (machine, mut process) = with_all_numbers_given();
    let mut value = 1 << 40;
    for delay in (0..400).step_by(if is_night() { 4 } else { 40 }) {
        write_everywhere(&mut process, delay, value);
        value += BLOCKS;
        let volume = process.volume("v0");
        let Process { live, port, reactor } = &mut process;
        // More than are set aside, and all before the pass has its next checkpoint.
        let late = write_late(live, port, volume, delay, value..value + 256);
        reactor.block_on(beside(live.gc(port), late)).unwrap().unwrap();
        drop(process);
        machine.world.kill_process().unwrap();
        process = Process::of(&machine).unwrap_or_else(|e| panic!("after {delay}: {e}"));
        assert_eq!(read_one(&mut process, "v0", 255), value + 255);
        value += BLOCKS;
    }
    nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn writers_have_numbers_at_any_time_of_a_pass() {
    let (_machine, mut process) = with_all_numbers_given();
    let mut value = 1 << 40;
    for delay in (0..400).step_by(if is_night() { 4 } else { 40 }) {
        write_everywhere(&mut process, delay, value);
        value += BLOCKS;
        let volume = process.volume("v0");
        let Process { live, port, reactor } = &mut process;
        let (live, port) = (&*live, &*port);
        let late = write_late(live, port, volume, delay, value..value + 1);
        let gc = async { live.gc(port).await.map(drop) };
        let done = reactor.block_on(all(vec![Box::pin(gc), Box::pin(late)])).unwrap();
        assert!(done.iter().all(Result::is_ok), "{done:?}");
        assert!(!passes(&process).is_hurried(), "the write after {delay} has waited for a pass");
        assert_eq!(read_one(&mut process, "v0", 0), value);
        value += BLOCKS;
    }
    nothing_is_lost_and_nothing_left(&mut process);
}

/// In a store that is nearly full there may be no others: of each page the pass makes some entry nothing.
#[test]
fn a_pass_sets_numbers_aside_for_writers_before_it_closes_their_pages() {
    let (_machine, mut process) = with_all_numbers_given();
    write_everywhere(&mut process, 0, 1 << 40);
    // The numbers of open pages are used up.
    for block in (0..).step_by(16) {
        let ready = process.live.shared.core().free_numbers.ready();
        if ready == 0 {
            break;
        }
        write_new(&mut process, "v0", block, ready.min(16) as usize, (1 << 41) + block).unwrap();
    }
    let Process { live, port, reactor } = &mut process;
    let (live, port) = (&*live, &*port);
    let has_ended = Cell::new(false);
    let gc = async {
        live.gc(port).await.unwrap();
        has_ended.set(true);
    };
    let watch = async {
        let mut ready = 0;
        while ready == 0 && !has_ended.get() {
            port.io.yield_to_others().await;
            ready = live.shared.core().free_numbers.ready();
        }
        ready
    };
    let ready = reactor.block_on(beside(gc, watch)).unwrap();
    assert!(ready > 0, "writes would wait for the end of the pass");
}

#[test]
fn each_step_of_a_pass_can_be_the_last() {
    let mut stop = 1;
    loop {
        let mut story = Story::new(5, None);
        let mut process = Process::of(&story.machine).unwrap();
        story.use_it(&mut process, 25).unwrap();
        process.flush().unwrap();
        story.all_durable();
        story.machine.world.stop_at(Some(story.machine.world.step() + stop));
        let done = process.gc();
        let was_stopped = story.machine.world.stopped();
        assert!(done.is_ok() || was_stopped, "{done:?}");
        drop(process);
        story.machine.world.cut_power().unwrap();
        let mut process = story.reopen(After::Cut);
        nothing_is_lost_and_nothing_left(&mut process);
        if !was_stopped {
            break;
        }
        stop += 3;
    }
    assert!(stop > 60, "{stop}");
}

#[test]
fn runs_that_come_free_are_holes() {
    let (machine, mut process) = with_a_volume();
    let bytes = |machine: &Machine| {
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&machine.path).unwrap()) * 512
    };
    let before = bytes(&machine);
    for block in (0..1600).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    process.flush().unwrap();
    let full = bytes(&machine);
    assert!(full >= before + (6 << 20), "{before} and {full}");
    // One of 64 stays, each alone.
    for block in (0..1600).step_by(64) {
        let sectors = (block + 1) * PER_BLOCK..(block + 64) * PER_BLOCK;
        process.write(&[write("v0", sectors, 0)], false).unwrap().remove(0).unwrap();
    }
    process.gc().unwrap();
    process.flush().unwrap();
    let left = bytes(&machine);
    assert!(left < before + (2 << 20), "{before}, {full} and {left}");
    assert_eq!(read_one(&mut process, "v0", 64), 65);
    nothing_is_lost_and_nothing_left(&mut process);
}

/// A future that is dropped where it waits first, as a task is with the queue that has failed.
async fn dropped<T>(future: impl Future<Output = T>) {
    let mut future = Box::pin(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(_) => panic!("it has not waited"),
        Poll::Pending => Poll::Ready(()),
    })
    .await;
}

/// It counts for good, since the store never learns when its operations end. So no place comes free any more.
#[test]
fn behind_an_operation_that_never_ends_passes_fail_and_writes_hear_that_there_is_no_room() {
    let (_machine, mut process) = with_a_volume();
    let volume = process.volume("v0");
    {
        let Process { live, port, reactor } = &mut process;
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        port.memory().fill(span, 7);
        reactor.block_on(dropped(live.write(port, volume, 0, span))).unwrap();
    }
    assert_eq!(process.gc().unwrap_err().kind(), io::ErrorKind::TimedOut);
    let full = (0..2000).find_map(|part| {
        let block = 16 * part % (BLOCKS - 16);
        write_new(&mut process, "v0", block, 16, 16 * part).err()
    });
    assert_eq!(full.map(|e| e.kind()), Some(io::ErrorKind::StorageFull));
    process.flush().unwrap();
}
