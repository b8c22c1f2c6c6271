//! Movers as frontends see them: the offer, the agreement of both ends, and successors with another mover than their
//! predecessors.

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::mover::Mover;

const ALL: [Mover; 3] = [Mover::Copy, Mover::Map, Mover::Persistent];

fn rig(mover: Mover) -> Rig {
    let mut rig = Rig::without_backend(Plan { bytes: 4 << 20, ..Plan::default() });
    rig.change_mover(mover);
    rig.start();
    rig
}

/// Writes and reads on each queue: small and large, whole pages and parts of them.
fn works(front: &mut Frontend, seed: u8) {
    let buffer = front.space().buffer(32).unwrap();
    for (q, queue) in front.queues.iter_mut().enumerate() {
        for (sector, at, len) in [(1, 512, 1024), (64, 0, 32 * 4096), (400, 3584, 8192)] {
            let sector = sector + 512 * q as u64;
            let data: Vec<u8> = (0..len).map(|i| (i / 512) as u8 ^ seed ^ q as u8).collect();
            buffer.write(at, &data);
            queue.write(sector, &buffer, at, len).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
            buffer.fill(0, buffer.len(), 0xEE);
            queue.read(sector, &buffer, at, len).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
            assert_eq!(buffer.to_vec(at, len), data);
            assert!(buffer.to_vec(0, at).iter().all(|b| *b == 0xEE));
        }
    }
}

#[test]
fn persistent_grants_are_offered_by_their_mover_only_and_used_if_both_ends_agree() {
    for mover in ALL {
        for claims in [false, true] {
            let rig = rig(mover);
            // Without an agreement, every page has to be released before its response.
            let options =
                FrontOptions { persistent: claims, regrant: true, queues: 2, ..Default::default() };
            let mut front = rig.connect(&options);
            assert_eq!(front.features().persistent, mover == Mover::Persistent);
            for seed in 0..4 {
                works(&mut front, seed);
            }
            let used = front.space().memory().grants().users();
            front.close(PATIENCE).unwrap();
            let counts = rig.counts();
            let agreed = claims && mover == Mover::Persistent;
            assert_eq!(used > 2, agreed, "{mover}: {used} in use beside the two rings");
            assert_eq!(counts.hits > 0, agreed, "{mover}: {counts}");
            assert_eq!(counts.misses > 0, agreed || mover == Mover::Map, "{mover}: {counts}");
            assert_eq!((counts.mapped, counts.fallbacks), (0, 0), "{mover}: {counts}");
            assert_eq!(front.space().memory().grants().users(), 0);
        }
    }
}

#[test]
fn a_guest_that_uses_the_same_pages_again_has_them_mapped_once() {
    let rig = rig(Mover::Persistent);
    let mut front = rig.connect(&FrontOptions::default());
    for seed in 0..50 {
        works(&mut front, seed);
    }
    front.close(PATIENCE).unwrap();
    let counts = rig.counts();
    // 32 pages of data and one of descriptors.
    assert_eq!(counts.misses, 33, "{counts}");
    assert!(counts.hits > 50 * 60 && counts.evictions == 0, "{counts}");
}

#[test]
fn a_successor_may_move_data_in_another_way() {
    for first in ALL {
        for second in ALL {
            let mut rig = rig(first);
            let options = FrontOptions { regrant: true, ..FrontOptions::default() };
            let mut front = rig.connect(&options);
            works(&mut front, 1);
            rig.stop().unwrap();
            rig.change_mover(second);
            rig.start();
            for seed in 0..3 {
                works(&mut front, seed);
            }
            front.close(PATIENCE).unwrap();
            // The guest relies on the offer that it got, so it must hold.
            let persistent = first == Mover::Persistent && second == Mover::Persistent;
            assert_eq!(rig.counts().hits > 0, persistent, "{first}, then {second}");
            // The next connection uses the successor's offer.
            front.connect(&options, PATIENCE).unwrap();
            works(&mut front, 4);
            assert_eq!(front.features().persistent, second == Mover::Persistent);
            front.close(PATIENCE).unwrap();
        }
    }
}
