//! The costs of processes, by procfs. Unreadable values count as 0: a process may end meanwhile.

use std::fs;

/// The worker of a keeper.
pub(super) fn worker_of(keeper: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

pub(super) fn threads(pid: u32) -> u64 {
    entries(&format!("/proc/{pid}/task"))
}

pub(super) fn descriptors(pid: u32) -> u64 {
    entries(&format!("/proc/{pid}/fd"))
}

fn entries(folder: &str) -> u64 {
    fs::read_dir(folder).map_or(0, |entries| entries.count() as u64)
}

/// How often the threads of a process have gone to sleep: as often as they were woken.
pub(super) fn sleeps(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let sleeps = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    tasks.filter_map(sleeps).sum()
}

/// The processor time of all threads of a process, also of those that have ended, in milliseconds.
pub(super) fn cpu_ms(pid: u32) -> f64 {
    let ticks = ferrite_serve::counters::snapshot::process(pid).map_or(0, |it| it.cpu_ticks);
    ticks as f64 * 1000.0 / rustix::param::clock_ticks_per_second() as f64
}
