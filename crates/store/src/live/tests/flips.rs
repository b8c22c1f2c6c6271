//! A bit that flips anywhere on the medium is an error, or the second copy is read, or the block is not in use. A volume
//! never reads other data (store.md 2 and 4).

use super::super::leaf::Leaf;
use super::*;
use crate::page::HASHES;
use crate::tree::Found;

/// Of each volume: 24 blocks at the beginning of a leaf and as many behind it.
const SECTORS: [Range<u64>; 2] = [0..192, 4096..4288];

type Contents = Vec<(&'static str, Vec<u8>)>;

/// Values of all sectors, or the error.
fn read_all(process: &mut Process, name: &str) -> io::Result<Vec<u8>> {
    let parts = SECTORS.map(|sectors| process.read(name, sectors));
    parts.into_iter().try_fold(Vec::new(), |all, part| Ok([all, part?].concat()))
}

/// One block's reads are errors of their own.
fn read_blocks(process: &mut Process, name: &str) -> Vec<io::Result<Vec<u8>>> {
    let blocks = SECTORS.into_iter().flat_map(|s| s.step_by(PER_BLOCK as usize));
    blocks.map(|first| process.read(name, first..first + PER_BLOCK)).collect()
}

/// A store with a past, and what its volumes have: at the last checkpoint, and with what the journal has besides.
fn with_everything() -> (Machine, Contents, Contents) {
    let (machine, mut process) = with_a_volume();
    let put = |process: &mut Process, name: &str, first: u64, value: u8| {
        let done = process.write(&[write(name, first..first + 64, value)], false);
        done.unwrap().remove(0).unwrap();
    };
    for (i, first) in [0, 64, 128, 4096, 4160, 4224].into_iter().enumerate() {
        put(&mut process, "v0", first, 10 + i as u8);
        put(&mut process, "v1", first, 20 + i as u8 % 4);
    }
    let volume = process.volume("v0");
    process.operate(Operation::Snapshot(Name::new("s").unwrap(), volume)).unwrap();
    put(&mut process, "v0", 0, 30);
    // Some content is dead by now, and its place has other content.
    put(&mut process, "v1", 64, 31);
    process.gc().unwrap();
    put(&mut process, "v1", 64, 32);
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    let now = |process: &mut Process| {
        ["s", "v0", "v1"].map(|name| (name, read_all(process, name).unwrap())).to_vec()
    };
    let checkpoint = now(&mut process);
    put(&mut process, "v0", 4096, 40);
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.flush(port).await }).unwrap().unwrap();
    // These vouch for the block before: it has to be there.
    put(&mut process, "v1", 4096, 41);
    put(&mut process, "v1", 0, 10);
    let journal = now(&mut process);
    (machine, checkpoint, journal)
}

/// Errors and values that were read behind a flip.
#[derive(Default)]
struct Seen {
    errors: u64,
    refused: u64,
    read: u64,
}

/// Volumes read one of two contents in each sector, or an error.
fn nothing_else_is_read(
    process: &mut Process,
    before: &Contents,
    after: &Contents,
    what: &str,
    seen: &mut Seen,
) {
    for ((name, before), (_, after)) in before.iter().zip(after) {
        let blocks = read_blocks(process, name);
        let block = PER_BLOCK as usize;
        for ((found, before), after) in
            blocks.into_iter().zip(before.chunks(block)).zip(after.chunks(block))
        {
            match found {
                Ok(found) => {
                    let is_one = found == before || found == after;
                    assert!(is_one, "{what}: {name} reads {found:?}, not {before:?} or {after:?}");
                    seen.read += 1;
                }
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{what}: {e}");
                    seen.errors += 1;
                }
            }
        }
    }
}

#[test]
fn a_bit_that_flips_anywhere_is_an_error_or_unused_and_never_other_data() {
    let (machine, before, after) = with_everything();
    let bytes = std::fs::read(&machine.path).unwrap();
    let mut random = SplitMix64::new(14);
    let (mut seen, mut flips) = (Seen::default(), 0);
    let every = if is_night() { 1 } else { 3 };
    let blocks = bytes.chunks(BLOCK_BYTES).enumerate();
    let used = blocks.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
    for (place, block) in used.step_by(every) {
        let last = block.iter().rposition(|byte| *byte != 0).unwrap();
        // In what the block has, and in the zeros behind that.
        for at in [random.below(last as u64 + 1), random.below(BLOCK_BYTES as u64)] {
            let at = (place * BLOCK_BYTES) as u64 + at;
            let bit = 1 << random.below(8);
            let what = format!("bit {bit:#x} of byte {at} (block {place})");
            let other = Machine::new(3);
            std::fs::write(&other.path, &bytes).unwrap();
            let file = std::fs::File::options().read(true).write(true).open(&other.path).unwrap();
            file.write_all_at(&[bytes[at as usize] ^ bit], at).unwrap();
            other.world.changed_outside(&file).unwrap();
            flips += 1;
            let mut process = match Process::of(&other) {
                Ok(process) => process,
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{what}: {e}");
                    seen.refused += 1;
                    continue;
                }
            };
            // Data that no flush has covered look torn: a block of the journal, or content of its records.
            nothing_else_is_read(&mut process, &before, &after, &what, &mut seen);
            // Nor is it when places are given again: no content of a volume is in them.
            for i in 0..6 {
                let sectors = 8000 + 8 * i..8008 + 8 * i;
                let _ = process.write(&[write("v1", sectors, 50 + i as u8)], false).unwrap();
            }
            let _ = process.gc();
            for i in 0..6 {
                let sectors = 8100 + 8 * i..8108 + 8 * i;
                let _ = process.write(&[write("v0", sectors, 60 + i as u8)], false).unwrap();
            }
            nothing_else_is_read(&mut process, &before, &after, &what, &mut seen);
        }
    }
    assert!(
        flips > 300 / every && (seen.refused > 0 || !is_night()),
        "{flips} flips, {} refused",
        seen.refused
    );
    assert!(
        seen.errors > 50 / every as u64 && seen.read > 100 * seen.errors,
        "{} {}",
        seen.errors,
        seen.read
    );
}

