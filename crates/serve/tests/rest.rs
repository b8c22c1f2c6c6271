//! A disk with an idle guest costs nothing: no thread of its backend runs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_loopback::front::FrontOptions;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::proc::threads;
use ferrite_testkit::rig::{Plan, Rig};

/// How often these threads have been scheduled.
fn wake_ups(threads: &BTreeSet<String>) -> u64 {
    let of = |thread: &String| {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status"));
        let status = status.unwrap_or_default();
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        counts.map(|(_, count)| count.trim().parse::<u64>().unwrap()).sum::<u64>()
    };
    threads.iter().map(of).sum()
}

/// Waits until these threads are not woken any more: the size is read once more before the backend has itself notified.
/// Returns how often they have been scheduled.
fn rest(threads: &BTreeSet<String>) -> u64 {
    let end = Instant::now() + PATIENCE;
    let mut last = wake_ups(threads);
    loop {
        std::thread::sleep(Duration::from_millis(1500));
        let now = wake_ups(threads);
        if now == last {
            return last;
        }
        assert!(Instant::now() < end, "woken {} times in 1.5 s", now - last);
        last = now;
    }
}

fn wait_for_size(rig: &Rig, bytes: u64) {
    let (mut store, sectors) = (rig.machine.store().unwrap(), (bytes / 512).to_string());
    let path = format!("{}/sectors", rig.disk.backend);
    let end = Instant::now() + PATIENCE;
    while store.read_string(&path).unwrap() != Some(sectors.clone()) {
        assert!(Instant::now() < end, "the new size is not published");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_idle_backend_is_not_woken_until_its_medium_grows_or_is_exchanged() {
    let before = threads();
    let rig = Rig::new(Plan::default());
    let mut front = rig.connect(&FrontOptions::default());
    let backend: BTreeSet<String> = threads().difference(&before).cloned().collect();
    let last = rest(&backend);
    let file = std::fs::File::options().write(true).open(&rig.image).unwrap();
    file.set_len(128 << 20).unwrap();
    wait_for_size(&rig, 128 << 20);
    assert!(wake_ups(&backend) > last);

    rest(&backend);
    let larger = rig.image.with_extension("larger");
    std::fs::File::create(&larger).unwrap().set_len(256 << 20).unwrap();
    let (disk, away) = rig.device().park(PATIENCE).unwrap();
    drop(disk);
    let disk = Disk::open(&larger, &OpenOptions::default()).unwrap();
    away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    wait_for_size(&rig, 256 << 20);
    front.close(PATIENCE).unwrap();
}
