//! The methods of the control socket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ferrite_disk::Fencing;
use ferrite_serve::counters::snapshot::{self, Snapshot as Counters};
use ferrite_serve::counters::stats_file;
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::protocol::{
    Attached, DetachParams, Detached, Details, Disk, Disks, Full, Hangs, Nothing, PhaseName,
    RpcError, Setting, ShowParams, Status, WaitParams, code,
};
use super::waits::waits_for;
use super::{exports, images, limits, pauses, upgrades};
use crate::config::nearest;
use crate::directory::{self, Snapshot};
use crate::pause::Pause;
use crate::state::DiskId;
use crate::table::{Counts, Entry, Phase};
use crate::{Shared, Xen, tuning};

/// The names of all methods.
pub(super) const METHODS: [&str; 51] = [
    "attach.wait",
    "daemon.status",
    "device.add",
    "device.clean",
    "device.list",
    "device.remove",
    "disk.coalesce",
    "disk.detach",
    "disk.dirty",
    "disk.export",
    "disk.exports",
    "disk.limit",
    "disk.list",
    "disk.mirror",
    "disk.pause",
    "disk.resize",
    "disk.resume",
    "disk.set",
    "disk.show",
    "disk.snapshot",
    "disk.switch",
    "disk.unexport",
    "image.change",
    "image.query",
    "job.cancel",
    "job.complete",
    "job.limit",
    "job.list",
    "job.pause",
    "job.resume",
    "job.show",
    "job.wait",
    "migrate.abort",
    "migrate.commit",
    "migrate.forget",
    "migrate.list",
    "migrate.prepare",
    "migrate.resolve",
    "migrate.run",
    "tap.allocate",
    "tap.attach",
    "tap.close",
    "tap.detach",
    "tap.free",
    "tap.list",
    "tap.open",
    "tap.pause",
    "tap.spawn",
    "tap.stats",
    "tap.unpause",
    "upgrade",
];

/// The longest wait of a method.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(300);
/// A failed disk is reported to its script after so many tries.
const MIN_TRIES: u64 = 3;
/// How often xenstore is checked for a guest that lets go.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Calls a method.
pub(super) fn call(shared: &Arc<Shared>, method: &str, params: Value) -> Result<Value, RpcError> {
    match method {
        "daemon.status" => take::<Nothing>(params).and_then(|_| reply(&status(shared))),
        "disk.list" => take::<Nothing>(params).and_then(|_| reply(&list(shared))),
        "disk.show" => {
            take::<ShowParams>(params).and_then(|request| reply(&show(shared, request.disk)?))
        }
        "disk.detach" => take(params).and_then(|request| reply(&detach(shared, &request)?)),
        "disk.export" => {
            take(params).and_then(|request| reply(&exports::export(shared, &request)?))
        }
        "disk.exports" => take::<Nothing>(params).and_then(|_| reply(&exports::list(shared))),
        "disk.unexport" => {
            take(params).and_then(|request| reply(&exports::unexport(shared, &request)?))
        }
        "disk.pause" => take(params).and_then(|request| reply(&pauses::pause(shared, &request)?)),
        "disk.resume" => take(params).and_then(|request| reply(&pauses::resume(shared, &request)?)),
        "disk.limit" => take(params).and_then(|request| reply(&limits::limit(shared, &request)?)),
        "disk.set" => take(params).and_then(|request| reply(&limits::set(shared, &request)?)),
        "disk.snapshot" => {
            take(params).and_then(|request| reply(&pauses::snapshot(shared, &request)?))
        }
        "disk.dirty" => take(params).and_then(|request| reply(&pauses::dirty(shared, &request)?)),
        "disk.resize" => take(params).and_then(|request| reply(&pauses::resize(shared, &request)?)),
        "disk.switch" => take(params).and_then(|request| reply(&pauses::switch(shared, &request)?)),
        "attach.wait" => take(params).and_then(|request| reply(&wait(shared, &request)?)),
        "image.change" => {
            take(params).and_then(|request| reply(&images::change(shared, &request)?))
        }
        "image.query" => take(params).and_then(|request| reply(&images::query(shared, &request)?)),
        "upgrade" => take(params).and_then(|request| reply(&upgrades::upgrade(shared, &request)?)),
        _ if method.starts_with("migrate.") => super::migrations::call(shared, method, params)
            .unwrap_or_else(|| Err(no_method(method))),
        _ if method.starts_with("device.") => {
            super::devices::call(shared, method, params).unwrap_or_else(|| Err(no_method(method)))
        }
        _ if method.starts_with("tap.") => {
            super::taps::call(shared, method, params).unwrap_or_else(|| Err(no_method(method)))
        }
        _ => super::jobs::call(shared, method, params).unwrap_or_else(|| Err(no_method(method))),
    }
}

