//! The headers of a disk's image while the disk is in use.

use std::io;
use std::path::Path;

use ferrite_disk_base::{Format, Port};
use ferrite_images::Layer;
use ferrite_images::vhd::{Change, Facts, Vhd};

use crate::disk::{Disk, Work};

/// An image of an open chain.
#[derive(Clone, Copy, Debug)]
pub struct ChainImage<'a> {
    /// Its path, as it was opened.
    pub path: &'a Path,
    /// Its format.
    pub format: Format,
    /// Sectors of 512 bytes that were read from it, below the leaf, since the chain was opened.
    pub read_sectors: u64,
}

impl Disk {
    /// The facts in the headers and the table of the disk's image now. `None`: it is no VHD.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn header_facts(&self) -> io::Result<Option<Facts>> {
        self.leaf_vhd().map(Vhd::facts).transpose()
    }

    /// The images of the disk's chain, the leaf first; none if it has no chain. The leaf's sectors are 0: they are what is
    /// left of all reads.
    pub fn chain(&self) -> Vec<ChainImage<'_>> {
        let image = match self {
            Disk::Image(image) => image,
            Disk::Mirror(mirror) => return mirror.source().chain(),
            _ => return Vec::new(),
        };
        let found = std::iter::once(0).chain(image.found_below());
        let layers = image.layers().iter().map(|layer| (layer.medium().path(), layer.format()));
        let images = layers.zip(found);
        images
            .map(|((path, format), read_sectors)| ChainImage { path, format, read_sectors })
            .collect()
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
