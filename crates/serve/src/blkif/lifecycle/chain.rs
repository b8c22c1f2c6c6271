//! The question to a worker which images it has open, and how much was read from each: for the counters of `tap-ctl
//! stats`.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::path::device::Device;

/// Most bytes of the images in a reply, so that it fits into a message.
const MOST_BYTES: usize = 60 << 10;

/// An image of the open chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainImage {
    /// `raw`, `vhd` or `qcow2`.
    pub format: String,
    /// Its path, as its child names it. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Sectors of 512 bytes that were read from it, below the leaf, since the chain was opened. 0 for the leaf.
    pub read_sectors: u64,
}

/// The images of the open chain, the leaf first, as many as fit into a message. None: the disk has no chain.
pub(super) fn images(device: &Arc<Device>) -> Vec<ChainImage> {
    let Ok(disk) = device.disk() else { return Vec::new() };
    let mut bytes = 0;
    let images = disk.chain().into_iter().map(|image| {
        // Without the dot of a locator's path: `/FOLDER/./NAME`.
        let path: PathBuf = image.path.components().collect();
        let path = path.to_string_lossy().into_owned();
        ChainImage { format: image.format.to_string(), path, read_sectors: image.read_sectors }
    });
    let fits = |image: &ChainImage| {
        bytes += serde_json::to_vec(image).map_or(MOST_BYTES, |text| text.len() + 1);
        bytes <= MOST_BYTES
    };
    images.take_while(fits).collect()
}
