//! The address of a server, which processes of Ferrite give each other as bytes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use crate::uri::pool::Disk;
use crate::uri::rbd::Image;

/// Before the name of an image on Ceph that is written, and of one that is only read.
const RBD: [&[u8]; 2] = [b"rbd:", b"rbd-read-only:"];
/// The same for a disk of a pool.
const POOL: [&[u8]; 2] = [b"pool:", b"pool-read-only:"];

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// A Unix socket of the kind `STREAM`.
    Unix(PathBuf),
    /// A TCP port, without encryption.
    Tcp {
        /// A name, or an address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A TCP port, by TLS.
    Tls {
        /// A name, or an address without brackets, as the server's certificate has it.
        host: String,
        /// The port.
        port: u16,
        /// The folder of `ca-cert.pem` and perhaps `client-cert.pem` and `client-key.pem`.
        certificates: PathBuf,
    },
    /// A disk that a helper process has open. It speaks NBD on a socket pair to the process that has started it.
    Helped {
        /// The disk, with the settings of its name.
        by: Helped,
        /// Nothing is written.
        read_only: bool,
    },
}

/// A disk that a helper process opens, by the kind of the helper.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Helped {
    /// An image of a Ceph cluster: `ferrite-rbd`. If it is only read, no lock is taken.
    Rbd(Image),
    /// A disk of a pool of servers: `ferrite pool own`. A reader has it alone, too.
    Pool(Disk),
}

impl Helped {
    /// The name without settings, for people: with the scheme.
    pub fn short(&self) -> String {
        match self {
            Helped::Rbd(image) => format!("rbd:{}", image.short()),
            Helped::Pool(disk) => format!("pool:{}", disk.short()),
        }
    }
}

impl Address {
    /// As two texts, for [`parse`](Self::parse): the server, and the folder of certificates.
    pub fn to_bytes(&self) -> (Vec<u8>, &[u8]) {
        match self {
            Address::Unix(path) => ([b"unix:", path.as_os_str().as_bytes()].concat(), &[]),
            Address::Tcp { host, port } => (format!("tcp:{port}:{host}").into_bytes(), &[]),
            Address::Tls { host, port, certificates } => {
                (format!("tls:{port}:{host}").into_bytes(), certificates.as_os_str().as_bytes())
            }
            Address::Helped { by, read_only } => {
                let (prefixes, name) = match by {
                    Helped::Rbd(image) => (RBD, image.to_string()),
                    Helped::Pool(disk) => (POOL, disk.to_string()),
                };
                ([prefixes[usize::from(*read_only)], name.as_bytes()].concat(), &[])
            }
        }
    }

    /// From such texts. None: they are none.
    pub fn parse(bytes: &[u8], folder: &[u8]) -> Option<Address> {
        if let Some(rest) = bytes.strip_prefix(b"tls:") {
            let Address::Tcp { host, port } = Address::parse(&[b"tcp:", rest].concat(), &[])?
            else {
                return None;
            };
            let certificates = OsString::from_vec(folder.to_vec()).into();
            return folder.starts_with(b"/").then_some(Address::Tls { host, port, certificates });
        }
        if !folder.is_empty() {
            return None;
        }
        let behind = |prefix: &[u8]| std::str::from_utf8(bytes.strip_prefix(prefix)?).ok();
        for read_only in [false, true] {
            if let Some(name) = behind(RBD[usize::from(read_only)]) {
                let by = Helped::Rbd(Image::parse(name).ok()?);
                return Some(Address::Helped { by, read_only });
            }
            if let Some(name) = behind(POOL[usize::from(read_only)]) {
                let by = Helped::Pool(Disk::parse(name).ok()?);
                return Some(Address::Helped { by, read_only });
            }
        }
        if let Some(path) = bytes.strip_prefix(b"unix:").filter(|path| path.starts_with(b"/")) {
            return Some(Address::Unix(OsString::from_vec(path.to_vec()).into()));
        }
        let text = std::str::from_utf8(bytes.strip_prefix(b"tcp:")?).ok()?;
        let (port, host) = text.split_once(':')?;
        let (port, host) = (port.parse().ok()?, host.to_owned());
        (!host.is_empty()).then_some(Address::Tcp { host, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_what_its_text_says() {
        let helped = |by, read_only| Address::Helped { by, read_only };
        let of_pool = "p/d?etcd=https://h:1&tls=/t&experimental=yes&deadline_s=9";
        for address in [
            Address::Unix("/run/a:b".into()),
            Address::Tcp { host: "::1".into(), port: 7 },
            Address::Tcp { host: "h.example".into(), port: 65535 },
            Address::Tls { host: "::1".into(), port: 7, certificates: "/etc/pki".into() },
            helped(Helped::Rbd(Image::parse("p/i?id=a").unwrap()), false),
            helped(Helped::Rbd(Image::parse("p/n/i%40x@s?keyring=/k").unwrap()), true),
            helped(Helped::Pool(Disk::parse("p/d").unwrap()), true),
            helped(Helped::Pool(Disk::parse(of_pool).unwrap()), false),
        ] {
            let (text, folder) = address.to_bytes();
            assert_eq!(Address::parse(&text, folder), Some(address.clone()));
        }
        for text in [
            "",
            "unix:",
            "unix:a",
            "tcp:",
            "tcp:1:",
            "tcp:x:h",
            "tcp:65536:h",
            "/a",
            "tls:1:h",
            "rbd:",
            "rbd:p",
            "rbd-read-only:p/i?x=1",
            "pool:",
            "pool:p",
            "pool-read-only:p/d?x=1",
        ] {
            assert_eq!(Address::parse(text.as_bytes(), &[]), None, "{text}");
        }
    }
}
