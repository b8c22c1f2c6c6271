//! The backend at rest: its memory, and its wake-ups.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};
use serde::{Deserialize, Serialize};

/// The loopback's name for the memory of guests.
const GUESTS: &str = "/memfd:ferrite-guest";

/// A time without requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Idle {
    pub(crate) seconds: f64,
    /// Context switches of all threads of the process but the one that measures: a sleeping thread has none.
    pub(crate) context_switches: u64,
}

/// Resident memory of this process, with everything connected and idle. It waits until the figure no longer changes, as
/// new threads may still be starting.
pub(crate) fn rss_kib() -> Option<u64> {
    let now = || status_value("/proc/self/status", "VmRSS:");
    let mut last = now()?;
    let mut since = 0;
    for _ in 0..100 {
        SystemClock.sleep(Duration::from_millis(10));
        let now = now()?;
        since = if now == last { since + 1 } else { 0 };
        if since == 10 {
            break;
        }
        last = now;
    }
    Some(last)
}

/// Memory of a process with shared pages in parts, in KiB; without guests' memory, which a backend on Xen has not
/// mapped. Unreadable values count as 0.
pub(crate) fn pss_kib(pid: u32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut all, mut is_guests) = (0, false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("Pss:"), Some(kib)) if !is_guests => all += kib.parse().unwrap_or(0),
            // A mapping's first line begins with its addresses.
            (Some(first), _) if !first.ends_with(':') => is_guests = line.contains(GUESTS),
            _ => {}
        }
    }
    all
}

/// The program in it: file pages, which the kernel has once for all processes and can read again, and the pages of the
/// program's tables of addresses, which each start of it fills in.
pub(crate) fn file_kib() -> Option<u64> {
    let files = status_value("/proc/self/status", "RssFile:")?;
    let program = std::env::current_exe().ok()?;
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let (mut tables, mut is_program) = (0, false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("Anonymous:"), Some(kib)) if is_program => tables += kib.parse().unwrap_or(0),
            (Some(first), _) if !first.ends_with(':') => {
                is_program = line.ends_with(program.to_str()?);
            }
            _ => {}
        }
    }
    Some(files + tables)
}

/// Context switches of each thread of this process but the calling one, voluntary or not.
pub(crate) struct Switches(BTreeMap<String, u64>);

impl Switches {
    pub(crate) fn now() -> Switches {
        let me = rustix::thread::gettid().as_raw_nonzero().to_string();
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let names = tasks.map(|t| t.file_name().to_string_lossy().into_owned());
        let count = |tid: String| Some((tid.clone(), switches(&tid)?));
        Switches(names.filter(|tid| *tid != me).filter_map(count).collect())
    }

    /// A thread that was started since counts with all of its switches, one that has ended as one.
    pub(crate) fn since(&self, before: &Switches) -> u64 {
        let grown = |(tid, now): (&String, &u64)| now - before.0.get(tid).unwrap_or(&0).min(now);
        let gone = before.0.keys().filter(|tid| !self.0.contains_key(*tid)).count() as u64;
        self.0.iter().map(grown).sum::<u64>() + gone
    }
}

fn switches(tid: &str) -> Option<u64> {
    let status = format!("/proc/self/task/{tid}/status");
    let wanted = status_value(&status, "voluntary_ctxt_switches:")?;
    Some(wanted + status_value(&status, "nonvoluntary_ctxt_switches:")?)
}

/// A number of a status file; its unit is dropped.
fn status_value(path: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(path).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_woken_is_seen_and_one_that_sleeps_is_not() {
        let of = |counts: &[(&str, u64)]| {
            Switches(counts.iter().map(|(tid, n)| ((*tid).to_owned(), *n)).collect())
        };
        let before = of(&[("7", 10), ("8", 20), ("9", 5)]);
        assert_eq!(before.since(&before), 0);
        assert_eq!(of(&[("7", 10), ("8", 23), ("10", 2)]).since(&before), 3 + 2 + 1);
    }

    #[test]
    fn this_process_can_be_looked_at() {
        assert!(rss_kib().is_some_and(|kib| kib > 100));
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        assert!(!Switches::now().0.is_empty());
        drop(go);
        assert!(thread.join().unwrap().is_err());
    }
}
