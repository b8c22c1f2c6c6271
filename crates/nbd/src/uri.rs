//! Names of exports: `nbd+unix:///EXPORT?socket=PATH`, `nbd://HOST:PORT/EXPORT?plain=yes`,
//! `nbds://HOST:PORT/EXPORT?tls-certificates=DIR` (the NBD project's document of URIs), with settings of this client
//! behind the question mark. A block device of a Ceph cluster ([`rbd`]) and a disk of a pool of servers ([`pool`]) have names of
//! their own forms.

pub mod pool;
pub mod rbd;

use std::fmt;
use std::time::Duration;

use crate::address::Address;

/// The port of NBD.
pub const PORT: u16 = 10809;

/// The schemes, with their colon.
pub const SCHEMES: [&str; 6] =
    ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:", rbd::SCHEME, pool::SCHEME];

/// The longest name that is read.
pub const MAX_URI_BYTES: usize = 8192;
const MAX_SECONDS: u64 = 24 * 3600;
const MAX_SESSION_BYTES: usize = 64;

/// An export, and how it is used.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Uri {
    /// Its server.
    pub server: Address,
    /// Its name there; empty: the server's default.
    pub export: String,
    /// The name of the session: all processes that follow each other on this disk have the same.
    pub session: Option<String>,
    /// How long a lost server is looked for before requests fail; zero: not at all.
    pub reconnect: Duration,
    /// How long unanswered writes wait after the end of a connection, before they are sent again to a server that cannot
    /// end the old connection's.
    pub drain: Duration,
    /// The time that a server has for one request.
    pub deadline: Duration,
}

/// Why a name is none, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadUri {
    /// The reason.
    pub why: String,
    /// The next step for the user.
    pub help: String,
}

impl fmt::Display for BadUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.why, self.help)
    }
}

impl std::error::Error for BadUri {}

const FORMS: &str = "write nbd+unix:///EXPORT?socket=PATH, nbds://HOST:PORT/EXPORT?tls-certificates=DIR, or \
                     nbd://HOST:PORT/EXPORT?plain=yes";

/// Whether this names an export, rather than an image.
pub fn is_uri(text: &[u8]) -> bool {
    SCHEMES.iter().any(|scheme| text.starts_with(scheme.as_bytes()))
}

/// The settings behind the question mark.
#[derive(Default)]
struct Settings {
    socket: Option<String>,
    certificates: Option<String>,
    session: Option<String>,
    plain: bool,
    reconnect_s: Option<u64>,
    drain_s: Option<u64>,
    deadline_s: Option<u64>,
}

impl Uri {
    /// Parses a name.
    ///
    /// # Errors
    /// It is no such name; see there.
    pub fn parse(text: &str) -> Result<Uri, BadUri> {
        if text.len() > MAX_URI_BYTES {
            return bad(format!("it is longer than {MAX_URI_BYTES} bytes"), FORMS);
        }
        if let Some(image) = text.strip_prefix(rbd::SCHEME) {
            return rbd::uri(image);
        }
        if let Some(disk) = text.strip_prefix(pool::SCHEME) {
            return pool::uri(disk);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return bad("it has no // behind its first colon", FORMS);
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if rest.contains('#') || query.contains('#') {
            return bad("it has a #, which has no meaning here", "write %23 for a # in a name");
        }
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let settings = Settings::parse(query)?;
        let server = match scheme {
            "nbd+unix" => settings.unix(authority)?,
            "nbd" => settings.plain(authority)?,
            "nbds" => settings.tls(authority)?,
            "nbds+unix" => {
                let help = "write nbd+unix://, or nbds://HOST:PORT/EXPORT for a server on TCP";
                return bad("TLS on a Unix socket is not supported", help);
            }
            _ => return bad(format!("{scheme}:// is not known"), FORMS),
        };
        let seconds = |said: Option<u64>, default| Duration::from_secs(said.unwrap_or(default));
        Ok(Uri {
            server,
            export: decoded(export)?,
            reconnect: seconds(settings.reconnect_s, 30),
            drain: seconds(settings.drain_s, 10),
            deadline: seconds(settings.deadline_s, 30),
            session: settings.session,
        })
    }
}

impl Settings {
    fn parse(query: &str) -> Result<Settings, BadUri> {
        let mut settings = Settings::default();
        let mut seen = Vec::new();
        for part in query.split(['&', ';']).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let value = decoded(value)?;
            if seen.contains(&key) {
                return bad(format!("{key} is there twice"), "leave one of the two out");
            }
            seen.push(key);
            match key {
                "socket" => settings.socket = Some(value),
                "tls-certificates" => settings.certificates = Some(value),
                "plain" => settings.plain = yes(key, &value)?,
                "session" => settings.session = Some(session(value)?),
                "reconnect_s" => settings.reconnect_s = Some(number(key, &value, 0)?),
                "drain_s" => settings.drain_s = Some(number(key, &value, 0)?),
                "deadline_s" => settings.deadline_s = Some(number(key, &value, 1)?),
                other => {
                    let help = "it may have socket, tls-certificates, plain, session, reconnect_s, drain_s and \
                                deadline_s";
                    return bad(format!("the setting {other:?} is not known"), help);
                }
            }
        }
        Ok(settings)
    }

