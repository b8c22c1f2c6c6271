//! The facts of all disks that the daemon needs at each event: kept with each change, so that no event walks over all
//! disks.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::path::{Path, PathBuf};

use super::{Entry, Phase};
use crate::state::DiskId;

/// How many disks there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Number of all disks.
    pub(crate) disks: u32,
    /// Number of disks that are served.
    pub(crate) served: u32,
    /// Number of disks that cannot be served now.
    pub(crate) failed: u32,
}

/// A disk's entry in the index.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    is_served: bool,
    has_failed: bool,
    /// The guest's disk that has joined this tap.
    guest: Option<DiskId>,
    file: Option<PathBuf>,
}

impl Seen {
    pub(super) fn of(entry: &Entry) -> Seen {
        Seen {
            is_served: entry.phase == Phase::Served,
            has_failed: matches!(entry.phase, Phase::Failed(_)),
            guest: entry.tap.as_ref().and_then(|tap| tap.guest),
            file: entry.file().map(Path::to_owned),
        }
    }
}

/// The disks by minor, guest, file, and whether their thread has ended.
#[derive(Debug, Default)]
pub(super) struct Index {
    counts: Counts,
    minors: BTreeSet<u32>,
    /// Guests' disks, each with the tap that serves it.
    guests: BTreeSet<(DiskId, DiskId)>,
    files: BTreeSet<(PathBuf, DiskId)>,
    /// The disks whose threads have ended.
    ended: BTreeSet<DiskId>,
}

impl Index {
    pub(super) fn insert(&mut self, id: DiskId, entry: &Entry) {
        self.counts.disks += 1;
        self.minors.insert(entry.minor);
        self.add(id, Seen::of(entry));
    }

    pub(super) fn remove(&mut self, id: DiskId, entry: &Entry) {
        self.counts.disks -= 1;
        self.minors.remove(&entry.minor);
        self.ended.remove(&id);
        self.subtract(id, Seen::of(entry));
    }

    /// Notes a change of a disk that was as `before`.
    pub(super) fn change(&mut self, id: DiskId, before: Seen, entry: &Entry) {
        if entry.has_ended() {
            self.ended.insert(id);
        }
        let now = Seen::of(entry);
        if now != before {
            self.subtract(id, before);
            self.add(id, now);
        }
    }

    fn add(&mut self, id: DiskId, seen: Seen) {
        self.counts.served += u32::from(seen.is_served);
        self.counts.failed += u32::from(seen.has_failed);
        self.guests.extend(seen.guest.map(|guest| (guest, id)));
        self.files.extend(seen.file.map(|file| (file, id)));
    }

