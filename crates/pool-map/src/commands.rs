//! The commands. Each is one transaction, decided on the keys as they are then.

use ferrite_etcd::Transaction;

use crate::map::{Disk, Lun, MAX_BYTES, MAX_SEGMENTS, Removed, Segment, Set, Shape};
use crate::place::{Ranges, another, new_set};
use crate::pool::{Access, Decided, Error, State, json};
use crate::{Id, MAX_SETS, Room, Stored, is_name, rooms};

/// A disk that is to be made.
#[derive(Clone, Debug)]
pub struct NewDisk {
    /// Its bytes. They become a whole number of stripes.
    pub bytes: u64,
    /// How it is spread.
    pub shape: Shape,
    /// Names this command. A second one with it finds what the first has made.
    pub request: Id,
    /// The servers and LUNs that get copies. Empty: the emptiest servers.
    pub on: Vec<String>,
}

/// A disk that was made or has grown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The disk.
    pub disk: Disk,
    /// Whether it was like that already.
    pub was_there: bool,
}

/// A copy that another one replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// The disk.
    pub disk: String,
    /// The set.
    pub set: usize,
    /// The server that has the copy.
    pub from: String,
    /// The server that gets one.
    pub to: String,
    /// Whether nothing has to be copied, since no owner has opened the disk yet.
    pub done: bool,
}

impl Access {
    /// Makes a disk.
    ///
    /// # Errors
    /// [`Error::Exists`] of another request, [`Error::Room`], [`Error::Refused`], [`Error::Name`], and those of etcd.
    pub fn create(&self, name: &str, new: &NewDisk) -> Result<Made, Error> {
        if !is_name(name) {
            return Err(Error::Name(name.to_owned()));
        }
        new.shape.check().map_err(Error::Refused)?;
        let bytes = rounded(new.bytes, &new.shape)?;
        self.change(|state| {
            if let Some(disk) = state.disks.get(name) {
                return match disk.request == new.request {
                    true => Ok(Err(Made { disk: disk.clone(), was_there: true })),
                    false => Err(Error::Exists(format!("the disk {}/{name}", self.name()))),
                };
            }
            let mut disk = Disk {
                id: Id::random(),
                request: new.request,
                shape: new.shape,
                segments: Vec::new(),
            };
            let others = grow(state, name, &mut disk, bytes, &new.on)?;
            Ok(Ok(decided(state, others, Made { disk, was_there: false })))
        })
    }

    /// Makes a disk larger: it gets a further segment. Its owner sees it when it opens the disk again.
    ///
    /// # Errors
    /// [`Error::NoDisk`], [`Error::Refused`] for a smaller size, [`Error::Room`], and those of etcd.
    pub fn resize(&self, name: &str, bytes: u64) -> Result<Made, Error> {
        self.change(|state| {
            let mut disk = self.disk(state, name)?.clone();
            let (now, bytes) = (disk.bytes(), rounded(bytes, &disk.shape)?);
            if bytes == now {
                return Ok(Err(Made { disk, was_there: true }));
            }
            let more = bytes.checked_sub(now).ok_or_else(|| {
                Error::Refused(format!("a disk only grows, and {name} has {now} bytes already"))
            })?;
            let others = grow(state, name, &mut disk, more, &[])?;
            Ok(Ok(decided(state, others, Made { disk, was_there: false })))
        })
    }

    /// Removes a disk from the map. Its files are listed as not needed any more.
    ///
    /// # Errors
    /// [`Error::NoDisk`]; [`Error::Refused`] if it has an owner, and not `force`; and those of etcd.
    pub fn delete(&self, name: &str, force: bool) -> Result<(), Error> {
        self.change(|state| {
            let disk = self.disk(state, name)?;
            let mut others = Transaction::default().delete(&state.disk_key(name));
            for set in 0..disk.sets().count() {
                let record = state.record(name, set)?;
                if record.stored.owner != 0 && !force {
                    return Err(Error::Refused(format!("{name} has an owner, which may be alive")));
                }
                // An owner that takes the disk meanwhile makes this lose. An owner with the record's old revision loses
                // later.
                let key = state.record_key(name, set);
                others = others.and_when(&key, record.revision).delete(&key);
            }
            let files = disk.copies().filter(|(_, copy)| copy.start.is_none());
            let removed = files.map(|(_, copy)| Removed::from(copy.clone()));
            let removed: Vec<Removed> = removed.collect();
            let others = listed(state, others, &removed);
            Ok(Ok(decided(state, others, ())))
        })
    }