    fn unix(&self, authority: &str) -> Result<Address, BadUri> {
        if !authority.is_empty() {
            let help = "write nbd+unix:///EXPORT?socket=PATH, with three slashes";
            return bad("a Unix socket has no host", help);
        }
        self.refuse_certificates("nbd+unix")?;
        match &self.socket {
            Some(path) if path.starts_with('/') && !path.contains('\0') => {
                Ok(Address::Unix(path.into()))
            }
            Some(_) => bad("the path of the socket does not begin with /", "write the whole path"),
            None => bad("it names no socket", "write nbd+unix:///EXPORT?socket=PATH"),
        }
    }

    fn plain(&self, authority: &str) -> Result<Address, BadUri> {
        self.refuse_socket()?;
        self.refuse_certificates("nbd")?;
        let (host, port) = host_and_port(authority)?;
        if !self.plain {
            let help = format!(
                "write nbds://{authority}/EXPORT?tls-certificates=DIR; or, on a network that only trusted \
                 hosts read and write, nbd://{authority}/EXPORT?plain=yes"
            );
            return bad("nbd:// neither encrypts nor authenticates", &help);
        }
        Ok(Address::Tcp { host, port })
    }

    fn tls(&self, authority: &str) -> Result<Address, BadUri> {
        self.refuse_socket()?;
        if self.plain {
            return bad("it is encrypted and plain at once", "leave plain out, or write nbd://");
        }
        let (host, port) = host_and_port(authority)?;
        match &self.certificates {
            Some(path) if path.starts_with('/') && !path.contains('\0') => {
                Ok(Address::Tls { host, port, certificates: path.into() })
            }
            Some(_) => bad("the path of the certificates does not begin with /", "write it whole"),
            None => {
                let help = "add ?tls-certificates=DIR, a folder with ca-cert.pem, and with client-cert.pem \
                            and client-key.pem if the server demands them";
                bad("it names no certificates", help)
            }
        }
    }

    fn refuse_socket(&self) -> Result<(), BadUri> {
        match self.socket {
            Some(_) => bad("a host and a socket are named", "write nbd+unix:///EXPORT?socket=PATH"),
            None => Ok(()),
        }
    }

    fn refuse_certificates(&self, scheme: &str) -> Result<(), BadUri> {
        match self.certificates {
            Some(_) => bad(format!("{scheme}:// does not use certificates"), "write nbds://"),
            None => Ok(()),
        }
    }
}

fn bad<T>(why: impl Into<String>, help: &str) -> Result<T, BadUri> {
    Err(BadUri { why: why.into(), help: help.to_owned() })
}

fn yes(key: &str, value: &str) -> Result<bool, BadUri> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => bad(format!("{key} is yes or no"), &format!("write {key}=yes, or leave it out")),
    }
}

fn session(value: String) -> Result<String, BadUri> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    match (1..=MAX_SESSION_BYTES).contains(&value.len()) && value.chars().all(fits) {
        true => Ok(value),
        false => bad(
            "the name of the session is none",
            "use 1 to 64 letters, digits, \"-\", \"_\", \".\" and \":\"",
        ),
    }
}

fn number(key: &str, value: &str, least: u64) -> Result<u64, BadUri> {
    let number = value.parse().ok().filter(|seconds| (least..=MAX_SECONDS).contains(seconds));
    match number {
        Some(seconds) if value.bytes().all(|b| b.is_ascii_digit()) => Ok(seconds),
        _ => bad(
            format!("{key} is no number of seconds"),
            &format!("write a whole number from {least} to {MAX_SECONDS}"),
        ),
    }
}

