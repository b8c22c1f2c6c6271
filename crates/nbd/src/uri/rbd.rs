//! Names of Ceph's block devices: `rbd:POOL/IMAGE@SNAP?conf=FILE&id=NAME&keyring=FILE`. `ferrite-rbd` serves each by NBD to
//! the one process that has started it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BadUri, Uri, bad, decoded, number};
use crate::address::{Address, Helped};

/// The scheme, with its colon.
pub const SCHEME: &str = "rbd:";
/// The configuration of clients if none is named.
const CONF: &str = "/etc/ceph/ceph.conf";
/// The client's name if none is named: `client.admin`.
const ID: &str = "admin";
/// The longest name of a pool, a namespace, an image, a snapshot or a client.
const MAX_NAME_BYTES: usize = 256;
const FORM: &str = "write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE or rbd:POOL/IMAGE@SNAP, with ?conf=FILE&id=NAME&keyring=FILE \
                    behind it";
/// How much later than the helper its client gives a request up.
const GRACE: Duration = Duration::from_secs(15);

/// An image or a snapshot of a cluster, and the client that asks for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Image {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty: the pool's own.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// Its snapshot, which is read-only.
    pub snapshot: Option<String>,
    /// Ceph's configuration file.
    pub conf: PathBuf,
    /// The client's name, without `client.`.
    pub id: String,
    /// The file of its key, if the configuration does not say.
    pub keyring: Option<PathBuf>,
    /// The time that the cluster has for one request.
    pub deadline: Duration,
}

impl Image {
    /// Parses a name without its scheme.
    ///
    /// # Errors
    /// It is no such name; see there.
    pub fn parse(text: &str) -> Result<Image, BadUri> {
        parse(text).map(|(image, _)| image)
    }

    /// The name without settings, for people.
    pub fn short(&self) -> String {
        let namespace = match self.namespace.as_str() {
            "" => String::new(),
            namespace => format!("{namespace}/"),
        };
        let snapshot = self.snapshot.as_ref().map(|snapshot| format!("@{snapshot}"));
        format!("{}/{namespace}{}{}", self.pool, self.image, snapshot.unwrap_or_default())
    }
}

impl fmt::Display for Image {
    /// The name with all its settings, without the scheme: [`Image::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", encoded(&self.pool))?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", encoded(&self.namespace))?;
        }
        f.write_str(&encoded(&self.image))?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{}", encoded(snapshot))?;
        }
        let path = |path: &Path| encoded(&path.to_string_lossy());
        write!(f, "?conf={}&id={}", path(&self.conf), encoded(&self.id))?;
        if let Some(keyring) = &self.keyring {
            write!(f, "&keyring={}", path(keyring))?;
        }
        write!(f, "&deadline_s={}", self.deadline.as_secs())
    }
}

/// The export that a name stands for.
pub(super) fn uri(text: &str) -> Result<Uri, BadUri> {
    let (image, reconnect_s) = parse(text)?;
    Ok(Uri {
        export: String::new(),
        // A helper has one user, whose processes follow each other.
        session: Some("rbd".into()),
        reconnect: Duration::from_secs(reconnect_s.unwrap_or(30)),
        // A new helper breaks the lock of the old one: the cluster refuses what of it comes late.
        drain: Duration::ZERO,
        deadline: image.deadline + GRACE,
        // A snapshot is read-only.
        server: Address::Helped { read_only: image.snapshot.is_some(), by: Helped::Rbd(image) },
    })
}

fn parse(text: &str) -> Result<(Image, Option<u64>), BadUri> {
    if text.contains('#') {
        return bad("it has a #, which has no meaning here", "write %23 for a # in a name");
    }
    let (names, query) = text.split_once('?').unwrap_or((text, ""));
    let (names, snapshot) = match names.rsplit_once('@') {
        Some((names, snapshot)) => (names, Some(name("snapshot", snapshot)?)),
        None => (names, None),
    };
    let parts: Vec<&str> = names.split('/').collect();
    let (pool, namespace, image) = match parts[..] {
        [pool, image] => (pool, String::new(), image),
        [pool, namespace, image] => (pool, name("namespace", namespace)?, image),
        _ => return bad("it does not name a pool and an image", FORM),
    };
    let (pool, image) = (name("pool", pool)?, name("image", image)?);
    let (conf, id, deadline) = (CONF.into(), ID.to_owned(), Duration::from_secs(60));
    let mut image = Image { pool, namespace, image, snapshot, conf, id, keyring: None, deadline };
    let reconnect_s = settings(query, &mut image)?;
    Ok((image, reconnect_s))
}