/// Bits of a segment are wanted while the store is in use, and storage cannot read them.
#[test]
fn of_a_segment_whose_bits_cannot_be_read_nothing_is_given_and_others_are_written() {
    let (machine, mut process) = with_a_volume();
    let layout = process.live.shared.core().layout;
    // Pairs that are full, so that nothing of them is in memory.
    for first in (16..416).step_by(100) {
        super::passes::write_new(&mut process, "v0", first, 100, 1000 + first).unwrap();
    }
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    let pages = layout.space_page(0, 0)..layout.space_page(layout.segments - 1, 1) + 1;
    let range = pages.start * BLOCK_BYTES as u64..pages.end * BLOCK_BYTES as u64;
    let fault = Fault { on: On::Read, range, per_mille: 1000, errno: 5, times: u64::MAX };
    machine.world.set_faults(vec![fault]);
    let mut unread = 0;
    for segment in 0..layout.segments {
        let Process { live, port, reactor } = &mut process;
        if !live.shared.core().space.is_loaded(segment) {
            reactor
                .block_on(async { live.shared.load_bits(port, segment).await })
                .unwrap()
                .unwrap();
            let first = layout.first_place(segment);
            let mut places = first..first + layout.segment_blocks;
            let space = &live.shared.core().space;
            assert!(places.all(|place| space.is_taken(place) == Some(true)), "{segment}");
            unread += 1;
        }
    }
    assert!(unread > 0);
    process.write(&[write("v0", 0..64, 7)], false).unwrap().remove(0).unwrap();
    assert_eq!(process.read("v0", 0..64).unwrap(), [7; 64]);
}

/// Places of all leaves of the hashes.
fn hashes(process: &mut Process) -> Vec<u64> {
    let Process { live, port, reactor } = process;
    let mut places = Vec::new();
    for leaf in 0..live.shared.layout().places().div_ceil(HASHES as u64) {
        loop {
            let found = Leaf::Hashes(leaf).find(&live.shared.core()).unwrap();
            match found {
                Found::Load(id, pointer) if id.level == 0 => places.push(pointer.place),
                Found::Load(id, pointer) => {
                    let load =
                        async { live.leaves.load(port, Leaf::Hashes(leaf), id, pointer).await };
                    reactor.block_on(load).unwrap().unwrap();
                    continue;
                }
                Found::Nothing => {}
                Found::Leaf(_) => panic!("nothing was looked up"),
            }
            break;
        }
    }
    places
}

/// New content gets numbers in these pages, and is found afterwards; their old contents cost space only.
#[test]
fn hashes_that_are_lost_fail_no_write() {
    let (machine, before, _) = with_everything();
    // The first opening replays the journal.
    drop(Process::of(&machine).unwrap());
    let places = hashes(&mut Process::of(&machine).unwrap());
    assert!(!places.is_empty());
    for is_unreadable in [false, true] {
        let other = Machine::new(3);
        std::fs::copy(&machine.path, &other.path).unwrap();
        let range = |place: &u64| place * BLOCK_BYTES as u64..(place + 1) * BLOCK_BYTES as u64;
        let fault =
            |range| Fault { on: On::Read, range, per_mille: 1000, errno: 5, times: u64::MAX };
        match is_unreadable {
            true => other.world.set_faults(places.iter().map(range).map(fault).collect()),
            false => {
                let file = std::fs::File::options().write(true).open(&other.path).unwrap();
                for place in &places {
                    file.write_all_at(&[0xa5; 64], range(place).start).unwrap();
                }
                other.world.changed_outside(&file).unwrap();
            }
        }
        let mut process = Process::of(&other).unwrap();
        let (_, snapshot) = &before[0];
        for first in [8000, 8064] {
            process.write(&[write("v1", first..first + 64, 70)], false).unwrap().remove(0).unwrap();
        }
        assert_eq!(process.read("v1", 8064..8128).unwrap(), [70; 64]);
        assert_eq!(read_all(&mut process, "s").unwrap(), *snapshot);
        process.gc().unwrap();
        assert_eq!(process.read("v1", 8000..8064).unwrap(), [70; 64]);
        assert_eq!(read_all(&mut process, "s").unwrap(), *snapshot);
    }
}
