//! Disks for guests of QEMU and other virtual-machine monitors, by vhost-user (docs/internals/processes.md 17).
//!
//! The daemon listens, and hands each front end to the disk's worker; no process is between these two then. A front end whose
//! worker has ended connects again, as QEMU does with `reconnect=1`, and brings the requests in flight along. So it
//! outlives the worker, an upgrade and the daemon. While there is no daemon it cannot connect.
//!
//! One front end is served at a time. The next waits in the listening socket, also while the disk is not served.
//!
//! Steps of making one: the claim to write (`writers.rs`), the socket, the record. Steps of removing one: the socket, the
//! front end, the record, the claim.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_serve::nbd::{BindError, Bound, bind};
use ferrite_serve::others::{Newcomer, Told, is_over, told};
use ferrite_serve::vhost::{ID_BYTES, MAX_QUEUES, table_memory};
use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::devices::NotDone;
use crate::newcomers::{hand_over, is_served, send};
use crate::state::{DiskId, States};
use crate::state_files::{StateFiles, Stated};
use crate::writers::{Refused, Way};
use crate::{Failure, Paths, Shared, exports};

/// How often exports are looked at whose disk is not served, and all others for a disk that is gone.
const LOOK: Duration = Duration::from_secs(1);
/// How often the thread looks while a front end waits for its disk.
const SOON: Duration = Duration::from_millis(100);
/// How long the end of a front end may take: its requests are answered first.
const END: Duration = Duration::from_secs(10);
/// The longest path of a Unix socket.
const MAX_PATH: usize = 107;

/// The record of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub(crate) version: u32,
    /// The disk.
    pub(crate) disk: DiskId,
    /// The path of the socket.
    pub(crate) socket: PathBuf,
    /// The number of queues that a front end is offered.
    pub(crate) queues: u16,
    /// The name that its guest can ask for.
    pub(crate) name: String,
    /// Whether its guest may not change anything.
    pub(crate) read_only: bool,
    /// Whether it may write beside a guest of Xen.
    pub(crate) shared: bool,
}

impl Record {
    /// Whether no other guest may write meanwhile.
    fn writes_alone(&self) -> bool {
        !self.read_only && !self.shared
    }

    fn front_end(&self) -> Newcomer {
        Newcomer::FrontEnd {
            queues: self.queues,
            read_only: self.read_only,
            name: self.name.clone(),
        }
    }
}

impl Stated for Record {
    const VERSION: u32 = 1;
    const WITHOUT: &'static str = "its disk is not exported by vhost-user any more";

    fn name(&self) -> String {
        self.disk.file_name()
    }
}

/// An export.
struct Export {
    record: Record,
    /// `None`: the socket could not be made.
    bound: Option<Bound>,
    /// The status of the front end that is served.
    status: Option<OwnedFd>,
    /// Whether a worker was asked for the front end of an earlier daemon.
    asked: bool,
    /// Why no front end is served.
    why: Option<String>,
}

impl Export {
    fn of(record: Record, bound: Option<Bound>, asked: bool) -> Export {
        Export { record, bound, status: None, asked, why: None }
    }
}

/// All exports of this kind.
#[derive(Default)]
pub(crate) struct FrontEnds {
    known: Mutex<BTreeMap<DiskId, Export>>,
    /// Wakes the thread that accepts, while there is one.
    thread: Mutex<Option<Arc<Waker>>>,
}

