//! Reads that `map` answers: what they find, and what is never found.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use ferrite_disk_base::Extent;

use super::super::changes::Change;
use super::super::leaf::{Leaf, bytes, words};
use super::passes::{read_one, write_new};
use super::*;
use crate::content::ContentHash;
use crate::journal::NewContent;
use crate::page::Whereabouts;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A read of whole blocks, as a queue makes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    /// Data, and whether the check believes them.
    Data(Vec<u8>, bool),
    /// It takes steps.
    Slow,
}

impl Process {
    fn map(&self, name: &str, blocks: Range<u64>) -> Extent {
        let len = (blocks.end - blocks.start) * BLOCK;
        self.live.map(self.volume(name), blocks.start * BLOCK, len)
    }

    /// Whole blocks that were read step by step are the same when they are mapped, as no write is under way.
    pub(super) fn read_as_queues_do(
        &mut self,
        name: &str,
        sector: u64,
        read: &[u8],
    ) -> io::Result<()> {
        let (first, skip) =
            (sector.div_ceil(PER_BLOCK), sector.next_multiple_of(PER_BLOCK) - sector);
        let Some(read) = read.get(skip as usize * SECTOR..) else { return Ok(()) };
        let whole = read.as_chunks::<BLOCK_BYTES>().0;
        let mut done = 0;
        while done < whole.len() {
            let blocks = first + done as u64..first + whole.len() as u64;
            done += match self.read_mapped(name, blocks)? {
                Mapped::Data(found, is_sure) => {
                    let count = found.len() / BLOCK_BYTES;
                    assert!(is_sure && found == whole[done..done + count].as_flattened());
                    count
                }
                Mapped::Slow => 1,
            };
        }
        Ok(())
    }

    /// The data that `map` finds at the beginning of these blocks.
    pub(super) fn read_mapped(&mut self, name: &str, blocks: Range<u64>) -> io::Result<Mapped> {
        let volume = self.volume(name);
        let (at, extent) = (blocks.start * BLOCK, self.map(name, blocks));
        let Process { live, port, reactor } = self;
        let (Extent::Data { len, .. } | Extent::Zeros { len } | Extent::Slow { len }) = extent;
        let to = port.memory().span(SCRATCH_BYTES, len as usize);
        match extent {
            Extent::Slow { .. } => return Ok(Mapped::Slow),
            Extent::Zeros { .. } => port.memory().fill(to, 0),
            Extent::Data { file, offset, .. } => {
                let read = async { port.io.read_exact(port.files[file], offset, to).await };
                reactor.block_on(read)??;
            }
        }
        let mut found = vec![0; to.len()];
        port.memory().copy_out(to, &mut found);
        Ok(Mapped::Data(found, live.check(port.memory(), volume, at, to)))
    }
}

fn data(extent: Extent) -> Option<u64> {
    match extent {
        Extent::Data { file: 0, len, .. } => Some(len / BLOCK),
        _ => None,
    }
}

#[test]
fn whole_blocks_that_memory_knows_are_mapped_in_runs_and_all_else_takes_steps() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 4, 8, 1000).unwrap();
    assert_eq!(data(process.map("v0", 4..12)), Some(8), "written in order");
    assert_eq!(data(process.map("v0", 5..40)), Some(7), "zeros are behind");
    assert_eq!(process.map("v0", 0..8), Extent::Zeros { len: 4 * BLOCK });
    write_new(&mut process, "v0", 6, 1, 2000).unwrap();
    let runs = [4..12, 6..12, 7..12].map(|blocks| data(process.map("v0", blocks)));
    assert_eq!(runs, [Some(2), Some(1), Some(5)]);
    // Equal content is in one place, so its neighbours do not follow it.
    write_new(&mut process, "v0", 20, 1, 1000).unwrap();
    write_new(&mut process, "v0", 21, 1, 1000).unwrap();
    assert_eq!(data(process.map("v0", 20..22)), Some(1));
    let volume = process.volume("v0");
    for (offset, len) in [(4 * BLOCK + 512, BLOCK), (4 * BLOCK, 512), (5 * BLOCK, BLOCK + 512)] {
        assert_eq!(process.live.map(volume, offset, len), Extent::Slow { len });
        let part = process.port.memory().span(SCRATCH_BYTES, len as usize);
        assert!(!process.live.check(process.port.memory(), volume, offset, part));
    }
    // Of a leaf that is not there nothing is known without the lock.
    assert_eq!(process.map("v0", 600..601), Extent::Slow { len: BLOCK });
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    process.live.shared.core().pages.hide_volume(volume);
    assert_eq!(process.map("v0", 4..12), Extent::Slow { len: 8 * BLOCK });
    assert_eq!(read_one(&mut process, "v0", 4), 1000);
    assert_eq!(data(process.map("v0", 4..12)), Some(2), "who missed brings it");
    let Mapped::Data(found, true) = process.read_mapped("v0", 4..6).unwrap() else { panic!() };
    assert_eq!(found[..8], 1000u64.to_le_bytes());
    assert_eq!(found[BLOCK_BYTES..][..8], 1001u64.to_le_bytes());
}

