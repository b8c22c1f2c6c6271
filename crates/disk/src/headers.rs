//! The headers of a disk's image while the disk is in use.

use std::io;

use ferrite_disk_base::Port;
use ferrite_images::Layer;
use ferrite_images::vhd::{Change, Facts, Vhd};

use crate::disk::{Disk, Work};

impl Disk {
    /// What the headers and the table of the disk's image say now. `None`: it is no VHD.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn header_facts(&self) -> io::Result<Option<Facts>> {
        self.leaf_vhd().map(Vhd::facts).transpose()
    }

    /// Changes a field of the headers of the disk's image, durably, while the disk is in use. It has its effect when the
    /// disk is opened again.
    ///
    /// # Errors
    /// `InvalidInput`: this image cannot have it. `Unsupported`: it is no VHD. Otherwise those of [`flush`](Disk::flush);
    /// the call may be repeated.
    pub fn change_headers<'a>(&'a self, port: &'a Port, change: &'a Change) -> Work<'a, ()> {
        Box::pin(async move {
            let leaf = self.leaf_vhd().ok_or(io::ErrorKind::Unsupported)?;
            leaf.change(port, change).await
        })
    }

    fn leaf_vhd(&self) -> Option<&Vhd> {
        match self {
            Disk::Image(image) => match image.layers().first() {
                Some(Layer::Vhd(vhd)) => Some(vhd),
                _ => None,
            },
            Disk::Mirror(mirror) => mirror.source().leaf_vhd(),
            _ => None,
        }
    }
}
