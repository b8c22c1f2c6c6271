//! Backends that are killed at any time, and their successors (blkif.md 3.9): the guest sees a pause. No error, no lost
//! or wrong byte, no request without an answer or with two.

mod nth;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_host::clock::SplitMix64;
use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend, RingWord};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_testkit::errno::ENOMEM;
use ferrite_testkit::processes::{World, killed_under_load, word};
use ferrite_testkit::rig::{Plan, Rig, offer};
use ferrite_testkit::{PATIENCE, images, scale};

use nth::{Call, FailingHypervisor, Nth};

/// Not a test: the backend, if this program was started again with that environment.
#[test]
fn process_backend() {
    ferrite_testkit::processes::be_a_backend(|_, _, _| {});
}

#[test]
fn a_killed_backend_is_a_pause_on_images_and_what_it_answered_is_there() {
    for (i, format) in images::FORMATS.into_iter().enumerate() {
        let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
        killed_under_load(World::with_format(format), options, 6 * scale(), 10 + i as u64);
    }
}

/// With a keeper that opens files for it and without rights of its own (threats.md T27 and T28).
#[test]
fn a_killed_backend_without_rights_is_a_pause_on_all_images() {
    for (i, format) in ["raw"].iter().chain(&images::FORMATS).enumerate() {
        let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
        let world = World::with_format(format).sandboxed();
        killed_under_load(world, options, 4 * scale(), 30 + i as u64);
    }
}

#[test]
fn a_killed_backend_is_a_pause_with_one_small_ring() {
    let options = FrontOptions { regrant: true, max_indirect: 64, ..FrontOptions::default() };
    killed_under_load(World::new(CopyWith::Memcpy), options, 20 * scale(), 1);
}

#[test]
fn a_killed_backend_is_a_pause_with_two_large_rings_and_copies_by_the_kernel() {
    let options = FrontOptions { queues: 2, ..FrontOptions::windows() };
    killed_under_load(World::new(CopyWith::ProcessVm), options, 20 * scale(), 2);
}

#[test]
fn a_killed_backend_is_a_pause_for_a_32_bit_guest() {
    let options = FrontOptions {
        queues: 2,
        order: 2,
        regrant: true,
        max_indirect: 64,
        ..FrontOptions::x86_32()
    };
    killed_under_load(World::new(CopyWith::Memcpy), options, 8 * scale(), 3);
}

/// Killed between reading and writing a block that was to be changed in part.
#[test]
fn a_killed_backend_is_a_pause_on_blocks_of_4096_bytes() {
    let Some(world) = World::with_large_blocks(CopyWith::Memcpy) else { return };
    let options = FrontOptions { queues: 2, order: 1, max_indirect: 64, ..FrontOptions::default() };
    killed_under_load(world, options, 8 * scale(), 4);
}

