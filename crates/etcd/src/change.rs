//! A change whose outcome may be unknown, until it is settled (R11).
//!
//! A transaction that got no answer was carried out, or is going to be, or never. A read proves nothing: etcd may carry it
//! out after the read. So the same comparison is sent again, with the same content under another number. If that wins, all
//! earlier attempts are lost for ever, since they compare with a revision that is gone. If it loses, the key says by its
//! number whether an earlier attempt was carried out.

use crate::{Cluster, Entry, Failure, Revision, Said, Transaction};

/// The most attempts whose numbers are kept. A change that is not settled by then is given up as unknown.
const MAX_ATTEMPTS: usize = 10_000;

/// A change of one key, and of others with it.
pub struct Change<'a> {
    key: &'a str,
    compare: Revision,
    /// The key's value with a number.
    value: &'a dyn Fn(u64) -> Vec<u8>,
    /// The number in a value.
    number: &'a dyn Fn(&[u8]) -> Option<u64>,
    /// The keys that are written with it.
    others: Transaction,
    tried: Vec<u64>,
}

/// The known outcome of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It was carried out, once; the key had this revision then.
    Won(Revision),
    /// It was not carried out, and never will be: the key holds this.
    Lost(Option<Entry>),
    /// Not known yet, and why: nothing follows from either outcome. Try again.
    Unknown(String),
}

impl<'a> Change<'a> {
    /// A change of `key`, which has the revision `compare` before it. `value` writes it with a number, and `number` reads the
    /// number of a value, also of another writer's. `others` has further comparisons and keys.
    ///
    /// A comparison with [`Revision::ABSENT`] may hold again after the key was made and removed. A change that makes a key
    /// compares one that always stays, too (the pool's own), and the removal of a key writes that one: then it does not.
    pub fn new(
        key: &'a str,
        compare: Revision,
        value: &'a dyn Fn(u64) -> Vec<u8>,
        number: &'a dyn Fn(&[u8]) -> Option<u64>,
        others: Transaction,
    ) -> Change<'a> {
        Change { key, compare, value, number, others, tried: Vec::new() }
    }

    /// Makes one attempt. `number` was never used before: a random one of 64 bits.
    ///
    /// # Errors
    /// Before the first attempt that may have been received: as [`Cluster::commit`]. Later such an error is
    /// [`Settled::Unknown`].
    pub fn attempt(&mut self, cluster: &Cluster, number: u64) -> Result<Settled, Failure> {
        if self.tried.len() >= MAX_ATTEMPTS {
            return Ok(Settled::Unknown(format!("{MAX_ATTEMPTS} attempts had no answer")));
        }
        let own = Transaction::when(self.key, self.compare).put(self.key, (self.value)(number));
        let whole = Transaction {
            compares: [own.compares, self.others.compares.clone()].concat(),
            puts: [own.puts, self.others.puts.clone()].concat(),
            deletes: self.others.deletes.clone(),
        };
        let said = match cluster.commit(&whole) {
            Ok(said) => said,
            Err(e) if self.tried.is_empty() => return Err(e),
            Err(e) => return Ok(Settled::Unknown(e.to_string())),
        };
        self.tried.push(number);
        Ok(match said {
            Said::Won(revision) => Settled::Won(revision),
            Said::Unknown(why) => Settled::Unknown(why),
            Said::Lost(entries) => self.lost(entries.into_iter().next().flatten()),
        })
    }

    /// A comparison did not hold. Earlier attempts have the same comparisons, so they are lost, too, unless only a key was
    /// there that must not be, and may be removed again.
    fn lost(&self, found: Option<Entry>) -> Settled {
        let own = found.as_ref().filter(|entry| {
            (self.number)(&entry.value).is_some_and(|number| self.tried.contains(&number))
        });
        match own {
            Some(entry) => Settled::Won(entry.revision),
            None if self.tried.len() > 1 && self.may_hold_again(found.as_ref()) => {
                Settled::Unknown("a key that must not be there is there now".to_owned())
            }
            None => Settled::Lost(found),
        }
    }

    fn may_hold_again(&self, found: Option<&Entry>) -> bool {
        let revision = found.map_or(Revision::ABSENT, |entry| entry.revision);
        let absent = |(_, revision): &(String, Revision)| *revision == Revision::ABSENT;
        revision == self.compare && self.others.compares.iter().any(absent)
    }
}
