//! Names of disks of a pool of servers: `pool:POOL/DISK?etcd=URL,URL&tls=DIR&experimental=yes`. `ferrite pool own` serves each
//! by NBD to the one process that has started it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BadUri, Uri, bad, decoded, number, yes};
use crate::address::{Address, Helped};

/// The scheme, with its colon.
pub const SCHEME: &str = "pool:";
/// The longest name of a pool or a disk.
const MAX_NAME_BYTES: usize = 40;
/// Addresses of etcd in a name, at most, and the bytes of one.
const MAX_ADDRESSES: usize = 9;
const MAX_ADDRESS_BYTES: usize = 300;
const FORM: &str = "write pool:POOL/DISK, with ?etcd=URL,URL&tls=DIR&experimental=yes behind it if [pool.POOL] of \
                    ferrite.toml does not say it; names have 1 to 40 of a-z, 0-9, \"-\" and \"_\"";
const EXPERIMENTAL: &str =
    "add experimental=yes to the name, or experimental = true to [pool.POOL] of ferrite.toml";

/// A disk of a pool, and how its servers are reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Disk {
    /// The pool.
    pub pool: String,
    /// The disk.
    pub disk: String,
    /// Where the pool's etcd is. `None`: the host's configuration says it.
    pub access: Option<Access>,
    /// The user knows that pools are being built. Without it the host's configuration has to say so.
    pub experimental: bool,
    /// The time that the helper has for one request, before it is asked again.
    pub deadline: Duration,
}

/// Where a pool's etcd is, and how it and the pool's servers are spoken to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The addresses of etcd's servers: `https://HOST:PORT`, or `http://` without TLS.
    pub etcd: Vec<String>,
    /// How etcd and the pool's servers are spoken to.
    pub security: Security,
}

/// Whether connections are encrypted and authenticated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Security {
    /// Neither: any host on the network can take each disk.
    Plain,
    /// By TLS, with the certificates of a folder: `ca-cert.pem`, `client-cert.pem`, `client-key.pem`.
    Tls(PathBuf),
}

impl Disk {
    /// Parses a name without its scheme.
    ///
    /// # Errors
    /// It is no such name; see there.
    pub fn parse(text: &str) -> Result<Disk, BadUri> {
        parse(text).map(|(disk, _)| disk)
    }

    /// The name without settings, for people.
    pub fn short(&self) -> String {
        format!("{}/{}", self.pool, self.disk)
    }
}

impl Access {
    /// Checks the addresses and the folder, and puts them together.
    ///
    /// # Errors
    /// No address or too many; one that does not fit to the kind of connection; a folder that is not absolute.
    pub fn new(etcd: Vec<String>, security: Security) -> Result<Access, BadUri> {
        let (scheme, other) = match &security {
            Security::Plain => {
                ("http://", "https:// needs certificates: name their folder, and leave plain out")
            }
            Security::Tls(folder) if !is_whole(folder) => {
                return bad("the path of the certificates does not begin with /", "write it whole");
            }
            Security::Tls(_) => ("https://", "write https:// before each address of etcd"),
        };
        if !(1..=MAX_ADDRESSES).contains(&etcd.len()) {
            let help = format!("name 1 to {MAX_ADDRESSES} addresses of etcd, with commas between");
            return bad(format!("it has {} addresses of etcd", etcd.len()), &help);
        }
        for address in &etcd {
            let Some(host) = address.strip_prefix(scheme) else {
                return bad(
                    format!("etcd's address {address:?} does not begin with {scheme}"),
                    other,
                );
            };
            let fits = |c: char| c.is_ascii_alphanumeric() || ".-:_[]".contains(c);
            if host.is_empty() || address.len() > MAX_ADDRESS_BYTES || !host.chars().all(fits) {
                let help = format!("write {scheme}HOST:PORT");
                return bad(format!("etcd's address {address:?} is none"), &help);
            }
        }
        Ok(Access { etcd, security })
    }
}

impl fmt::Display for Disk {
    /// The name with all its settings, without the scheme: [`Disk::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}?", self.pool, self.disk)?;
        if let Some(access) = &self.access {
            write!(f, "etcd={}&", access.etcd.join(","))?;
            match &access.security {
                Security::Plain => f.write_str("plain=yes&")?,
                Security::Tls(folder) => write!(f, "tls={}&", encoded(folder))?,
            }
        }
        if self.experimental {
            f.write_str("experimental=yes&")?;
        }
        write!(f, "deadline_s={}", self.deadline.as_secs())
    }
}