    /// Has other servers get the copies of a disk that `server` has; `by`, if it is given. A set that no owner has
    /// opened has them at once. Otherwise the old copy stays in use until the disk's owner has filled the new one.
    ///
    /// # Errors
    /// [`Error::NoDisk`], [`Error::Room`], [`Error::Refused`] if the server has no copy, and those of etcd.
    pub fn replace(
        &self,
        name: &str,
        server: &str,
        by: Option<&str>,
    ) -> Result<Vec<Replaced>, Error> {
        self.change(|state| {
            let mut disk = self.disk(state, name)?.clone();
            let has = disk.copies().filter(|(_, copy)| copy.server == server);
            let (sets, bytes): (Vec<(usize, bool)>, Vec<u64>) = (
                has.map(|(set, copy)| (set, copy.leaves)).collect(),
                disk.sets().map(|(_, bytes)| bytes).collect(),
            );
            if sets.is_empty() {
                return Err(Error::Refused(format!("{server} has no copy of {name}")));
            }
            let mut rooms = rooms(state, Some(disk.id));
            let mut ranges = Ranges::new(state, disk.id);
            let mut others = Transaction::default();
            let mut all = Vec::new();
            for (number, _) in sets.into_iter().filter(|(_, leaves)| !leaves) {
                let bytes = bytes.get(number).copied().unwrap_or(0);
                let Some(set) = disk.set_mut(number) else { continue };
                let wanted = Wanted { disk: name, set: number, server, by, bytes };
                let (replaced, changes) =
                    wanted.replace(state, (&mut rooms, &mut ranges), set, others)?;
                others = changes;
                all.push(replaced);
            }
            if all.is_empty() {
                // They are being replaced already.
                return Ok(Err(all));
            }
            let others = ranges.written(state, others).put(&state.disk_key(name), json(&disk));
            Ok(Ok(decided(state, others, all)))
        })
    }

    /// Takes a copy out of the map that another one has replaced, once the record of its set has it no more. Its file is listed as
    /// not needed any more. False: it is in use, or gone already.
    ///
    /// # Errors
    /// [`Error::NoDisk`], and those of etcd.
    pub fn retire(&self, name: &str, set: usize, member: u8) -> Result<bool, Error> {
        self.change(|state| {
            let mut disk = self.disk(state, name)?.clone();
            let record = state.record(name, set)?;
            let stored = &record.stored;
            let is_in_use = stored.in_sync.contains(&member) || stored.out.contains(&member);
            let gone = disk.set_mut(set).filter(|_| !is_in_use).and_then(|set| {
                let at = set.copies.iter().position(|copy| copy.member == member && copy.leaves)?;
                Some(set.copies.remove(at))
            });
            let Some(gone) = gone else { return Ok(Err(false)) };
            let is_file = gone.start.is_none();
            let removed = is_file.then_some(Removed::from(gone));
            let removed: Vec<Removed> = removed.into_iter().collect();
            let others = Transaction::when(&state.record_key(name, set), record.revision)
                .put(&state.disk_key(name), json(&disk));
            let others = listed(state, others, &removed);
            Ok(Ok(decided(state, others, true)))
        })
    }

    /// A server gets no new copies from now on, or does again.
    ///
    /// # Errors
    /// Those of etcd.
    pub fn set_drained(&self, server: &str, drained: bool) -> Result<(), Error> {
        if !is_name(server) {
            return Err(Error::Name(server.to_owned()));
        }
        self.change(|state| {
            let mut pool = state.pool.clone();
            let changed = match drained {
                true => pool.drained.insert(server.to_owned()),
                false => pool.drained.remove(server),
            };
            let decided = Decided { pool, others: Transaction::default(), result: () };
            Ok(if changed { Ok(decided) } else { Err(()) })
        })
    }

