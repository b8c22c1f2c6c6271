//! Block devices of this host that show disks: `/dev/nbdN`, of the kernel's own NBD client.
//!
//! A device is one more attachment of a disk. The kernel has connections to the disk's NBD socket, which the relay keeps
//! while workers come and go. So neither the death of a worker nor an upgrade is an error for the device. The daemon
//! makes devices, since a worker has no rights. It keeps copies of the connections to hear of their end, and gives the
//! kernel new ones then.
//!
//! **No time limit for requests.** A request that the kernel sends again on another connection may be executed twice, the
//! second time after later writes: a paused disk answers nothing, and the kernel cannot tell it from a dead one. So
//! requests are waited for without limit. With one connection the kernel sends what was on a dead one again, after
//! 30 seconds. With several it does so only after the limit, which is 30 days: if the disk's keeper is killed, what was
//! under way on its connections waits. That is why one connection is the default.
//!
//! Steps of making one: the record, the connections, the device, the record with its index. Steps of removing one: the
//! device, the disk if it was opened for the device, the record.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_host::nbd_device::{self, Connection, Devices as Kernel};
use ferrite_nbd::wire::can;

use crate::params::Image;
use crate::state::DiskId;
use crate::table::{Entry, Phase};
use crate::{Failure, Paths, Shared, taps};

mod record;
mod streams;
mod watch;

pub(crate) use record::Record;
use streams::Streams;

/// The most connections of a device.
pub(crate) const MAX_CONNECTIONS: u32 = 4;
/// How long the kernel waits for a connection when there is none, and with several for an answer. In the kernel it is a
/// 32-bit number of ticks, 1000 a second at most.
const FOREVER: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often a device is looked at for users before it is removed, and the time in between.
const LOOKS: u32 = 10;
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
/// The block of a device. Disks are multiples of it.
const BLOCK_BYTES: u64 = 512;

/// Why a device was not made or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// There is no such disk or device.
    Missing(Failure),
    /// Somebody uses it.
    InUse(Failure),
    /// Anything else.
    Failed(Failure),
}

/// A device that is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) read_only: bool,
    /// Whether it may be writable beside a guest.
    pub(crate) shared: bool,
    pub(crate) connections: u32,
}

/// A device, and this daemon's copies of its connections.
struct Device {
    record: Record,
    /// Empty: they are gone, or were a predecessor's.
    streams: Vec<UnixStream>,
}

