//! The answers of etcd. Numbers of 64 bits come as strings or as numbers. 0, false, empty strings and empty lists are
//! left out, so each field may be missing. Two shapes of errors are in use.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, de};

use crate::{Entry, Lease, Revision};

/// A number of 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Number(i128);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Signed(i64),
            Unsigned(u64),
        }
        match Either::deserialize(deserializer)? {
            Either::Signed(n) => Ok(Number(n.into())),
            Either::Unsigned(n) => Ok(Number(n.into())),
            Either::Text(text) => text.parse().map(Number).map_err(de::Error::custom),
        }
    }
}

impl Number {
    fn unsigned(self) -> Option<u64> {
        self.0.try_into().ok()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Header {
    cluster_id: Number,
    revision: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KeyValue {
    key: String,
    value: String,
    mod_revision: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RangeAnswer {
    header: Option<Header>,
    kvs: Vec<KeyValue>,
    more: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TxnAnswer {
    header: Option<Header>,
    succeeded: bool,
    responses: Vec<OpAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OpAnswer {
    response_range: Option<RangeAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LeaseAnswer {
    header: Option<Header>,
    #[serde(rename = "ID")]
    id: Number,
    #[serde(rename = "TTL")]
    ttl: Number,
    /// A stream, as an answer about keeping a lease comes.
    result: Option<Box<LeaseAnswer>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StatusAnswer {
    header: Option<Header>,
    version: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ErrorAnswer {
    message: String,
    error: Option<ErrorField>,
    code: i32,
}

/// A text, or the error of a stream.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ErrorField {
    Text(String),
    Nested { message: String },
}

/// The fields about the cluster in each answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) cluster: u64,
    pub(crate) revision: Revision,
}

impl Header {
    fn head(header: Option<Header>) -> Result<Head, String> {
        let header = header.ok_or("an answer without a header")?;
        match (header.cluster_id.unsigned(), header.revision.unsigned()) {
            (Some(cluster), Some(revision)) if cluster != 0 => {
                Ok(Head { cluster, revision: Revision(revision) })
            }
            _ => Err("a header without the cluster's identifier".to_owned()),
        }
    }
}

impl KeyValue {
    fn entry(self) -> Result<Entry, String> {
        let decode = |text: String| STANDARD.decode(text).map_err(|e| format!("no base64: {e}"));
        let key = String::from_utf8(decode(self.key)?).map_err(|_| "a key that is no text")?;
        let revision = self.mod_revision.unsigned().filter(|n| *n > 0);
        let revision = Revision(revision.ok_or("a key without a revision")?);
        Ok(Entry { key, value: decode(self.value)?, revision })
    }
}

/// Keys, and whether there are more.
pub(crate) struct Page {
    pub(crate) head: Head,
    pub(crate) entries: Vec<Entry>,
    pub(crate) more: bool,
}

pub(crate) fn page(body: &[u8]) -> Result<Page, String> {
    let answer: RangeAnswer = parse(body)?;
    let head = Header::head(answer.header)?;
    let entries = answer.kvs.into_iter().map(KeyValue::entry).collect::<Result<_, _>>()?;
    Ok(Page { head, entries, more: answer.more })
}

/// Whether a transaction was carried out, and what its keys hold if it was not.
pub(crate) struct Carried {
    pub(crate) head: Head,
    /// Of a lost one, in the order of the comparisons.
    pub(crate) lost: Option<Vec<Option<Entry>>>,
}

/// Reads the answer to a transaction that compares these keys.
pub(crate) fn transaction(body: &[u8], compared: &[&str]) -> Result<Carried, String> {
    let answer: TxnAnswer = parse(body)?;
    let head = Header::head(answer.header)?;
    if answer.succeeded {
        return Ok(Carried { head, lost: None });
    }
    // A lost one reads the keys that it compares, so it has an answer for each of them.
    if answer.responses.len() != compared.len() {
        return Err("an answer without `succeeded` and without the keys".to_owned());
    }
    let read = |(response, key): (OpAnswer, &&str)| -> Result<Option<Entry>, String> {
        let range = response.response_range.ok_or("an answer without a key that was asked for")?;
        let mut entries = range.kvs.into_iter().map(KeyValue::entry);
        let entry = entries.next().transpose()?;
        match (&entry, entries.next()) {
            (Some(entry), None) if entry.key == **key => {}
            (None, None) => {}
            _ => return Err(format!("an answer with other keys than {key}")),
        }
        Ok(entry)
    };
    let lost = answer.responses.into_iter().zip(compared).map(read).collect::<Result<_, _>>()?;
    Ok(Carried { head, lost: Some(lost) })
}

/// A lease and its remaining seconds. No seconds: it is gone.
pub(crate) fn lease(body: &[u8]) -> Result<(Head, Lease, Option<u64>), String> {
    let mut answer: LeaseAnswer = parse(body)?;
    if let Some(inner) = answer.result.take() {
        answer = *inner;
    }
    let head = Header::head(answer.header)?;
    let id = i64::try_from(answer.id.0).map_err(|_| "an odd lease")?;
    Ok((head, Lease(id), answer.ttl.unsigned().filter(|seconds| *seconds > 0)))
}

/// Which cluster, and which version of the server.
pub(crate) fn status(body: &[u8]) -> Result<(Head, String), String> {
    let answer: StatusAnswer = parse(body)?;
    Ok((Header::head(answer.header)?, answer.version))
}

/// An error's code and text, for people.
pub(crate) fn error(body: &[u8]) -> (i32, String) {
    let answer: ErrorAnswer = serde_json::from_slice(body).unwrap_or_default();
    let text = match (answer.message, answer.error) {
        (message, _) if !message.is_empty() => message,
        (_, Some(ErrorField::Text(text) | ErrorField::Nested { message: text })) => text,
        _ => "no reason".to_owned(),
    };
    let short: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    (answer.code, short)
}

fn parse<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| format!("no JSON of etcd: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r#""header":{"cluster_id":"14841639068965178418","revision":"7"}"#;

    #[test]
    fn numbers_may_be_texts_or_numbers_and_fields_in_any_order() {
        let text = format!(
            r#"{{"kvs": [ {{"mod_revision": 5, "value": "YmI=", "key": "YQ=="}}], "unknown": {{}}, {HEADER}}}"#
        );
        let page = page(text.as_bytes()).unwrap();
        let entry = Entry { key: "a".to_owned(), value: b"bb".to_vec(), revision: Revision(5) };
        assert_eq!((page.entries, page.more), (vec![entry], false));
        assert_eq!(page.head, Head { cluster: 14841639068965178418, revision: Revision(7) });
    }

    #[test]
    fn a_lost_transaction_has_each_key_that_it_compares_and_no_other() {
        let lost = |responses: &str| {
            let text = format!(r#"{{{HEADER},"responses":[{responses}]}}"#);
            transaction(text.as_bytes(), &["a"]).map(|carried| carried.lost)
        };
        assert_eq!(lost(r#"{"response_range":{}}"#).unwrap(), Some(vec![None]));
        let of = |key: &str| {
            format!(r#"{{"response_range":{{"kvs":[{{"key":"{key}","mod_revision":"3"}}]}}}}"#)
        };
        assert!(lost(&of("YQ==")).unwrap().unwrap()[0].is_some());
        for bad in ["", r#"{"response_put":{}}"#, &of("Yg=="), &of("not base64"), "{}"] {
            assert!(lost(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cut_and_odd_answers_are_errors() {
        let whole = format!(r#"{{{HEADER},"succeeded":true}}"#);
        assert!(transaction(whole.as_bytes(), &["a"]).unwrap().lost.is_none());
        for end in 0..whole.len() {
            assert!(transaction(&whole.as_bytes()[..end], &["a"]).is_err(), "{end}");
        }
        for bad in [
            r#"{"succeeded":true}"#,
            r#"{"header":{"revision":"1"},"succeeded":true}"#,
            r#"{"header":{"cluster_id":"-1"},"succeeded":true}"#,
            r#"{"header":{"cluster_id":"99999999999999999999999999"},"succeeded":true}"#,
            "[]",
        ] {
            assert!(transaction(bad.as_bytes(), &["a"]).is_err(), "{bad}");
        }
    }

    #[test]
    fn both_shapes_of_errors_are_read() {
        assert_eq!(error(br#"{"error":"a b","message":"a b","code":3}"#), (3, "a b".to_owned()));
        assert_eq!(error(br#"{"code":4, "message":"late", "details":[]}"#), (4, "late".to_owned()));
        assert_eq!(error(br#"{"error":{"message":"of a stream"}}"#).1, "of a stream");
        assert_eq!(error(b"<html>").1, "no reason");
    }
}
