//! The messages between the daemons of two hosts.
//!
//! They speak as a client and a server of NBD by TLS do (nbd-rules.md 7), up to the options of the client. Each request
//! is a private option whose data are JSON, and is answered by ACK with JSON. So listening, certificates and the process
//! that speaks TLS are those of exports.

use serde::{Deserialize, Serialize};

use super::token::Receiver;
use crate::Failure;
use crate::params::Format;

/// The version of these messages.
pub(crate) const VERSION: u32 = 1;
/// The private option.
pub(crate) const OPTION: u32 = u32::from_be_bytes(*b"FeMG");
/// The longest request or answer. Maps of changes are the longest part.
pub(crate) const MAX_BYTES: usize = 16 << 20;
/// The longest name of an image's file.
pub(crate) const MAX_NAME: usize = 200;

/// A request of the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ask {
    /// The first one of each connection.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Make an image, and export it.
    Prepare(Prepare),
    /// Take the disk: the copy is complete.
    Take {
        /// The migration.
        id: String,
        /// Whether the image is exported further on, since the guest stays where it is.
        keep: bool,
        /// The file of the disk's dirty maps, in hexadecimal.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        maps: Option<String>,
    },
    /// Give the migration up.
    Abort {
        /// The migration.
        id: String,
    },
    /// What is the state?
    Look {
        /// The migration.
        id: String,
    },
}

/// The disk that comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prepare {
    /// The identifier of the migration: random, 32 hexadecimal digits.
    pub(crate) id: String,
    /// The name of the image's file.
    pub(crate) name: String,
    /// Its format.
    pub(crate) format: Format,
    /// Bytes of the disk.
    pub(crate) bytes: u64,
    /// Bytes that the image takes now.
    pub(crate) allocated: u64,
    /// The image there that it is to stand on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) base: Option<Base>,
    /// Whether a file of `bytes` is to be copied, which has an image of this format in it: a parent of a disk.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub(crate) is_file: bool,
}

/// An image of the receiver that another one stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    /// The name of its file.
    pub(crate) name: String,
    /// The migration by which it came. Without one it has to be one of the receiver's `bases`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) id: Option<String>,
}

/// An answer of the receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// It speaks this version.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// The image is there, and exported.
    Prepared {
        /// The TCP port of the export.
        port: u16,
        /// The export's name.
        export: String,
    },
    /// The state after a request.
    State {
        /// The state. `None`: it does not know the migration.
        state: Option<Receiver>,
        /// What is lost besides, such as dirty maps.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        note: Option<String>,
    },
    /// The request was not done.
    Refused {
        /// Why.
        why: String,
        /// What to do.
        help: String,
    },
}

impl From<Failure> for Answer {
    fn from(Failure { why, help }: Failure) -> Answer {
        Answer::Refused { why, help }
    }
}

/// Whether this can be the identifier of a migration. It becomes a part of files' names.
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Whether this can be the name of an image's file in the folder of incoming images.
pub(crate) fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-+@".contains(c);
    let is_own = name.contains(".ferrite-") || name.ends_with(".new");
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(fits)
        && !name.starts_with(['.', '-'])
        && !is_own
}

/// Bytes as hexadecimal digits.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Hexadecimal digits as bytes.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| (b as char).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        for good in ["web.qcow2", "a", "vm-7_x@1.vhd", &"x".repeat(MAX_NAME)] {
            assert!(is_name(good), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "-x",
            "a/b",
            "a\0",
            "a\n",
            "ä",
            "a.ferrite-dirty",
            &"x".repeat(201),
        ] {
            assert!(!is_name(bad), "{bad:?}");
        }
        assert!(is_id(&"0f".repeat(16)));
        for bad in ["", "../../../../../../../../../etc/pa", &"0F".repeat(16), &"0f".repeat(17)] {
            assert!(!is_id(bad), "{bad}");
        }
        assert_eq!(from_hex(&to_hex(&[0, 255, 16])), Some(vec![0, 255, 16]));
        assert_eq!((from_hex("0"), from_hex("0g")), (None, None));
    }
}
