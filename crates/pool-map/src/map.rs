//! The values of the keys, their checks, and the arithmetic from a place of a disk to a place of a set.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use ferrite_pool::wire::{RANGE_UNIT, range_bytes};

use crate::{Id, is_name};

/// Sizes of sets and stripes are multiples of these bytes.
pub const UNIT: u64 = 64 << 10;
/// The most copies of a set.
pub const MAX_COPIES: usize = 3;
/// The most sets of a segment.
pub const MAX_STRIPES: usize = 16;
/// The most segments of a disk: it grows less often by one.
pub const MAX_SEGMENTS: usize = 64;
/// The most sets of a disk. All its records change in one transaction of etcd, with others.
pub const MAX_SETS: usize = 60;
/// The most bytes of a disk (1 PiB).
pub const MAX_BYTES: u64 = 1 << 50;

/// A pool's own key. Each change of the map writes it, so there is one change at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Of this pool alone. Its other keys begin with it.
    pub id: Id,
    /// Servers that get no new copies.
    pub drained: BTreeSet<String>,
    /// Of the attempt that has written it (R11).
    pub number: u64,
}

/// A server's announcement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// Where it listens. Servers of one IP address are one host.
    pub address: SocketAddr,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes of its file system.
    pub total: u64,
    /// Of this start of its operating system.
    pub boot: String,
}

/// A LUN that the hosts' own initiators have. Copies are ranges of it. While it is in the pool, all of them are of one disk: a
/// LUN is reserved as a whole, for the host that has the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lun {
    /// Of this LUN's time in the pool. Its header has it.
    pub id: Id,
    /// Its own name, which it has on every host.
    pub wwid: String,
    /// Its device on the host that has added it.
    pub device: PathBuf,
    /// The array that it fails with: LUNs of one array are one host's.
    pub array: String,
    /// Its bytes.
    pub bytes: u64,
    /// Where the next range begins. No range is used twice.
    pub used: u64,
    /// Whether its target forgets reservations when it starts again.
    pub weak: bool,
    /// The disk that has it.
    #[serde(default)]
    pub disk: Option<Id>,
}

/// How a disk is spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Copies of each set.
    pub replicas: usize,
    /// Sets of each segment.
    pub stripes: usize,
    /// Consecutive bytes of one set.
    pub stripe_size: u64,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Of this disk alone. A later one of its name has another.
    pub id: Id,
    /// Names the command that has made it. A repeated command finds it.
    pub request: Id,
    /// How it is spread.
    pub shape: Shape,
    /// Its parts, in their order.
    pub segments: Vec<Segment>,
}

/// A part of a disk that was made at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Its bytes: those of its sets together.
    pub bytes: u64,
    /// Its sets. They take turns.
    pub sets: Vec<Set>,
}

/// Copies with equal content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Set {
    /// Those that there are.
    pub copies: Vec<Copy>,
    /// The member number of the next new copy: none is used twice.
    pub next_member: u8,
}

/// A file on a server, or a range of a LUN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// Its number in the set's record.
    pub member: u8,
    /// The server, or the LUN.
    pub server: String,
    /// Of this copy alone.
    pub id: Id,
    /// The file's name, without an ending.
    pub name: String,
    /// Another copy takes its place: it goes when that one is in sync.
    #[serde(default)]
    pub leaves: bool,
    /// Where its range of a LUN begins. `None`: it is a file on a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<u64>,
}

/// A file that is not needed any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The server that has it.
    pub server: String,
    /// The file's name.
    pub name: String,
    /// The copy's identifier. `None`: an earlier version has listed it, and no server removes it.
    #[serde(default)]
    pub id: Option<Id>,
}

impl From<Copy> for Removed {
    fn from(copy: Copy) -> Removed {
        Removed { server: copy.server, name: copy.name, id: Some(copy.id) }
    }
}

/// A place of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// The set, counted through all segments.
    pub set: usize,
    /// The byte in it.
    pub offset: u64,
    /// The bytes from there on that lie behind each other in the disk and in the set.
    pub bytes: u64,
}

impl Shape {
    /// Bytes that a disk's size is a multiple of.
    pub fn step(&self) -> u64 {
        self.stripes as u64 * self.stripe_size
    }

