//! The thread that reads the disk's map while the disk is in use: copies come, and others leave when they are replaced.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::{Event, MemberId};
use ferrite_pool_map::{Error, Id};

use crate::disk::Disk;
use crate::member::{self, Place, Way};
use crate::set::Set;

/// The pause between two looks.
const LOOK: Duration = Duration::from_secs(3);

struct Watch {
    /// The disk.
    id: Id,
    name: String,
    way: Arc<Way>,
    sets: Vec<Weak<Set>>,
}

/// Starts the thread. It ends with the sets.
///
/// # Errors
/// The kernel's.
pub(crate) fn start(disk: &Disk, name: &str, way: Arc<Way>) -> std::io::Result<()> {
    let sets = disk.sets.iter().map(Arc::downgrade).collect();
    let watch = Watch { id: disk.map.id, name: name.to_owned(), way, sets };
    std::thread::Builder::new().name("copies".into()).spawn(move || {
        let limit = SharedLogLimit::default();
        while watch.sets.iter().any(|set| set.strong_count() > 0) {
            // etcd may be away: nothing comes or goes then.
            if let Err(why) = watch.look() {
                let name = &watch.name;
                limited!(warn, limit, SystemClock.now_ns(), "{name}: its copies stay: {why}");
            }
            std::thread::sleep(LOOK);
        }
    })?;
    Ok(())
}

impl Watch {
    fn look(&self) -> Result<(), String> {
        let words = |e: Error| e.to_string();
        let found = self.way.access.disk_now(self.way.pool, &self.name).map_err(words)?;
        // Another disk of this name has other records.
        let Some(disk) = found.filter(|disk| disk.id == self.id) else { return Ok(()) };
        for (number, ((of_map, bytes), set)) in disk.sets().zip(&self.sets).enumerate() {
            let Some(set) = set.upgrade() else { continue };
            let known: BTreeSet<MemberId> = set.places().iter().map(|place| place.member).collect();
            for copy in &of_map.copies {
                if known.contains(&MemberId(copy.member)) {
                    continue;
                }
                let place = Place::of(copy, bytes, None);
                let thread = member::start(place.clone(), self.way.clone(), Arc::downgrade(&set));
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
}
