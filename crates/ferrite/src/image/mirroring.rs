//! A look at the two disks of a mirror, before it is begun; and the map that says after a power cut what its target lacks.

use ferrite_disk::{
    Disk, ErrorKind, ImageName, OnDamage, OpenOptions, SECTOR_BYTES, check_target, mirror_target,
    target_identity,
};
use ferrite_image_tools::{ImageTools, MIRROR_MAP, MapChange};
use serde::Serialize;

use super::Out;
use super::args::{MirrorCheckArgs, MirrorMapArgs, MirrorMapVerb, existing};
use super::merging::tell;
use crate::exit::Failure;

/// The result.
#[derive(Serialize)]
struct Checked {
    /// Bytes of the disk.
    bytes: u64,
    /// Bytes of the target.
    target_bytes: u64,
    /// The name of the map for this target: another file has another one.
    map: String,
}

/// The result of a change of the map.
#[derive(Serialize)]
struct Kept {
    /// Whether there is a map that fits.
    kept: bool,
    /// Why there is none.
    why: String,
    /// Whether there are other maps.
    others: bool,
}

impl Kept {
    fn none(why: &str) -> Kept {
        Kept { kept: false, why: why.to_owned(), others: false }
    }
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
    let identity = target_identity(&opened).unwrap_or_default();
    let hash = blake3::hash(format!("{}\n{identity}", it.target).as_bytes());
    let map = format!("{MIRROR_MAP}{}", &hash.to_hex()[..16]);
    let [bytes, target_bytes] = [sectors, opened.sectors()].map(|n| n * SECTOR_BYTES);
    tell(out, &Checked { bytes, target_bytes, map }, |it| {
        format!("the target has {} bytes, and the disk {}\n", it.target_bytes, it.bytes)
    })
}

/// Changes the map, or looks whether there is one. A disk that cannot have maps has a mirror without one.
pub(super) fn map(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    it: &MirrorMapArgs,
) -> Result<(), Failure> {
    let source = existing(&it.source, None)?;
    let kept = match it.verb {
        MirrorMapVerb::Begin => {
            match tools.change_maps(&source, &MapChange::Mirror(it.map.clone())) {
                Ok(_) => Kept { kept: true, ..Kept::none("") },
                Err(e) if e.kind() == ErrorKind::Unsuitable => Kept::none(e.why()),
                Err(e) => return Err(e.into()),
            }
        }
        MirrorMapVerb::Keep | MirrorMapVerb::Look => {
            let in_use = ImageTools {
                unlocked: it.verb == MirrorMapVerb::Look,
                state_dir: tools.state_dir.clone(),
                parents: tools.parents.clone(),
                ..*tools
            };
            let maps = in_use.dirty_maps(&source)?;
            let others = maps.maps.iter().any(|map| map.name != it.map);
            let is_there = maps.maps.iter().any(|map| map.name == it.map);
            let why = match maps.void {
                Some(why) => why,
                None if is_there => String::new(),
                None => "the disk has no map of a mirror to this target".to_owned(),
            };
            Kept { kept: why.is_empty(), why, others }
        }
        MirrorMapVerb::End => match tools.change_maps(&source, &MapChange::End(it.map.clone())) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Unsuitable) => {
                return Err(e.into());
            }
            _ => Kept::none(""),
        },
    };
    tell(out, &kept, |it| format!("kept: {}\n", it.kept))
}