    fn subtract(&mut self, id: DiskId, seen: Seen) {
        self.counts.served -= u32::from(seen.is_served);
        self.counts.failed -= u32::from(seen.has_failed);
        if let Some(guest) = seen.guest {
            self.guests.remove(&(guest, id));
        }
        if let Some(file) = seen.file {
            self.files.remove(&(file, id));
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn has_minor(&self, minor: u32) -> bool {
        self.minors.contains(&minor)
    }

    /// Whether a tap serves this guest's disk as its first.
    pub(super) fn is_of_tap(&self, guest: DiskId) -> bool {
        self.guests.range((guest, DiskId::FIRST)..).next().is_some_and(|(found, _)| *found == guest)
    }

    /// Whether a tap serves any guest's disk.
    pub(super) fn has_guests(&self) -> bool {
        !self.guests.is_empty()
    }

    /// The disks with this file, in order.
    pub(super) fn of_file(&self, file: &Path) -> Vec<DiskId> {
        let from = Bound::Included((file.to_owned(), DiskId::FIRST));
        let found = self.files.range((from, Bound::Unbounded));
        found.take_while(|(other, _)| other == file).map(|(_, id)| *id).collect()
    }

    /// Takes the disks whose threads have ended.
    pub(super) fn take_ended(&mut self) -> BTreeSet<DiskId> {
        std::mem::take(&mut self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Failure, Table};
    use super::*;
    use crate::params::Params;
    use crate::state::{DiskState, TapState};

    const FILES: [&str; 3] = ["/a.img", "/b.img", "/b.img#x"];

    fn disk(n: u64) -> DiskId {
        DiskId { domid: 1 + (n % 3) as u16, devid: 51712 + 16 * (n / 3 % 3) as u32 }
    }

    fn insert(table: &Table, id: DiskId) {
        let Params::Image(image) = Params::parse(b"aio:/a.img") else { panic!("an image") };
        let state = DiskState::new(id, &image, 0).with_tap(Some(TapState::default()));
        let start = |_, _| Ok(std::thread::spawn(|| ()));
        table.insert(id, Some(image), Some(&state), |_| false, start).unwrap();
    }

    /// Compares the index with a walk over all disks.
    fn check(table: &Table) {
        let counts = table.read(|disks| {
            let count = |is: fn(&Phase) -> bool| {
                disks.values().filter(|entry| is(&entry.phase)).count() as u32
            };
            let failed = count(|phase| matches!(phase, Phase::Failed(_)));
            Counts { disks: count(|_| true), served: count(|it| *it == Phase::Served), failed }
        });
        assert_eq!(table.counts(), counts);
        let guest = |entry: &Entry| entry.tap.as_ref().and_then(|tap| tap.guest);
        for id in (0..9).map(disk) {
            let is_guest = table.read(|disks| disks.values().any(|e| guest(e) == Some(id)));
            assert_eq!(table.is_of_tap(id), is_guest, "{id}");
            let is_there = table.read(|disks| disks.contains_key(&id));
            assert_eq!(table.is_known(id), is_there || is_guest, "{id}");
            let sharers: Vec<DiskId> = table.read(|disks| {
                let file = disks.get(&id).and_then(Entry::file);
                let shares = |entry: &Entry| file.is_some() && entry.file() == file;
                let others = disks.iter().filter(|(other, _)| **other != id);
                others.filter(|(_, entry)| shares(entry)).map(|(other, _)| *other).collect()
            });
            assert_eq!(table.sharers(id), sharers, "{id}");
        }
        let has_guests = table.read(|disks| disks.values().any(|entry| guest(entry).is_some()));
        assert_eq!(table.has_guests_of_taps(), has_guests);
        let minors = table.read(|disks| disks.values().map(|entry| entry.minor).collect());
        let minors: BTreeSet<u32> = minors;
        assert_eq!(minors.len() as u32, counts.disks, "each disk has a minor of its own");
    }

    #[test]
    fn what_is_asked_at_each_event_is_what_a_walk_over_all_disks_would_find() {
        let table = Table::default();
        let (mut seed, mut reaped) = (1_u64, 0);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (what, a, b) = (seed >> 60, seed >> 33 & 0xFF, seed >> 41 & 0xFF);
            let id = disk(a);
            let is_there = table.read(|disks| disks.contains_key(&id));
            match what {
                0..4 if !is_there => insert(&table, id),
                0..6 => table.set(id, Phase::Served),
                6..8 => {
                    let failure = Failure { why: "no".to_owned(), help: "none".to_owned() };
                    table.set(id, Phase::Failed(failure));
                }
                8..10 => table.change(id, |entry| {
                    entry.real = Some(FILES[b as usize % FILES.len()].into());
                }),
                10..12 => table.change(id, |entry| {
                    entry.tap = Some(TapState { guest: Some(disk(b)), ..TapState::default() });
                }),
                12 => table.change(id, |entry| entry.tap = None),
                13 => table.set(id, Phase::Starting),
                14 => table.mark_ended(id),
                _ => reaped += table.reap().len(),
            }
            check(&table);
        }
        assert!(reaped > 20, "{reaped} were reaped");
    }

    #[test]
    fn a_disk_whose_thread_has_ended_is_reaped_once() {
        let table = Table::default();
        [disk(0), disk(1)].into_iter().for_each(|id| insert(&table, id));
        assert_eq!(table.reap(), []);
        table.mark_ended(disk(1));
        table.change(disk(1), |entry| entry.starts += 1);
        assert_eq!(table.reap(), [disk(1)]);
        assert_eq!(table.reap(), []);
        assert_eq!(table.counts().disks, 1);
    }
}
