//! Disks that clients of other hosts reach by NBD.
//!
//! Each has an exporter (`ferrite_keeper::ExporterSpec`), a process that outlives the daemon, and a record in
//! `/run/ferrite/exports` for the next daemon. A thread looks after exporters: one that has ended is started again, and
//! that of a detached disk is ended.
//!
//! Steps of making one: the claim to write (`writers.rs`), the record, the exporter, the record with its addresses. Steps
//! of removing one: the exporter, the record, the claim. So there is a record wherever there is an exporter, and no
//! guest joins while clients may write.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_keeper::{Exporter, ExporterSpec, Started, TlsFolder, nbd_socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::devices::NotDone;
use crate::state::{DiskId, States};
use crate::state_files::{StateFiles, Stated};
use crate::table::Phase;
use crate::writers::{Refused, Way};
use crate::{Failure, Paths, Shared, vhost};

/// The pause between looks at the disks.
const LOOK: Duration = Duration::from_secs(1);

/// The record of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub(crate) version: u32,
    /// The disk.
    pub(crate) disk: DiskId,
    /// Where it listens.
    pub(crate) listen: Vec<SocketAddr>,
    /// The folder of certificates. Without it clients speak in clear.
    pub(crate) tls: Option<PathBuf>,
    /// Whether clients need no certificates.
    pub(crate) any_client: bool,
    /// The hosts whose certificates clients may have. Empty: any that the authority has signed.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) peers: Vec<String>,
    /// The export's name.
    pub(crate) name: String,
    /// Whether clients may not change anything.
    pub(crate) read_only: bool,
    /// Whether clients are not told the name.
    pub(crate) no_list: bool,
    /// Whether clients may write beside a guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shared: bool,
}

impl Record {
    /// Whether no guest may write meanwhile.
    fn writes_alone(&self) -> bool {
        !self.read_only && !self.shared
    }
}

impl Stated for Record {
    const VERSION: u32 = 1;
    const WITHOUT: &'static str = "its disk is not exported any more";

    fn name(&self) -> String {
        self.disk.file_name()
    }
}

/// An export.
struct Export {
    record: Record,
    exporter: Option<Exporter>,
    /// Why there is none.
    why: Option<String>,
}

/// All exports of this daemon.
#[derive(Default)]
pub(crate) struct Exports {
    known: Mutex<BTreeMap<DiskId, Export>>,
    /// Held while an export is made, removed or looked after.
    changing: Mutex<()>,
    /// Whether the thread runs.
    is_watched: Mutex<bool>,
}

impl Exports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Export>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while an export of either kind is made: a disk has one.
    pub(crate) fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Paths {
    fn exports(&self) -> PathBuf {
        self.run.join("exports")
    }
}

fn failed(why: impl Into<String>, help: &str) -> NotDone {
    NotDone::Failed(Failure { why: why.into(), help: help.to_owned() })
}

/// Whether a disk is exported by NBD.
pub(crate) fn has(shared: &Shared, disk: DiskId) -> bool {
    shared.exports.lock().contains_key(&disk)
}

/// Exports a disk.
pub(crate) fn add(shared: &Arc<Shared>, record: Record) -> Result<Record, NotDone> {
    let _one = shared.exports.change();
    let disk = record.disk;
    claim(shared, disk, record.writes_alone())?;
    make(shared, record).inspect_err(|_| release(shared, disk))
}

/// Checks that a disk has no export of either kind, and claims it for one that writes alone. The caller holds
/// [`Exports::change`]: a second export that fails would release the claim of the first.
pub(crate) fn claim(shared: &Shared, disk: DiskId, writes_alone: bool) -> Result<(), NotDone> {
    if has(shared, disk) || vhost::has(shared, disk) {
        let why = format!("disk {disk} is exported already");
        let help = "ferrite disk exports shows how; ferrite disk unexport ends that".to_owned();
        return Err(NotDone::InUse(Failure { why, help }));
    }
    if writes_alone {
        shared.writers.claim(&shared.table, disk, Way::Export).map_err(|e| {
            let failure = e.failure(disk, "export it");
            match e {
                Refused::Missing => NotDone::Missing(failure),
                Refused::OfGuest(_) => NotDone::InUse(failure),
            }
        })?;
    }
    Ok(())
}

/// Ends the claim of an export. A guest may wait for that.
pub(crate) fn release(shared: &Shared, disk: DiskId) {
    if shared.writers.release(disk, Way::Export) {
        shared.wake.wake();
    }
}

