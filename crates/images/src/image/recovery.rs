//! Recovery of a parent's journal into the leaf.
//!
//! If another program makes a child of an image whose backend was killed, answered writes are in the journal of a
//! parent, which no process writes to any more. The guest expects a flush to cover them, and the journal does not
//! outlive the host. So the leaf gets a copy before the disk is used. The journal of a killed coalesce costs nothing:
//! the leaf has its data.

use std::io;

use ferrite_disk_base::{Port, SECTOR_BYTES};

use super::Image;
use super::mapping::Mapping;

/// A part of the disk that a parent has from its journal, at least partly.
#[derive(Clone, Copy, Debug)]
pub struct Unrecovered {
    /// Index of the parent in the chain.
    layer: usize,
    /// First byte of the disk.
    pub start: u64,
    /// The first byte after it.
    pub end: u64,
}

impl Image {
    /// The parts of the disk that only a parent's journal has, before anything was loaded or written.
    pub fn unrecovered(&self) -> Vec<Unrecovered> {
        let bytes = self.sectors() * SECTOR_BYTES;
        let parents = self.layers.iter().enumerate().skip(1);
        let parts = parents.flat_map(|(layer, parent)| {
            let parts = parent.recovered().into_iter();
            parts.map(move |(start, len)| Unrecovered {
                layer,
                start,
                end: (start + len).min(bytes),
            })
        });
        parts.filter(|part| part.start < part.end).collect()
    }

    /// Tells for a part, from the byte `at` on, whether the leaf needs a copy (it has no data there, and the parent
    /// has), and for how many bytes that holds.
    ///
    /// # Errors
    /// Those of reading metadata.
    pub async fn lacks(&self, port: &Port, part: Unrecovered, at: u64) -> io::Result<(bool, u64)> {
        let (own, len) = self.has(port, 0, at, part.end - at).await?;
        if own {
            return Ok((false, len));
        }
        self.has(port, part.layer, at, len).await
    }

    /// Whether a layer has the beginning of a range, and for how many bytes that holds.
    async fn has(&self, port: &Port, layer: usize, at: u64, len: u64) -> io::Result<(bool, u64)> {
        loop {
            match self.layers[layer].find(at, len) {
                Mapping::Backing { len } => return Ok((false, len)),
                Mapping::Miss { len } => {
                    self.layers[layer].load(port, port.files[layer], at, len).await?;
                }
                Mapping::Data { len, .. }
                | Mapping::Zeros { len }
                | Mapping::Compressed { len }
                | Mapping::Cow { len } => return Ok((true, len)),
            }
        }
    }
}
