//! Which servers get new copies: the emptiest first, and each copy of a set on a host of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::map::{Copy, Disk, Pool, Server, Set};
use crate::{Id, MAX_COPIES};

/// A server that may get copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Its name.
    pub server: String,
    /// Its host.
    pub host: IpAddr,
    /// Bytes that are not promised to any copy.
    pub bytes: u64,
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
    /// What each has to have.
    pub bytes: u64,
}

/// The room of each server that answers and is not drained. Copies are thin, so what they may still grow to counts.
pub fn rooms<'a>(
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
        Room { server: name.clone(), host: server.address.ip(), bytes }
    };
    open.map(room).collect()
}

/// Finds hosts for `wanted` copies of `bytes` each, beside those that have one, and takes the room.
fn take(
    rooms: &mut [Room],
    taken: &BTreeSet<IpAddr>,
    wanted: usize,
    bytes: u64,
) -> Result<Vec<String>, NoRoom> {
    let mut hosts = taken.clone();
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    // Of equal ones the first by name, so the same servers are found again.
    order.sort_by_key(|i| (std::cmp::Reverse(rooms[*i].bytes), rooms[*i].server.clone()));
    let fits = |i: &usize| rooms[*i].bytes >= bytes && hosts.insert(rooms[*i].host);
    let chosen: Vec<usize> = order.into_iter().filter(fits).take(wanted).collect();
    if chosen.len() < wanted {
        return Err(NoRoom { wanted, found: chosen.len(), bytes });
    }
    let chosen = chosen.into_iter().map(|i| {
        rooms[i].bytes -= bytes;
        rooms[i].server.clone()
    });
    Ok(chosen.collect())
}

/// A new set of a disk, with the number `set`.
pub(crate) fn new_set(
    rooms: &mut [Room],
    disk: &str,
    set: usize,
    replicas: usize,
    bytes: u64,
) -> Result<Set, NoRoom> {
    let servers = take(rooms, &BTreeSet::new(), replicas.min(MAX_COPIES), bytes)?;
    let mut new = Set { copies: Vec::new(), next_member: 0 };
    for server in servers {
        new.add(disk, set, server);
    }
    Ok(new)
}

/// A further copy of a set, on a host that has none. `by`: the server that is to have it.
pub(crate) fn another(
    rooms: &mut [Room],
    servers: &BTreeMap<String, Server>,
    set: &Set,
    bytes: u64,
    by: Option<&str>,
) -> Result<String, NoRoom> {
    let of = |copy: &Copy| servers.get(&copy.server).map(|server| server.address.ip());
    let hosts = set.copies.iter().filter_map(of).collect();
    // A server that does not answer has no address, but it still has its copy.
    let has = |room: &Room| set.copies.iter().any(|copy| copy.server == room.server);
    let may = |room: &Room| !has(room) && by.is_none_or(|by| by == room.server);
    let mut able: Vec<Room> = rooms.iter().filter(|room| may(room)).cloned().collect();
    let chosen = take(&mut able, &hosts, 1, bytes)?.pop().unwrap_or_default();
    if let Some(room) = rooms.iter_mut().find(|room| room.server == chosen) {
        room.bytes -= bytes;
    }
    Ok(chosen)
}

impl Set {
    /// Adds a copy under a number that was never used.
    pub(crate) fn add(&mut self, disk: &str, set: usize, server: String) {
        let member = self.next_member;
        self.next_member += 1;
        let (id, name) = (Id::random(), format!("{disk}-{set}-{member}"));
        self.copies.push(Copy { member, server, id, name, leaves: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(server: &str, host: u8, bytes: u64) -> Room {
        Room { server: server.to_owned(), host: [127, 0, 0, host].into(), bytes }
    }

    #[test]
    fn copies_are_on_different_hosts_and_the_emptiest_servers_are_first() {
        let mut rooms = [room("a", 1, 30), room("b", 1, 50), room("c", 2, 40), room("d", 3, 9)];
        let servers = |set: Set| set.copies.into_iter().map(|c| c.server).collect::<Vec<_>>();
        assert_eq!(servers(new_set(&mut rooms, "x", 0, 2, 10).unwrap()), ["b", "c"]);
        assert_eq!(servers(new_set(&mut rooms, "x", 1, 2, 30).unwrap()), ["b", "c"]);
        assert_eq!(servers(new_set(&mut rooms, "x", 2, 2, 9).unwrap()), ["a", "d"]);
        let error = new_set(&mut rooms, "x", 3, 3, 1).unwrap_err();
        assert_eq!(error, NoRoom { wanted: 3, found: 1, bytes: 1 });
    }
}