/// The export that a name stands for.
pub(super) fn uri(text: &str) -> Result<Uri, BadUri> {
    let (disk, reconnect_s) = parse(text)?;
    Ok(Uri {
        export: String::new(),
        // A helper has one user, whose processes follow each other.
        session: Some("pool".into()),
        reconnect: Duration::from_secs(reconnect_s.unwrap_or(30)),
        // A new helper opens each server under a higher generation: they refuse what of the old one comes late.
        drain: Duration::ZERO,
        deadline: disk.deadline,
        server: Address::Helped { by: Helped::Pool(disk), read_only: false },
    })
}

#[derive(Default)]
struct Settings {
    etcd: Option<Vec<String>>,
    tls: Option<PathBuf>,
    plain: bool,
    experimental: bool,
    deadline_s: Option<u64>,
    reconnect_s: Option<u64>,
}

fn parse(text: &str) -> Result<(Disk, Option<u64>), BadUri> {
    if text.contains('#') {
        return bad("it has a #, and snapshots of a pool's disks have no names", FORM);
    }
    let (names, query) = text.split_once('?').unwrap_or((text, ""));
    let Some((pool, disk)) = names.split_once('/') else {
        return bad("it does not name a pool and a disk", FORM);
    };
    let (pool, disk) = (name("pool", pool)?, name("disk", disk)?);
    let settings = settings(query)?;
    let security = match (settings.tls, settings.plain) {
        (Some(_), true) => {
            return bad("it is encrypted and plain at once", "leave plain out, or tls");
        }
        (Some(folder), false) => Some(Security::Tls(folder)),
        (None, plain) => plain.then_some(Security::Plain),
    };
    let access = match (settings.etcd, security) {
        (None, None) => None,
        (Some(etcd), Some(security)) => Some(Access::new(etcd, security)?),
        (Some(_), None) => {
            let help = "add tls=DIR, a folder with ca-cert.pem, client-cert.pem and client-key.pem; or, on a network that \
                        only trusted hosts read and write, plain=yes";
            return bad("it does not say how etcd and the servers are spoken to", help);
        }
        (None, Some(_)) => {
            return bad("it has certificates, or is plain, and names no etcd", "add etcd=URL,URL");
        }
    };
    if access.is_some() && !settings.experimental {
        return bad("disks of a pool are being built, and may fail", EXPERIMENTAL);
    }
    let deadline = Duration::from_secs(settings.deadline_s.unwrap_or(60));
    let disk = Disk { pool, disk, access, experimental: settings.experimental, deadline };
    Ok((disk, settings.reconnect_s))
}

fn settings(query: &str) -> Result<Settings, BadUri> {
    let (mut seen, mut settings) = (Vec::new(), Settings::default());
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let value = decoded(value)?;
        if seen.contains(&key) {
            return bad(format!("{key} is there twice"), "leave one of the two out");
        }
        seen.push(key);
        match key {
            "etcd" => settings.etcd = Some(value.split(',').map(str::to_owned).collect()),
            "tls" => settings.tls = Some(value.into()),
            "plain" => settings.plain = yes(key, &value)?,
            "experimental" => settings.experimental = yes(key, &value)?,
            "reconnect_s" => settings.reconnect_s = Some(number(key, &value, 0)?),
            "deadline_s" => settings.deadline_s = Some(number(key, &value, 1)?),
            other => {
                let help = "it may have etcd, tls, plain, experimental, reconnect_s and deadline_s";
                return bad(format!("the setting {other:?} is not known"), help);
            }
        }
    }
    Ok(settings)
}

/// Whether a pool, a disk or a server may have this name: 1 to 40 of a-z, 0-9, `-` and `_`, and no `-` at its beginning.
/// A copy's name has its disk's in it, and 64 bytes at most.
pub fn is_name(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(fits) && !text.starts_with('-')
}

fn name(what: &str, text: &str) -> Result<String, BadUri> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => bad(format!("the name of the {what} is none"), FORM),
    }
}

fn is_whole(folder: &Path) -> bool {
    folder.to_str().is_some_and(|text| text.starts_with('/') && !text.chars().any(char::is_control))
}

