//! The differences between formats: each has a file here.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use ferrite_disk::{Disk, Elsewhere, RemoteDisk, Volume};
use ferrite_disk_base::{
    Counts, DiskError, ErrorKind, Format, ImageName, Port, ProblemKind, Raw, SECTOR_BYTES,
};
use ferrite_images::qcow2::Qcow2;
use ferrite_images::vhd::Vhd;
use ferrite_images::{Image, ImageFormat, Layer, each_format};
use ferrite_io::scratch::MAX_PIECE_BYTES;
use ferrite_store::BLOCK_BYTES;

use super::files::is_write_protected;
use super::room::Room;
use super::spec::{NewImage, Parent};
use super::{Checked, Finding, LayerInfo, broken, unsuitable};

mod qcow2;
mod raw;
mod vhd;

/// A new image: its name, properties and parent, and the bytes of its disk.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub(super) path: &'a Path,
    pub(super) new: &'a NewImage,
    pub(super) parent: Option<&'a Parent>,
    pub(super) bytes: u64,
}

/// The content of a new image on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blank {
    /// Zeros.
    Zeros,
    /// Any content, if the format cannot hide it: every byte will be written.
    Anything,
}

/// Rules of other programs, which a strict check applies, too.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rules<'a> {
    /// None.
    Ours,
    /// The rules of other programs, for an image whose parent has this path, if it has one that was found.
    Theirs(Option<&'a Path>),
}

/// The findings of a check.
#[derive(Default)]
struct Looked {
    findings: Vec<Finding>,
    counts: Counts,
    /// Findings that are in the line of another one.
    joined: u64,
    unused_bytes: u64,
}

