//! From a name to an open disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ferrite_etcd::{Cluster, Settings, TlsFiles};
use ferrite_helper::{Fault, State as Held};
use ferrite_pool::{Event, Failure, MemberId, OwnerId, Record, Revision};
use ferrite_pool_map::{Access, Disk as Map, Error, State, StoredRecord};

use crate::disk::{Disk, Now, Whole};
use crate::lock::{Lock, new_owner};
use crate::luns::Luns;
use crate::member::{self, Place, Way};
use crate::records::Records;
use crate::set::Set;
use crate::{Name, copies, now, records};

/// How long a disk may take to be served. The client of the stream waits for 10 s.
const OPENING: Duration = Duration::from_secs(8);
/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// How often each set hears of the time.
const TICK: Duration = Duration::from_millis(100);
const SEE: &str = "see ferrite pool status, and whether the servers run";

/// Opens a disk, and takes it.
///
/// # Errors
/// In words for the user.
pub fn open(name: &Name) -> Result<Disk, Fault> {
    let settings = Settings {
        endpoints: name.etcd.clone(),
        tls: name.tls.clone().map(TlsFiles),
        plain: name.tls.is_none(),
        cluster: None,
    };
    let cluster = Cluster::new(&settings)
        .map_err(|e| Fault::lasting(e.to_string(), "correct the addresses of etcd"))?;
    let access = Access::new(cluster, &name.pool).map_err(|e| unreadable(&e))?;
    let state = access.state().map_err(|e| unreadable(&e))?;
    let shown = format!("pool:{}/{}", name.pool, name.disk);
    let Some(map) = state.disks.get(&name.disk).cloned() else {
        let none = Error::NoDisk { pool: name.pool.clone(), disk: name.disk.clone() };
        return Err(unreadable(&none));
    };
    let lock = Lock::take(state.pool.id, map.id, &shown, name.take_over)?;
    let records = checked(&state, name, &shown, &lock)?;
    let access = Arc::new(access);
    let luns = Arc::new(Luns::new(state.pool.id, name.fences.clone()));
    let (pool, tls) = (state.pool.id, name.tls.clone());
    let way = Arc::new(Way { access: access.clone(), pool, tls, luns });
    let me = new_owner();
    let owners = records.iter().map(|record| record.stored.owner).collect();
    let wanted = Wanted { disk: &name.disk, shown: &shown, me };
    let thread =
        |e: std::io::Error| Fault::passing(format!("no thread for {shown}: {e}"), "free memory");
    let changes = records::start(access.clone()).map_err(thread)?;
    let sets = sets(&state, &map, &wanted, &records, 0, &changes);
    // Before the first change: a successor has to know whose it was.
    lock.takes(me, &owners);
    let disk = Disk {
        name: shown.clone(),
        now: Arc::new(Now::new(Whole { map, sets })),
        access,
        read_only: name.read_only,
        has_lost: AtomicBool::new(false),
        me,
        lock,
    };
    begin(&disk, &name.disk, &way, changes).map_err(|e| {
        Fault::passing(format!("a thread of {shown} cannot be started: {e}"), "free memory")
    })?;
    match serve(&disk) {
        Ok(()) => {
            disk.lock.note(me, Held::Holds);
            Ok(disk)
        }
        Err(fault) => {
            let is_lost = disk.is_serving() == Err(Failure::Superseded);
            match (disk.lock.goes_on(), is_lost) {
                (false, _) => disk.give_back(),
                (true, true) => disk.lock.note(me, Held::Lost),
                // The next process goes on from here: no other host may have the disk meanwhile.
                (true, false) => {}
            }
            Err(fault)
        }
    }
}

fn unreadable(e: &Error) -> Fault {
    let text = e.to_string();
    match e {
        Error::NoPool(_) | Error::NoDisk { .. } => {
            Fault::lasting(text, "ferrite pool list shows the disks of a pool")
        }
        Error::Name(_) => Fault::lasting(text, "write pool:NAME/DISK"),
        Error::Odd { .. } => Fault::lasting(text, "see which program has written that key"),
        _ => Fault::passing(text, "see whether etcd runs, and has a quorum"),
    }
}

