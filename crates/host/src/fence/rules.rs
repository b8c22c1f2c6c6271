//! Which host may write to a LUN: the order of commands to it, and of writes to the record. No I/O of its own.
//!
//! * A host that is registered may write. So no host registers while another one has the reservation, and a host that loses
//!   a race for it unregisters at once. Nothing of a disk is written meanwhile: a worker asks for the LUN when the last operation of
//!   the worker before it has ended.
//! * After a take there is no other registration. Those of others are preempted.
//! * A command that needs this host's key is the test of whether that is there still. Questions alone prove nothing:
//!   the answers may change before the next command.

use std::fmt;
use std::io;

use super::lun::{Abilities, Lun, Outcome, Reservation};
use super::record::{Entry, Record};
use crate::clock::{Random as _, SplitMix64};

/// A reservation that this host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The key.
    pub key: u64,
    /// Whether the LUN's target forgets the reservation when it starts again.
    pub is_weak: bool,
}

/// A reservation that this host has seized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seized {
    /// It.
    pub held: Held,
    /// Whether this host had it before. Otherwise another one may have had it until now, and may not know yet that it has not.
    pub was_ours: bool,
}

/// The state of a LUN's reservation, as the LUN reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its abilities.
    pub abilities: Abilities,
    /// The reservation.
    pub reservation: Option<Reservation>,
    /// The keys of all registrations.
    pub keys: Vec<u64>,
    /// The keys of this host.
    pub own: Vec<u64>,
}

/// Why a LUN is not this host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key of the host that has it.
    InUse(u64),
    /// It is reserved by this key in a way that is not Ferrite's.
    Foreign(u64),
    /// The disk had it, and the LUN was taken meanwhile: by the host with this key, if it is known.
    Taken(Option<u64>),
    /// Its target forgets reservations when it starts again.
    Forgetful,
    /// It has no reservations, or none of the type that is needed; the reason.
    Unsuitable(String),
    /// The record cannot be kept; the reason.
    Record(String),
    /// The LUN does not answer, or the process that asks it; the reason.
    Io(String),
}

impl Refusal {
    /// The next step for a person. `device` is the LUN's path.
    pub fn help(&self, device: &str) -> String {
        match self {
            Refusal::InUse(_) => format!(
                "end the disk on the host that has it; if that host is gone, take it: ferrite fence steal {device}"
            ),
            Refusal::Foreign(_) => format!(
                "another program reserves it: release it there, or with sg_persist; sg_persist -r {device} shows it"
            ),
            Refusal::Taken(_) => {
                format!(
                "end the guest here: what it has in memory is no longer what the disk has; then detach the disk \
                 (or, if there is none: ferrite fence release {device}), and attach it anew"
            )
            }
            Refusal::Forgetful => {
                "use a target that keeps them (LIO does, tgt does not), or say fence = \"weak-reservation\" if that \
                 target never starts again while a host is cut off"
                    .to_owned()
            }
            Refusal::Unsuitable(_) => {
                "name the LUN itself or multipath's device of it; leave fence out for other devices".to_owned()
            }
            Refusal::Record(_) => "correct the record's folder (state_folder in ferrite.toml)".to_owned(),
            Refusal::Io(_) => "check the LUN and its paths (multipath -ll); it is tried again".to_owned(),
        }
    }

    /// The words between processes: a number for the kind, and a text.
    pub(crate) fn to_words(&self) -> (i32, String) {
        match self {
            Refusal::InUse(key) => (1, format!("{key:x}")),
            Refusal::Foreign(key) => (2, format!("{key:x}")),
            Refusal::Taken(key) => (3, format!("{:x}", key.unwrap_or(0))),
            Refusal::Forgetful => (4, String::new()),
            Refusal::Unsuitable(why) => (5, why.clone()),
            Refusal::Record(why) => (6, why.clone()),
            Refusal::Io(why) => (7, why.clone()),
        }
    }

