//! Disks on other servers, and exports of this host's disks: what is wrong with them, as far as it is seen without a
//! connection. A connection that says nothing is a client that has left, and some servers end with that.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use ferrite_daemon::Paths;
use ferrite_daemon::control::client::call;
use ferrite_daemon::control::protocol::{Disk, Disks, ExportRow, ExportRows, Nothing, PhaseName};
use ferrite_host::names::connect::resolve;
use ferrite_nbd::address::Address;
use ferrite_nbd::uri::{Uri, is_uri};
use ferrite_tunnel::{Side, check_client, check_server, expires_within};

use super::{Check, State};
use crate::disk::vbd;
use crate::guests::Names;
use crate::plain::one_line;

/// The time for the daemon's answer.
const ANSWER: Duration = Duration::from_secs(10);
/// A certificate that expires within this time is told of.
const SOON: Duration = Duration::from_secs(14 * 24 * 3600);

/// An error, and the next step.
type Fault = (String, String);

/// All exports, and all disks on other servers. Without a daemon there are none.
pub(super) fn checks(run: &Path, names: &Names) -> Vec<Check> {
    let control = Paths { run: run.to_owned() }.control();
    let exports = call::<ExportRows>(&control, "disk.exports", &Nothing {}, ANSWER);
    let disks = call::<Disks>(&control, "disk.list", &Nothing {}, ANSWER);
    let mut checks = Vec::new();
    for row in exports.map(|rows| rows.exports).unwrap_or_default() {
        let found = format!("{}, {}", names.disk(vbd(row.disk)), one_line(&describe(&row)));
        checks.push(check("exports", "export", found, of_export(&row)));
    }
    let mut connected = None;
    for disk in disks.map(|disks| disks.disks).unwrap_or_default() {
        let Some(image) = disk.image.as_ref().filter(|image| is_uri(image.as_bytes())) else {
            continue;
        };
        let found = format!("{}, on {}", names.disk(vbd(disk.disk)), one_line(image));
        let fault = of_disk(&disk, image, &mut connected);
        checks.push(check("remote disks", "server", found, fault));
    }
    checks
}

fn check(area: &'static str, name: &'static str, found: String, fault: Option<Fault>) -> Check {
    match fault {
        None => Check { area, name, state: State::Ok, found, means: String::new() },
        Some((why, help)) => {
            let found = format!("{found}: {}", one_line(&why));
            let means = one_line(&help).into_owned();
            Check { area, name, state: State::Warn, found, means }
        }
    }
}

fn describe(row: &ExportRow) -> String {
    let how = match &row.tls {
        Some(folder) => format!("TLS by {folder}"),
        None => "in clear".to_owned(),
    };
    let mode = if row.read_only { "read only" } else { "writable" };
    format!("exported as {} at {}, {how}, {mode}", row.name, row.listen.join(" "))
}

fn of_export(row: &ExportRow) -> Option<Fault> {
    if let Some(why) = &row.why {
        let help = "the daemon tries again every second; ferrite disk unexport ends that";
        return Some((why.clone(), help.to_owned()));
    }
    let folder = Path::new(row.tls.as_ref()?);
    if let Err(fault) = check_server(folder, !row.any_client) {
        let why = format!("{}: {}", fault.what, fault.why);
        let help = format!("{}; clients get the certificate that was read before", fault.help);
        return Some((why, help));
    }
    soon(folder, Side::Server)
}

/// A certificate that expires soon.
fn soon(folder: &Path, side: Side) -> Option<Fault> {
    let name = expires_within(folder, side, SOON)?;
    let why =
        format!("{} expires within {} days", folder.join(name).display(), SOON.as_secs() / 86400);
    Some((why, "renew it: docs/access.md says how".to_owned()))
}

/// The error of a disk on another server. `connected` are this host's connections, once they were read.
fn of_disk(
    disk: &Disk,
    image: &str,
    connected: &mut Option<BTreeSet<SocketAddr>>,
) -> Option<Fault> {
    if let Some(why) = &disk.why {
        return Some((why.clone(), disk.help.clone().unwrap_or_default()));
    }
    let uri = Uri::parse(image).ok()?;
    match &uri.server {
        Address::Unix(path) => {
            let is_socket = fs::metadata(path).is_ok_and(|seen| seen.file_type().is_socket());
            let why = format!("there is no socket {}", path.display());
            (!is_socket).then(|| (why, "start the server".to_owned()))
        }
        Address::Tcp { host, port } => unconnected(disk, host, *port, connected),
        Address::Tls { host, port, certificates } => of_client(certificates)
            .or_else(|| unconnected(disk, host, *port, connected))
            .or_else(|| soon(certificates, Side::Client)),
        Address::Helped { .. } => None,
    }
}

fn of_client(folder: &Path) -> Option<Fault> {
    let fault = check_client(folder).err()?;
    let help = format!("{}; the disk is lost with its connection until then", fault.help);
    Some((format!("{}: {}", fault.what, fault.why), help))
}

/// Why a served disk has no connection to its server now.
fn unconnected(
    disk: &Disk,
    host: &str,
    port: u16,
    connected: &mut Option<BTreeSet<SocketAddr>>,
) -> Option<Fault> {
    let addresses = match resolve(host, port) {
        Ok(addresses) => addresses,
        Err(e) => {
            let why = format!("the name {host} has no address: {e}");
            let help = "check getent hosts NAME; the disk goes by the addresses from its start";
            return Some((why, help.to_owned()));
        }
    };
    if disk.phase != PhaseName::Served {
        return None;
    }
    let connected = connected.get_or_insert_with(connections);
    if addresses.iter().any(|address| connected.contains(&plain(*address))) {
        return None;
    }
    let why = "this host has no connection to it now, and requests wait or fail".to_owned();
    let help = "start the server; check the network, its routes and the port (ss -tn, ping)";
    Some((why, help.to_owned()))
}

/// An address of IPv4 that was written as one of IPv6.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The other sides of this host's connections by TCP that are established.
fn connections() -> BTreeSet<SocketAddr> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    [read("/proc/net/tcp"), read("/proc/net/tcp6")]
        .iter()
        .flat_map(|text| established(text))
        .collect()
}

/// From the text of `/proc/net/tcp` or `tcp6`.
fn established(text: &str) -> Vec<SocketAddr> {
    let row = |line: &str| {
        let mut words = line.split_whitespace().skip(2);
        let (remote, state) = (words.next()?, words.next()?);
        let (address, port) = remote.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        (state == "01").then_some(())?;
        Some(plain(SocketAddr::new(address_of(address)?, port)))
    };
    text.lines().skip(1).filter_map(row).collect()
}

/// The kernel prints each word of four bytes as a number of this machine.
fn address_of(text: &str) -> Option<IpAddr> {
    let word = |i: usize| {
        u32::from_str_radix(text.get(8 * i..8 * (i + 1))?, 16).ok().map(u32::to_ne_bytes)
    };
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for i in 0..4 {
                bytes[4 * i..4 * (i + 1)].copy_from_slice(&word(i)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn connections_are_those_that_the_kernel_has() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let at = listener.local_addr().unwrap();
            assert!(!connections().contains(&at));
            let client = TcpStream::connect(at).unwrap();
            assert!(connections().contains(&at), "{at}");
            drop(client);
        }
        assert_eq!(established("head\n 0: 00000000:1F90 0100007F:2A39 01 0\nrubbish\n").len(), 1);
    }
}
