//! The method `upgrade`: disks get another program, some at a time.
//!
//! The guest of a disk waits while its image is closed and opened again. So the number at a time is bounded: each of them
//! starts two processes, and closing an image writes to its storage.
//!
//! The upgrade of all is noted in a file. If the daemon ends before all disks have the program, the next daemon goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_host::processors;
use serde::{Deserialize, Serialize};

use super::methods::found;
use super::protocol::{NotUpgraded, RpcError, UpgradeParams, Upgraded, code};
use crate::state::DiskId;
use crate::state_files::{StateFiles, Stated};
use crate::table::{Entry, Phase, Upgrade, detached};
use crate::{Failure, Shared, taps};

/// How long the upgrade of one disk may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most workers that are upgraded at a time.
const MOST_AT_A_TIME: usize = 16;
/// Workers that are upgraded at a time for each processor: with more, guests would wait for the start of one another's
/// processes.
const OF_A_PROCESSOR: usize = 2;
/// How often the next daemon looks which disks still have the program before.
const LOOK: Duration = Duration::from_millis(200);
/// It is done when so many looks in a row have found none. Disks are found one by one after its start.
const QUIET_LOOKS: u32 = 25;

/// An upgrade of all disks that has begun.
#[derive(Debug, Serialize, Deserialize)]
struct Begun {
    version: u32,
    binary: PathBuf,
}

impl Stated for Begun {
    const VERSION: u32 = 1;
    const WITHOUT: &'static str = "ferrite upgrade upgrades all disks";

    fn name(&self) -> String {
        ALL.to_owned()
    }
}

const ALL: &str = "all";

fn begun(shared: &Shared) -> StateFiles<Begun> {
    StateFiles::at(&shared.paths.run.join("upgrade"))
}

fn note(shared: &Shared, binary: &Path) {
    let begun = Begun { version: Begun::VERSION, binary: binary.to_owned() };
    let folder = shared.paths.run.join("upgrade");
    if let Err(e) = StateFiles::open(&folder).and_then(|files| files.write(&begun)) {
        tracing::warn!(
            "the next daemon would not go on with this upgrade: {}: {e}",
            folder.display()
        );
    }
}

/// Removes the note: no disk has to be upgraded any more.
fn forget(shared: &Shared) {
    begun(shared).remove(ALL);
    // A folder that is not empty, or is not there, stays as it is.
    let _ = std::fs::remove_dir(shared.paths.run.join("upgrade"));
}

/// The disks of one worker.
type OfWorker = Vec<DiskId>;
type Outcome = (DiskId, Result<(), Failure>);

/// Upgrades one disk, or all.
pub(super) fn upgrade(shared: &Shared, request: &UpgradeParams) -> Result<Upgraded, RpcError> {
    let binary = Path::new(&request.binary);
    if !binary.is_absolute() {
        let help = "name the program by its absolute path, such as /usr/bin/ferrite";
        return Err(RpcError::new(code::INVALID_PARAMS, "binary is not an absolute path", help));
    }
    // The program is checked before any image is closed.
    runs(binary).map_err(|e| {
        let message = format!("cannot run {}: {e}", binary.display());
        RpcError::new(code::FAILED, message, "name a program of ferrite that root may run")
    })?;
    let mut outcomes = match request.disk {
        Some(id) => upgrade_workers(shared, vec![vec![found(shared, id)?.disk]], binary),
        None => {
            let _one = one_at_a_time(shared);
            note(shared, binary);
            let mut outcomes = taps::upgrade_idle(shared, binary);
            let workers = shared.table.read(|disks| by_worker(disks, |_| true));
            outcomes.extend(upgrade_workers(shared, workers, binary));
            // A daemon that stops causes failures of its own. The next one goes on.
            if !shared.is_stopped(Duration::ZERO) {
                forget(shared);
            }
            outcomes
        }
    };
    outcomes.sort_by_key(|(id, _)| *id);
    let mut done = Upgraded { upgraded: Vec::new(), failed: Vec::new() };
    for (id, outcome) in outcomes {
        match outcome {
            Ok(()) => done.upgraded.push(id),
            Err(Failure { why, help }) => done.failed.push(NotUpgraded { disk: id, why, help }),
        }
    }
    Ok(done)
}

