//! The identity of a disk, which stays the same as long as a guest has it.

use std::io;
use std::path::Path;

use ferrite_disk_base::Raw;
use ferrite_images::Layer;

use crate::Disk;
use ferrite_host::place::{Place, look_at};

/// The properties that distinguish an image from others while the host is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Format, UUID if the format has one, and the identity of the file or device without its present device number.
    /// The size is not in it: images grow while they are served.
    pub key: String,
    /// Its path, as it was named.
    pub path: String,
}

impl DiskIdentity {
    /// The longest key in bytes.
    pub const MAX_KEY_BYTES: usize = 1280;
}

impl Disk {
    /// The identity of the disk's own image, without its parents.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn identity(&self) -> io::Result<DiskIdentity> {
        let (format, raw) = match self {
            Disk::Remote(remote) => {
                let path = remote.facts().name.clone();
                return Ok(DiskIdentity { key: format!("remote {path}"), path });
            }
            Disk::Mirror(mirror) => return mirror.source().identity(),
            Disk::Null(_) => return Ok(DiskIdentity { key: "null".into(), path: "null:".into() }),
            Disk::Raw(raw) => ("raw".to_owned(), raw),
            Disk::Store(volume) => {
                let key = format!("store {}, {}", volume.name(), of_medium(volume.medium())?);
                return Ok(DiskIdentity { key, path: volume.path().display().to_string() });
            }
            Disk::Elsewhere(volume) => {
                let path = volume.path().display().to_string();
                return Ok(DiskIdentity { key: format!("elsewhere {path}"), path });
            }
            Disk::Image(image) => match image.layers().first() {
                Some(Layer::Vhd(vhd)) => (format!("vhd {}", vhd.footer().uuid), vhd.medium()),
                _ => ("qcow2".to_owned(), image.medium()),
            },
        };
        let path = raw.path().display().to_string();
        Ok(DiskIdentity { key: format!("{format}, {}", of_medium(raw)?), path })
    }
}

fn of_medium(raw: &Raw) -> io::Result<String> {
    Ok(Place::while_up(raw.fd())?.text().to_owned())
}

impl DiskIdentity {
    /// The identity of a raw disk at this path, which is not opened.
    ///
    /// # Errors
    /// There is none, or it cannot be examined.
    pub fn raw_at(path: &Path) -> io::Result<DiskIdentity> {
        let key = format!("raw, {}", Place::while_up(look_at(path)?)?.text());
        Ok(DiskIdentity { key, path: path.display().to_string() })
    }
}
