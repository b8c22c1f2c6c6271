//! Devices of the kernel's NBD client.
//!
//! **No time limit for requests.** A request that the kernel sends again on another connection may be executed twice, the
//! second time after later writes: a paused disk answers nothing, and the kernel cannot tell it from a dead one. So
//! requests are waited for without limit. With one connection the kernel sends the requests of a dead one again,
//! after 30 seconds. With several it does so only after the limit, which is 30 days: if the disk's keeper is killed,
//! the requests on its connections wait. That is why one connection is the default.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::nbd_device::{Connection, Devices as Driver};
use ferrite_nbd::wire::can;

use super::kernel::{Again, Kind, Name, no_driver, recorded};
use super::streams::Streams;
use super::{MAX_CONNECTIONS, NotDone, Record, Wish, record};
use crate::state::DiskId;
use crate::{Failure, Shared};

/// How long the kernel waits for a connection when there is none, and with several for an answer. In the kernel it is a
/// 32-bit number of ticks, 1000 a second at most.
const FOREVER: Duration = Duration::from_secs(30 * 24 * 3600);
/// The block of a device. Disks are multiples of it.
const BLOCK_BYTES: u64 = 512;

fn socket(shared: &Shared, disk: DiskId) -> Option<PathBuf> {
    shared.table.read(|disks| disks.get(&disk).and_then(|entry| entry.nbd.clone()))
}

/// See [`super::kernel::make`].
pub(super) fn make(
    shared: &Arc<Shared>,
    disk: DiskId,
    wish: Wish,
    owns_disk: bool,
) -> Result<(Record, Vec<UnixStream>), NotDone> {
    let mut kernel = Driver::open().map_err(|e| NotDone::Failed(no_driver(Kind::Nbd, &e)))?;
    let socket = socket(shared, disk).ok_or_else(|| {
        let why = format!("disk {disk} is not served now");
        let help = "ferrite disk show says what it waits for".to_owned();
        NotDone::Failed(Failure { why, help })
    })?;
    let streams = Streams::connect(&socket, wish.connections.clamp(1, MAX_CONNECTIONS))
        .map_err(NotDone::Failed)?;
    let mut record = Record::new(disk, Kind::Nbd, shared.clock.now_ns(), owns_disk);
    record.shared = wish.shared;
    record.read_only = wish.read_only || streams.export.can(can::READ_ONLY);
    record.connections = streams.streams.len() as u32;
    record.bytes = streams.export.bytes;
    recorded(shared, &mut record, not_made, |record| {
        with_connection(record, &streams, |wanted| kernel.connect(wanted))
    })?;
    Ok((record, streams.streams))
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

/// See [`super::kernel::remove`].
pub(super) fn remove(record: &Record, index: u32) -> io::Result<()> {
    let mut kernel = match Driver::open() {
        // Without the module there are no devices.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    match kernel.connected()?.contains(&index) && record.is_at(index) {
        true => kernel.disconnect(index),
        false => Ok(()),
    }
}

/// See [`super::kernel::clean`].
pub(super) fn clean(is_left: &impl Fn(&Name) -> bool) -> Vec<Name> {
    let Ok(mut kernel) = Driver::open() else { return Vec::new() };
    let mut removed = Vec::new();
    for index in kernel.connected().unwrap_or_default() {
        let name = Name { kind: Kind::Nbd, index };
        if record::is_ours(index) && is_left(&name) && kernel.disconnect(index).is_ok() {
            removed.push(name);
        }
    }
    removed
}

/// See [`super::kernel::connect`].
pub(super) fn connect(shared: &Shared, record: &Record, index: u32) -> Again {
    let Ok(mut kernel) = Driver::open() else { return Again::Waits };
    let Ok(connected) = kernel.connected() else { return Again::Waits };
    if !connected.contains(&index) || !record.is_at(index) {
        return Again::Gone;
    }
    let Some(socket) = socket(shared, record.disk) else { return Again::Waits };
    let Ok(streams) = Streams::connect(&socket, record.connections) else { return Again::Waits };
    if streams.export.bytes < record.bytes {
        // Only another disk can be smaller.
        return Again::Waits;
    }
    match with_connection(record, &streams, |wanted| kernel.reconnect(index, wanted)) {
        Ok(()) => Again::Connected(streams.streams),
        Err(e) => {
            tracing::warn!("/dev/nbd{index} gets no new connections: {e}");
            Again::Waits
        }
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
