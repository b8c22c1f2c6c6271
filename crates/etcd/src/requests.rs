//! The requests, as JSON of etcd's gateway: numbers of 64 bits as strings, keys and values in base64.
//!
//! The names of the fields stand here alone. etcd drops those that it does not know, and a comparison without its fields
//! is another comparison that may well hold. So each kind of request has a test against a real server in which it loses.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use crate::{Lease, Revision};

/// The most operations of a transaction (etcd's `--max-txn-ops`).
pub const MAX_OPERATIONS: usize = 128;
/// The most bytes of a transaction's keys and values. etcd takes 1.5 MiB a request.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;

/// Why a transaction cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It has too many operations or comparisons.
    #[error("a transaction has at most {MAX_OPERATIONS} operations, and this one has {0}")]
    Operations(usize),
    /// Its keys and values are too large.
    #[error("a transaction has at most {MAX_REQUEST_BYTES} bytes, and this one has {0}")]
    Bytes(usize),
    /// etcd refuses that.
    #[error("a transaction writes the key {0} twice")]
    Twice(String),
    /// It compares nothing: it would always be carried out.
    #[error("a transaction compares nothing")]
    Unconditional,
}

/// Keys that are written together, if other keys (or the same) have these revisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    pub(crate) compares: Vec<(String, Revision)>,
    pub(crate) puts: Vec<(String, Vec<u8>, Option<Lease>)>,
    pub(crate) deletes: Vec<String>,
}

impl Transaction {
    /// One that is carried out only if the key has this revision. [`Revision::ABSENT`]: if it does not exist.
    pub fn when(key: &str, revision: Revision) -> Transaction {
        Transaction::default().and_when(key, revision)
    }

    /// Adds a comparison: the transaction is carried out only if this key has this revision, too.
    pub fn and_when(mut self, key: &str, revision: Revision) -> Transaction {
        self.compares.push((key.to_owned(), revision));
        self
    }

    /// Writes a key.
    pub fn put(mut self, key: &str, value: Vec<u8>) -> Transaction {
        self.puts.push((key.to_owned(), value, None));
        self
    }

    /// Writes a key that goes with a lease.
    pub fn put_leased(mut self, key: &str, value: Vec<u8>, lease: Lease) -> Transaction {
        self.puts.push((key.to_owned(), value, Some(lease)));
        self
    }

    /// Removes a key, if it is there.
    pub fn delete(mut self, key: &str) -> Transaction {
        self.deletes.push(key.to_owned());
        self
    }

    /// Its JSON.
    pub(crate) fn to_json(&self) -> Result<String, Unfit> {
        self.check()?;
        let puts = self.puts.iter().map(|(key, value, lease)| Op {
            request_put: Some(Put {
                key: base64(key.as_bytes()),
                value: base64(value),
                lease: lease.map(|lease| lease.0.to_string()),
            }),
            ..Op::default()
        });
        let deletes = self.deletes.iter().map(|key| Op {
            request_delete_range: Some(Key { key: base64(key.as_bytes()) }),
            ..Op::default()
        });
        let compare = |(key, revision): &(String, Revision)| Compare {
            key: base64(key.as_bytes()),
            target: "MOD",
            result: "EQUAL",
            mod_revision: revision.0.to_string(),
        };
        let read = |(key, _): &(String, Revision)| Op {
            request_range: Some(Key { key: base64(key.as_bytes()) }),
            ..Op::default()
        };
        Ok(json(&Txn {
            compare: self.compares.iter().map(compare).collect(),
            success: puts.chain(deletes).collect(),
            failure: self.compares.iter().map(read).collect(),
        }))
    }

