//! A disk whose guest does nothing costs nothing: no thread of its backend runs.

mod rig;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ferrite_loopback::front::FrontOptions;

use rig::{PATIENCE, Plan, Rig};

/// The threads of this process.
fn threads() -> BTreeSet<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|t| t.unwrap().file_name().into_string().unwrap()).collect()
}

/// How often these threads were put to run, ever.
fn wake_ups(threads: &BTreeSet<String>) -> u64 {
    let of = |thread: &String| {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status"));
        let status = status.unwrap_or_default();
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        counts.map(|(_, count)| count.trim().parse::<u64>().unwrap()).sum::<u64>()
    };
    threads.iter().map(of).sum()
}

#[test]
fn an_idle_backend_is_not_woken_until_its_medium_grows() {
    let before = threads();
    let rig = Rig::new(Plan::default());
    let mut front = rig.connect(&FrontOptions::default());
    let backend: BTreeSet<String> = threads().difference(&before).cloned().collect();
    // It asks for the size once more before it has itself told.
    let end = Instant::now() + PATIENCE;
    let mut last = wake_ups(&backend);
    loop {
        std::thread::sleep(Duration::from_millis(1500));
        let now = wake_ups(&backend);
        if now == last {
            break;
        }
        assert!(Instant::now() < end, "woken {} times in 1.5 s", now - last);
        last = now;
    }
    let file = std::fs::File::options().write(true).open(&rig.image).unwrap();
    file.set_len(128 << 20).unwrap();
    let mut store = rig.machine.store().unwrap();
    let path = format!("{}/sectors", rig.disk.backend);
    while store.read_string(&path).unwrap().as_deref() != Some("262144") {
        assert!(Instant::now() < end, "the new size is not published");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(wake_ups(&backend) > last);
    front.close(PATIENCE).unwrap();
}
