//! A pool as `ferrite pool status` shows it.

use std::fmt::Write as _;

use ferrite_disk::size::Human;
use ferrite_host::fence::find;
use ferrite_pool_map::{Copy, Disk, Id, Lun, State, rooms};
use serde::Serialize;

use crate::plain::one_line;

/// A pool.
#[derive(Serialize)]
pub(super) struct Status {
    pub(super) pool: String,
    id: Id,
    servers: Vec<ServerStatus>,
    luns: Vec<LunStatus>,
    pub(super) disks: Vec<DiskStatus>,
    /// Files that are not needed any more.
    removed_files: usize,
    /// Keys of etcd that hold something else.
    odd_keys: Vec<OddKey>,
}

#[derive(Serialize)]
struct OddKey {
    key: String,
    why: String,
}

#[derive(Serialize)]
struct ServerStatus {
    name: String,
    /// None: it does not announce itself.
    address: Option<String>,
    drained: bool,
    free_bytes: Option<u64>,
    /// The room for new copies.
    room_bytes: Option<u64>,
    copies: usize,
}

#[derive(Serialize)]
struct LunStatus {
    name: String,
    /// The name that it has on every host.
    wwid: String,
    array: String,
    /// Its device here. None: this host has no such LUN.
    device: Option<String>,
    bytes: u64,
    used_bytes: u64,
    /// Its target forgets reservations when it starts again.
    weak: bool,
    drained: bool,
    copies: usize,
    /// None: no disk has it. A disk that is gone has no name.
    disk: Option<String>,
}

/// A disk.
#[derive(Serialize)]
pub(super) struct DiskStatus {
    pub(super) name: String,
    id: Id,
    bytes: u64,
    replicas: usize,
    stripes: usize,
    stripe_size: u64,
    /// Whether each part has as many copies in sync as it is to have.
    pub(super) whole: bool,
    sets: Vec<SetStatus>,
}

#[derive(Serialize)]
struct SetStatus {
    set: usize,
    bytes: u64,
    generation: u64,
    owned: bool,
    copies: Vec<CopyStatus>,
}

#[derive(Serialize)]
struct CopyStatus {
    server: String,
    file: String,
    /// `in_sync`, `out` (it has missed something), `new` (nothing is there yet), or `unknown` (the record is missing).
    state: &'static str,
    leaves: bool,
    answers: bool,
}

impl Status {
    /// A pool with this state.
    pub(super) fn of(pool: &str, state: &State) -> Status {
        let disks = state.disks.iter().map(|(name, disk)| disk_status(state, name, disk));
        let odd = state.odd.iter();
        Status {
            pool: pool.to_owned(),
            id: state.pool.id,
            servers: servers(state),
            luns: luns(state),
            disks: disks.collect(),
            removed_files: state.removed.len(),
            odd_keys: odd.map(|(key, why)| OddKey { key: key.clone(), why: why.clone() }).collect(),
        }
    }
}

impl DiskStatus {
    /// The servers and LUNs whose copies are not in sync, or wait to be replaced.
    pub(super) fn not_in_sync(&self) -> Vec<String> {
        let copies = self.sets.iter().flat_map(|set| &set.copies);
        let missing = copies.filter(|copy| copy.state != "in_sync" || copy.leaves);
        let mut names: Vec<String> = missing.map(|copy| copy.server.clone()).collect();
        names.sort();
        names.dedup();
        names
    }
}

impl Status {
    /// The servers that have copies and do not announce themselves.
    pub(super) fn silent(&self) -> impl Iterator<Item = &str> {
        let is_silent = |it: &&ServerStatus| it.copies > 0 && it.address.is_none();
        self.servers.iter().filter(is_silent).map(|it| it.name.as_str())
    }
}

/// The servers that answer, and the servers that have copies.
fn servers(state: &State) -> Vec<ServerStatus> {
    let with_copies = state.disks.values().flat_map(Disk::copies).map(|(_, copy)| &copy.server);
    let mut names: Vec<&String> =
        state.servers.keys().chain(with_copies).chain(&state.pool.drained).collect();
    names.retain(|name| !state.luns.contains_key(*name));
    names.sort();
    names.dedup();
    let rooms = rooms(state, None);
    let status = |name: &String| {
        let server = state.servers.get(name);
        let has = |(_, copy): &(usize, &Copy)| copy.server == *name;
        ServerStatus {
            name: name.clone(),
            address: server.map(|server| server.address.to_string()),
            drained: state.pool.drained.contains(name),
            free_bytes: server.map(|server| server.free),
            room_bytes: rooms.iter().find(|room| room.server == *name).map(|room| room.bytes),
            copies: state.disks.values().flat_map(Disk::copies).filter(has).count(),
        }
    };
    names.into_iter().map(status).collect()
}

