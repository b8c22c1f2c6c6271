//! What is different from format to format.

use std::io;
use std::os::unix::fs::MetadataExt;

use super::create::Parent;
use super::info::{of_medium, raw_info};
use super::{LayerInfo, NewImage, broken, unsuitable};
use crate::image::Layer;
use crate::qcow2::NewImage as NewQcow2;
use crate::vhd::{DEFAULT_BLOCK_BYTES, Kind, NewImage as NewVhd, NewParent, Stamp, Uuid, Vhd};
use crate::{Disk, DiskError, Format, Port, Raw};

/// Writes an image of `bytes` without data into a new file or a device, durably.
pub(super) async fn empty(
    port: &Port,
    raw: &Raw,
    format: Format,
    new: &NewImage,
    parent: Option<&Parent>,
    bytes: u64,
) -> Result<(), DiskError> {
    match format {
        Format::Raw => {
            let made = empty_raw(port, raw, new, bytes).await;
            made.map_err(|e| broken(format!("cannot make {}", raw.path().display()), e))
        }
        Format::Vhd => {
            let new = NewVhd {
                bytes,
                fixed: new.fixed,
                parent: parent.map(vhd_parent),
                block_bytes: new.unit_bytes.unwrap_or(DEFAULT_BLOCK_BYTES),
                room_for_bytes: 0,
                stamp: Stamp::from_system(),
            };
            new.create(port, raw).await.map(|_| ())
        }
        Format::Qcow2 => {
            let backing = parent.map(|parent| qcow2_backing(parent, raw)).transpose()?;
            let room_for_bytes = 0;
            let usual = NewQcow2::new(bytes);
            let cluster_bytes = new.unit_bytes.unwrap_or(usual.cluster_bytes);
            let new = NewQcow2 { backing, cluster_bytes, room_for_bytes, ..usual };
            new.create(port, raw).await
        }
    }
}

/// A parent's name for a new image.
fn qcow2_backing(parent: &Parent, child: &Raw) -> Result<(String, Format), DiskError> {
    let name = parent.path.to_str().map(|name| (name.to_owned(), parent.name.format));
    name.ok_or_else(|| {
        let what = format!("cannot make {}", child.path().display());
        let why = format!("the name of its parent, {}, is no UTF-8", parent.path.display());
        unsuitable(what, why, "rename the parent")
    })
}

async fn empty_raw(port: &Port, raw: &Raw, new: &NewImage, bytes: u64) -> io::Result<()> {
    let file = port.files[0];
    if !raw.is_file() {
        return match raw.bytes_now()? {
            room if room < bytes => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        };
    }
    port.io.set_len(file, bytes).await?;
    if new.fixed {
        match port.io.allocate(file, 0, bytes).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
            done => done?,
        }
    }
    port.io.sync(file).await
}

/// The layer that a disk is, without those below it.
fn leaf(disk: &Disk) -> Option<&Layer> {
    match disk {
        Disk::Image(image) => image.layers().first(),
        _ => None,
    }
}

fn vhd_parent(parent: &Parent) -> NewParent {
    let uuid = match leaf(&parent.disk) {
        Some(Layer::Vhd(vhd)) => vhd.footer().uuid,
        _ => Uuid::NIL,
    };
    let modified = parent.path.metadata().map(|meta| meta.mtime()).unwrap_or(0);
    NewParent {
        uuid,
        bytes: parent.bytes(),
        modified_unix_s: u64::try_from(modified).unwrap_or(0),
        path: parent.path.clone(),
    }
}

/// Whether an image of this format can stand on a parent of that one.
pub(super) fn stands_on(child: Format, parent: Format) -> bool {
    match child {
        Format::Raw => false,
        Format::Vhd => parent != Format::Qcow2,
        Format::Qcow2 => true,
    }
}

/// What a layer says about itself.
pub(super) fn layer_info(layer: &Layer) -> Result<LayerInfo, DiskError> {
    match layer {
        Layer::Raw(raw) => raw_info(raw),
        Layer::Vhd(vhd) => vhd_info(vhd),
        Layer::Qcow2(qcow2) => Ok(LayerInfo {
            kind: Some(format!("version {}", qcow2.version())),
            virtual_bytes: qcow2.bytes(),
            unit_bytes: Some(qcow2.cluster_bytes()),
            ..of_medium(qcow2.medium(), Format::Qcow2)?
        }),
    }
}

fn vhd_info(vhd: &Vhd) -> Result<LayerInfo, DiskError> {
    let footer = vhd.footer();
    let kind = match footer.kind {
        Kind::Fixed => "fixed",
        Kind::Dynamic => "dynamic",
        Kind::Differencing => "differencing",
    };
    let (app, version) = (footer.creator.app, footer.creator.version);
    let app: String = app.iter().map(|b| char::from(*b)).filter(char::is_ascii_graphic).collect();
    Ok(LayerInfo {
        kind: Some(kind.into()),
        virtual_bytes: vhd.bytes(),
        uuid: Some(footer.uuid.to_string()),
        creator: Some(format!("{app} {}.{}", version >> 16, version & 0xffff)),
        ..of_medium(vhd.medium(), Format::Vhd)?
    })
}
