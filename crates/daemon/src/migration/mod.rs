//! Migrations: disks that move from the daemon of one host to that of another one.
//!
//! * `token`: which of the two hosts may write, as rules without I/O.
//! * `records`: what each host knows durably. The sender has a mark beside its image, too (`ferrite_disk::moved`).
//! * `messages`, `wire`: what they say to each other, by TLS.
//! * `receive`: the host that a disk comes to. It has the order of its durable writes.
//! * `send`: the host that a disk leaves. It has the order of its durable writes.
//! * `parents`: the copies of the parents of such a disk.
//!
//! The data go by a mirror (`crate::jobs`), to an export of the receiver's. docs/internals/migration.md says what
//! follows a crash of either side at each step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferrite_host::clock::secret;

use crate::{Failure, Shared};

pub(crate) mod messages;
mod parents;
mod receive;
pub(crate) mod records;
pub(crate) mod send;
pub mod token;
mod wire;

use records::{Incoming, Outgoing, Records};
use token::{Receiver, Sender};

/// The pause between two looks at migrations that are not over.
const LOOK: Duration = Duration::from_secs(2);

/// All migrations of this daemon.
pub(crate) struct Migrations {
    pub(crate) records: Records,
    /// Held while a migration of a disk that leaves is changed.
    leaving: Mutex<()>,
    /// Held while a migration of a disk that comes is changed. A host may send itself a disk.
    coming: Mutex<()>,
    /// The reasons why migrations do not end.
    troubles: Mutex<BTreeMap<String, Failure>>,
    /// The copies of parents that this daemon makes.
    copying: Mutex<BTreeSet<String>>,
}

impl Migrations {
    pub(crate) fn of(state_folder: &Path) -> Migrations {
        let records = Records::of(state_folder);
        let (leaving, coming, troubles, copying) = Default::default();
        Migrations { records, leaving, coming, troubles, copying }
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_in(&self) -> MutexGuard<'_, ()> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the copy of a parent is being made, or not any more.
    fn copies(&self, id: &str, begins: bool) {
        let mut copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        match begins {
            true => copying.insert(id.to_owned()),
            false => copying.remove(id),
        };
    }

    fn is_copying(&self, id: &str) -> bool {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    fn set_trouble(&self, id: &str, trouble: Option<&Failure>) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match trouble {
            Some(failure) => troubles.insert(id.to_owned(), failure.clone()),
            None => troubles.remove(id),
        };
        if let Some(failure) = trouble.filter(|failure| before.as_ref() != Some(*failure)) {
            tracing::warn!("migration {id}: {failure}; trying again");
        }
    }

    pub(crate) fn trouble(&self, id: &str) -> Option<Failure> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn no_certificates() -> Failure {
    Failure {
        why: "no folder of certificates is named".to_owned(),
        help: "set certificates below [migration] in ferrite.toml (docs/access.md), and restart the daemon".to_owned(),
    }
}

fn no_such(id: &str) -> Failure {
    let why = format!("there is no migration {id:.40}");
    Failure { why, help: "ferrite migrate list shows all".to_owned() }
}

fn new_id() -> Result<String, Failure> {
    let bytes = secret::<16>().map_err(|e| {
        let why = format!("the kernel has no random numbers: {e}");
        Failure { why, help: "try again".to_owned() }
    })?;
    Ok(messages::to_hex(&bytes))
}

/// Goes on with the migrations of earlier daemons, and listens for disks that come.
pub(crate) fn begin(shared: &Arc<Shared>) {
    let spawn = |name: &str, run: fn(&Arc<Shared>)| {
        let own = shared.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        if let Err(e) = thread.spawn(move || run(&own)) {
            tracing::error!("migrations do not go on: no thread: {e}");
        }
    };
    spawn("migrations", go_on);
    if shared.config.migration.listen.is_some() {
        spawn("migrations-at", receive::listen);
    }
}

/// Continues the migrations whose records are not finished, until the daemon ends.
fn go_on(shared: &Arc<Shared>) {
    loop {
        for record in shared.migration.records.all::<Incoming>() {
            let _one = shared.migration.change_in();
            // It may have changed meanwhile.
            let record = match shared.migration.records.read::<Incoming>(&record.id) {
                Ok(Some(record)) if record.state != Receiver::Aborted => record,
                _ => continue,
            };
            let id = record.id.clone();
            let done = if record.made { receive::ensure(shared, record).map(drop) } else { Ok(()) };
            shared.migration.set_trouble(&id, done.as_ref().err());
        }
        for record in shared.migration.records.all::<Outgoing>() {
            // An earlier daemon's copy of a parent does not go on.
            let is_left = record.is_parent && !shared.migration.is_copying(&record.id);
            let is_due =
                !record.done && (record.gives_up || is_left || record.state == Sender::Leaving);
            // The job of a disk that is attached does it.
            if is_due && shared.jobs.migrating(&record.id).is_none() {
                let done = send::settle(shared, &record.id);
                shared.migration.set_trouble(&record.id, done.as_ref().err());
            }
        }
        if shared.is_stopped(LOOK) {
            return;
        }
    }
}

/// Records an administrator's decision on a disk that is in doubt: this host has it, or the other one.
pub(crate) fn resolve(shared: &Arc<Shared>, id: &str, here: bool) -> Result<(), Failure> {
    match shared.migration.records.read::<Outgoing>(id) {
        Ok(Some(_)) => send::resolve(shared, id, here),
        _ => receive::resolve(shared, id, here).map(drop),
    }
}

/// Removes the record of a migration that is over.
pub(crate) fn forget(shared: &Shared, id: &str) -> Result<(), Failure> {
    let (_out, _in) = (shared.migration.change(), shared.migration.change_in());
    let failed = |e: std::io::Error| Failure {
        why: format!("its record cannot be removed: {e}"),
        help: "mend the state folder, and try again".to_owned(),
    };
    let going = || Failure {
        why: "it is not over".to_owned(),
        help: "ferrite migrate status shows what it waits for; ferrite migrate abort ends it"
            .to_owned(),
    };
    let records = &shared.migration.records;
    match (records.read::<Outgoing>(id), records.read::<Incoming>(id)) {
        (Ok(Some(out)), _) if !out.done => Err(going()),
        (Ok(Some(_)), _) => records.remove::<Outgoing>(id).map_err(failed),
        (_, Ok(Some(of))) if of.state == Receiver::Incoming => Err(going()),
        (_, Ok(Some(of))) => {
            receive::end(shared, &of)?;
            records.remove::<Incoming>(id).map_err(failed)
        }
        _ => Err(no_such(id)),
    }
}