    fn check(&self) -> Result<(), Unfit> {
        if self.compares.is_empty() {
            return Err(Unfit::Unconditional);
        }
        let operations = (self.puts.len() + self.deletes.len()).max(self.compares.len());
        if operations > MAX_OPERATIONS {
            return Err(Unfit::Operations(operations));
        }
        let puts = self.puts.iter().map(|(key, value, _)| key.len() + value.len());
        let keys = self.compares.iter().map(|(key, _)| key).chain(&self.deletes).map(String::len);
        let bytes = puts.chain(keys).sum();
        if bytes > MAX_REQUEST_BYTES {
            return Err(Unfit::Bytes(bytes));
        }
        let mut written: Vec<&String> =
            self.puts.iter().map(|(key, ..)| key).chain(&self.deletes).collect();
        written.sort();
        match written.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Unfit::Twice(pair[0].clone())),
            None => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Txn {
    compare: Vec<Compare>,
    success: Vec<Op>,
    failure: Vec<Op>,
}

#[derive(Serialize)]
struct Compare {
    key: String,
    target: &'static str,
    result: &'static str,
    mod_revision: String,
}

#[derive(Default, Serialize)]
struct Op {
    #[serde(skip_serializing_if = "Option::is_none")]
    request_put: Option<Put>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_delete_range: Option<Key>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_range: Option<Key>,
}

#[derive(Serialize)]
struct Put {
    key: String,
    value: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

#[derive(Serialize)]
struct Key {
    key: String,
}

/// The range of keys from `key` to `end` (not included), at most `limit` of them, in order, as they were at `revision`.
#[derive(Serialize)]
pub(crate) struct Range {
    key: String,
    range_end: String,
    limit: String,
    revision: String,
    sort_order: &'static str,
    sort_target: &'static str,
}

/// One key, from those who have a quorum.
pub(crate) fn get(key: &str) -> String {
    json(&Key { key: base64(key.as_bytes()) })
}

/// A page of keys. `revision` 0: as they are now.
pub(crate) fn page(from: &[u8], end: &[u8], limit: usize, revision: Revision) -> String {
    json(&Range {
        key: base64(from),
        range_end: base64(end),
        limit: limit.to_string(),
        revision: revision.0.to_string(),
        sort_order: "ASCEND",
        sort_target: "KEY",
    })
}

/// The key behind all keys that begin with `prefix`. None: there is none, since it has 0xff alone.
pub(crate) fn end_of(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != 0xff)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

/// A lease, by its field `ID` or by its time.
#[derive(Default, Serialize)]
pub(crate) struct LeaseAsked {
    #[serde(rename = "ID", skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "TTL", skip_serializing_if = "Option::is_none")]
    ttl: Option<String>,
}

pub(crate) fn grant(seconds: u32) -> String {
    json(&LeaseAsked { ttl: Some(seconds.to_string()), ..LeaseAsked::default() })
}

pub(crate) fn of_lease(lease: Lease) -> String {
    json(&LeaseAsked { id: Some(lease.0.to_string()), ..LeaseAsked::default() })
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Strings and lists of them: that cannot fail.
fn json(request: &impl Serialize) -> String {
    serde_json::to_string(request).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_would_refuse_or_always_do_is_not_sent() {
        let one = || Transaction::when("a", Revision(7));
        assert_eq!(Transaction::default().to_json(), Err(Unfit::Unconditional));
        let twice = one().put("b", vec![1]).delete("b");
        assert_eq!(twice.to_json(), Err(Unfit::Twice("b".to_owned())));
        let large = one().put("b", vec![0; MAX_REQUEST_BYTES]);
        assert!(matches!(large.to_json(), Err(Unfit::Bytes(_))));
        let many = (0..129).fold(one(), |txn, i| txn.put(&format!("k{i}"), Vec::new()));
        assert_eq!(many.to_json(), Err(Unfit::Operations(129)));
        let fits = (0..128).fold(one(), |txn, i| txn.put(&format!("k{i}"), Vec::new()));
        assert!(fits.to_json().is_ok());
    }

    #[test]
    fn a_prefix_ends_before_the_next_one() {
        assert_eq!(end_of(b"disks/"), Some(b"disks0".to_vec()));
        assert_eq!(end_of(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(end_of(b"\xff"), None);
        assert_eq!(end_of(b""), None);
    }
}
