//! The writers of a tap that has no guest: its export, and its device.
//!
//! Two writers that do not know of each other destroy a file system. So the second one is refused: the export or
//! the device while there is a guest, and the guest while there is one of these. Both checks are made under the table's
//! lock. A guest that is refused joins when the last of them has ended. An export or device that was made with
//! `--shared` is not noted here.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Failure;
use crate::state::DiskId;
use crate::table::{Entry, Table};

/// A way to write to a disk beside its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Export,
    Device,
}

/// Why there is no claim.
#[derive(Debug)]
pub(crate) enum Refused {
    /// There is no such disk.
    Missing,
    /// This guest has the disk.
    OfGuest(DiskId),
}

impl Refused {
    /// The message for the user. `way` begins the advice: how to get the disk for reading.
    pub(crate) fn failure(&self, disk: DiskId, way: &str) -> Failure {
        let (why, help) = match self {
            Refused::Missing => (
                format!("disk {disk} is not attached"),
                "ferrite disk list shows the attached disks".to_owned(),
            ),
            Refused::OfGuest(guest) => (
                format!("disk {disk} is that of a guest ({guest}), which writes to it"),
                format!(
                    "{way} by --read-only; --shared has both write, for file systems that are made for that"
                ),
            ),
        };
        Failure { why, help }
    }
}

/// The claims of exports and devices.
#[derive(Default)]
pub(crate) struct Writers(Mutex<BTreeSet<(DiskId, Way)>>);

impl Writers {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<(DiskId, Way)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a disk for writing, unless a guest has it.
    pub(crate) fn claim(&self, table: &Table, disk: DiskId, way: Way) -> Result<(), Refused> {
        table.read(|disks| {
            let entry = disks.get(&disk).ok_or(Refused::Missing)?;
            match guest_of(disk, entry) {
                Some(guest) => Err(Refused::OfGuest(guest)),
                // A read-only tap has no writers.
                None if entry.tap.as_ref().is_some_and(|tap| tap.read_only) => Ok(()),
                None => {
                    self.lock().insert((disk, way));
                    Ok(())
                }
            }
        })
    }

    /// Takes up the claim that a predecessor has granted.
    pub(crate) fn restore(&self, disk: DiskId, way: Way) {
        self.lock().insert((disk, way));
    }

    /// Ends a claim, if there is one.
    pub(crate) fn release(&self, disk: DiskId, way: Way) -> bool {
        self.lock().remove(&(disk, way))
    }

    /// Why a guest may not write to a tap now. Call it under the table's lock.
    pub(crate) fn in_the_way(&self, tap: DiskId) -> Option<String> {
        let claims = self.lock();
        if claims.contains(&(tap, Way::Export)) {
            return Some(format!(
                "{tap} is exported for writing, and two writers would destroy its file system: end that by \
                 ferrite disk unexport {tap}, then the guest gets the disk by itself (ferrite disk export \
                 --read-only goes on beside a guest)"
            ));
        }
        claims.contains(&(tap, Way::Device)).then(|| {
            format!(
                "{tap} is a block device of this host that may be written, and two writers would destroy its file \
                 system: unmount and remove it (ferrite disk devices shows its name, ferrite disk device --remove \
                 removes it), then the guest gets the disk by itself"
            )
        })
    }
}

/// The guest that has the disk.
fn guest_of(disk: DiskId, entry: &Entry) -> Option<DiskId> {
    entry.tap.as_ref().map_or(Some(disk), |tap| tap.guest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Params;
    use crate::state::{DiskState, TapState};

    const TAP: DiskId = DiskId::tap(0);
    const GUEST: DiskId = DiskId { domid: 1, devid: 51712 };

    /// A table with one disk.
    fn table(id: DiskId, tap: Option<TapState>) -> Table {
        let Params::Image(image) = Params::parse(b"aio:/a.img") else { panic!("an image") };
        let (table, state) = (Table::default(), DiskState::new(id, &image, 0).with_tap(tap));
        let start = |_, _| Ok(std::thread::spawn(|| ()));
        table.insert(id, Some(image), Some(&state), |_| false, start).unwrap();
        table
    }

    #[test]
    fn a_tap_is_either_a_guests_or_written_by_others() {
        let (table, writers) = (table(TAP, Some(TapState::default())), Writers::default());
        writers.claim(&table, TAP, Way::Export).unwrap();
        writers.claim(&table, TAP, Way::Device).unwrap();
        assert!(writers.in_the_way(TAP).unwrap().contains("ferrite disk unexport tap/0"));
        assert!(writers.release(TAP, Way::Export) && !writers.release(TAP, Way::Export));
        assert!(writers.in_the_way(TAP).unwrap().contains("ferrite disk device --remove"));
        assert_eq!(writers.in_the_way(DiskId::tap(1)), None);
        assert!(writers.release(TAP, Way::Device));
        assert_eq!(writers.in_the_way(TAP), None);
        table.change(TAP, |entry| entry.tap.as_mut().unwrap().guest = Some(GUEST));
        let refused = writers.claim(&table, TAP, Way::Device).unwrap_err();
        assert!(matches!(refused, Refused::OfGuest(GUEST)), "{refused:?}");
        let refused = writers.claim(&table, DiskId::tap(1), Way::Device).unwrap_err();
        assert!(matches!(refused, Refused::Missing), "{refused:?}");
        assert_eq!(writers.in_the_way(TAP), None);
    }

    #[test]
    fn a_guests_disk_has_no_other_writer_and_a_tap_for_reading_has_none() {
        let writers = Writers::default();
        let refused = writers.claim(&table(GUEST, None), GUEST, Way::Export).unwrap_err();
        assert!(matches!(refused, Refused::OfGuest(GUEST)), "{refused:?}");
        let read = TapState { read_only: true, ..TapState::default() };
        writers.claim(&table(TAP, Some(read)), TAP, Way::Export).unwrap();
        assert_eq!(writers.in_the_way(TAP), None);
    }
}
