//! Orders about the headers of the image that a worker has open: a tool changes and reads them through the worker
//! (`vhd-util modify`, `set`, `key`, `resize -f`, `query`, `scan`).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_disk::{Disk, HeaderChange, HeaderFacts, KeyHash, ParentLink, Session, Uuid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::connected::EngineFactory;
use crate::path::device::Device;

/// Operations in flight of a session that changes headers.
const ENTRIES: u32 = 32;

/// A change of an image's headers. The open disk stays as it is until it is opened again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Change {
    /// The image has another parent, which reads as the old one, or hides what is different.
    Parent {
        /// Its UUID in hexadecimal digits, with or without dashes; of a raw image all are 0.
        uuid: String,
        /// When it was last changed, in seconds since 1970.
        modified: u64,
        /// Its path from the image's folder: `./NAME`.
        relative: String,
    },
    /// Whether the image is used only as a parent.
    Hidden(u8),
    /// The hash of its key.
    Key {
        /// The nonce, which is hashed before the key: 64 hexadecimal digits.
        nonce: String,
        /// The hash: 64 hexadecimal digits.
        hash: String,
    },
    /// The size of its disk in bytes, larger than before.
    Size(u64),
}

/// A question to a worker about its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOrder {
    /// The file that is meant: file system and number, or a block device and 0.
    pub file: (u64, u64),
    /// The change. `None`: only the facts are asked for.
    pub change: Option<Change>,
}

/// The facts in an image's headers and table now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Bytes of its disk after the next opening.
    pub bytes: u64,
    /// The end of the last used part of its file, in bytes. The reserve behind that does not count.
    pub end: u64,
    /// Blocks that have a place. Absent in a fixed image.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub blocks: Option<u32>,
    /// Blktap's field: it is used only as a parent.
    pub hidden: u8,
    /// Its parent's likeliest path.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub parent: Option<String>,
}

/// A worker's reply to an [`ImageOrder`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageReply {
    /// It was done. The facts are those after a change.
    Facts(Facts),
    /// This image cannot have that.
    Refused {
        /// The reason, for programs.
        errno: i32,
        /// The reason, for people.
        why: String,
    },
    /// The worker does not write to this file.
    NotMine,
}

impl From<HeaderFacts> for Facts {
    fn from(facts: HeaderFacts) -> Facts {
        let HeaderFacts { bytes, end, blocks, hidden, parent } = facts;
        // Without the dot of a locator's path: `/FOLDER/./NAME`.
        let whole = |path: PathBuf| path.components().collect::<PathBuf>();
        let parent = parent.map(|path| whole(path).to_string_lossy().into_owned());
        Facts { bytes, end, blocks, hidden, parent }
    }
}

impl ImageReply {
    fn refused(errno: Errno, why: impl Into<String>) -> ImageReply {
        ImageReply::Refused { errno: errno.raw_os_error(), why: why.into() }
    }

    fn failed(e: &io::Error) -> ImageReply {
        let errno = match e.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => Errno::INVAL,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Errno::NOSPC,
            io::ErrorKind::PermissionDenied => Errno::ROFS,
            _ => Errno::IO,
        };
        ImageReply::refused(errno, e.to_string())
    }
}

/// Carries out an order for the disk that is served. The order of durable writes of a change:
///
/// 1. A flush: data and metadata of all answered writes, in the order of the format's commit.
/// 2. The header field, in the steps of `images/src/vhd/headers.rs`.
///
/// Queues go on meanwhile. A worker that dies leaves the old field or the new one, and the daemon asks the next worker
/// again.
pub(super) fn carry_out(
    device: &Arc<Device>,
    engine: &EngineFactory,
    order: &ImageOrder,
) -> ImageReply {
    let disk = match device.disk() {
        Ok(disk) => disk,
        Err(e) => return ImageReply::failed(&e),
    };
    // An image that is only read is as its file says, and others may change it.
    if disk.read_only() || disk.media().first().is_none_or(|leaf| leaf.inode() != order.file) {
        return ImageReply::NotMine;
    }
    if let Some(change) = &order.change {
        let Some(change) = parsed(change) else {
            return ImageReply::refused(Errno::INVAL, "the change has wrong digits");
        };
        if device.flush_has_failed() {
            return ImageReply::refused(Errno::IO, "a flush has failed: detach the disk first");
        }
        match changed(device, engine, &disk, &change) {
            Ok(()) => {
                tracing::info!("the image's headers were changed while it is in use: {change:?}")
            }
            Err(e) => return ImageReply::failed(&e),
        }
    }
    match disk.header_facts() {
        Ok(Some(facts)) => ImageReply::Facts(facts.into()),
        Ok(None) => ImageReply::refused(Errno::INVAL, "it is no VHD"),
        Err(e) => ImageReply::failed(&e),
    }
}

fn changed(
    device: &Arc<Device>,
    engine: &EngineFactory,
    disk: &Arc<Disk>,
    change: &HeaderChange,
) -> io::Result<()> {
    let mut session = Session::new(disk.clone(), |arena| engine(arena, ENTRIES))?;
    let port = session.port().clone();
    session.run(device.flush(disk, &port))??;
    session.run(disk.change_headers(&port, change))?
}

fn parsed(change: &Change) -> Option<HeaderChange> {
    Some(match change {
        Change::Parent { uuid, modified, relative } => HeaderChange::Parent(ParentLink {
            uuid: Uuid(digits(&uuid.replace('-', ""))?),
            modified_unix_s: *modified,
            relative: PathBuf::from(relative),
        }),
        Change::Hidden(hidden) => HeaderChange::Hidden(*hidden),
        Change::Key { nonce, hash } => {
            HeaderChange::Key(KeyHash { nonce: digits(nonce)?, hash: digits(hash)? })
        }
        Change::Size(bytes) => HeaderChange::Bytes(*bytes),
    })
}

/// The bytes that these hexadecimal digits stand for.
fn digits<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_bytes_and_nothing_else_is() {
        assert_eq!(digits::<2>("00fF"), Some([0, 255]));
        for wrong in ["00f", "00fg", "00ff0", "+0ff", "\u{e9}\u{e9}"] {
            assert_eq!(digits::<2>(wrong), None, "{wrong}");
        }
    }
}