    /// From these words.
    pub(crate) fn from_words(number: i32, text: &str) -> Refusal {
        let key = u64::from_str_radix(text, 16).unwrap_or(0);
        match number {
            1 => Refusal::InUse(key),
            2 => Refusal::Foreign(key),
            3 => Refusal::Taken((key != 0).then_some(key)),
            4 => Refusal::Forgetful,
            5 => Refusal::Unsuitable(text.to_owned()),
            6 => Refusal::Record(text.to_owned()),
            _ => Refusal::Io(text.to_owned()),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::InUse(key) => write!(f, "another host has it reserved (key {key:016x})"),
            Refusal::Foreign(key) => {
                write!(f, "it is reserved in a way that is not Ferrite's (key {key:016x})")
            }
            Refusal::Taken(Some(key)) => {
                write!(f, "another host (key {key:016x}) has taken it while this disk had it")
            }
            Refusal::Taken(None) => {
                f.write_str("its reservation was taken or lost while this disk had it")
            }
            Refusal::Forgetful => {
                f.write_str("its target forgets reservations when it starts again (PTPL_C is 0)")
            }
            Refusal::Unsuitable(why) => write!(f, "it cannot be reserved: {why}"),
            Refusal::Record(why) => {
                write!(f, "the record of its reservation cannot be kept: {why}")
            }
            Refusal::Io(why) => write!(f, "its reservation cannot be had now: {why}"),
        }
    }
}

impl std::error::Error for Refusal {}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Refusal {
        match e.kind() {
            io::ErrorKind::Unsupported => Refusal::Unsuitable(e.to_string()),
            _ => Refusal::Io(e.to_string()),
        }
    }
}

/// See [`super::take`].
pub(super) fn take(lun: &dyn Lun, record: &dyn Record, weak: bool) -> Result<Held, Refusal> {
    let abilities = abilities(lun, weak)?;
    let before = entry(record)?;
    let holder = match lun.reservation()? {
        Some(Reservation { key, is_ours_by_type: false }) => return Err(Refusal::Foreign(key)),
        found => found.map(|found| found.key),
    };
    let key = match holder {
        Some(key) if before.keys.contains(&key) => go_on(lun, record, key)?,
        // It was another host's in between, or its target has forgotten it.
        holder if before.is_held => return Err(Refusal::Taken(holder)),
        Some(key) => return Err(Refusal::InUse(key)),
        None => begin(lun, record)?,
    };
    alone(lun, record, key)?;
    let persists = abilities.can_persist && lun.abilities()?.persists;
    match persists || weak {
        true => {
            set(record, &[key], true)?;
            Ok(Held { key, is_weak: !persists })
        }
        false => {
            undo(lun, record, key)?;
            Err(Refusal::Forgetful)
        }
    }
}

/// Takes a LUN that no host has reserved.
fn begin(lun: &dyn Lun, record: &dyn Record) -> Result<u64, Refusal> {
    let key = new_key();
    set(record, &[key], false)?;
    lun.register(None, key)?;
    match lun.reserve(key)? {
        Outcome::Done => Ok(key),
        Outcome::Conflict => {
            undo(lun, record, key)?;
            let holder = lun.reservation()?.map_or(0, |found| found.key);
            Err(Refusal::InUse(holder))
        }
    }
}

/// Goes on with a LUN that is reserved by this host's key. The LUN itself judges each write by the registrations that it has:
/// so nothing has to be ordered where these are right, and nothing is ordered that could lose one of them.
fn go_on(lun: &dyn Lun, record: &dyn Record, key: u64) -> Result<u64, Refusal> {
    // Of the holder it is no new order. A path that is not the holder's is in conflict, and registered all the same.
    if lun.reserve(key)? == Outcome::Done || !lun.all_paths_work() {
        return Ok(key);
    }
    // This host's port has another name now, as after a new login: its former registration is preempted like another's.
    let next = new_key();
    set(record, &[key, next], true)?;
    lun.register(None, next)?;
    match lun.preempt(next, key)? {
        Outcome::Done => {
            set(record, &[next], true)?;
            Ok(next)
        }
        Outcome::Conflict => {
            let _ = lun.register(Some(next), 0)?;
            set(record, &[key], true)?;
            Err(Refusal::Taken(lun.reservation()?.map(|found| found.key)))
        }
    }
}

