//! What each method does.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ferrite_serve::counters::{snapshot, stats_file};
use ferrite_xen::store::{Store, StoreError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::protocol::{
    Attached, DetachParams, Detached, Details, Disk, Disks, Full, NotUpgraded, Nothing, PhaseName,
    RpcError, Setting, ShowParams, Status, UpgradeParams, Upgraded, WaitParams, code,
};
use super::waits::waits_for;
use crate::config::nearest;
use crate::directory::{self, Look};
use crate::state::DiskId;
use crate::table::{Entry, Phase, Upgrade, detached};
use crate::{Failure, Shared, Xen};

/// All of them.
pub(super) const METHODS: [&str; 6] =
    ["attach.wait", "daemon.status", "disk.detach", "disk.list", "disk.show", "upgrade"];

/// How long a disk's image may take to be closed for it.
const UPGRADE: Duration = Duration::from_secs(60);
/// The longest wait of a method.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// A script is told of a failure after so many tries.
const FAILED: u64 = 3;
/// How often xenstore is looked at for a guest that lets go.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Does what a request asks for.
pub(super) fn call(shared: &Shared, method: &str, params: Value) -> Result<Value, RpcError> {
    match method {
        "daemon.status" => take::<Nothing>(params).and_then(|_| give(&status(shared))),
        "disk.list" => take::<Nothing>(params).and_then(|_| give(&list(shared))),
        "disk.show" => {
            take::<ShowParams>(params).and_then(|asked| give(&show(shared, asked.disk)?))
        }
        "disk.detach" => take(params).and_then(|asked| give(&detach(shared, &asked)?)),
        "attach.wait" => take(params).and_then(|asked| give(&wait(shared, &asked)?)),
        "upgrade" => take(params).and_then(|asked| give(&upgrade(shared, &asked)?)),
        _ => {
            let meant = nearest(method, METHODS).map(|name| format!("did you mean {name}?"));
            let help = meant.unwrap_or_else(|| format!("there are {}", METHODS.join(", ")));
            Err(RpcError::new(code::NO_METHOD, "there is no such method", &help))
        }
    }
}

fn take<T: DeserializeOwned>(params: Value) -> Result<T, RpcError> {
    let params = match params {
        Value::Null => Value::Object(serde_json::Map::new()),
        params => params,
    };
    serde_json::from_value(params).map_err(|e| {
        RpcError::new(code::INVALID_PARAMS, e.to_string(), "control.schema.json has all of them")
    })
}

fn give(result: &impl Serialize) -> Result<Value, RpcError> {
    serde_json::to_value(result).map_err(|e| RpcError::new(code::FAILED, e.to_string(), ""))
}

pub(crate) fn status(shared: &Shared) -> Status {
    let no_xen = no_xen(shared);
    let count = |f: fn(&Phase) -> bool| {
        shared.table.look(|disks| disks.values().filter(|entry| f(&entry.phase)).count() as u32)
    };
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        started: seconds(shared.started),
        xen: no_xen.is_none(),
        no_xen,
        served: count(|phase| *phase == Phase::Served),
        failed: count(|phase| matches!(phase, Phase::Failed(_))),
        disks: count(|_| true),
    }
}

