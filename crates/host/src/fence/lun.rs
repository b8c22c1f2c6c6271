//! The reservations by which a LUN orders its users: the persistent ones of SCSI (SPC-4) and NVMe, as far as they are
//! used.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::{fstat, major, minor};

use super::scsi;
use crate::names;
use crate::nvme;

/// The outcome of a command that needs the right key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was executed.
    Done,
    /// RESERVATION CONFLICT: this host is not registered with that key, or another one has the reservation.
    Conflict,
}

/// The abilities that a LUN reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Whether it has the reservation that is wanted: Write Exclusive, Registrants Only.
    pub has_type: bool,
    /// Whether it can keep reservations when its target starts again (PTPL_C).
    pub can_persist: bool,
    /// Whether it does, for what was registered last (PTPL_A).
    pub persists: bool,
}

/// The reservation of a LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The key of its holder.
    pub key: u64,
    /// Whether it is Write Exclusive, Registrants Only. Ferrite takes no other type.
    pub is_ours_by_type: bool,
}

/// A LUN as one host has it. Each call waits for the LUN, for as long as the kernel lets its commands take.
pub trait Lun {
    /// The LUN's abilities.
    ///
    /// # Errors
    /// `Unsupported`: it has no reservations. Others of the kernel; so for all of these.
    fn abilities(&self) -> io::Result<Abilities>;

    /// The present reservation.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn reservation(&self) -> io::Result<Option<Reservation>>;

    /// The keys of all registrations: one for each port of a host.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn keys(&self) -> io::Result<Vec<u64>>;

    /// Registers this host by `new` in the place of `old`, to be kept when the target starts again; `new` 0 removes the
    /// registration. `old` `None`: whatever it was registered by.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn register(&self, old: Option<u64>, new: u64) -> io::Result<Outcome>;

    /// Takes the reservation, if no other host has it.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn reserve(&self, key: u64) -> io::Result<Outcome>;

    /// Gives the reservation back.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn release(&self, key: u64) -> io::Result<Outcome>;

    /// Removes all registrations by `victim`, whose commands under way are aborted. If the reservation was its, it is
    /// this host's afterwards. In conflict if `victim` is not registered.
    ///
    /// # Errors
    /// As [`abilities`](Self::abilities).
    fn preempt(&self, own: u64, victim: u64) -> io::Result<Outcome>;

    /// Whether all paths to the LUN work. A registration goes by all of them. If one fails, device mapper takes back those of
    /// all others.
    fn all_paths_work(&self) -> bool {
        true
    }
}

/// `struct pr_registration` of linux/pr.h.
#[repr(C)]
struct PrRegistration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    pad: u32,
}