fn no_method(method: &str) -> RpcError {
    let meant = nearest(method, METHODS).map(|name| format!("did you mean {name}?"));
    let help = meant.unwrap_or_else(|| format!("there are {}", METHODS.join(", ")));
    RpcError::new(code::NO_METHOD, "there is no such method", &help)
}

pub(super) fn take<T: DeserializeOwned>(params: Value) -> Result<T, RpcError> {
    let params = match params {
        Value::Null => Value::Object(serde_json::Map::new()),
        params => params,
    };
    serde_json::from_value(params).map_err(|e| {
        RpcError::new(
            code::INVALID_PARAMS,
            e.to_string(),
            "docs/control.schema.json describes them",
        )
    })
}

pub(super) fn reply(result: &impl Serialize) -> Result<Value, RpcError> {
    serde_json::to_value(result).map_err(|e| RpcError::new(code::FAILED, e.to_string(), ""))
}

pub(crate) fn status(shared: &Shared) -> Status {
    let no_xen = no_xen(shared);
    let Counts { served, failed, disks } = shared.table.counts();
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        started: seconds(shared.started),
        xen: no_xen.is_none(),
        no_xen,
        served,
        failed,
        disks,
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
    let mut disks: Vec<Disk> = shared.table.read(|disks| disks.iter().map(disk).collect());
    disks.iter_mut().for_each(|disk| {
        add_counters(shared, disk);
        add_fence(shared, disk);
    });
    Disks { disks, no_xen: no_xen(shared) }
}

/// Adds what the counters of a served disk show: requests that wait for space, or for storage that hangs.
fn add_counters(shared: &Shared, disk: &mut Disk) {
    if disk.phase != PhaseName::Served {
        return;
    }
    let Some(seen) = counters_of(shared, disk.disk) else { return };
    let requests = seen.counts.waiting_for_space();
    disk.full = seen.full_since_unix_s.map(|since| Full { requests, since });
    let hangs = shared.hanging.of(disk.disk, &seen);
    disk.hangs = hangs.map(|(requests, since)| Hangs { requests, since: seconds(since) });
}

/// Adds whether the disk's LUN may forget which host writes to it.
fn add_fence(shared: &Shared, disk: &mut Disk) {
    let (id, known) = shared.table.read(|disks| {
        let beside = disks.get(&disk.disk).and_then(|entry| entry.beside);
        let id = beside.unwrap_or(disk.disk);
        (id, disks.get(&id).and_then(|entry| entry.weak))
    });
    // A disk that this daemon has followed is not asked: that takes its keeper, for each disk of the list.
    disk.weak = known.unwrap_or_else(|| {
        let options = shared.serving.options(id);
        let weak = options.map(|options| options.fence == Fencing::WeakReservation);
        if weak.is_some() {
            shared.table.change(id, |entry| entry.weak = entry.weak.or(weak));
        }
        weak.unwrap_or(false)
    });
}

/// The counters of a disk, if they can be read.
pub(crate) fn counters_of(shared: &Shared, id: DiskId) -> Option<Counters> {
    snapshot::read(&stats_file(&shared.paths.run.join(id.file_name()))).ok()
}

fn describe(id: DiskId, entry: &Entry) -> Disk {
    let (phase, failure) = match &entry.phase {
        Phase::Starting => (PhaseName::Starting, None),
        Phase::Served => (PhaseName::Served, None),
        Phase::Failed(failure) => (PhaseName::Failed, Some(failure)),
        Phase::Empty => (PhaseName::Empty, None),
        Phase::Resting(_) | Phase::Suspended => (PhaseName::Resting, None),
        Phase::Paused => (PhaseName::Paused, None),
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
        hangs: None,
        weak: false,
        // The image that was refused is between the daemon and the next one.
        paused: entry.pause.clone().map(|pause| Pause { refused: None, ..pause }),
        guest: entry.tap.as_ref().and_then(|tap| tap.guest),
        why: failure.map(|failure| failure.why.clone()),
        help: failure.map(|failure| failure.help.clone()),
    }
}