fn luns(state: &State) -> Vec<LunStatus> {
    let status = |(name, lun): (&String, &Lun)| {
        let has = |(_, copy): &(usize, &Copy)| copy.server == *name;
        let of = |id| state.disks.iter().find(|(_, disk)| disk.id == id);
        LunStatus {
            name: name.clone(),
            wwid: lun.wwid.clone(),
            array: lun.array.clone(),
            device: find(&lun.wwid, &lun.device).map(|it| it.display().to_string()),
            bytes: lun.bytes,
            used_bytes: lun.used,
            weak: lun.weak,
            drained: state.pool.drained.contains(name),
            copies: state.disks.values().flat_map(Disk::copies).filter(has).count(),
            disk: lun.disk.map(|id| of(id).map_or_else(String::new, |(name, _)| name.clone())),
        }
    };
    state.luns.iter().map(status).collect()
}

fn disk_status(state: &State, name: &str, disk: &Disk) -> DiskStatus {
    let sets = disk.sets().enumerate().map(|(number, (set, bytes))| {
        let record = state.records.get(&(name.to_owned(), number)).map(|record| &record.stored);
        let copy = |copy: &Copy| CopyStatus {
            server: copy.server.clone(),
            file: copy.name.clone(),
            state: match record {
                None => "unknown",
                Some(record) if record.in_sync.contains(&copy.member) => "in_sync",
                Some(record) if record.out.contains(&copy.member) => "out",
                Some(_) => "new",
            },
            leaves: copy.leaves,
            answers: match (copy.start, state.luns.get(&copy.server)) {
                (Some(_), lun) => lun.is_some_and(|it| find(&it.wwid, &it.device).is_some()),
                (None, _) => state.servers.contains_key(&copy.server),
            },
        };
        SetStatus {
            set: number,
            bytes,
            generation: record.map_or(0, |record| record.generation),
            owned: record.is_some_and(|record| record.owner != 0),
            copies: set.copies.iter().map(copy).collect(),
        }
    });
    let sets: Vec<SetStatus> = sets.collect();
    let in_sync = |set: &SetStatus| set.copies.iter().filter(|it| it.state == "in_sync").count();
    DiskStatus {
        name: name.to_owned(),
        id: disk.id,
        bytes: disk.bytes(),
        replicas: disk.shape.replicas,
        stripes: disk.shape.stripes,
        stripe_size: disk.shape.stripe_size,
        whole: sets.iter().all(|set| in_sync(set) >= disk.shape.replicas),
        sets,
    }
}

fn line(it: &DiskStatus) -> String {
    let whole = if it.whole { "" } else { ", copies are missing" };
    let (replicas, stripes) = (it.replicas, it.stripes);
    format!(
        "{:<24} {:>10}  copies: {replicas}, stripes: {stripes}{whole}\n",
        it.name,
        Human(it.bytes)
    )
}

/// The disks as text.
pub(super) fn list(disks: &[DiskStatus]) -> String {
    match disks.is_empty() {
        true => "no disks\n".to_owned(),
        false => disks.iter().map(line).collect(),
    }
}

/// A disk as text.
pub(super) fn disk(it: &DiskStatus) -> String {
    let mut out = line(it);
    for set in &it.sets {
        let owned = if set.owned { "has an owner" } else { "no owner" };
        let (number, size, generation) = (set.set, Human(set.bytes), set.generation);
        let _ = writeln!(out, "  part {number}: {size}, generation {generation}, {owned}");
        for copy in &set.copies {
            let state = match copy.state {
                "in_sync" => "in sync",
                state => state,
            };
            let leaves = if copy.leaves { ", is being replaced" } else { "" };
            let answers = if copy.answers { "" } else { "; the server does not answer" };
            let _ = writeln!(out, "    {} {}: {state}{leaves}{answers}", copy.server, copy.file);
        }
    }
    out
}

/// A pool as text.
pub(super) fn pool(it: &Status) -> String {
    let mut out = format!("pool {}: {}\n", it.pool, it.id);
    for server in &it.servers {
        let address = server.address.as_deref().unwrap_or("does not answer");
        let drained = if server.drained { ", drained" } else { "" };
        let room = match server.room_bytes {
            Some(bytes) => format!(", {} for new copies", Human(bytes)),
            None => String::new(),
        };
        let _ = writeln!(
            out,
            "server {}: {address}, copies: {}{room}{drained}",
            server.name, server.copies
        );
    }
    for lun in &it.luns {
        let device = lun.device.as_deref().unwrap_or("not on this host");
        let whose = match lun.disk.as_deref() {
            None => "no disk has it".to_owned(),
            Some("") => "of a disk that is gone".to_owned(),
            Some(disk) => format!("of {disk}, copies: {}", lun.copies),
        };
        let drained = if lun.drained { ", drained" } else { "" };
        let weak = match lun.weak {
            true => {
                ", WEAK: its target forgets reservations, two hosts may write after its restart"
            }
            false => "",
        };
        let (used, bytes) = (Human(lun.used_bytes), Human(lun.bytes));
        let (name, device, array) = (&lun.name, one_line(device), &lun.array);
        let _ = writeln!(
            out,
            "LUN {name}: {device}, {used} of {bytes} used, array {array}, {whose}{drained}{weak}"
        );
    }
    it.disks.iter().for_each(|it| out += &disk(it));
    if it.removed_files > 0 {
        let _ = writeln!(out, "files that are not needed any more: {}", it.removed_files);
    }
    for OddKey { key, why } in &it.odd_keys {
        let _ = writeln!(out, "the key {}: {}", one_line(key), one_line(why));
    }
    out
}
