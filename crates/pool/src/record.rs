//! The record of a disk, and changes of it whose outcome may be unknown (R11).

use crate::rules::{Rule, Rules};
use crate::{Generation, Members, OwnerId};

/// A revision of the record's key: etcd's `mod_revision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// The owner of a disk, and the places of its copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Of the owner.
    pub generation: Generation,
    /// The owner.
    pub owner: OwnerId,
    /// The members that have all that was answered.
    pub in_sync: Members,
    /// The members that have missed something.
    pub out: Members,
    /// Says which attempt has written the record: an owner uses each number once.
    pub nonce: u64,
}

/// The known outcome of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It was carried out; the key has this revision.
    Won(Revision),
    /// The key had another revision: this one, with this record.
    Lost(Revision, Record),
    /// It was carried out, or is going to be, or never.
    Unknown,
}

/// A change of the record that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    /// The revision that it follows.
    pub(crate) compare: Revision,
    /// The record that it writes; each attempt with a nonce of its own.
    pub(crate) record: Record,
    tried: Vec<u64>,
}

/// The conclusion from an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The record is as wanted, under this revision.
    Won(Revision),
    /// Another program has changed it: this owner does not have the disk any more.
    Lost,
    /// Not known yet: the change is to be tried again as it stands now.
    Again,
    /// A test leaves R11 out: the record was read, and shows nothing of the change.
    NotSeen,
}

impl Change {
    pub(crate) fn new(compare: Revision, record: Record) -> Change {
        Change { compare, tried: vec![record.nonce], record }
    }

    /// Takes an answer. `nonce` is one that was never used.
    ///
    /// The same comparison is made by all attempts, so at most one of them is ever carried out. Once one has won, or
    /// another record is seen, all others are lost for ever.
    pub(crate) fn said(&mut self, said: Said, nonce: u64, rules: Rules) -> Settled {
        match said {
            Said::Won(revision) => Settled::Won(revision),
            Said::Lost(revision, record) => {
                let is_own = record.owner == self.record.owner;
                match is_own && self.tried.contains(&record.nonce) {
                    true => Settled::Won(revision),
                    false if !rules.keep(Rule::Settle) && revision == self.compare => {
                        Settled::NotSeen
                    }
                    false => Settled::Lost,
                }
            }
            Said::Unknown => {
                self.record.nonce = nonce;
                self.tried.push(nonce);
                Settled::Again
            }
        }
    }
}