    /// Takes a disk from its owner, whose next change of a record loses. Until another owner opens the members, the old one may
    /// still write there. Returns whether it had one.
    ///
    /// # Errors
    /// [`Error::NoDisk`], and those of etcd.
    pub fn steal(&self, name: &str) -> Result<bool, Error> {
        self.change(|state| {
            let sets = self.disk(state, name)?.sets().count();
            let mut others = Transaction::default();
            let mut had_owner = false;
            for set in 0..sets {
                let record = state.record(name, set)?;
                had_owner |= record.stored.owner != 0;
                if record.stored.generation == 0 {
                    // No owner has it. By its generation the next owner knows that its files are to be made.
                    continue;
                }
                let stored = Stored {
                    generation: record.stored.generation + 1,
                    owner: 0,
                    nonce: Id::random().number(),
                    ..record.stored.clone()
                };
                let key = state.record_key(name, set);
                others = others.and_when(&key, record.revision).put(&key, json(&stored));
            }
            Ok(if had_owner { Ok(decided(state, others, true)) } else { Err(false) })
        })
    }

    /// Takes a LUN into the pool.
    ///
    /// # Errors
    /// [`Error::Exists`] for its name or the LUN itself, [`Error::Refused`] for what no LUN can be, and those of etcd.
    pub fn add_lun(&self, name: &str, lun: &Lun) -> Result<(), Error> {
        self.change(|state| {
            if state.luns.get(name).is_some_and(|found| found.id == lun.id) {
                return Ok(Err(()));
            }
            may_add_lun(state, name, lun)?;
            let others = Transaction::default().put(&state.lun_key(name), json(lun));
            Ok(Ok(decided(state, others, ())))
        })
    }

    /// Whether a LUN could be taken into the pool now.
    ///
    /// # Errors
    /// As [`add_lun`](Access::add_lun).
    pub fn may_add_lun(&self, name: &str, lun: &Lun) -> Result<(), Error> {
        may_add_lun(&self.state()?, name, lun)
    }

    /// Takes a LUN out of the pool that no disk has any more.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is none, or it has copies; and those of etcd.
    pub fn remove_lun(&self, name: &str) -> Result<Lun, Error> {
        self.change(|state| {
            let Some(lun) = state.luns.get(name).cloned() else {
                return Err(Error::Refused(format!("the pool {} has no LUN {name}", self.name())));
            };
            let has = |disk: &Disk| disk.copies().any(|(_, copy)| copy.server == name);
            if let Some((disk, _)) = state.disks.iter().find(|(_, disk)| has(disk)) {
                let why = format!("{name} has copies of {disk}: replace them, or delete the disk");
                return Err(Error::Refused(why));
            }
            let mut pool = state.pool.clone();
            pool.drained.remove(name);
            let others = Transaction::default().delete(&state.lun_key(name));
            Ok(Ok(Decided { pool, others, result: lun }))
        })
    }

    fn disk<'a>(&self, state: &'a State, name: &str) -> Result<&'a Disk, Error> {
        let none = || Error::NoDisk { pool: self.name().to_owned(), disk: name.to_owned() };
        state.disks.get(name).ok_or_else(none)
    }
}

fn may_add_lun(state: &State, name: &str, lun: &Lun) -> Result<(), Error> {
    if !is_name(name) {
        return Err(Error::Name(name.to_owned()));
    }
    lun.check().map_err(Error::Refused)?;
    if let Some((other, _)) = state.luns.iter().find(|(_, found)| found.wwid == lun.wwid) {
        return Err(Error::Exists(format!("the LUN {}, as {other},", lun.wwid)));
    }
    let has_copies = state.disks.values().flat_map(Disk::copies).any(|(_, it)| it.server == name);
    match state.luns.contains_key(name) || state.servers.contains_key(name) || has_copies {
        true => Err(Error::Exists(format!("a server or LUN {name}"))),
        false => Ok(()),
    }
}

/// One set's copy that is to be replaced.
struct Wanted<'a> {
    disk: &'a str,
    set: usize,
    server: &'a str,
    by: Option<&'a str>,
    bytes: u64,
}

