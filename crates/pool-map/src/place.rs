//! Which servers get new copies: the emptiest first, and each copy of a set on a host of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ferrite_etcd::Transaction;

use crate::map::{Copy, Disk, Lun, Pool, Server, Set, range_bytes};
use crate::pool::{State, json};
use crate::{Id, MAX_COPIES};

/// A server that may get copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Its name.
    pub server: String,
    /// Its host.
    pub host: Host,
    /// Bytes that are not promised to any copy.
    pub bytes: u64,
    /// Whether it is a LUN: it gets copies of one disk, by name.
    pub is_lun: bool,
}

/// A unit that fails as a whole.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// The host of servers.
    Address(IpAddr),
    /// The array of LUNs.
    Array(String),
}

/// The ranges that a disk's copies get in one change of the map.
pub(crate) struct Ranges {
    luns: BTreeMap<String, Lun>,
    changed: BTreeSet<String>,
    disk: Id,
    /// How many copies each host gets.
    given: BTreeMap<Host, usize>,
}

impl Ranges {
    pub(crate) fn new(state: &State, disk: Id) -> Ranges {
        let given = BTreeMap::new();
        Ranges { luns: state.luns.clone(), changed: BTreeSet::new(), disk, given }
    }

    /// Where a copy of this size begins, if this is a LUN.
    fn take(&mut self, name: &str, size: u64) -> Result<Option<u64>, NoRoom> {
        let Some(lun) = self.luns.get_mut(name) else { return Ok(None) };
        let (start, bytes) = (lun.used, range_bytes(size));
        let end = start.checked_add(bytes).filter(|end| *end <= lun.bytes);
        lun.used = end.ok_or(NoRoom { wanted: 1, found: 0, bytes })?;
        lun.disk = Some(self.disk);
        self.changed.insert(name.to_owned());
        Ok(Some(start))
    }

    /// The change with what the LUNs have become.
    pub(crate) fn written(&self, state: &State, others: Transaction) -> Transaction {
        self.changed.iter().fold(others, |others, name| {
            others.put(&state.lun_key(name), json(&self.luns.get(name)))
        })
    }
}

/// There are too few hosts with enough room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more hosts are needed that have {bytes} free bytes, and {found} of those that answer have them"
)]
pub struct NoRoom {
    /// How many are needed.
    pub wanted: usize,
    /// How many there are.
    pub found: usize,
    /// The bytes that each has to have.
    pub bytes: u64,
}

/// The room of each server that answers, and of each LUN that `disk` has or may have; not of drained ones. Copies on servers
/// are thin, so what they may still grow to counts.
pub fn rooms(state: &State, disk: Option<Id>) -> Vec<Room> {
    let State { pool, servers, disks, luns, .. } = state;
    let may = |lun: &Lun| lun.disk.is_none() || lun.disk == disk;
    let of_luns = luns.iter().filter(|(name, lun)| !pool.drained.contains(*name) && may(lun));
    let of_luns = of_luns.map(|(name, lun)| Room {
        server: name.clone(),
        host: Host::Array(lun.array.clone()),
        bytes: lun.bytes - lun.used,
        is_lun: true,
    });
    rooms_of_servers(pool, servers, disks.values())
        .into_iter()
        .filter(|room| !luns.contains_key(&room.server))
        .chain(of_luns)
        .collect()
}

