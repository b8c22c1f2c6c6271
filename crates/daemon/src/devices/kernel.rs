//! A device as the kernel has it, of either kind, and its name.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_host::nbd_device::{self, Devices as Nbd};
use serde::{Deserialize, Serialize};

use super::{NotDone, Record, Wish, by_nbd, by_ublk, not_written};
use crate::state::DiskId;
use crate::{Failure, Shared};

/// Which driver of the kernel has a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The kernel's NBD client: `/dev/nbdN`.
    #[default]
    Nbd,
    /// The driver for block devices that a process serves: `/dev/ublkbN`.
    Ublk,
}

impl Kind {
    /// Whether it is the kind of records that name none.
    pub(super) fn is_default(&self) -> bool {
        *self == Kind::default()
    }
}

/// A device of a kind, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) kind: Kind,
    pub(crate) index: u32,
}

const NAMES: [(Kind, &str); 2] = [(Kind::Nbd, "nbd"), (Kind::Ublk, "ublkb")];

impl Name {
    /// The device of this path.
    pub(crate) fn of(path: &Path) -> Option<Name> {
        let name = path.to_str()?.strip_prefix("/dev/")?;
        NAMES.into_iter().find_map(|(kind, prefix)| {
            let number = name.strip_prefix(prefix)?;
            let index: u32 =
                number.parse().ok().filter(|index: &u32| index.to_string() == number)?;
            Some(Name { kind, index })
        })
    }

    /// Its name without a folder.
    pub(crate) fn short(self) -> String {
        let prefix = NAMES.into_iter().find(|(kind, _)| *kind == self.kind).map_or("", |(_, p)| p);
        format!("{prefix}{}", self.index)
    }

    /// The path of the device.
    pub(crate) fn path(self) -> PathBuf {
        Path::new("/dev").join(self.short())
    }

    /// The users of the device, for people.
    pub(crate) fn users(self) -> io::Result<Vec<String>> {
        nbd_device::users(&self.short())
    }
}

/// Makes a device, and returns its record and the streams whose end shows that it needs another worker or connection.
/// The record is written. If this fails nothing is left.
pub(super) fn make(
    shared: &Arc<Shared>,
    disk: DiskId,
    wish: Wish,
    owns_disk: bool,
) -> Result<(Record, Vec<UnixStream>), NotDone> {
    match wish.kind {
        Kind::Nbd => by_nbd::make(shared, disk, wish, owns_disk),
        Kind::Ublk => by_ublk::make(shared, disk, wish, owns_disk),
    }
}

/// The steps that either kind is made by: the record, the device, whose number `make` returns, and the record with that
/// number. If it is not made, there is no record.
pub(super) fn recorded(
    shared: &Shared,
    record: &mut Record,
    not_made: impl FnOnce(&io::Error) -> Failure,
    make: impl FnOnce(&mut Record) -> io::Result<u32>,
) -> Result<u32, NotDone> {
    let folder = shared.paths.devices();
    record.write(&folder).map_err(|e| NotDone::Failed(not_written(&folder, &e)))?;
    (shared.on_step)(crate::Step::DeviceRecorded);
    let index = make(record).map_err(|e| {
        record.remove(&folder);
        NotDone::Failed(not_made(&e))
    })?;
    (shared.on_step)(crate::Step::DeviceMade);
    record.index = Some(index);
    if let Err(e) = record.write(&folder) {
        // By its identifier or its mark the next daemon finds it all the same.
        let name = Name { kind: record.kind, index };
        tracing::warn!("the record of {} is not complete: {e}", name.path().display());
    }
    Ok(index)
}

/// Has the kernel remove a device, if it is there and is this one. It ends also if it is in use.
pub(super) fn remove(record: &Record) -> io::Result<()> {
    let Some(name) = record.device() else { return Ok(()) };
    match name.kind {
        Kind::Nbd => by_nbd::remove(record, name.index),
        Kind::Ublk => by_ublk::remove(record, name.index),
    }
}

/// Where the kernel has the devices of these records, in their order.
pub(super) fn find(records: &[Record]) -> Vec<Option<u32>> {
    let has = |kind| records.iter().any(|record| record.kind == kind);
    let nbd = match has(Kind::Nbd) {
        true => Nbd::open().and_then(|mut nbd| nbd.connected()).unwrap_or_default(),
        false => Vec::new(),
    };
    let ublk = if has(Kind::Ublk) { by_ublk::all() } else { Vec::new() };
    let place = |record: &Record| match record.kind {
        Kind::Nbd => nbd.iter().copied().find(|index| record.is_at(*index)),
        Kind::Ublk => {
            let of_mark = |(_, mark): &&(u32, u64)| Some(*mark) == record.mark;
            ublk.iter().find(of_mark).map(|(index, _)| *index)
        }
    };
    records.iter().map(place).collect()
}

/// Removes the devices that this program has made, that are not `known`, and that are not in use.
pub(super) fn clean(known: &[Name]) -> Vec<Name> {
    let is_left =
        |name: &Name| !known.contains(name) && name.users().is_ok_and(|users| users.is_empty());
    let mut removed = by_nbd::clean(&is_left);
    removed.extend(by_ublk::clean(&is_left));
    removed
}

/// The state of a device after its worker or its connections have ended.
pub(super) enum Again {
    /// It goes on. The streams show the next end.
    Connected(Vec<UnixStream>),
    /// It waits still.
    Waits,
    /// The kernel does not have it any more, since another program has removed it.
    Gone,
}

/// Gives a device another worker or other connections.
pub(super) fn connect(shared: &Shared, record: &Record, index: u32) -> Again {
    match record.kind {
        Kind::Nbd => by_nbd::connect(shared, record, index),
        Kind::Ublk => by_ublk::connect(shared, record, index),
    }
}

/// Why the kernel has no driver of a kind.
pub(super) fn no_driver(kind: Kind, e: &io::Error) -> Failure {
    let (driver, module) = match kind {
        Kind::Nbd => ("NBD client", "nbd"),
        Kind::Ublk => ("ublk driver", "ublk_drv"),
    };
    match e.kind() {
        io::ErrorKind::NotFound => {
            let other = match kind {
                Kind::Nbd => "",
                Kind::Ublk => "; a kernel before Linux 6.5 has none of use: --by nbd",
            };
            Failure {
                why: format!("the kernel's {driver} is not loaded"),
                help: format!("load it (modprobe {module}), or have it loaded by --load{other}"),
            }
        }
        _ => Failure {
            why: format!("the kernel's {driver} cannot be asked: {e}"),
            help: "ferrite doctor shows what this kernel has".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_whole_name_only() {
        for kind in [Kind::Nbd, Kind::Ublk] {
            let name = Name { kind, index: 12 };
            assert_eq!(Name::of(&name.path()), Some(name));
        }
        for wrong in [
            "/dev/nbd",
            "/dev/nbd01",
            "/dev/nbd+1",
            "/dev/nbd1p1",
            "/dev/sda",
            "/dev/ublk0",
            "nbd0",
            "/dev/ublkb0p1",
            "/dev/ublkc0",
        ] {
            assert_eq!(Name::of(Path::new(wrong)), None, "{wrong}");
        }
    }
}
