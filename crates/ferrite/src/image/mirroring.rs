//! A look at the two disks of a mirror, before it is begun.

use ferrite_disk::{
    Disk, ImageName, OnDamage, OpenOptions, SECTOR_BYTES, check_target, mirror_target,
};
use ferrite_image_tools::ImageTools;
use serde::Serialize;

use super::Out;
use super::args::{MirrorCheckArgs, existing};
use super::merging::tell;
use crate::exit::Failure;

/// The result.
#[derive(Serialize)]
struct Checked {
    /// Bytes of the disk.
    bytes: u64,
    /// Bytes of the target.
    target_bytes: u64,
}

/// Opens the target as the worker will, and closes it again. The source is in use, and only its size is read.
pub(super) fn check(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    it: &MirrorCheckArgs,
) -> Result<(), Failure> {
    let source = existing(&it.source, None)?;
    let looks = OpenOptions {
        read_only: true,
        unlocked: true,
        parents: tools.parents.clone(),
        on_damage: OnDamage::Serve,
        ..OpenOptions::default()
    };
    let sectors = Disk::open_image(&source, &looks)?.sectors();
    let target: ImageName = mirror_target(&it.target)?;
    let format_said = ImageName::says_format(&it.target);
    let options =
        OpenOptions { parents: tools.parents.clone(), format_said, ..OpenOptions::default() };
    let opened = Disk::open_image(&target, &options)?;
    check_target(&target, &opened, sectors)?;
    let [bytes, target_bytes] = [sectors, opened.sectors()].map(|n| n * SECTOR_BYTES);
    tell(out, &Checked { bytes, target_bytes }, |it| {
        format!("the target has {} bytes, and the disk {}\n", it.target_bytes, it.bytes)
    })
}