/// `struct pr_reservation`.
#[repr(C)]
struct PrReservation {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_preempt`. The kernel sends `old_key` as this host's key, and `new_key` as that of the victim.
#[repr(C)]
struct PrPreempt {
    old_key: u64,
    new_key: u64,
    kind: u32,
    flags: u32,
}

/// `_IOW('p', 200, struct pr_registration)` and those behind it.
const PR_REGISTER: libc::Ioctl = 0x4018_70c8;
const PR_RESERVE: libc::Ioctl = 0x4010_70c9;
const PR_RELEASE: libc::Ioctl = 0x4010_70ca;
const PR_PREEMPT_ABORT: libc::Ioctl = 0x4018_70cc;

/// `PR_WRITE_EXCLUSIVE_REG_ONLY`.
const WRITE_EXCLUSIVE_REGISTRANTS: u32 = 3;
/// `PR_FL_IGNORE_KEY`.
const IGNORE_KEY: u32 = 1;
/// The SCSI status of a conflict, which is the ioctls' result; and NVMe's.
const SCSI_CONFLICT: i32 = 0x18;
const NVME_CONFLICT: i32 = 0x83;

/// A block device of the kernel's: orders by `linux/pr.h`, which go through dm-multipath to all paths; questions, which pr.h
/// lacks, by commands of its own.
struct Device<'a> {
    file: BorrowedFd<'a>,
    is_nvme: bool,
    /// Its folder in sysfs.
    sysfs: String,
    /// Whether its target forgets reservations, if that is known.
    forgets: Cell<Option<bool>>,
}

/// The LUN of an open block device.
///
/// # Errors
/// It cannot be examined.
pub fn open(file: BorrowedFd<'_>) -> io::Result<Box<dyn Lun + '_>> {
    let stat = fstat(file)?;
    let number = (major(stat.st_rdev), minor(stat.st_rdev));
    let of = format!("/sys/dev/block/{}:{}", number.0, number.1);
    let name = names::read_link(&of)?;
    let first = first_path(&of).or_else(|| name.file_name()?.to_str().map(str::to_owned));
    let is_nvme = first.is_some_and(|name| name.starts_with("nvme"));
    Ok(Box::new(Device { file, is_nvme, sysfs: of, forgets: Cell::new(None) }))
}

/// The first path of a device of multipath.
fn first_path(of: &str) -> Option<String> {
    let path = names::read_dir(format!("{of}/slaves")).ok()?.find_map(Result::ok)?;
    path.file_name().into_string().ok()
}

impl Device<'_> {
    fn order<T>(&self, request: libc::Ioctl, argument: &T) -> io::Result<Outcome> {
        // SAFETY: the kernel reads one structure of the request's size, which `T` is, and it outlives the call.
        let done =
            unsafe { libc::ioctl(self.file.as_raw_fd(), request, std::ptr::from_ref(argument)) };
        match done {
            0 => Ok(Outcome::Done),
            SCSI_CONFLICT => Ok(Outcome::Conflict),
            status if status > 0 && self.is_nvme && status & 0x7ff == NVME_CONFLICT => {
                Ok(Outcome::Conflict)
            }
            status if status > 0 => Err(io::Error::other(format!(
                "the LUN refuses the command with status {status:#x}"
            ))),
            _ => match io::Error::last_os_error() {
                // The block layer's name of a conflict.
                e if e.raw_os_error() == Some(libc::EBADE) => Ok(Outcome::Conflict),
                e if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
                    Err(io::Error::new(io::ErrorKind::Unsupported, e))
                }
                e => Err(e),
            },
        }
    }
}

impl Lun for Device<'_> {
    fn abilities(&self) -> io::Result<Abilities> {
        let found = match self.is_nvme {
            true => nvme::reservation_abilities(self.file),
            false => scsi::abilities(self.file),
        }?;
        self.forgets.set(Some(!found.can_persist));
        Ok(found)
    }

    fn reservation(&self) -> io::Result<Option<Reservation>> {
        match self.is_nvme {
            true => Ok(nvme::reservations(self.file)?.0),
            false => scsi::reservation(self.file),
        }
    }

    fn keys(&self) -> io::Result<Vec<u64>> {
        match self.is_nvme {
            true => Ok(nvme::reservations(self.file)?.1),
            false => scsi::keys(self.file),
        }
    }

    fn register(&self, old: Option<u64>, new: u64) -> io::Result<Outcome> {
        let forgets = match self.forgets.get() {
            Some(forgets) => forgets,
            None => !self.abilities()?.can_persist,
        };
        // By the one path that there is: it is no LUN for several.
        if forgets && !self.is_nvme {
            return scsi::register(self.file, old, new);
        }
        let flags = if old.is_none() { IGNORE_KEY } else { 0 };
        let old_key = old.unwrap_or(0);
        self.order(PR_REGISTER, &PrRegistration { old_key, new_key: new, flags, pad: 0 })
    }

    fn reserve(&self, key: u64) -> io::Result<Outcome> {
        let kind = WRITE_EXCLUSIVE_REGISTRANTS;
        self.order(PR_RESERVE, &PrReservation { key, kind, flags: 0 })
    }

    fn release(&self, key: u64) -> io::Result<Outcome> {
        let kind = WRITE_EXCLUSIVE_REGISTRANTS;
        self.order(PR_RELEASE, &PrReservation { key, kind, flags: 0 })
    }

    fn preempt(&self, own: u64, victim: u64) -> io::Result<Outcome> {
        let kind = WRITE_EXCLUSIVE_REGISTRANTS;
        self.order(PR_PREEMPT_ABORT, &PrPreempt { old_key: own, new_key: victim, kind, flags: 0 })
    }

    fn all_paths_work(&self) -> bool {
        let paths = names::read_dir(format!("{}/slaves", self.sysfs));
        paths.into_iter().flatten().filter_map(Result::ok).all(|path| {
            let state = names::read_to_string(path.path().join("device/state"));
            state.is_ok_and(|state| matches!(state.trim(), "running" | "live"))
        })
    }
}
