//! Metadata of answered writes reach the medium without a flush (ARCHITECTURE.md, "A write into new space costs what
//! one into old space does").

use std::path::Path;
use std::time::Duration;

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images};

/// Bytes of an image's block; a write into a new one leaves metadata to save.
const BLOCK: usize = 2 << 20;
const BYTES: u64 = 4 * BLOCK as u64;

/// Serves this image to a guest with two queues. It has grown for its first block, which takes a sync, so that later
/// syncs are those of saves.
fn connected(image: &Path, faults: &Faults) -> (Rig, Frontend, Buffer) {
    let (image, engine) = (Some(image.to_owned()), faults.factory());
    let rig = Rig::new(Plan { image, engine, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(1).unwrap();
    write(&mut front.queues[0], &buffer, 0, 0xA0);
    front.queues[0].flush().unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    (rig, front, buffer)
}

fn write(queue: &mut FrontQueue, buffer: &Buffer, sector: u64, byte: u8) {
    buffer.fill(0, 4096, byte);
    queue.write(sector, buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
}

/// Stops the backend and cuts the power, which loses the journal.
fn after_a_crash(rig: &mut Rig, image: &Path) -> Vec<u8> {
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    std::fs::remove_dir_all(images::state_dir(image)).unwrap();
    images::contents(image)
}

/// Saving goes on although no request waits for it.
#[test]
fn what_is_being_saved_as_the_guest_leaves_is_saved() {
    let dir = dir_in_memory();
    let image = images::make(dir.path(), "vhd", BYTES);
    let faults = Faults::none();
    let (mut rig, mut front, buffer) = connected(&image, &faults);
    faults.forget();
    // Slow storage: the guest is gone before the next step.
    faults.once(Kind::Sync, Fault::Late(Duration::from_millis(300)));
    write(&mut front.queues[0], &buffer, BLOCK as u64 / 512, 0xA1);
    faults.wait_for(Kind::Sync, 1);
    front.close(PATIENCE).unwrap();
    assert!(after_a_crash(&mut rig, &image)[BLOCK..][..4096] == [0xA1; 4096]);
}

#[test]
fn what_was_written_just_before_the_guest_leaves_is_saved() {
    for format in images::FORMATS {
        let dir = dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        let (mut rig, mut front, buffer) = connected(&image, &Faults::none());
        write(&mut front.queues[0], &buffer, BLOCK as u64 / 512, 0xA1);
        front.close(PATIENCE).unwrap();
        assert!(after_a_crash(&mut rig, &image)[BLOCK..][..4096] == [0xA1; 4096], "{format}");
    }
}

#[test]
fn what_is_written_during_a_save_is_saved_by_another() {
    let dir = dir_in_memory();
    let image = images::make(dir.path(), "vhd", BYTES);
    let faults = Faults::none();
    let (mut rig, mut front, buffer) = connected(&image, &faults);
    faults.forget();
    faults.once(Kind::Sync, Fault::Held(None));
    let held = faults.hold();
    write(&mut front.queues[0], &buffer, BLOCK as u64 / 512, 0xA1);
    faults.wait_for(Kind::Sync, 1);
    // Another block of the image.
    write(&mut front.queues[1], &buffer, 2 * BLOCK as u64 / 512, 0xA2);
    drop(held);
    // The other sync of the first save, then that of the second, which is complete.
    faults.wait_for(Kind::Sync, 3);
    let bytes = after_a_crash(&mut rig, &image);
    let written = |block: usize, byte| bytes[block * BLOCK..][..4096] == [byte; 4096];
    assert!(written(1, 0xA1) && written(2, 0xA2));
}