/// Killed while states are written and rings are mapped: the successor continues at each step.
#[test]
fn a_backend_killed_in_a_handshake_is_followed_by_one_that_goes_on_with_it() {
    let world = World::new(CopyWith::Memcpy);
    let mut front =
        Frontend::new(world.machine.guest(world.disk.domid).unwrap(), world.disk.devid).unwrap();
    let (stop, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let thread = std::thread::spawn({
        let (stop, progress) = (stop.clone(), progress.clone());
        move || {
            let mut rounds = 0u32;
            while !stop.load(Ordering::Relaxed) {
                rounds += 1;
                let options = FrontOptions { queues: 1 + rounds % 2, ..FrontOptions::default() };
                front.connect(&options, PATIENCE).unwrap();
                let buffer = front.space().buffer(1).unwrap();
                buffer.write(0, &word(rounds, 0).repeat(512));
                for queue in &mut front.queues {
                    queue.write(0, &buffer, 0, 4096).unwrap();
                    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                }
                progress.fetch_add(1, Ordering::Relaxed);
                front.close(PATIENCE).unwrap();
            }
            front.connect(&FrontOptions::default(), PATIENCE).unwrap();
            println!("{rounds} connections");
            front
        }
    });
    let mut random = SplitMix64::new(7);
    let last = world.kill_backends(12 * scale(), &progress, &mut random);
    stop.store(true, Ordering::Relaxed);
    let front = thread.join().unwrap();
    world.end(front, last);
}

/// A rig with one request in flight that no backend has answered.
fn interrupted() -> (Rig, Frontend, Buffer) {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(2).unwrap();
    buffer.fill(0, 8192, 7);
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    (rig, front, buffer)
}

/// Checks that the takeover is refused because of `why`, and that nothing changed.
fn refused(rig: &mut Rig, front: &mut Frontend, why: &str) {
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
    assert!(error.to_string().contains(why), "{error} does not say {why:?}");
    assert_eq!(front.backend_state().unwrap(), 4, "the guest would lose its disk");
    assert_eq!(front.queues[0].ring().load(RingWord::RspProd), 0);
    assert_eq!(front.queues[0].in_flight(), 1);
    let memory = front.space().memory();
    assert_eq!((memory.grants().users(), memory.bound_ports()), (0, 0));
    assert_eq!(rig.take_error(), None);
}

#[test]
fn without_the_right_table_nothing_is_taken_over_and_nothing_touched() {
    let (mut rig, mut front, _buffer) = interrupted();
    let path = rig.run_dir().join("inflight");
    let right = std::fs::read(&path).unwrap();
    let aside = rig.run_dir().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    refused(&mut rig, &mut front, "inflight");

    let changed = |at: usize, byte: u8| {
        let mut wrong = right.clone();
        wrong[at] ^= byte;
        wrong
    };
    let wrong = [
        (Vec::new(), "inflight"),
        (vec![0; right.len()], "not a table"),
        (changed(0, 1), "not a table"),
        // A byte in the text of the owner.
        (changed(70, 1), "does not belong"),
        (right[..right.len() - 64].to_vec(), "does not belong"),
        (right[..100].to_vec(), "not a table"),
    ];
    for (bytes, why) in wrong {
        std::fs::write(&path, bytes).unwrap();
        refused(&mut rig, &mut front, why);
    }
    std::fs::write(&path, &right).unwrap();
    // The guest names a page that is not a ring.
    let ring = front.queues[0].ring_grefs()[0].0;
    front.write_key("ring-ref", b"8191").unwrap();
    refused(&mut rig, &mut front, "8191");
    front.write_key("ring-ref", ring.to_string().as_bytes()).unwrap();
    // Another guest with the same number.
    let vm = format!("/local/domain/{}/vm", rig.domid);
    let mut store = rig.machine.store().unwrap();
    store.write(&vm, b"/vm/another").unwrap();
    refused(&mut rig, &mut front, "does not belong");
    store.remove(&vm).unwrap();

    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(rig.sectors(0, 4096), vec![7; 4096]);
    front.close(PATIENCE).unwrap();
}

/// Old blkfronts go to 5 while a file system is mounted ("Device in use; refusing to close"), and continue their I/O.
#[test]
fn a_guest_that_closes_and_is_not_done_is_taken_over() {
    let (mut rig, mut front, _buffer) = interrupted();
    front.set_state(5).unwrap();
    for _ in 0..2 {
        // Our state is 4 the first time, 5 the second.
        rig.start();
        front.wait_for_backend(&[5], PATIENCE).unwrap();
        let replies = front.queues[0].drain(PATIENCE).unwrap();
        assert!(replies.len() == 1 && replies[0].is_ok());
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        front.queues[0].flush().unwrap();
        front.queues[0].push().unwrap();
    }
    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
    // Without anything to take over the guest is released.
    for state in [4, 5] {
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        std::fs::remove_file(rig.run_dir().join("inflight")).unwrap();
        let path = format!("{}/state", rig.disk.backend);
        let state = state.to_string();
        rig.machine.store().unwrap().write(&path, state.as_bytes()).unwrap();
        front.set_state(5).unwrap();
        rig.start();
        front.close(PATIENCE).unwrap();
    }
}

/// A guest that was resumed while no backend ran (3.8): it is in state 3, with rings that no backend has seen.
#[test]
fn a_resumed_guest_whose_rings_are_new_is_connected() {
    let (mut rig, mut front, _buffer) = interrupted();
    for with_table in [true, false] {
        if !with_table {
            std::fs::remove_file(rig.run_dir().join("inflight")).unwrap();
        }
        front.offer(&FrontOptions { queues: 2, ..FrontOptions::default() }).unwrap();
        rig.start();
        let buffer = front.space().buffer(1).unwrap();
        for queue in &mut front.queues {
            queue.read(0, &buffer, 0, 4096).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        }
        front.finish(PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    }
    rig.start();
    front.close(PATIENCE).unwrap();
}

/// Resumes as Linux does: it goes from 3 to 4 by itself if the backend is in state 4, and repeats all unanswered
/// requests.
fn resume_at_four(front: &mut Frontend, buffer: &Buffer) {
    let queues = 1 + front.queues.len() as u32 % 2;
    front.offer(&FrontOptions { queues, ..FrontOptions::default() }).unwrap();
    front.set_state(4).unwrap();
    // A page each: that of an answered request must be free, whatever the other queue does.
    for (i, queue) in front.queues.iter_mut().enumerate() {
        queue.write(0, buffer, i * 4096, 4096).unwrap();
        queue.push().unwrap();
    }
}

fn all_are_answered(front: &mut Frontend) {
    for queue in &mut front.queues {
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    }
}

#[test]
fn a_guest_that_was_resumed_and_is_at_work_while_nobody_serves_it_is_connected() {
    let (mut rig, mut front, buffer) = interrupted();
    for _ in 0..3 {
        resume_at_four(&mut front, &buffer);
        rig.start();
        all_are_answered(&mut front);
        assert_eq!(rig.sectors(0, 4096), vec![7; 4096]);
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    }
    // From another image of the same size it is not.
    resume_at_four(&mut front, &buffer);
    for state in [4, 3] {
        front.set_state(state).unwrap();
        let (image, copy) = (rig.image.clone(), rig.dir.path().join("copy.img"));
        std::fs::copy(&image, &copy).unwrap();
        rig.image = copy;
        rig.start();
        let error = rig.join().unwrap_err();
        assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
        assert_eq!(front.backend_state().unwrap(), 4, "the guest would lose its disk");
        rig.image = image;
    }
    rig.start();
    all_are_answered(&mut front);
    front.close(PATIENCE).unwrap();
}

/// A host that crashes or a kill between the end of the old rings and the table of the new ones.
#[test]
fn a_backend_that_ends_while_it_connects_a_resumed_guest_is_followed_by_one_that_connects_it() {
    for connection in [2, 3] {
        let mut rig = Rig::without_backend(Plan { bytes: 1 << 20, ..Plan::default() });
        let nth = Nth::new(Call::Connect, connection, 1, ENOMEM);
        let inner = rig.machine.loopback(CopyWith::Memcpy).unwrap();
        let store = rig.machine.store().unwrap();
        rig.start_with(store, Box::new(FailingHypervisor { inner, nth: nth.clone() }));
        let mut front = rig.connect(&FrontOptions::default());
        let buffer = front.space().buffer(2).unwrap();
        resume_at_four(&mut front, &buffer);
        let error = rig.join().unwrap_err();
        assert!(matches!(error, ServeError::Host { .. }), "{error}");
        rig.start();
        all_are_answered(&mut front);
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_backend_killed_at_any_moment_is_a_pause_for_a_guest_that_is_resumed_all_the_time() {
    let world = World::new(CopyWith::Memcpy);
    let mut front =
        Frontend::new(world.machine.guest(world.disk.domid).unwrap(), world.disk.devid).unwrap();
    let (stop, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let thread = std::thread::spawn({
        let (stop, progress) = (stop.clone(), progress.clone());
        move || {
            front.connect(&FrontOptions::default(), PATIENCE).unwrap();
            let buffer = front.space().buffer(2).unwrap();
            buffer.write(0, &word(1, 0).repeat(1024));
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                rounds += 1;
                resume_at_four(&mut front, &buffer);
                all_are_answered(&mut front);
                progress.fetch_add(1, Ordering::Relaxed);
            }
            println!("{rounds} connections");
            front
        }
    });
    let mut random = SplitMix64::new(8);
    let last = world.kill_backends(12 * scale(), &progress, &mut random);
    stop.store(true, Ordering::Relaxed);
    let front = thread.join().unwrap();
    world.end(front, last);
}

/// A guest relies on the published offer: for the shape of its rings until they are set up, and for its requests until
/// it goes to 4.
#[test]
fn a_guest_gets_what_it_was_offered_from_a_successor_that_would_offer_less_until_it_begins_anew() {
    let more = FrontOptions { queues: 2, order: 2, max_indirect: 64, ..FrontOptions::default() };
    let less = Offer { max_queues: 1, max_ring_order: 1, max_indirect_segments: 16, ..offer() };
    let published = |front: &mut Frontend| {
        let offered = front.read_features().unwrap();
        (offered.max_queues, offered.max_order, offered.max_indirect)
    };
    let was = (4, 4, 256);
    let large = |front: &mut Frontend| {
        let buffer = front.space().buffer(32).unwrap();
        for queue in &mut front.queues {
            queue.write(8, &buffer, 0, 32 * 4096).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        }
    };
    // The guest's state when the successor begins: 2, 3 with rings that no backend has seen, or 4.
    for front_at in [1, 3, 4] {
        let mut rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
        let mut front = rig.frontend();
        front.wait_for_backend(&[2], PATIENCE).unwrap();
        assert_eq!(published(&mut front), was);
        if front_at > 1 {
            front.offer(&more).unwrap();
            front.finish(PATIENCE).unwrap();
            large(&mut front);
        }
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        if front_at < 4 {
            front.offer(&more).unwrap();
        }
        rig.change_offer(less);
        rig.start();
        front.finish(PATIENCE).unwrap();
        large(&mut front);
        assert_eq!(published(&mut front), was);
        // Resumed, without a change of state that it would wait for.
        front.offer(&more).unwrap();
        front.set_state(4).unwrap();
        large(&mut front);
        assert_eq!(published(&mut front), was);
        assert_eq!(rig.take_error(), None);
        front.connect(&more, PATIENCE).unwrap();
        assert_eq!((front.queues.len(), published(&mut front)), (1, (1, 1, 16)));
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_ring_that_was_changed_meanwhile_is_not_taken_over() {
    let (mut rig, mut front, _buffer) = interrupted();
    let ring = front.queues[0].ring();
    for scribble in [1, 1 << 31, u32::MAX] {
        ring.store(RingWord::RspProd, scribble);
        rig.start();
        let error = rig.join().unwrap_err();
        assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
        assert_eq!(ring.load(RingWord::RspProd), scribble);
        assert_eq!(front.backend_state().unwrap(), 4);
    }
    ring.store(RingWord::RspProd, 0);
    ring.store(RingWord::ReqProd, 1 << 20);
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
    ring.store(RingWord::ReqProd, 1);
    rig.start();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
}

/// By `inflight.rs`: the offset of the words of the only queue in its file.
const PUBLISHED_AT: u64 = (20 << 10) + 4;
const ENTRIES_AT: u64 = (20 << 10) + 64;
const REQ_INDEX_AT: u64 = 4;
const RSP_INDEX_AT: u64 = 8;
const TAKEN: u32 = 1;
const ANSWERING: u32 = 2;

/// Killed with one published answer whose entry is not yet free, and two requests in flight. One more answer on the
/// ring would leave these two with room for one.
#[test]
fn a_guest_that_answers_itself_after_a_kill_is_refused_at_every_restart() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(3).unwrap();
    for page in 0..3 {
        front.queues[0].read(0, &buffer, page * 4096, 4096).unwrap();
    }
    assert_eq!(front.queues[0].drain(PATIENCE).unwrap().len(), 3);
    let end = rig.stop().unwrap();
    assert_eq!(end, Outcome::Stopped);

    let path = rig.run_dir().join("inflight");
    let entry_bytes = (std::fs::metadata(&path).unwrap().len() - ENTRIES_AT) / 32;
    let table = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let word = |at| {
        let mut bytes = [0; 4];
        table.read_exact_at(&mut bytes, at).unwrap();
        u32::from_le_bytes(bytes)
    };
    let set = |at, value: u32| table.write_all_at(&value.to_le_bytes(), at).unwrap();
    assert_eq!(word(PUBLISHED_AT), 3);
    set(PUBLISHED_AT, 1);
    // The number of used entries depends on how many requests a sweep found: one is the model of all.
    let mut used = vec![0; entry_bytes as usize];
    table.read_exact_at(&mut used, ENTRIES_AT).unwrap();
    assert!(used[16..16 + 64].iter().any(|byte| *byte != 0), "the first entry was not used");
    for (entry, state) in [ANSWERING, TAKEN, TAKEN].into_iter().enumerate() {
        let at = ENTRIES_AT + entry as u64 * entry_bytes;
        table.write_all_at(&used, at).unwrap();
        set(at + REQ_INDEX_AT, entry as u32);
        set(at + RSP_INDEX_AT, entry as u32);
        set(at, state);
    }
    let ring = front.queues[0].ring();
    for _ in 0..2 {
        for lie in [0, 2, 3, 4] {
            ring.store(RingWord::RspProd, lie);
            rig.start();
            let end = Instant::now() + PATIENCE;
            while rig.is_running() {
                assert!(Instant::now() < end, "{lie} was taken over");
                std::thread::sleep(Duration::from_millis(1));
            }
            let error = rig.join().unwrap_err();
            assert!(matches!(error, ServeError::TakeOver(_)), "{lie}: {error}");
            assert_eq!(front.backend_state().unwrap(), 4);
        }
    }
    ring.store(RingWord::RspProd, 1);
    rig.start();
    let end = Instant::now() + PATIENCE;
    while ring.load(RingWord::RspProd) != 3 {
        assert!(Instant::now() < end, "two requests are left to be answered");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.stop().unwrap();
}
