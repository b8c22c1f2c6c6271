//! The servers of NBD whose exports may be disks. Without an entry there are none: what a toolstack writes into a disk's
//! target must not make this host connect to whatever it names, nor read any folder as certificates.

use std::path::{Path, PathBuf};

use ferrite_nbd::address::Address;
use ferrite_nbd::uri::{PORT, Uri};
use toml::Value;

use super::keys::is_folder;
use crate::Failure;
use crate::params::real_socket;

/// The valid values of the list, for errors.
pub(super) const ALLOWED: &str = "a list of hosts, each with a port if it is not 10809, and absolute paths of Unix \
                                  sockets or their folders, such as [\"storage.example:10810\", \"/run/nbd\"]";

/// The most bytes of a host's name.
const MAX_HOST: usize = 255;

/// The servers that disks may use, and the folders of their certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdOptions {
    /// The servers.
    pub servers: Vec<NbdServer>,
    /// The folders that certificates may be in, at any depth.
    pub certificate_folders: Vec<PathBuf>,
}

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdServer {
    /// A Unix socket, or a folder of sockets.
    Socket(PathBuf),
    /// A port of a host, whose name is compared as it is written.
    Port {
        /// A name or an address, without brackets.
        host: String,
        /// The TCP port.
        port: u16,
    },
}

impl NbdServer {
    /// Parses an entry of the list.
    pub fn parse(text: &str) -> Option<NbdServer> {
        if text.starts_with('/') {
            return Some(NbdServer::Socket(text.into())).filter(|_| is_folder(Path::new(text)));
        }
        let (host, rest) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some(split) => split,
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let port = match rest {
            "" => PORT,
            rest => rest.strip_prefix(':')?.parse().ok().filter(|port| *port > 0)?,
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-:%_".contains(c);
        let is_host = (1..=MAX_HOST).contains(&host.len()) && host.chars().all(fits);
        is_host.then(|| NbdServer::Port { host: host.to_ascii_lowercase(), port })
    }
}

impl NbdOptions {
    /// Checks that an export may be a disk. Links in a socket's path are resolved first; the socket need not be there.
    ///
    /// # Errors
    /// The list does not have its server, or its certificates are elsewhere.
    pub(crate) fn check(&self, uri: &Uri) -> Result<(), Failure> {
        let (is_listed, shown) = match &uri.server {
            Address::Unix(path) => {
                let real = real_socket(path).unwrap_or_else(|_| path.clone());
                (self.has_socket(&real), path.display().to_string())
            }
            Address::Tcp { host, port } | Address::Tls { host, port, .. } => {
                let shown = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                (self.has_port(host, *port), format!("{shown}:{port}"))
            }
            // No entry of this list allows a cluster or a pool: these have tables of their own.
            Address::Helped { by, .. } => (false, by.short()),
        };
        if !is_listed {
            return Err(Failure {
                why: format!(
                    "the daemon's configuration does not allow disks of the server {shown}"
                ),
                help: format!("add {shown:?} to servers below [nbd] in it and restart the daemon"),
            });
        }
        let Address::Tls { certificates, .. } = &uri.server else { return Ok(()) };
        let folder = certificates.display();
        let real = certificates.canonicalize().map_err(|e| Failure {
            why: format!("cannot find the certificates in {folder}: {e}"),
            help: "correct tls-certificates=DIR, or make the folder; ferrite tries again"
                .to_owned(),
        })?;
        match is_below(&self.certificate_folders, &real) {
            true => Ok(()),
            false => Err(Failure {
                why: format!("{folder} is in none of the folders that certificates may be in"),
                help: format!(
                    "add the folder {:?} to certificate_folders below [nbd] in the daemon's configuration and \
                     restart the daemon",
                    real.display().to_string()
                ),
            }),
        }
    }

    fn has_socket(&self, real: &Path) -> bool {
        let listed = self.servers.iter().filter_map(|server| match server {
            NbdServer::Socket(path) => Some(path),
            NbdServer::Port { .. } => None,
        });
        is_below(listed, real)
    }

    fn has_port(&self, host: &str, port: u16) -> bool {
        let wanted = NbdServer::Port { host: host.to_ascii_lowercase(), port };
        self.servers.contains(&wanted)
    }
}

/// Whether a path without links is one of these, or below one. These may be links, whose targets may change: they are
/// resolved each time.
pub(super) fn is_below<'a>(places: impl IntoIterator<Item = &'a PathBuf>, real: &Path) -> bool {
    places.into_iter().any(|place| {
        real.starts_with(place) || real_socket(place).is_ok_and(|place| real.starts_with(place))
    })
}

/// The value of the key.
pub(super) fn of_list(value: &Value) -> Option<Vec<NbdServer>> {
    value.as_array()?.iter().map(|entry| NbdServer::parse(entry.as_str()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_may_be_on_a_listed_server_with_certificates_of_a_listed_folder_only() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for folder in ["sockets", "tls/a", "other"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::os::unix::fs::symlink(at("other"), at("sockets/link")).unwrap();
        let entries = [
            at("sockets"),
            at("one"),
            "Storage.Example".into(),
            "192.0.2.1:7".into(),
            "[::1]:8".into(),
        ];
        let list = Value::Array(entries.into_iter().map(Value::String).collect());
        let certificate_folders = vec![at("tls").into()];
        let nbd = NbdOptions { servers: of_list(&list).unwrap(), certificate_folders };
        let check = |uri: String| {
            nbd.check(&Uri::parse(&uri).unwrap())
                .map_err(|refused| format!("{}; {}", refused.why, refused.help))
        };
        let tls = |server: &str, folder: &str| {
            format!("nbds://{server}/?tls-certificates={}", at(folder))
        };
        for uri in [
            format!("nbd+unix:///?socket={}", at("sockets/s")),
            format!("nbd+unix:///x?socket={}", at("one")),
            "nbd://storage.example/x?plain=yes".into(),
            "nbd://STORAGE.example:10809/x?plain=yes".into(),
            "nbd://[::1]:8/?plain=yes".into(),
            tls("192.0.2.1:7", "tls/a"),
        ] {
            assert_eq!(check(uri.clone()), Ok(()), "{uri}");
        }
        for (uri, cure) in [
            (format!("nbd+unix:///?socket={}", at("one2")), "servers below [nbd]"),
            (format!("nbd+unix:///?socket={}", at("other/s")), "servers below [nbd]"),
            // A socket that is reached by a link in a listed folder is elsewhere.
            (format!("nbd+unix:///?socket={}", at("sockets/link/s")), "servers below [nbd]"),
            (format!("nbd+unix:///?socket={}", at("sockets/../other/s")), "servers below [nbd]"),
            ("nbd://storage.example:7/x?plain=yes".into(), "\"storage.example:7\""),
            ("nbd://[::1]/?plain=yes".into(), "\"[::1]:10809\""),
            (tls("192.0.2.1:7", "other"), "certificate_folders below [nbd]"),
            (tls("192.0.2.1:7", "tls/b"), "tls-certificates=DIR"),
        ] {
            let why = check(uri.clone()).unwrap_err();
            assert!(why.contains(cure), "{uri}: {why}");
        }
        let none = NbdOptions::default();
        assert!(none.check(&Uri::parse("nbd+unix:///?socket=/run/s").unwrap()).is_err());
        for wrong in ["", "relative/path:x", "/a/../b", "h:0", "h:x", "[::1", "h h", "h:7:8"] {
            assert_eq!(NbdServer::parse(wrong), None, "{wrong}");
        }
    }
}