/// Goes on with the upgrade of the daemon before, if that ended within it.
pub(crate) fn go_on(shared: &Arc<Shared>) {
    let Ok(Some(Begun { binary, .. })) = begun(shared).read(ALL) else { return };
    if let Err(e) = runs(&binary) {
        tracing::warn!("the upgrade to {} is not gone on with: {e}", binary.display());
        forget(shared);
        return;
    }
    let theirs = shared.clone();
    let body = move || {
        if upgrade_rest(&theirs, &binary) {
            let _one = one_at_a_time(&theirs);
            forget(&theirs);
        }
    };
    if let Err(e) = std::thread::Builder::new().name("upgrade".to_owned()).spawn(body) {
        tracing::warn!("the upgrade of the daemon before is not gone on with: {e}");
    }
}

/// No disk is in two upgrades of all.
fn one_at_a_time(shared: &Shared) -> MutexGuard<'_, ()> {
    shared.upgrading.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Upgrades all disks that are served by another program. Returns whether it has come to its end.
fn upgrade_rest(shared: &Shared, binary: &Path) -> bool {
    let (mut tried, mut quiet, mut upgraded) = (BTreeSet::new(), 0, 0);
    // Idle keepers that run this program already are replaced once more. They have no guest.
    taps::upgrade_idle(shared, binary);
    while quiet < QUIET_LOOKS {
        if shared.is_stopped(LOOK) {
            return false;
        }
        let _one = one_at_a_time(shared);
        // Another upgrade of all has come to its end meanwhile, or has another program.
        if !begun(shared).read(ALL).is_ok_and(|now| now.is_some_and(|now| now.binary == binary)) {
            return false;
        }
        let is_due = |entry: &Entry| {
            let may = matches!(entry.phase, Phase::Served | Phase::Paused);
            may && entry.pid.is_some_and(|pid| !is_program(pid, binary))
        };
        let mut workers = shared.table.read(|disks| by_worker(disks, is_due));
        workers.retain(|disks| disks.iter().any(|id| tried.insert(*id)));
        quiet = if workers.is_empty() { quiet + 1 } else { 0 };
        for (id, outcome) in upgrade_workers(shared, workers, binary) {
            match outcome {
                Ok(()) => upgraded += 1,
                Err(e) => tracing::warn!("disk {id} is not upgraded: {e}"),
            }
        }
    }
    tracing::info!("went on with the upgrade of the daemon before: {upgraded} disks");
    true
}

/// Whether the process runs this file.
fn is_program(pid: u32, binary: &Path) -> bool {
    let file = |path: &Path| path.metadata().map(|meta| (meta.dev(), meta.ino()));
    match (file(Path::new(&format!("/proc/{pid}/exe"))), file(binary)) {
        (Ok(running), Ok(binary)) => running == binary,
        // The process has ended: the next one is of the daemon's program.
        (Err(_), _) => true,
        (_, Err(_)) => false,
    }
}

/// Whether the file can be executed. Whether it is ferrite shows when it runs.
fn runs(binary: &Path) -> io::Result<()> {
    let found = binary.metadata()?;
    match found.is_file() && found.permissions().mode() & 0o111 != 0 {
        true => Ok(()),
        false => Err(io::Error::other("it is not an executable file")),
    }
}

/// The disks to upgrade, those of one worker together. A disk that is served beside another is upgraded with that one.
fn by_worker(disks: &BTreeMap<DiskId, Entry>, is_due: impl Fn(&Entry) -> bool) -> Vec<OfWorker> {
    let (mut alone, mut groups) = (Vec::new(), BTreeMap::<PathBuf, OfWorker>::new());
    for (id, entry) in disks {
        if entry.phase == Phase::Empty || entry.beside.is_some() || !is_due(entry) {
            continue;
        }
        match &entry.group {
            None => alone.push(vec![*id]),
            Some(group) => groups.entry(group.clone()).or_default().push(*id),
        }
    }
    alone.extend(groups.into_values());
    alone
}