    /// Whether there can be such disks; else why not.
    ///
    /// # Errors
    /// A number is out of its range.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_COPIES).contains(&self.replicas) {
            return Err(format!("a disk has 1 to {MAX_COPIES} copies, and not {}", self.replicas));
        }
        if !(1..=MAX_STRIPES).contains(&self.stripes) {
            return Err(format!("a disk has 1 to {MAX_STRIPES} stripes, and not {}", self.stripes));
        }
        let is_fit =
            self.stripe_size.is_power_of_two() && (UNIT..=1 << 30).contains(&self.stripe_size);
        match is_fit {
            true => Ok(()),
            false => Err(format!(
                "a stripe is a power of two of bytes, from {UNIT} to {}, and not {}",
                1 << 30,
                self.stripe_size
            )),
        }
    }
}

impl Lun {
    /// Whether it can be one; else what is wrong.
    ///
    /// # Errors
    /// A field is out of its range.
    pub fn check(&self) -> Result<(), String> {
        let is_fit =
            |name: &str| (1..=200).contains(&name.len()) && !name.chars().any(char::is_control);
        match () {
            () if !is_name(&self.array) => Err(format!("a LUN of the array {:?}", self.array)),
            () if !is_fit(&self.wwid) => Err("a LUN without a name".to_owned()),
            () if self.used > self.bytes || !self.used.is_multiple_of(RANGE_UNIT) => {
                Err(format!("a LUN of {} bytes, of which {} are used", self.bytes, self.used))
            }
            () => Ok(()),
        }
    }
}

impl Disk {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// Its sets in their order, each with its bytes.
    pub fn sets(&self) -> impl Iterator<Item = (&Set, u64)> {
        self.segments.iter().flat_map(|segment| {
            let bytes = segment.bytes / segment.sets.len().max(1) as u64;
            segment.sets.iter().map(move |set| (set, bytes))
        })
    }

    /// Where a byte of the disk is. `None`: behind its end.
    pub fn spot(&self, at: u64) -> Option<Spot> {
        let (mut begin, mut first) = (0, 0);
        for segment in &self.segments {
            if at < begin + segment.bytes {
                let (size, sets) = (self.shape.stripe_size, segment.sets.len() as u64);
                let (stripe, within) = ((at - begin) / size, (at - begin) % size);
                let offset = stripe / sets * size + within;
                // A single set has all of its segment in one piece.
                let bytes = if sets == 1 { segment.bytes - offset } else { size - within };
                return Some(Spot { set: first + (stripe % sets) as usize, offset, bytes });
            }
            begin += segment.bytes;
            first += segment.sets.len();
        }
        None
    }

    /// Whether it is a disk as this program makes them; else what is wrong.
    ///
    /// # Errors
    /// A field is out of its range, or contradicts another one.
    pub fn check(&self) -> Result<(), String> {
        self.shape.check()?;
        if !(1..=MAX_SEGMENTS).contains(&self.segments.len()) {
            return Err(format!("{} segments", self.segments.len()));
        }
        let mut bytes = 0u64;
        for segment in &self.segments {
            bytes = bytes.saturating_add(segment.bytes);
            let is_whole = segment.bytes > 0 && segment.bytes.is_multiple_of(self.shape.step());
            if segment.sets.len() != self.shape.stripes || !is_whole || bytes > MAX_BYTES {
                return Err(format!(
                    "a segment of {} bytes with {} sets",
                    segment.bytes,
                    segment.sets.len()
                ));
            }
            segment.sets.iter().try_for_each(Set::check)?;
        }
        let ids: BTreeSet<Id> = self.copies().map(|(_, copy)| copy.id).collect();
        let names: BTreeSet<(&str, &str)> =
            self.copies().map(|(_, copy)| (copy.server.as_str(), copy.name.as_str())).collect();
        if self.sets().count() > MAX_SETS {
            return Err(format!("{} sets", self.sets().count()));
        }
        match ids.len() == self.copies().count() && names.len() == ids.len() {
            true => Ok(()),
            false => Err("two copies that are one file".to_owned()),
        }
    }

    /// All copies, each with the number of its set.
    pub fn copies(&self) -> impl Iterator<Item = (usize, &Copy)> {
        let sets = self.segments.iter().flat_map(|segment| &segment.sets).enumerate();
        sets.flat_map(|(number, set)| set.copies.iter().map(move |copy| (number, copy)))
    }

