//! A correct guest and its disk: handshakes, data, restarts.

use std::path::PathBuf;

use ferrite_loopback::front::{FrontOptions, RingKeys};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images, stores};
use ferrite_xen::abi::Protocol;

#[test]
fn what_is_written_is_read_back_and_is_on_the_medium() {
    let rig = Rig::new(Plan::default());
    let options = FrontOptions { max_indirect: 256, ..FrontOptions::default() };
    let mut front = rig.connect(&options);
    let buffer = front.space().buffer(64).unwrap();
    let data: Vec<u8> = (0..64 * 4096).map(|i| (i * 7 % 251) as u8).collect();
    buffer.write(0, &data);
    let queue = &mut front.queues[0];
    for (sector, at, len) in [(3, 512, 512), (8, 4096, 40960), (1000, 0, 64 * 4096)] {
        queue.write(sector, &buffer, at, len).unwrap();
        queue.push().unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(rig.sectors(sector, len), data[at..at + len]);
    }
    queue.flush().unwrap();
    queue.push().unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    let back = front.space().buffer(64).unwrap();
    let queue = &mut front.queues[0];
    queue.read(1000, &back, 0, 64 * 4096).unwrap();
    queue.push().unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(back.to_vec(0, 64 * 4096), data);
    front.close(PATIENCE).unwrap();
}

/// The bitmap of a block of a differencing VHD is read with its first request, and then cached.
#[test]
fn metadata_that_has_to_be_read_is_a_miss_once() {
    let dir = ferrite_testkit::places::dir_in_memory();
    let image = images::make(dir.path(), "chain.vhd", 16 << 20);
    images::write(&image, 32768, &[7; 4096]);
    let rig = Rig::new(Plan { image: Some(image), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    for (hits, misses) in [(0, 1), (1, 1), (2, 1)] {
        let queue = &mut front.queues[0];
        queue.read(64, &buffer, 0, 4096).unwrap();
        queue.push().unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(buffer.to_vec(0, 4096), [7; 4096]);
        let counts = rig.counters.counts();
        assert_eq!((counts.metadata_hits, counts.metadata_misses), (hits, misses));
    }
    front.close(PATIENCE).unwrap();
}

/// A leaf of each of a store's tables is read with the first request for it. Writes take steps in any case, so they
/// prove nothing.
#[test]
fn tables_of_a_store_that_have_to_be_read_are_missed_once_each_and_counted_apart() {
    let dir = ferrite_testkit::places::dir_in_memory();
    let store = dir.path().join("s");
    stores::create(&store, stores::SMALLEST, &[("a", 256)]);
    let image = PathBuf::from(format!("store:{}#a", store.display()));
    images::write(&image, 32768, &[7; 4096]);
    let rig = Rig::new(Plan { image: Some(image), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    for (hits, misses) in [(0, 1), (1, 1), (2, 1)] {
        let queue = &mut front.queues[0];
        queue.read(64, &buffer, 0, 4096).unwrap();
        queue.push().unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(buffer.to_vec(0, 4096), [7; 4096]);
        let counts = rig.counters.counts();
        assert_eq!((counts.metadata_hits, counts.metadata_misses), (hits, misses));
        assert_eq!((counts.v2p_misses, counts.p2m_misses), (1, 1));
        assert_eq!((counts.v2p_hits, counts.p2m_hits), (hits, hits));
    }
    let queue = &mut front.queues[0];
    queue.write(64, &buffer, 0, 4096).unwrap();
    queue.push().unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    let counts = rig.counters.counts();
    assert_eq!((counts.metadata_hits, counts.metadata_misses), (2, 1));
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_guest_may_disconnect_and_connect_in_other_shapes_without_end() {
    let rig = Rig::new(Plan::default());
    let shapes = [
        FrontOptions::default(),
        FrontOptions::windows(),
        FrontOptions::x86_32(),
        FrontOptions { queues: 4, order: 4, ..FrontOptions::default() },
        FrontOptions { order: 2, ring_keys: RingKeys::NumRingPages, ..FrontOptions::default() },
        FrontOptions { ring_keys: RingKeys::AlwaysOrder, ..FrontOptions::default() },
        FrontOptions { queues: 2, order: 1, ring_keys: RingKeys::Both, ..FrontOptions::default() },
        FrontOptions { protocol: Protocol::X86_32, queues: 3, order: 3, ..FrontOptions::default() },
    ];
    for (i, shape) in shapes.iter().cycle().take(24).enumerate() {
        let mut front = rig.connect(shape);
        let buffer = front.space().buffer(8).unwrap();
        for (q, queue) in front.queues.iter_mut().enumerate() {
            buffer.fill(0, 8 * 4096, i as u8 + 1);
            queue.write(q as u64 * 64, &buffer, 0, 8 * 4096).unwrap();
            queue.push().unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "{shape:?} queue {q}");
            assert!(rig.sectors(q as u64 * 64, 8 * 4096).iter().all(|&b| b == i as u8 + 1));
        }
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn an_unplugged_disk_is_let_go_of() {
    let mut rig = Rig::new(Plan::default());
    let mut front = rig.connect(&FrontOptions::default());
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    assert!(rig.is_running(), "the guest still uses it");
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert!(!rig.run_dir().join("inflight").exists());
}

#[test]
fn a_successor_goes_on_where_its_predecessor_was_stopped() {
    let mut rig = Rig::new(Plan::default());
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(8).unwrap();
    for round in 1..5u8 {
        buffer.fill(0, 8 * 4096, round);
        for queue in &mut front.queues {
            queue.write(0, &buffer, 0, 8 * 4096).unwrap();
            queue.push().unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        }
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        // Sent while no backend runs.
        front.queues[1].write(64, &buffer, 0, 4096).unwrap();
        front.queues[1].push().unwrap();
        rig.start();
        assert!(front.queues[1].next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(rig.sectors(64, 1), [round]);
    }
    front.close(PATIENCE).unwrap();
}
