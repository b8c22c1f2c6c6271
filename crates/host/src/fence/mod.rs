//! The reservation of a LUN that several hosts see: one host writes to it at a time, and the LUN itself refuses all others.
//!
//! A host registers a key at the LUN and takes the reservation *Write Exclusive, Registrants Only*. Registrations are of
//! a host's ports, not of its processes: they stay when processes die. So the key stands in a [record], and the
//! next process of this host that finds its key at the LUN goes on. A process of another host is refused, until a user
//! there [steals](steal) the LUN: its reservation is preempted, and not one write of the old host is executed from then
//! on.
//!
//! A keeper does this for its worker, which has no right to ([`crate::names::fence`]). `docs/internals/locks.md` has the
//! rules, [`rules`] has them as code, [`lun`] what a LUN can do.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

mod direct;
mod identity;
pub mod lun;
#[cfg(any(test, feature = "testing"))]
pub mod model;
pub mod record;
pub mod rules;
mod scsi;
#[cfg(test)]
mod tests;

pub use direct::{Direct, find, name};
use lun::Lun;
use record::FileRecord;
pub use rules::{Held, Refusal, Seized, Status};

/// The folder of records, if the host's configuration names no other.
pub const RECORDS: &str = "/var/lib/ferrite/fences";

/// How a disk's LUN is reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// A LUN whose target forgets reservations when it starts again is taken, too.
    pub weak: bool,
    /// The folder of the records of this host's keys. It outlives the host's restart.
    pub records: PathBuf,
}

/// Takes the reservation of an open LUN for this host, or goes on with it. It waits for the LUN.
///
/// # Errors
/// See [`Refusal`].
pub fn take(file: BorrowedFd<'_>, terms: &Terms) -> Result<Held, Refusal> {
    with(file, &terms.records, |lun, record| rules::take(lun, record, terms.weak))
}

/// Gives the reservation of an open LUN back, if this host has it.
///
/// # Errors
/// The LUN does not answer: it stays reserved for this host.
pub fn release(file: BorrowedFd<'_>, records: &Path) -> Result<(), Refusal> {
    with(file, records, rules::release)
}

/// Gives the reservation of a LUN back that a process of this host has left. Nothing of this host's may write to it any more.
///
/// # Errors
/// As [`release`]; the LUN is not there.
pub fn release_left(lun: &Path, records: &Path) -> Result<(), Refusal> {
    match open_alone(lun) {
        // Another disk of this host has it by now, and the reservation with it.
        Err(Errno::BUSY | Errno::AGAIN) => Ok(()),
        Err(e) => Err(Refusal::Io(e.to_string())),
        Ok(file) => release(file.as_fd(), records),
    }
}

/// Opens a LUN that no process of this host has, for an order to it: with the locks of a writer.
///
/// # Errors
/// `BUSY`, `AGAIN`: a process of this host has it. Others of the kernel.
pub fn open_alone(lun: &Path) -> rustix::io::Result<OwnedFd> {
    let is_device =
        FileType::from_raw_mode(rustix::fs::stat(lun)?.st_mode) == FileType::BlockDevice;
    let exclusively = if is_device { OFlags::EXCL } else { OFlags::empty() };
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | exclusively;
    let file = rustix::fs::open(lun, flags, Mode::empty())?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Takes the reservation of an open LUN from the host that has it. `None`: no host has it.
///
/// # Errors
/// See [`Refusal`]; the LUN has the reservation of before, or none.
pub fn steal(file: BorrowedFd<'_>, terms: &Terms) -> Result<Option<u64>, Refusal> {
    with(file, &terms.records, |lun, record| rules::steal(lun, record, terms.weak))
}

/// Takes the reservation of an open LUN for this host, whichever host has it. Whether this host may do so is decided
/// elsewhere, as by a pool's record. Nothing else of this host may write to the LUN, which is opened exclusively for
/// that. It waits for the LUN.
///
/// # Errors
/// See [`Refusal`].
pub fn seize(file: BorrowedFd<'_>, terms: &Terms) -> Result<Seized, Refusal> {
    with(file, &terms.records, |lun, record| rules::seize(lun, record, terms.weak))
}

/// The state of the LUN's reservation, as the LUN reports it.
///
/// # Errors
/// The LUN has none, or does not answer.
pub fn status(file: BorrowedFd<'_>, records: &Path) -> Result<Status, Refusal> {
    with(file, records, rules::status)
}

fn with<T>(
    file: BorrowedFd<'_>,
    records: &Path,
    what: impl FnOnce(&dyn Lun, &dyn record::Record) -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    let record = |identity: &str| {
        FileRecord::open(records, identity).map_err(|e| Refusal::Record(e.to_string()))
    };
    #[cfg(feature = "testing")]
    if let Some(lun) = model::FileLun::of(file) {
        return what(&lun, &record(&lun.identity())?);
    }
    let identity = identity::of(file).map_err(Refusal::Unsuitable)?;
    let lun = lun::open(file).map_err(|e: io::Error| Refusal::Io(e.to_string()))?;
    what(&*lun, &record(&identity)?)
}