/// Calls `f` with each, so many at a time. Returns all that it has returned.
fn each<T: Send>(
    workers: Vec<OfWorker>,
    at_a_time: usize,
    f: impl Fn(OfWorker) -> Vec<T> + Sync,
) -> Vec<T> {
    let threads = workers.len().min(at_a_time);
    let (left, done) = (Mutex::new(workers.into_iter()), Mutex::new(Vec::new()));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(disks) = next() {
            let outcomes = f(disks);
            done.lock().unwrap_or_else(PoisonError::into_inner).extend(outcomes);
        }
    };
    std::thread::scope(|scope| {
        // This thread works, too: so all are upgraded even if no other thread can be started.
        for number in 1..threads {
            let thread = std::thread::Builder::new().name(format!("upgrade-{number}"));
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn upgrade_workers(shared: &Shared, workers: Vec<OfWorker>, binary: &Path) -> Vec<Outcome> {
    let at_a_time = (OF_A_PROCESSOR * processors::count()).min(MOST_AT_A_TIME);
    each(workers, at_a_time, |disks| upgrade_worker(shared, &disks, binary))
}

/// Upgrades these disks, which one worker serves. Returns the result for each.
fn upgrade_worker(shared: &Shared, disks: &[DiskId], binary: &Path) -> Vec<Outcome> {
    let (mut seen, mut outcomes) = (BTreeSet::new(), Vec::new());
    for id in disks {
        // The disk was upgraded with another one of its store.
        if seen.contains(id) {
            continue;
        }
        for (id, outcome) in upgrade_one(shared, *id, binary) {
            seen.insert(id);
            outcomes.push((id, outcome));
        }
    }
    outcomes
}

/// Upgrades a disk and all disks of its worker. Returns the result for each.
fn upgrade_one(shared: &Shared, id: DiskId, binary: &Path) -> Vec<Outcome> {
    match shared.table.request_upgrade(id, binary) {
        Err(failure) => vec![(id, Err(failure))],
        Ok(all) => all.into_iter().map(|id| (id, outcome(shared, id))).collect(),
    }
}

fn outcome(shared: &Shared, id: DiskId) -> Result<(), Failure> {
    let failure = |why: &str, help: &str| Failure { why: why.to_owned(), help: help.to_owned() };
    let outcome = shared.table.wait_for(TIMEOUT, |disks| match disks.get(&id) {
        None => Some(Err(detached())),
        Some(entry) => match &entry.upgrade {
            Upgrade::Requested(_) => None,
            Upgrade::Done(outcome) => Some(outcome.clone()),
            Upgrade::None => {
                Some(Err(failure("another upgrade of this disk is in progress", "try again later")))
            }
        },
    });
    shared.table.change(id, |entry| (entry.upgrade, entry.participant) = (Upgrade::None, None));
    outcome.unwrap_or_else(|| {
        Err(failure("its image is still being closed", "look again later: ferrite disk show"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn each_worker_is_upgraded_once_and_no_more_than_so_many_at_a_time() {
        let worker = |domid| vec![DiskId { domid, devid: 51712 }];
        let (now, most, four) = (AtomicUsize::new(0), AtomicUsize::new(0), Barrier::new(4));
        let mut done = each((1..=40).map(worker).collect(), 4, |disks| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Fewer than four at a time would wait for ever.
            four.wait();
            now.fetch_sub(1, Ordering::SeqCst);
            disks
        });
        done.sort();
        assert_eq!(done, (1..=40).flat_map(worker).collect::<Vec<_>>());
        assert_eq!(most.into_inner(), 4);
        assert_eq!(each(Vec::new(), 4, |disks| disks), []);
    }
}