impl FrontEnds {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Export>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Paths {
    fn front_ends(&self) -> PathBuf {
        self.run.join("vhost-user")
    }
}

fn failed(why: impl Into<String>, help: &str) -> NotDone {
    NotDone::Failed(Failure { why: why.into(), help: help.to_owned() })
}

/// Whether a disk is exported by this way.
pub(crate) fn has(shared: &Shared, disk: DiskId) -> bool {
    shared.front_ends.lock().contains_key(&disk)
}

/// Exports a disk.
pub(crate) fn add(shared: &Arc<Shared>, mut record: Record) -> Result<Record, NotDone> {
    let disk = record.disk;
    if !(1..=MAX_QUEUES).contains(&record.queues) {
        let help = format!("1 to {MAX_QUEUES} are possible");
        return Err(failed(format!("there are no {} queues", record.queues), &help));
    }
    let fits = record.socket.is_absolute() && record.socket.as_os_str().len() <= MAX_PATH;
    if !fits {
        let why = format!("{} is no place for a socket", record.socket.display());
        return Err(failed(why, "name it from the root folder on, in at most 107 bytes"));
    }
    let image = shared.table.read(|disks| disks.get(&disk).map(|entry| entry.image.clone()));
    let Some(image) = image else {
        return Err(NotDone::Missing(Refused::Missing.failure(disk, "")));
    };
    if record.name.is_empty() {
        let stem = image.as_ref().and_then(|image| image.path.file_stem()?.to_str());
        record.name = stem.unwrap_or_default().to_owned();
    }
    record.name.retain(|c| c.is_ascii_graphic());
    record.name.truncate(ID_BYTES);
    if !is_served(shared, disk) {
        let help = "ferrite disk show says what it waits for";
        return Err(failed(format!("disk {disk} is not served now"), help));
    }
    let _one = shared.exports.change();
    exports::claim(shared, disk, record.writes_alone())?;
    make(shared, record).inspect_err(|_| exports::release(shared, disk))
}

fn listen(socket: &Path) -> Result<Bound, NotDone> {
    let bound = bind(socket).map_err(|e| {
        let why = format!("cannot listen at {}: {e}", socket.display());
        let failure = |help: &str| Failure { why: why.clone(), help: help.to_owned() };
        match e {
            BindError::InUse => NotDone::InUse(failure("end that program, or name another place")),
            BindError::NoSocket => NotDone::InUse(failure("name another place")),
            BindError::System(_) => NotDone::Failed(failure("make its folder, and room there")),
        }
    })?;
    let prepared = bound.listener.set_nonblocking(true);
    prepared.map_err(|e| failed(format!("cannot listen at {}: {e}", socket.display()), ""))?;
    Ok(bound)
}

fn make(shared: &Arc<Shared>, record: Record) -> Result<Record, NotDone> {
    let bound = listen(&record.socket)?;
    let not_written = |e: io::Error| {
        failed(format!("cannot write the record: {e}"), "make room on the file system of /run")
    };
    let files = StateFiles::open(&shared.paths.front_ends()).map_err(not_written)?;
    files.write(&record).map_err(not_written)?;
    tracing::info!("disk {} is exported by vhost-user", record.disk);
    let export = Export::of(record.clone(), Some(bound), true);
    shared.front_ends.lock().insert(record.disk, export);
    watch(shared);
    Ok(record)
}

/// Ends the export of a disk, and its front end. `None`: there is none.
pub(crate) fn remove(shared: &Shared, disk: DiskId) -> Option<Record> {
    let export = shared.front_ends.lock().remove(&disk)?;
    let record = export.record.clone();
    end(shared, export, "as was asked for");
    Some(record)
}

/// Ends what the earlier disk of this number had. Call it before a new one can be reached.
pub(crate) fn end_of_earlier(shared: &Shared, disk: DiskId) {
    let export = shared.front_ends.lock().remove(&disk);
    if let Some(export) = export {
        end(shared, export, "another disk has its number");
    }
}

fn end(shared: &Shared, export: Export, why: &str) {
    let Export { record, bound, .. } = export;
    let disk = record.disk;
    // No front end can connect any more.
    drop(bound);
    // Without a worker no front end is served.
    if let Ok(status) = send(shared, disk, &Newcomer::NoFrontEnd, &[]) {
        let until = Instant::now() + END;
        while !is_over(&status) && Instant::now() < until {
            std::thread::sleep(SOON);
        }
        if !is_over(&status) {
            tracing::warn!("the front end of disk {disk} has requests that are not answered yet");
        }
    }
    StateFiles::<Record>::at(&shared.paths.front_ends()).remove(&disk.file_name());
    exports::release(shared, disk);
    tracing::info!("disk {disk} is not exported by vhost-user any more: {why}");
}

/// An export, and why it serves no front end.
pub(crate) type Row = (Record, Option<String>);

/// All exports.
pub(crate) fn list(shared: &Shared) -> Vec<Row> {
    let known = shared.front_ends.lock();
    known.values().map(|export| (export.record.clone(), export.why.clone())).collect()
}

/// Takes up the exports of a predecessor.
pub(crate) fn restore(shared: &Arc<Shared>) {
    let records = StateFiles::<Record>::at(&shared.paths.front_ends()).all();
    if records.is_empty() {
        return;
    }
    for record in records {
        if record.writes_alone() {
            shared.writers.restore(record.disk, Way::Export);
        }
        let bound = listen(&record.socket);
        let (bound, why) = match bound {
            Ok(bound) => (Some(bound), None),
            Err(NotDone::Missing(e) | NotDone::InUse(e) | NotDone::Failed(e)) => {
                tracing::warn!("disk {} is not exported: {e}", record.disk);
                (None, Some(e.why))
            }
        };
        let export = Export { why, ..Export::of(record.clone(), bound, false) };
        shared.front_ends.lock().insert(record.disk, export);
    }
    watch(shared);
}

/// Has a thread accept front ends, until there are no exports.
fn watch(shared: &Arc<Shared>) {
    let mut thread = shared.front_ends.thread.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(waker) = &*thread {
        return waker.wake();
    }
    let started = Waker::new().map(Arc::new).and_then(|waker| {
        let (shared, own) = (shared.clone(), waker.clone());
        let builder = std::thread::Builder::new().name("vhost-user".to_owned());
        builder.spawn(move || look_after(&shared, &own))?;
        Ok(waker)
    });
    match started {
        Ok(waker) => *thread = Some(waker),
        Err(e) => tracing::warn!("front ends are not served: {e}"),
    }
}

fn look_after(shared: &Arc<Shared>, waker: &Waker) {
    loop {
        waker.clear();
        let disks: Vec<DiskId> = shared.front_ends.lock().keys().copied().collect();
        let waits = disks.into_iter().filter(|disk| look_at(shared, *disk)).count();
        wait(shared, waker, if waits > 0 { SOON } else { LOOK });
        if shared.is_stopped(Duration::ZERO) {
            return;
        }
        let mut thread = shared.front_ends.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.front_ends.lock().is_empty() {
            *thread = None;
            return;
        }
    }
}

/// Waits for a front end that may be served, the end of one, or `timeout`.
fn wait(shared: &Shared, waker: &Waker, timeout: Duration) {
    // Copies, so that exports can be made and removed meanwhile.
    let mut files = Vec::new();
    for export in shared.front_ends.lock().values() {
        let copied = match (&export.status, &export.bound) {
            (Some(status), _) => status.try_clone().map(|copy| (copy, PollFlags::RDHUP)),
            (None, Some(bound)) if is_served(shared, export.record.disk) => {
                bound.listener.try_clone().map(|copy| (copy.into(), PollFlags::IN))
            }
            _ => continue,
        };
        files.extend(copied.ok());
    }
    let mut fds = vec![
        PollFd::from_borrowed_fd(waker.fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(shared.stop.fd(), PollFlags::IN),
    ];
    fds.extend(files.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd.as_fd(), *flags)));
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // The next turn looks at the exports in any case.
    if poll(&mut fds, Some(&timeout)).is_err() {
        std::thread::sleep(SOON);
    }
}

