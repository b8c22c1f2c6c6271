//! qemu-img's names for results, which stand beside those of this program in JSON.

use std::path::Path;

use ferrite_image_tools::{Extent, Info, Kind, LayerInfo};
use serde::Serialize;
use serde_json::{Value, json};

/// The properties of a disk with both programs' names.
#[derive(Serialize)]
pub(super) struct Both<'a> {
    #[serde(flatten)]
    pub(super) ours: &'a Info,
    #[serde(flatten)]
    image: Option<Image>,
}

impl<'a> Both<'a> {
    pub(super) fn of(ours: &'a Info) -> Both<'a> {
        Both { ours, image: chain(ours).into_iter().next() }
    }
}

/// The images of a chain, as `qemu-img info --backing-chain` lists them.
pub(super) fn chain(info: &Info) -> Vec<Image> {
    let below = info.chain.iter().skip(1).map(Some).chain([None]);
    info.chain.iter().zip(below).map(|(layer, below)| Image::of(layer, below)).collect()
}

/// An image, as `qemu-img info` has it.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Image {
    filename: String,
    format: &'static str,
    virtual_size: u64,
    actual_size: u64,
    dirty_flag: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    full_backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format_specific: Option<Value>,
}

impl Image {
    fn of(layer: &LayerInfo, below: Option<&LayerInfo>) -> Image {
        // The name alone where both are in one folder: so qcow2 images have it.
        let folder = |path: &str| Path::new(path).parent().map(Path::to_owned);
        let name = |path: &str| Path::new(path).file_name().map(|name| name.display().to_string());
        let relative = below.map(|below| match folder(&below.path) == folder(&layer.path) {
            true => name(&below.path).unwrap_or_default(),
            false => below.path.clone(),
        });
        Image {
            filename: layer.path.clone(),
            format: qemu_format(layer.format),
            virtual_size: layer.virtual_bytes,
            actual_size: layer.disk_bytes,
            // Of the format's own flag, which this program does not set.
            dirty_flag: false,
            cluster_size: layer.unit_bytes,
            backing_filename: relative,
            full_backing_filename: below.map(|below| below.path.clone()),
            backing_filename_format: below.map(|below| qemu_format(below.format)),
            format_specific: specific(layer),
        }
    }
}

/// The further properties of a qcow2 image.
fn specific(layer: &LayerInfo) -> Option<Value> {
    let compat = match layer.kind.as_deref() {
        Some("version 2") => "0.10",
        Some("version 3") => "1.1",
        _ => return None,
    };
    let qcow2 = layer.qcow2?;
    let data = json!({
        "compat": compat,
        "compression-type": qcow2.compression,
        "lazy-refcounts": qcow2.has_lazy_refcounts,
        "refcount-bits": qcow2.refcount_bits,
        "corrupt": qcow2.is_corrupt,
        "extended-l2": qcow2.has_extended_l2,
    });
    Some(json!({ "type": "qcow2", "data": data }))
}

/// qemu-img's name for a format.
fn qemu_format(format: &'static str) -> &'static str {
    if format == "vhd" { "vpc" } else { format }
}

/// A part of a disk with both programs' names.
#[derive(Serialize)]
pub(super) struct Part<'a> {
    #[serde(flatten)]
    ours: &'a Extent,
    start: u64,
    length: u64,
    present: bool,
    zero: bool,
    data: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

impl<'a> Part<'a> {
    pub(super) fn of(ours: &'a Extent) -> Part<'a> {
        let data = matches!(ours.kind, Kind::Data | Kind::Compressed);
        Part {
            ours,
            start: ours.start_bytes,
            length: ours.length_bytes,
            present: ours.kind != Kind::Unallocated,
            zero: !data,
            data,
            offset: ours.offset_bytes,
        }
    }
}
