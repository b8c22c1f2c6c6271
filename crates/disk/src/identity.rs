//! Which image a disk is: what stays the same as long as a guest has it.

use std::io;

use crate::image::Layer;
use crate::journal::made_ns;
use crate::{Disk, Raw};

/// What tells an image from others while the host is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Format, UUID where the format has one, device and inode. The size is not in it: images grow
    /// while they are served.
    pub key: String,
    /// Where it is, as it was named.
    pub path: String,
}

impl Disk {
    /// Of the disk's own image, without its parents.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn identity(&self) -> io::Result<DiskIdentity> {
        let (format, raw) = match self {
            Disk::Null(_) => return Ok(DiskIdentity { key: "null".into(), path: "null:".into() }),
            Disk::Raw(raw) => ("raw".to_owned(), raw),
            Disk::Image(image) => match image.layers().first() {
                Some(Layer::Vhd(vhd)) => (format!("vhd {}", vhd.footer().uuid), vhd.medium()),
                _ => ("qcow2".to_owned(), image.medium()),
            },
        };
        let path = raw.path().display().to_string();
        Ok(DiskIdentity { key: format!("{format}, {}", of_medium(raw)?), path })
    }
}

/// A file's number is used again when it is gone; the new file was made later.
fn of_medium(raw: &Raw) -> io::Result<String> {
    let (device, inode) = raw.inode()?;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    Ok(match inode {
        0 => format!("device {major}:{minor}"),
        _ => format!("inode {inode} of {major}:{minor}, made {}", made_ns(raw.fd())?),
    })
}
