//! Disks that are parked and exchanged, and machines that lose their power, while or after a guest by vhost-user has
//! written: the stories of a Xen ring (`parking.rs`, `blkif/saving.rs`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrite_serve::vhost::Options;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::vhost::{Ask, FrontEnd, Guest, Load, Served, options};
use ferrite_testkit::{PATIENCE, images, processes, rounds};

const QUEUES: u16 = 2;
const ENTRIES: u16 = 32;
const BYTES: u64 = 16 << 20;

/// Connects a guest that begins its work.
fn connect(served: &Served, seed: u64) -> (FrontEnd, Load) {
    let front = FrontEnd::connect(&served.socket);
    let guest = Guest::new(Load::memory_bytes(QUEUES, ENTRIES));
    let features = front.agree(0);
    front.give(&guest);
    let load = Load::new(&guest, QUEUES, ENTRIES, features, seed);
    for driver in &load.drivers {
        assert!(front.start(driver, 0));
    }
    (front, load)
}

/// Has a guest work while `beside` does something. Then compares the guest's reads, and the image that is served at the
/// end, with the model.
fn under_load(format: &str, seed: u64, beside: impl FnOnce(&Served) -> PathBuf) {
    let mut served = Served::new(format, BYTES, options());
    let (front, mut load) = connect(&served, seed);
    let stop = AtomicBool::new(false);
    let image = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                load.turn();
            }
            load.finish();
        });
        let image = beside(&served);
        stop.store(true, Ordering::Relaxed);
        guest.join().unwrap();
        image
    });
    drop(front);
    served.stop().unwrap();
    let (disk, _away) = served.device.park(PATIENCE).unwrap();
    images::session(disk).close().unwrap();
    images::check(&image);
    load.compare(&images::contents(&image));
}

#[test]
fn a_disk_that_is_parked_at_any_moment_is_a_pause() {
    for (seed, format) in ["vhd", "chain.qcow2"].into_iter().enumerate() {
        under_load(format, seed as u64, |served| {
            for round in 0..rounds(100) {
                let (disk, away) = served.device.park(PATIENCE).unwrap();
                // A disk that is put back unchanged, one that was closed, and one that was left as by a death.
                let disk = match round % 3 {
                    0 => disk,
                    1 => {
                        images::session(disk).close().unwrap();
                        processes::open(&served.image)
                    }
                    _ => {
                        drop(disk);
                        processes::open(&served.image)
                    }
                };
                away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
                std::thread::sleep(Duration::from_micros(500 * u64::from(round % 5)));
            }
            served.image.clone()
        });
    }
}

#[test]
fn after_an_exchange_for_another_image_that_one_has_what_was_answered() {
    for (seed, format) in ["vhd", "qcow2"].into_iter().enumerate() {
        under_load(format, 10 + seed as u64, |served| {
            let mut image = served.image.clone();
            for round in 0..rounds(10) {
                std::thread::sleep(Duration::from_millis(5));
                let next = image.with_file_name(format!("next-{round}.{format}"));
                let (disk, away) = served.device.park(PATIENCE).unwrap();
                images::session(disk).close().unwrap();
                images::make_next(&image, &next);
                away.go_on_with(processes::open(&next)).map_err(|refused| refused.unfit).unwrap();
                image = next;
            }
            image
        });
    }
}

/// Bytes of an image's block; a write into a new one leaves metadata to save.
const BLOCK: u64 = 2 << 20;

fn faulty(faults: &Faults) -> Options {
    Options { engine: faults.factory(), ..options() }
}

/// Stops the server and cuts the power, which loses the journal.
fn after_a_crash(served: &mut Served) -> Vec<u8> {
    served.stop().unwrap();
    drop(served.device.park(PATIENCE).unwrap());
    std::fs::remove_dir_all(images::state_dir(&served.image)).unwrap();
    images::contents(&served.image)
}

#[test]
fn what_was_answered_just_before_the_guest_leaves_is_there_after_a_power_cut() {
    for format in images::FORMATS {
        let faults = Faults::none();
        let mut served = Served::new(format, 4 * BLOCK, faulty(&faults));
        let (front, mut load) = connect(&served, 0);
        let (status, _) = load.drivers[0].call(&Ask::write(BLOCK / 512, &[0xA1; 4096]));
        assert_eq!(status, 0);
        // Slow storage: the guest is gone before what it has written is saved.
        faults.once(Kind::Sync, Fault::Late(Duration::from_millis(100)));
        drop(front);
        let bytes = after_a_crash(&mut served);
        assert!(bytes[BLOCK as usize..][..4096] == [0xA1; 4096], "{format}");
    }
}