pub(super) fn found(shared: &Shared, id: DiskId) -> Result<Disk, RpcError> {
    let found = shared.table.read(|disks| disks.get(&id).map(|entry| describe(id, entry)));
    let mut disk = found.ok_or_else(|| no_disk(id))?;
    add_counters(shared, &mut disk);
    add_fence(shared, &mut disk);
    Ok(disk)
}

pub(super) fn no_disk(id: DiskId) -> RpcError {
    let help = "ferrite disk list shows the attached disks";
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
    let tap = shared.table.read(|disks| disks.get(&id)?.tap.clone());
    let (seen, read_only) = match (&tap, disk.guest) {
        (Some(tap), None) => (Snapshot::default(), tap.read_only),
        (_, guest) => {
            let (mut store, guest) = (store(shared)?, guest.unwrap_or(id));
            let seen = Snapshot::read(&mut store, guest).map_err(|e| failed(&e))?;
            let mode = store.read(&format!("{}/mode", directory::path(guest)));
            let mode = mode.map_err(|e| failed(&e))?;
            (seen, !mode.is_some_and(|mode| mode.contains(&b'w')))
        }
    };
    let of_entry = |entry: &Entry| (entry.phase.clone(), entry.nbd.clone());
    let (phase, nbd) = shared.table.read(|disks| disks.get(&id).map(of_entry)).unzip();
    let waits_for = match tap.is_some() && disk.guest.is_none() {
        true => None,
        false => waits_for(&seen, phase.as_ref(), disk.full.is_some()),
    };
    Ok(Details {
        disk,
        nbd: nbd.flatten().map(|path| path.to_string_lossy().into_owned()),
        backend_state: seen.own.number(),
        frontend_state: seen.front.number(),
        online: seen.online,
        read_only,
        settings: settings(shared, id),
        waits_for,
        hotplug_status: seen.hotplug_status,
    })
}

/// The options of the disk's worker, which an older daemon may have started.
pub(super) fn settings(shared: &Shared, id: DiskId) -> Vec<Setting> {
    let of_entry = |entry: &Entry| Some((entry.beside.unwrap_or(id), entry.image.clone()?.path));
    let Some((kept, image)) = shared.table.read(|disks| disks.get(&id).and_then(of_entry)) else {
        return Vec::new();
    };
    let in_force = shared.serving.options(kept);
    let mut settings =
        in_force.map(|options| shared.config.settings(&image, &options)).unwrap_or_default();
    let tune = |entry: &Entry| entry.tune.clone();
    let tune = shared.table.read(|disks| disks.get(&kept).map(tune)).unwrap_or_default();
    tuning::show(&mut settings, &tune);
    settings
}