fn host_and_port(authority: &str) -> Result<(String, u16), BadUri> {
    if authority.contains('@') {
        return bad("it names a user, and NBD has none", "leave out what is before the @");
    }
    let (host, rest) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest),
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = match rest {
        "" => Some(PORT),
        rest => rest.strip_prefix(':').and_then(|port| port.parse().ok()).filter(|port| *port > 0),
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || ".-:%_".contains(c);
    let is_host = !host.is_empty() && host.len() <= 255 && host.chars().all(fits);
    match port {
        Some(port) if is_host => Ok((host.to_owned(), port)),
        _ => bad(
            "the host or the port is none",
            "write HOST:PORT, and an IPv6 address in brackets: [::1]:10809",
        ),
    }
}

/// Resolves `%41`.
fn decoded(text: &str) -> Result<String, BadUri> {
    let refuse = || bad("a % is not followed by two digits of a character", "write %25 for a %");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let Some(([high, low], behind)) = rest.split_first_chunk() else { return refuse() };
        let (Some(high), Some(low)) = (digit(*high), digit(*low)) else { return refuse() };
        rest = behind;
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).or_else(|_| refuse())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_names_a_server_and_an_export() {
        let host = |host: &str, port| Address::Tcp { host: host.into(), port };
        for (text, server, export) in [
            ("nbd+unix:///?socket=/run/a", Address::Unix("/run/a".into()), ""),
            ("nbd+unix:///d%20e?socket=/run/a%3fb", Address::Unix("/run/a?b".into()), "d e"),
            ("nbd+unix://?socket=/a", Address::Unix("/a".into()), ""),
            ("nbd://h/x/y?plain=yes", host("h", 10809), "x/y"),
            ("nbd://[::1]:99/?plain=yes", host("::1", 99), ""),
            ("nbd://10.0.0.1:5?plain=yes", host("10.0.0.1", 5), ""),
        ] {
            let uri = Uri::parse(text).unwrap();
            assert_eq!((uri.server, uri.export.as_str()), (server, export), "{text}");
        }
        let uri = Uri::parse("nbds://h:7/e?tls-certificates=/etc/pki").unwrap();
        let certificates = "/etc/pki".into();
        assert_eq!(uri.server, Address::Tls { host: "h".into(), port: 7, certificates });
    }

    #[test]
    fn settings_have_defaults_and_bounds() {
        let uri = Uri::parse("nbd+unix:///?socket=/a").unwrap();
        let seconds = [uri.reconnect, uri.drain, uri.deadline].map(|time| time.as_secs());
        assert_eq!((seconds, uri.session), ([30, 10, 30], None));
        let text = "nbd+unix:///?socket=/a&reconnect_s=0&drain_s=0&deadline_s=5&session=vm-1:xvda";
        let uri = Uri::parse(text).unwrap();
        let seconds = [uri.reconnect, uri.drain, uri.deadline].map(|time| time.as_secs());
        assert_eq!((seconds, uri.session.as_deref()), ([0, 0, 5], Some("vm-1:xvda")));
        for bad in ["reconnect_s=-1", "drain_s=+1", "deadline_s=0", "reconnect_s=86401", "session="]
        {
            assert!(Uri::parse(&format!("nbd+unix:///?socket=/a&{bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_form_to_write() {
        for (text, help) in [
            ("nbd:", "nbd+unix:///EXPORT"),
            ("nbd://h/e", "nbds://h/EXPORT?tls-certificates=DIR"),
            ("nbds://h/e", "tls-certificates=DIR"),
            ("nbds://h/e?plain=yes&tls-certificates=/a", "plain out"),
            ("nbd+unix:///e", "socket=PATH"),
            ("nbd+unix:///e?socket=a", "whole path"),
            ("nbd+unix://h/e?socket=/a", "three slashes"),
            ("nbd://h:0/?plain=yes", "HOST:PORT"),
            ("nbd://::1/?plain=yes", "brackets"),
            ("nbd://u@h/?plain=yes", "before the @"),
            ("nbd://h/%?plain=yes", "%25"),
            ("nbd://h/?plain=yes&plain=yes", "two out"),
            ("nbd://h/?plan=yes", "it may have"),
            ("nbd://h/a#b?plain=yes", "%23"),
            ("nbds+unix:///?socket=/a", "nbd+unix://"),
        ] {
            let error = Uri::parse(text).unwrap_err();
            assert!(error.help.contains(help), "{text}: {error}");
        }
    }
}
