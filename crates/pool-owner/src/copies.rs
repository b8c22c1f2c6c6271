//! The thread that reads the disk's map while the disk is in use: copies come, others leave when they are replaced, and the disk
//! grows by further sets.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::{Event, MemberId, OwnerId};
use ferrite_pool_map::{Disk as Map, Error, Id};

use crate::disk::{Disk, Now, Whole};
use crate::member::{self, Place, Way};
use crate::open::{Wanted, begin_sets, sets};
use crate::records::Records;
use crate::set::Set;

/// The pause between two looks.
const LOOK: Duration = Duration::from_secs(3);

struct Watch {
    /// The disk.
    id: Id,
    name: String,
    /// For people.
    shown: String,
    me: OwnerId,
    way: Arc<Way>,
    now: Weak<Now>,
    changes: Records,
}

/// Starts the thread. It ends with the disk.
///
/// # Errors
/// The kernel's.
pub(crate) fn start(
    disk: &Disk,
    name: &str,
    way: Arc<Way>,
    changes: Records,
) -> std::io::Result<()> {
    let now = Arc::downgrade(&disk.now);
    let (name, shown, id) = (name.to_owned(), disk.name.clone(), disk.now.get().map.id);
    let watch = Watch { id, name, shown, me: disk.me, way, now, changes };
    std::thread::Builder::new().name("copies".into()).spawn(move || {
        let limit = SharedLogLimit::default();
        while let Some(now) = watch.now.upgrade() {
            // etcd may be away: nothing comes or goes then.
            if let Err(why) = watch.look(&now) {
                let name = &watch.name;
                limited!(warn, limit, SystemClock.now_ns(), "{name}: its copies stay: {why}");
            }
            drop(now);
            std::thread::sleep(LOOK);
        }
    })?;
    Ok(())
}

impl Watch {
    fn look(&self, now: &Now) -> Result<(), String> {
        let words = |e: Error| e.to_string();
        let found = self.way.access.disk_now(self.way.pool, &self.name).map_err(words)?;
        // Another disk of this name has other records.
        let Some(disk) = found.filter(|disk| disk.id == self.id) else { return Ok(()) };
        self.grow(now, &disk)?;
        for (number, ((of_map, bytes), set)) in disk.sets().zip(&now.get().sets).enumerate() {
            let known: BTreeSet<MemberId> = set.places().iter().map(|place| place.member).collect();
            for copy in &of_map.copies {
                if known.contains(&MemberId(copy.member)) {
                    continue;
                }
                let place = Place::of(copy, bytes, None);
                let thread = member::start(place.clone(), self.way.clone(), Arc::downgrade(set));
                set.add(place, thread.map_err(|e| e.to_string())?);
            }
            let members = |leaves: bool| {
                let copies = of_map.copies.iter().filter(move |copy| copy.leaves == leaves);
                copies.map(|copy| MemberId(copy.member)).collect()
            };
            set.happened(Event::Copies { stay: members(false), leave: members(true) });
            for copy in of_map.copies.iter().filter(|copy| copy.leaves) {
                if !set.has(MemberId(copy.member)) {
                    self.way.access.retire(&self.name, number, copy.member).map_err(words)?;
                }
            }
        }
        Ok(())
    }

    /// Takes the sets by which the disk has grown. Requests go to them, and clients learn of the size, when they are served.
    fn grow(&self, now: &Now, disk: &Map) -> Result<(), String> {
        let before = now.get();
        if disk.sets().count() > before.sets.len() {
            let state = self.way.access.state().map_err(|e| e.to_string())?;
            let record = |set| state.records.get(&(self.name.clone(), set)).cloned();
            let records: Option<Vec<_>> = (0..disk.sets().count()).map(record).collect();
            let records = records.ok_or("a record of what it has grown by is missing")?;
            let wanted = Wanted { disk: &self.name, shown: &self.shown, me: self.me };
            let new = sets(&state, disk, &wanted, &records, before.sets.len(), &self.changes);
            // They are the disk's from now on, so that they are given back with it.
            let all = before.sets.iter().chain(&new).cloned().collect();
            now.replace(Whole { map: before.map.clone(), sets: all });
            return begin_sets(&new, &self.way).map_err(|e| e.to_string());
        }
        let is_new = before.used().len() < before.sets.len();
        let serves = |set: &Arc<Set>| set.is_serving() == Ok(true);
        if is_new && before.sets.iter().skip(before.used().len()).all(serves) {
            tracing::info!("{}: it has {} bytes now", self.shown, disk.bytes());
            now.replace(Whole { map: disk.clone(), sets: before.sets.clone() });
        }
        Ok(())
    }
}
