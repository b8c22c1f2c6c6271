//! The check before `ferrite store rollback`: a mistyped name must not give a volume the content of another.

use ferrite_store::journal::Name;
use ferrite_store::live::VolumeInfo;
use ferrite_store::name::StoreName;

use crate::exit::Failure;

/// Refuses a snapshot that neither was made from this volume nor is what this volume was made from. What else is wrong
/// with the names, the store finds.
pub(super) fn check(volumes: &[VolumeInfo], name: &StoreName, snap: &Name) -> Result<(), Failure> {
    let find = |name: &str| volumes.iter().find(|volume| volume.name == name);
    let volume = name.volume.as_ref().and_then(|volume| find(volume.as_str()));
    let (Some(volume), Some(snap)) = (volume, find(snap.as_str())) else { return Ok(()) };
    let is_fit = !volume.snapshot && snap.snapshot && volume.domain == snap.domain;
    if !is_fit || descends(volumes, snap, volume) || descends(volumes, volume, snap) {
        return Ok(());
    }
    let (of, origin, snap) = (&volume.name, &snap.origin, &snap.name);
    let why = match origin {
        Some(origin) => format!("{snap} is a snapshot of {origin}, not of {of}"),
        None => format!("the store does not say that {snap} is a snapshot of {of}"),
    };
    let help = format!(
        "ferrite store list {} shows what each was made from (FROM); with --force {of} gets the content of {snap}, and \
         loses its own",
        name.path.display()
    );
    Err(Failure::new(format!("cannot roll {name} back"), why, help))
}

/// Whether a volume was made from another, directly or by way of others.
fn descends(volumes: &[VolumeInfo], volume: &VolumeInfo, from: &VolumeInfo) -> bool {
    let origin_of = |volume: &VolumeInfo| {
        let origin = volume.origin.as_ref()?;
        volumes.iter().find(|found| found.name == *origin)
    };
    // A damaged store may have a circle.
    let origins = std::iter::successors(origin_of(volume), |volume| origin_of(volume));
    origins.take(volumes.len()).any(|origin| origin.name == from.name)
}
