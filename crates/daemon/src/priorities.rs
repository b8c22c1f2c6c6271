//! The I/O priority that a storage manager or an administrator gives a keeper holds for its worker, too.
//!
//! They know the keeper's process number only: it is that of a disk for tapdisk's tools. The kernel reports no change of
//! a priority, so it is looked at. The daemon does that for all disks: a keeper that did it would be woken for it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_host::process::{io_priority, set_io_priority_of_group};
use rustix::process::Pid;

use crate::control::counters_of;
use crate::{Shared, hanging};

const INTERVAL: Duration = Duration::from_secs(4);
/// The priority of a process that was given none.
const NONE: i32 = 0;

/// Starts the thread that looks, also at the counters of [`hanging`] disks.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn watch(shared: &Arc<Shared>) -> io::Result<()> {
    let shared = shared.clone();
    let body = move || {
        let (mut known, mut counters) = (BTreeMap::new(), Instant::now());
        while !shared.is_stopped(INTERVAL) {
            known = look(&shared, &known);
            if counters.elapsed() >= hanging::INTERVAL {
                counters = Instant::now();
                shared.hanging.look(&shared, |id| counters_of(&shared, id));
            }
        }
    };
    std::thread::Builder::new().name("priorities".to_owned()).spawn(body).map(drop)
}

/// Gives each keeper's new priority to its worker. Returns the priorities by keeper.
fn look(shared: &Shared, known: &BTreeMap<u32, i32>) -> BTreeMap<u32, i32> {
    let keepers: Vec<u32> =
        shared.table.read(|disks| disks.values().filter_map(|entry| entry.pid).collect());
    let mut found = BTreeMap::new();
    for keeper in keepers {
        let Some(pid) = i32::try_from(keeper).ok().and_then(Pid::from_raw) else { continue };
        let Ok(priority) = io_priority(pid) else { continue };
        // An error is not repeated before the priority changes again: only speed depends on it.
        if found.insert(keeper, priority).is_none()
            && priority != known.get(&keeper).copied().unwrap_or(NONE)
        {
            let _ = set_io_priority_of_group(pid, priority);
        }
    }
    found
}
