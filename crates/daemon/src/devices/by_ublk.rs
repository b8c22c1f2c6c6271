//! Devices of the kernel's ublk driver, whose requests a disk's worker serves.
//!
//! The daemon has the rights to make, start and stop a device, and opens its character device; the worker gets that
//! opened. When the worker has gone, the driver keeps the requests that it had taken, and all later ones, until the
//! daemon gives the device to the next worker (`UBLK_F_USER_RECOVERY_REISSUE`). So while there is no daemon, a device
//! outlives the death of its worker by waiting.
//!
//! The driver keeps a number for its user. It has a mark there by which this program knows its devices.
//!
//! Commands of the driver wait for others without a limit, so each has a thread that this one does not wait for longer
//! than [`PATIENCE`]. Such a thread ends with its command.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ferrite_io::ublk::{Control, Info, State, USER_COPY};
use ferrite_serve::others::{Newcomer, Told};
use ferrite_serve::ublk::MAX_BYTES;
use rustix::io::Errno;

use super::kernel::{Again, Kind, Name, no_driver, recorded};
use super::{MAX_CONNECTIONS, NotDone, Record, Wish};
use crate::newcomers::hand_over;
use crate::state::DiskId;
use crate::{Failure, Shared};

/// How long a command of the driver may take: it waits for requests that are under way, and for the worker to close.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests of a queue that are under way at a time. If all of them are when the worker dies, the driver notices that
/// after 30 seconds only. So it is more than what programs usually have.
const DEPTH: u16 = 128;
/// The upper half of a mark.
const MARK: u64 = 0x6665_7272 << 32;
/// Where the kernel lists character devices of the driver.
const LIST: &str = "/sys/class/ublk-char";

/// The mark of a device. `unique` was not used since this host was started.
pub(super) fn mark(unique: u64) -> u64 {
    // Microseconds: the lower half repeats itself after 71 minutes, and the device's number is different then, or free.
    MARK | (unique / 1000) & u64::from(u32::MAX)
}

fn is_ours(mark: u64) -> bool {
    mark & (u64::from(u32::MAX) << 32) == MARK
}

/// Does something with the driver, on a thread of its own.
///
/// # Errors
/// `NotFound`: there is no driver. `TimedOut`: it is not done in time, and may be done later.
fn command<T: Send + 'static>(
    body: impl FnOnce(&mut Control) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (tell, done) = channel();
    let run = move || {
        let result = Control::open().and_then(|mut control| body(&mut control));
        // The caller may have given up waiting.
        let _ = tell.send(result);
    };
    std::thread::Builder::new().name("ublk control".to_owned()).spawn(run)?;
    match done.recv_timeout(PATIENCE) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("its thread has panicked")),
    }
}

/// Whether this kernel has the driver.
fn is_there() -> io::Result<()> {
    command(|_| Ok(()))
}

/// See [`super::kernel::make`].
pub(super) fn make(
    shared: &Arc<Shared>,
    disk: DiskId,
    wish: Wish,
    owns_disk: bool,
) -> Result<(Record, Vec<UnixStream>), NotDone> {
    is_there().map_err(|e| NotDone::Failed(no_driver(Kind::Ublk, &e)))?;
    let asked = Newcomer::Question { read_only: wish.read_only };
    let told = hand_over(shared, disk, &asked, None).map_err(|e| not_served(disk, &e))?.told;
    let parameters = told.parameters().ok_or_else(|| refused(disk, told))?;
    let mut record = Record::new(disk, Kind::Ublk, shared.clock.now_ns(), owns_disk);
    record.shared = wish.shared;
    record.read_only = parameters.read_only;
    record.connections = wish.connections.clamp(1, MAX_CONNECTIONS);
    record.bytes = parameters.sectors * 512;
    let wanted = Info {
        queues: record.connections as u16,
        depth: DEPTH,
        state: State::Dead,
        max_bytes: MAX_BYTES,
        number: u32::MAX,
        pid: 0,
        flags: USER_COPY,
        own: record.mark.unwrap_or_default(),
    };
    let index = recorded(shared, &mut record, not_made, |record| {
        let made = command(move |control| {
            let made = control.add(&wanted)?;
            let lacks = USER_COPY & !made.flags;
            let set = match lacks {
                0 => control.set_parameters(made.number, &parameters),
                _ => Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("its driver lacks features ({lacks:#x}): Linux 6.5 has them"),
                )),
            };
            if let Err(e) = set {
                control.delete(made.number)?;
                return Err(e);
            }
            Ok(made)
        })?;
        record.connections = made.queues.into();
        Ok(made.number)
    })?;
    match give(shared, &record, index, false) {
        Ok(status) => Ok((record, vec![status])),
        Err(e) => {
            if let Err(e) = remove(&record, index) {
                tracing::error!("/dev/ublkb{index}, which is not started, stays: {e}");
            }
            record.remove(&shared.paths.devices());
            Err(NotDone::Failed(not_made(&e)))
        }
    }
}

