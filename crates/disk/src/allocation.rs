//! The allocated parts of a disk in use.

use std::io;

use ferrite_disk_base::{Format, Port};

use crate::disk::{Disk, Work};
use crate::pieces::{Found, Piece, What, look_in_spite};

/// The beginning of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes.
    pub len: u64,
    /// It reads as zeros, and takes no space.
    pub zeros: bool,
    /// The image of the chain that has it: 1 is the disk's own, 2 its parent. 0: none has.
    pub depth: u32,
}

impl Disk {
    /// Whether the beginning of a range has data. It may read metadata for that, and never data. Where metadata are
    /// damaged it has: reading them fails.
    ///
    /// # Errors
    /// `InvalidInput`: not inside the disk, or empty. Errors of the kernel.
    pub fn allocation<'a>(&'a self, port: &'a Port, offset: u64, len: u64) -> Work<'a, Allocation> {
        Box::pin(async move {
            if len == 0 || !self.contains(offset, len) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            Ok(match self.while_mapped(look_in_spite(self, port, offset, len)).await? {
                Found::Piece(piece) => Allocation {
                    len: piece.len.min(len),
                    zeros: piece.what == What::Zeros,
                    depth: piece.layer.filter(|_| !is_nobodys(self, &piece)).map_or(0, depth),
                },
                // A read of it gets the error.
                Found::Damaged { len: lost, layer, .. } => {
                    Allocation { len: lost.min(len), zeros: false, depth: depth(layer) }
                }
            })
        })
    }
}

/// Whether zeros have no place in any image. The last VHD of a chain says so of blocks without a place: it has no other
/// zeros.
fn is_nobodys(disk: &Disk, piece: &Piece) -> bool {
    let image = match disk {
        Disk::Image(image) => image,
        Disk::Mirror(mirror) => return is_nobodys(mirror.source(), piece),
        _ => return false,
    };
    let layers = image.layers();
    let is_last = piece.layer == layers.len().checked_sub(1);
    let is_vhd = layers.last().is_some_and(|layer| layer.format() == Format::Vhd);
    piece.what == What::Zeros && is_last && is_vhd
}

/// The depth of a layer, whose index is 0 for the disk's own image. A chain has a bounded length.
fn depth(layer: usize) -> u32 {
    layer as u32 + 1
}