/// Removes all registrations but this host's, and makes sure of the reservation.
fn alone(lun: &dyn Lun, record: &dyn Record, key: u64) -> Result<(), Refusal> {
    let mut others = lun.keys()?;
    others.retain(|other| *other != key);
    others.sort_unstable();
    others.dedup();
    for other in others {
        // In conflict: that one has gone by itself, or this host's key has, which the next question tells.
        let _ = lun.preempt(key, other)?;
    }
    match lun.reservation()? {
        Some(Reservation { key: holder, is_ours_by_type: true }) if holder == key => Ok(()),
        found => {
            undo(lun, record, key)?;
            match found {
                Some(found) => Err(Refusal::InUse(found.key)),
                None => {
                    Err(Refusal::Io("the reservation was removed while it was taken".to_owned()))
                }
            }
        }
    }
}

/// Unregisters this host, and forgets the key.
fn undo(lun: &dyn Lun, record: &dyn Record, key: u64) -> Result<(), Refusal> {
    // In conflict: it is not registered any more.
    let _ = lun.register(Some(key), 0)?;
    set(record, &[], false)
}

/// See [`super::release`].
pub(super) fn release(lun: &dyn Lun, record: &dyn Record) -> Result<(), Refusal> {
    let mut own = entry(record)?.keys;
    let holder = lun.reservation()?.filter(|found| own.contains(&found.key));
    if let Some(found) = holder {
        own.push(go_on(lun, record, found.key)?);
    }
    // LIO answers a release by a key that is not registered as if the LUN did not work, and not by a conflict.
    let registered = lun.keys()?;
    own.retain(|key| registered.contains(key));
    own.sort_unstable();
    own.dedup();
    for key in own {
        // In conflict: another host has taken it meanwhile.
        let _ = lun.release(key)?;
        let _ = lun.register(Some(key), 0)?;
    }
    set(record, &[], false)
}

/// See [`super::steal`].
pub(super) fn steal(
    lun: &dyn Lun,
    record: &dyn Record,
    weak: bool,
) -> Result<Option<u64>, Refusal> {
    abilities(lun, weak)?;
    let own = entry(record)?.keys;
    let victim = match lun.reservation()? {
        None => return Ok(None),
        Some(Reservation { key, is_ours_by_type: false }) => return Err(Refusal::Foreign(key)),
        Some(found) if own.contains(&found.key) => return Ok(None),
        Some(found) => found.key,
    };
    let key = new_key();
    set(record, &[key], false)?;
    lun.register(None, key)?;
    match lun.preempt(key, victim)? {
        Outcome::Done => {
            alone(lun, record, key)?;
            Ok(Some(victim))
        }
        Outcome::Conflict => {
            undo(lun, record, key)?;
            let why = "the reservation has changed hands meanwhile".to_owned();
            Err(Refusal::Io(why))
        }
    }
}

/// See [`super::seize`].
pub(super) fn seize(lun: &dyn Lun, record: &dyn Record, weak: bool) -> Result<Seized, Refusal> {
    let own = entry(record)?.keys;
    let was_ours = lun.reservation()?.is_some_and(|found| own.contains(&found.key));
    match take(lun, record, weak) {
        Err(Refusal::InUse(_)) => {}
        Err(Refusal::Taken(_)) => set(record, &[], false)?,
        taken => return taken.map(|held| Seized { held, was_ours }),
    }
    steal(lun, record, weak)?;
    take(lun, record, weak).map(|held| Seized { held, was_ours: false })
}

/// See [`super::status`].
pub(super) fn status(lun: &dyn Lun, record: &dyn Record) -> Result<Status, Refusal> {
    Ok(Status {
        abilities: lun.abilities()?,
        reservation: lun.reservation()?,
        keys: lun.keys()?,
        own: entry(record)?.keys,
    })
}

fn abilities(lun: &dyn Lun, weak: bool) -> Result<Abilities, Refusal> {
    let found = lun.abilities()?;
    if !found.has_type {
        let why = "it lacks the reservation Write Exclusive, Registrants Only";
        return Err(Refusal::Unsuitable(why.to_owned()));
    }
    match found.can_persist || weak {
        true => Ok(found),
        false => Err(Refusal::Forgetful),
    }
}

fn entry(record: &dyn Record) -> Result<Entry, Refusal> {
    record.get().map_err(|e| Refusal::Record(e.to_string()))
}

fn set(record: &dyn Record, keys: &[u64], is_held: bool) -> Result<(), Refusal> {
    record.set(keys, is_held).map_err(|e| Refusal::Record(e.to_string()))
}

/// A key that no other host has, and that is not 0.
fn new_key() -> u64 {
    SplitMix64::from_system().next_u64().max(1)
}