fn make(shared: &Arc<Shared>, mut record: Record) -> Result<Record, NotDone> {
    let disk = record.disk;
    may_be_exported(shared, &mut record)?;
    let not_written = |e: std::io::Error| {
        failed(format!("cannot write the record: {e}"), "make room on the file system of /run")
    };
    let files = StateFiles::open(&shared.paths.exports()).map_err(not_written)?;
    files.write(&record).map_err(not_written)?;
    let exporter = start(shared, &mut record).inspect_err(|_| files.remove(&record.name()))?;
    if let Err(e) = files.write(&record) {
        // The next daemon finds the exporter all the same.
        tracing::warn!("the record of the export of disk {disk} is not complete: {e}");
    }
    tracing::info!("disk {disk} is exported as {}", record.name);
    let export = Export { record: record.clone(), exporter: Some(exporter), why: None };
    shared.exports.lock().insert(disk, export);
    watch(shared);
    Ok(record)
}

/// Whether the disk may be exported now. Names the export, if it has no name.
fn may_be_exported(shared: &Shared, record: &mut Record) -> Result<(), NotDone> {
    let disk = record.disk;
    let seen = shared.table.read(|disks| {
        let entry = disks.get(&disk)?;
        Some((entry.phase.clone(), entry.nbd.is_some(), entry.image.clone()))
    });
    let Some((phase, has_socket, image)) = seen else {
        return Err(NotDone::Missing(Refused::Missing.failure(disk, "")));
    };
    match phase {
        Phase::Served if has_socket => {}
        Phase::Paused => {
            return Err(failed(
                format!("disk {disk} is paused"),
                "resume it (ferrite disk resume)",
            ));
        }
        _ => {
            let help = "ferrite disk show says what it waits for";
            return Err(failed(format!("disk {disk} is not served now"), help));
        }
    }
    if record.name.is_empty() {
        let volume = image.as_ref().and_then(|image| Some(image.volume()?.1.to_str()?.to_owned()));
        let stem = || Some(image.as_ref()?.path.file_stem()?.to_str()?.to_owned());
        record.name = volume.or_else(stem).unwrap_or_default();
    }
    let fits = |name: &str| (1..=255).contains(&name.len()) && !name.contains(char::is_control);
    match fits(&record.name) {
        true => Ok(()),
        false => Err(failed("no name can be made of its image's", "give it one: --name NAME")),
    }
}

fn socket(shared: &Shared, disk: DiskId) -> PathBuf {
    shared.paths.exports().join(format!("{}.sock", disk.file_name()))
}

/// Starts the exporter, and notes where it listens.
fn start(shared: &Shared, record: &mut Record) -> Result<Exporter, NotDone> {
    let disk = record.disk;
    let spec = ExporterSpec {
        socket: socket(shared, disk),
        server: nbd_socket(&shared.paths.run.join(disk.file_name())),
        listen: record.listen.clone(),
        tls: record.tls.clone().map(|folder| TlsFolder {
            folder,
            verifies: !record.any_client,
            peers: record.peers.clone(),
        }),
        name: record.name.clone(),
        read_only: record.read_only,
        hides_names: record.no_list,
        root: shared.paths.run.join("empty"),
    };
    let not_started = |e: std::io::Error| {
        failed(format!("cannot start the process that listens: {e}"), "see the daemon's log")
    };
    let command = shared.serving.exporter(disk).ok_or_else(|| {
        failed("this daemon cannot export disks", "run the daemon of this program")
    })?;
    match spec.start(command).map_err(not_started)? {
        Started::Listening(addresses) => record.listen = addresses,
        Started::Refused { why, help, in_use: true } => {
            return Err(NotDone::InUse(Failure { why, help }));
        }
        Started::Refused { why, help, .. } => return Err(failed(why, &help)),
    }
    Exporter::connect(&spec.socket).map_err(not_started)
}

/// Ends the export of a disk, and its clients' connections.
pub(crate) fn remove(shared: &Shared, disk: DiskId) -> Result<Record, NotDone> {
    let _one = shared.exports.change();
    let record = shared.exports.lock().get(&disk).map(|export| export.record.clone());
    let record = record.ok_or_else(|| {
        let why = format!("disk {disk} is not exported");
        let help = "ferrite disk exports shows those that are".to_owned();
        NotDone::Missing(Failure { why, help })
    })?;
    end(shared, disk, "as was asked for")?;
    Ok(record)
}

/// Ends what the earlier disk of this number had. Call it before a new one can be reached: the clients of that one must
/// not come to this one.
pub(crate) fn end_of_earlier(shared: &Shared, disk: DiskId) {
    let _one = shared.exports.change();
    if !shared.exports.lock().contains_key(&disk) {
        return;
    }
    if let Err(NotDone::Failed(e)) = end(shared, disk, "another disk has its number") {
        tracing::error!("clients of an earlier disk {disk} may reach the new one: {e}");
    }
}