/// The tools' operations on images of a format. Operations that most formats do not need have a default.
trait Offline: ImageFormat + Sized {
    /// Refuses invalid options of a new image, before anything is made or changed.
    fn check_new(new: New<'_>) -> Result<(), DiskError>;

    /// Writes an image without data into a new file or a device, durably.
    async fn empty(port: &Port, raw: &Raw, new: New<'_>) -> Result<(), DiskError>;

    /// Whether an image on a device shows the device's old data until they are overwritten.
    fn shows_medium(_: &NewImage) -> bool {
        false
    }

    /// The operations of other programs that do not work with a new image.
    fn warnings(_: New<'_>) -> Vec<String> {
        Vec::new()
    }

    /// Whether an image of this format can have a parent of that one.
    fn stands_on(_: Format) -> bool {
        false
    }

    /// Checks one image.
    fn check(_: &Raw, _: Rules<'_>) -> Result<Looked, DiskError> {
        Ok(Looked::default())
    }

    /// Whether [`repair`](Self::repair) would change an image.
    fn is_repairable(_: &Raw) -> Result<bool, DiskError> {
        Ok(false)
    }

    /// Repairs one image.
    async fn repair(_: &Port, _: &Raw) -> Result<(), DiskError> {
        Ok(())
    }

    /// The properties of an image.
    fn info(&self) -> Result<LayerInfo, DiskError>;

    /// Bytes of the unit of allocation.
    fn unit_bytes(&self) -> Option<u32> {
        None
    }

    /// Whether its L2 entries have a bitmap of subclusters.
    fn has_extended_l2(&self) -> bool {
        false
    }

    /// Whether it takes the space of all its disk at once.
    fn is_fixed(&self) -> bool {
        false
    }

    /// The number of internal snapshots.
    fn inner_snapshots(&self) -> io::Result<usize> {
        Ok(0)
    }

    /// The number of dirty bitmaps inside that are up to date.
    fn dirty_bitmaps(&self) -> u32 {
        0
    }

    /// The bytes of the disk that QEMU sees after a resize.
    fn qemu_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    /// Resizes it, above a disk of `below_bytes`, and closes it.
    async fn resize(self, port: &Port, bytes: u64, below_bytes: u64) -> Result<(), DiskError>;

    /// Gives an image that stands on another one this parent, in its place, and closes it.
    async fn relink(self, _: &Port, _: &Parent) -> Result<(), DiskError> {
        let what = format!("cannot give {} another parent", self.medium().path().display());
        Err(unsuitable(
            what,
            "a raw image has no parent",
            "name an image that stands on another one",
        ))
    }

    /// Completes a parent that has all data of its child, with the child's identity if the format has one.
    async fn take_identity(self, port: &Port, _child: &Layer) -> io::Result<()> {
        self.close(port).await
    }
}

/// Dispatches to a format: the one place for operations without an open image.
macro_rules! ask_format {
    ($format:expr, $type:ident => $ask:expr) => {
        match $format {
            // A volume and an export are no images, and their names were refused before.
            Format::Raw | Format::Store | Format::Nbd | Format::Rbd | Format::Pool => {
                type $type = Raw;
                $ask
            }
            Format::Vhd => {
                type $type = Vhd;
                $ask
            }
            Format::Qcow2 => {
                type $type = Qcow2;
                $ask
            }
        }
    };
}

/// Dispatches to the format of an open image, which is consumed.
macro_rules! consume {
    ($layer:expr, $image:ident => $do:expr) => {
        match $layer {
            Layer::Raw($image) => $do,
            Layer::Vhd($image) => $do,
            Layer::Qcow2(image) => {
                let $image = *image;
                $do
            }
        }
    };
}

/// Refuses invalid options of a new image of a format, before anything is made or changed.
pub(super) fn check_new(
    name: &ImageName,
    new: &NewImage,
    parent: Option<&Parent>,
    bytes: u64,
) -> Result<(), DiskError> {
    name.must_be_image()?;
    if let Some(parent) = parent {
        parent.name.must_be_image()?;
    }
    let new = New { path: &name.path, new, parent, bytes };
    ask_format!(name.format, Is => <Is as Offline>::check_new(new))
}

/// Whether an image on a device shows the device's old data until they are overwritten.
pub(super) fn shows_medium(format: Format, new: &NewImage) -> bool {
    ask_format!(format, Is => <Is as Offline>::shows_medium(new))
}

/// Writes an image of `bytes` without data into a new file or a device, durably.
pub(super) async fn empty(
    port: &Port,
    raw: &Raw,
    format: Format,
    new: &NewImage,
    (parent, blank): (Option<&Parent>, Blank),
    bytes: u64,
) -> Result<(), DiskError> {
    check_room(raw, format, new, bytes)?;
    if !raw.is_file() && blank == Blank::Zeros && shows_medium(format, new) {
        let what = || format!("cannot make {}", raw.path().display());
        zero_device(port, raw, bytes).await.map_err(|e| broken(what(), e))?;
    }
    let new = New { path: raw.path(), new, parent, bytes };
    ask_format!(format, Is => <Is as Offline>::empty(port, raw, new).await)
}

/// Refuses a new image that does not fit on its device, or a fixed one that does not fit on its file system.
fn check_room(raw: &Raw, format: Format, new: &NewImage, bytes: u64) -> Result<(), DiskError> {
    let what = format!("cannot make {}", raw.path().display());
    let footer = if format == Format::Vhd { SECTOR_BYTES } else { 0 };
    if !shows_medium(format, new) {
        return Ok(());
    }
    let needed = bytes.saturating_add(footer);
    if raw.is_file() {
        let had = examined(raw, raw.disk_bytes())?;
        let room = examined(raw, Room::at(raw.path()))?;
        let needed = if new.fixed { needed.saturating_sub(had) } else { 0 };
        return room.check(what, needed, raw.path());
    }
    let device = examined(raw, raw.bytes_now())?;
    if device >= needed {
        return Ok(());
    }
    let why = format!("a {format} of this disk takes {needed} bytes, and the device has {device}");
    Err(unsuitable(what, why, "take a larger device; a disk has its own size in any copy"))
}

/// Overwrites a device with zeros.
async fn zero_device(port: &Port, raw: &Raw, bytes: u64) -> io::Result<()> {
    let zeros = port.scratch.take(MAX_PIECE_BYTES).await;
    port.memory().fill(zeros.span(), 0);
    let block = u64::from(raw.block_bytes());
    let (whole, rest) = (bytes / block * block, (bytes % block) as usize);
    raw.write_zeroes(&port.io, &port.files, 0, whole, zeros.span()).await?;
    if rest > 0 {
        // The device is written in blocks: the last one keeps what is behind the disk's end.
        let last = zeros.span().slice(0, block as usize);
        port.io.read_exact(port.files[0], whole, last).await?;
        port.memory().fill(last.slice(0, rest), 0);
        port.io.write_all(port.files[0], whole, last).await?;
    }
    port.io.sync(port.files[0]).await
}

/// The operations of other programs that do not work with a new image.
pub(super) fn warnings(
    name: &ImageName,
    new: &NewImage,
    parent: Option<&Parent>,
    bytes: u64,
) -> Vec<String> {
    let new = New { path: &name.path, new, parent, bytes };
    ask_format!(name.format, Is => <Is as Offline>::warnings(new))
}

/// Whether an image of this format can have a parent of that one.
pub(super) fn stands_on(child: Format, parent: Format) -> bool {
    ask_format!(child, Is => <Is as Offline>::stands_on(parent))
}

/// Refuses units of allocation where a format has none.
fn without_units(new: New<'_>, why: &str) -> Result<(), DiskError> {
    if new.new.unit_bytes.is_none() {
        return Ok(());
    }
    let what = format!("cannot make {}", new.path.display());
    let help = "leave --block out, or make a .vhd (not --fixed) or a .qcow2";
    Err(DiskError::new(ErrorKind::Usage, what, why, help))
}

/// The disk's own layer, without those below it.
pub(super) fn leaf(disk: &Disk) -> Option<&Layer> {
    match disk {
        Disk::Image(image) => image.layers().first(),
        Disk::Mirror(mirror) => leaf(mirror.source()),
        Disk::Raw(_) | Disk::Store(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => {
            None
        }
    }
}

/// The properties of a layer.
pub(super) fn layer_info(layer: &Layer) -> Result<LayerInfo, DiskError> {
    each_format!(layer, image => Offline::info(image))
}

/// The properties of a disk without layers.
pub(super) fn raw_info(raw: &Raw) -> Result<LayerInfo, DiskError> {
    Offline::info(raw)
}

/// The properties of a volume. Those of its file are those of the whole store.
pub(super) fn volume_info(volume: &Volume, virtual_bytes: u64) -> Result<LayerInfo, DiskError> {
    let path = volume.path().display().to_string();
    let unit_bytes = Some(BLOCK_BYTES as u64);
    Ok(LayerInfo {
        path,
        virtual_bytes,
        unit_bytes,
        read_only: volume.is_snapshot(),
        ..of_medium(volume.medium(), Format::Store)?
    })
}

/// The properties of an export. How its server stores the data is not known.
pub(super) fn remote_info(remote: &RemoteDisk, virtual_bytes: u64) -> LayerInfo {
    LayerInfo {
        path: remote.facts().name.clone(),
        format: remote.format().name(),
        kind: None,
        virtual_bytes,
        allocated_bytes: None,
        file_bytes: virtual_bytes,
        disk_bytes: 0,
        unit_bytes: None,
        uuid: None,
        creator: None,
        qcow2: None,
        snapshots: Vec::new(),
        bitmaps: Vec::new(),
        journal: false,
        read_only: remote.facts().is_write_protected,
    }
}

/// The properties of a volume whose store another process has open.
pub(super) fn elsewhere_info(
    volume: &Elsewhere,
    virtual_bytes: u64,
) -> Result<LayerInfo, DiskError> {
    let file = fs::metadata(volume.store())
        .map_err(|e| broken(format!("cannot look at {}", volume.path().display()), e))?;
    Ok(LayerInfo {
        path: volume.path().display().to_string(),
        format: Format::Store.name(),
        kind: None,
        virtual_bytes,
        allocated_bytes: None,
        file_bytes: file.len(),
        disk_bytes: file.blocks() * SECTOR_BYTES,
        unit_bytes: Some(BLOCK_BYTES as u64),
        uuid: None,
        creator: None,
        qcow2: None,
        snapshots: Vec::new(),
        bitmaps: Vec::new(),
        journal: false,
        read_only: volume.is_snapshot(),
    })
}

/// Bytes of a layer's unit of allocation.
pub(super) fn unit_bytes(layer: &Layer) -> Option<u32> {
    each_format!(layer, image => Offline::unit_bytes(image))
}

/// The properties of a new image with a layer's way to allocate.
pub(super) fn like(layer: &Layer) -> NewImage {
    let extended_l2 = each_format!(layer, image => Offline::has_extended_l2(image));
    NewImage { unit_bytes: unit_bytes(layer), extended_l2, ..NewImage::default() }
}

/// The number of internal snapshots of a layer.
pub(super) fn inner_snapshots(layer: &Layer) -> io::Result<usize> {
    each_format!(layer, image => Offline::inner_snapshots(image))
}

/// The number of dirty bitmaps inside of a layer that are up to date.
pub(super) fn dirty_bitmaps(layer: &Layer) -> u32 {
    each_format!(layer, image => Offline::dirty_bitmaps(image))
}

/// A path for people. Parents are found by ./NAME, once for each level.
pub(super) fn shown(path: &Path) -> String {
    let parts = path.components().filter(|part| *part != Component::CurDir);
    parts.collect::<PathBuf>().display().to_string()
}

/// The properties of the file.
fn of_medium(raw: &Raw, format: Format) -> Result<LayerInfo, DiskError> {
    let path: &Path = raw.path();
    Ok(LayerInfo {
        path: shown(path),
        format: format.name(),
        kind: None,
        virtual_bytes: 0,
        allocated_bytes: None,
        file_bytes: examined(raw, raw.bytes_now())?,
        disk_bytes: examined(raw, raw.disk_bytes())?,
        unit_bytes: None,
        uuid: None,
        creator: None,
        qcow2: None,
        snapshots: Vec::new(),
        bitmaps: Vec::new(),
        journal: false,
        read_only: examined(raw, is_write_protected(path))?,
    })
}

fn examined<T>(raw: &Raw, found: io::Result<T>) -> Result<T, DiskError> {
    found.map_err(|e| broken(format!("cannot examine {}", raw.path().display()), e))
}

/// Notes on how other programs treat the resized disk.
pub(super) fn resize_notes(disk: &Disk, bytes: u64) -> Vec<String> {
    let seen = |layer: &Layer| each_format!(layer, image => Offline::qemu_bytes(image, bytes));
    let qemu_bytes = leaf(disk).map_or(bytes, seen);
    let note = || {
        format!(
            "QEMU sees {qemu_bytes} bytes only: it takes the size of an image that it has made \
             from the geometry; ferrite image convert makes a copy that it sees as a whole"
        )
    };
    if qemu_bytes < bytes { vec![note()] } else { Vec::new() }
}

/// Resizes a disk, and closes it.
pub(super) async fn resize(port: &Port, disk: Disk, bytes: u64) -> Result<(), DiskError> {
    let (layer, below_bytes) = match disk {
        // A volume and a remote keep their size; their names were refused before.
        // A mirror is of a disk that is served.
        Disk::Null(_) | Disk::Store(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Mirror(_) => {
            return Ok(());
        }
        Disk::Raw(raw) => (Some(Layer::Raw(raw)), 0),
        Disk::Image(image) => {
            let below_bytes = image.layers().get(1).map_or(0, Layer::bytes);
            (image.into_leaf(), below_bytes)
        }
    };
    let Some(layer) = layer else { return Ok(()) };
    let medium = layer.medium();
    if bytes > layer.bytes()
        && medium.is_file()
        && each_format!(&layer, image => Offline::is_fixed(image))
    {
        let what = format!("cannot resize {}", medium.path().display());
        let room = examined(medium, Room::at(medium.path()))?;
        room.check(what, bytes - layer.bytes(), medium.path())?;
    }
    if bytes > layer.bytes() && below_bytes > layer.bytes() {
        let what = format!("cannot resize {}", layer.medium().path().display());
        let why = "its parent is larger: what is behind the disk's end would be seen";
        return Err(unsuitable(what, why, "ferrite image convert makes a copy, which can grow"));
    }
    consume!(layer, image => Offline::resize(image, port, bytes, below_bytes).await)
}

/// Completes a parent that has all data of its child, with the child's identity if the format has one.
pub(super) async fn take_identity(port: &Port, parent: Disk, child: &Disk) -> io::Result<()> {
    let Disk::Image(parent) = parent else { return Ok(()) };
    match (parent.into_leaf(), leaf(child)) {
        (Some(parent), Some(child)) => {
            consume!(parent, image => Offline::take_identity(image, port, child).await)
        }
        (Some(layer), None) => layer.close(port).await,
        (None, _) => Ok(()),
    }
}

/// Gives an image that stands on another one this parent, in its place, and closes it.
pub(super) async fn relink(port: &Port, child: Disk, parent: &Parent) -> Result<(), DiskError> {
    let Disk::Image(child) = child else { return Ok(()) };
    let Some(layer) = child.into_leaf() else { return Ok(()) };
    consume!(layer, image => Offline::relink(image, port, parent).await)
}

/// The error of an image that did not get its new parent.
fn not_relinked(child: &Path, e: io::Error) -> DiskError {
    let what = format!("cannot give {} another parent", child.display());
    match e.kind() {
        io::ErrorKind::InvalidInput => {
            let help =
                "ferrite image rebase makes the image anew on its parent, which takes longer";
            unsuitable(what, e.to_string(), help)
        }
        _ => broken(what, e),
    }
}

/// The possible paths of an open image's parent.
pub(super) fn parents_of(image: &Image) -> Vec<PathBuf> {
    let parents = image.layers().first().map(Layer::parents);
    let Some(Ok(Some(parents))) = parents else { return Vec::new() };
    parents.candidates.into_iter().map(|name| name.path).collect()
}

/// Checks one image.
pub(super) fn check(raw: &Raw, format: Format, rules: Rules<'_>) -> Result<Checked, DiskError> {
    let Looked { findings, counts, joined, unused_bytes } =
        ask_format!(format, Is => <Is as Offline>::check(raw, rules))?;
    let path = raw.path().display().to_string();
    let more_findings = counts.total().saturating_sub(findings.len() as u64 + joined);
    let format = format.name();
    // The caller knows where journals are.
    let journal = false;
    Ok(Checked { path, format, counts, findings, more_findings, unused_bytes, journal })
}

fn finding<P: ProblemKind>(kind: &str, found: &ferrite_disk_base::Finding<P>) -> Finding {
    let class = found.problem.class();
    Finding {
        offset_bytes: Some(found.offset),
        kind: kind.into(),
        why: found.why.clone(),
        class,
        harmless: class.is_harmless(),
        mendable: found.problem.is_mendable(),
    }
}

/// Whether [`repair`] would change one image.
pub(super) fn is_repairable(raw: &Raw, format: Format) -> Result<bool, DiskError> {
    ask_format!(format, Is => <Is as Offline>::is_repairable(raw))
}

/// Repairs one image.
pub(super) async fn repair(port: &Port, raw: &Raw, format: Format) -> Result<(), DiskError> {
    ask_format!(format, Is => <Is as Offline>::repair(port, raw).await)
}
