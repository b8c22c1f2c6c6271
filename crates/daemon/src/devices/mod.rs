//! Block devices of this host that show disks: `/dev/nbdN`, of the kernel's own NBD client, and `/dev/ublkbN`, of its ublk
//! driver.
//!
//! A device is one more attachment of a disk. The daemon makes devices, since a worker has no rights.
//!
//! * `by_nbd`: the kernel has connections to the disk's NBD socket, which the relay keeps while workers come and go. So
//!   neither the death of a worker nor an upgrade is an error for the device. The daemon keeps copies of the connections to
//!   hear of their end, and gives the kernel new ones then.
//! * `by_ublk`: the worker serves the kernel's requests itself. The daemon hears of its end by a socket to it, and gives
//!   the device to the next worker.
//! * `kernel`: either of them.
//!
//! Steps of making one: the claim to write (`writers.rs`), the record, the device, the record with its index. Steps of removing one: the device, the claim, the disk if it was opened for the device, the record.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::params::Image;
use crate::state::DiskId;
use crate::table::{Entry, Phase};
use crate::writers::{Refused, Way};
use crate::{Failure, Paths, Shared, taps};

mod by_nbd;
mod by_ublk;
mod kernel;
mod record;
mod streams;
mod watch;

pub use kernel::Kind;
pub(crate) use kernel::Name;
pub(crate) use record::Record;

/// The most connections or queues of a device.
pub(crate) const MAX_CONNECTIONS: u32 = 4;
/// How often a device is looked at for users before it is removed, and the time in between.
const LOOKS: u32 = 10;
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

/// Why a device was not made or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// There is no such disk or device.
    Missing(Failure),
    /// The device, the disk or the image is in use.
    InUse(Failure),
    /// Anything else.
    Failed(Failure),
}

impl NotDone {
    /// The reason, whichever it is.
    pub(crate) fn failure(self) -> Failure {
        let (NotDone::Missing(failure) | NotDone::InUse(failure) | NotDone::Failed(failure)) = self;
        failure
    }
}

/// A device that is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) kind: Kind,
    pub(crate) read_only: bool,
    /// Whether it may be writable beside a guest.
    pub(crate) shared: bool,
    pub(crate) connections: u32,
}

impl Wish {
    /// Whether no guest may write meanwhile.
    fn writes_alone(self) -> bool {
        !self.read_only && !self.shared
    }
}

/// A device, and what tells this daemon that its connections or its worker have ended.
struct Device {
    record: Record,
    /// Empty: they have ended, or were a predecessor's.
    streams: Vec<UnixStream>,
}

