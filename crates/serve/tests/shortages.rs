//! The host has no descriptor, no memory or no space left when a guest connects (threats.md T6): the backend reports
//! that and ends, the guest's disk stays unchanged, and a successor with enough resources connects it.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_serve::counters::FOLDER;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::places::{Small, dir_in_memory};
use ferrite_testkit::rig::{Plan, Rig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Serialises the tests: descriptors are counted for the whole process.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn plan() -> Plan {
    let guest = GuestOptions { frames: 512, grants: 1024, ports: 4 };
    Plan { bytes: 1 << 20, pool_bytes: 4 << 20, guest, ..Plan::default() }
}

fn two_queues() -> FrontOptions {
    FrontOptions { queues: 2, ..FrontOptions::default() }
}

/// Goes as far as a frontend can alone.
fn ask(front: &mut Frontend) {
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer(&two_queues()).unwrap();
}

/// Whether the frontend gets connected; otherwise the backend has ended.
fn is_connected(rig: &Rig, front: &mut Frontend) -> bool {
    let end = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < end, "neither connected nor ended");
        // A queue's engine is built on the queue's own thread, after the backend's 4: only an answer proves success.
        if !rig.is_running() {
            return false;
        }
        if front.backend_state().unwrap() == 4 {
            return front.queues.iter_mut().all(|queue| {
                queue.flush().unwrap();
                queue.push().unwrap();
                loop {
                    assert!(Instant::now() < end, "neither answered nor ended");
                    if queue.take().unwrap().is_some() {
                        return true;
                    }
                    if !rig.is_running() {
                        return false;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The backend has ended for a reason of the host, and the guest may continue to wait.
fn has_given_up(rig: &mut Rig, front: &mut Frontend) -> String {
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::Host { .. }), "{error}");
    let text = error.to_string();
    assert!(!text.contains("its thread ended"), "{text}");
    let state = front.backend_state().unwrap();
    assert!([1, 2, 4].contains(&state), "{state}: the guest gives its disk up, after: {text}");
    text
}

/// A backend with enough resources.
fn works(front: &mut Frontend) {
    front.finish(PATIENCE).unwrap();
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        queue.drain(PATIENCE).unwrap();
        queue.write(0, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    }
    front.close(PATIENCE).unwrap();
    assert_eq!(front.space().memory().bound_ports(), 0);
}

fn open_descriptors() -> BTreeSet<u64> {
    let list = std::fs::read_dir("/proc/self/fd").unwrap();
    let number = |name: std::ffi::OsString| name.to_str().unwrap().parse().unwrap();
    let mut numbers: BTreeSet<u64> = list.map(|fd| number(fd.unwrap().file_name())).collect();
    // Without that of the list itself.
    numbers.retain(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok());
    numbers
}

/// Leaves this process so many descriptors, until it is dropped.
struct Few(Rlimit);

impl Few {
    fn left(more: usize) -> Few {
        let usual = getrlimit(Resource::Nofile);
        let open = open_descriptors();
        let limit = (0..).filter(|fd| !open.contains(fd)).nth(more);
        setrlimit(Resource::Nofile, Rlimit { current: limit, ..usual }).unwrap();
        Few(usual)
    }
}

impl Drop for Few {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).unwrap();
    }
}

#[test]
fn a_backend_without_descriptors_ends_and_leaves_the_disk_and_none_open() {
    let _alone = alone();
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    ask(&mut front);
    works(&mut front);
    let base = open_descriptors().len();
    let mut reasons = BTreeSet::new();
    for more in 0.. {
        front.set_state(1).unwrap();
        front.wait_for_backend(&[2], PATIENCE).unwrap();
        let few = Few::left(more);
        ask(&mut front);
        let connected = is_connected(&rig, &mut front);
        drop(few);
        if connected {
            println!("{more} descriptors are enough");
            works(&mut front);
            break;
        }
        reasons.insert(has_given_up(&mut rig, &mut front));
        rig.start();
        works(&mut front);
        assert_eq!(open_descriptors().len(), base, "after a start with {more} descriptors");
    }
    println!("{reasons:#?}");
    assert!(reasons.len() > 2, "{reasons:?}");
}

#[test]
fn a_pool_that_there_is_no_memory_for_is_an_error_that_leaves_the_guest_waiting() {
    let _alone = alone();
    let mut rig = Rig::new(Plan { pool_bytes: 1 << 60, ..plan() });
    let mut front = rig.frontend();
    ask(&mut front);
    assert!(!is_connected(&rig, &mut front));
    let reason = has_given_up(&mut rig, &mut front);
    assert!(reason.contains("memory"), "{reason}");
    assert_eq!(front.space().memory().bound_ports(), 0);
}

/// Runs a backend whose run directory has this much space. Returns the reason for which its guest
/// waits, or `Ok` if it is served. `None` means that this host cannot run the test.
fn with_run_directory(limits: &str) -> Option<Result<(), String>> {
    let images = dir_in_memory();
    let image = images.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let mut rig = Rig::without_backend(Plan { image: Some(image), ..plan() });
    let (base, run_dir) = (rig.dir.path().to_owned(), rig.run_dir().to_owned());
    let small = Small::mount(&base, limits)?;
    rig.start();
    let mut front = rig.frontend();
    ask(&mut front);
    let end = Instant::now() + PATIENCE;
    let mut reason = None;
    while reason.is_none() && front.backend_state().unwrap() != 4 {
        assert!(Instant::now() < end, "neither connected nor told why not");
        reason = rig.take_error();
    }
    if reason.is_some() {
        assert!(rig.is_running() && front.backend_state().unwrap() == 2);
        small.change("size=8m,nr_inodes=100");
    }
    front.finish(PATIENCE).unwrap();
    works(&mut front);
    assert_eq!(rig.take_error(), None, "what was mended is an error no longer");
    front.close(PATIENCE).unwrap();
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    // Except the folder of counters, which belongs to all disks.
    let _ = std::fs::remove_dir(base.join(FOLDER));
    assert_eq!(std::fs::read_dir(&base).unwrap().count(), 0);
    Some(reason.map_or(Ok(()), |reason| Err(reason.replace(run_dir.to_str().unwrap(), ""))))
}

#[test]
fn a_run_directory_without_space_delays_a_connection_and_ends_nothing() {
    let _alone = alone();
    let mut reasons = BTreeSet::new();
    for limits in ["size", "nr_inodes"] {
        let (unit, first, step) = if limits == "size" { ("k", 4, 24) } else { ("", 1, 1) };
        for n in (first..).step_by(step) {
            let Some(result) = with_run_directory(&format!("{limits}={n}{unit}")) else { return };
            let Err(reason) = result else { break };
            reasons.insert(reason);
        }
    }
    println!("{reasons:#?}");
    assert!(reasons.len() > 2, "{reasons:?}");
    assert!(reasons.iter().all(|reason| reason.contains("space")), "{reasons:?}");
}
