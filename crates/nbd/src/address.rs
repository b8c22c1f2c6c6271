//! The address of a server, which processes of Ferrite give each other as bytes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use crate::uri::rbd::Image;

/// Before the name of an image that is written, and of one that is only read.
const RBD: [&[u8]; 2] = [b"rbd:", b"rbd-read-only:"];

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
    /// An image of a Ceph cluster: a helper process stands between, which has it open.
    Rbd {
        /// The image, with the settings of its name.
        image: Image,
        /// Nothing is written, and no lock is taken.
        read_only: bool,
    },
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
            Address::Rbd { image, read_only } => {
                let name = image.to_string();
                ([RBD[usize::from(*read_only)], name.as_bytes()].concat(), &[])
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
        for (read_only, prefix) in [false, true].into_iter().zip(RBD) {
            if let Some(name) = bytes.strip_prefix(prefix) {
                let image = Image::parse(std::str::from_utf8(name).ok()?).ok()?;
                return Some(Address::Rbd { image, read_only });
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
        for address in [
            Address::Unix("/run/a:b".into()),
            Address::Tcp { host: "::1".into(), port: 7 },
            Address::Tcp { host: "h.example".into(), port: 65535 },
            Address::Tls { host: "::1".into(), port: 7, certificates: "/etc/pki".into() },
            Address::Rbd { image: Image::parse("p/i?id=a").unwrap(), read_only: false },
            Address::Rbd {
                image: Image::parse("p/n/i%40x@s?keyring=/k").unwrap(),
                read_only: true,
            },
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
        ] {
            assert_eq!(Address::parse(text.as_bytes(), &[]), None, "{text}");
        }
    }
}