fn no_xen(shared: &Shared) -> Option<String> {
    match shared.xen() {
        Xen::Connected => None,
        Xen::Gone(why) => Some(why),
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(crate) fn list(shared: &Shared) -> Disks {
    let disk = |(id, entry): (&DiskId, &Entry)| describe(*id, entry);
    let mut disks: Vec<Disk> = shared.table.look(|disks| disks.iter().map(disk).collect());
    disks.iter_mut().for_each(|disk| disk.full = full(shared, disk));
    Disks { disks, no_xen: no_xen(shared) }
}

/// Which of a disk's requests wait for space, by its counters.
fn full(shared: &Shared, disk: &Disk) -> Option<Full> {
    if disk.phase != PhaseName::Served {
        return None;
    }
    let counters = stats_file(&shared.places.run.join(disk.disk.file_name()));
    let seen = snapshot::read(&counters).ok()?;
    let requests = seen.counts.waiting_for_space();
    seen.full_since_unix_s.map(|since| Full { requests, since })
}

fn describe(id: DiskId, entry: &Entry) -> Disk {
    let (phase, failure) = match &entry.phase {
        Phase::Starting => (PhaseName::Starting, None),
        Phase::Served => (PhaseName::Served, None),
        Phase::Failed(failure) => (PhaseName::Failed, Some(failure)),
        Phase::Empty => (PhaseName::Empty, None),
        Phase::Resting(_) => (PhaseName::Resting, None),
    };
    let image = entry.image.as_ref();
    Disk {
        disk: id,
        phase,
        since: seconds(entry.since),
        format: image.map(|image| image.format),
        image: image.map(|image| image.path.to_string_lossy().into_owned()),
        pid: entry.pid,
        minor: entry.minor,
        starts: entry.starts,
        full: None,
        why: failure.map(|failure| failure.why.clone()),
        help: failure.map(|failure| failure.help.clone()),
    }
}

fn found(shared: &Shared, id: DiskId) -> Result<Disk, RpcError> {
    let found = shared.table.look(|disks| disks.get(&id).map(|entry| describe(id, entry)));
    let mut disk = found.ok_or_else(|| no_disk(id))?;
    disk.full = full(shared, &disk);
    Ok(disk)
}

fn no_disk(id: DiskId) -> RpcError {
    let help = "ferrite disk list (disk.list) has those that are attached";
    RpcError::new(code::NO_DISK, format!("disk {id} is not attached"), help)
}

fn store(shared: &Shared) -> Result<Store, RpcError> {
    (shared.connect)().map_err(|e| failed(&e))
}

fn failed(e: &StoreError) -> RpcError {
    RpcError::new(code::FAILED, e.to_string(), "ferrite doctor shows what is missing")
}

fn show(shared: &Shared, id: DiskId) -> Result<Details, RpcError> {
    let disk = found(shared, id)?;
    let mut store = store(shared)?;
    let look = Look::take(&mut store, id).map_err(|e| failed(&e))?;
    let mode = store.read(&format!("{}/mode", directory::path(id))).map_err(|e| failed(&e))?;
    let of_entry = |entry: &Entry| (entry.phase.clone(), entry.nbd.clone());
    let (phase, nbd) = shared.table.look(|disks| disks.get(&id).map(of_entry)).unzip();
    let waits_for = waits_for(&look, phase.as_ref(), disk.full.is_some());
    Ok(Details {
        disk,
        nbd: nbd.flatten().map(|path| path.to_string_lossy().into_owned()),
        backend_state: look.own,
        frontend_state: look.front,
        online: look.online,
        read_only: !mode.is_some_and(|mode| mode.contains(&b'w')),
        settings: settings(shared, id),
        waits_for,
        hotplug_status: look.hotplug_status,
    })
}

/// What its worker goes by, which an older daemon may have started.
fn settings(shared: &Shared, id: DiskId) -> Vec<Setting> {
    let of_entry = |entry: &Entry| Some((entry.beside.unwrap_or(id), entry.image.clone()?.path));
    let Some((kept, image)) = shared.table.look(|disks| disks.get(&id).and_then(of_entry)) else {
        return Vec::new();
    };
    let in_force = shared.serving.options(kept);
    in_force.map(|options| shared.config.settings(&image, &options)).unwrap_or_default()
}

/// What xl does: it asks the guest, waits, and removes the directories. With force, a guest that does
/// not let go loses its directory first, which the backend takes for its end.
fn detach(shared: &Shared, asked: &DetachParams) -> Result<Detached, RpcError> {
    let id = asked.disk;
    found(shared, id)?;
    let mut store = store(shared)?;
    let mut look = Look::take(&mut store, id).map_err(|e| failed(&e))?;
    let Some(frontend) = look.frontend.clone() else { return Err(no_disk(id)) };
    let dir = directory::path(id);
    let ask = store.transaction(|tx| {
        // Not twice: a 6 that was answered would be gone.
        if tx.read(&format!("{dir}/online"))?.is_some_and(|online| online == b"1") {
            tx.write(&format!("{dir}/online"), b"0")?;
            tx.write(&format!("{dir}/state"), b"5")?;
        }
        Ok(())
    });
    ask.map_err(|e| failed(&e))?;
    let timeout = Duration::from_secs(asked.timeout_s.into()).min(MAX_WAIT);
    let mut is_closed = wait_for_close(shared, &mut store, id, timeout, &mut look, |_| false)?;
    let forced = !is_closed && asked.force;
    if forced {
        store.remove(&frontend).map_err(|e| failed(&e))?;
        // The image has to be closed even so, if it can be opened: the next try shows that.
        let tries =
            |disks: &BTreeMap<DiskId, Entry>| disks.get(&id).map_or(0, |entry| entry.starts);
        let before = shared.table.look(tries);
        let has_failed =
            |entry: &Entry| entry.starts > before && matches!(entry.phase, Phase::Failed(_));
        is_closed = wait_for_close(shared, &mut store, id, MAX_WAIT, &mut look, has_failed)?;
    }
    if !is_closed {
        let phase = shared.table.look(|disks| disks.get(&id).map(|entry| entry.phase.clone()));
        let is_full = found(shared, id).is_ok_and(|disk| disk.full.is_some());
        let waits = waits_for(&look, phase.as_ref(), is_full).unwrap_or_default();
        let message = format!("disk {id} is still attached; it waits for {waits}");
        let help = "it is detached when that is done; it may be asked for again";
        return Err(RpcError::new(code::TIMEOUT, message, help));
    }
    let removed = store.transaction(|tx| {
        tx.remove(&frontend)?;
        tx.remove(&dir)?;
        // libxl's own note of the disk, as it is made by it alone.
        tx.remove(&format!("/libxl/{}/device/vbd/{}", id.domid, id.devid))
    });
    removed.map_err(|e| failed(&e))?;
    Ok(Detached { disk: id, forced })
}

/// Waits until nobody serves the disk any more and the toolstack may remove it, or it is given up as
/// it is.
fn wait_for_close(
    shared: &Shared,
    store: &mut Store,
    id: DiskId,
    timeout: Duration,
    look: &mut Look,
    is_given_up: impl Fn(&Entry) -> bool,
) -> Result<bool, RpcError> {
    let end = Instant::now() + timeout;
    loop {
        *look = Look::take(store, id).map_err(|e| failed(&e))?;
        let (is_served, is_given_up) = shared.table.look(|disks| {
            let entry = disks.get(&id);
            (entry.is_some(), entry.is_some_and(&is_given_up))
        });
        if is_given_up || (!is_served && (!look.is_there || look.own == 6)) {
            return Ok(true);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || shared.is_stopped(left.min(LOOK_AGAIN)) {
            return Ok(false);
        }
    }
}

/// What a hotplug script asks: whether the disk is there.
fn wait(shared: &Shared, asked: &WaitParams) -> Result<Attached, RpcError> {
    let id = directory::id_of(&asked.backend).ok_or_else(|| {
        let message = format!("{:.200} is no disk's directory", asked.backend);
        RpcError::new(code::INVALID_PARAMS, message, "it is backend/vbd3/DOMID/DEVID")
    })?;
    let timeout = Duration::from_secs(asked.timeout_s.into()).min(MAX_WAIT);
    let disk = shared.table.wait_for(timeout, |disks| {
        let entry = disks.get(&id)?;
        let is_known = match entry.phase {
            Phase::Starting => false,
            // At first the one that had the image before may not have let go of it.
            Phase::Failed(_) => entry.starts == 0 || entry.starts >= FAILED,
            Phase::Served | Phase::Empty | Phase::Resting(_) => true,
        };
        is_known.then(|| describe(id, entry))
    });
    let Some(disk) = disk else {
        let (message, help) = match found(shared, id) {
            Ok(_) => ("served", "ferrite disk show (disk.show) says what it waits for"),
            Err(_) => ("attached", "ferrite disk list (disk.list) names those that are"),
        };
        let message = format!("disk {id} was not {message} in time");
        return Err(RpcError::new(code::TIMEOUT, message, help));
    };
    match disk.phase {
        PhaseName::Failed => {
            let (why, help) = (disk.why.unwrap_or_default(), disk.help.unwrap_or_default());
            Err(RpcError::new(code::FAILED, why, &help))
        }
        PhaseName::Served | PhaseName::Empty | PhaseName::Starting | PhaseName::Resting => {
            Ok(Attached { disk })
        }
    }
}

/// One disk after the other: a guest's pause is its own, and not all storage is written to at once.
fn upgrade(shared: &Shared, asked: &UpgradeParams) -> Result<Upgraded, RpcError> {
    let binary = Path::new(&asked.binary);
    if !binary.is_absolute() {
        let help = "name the program by its absolute path, such as /usr/bin/ferrite";
        return Err(RpcError::new(code::INVALID_PARAMS, "binary is no absolute path", help));
    }
    // Before any image is closed for it.
    runs(binary).map_err(|e| {
        let message = format!("cannot run {}: {e}", binary.display());
        RpcError::new(code::FAILED, message, "name a program of ferrite that root may run")
    })?;
    let any = |disks: &BTreeMap<DiskId, Entry>| -> Vec<DiskId> {
        // What is served beside another goes with that.
        let goes = |entry: &Entry| entry.phase != Phase::Empty && entry.beside.is_none();
        let served = disks.iter().filter(|(_, entry)| goes(entry));
        served.map(|(id, _)| *id).collect()
    };
    let ids = match asked.disk {
        Some(id) => vec![found(shared, id)?.disk],
        None => shared.table.look(any),
    };
    let mut done = Upgraded { upgraded: Vec::new(), failed: Vec::new() };
    let mut seen = BTreeSet::new();
    for id in ids {
        // It went with another one of its store.
        if seen.contains(&id) {
            continue;
        }
        for (id, outcome) in upgrade_one(shared, id, binary) {
            seen.insert(id);
            match outcome {
                Ok(()) => done.upgraded.push(id),
                Err(Failure { why, help }) => done.failed.push(NotUpgraded { disk: id, why, help }),
            }
        }
    }
    Ok(done)
}

/// Whether there is such a program; what it is, it has to show.
fn runs(binary: &Path) -> io::Result<()> {
    let found = binary.metadata()?;
    match found.is_file() && found.permissions().mode() & 0o111 != 0 {
        true => Ok(()),
        false => Err(io::Error::other("it is no program")),
    }
}

/// A disk, and those that are served by the same worker; what came of it for each.
fn upgrade_one(shared: &Shared, id: DiskId, binary: &Path) -> Vec<(DiskId, Result<(), Failure>)> {
    match shared.table.ask_upgrade(id, binary) {
        Err(failure) => vec![(id, Err(failure))],
        Ok(all) => all.into_iter().map(|id| (id, outcome(shared, id))).collect(),
    }
}

fn outcome(shared: &Shared, id: DiskId) -> Result<(), Failure> {
    let failure = |why: &str, help: &str| Failure { why: why.to_owned(), help: help.to_owned() };
    let outcome = shared.table.wait_for(UPGRADE, |disks| match disks.get(&id) {
        None => Some(Err(detached())),
        Some(entry) => match &entry.upgrade {
            Upgrade::Asked(_) => None,
            Upgrade::Done(outcome) => Some(outcome.clone()),
            Upgrade::None => Some(Err(failure("somebody else asks for the same", "ask again"))),
        },
    });
    shared.table.change(id, |entry| (entry.upgrade, entry.ticket) = (Upgrade::None, None));
    outcome.unwrap_or_else(|| {
        Err(failure("its image is being closed, which takes long", "look at it in a while"))
    })
}