    /// A set, by its number.
    pub(crate) fn set_mut(&mut self, number: usize) -> Option<&mut Set> {
        self.segments.iter_mut().flat_map(|segment| &mut segment.sets).nth(number)
    }
}

impl Set {
    fn check(&self) -> Result<(), String> {
        // While copies are replaced there are twice as many.
        if !(1..=2 * MAX_COPIES).contains(&self.copies.len()) {
            return Err(format!("a set with {} copies", self.copies.len()));
        }
        let members: BTreeSet<u8> = self.copies.iter().map(|copy| copy.member).collect();
        let servers: BTreeSet<&str> = self.copies.iter().map(|copy| copy.server.as_str()).collect();
        let is_known = members.iter().all(|member| *member < self.next_member);
        if members.len() != self.copies.len() || servers.len() != members.len() || !is_known {
            return Err("two copies of a set with one number, or on one server".to_owned());
        }
        let is_fit = |copy: &Copy| {
            // The file's name is the disk's with numbers behind it.
            is_name(&copy.server)
                && copy.name.len() <= 64
                && copy.name.split('.').count() == 1
                && is_name(copy.name.get(..copy.name.len().min(40)).unwrap_or(""))
                && !copy.name.contains('/')
        };
        match self.copies.iter().find(|copy| !is_fit(copy)) {
            None => Ok(()),
            Some(copy) => Err(format!("a copy with the name {:?}", copy.name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(stripes: usize, stripe_size: u64, sizes: &[u64]) -> Disk {
        let mut number = 0;
        let mut copy = |server: &str| {
            number += 1;
            let id = Id::random();
            Copy {
                member: 0,
                server: server.to_owned(),
                id,
                name: format!("d-{number}"),
                leaves: false,
                start: None,
            }
        };
        let segments = sizes.iter().map(|bytes| Segment {
            bytes: *bytes,
            sets: (0..stripes).map(|_| Set { copies: vec![copy("a")], next_member: 1 }).collect(),
        });
        let segments = segments.collect();
        let shape = Shape { replicas: 1, stripes, stripe_size };
        Disk { id: Id::random(), request: Id::random(), shape, segments }
    }

    #[test]
    fn each_byte_of_a_disk_has_one_place_and_each_place_one_byte() {
        for (stripes, sizes) in [(1, &[3][..]), (3, &[6, 3]), (2, &[4, 2, 8])] {
            let sizes: Vec<u64> = sizes.iter().map(|n| n * UNIT).collect();
            let disk = disk(stripes, UNIT, &sizes);
            assert_eq!(disk.check(), Ok(()));
            let mut seen = BTreeSet::new();
            let mut at = 0;
            while let Some(spot) = disk.spot(at) {
                let (_, bytes) = disk.sets().nth(spot.set).unwrap();
                assert!(spot.bytes > 0 && spot.offset + spot.bytes <= bytes);
                for unit in 0..spot.bytes / UNIT {
                    assert!(seen.insert((spot.set, spot.offset / UNIT + unit)));
                    let within = disk.spot(at + unit * UNIT + 7).unwrap();
                    assert_eq!(
                        (within.set, within.offset),
                        (spot.set, spot.offset + unit * UNIT + 7)
                    );
                }
                at += spot.bytes;
            }
            assert_eq!((at, seen.len() as u64), (disk.bytes(), disk.bytes() / UNIT));
        }
    }

    #[test]
    fn a_disk_that_contradicts_itself_is_refused() {
        let good = disk(2, UNIT, &[4 * UNIT]);
        let breaks: [fn(&mut Disk); 10] = [
            |d| d.shape.replicas = 4,
            |d| d.shape.stripes = 3,
            |d| d.shape.stripe_size = UNIT + 1,
            |d| d.segments.clear(),
            |d| d.segments[0].bytes = MAX_BYTES * 2,
            |d| d.segments[0].bytes += UNIT,
            |d| d.segments[0].sets[0].copies.clear(),
            |d| d.segments[0].sets[0].next_member = 0,
            |d| d.segments[0].sets[0].copies[0].name = "../a".to_owned(),
            |d| d.segments[0].sets[1] = d.segments[0].sets[0].clone(),
        ];
        for (number, breaks) in breaks.iter().enumerate() {
            let mut bad = good.clone();
            breaks(&mut bad);
            assert!(bad.check().is_err(), "{number}");
        }
    }
}
