//! A backend that waits for storage while the toolstack removes its disk, and attaches another one under the same name.
//! The new disk is not touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::Disk;
use ferrite_serve::blkif::lifecycle::{EngineFactory, Outcome};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::rig::{Plan, Rig, engines};

const BYTES: u64 = 1 << 20;

/// Time for the backend to see a write. Too little makes a test weaker, but not wrong.
/// else.
const A_WHILE: Duration = Duration::from_millis(300);

fn wait_for(flag: &AtomicBool) {
    let end = Instant::now() + PATIENCE;
    while !flag.load(Ordering::SeqCst) {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A connected frontend whose write hangs in storage during `meanwhile`, and the backend's end.
fn held_up(meanwhile: impl FnOnce(&mut Rig, &mut Frontend)) -> (Rig, Result<Outcome, String>) {
    let faults = Faults::none();
    let plan = Plan { bytes: BYTES, engine: faults.factory(), ..Plan::default() };
    let mut rig = Rig::new(plan);
    let mut front = rig.connect(&FrontOptions { check_release: false, ..FrontOptions::default() });
    let held = faults.hold();
    faults.forget();
    faults.once(Kind::Write, Fault::Held(None));
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    faults.wait_for(Kind::Write, 1);
    meanwhile(&mut rig, &mut front);
    drop(held);
    let outcome = rig.join().map_err(|e| e.to_string());
    (rig, outcome)
}

/// The toolstack does not wait any longer: both directories are removed, and made again for another image.
fn replace(rig: &mut Rig) {
    let disk = rig.disk.clone();
    rig.machine.remove_disk(&disk).unwrap();
    let mut another = Disk::xvd(0).read_only();
    another.params = "vhd:/another/image.vhd".into();
    rig.machine.attach_disk(rig.domid, another).unwrap();
}

#[track_caller]
fn is_untouched(rig: &mut Rig) {
    let disk = rig.disk.clone();
    assert_eq!(rig.machine.backend_state(&disk).unwrap(), 1, "that is its own backend's to change");
    let mut keys = rig.machine.store().unwrap().list(&disk.backend).unwrap();
    keys.retain(|key| key.starts_with("feature-") || key == "sectors");
    assert_eq!(keys, Vec::<String>::new());
}

#[test]
fn a_backend_that_was_held_up_while_its_guest_closed_leaves_the_next_disk_of_that_name_alone() {
    let (mut rig, outcome) = held_up(|rig, front| {
        front.set_state(6).unwrap();
        std::thread::sleep(A_WHILE);
        replace(rig);
    });
    assert_eq!(outcome, Ok(Outcome::Unplugged));
    is_untouched(&mut rig);
}

#[test]
fn a_backend_that_was_held_up_while_its_disk_was_unplugged_does_not_close_the_next_one() {
    let (mut rig, outcome) = held_up(|rig, front| {
        rig.machine.unplug(&rig.disk.clone()).unwrap();
        front.set_state(6).unwrap();
        std::thread::sleep(A_WHILE);
        replace(rig);
    });
    assert_eq!(outcome, Ok(Outcome::Unplugged));
    is_untouched(&mut rig);
}

/// Its own state was not written yet, and so proves nothing.
#[test]
fn a_backend_that_was_held_up_before_it_wrote_anything_does_not_close_the_next_disk_of_that_name() {
    let (closes, goes_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (usual, closing, release) = (engines(), closes.clone(), goes_on.clone());
    // The image is closed with few operations in flight, queues have a ring of them and more.
    let engine: EngineFactory = Arc::new(move |arena, entries| {
        if entries == 32 {
            closing.store(true, Ordering::SeqCst);
            wait_for(&release);
        }
        usual(arena, entries)
    });
    for replaced in [false, true] {
        let engine = engine.clone();
        let mut rig = Rig::without_backend(Plan { bytes: BYTES, engine, ..Plan::default() });
        let disk = rig.disk.clone();
        goes_on.store(!replaced, Ordering::SeqCst);
        closes.store(false, Ordering::SeqCst);
        let online = format!("{}/online", disk.backend);
        rig.machine.store().unwrap().write(&online, b"0").unwrap();
        rig.start();
        wait_for(&closes);
        if replaced {
            replace(&mut rig);
            goes_on.store(true, Ordering::SeqCst);
        }
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        match replaced {
            true => is_untouched(&mut rig),
            false => assert_eq!(rig.machine.backend_state(&disk).unwrap(), 6),
        }
    }
}

#[test]
fn a_disk_whose_guest_is_dead_is_said_to_be_closed() {
    let mut rig = Rig::new(Plan { bytes: BYTES, ..Plan::default() });
    let front = rig.connect(&FrontOptions::default());
    drop(front);
    rig.machine.destroy(rig.domid).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert_eq!(rig.machine.backend_state(&rig.disk.clone()).unwrap(), 6);
}