/// Looks at one export: its disk may be gone, its front end too, and the next may wait. Returns whether it waits for its
/// disk's worker.
fn look_at(shared: &Arc<Shared>, disk: DiskId) -> bool {
    let is_there = shared.table.read(|disks| disks.contains_key(&disk))
        || States::peek(&shared.paths.states(), disk).is_some();
    let mut known = shared.front_ends.lock();
    let Some(export) = known.get_mut(&disk) else { return false };
    if !is_there {
        let export = known.remove(&disk);
        drop(known);
        if let Some(export) = export {
            end(shared, export, "it is detached");
        }
        return false;
    }
    if export.status.as_ref().is_some_and(|status| !is_over(status)) {
        return false;
    }
    if let Some(status) = export.status.take() {
        export.why = refusal(&status);
    }
    if !is_served(shared, disk) {
        return export.bound.is_some();
    }
    let (asked, front_end) = (export.asked, export.record.front_end());
    if !asked {
        drop(known);
        return ask(shared, disk, &front_end);
    }
    let stream = export.bound.as_ref().and_then(|bound| bound.listener.accept().ok());
    let Some((stream, _)) = stream else { return false };
    drop(known);
    give(shared, disk, &front_end, stream.as_fd());
    false
}

/// Asks the worker for the front end of an earlier daemon.
fn ask(shared: &Shared, disk: DiskId, front_end: &Newcomer) -> bool {
    let Ok(handed) = hand_over(shared, disk, front_end, None) else { return true };
    if let Some(export) = shared.front_ends.lock().get_mut(&disk) {
        export.asked = true;
        export.status =
            matches!(handed.told, Told::Served { .. }).then(|| OwnedFd::from(handed.status));
    }
    false
}

/// Hands a front end to the worker. One that the worker does not get connects again.
fn give(shared: &Shared, disk: DiskId, front_end: &Newcomer, stream: BorrowedFd<'_>) {
    let sent =
        table_memory().and_then(|memory| send(shared, disk, front_end, &[stream, memory.as_fd()]));
    let mut known = shared.front_ends.lock();
    let Some(export) = known.get_mut(&disk) else { return };
    match sent {
        Ok(status) => (export.status, export.why) = (Some(status), None),
        Err(e) => {
            let why = e.to_string();
            if export.why.as_ref() != Some(&why) {
                tracing::warn!("a front end of disk {disk} is not served: {why}");
            }
            export.why = Some(why);
        }
    }
}

/// Why a worker has not served a front end that is gone, if it has said so.
fn refusal(status: &OwnedFd) -> Option<String> {
    match told(status, Duration::from_millis(1)) {
        Ok(Told::Refused(why)) => Some(why),
        _ => None,
    }
}