/// Gives a device to the disk's worker, and starts it or lets its requests come again.
fn give(shared: &Shared, record: &Record, index: u32, again: bool) -> io::Result<UnixStream> {
    let file = File::options().read(true).write(true).open(format!("/dev/ublkc{index}"))?;
    let file = OwnedFd::from(file);
    let handed = hand_over(shared, record.disk, &newcomer(record, index), Some(file.as_fd()))?;
    drop(file);
    match handed.told {
        Told::Served { pid } => {
            begin(index, pid, again)?;
            Ok(handed.status)
        }
        Told::Refused(why) => Err(io::Error::other(why)),
        Told::Device { .. } => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn newcomer(record: &Record, number: u32) -> Newcomer {
    let (queues, read_only) = (record.connections as u16, record.read_only);
    Newcomer::Device { number, queues, depth: DEPTH, read_only }
}

/// Starts a device, or lets its requests come again. Drivers differ in the process that has to be named:
/// older ones note any.
fn begin(index: u32, worker: u32, again: bool) -> io::Result<()> {
    command(move |control| {
        let mut by = |pid| match again {
            true => control.end_recovery(index, pid),
            false => control.start(index, pid),
        };
        by(worker).or_else(|e| match e.kind() {
            io::ErrorKind::InvalidInput => by(std::process::id()),
            _ => Err(e),
        })
    })
}

/// All devices with a mark of this program, and their marks.
pub(super) fn all() -> Vec<(u32, u64)> {
    let number = |entry: io::Result<fs::DirEntry>| -> Option<u32> {
        entry.ok()?.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok()
    };
    let numbers: Vec<u32> = fs::read_dir(LIST).into_iter().flatten().filter_map(number).collect();
    let found = command(move |control| {
        let of = |number| control.info(number).ok().map(|info| (number, info.own));
        Ok(numbers.into_iter().filter_map(of).collect::<Vec<_>>())
    });
    found.unwrap_or_default().into_iter().filter(|(_, mark)| is_ours(*mark)).collect()
}

/// The device of a record. `None`: the driver does not have it any more.
fn info(record: &Record, index: u32) -> io::Result<Option<Info>> {
    match command(move |control| control.info(index)) {
        Ok(info) => Ok(Some(info).filter(|info| Some(info.own) == record.mark)),
        // The number is free, or there is no driver.
        Err(e)
            if e.raw_os_error() == Some(Errno::NODEV.raw_os_error())
                || e.kind() == io::ErrorKind::NotFound =>
        {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// See [`super::kernel::remove`].
pub(super) fn remove(record: &Record, index: u32) -> io::Result<()> {
    match info(record, index)? {
        Some(_) => end(index),
        None => Ok(()),
    }
}

/// The block device goes first, with errors for what waits. The worker closes the character device then.
fn end(index: u32) -> io::Result<()> {
    command(move |control| {
        control.stop(index)?;
        control.delete(index)
    })
}

/// See [`super::kernel::clean`].
pub(super) fn clean(is_left: &impl Fn(&Name) -> bool) -> Vec<Name> {
    let names = all().into_iter().map(|(index, _)| Name { kind: Kind::Ublk, index });
    names.filter(|name| is_left(name) && end(name.index).is_ok()).collect()
}

/// See [`super::kernel::connect`].
pub(super) fn connect(shared: &Shared, record: &Record, index: u32) -> Again {
    let info = match info(record, index) {
        Ok(Some(info)) => info,
        Ok(None) => return Again::Gone,
        Err(_) => return Again::Waits,
    };
    match serve_on(shared, record, &info) {
        Ok(status) => Again::Connected(vec![status]),
        Err(e) => {
            tracing::debug!("/dev/ublkb{index} waits for a worker: {e}");
            Again::Waits
        }
    }
}

fn serve_on(shared: &Shared, record: &Record, info: &Info) -> io::Result<UnixStream> {
    let index = info.number;
    // After the end of a daemon its worker serves on.
    let asked = hand_over(shared, record.disk, &newcomer(record, index), None)?;
    if let Told::Served { pid } = asked.told {
        match info.state {
            State::Live => {}
            State::Quiesced => begin(index, pid, true)?,
            _ => begin(index, pid, false)?,
        }
        return Ok(asked.status);
    }
    match info.state {
        State::Quiesced => {}
        State::Live => return Err(io::Error::other("the driver still has the worker before")),
        _ => return give(shared, record, index, false),
    }
    match command(move |control| control.begin_recovery(index)) {
        // An earlier worker has got the device, and has ended before it said anything.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
        begun => begun?,
    }
    give(shared, record, index, true)
}

fn not_served(disk: DiskId, e: &io::Error) -> NotDone {
    let why = format!("disk {disk} cannot be had as a device: {e}");
    let help = "ferrite disk show says what the disk waits for; a disk that an earlier program serves needs \
                ferrite upgrade first"
        .to_owned();
    NotDone::Failed(Failure { why, help })
}

fn refused(disk: DiskId, told: Told) -> NotDone {
    let why = match told {
        Told::Refused(why) => why,
        _ => "its worker has said something else".to_owned(),
    };
    not_served(disk, &io::Error::other(why))
}

fn not_made(e: &io::Error) -> Failure {
    let help = match e.kind() {
        io::ErrorKind::PermissionDenied => "the daemon needs CAP_SYS_ADMIN",
        io::ErrorKind::TimedOut => "the driver does not answer: dmesg may say why",
        io::ErrorKind::Unsupported => "use the kernel's NBD client: --by nbd",
        _ => "dmesg may say why; --by nbd does not need this driver",
    };
    Failure { why: format!("the kernel makes no device: {e}"), help: help.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_tells_own_devices_from_those_of_others() {
        assert!(is_ours(mark(0)) && is_ours(mark(u64::MAX)));
        assert_ne!(mark(1_000_000), mark(2_000_000));
        assert!(!is_ours(0) && !is_ours(0x1234) && !is_ours(!0));
    }
}
