//! A set's record as its key holds it.

use std::collections::BTreeSet;

use ferrite_etcd::Revision;
use ferrite_pool::{Generation, MemberId, OwnerId, Record};
use serde::{Deserialize, Serialize};

use crate::pool::json;

/// The content of a record's key. See [`Record`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// Counts the owners. 0: the set was never opened.
    pub generation: u64,
    /// The owner. 0: none.
    pub owner: u64,
    /// The members that have all that was answered.
    pub in_sync: BTreeSet<u8>,
    /// The members that have missed something.
    pub out: BTreeSet<u8>,
    /// Of the attempt that has written it (R11).
    pub nonce: u64,
}

/// A record and its key's revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    /// The content.
    pub stored: Stored,
    /// The revision.
    pub revision: Revision,
}

impl Stored {
    /// The record of a new set with these members.
    pub fn new(members: impl IntoIterator<Item = u8>) -> Stored {
        let in_sync = members.into_iter().collect();
        Stored { generation: 0, owner: 0, in_sync, out: BTreeSet::new(), nonce: 0 }
    }

    /// As its key has it.
    pub fn to_json(&self) -> Vec<u8> {
        json(self)
    }

    /// From a key's value.
    ///
    /// # Errors
    /// It is no record, or as [`check`](Stored::check).
    pub fn from_json(value: &[u8]) -> Result<Stored, String> {
        let stored: Stored =
            serde_json::from_slice(value).map_err(|e| format!("it is not as expected: {e}"))?;
        stored.check().map(|()| stored)
    }

    /// Whether it can be a record; else what is wrong.
    ///
    /// # Errors
    /// No member is in sync, or one is in sync and out.
    pub fn check(&self) -> Result<(), String> {
        match () {
            () if self.in_sync.is_empty() => Err("a record without a member in sync".to_owned()),
            () if !self.in_sync.is_disjoint(&self.out) => {
                Err("a record with a member that is in sync and out".to_owned())
            }
            () => Ok(()),
        }
    }
}

impl From<&Stored> for Record {
    fn from(stored: &Stored) -> Record {
        let members = |numbers: &BTreeSet<u8>| numbers.iter().map(|n| MemberId(*n)).collect();
        Record {
            generation: Generation(stored.generation),
            owner: OwnerId(stored.owner),
            in_sync: members(&stored.in_sync),
            out: members(&stored.out),
            nonce: stored.nonce,
        }
    }
}

impl From<&Record> for Stored {
    fn from(record: &Record) -> Stored {
        Stored {
            generation: record.generation.0,
            owner: record.owner.0,
            in_sync: record.in_sync.iter().map(|member| member.0).collect(),
            out: record.out.iter().map(|member| member.0).collect(),
            nonce: record.nonce,
        }
    }
}
