//! Files that are not needed any more, and their servers, which remove them.

use ferrite_etcd::{Cluster, Entry, Transaction};

use crate::pool::{Error, json, read};
use crate::{Id, Removed};

/// The most keys that are looked at in a turn.
const MAX_KEYS: usize = 1000;

/// Has a server remove its files that are listed as not needed any more; `remove` gets the name and the identifier of each,
/// and says whether it is gone. Returns how many are.
///
/// # Errors
/// etcd's. The caller tries again later; files that were removed already stay removed.
pub fn clean(
    cluster: &Cluster,
    pool: Id,
    server: &str,
    mut remove: impl FnMut(&str, Id) -> bool,
) -> Result<usize, Error> {
    let mut entries: Vec<Entry> = Vec::new();
    cluster.list(&format!("ferrite/{pool}/removed/"), |entry| {
        if entries.len() < MAX_KEYS {
            entries.push(entry);
        }
    })?;
    let mut count = 0;
    for entry in entries {
        // A key with another value is left alone; `status` shows it.
        let Ok(all) = read::<Vec<Removed>>(&entry) else { continue };
        let listed = all.len();
        let stays = |it: &Removed| {
            let is_own = it.server == server;
            !it.id.filter(|_| is_own).is_some_and(|id| remove(&it.name, id))
        };
        let stay: Vec<Removed> = all.into_iter().filter(stays).collect();
        if stay.len() == listed {
            continue;
        }
        let change = Transaction::when(&entry.key, entry.revision);
        let change = match stay.is_empty() {
            true => change.delete(&entry.key),
            false => change.put(&entry.key, json(&stay)),
        };
        // Lost or unknown: the next look finds the entry again, and the file gone.
        cluster.commit(&change)?;
        count += listed - stay.len();
    }
    Ok(count)
}
