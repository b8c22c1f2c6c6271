//! Room for pages: operations that take pages and no data never take the room that a checkpoint or a pass needs.

use super::*;

const LEAF_BYTES: u64 = (crate::page::V2P_ENTRIES * BLOCK_BYTES) as u64;

impl Process {
    /// One block of the same content in each of so many leaves of a volume. The first for which there is no room.
    fn fill_leaves(&mut self, volume: VolumeId, value: u8, leaves: u64) -> Option<u64> {
        let Process { live, port, reactor } = self;
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        port.memory().fill(span, value);
        (0..leaves).find(|leaf| {
            let write = async { live.write(port, volume, leaf * LEAF_BYTES, span).await };
            let done = reactor.block_on(write).unwrap();
            done.is_err_and(|e| {
                assert_eq!(e.kind(), io::ErrorKind::StorageFull);
                true
            })
        })
    }

    fn zeros(&mut self, volume: VolumeId, leaves: Range<u64>) -> io::Result<()> {
        let Process { live, port, reactor } = self;
        let (at, len) = (leaves.start * LEAF_BYTES, (leaves.end - leaves.start) * LEAF_BYTES);
        reactor.block_on(async { live.write_zeros(port, volume, at, len).await })?
    }

    fn first_block(&mut self, volume: VolumeId, leaf: u64) -> Vec<u8> {
        let Process { live, port, reactor } = self;
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        let read = async { live.read(port, volume, leaf * LEAF_BYTES, span).await };
        reactor.block_on(read).unwrap().unwrap();
        let mut found = vec![0; BLOCK_BYTES];
        port.memory().copy_out(span, &mut found);
        found
    }

    fn close(&mut self) -> io::Result<()> {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.close(port).await })?
    }
}

fn with_a_thin_volume() -> (Machine, Process, VolumeId) {
    let (machine, mut process) = with_a_volume();
    let thin = Operation::Create(Name::new("thin").unwrap(), 1 << 24, 0);
    let thin = process.operate(thin).unwrap();
    (machine, process, thin)
}

#[test]
fn a_store_that_is_full_of_pages_is_flushed_swept_emptied_and_closed() {
    let (machine, mut process, thin) = with_a_thin_volume();
    let written = process.fill_leaves(thin, 7, 10_000).unwrap();
    process.flush().unwrap();
    process.gc().unwrap();
    process.zeros(thin, 0..100).unwrap();
    process.gc().unwrap();
    process.close().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(process.first_block(thin, written - 1), [7; BLOCK_BYTES]);
    process.operate(Operation::Delete(thin)).unwrap();
    process.gc().unwrap();
    process.gc().unwrap();
    let again =
        process.operate(Operation::Create(Name::new("again").unwrap(), 1 << 24, 0)).unwrap();
    let fits = process.fill_leaves(again, 8, 10_000).unwrap();
    assert!(fits >= written * 9 / 10, "{fits} of {written}");
}

#[test]
fn a_store_that_is_full_of_pages_opens_after_a_death_and_after_a_cut() {
    for cut in [false, true] {
        let (machine, mut process, thin) = with_a_thin_volume();
        let written = process.fill_leaves(thin, 7, 10_000).unwrap();
        process.flush().unwrap();
        drop(process);
        match cut {
            true => machine.world.cut_power().unwrap(),
            false => machine.world.kill_process().unwrap(),
        }
        let mut process = Process::of(&machine).unwrap();
        assert_eq!(process.first_block(thin, 0), [7; BLOCK_BYTES]);
        assert_eq!(process.first_block(thin, written - 1), [7; BLOCK_BYTES]);
        process.close().unwrap();
    }
}

#[test]
fn copies_of_what_snapshots_have_leave_room_for_a_checkpoint() {
    let (_machine, mut process, thin) = with_a_thin_volume();
    let quarter = process.fill_leaves(thin, 7, 10_000).unwrap() / 4;
    process.operate(Operation::Delete(thin)).unwrap();
    process.gc().unwrap();
    process.gc().unwrap();
    let name = |name: String| Name::new(&name).unwrap();
    let of = process.operate(Operation::Create(name("of".into()), 1 << 24, 0)).unwrap();
    let mut snapshots = 0;
    let is_full = (8..20).any(|value| {
        let written = process.fill_leaves(of, value, quarter);
        // A discard of what a snapshot has takes pages, too.
        if let Err(e) = process.zeros(of, 0..quarter / 2) {
            assert_eq!(e.kind(), io::ErrorKind::StorageFull);
        }
        process.flush().unwrap();
        process.gc().unwrap();
        match process.operate(Operation::Snapshot(name(format!("s{value}")), of)) {
            Ok(_) => snapshots += 1,
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::StorageFull),
        }
        written.is_some()
    });
    assert!(is_full && snapshots > 1, "{snapshots} snapshots");
    process.operate(Operation::Delete(of)).unwrap();
    process.gc().unwrap();
    process.close().unwrap();
}

/// Where a file system writes elsewhere what it writes again, as a file with a copy does.
#[test]
fn what_an_opening_writes_has_the_space_that_is_kept_for_the_stores_own_work() {
    let (machine, process) = with_a_volume();
    drop(process);
    machine.world.kill_process().unwrap();
    let superblock = 0..BLOCK_BYTES as u64;
    let fault = Fault { on: On::Write, range: superblock, per_mille: 1000, errno: 28, times: 1 };
    machine.world.set_faults(vec![fault]);
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(process.read("v0", 0..8).unwrap(), [0; 8]);
}

#[test]
fn what_is_available_is_what_can_be_written_and_nothing_when_writes_find_no_room() {
    let (_machine, mut process, thin) = with_a_thin_volume();
    let available = |process: &mut Process| {
        let Process { live, port, reactor } = process;
        let stats = reactor.block_on(async { live.stats(port).await }).unwrap().unwrap();
        assert_eq!(stats.available_bytes + stats.reserved_bytes, stats.free_bytes);
        stats.available_bytes
    };
    let before = available(&mut process);
    let block = BLOCK_BYTES as u64;
    let write = |process: &mut Process, at: u64| {
        let Process { live, port, reactor } = process;
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        port.memory().fill(span, 0);
        port.memory().copy_in(span.slice(0, 8), &(at + 1).to_le_bytes());
        reactor.block_on(async { live.write(port, thin, at * block, span).await }).unwrap()
    };
    let written = (0..).find(|at| write(&mut process, *at).is_err()).unwrap() * block;
    // So small a store has much of its room for the pages of one turn of writes: it says too little rather than too much.
    assert!(before <= written + written / 8 && before >= written / 4, "{before}, {written}");
    let (left, free) = (available(&mut process), process.live.info().free_bytes);
    assert!(left <= 16 * block && free > left, "{left} of {free}");
}