fn rooms_of_servers<'a>(
    pool: &Pool,
    servers: &BTreeMap<String, Server>,
    disks: impl Iterator<Item = &'a Disk>,
) -> Vec<Room> {
    let mut promised: BTreeMap<&str, u64> = BTreeMap::new();
    for (set, bytes) in disks.flat_map(Disk::sets) {
        for copy in &set.copies {
            let sum = promised.entry(&copy.server).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let open = servers.iter().filter(|(name, _)| !pool.drained.contains(*name));
    let room = |(name, server): (&String, &Server)| {
        let promised = promised.get(name.as_str()).copied().unwrap_or(0);
        let bytes = server.total.saturating_sub(promised).min(server.free);
        let host = Host::Address(server.address.ip());
        Room { server: name.clone(), host, bytes, is_lun: false }
    };
    open.map(room).collect()
}

/// Finds hosts for `wanted` copies of `bytes` each, beside those that have one, and takes the room. Parts of a disk that take turns
/// are of use on different hosts, so those come first that were `given` the fewest, then the emptiest.
fn take(
    rooms: &mut [Room],
    taken: &BTreeSet<Host>,
    given: &BTreeMap<Host, usize>,
    wanted: usize,
    bytes: u64,
) -> Result<Vec<String>, NoRoom> {
    let mut hosts = taken.clone();
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    // Of equal ones the first by name, so the same servers are found again.
    order.sort_by_key(|i| {
        let Room { host, bytes, server, .. } = &rooms[*i];
        (given.get(host).copied().unwrap_or(0), std::cmp::Reverse(*bytes), server.clone())
    });
    let fits = |i: &usize| {
        rooms[*i].bytes >= rooms[*i].needs(bytes) && hosts.insert(rooms[*i].host.clone())
    };
    let chosen: Vec<usize> = order.into_iter().filter(fits).take(wanted).collect();
    if chosen.len() < wanted {
        return Err(NoRoom { wanted, found: chosen.len(), bytes });
    }
    let chosen = chosen.into_iter().map(|i| {
        rooms[i].bytes -= rooms[i].needs(bytes);
        rooms[i].server.clone()
    });
    Ok(chosen.collect())
}

impl Room {
    /// The bytes that a copy of so many bytes takes.
    fn needs(&self, bytes: u64) -> u64 {
        if self.is_lun { range_bytes(bytes) } else { bytes }
    }
}

/// A new set of a disk, with the number `set`.
pub(crate) fn new_set(
    rooms: &mut [Room],
    disk: &str,
    set: usize,
    (replicas, bytes): (usize, u64),
    ranges: &mut Ranges,
) -> Result<Set, NoRoom> {
    let servers = take(rooms, &BTreeSet::new(), &ranges.given, replicas.min(MAX_COPIES), bytes)?;
    for room in rooms.iter().filter(|room| servers.contains(&room.server)) {
        *ranges.given.entry(room.host.clone()).or_default() += 1;
    }
    let mut new = Set { copies: Vec::new(), next_member: 0 };
    for server in servers {
        new.add(disk, set, server, bytes, ranges)?;
    }
    Ok(new)
}

/// A further copy of a set, on a host that has none. `by`: the server that is to have it.
pub(crate) fn another(
    rooms: &mut [Room],
    state: &State,
    set: &Set,
    bytes: u64,
    by: Option<&str>,
) -> Result<String, NoRoom> {
    let of = |copy: &Copy| match state.luns.get(&copy.server) {
        Some(lun) => Some(Host::Array(lun.array.clone())),
        None => state.servers.get(&copy.server).map(|it| Host::Address(it.address.ip())),
    };
    let hosts = set.copies.iter().filter_map(of).collect();
    // A server that does not answer has no address, but it still has its copy.
    let has = |room: &Room| set.copies.iter().any(|copy| copy.server == room.server);
    // A LUN is given to a disk by name alone.
    let may = |room: &Room| !has(room) && by.map_or(!room.is_lun, |by| by == room.server);
    let mut able: Vec<Room> = rooms.iter().filter(|room| may(room)).cloned().collect();
    let chosen = take(&mut able, &hosts, &BTreeMap::new(), 1, bytes)?.pop().unwrap_or_default();
    if let Some(room) = rooms.iter_mut().find(|room| room.server == chosen) {
        room.bytes -= room.needs(bytes);
    }
    Ok(chosen)
}

impl Set {
    /// Adds a copy under a number that was never used.
    pub(crate) fn add(
        &mut self,
        disk: &str,
        set: usize,
        server: String,
        bytes: u64,
        ranges: &mut Ranges,
    ) -> Result<(), NoRoom> {
        let start = ranges.take(&server, bytes)?;
        let member = self.next_member;
        self.next_member += 1;
        let id = Id::random();
        // With a part of its identifier: a later disk of this name has other files.
        let name = format!("{disk}-{set}-{member}-{:08x}", id.number() >> 32);
        self.copies.push(Copy { member, server, id, name, leaves: false, start });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(server: &str, host: u8, bytes: u64) -> Room {
        let host = Host::Address([127, 0, 0, host].into());
        Room { server: server.to_owned(), host, bytes, is_lun: false }
    }

    fn no_ranges() -> Ranges {
        let (luns, changed, given) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Ranges { luns, changed, disk: Id::random(), given }
    }

    #[test]
    fn parts_that_take_turns_are_on_different_hosts_while_these_have_room() {
        let mut rooms = [room("a", 1, 30), room("b", 2, 90)];
        let mut ranges = no_ranges();
        let mut part = |number| {
            let set = new_set(&mut rooms, "x", number, (1, 20), &mut ranges).unwrap();
            set.copies[0].server.clone()
        };
        assert_eq!([0, 1, 2].map(&mut part), ["b", "a", "b"]);
        assert_eq!(part(3), "b");
    }

    #[test]
    fn copies_are_on_different_hosts_and_the_emptiest_servers_are_first() {
        let mut rooms = [room("a", 1, 30), room("b", 1, 50), room("c", 2, 40), room("d", 3, 9)];
        let mut ranges = no_ranges();
        let servers = |set: Set| set.copies.into_iter().map(|c| c.server).collect::<Vec<_>>();
        assert_eq!(servers(new_set(&mut rooms, "x", 0, (2, 10), &mut ranges).unwrap()), ["b", "c"]);
        assert_eq!(servers(new_set(&mut rooms, "x", 1, (2, 30), &mut ranges).unwrap()), ["b", "c"]);
        assert_eq!(servers(new_set(&mut rooms, "x", 2, (2, 9), &mut ranges).unwrap()), ["d", "a"]);
        let error = new_set(&mut rooms, "x", 3, (3, 1), &mut ranges).unwrap_err();
        assert_eq!(error, NoRoom { wanted: 3, found: 1, bytes: 1 });
    }

    #[test]
    fn ranges_of_a_lun_are_given_once_and_end_with_it() {
        let (id, disk) = (Id::random(), Id::random());
        let lun = Lun {
            id,
            wwid: "naa.1".to_owned(),
            device: "/dev/x".into(),
            array: "lun".to_owned(),
            bytes: 10 << 20,
            used: 1 << 20,
            weak: false,
            disk: None,
        };
        let luns = [("l".to_owned(), lun)].into();
        let mut ranges = Ranges { luns, disk, ..no_ranges() };
        assert_eq!(ranges.take("l", 1 << 20), Ok(Some(1 << 20)));
        assert_eq!(ranges.take("l", (1 << 20) + 512), Ok(Some(3 << 20)));
        assert_eq!(ranges.take("a", 1 << 40), Ok(None));
        assert!(ranges.take("l", 4 << 20).is_err());
        assert_eq!(ranges.take("l", 3 << 20), Ok(Some(6 << 20)));
        assert_eq!((ranges.luns["l"].used, ranges.luns["l"].disk), (10 << 20, Some(disk)));
    }
}