fn end(shared: &Shared, disk: DiskId, why: &str) -> Result<(), NotDone> {
    let not_ended = |e: &io::Error| {
        failed(format!("the process that listens does not end: {e}"), "try again, or kill it")
    };
    let killed = |exporter: &Exporter| -> io::Result<()> {
        let pid = i32::try_from(exporter.pid).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.ok_or(io::ErrorKind::NotFound)?, Signal::KILL)?)
    };
    match Exporter::connect(&socket(shared, disk)) {
        // One that was stopped does not answer.
        Ok(exporter) => exporter.end().or_else(|_| killed(&exporter)).map_err(|e| not_ended(&e))?,
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
        {
            tracing::debug!("the exporter of disk {disk} has ended: {e}");
        }
        Err(e) => {
            match &shared.exports.lock().get(&disk).and_then(|export| export.exporter.as_ref()) {
                Some(exporter) if has_ended(exporter) => {}
                // The process of that number has this connection open, so it is the exporter.
                Some(exporter) => killed(exporter).map_err(|e| not_ended(&e))?,
                None => return Err(not_ended(&e)),
            }
        }
    }
    StateFiles::<Record>::at(&shared.paths.exports()).remove(&disk.file_name());
    shared.exports.lock().remove(&disk);
    release(shared, disk);
    tracing::info!("disk {disk} is not exported any more: {why}");
    Ok(())
}

/// An export, with its exporter's process number or why it has none.
pub(crate) type Row = (Record, Option<u32>, Option<String>);

/// All exports.
pub(crate) fn list(shared: &Shared) -> Vec<Row> {
    let pid = |export: &Export| export.exporter.as_ref().map(|exporter| exporter.pid);
    let known = shared.exports.lock();
    known.values().map(|export| (export.record.clone(), pid(export), export.why.clone())).collect()
}

/// Takes up the exports of a predecessor.
pub(crate) fn restore(shared: &Arc<Shared>) {
    let records = StateFiles::<Record>::at(&shared.paths.exports()).all();
    if records.is_empty() {
        return;
    }
    for record in records {
        if record.writes_alone() {
            shared.writers.restore(record.disk, Way::Export);
        }
        let export = Export { record: record.clone(), exporter: None, why: None };
        shared.exports.lock().insert(record.disk, export);
    }
    watch(shared);
}

/// Has a thread look after exports, until there are none.
fn watch(shared: &Arc<Shared>) {
    let mut is_watched = shared.exports.is_watched.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_watched {
        return;
    }
    let own = shared.clone();
    let thread = std::thread::Builder::new().name("exports".to_owned());
    match thread.spawn(move || look_after(&own)) {
        Ok(_) => *is_watched = true,
        Err(e) => tracing::warn!("exports are not started again when they end: {e}"),
    }
}

fn look_after(shared: &Arc<Shared>) {
    loop {
        let disks: Vec<DiskId> = shared.exports.lock().keys().copied().collect();
        disks.into_iter().for_each(|disk| look_at(shared, disk));
        if shared.is_stopped(LOOK) {
            return;
        }
        let mut is_watched =
            shared.exports.is_watched.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.exports.lock().is_empty() {
            *is_watched = false;
            return;
        }
    }
}

/// Looks at one export: its disk may be gone, or its exporter.
fn look_at(shared: &Arc<Shared>, disk: DiskId) {
    let _one = shared.exports.change();
    if shared.is_stopped(Duration::ZERO) {
        return;
    }
    let is_there = shared.table.read(|disks| disks.contains_key(&disk))
        || States::peek(&shared.paths.states(), disk).is_some();
    if !is_there {
        if let Err(NotDone::Failed(e)) = end(shared, disk, "it is detached") {
            tracing::warn!("the export of disk {disk}, which is detached, does not end: {e}");
        }
        return;
    }
    let mut known = shared.exports.lock();
    let Some(export) = known.get_mut(&disk) else { return };
    if export.exporter.as_ref().is_some_and(|exporter| !has_ended(exporter)) {
        return;
    }
    let mut record = export.record.clone();
    drop(known);
    let found = match Exporter::connect(&socket(shared, disk)) {
        Ok(exporter) => Ok(exporter),
        Err(_) => start(shared, &mut record),
    };
    let mut known = shared.exports.lock();
    let Some(export) = known.get_mut(&disk) else { return };
    match found {
        Ok(exporter) => {
            (export.record, export.exporter, export.why) = (record, Some(exporter), None);
        }
        Err(NotDone::Missing(e) | NotDone::InUse(e) | NotDone::Failed(e)) => {
            if export.why.as_ref() != Some(&e.why) {
                tracing::warn!("disk {disk} is not exported: {e}; trying again every second");
            }
            (export.exporter, export.why) = (None, Some(e.why));
        }
    }
}

fn has_ended(exporter: &Exporter) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(exporter.fd(), PollFlags::RDHUP)];
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