#[test]
fn what_was_read_is_believed_only_if_it_is_what_the_blocks_have_now() {
    let (_machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 4, 1000).unwrap();
    let volume = process.volume("v0");
    let blocks = process.port.memory().span(SCRATCH_BYTES, 4 * BLOCK_BYTES);
    let content =
        |of: [u64; 4]| -> Vec<u8> { of.map(|word| word.to_le_bytes().repeat(512)).concat() };
    let check = |process: &Process, of: Vec<u8>| {
        process.port.memory().copy_in(blocks, &of);
        process.live.check(process.port.memory(), volume, 0, blocks)
    };
    assert!(check(&process, content([1000, 1001, 1002, 1003])));
    for at in [0, 5000, 4 * BLOCK_BYTES - 1] {
        let mut flipped = content([1000, 1001, 1002, 1003]);
        flipped[at] ^= 0x20;
        assert!(!check(&process, flipped), "a bit at {at}");
    }
    // Written meanwhile: the old content was right, but a check cannot know it.
    write_new(&mut process, "v0", 2, 1, 7).unwrap();
    assert!(!check(&process, content([1000, 1001, 1002, 1003])));
    assert!(check(&process, content([1000, 1001, 7, 1003])));
    process.write(&[write("v0", 8..16, 0)], false).unwrap().pop().unwrap().unwrap();
    assert!(!check(&process, content([1000, 1001, 7, 1003])));
    assert!(check(&process, content([1000, 0, 7, 1003])));
    // A page that memory no longer has makes the check fail.
    process.live.shared.core().pages.hide_volume(volume);
    assert!(!check(&process, content([1000, 0, 7, 1003])));
}

#[test]
fn a_number_that_stands_for_another_is_mapped_to_the_one_place() {
    let (_machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 2, 1000).unwrap();
    let first = number_of(&mut process);
    let Process { live, port, reactor } = &mut process;
    let (leaf, at) = Leaf::of_number(first + 1);
    let join = async {
        let leaves = [leaf].into();
        let mut claim = live.changes.claim(port, &leaves).await?;
        let entry = words::<2>(&Whereabouts::SameAs { number: first }.encode());
        live.changes.with_all(port, &mut claim, &leaves, |core| leaf.store(core, at, &entry)).await
    };
    reactor.block_on(join).unwrap().unwrap();
    let Mapped::Data(found, true) = process.read_mapped("v0", 1..2).unwrap() else { panic!() };
    assert_eq!(found[..8], 1000u64.to_le_bytes());
    assert_eq!(process.map("v0", 0..1), process.map("v0", 1..2));
}