/// All devices of this daemon, by index.
#[derive(Default)]
pub(crate) struct Devices {
    known: Mutex<BTreeMap<u32, Device>>,
    /// Held while a device is made or removed.
    changing: Mutex<()>,
    watching: watch::Watching,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Device>> {
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
    let device = record.index.map(nbd_device::path).unwrap_or_default();
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
    let socket = socket_of(shared, disk, wish)?;
    let mut kernel = Kernel::open().map_err(|e| NotDone::Failed(no_kernel(&e)))?;
    let mut record = Record::new(disk, shared.clock.now_ns(), owns_disk);
    let streams = Streams::connect(&socket, wish.connections.clamp(1, MAX_CONNECTIONS))
        .map_err(NotDone::Failed)?;
    record.read_only = wish.read_only || streams.export.can(can::READ_ONLY);
    record.connections = streams.streams.len() as u32;
    record.bytes = streams.export.bytes;
    let folder = shared.paths.devices();
    record.write(&folder).map_err(|e| NotDone::Failed(not_written(&folder, &e)))?;
    (shared.on_step)(crate::Step::DeviceRecorded);
    let made = with_connection(&record, &streams, |wanted| kernel.connect(wanted));
    let index = made.map_err(|e| {
        record.remove(&folder);
        NotDone::Failed(not_made(&e))
    })?;
    (shared.on_step)(crate::Step::DeviceMade);
    record.index = Some(index);
    if let Err(e) = record.write(&folder) {
        // By its identifier the next daemon finds it all the same.
        tracing::warn!("the record of {} is not complete: {e}", nbd_device::path(index).display());
    }
    tracing::info!("disk {disk} is {}", nbd_device::path(index).display());
    let device = Device { record: record.clone(), streams: streams.streams };
    shared.devices.lock().insert(index, device);
    watch::begin(shared);
    Ok(record)
}

/// The socket of a disk that may have a device.
fn socket_of(shared: &Shared, disk: DiskId, wish: Wish) -> Result<PathBuf, NotDone> {
    if let Some(device) = shared.devices.lock().values().find(|device| device.record.disk == disk) {
        return Err(NotDone::InUse(has_one(&format!("disk {disk}"), &device.record)));
    }
    let seen = shared.table.read(|disks| {
        let entry = disks.get(&disk)?;
        let guest = match &entry.tap {
            Some(tap) => tap.guest,
            None => Some(disk),
        };
        Some((entry.phase.clone(), entry.nbd.clone(), guest))
    });
    let Some((phase, socket, guest)) = seen else {
        let help = "ferrite disk list shows the attached disks".to_owned();
        return Err(NotDone::Missing(Failure {
            why: format!("disk {disk} is not attached"),
            help,
        }));
    };
    if let Some(guest) = guest.filter(|_| !wish.read_only && !wish.shared) {
        let why = format!("disk {disk} is that of a guest ({guest}), which writes to it");
        let help = "look into it by --read-only; --shared has both write, for file systems that are \
                    made for that";
        return Err(NotDone::InUse(Failure { why, help: help.to_owned() }));
    }
    match (phase, socket) {
        (Phase::Served, Some(socket)) => Ok(socket),
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

/// Calls with what the kernel needs of these connections.
fn with_connection<T>(
    record: &Record,
    streams: &Streams,
    f: impl FnOnce(&Connection<'_>) -> io::Result<T>,
) -> io::Result<T> {
    let sockets: Vec<i32> = streams.streams.iter().map(|stream| stream.as_raw_fd()).collect();
    let read_only = if record.read_only { can::READ_ONLY } else { 0 };
    f(&Connection {
        sockets: &sockets,
        bytes: record.bytes,
        block_bytes: BLOCK_BYTES,
        server_flags: u64::from(streams.export.flags | read_only),
        timeout_s: if record.connections > 1 { FOREVER.as_secs() } else { 0 },
        dead_timeout_s: FOREVER.as_secs(),
        identifier: &record.identifier,
    })
}

/// Removes a device. One that is in use stays.
pub(crate) fn remove(shared: &Arc<Shared>, index: u32) -> Result<Record, NotDone> {
    let _one = shared.devices.change();
    let path = nbd_device::path(index);
    let record = shared.devices.lock().get(&index).map(|device| device.record.clone());
    let Some(record) = record else {
        let why = format!("{} is no device of a disk of ferrite", path.display());
        let help = "ferrite disk devices shows them".to_owned();
        return Err(NotDone::Missing(Failure { why, help }));
    };
    let users = lasting_users(index);
    if !users.is_empty() {
        let why = format!("{} is in use: {}", path.display(), users.join(", "));
        let help = "unmount it (umount), or end its other use, then try again".to_owned();
        return Err(NotDone::InUse(Failure { why, help }));
    }
    disconnect(&record, index).map_err(|e| {
        let why = format!("the kernel does not remove {}: {e}", path.display());
        NotDone::Failed(Failure { why, help: "dmesg may say why".to_owned() })
    })?;
    forget(shared, index, &record);
    Ok(record)
}

/// Who uses a device, and not for a moment only: udev reads a device after each change of it.
fn lasting_users(index: u32) -> Vec<String> {
    let mut users = Vec::new();
    for _ in 0..LOOKS {
        users = nbd_device::users(index).unwrap_or_default();
        if users.is_empty() {
            break;
        }
        std::thread::sleep(BETWEEN_LOOKS);
    }
    users
}

/// Has the kernel remove the device, if it is there and is this one.
fn disconnect(record: &Record, index: u32) -> io::Result<()> {
    let mut kernel = match Kernel::open() {
        // Without the module there are no devices.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    match kernel.connected()?.contains(&index) && record.is_at(index) {
        true => kernel.disconnect(index),
        false => Ok(()),
    }
}

/// Closes the disk of a device that is gone, if it was opened for that, and removes the record.
fn forget(shared: &Shared, index: u32, record: &Record) {
    shared.devices.lock().remove(&index);
    if let Some(minor) = record.disk.minor_of_tap().filter(|_| record.owns_disk) {
        taps::close_own(shared, minor);
    }
    record.remove(&shared.paths.devices());
    tracing::info!("{} is removed", nbd_device::path(index).display());
}

/// A device, and whether somebody uses it.
pub(crate) struct Row {
    pub(crate) record: Record,
    pub(crate) users: Vec<String>,
}

/// All devices, by index.
pub(crate) fn list(shared: &Shared) -> Vec<Row> {
    let records: Vec<Record> =
        shared.devices.lock().values().map(|device| device.record.clone()).collect();
    let row = |record: Record| {
        let users = record.index.map(|index| nbd_device::users(index).unwrap_or_default());
        Row { users: users.unwrap_or_default(), record }
    };
    records.into_iter().map(row).collect()
}

/// Removes all devices without a mount or another user, and those of an earlier daemon that have no record. Returns the
/// indices.
pub(crate) fn clean(shared: &Arc<Shared>) -> Vec<u32> {
    let known: Vec<u32> = shared.devices.lock().keys().copied().collect();
    let mut removed: Vec<u32> =
        known.iter().copied().filter(|index| remove(shared, *index).is_ok()).collect();
    let _one = shared.devices.change();
    let Ok(mut kernel) = Kernel::open() else { return removed };
    for index in kernel.connected().unwrap_or_default() {
        let is_left = !known.contains(&index) && record::is_ours(index);
        let is_used = nbd_device::users(index).map_or(true, |users| !users.is_empty());
        if is_left && !is_used && kernel.disconnect(index).is_ok() {
            removed.push(index);
        }
    }
    removed
}

/// Takes up the devices of a predecessor.
pub(crate) fn restore(shared: &Arc<Shared>) {
    let records = record::all(&shared.paths.devices());
    if records.is_empty() {
        return;
    }
    let connected = Kernel::open().and_then(|mut kernel| kernel.connected()).unwrap_or_default();
    for mut record in records {
        let found = connected.iter().copied().find(|index| record.is_at(*index));
        match found {
            Some(index) => {
                record.index = Some(index);
                // By the first complete record the device is known on older kernels, too.
                let _ = record.write(&shared.paths.devices());
                shared.devices.lock().insert(index, Device { record, streams: Vec::new() });
            }
            // It was not made, or the kernel has lost it.
            None => {
                if let Some(minor) = record.disk.minor_of_tap().filter(|_| record.owns_disk) {
                    taps::close_own(shared, minor);
                }
                record.remove(&shared.paths.devices());
            }
        }
    }
    watch::begin(shared);
}

fn no_kernel(e: &io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::NotFound => Failure {
            why: "the kernel's NBD client is not loaded".to_owned(),
            help: "load it (modprobe nbd), or have it loaded by --load".to_owned(),
        },
        _ => Failure {
            why: format!("the kernel's NBD client cannot be asked: {e}"),
            help: "ferrite doctor shows what this kernel has".to_owned(),
        },
    }
}

fn not_made(e: &io::Error) -> Failure {
    let help = match e.kind() {
        io::ErrorKind::PermissionDenied => "the daemon needs CAP_SYS_ADMIN",
        io::ErrorKind::ResourceBusy => "all devices are taken: remove one (ferrite disk devices)",
        _ => "dmesg may say why",
    };
    Failure { why: format!("the kernel makes no device: {e}"), help: help.to_owned() }
}

fn not_written(folder: &std::path::Path, e: &io::Error) -> Failure {
    let why = format!("cannot write in {}: {e}", folder.display());
    Failure { why, help: "make room on the file system of /run".to_owned() }
}
