//! The places of a disk's parts: the chain is asked from memory, its metadata are loaded if needed, and holes of files
//! are found.

use std::io;

use ferrite_disk_base::{Format, Port, Raw, Run, is_damage};
use ferrite_images::{Layer, Mapping};

use crate::disk::{Disk, Work};

/// The most bytes that a chain of several layers is asked about at once. A layer without data looks through all of its
/// tables for that range, and is asked again behind each piece of those below it.
const ASKED_OF_CHAIN: u64 = 256 << 20;

/// The beginning of a range, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes, from the start of the range asked for.
    pub len: u64,
    /// The index of the layer that has it; the leaf is 0. `None`: no layer has it.
    pub layer: Option<usize>,
    /// Its content.
    pub what: What,
}

/// The content of a part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Bytes of the layer's file from here on.
    Data(u64),
    /// Compressed in the layer's file.
    Packed,
    /// In a store, block by block.
    Shared,
    /// It reads as zeros.
    Zeros,
}

/// Finds the beginning of a range, which is inside the disk. It may read metadata, and never data.
///
/// # Errors
/// `InvalidData`: metadata is damaged. Errors of the kernel.
pub fn look<'a>(disk: &'a Disk, port: &'a Port, offset: u64, len: u64) -> Work<'a, Piece> {
    Box::pin(async move {
        match disk {
            Disk::Null(_) => Ok(Piece { len, layer: None, what: What::Zeros }),
            Disk::Raw(raw) => match raw.bytes_in_file(offset, len) {
                0 => Ok(Piece { len, layer: Some(0), what: What::Zeros }),
                len => Ok(data(raw, 0, offset, len)),
            },
            Disk::Store(volume) => {
                let (zeros, len) = volume.look(port, offset, len).await?;
                let what = if zeros { What::Zeros } else { What::Shared };
                Ok(Piece { len, layer: Some(0), what })
            }
            Disk::Elsewhere(volume) => {
                let (zeros, len) = volume.look(port, offset, len).await?;
                let what = if zeros { What::Zeros } else { What::Shared };
                Ok(Piece { len, layer: Some(0), what })
            }
            Disk::Remote(remote) => {
                let found = remote.allocation(port, offset, len).await?;
                let what = if found.zeros { What::Zeros } else { What::Data(offset) };
                Ok(Piece { len: found.len, layer: Some(0), what })
            }
            Disk::Mirror(mirror) => look(mirror.source(), port, offset, len).await,
            Disk::Image(image) => look_at_layers(image.layers(), port, offset, len).await,
        }
    })
}

/// The beginning of a range of a disk that may be damaged.
#[derive(Debug)]
pub enum Found {
    /// Its place.
    Piece(Piece),
    /// Its place is not known.
    Damaged {
        /// Bytes, from the start of the range asked for.
        len: u64,
        /// The index of the layer whose metadata are damaged.
        layer: usize,
        /// The reason.
        why: io::Error,
    },
}

/// [`look`] at a disk that may be damaged.
///
/// # Errors
/// Errors of the kernel that are no damage.
pub fn look_in_spite<'a>(disk: &'a Disk, port: &'a Port, offset: u64, len: u64) -> Work<'a, Found> {
    Box::pin(async move {
        if let Disk::Mirror(mirror) = disk {
            return look_in_spite(mirror.source(), port, offset, len).await;
        }
        let Disk::Image(image) = disk else {
            return look(disk, port, offset, len).await.map(Found::Piece);
        };
        let layers = image.layers();
        let mut len = if layers.len() > 1 { len.min(ASKED_OF_CHAIN) } else { len };
        for (i, layer) in layers.iter().enumerate() {
            match look_at_layer(layer, i, port, offset, len).await {
                Ok((Some(piece), _)) => return Ok(Found::Piece(piece)),
                Ok((None, below)) => len = below,
                Err(why) => match layer.find(offset, len) {
                    Mapping::Miss { len } if len > 0 && is_damage(&why) => {
                        return Ok(Found::Damaged { len, layer: i, why });
                    }
                    _ => return Err(why),
                },
            }
        }
        Ok(Found::Piece(Piece { len, layer: None, what: What::Zeros }))
    })
}

async fn look_at_layers(layers: &[Layer], port: &Port, offset: u64, len: u64) -> io::Result<Piece> {
    let (piece, len) = look_at_first(layers, port, offset, len).await?;
    Ok(piece.unwrap_or(Piece { len, layer: None, what: What::Zeros }))
}

/// Finds the beginning of a range in the first layers of a chain: a piece of the first that has it; or, without one, the
/// number of bytes that all of them lack.
///
/// # Errors
/// As [`look`].
pub async fn look_at_first(
    layers: &[Layer],
    port: &Port,
    offset: u64,
    len: u64,
) -> io::Result<(Option<Piece>, u64)> {
    let mut len = if layers.len() > 1 { len.min(ASKED_OF_CHAIN) } else { len };
    for (i, layer) in layers.iter().enumerate() {
        match look_at_layer(layer, i, port, offset, len).await? {
            (Some(piece), _) => return Ok((Some(piece), 0)),
            (None, below) => len = below,
        }
    }
    Ok((None, len))
}

/// Finds the beginning of a range in one layer: a piece; or, without one, the number of bytes that the layer lacks. `i`
/// is the index of the layer in its chain.
///
/// # Errors
/// As [`look`].
pub async fn look_at_layer(
    layer: &Layer,
    i: usize,
    port: &Port,
    offset: u64,
    len: u64,
) -> io::Result<(Option<Piece>, u64)> {
    loop {
        let piece = match layer.find(offset, len) {
            Mapping::Backing { len } => return Ok((None, len)),
            Mapping::Miss { len: missing } => {
                // The walk comes to the tables behind it, too: those of qcow2 are read ahead.
                let wanted = if layer.format() == Format::Qcow2 { len } else { missing };
                layer.load(port, port.files[i], offset, wanted).await?;
                continue;
            }
            Mapping::Data { offset, len } => data(layer.medium(), i, offset, len),
            Mapping::Zeros { len } => Piece { len, layer: Some(i), what: What::Zeros },
            Mapping::Compressed { len } | Mapping::Cow { len } => {
                Piece { len, layer: Some(i), what: What::Packed }
            }
        };
        if piece.len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a layer answered for nothing"));
        }
        return Ok((Some(piece), 0));
    }
}

/// Data of a file, or a hole.
fn data(raw: &Raw, layer: usize, offset: u64, len: u64) -> Piece {
    let piece = |what, len| Piece { len, layer: Some(layer), what };
    match raw.run_at(offset) {
        Some(Run::Hole(end)) => piece(What::Zeros, (end - offset).min(len)),
        Some(Run::Data(end)) => piece(What::Data(offset), (end - offset).min(len)),
        None => piece(What::Data(offset), len),
    }
}