/// Detaches a disk as xl does: asks the guest, waits, and removes the directories. With `force`,
/// the directory of a guest that does not let go is removed first. The backend takes that for the
/// guest's end.
fn detach(shared: &Shared, request: &DetachParams) -> Result<Detached, RpcError> {
    let id = request.disk;
    found(shared, id)?;
    if id.is_tap() {
        let (message, help) = match crate::is_standalone(&shared.paths.run) {
            true => (format!("{id} is served by one process"), "stop that (SIGTERM)"),
            false => (
                format!("{id} is a tap, which its storage manager closes"),
                "tap-ctl close, and tap-ctl detach",
            ),
        };
        return Err(RpcError::new(code::FAILED, message, help));
    }
    let mut store = store(shared)?;
    let mut seen = Snapshot::read(&mut store, id).map_err(|e| failed(&e))?;
    let Some(frontend) = seen.frontend.clone() else { return Err(no_disk(id)) };
    let dir = directory::path(id);
    let requested = store.transaction(|tx| {
        // The state is written once only: 5 would overwrite a 6 that follows it.
        if tx.read(&format!("{dir}/online"))?.is_some_and(|online| online == b"1") {
            tx.write(&format!("{dir}/online"), b"0")?;
            tx.write(&format!("{dir}/state"), b"5")?;
        }
        Ok(())
    });
    requested.map_err(|e| failed(&e))?;
    let timeout = Duration::from_secs(request.timeout_s.into()).min(MAX_WAIT);
    let mut is_closed = wait_for_close(shared, &mut store, id, timeout, &mut seen, |_| false)?;
    let forced = !is_closed && request.force;
    if forced {
        store.remove(&frontend).map_err(|e| failed(&e))?;
        // The image has to be closed even so, if it can be opened. The next try shows whether it
        // can.
        let tries =
            |disks: &BTreeMap<DiskId, Entry>| disks.get(&id).map_or(0, |entry| entry.starts);
        let before = shared.table.read(tries);
        let has_failed =
            |entry: &Entry| entry.starts > before && matches!(entry.phase, Phase::Failed(_));
        is_closed = wait_for_close(shared, &mut store, id, MAX_WAIT, &mut seen, has_failed)?;
    }
    if !is_closed {
        let phase = shared.table.read(|disks| disks.get(&id).map(|entry| entry.phase.clone()));
        let is_full = found(shared, id).is_ok_and(|disk| disk.full.is_some());
        let waits = waits_for(&seen, phase.as_ref(), is_full).unwrap_or_default();
        let message = format!("disk {id} is still attached; it waits for {waits}");
        let help = "it is detached when that is done; the command may be repeated";
        return Err(RpcError::new(code::TIMEOUT, message, help));
    }
    let removed = store.transaction(|tx| {
        tx.remove(&frontend)?;
        tx.remove(&dir)?;
        // libxl's record of the disk, which only libxl makes.
        tx.remove(&format!("/libxl/{}/device/vbd/{}", id.domid, id.devid))
    });
    removed.map_err(|e| failed(&e))?;
    Ok(Detached { disk: id, forced })
}

/// Waits until the disk is not served any more and the toolstack may remove it, or until
/// `is_given_up` holds. Returns whether that was within `timeout`.
fn wait_for_close(
    shared: &Shared,
    store: &mut Store,
    id: DiskId,
    timeout: Duration,
    seen: &mut Snapshot,
    is_given_up: impl Fn(&Entry) -> bool,
) -> Result<bool, RpcError> {
    let end = Instant::now() + timeout;
    loop {
        *seen = Snapshot::read(store, id).map_err(|e| failed(&e))?;
        let (is_served, is_given_up) = shared.table.read(|disks| {
            let entry = disks.get(&id);
            (entry.is_some(), entry.is_some_and(&is_given_up))
        });
        if is_given_up || (!is_served && (!seen.is_there || seen.own == XenbusState::Closed)) {
            return Ok(true);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || shared.is_stopped(left.min(POLL_INTERVAL)) {
            return Ok(false);
        }
    }
}

/// Waits for a hotplug script until the disk is served or has failed.
fn wait(shared: &Shared, request: &WaitParams) -> Result<Attached, RpcError> {
    let id = directory::id_of(&request.backend).ok_or_else(|| {
        let message = format!("{:.200} is not a disk's directory", request.backend);
        RpcError::new(code::INVALID_PARAMS, message, "it is backend/vbd3/DOMID/DEVID")
    })?;
    let timeout = Duration::from_secs(request.timeout_s.into()).min(MAX_WAIT);
    let disk = shared.table.wait_for(timeout, |disks| {
        let entry = disks.get(&id)?;
        let is_known = match entry.phase {
            Phase::Starting => false,
            // The first tries may fail while an earlier process still holds the image.
            Phase::Failed(_) => entry.starts == 0 || entry.starts >= MIN_TRIES,
            Phase::Served | Phase::Empty | Phase::Paused => true,
            Phase::Resting(_) | Phase::Suspended => true,
        };
        is_known.then(|| describe(id, entry))
    });
    let Some(disk) = disk else {
        let (message, help) = match found(shared, id) {
            Ok(_) => ("served", "ferrite disk show says what it waits for"),
            Err(_) => ("attached", "ferrite disk list shows the attached disks"),
        };
        let message = format!("disk {id} was not {message} in time");
        return Err(RpcError::new(code::TIMEOUT, message, help));
    };
    match disk.phase {
        PhaseName::Failed => {
            let (why, help) = (disk.why.unwrap_or_default(), disk.help.unwrap_or_default());
            Err(RpcError::new(code::FAILED, why, &help))
        }
        PhaseName::Served
        | PhaseName::Empty
        | PhaseName::Starting
        | PhaseName::Resting
        | PhaseName::Paused => Ok(Attached { disk }),
    }
}