/// The number of a volume that has ended is another's, and so is its view of a leaf.
#[test]
fn nobody_reads_by_the_leaves_of_a_volume_that_has_ended_or_was_rolled_back() {
    let (_machine, mut process) = with_a_volume();
    let name = |name| Name::new(name).unwrap();
    let first = process.operate(Operation::Create(name("first"), BLOCKS, 0)).unwrap();
    write_new(&mut process, "first", 0, 1, 1000).unwrap();
    let then = process.operate(Operation::Snapshot(name("then"), first)).unwrap();
    write_new(&mut process, "first", 0, 1, 2000).unwrap();
    let word = |process: &mut Process, name| match process.read_mapped(name, 0..1).unwrap() {
        Mapped::Data(found, is_sure) => {
            assert!(is_sure);
            Some(u64::from_le_bytes(found[..8].try_into().unwrap()))
        }
        Mapped::Slow => None,
    };
    assert_eq!(word(&mut process, "first"), Some(2000));
    // A leaf that two have is found by both.
    assert_eq!((word(&mut process, "then"), read_one(&mut process, "then", 0)), (None, 1000));
    assert_eq!(word(&mut process, "then"), Some(1000));
    process.operate(Operation::Rollback(first, then)).unwrap();
    assert_eq!(word(&mut process, "first"), None);
    assert_eq!(read_one(&mut process, "first", 0), 1000);
    assert_eq!(word(&mut process, "first"), Some(1000));
    process.operate(Operation::Delete(first)).unwrap();
    let second = process.operate(Operation::Create(name("second"), BLOCKS, 1)).unwrap();
    assert_eq!(second, first, "the number is given again");
    assert_eq!(word(&mut process, "second"), None);
    assert_eq!(read_one(&mut process, "second", 0), 0);
    assert_eq!(word(&mut process, "then"), Some(1000));
}

/// A page of P2M with an entry of a number that was never given. A later write would get the number.
#[test]
fn an_entry_of_a_number_that_was_never_given_is_damage() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 1, 1000).unwrap();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.close(port).await }).unwrap().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    process.live.shared.core().numbers_end = 1;
    assert_eq!(process.read("v0", 0..8).unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(process.read_mapped("v0", 0..1).unwrap(), Mapped::Slow);
}

/// Block 0 of `v0`, and the number that it has.
fn number_of(process: &mut Process) -> u64 {
    let leaf = Leaf::of_block(process.volume("v0"), 0);
    let Process { live, port, reactor } = process;
    reactor.block_on(async { live.leaves.words::<1>(port, leaf).await }).unwrap().unwrap()[0]
}

/// Gives a number another content, as if no task could still be reading it.
async fn use_again(live: &Live, port: &Port, number: u64, content: u64) -> io::Result<()> {
    let volume = live.volume("v0").unwrap();
    let place = live.shared.layout().first_place(live.shared.layout().segments - 1);
    let checksum = content as u32;
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&content.to_le_bytes());
    let hash = ContentHash(hash);
    let new = NewContent { volume, block: 0, number, place, checksum, domain: 0, hash };
    let change = Change { blocks: Vec::new(), new: vec![new] };
    let leaves = change.leaves();
    let mut claim = live.changes.claim(port, &leaves).await?;
    live.changes.with_all(port, &mut claim, &leaves, |core| change.make(core)).await
}

/// Section 6, Order: of a reader.
#[test]
fn a_candidate_that_becomes_another_content_while_it_is_looked_at_is_not_believed() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 1, 1000).unwrap();
    let number = number_of(&mut process);
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.close(port).await }).unwrap().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    let Process { live, port, reactor } = &mut Process::of(&machine).unwrap();
    let steps = async {
        // Its hash is in memory, and its entry of P2M has to be loaded.
        let hash = live.leaves.hash_of(port, number).await?;
        let mut has = pin!(live.writer.has(port, number, &hash));
        let begun = poll_fn(|cx| Poll::Ready(has.as_mut().poll(cx))).await;
        assert!(begun.is_pending());
        use_again(live, port, number, 1).await?;
        has.await
    };
    assert!(!reactor.block_on(steps).unwrap().unwrap());
}