/// Writes as `%41` what has a meaning in a name.
fn encoded(path: &Path) -> String {
    path.to_string_lossy().chars().fold(String::new(), |mut out, c| {
        match c {
            '%' | '#' | '&' => out.push_str(&format!("%{:02x}", c as u32)),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_pool_disk_and_how_they_are_reached() {
        let disk = Disk::parse("lab/web-1").unwrap();
        assert_eq!((disk.pool.as_str(), disk.disk.as_str()), ("lab", "web-1"));
        assert_eq!((disk.access.clone(), disk.experimental), (None, false));
        assert_eq!(Disk::parse(&disk.to_string()).unwrap(), disk);
        let plain = "lab/a?etcd=http://10.0.0.1:2379,http://[::1]:2379&plain=yes&experimental=yes";
        let tls =
            "lab/a?etcd=https://a.example:2379&tls=/etc/p%26i%25&experimental=yes&deadline_s=5";
        for text in [plain, tls] {
            let disk = Disk::parse(text).unwrap();
            assert_eq!(Disk::parse(&disk.to_string()).unwrap(), disk, "{disk}");
            assert_eq!(disk.short(), "lab/a");
        }
        let access = Disk::parse(plain).unwrap().access.unwrap();
        assert_eq!(access.etcd, ["http://10.0.0.1:2379", "http://[::1]:2379"]);
        assert_eq!(access.security, Security::Plain);
        let disk = Disk::parse(tls).unwrap();
        assert_eq!(disk.access.unwrap().security, Security::Tls("/etc/p&i%".into()));
        let uri = Uri::parse(&format!("pool:{tls}&reconnect_s=7")).unwrap();
        assert_eq!((uri.reconnect.as_secs(), uri.deadline.as_secs()), (7, 5));
        assert!(matches!(uri.server, Address::Helped { read_only: false, .. }), "{uri:?}");
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_form_to_write() {
        let long = format!("lab/{}", "a".repeat(41));
        let many = format!("lab/a?plain=yes&experimental=yes&etcd={}", ["http://a"; 10].join(","));
        for (text, help) in [
            ("", "pool:POOL/DISK"),
            ("lab", "pool:POOL/DISK"),
            ("lab/", "pool:POOL/DISK"),
            ("/a", "pool:POOL/DISK"),
            ("lab/a/b", "pool:POOL/DISK"),
            ("Lab/a", "a-z"),
            ("-lab/a", "a-z"),
            ("lab/%61", "a-z"),
            (&long, "1 to 40"),
            ("lab/a#s", "pool:POOL/DISK"),
            ("lab/a?etcd=http://h", "tls=DIR"),
            ("lab/a?plain=yes", "etcd=URL"),
            ("lab/a?etcd=http://h&plain=yes", "experimental=yes"),
            ("lab/a?etcd=http://h&plain=yes&tls=/t&experimental=yes", "leave plain out"),
            ("lab/a?etcd=http://h&tls=/t&experimental=yes", "https://"),
            ("lab/a?etcd=https://h&tls=t&experimental=yes", "whole"),
            ("lab/a?etcd=https://h&plain=yes&experimental=yes", "certificates"),
            ("lab/a?etcd=http://h/x&plain=yes&experimental=yes", "http://HOST:PORT"),
            ("lab/a?etcd=http://u@h&plain=yes&experimental=yes", "http://HOST:PORT"),
            ("lab/a?etcd=http://&plain=yes&experimental=yes", "http://HOST:PORT"),
            ("lab/a?etcd=&plain=yes&experimental=yes", "certificates"),
            (&many, "1 to 9"),
            ("lab/a?experimental=1", "experimental=yes"),
            ("lab/a?experimental=yes&experimental=yes", "two out"),
            ("lab/a?deadline_s=0", "whole number"),
            ("lab/a?key=a", "it may have"),
        ] {
            let error = Disk::parse(text).unwrap_err();
            assert!(error.help.contains(help), "{text}: {error}");
        }
    }
    #[test]
    fn names_are_never_part_of_another_key() {
        for bad in ["", "a/b", "..", "A", "-a", "a b", &"a".repeat(41)] {
            assert!(!is_name(bad), "{bad}");
        }
        assert!(is_name("web-1_a"));
    }
}
