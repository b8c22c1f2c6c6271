//! Migrations: where disks of other hosts may come to, and which hosts this one knows.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use toml::Value;

/// The ports of exports of disks that come, unless others are named: those that libvirt takes for migrations, too.
const PORTS: (u16, u16) = (49152, 49215);
/// Most hosts in a list.
const MAX_HOSTS: usize = 1000;

/// The table `migration`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationOptions {
    /// Where other daemons are listened for. `None`: no disk can come.
    pub listen: Option<SocketAddr>,
    /// The folder of certificates and keys, of a server and of a client.
    pub certificates: Option<PathBuf>,
    /// The folder where images of disks that come are made. `None`: no disk can come.
    pub folder: Option<PathBuf>,
    /// The hosts that disks may come from, as their clients' certificates name them. Empty: all that the authority has
    /// signed a certificate for.
    pub from: Vec<String>,
    /// The first and the last port of exports of disks that come.
    pub ports: (u16, u16),
    /// Images in `folder` that disks which come may stand on, and so read.
    pub bases: Vec<String>,
    /// Other hosts, by short names, as HOST:PORT.
    pub hosts: BTreeMap<String, String>,
}

impl Default for MigrationOptions {
    fn default() -> MigrationOptions {
        let (from, hosts) = (Vec::new(), BTreeMap::new());
        MigrationOptions {
            listen: None,
            certificates: None,
            folder: None,
            from,
            ports: PORTS,
            bases: Vec::new(),
            hosts,
        }
    }
}

/// An address with a port.
pub(super) fn listen(value: &Value) -> Option<SocketAddr> {
    value.as_str()?.parse().ok().filter(|at: &SocketAddr| at.port() > 0)
}

/// A list of names of hosts.
pub(super) fn from(value: &Value) -> Option<Vec<String>> {
    let names = value.as_array()?.iter();
    let names: Option<Vec<String>> =
        names.map(|name| name.as_str().filter(|name| is_host(name)).map(str::to_owned)).collect();
    names.filter(|names| names.len() <= MAX_HOSTS)
}

/// Two ports, or `[0, 0]`.
pub(super) fn ports(value: &Value) -> Option<(u16, u16)> {
    let port = |value: &Value| u16::try_from(value.as_integer()?).ok();
    let [first, last] = value.as_array()?.as_slice() else { return None };
    let (first, last) = (port(first)?, port(last)?);
    ((first, last) == (0, 0) || (0 < first && first <= last)).then_some((first, last))
}

/// A list of names of images, without folders.
pub(super) fn bases(value: &Value) -> Option<Vec<String>> {
    let names = value.as_array()?.iter();
    let is_base = |name: &&str| crate::migration::messages::is_name(name);
    let names: Option<Vec<String>> =
        names.map(|name| name.as_str().filter(is_base).map(str::to_owned)).collect();
    names.filter(|names| names.len() <= MAX_HOSTS)
}

/// A table of short names and places.
pub(super) fn hosts(value: &Value) -> Option<BTreeMap<String, String>> {
    let is_place = |place: &str| {
        place.rsplit_once(':').is_some_and(|(host, port)| {
            is_host(host.trim_matches(['[', ']'])) && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
    };
    let host = |(name, place): (&String, &Value)| {
        let place = place.as_str().filter(|place| is_place(place) && is_host(name))?;
        Some((name.clone(), place.to_owned()))
    };
    value.as_table()?.iter().map(host).collect()
}

fn is_host(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-:%_".contains(c))
        && !name.starts_with('-')
}

impl MigrationOptions {
    /// Whether a host is one of `hosts`, at whatever port.
    pub(crate) fn knows(&self, host: &str) -> bool {
        let of = |place: &String| {
            let host = place.rsplit_once(':').map_or(place.as_str(), |(host, _)| host);
            host.trim_matches(['[', ']']).to_ascii_lowercase()
        };
        self.hosts.values().any(|place| of(place) == host.to_ascii_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Value {
        toml::from_str::<toml::Table>(&format!("x = {text}")).unwrap()["x"].clone()
    }

    #[test]
    fn values_of_the_table_are_checked() {
        assert_eq!(listen(&value("'192.0.2.1:10810'")), Some("192.0.2.1:10810".parse().unwrap()));
        for bad in ["'192.0.2.1'", "'h:5'", "'0.0.0.0:0'", "5"] {
            assert_eq!(listen(&value(bad)), None, "{bad}");
        }
        assert_eq!(ports(&value("[5, 7]")), Some((5, 7)));
        assert_eq!(ports(&value("[0, 0]")), Some((0, 0)));
        for bad in ["[7, 5]", "[0, 5]", "[5]", "[5, 70000]", "'5-7'"] {
            assert_eq!(ports(&value(bad)), None, "{bad}");
        }
        let known = hosts(&value("{ b = 'B.example:10810', c = '[::1]:5' }")).unwrap();
        let options = MigrationOptions { hosts: known, ..MigrationOptions::default() };
        assert!(options.knows("b.example") && options.knows("::1") && !options.knows("b"));
        for bad in ["{ b = 'b' }", "{ b = 'b:0' }", "{ b = 5 }", "{ b = 'x y:5' }", "[]"] {
            assert_eq!(hosts(&value(bad)), None, "{bad}");
        }
        assert_eq!(from(&value("['a.example']")), Some(vec!["a.example".to_owned()]));
        assert_eq!(from(&value("['--x']")), None);
        assert_eq!(bases(&value("['gold.qcow2']")), Some(vec!["gold.qcow2".to_owned()]));
        for bad in ["['../x']", "['/srv/x']", "'x'", "['a.ferrite-incoming']"] {
            assert_eq!(bases(&value(bad)), None, "{bad}");
        }
    }
}