fn settings(query: &str, image: &mut Image) -> Result<Option<u64>, BadUri> {
    let (mut seen, mut reconnect_s) = (Vec::new(), None);
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if seen.contains(&key) {
            return bad(format!("{key} is there twice"), "leave one of the two out");
        }
        seen.push(key);
        match key {
            "conf" => image.conf = path(key, value)?,
            "keyring" => image.keyring = Some(path(key, value)?),
            "id" => image.id = name("client", value)?,
            "reconnect_s" => reconnect_s = Some(number(key, &decoded(value)?, 0)?),
            "deadline_s" => {
                image.deadline = Duration::from_secs(number(key, &decoded(value)?, 1)?);
            }
            other => {
                let help = "it may have conf, id, keyring, reconnect_s and deadline_s";
                return bad(format!("the setting {other:?} is not known"), help);
            }
        }
    }
    Ok(reconnect_s)
}

fn name(what: &str, text: &str) -> Result<String, BadUri> {
    let text = decoded(text)?;
    match (1..=MAX_NAME_BYTES).contains(&text.len()) && !text.chars().any(char::is_control) {
        true => Ok(text),
        false => bad(format!("the name of the {what} is empty, too long, or no text"), FORM),
    }
}

fn path(key: &str, text: &str) -> Result<PathBuf, BadUri> {
    let text = decoded(text)?;
    match text.starts_with('/') && !text.chars().any(char::is_control) {
        true => Ok(text.into()),
        false => bad(format!("the path behind {key}= does not begin with /"), "write it whole"),
    }
}

/// Writes as `%41` what has a meaning in a name.
fn encoded(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '%' | '#' | '?' | '&' | '@' | '=' => out.push_str(&format!("%{:02x}", c as u32)),
            '/' => out.push_str("%2f"),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_pool_image_snapshot_and_who_asks() {
        let image = Image::parse("p/i").unwrap();
        assert_eq!((image.pool.as_str(), image.image.as_str()), ("p", "i"));
        assert_eq!((image.conf.as_path(), image.id.as_str()), (Path::new(CONF), "admin"));
        let text = "p%2fq/n/i%40x@s?conf=/c&id=vm&keyring=/k&deadline_s=5&reconnect_s=7";
        let image = Image::parse(text).unwrap();
        assert_eq!(image.short(), "p/q/n/i@x@s");
        assert_eq!(Image::parse(&image.to_string()).unwrap(), image);
        let uri = Uri::parse(&format!("rbd:{text}")).unwrap();
        assert_eq!((uri.reconnect.as_secs(), uri.deadline.as_secs()), (7, 20));
        assert_eq!(uri.server, Address::Helped { by: Helped::Rbd(image), read_only: true });
        let uri = Uri::parse("rbd:p/i").unwrap();
        assert!(matches!(uri.server, Address::Helped { read_only: false, .. }), "{uri:?}");
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_form_to_write() {
        for (text, help) in [
            ("", "POOL/IMAGE"),
            ("p", "POOL/IMAGE"),
            ("p/", "POOL/IMAGE"),
            ("/i", "POOL/IMAGE"),
            ("a/b/c/d", "POOL/IMAGE"),
            ("p/i@", "POOL/IMAGE"),
            ("p/i?conf=c", "whole"),
            ("p/i?keyring=", "whole"),
            ("p/i?id=", "POOL/IMAGE"),
            ("p/i?id=a&id=b", "two out"),
            ("p/i?key=a", "it may have"),
            ("p/i?deadline_s=0", "whole number"),
            ("p/i%0a", "POOL/IMAGE"),
            ("p/i#x", "%23"),
        ] {
            let error = Image::parse(text).unwrap_err();
            assert!(error.help.contains(help), "{text}: {error}");
        }
    }
}