/// Section 6, Order: of a writer.
#[test]
fn a_number_that_is_used_again_is_never_seen_with_its_new_place_and_its_old_hash() {
    let (_machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 1, 1000).unwrap();
    let number = number_of(&mut process);
    let Process { live, port, reactor } = &mut process;
    let live = &*live;
    let mut again = |content| {
        let again = async { use_again(live, port, number, content).await };
        reactor.block_on(again).unwrap().unwrap();
    };
    again(1);
    let (ends, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut last = 0;
            while !ends.load(Ordering::Relaxed) {
                let (leaf, at) = Leaf::of_number(number);
                let Some(entry) = live.shared.slots.read::<2>(leaf.view(), at) else { continue };
                let (leaf, at) = Leaf::of_hash(number);
                let Some([hash]) = live.shared.slots.read::<1>(leaf.view(), at) else { continue };
                let found =
                    Whereabouts::decode(&bytes(entry), number, &live.shared.layout()).unwrap();
                let Whereabouts::Plain { checksum, .. } = found else { panic!("{found:?}") };
                let place = u64::from(checksum);
                assert!(hash >= place, "the place of {place} and the hash of {hash}");
                seen.fetch_add(u64::from(place != last), Ordering::Relaxed);
                last = place;
            }
        });
        // Until both have run beside each other for a while.
        let mut content = 2;
        while seen.load(Ordering::Relaxed) < 5000 && !reader.is_finished() {
            again(content);
            content += 1;
        }
        ends.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

/// Steps that may wait for a reader: after how many looks they have ended. None: not after so many.
fn looks(
    process: &mut Process,
    most: u32,
    steps: impl AsyncFnOnce(&Live, &Port) -> io::Result<()>,
) -> Option<u32> {
    let Process { live, port, reactor } = process;
    let work = async {
        let mut steps = pin!(steps(live, port));
        for look in 0..most {
            let now = poll_fn(|cx| Poll::Ready(steps.as_mut().poll(cx))).await;
            if let Poll::Ready(done) = now {
                done.unwrap();
                return Some(look);
            }
            port.io.sleep(std::time::Duration::from_millis(1)).await.unwrap();
        }
        None
    };
    reactor.block_on(work).unwrap()
}

/// threats.md T18: the volumes are of two domains.
#[test]
fn a_place_that_a_queue_reads_is_nobody_elses_before_it_has_ended() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 1, 1000).unwrap();
    let pass = async |live: &Live, port: &Port| live.gc(port).await.map(drop);
    let long = 10 * looks(&mut process, u32::MAX, pass).unwrap() + 300;
    let reader = process.live.reader();
    let sweep = reader.enter();
    let Extent::Data { offset, .. } = process.map("v0", 0..1) else { panic!() };
    let operation = reader.keep(sweep);
    reader.leave(sweep);
    write_new(&mut process, "v0", 0, 1, 2000).unwrap();
    let file = std::fs::File::open(&machine.path).unwrap();
    let word = || {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, offset).unwrap();
        u64::from_le_bytes(word)
    };
    // Ten times as long as a pass takes that waits for no operation.
    let pass = async |live: &Live, port: &Port| live.gc(port).await.map(drop);
    assert_eq!(looks(&mut process, long, pass), None);
    // Others write as long as there is room, and then wait.
    let volume = process.volume("v1");
    let mut value = 1 << 20;
    let mut fill = |process: &mut Process, most: u32| {
        for block in (0..BLOCKS / 16 * 16).step_by(16) {
            let span = process.port.memory().span(SCRATCH_BYTES, 16 * BLOCK_BYTES);
            for i in 0..16 {
                value += 1;
                let content = u64::to_le_bytes(value).repeat(BLOCK_BYTES / 8);
                let to = span.slice(i * BLOCK_BYTES, BLOCK_BYTES);
                process.port.memory().copy_in(to, &content);
            }
            let write = async |live: &Live, port: &Port| {
                live.write(port, volume, block * BLOCK, span).await
            };
            if looks(process, most, write).is_none() {
                return false;
            }
        }
        true
    };
    let is_full = (0..4).any(|_| !fill(&mut process, long));
    assert!(is_full, "there is room for it, or a place that is read was given");
    process.flush().unwrap();
    assert_eq!(word(), 1000, "what the read brings");
    reader.leave(operation);
    for _ in 0..3 {
        assert!(fill(&mut process, 20 * long));
    }
    process.flush().unwrap();
    assert_ne!(word(), 1000, "it was given to others");
    assert_eq!(read_one(&mut process, "v0", 0), 2000);
}
