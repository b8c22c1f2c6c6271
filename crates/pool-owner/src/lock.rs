//! Numbers of owners, and the last owner of a disk on this host.

use std::collections::BTreeSet;

use ferrite_helper::{Fault, Record, State};
use ferrite_pool::OwnerId;
use ferrite_pool_map::Id;

/// The files that tell hosts apart: an installation of a system, and the machine of a copy of it.
const HOST: [&str; 3] = ["/etc/machine-id", "/etc/hostname", "/sys/class/dmi/id/product_uuid"];

/// A number of this host for a new owner. Its upper half is the host's.
pub(crate) fn new_owner() -> OwnerId {
    let random = Id::random().number();
    // 0 means: no owner.
    OwnerId(host() << 32 | (random & 0xffff_ffff).max(1))
}

/// Whether an owner is, or was, a process of this host.
fn is_of_this_host(owner: u64) -> bool {
    owner != 0 && OwnerId(owner).host() == host()
}

/// 32 bits that tell hosts apart.
fn host() -> u64 {
    let all = HOST.map(|path| std::fs::read(path).unwrap_or_default());
    let hash = blake3::hash(&all.join(&b'\n'));
    hash.as_bytes().first_chunk::<4>().map_or(0, |b| u32::from_be_bytes(*b).into())
}

/// This host's record of a disk.
pub(crate) struct Lock(Option<Record>);

impl Lock {
    /// Takes the lock of a disk on this host, and waits some seconds for it. With `force` it may be another process's.
    ///
    /// # Errors
    /// Another process of this host has the disk.
    pub(crate) fn take(pool: Id, disk: Id, name: &str, force: bool) -> Result<Lock, Fault> {
        match Record::open("pool", &format!("{pool} {disk}"), name) {
            Ok(record) => Ok(Lock(Some(record))),
            Err(_) if force => Ok(Lock(None)),
            Err(fault) => Err(fault),
        }
    }

    /// Whether the owner of a record has ended: there is none, or it was a process of this host.
    pub(crate) fn has_ended(&self, owner: u64) -> bool {
        let is_alone = self.0.as_ref().is_some_and(Record::is_kept);
        owner == 0 || is_alone && is_of_this_host(owner)
    }

    /// Whether the process that this one goes on for has lost the disk: then its user has in memory what the disk has no more.
    pub(crate) fn has_lost(&self, owners: &BTreeSet<u64>) -> bool {
        match self.0.as_ref().and_then(Record::before) {
            Some((_, State::Lost)) => true,
            Some((known, State::Holds)) => {
                let known: BTreeSet<u64> = known.split(',').flat_map(str::parse).collect();
                !owners.is_subset(&known)
            }
            Some((_, State::Releases)) | None => false,
        }
    }

    /// Whether this process goes on for one that had the disk and died.
    pub(crate) fn goes_on(&self) -> bool {
        let before = self.0.as_ref().and_then(Record::before);
        before.is_some_and(|(_, state)| state == State::Holds)
    }

    /// Notes that this process takes the disk, whose sets these owners had: it may die when it has some of them.
    pub(crate) fn takes(&self, me: OwnerId, from: &BTreeSet<u64>) {
        let owners: Vec<String> = [me.0].iter().chain(from).map(u64::to_string).collect();
        self.write(&owners.join(","), State::Holds);
    }

    /// Notes how far this process is with the whole disk.
    pub(crate) fn note(&self, me: OwnerId, state: State) {
        self.write(&me.0.to_string(), state);
    }

    /// Without the note a successor only knows less.
    fn write(&self, owners: &str, state: State) {
        if let Some(Err(e)) = self.0.as_ref().map(|record| record.write(owners, state)) {
            tracing::warn!("the record of the lock of a disk cannot be written: {e}");
        }
    }
}
