//! The keys of a pool: read together, and changed one change after the other.
//!
//! Each change of the map compares the pool's own key, and writes it. That key is never removed. So a change that has
//! lost can never be carried out later. The keys that a change was decided on were still the same when it was carried
//! out (R11).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ferrite_etcd::{Change, Cluster, Entry, Revision, Settled, Transaction};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Disk, Id, Lun, NoRoom, Pool, Removed, Server, Stored, StoredRecord, is_name};

/// How long a change may be without an outcome.
const PATIENCE: Duration = Duration::from_secs(20);
/// The wait between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// How often a change is decided anew, since another one was before it.
const MAX_LOST: usize = 50;
/// The most keys of a pool.
const MAX_KEYS: usize = 100_000;

/// Why a command has failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// etcd cannot be asked, or has refused.
    #[error(transparent)]
    Etcd(#[from] ferrite_etcd::Failure),
    /// A name that nothing may have.
    #[error("{0:?} is no name: 1 to 40 of a-z, 0-9, '-' and '_', and no '-' first")]
    Name(String),
    /// There is no such pool.
    #[error("there is no pool {0}")]
    NoPool(String),
    /// There is no such disk.
    #[error("the pool {pool} has no disk {disk}")]
    NoDisk {
        /// The pool.
        pool: String,
        /// The disk.
        disk: String,
    },
    /// There is something of this name.
    #[error("{0} is there already")]
    Exists(String),
    /// Too few servers.
    #[error(transparent)]
    Room(#[from] NoRoom),
    /// It makes no sense.
    #[error("{0}")]
    Refused(String),
    /// A key does not hold what this program writes there.
    #[error("the key {key}: {why}")]
    Odd {
        /// The key.
        key: String,
        /// The reason.
        why: String,
    },
    /// The outcome of the change is not known.
    #[error("etcd has not said whether it has carried the change out: {0}")]
    Unsettled(String),
    /// Others were faster each time.
    #[error("the map was changed by others {MAX_LOST} times meanwhile")]
    Busy,
}

/// A pool of a cluster.
pub struct Access {
    cluster: Cluster,
    name: String,
}

/// The values of a pool's keys.
#[derive(Debug)]
pub struct State {
    /// The pool.
    pub pool: Pool,
    /// Its key's revision.
    pub revision: Revision,
    /// The servers that seem alive.
    pub servers: BTreeMap<String, Server>,
    /// The LUNs.
    pub luns: BTreeMap<String, Lun>,
    /// The disks.
    pub disks: BTreeMap<String, Disk>,
    /// The records, by disk and set.
    pub records: BTreeMap<(String, usize), StoredRecord>,
    /// Files that are not needed any more.
    pub removed: Vec<Removed>,
    /// Keys that hold something else, and what is wrong.
    pub odd: Vec<(String, String)>,
}

/// A change of the map, as it was decided.
pub(crate) struct Decided<T> {
    pub(crate) pool: Pool,
    pub(crate) others: Transaction,
    pub(crate) result: T,
}

impl Access {
    /// A pool by its name. Nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::Name`].
    pub fn new(cluster: Cluster, name: &str) -> Result<Access, Error> {
        match is_name(name) {
            true => Ok(Access { cluster, name: name.to_owned() }),
            false => Err(Error::Name(name.to_owned())),
        }
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The announcement of a server of the pool with this identifier now. `None`: it announces nothing.
    ///
    /// # Errors
    /// [`Error::Etcd`], [`Error::Odd`].
    pub fn server(&self, pool: Id, name: &str) -> Result<Option<Server>, Error> {
        let entry = self.cluster.get(&format!("ferrite/{pool}/servers/{name}"))?;
        let read =
            |entry: Entry| read(&entry).map_err(|why| Error::Odd { key: entry.key.clone(), why });
        entry.map(read).transpose()
    }

    /// A LUN of the pool with this identifier, as it is now. `None`: there is none.
    ///
    /// # Errors
    /// [`Error::Etcd`], [`Error::Odd`].
    pub fn lun(&self, pool: Id, name: &str) -> Result<Option<Lun>, Error> {
        let Some(entry) = self.cluster.get(&format!("ferrite/{pool}/luns/{name}"))? else {
            return Ok(None);
        };
        let lun = read::<Lun>(&entry).and_then(|lun| lun.check().map(|()| lun));
        lun.map(Some).map_err(|why| Error::Odd { key: entry.key, why })
    }

    /// A disk of the pool with this identifier, as it is now. `None`: there is none.
    ///
    /// # Errors
    /// [`Error::Etcd`], [`Error::Odd`].
    pub fn disk_now(&self, pool: Id, name: &str) -> Result<Option<Disk>, Error> {
        let Some(entry) = self.cluster.get(&format!("ferrite/{pool}/disks/{name}"))? else {
            return Ok(None);
        };
        let disk = read::<Disk>(&entry).and_then(|disk| disk.check().map(|()| disk));
        disk.map(Some).map_err(|why| Error::Odd { key: entry.key, why })
    }

    fn key(&self) -> String {
        format!("ferrite/pools/{}", self.name)
    }

    /// Makes the pool.
    ///
    /// # Errors
    /// [`Error::Exists`], or as [`state`](Access::state).
    pub fn init(&self) -> Result<Pool, Error> {
        let pool = Pool { id: Id::random(), drained: Default::default(), number: 0 };
        match self.settle(Revision::ABSENT, &pool, Transaction::default())? {
            // The key is never removed, so the pool that has it is there for good.
            false => Err(Error::Exists(format!("the pool {}", self.name))),
            true => Ok(pool),
        }
    }

    /// Reads all keys.
    ///
    /// # Errors
    /// [`Error::Etcd`], [`Error::NoPool`], and [`Error::Odd`] about the pool's own key.
    pub fn state(&self) -> Result<State, Error> {
        // The pool's key first: a change that comes between the two makes that revision old, and what follows from it lose.
        let own = self.cluster.get(&self.key())?.ok_or(Error::NoPool(self.name.clone()))?;
        let pool: Pool = read(&own).map_err(|why| Error::Odd { key: own.key.clone(), why })?;
        let mut state = State {
            pool,
            revision: own.revision,
            servers: BTreeMap::new(),
            luns: BTreeMap::new(),
            disks: BTreeMap::new(),
            records: BTreeMap::new(),
            removed: Vec::new(),
            odd: Vec::new(),
        };
        let prefix = state.prefix();
        let mut keys = 0;
        self.cluster.list(&prefix, |entry| {
            keys += 1;
            if keys <= MAX_KEYS
                && let Err(why) = state.take(&prefix, &entry)
            {
                state.odd.push((entry.key, why));
            }
        })?;
        match keys <= MAX_KEYS {
            true => Ok(state),
            false => Err(Error::Odd { key: prefix, why: format!("more than {MAX_KEYS} keys") }),
        }
    }

    /// Decides on a change, and has it carried out. If another change was before it, it is decided anew. `None`: nothing
    /// is to be changed.
    pub(crate) fn change<T>(
        &self,
        mut decide: impl FnMut(&State) -> Result<Result<Decided<T>, T>, Error>,
    ) -> Result<T, Error> {
        for _ in 0..MAX_LOST {
            let state = self.state()?;
            if let Some((key, why)) = state.odd.first() {
                // Its meaning is unknown.
                return Err(Error::Odd { key: key.clone(), why: why.clone() });
            }
            let decided = match decide(&state)? {
                Ok(decided) => decided,
                Err(done) => return Ok(done),
            };
            if self.settle(state.revision, &decided.pool, decided.others)? {
                return Ok(decided.result);
            }
        }
        Err(Error::Busy)
    }

    /// Writes the pool's key and others, once. False: another program has changed it meanwhile, and this change is
    /// never done.
    fn settle(&self, compare: Revision, pool: &Pool, others: Transaction) -> Result<bool, Error> {
        let key = self.key();
        let value = |number| json(&Pool { number, ..pool.clone() });
        let number = |value: &[u8]| serde_json::from_slice::<Pool>(value).ok().map(|it| it.number);
        let mut change = Change::new(&key, compare, &value, &number, others);
        let until = Instant::now() + PATIENCE;
        loop {
            match change.attempt(&self.cluster, Id::random().number())? {
                Settled::Won(_) => return Ok(true),
                Settled::Lost(_) => return Ok(false),
                Settled::Unknown(why) if Instant::now() >= until => {
                    return Err(Error::Unsettled(why));
                }
                Settled::Unknown(_) => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl State {
    fn prefix(&self) -> String {
        format!("ferrite/{}/", self.pool.id)
    }

    pub(crate) fn disk_key(&self, disk: &str) -> String {
        format!("{}disks/{disk}", self.prefix())
    }

    /// The key of a set's record.
    pub fn record_key(&self, disk: &str, set: usize) -> String {
        format!("{}records/{disk}/{set}", self.prefix())
    }

    pub(crate) fn lun_key(&self, name: &str) -> String {
        format!("{}luns/{name}", self.prefix())
    }

    pub(crate) fn removed_key(&self) -> String {
        format!("{}removed/{}", self.prefix(), Id::random())
    }

    /// A record that there has to be.
    pub(crate) fn record(&self, disk: &str, set: usize) -> Result<&StoredRecord, Error> {
        self.records.get(&(disk.to_owned(), set)).ok_or_else(|| Error::Odd {
            key: self.record_key(disk, set),
            why: "it is missing, though its disk is there".to_owned(),
        })
    }

    fn take(&mut self, prefix: &str, entry: &Entry) -> Result<(), String> {
        let path: Vec<&str> = entry.key.get(prefix.len()..).unwrap_or("").split('/').collect();
        match path[..] {
            ["servers", name] if is_name(name) => {
                self.servers.insert(name.to_owned(), read(entry)?);
            }
            ["luns", name] if is_name(name) => {
                let lun: Lun = read(entry)?;
                lun.check()?;
                self.luns.insert(name.to_owned(), lun);
            }
            ["disks", name] if is_name(name) => {
                let disk: Disk = read(entry)?;
                disk.check()?;
                self.disks.insert(name.to_owned(), disk);
            }
            ["records", name, set] if is_name(name) => {
                let set = set.parse().map_err(|_| "a record of no set".to_owned())?;
                let stored: Stored = read(entry)?;
                stored.check()?;
                let record = StoredRecord { stored, revision: entry.revision };
                self.records.insert((name.to_owned(), set), record);
            }
            ["removed", _] => self.removed.extend(read::<Vec<Removed>>(entry)?),
            // Of a later version: it is left alone.
            _ => {}
        }
        Ok(())
    }
}

pub(crate) fn json(value: &impl Serialize) -> Vec<u8> {
    // These types have no maps with other keys than texts, the only thing that fails.
    serde_json::to_vec(value).unwrap_or_default()
}

pub(crate) fn read<T: DeserializeOwned>(entry: &Entry) -> Result<T, String> {
    serde_json::from_slice(&entry.value).map_err(|e| format!("it is not as expected: {e}"))
}