/// All devices of this daemon, by name.
#[derive(Default)]
pub(crate) struct Devices {
    known: Mutex<BTreeMap<Name, Device>>,
    /// Held while a device is made or removed.
    changing: Mutex<()>,
    watching: watch::Watching,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Name, Device>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Paths {
    /// The folder of the records of devices.
    pub(crate) fn devices(&self) -> PathBuf {
        self.run.join("devices")
    }
}

/// Makes a device of a disk, and returns its record.
pub(crate) fn add(shared: &Arc<Shared>, disk: DiskId, wish: Wish) -> Result<Record, NotDone> {
    let _one = shared.devices.change();
    make(shared, disk, wish, false)
}

/// Opens an image that is not in use, and makes a device of it.
pub(crate) fn add_image(
    shared: &Arc<Shared>,
    image: &Image,
    wish: Wish,
) -> Result<Record, NotDone> {
    let _one = shared.devices.change();
    if let Some(record) = of_image(shared, image) {
        return Err(NotDone::InUse(has_one(&image.path.display().to_string(), &record)));
    }
    let minor = taps::open_own(shared, image, wish.read_only).map_err(|e| {
        let taps::TapError { failure, .. } = e;
        NotDone::Failed(failure)
    })?;
    make(shared, DiskId::tap(minor), wish, true).inspect_err(|_| taps::close_own(shared, minor))
}

/// The device that was made of an image, if one was.
fn of_image(shared: &Shared, image: &Image) -> Option<Record> {
    let real = image.real_file();
    let is_it = |entry: &Entry| entry.image.as_ref() == Some(image) || entry.real == real;
    let of_disk = |disk| shared.table.read(|disks| disks.get(&disk).is_some_and(is_it));
    let known = shared.devices.lock();
    let mut own = known.values().filter(|device| device.record.owns_disk);
    own.find(|device| of_disk(device.record.disk)).map(|device| device.record.clone())
}

fn has_one(name: &str, record: &Record) -> Failure {
    let device = record.path();
    let help =
        format!("use it, or remove it first: ferrite disk device --remove {}", device.display());
    Failure { why: format!("{name} has the device {} already", device.display()), help }
}

fn make(
    shared: &Arc<Shared>,
    disk: DiskId,
    wish: Wish,
    owns_disk: bool,
) -> Result<Record, NotDone> {
    // Before the claim: that of another device of the disk stays.
    may_have_one(shared, disk)?;
    if wish.writes_alone() {
        shared.writers.claim(&shared.table, disk, Way::Device).map_err(|e| {
            let failure = e.failure(disk, "look into it");
            match e {
                Refused::Missing => NotDone::Missing(failure),
                Refused::OfGuest(_) => NotDone::InUse(failure),
            }
        })?;
    }
    let made = kernel::make(shared, disk, wish, owns_disk);
    let (record, streams) = made.inspect_err(|_| release(shared, disk))?;
    tracing::info!("disk {disk} is {}", record.path().display());
    if let Some(name) = record.device() {
        shared.devices.lock().insert(name, Device { record: record.clone(), streams });
    }
    watch::begin(shared);
    Ok(record)
}

/// Ends the claim of a device. A guest may wait for that.
fn release(shared: &Shared, disk: DiskId) {
    if shared.writers.release(disk, Way::Device) {
        shared.wake.wake();
    }
}

/// Whether a disk may have a device now.
fn may_have_one(shared: &Shared, disk: DiskId) -> Result<(), NotDone> {
    if let Some(device) = shared.devices.lock().values().find(|device| device.record.disk == disk) {
        return Err(NotDone::InUse(has_one(&format!("disk {disk}"), &device.record)));
    }
    let seen = shared.table.read(|disks| {
        let entry = disks.get(&disk)?;
        Some((entry.phase.clone(), entry.nbd.is_some()))
    });
    let Some((phase, has_socket)) = seen else {
        return Err(NotDone::Missing(Refused::Missing.failure(disk, "")));
    };
    match (phase, has_socket) {
        (Phase::Served, true) => Ok(()),
        (phase, _) => {
            let why = match phase {
                Phase::Failed(failure) => format!("disk {disk} is not served: {}", failure.why),
                Phase::Paused => format!("disk {disk} is paused"),
                _ => format!("disk {disk} is not served now"),
            };
            let help = "ferrite disk show says what it waits for".to_owned();
            Err(NotDone::Failed(Failure { why, help }))
        }
    }
}

/// Removes a device. One that is in use stays.
pub(crate) fn remove(shared: &Arc<Shared>, name: Name) -> Result<Record, NotDone> {
    let _one = shared.devices.change();
    let path = name.path();
    let record = shared.devices.lock().get(&name).map(|device| device.record.clone());
    let Some(record) = record else {
        let why = format!("{} is no device of a disk of ferrite", path.display());
        let help = "ferrite disk devices shows them".to_owned();
        return Err(NotDone::Missing(Failure { why, help }));
    };
    let users = lasting_users(name);
    if !users.is_empty() {
        let why = format!("{} is in use: {}", path.display(), users.join(", "));
        let help = "unmount it (umount), or end its other use, then try again".to_owned();
        return Err(NotDone::InUse(Failure { why, help }));
    }
    kernel::remove(&record).map_err(|e| {
        let why = format!("the kernel does not remove {}: {e}", path.display());
        NotDone::Failed(Failure { why, help: "dmesg may say why".to_owned() })
    })?;
    forget(shared, name, &record);
    Ok(record)
}

/// Removes the device of an earlier disk of this number, also one that is in use: it must not show the new disk. Call it
/// before that can be reached.
pub(crate) fn end_of_earlier(shared: &Shared, disk: DiskId) {
    let _one = shared.devices.change();
    end_of_earlier_held(shared, disk);
}

/// As [`end_of_earlier`], of a tap that is opened for a device: the caller makes devices.
pub(crate) fn end_of_earlier_held(shared: &Shared, disk: DiskId) {
    let known = shared.devices.lock();
    let found = known.iter().find(|(_, device)| device.record.disk == disk);
    let Some((name, record)) = found.map(|(name, device)| (*name, device.record.clone())) else {
        return;
    };
    drop(known);
    let path = name.path();
    tracing::warn!("{} is removed: another disk has the number {disk} now", path.display());
    if let Err(e) = kernel::remove(&record) {
        tracing::error!("{} of an earlier disk is not removed: {e}", path.display());
    }
    shared.devices.lock().remove(&name);
    release(shared, disk);
    record.remove(&shared.paths.devices());
}

/// The lasting users of a device. udev is not one: it reads a device for a moment after each change of it.
fn lasting_users(name: Name) -> Vec<String> {
    let mut users = Vec::new();
    for _ in 0..LOOKS {
        users = name.users().unwrap_or_default();
        if users.is_empty() {
            break;
        }
        std::thread::sleep(BETWEEN_LOOKS);
    }
    users
}

/// Closes the disk of a device that is gone, if it was opened for that, and removes the record.
fn forget(shared: &Shared, name: Name, record: &Record) {
    shared.devices.lock().remove(&name);
    release(shared, record.disk);
    if let Some(minor) = record.disk.minor_of_tap().filter(|_| record.owns_disk) {
        taps::close_own(shared, minor);
    }
    record.remove(&shared.paths.devices());
    tracing::info!("{} is removed", name.path().display());
}

/// A device, and its users.
pub(crate) struct Row {
    pub(crate) record: Record,
    pub(crate) users: Vec<String>,
}

/// All devices, by name.
pub(crate) fn list(shared: &Shared) -> Vec<Row> {
    let records: Vec<Record> =
        shared.devices.lock().values().map(|device| device.record.clone()).collect();
    let row = |record: Record| {
        let users = record.device().map(|name| name.users().unwrap_or_default());
        Row { users: users.unwrap_or_default(), record }
    };
    records.into_iter().map(row).collect()
}

/// Removes all devices without a mount or another user, and those of an earlier daemon that have no record. Returns
/// their names.
pub(crate) fn clean(shared: &Arc<Shared>) -> Vec<Name> {
    let known: Vec<Name> = shared.devices.lock().keys().copied().collect();
    let mut removed: Vec<Name> =
        known.iter().copied().filter(|name| remove(shared, *name).is_ok()).collect();
    let _one = shared.devices.change();
    removed.extend(kernel::clean(&known));
    removed
}

/// Takes up the devices of a predecessor.
pub(crate) fn restore(shared: &Arc<Shared>) {
    let folder = shared.paths.devices();
    let records = record::all(&folder);
    if records.is_empty() {
        return;
    }
    let found = kernel::find(&records);
    for (mut record, index) in records.into_iter().zip(found) {
        match index {
            Some(index) => {
                record.index = Some(index);
                // By the first complete record the device is known on older kernels, too.
                let _ = record.write(&folder);
                if !record.read_only && !record.shared {
                    shared.writers.restore(record.disk, Way::Device);
                }
                let name = Name { kind: record.kind, index };
                shared.devices.lock().insert(name, Device { record, streams: Vec::new() });
            }
            // It was not made, or the kernel has lost it.
            None => {
                if let Some(minor) = record.disk.minor_of_tap().filter(|_| record.owns_disk) {
                    taps::close_own(shared, minor);
                }
                record.remove(&folder);
            }
        }
    }
    watch::begin(shared);
}

fn not_written(folder: &Path, e: &io::Error) -> Failure {
    let why = format!("cannot write in {}: {e}", folder.display());
    Failure { why, help: "make room on the file system of /run".to_owned() }
}