/// The records of all sets, if this process may take them.
fn checked(
    state: &State,
    name: &Name,
    shown: &str,
    lock: &Lock,
) -> Result<Vec<StoredRecord>, Fault> {
    let count = state.disks.get(&name.disk).map_or(0, |disk| disk.sets().count());
    let record = |set: usize| {
        state.records.get(&(name.disk.clone(), set)).cloned().ok_or_else(|| {
            let why = format!("the record of set {set} of {shown} is missing or odd");
            Fault::lasting(why, "see ferrite pool status")
        })
    };
    let records = (0..count).map(record).collect::<Result<Vec<_>, _>>()?;
    if name.take_over {
        return Ok(records);
    }
    // A set that was never opened is what the disk has grown by: its predecessor has not seen it yet.
    let opened = records.iter().filter(|record| record.stored.generation > 0);
    if lock.has_lost(&opened.map(|record| record.stored.owner).collect()) {
        let why = format!("{shown} was taken by another process while this disk had it");
        let help = "end the guest here: what it has in memory is no longer what the disk has; then attach it anew";
        return Err(Fault::lasting(why, help));
    }
    match records.iter().find(|record| !lock.has_ended(record.stored.owner)) {
        None => Ok(records),
        Some(_) => {
            let why = format!("{shown} is in use by another host");
            let help = format!(
                "end its user there; if that host is gone, take the disk: ferrite pool steal {}/{}",
                name.pool, name.disk
            );
            Err(Fault::passing(why, help))
        }
    }
}

/// The disk whose sets are made.
pub(crate) struct Wanted<'a> {
    pub(crate) disk: &'a str,
    /// For people.
    pub(crate) shown: &'a str,
    pub(crate) me: OwnerId,
}

/// The sets of a disk from the one with the number `first` on, before anything is taken. `found` has all records.
pub(crate) fn sets(
    state: &State,
    map: &Map,
    wanted: &Wanted<'_>,
    found: &[StoredRecord],
    first: usize,
    changes: &Records,
) -> Vec<Arc<Set>> {
    let set = |(number, ((set, bytes), record)): (
        usize,
        ((&ferrite_pool_map::Set, u64), &StoredRecord),
    )| {
        let place = |copy: &ferrite_pool_map::Copy| {
            let address = state.servers.get(&copy.server).map(|server| server.address);
            (MemberId(copy.member), Place::of(copy, bytes, address))
        };
        let places = set.copies.iter().map(place).collect();
        let called =
            (format!("{}, set {number}", wanted.shown), state.record_key(wanted.disk, number));
        let found = (Revision(record.revision.0), Record::from(&record.stored));
        Set::new(called, places, bytes, wanted.me, found, changes.clone(), now)
    };
    map.sets().zip(found).enumerate().skip(first).map(set).collect()
}

/// Makes the files of a new disk, takes the disk, and starts its threads.
fn begin(disk: &Disk, name: &str, way: &Arc<Way>, changes: Records) -> std::io::Result<()> {
    begin_sets(&disk.now.get().sets, way)?;
    copies::start(disk, name, way.clone(), changes)?;
    let now = Arc::downgrade(&disk.now);
    let ticks = std::thread::Builder::new().name("ticks".into());
    ticks.spawn(move || {
        loop {
            std::thread::sleep(TICK);
            let Some(now) = now.upgrade() else { return };
            now.get().sets.iter().for_each(|set| set.happened(Event::Tick));
        }
    })?;
    Ok(())
}

/// Makes the files of sets that no owner has opened yet, takes the sets, and starts their threads.
pub(crate) fn begin_sets(sets: &[Arc<Set>], way: &Arc<Way>) -> std::io::Result<()> {
    for set in sets {
        if set.is_new() {
            make(set, way);
        }
        let mut threads = BTreeMap::new();
        for place in set.places() {
            let thread = member::start(place.clone(), way.clone(), Arc::downgrade(set))?;
            threads.insert(place.member, thread);
        }
        set.begin(threads);
    }
    Ok(())
}

/// Makes the empty files of a set that no owner has opened yet. A server that is not there gets its copy when it is: then its
/// copy is out of sync, and filled.
fn make(set: &Arc<Set>, way: &Way) {
    std::thread::scope(|scope| {
        for place in set.places() {
            scope.spawn(move || {
                if let Err(why) = place.make(way) {
                    tracing::warn!("{}: no copy on {} yet: {why}", set.name(), place.server);
                }
            });
        }
    });
}

/// Waits until the disk is served.
fn serve(disk: &Disk) -> Result<(), Fault> {
    let until = Instant::now() + OPENING;
    loop {
        match disk.is_serving() {
            Ok(true) => return Ok(()),
            Ok(false) if Instant::now() < until => std::thread::sleep(LOOK),
            Ok(false) => {
                let why = format!("no copy of a part of {} can be reached", disk.name);
                return Err(Fault::passing(why, SEE));
            }
            Err(Failure::Superseded) => {
                let why = format!("another process has taken {} meanwhile", disk.name);
                return Err(Fault::passing(why, "see who uses it: ferrite pool status"));
            }
            Err(Failure::Incomplete) => {
                let why = format!(
                    "all servers with a copy of a part of {} were restarted while it was in use, and may have lost answered \
                     writes",
                    disk.name
                );
                return Err(Fault::lasting(why, "take the data from a backup"));
            }
            Err(Failure::NoRecord) => {
                let why = format!("a record of {} is missing", disk.name);
                return Err(Fault::lasting(why, "see ferrite pool status"));
            }
        }
    }
}