impl Wanted<'_> {
    fn replace(
        &self,
        state: &State,
        (rooms, ranges): (&mut [Room], &mut Ranges),
        set: &mut Set,
        others: Transaction,
    ) -> Result<(Replaced, Transaction), Error> {
        let record = state.record(self.disk, self.set)?;
        let key = state.record_key(self.disk, self.set);
        let is_new = record.stored.generation == 0;
        // The copy itself does not stand against its host: a second server of that host may take it.
        let mut rest = set.clone();
        rest.copies.retain(|copy| copy.server != self.server);
        let mut able: Vec<Room> =
            rooms.iter().filter(|room| room.server != self.server).cloned().collect();
        let to = another(&mut able, state, &rest, self.bytes, self.by)?;
        if let Some(room) = rooms.iter_mut().find(|room| room.server == to) {
            room.bytes = room.bytes.saturating_sub(self.bytes);
        }
        if set.next_member == u8::MAX {
            return Err(Error::Refused(format!("{} had 255 copies of a set: copy it", self.disk)));
        }
        let mut others = others.and_when(&key, record.revision);
        if is_new {
            // No owner has opened it: all copies are empty, and equal. Its files may not be there yet.
            let (gone, stay): (Vec<_>, Vec<_>) =
                set.copies.drain(..).partition(|copy| copy.server == self.server);
            set.copies = stay;
            set.add(self.disk, self.set, to.clone(), self.bytes, ranges)?;
            let stored = Stored {
                nonce: Id::random().number(),
                ..Stored::new(set.copies.iter().map(|copy| copy.member))
            };
            others = others.put(&key, json(&stored));
            let files = gone.into_iter().filter(|copy| copy.start.is_none());
            let removed: Vec<Removed> = files.map(Removed::from).collect();
            others = listed(state, others, &removed);
        } else {
            let mut leaving = set.copies.iter_mut().filter(|copy| copy.server == self.server);
            leaving.by_ref().for_each(|copy| copy.leaves = true);
            set.add(self.disk, self.set, to.clone(), self.bytes, ranges)?;
        }
        let (disk, from) = (self.disk.to_owned(), self.server.to_owned());
        Ok((Replaced { disk, set: self.set, from, to, done: is_new }, others))
    }
}

/// Lists files that are not needed any more.
fn listed(state: &State, others: Transaction, removed: &[Removed]) -> Transaction {
    match removed.is_empty() {
        true => others,
        false => others.put(&state.removed_key(), json(&removed)),
    }
}

fn decided<T>(state: &State, others: Transaction, result: T) -> Decided<T> {
    Decided { pool: state.pool.clone(), others, result }
}

fn rounded(bytes: u64, shape: &Shape) -> Result<u64, Error> {
    match bytes.checked_next_multiple_of(shape.step()) {
        Some(whole @ 1..=MAX_BYTES) => Ok(whole),
        _ => Err(Error::Refused(format!("a disk has 1 to {MAX_BYTES} bytes, and not {bytes}"))),
    }
}

/// Adds a segment, and writes it with the records of its sets.
fn grow(
    state: &State,
    name: &str,
    disk: &mut Disk,
    bytes: u64,
    on: &[String],
) -> Result<Transaction, Error> {
    let (first, shape) = (disk.sets().count(), disk.shape);
    if disk.segments.len() >= MAX_SEGMENTS || first + shape.stripes > MAX_SETS {
        return Err(Error::Refused(format!("{name} has grown too often: copy it to a new disk")));
    }
    let mut rooms = rooms(state, Some(disk.id));
    // A LUN is given to a disk by name, and stays its.
    let is_its = |name: &str| state.luns.get(name).is_some_and(|lun| lun.disk == Some(disk.id));
    rooms.retain(|room| match on.is_empty() {
        true => !room.is_lun || is_its(&room.server),
        false => on.contains(&room.server),
    });
    let mut ranges = Ranges::new(state, disk.id);
    let mut others = Transaction::default();
    let mut sets = Vec::new();
    for number in first..first + shape.stripes {
        let each = bytes / shape.stripes as u64;
        let set = new_set(&mut rooms, name, number, (shape.replicas, each), &mut ranges)?;
        let stored = Stored {
            nonce: Id::random().number(),
            ..Stored::new(set.copies.iter().map(|copy| copy.member))
        };
        others = others.put(&state.record_key(name, number), json(&stored));
        sets.push(set);
    }
    disk.segments.push(Segment { bytes, sets });
    let others = ranges.written(state, others);
    Ok(others.put(&state.disk_key(name), json(disk)))
}
