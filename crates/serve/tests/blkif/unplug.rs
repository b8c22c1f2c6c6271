//! The state of a disk when a toolstack learns that it is unplugged.

use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_loopback::front::FrontOptions;
use ferrite_serve::blkif::lifecycle::{EngineFactory, Outcome, ServeError};
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig, engines};
use ferrite_testkit::{PATIENCE, images};

const BYTES: u64 = 8 << 20;

fn plan(image: PathBuf) -> Plan {
    Plan { bytes: BYTES, pool_bytes: 4 << 20, image: Some(image), ..Plan::default() }
}

#[test]
fn an_image_is_whole_and_free_as_soon_as_its_disk_is_said_to_be_closed() {
    for format in images::FORMATS {
        let dir = dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        for round in 0..10u8 {
            let mut rig = Rig::new(plan(image.clone()));
            let disk = rig.disk.clone();
            let mut front = rig.connect(&FrontOptions::default());
            let buffer = front.space().buffer(1).unwrap();
            buffer.fill(0, 4096, round + 1);
            front.queues[0].write(u64::from(round) * 1000, &buffer, 0, 4096).unwrap();
            assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
            rig.machine.unplug(&disk).unwrap();
            front.close(PATIENCE).unwrap();
            rig.machine.wait_for_backend(&disk, &[6], PATIENCE).unwrap();
            // At once, and without a journal: answered writes are in the image.
            let opened = Disk::open(image.to_str().unwrap(), &OpenOptions::default());
            drop(opened.unwrap_or_else(|e| panic!("{format}, round {round}: {e}")));
            assert_eq!(images::state_dir(&image).read_dir().unwrap().count(), 0);
            assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        }
        let bytes = images::contents(&image);
        for round in 0..10 {
            assert_eq!(bytes[round * 512_000..][..4096], vec![round as u8 + 1; 4096]);
        }
    }
}

/// Another host may open the file as soon as it learns of that.
#[test]
fn what_a_raw_disk_was_written_is_on_the_medium_when_its_disk_is_said_to_be_closed() {
    let faults = Faults::none();
    let plan = Plan { bytes: BYTES, engine: faults.factory(), ..Plan::default() };
    let mut rig = Rig::new(plan);
    let disk = rig.disk.clone();
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    faults.forget();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(faults.seen(&[Kind::Sync]), 0);
    rig.machine.unplug(&disk).unwrap();
    front.close(PATIENCE).unwrap();
    rig.machine.wait_for_backend(&disk, &[6], PATIENCE).unwrap();
    assert!(faults.seen(&[Kind::Sync]) > 0);
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

/// Otherwise the next host would read old contents.
#[test]
fn a_disk_whose_image_cannot_be_closed_is_not_said_to_be_closed_until_it_is() {
    for destroyed in [false, true] {
        let dir = dir_in_memory();
        let image = images::make(dir.path(), "vhd", BYTES);
        let faults = Faults::none();
        let mut rig = Rig::new(Plan { engine: faults.factory(), ..plan(image.clone()) });
        let disk = rig.disk.clone();
        let mut front = rig.connect(&FrontOptions::default());
        let buffer = front.space().buffer(1).unwrap();
        buffer.fill(0, 4096, 7);
        front.queues[0].write(8, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        faults.set([Ops::from(Kind::Write).meet(Fault::Errno(EIO))]);
        match destroyed {
            true => rig.machine.destroy(rig.domid).unwrap(),
            false => {
                rig.machine.unplug(&disk).unwrap();
                front.set_state(6).unwrap();
            }
        }
        let error = rig.join().unwrap_err();
        assert!(matches!(error, ServeError::Close(_)), "{error}");
        assert!(rig.take_error().unwrap().contains("cannot close the image"));
        let before = rig.machine.backend_state(&disk).unwrap();
        assert_eq!(before, if destroyed { 4 } else { 5 });

        // Another try.
        faults.clear();
        rig.start();
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        assert_eq!(rig.machine.backend_state(&disk).unwrap(), 6);
        assert_eq!(rig.take_error(), None);
        assert_eq!(images::state_dir(&image).read_dir().unwrap().count(), 0);
        assert!(images::contents(&image)[4096..8192] == [7; 4096]);
    }
}

#[test]
fn storage_that_is_stuck_does_not_keep_a_disk_from_being_unplugged() {
    let dir = dir_in_memory();
    let image = images::make(dir.path(), "vhd", BYTES);
    let (release, released) = channel::<()>();
    let released = std::sync::Mutex::new(released);
    let usual = engines();
    // The image is closed with few operations in flight, queues have a ring of them and more.
    let engine: EngineFactory = Arc::new(move |arena, entries| {
        if entries == 32 {
            let _ = released.lock().unwrap().recv();
        }
        usual(arena, entries)
    });
    let mut rig = Rig::new(Plan { engine, ..plan(image) });
    let disk = rig.disk.clone();
    let mut front = rig.connect(&FrontOptions::default());
    rig.machine.unplug(&disk).unwrap();
    front.close(PATIENCE).unwrap();
    rig.machine.wait_for_backend(&disk, &[6], PATIENCE).unwrap();
    assert!(rig.is_running(), "it is not closed yet");
    release.send(()).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

/// An exchange of the disk at its end finds the image unlocked, or takes place before the image is
/// closed.
#[test]
fn a_disk_that_takes_the_place_of_a_closed_one_stays_locked() {
    for round in 0..10 {
        let closes = Arc::new(Barrier::new(2));
        let begins = closes.clone();
        let usual = engines();
        let engine: EngineFactory = Arc::new(move |arena, entries| {
            if entries == 32 {
                begins.wait();
            }
            usual(arena, entries)
        });
        let mut rig = Rig::new(Plan { bytes: BYTES, engine, ..Plan::default() });
        let next = rig.dir.path().join("next.img");
        std::fs::File::create(&next).unwrap().set_len(BYTES).unwrap();
        let open = || Disk::open(&next, &OpenOptions::default());
        let other = open().unwrap();
        let (disk, device, end) = (rig.disk.clone(), rig.device(), Instant::now() + PATIENCE);
        let mut front = rig.connect(&FrontOptions::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                closes.wait();
                // As soon as no queue uses the disk.
                let (_, away) = loop {
                    match device.park(Duration::ZERO) {
                        Ok(parked) => break parked,
                        Err(e) => assert!(Instant::now() < end, "{e}"),
                    }
                };
                away.go_on_with(other).map_err(|refused| refused.unfit).unwrap();
            });
            rig.machine.unplug(&disk).unwrap();
            front.close(PATIENCE).unwrap();
        });
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        assert!(open().is_err(), "round {round}: it was not closed, and is unlocked");
    }
}
